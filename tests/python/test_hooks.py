"""The hooks that come with the object API."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import ncclx_rs
import pytest
import torch
from harness import World, fresh_store, leaving_together
from ncclx_rs import ReduceOp, TorchComm
from ncclx_rs.hooks import FlightRecorderHook, NanCheckHook, TimelineHook

pytestmark = pytest.mark.worlds(sizes=(1, 2), modes=("shm",))


@contextmanager
def communicator(rank: int, size: int, **options: Any) -> Iterator[TorchComm]:
    comm = ncclx_rs.new_comm("ncclx", "cpu", "watched", store=fresh_store(), rank=rank, size=size, **options)
    try:
        yield comm
    finally:
        comm.finalize()


def nans_are_found_before_they_are_sent(rank: int, size: int) -> None:
    good, bad = torch.ones(4), torch.tensor([1.0, float("nan")])
    with communicator(rank, size) as comm:
        hook = NanCheckHook()
        hook.register_with_comm(comm)
        assert hook.is_enabled()
        for call in (
            lambda: comm.all_reduce(bad, ReduceOp.SUM, False),
            lambda: comm.send(bad, rank, True),
            lambda: comm.all_gather_single(torch.empty(2 * size), bad, False),
            lambda: comm.all_to_all([good] * size, [bad] * size, False),
        ):
            with pytest.raises(RuntimeError, match=r"NaN detected in input tensor for '\w+' on comm 'watched'"):
                call()
        comm.all_reduce(good, ReduceOp.SUM, False)
        comm.all_reduce(torch.ones(2, dtype=torch.int64), ReduceOp.SUM, False)
        comm.barrier(False)
        comm.all_gather_single(torch.full((4 * size,), float("nan")), good, False)  # an output may hold anything
        hook.unregister()
        comm.all_reduce(bad, ReduceOp.SUM, False)


def the_recorder_remembers_the_last_operations(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        recorder = FlightRecorderHook(max_entries=5, isolated=True)
        recorder.register_with_comm(comm)
        for count in range(1, 9):
            comm.all_reduce(torch.ones(count, 2), ReduceOp.SUM, count % 2 == 0).wait()
        child = comm.split([rank], "child")
        assert child is not None
        child.broadcast(torch.ones(3, dtype=torch.int64), 0, False)
        assert recorder.size() == 5
        dump = json.loads(recorder.dump_json())
        last = dump["entries"][-1]
        assert last["process_group"] == ["child", "ncclx"] and last["input_dtypes"] == ["Long"]
        assert [entry["input_sizes"] for entry in dump["entries"][:3]] == [[[6, 2]], [[7, 2]], [[8, 2]]]
        assert [entry["collective_seq_id"] for entry in dump["entries"][:4]] == [6, 7, 8, 9]
        assert all(entry["state"] == "completed" and entry["duration_ms"] >= 0 for entry in dump["entries"])
        assert dump["pg_config"]["watched"]["ranks"] == f"[{','.join(map(str, range(size)))}]"
        assert json.loads(recorder.dump_json(include_completed=False))["entries"] == []
        recorder.reset()
        assert recorder.size() == 0
        child.finalize()


def a_timeout_leaves_a_dump_that_the_analyser_reads(rank: int, size: int, folder: str) -> None:
    os.environ["TORCHCOMM_FR_DUMP_TEMP_FILE"] = f"{folder}/trace_"
    with communicator(rank, size, abort_process_on_timeout_or_error=False) as comm:
        comm.set_timeout(timedelta(seconds=1))
        recorder = FlightRecorderHook(isolated=True)
        recorder.register_with_comm(comm)
        comm.barrier(False)
        with leaving_together():
            if rank == 0:
                with pytest.raises(RuntimeError, match="timed out"):
                    comm.all_reduce(torch.ones(10), ReduceOp.SUM, False)
            else:
                recorder.dump_file(rank)
    dump = pickle.loads(Path(f"{folder}/trace_{rank}").read_bytes())
    states = [(entry["profiling_name"], entry["state"]) for entry in dump["entries"]]
    assert states[0] == ("ncclx:barrier", "completed")
    assert rank != 0 or states[1] == ("ncclx:all_reduce", "started")


def the_timeline_shows_operations(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        hook = TimelineHook()
        hook.register_with_comm(comm)
        comm.all_reduce(torch.ones(10), ReduceOp.SUM, True).wait()
        comm.barrier(False)
        with tempfile.TemporaryDirectory() as folder:
            hook.save(f"{folder}/trace.json")
            trace = json.loads(Path(f"{folder}/trace.json").read_text())
    shown = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert sorted(event["name"] for event in shown) == ["all_reduce", "barrier"]
    assert all(event["dur"] > 0 and event["pid"] == rank for event in shown)


@pytest.mark.parametrize(
    "check",
    [
        nans_are_found_before_they_are_sent,
        the_recorder_remembers_the_last_operations,
        the_timeline_shows_operations,
    ],
    ids=lambda check: check.__name__,
)
def test_hook(world: World, check) -> None:
    world.run(check, join=False)


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_a_timeout_leaves_a_dump_that_the_analyser_reads(fresh_world: World, tmp_path: Path) -> None:
    fresh_world.run(a_timeout_leaves_a_dump_that_the_analyser_reads, str(tmp_path), join=False)
    analyser = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(tmp_path), "--prefix", "trace_"]
    for flags, expected in ((["-j"], "all_reduce"), ([], "missing ranks: {1}")):
        done = subprocess.run([*analyser, *flags], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert expected in done.stdout + done.stderr
