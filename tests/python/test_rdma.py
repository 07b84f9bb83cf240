"""Transports between two processes: bytes arrive, keys protect memory, and what fails is named."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from harness import World, lacking, stop
from ncclx_rs import RdmaFuture, RdmaMemory, RdmaRemoteBuffer, RdmaTransport
from reference import without_memory

WIRES = [{"transport": "shm"}, {"transport": "shm", "single_copy_bytes": "0"}, {"transport": "tcp"}]


def ucx_library() -> Path | None:
    """UCX: the file that ``NCCLX_RS_TEST_UCX`` names, or that of the Python package."""
    if named := os.environ.get("NCCLX_RS_TEST_UCX"):
        return Path(named)
    package = importlib.util.find_spec("libucx")
    return Path(package.origin).parent / "lib/libucp.so.0" if package and package.origin else None


def over_ucx() -> dict[str, str]:
    """The settings of the wire, or a skip."""
    if (library := ucx_library()) is None:
        lacking("UCX: the package libucx-cu12")
    return {"transport": "ucx", "ucx": str(library)}


@pytest.fixture
def hints(request: pytest.FixtureRequest) -> dict[str, str]:
    """The settings of a wire."""
    found: dict[str, str] = request.param
    return over_ucx() if found["transport"] == "ucx" else found


# UCX with all that it finds. What it goes through in particular is tested in tests/engine/rdma, and for failures below.
wires = pytest.mark.parametrize(
    "hints", [*WIRES, {"transport": "ucx"}], ids=["direct", "frames", "tcp", "ucx"], indirect=True
)


@contextmanager
def pair(hints: dict[str, str]) -> Iterator[tuple[RdmaTransport, RdmaTransport]]:
    """Two connected transports of this process."""
    one, other = RdmaTransport("cpu", hints=hints), RdmaTransport(torch.device("cpu"), hints=hints)
    mine, theirs = one.bind(), other.bind()
    assert not one.connected() and one.wire is None
    assert one.connect(theirs) == 0 and other.connect(mine) == 0
    assert one.connected() and other.connected()
    yield one, other
    one.close()
    other.close()
    assert not one.connected()


def to_all(rank: int, size: int, hints: dict[str, str]) -> dict[int, RdmaTransport]:
    """A transport to each of the other ranks."""
    transports = {other: RdmaTransport(hints=hints) for other in range(size) if other != rank}
    bound: list[dict[int, bytes]] = [{} for _ in range(size)]
    dist.all_gather_object(bound, {other: transport.bind() for other, transport in transports.items()})
    for other, transport in transports.items():
        transport.connect(bound[other][rank])
    dist.barrier()
    return transports


def buffers(memory: RdmaMemory, size: int) -> list[RdmaRemoteBuffer]:
    """The buffers of all ranks."""
    found: list[RdmaRemoteBuffer] = [None] * size  # type: ignore[list-item]
    dist.all_gather_object(found, memory.to_remote_buffer())
    return found


def test_a_forked_child_has_keys_and_secrets_of_its_own() -> None:
    def make() -> bytes:
        return RdmaMemory(torch.zeros(1)).to_remote_buffer().access_key.encode() + RdmaTransport().bind()

    make()
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(there, make())
        os._exit(0)
    own, childs = make(), os.read(here, 4096)
    os.waitpid(child, 0)
    secrets = [json.loads(made[32:])["secret"] for made in (own, childs)]
    assert own[:32] != childs[:32] and secrets[0] != secrets[1]


@wires
def test_tensors_are_written_and_read(hints: dict[str, str]) -> None:
    assert RdmaTransport.supported()
    with pair(hints) as (one, other):
        for dtype, count in ((torch.uint8, 1024), (torch.float32, 300_001), (torch.bfloat16, 0)):
            source = torch.arange(count).to(dtype)
            target = torch.zeros_like(source)
            source_memory, target_memory = RdmaMemory(source), RdmaMemory(target)
            assert source_memory.to_view().size() == source.nbytes
            assert one.write(source_memory.to_view(), target_memory.to_remote_buffer()) == 0
            assert torch.equal(source, target)
            target.zero_()
            assert other.read(target_memory.to_mutable_view(), source_memory.to_remote_buffer()) == 0
            assert torch.equal(source, target)


@wires
def test_views_are_parts(hints: dict[str, str]) -> None:
    source, target = torch.arange(1024, dtype=torch.uint8), torch.zeros(1024, dtype=torch.uint8)
    source_memory, target_memory = RdmaMemory(source, cache_reg=True), RdmaMemory(target)
    for view in (source_memory.to_view, source_memory.to_mutable_view):
        assert [view().size(), view(256).size(), view(length=512).size(), view(256, 512).size()] == [
            1024,
            768,
            512,
            512,
        ]
        for part in ((1025, None), (0, 1025), (1000, 25), (-1, 5), (5, -1)):
            with pytest.raises(ValueError, match="expected a part of 1024 bytes"):
                view(*part)
    with pair(hints) as (one, _):
        one.write(source_memory.to_view(256, 512), target_memory.to_remote_buffer().to_view(3))
        assert torch.equal(target[3:515], source[256:768]) and target[515:].count_nonzero() == 0
        target.zero_()
        one.read(target_memory.to_mutable_view(17, 100), source_memory.to_remote_buffer(5, 100))
        assert torch.equal(target[17:117], source[5:105])
        assert target[:17].count_nonzero() == 0 and target[117:].count_nonzero() == 0


@wires
def test_a_remote_buffer_is_pickled_and_cannot_grow(hints: dict[str, str]) -> None:
    target = torch.zeros(1000, dtype=torch.uint8)
    memory, ones = RdmaMemory(target), RdmaMemory(torch.ones(1000, dtype=torch.uint8))
    whole, part = memory.to_remote_buffer(), memory.to_remote_buffer(100, 200)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(part, protocol)) == part != whole
    assert part.access_key not in repr(part)
    assert part.to_view(50, 100).ptr == target.data_ptr() + 150
    for outside in ((0, 201), (201, None), (-1, 1)):
        with pytest.raises(ValueError, match="expected a part of 200 bytes"):
            part.to_view(*outside)
    with pair(hints) as (one, _):
        one.write(ones.to_view(0, 100), pickle.loads(pickle.dumps(part)).to_view(50))
        assert target.nonzero().flatten().tolist() == list(range(150, 250))
        grown = RdmaRemoteBuffer(part.ptr, 300, part.access_key)
        shifted = RdmaRemoteBuffer(part.ptr - 1, 200, part.access_key)
        forged = RdmaRemoteBuffer(part.ptr, 200, f"{int(part.access_key, 16) ^ 1:032x}")
        for buffer, length, reason in ((grown, 300, "not all inside"), (shifted, 1, "not all inside")):
            with pytest.raises(
                RuntimeError, match=rf"write: process {os.getpid()} .*refused {length} bytes at .*{reason}"
            ):
                one.write(ones.to_view(0, length), buffer)
        with pytest.raises(RuntimeError, match=r"read: process .* refused 8 bytes at .*: the memory is not registered"):
            one.read(ones.to_mutable_view(0, 8), forged)
        with pytest.raises(ValueError, match="access_key"):
            one.write(ones.to_view(0, 8), RdmaRemoteBuffer(part.ptr, 8, "a key"))
        memory.deregister()
        with pytest.raises(RuntimeError, match="not registered with this key, or no longer"):
            one.write(ones.to_view(0, 8), part)
        memory = RdmaMemory(target)
        stale = memory.to_remote_buffer()
        del memory
        with pytest.raises(RuntimeError, match="not registered with this key, or no longer"):
            one.read(ones.to_mutable_view(0, 8), stale)
        assert one.connected() and target.count_nonzero() == 100


def test_ucx_is_named_and_a_forked_child_does_without() -> None:
    with pair(over_ucx()) as (one, _):
        assert one.wire == "ucx" and one.devices
        child = os.fork()
        if child == 0:
            try:
                RdmaTransport(hints=over_ucx()).bind()
            except RuntimeError as error:
                os._exit(0 if "this process was forked from one that had used UCX" in str(error) else 2)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(RuntimeError, match="bind: UCX cannot be used: its setting `ucx` is off"):
        RdmaTransport(hints={"transport": "ucx", "ucx": "off"}).bind()
    with pytest.raises(RuntimeError, match="UCX cannot be used: its setting `tls` forbids"):
        RdmaTransport(hints={**over_ucx(), "tls": "on"}).bind()


def test_unknown_hints_are_warned_about() -> None:
    with pytest.warns(UserWarning, match="the hint `transports` is not known and has no effect"):
        RdmaTransport(hints={"transports": "tcp"})


def test_mistakes_are_refused() -> None:
    tensor = torch.zeros(8)
    memory = RdmaMemory(tensor)
    remote, one = memory.to_remote_buffer(), RdmaTransport()
    with pytest.raises(RuntimeError, match="read: the transport is not connected"):
        one.read(memory.to_mutable_view(), remote)
    with pytest.raises(TypeError, match="expected a RdmaMemoryMutableView, got RdmaMemoryView"):
        one.read(memory.to_view(), remote)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected an RdmaRemoteBuffer, got int"):
        one.write(memory.to_view(), 5)  # type: ignore[arg-type]
    for transfer in (one.write, one.read):
        with pytest.raises(ValueError, match="expected at most the 31 bytes of the remote buffer, got 32 bytes"):
            transfer(memory.to_mutable_view(), remote.to_view(0, 31))
    with pytest.raises(ValueError, match="the bytes that the peer's bind returned"):
        one.connect(b"nonsense")
    with pytest.raises(ValueError, match="expected a contiguous tensor"):
        RdmaMemory(torch.zeros(4, 4).t())
    conjugated = torch.zeros(1, dtype=torch.complex64).conj()
    for lazy in (conjugated, conjugated.imag):
        with pytest.raises(ValueError, match="lazily conjugated or negated"):
            RdmaMemory(lazy)
    for lost in without_memory():
        with pytest.raises(ValueError, match="RdmaMemory: argument `tensor`: expected a tensor with memory of its own"):
            RdmaMemory(lost)
    with pytest.raises(ValueError, match="expected a tensor on the CPU or a CUDA device, got one on meta"):
        RdmaMemory(torch.zeros(4, device="meta"))
    with pytest.raises(ValueError, match="expected a CPU or CUDA device"):
        RdmaTransport("meta")
    with pytest.raises(RuntimeError, match="transport"):
        RdmaTransport(hints={"transport": "pigeon"})
    view = memory.to_view()
    memory.deregister()
    for call in (memory.to_view, memory.to_remote_buffer, lambda: one.write(view, remote)):
        with pytest.raises(ValueError, match="the memory was deregistered"):
            call()


@wires
def test_batches_and_futures(hints: dict[str, str]) -> None:
    source, target = torch.arange(10_000.0), torch.zeros(10_000)
    source_memory, target_memory = RdmaMemory(source), RdmaMemory(target)
    parts = [(4 * start, 400) for start in range(0, 10_000, 100)]
    random.Random(1).shuffle(parts)

    async def read_and_write() -> None:
        spans = [(source_memory.to_view(*part), target_memory.to_remote_buffer(*part)) for part in parts]
        assert await one.write_batch(spans) == 0
        assert torch.equal(source, target)
        target.zero_()
        futures = [one.read_async(target_memory.to_mutable_view(*p), source_memory.to_remote_buffer(*p)) for p in parts]
        await asyncio.gather(*futures)
        assert all(future.done() and future.exception() is None for future in futures)
        assert torch.equal(source, target)

    with pair(hints) as (one, _):
        asyncio.run(read_and_write())
        keys = [target_memory.to_remote_buffer(0, 4), RdmaRemoteBuffer(target.data_ptr(), 4, "0" * 32)]
        failing = one.write_batch([(source_memory.to_view(0, 4), key) for key in keys])
        with pytest.raises(RuntimeError, match="refused span 2 of 2, 4 bytes at"):
            failing.wait()
        assert isinstance(failing.exception(), RuntimeError)
        assert one.write_batch([]).wait() == 0
        # The tensors of an operation live until its end.
        target_memory = RdmaMemory(torch.zeros(3_000_000))
        future = one.write_async(RdmaMemory(torch.full((3_000_000,), 7.0)).to_view(), target_memory.to_remote_buffer())
        decoys = [torch.full((3_000_000,), -1.0) for _ in range(3)]  # these would take freed memory
        assert future.wait() == 0
        got = torch.zeros(3_000_000)
        one.read(RdmaMemory(got).to_mutable_view(), target_memory.to_remote_buffer())
        assert torch.equal(got, torch.full((3_000_000,), 7.0))
        del decoys


class InFlight:
    """An operation that ends when it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ended = threading.Event()
        self._error = error

    def is_done(self) -> bool:
        return self.ended.is_set()

    def wait(self, limit: timedelta | None) -> None:
        if not self.ended.wait(limit and limit.total_seconds()):
            raise TimeoutError("it is in flight")
        if self._error is not None:
            raise self._error


def test_an_await_that_is_cancelled_frees_its_thread() -> None:
    operation = InFlight()

    async def wait_for_it(future: RdmaFuture) -> int:
        return await future

    async def cancel() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(max_workers=1))
        task = asyncio.create_task(wait_for_it(RdmaFuture(operation)))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait_for(loop.run_in_executor(None, lambda: None), 30)
        assert task.cancelled() and not operation.is_done()
        # One that is not cancelled gets the outcome, also after several slices.
        loop.call_later(0.3, operation.ended.set)
        assert await RdmaFuture(operation) == 0

    async def fail(error: Exception) -> None:
        failed = InFlight(error)
        asyncio.get_running_loop().call_later(0.15, failed.ended.set)
        with pytest.raises(type(error), match="refused"):
            await RdmaFuture(failed)

    watchdog = threading.Timer(60, operation.ended.set)  # instead of a hang
    watchdog.start()
    asyncio.run(cancel())
    watchdog.cancel()
    for error in (RuntimeError("refused"), OSError("refused"), TimeoutError("refused")):
        asyncio.run(fail(error))


def test_an_await_that_is_given_up_does_not_delay_the_end_of_the_program() -> None:
    # The task stays pending, and nobody cancels it.
    program = """
import asyncio, sys, threading
sys.path.insert(0, sys.argv[1])
from ncclx_rs import RdmaFuture
from test_rdma import InFlight

async def wait_for_it():
    await RdmaFuture(InFlight())

loop = asyncio.new_event_loop()
task = loop.create_task(wait_for_it())
loop.run_until_complete(asyncio.sleep(0.05))
"""
    subprocess.run([sys.executable, "-c", program, str(Path(__file__).parent)], check=True, timeout=60)


def test_every_error_of_an_operation_is_told() -> None:
    for error in (OSError("no memory"), ValueError("not this"), RuntimeError("gone")):
        operation = InFlight(error)
        future = RdmaFuture(operation)
        assert future.exception() is None
        operation.ended.set()
        assert future.exception() is error


def test_no_time_is_no_time_and_negative_ones_are_refused() -> None:
    memory = RdmaMemory(torch.zeros(1_000_000))
    local, remote = memory.to_mutable_view(), memory.to_remote_buffer()
    with pair({"transport": "tcp"}) as (one, other):
        unbound = RdmaTransport(hints={"transport": "tcp"})
        unbound.bind()
        for operation, call in (
            ("RdmaTransport", lambda timeout: RdmaTransport(timeout=timeout)),
            ("connect", lambda timeout: unbound.connect(one.bind(), timeout)),
            ("write", lambda timeout: one.write(local, remote, timeout)),
            ("read", lambda timeout: one.read_async(local, remote, timeout)),
            ("wait", lambda timeout: one.write_batch([]).wait(timeout)),
        ):
            with pytest.raises(ValueError, match=f"{operation}: argument `timeout`: expected no negative time, got -1"):
                call(timedelta(seconds=-1))
            with pytest.raises(TypeError, match=f"{operation}: argument `timeout`: expected a timedelta, got 5"):
                call(5)
        with pytest.raises(RuntimeError):
            other.read(local, remote, timedelta(0))


def test_torchcomms_programs_find_it() -> None:
    import ncclx_rs._transport as module

    assert module.RdmaTransport is ncclx_rs.RdmaTransport and module.RdmaMemory is ncclx_rs.RdmaMemory


def everyone_writes_to_everyone(rank: int, size: int, hints: dict[str, str]) -> None:
    transports = to_all(rank, size, hints)
    count = 100_000
    tensor = torch.full((size, count), -1.0)
    memory = RdmaMemory(tensor)
    remote = buffers(memory, size)
    for turn in range(5):
        source = RdmaMemory(torch.full((count,), float(10 * rank + turn)))
        futures = [t.write_async(source.to_view(), remote[r].to_view(4 * count * rank)) for r, t in transports.items()]
        assert [future.wait() for future in futures] == [0] * len(futures)
        dist.barrier()
        for other, transport in transports.items():
            assert torch.equal(tensor[other], torch.full((count,), float(10 * other + turn)))
            got = torch.zeros(count)
            transport.read(RdmaMemory(got).to_mutable_view(), remote[other].to_view(4 * count * rank))
            assert torch.equal(got, torch.full((count,), float(10 * rank + turn)))
        dist.barrier()
    assert torch.equal(tensor[rank], torch.full((count,), -1.0))
    dist.barrier()


@pytest.mark.worlds(sizes=(2, 4), modes=("shm",))
@wires
def test_everyone_writes_to_everyone(world: World, hints: dict[str, str]) -> None:
    world.run(everyone_writes_to_everyone, hints)


def a_target_that_computes_is_written_to(rank: int, size: int, hints: dict[str, str]) -> None:
    transports = to_all(rank, size, hints)
    tensor = torch.zeros(1_000_000)
    memory = RdmaMemory(tensor)
    remote = buffers(memory, size)
    if rank == 0:
        transports[1].write(RdmaMemory(torch.ones(1_000_000)).to_view(), remote[1])
    else:
        deadline = time.monotonic() + 300
        while tensor[-1] == 0:  # holds Python's lock nearly all the time
            assert time.monotonic() < deadline
    dist.barrier()
    assert rank == 0 or torch.equal(tensor, torch.ones(1_000_000))


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
@wires
def test_a_target_that_computes_is_written_to(world: World, hints: dict[str, str]) -> None:
    world.run(a_target_that_computes_is_written_to, hints)


def a_stopped_target_is_named(rank: int, size: int, hints: dict[str, str]) -> None:
    transports = to_all(rank, size, hints)
    tensor = torch.zeros(10_000_000)
    memory = RdmaMemory(tensor)
    remote = buffers(memory, size)
    processes: list[int] = [0] * size
    dist.all_gather_object(processes, os.getpid())
    if rank == 0:
        stop(processes[1])
        try:
            source = RdmaMemory(torch.ones(10_000_000))
            first = transports[1].write_async(source.to_view(), remote[1], timedelta(seconds=1))
            second = transports[1].read_async(source.to_mutable_view(), remote[1], timedelta(minutes=10))
            with pytest.raises(TimeoutError, match="still in flight"):
                first.wait(timedelta(milliseconds=10))
            with pytest.raises(
                RuntimeError, match=rf"write: process {processes[1]} .*did not complete 40000000 bytes at"
            ):
                first.wait()
            with pytest.raises(RuntimeError, match=rf"read: the connection to process {processes[1]} .*ended before"):
                second.wait()
            assert not transports[1].connected()
            with pytest.raises(RuntimeError, match="not connected: the peer did not complete"):
                transports[1].write(source.to_view(), remote[1])
        finally:
            os.kill(processes[1], signal.SIGCONT)
    dist.barrier()
    # What was given up before it was taken does not come later.
    if hints["transport"] == "shm" and "single_copy_bytes" not in hints:
        assert tensor.count_nonzero() == 0
    memory.deregister()


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
@wires
def test_a_stopped_target_is_named(world: World, hints: dict[str, str]) -> None:
    world.run(a_stopped_target_is_named, hints)


def ctrl_c_ends_a_wait(rank: int, size: int) -> None:
    transports = to_all(rank, size, {"transport": "tcp"})
    tensor = torch.zeros(10_000_000)
    memory = RdmaMemory(tensor)
    remote = buffers(memory, size)
    processes: list[int] = [0] * size
    dist.all_gather_object(processes, os.getpid())
    if rank == 0:
        source = RdmaMemory(torch.ones(10_000_000))
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        stop(processes[1])
        try:
            future = transports[1].write_async(source.to_view(), remote[1], timedelta(minutes=1))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                future.wait()
            assert not future.done()
            timer.join()
        finally:
            signal.signal(signal.SIGINT, before)
            os.kill(processes[1], signal.SIGCONT)
        assert future.wait() == 0
    dist.barrier()
    assert rank == 0 or torch.equal(tensor, torch.ones(10_000_000))


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_ctrl_c_ends_a_wait(world: World) -> None:
    world.run(ctrl_c_ends_a_wait)


def a_stopped_target_is_read(rank: int, size: int) -> None:
    transports = to_all(rank, size, {"transport": "shm"})
    tensor = torch.full((1_000_000,), float(rank))
    memory = RdmaMemory(tensor)
    remote = buffers(memory, size)
    processes: list[int] = [0] * size
    dist.all_gather_object(processes, os.getpid())
    if rank == 0:
        into = torch.zeros(1_000_000)
        local = RdmaMemory(into)
        # From here on this rank knows where the other one's memory lies.
        transports[1].read(local.to_mutable_view(0, 4), remote[1].to_view(0, 4))
        stop(processes[1])
        try:
            transports[1].read(local.to_mutable_view(), remote[1])
            futures = [
                transports[1].read_async(local.to_mutable_view(at, 64), remote[1].to_view(at, 64))
                for at in range(0, 64_000, 64)
            ]
            for future in futures:
                future.wait()
        finally:
            os.kill(processes[1], signal.SIGCONT)
        assert torch.equal(into, torch.ones(1_000_000))
    dist.barrier()


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_a_stopped_target_is_read(world: World) -> None:
    world.run(a_stopped_target_is_read)


def a_dead_target_is_named(rank: int, size: int, hints: dict[str, str]) -> None:
    transports = to_all(rank, size, hints)
    tensor = torch.zeros(10_000_000)
    memory = RdmaMemory(tensor)
    remote = buffers(memory, size)
    processes: list[int] = [0] * size
    dist.all_gather_object(processes, os.getpid())
    if rank == 1:
        while tensor[0] == 0:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        source = RdmaMemory(torch.ones(10_000_000))
        with pytest.raises(RuntimeError, match=rf"connection to process {processes[1]}\b.* ended|is not connected"):
            for _ in range(10_000):
                transports[1].write(source.to_view(), remote[1], timedelta(minutes=10))
        assert not transports[1].connected()


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
@wires
def test_a_dead_target_is_named(fresh_world: World, hints: dict[str, str]) -> None:
    fresh_world.run(a_dead_target_is_named, hints, dies=[1])


def a_target_outlives_a_dead_writer(rank: int, size: int, hints: dict[str, str]) -> None:
    transports = to_all(rank, size, hints)
    tensor = torch.zeros(10_000_000)
    memory = RdmaMemory(tensor)
    remote = buffers(memory, size)
    if rank == 1:
        source = RdmaMemory(torch.ones(10_000_000))
        for _ in range(3):
            transports[0].write_async(source.to_view(), remote[0])
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        while transports[1].connected():
            time.sleep(0.01)
        assert set(tensor.unique().tolist()) <= {0.0, 1.0}
        memory.deregister()
        tensor.zero_()
        with pair(hints) as (one, _):
            again = RdmaMemory(tensor)
            one.write(RdmaMemory(torch.full((10,), 3.0)).to_view(), again.to_remote_buffer())
        assert tensor.sum() == 30


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
@wires
def test_a_target_outlives_a_dead_writer(fresh_world: World, hints: dict[str, str]) -> None:
    fresh_world.run(a_target_outlives_a_dead_writer, hints, dies=[1])


def a_stopped_writer_does_not_delay_the_end_of_its_access(rank: int, size: int, hints: dict[str, str]) -> None:
    transports = to_all(rank, size, hints)
    count = 100_000_000
    tensor = torch.zeros(count if rank == 0 else 1, dtype=torch.uint8)
    memory = RdmaMemory(tensor)
    remote = buffers(memory, size)
    processes: list[int] = [0] * size
    dist.all_gather_object(processes, os.getpid())
    if rank == 1:
        source = RdmaMemory(torch.ones(count, dtype=torch.uint8))
        futures, refused = [], ("refused", "ended before", "not connected")
        for _ in range(20):
            try:
                futures.append(transports[0].write_async(source.to_view(), remote[0]))
            except RuntimeError as error:
                # This process was stopped, and the connection ended, before it had asked for all.
                assert any(word in str(error) for word in refused), error
        for future in futures:
            try:
                future.wait()
            except RuntimeError as error:
                assert any(word in str(error) for word in refused), error
    else:
        while tensor[0] == 0:
            time.sleep(0.0001)
        stop(processes[1])
        try:
            memory.deregister()
            tensor.fill_(7)
        finally:
            os.kill(processes[1], signal.SIGCONT)
        time.sleep(0.5)
        assert torch.equal(tensor, torch.full_like(tensor, 7)), "written after the end"
    dist.barrier()


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
@wires
def test_a_stopped_writer_does_not_delay_the_end_of_its_access(fresh_world: World, hints: dict[str, str]) -> None:
    fresh_world.run(a_stopped_writer_does_not_delay_the_end_of_its_access, hints)


MALLOPT_PERTURB = -6  # M_PERTURB of malloc.h: new memory's bytes are the complement


def through(rank: int, size: int, hints: dict[str, str], tls: str, body: Callable[..., None]) -> None:
    os.environ["UCX_TLS"] = tls  # before UCX is loaded
    # New memory is full of a byte that UCX has no use for, where its own may be anything.
    assert ctypes.CDLL(None).mallopt(MALLOPT_PERTURB, 0xA5) == 1
    body(rank, size, hints)


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
@pytest.mark.parametrize("tls", ["posix", "all"])
@pytest.mark.parametrize(
    ("body", "dies"),
    [
        (a_stopped_target_is_named, []),
        (a_dead_target_is_named, [1]),
        (a_target_outlives_a_dead_writer, [1]),
        (a_stopped_writer_does_not_delay_the_end_of_its_access, []),
    ],
)
def test_failures_are_the_same_through(
    fresh_world: World, body: Callable[..., None], dies: list[int], tls: str
) -> None:
    fresh_world.run(through, over_ucx(), tls, body, dies=dies)
