"""The engine's records in Python's logging, its warnings, and its silence without a problem."""

from __future__ import annotations

import logging
import os
import queue
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, WATCHDOG_SECONDS, World, fresh_store, join, joined, leaving_together, meet

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="of this engine's records")

WATCHDOG = timedelta(seconds=WATCHDOG_SECONDS)
TWO = pytest.mark.worlds(sizes=(2,), modes=("shm",))
THREE = pytest.mark.worlds(sizes=(3,), modes=("tcp",))


class LogCapture(logging.Handler):
    """Keeps the records that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.records: queue.Queue[logging.LogRecord] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.put(record)

    def next(self) -> logging.LogRecord:
        return self.records.get(timeout=WATCHDOG_SECONDS)

    def rest(self) -> list[str]:
        assert native().flush_log(WATCHDOG_SECONDS)
        return [self.records.get_nowait().getMessage() for _ in range(self.records.qsize())]


def native() -> Any:
    from ncclx_rs._load import native

    return native()


def start_capture() -> LogCapture:
    """A new capture of the engine's records."""
    capture = LogCapture()
    logging.getLogger("ncclx_rs").addHandler(capture)
    return capture


def run_at_info(size: int, function: Callable[[int, int], None]) -> None:
    """Runs a check in workers that capture all records of that level."""
    world = World(size, "shm", variables={"NCCLX_RS_LOG": "info"})
    try:
        world.run(function, join=False)
    finally:
        world.close()


# ---- losses ----


def each_lost_rank_is_told_of_once(rank: int, size: int) -> None:
    capture = start_capture()
    join(timeout=300)
    dist.barrier()
    meet()
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with leaving_together(range(size - 1)):
        record = capture.next()
        with pytest.raises(dist.DistBackendError, match=f"rank {size - 1} is lost"):
            dist.barrier()
    assert (record.levelname, record.name) == ("WARNING", "ncclx_rs.engine")
    assert re.match(rf"communicator `.+` rank {rank}: rank {size - 1} is lost: .+", record.getMessage())
    dist.destroy_process_group()
    assert capture.rest() == []


@THREE
def test_each_lost_rank_is_told_of_once(fresh_world: World) -> None:
    fresh_world.run(each_lost_rank_is_told_of_once, join=False, dies=[2])


def ranks_that_leave_in_any_order_are_no_loss(rank: int, size: int) -> None:
    capture = start_capture()
    for last in range(size):
        join()
        tensors = [torch.full((3,), float(rank)) for _ in range(size)]
        dist.all_to_all(tensors, [tensor.clone() for tensor in tensors])
        if rank == last:
            time.sleep(0.1)
        dist.destroy_process_group()
    assert capture.rest() == []


@pytest.mark.worlds(sizes=(3,))
def test_ranks_that_leave_in_any_order_are_no_loss(fresh_world: World) -> None:
    fresh_world.run(ranks_that_leave_in_any_order_are_no_loss, join=False)


# ---- threads ----


def a_handler_that_blocks_holds_nobody_up(rank: int, size: int) -> None:
    inside, released = threading.Event(), threading.Event()

    class Stuck(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            inside.set()
            released.wait()

    logging.getLogger("ncclx_rs").addHandler(Stuck())
    with joined():
        # Each rank logs a line about the new group.
        assert inside.wait(WATCHDOG_SECONDS)
        for _ in range(100):
            tensor = torch.ones(100_000)
            dist.all_reduce(tensor)
            assert tensor[-1].item() == 2.0
        part = dist.new_group()
        dist.barrier(part)
        assert not native().flush_log(0.0)
    released.set()
    assert native().flush_log(WATCHDOG_SECONDS)


def test_a_handler_that_blocks_holds_nobody_up() -> None:
    run_at_info(2, a_handler_that_blocks_holds_nobody_up)


def a_full_queue_drops_and_counts(rank: int, size: int) -> None:
    inside, released, heard = threading.Event(), threading.Event(), LogCapture()

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            inside.set()
            released.wait()
            heard.emit(record)

    with joined():
        logging.getLogger("ncclx_rs").addHandler(Slow())
        for number in range(3000):
            # Each logs one line at level INFO.
            _alone(f"alone{number}").finalize()
        assert inside.wait(WATCHDOG_SECONDS)
        released.set()
    told = heard.rest()
    lost = [int(found[1]) for text in told if (found := re.match(r"(\d+) records were dropped: ", text))]
    lines = [text for text in told if text.startswith("communicator `alone")]
    assert len(lost) == 1 and len(lines) + lost[0] == 3000, (lost, len(lines))


def _alone(name: str) -> ncclx_rs.TorchComm:
    return ncclx_rs.new_comm("ncclx", "cpu", name=name, store=dist.HashStore(), rank=0, size=1)


def test_a_full_queue_drops_and_counts() -> None:
    run_at_info(1, a_full_queue_drops_and_counts)


def a_child_tells_of_its_own(rank: int, size: int) -> None:
    native()
    _alone("parent").finalize()
    assert native().flush_log(WATCHDOG_SECONDS)
    child = os.fork()
    if child == 0:
        capture = start_capture()
        _alone("child").finalize()
        told = native().flush_log(WATCHDOG_SECONDS) and "communicator `child`" in "".join(capture.rest())
        os._exit(0 if told else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_child_tells_of_its_own() -> None:
    run_at_info(1, a_child_tells_of_its_own)


# ---- hints ----


def unknown_hints_are_warned_about(rank: int, size: int) -> None:
    from ncclx_rs import Options

    def warned_of(make: Callable[[], object]) -> list[tuple[type[Warning], str, str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make()
        return [(each.category, str(each.message), each.filename) for each in caught if "hint" in str(each.message)]

    expected = [(UserWarning, "ncclx_rs: the hint `eager_byte` is not known and has no effect", __file__)]
    hints, capture = {"eager_byte": "8", "eager_bytes": "8"}, start_capture()
    store = fresh_store()
    assert expected == warned_of(
        lambda: dist.init_process_group(
            "ncclx_rs", store=store, rank=rank, world_size=size, pg_options=Options(WATCHDOG, hints)
        )
    )
    place: dict[str, Any] = {"store": fresh_store(), "rank": rank, "size": size}
    assert expected == warned_of(lambda: ncclx_rs.new_comm("ncclx", "cpu", "named", hints=hints, **place).finalize())
    whole = ncclx_rs.new_comm("ncclx", "cpu", "whole", **place)
    assert expected == warned_of(lambda: whole.split(list(range(size)), "part", hints).finalize())
    whole.finalize()
    dist.destroy_process_group()
    assert capture.rest() == []


@TWO
def test_unknown_hints_are_warned_about_where_the_program_calls(fresh_world: World) -> None:
    fresh_world.run(unknown_hints_are_warned_about, join=False)


# ---- programs ----

PROGRAM = """
    import torch, torch.distributed as dist
    dist.init_process_group("ncclx_rs", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(3))
"""


def program(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program without the environment's settings for logs."""
    environment = {name: value for name, value in os.environ.items() if name not in ("NCCLX_RS_LOG", "NCCL_DEBUG")}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environment |= variables
    return subprocess.run(
        command, capture_output=True, text=True, timeout=WATCHDOG_SECONDS, check=False, env=environment
    )


def test_nothing_is_said_where_all_is_well() -> None:
    done = program(PROGRAM + "    dist.destroy_process_group()\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


LINE = (
    r"communicator `0` rank 0 of 1: 1 on this host, 1 in all; transports: none; interfaces: .+; "
    r"algorithms: the engine's table; cores: \d+(; threads for long copies: \d+)?; "
    r"memory: 262144 bytes a ring, 65536 a message sent unasked\n"
)


@pytest.mark.parametrize("variable", [("NCCLX_RS_LOG", "info"), ("NCCL_DEBUG", "INFO")], ids=lambda pair: pair[0])
def test_a_line_says_what_a_communicator_runs_on(variable: tuple[str, str]) -> None:
    done = program(PROGRAM + "    dist.destroy_process_group()\n", **dict([variable]))
    assert done.returncode == 0
    assert re.fullmatch(r"\S+ \S+ INFO ncclx_rs\.comm: " + LINE, done.stderr), done.stderr


def test_logging_that_the_program_sets_up_is_the_only_one() -> None:
    code = "    import logging; logging.basicConfig(format='mine: %(message)s')\n" + PROGRAM
    done = program(code + "    dist.destroy_process_group()\n", NCCLX_RS_LOG="info")
    assert done.returncode == 0
    assert re.fullmatch("mine: " + LINE, done.stderr), done.stderr


def test_our_variable_wins_over_that_of_nccl() -> None:
    done = program(PROGRAM + "    dist.destroy_process_group()\n", NCCLX_RS_LOG="warn", NCCL_DEBUG="INFO")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_level_that_there_is_not_is_an_error() -> None:
    done = program(PROGRAM, NCCLX_RS_LOG="loud")
    assert done.returncode == 1
    assert "ValueError: NCCLX_RS_LOG is `loud`: expected off, error, warn, info, debug or trace" in done.stderr


def test_the_end_of_a_program_waits_for_its_handlers() -> None:
    slow = """
    import logging, time
    class Slow(logging.Handler):
        def emit(self, record):
            time.sleep(0.3)
            print("handled", record.getMessage()[:16], flush=True)
    logging.getLogger("ncclx_rs").addHandler(Slow())
    """
    done = program(textwrap.dedent(slow) + textwrap.dedent(PROGRAM), NCCLX_RS_LOG="info")
    assert (done.returncode, done.stdout) == (0, "handled communicator `0`\n"), done.stderr


def test_a_handler_that_never_returns_does_not_keep_a_program() -> None:
    stuck = """
    import logging, threading
    class Stuck(logging.Handler):
        def emit(self, record):
            threading.Event().wait()
    logging.getLogger("ncclx_rs").addHandler(Stuck())
    """
    more = "dist.new_group([0])\n"
    done = program(textwrap.dedent(stuck) + textwrap.dedent(PROGRAM) + more, NCCLX_RS_LOG="info")
    assert done.returncode == 0
    # The handler holds the first record; those behind it are not lost.
    assert re.search(r"^INFO ncclx_rs::comm::communicator: communicator `1` rank 0 of 1", done.stderr, re.M), (
        done.stderr
    )
