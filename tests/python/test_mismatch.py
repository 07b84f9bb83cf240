"""Ranks that disagree about an operation: every rank's error has the other ranks' calls, and the group stays usable."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from harness import World, leaving_together
from reference import assert_same, data, reduced

F32, I32 = torch.float32, torch.int32


def call(name: str, size: int, count: int = 10, dtype: torch.dtype = F32, op: str = "SUM", root: int = 0) -> None:
    """Runs one collective, which plain data describes."""
    tensor = torch.ones(count, dtype=dtype)
    if name == "all_reduce":
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    elif name == "reduce":
        dist.reduce(tensor, dst=root, op=getattr(dist.ReduceOp, op))
    elif name == "broadcast":
        dist.broadcast(tensor, src=root)
    elif name == "all_gather":
        dist.all_gather_into_tensor(torch.empty(count * size, dtype=dtype), tensor)
    elif name == "reduce_scatter":
        dist.reduce_scatter_tensor(torch.empty(count, dtype=dtype), torch.ones(count * size, dtype=dtype))
    elif name == "all_to_all":
        dist.all_to_all_single(torch.empty(count * size, dtype=dtype), torch.ones(count * size, dtype=dtype))
    else:
        assert name == "barrier", name
        dist.barrier()


Call = tuple[str, dict[str, object]]
# Counts of 7 and 1000, of one rank's part or of the whole on 2 to 4 ranks.
WHOLE = ["(7|14|21|28)", "[1-4]000"]
# The call of the last rank, the call of the others, and the patterns that the message on every rank must match.
CASES: dict[str, tuple[Call, Call, list[str]]] = {
    "all_reduce_counts": (("all_reduce", {"count": 10}), ("all_reduce", {"count": 20}), ["all_reduce", "10", "20"]),
    "large_counts": (
        ("all_reduce", {"count": 300_000}),
        ("all_reduce", {"count": 300_001}),
        ["all_reduce", "300000", "300001"],
    ),
    "small_against_large": (
        ("all_reduce", {"count": 4}),
        ("all_reduce", {"count": 1_000_000}),
        ["all_reduce", "4", "1000000"],
    ),
    "nothing_against_something": (("all_reduce", {"count": 0}), ("all_reduce", {"count": 7}), ["all_reduce", "0", "7"]),
    "broadcast_counts": (("broadcast", {"count": 10}), ("broadcast", {"count": 20}), ["broadcast", "10", "20"]),
    "all_gather_counts": (("all_gather", {"count": 7}), ("all_gather", {"count": 1000}), ["all_gather", *WHOLE]),
    "reduce_scatter_counts": (
        ("reduce_scatter", {"count": 7}),
        ("reduce_scatter", {"count": 1000}),
        ["reduce_scatter", *WHOLE],
    ),
    "collectives": (("all_reduce", {}), ("broadcast", {}), ["all_reduce", "broadcast"]),
    "collective_against_barrier": (("barrier", {}), ("all_gather", {}), ["barrier", "all_gather"]),
    "large_against_barrier": (("barrier", {}), ("all_to_all", {"count": 200_000}), ["barrier", "all_to_all"]),
    "reduce_operations": (("all_reduce", {"op": "SUM"}), ("all_reduce", {"op": "MAX"}), ["all_reduce", "SUM", "MAX"]),
    "dtypes_of_one_size": (
        ("all_reduce", {"dtype": F32}),
        ("all_reduce", {"dtype": I32}),
        ["all_reduce", "float32", "int32"],
    ),
    "dtypes_of_other_sizes": (
        ("broadcast", {"dtype": torch.float64, "count": 5}),
        ("broadcast", {"dtype": F32}),
        ["broadcast", "float64", "float32"],
    ),
    "roots_of_broadcasts": (("broadcast", {"root": 0}), ("broadcast", {"root": 1}), ["broadcast", "root"]),
    "roots_of_reductions": (("reduce", {"root": 0}), ("reduce", {"root": 1}), ["reduce", "root"]),
}


@contextlib.contextmanager
def failure_into(texts: list[str]) -> Iterator[None]:
    """Keeps the text of the error, if there is one."""
    try:
        yield
    except dist.DistBackendError as error:
        texts.append(str(error))


def disagreement_is_reported(rank: int, size: int, case: str) -> None:
    odd, usual, words = CASES[case]
    name, arguments = odd if rank == size - 1 else usual
    texts: list[str] = []
    with failure_into(texts):
        call(name, size, **arguments)  # type: ignore[arg-type]
    # A rank whose part was done may hear of it at its next call, which fails on the others, too, if they need it.
    with failure_into(texts):
        dist.barrier()
    assert texts, f"rank {rank} has heard of no disagreement"
    for text in texts:
        missing = [word for word in words if not re.search(rf"(?<![A-Za-z0-9]){word}(?![a-z0-9])", text)]
        assert not missing, f"rank {rank}: the message does not mention {missing}: {text}"
    tensor = data(rank, 1000)
    dist.all_reduce(tensor)
    assert_same(tensor, reduced([data(r, 1000) for r in range(size)]), "all_reduce after the disagreement")


def every_disagreement_is_reported_in_one_group(rank: int, size: int) -> None:
    for case in CASES:
        disagreement_is_reported(rank, size, case)


def async_disagreement_surfaces_in_wait(rank: int, size: int) -> None:
    work = dist.all_reduce(torch.ones(10 + (rank == 0)), async_op=True)
    with pytest.raises(dist.DistBackendError, match="all_reduce"):
        work.wait()
    assert work.is_completed() and not work.is_success()
    dist.barrier()


def message_longer_than_the_receive_is_an_error(rank: int, size: int) -> None:
    with leaving_together():
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match=r"(?s)recv(?=.*\b(10|40)\b)(?=.*\b(20|80)\b)"):
                dist.recv(torch.empty(10), src=1)
        elif rank == 1:
            # Only the receiver is sure to notice; the sender's bytes may have left before.
            with contextlib.suppress(dist.DistBackendError):
                dist.send(torch.ones(20), dst=0)


@pytest.mark.worlds(sizes=(2,))
@pytest.mark.parametrize("case", CASES)
def test_disagreement_is_reported(fresh_world: World, case: str) -> None:
    fresh_world.run(disagreement_is_reported, case)


@pytest.mark.worlds(sizes=(3, 4))
def test_every_disagreement_is_reported_in_one_group(fresh_world: World) -> None:
    fresh_world.run(every_disagreement_is_reported_in_one_group)


@pytest.mark.worlds(sizes=(2, 3))
@pytest.mark.parametrize("check", [async_disagreement_surfaces_in_wait], ids=lambda check: check.__name__)
def test_disagreement(fresh_world: World, check) -> None:
    fresh_world.run(check)


@pytest.mark.worlds(sizes=(2, 3))
def test_message_longer_than_the_receive_is_an_error(fresh_world: World) -> None:
    fresh_world.run(message_longer_than_the_receive_is_an_error)
