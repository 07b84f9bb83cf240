"""A plugin of pytest for run_gpu.py: writes the outcome of each test at once, and begins none after a time.

`NCCLX_RS_GPU_OUTCOMES` names the file, `NCCLX_RS_GPU_UNTIL` the time, in seconds since 1970.
"""

from __future__ import annotations

import json
import os
import time

import pytest

_FILE, _UNTIL = os.environ["NCCLX_RS_GPU_OUTCOMES"], float(os.environ["NCCLX_RS_GPU_UNTIL"])


def _write(test: str, outcome: str, why: str = "") -> None:
    with open(_FILE, "a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "why": why}) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        _write(item.nodeid, "left")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if time.time() < _UNTIL:
        _write(item.nodeid, "left", "running")
        return None
    item.session.shouldstop = "the time is over"
    return True  # the test is left


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _write(report.nodeid, "skipped", reason.removeprefix("Skipped: "))
    elif report.failed:
        _write(report.nodeid, "failed", report.longreprtext)
    elif report.when == "call":
        _write(report.nodeid, "passed")
