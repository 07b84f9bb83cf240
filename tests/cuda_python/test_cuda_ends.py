"""Who is told when an operation on a CUDA tensor ends: hooks, awaiting tasks, and whoever asks."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import World, fresh_store
from reference import assert_same


def new_comm(rank: int, size: int, **options: object) -> object:
    import ncclx_rs

    device = torch.device("cuda", torch.cuda.current_device())
    return ncclx_rs.new_comm("ncclx", device, store=fresh_store(), rank=rank, size=size, **options)


def told_at_the_end(rank: int, size: int) -> None:
    from ncclx_rs import ReduceOp
    from ncclx_rs._types import WorkStatus

    comm = new_comm(rank, size)
    tensors = [torch.ones(1000, device="cuda") for _ in range(3)]
    store = fresh_store()
    if rank > 0:
        store.wait(["looked"])
    works = [comm.all_reduce(tensor, ReduceOp.SUM, True) for tensor in tensors[:2]]
    # In order on the current stream, and as much in flight as the others.
    works.append(comm.all_reduce(tensors[2], ReduceOp.SUM, False))
    seen: list[tuple[int, bool]] = []
    ended = threading.Event()

    def note(index: int, succeeded: bool) -> None:
        seen.append((index, succeeded))
        if len(seen) == len(works):
            ended.set()

    for index, work in enumerate(works):
        work._on_end(lambda succeeded, index=index: note(index, succeeded))
    works[0].wait()
    if rank == 0:
        assert not seen and not any(work.is_completed() for work in works)
        assert [work.status for work in works] == [WorkStatus.INPROGRESS] * 3
        store.set("looked", "yes")
    # Nobody waits or asks.
    assert ended.wait(60), seen
    assert sorted(seen) == [(0, True), (1, True), (2, True)]
    assert all(work.is_completed() and work.status is WorkStatus.COMPLETED for work in works)
    works[2]._on_end(lambda succeeded: note(3, succeeded))
    assert (3, True) in seen, "at once, as it has ended"
    for tensor in tensors:
        assert_same(tensor.cpu(), torch.full((1000,), float(size)), "the sum")
    comm.finalize()


def test_hooks_are_called_when_the_operation_has_ended(cuda_world: World) -> None:
    cuda_world.run(told_at_the_end, join=False)


def awaited(rank: int, size: int) -> None:
    from ncclx_rs import ReduceOp

    comm = new_comm(rank, size)
    tensor = torch.ones(1000, device="cuda")
    store = fresh_store()
    if rank > 0:
        store.wait(["others ran"])

    async def main() -> None:
        work = comm.all_reduce(tensor, ReduceOp.SUM, True)

        async def other() -> None:
            assert rank > 0 or not work.is_completed()
            store.set("others ran", "yes")

        beside = asyncio.create_task(other())
        await work
        assert work.is_completed() and beside.done()

    asyncio.run(main())
    assert_same(tensor.cpu(), torch.full((1000,), float(size)), "the sum")
    comm.finalize()


def test_a_task_awaits_the_end_while_others_run(cuda_world: World) -> None:
    cuda_world.run(awaited, join=False)


def too_late(rank: int, size: int) -> None:
    from ncclx_rs import ReduceOp
    from ncclx_rs._types import WorkStatus

    comm = new_comm(rank, size, abort_process_on_timeout_or_error=False)
    store = fresh_store()
    tensor = torch.ones(10, device="cuda")
    if rank > 0:
        store.wait(["it timed out"])
        comm.abort()
        return
    failed, outcome = threading.Event(), []
    comm.register_abort_hook(failed.set)
    work = comm.all_reduce(tensor, ReduceOp.SUM, True, timeout=timedelta(seconds=1))
    work._on_end(outcome.append)
    work.wait()  # of the stream
    with pytest.raises(RuntimeError, match=r"did not call it"):
        work.wait_blocking()
    assert work.is_completed() and work.status is WorkStatus.TIMEDOUT
    assert "did not call it" in str(work.exception())
    assert failed.wait(60) and comm.is_aborted()
    torch.cuda.synchronize()  # the stream was released
    with pytest.raises(RuntimeError, match=r"did not call it|aborted"):
        comm.all_reduce(tensor, ReduceOp.SUM, True)
    store.set("it timed out", "yes")
    for _ in range(600):
        if outcome:
            break
        threading.Event().wait(0.1)
    assert outcome == [False]


def test_an_operation_that_times_out_ends_with_an_error(cuda_world: World) -> None:
    cuda_world.run(too_late, join=False)


def completion_hooks(rank: int, size: int) -> None:
    group = dist.group.WORLD._get_backend(torch.device("cuda"))
    if not hasattr(group, "_register_on_completion_hook"):
        pytest.skip("this torch has no _register_on_completion_hook")
    dist.all_reduce(torch.zeros(1, device="cuda"))  # sets up
    torch.cuda.synchronize()
    group._settle()
    seen, told = [], threading.Event()

    def note(info: object) -> None:
        seen.append(info.seq)
        told.set()

    group._register_on_completion_hook(note)
    store = fresh_store()
    if rank > 0:
        store.wait(["looked"])
    work = dist.all_reduce(torch.ones(100, device="cuda"), async_op=True)
    work.wait()
    if rank == 0:
        assert not seen
        store.set("looked", "yes")
    assert told.wait(60)
    assert work.is_success()


def test_c10ds_hook_is_called_when_the_operation_has_ended(cuda_world: World) -> None:
    cuda_world.run(completion_hooks)
