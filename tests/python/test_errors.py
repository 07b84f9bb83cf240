"""Misuse is found before anything is sent: a ValueError names the argument, and the group stays usable."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import World
from reference import assert_same, data, reduced, without_memory
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def assert_refused(pattern: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=f"(?s){pattern}") as refused:
        call()
    assert not isinstance(refused.value, dist.DistError)


def assert_group_still_works(rank: int, size: int) -> None:
    tensor = data(rank, 1000)
    dist.all_reduce(tensor)
    assert_same(tensor, reduced([data(r, 1000) for r in range(size)]), "all_reduce after the error")


def outputs_of_wrong_sizes_are_refused(rank: int, size: int) -> None:
    ten = torch.ones(10)
    assert_refused(
        rf"all_gather.*\b{size * 10 + 1}\b",
        lambda: dist.all_gather_into_tensor(torch.empty(size * 10 + 1), ten),
    )
    assert_refused("reduce_scatter", lambda: dist.reduce_scatter_tensor(torch.empty(11), torch.ones(size * 10)))
    assert_refused("all_gather", lambda: dist.all_gather([torch.empty(10)] * (size + 1), ten))
    wrong_own = [torch.empty(11 if r == rank else 10) for r in range(size)]
    assert_refused("all_gather", lambda: dist.all_gather(wrong_own, ten))
    assert_refused("reduce_scatter", lambda: dist.reduce_scatter(ten, [torch.ones(10)] * (size + 1)))
    wrong_part = [torch.ones(11 if r == rank else 10) for r in range(size)]
    assert_refused("reduce_scatter", lambda: dist.reduce_scatter(torch.empty(10), wrong_part))
    assert_refused("all_to_all", lambda: dist.all_to_all([torch.empty(1)] * (size + 1), [torch.ones(1)] * size))
    assert_group_still_works(rank, size)


def splits_that_do_not_add_up_are_refused(rank: int, size: int) -> None:
    whole, output = torch.ones(size * 4), torch.empty(size * 4)
    even = [4] * size
    too_much = [4] * (size - 1) + [5]
    assert_refused("(?i)split", lambda: dist.all_to_all_single(output, whole, even, too_much))
    assert_refused("(?i)split", lambda: dist.all_to_all_single(output, whole, too_much, even))
    assert_refused("(?i)split", lambda: dist.all_to_all_single(output, whole, even + [0], even))
    if size > 1:
        negative = [-4, 12] + [4] * (size - 2)
        assert_refused("(?i)split", lambda: dist.all_to_all_single(output, whole, even, negative))
        # From three ranks on, this sum overflows 64 bits to the expected value.
        wraps = [2**63 - 1, 2**63 - 1] + [0] * (size - 3) + [2 + size * 4][: size - 2]
        for splits in (wraps, even), (even, wraps):
            assert_refused("(?i)split", lambda splits=splits: dist.all_to_all_single(output, whole, *splits))
        odd = torch.ones(size * 4 + 1)
        assert_refused("all_to_all", lambda: dist.all_to_all_single(torch.empty_like(odd), odd))
    assert_group_still_works(rank, size)


def mixed_dtypes_are_refused(rank: int, size: int) -> None:
    ints, floats = torch.ones(10, dtype=torch.int64), torch.ones(10)
    many = torch.ones(size * 10, dtype=torch.int64)
    # torch itself refuses some of these before they reach a backend, with exceptions of its own.
    for call in [
        lambda: dist.all_gather([torch.empty(10) for _ in range(size)], ints),
        lambda: dist.all_gather_into_tensor(many, floats),
        lambda: dist.reduce_scatter_tensor(floats, many),
        lambda: dist.all_to_all_single(torch.empty(size * 10), many),
    ]:
        with pytest.raises((ValueError, RuntimeError), match="(?i)type"):
            call()
    assert_group_still_works(rank, size)


def ranks_outside_the_group_are_refused(rank: int, size: int) -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    tensor = torch.ones(4)
    for call in [
        lambda: dist.broadcast(tensor, src=size),
        lambda: dist.broadcast(tensor, group_src=-1),
        lambda: dist.reduce(tensor, dst=size),
        lambda: dist.send(tensor, dst=size),
        lambda: dist.recv(tensor, src=size),
    ]:
        with pytest.raises((ValueError, RuntimeError)):
            call()
    options = dist.BroadcastOptions()
    options.rootRank = size
    assert_refused(rf"broadcast.*got {size}\b", lambda: backend.broadcast([tensor], options))
    assert_refused(rf"send.*got {size}\b", lambda: backend.send([tensor], size, 0))
    assert_refused("recv", lambda: backend.recv([tensor], -7, 0))
    assert_refused("(?i)tag", lambda: backend.send([tensor], (rank + 1) % size, -1))
    assert_group_still_works(rank, size)


def sending_to_oneself_is_refused(rank: int, size: int) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        dist.send(torch.ones(1), dst=rank)
    assert_group_still_works(rank, size)


def tensors_without_memory_are_refused(rank: int, size: int) -> None:
    # dist.* finds no backend for "meta"; the backend itself must not read a null pointer either.
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert_refused("(?i)meta", lambda: backend.allreduce([torch.empty(4, device="meta")], dist.AllreduceOptions()))
    sparse = torch.eye(3).to_sparse()
    assert_refused("(?i)sparse", lambda: backend.broadcast([sparse], dist.BroadcastOptions()))
    mesh = DeviceMesh("cpu", list(range(size)))
    for tensor in (*without_memory(), DTensor.from_local(torch.ones(4), mesh)):
        for call in (
            lambda tensor=tensor: backend.allreduce([tensor], dist.AllreduceOptions()),
            lambda tensor=tensor: backend.send([tensor], (rank + 1) % size, 0),
            lambda tensor=tensor: backend.recv([tensor], (rank + 1) % size, 0),
            lambda tensor=tensor: backend._window_register(tensor),
        ):
            assert_refused(
                r"`tensor`: expected a tensor with memory of its own \(of a DTensor pass `to_local\(\)`\)", call
            )
    strided = torch.ones(1000, 2)[:, 0]
    strided.untyped_storage().resize_(7992)
    assert_refused("memory of its own", lambda: backend.allreduce([strided], dist.AllreduceOptions()))
    assert_group_still_works(rank, size)


def tensors_elsewhere_are_refused(rank: int, size: int) -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for device in ("meta", *(["cuda"] if torch.cuda.is_available() else [])):
        tensor = torch.empty(4, device=device)
        assert_refused('"cpu:ncclx_rs,cuda:nccl"', lambda tensor=tensor: backend.allreduce([tensor]))
    if torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="cuda"):  # PyTorch's: the group serves the CPU
            dist.all_reduce(torch.empty(4, device="cuda"))
    assert_group_still_works(rank, size)


def overlapping_outputs_are_refused(rank: int, size: int) -> None:
    assert_refused("all_reduce", lambda: dist.all_reduce(torch.ones(1).expand(5)))
    assert_group_still_works(rank, size)


CHECKS = [
    outputs_of_wrong_sizes_are_refused,
    splits_that_do_not_add_up_are_refused,
    mixed_dtypes_are_refused,
    ranks_outside_the_group_are_refused,
    tensors_without_memory_are_refused,
    tensors_elsewhere_are_refused,
    overlapping_outputs_are_refused,
]


@pytest.mark.worlds(sizes=(2, 3))
@pytest.mark.parametrize("check", [*CHECKS, sending_to_oneself_is_refused], ids=lambda check: check.__name__)
def test_misuse(world: World, check) -> None:
    world.run(check)


@pytest.mark.worlds(sizes=(1,))
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_misuse_alone(world: World, check) -> None:
    world.run(check)
