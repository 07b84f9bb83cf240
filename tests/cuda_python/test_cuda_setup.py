"""Groups that are bound to a device: they set up there when they are made."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import World, fresh_store, joined
from reference import assert_same


def place() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def submits_before_others_call(rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
    """Without the setup, the first operation would wait for the others, which wait for its submission."""
    store = fresh_store()
    tensor = torch.full((5,), float(rank), device="cuda")
    if rank > 0:
        store.wait(["submitted"])
    dist.all_reduce(tensor, group=group)
    if rank == 0:
        store.set("submitted", "yes")
    assert_same(tensor.cpu(), torch.full((5,), float(sum(range(size)))), "the sum")


def bound(rank: int, size: int, backend: str) -> None:
    dist.init_process_group(backend, store=fresh_store(), rank=rank, world_size=size, device_id=place())
    try:
        submits_before_others_call(rank, size)
        submits_before_others_call(rank, size, dist.new_group(list(range(size))))
        if hasattr(dist, "split_group"):
            submits_before_others_call(rank, size, dist.split_group(split_ranks=[list(range(size))]))
        # Some ranks alone.
        if size > 2:
            pair = dist.new_group([0, 1])
            if rank < 2:
                submits_before_others_call(rank, 2, pair)
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["ncclx_rs", "cpu:ncclx_rs,cuda:ncclx_rs"])
def test_a_bound_group_and_groups_of_it_are_set_up_when_they_are_made(cuda_world: World, backend: str) -> None:
    cuda_world.run(bound, backend, join=False)


def merged(rank: int, size: int, backend: str) -> None:
    dist.init_process_group(backend, store=fresh_store(), rank=rank, world_size=size, device_id=place())
    try:
        group = dist.group.WORLD.merge_remote_group(fresh_store(), size, timedelta(seconds=60), "merged")
        for device in (torch.device("cpu"), place()):
            tensor = torch.ones(5, device=device)
            group.allreduce([tensor]).wait()
            assert_same(tensor.cpu(), torch.full((5,), float(size)), f"the sum on {device}")
        group.shutdown()
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "merge_remote_group"), reason="this PyTorch merges no groups")
@pytest.mark.parametrize("backend", ["ncclx_rs", "cpu:ncclx_rs,cuda:ncclx_rs"])
def test_bound_groups_that_serve_two_types_of_devices_merge(cuda_world: World, backend: str) -> None:
    cuda_world.run(merged, backend, join=False)


def bound_communicators(rank: int, size: int) -> None:
    import ncclx_rs

    comm = ncclx_rs.new_comm("ncclx", place(), store=fresh_store(), rank=rank, size=size)
    child = comm.split(list(range(size)), "child")
    assert child is not None
    for made in (comm, child):
        store = fresh_store()
        tensor = torch.full((5,), float(rank), device="cuda")
        if rank > 0:
            store.wait(["submitted"])
        made.all_reduce(tensor, ncclx_rs.ReduceOp.SUM, False)
        if rank == 0:
            store.set("submitted", "yes")
        assert_same(tensor.cpu(), torch.full((5,), float(sum(range(size)))), "the sum")
    child.finalize()
    comm.finalize()


def test_communicators_are_set_up_when_they_are_made(cuda_world: World) -> None:
    cuda_world.run(bound_communicators, join=False)


def one_rank_without_its_device(rank: int, size: int) -> None:
    last = size - 1
    with joined():
        # PyTorch itself refuses such numbers; other things that a rank lacks it does not know.
        device = torch.device("cuda", 99) if rank == last else place()
        backend = dist.group.WORLD._get_backend(torch.device("cuda"))
        with pytest.raises(RuntimeError, match=rf"CUDA on rank {last}: a look at its device 99"):
            backend.eager_connect_single_device(device)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert_same(tensor, torch.full((3,), float(size)), "the CPU's tensors are not concerned")


def test_what_fails_on_a_rank_is_an_error_of_all_that_names_it(cuda_world: World) -> None:
    cuda_world.run(one_rank_without_its_device, join=False)
