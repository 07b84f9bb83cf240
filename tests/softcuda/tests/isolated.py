"""Runs a function of a test's file in a process of its own, whose environment chooses what the software CUDA does."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SECONDS = 120


@dataclass(frozen=True)
class Outcome:
    status: int
    output: str
    errors: str


def run(function: Callable[..., Any], *arguments: str, **environment: str) -> Outcome:
    """The outcome of a function, whatever it is."""
    command = [sys.executable, str(Path(__file__)), function.__module__, function.__name__, *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, cwd=FOLDER, env={**os.environ, **environment}
    )
    return Outcome(result.returncode, result.stdout, result.stderr)


def alone(function: Callable[..., Any], *arguments: str, **environment: str) -> Outcome:
    """The outcome of a function that must end well."""
    outcome = run(function, *arguments, **environment)
    assert outcome.status == 0, f"{outcome.output}\n{outcome.errors}"
    return outcome


def main() -> None:
    module, name, *arguments = sys.argv[1:]
    getattr(importlib.import_module(module), name)(*arguments)


if __name__ == "__main__":
    main()
