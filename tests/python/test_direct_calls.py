"""Blocking calls of the object API that go straight into the engine: which do, what they give, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, World
from ncclx_rs import ReduceOp, TorchComm
from test_object_api import communicator

pytestmark = [
    pytest.mark.worlds(sizes=(2,), modes=("shm",)),
    pytest.mark.skipif(BACKEND != "ncclx_rs", reason="only ncclx_rs has such calls"),
]


class Watched:
    """The direct calls of a communicator, which note what they return."""

    def __init__(self, comm: TorchComm) -> None:
        self.went: list[tuple[str, bool]] = []
        comm._impl._direct = {name: self._noting(name, call) for name, call in comm._impl._direct.items()}

    def _noting(self, name: str, call: Callable[..., bool]) -> Callable[..., bool]:
        def noting(*args: Any) -> bool:
            done = call(*args)
            self.went.append((name, done))
            return done

        return noting


def plain_calls_go_straight_to_the_engine(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        watched = Watched(comm)
        other = 1 - rank
        mine, all_of = torch.full((4,), rank + 1.0), torch.zeros(8)
        comm.all_reduce(mine)
        assert mine.tolist() == [3.0] * 4
        comm.all_reduce(mine, ReduceOp.MAX)
        comm.reduce(mine, 1, ReduceOp.PRODUCT)
        assert rank == 0 or mine.tolist() == [9.0] * 4
        comm.broadcast(mine, 1)
        assert mine.tolist() == [9.0] * 4
        comm.all_gather_single(all_of, torch.full((4,), float(rank)))
        assert all_of.tolist() == [0.0] * 4 + [1.0] * 4
        comm.reduce_scatter_single(mine, all_of, ReduceOp.AVG)
        assert mine.tolist() == [float(rank)] * 4
        comm.all_to_all_single(all_of, torch.arange(8.0) + 8 * rank)
        first = 4.0 * rank
        assert all_of.tolist() == [*torch.arange(first, first + 4), *torch.arange(first + 8, first + 12)]
        comm.barrier()
        for sender in range(size):
            comm.send(mine, other) if rank == sender else comm.recv(mine, other)
        assert mine.tolist() == [0.0] * 4, "rank 1 has rank 0's, which came back"
        names = ["all_reduce", "all_reduce", "reduce", "broadcast", "all_gather_single", "reduce_scatter_single"]
        names += ["all_to_all_single", "barrier", *(["send", "recv"] if rank == 0 else ["recv", "send"])]
        assert watched.went == [(name, True) for name in names]


def what_others_look_at_takes_a_work(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        watched = Watched(comm)
        tensor = torch.ones(2, 3)
        numbers = torch.arange(8.0)
        comm.all_reduce(tensor, async_op=True).wait()
        comm.all_reduce(tensor, timeout=timedelta(seconds=30))
        comm.all_reduce(tensor, ReduceOp.PREMUL_SUM(0.125))
        assert tensor.eq(1.0).all()
        # An input that lies in its output.
        comm.all_gather_single(numbers, numbers[4 * rank : 4 * rank + 4])
        assert numbers.tolist() == [*range(8)]
        with torch.profiler.profile() as profile:
            comm.all_reduce(tensor)
        assert "ncclx_rs:all_reduce" in {event.name for event in profile.events()}
        assert not any(done for _, done in watched.went)
        before, calls = len(watched.went), []
        hook = comm.register_pre_hook(lambda *args: calls.append(args))
        comm.all_reduce(tensor)
        hook.remove()
        assert len(calls) == 1 and len(watched.went) == before
        comm.all_reduce(tensor)
        assert watched.went[-1] == ("all_reduce", True), "without the hook it goes straight again"


def errors_are_those_of_every_call(rank: int, size: int) -> None:
    mistakes: list[Callable[[TorchComm], object]] = [
        lambda comm: comm.all_reduce(torch.ones(2, 3).t()),
        lambda comm: comm.all_reduce("a tensor"),
        lambda comm: comm.all_reduce(torch.ones(2, dtype=torch.float8_e5m2)),
        lambda comm: comm.broadcast(torch.ones(2), 2),
        lambda comm: comm.send(torch.ones(2), -1),
        lambda comm: comm.all_gather_single(torch.ones(3), torch.ones(2)),
        lambda comm: comm.reduce_scatter_single(torch.ones(2), torch.ones(4, dtype=torch.int32)),
        lambda comm: comm.all_to_all_single(torch.ones(3), torch.ones(3)),
        lambda comm: comm.all_reduce(torch.ones(2 + rank)),
    ]
    texts: list[list[str]] = []
    for is_direct in (True, False):
        with communicator(rank, size) as comm:
            if not is_direct:
                comm._impl._direct = {}
            texts.append([])
            for mistake in mistakes:
                with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
                    mistake(comm)
                texts[-1].append(f"{type(caught.value).__name__}: {caught.value}".splitlines()[0])
            comm.barrier()  # it works on
            assert not comm.is_aborted()
    # Which rank finds a disagreement first is left to chance.
    assert "disagree" in texts[0].pop() and "disagree" in texts[1].pop()
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "check",
    [plain_calls_go_straight_to_the_engine, what_others_look_at_takes_a_work, errors_are_those_of_every_call],
    ids=lambda check: check.__name__,
)
def test_direct_calls(world: World, check) -> None:
    world.run(check)


def least_times(calls: dict[str, Callable[[], object]], rounds: int = 100, length: int = 200) -> dict[str, float]:
    """The time of each in its best round; they take turns."""
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            for _ in range(length):
                call()
            least[name] = min(least[name], time.perf_counter() - began)
    return least


def a_call_costs_half_of_torch_distributeds(rank: int, size: int) -> None:
    tensor = torch.ones(1)
    with communicator(rank, size) as comm:
        calls = {"ours": lambda: comm.all_reduce(tensor), "theirs": lambda: dist.all_reduce(tensor)}
        least = least_times(calls)
    ratio = least["ours"] / least["theirs"]
    assert ratio < 0.5, f"all_reduce of the object API takes {ratio:.2f} of dist.all_reduce's time"


@pytest.mark.alone
@pytest.mark.worlds(sizes=(1,), modes=("shm",))
def test_the_cost_of_a_call(fresh_world: World) -> None:
    fresh_world.run(a_call_costs_half_of_torch_distributeds)
