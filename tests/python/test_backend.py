"""The backend's error state, hooks and pending works; and it is faster than gloo."""

from __future__ import annotations

import json
import os
import pickle
import queue
import statistics
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, WATCHDOG_SECONDS, World, descriptors, join, leaving_together, meet, set_timeout
from ncclx_rs.bench.measure import on_a_core_of_its_own
from reference import assert_same
from torch._C import _distributed_c10d as c10d


def backend() -> dist.Backend:
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def error_state() -> str:
    if not hasattr(backend(), "get_error"):
        pytest.skip("this torch does not show a backend's error state")
    return backend().get_error().name


def a_refused_call_is_no_error_of_the_group(rank: int, size: int) -> None:
    assert error_state() == "SUCCESS"
    with pytest.raises(ValueError, match="BAND"):
        dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BAND)
    dist.barrier()
    assert error_state() == "SUCCESS"


def a_timeout_is_the_groups_error(rank: int, size: int) -> None:
    join(timeout=1)
    error_state()
    with leaving_together():
        if rank != 0:
            with pytest.raises(dist.DistBackendError):
                dist.all_reduce(torch.ones(3))
            # The first rank that times out notifies the others.
            assert error_state() in ("TIMEOUT", "REMOTE_ERROR")


def a_store_ends_with_its_group(rank: int, size: int) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    counts = []
    for _ in range(4):
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
        join(store=store)
        dist.destroy_process_group()
        del store
        counts.append(descriptors())
    assert descriptors(counts[0]) <= counts[0], counts


def completion_hooks_are_told_of_every_work(rank: int, size: int) -> None:
    group = dist.group.WORLD
    if not hasattr(group, "_register_on_completion_hook"):
        pytest.skip("this torch has no _register_on_completion_hook")
    seen = []
    group._register_on_completion_hook(lambda info: seen.append((info.op_type, info.seq, info.active_duration)))
    works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(5)]
    dist.broadcast(torch.ones(1), src=0)
    group._wait_for_pending_works()
    assert [work.is_completed() for work in works] == [True] * 5
    assert [str(kind).rpartition(".")[2] for kind, *_ in seen].count("ALLREDUCE") == 5
    assert len(seen) == 6 and all(duration.total_seconds() >= 0 for *_, duration in seen)
    sequences = sorted(sequence for _, sequence, _ in seen)  # several threads call the hook
    assert sequences == list(range(sequences[0], sequences[0] + 6))


def outcomes_in_callbacks(works: list[dist.Work]) -> queue.SimpleQueue[Exception | None]:
    """How each work ends, as its `wait` tells in a callback of its own future."""
    outcomes: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def wait(work: dist.Work) -> None:
        try:
            work.wait()
        except Exception as error:
            outcomes.put(error)
        else:
            outcomes.put(None)

    for work in works:
        work.get_future().add_done_callback(lambda _, work=work: wait(work))
    return outcomes


def a_work_is_waited_for_in_its_own_callback(rank: int, size: int) -> None:
    group, tensors = dist.group.WORLD, [torch.ones(10) for _ in range(3)]

    def start() -> list[dist.Work]:
        works = [dist.all_reduce(tensors[0], async_op=True)]
        group._start_coalescing(torch.device("cpu"))
        for tensor in tensors[1:]:
            dist.all_reduce(tensor, async_op=True)
        return [*works, group._end_coalescing(torch.device("cpu"))]

    if rank == 0:  # whose works end on another thread, once the others begin
        works = start()
        outcomes = outcomes_in_callbacks(works)
        meet()
        assert [outcomes.get(timeout=WATCHDOG_SECONDS / 4) for _ in works] == [None, None]
    else:
        meet()
        works = start()
    for work in works:
        work.wait()
    assert [tensor[0].item() for tensor in tensors] == [size] * 3


def a_failed_work_is_waited_for_in_its_own_callback(rank: int, size: int) -> None:
    join(timeout=1)
    with leaving_together():
        if rank == 0:
            outcomes = outcomes_in_callbacks([dist.irecv(torch.ones(3), 1)])
            assert isinstance(outcomes.get(timeout=WATCHDOG_SECONDS / 4), dist.DistBackendError)


def abort_hooks_are_called_once_a_rank_is_lost(rank: int, size: int) -> None:
    join(timeout=1)
    if not (hasattr(backend(), "supports_abort_hooks") and backend().supports_abort_hooks):
        pytest.skip("this torch has no abort hooks")
    called = []
    backend().register_abort_hook(7, lambda: called.append(7))
    backend().register_abort_hook(8, lambda: called.append(8))
    backend().unregister_abort_hook(8)
    with leaving_together():
        if rank != 0:
            with pytest.raises(dist.DistBackendError):
                dist.all_reduce(torch.ones(3))
            backend().shutdown()  # does not overtake the hooks
            assert called == [7]


def sparse_tensors_are_summed(rank: int, size: int) -> None:
    def sparse(r: int) -> torch.Tensor:
        # The number of entries differs by rank, and is zero on the last; some have equal indices.
        entries = [(i * (r + 1)) % 7 for i in range(size - 1 - r)]
        values = torch.arange(2 * len(entries), dtype=torch.float32).reshape(len(entries), 2) + r
        return torch.sparse_coo_tensor(torch.tensor([entries], dtype=torch.long), values, (7, 2))

    tensor = sparse(rank)
    dist.all_reduce(tensor)
    expected = torch.stack([sparse(r).to_dense() for r in range(size)]).sum(0)
    assert_same(tensor.to_dense(), expected, "the sum of sparse tensors")
    with pytest.raises(ValueError, match="SUM"):
        dist.all_reduce(sparse(rank), op=dist.ReduceOp.MAX)


def both_may_block_in_sends_first(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in (10, 3_000_000):
        tensor = torch.empty(count)
        dist.send(torch.full((count,), float(rank)), dst=after)
        dist.recv(tensor, src=before)
        assert_same(tensor, torch.full((count,), float(before)), f"{count} elements")


def medians_of(groups: dict[str, dist.ProcessGroup], count: int) -> dict[str, float]:
    """The median time of an all_reduce on each group, measured in alternating rounds."""
    times: dict[str, list[float]] = {name: [] for name in groups}
    tensor = torch.ones(count)
    for turn in range(30):
        for name, group in groups.items():
            dist.barrier(group)
            began = time.perf_counter()
            dist.all_reduce(tensor, group=group, op=dist.ReduceOp.MAX)
            if turn >= 5:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(all_times) for name, all_times in times.items()}


def all_reduce_beats_gloo(rank: int, size: int) -> None:
    groups = {"ours": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    for count in (1, 1024, 16384):
        # After calls of gloo, Linux tends to leave several ranks on one core, which would dominate the time.
        with on_a_core_of_its_own(rank):
            medians = medians_of(groups, count)
        ratio = torch.tensor([medians["gloo"] / medians["ours"]])
        dist.all_reduce(ratio, op=dist.ReduceOp.MAX)
        assert ratio.item() > 1, f"{count} elements: gloo is {1 / ratio.item():.2f} times as fast"


RECORDER_FOLLOWS_US = BACKEND == "ncclx_rs" and tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


def pytorchs_recorder_learns_what_became_of_operations(rank: int, size: int, folder: str) -> None:
    os.environ |= {"TORCH_FR_DUMP_ON_TIMEOUT": "1", "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/trace_"}
    os.environ["NCCLX_RS_PYTORCH_RECORDER"] = "1"
    join()
    dist.all_reduce(torch.ones(10))
    dist.barrier()
    set_timeout(dist.group.WORLD, 1)
    entries = json.loads(c10d._dump_fr_trace_json(backend=BACKEND))["entries"]
    assert [entry["profiling_name"] for entry in entries] == [f"{BACKEND}:all_reduce", f"{BACKEND}:barrier"]
    assert all(entry["state"] == "completed" and entry["duration_ms"] > 0 for entry in entries)
    with leaving_together():
        if rank == 0:
            with pytest.raises(dist.DistBackendError):
                dist.broadcast(torch.ones(3), src=1)


def failures_are_written_down_without_pytorchs_recorder(rank: int, size: int, folder: str) -> None:
    os.environ |= {"TORCH_FR_DUMP_ON_TIMEOUT": "1", "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/trace_"}
    join()
    dist.barrier()
    set_timeout(dist.group.WORLD, 1)
    if RECORDER_FOLLOWS_US:
        assert not json.loads(c10d._dump_fr_trace_json(backend=BACKEND)).get("entries")
    with leaving_together():
        if rank == 0:
            with pytest.raises(dist.DistBackendError):
                dist.broadcast(torch.ones(3), src=1)
    dist.destroy_process_group()
    if rank == 0:
        content = pickle.loads(Path(f"{folder}/trace_0").read_bytes())
        shown = [(entry["profiling_name"], entry["state"]) for entry in content["entries"]]
        assert shown == [("ncclx:barrier", "completed"), ("ncclx:broadcast", "started")]


@pytest.mark.skipif(BACKEND != "ncclx_rs", reason="the engine's recorder")
@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_failures_are_written_down_without_pytorchs_recorder(fresh_world: World, tmp_path: Path) -> None:
    fresh_world.run(failures_are_written_down_without_pytorchs_recorder, str(tmp_path), join=False)


@pytest.mark.skipif(not RECORDER_FOLLOWS_US, reason="this torch's recorder does not follow this backend")
@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_pytorchs_recorder_learns_what_became_of_operations(fresh_world: World, tmp_path: Path) -> None:
    fresh_world.run(pytorchs_recorder_learns_what_became_of_operations, str(tmp_path), join=False)
    last = pickle.loads((tmp_path / "trace_0").read_bytes())["entries"][-1]
    assert (last["profiling_name"], last["state"]) == (f"{BACKEND}:broadcast", "scheduled")


@pytest.mark.worlds(sizes=(1, 2, 3), modes=("shm",))
@pytest.mark.parametrize(
    "check",
    [a_refused_call_is_no_error_of_the_group, sparse_tensors_are_summed, completion_hooks_are_told_of_every_work],
    ids=lambda check: check.__name__,
)
def test_backend(world: World, check) -> None:
    world.run(check)


@pytest.mark.skipif(BACKEND != "ncclx_rs", reason="gloo waits for itself")
@pytest.mark.worlds(sizes=(2, 3), modes=("shm",))
def test_a_work_is_waited_for_in_its_own_callback(fresh_world: World) -> None:
    fresh_world.run(a_work_is_waited_for_in_its_own_callback)


@pytest.mark.skipif(BACKEND != "ncclx_rs", reason="gloo waits for itself")
@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_a_failed_work_is_waited_for_in_its_own_callback(fresh_world: World) -> None:
    fresh_world.run(a_failed_work_is_waited_for_in_its_own_callback, join=False)


@pytest.mark.worlds(sizes=(1,), modes=("shm",))
def test_a_store_ends_with_its_group(fresh_world: World) -> None:
    fresh_world.run(a_store_ends_with_its_group, join=False)


@pytest.mark.worlds(sizes=(2, 3), modes=("shm", "tcp"))
def test_both_may_block_in_sends_first(world: World) -> None:
    world.run(both_may_block_in_sends_first)


@pytest.mark.alone
@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_all_reduce_beats_gloo(world: World) -> None:
    world.run(all_reduce_beats_gloo)


@pytest.mark.worlds(sizes=(3,), modes=("shm",))
@pytest.mark.parametrize(
    "check",
    [a_timeout_is_the_groups_error, abort_hooks_are_called_once_a_rank_is_lost],
    ids=lambda check: check.__name__,
)
def test_failure(fresh_world: World, check) -> None:
    fresh_world.run(check, join=False)
