"""Exits of programs whose functions still run on threads of the engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch.distributed as dist
from harness import BACKEND, WATCHDOG_SECONDS

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="of this engine's threads")

# `Last` delays the exit once no other thread can take Python's lock: the threads have time to try.
BUSY = """
import sys, threading, time
from datetime import timedelta
import ncclx_rs, torch
import torch.distributed as dist

how, by, code = sys.argv[1], sys.argv[2], int(sys.argv[3])
inside = threading.Event()


def outlasts_all():
    inside.set()
    while how == "naps":
        time.sleep(0.001)
    while how == "runs":
        pass
    threading.Event().wait()


class Last:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)


last = Last()
"""

HANDLER = """
import logging


class Stuck(logging.Handler):
    def emit(self, record):
        outlasts_all()


logging.getLogger("ncclx_rs").addHandler(Stuck())
"""

MESSAGE = """
def message(backend):
    backend._message(False, torch.ones(3), 0, 1, timedelta(milliseconds=50))


if by == "comm":
    place = {"store": dist.HashStore(), "rank": 0, "size": 1}
    comm = ncclx_rs.new_comm("ncclx", "cpu", abort_process_on_timeout_or_error=False, **place)
    comm.register_abort_hook(outlasts_all)
    message(comm.get_backend_impl().c10d)
else:
    dist.init_process_group("ncclx_rs", store=dist.HashStore(), rank=0, world_size=1)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    if by != "handler":
        {"group": dist.group.WORLD, "backend": backend}[by].register_abort_hook(1, outlasts_all)
        message(backend)
assert inside.wait(60)
if code:
    sys.exit(code)
"""


def check_ends(script: str, *cases: tuple[str, str, int], **variables: str) -> None:
    """Runs a script at once with the arguments of each case, the last of which is the expected exit code."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    running = [
        subprocess.Popen(
            command + [str(argument) for argument in case],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | variables,
        )
        for case in cases
    ]
    try:
        for case, process in zip(cases, running, strict=True):
            output, _ = process.communicate(timeout=WATCHDOG_SECONDS)
            assert process.returncode == case[-1], f"{case} ended with {process.returncode}:\n{output}"
    finally:
        for process in running:
            process.kill()


def test_a_handler_that_does_not_return_does_not_keep_a_program() -> None:
    script = BUSY + HANDLER + MESSAGE
    cases = (("naps", "handler", 3), ("runs", "handler", 0), ("waits", "handler", 3))
    check_ends(script, *cases, NCCLX_RS_LOG="info")


def test_an_abort_hook_that_does_not_return_does_not_keep_a_program() -> None:
    cases = [("naps", "comm", 3), ("runs", "comm", 0), ("waits", "comm", 0)]
    if hasattr(dist.ProcessGroup, "register_abort_hook"):
        cases += [("naps", "backend", 0), ("naps", "group", 3)]
    check_ends(BUSY + MESSAGE, *cases)


def test_exceptions_of_a_handler_and_of_an_abort_hook_are_told() -> None:
    script = BUSY + HANDLER.replace("outlasts_all()", "raise ValueError('of the handler')") + MESSAGE
    script = script.replace("register_abort_hook(outlasts_all)", "register_abort_hook(raises)")
    script = script.replace("last = Last()", "def raises():\n    inside.set()\n    raise ValueError('of the hook')\n")
    command = [sys.executable, "-c", script, "waits", "comm", "0"]
    environment = os.environ | {"NCCLX_RS_LOG": "info"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG_SECONDS, env=environment)
    assert done.returncode == 0
    for text in ("ValueError: of the handler", "ValueError: of the hook"):
        assert text in done.stderr, done.stderr


# The end of a process by a failure, which is the default.
ABORTED = """
import os, sys, threading
from datetime import timedelta
import ncclx_rs, torch
import torch.distributed as dist


def raises():
    raise ValueError("of the hook")


comm = ncclx_rs.new_comm("ncclx", "cpu", store=dist.HashStore(), rank=0, size=1)
comm.register_abort_hook(raises)
comm.register_abort_hook(lambda: print("the next hook runs", file=sys.stderr, flush=True))
if sys.argv[1] == "closed":
    sys.stderr = open(os.devnull, "w")
    sys.stderr.close()
comm.recv(torch.ones(1), 0, True, timeout=timedelta(milliseconds=50))
threading.Event().wait(60)
"""


def aborted(stderr: str) -> str:
    """What the program writes before it is aborted."""
    command = [sys.executable, "-c", ABORTED, stderr]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG_SECONDS)
    assert done.returncode == -signal.SIGABRT, done.stderr
    return done.stderr


def test_a_hook_that_raises_is_told_before_an_abort_and_the_next_one_runs() -> None:
    said = aborted("open")
    for text in ("ValueError: of the hook", "the next hook runs", "Aborting process due to timeout or error"):
        assert text in said, said


def test_a_closed_standard_error_keeps_no_process_from_being_aborted() -> None:
    aborted("closed")
