"""Runs the tests of CUDA tensors within a time, and says what became of each."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from report import FAILED, NOT_RUN, PASSED, Part

ROOT = Path(__file__).parents[2]
# What a suite gets to end by itself when its time is over.
GRACE = 15.0
_RUST_LINE = re.compile(r"^test (\S+)(?: - should panic)? \.\.\. (ok|FAILED|ignored)", re.MULTILINE)


@dataclass
class Ended:
    """How a command ended: its exit code, or None if its time was over and it was killed, and its output."""

    code: int | None
    output: str


def run(command: Sequence[str], seconds: float, **environment: str) -> Ended:
    """Runs a command; kills it and all that it has started when its time is over."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(max(seconds, 0.1))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return Ended(code, output.read())


@dataclass
class Outcomes:
    """What became of the tests of a suite."""

    by_test: dict[str, tuple[str, str]] = field(default_factory=dict)

    def add(self, test: str, outcome: str, why: str = "") -> None:
        """Notes an outcome with its reason. A failure stays one, whatever comes after."""
        if self.by_test.get(test, ("", ""))[0] != "failed":
            self.by_test[test] = (outcome, why)

    def facts(self) -> dict[str, Any]:
        """The facts of a suite for the report."""
        counts = collections.Counter(outcome for outcome, _ in self.by_test.values())
        failures = {name: why for name, (outcome, why) in self.by_test.items() if outcome == "failed"}
        reasons = collections.Counter(why for outcome, why in self.by_test.values() if outcome == "skipped")
        left = [name for name, (outcome, _) in self.by_test.items() if outcome == "left"]
        # Those that were killed while they ran.
        running = [name for name, (_, why) in self.by_test.items() if why == "running"]
        return {
            **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped", "left")},
            "failures": failures,
            "reasons": dict(reasons),
            "not_run": left,
            "running": running,
        }


def judge(part: Part, outcomes: Outcomes, ended: Ended, good_codes: Sequence[int]) -> None:
    """Writes the outcomes of a suite into its part."""
    part.facts = outcomes.facts()
    ran = part.facts["passed"] + part.facts["failed"]
    if part.facts["failed"]:
        part.status, part.why = FAILED, f"{part.facts['failed']} tests failed"
    elif ended.code is None and not ran:
        part.status, part.why = FAILED, "no test ended within the time"
    elif ended.code is not None and ended.code not in good_codes:
        part.status, part.why = FAILED, f"exit code {ended.code}: {ended.output[-2000:]}"
    elif not outcomes.by_test:
        part.status, part.why = FAILED, f"found no test: {ended.output[-2000:]}"
    elif not ran:
        part.status, part.why = NOT_RUN, "every test was skipped" if part.facts["skipped"] else "the time was over"
    else:
        part.status = PASSED
        if part.facts["left"]:
            part.why = f"{part.facts['left']} tests were left when the time was over"
            part.why += "".join(f"; {name} was running" for name in part.facts["running"])


def python_suite(part: Part, seconds: float, arguments: Sequence[str]) -> None:
    """Runs tests by pytest."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "outcomes"
        record.touch()
        until = time.time() + seconds - GRACE
        paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "pytest", "-q", "-p", "recorder", "-p", "no:cacheprovider", *arguments]
        settings: Mapping[str, str] = {
            "PYTHONPATH": paths,
            "NCCLX_RS_TEST_GPU": "1",
            "NCCLX_RS_GPU_OUTCOMES": str(record),
            "NCCLX_RS_GPU_UNTIL": str(until),
        }
        ended = run(command, seconds, **settings)
        outcomes = Outcomes()
        for line in record.read_text().splitlines():
            outcomes.add(**json.loads(line))
    # 0: all passed; 1: some failed; 2: stopped, by us or because a file cannot be read.
    judge(part, outcomes, ended, (0, 1, 2) if "the time is over" in ended.output else (0, 1))


def rust_suite(part: Part, seconds: float, program: str) -> None:
    """Runs the engine's tests from their program."""
    outcomes = Outcomes()
    listed = run([program, "--list"], 20)
    for line in listed.output.splitlines():
        if line.endswith(": test"):
            outcomes.add(line.removesuffix(": test"), "left")
    if listed.code != 0 or not outcomes.by_test:
        part.status, part.why = FAILED, f"{program} --list: {listed.output[-2000:] or 'no tests'}"
        return
    with tempfile.TemporaryDirectory() as folder:
        not_run = Path(folder) / "not_run"
        not_run.touch()
        ended = run([program, "--test-threads", "2"], seconds, NCCLX_RS_TEST_NOT_RUN=str(not_run))
        reasons = dict(line.split(": ", 1) for line in not_run.read_text().splitlines())
    for test, outcome in _RUST_LINE.findall(ended.output):
        if outcome == "FAILED":
            outcomes.add(test, "failed", failure_of(test, ended.output))
        else:
            skipped = outcome == "ignored" or test in reasons
            outcomes.add(test, "skipped" if skipped else "passed", reasons.get(test, "ignored") if skipped else "")
    judge(part, outcomes, ended, (0, 101))


def failure_of(test: str, output: str) -> str:
    """What a test of Rust printed before it failed."""
    found = re.search(
        rf"^---- {re.escape(test)} stdout ----\n(.*?)(?=^---- |^failures:$)", output, re.MULTILINE | re.DOTALL
    )
    return found[1].strip() if found else "failed"
