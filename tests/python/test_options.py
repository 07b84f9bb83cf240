"""The timeout and options that a program gives a process group, which does not change them."""

from __future__ import annotations

import copy
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import World, fresh_store
from ncclx_rs import Options

pytestmark = pytest.mark.worlds(sizes=(2,), modes=("shm",))

DEFAULT = timedelta(minutes=30)
LONG, LONGER = timedelta(seconds=77), timedelta(seconds=99)


def limit_of(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


def options_stay_the_programs_own(rank: int, size: int) -> None:
    options = Options(LONG, {"eager_bytes": "8"})
    dist.init_process_group("ncclx_rs", store=fresh_store(), rank=rank, world_size=size, pg_options=options)
    groups = [dist.group.WORLD, dist.new_group([1, 0], pg_options=options), dist.new_group([1], pg_options=options)]
    members = [[0, 1], [0, 1], [1]]
    for group, expected in zip(groups, members, strict=True):
        if rank not in expected:
            continue
        backend = group._get_backend(torch.device("cpu"))
        assert list(backend.options.global_ranks_in_group) in (expected, [])  # PyTorch gives none for all ranks
        assert (backend.options._timeout, backend.options.hints) == (LONG, {"eager_bytes": "8"})
        backend._set_default_timeout(LONGER)
    assert (options._timeout, options.hints) == (LONG, {"eager_bytes": "8"})
    assert (list(options.global_ranks_in_group), options.group_name) == ([], "")
    dist.destroy_process_group()


def split_groups_have_options_of_their_own(rank: int, size: int) -> None:
    options = Options(LONG, {"eager_bytes": "8"})
    store = fresh_store()
    dist.init_process_group(
        "ncclx_rs", store=store, rank=rank, world_size=size, device_id=torch.device("cpu:0"), pg_options=options
    )
    part = dist.split_group(split_ranks=[[0], [1]], timeout=LONGER, pg_options=options)
    assert limit_of(part) == LONGER and limit_of(dist.group.WORLD) == LONG
    part._get_backend(torch.device("cpu"))._set_default_timeout(DEFAULT)
    assert options._timeout in (LONG, LONGER)  # up to 2.13 PyTorch itself writes there
    dist.destroy_process_group()


def merged_groups_keep_the_limit(rank: int, size: int) -> None:
    dist.init_process_group("ncclx_rs", timeout=LONG, store=fresh_store(), rank=rank, world_size=size)
    # PyTorch passes its default where it is given no time.
    for timeout, expected in ((DEFAULT, LONG), (LONGER, LONGER)):
        merged = dist.group.WORLD.merge_remote_group(fresh_store(), size, timeout, f"merged for {timeout}")
        assert limit_of(merged) == expected
        merged.shutdown()
    assert limit_of(dist.group.WORLD) == LONG
    dist.destroy_process_group()


def what_is_nearest_to_the_call_limits_it(rank: int, size: int) -> None:
    cases = [
        ({}, None, DEFAULT),
        ({"timeout": LONG}, None, LONG),
        ({}, Options(LONG), LONG),
        ({"timeout": LONG}, Options(), LONG),
        ({"timeout": LONG}, Options(hints={"timeout_seconds": "99"}), LONG),
        ({"timeout": LONG}, Options(LONG), LONG),
        ({"timeout": DEFAULT}, Options(LONG), LONG),  # PyTorch does not tell that from no argument
    ]
    for argument, options, expected in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dist.init_process_group(
                "ncclx_rs", store=fresh_store(), rank=rank, world_size=size, pg_options=options, **argument
            )
        assert limit_of(dist.group.WORLD) == expected, (argument, options)
        dist.destroy_process_group()
    place = {"store": fresh_store(), "rank": rank, "world_size": size}
    with pytest.warns(UserWarning, match="`timeout`, 0:01:17, wins over the timeout in `pg_options`, 0:01:39") as told:
        dist.init_process_group("ncclx_rs", timeout=LONG, pg_options=Options(LONGER), **place)
    assert [warning.filename for warning in told] == [__file__]
    assert limit_of(dist.group.WORLD) == LONG
    dist.destroy_process_group()


def half_an_hour_in_options_is_a_limit(rank: int, size: int) -> None:
    # The environment variable is one second.
    options = copy.deepcopy(Options(DEFAULT))
    store = fresh_store()
    dist.init_process_group("ncclx_rs", store=store, rank=rank, world_size=size, pg_options=options)
    if rank == 1:
        time.sleep(1.5)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "check",
    [
        options_stay_the_programs_own,
        pytest.param(
            split_groups_have_options_of_their_own,
            marks=pytest.mark.skipif(not hasattr(dist, "split_group"), reason="this torch splits no groups"),
        ),
        pytest.param(
            merged_groups_keep_the_limit,
            marks=pytest.mark.skipif(
                not hasattr(dist.ProcessGroup, "merge_remote_group"), reason="this torch merges no groups"
            ),
        ),
        what_is_nearest_to_the_call_limits_it,
    ],
    ids=lambda check: check.__name__,
)
def test_options(world: World, check) -> None:
    world.run(check, join=False)


def test_hints_of_options_change_as_a_whole() -> None:
    options, others = Options(hints={"eager_bytes": "8"}), Options()
    with pytest.raises(TypeError):
        options.hints["spin"] = "off"
    options.hints = {**options.hints, "spin": "off"}
    assert options.hints == {"eager_bytes": "8", "spin": "off"}
    others.hints = options.hints
    for copied in (others, copy.deepcopy(options), Options(hints=options.hints)):
        assert copied.hints == options.hints
    with pytest.raises(TypeError):
        options.hints = {"eager_bytes": 8}


def test_half_an_hour_in_options_is_a_limit() -> None:
    world = World(2, "shm", {"NCCLX_RS_TIMEOUT_SECONDS": "1"})
    try:
        world.run(half_an_hour_in_options_is_a_limit, join=False)
    finally:
        world.close()
