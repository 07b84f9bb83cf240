"""Replays the inputs that the fuzzer in tests/fuzz has kept."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[1] / "fuzz"
TARGETS = runpy.run_path(str(FUZZ / "targets.py"))["TARGETS"]


@pytest.mark.parametrize("name", TARGETS)
def test_what_the_fuzzer_has_kept_is_read_or_refused(name: str) -> None:
    inputs = sorted((FUZZ / "corpus" / name).iterdir())
    assert inputs
    for file in inputs:
        try:
            TARGETS[name](file.read_bytes())
        except Exception as error:
            raise AssertionError(f"{file} is neither read nor refused") from error
