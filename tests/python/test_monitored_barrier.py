"""The monitored barrier: rank 0 names missing ranks, or a lost one. A late call does not count for the next barrier."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, World, fresh_store, leaving_together, meet

SHORT, PATIENT = timedelta(seconds=1), timedelta(seconds=60)


def all_pass(rank: int, size: int) -> None:
    with leaving_together():
        for wait_all_ranks in (False, True, False):
            dist.monitored_barrier(timeout=PATIENT, wait_all_ranks=wait_all_ranks)


def the_limit_is_rank_0s_alone(rank: int, size: int) -> None:
    with leaving_together():
        dist.monitored_barrier(timeout=PATIENT)
        if rank == 0:
            time.sleep(2 * SHORT.total_seconds())
        dist.monitored_barrier(timeout=SHORT)


def late_ranks_have_not_come_to_the_next(rank: int, size: int) -> None:
    store, late = fresh_store(), size - 1
    store.set_timeout(PATIENT)
    told = f"Rank {rank} successfully reached .*: rank 0 says that the barrier failed"
    said = rf"\[Rank 0\]: Ranks {late} failed to pass monitoredBarrier in 1000 ms"

    def others_fail() -> None:
        with pytest.raises(dist.DistBackendError, match=said if rank == 0 else told):
            dist.monitored_barrier(timeout=SHORT, wait_all_ranks=True)

    with leaving_together():
        dist.monitored_barrier(timeout=PATIENT)
        for turn in ("first", "second"):
            # Each time, the late rank's report arrives after the other ranks have given up, and before they try again.
            if rank != late:
                others_fail()
                store.set(f"{turn} {rank}", "failed")
                store.wait([f"{turn} {late}"])
            else:
                store.wait([f"{turn} {other}" for other in range(size) if other != late])
                with pytest.raises(dist.DistBackendError, match=told):
                    dist.monitored_barrier(timeout=SHORT)
                store.set(turn + f" {late}", "failed")
        dist.monitored_barrier(timeout=PATIENT)


def a_barrier_without_a_limit_takes_the_groups(rank: int, size: int) -> None:
    from ncclx_rs import Options

    configured = dist.new_group(pg_options=Options(hints={"timeout_seconds": "5"}))  # in which it is made, too
    changed = dist.new_group()
    changed._get_backend(torch.device("cpu"))._set_default_timeout(SHORT)
    with leaving_together():
        for group, limit in ((configured, 5000), (changed, 1000)):
            if rank == 0:
                with pytest.raises(dist.DistBackendError, match=f"failed to pass monitoredBarrier in {limit} ms"):
                    dist.monitored_barrier(group)


def a_lost_rank_is_to_blame_and_not_one_that_may_yet_come(rank: int, size: int, wait_all_ranks: bool) -> None:
    dist.barrier()
    meet()
    if rank == 2:
        time.sleep(0.5)  # rank 0 waits by then
        os._exit(7)
    with leaving_together(range(2)):
        if rank == 0:
            lost = r"\[Rank 0\]: monitoredBarrier failed: .*rank 2 is lost"
            with pytest.raises(dist.DistBackendError, match=lost) as raised:
                dist.monitored_barrier(timeout=PATIENT, wait_all_ranks=wait_all_ranks)
            assert "failed to pass" not in str(raised.value)


@pytest.mark.worlds(sizes=(1, 2, 3))
def test_all_pass(world: World) -> None:
    world.run(all_pass)


@pytest.mark.worlds(sizes=(3,), modes=("shm",))
def test_the_limit_is_rank_0s_alone(world: World) -> None:
    world.run(the_limit_is_rank_0s_alone)


@pytest.mark.worlds(sizes=(2, 3), modes=("shm", "tcp"))
def test_late_ranks_have_not_come_to_the_next(fresh_world: World) -> None:
    fresh_world.run(late_ranks_have_not_come_to_the_next)


@pytest.mark.skipif(BACKEND != "ncclx_rs", reason="gloo takes PyTorch's default")
@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_a_barrier_without_a_limit_takes_the_groups(fresh_world: World) -> None:
    fresh_world.run(a_barrier_without_a_limit_takes_the_groups)


@pytest.mark.skipif(BACKEND != "ncclx_rs", reason="gloo waits for the other ranks first")
@pytest.mark.parametrize("wait_all_ranks", [False, True])
@pytest.mark.worlds(sizes=(3,), modes=("shm", "tcp"))
def test_a_lost_rank_is_to_blame_and_not_one_that_may_yet_come(fresh_world: World, wait_all_ranks: bool) -> None:
    fresh_world.run(a_lost_rank_is_to_blame_and_not_one_that_may_yet_come, wait_all_ranks, dies={2})
