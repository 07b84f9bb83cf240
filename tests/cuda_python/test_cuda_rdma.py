"""Transports of CUDA tensors: UCX reads and writes the device's memory, and other wires refuse it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import NoReturn

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from conftest import begin
from harness import World, fresh_store
from ncclx_rs import RdmaMemory, RdmaTransport
from test_cuda_windows import comm_of, pool_of
from test_rdma import buffers, over_ucx, to_all

BYTES = 3_000_001
# Shorter and longer than what travels beside UCX where all memory is the host's.
LENGTHS = (0, 1, 5000, 16_384, 70_001, BYTES)
GUARD = 254
PLACES = [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")]


def pattern(number: int) -> torch.Tensor:
    """Bytes of the host, none of them the guards'."""
    return ((torch.arange(BYTES) * 31 + number * 7) % 251).to(torch.uint8)


def on(device: str, content: torch.Tensor) -> torch.Tensor:
    """The content in the memory of a device, of which no stream has anything left to do."""
    tensor = content.to(device, copy=True)
    torch.cuda.synchronize()
    return tensor


def parts() -> list[tuple[int, int]]:
    """Where parts begin, and their lengths."""
    return [(offset, length) for length in LENGTHS for offset in sorted({0, min(3, BYTES - length), BYTES - length})]


@pytest.fixture(scope="module", params=["posix,cma,cuda_copy", "posix,cma,cuda_copy,cuda_ipc"])
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    """Two ranks with a device each."""
    world = World(2, "ucx", through(request.param), begin)
    yield world
    world.close()


def through(ways: str) -> dict[str, str]:
    return {"UCX_TLS": ways, "SOFTCUDA_DEVICES": "2", "SOFTCUDA_DELAY_US": "100", "SOFTCUDA_WEAK": "1"}


def bytes_are_read(rank: int, size: int, here: str, there: str) -> None:
    other = 1 - rank
    transport = to_all(rank, size, over_ucx())[other]
    assert transport.wire == "ucx"
    memory = RdmaMemory(on(there, pattern(rank)))
    remote = buffers(memory, size)[other]
    for offset, length in parts():
        local = on(here, torch.full((length + 2,), GUARD, dtype=torch.uint8))
        into = RdmaMemory(local)
        transport.read(into.to_mutable_view(1, length), remote.to_view(offset, length))
        got = local.cpu()
        assert torch.equal(got[1:-1], pattern(other)[offset : offset + length]), f"{length} bytes at {offset}"
        assert got[0] == got[-1] == GUARD
    dist.barrier()


def bytes_are_written(rank: int, size: int, here: str, there: str) -> None:
    other = 1 - rank
    transport = to_all(rank, size, over_ucx())[other]
    exposed, model = on(there, pattern(rank)), pattern(rank)
    memory = RdmaMemory(exposed)
    remote = buffers(memory, size)[other]
    for turn, (offset, length) in enumerate(parts(), 1):
        source = RdmaMemory(on(here, pattern(10 * turn + rank)))
        transport.write(source.to_view(BYTES - length, length), remote.to_view(offset, length))
        dist.barrier()
        model[offset : offset + length] = pattern(10 * turn + other)[BYTES - length :]
        assert torch.equal(exposed.cpu(), model), f"{length} bytes at {offset}"
        dist.barrier()  # the next ones are written


def memory_of_a_pool_moves(rank: int, size: int) -> None:
    comm = comm_of(rank, size)
    with torch.cuda.use_mem_pool(pool_of(comm)):
        exposed, local = (torch.zeros(BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    exposed.copy_(pattern(rank))
    torch.cuda.synchronize()
    transport = to_all(rank, size, over_ucx())[1 - rank]
    memory, into = RdmaMemory(exposed), RdmaMemory(local)
    transport.read(into.to_mutable_view(), buffers(memory, size)[1 - rank])
    assert torch.equal(local.cpu(), pattern(1 - rank))
    dist.barrier()
    comm.finalize()


def the_engine_opens_ucx(rank: int, size: int) -> None:
    place = {"store": fresh_store(), "rank": rank, "size": size}
    comm = ncclx_rs.new_comm("ncclx", "cpu", abort_process_on_timeout_or_error=False, **place)
    tensor = torch.full((10,), rank)
    if rank == 0:
        time.sleep(0.3)  # the other rank has begun to receive
        work = comm.send(tensor, 1, async_op=True)
    else:
        work = comm.recv(tensor, 0, async_op=True)
    time.sleep(1)  # nobody but the engines' threads goes on
    work.wait()
    assert tensor.eq(0).all()
    comm.finalize()


def batches_mix_memories(rank: int, size: int) -> None:
    other = 1 - rank
    transport = to_all(rank, size, over_ucx())[other]
    exposed = [on(device, pattern(rank)) for device in ("cuda", "cpu")]
    memories = [RdmaMemory(tensor) for tensor in exposed]
    remotes = [buffers(memory, size)[other] for memory in memories]
    local = [on(device, torch.zeros(BYTES, dtype=torch.uint8)) for _, device in PLACES]
    into = [RdmaMemory(tensor) for tensor in local]
    cuts = [(number * 1000, 900) for number in range(100)] + [(200_000, 1_000_000)]
    spans = [
        (memory.to_mutable_view(*cut), remote.to_view(*cut)) for memory in into for remote in remotes for cut in cuts
    ]
    transport.read_batch(spans).wait()
    for tensor in local:
        got = tensor.cpu()
        assert all(torch.equal(got[at : at + len_], pattern(other)[at : at + len_]) for at, len_ in cuts)
    dist.barrier()


def keys_end(rank: int, size: int) -> None:
    other = 1 - rank
    transport = to_all(rank, size, over_ucx())[other]
    memory, into = RdmaMemory(on("cuda", pattern(rank))), RdmaMemory(on("cpu", pattern(rank)))
    remote = buffers(memory, size)[other]
    transport.read(into.to_mutable_view(), remote)
    dist.barrier()
    memory.deregister()
    dist.barrier()
    for length in (10, BYTES):
        for call in (transport.read, transport.write):
            with pytest.raises(RuntimeError, match="refused .*: the memory is not registered with this key"):
                call(into.to_mutable_view(0, length), remote)
    with pytest.raises(ValueError, match="deregistered"):
        memory.to_view()
    assert transport.connected()
    dist.barrier()


def other_wires_refuse(rank: int, size: int, wire: str) -> None:
    other = 1 - rank
    transport = to_all(rank, size, {"transport": wire})[other]
    on_device, on_host = RdmaMemory(on("cuda", pattern(rank))), RdmaMemory(on("cpu", pattern(rank)))
    far = [buffers(memory, size)[other] for memory in (on_device, on_host)]
    for length in (10, BYTES):
        for call in (transport.read, transport.write):
            with pytest.raises(ValueError, match=r"expected memory of the CPU, or a transport through UCX .*, got mem"):
                call(on_device.to_mutable_view(0, length), far[1])
            with pytest.raises(RuntimeError, match="the memory is a CUDA device's, which only UCX reaches"):
                call(on_host.to_mutable_view(0, length), far[0])
    transport.read(on_host.to_mutable_view(), far[1])
    dist.barrier()


def ucx_without_cuda_refuses(rank: int, size: int) -> None:
    other = 1 - rank
    transport = to_all(rank, size, over_ucx())[other]
    on_device, on_host = RdmaMemory(on("cuda", pattern(rank))), RdmaMemory(on("cpu", pattern(rank)))
    far = [buffers(memory, size)[other] for memory in (on_device, on_host)]
    for length in (10, BYTES):
        for call in (transport.read, transport.write):
            with pytest.raises(OSError, match="UCX cannot register .*reaches no memory of CUDA devices"):
                call(on_device.to_mutable_view(0, length), far[1])
            with pytest.raises(RuntimeError, match="refused .*reaches no memory of CUDA devices"):
                call(on_host.to_mutable_view(0, length), far[0])
    transport.read(on_host.to_mutable_view(), far[1])
    dist.barrier()


def a_peer_that_dies_is_named(rank: int, size: int) -> None:
    transport = to_all(rank, size, over_ucx())[1 - rank]
    memory, into = RdmaMemory(on("cuda", pattern(rank))), RdmaMemory(on("cuda", pattern(rank)))
    remote = buffers(memory, size)[1 - rank]
    if rank == 1:
        transport.read(into.to_mutable_view(), remote)
        os._exit(9)
    with pytest.raises(RuntimeError, match="the connection to .* ended before|is not connected"):
        until_it_ends(transport, into, remote)
    assert not transport.connected()


def until_it_ends(transport: RdmaTransport, into: RdmaMemory, remote: object) -> NoReturn:
    while True:
        transport.read(into.to_mutable_view(), remote)  # type: ignore[arg-type]


@pytest.mark.parametrize(("here", "there"), PLACES)
def test_bytes_are_read(ranks: World, here: str, there: str) -> None:
    ranks.run(bytes_are_read, here, there)


@pytest.mark.parametrize(("here", "there"), PLACES)
def test_bytes_are_written(ranks: World, here: str, there: str) -> None:
    ranks.run(bytes_are_written, here, there)


def test_the_engines_thread_that_opens_ucx_calls_no_driver(ranks: World) -> None:
    ranks.run(the_engine_opens_ucx)


def test_memory_of_a_pool_moves(ranks: World) -> None:
    ranks.run(memory_of_a_pool_moves)


def test_batches_mix_memories(ranks: World) -> None:
    ranks.run(batches_mix_memories)


def test_keys_end(ranks: World) -> None:
    ranks.run(keys_end)


@pytest.mark.parametrize("wire", ["shm", "tcp"])
def test_other_wires_refuse(ranks: World, wire: str) -> None:
    ranks.run(other_wires_refuse, wire)


def test_a_peer_that_dies_is_named() -> None:
    world = World(2, "ucx", through("posix,cma,cuda_copy"), begin)
    world.run(a_peer_that_dies_is_named, dies=[1])


def test_ucx_without_cuda_refuses() -> None:
    world = World(2, "ucx", through("posix,cma"), begin)
    try:
        world.run(ucx_without_cuda_refuses)
    finally:
        world.close()
