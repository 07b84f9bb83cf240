"""The order of operations on streams: who waits for what, and how long memory lives."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, fresh_store, joined
from ncclx_rs._load import native
from reference import assert_same, data, reduced
from torch.utils._python_dispatch import TorchDispatchMode


def warm() -> None:
    """The first operation on a device blocks until all ranks have called it."""
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()


def a_late_rank_blocks_nobody(rank: int, size: int) -> None:
    warm()
    store = fresh_store()
    parts = [data(r, 5000) for r in range(size)]
    first, second = parts[rank].cuda(), parts[rank].cuda()
    if rank > 0:
        # Until rank 0 has been through `wait` and a blocking call: if these waited for this rank, nobody would go on.
        store.wait(["through"])
    work = dist.all_reduce(first, async_op=True)
    work.wait()
    # No operator that the software CUDA computes on the CPU: it would wait for the stream.
    after = torch.empty_like(first).copy_(first)
    dist.all_reduce(second)
    if rank == 0:
        assert not work.is_completed() and not work.is_success()
        store.set("through", "yes")
    assert_same(after.cpu(), reduced(parts), "what follows `wait` on the current stream")
    assert_same(second.cpu(), reduced(parts), "a blocking call")
    # The engine's words say so before anybody is told.
    assert work.is_completed() and work.is_success()
    assert work.result()[0] is not None


def test_wait_orders_the_stream_and_never_blocks_the_host(cuda_world: World) -> None:
    cuda_world.run(a_late_rank_blocks_nobody)


def blocked_streams(rank: int, size: int) -> None:
    store, group = fresh_store(), dist.group.WORLD
    here = torch.device("cuda", torch.cuda.current_device())
    parts = [data(r, 5000) for r in range(size)]
    for is_warm in (False, True):  # the first operations on a device block until all ranks have called them
        tensor, got = parts[rank].cuda(), torch.zeros(5000, device="cuda")
        if is_warm and rank > 0:
            # Until rank 0 has put its copies on the stream: what they copy is not there before.
            store.wait(["copies"])
        dist.all_reduce(tensor, async_op=True).block_current_stream()
        summed = torch.empty_like(tensor).copy_(tensor)
        group._start_coalescing(here)
        received = dist.irecv(got, (rank - 1) % size)
        dist.isend(tensor, (rank + 1) % size)
        group._end_coalescing(here)
        received.block_current_stream()
        copied = torch.empty_like(got).copy_(got)
        if is_warm and rank == 0:
            store.set("copies", "yes")
        assert_same(summed.cpu(), reduced(parts), f"what was copied after a collective, warm {is_warm}")
        assert_same(copied.cpu(), reduced(parts), f"what was copied after a message, warm {is_warm}")


def test_a_blocked_stream_comes_after_the_operation(cuda_world: World) -> None:
    cuda_world.run(blocked_streams)


def waits_that_block(rank: int, size: int) -> None:
    import datetime

    warm()
    store = fresh_store()
    tensor = torch.ones(100, device="cuda")
    if rank > 0:
        store.wait(["gave up"])
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        with pytest.raises(RuntimeError, match="ncclx_rs"):
            work.wait(datetime.timedelta(milliseconds=50))
        store.set("gave up", "yes")
    assert work.wait(datetime.timedelta(seconds=60)) and work.is_completed()
    assert_same(tensor.cpu(), torch.full((100,), float(size)), "after a wait that gave up")
    if rank > 0:
        store.set(f"here{rank}", "yes")
    dist.barrier()
    assert all(store.check([f"here{r}"]) for r in range(1, size)), "the barrier did not wait"


def test_a_wait_with_a_limit_and_a_barrier_block_the_host(cuda_world: World) -> None:
    cuda_world.run(waits_that_block)


def dropped_tensors(rank: int, size: int) -> None:
    warm()
    parts = [data(r, 200_000) for r in range(size)]
    for turn in range(8):
        tensor = parts[rank].cuda()
        results = torch.empty(size * 200_000, device="cuda")
        gathered = dist.all_gather_into_tensor(results, tensor, async_op=True)
        view = parts[rank].cuda().view(400, 500).t()
        summed = dist.all_reduce(view, async_op=True)
        # What is allocated now must not get their memory while they are in use.
        del tensor, view, summed
        garbage = [torch.full((200_000,), 1e9, device="cuda") for _ in range(4)]
        gathered.wait()
        assert_same(results.cpu(), torch.cat(parts), f"turn {turn}")
        del garbage


def test_tensors_that_the_program_drops_live_until_they_are_used(cuda_world: World) -> None:
    cuda_world.run(dropped_tensors)


def two_streams(rank: int, size: int) -> None:
    warm()
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()]
    parts = [data(r, 3000) for r in range(size)]
    tensors = []
    for turn in range(9):
        with torch.cuda.stream(streams[turn % 3]):
            tensor = (parts[rank] + turn).cuda()
            dist.all_reduce(tensor)
            tensors.append(tensor)
    torch.cuda.synchronize()
    for turn, tensor in enumerate(tensors):
        assert_same(tensor.cpu(), reduced([part + turn for part in parts]), f"turn {turn}")


def test_blocking_calls_may_come_from_streams_in_turn(cuda_world: World) -> None:
    cuda_world.run(two_streams)


def futures(rank: int, size: int) -> None:
    warm()
    store = fresh_store()
    parts = [data(r, 10_000) for r in range(size)]
    tensor = parts[rank].cuda()
    if rank > 0:
        store.wait(["chained"])
    work = dist.all_reduce(tensor, async_op=True)
    # The callback runs at once, on a stream that waits for the collective.
    chained = work.get_future().then(lambda done: torch.empty_like(tensor).copy_(done.value()[0]))
    if rank == 0:
        store.set("chained", "yes")
    assert_same(chained.wait().cpu(), reduced(parts), "what a callback made of the result")
    assert work.get_future_result().wait() == 0
    later = dist.all_reduce(parts[rank].cuda(), async_op=True).get_future().value()
    torch.cuda.synchronize()
    assert_same(later[0].cpu(), reduced(parts), "the value of a future")


def test_callbacks_of_futures_run_on_streams_after_the_operation(cuda_world: World) -> None:
    cuda_world.run(futures)


def other_devices(rank: int, size: int) -> None:
    warm()
    here = torch.device("cuda", torch.cuda.current_device())
    for wrong, named in ((torch.ones(3), "cpu"), (torch.ones(3, device=f"cuda:{(here.index + 1) % 3}"), "cuda")):
        outputs = [torch.zeros(3, device=here) for _ in range(size)]
        with pytest.raises(ValueError, match=f"expected a tensor on {here}.*got one on {named}"):
            dist.distributed_c10d._get_default_group()._get_backend(here).allgather([outputs], [wrong])
    elsewhere = torch.ones(3, device=f"cuda:{(here.index + 1) % 3}")
    with pytest.raises(ValueError, match=f"all_reduce.*expected a tensor on {here}.*got one on {elsewhere.device}"):
        dist.all_reduce(elsewhere)
    tensor = torch.ones(3, device=here)
    dist.all_reduce(tensor)
    assert_same(tensor.cpu(), torch.full((3,), float(size)), "the group works on")


def test_a_tensor_on_another_device_is_refused_by_name(cuda_world: World) -> None:
    if cuda_world.size != 3:
        pytest.skip("there is one device")
    cuda_world.run(other_devices)


def bound_groups(rank: int, size: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    place = {"rank": rank, "world_size": size}
    for backend in ("ncclx_rs", "cpu:ncclx_rs,cuda:ncclx_rs"):
        dist.init_process_group(backend, store=fresh_store(), device_id=device, **place)
        dist.barrier()
        tensor = torch.ones(3, device=device)
        dist.all_reduce(tensor)
        assert_same(tensor.cpu(), torch.full((3,), float(size)), backend)
        dist.destroy_process_group()


def test_groups_may_be_bound_to_a_device(cuda_world: World) -> None:
    cuda_world.run(bound_groups, join=False)


def object_api(rank: int, size: int) -> None:
    import ncclx_rs

    comm = ncclx_rs.new_comm("ncclx", "cuda", store=fresh_store(), rank=rank, size=size)
    parts = [data(r, 5000) for r in range(size)]
    tensor = parts[rank].cuda()
    comm.all_reduce(tensor, ncclx_rs.ReduceOp.SUM, False)
    assert_same(tensor.cpu(), reduced(parts), "a blocking all_reduce")
    store = fresh_store()
    tensor = parts[rank].cuda()
    if rank > 0:
        store.wait(["through"])
    work = comm.all_reduce(tensor, ncclx_rs.ReduceOp.SUM, True)
    comm.barrier(False)  # on the stream: it does not block the host
    work.wait()
    if rank == 0:
        assert not work.is_completed() or work.status is not None
        store.set("through", "yes")
    work.wait_blocking()
    assert work.is_completed()
    assert_same(tensor.cpu(), reduced(parts), "an asynchronous all_reduce")
    child = comm.split(list(range(size)), "child")
    tensor = parts[rank].cuda()
    child.all_reduce(tensor, ncclx_rs.ReduceOp.SUM, False)
    assert_same(tensor.cpu(), reduced(parts), "in a child")
    child.finalize()
    comm.finalize()


def test_the_object_api_serves_the_device(cuda_world: World) -> None:
    cuda_world.run(object_api, join=False)


class Priorities(TorchDispatchMode):
    """Notes the priority of the stream that is current whenever an operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(torch.cuda.current_stream().priority)
        return func(*args, **(kwargs or {}))


def priorities(rank: int, size: int) -> None:
    from ncclx_rs import Options

    device = torch.device("cuda", torch.cuda.current_device())
    for is_high in (False, True):
        hints = {"is_high_priority_stream": "true"} if is_high else {}
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # such as one that the hint is not known
            group = dist.new_group(backend="ncclx_rs", pg_options=Options(hints=hints))
        backend = group._get_backend(device)
        # Not contiguous, so that operators copy it on the operation's stream; and the backend's own call, since what
        # runs within c10d's operator is not noted.
        tensor = torch.ones(20, device="cuda")[::2]
        with Priorities() as noted:
            work = backend.allreduce([tensor], dist.AllreduceOptions())
        work.wait()
        assert tensor.cpu().tolist() == [float(size)] * 10
        assert noted.seen, "an operator has copied it"
        assert all(priority < 0 if is_high else priority == 0 for priority in noted.seen), noted.seen
        dist.destroy_process_group(group)


def test_asynchronous_operations_may_have_high_priority(cuda_world: World) -> None:
    cuda_world.run(priorities)


def left_behind(rank: int, size: int) -> None:
    """Destroys the group while operations may be in flight."""
    with joined():
        warm()
        works = [dist.all_reduce(torch.ones(1000, device="cuda"), async_op=True) for _ in range(4)]
        works[-1].wait()


def test_a_group_may_end_with_operations_in_flight(cuda_world: World) -> None:
    cuda_world.run(left_behind, join=False)


def times_of_the_devices_clock(rank: int, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_NCCL_ENABLE_TIMING", "1")
        with joined():
            warm()
            dist.all_reduce(torch.zeros(1000, device="cuda"))
            records = [record for text in native().dumps("a test") for record in json.loads(text)["records"]]
            # The first one had ended when the second one was submitted.
            times = [record["device_microseconds"] for record in records if record["device_microseconds"] is not None]
            assert len(times) == 1 and times[0] > 0, records


def test_the_devices_clock_times_operations_if_asked(cuda_world: World) -> None:
    cuda_world.run(times_of_the_devices_clock, join=False)
