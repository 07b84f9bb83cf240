"""What probes are made of: what they ask and find, ranks in processes of their own, words, kernels.

A probe is a function that returns what it found. It runs in a process of its own, which `probe.py` starts.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import byref, c_int, c_size_t, c_uint64, c_ulonglong, c_void_p
from dataclasses import dataclass, field
from multiprocessing.reduction import DupFd, ForkingPickler
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# Last: its conftest.py must not stand in for that of the tests which import this.
sys.path.append(str(HERE.parent / "softcuda/tests"))

import driver as cu  # noqa: E402

Number = bool | int | float | str


@dataclass(frozen=True)
class Found:
    """What a probe found.

    Attributes:
        answer: Yes, no, a number or a text.
        numbers: What was measured, by name; names end in their unit.
        as_designed: Whether the engine's design can stay as it is; None if it relies on neither answer, or if the
            answer is a matter of time on a software CUDA, which has none.
    """

    answer: Number
    numbers: dict[str, Number] = field(default_factory=dict)
    as_designed: bool | None = None


class NotHere(Exception):
    """What a probe needs is not on this machine; the text says what."""


@dataclass(frozen=True)
class Probe:
    """A probe.

    Attributes:
        name: P1 to P15.
        asks: The question.
        means: What the answer means for the design.
        run: Finds it.
        seconds: After so long the probe counts as one that hangs.
    """

    name: str
    asks: str
    means: str
    run: Callable[[], Found]
    seconds: float = 30.0


def timed(as_designed: bool) -> bool | None:
    """A judgement that rests on time: none on a software CUDA."""
    return None if cu.IS_SOFTWARE else as_designed


def amount(on_a_gpu: int, on_software: int) -> int:
    """How much to do: less on a software CUDA."""
    return on_software if cu.IS_SOFTWARE else on_a_gpu


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which so many percent of the values lie."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)]


# ---- ranks ----


class Ranks:
    """This rank's way to the others, by way of the process that has started them."""

    def __init__(self, rank: int, size: int, parent: multiprocessing.connection.Connection) -> None:
        self.rank, self.size, self._parent = rank, size, parent

    def all_gather(self, value: Any = None) -> list[Any]:
        """Every rank's value, by rank. Every rank calls it."""
        self._parent.send_bytes(b"g" + bytes(ForkingPickler.dumps(value)))
        return [ForkingPickler.loads(part) for part in self._parent.recv()]

    def all_gather_files(self, file: int) -> list[int]:
        """File descriptors of what every rank has handed over, by rank. Every rank calls it."""
        copies = self.all_gather([DupFd(file) for _ in range(self.size)])
        return [row[self.rank].detach() for row in copies]


def _start(
    function: Callable[..., Any],
    rank: int,
    size: int,
    parent: multiprocessing.connection.Connection,
    arguments: tuple[Any, ...],
) -> None:
    try:
        result = function(Ranks(rank, size, parent), *arguments)
    except BaseException:
        parent.send_bytes(b"e" + traceback.format_exc().encode())
        raise
    parent.send_bytes(b"r" + bytes(ForkingPickler.dumps(result)))
    with suppress(EOFError):
        parent.recv()  # what others map of this process stays until all have ended


def together(function: Callable[..., Any], size: int, *arguments: Any, seconds: float = 20.0) -> list[Any]:
    """The results of a function on so many ranks, each a process: it gets its `Ranks` and the arguments.

    On a software CUDA it has three times as long.

    Raises:
        RuntimeError: a rank failed, or did not end in time; all ranks were killed.
    """
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(target=_start, args=(function, rank, size, theirs, arguments), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    ours = [pipe for pipe, _ in pipes]
    until = time.monotonic() + seconds * amount(1, 3)
    try:
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        while True:
            messages = [_message(function, rank, pipe, until) for rank, pipe in enumerate(ours)]
            if all(kind == b"r" for kind, _ in messages):
                return [ForkingPickler.loads(body) for _, body in messages]
            if any(kind == b"r" for kind, _ in messages):
                raise RuntimeError(f"{function.__name__}: some ranks have ended, and others go on")
            for pipe in ours:
                pipe.send([body for _, body in messages])
    finally:
        for pipe in ours:
            pipe.close()
        for process in processes:
            process.kill()
            process.join()


def _message(
    function: Callable[..., Any], rank: int, pipe: multiprocessing.connection.Connection, until: float
) -> tuple[bytes, bytes]:
    if not pipe.poll(max(until - time.monotonic(), 0)):
        raise RuntimeError(f"{function.__name__}: rank {rank} did not end in time")
    try:
        message = pipe.recv_bytes()
    except EOFError:
        raise RuntimeError(f"{function.__name__}: rank {rank} died") from None
    if message[:1] == b"e":
        raise RuntimeError(f"{function.__name__}: rank {rank} failed: {message[1:].decode()}")
    return message[:1], message[1:]


# ---- words, memory, kernels ----


class Words:
    """Words of 64 bytes each in memory that processes share, registered with CUDA."""

    def __init__(self, file: int, count: int) -> None:
        self._map = mmap.mmap(file, count * 64)
        self.host = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        cu.cuda.cuMemHostRegister_v2(c_void_p(self.host), c_size_t(count * 64), 3)  # portable, mapped
        found = c_uint64()
        cu.cuda.cuMemHostGetDevicePointer_v2(byref(found), c_void_p(self.host), 0)
        self._device = found.value

    @staticmethod
    def alone(count: int) -> Words:
        """Words of this process only."""
        return Words(words_file(count), count)

    @staticmethod
    def of(ranks: Ranks, count: int) -> Words:
        """Words of all ranks. Every rank calls it."""
        return Words(ranks.all_gather_files(words_file(count))[0], count)

    def at(self, index: int) -> int:
        """A word's address for the device."""
        return self._device + 64 * index

    def __getitem__(self, index: int) -> int:
        return c_uint64.from_address(self.host + 64 * index).value

    def __setitem__(self, index: int, value: int) -> None:
        c_uint64.from_address(self.host + 64 * index).value = value


def words_file(count: int) -> int:
    """A file in memory for so many words, all 0."""
    file = os.memfd_create("probe")
    os.ftruncate(file, count * 64)
    return file


def write(on: c_void_p, word: int, value: int) -> None:
    """Has a stream write a word at an address of the device."""
    cu.cuda.cuStreamWriteValue64_v2(on, cu.address(word), c_uint64(value), 0)


def wait_for(on: c_void_p, word: int, value: int) -> None:
    """Has a stream wait until a word is at least `value`."""
    cu.cuda.cuStreamWaitValue64_v2(on, cu.address(word), c_uint64(value), cu.GREATER_OR_EQUAL)


def batch(on: c_void_p, *steps: tuple[int, int, int]) -> None:
    """Submits operations on words together: each is `WAIT_64` or `WRITE_64`, the word's address, and the value."""
    made = (cu.BatchStep * len(steps))(*(cu.BatchStep(*step) for step in steps))
    cu.cuda.cuStreamBatchMemOp_v2(on, len(steps), made, 0)


def ends(on: c_void_p, seconds: float) -> bool:
    """Whether a stream ends within a time, found without a call that could block."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if cu.is_done(on):
            return True
        time.sleep(0.0005)
    return cu.is_done(on)


@dataclass(frozen=True)
class Page:
    """Device memory that processes share: where it is mapped here, and its pages."""

    at: int
    handle: c_ulonglong

    @staticmethod
    def new() -> Page:
        handle = cu.pages()
        return Page._mapped(handle)

    @staticmethod
    def _mapped(handle: c_ulonglong) -> Page:
        where = cu.reserve(1)
        cu.map_at(where, handle)
        cu.allow(where)
        return Page(where, handle)

    def export(self) -> int:
        """A file descriptor by which another process can map it."""
        file = c_int()
        cu.cuda.cuMemExportToShareableHandle(byref(file), self.handle, cu.POSIX_FILE, c_ulonglong(0))
        return file.value

    @staticmethod
    def of_file(file: int) -> Page:
        """What another process has exported."""
        handle = c_ulonglong()
        cu.cuda.cuMemImportFromShareableHandle(byref(handle), c_void_p(file), cu.POSIX_FILE)
        return Page._mapped(handle)


def put(memory: int, *values: int) -> None:
    """Writes numbers of 64 bits to device memory."""
    numbers = (c_uint64 * len(values))(*values)
    cu.cuda.cuMemcpyHtoD_v2(cu.address(memory), numbers, c_size_t(8 * len(values)))


def take(memory: int, count: int) -> list[int]:
    """Reads numbers of 64 bits from device memory."""
    numbers = (c_uint64 * count)()
    cu.cuda.cuMemcpyDtoH_v2(numbers, cu.address(memory), c_size_t(8 * count))
    return list(numbers)


@contextmanager
def captured(on: c_void_p) -> Iterator[list[c_void_p]]:
    """Captures what the block submits; the list has the executable graph afterwards."""
    graphs: list[c_void_p] = []
    cu.cuda.cuStreamBeginCapture_v2(on, cu.THREAD_LOCAL)
    yield graphs
    graph, made = c_void_p(), c_void_p()
    cu.cuda.cuStreamEndCapture(on, byref(graph))
    cu.cuda.cuGraphInstantiateWithFlags(byref(made), graph, c_ulonglong(0))
    graphs.append(made)


def attribute(number: int) -> int:
    """An attribute of the first device."""
    found = c_int()
    cu.cuda.cuDeviceGetAttribute(byref(found), number, 0)
    return found.value


def image() -> bytes:
    """The code of probe.cu for the first device."""
    architecture = f"sm_{attribute(75)}{attribute(76)}"
    return cu.compile_for(architecture, HERE / "probe.cu")


class Busy:
    """A kernel that fills the device for a time."""

    def __init__(self) -> None:
        self._kernel = cu.function(cu.load(image()), b"busy")
        self._grid, self._block = amount(4 * attribute(16), 1), amount(256, 1)
        self._to = cu.allocate(8 * self._grid * self._block)
        self._rounds_a_ms = 1e3
        self.on = cu.stream()
        for _ in range(3):  # the first launch loads it
            took = self.milliseconds(amount(100_000, 10_000))
            self._rounds_a_ms = amount(100_000, 10_000) / took

    def milliseconds(self, rounds: int | None = None, *, lasting: float = 0.0) -> float:
        """How long a kernel takes, of so many rounds or such that it takes about so many milliseconds alone."""
        began = time.perf_counter()
        self.submit(rounds if rounds is not None else int(lasting * self._rounds_a_ms))
        cu.wait(self.on)
        return (time.perf_counter() - began) * 1e3

    def submit(self, rounds: int) -> None:
        """Launches a kernel of so many rounds."""
        grid, block = (self._grid, 1, 1), (self._block, 1, 1)
        cu.launch(self._kernel, grid, block, self.on, cu.address(self._to), c_ulonglong(rounds))
