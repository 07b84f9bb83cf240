"""CUDA tensors of ranks on several hosts, which this machine poses as: four ranks, two on each."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from conftest import begin
from harness import World, joined
from reference import assert_same, data, reduced
from test_cuda_collectives import everything
from test_cuda_windows import a_persistent_all_gather_repeats, c10ds_windows, parts_travel_in_a_ring


@pytest.fixture(scope="module", params=["", "one-queue"], ids=["queues", "one-queue"])
def hosts(request: pytest.FixtureRequest) -> Iterator[World]:
    variables = {
        "SOFTCUDA_DEVICES": "2",
        "SOFTCUDA_DELAY_US": "100",
        "SOFTCUDA_WEAK": "1",
        "SOFTCUDA_HOST_POINTERS_DIFFER": "1",
        "NCCLX_RS_DEVICE_STAGING_BYTES": "65536",
    }
    if request.param:
        variables["SOFTCUDA_QUEUES"] = "1"
    world = World(4, "hier", variables, begin)
    yield world
    world.close()


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
def test_every_collective_is_right(hosts: World, is_async: bool) -> None:
    hosts.run(everything, is_async)


def from_both_sides(rank: int, size: int) -> None:
    # Long enough for many segments each way, several operations at once.
    parts = [data(r, 300_000) for r in range(size)]
    tensors = [parts[rank].cuda() for _ in range(3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    for tensor in tensors:
        assert_same(tensor.cpu(), reduced(parts), "all_reduce")


def test_long_tensors_go_both_ways_at_once(hosts: World) -> None:
    hosts.run(from_both_sides)


def disagreements(rank: int, size: int) -> None:
    dist.all_reduce(torch.zeros(1, device="cuda"))
    for odd in (0, 3):
        tensor = torch.ones(10, device="cuda")
        op = dist.ReduceOp.MAX if rank == odd else dist.ReduceOp.SUM
        with pytest.raises(RuntimeError, match=r"all_reduce\(MAX, 10 × float32\)") as caught:
            work = dist.all_reduce(tensor, op, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=60))
        assert "all_reduce(SUM, 10" in str(caught.value)
        torch.cuda.synchronize()
        again = torch.full((3,), float(rank), device="cuda")
        dist.all_reduce(again)
        assert again.cpu().tolist() == [float(sum(range(size)))] * 3


def test_hosts_that_disagree_are_told_and_the_group_goes_on(hosts: World) -> None:
    hosts.run(disagreements)


def synchronized_meanwhile(rank: int, size: int) -> None:
    tensor = torch.full((50_000,), float(rank), device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    spare = torch.zeros(1 << 20, device="cuda")
    del spare

    device = torch.cuda.current_device()

    def wait_for_the_device() -> None:
        torch.cuda.set_device(device)
        torch.cuda.empty_cache()
        torch.cuda.synchronize()

    for _ in range(5):
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True)
        thread = threading.Thread(target=wait_for_the_device)
        thread.start()
        work.wait()
        thread.join()
    assert tensor.cpu().tolist() == [float(sum(range(size)))] * 50_000


def test_threads_may_wait_for_the_device_meanwhile(hosts: World) -> None:
    hosts.run(synchronized_meanwhile)


def killed(rank: int, size: int) -> None:
    with joined(timeout=60):
        dist.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()
        if rank == 3:
            os._exit(1)
        with pytest.raises(RuntimeError, match="rank 3 is lost"):
            dist.all_reduce(torch.ones(10, device="cuda"), async_op=True).wait(timedelta(seconds=30))
        torch.cuda.synchronize()


def test_a_rank_that_dies_on_another_host_ends_what_waits_for_it(hosts: World) -> None:
    hosts.run(killed, join=False, dies=[3])


def messages(rank: int, size: int) -> None:
    """Rings and pairs over two hosts, as pipelines send them, and batches to ranks of both hosts."""
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in (0, 1, 70_001):
        # First: ranks that all send first, each as its pair's first message, would wait for each other.
        outputs = [torch.zeros(count + peer, device="cuda") for peer in range(size)]
        ops = []
        for peer in range(size):
            if peer != rank:
                ops.append(dist.P2POp(dist.isend, data(rank, count + rank, salt=peer).cuda(), peer))
                ops.append(dist.P2POp(dist.irecv, outputs[peer], peer))
        for batch in dist.batch_isend_irecv(ops):
            batch.wait()
        for peer in range(size):
            if peer != rank:
                assert_same(outputs[peer].cpu(), data(peer, count + peer, salt=rank), f"{count} from {peer}")
        # On one queue, a send that is longer than the cells waits before the receive that is behind it: docs/cuda.md.
        if count <= 1 or os.environ.get("SOFTCUDA_QUEUES") != "1":
            got = torch.zeros(count, device="cuda")
            works = [dist.isend(data(rank, count).cuda(), after), dist.irecv(got, before)]
            for work in works:
                assert work is not None
                work.wait()
            assert_same(got.cpu(), data(before, count), f"{count} from {before}")
        # Along the ranks and back, one after the other.
        got = torch.zeros(count, device="cuda")
        if rank > 0:
            dist.recv(got, rank - 1)
            assert_same(got.cpu(), data(rank - 1, count), f"{count} along the ranks")
        if rank + 1 < size:
            dist.send(data(rank, count).cuda(), rank + 1)


def test_messages_go_between_hosts(hosts: World) -> None:
    hosts.run(messages)


def ends_that_differ(rank: int, size: int) -> None:
    far = (rank + 2) % size
    tensor, got = torch.ones(100_000, device="cuda"), torch.zeros(99_999, device="cuda")
    dist.all_reduce(torch.zeros(1, device="cuda"))
    with pytest.raises(RuntimeError, match="400000 bytes") as caught:
        work = dist.isend(tensor, far) if rank < far else dist.irecv(got, far)
        assert work is not None
        work.wait(timedelta(seconds=60))
    assert "399996 bytes" in str(caught.value)
    torch.cuda.synchronize()
    if rank < far:
        dist.send(tensor, far)
    else:
        got = torch.zeros(100_000, device="cuda")
        dist.recv(got, far)
        assert got.cpu().tolist() == [1.0] * 100_000


def test_ends_on_different_hosts_that_differ_are_told_and_go_on(hosts: World) -> None:
    hosts.run(ends_that_differ)


# Where a device has one queue, a wait for a signal holds up what brings it.
@pytest.mark.parametrize("hosts", [""], ids=["queues"], indirect=True)
@pytest.mark.parametrize("what", [parts_travel_in_a_ring, c10ds_windows, a_persistent_all_gather_repeats])
def test_windows_of_other_hosts(hosts: World, what: Callable[[int, int], None]) -> None:
    hosts.run(what)
