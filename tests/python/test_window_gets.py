"""Gets of windows: right by every path, and the window says which path they take."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import UCX_WAYS, World, stop
from test_object_api import communicator

pytestmark = pytest.mark.worlds(sizes=(1, 2, 3))

# Of several pieces of UCX's reads, the last of them short.
BYTES = (3 << 20) + 5
LENGTHS = (0, 1, 7, 4095, 65_537, 1 << 18, (1 << 18) + 1, 1_048_579, BYTES)
GUARD = 254
COUNT = 100_003


def pattern(rank: int) -> torch.Tensor:
    """What a rank exposes; no byte is the guards'."""
    return ((torch.arange(BYTES) * 31 + rank * 7) % 251).to(torch.uint8)


def backend() -> Any:
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def gets_bring_what_is_there(rank: int, size: int) -> None:
    window = backend()._window_register(pattern(rank))
    for source in range(size):
        there, works = pattern(source), []
        for length in LENGTHS:
            for offset in {0, min(1, BYTES - length), min(4099, BYTES - length), BYTES - length}:
                for async_op in (False, True):
                    got = torch.full((length + 2,), GUARD, dtype=torch.uint8)
                    work = backend()._window_get(window, got[1:-1], source, offset, async_op)
                    works.append((work, got, there[offset : offset + length]))
        for work, got, expected in works:
            work.wait()
            assert torch.equal(got[1:-1], expected), f"{len(expected)} bytes of rank {source}"
            assert got[0] == got[-1] == GUARD
    backend()._window_deregister(window)


def gets_see_what_was_put(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    memory = torch.zeros(size * COUNT)
    window, at = backend()._window_register(memory), rank * COUNT * memory.element_size()
    for turn in range(1, 6):
        value, got = torch.full((COUNT,), float(rank * 10 + turn)), torch.zeros(COUNT)
        backend()._window_put(window, value, after, at)
        if turn % 2:
            backend()._window_flush(window, after)
        backend()._window_get(window, got, after, at)
        assert torch.equal(got, value), "a rank sees what it has put"
        backend()._window_signal(window, after)
        backend()._window_wait_signal(window, before)
        assert torch.equal(memory[before * COUNT :][:COUNT], torch.full((COUNT,), float(before * 10 + turn)))
        dist.barrier()
        for other in range(size):
            writer = (other - 1) % size
            backend()._window_get(window, got, other, writer * COUNT * memory.element_size())
            assert torch.equal(got, torch.full((COUNT,), float(writer * 10 + turn))), f"the part of rank {other}"
        dist.barrier()  # the next put overwrites it
    backend()._window_deregister(window)


def the_window_tells_the_path(rank: int, size: int, mode: str, reads: bool) -> None:
    with communicator(rank, size) as comm:
        shared = comm.get_mem_allocator().empty(10)
        for memory, is_shared in ((torch.zeros(10), False), (shared, True)):
            window = comm.new_window(memory)
            for other in range(size):
                window.get(torch.empty(10), other, 0, False)  # the first one of a rank travels by messages
            path = "mapped" if is_shared and mode == "shm" else "remote_reads" if reads else "messages"
            expected = ["mapped" if other == rank else path for other in range(size)]
            assert [window.get_attr(other).get_path for other in range(size)] == expected
            with pytest.raises(RuntimeError, match="get_attr: peer_rank must be in range"):
                window.get_attr(size)
            comm.barrier(False)
            window.tensor_deregister()
            for call in (window.get_attr, lambda other, window=window: window.get(torch.empty(1), other, 0, False)):
                with pytest.raises(RuntimeError, match="the window has no tensor"):
                    call(0)
        with pytest.raises(RuntimeError, match="the window has no tensor"):
            comm.new_window().get_attr(rank)


def a_window_that_is_gone_has_no_path(rank: int, size: int) -> None:
    window = backend()._window_register(torch.zeros(4))
    assert backend()._window_get_path(window, rank) == "mapped"
    with pytest.raises(ValueError, match=r"window_get_path: .*rank"):
        backend()._window_get_path(window, size)
    backend()._window_deregister(window)
    for call in (
        lambda: backend()._window_get_path(window, rank),
        lambda: backend()._window_get(window, torch.empty(1), (rank + 1) % size, 0),
    ):
        with pytest.raises(ValueError, match="registered window"):
            call()
    dist.barrier()


def a_stopped_target_is_read_where_the_window_says_so(rank: int, size: int, reads: bool) -> None:
    window = backend()._window_register(pattern(rank))
    processes: list[Any] = [None] * size
    dist.all_gather_object(processes, os.getpid())
    if rank == 0:
        backend()._window_get(window, torch.empty(8, dtype=torch.uint8), 1, 0)
        assert backend()._window_get_path(window, 1) == ("remote_reads" if reads else "messages")
        stop(processes[1])
        try:
            for offset, length in ((0, BYTES), (5, 1), (1_000_001, 100_000), (BYTES - 3, 3)):
                got = torch.full((length,), GUARD, dtype=torch.uint8)
                if reads:
                    backend()._window_get(window, got, 1, offset)
                    assert torch.equal(got, pattern(1)[offset : offset + length])
                else:
                    with pytest.raises(dist.DistBackendError, match="rank 1 did not answer"):
                        backend()._window_get(window, got, 1, offset, False, 100)
        finally:
            os.kill(processes[1], signal.SIGCONT)
        got = torch.empty(BYTES - 7, dtype=torch.uint8)
        backend()._window_get(window, got, 1, 7)
        assert torch.equal(got, pattern(1)[7:])
    dist.barrier()
    backend()._window_deregister(window)


def test_gets_bring_what_is_there(world: World) -> None:
    world.run(gets_bring_what_is_there)


def test_gets_see_what_was_put(world: World) -> None:
    world.run(gets_see_what_was_put)


def test_the_window_tells_the_path(world: World) -> None:
    reads = world.mode == "ucx" and "cma" in UCX_WAYS[world.size]
    world.run(the_window_tells_the_path, world.mode, reads, join=False)


def test_a_window_that_is_gone_has_no_path(world: World) -> None:
    world.run(a_window_that_is_gone_has_no_path)


@pytest.fixture(params=["posix,cma", "tcp"])
def ucx_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Two ranks, through what UCX is allowed."""
    world = World(2, "ucx", {"UCX_TLS": request.param})
    yield world
    world.close()


def test_a_stopped_target_is_read_where_the_window_says_so(ucx_world: World, request: pytest.FixtureRequest) -> None:
    ucx_world.run(a_stopped_target_is_read_where_the_window_says_so, request.node.callspec.params["ucx_world"] != "tcp")


@pytest.mark.parametrize("ucx_world", ["tcp"], indirect=True)
def test_two_ranks_over_ucxs_tcp_get_by_messages(ucx_world: World) -> None:
    ucx_world.run(gets_bring_what_is_there)
    ucx_world.run(gets_see_what_was_put)
    ucx_world.run(the_window_tells_the_path, "ucx", False, join=False)
