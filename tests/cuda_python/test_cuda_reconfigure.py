"""Process groups whose members change, with CUDA tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import World
from reference import assert_same
from test_reconfigure import begin, handles

pytestmark = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="this PyTorch cannot reconfigure process groups"
)


def assert_sum(size: int) -> None:
    tensor = torch.ones(1000, device="cuda")
    dist.all_reduce(tensor)
    assert_same(tensor.cpu(), torch.full((1000,), float(size)), f"the sum of {size} ranks")


def one_has_used_its_device(rank: int, size: int) -> None:
    everyone = handles(begin(rank, size), rank, size)
    if rank == 0:
        dist._reconfigure(1, [everyone[0]]).wait()
        assert_sum(1)
        dist.barrier()
    dist._reconfigure(2, everyone).wait()
    dist.barrier()  # on the host: these members have not used the device together
    assert_sum(size)
    dist.barrier()


def test_a_barrier_is_the_same_on_all_members_where_one_has_used_its_device(cuda_world: World) -> None:
    cuda_world.run(one_has_used_its_device, join=False)
