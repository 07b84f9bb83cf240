"""One-sided reads and writes between two processes: torchcomms' RDMA transport, over shared memory, TCP and UCX.

Two processes bind a transport each, exchange what `bind` returned by means of their own, and connect. Each registers
memory and gives the other a remote buffer. The holder reads and writes the memory; its owner does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import sysconfig
from collections.abc import Generator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from ncclx_rs._load import native
from ncclx_rs._types import as_hints


class RdmaRemoteBuffer:
    """Memory of another process, and the key to it. It can be pickled.

    Whoever has it and a transport connected to its owner can read and write the memory: keep it as you keep a password.
    """

    def __init__(self, ptr: int, len: int, access_key: str) -> None:
        """Makes a buffer from its parts. Programs get it from `RdmaMemory.to_remote_buffer`."""
        self._ptr, self._len, self._access_key = int(ptr), int(len), str(access_key)

    @property
    def ptr(self) -> int:
        """The address of the first byte, in the owner's process."""
        return self._ptr

    @property
    def len(self) -> int:
        """The number of bytes."""
        return self._len

    @property
    def access_key(self) -> str:
        """The key."""
        return self._access_key

    def to_view(self, offset: int | None = None, length: int | None = None) -> RdmaRemoteBuffer:
        """A part of the buffer, with the same key. For another process to have a part alone, its owner makes it.

        Args:
            offset: the first byte; 0 if not given.
            length: the number of bytes; all up to the end if not given.

        Raises:
            ValueError: the part is not inside the buffer.
        """
        offset, length = _part("RdmaRemoteBuffer.to_view", offset, length, self._len)
        return RdmaRemoteBuffer(self._ptr + offset, length, self._access_key)

    def __getstate__(self) -> tuple[int, int, str]:
        return (self._ptr, self._len, self._access_key)

    def __reduce__(self) -> tuple[Any, ...]:
        return (RdmaRemoteBuffer, self.__getstate__())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RdmaRemoteBuffer) and self.__getstate__() == other.__getstate__()

    def __hash__(self) -> int:
        return hash(self.__getstate__())

    def __repr__(self) -> str:
        return f"RdmaRemoteBuffer({self._len} bytes at {self._ptr:#x})"


class RdmaMemoryView:
    """A part of registered memory that is read."""

    def __init__(self, memory: RdmaMemory, offset: int, length: int) -> None:
        """Makes a view. Programs call `RdmaMemory.to_view` instead."""
        self._memory, self._offset, self._length = memory, offset, length

    def size(self) -> int:
        """The number of bytes."""
        return self._length


class RdmaMemoryMutableView(RdmaMemoryView):
    """A part of registered memory that is written."""


class RdmaMemory:
    """The memory of a tensor, for transports.

    The program must not resize the tensor's storage meanwhile. Deleting the object deregisters the memory.

    Memory of a CUDA device goes through UCX alone: the transport has the hint ``transport=ucx``, and UCX reaches CUDA.
    Streams are not waited for. Before the memory is read, by a `write` from here or by the peer, synchronize with what
    writes it; before it is written, with what uses it.

    Args:
        tensor: a contiguous tensor of any shape and dtype, on the CPU or a CUDA device.
        cache_reg: ignored: a registration costs nothing here.

    Raises:
        ValueError: the tensor is not contiguous, or on another device.
    """

    def __init__(self, tensor: torch.Tensor, cache_reg: bool = False) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"RdmaMemory: argument `tensor`: expected a tensor, got {type(tensor).__name__}")
        if tensor.device.type not in ("cpu", "cuda"):
            expected = "expected a tensor on the CPU or a CUDA device"
            raise ValueError(f"RdmaMemory: argument `tensor`: {expected}, got one on {tensor.device}")
        self._registration: Any = native().RdmaRegistration(tensor)
        self._bytes = tensor.nbytes
        self._registered = True

    def to_view(self, offset: int | None = None, length: int | None = None) -> RdmaMemoryView:
        """A part of the memory to be written to another process.

        Args:
            offset: the first byte; 0 if not given.
            length: the number of bytes; all up to the end if not given.

        Raises:
            ValueError: the part is not inside the memory, or the memory is deregistered.
        """
        return RdmaMemoryView(self, *self._part("to_view", offset, length))

    def to_mutable_view(self, offset: int | None = None, length: int | None = None) -> RdmaMemoryMutableView:
        """A part of the memory to be filled from another process.

        Args:
            offset: the first byte; 0 if not given.
            length: the number of bytes; all up to the end if not given.

        Raises:
            ValueError: the part is not inside the memory, or the memory is deregistered.
        """
        return RdmaMemoryMutableView(self, *self._part("to_mutable_view", offset, length))

    def to_remote_buffer(self, offset: int | None = None, length: int | None = None) -> RdmaRemoteBuffer:
        """A part of the memory, for other processes to read and write. Its key opens this part and no more.

        Args:
            offset: the first byte; 0 if not given.
            length: the number of bytes; all up to the end if not given.

        Raises:
            ValueError: the part is not inside the memory, or the memory is deregistered.
        """
        part = self._part("to_remote_buffer", offset, length)
        return RdmaRemoteBuffer(*self._registration.remote_buffer(*part))

    def deregister(self) -> None:
        """Ends other processes' access. Once it returns, none of them reads or writes the memory."""
        self._registered = False
        self._registration.deregister()

    def _part(self, operation: str, offset: int | None, length: int | None) -> tuple[int, int]:
        self._check(operation)
        return _part(f"RdmaMemory.{operation}", offset, length, self._bytes)

    def _check(self, operation: str) -> None:
        if not self._registered:
            raise ValueError(f"{operation}: the memory was deregistered")


# How long a thread waits for an operation that is awaited before it looks whether it still is.
_SLICE = timedelta(milliseconds=100)


class RdmaFuture:
    """An operation in flight or done. It can be awaited. Dropping it does not end the operation."""

    def __init__(self, operation: Any) -> None:
        """Wraps an operation. Programs get it from the methods of `RdmaTransport`."""
        self._operation = operation

    def wait(self, timeout: timedelta | None = None) -> int:
        """Waits for the end.

        Args:
            timeout: how long; until the end if not given.

        Returns:
            0.

        Raises:
            TimeoutError: the operation is still in flight.
            RuntimeError: it has failed; the text names the peer and the span.
            OSError: the system has refused something to it.
        """
        self._operation.wait(_limit("wait", timeout))
        return 0

    def done(self) -> bool:
        """Whether it has ended, with or without an error."""
        return bool(self._operation.is_done())

    def exception(self) -> BaseException | None:
        """Its error; None while it is in flight and after success."""
        if self.done():
            try:
                self._operation.wait(None)
            except Exception as error:
                return error
        return None

    def __await__(self) -> Generator[Any, None, int]:
        loop = asyncio.get_running_loop()
        # In slices, so that neither a cancelled task nor one of a loop that has stopped keeps a thread, for which the
        # interpreter's end would wait.
        while not self.done():
            yield from loop.run_in_executor(None, self._wait_for_a_slice).__await__()
        return self.wait()

    def _wait_for_a_slice(self) -> None:
        with contextlib.suppress(TimeoutError):
            self._operation.wait(_SLICE)


class RdmaTransport:
    """Reads and writes the memory of one other process, and lets that one access what this process has registered.

    Args:
        device: where the memory is; nothing is used of a CUDA device, since each `RdmaMemory` has its tensor's.
        timeout: how long operations may take that have no timeout of their own; ``timeout_seconds`` if not given.
        hints: settings by name: ``transport``, ``ucx``, ``single_copy_bytes``, ``socket_ifname``, ``tls``,
            ``timeout_seconds`` and ``peer_timeout_seconds``.

    Raises:
        ValueError: the device is neither a CPU nor a CUDA device, or the timeout is negative.
        RuntimeError: a setting is not valid.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        timeout: timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> None:
        if torch.device(device).type not in ("cpu", "cuda"):
            raise ValueError(f"RdmaTransport: argument `device`: expected a CPU or CUDA device, got {device}")
        self._timeout = _limit("RdmaTransport", timeout)
        pairs = list(as_hints("RdmaTransport", hints).items())
        self._connection: Any = native().RdmaConnection(pairs, [sysconfig.get_path("purelib")])

    @staticmethod
    def supported() -> bool:
        """Whether transports work here. Always: within a host over shared memory, between hosts over TCP.

        UCX need not be there; `ncclx-rs info` says whether it is.
        """
        return True

    def bind(self) -> bytes:
        """Begins to serve the peer. Returns what the peer connects by; only the peer may see it.

        Raises:
            RuntimeError: the host has no address for other hosts, or ``transport`` is ``ucx`` and UCX cannot be used.
            OSError: the system refuses a socket or a thread.
        """
        return bytes(self._connection.bind())

    def connect(self, peer_url: bytes, timeout: timedelta | None = None) -> int:
        """Connects to the peer, which need not have called `connect`.

        Args:
            peer_url: what the peer's `bind` has returned.
            timeout: how long to wait for the peer; the transport's if not given.

        Returns:
            0.

        Raises:
            ValueError: these are other bytes, or the transport is connected already.
            RuntimeError: the peer cannot be reached, or is another process, or the two cannot use UCX and ``transport``
                is ``ucx``.
        """
        self._connection.connect(bytes(peer_url), _limit("connect", timeout, self._timeout))
        return 0

    def connected(self) -> bool:
        """Whether it is connected. It no longer is after an operation has timed out, or the peer has ended."""
        return bool(self._connection.is_connected())

    @property
    def wire(self) -> str | None:
        """How bytes move: ``shared memory``, ``tcp`` or ``ucx``; None before `connect`."""
        wire: str | None = self._connection.wire()
        return wire

    @property
    def devices(self) -> list[str]:
        """What UCX goes through, such as ``tcp/eth0``; empty with other wires, and where UCX is older than 1.13."""
        devices: list[str] = self._connection.devices()
        return devices

    def write(self, local: RdmaMemoryView, remote: RdmaRemoteBuffer, timeout: timedelta | None = None) -> int:
        """Writes to the peer's memory, and waits until the bytes are there.

        Args:
            local: the bytes to write.
            remote: where to; at least as long. The first bytes are written.
            timeout: how long it may take; the transport's if not given.

        Returns:
            0.

        Raises:
            ValueError: the remote buffer is shorter, or the local memory is deregistered, or a CUDA device's where the
                transport does not go through UCX.
            RuntimeError: the transport is not connected, or the operation failed. The text names the peer and the
                span. A refusal by the peer leaves the transport connected, a timeout does not.
        """
        return self.write_async(local, remote, timeout).wait()

    def read(self, local: RdmaMemoryMutableView, remote: RdmaRemoteBuffer, timeout: timedelta | None = None) -> int:
        """Reads from the peer's memory, and waits until the bytes are here. After an error they may be anything.

        Args:
            local: the bytes to fill.
            remote: where from; at least as long. The first bytes are read.
            timeout: how long it may take; the transport's if not given.

        Returns:
            0.

        Raises:
            ValueError: the remote buffer is shorter, or the local memory is deregistered.
            RuntimeError: as `write`.
        """
        return self.read_async(local, remote, timeout).wait()

    def write_async(
        self, local: RdmaMemoryView, remote: RdmaRemoteBuffer, timeout: timedelta | None = None
    ) -> RdmaFuture:
        """As `write`, without waiting. Operations that are in flight together have no order."""
        return self.write_batch([(local, remote)], timeout)

    def read_async(
        self, local: RdmaMemoryMutableView, remote: RdmaRemoteBuffer, timeout: timedelta | None = None
    ) -> RdmaFuture:
        """As `read`, without waiting. Operations that are in flight together have no order."""
        return self.read_batch([(local, remote)], timeout)

    def write_batch(
        self, spans: Sequence[tuple[RdmaMemoryView, RdmaRemoteBuffer]], timeout: timedelta | None = None
    ) -> RdmaFuture:
        """Writes many spans as one operation, without waiting. It fails if one of them does; the others are written.

        Args:
            spans: the bytes to write and where to, as in `write`.
            timeout: how long the whole may take; the transport's if not given.

        Raises:
            ValueError: as `write`; nothing is written then.
            RuntimeError: the transport is not connected.
        """
        return self._post(True, RdmaMemoryView, spans, timeout)

    def read_batch(
        self, spans: Sequence[tuple[RdmaMemoryMutableView, RdmaRemoteBuffer]], timeout: timedelta | None = None
    ) -> RdmaFuture:
        """Reads many spans as one operation, without waiting. It fails if one of them does; the others are read.

        Args:
            spans: the bytes to fill and where from, as in `read`.
            timeout: how long the whole may take; the transport's if not given.

        Raises:
            ValueError: as `read`; nothing is read then.
            RuntimeError: the transport is not connected.
        """
        return self._post(False, RdmaMemoryMutableView, spans, timeout)

    def close(self) -> None:
        """Ends what is in flight and the connections. Deleting the transport does too."""
        self._connection.close()

    def _post(
        self,
        writes: bool,
        view: type[RdmaMemoryView],
        spans: Sequence[tuple[RdmaMemoryView, RdmaRemoteBuffer]],
        timeout: timedelta | None,
    ) -> RdmaFuture:
        operation = "write" if writes else "read"
        raw = []
        for local, remote in spans:
            if not isinstance(local, view):
                expected = view.__name__
                raise TypeError(f"{operation}: argument `local`: expected a {expected}, got {type(local).__name__}")
            if not isinstance(remote, RdmaRemoteBuffer):
                got = type(remote).__name__
                raise TypeError(f"{operation}: argument `remote`: expected an RdmaRemoteBuffer, got {got}")
            local._memory._check(operation)
            registration = local._memory._registration
            raw.append((registration, local._offset, local._length, remote.ptr, remote.len, remote.access_key))
        return RdmaFuture(self._connection.post(writes, raw, _limit(operation, timeout, self._timeout)))


def _limit(operation: str, timeout: timedelta | None, default: timedelta | None = None) -> timedelta | None:
    """How long an operation may take: what its caller says, else ``default``."""
    if timeout is None:
        return default
    if not isinstance(timeout, timedelta):
        raise TypeError(f"{operation}: argument `timeout`: expected a timedelta, got {timeout!r}")
    if timeout < timedelta(0):
        raise ValueError(f"{operation}: argument `timeout`: expected no negative time, got {timeout}")
    return timeout


def _part(operation: str, offset: int | None, length: int | None, size: int) -> tuple[int, int]:
    """A part of ``size`` bytes: where it begins, and its length."""
    start = 0 if offset is None else offset
    count = size - start if length is None else length
    if start < 0 or count < 0 or start + count > size:
        raise ValueError(f"{operation}: expected a part of {size} bytes, got offset {offset} and length {length}")
    return start, count
