"""Hooks: their arguments, and the ready-made ones of the object API, except the flight recorder."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ncclx_rs
import pytest
import torch
from harness import World, fresh_store
from ncclx_rs import OpName, ReduceOp, TorchComm
from ncclx_rs.hooks import NanCheckHook, TimelineHook, clog

pytestmark = pytest.mark.worlds(sizes=(1, 2), modes=("shm",))

FINALIZE_OP_ID = 2**64 - 1


@contextmanager
def communicator(
    rank: int, size: int, name: str = "watched", backend: str = "ncclx", **options: Any
) -> Iterator[TorchComm]:
    comm = ncclx_rs.new_comm(backend, "cpu", name, store=fresh_store(), rank=rank, size=size, **options)
    try:
        yield comm
    finally:
        comm.finalize()


def everything(comm: TorchComm) -> dict[OpName, Callable[[bool], Any]]:
    """A call of every operation that all ranks can make at once, and its name."""
    size, one, some = comm.get_size(), torch.ones(2), [torch.ones(2) for _ in range(comm.get_size())]
    all_of_it, sums = torch.ones(2 * size), ReduceOp.SUM
    at_root = some if comm.get_rank() == 0 else []

    def exchange(async_op: bool) -> Any:
        batch = comm.batch_op_create()
        for peer in range(size):
            batch.send(one, peer)
            batch.recv(some[peer], peer)
        return batch.issue(async_op)

    return {
        OpName.broadcast: lambda a: comm.broadcast(one, 0, a),
        OpName.all_reduce: lambda a: comm.all_reduce(one, sums, a),
        OpName.reduce: lambda a: comm.reduce(one, 0, sums, a),
        OpName.all_gather: lambda a: comm.all_gather(some, one, a),
        OpName.all_gather_v: lambda a: comm.all_gather_v(some, one, a),
        OpName.all_gather_single: lambda a: comm.all_gather_single(all_of_it, one, a),
        OpName.reduce_scatter: lambda a: comm.reduce_scatter(one, some, sums, a),
        OpName.reduce_scatter_v: lambda a: comm.reduce_scatter_v(one, some, sums, a),
        OpName.reduce_scatter_single: lambda a: comm.reduce_scatter_single(one, all_of_it, sums, a),
        OpName.all_to_all_single: lambda a: comm.all_to_all_single(all_of_it, all_of_it.clone(), a),
        OpName.all_to_all_v_single: lambda a: comm.all_to_all_v_single(
            all_of_it, all_of_it.clone(), [2] * size, [2] * size, a
        ),
        OpName.all_to_all: lambda a: comm.all_to_all([torch.ones(2) for _ in some], some, a),
        OpName.barrier: lambda a: comm.barrier(a),
        OpName.scatter: lambda a: comm.scatter(one, at_root, 0, a),
        OpName.gather: lambda a: comm.gather(at_root, one, 0, a),
        OpName.gather_single: lambda a: comm.gather_single(all_of_it, one, 0, a),
        OpName.batch_op_issue: exchange,
    }


# ---- arguments of hooks ----


def arguments_have_types(rank: int, size: int) -> None:
    called: list[tuple[OpName, int, Any]] = []
    ended: list[tuple[int, Any]] = []
    with communicator(rank, size) as comm:
        comm.register_pre_hook(lambda name, op_id, args: called.append((name, op_id, args)))
        comm.register_post_hook(lambda op_id, args: ended.append((op_id, args)))
        operations = everything(comm)
        for operation in operations.values():
            operation(True).wait()
        if size > 1:
            other = (rank + 1) % size
            works = [comm.send(torch.ones(1), other, True), comm.recv(torch.ones(1), other, True)]
            for work in works:
                work.wait()
        child = comm.split(list(range(size)), "child")
        assert child is not None
        child.finalize()
    messages = [OpName.send, OpName.recv] if size > 1 else []
    assert [name for name, *_ in called] == [*operations, *messages, OpName.split, OpName.finalize]
    for name, _, args in called:
        expected = "".join(word.capitalize() for word in name.name.split("_")) + "PreHookArgs"
        assert type(args) is getattr(ncclx_rs, expected)
        assert getattr(args, "async_op", True) is True
    by_name = {name: args for name, _, args in called}
    assert by_name[OpName.reduce].op == ReduceOp.SUM and by_name[OpName.reduce].root == 0
    assert by_name[OpName.all_to_all_v_single].input_split_sizes == [2] * size
    assert by_name[OpName.batch_op_issue].num_ops == len(by_name[OpName.batch_op_issue].ops) == 2 * size
    assert by_name[OpName.split].ranks == list(range(size)) and by_name[OpName.split].name == "child"
    assert [op_id for _, op_id, _ in called] == [op_id for op_id, _ in ended]
    assert sorted({op_id for op_id, _ in ended}) == [op_id for op_id, _ in ended] and called[-1][1] == FINALIZE_OP_ID
    assert all(args.work.is_completed() for _, args in ended[: len(operations)])
    assert ended[-2][1].comm is child


def hooks_can_be_removed(rank: int, size: int) -> None:
    calls: list[str] = []
    with communicator(rank, size) as comm:
        handles = [comm.register_pre_hook(lambda *_, k=k: calls.append(f"before{k}")) for k in range(2)]
        handles.append(comm.register_post_hook(lambda *_: calls.append("after")))
        comm.barrier(False)
        handles[0].remove()
        comm.barrier(False)
        for handle in handles:
            handle.remove()
        comm.barrier(False)
    assert calls == ["before0", "before1", "after", "before1", "after"]


def a_hook_that_raises_refuses_the_operation(rank: int, size: int) -> None:
    after: list[int] = []

    def refuse(name: OpName, op_id: int, args: object) -> None:
        raise LookupError(f"no {name.name}")

    tensor = torch.ones(3)
    with communicator(rank, size) as comm:
        comm.register_post_hook(lambda op_id, args: after.append(op_id))
        handle = comm.register_pre_hook(refuse)
        for name, operation in everything(comm).items():
            for async_op in (False, True):
                with pytest.raises(LookupError, match=f"no {name.name}"):
                    operation(async_op)
        assert after == []
        handle.remove()
        comm.all_reduce(tensor, ReduceOp.SUM, False)
        assert len(after) == 1
    assert tensor.tolist() == [size] * 3


def a_hook_hears_of_the_end_once(rank: int, size: int, backend: str) -> None:
    ends: dict[int, list[bool]] = {}
    with communicator(rank, size, backend=backend) as comm:
        comm.register_post_hook(
            lambda op_id, args: args.work._on_end(ends.setdefault(op_id, []).append) if hasattr(args, "work") else None
        )
        comm.all_reduce(torch.ones(4), ReduceOp.SUM, False)
        works = [comm.all_reduce(torch.ones(4), ReduceOp.SUM, True)]
        if size > 1:
            works += [comm.send(torch.ones(1), 1 - rank, True), comm.recv(torch.ones(1), 1 - rank, True)]
        for work in works:
            work.wait()
        works[0].wait()
    assert list(ends.values()) == [[True]] * (len(works) + 1)


# ---- NaNs ----


def nans_are_found_before_they_are_sent(rank: int, size: int) -> None:
    good, bad = torch.ones(4), torch.tensor([1.0, float("nan")])
    with communicator(rank, size) as comm:
        hook = NanCheckHook()
        assert not hook.is_enabled()
        hook.register_with_comm(comm)
        assert hook.is_enabled()
        batch = comm.batch_op_create()
        batch.recv(bad, rank)
        batch.send(bad, rank)
        for call in (
            lambda: comm.all_reduce(bad, ReduceOp.SUM, False),
            lambda: comm.send(bad, rank, True),
            lambda: comm.all_gather_single(torch.empty(2 * size), bad, False),
            lambda: comm.all_to_all([good] * size, [bad] * size, False),
            lambda: batch.issue(True),
        ):
            with pytest.raises(RuntimeError, match=r"NaN detected in input tensor for '\w+' on comm 'watched'"):
                call()
        comm.all_reduce(good, ReduceOp.SUM, False)
        comm.all_reduce(torch.ones(2, dtype=torch.int64), ReduceOp.SUM, False)
        comm.all_reduce(torch.tensor([float("inf")]), ReduceOp.SUM, False)
        comm.barrier(False)
        comm.all_gather_single(torch.full((4 * size,), float("nan")), good, False)  # an output may contain anything
        hook.unregister()
        comm.all_reduce(bad, ReduceOp.SUM, False)


def nans_of_a_broadcast_count_where_it_is_read(rank: int, size: int) -> None:
    bad, root = torch.full((2,), float("nan")), size - 1
    with communicator(rank, size) as comm:
        hook = NanCheckHook()
        hook.register_with_comm(comm)
        tensor = torch.ones(2) if rank == root else bad.clone()
        comm.broadcast(tensor, root, False)
        assert tensor.tolist() == [1.0, 1.0]
        if rank == root:
            with pytest.raises(RuntimeError, match="NaN detected in input tensor for 'broadcast'"):
                comm.broadcast(bad, root, False)
        hook.unregister()
        NanCheckHook(check_inputs=False, check_outputs=True).register_with_comm(comm)
        if rank != root:
            with pytest.raises(RuntimeError, match="NaN detected in output tensor for 'broadcast'"):
                comm.broadcast(bad, root, False)
        comm.broadcast(bad if rank == root else torch.ones(2), root, False)


def nans_in_outputs_are_found_if_asked_for(rank: int, size: int) -> None:
    bad = torch.full((2 * size,), float("nan"))
    with communicator(rank, size) as comm:
        NanCheckHook(check_inputs=False, check_outputs=True).register_with_comm(comm)
        with pytest.raises(
            RuntimeError, match="NaN detected in output tensor for 'all_gather_single' on comm 'watched'"
        ):
            comm.all_gather_single(bad, torch.ones(2), False)
        with pytest.raises(RuntimeError, match="NaN detected in input tensor for 'all_reduce'"):
            comm.all_reduce(bad, ReduceOp.SUM, False)  # it is input and output
        comm.reduce_scatter_single(torch.ones(2), bad, ReduceOp.SUM, False)


# ---- clog ----


def the_log_has_a_line_an_event(rank: int, size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clog"
        log = clog(str(path), ["ALL"])
        with communicator(rank, size) as comm:
            log.register_with_comm(comm)
            with pytest.raises(RuntimeError, match="already registered with comm watched"):
                log.register_with_comm(comm)
            for _ in range(2):
                comm.all_reduce(torch.ones(8), ReduceOp.PRODUCT, False)
            comm.broadcast(torch.ones(3, dtype=torch.bfloat16), 0, True).wait()
            child = comm.split([rank], "child")
            assert child is not None
            child.all_to_all_v_single(torch.ones(2), torch.ones(2), [2], [2], False)
            child.finalize()
        lines = path.read_text().splitlines()
    assert re.fullmatch(r"V\|1\|base_timestamp=\d+\.\d{3}", lines[0])
    assert all(re.search(r"\|\+\d+\.\d{3}$", line) for line in lines if re.match(r"C\d+\|[QSEW]\|", line))
    one_call = [r"C1|Q|work_id=", "C1|S", "C1|E"]
    expected = [
        f"new_comm|comm=watched|rank={rank}|world_size={size}",
        "C1|sig|all_reduce|in_count=8|out_count=8|dtype=f32|red_op=prod|async_op=f|comm=watched",
        *one_call,
        *one_call,
        "C2|sig|broadcast|in_count=3|out_count=3|dtype=bf16|root=0|async_op=t|comm=watched",
        "C2|Q|work_id=3",
        "C2|S",
        "C2|E",
        "C2|W",
        f"split|parent=watched|child=child|ranks={rank}",
        "C3|sig|all_to_all_v_single|in_splits=2|out_splits=2|dtype=f32|async_op=f|comm=child",
        "C3|Q|work_id=4",
        "C3|S",
        "C3|E",
    ]
    called = [re.sub(r"\|\+[\d.]+$", "", line) for line in lines[1:]]
    # Sorted: end and wait are logged by different threads.
    for line, start in zip(sorted(called), sorted(expected), strict=True):
        assert line.startswith(start), lines


def the_log_knows_every_operation(rank: int, size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clog"
        log = clog(path, [], verbose=["buffers"])
        with communicator(rank, size) as comm:
            log.register_with_comm(comm)
            for operation in everything(comm).values():
                operation(False)
        text = path.read_text()
    pairs = ",".join(["2"] * size)
    at_root = pairs if rank == 0 else ""
    for signature in (
        f"all_gather|in_count=2|out_counts={pairs}|dtype=f32|async_op=f|in=0x",
        f"reduce_scatter_v|in_counts={pairs}|out_count=2|dtype=f32|red_op=sum|async_op=f|in=0x",
        f"all_to_all|in_counts={pairs}|out_counts={pairs}|dtype=f32|async_op=f|in=0x",
        f"scatter|in_counts={at_root}|out_count=2|dtype=f32|root=0|async_op=f|in=",
        f"gather_single|in_count=2|out_count={2 * size}|dtype=f32|root=0|async_op=f|in=0x",
        "reduce|in_count=2|out_count=2|dtype=f32|red_op=sum|root=0|async_op=f|buf=0x",
        "barrier|async_op=f|comm=watched",
        f"batch_op_issue|num_ops={2 * size}|async_op=f|comm=watched",
    ):
        assert f"|sig|{signature}" in text, text
    assert "|Q|" in text and "|S|" not in text


def the_log_warns_of_what_did_not_end(rank: int, size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clog"
        log = clog(path, ["LIFECYCLE"])
        with communicator(rank, size) as comm:
            log.register_with_comm(comm)
            handle = comm.register_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                comm.barrier(False)
            handle.remove()
        assert path.read_text().endswith("WARN|comm=watched|leaked work_id=1|corr_id=1|pending_events=S,E\n")
        with pytest.raises(RuntimeError, match="failed to open log file"):
            clog(folder, [])


# ---- the timeline ----


def the_timeline_shows_operations(rank: int, size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/trace.json"
        with communicator(rank, size) as comm:
            hook = TimelineHook(path)
            hook.register_with_comm(comm)
            comm.all_reduce(torch.ones(10), ReduceOp.SUM, True).wait()
            comm.barrier(False)
            child = comm.split([rank], "child")
            assert child is not None
            child.broadcast(torch.ones(5, dtype=torch.int64), 0, False)
            child.finalize()
        trace = json.loads(Path(path).read_text())["traceEvents"]
    shown = {event["name"]: event for event in trace if event["ph"] == "X"}
    assert sorted(shown) == ["all_reduce", "barrier", "broadcast", "split"]
    assert all(event["dur"] > 0 and event["pid"] == rank for event in shown.values())
    assert shown["all_reduce"]["args"]["bytes"] == shown["broadcast"]["args"]["bytes"] == 40
    rows = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert [rows[shown[name]["tid"]] for name in ("barrier", "broadcast")] == ["watched", "child"]


def overlapping_operations_have_rows_of_their_own(rank: int, size: int) -> None:
    hook = TimelineHook(max_events=4)
    with communicator(rank, size) as comm:
        hook.register_with_comm(comm)
        received = torch.empty(1)
        work = comm.recv(received, rank, True)
        comm.barrier(False)
        in_flight = [event for event in hook.events() if event["ph"] == "B"]
        assert [event["name"] for event in in_flight] == ["recv"]
        comm.send(torch.ones(1), rank, False)
        work.wait()
        comm.barrier(False)
    events = [event for event in hook.events() if event["ph"] == "X"]
    rows = {event["tid"]: event["args"]["name"] for event in hook.events() if event["name"] == "thread_name"}
    named = sorted((event["name"], rows[event["tid"]]) for event in events)
    assert ("recv", "watched") in named and ("barrier", "watched, overlapping 1") in named
    assert not [event for event in hook.events() if event["ph"] == "B"]
    with communicator(rank, size) as comm:
        hook.register_with_comm(comm)
        for _ in range(9):
            comm.barrier(False)
    assert len([event for event in hook.events() if event["ph"] == "X"]) == 4
    with pytest.raises(ValueError, match="path"):
        hook.save()


@pytest.mark.parametrize(
    "check",
    [
        arguments_have_types,
        hooks_can_be_removed,
        a_hook_that_raises_refuses_the_operation,
        nans_are_found_before_they_are_sent,
        nans_of_a_broadcast_count_where_it_is_read,
        nans_in_outputs_are_found_if_asked_for,
        the_log_has_a_line_an_event,
        the_log_knows_every_operation,
        the_log_warns_of_what_did_not_end,
        the_timeline_shows_operations,
        overlapping_operations_have_rows_of_their_own,
    ],
    ids=lambda check: check.__name__,
)
def test_hook(world: World, check) -> None:
    world.run(check, join=False)


def test_hooks_are_found_as_torchcomms_has_them() -> None:
    program = """
import ncclx_rs
ncclx_rs.install_as_torchcomms()
from torchcomms.hooks import FlightRecorderHook, NanCheckHook, clog, fr
from torchcomms.hooks.clog import clog as same
assert fr.FlightRecorderHook is FlightRecorderHook is ncclx_rs.hooks.FlightRecorderHook and same is clog
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("backend", ["ncclx", "gloo"])
def test_a_hook_hears_of_the_end_once(world: World, backend: str) -> None:
    world.run(a_hook_hears_of_the_end_once, backend, join=False)
