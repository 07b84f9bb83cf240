"""Windows: memory that other ranks write and read by one-sided operations."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ncclx_rs import _graph_state
from ncclx_rs._mistakes import explained, no_device_side, warn_of_hints
from ncclx_rs._tracing import not_in_graphs
from ncclx_rs._types import OpOptions
from ncclx_rs._work import TorchWork

if TYPE_CHECKING:
    from ncclx_rs._operations import Operations


class TorchCommWinAccessType(enum.Enum):
    """How a rank's part of a window is accessed: as memory of this process, or only by operations."""

    WIN_ACCESS_TYPE_UNIFIED = enum.auto()
    WIN_ACCESS_TYPE_SEPARATE = enum.auto()


class TorchCommWindowAttr:
    """The attributes of a rank's part of a window.

    Attributes:
        access_type: how the part is accessed.
        get_path: how a `get` of the part goes: `mapped`, a copy by this process or its device; `remote_reads`, read by
            UCX without that rank's help; or `messages`, which that rank answers. torchcomms has no such attribute.
    """

    def __init__(self) -> None:
        self.access_type = TorchCommWinAccessType.WIN_ACCESS_TYPE_SEPARATE
        self.get_path = "messages"


class TorchCommWindow:
    """A tensor of each rank, which other ranks write and read; made by `TorchComm.new_window`.

    A rank that puts data sends a signal afterwards; once the target has waited for that signal, the data is there.
    Signals between two ranks are counted: each `signal` adds one, each `wait_signal` takes one.
    """

    def __init__(self, comm: Operations, c10d: Any) -> None:
        """Makes a window without a tensor. Programs call `TorchComm.new_window` instead."""
        self._comm = comm
        self._c10d = c10d
        self._tensor: torch.Tensor | None = None
        self._id: int | None = None
        self._bytes = 0
        self._meta: tuple[torch.dtype, torch.Size, torch.device] | None = None
        self._mapped: dict[int, torch.Tensor] = {}
        self._comm_handle = comm._handle
        self._handle = _graph_state.handle(self, f"{comm._handle}/window")

    @property
    def dtype(self) -> torch.dtype:
        """The registered tensor's dtype. This, `shape` and `device` raise RuntimeError if there is no tensor."""
        return self._registered()[0]

    @property
    def shape(self) -> list[int]:
        """The registered tensor's shape, which may differ from rank to rank."""
        return list(self._registered()[1])

    @property
    def device(self) -> torch.device:
        """The registered tensor's device."""
        return self._registered()[2]

    def get_size(self) -> int:
        """The number of bytes of this rank's part; 0 before a tensor is registered."""
        return self._bytes

    def get_tensor(self) -> torch.Tensor | None:
        """The registered tensor; None if the window does not keep it."""
        not_in_graphs("get_tensor", "other ranks change it without the graph's knowing; map_remote_tensor can be")
        return self._tensor

    def tensor_register(self, tensor: torch.Tensor, owning: bool = True) -> None:
        """Makes a tensor accessible to the other ranks. Called on all ranks.

        Args:
            tensor: a contiguous tensor of any shape and dtype, on the communicator's device.
            owning: whether the window keeps the tensor alive. Otherwise the caller must, until `tensor_deregister`.

        Raises:
            RuntimeError: a tensor is already registered, the tensor is not contiguous or on another device, or a rank
                did not call it.
            ValueError: a CUDA graph captures the current stream.

        Examples:
            >>> window = comm.new_window()
            >>> window.tensor_register(torch.zeros(4))
            >>> window.shape
            [4]
            >>> window.tensor_deregister()
        """
        not_in_graphs("tensor_register", "it changes the window")
        if self._id is not None:
            raise RuntimeError("Double registration error: the window has a tensor")
        self._comm._check_tensor("tensor_register", tensor)
        self._id = self._c10d._window_register(tensor, owning)
        self._tensor = tensor if owning else None
        self._bytes = tensor.nbytes
        self._meta = (tensor.dtype, tensor.shape, tensor.device)

    def tensor_deregister(self) -> None:
        """Ends the other ranks' access to the tensor, once no rank uses it. Called on all ranks.

        Raises:
            RuntimeError: no tensor is registered, or a rank did not call it. The window then has no tensor.
            ValueError: a CUDA graph captures the current stream, of the tensor's device; the tensor stays registered.

        Examples:
            >>> window = comm.new_window(torch.zeros(4))
            >>> window.tensor_deregister()
            >>> window.get_size()
            0
        """
        not_in_graphs("tensor_deregister", "it changes the window")
        if self._id is None:
            raise RuntimeError("Double deregistration error: the window has no tensor")
        try:
            self._c10d._window_deregister(self._id)
        except ValueError:
            raise  # refused, because of a capture, before anything ended
        except BaseException:
            self._forget()
            raise
        self._forget()

    def _forget(self) -> None:
        self._id, self._tensor, self._bytes, self._meta, self._mapped = None, None, 0, None, {}

    def put(
        self,
        tensor: torch.Tensor,
        dst_rank: int,
        target_offset_nelems: int = 0,
        async_op: bool = False,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | float | None = None,
    ) -> TorchWork:
        """Writes a tensor into a rank's part. Once it is done, the program may change the tensor.

        Args:
            tensor: the tensor to write, of any shape.
            dst_rank: the rank to write to.
            target_offset_nelems: the offset in the rank's part, in elements of ``tensor``.
            async_op: whether the call returns before the operation is done.
            hints: settings by name.
            timeout: the timeout; the communicator's if not given.

        Raises:
            ValueError: the tensor does not fit into the part at that offset.
            RuntimeError: there is no such rank, no tensor is registered, the tensor is not contiguous, or the operation
                failed.

        Examples:
            >>> window = comm.new_window(torch.zeros(4))
            >>> work = window.put(torch.ones(2), dst_rank=1 - comm.rank, target_offset_nelems=2)
            >>> work = window.signal(1 - comm.rank)
            >>> work = window.wait_signal(1 - comm.rank)
            >>> window.get_tensor()
            tensor([0., 0., 1., 1.])
            >>> window.tensor_deregister()
        """
        return self._move(
            "put",
            tensor,
            "dst_rank",
            dst_rank,
            target_offset_nelems,
            async_op,
            OpOptions.of("put", timeout, hints, None),
        )

    def get(
        self,
        tensor: torch.Tensor,
        src_rank: int,
        source_offset_nelems: int = 0,
        async_op: bool = False,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | float | None = None,
    ) -> TorchWork:
        """Reads from a rank's part into a tensor. Once it is done, the tensor holds the data.

        It reads what is there while it is under way. So ranks must synchronize before: by a signal of the rank that
        wrote the data, or by a barrier. What is put or signalled later comes after it. torchcomms has no such method.

        Args:
            tensor: the tensor to fill completely, of any shape.
            src_rank: the rank to read from.
            source_offset_nelems: the offset in the rank's part, in elements of ``tensor``.
            async_op: whether the call returns before the operation is done.
            hints: settings by name.
            timeout: the timeout; the communicator's if not given.

        Raises:
            ValueError: the rank's part is too short for that offset and tensor.
            RuntimeError: there is no such rank, no tensor is registered, the tensor is not contiguous, or the operation
                failed.

        Examples:
            >>> window = comm.new_window(torch.full((4,), comm.rank + 1.0))
            >>> tensor = torch.empty(2)
            >>> work = window.get(tensor, src_rank=1, source_offset_nelems=2)
            >>> tensor
            tensor([2., 2.])
            >>> window.tensor_deregister()
        """
        return self._move(
            "get",
            tensor,
            "src_rank",
            src_rank,
            source_offset_nelems,
            async_op,
            OpOptions.of("get", timeout, hints, None),
        )

    def accumulate(
        self,
        tensor: torch.Tensor,
        dst_rank: int,
        target_offset_nelems: int = 0,
        async_op: bool = False,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | float | None = None,
    ) -> TorchWork:
        """Adds a tensor to a rank's part, element by element. Once it is done, the program may change the tensor.

        What several ranks add to the same elements is all counted, in some order. An accumulate that fails may have
        been added in part. torchcomms has no such method.

        Args:
            tensor: the tensor to add, of any shape. The rank's part has its dtype, which ``all_reduce`` sums.
            dst_rank: the rank to whose part it is added.
            target_offset_nelems: the offset in the rank's part, in elements of ``tensor``.
            async_op: whether the call returns before the operation is done.
            hints: settings by name.
            timeout: the timeout; the communicator's if not given.

        Raises:
            ValueError: the tensor does not fit into the part at that offset, its elements have no sum, or the window is
                one of CUDA tensors.
            RuntimeError: there is no such rank, no tensor is registered, the tensor is not contiguous, or the operation
                failed.

        Examples:
            >>> window = comm.new_window(torch.zeros(2))
            >>> work = window.accumulate(torch.ones(2), dst_rank=0)
            >>> window.fence()
            >>> assert window.get_tensor().tolist() == ([2.0, 2.0] if comm.rank == 0 else [0.0, 0.0])
            >>> window.tensor_deregister()
        """
        return self._move(
            "accumulate",
            tensor,
            "dst_rank",
            dst_rank,
            target_offset_nelems,
            async_op,
            OpOptions.of("accumulate", timeout, hints, None),
        )

    def flush(
        self,
        dst_rank: int,
        async_op: bool = False,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | float | None = None,
    ) -> TorchWork:
        """Waits until what this rank has put and accumulated is in a rank's part. torchcomms has no such method.

        Args:
            dst_rank: the rank whose part it is.
            async_op: whether the call returns before the operation is done.
            hints: settings by name.
            timeout: the timeout; the communicator's if not given.

        Raises:
            ValueError: the window is one of CUDA tensors.
            RuntimeError: there is no such rank, no tensor is registered, or the operation failed.

        Examples:
            >>> window = comm.new_window(torch.zeros(2))
            >>> work = window.put(torch.ones(2), dst_rank=1 - comm.rank, async_op=True)
            >>> work = window.flush(1 - comm.rank)  # now the other rank has it
            >>> window.tensor_deregister()
        """
        self._comm._check_rank("flush", "dst_rank", dst_rank)
        return self._access("flush", OpOptions.of("flush", timeout, hints, None), dst_rank, async_op)

    def flush_all(self, hints: Mapping[str, str] | None = None, timeout: timedelta | float | None = None) -> None:
        """Does `flush` for all ranks.

        Args:
            hints: settings by name.
            timeout: the timeout; the communicator's if not given.

        Raises:
            ValueError: the window is one of CUDA tensors.
            RuntimeError: no tensor is registered, or the operation failed.

        Examples:
            >>> window = comm.new_window(torch.zeros(comm.size))
            >>> for rank in range(comm.size):
            ...     work = window.put(torch.ones(1), dst_rank=rank, target_offset_nelems=comm.rank, async_op=True)
            >>> window.flush_all()
            >>> window.tensor_deregister()
        """
        works = [self.flush(rank, True, hints, timeout) for rank in range(self._comm._size)]
        for work in works:
            work.wait()

    def fence(self) -> None:
        """Waits until what all ranks have put and accumulated is in the ranks' parts. Called on all ranks.

        torchcomms has no such method.

        Raises:
            ValueError: the window is one of CUDA tensors.
            RuntimeError: no tensor is registered, a put or accumulate did not end in time, a rank did not call it, or a
                rank is lost.

        Examples:
            >>> window = comm.new_window(torch.zeros(1))
            >>> work = window.accumulate(torch.ones(1), dst_rank=1 - comm.rank)
            >>> window.fence()
            >>> window.get_tensor()
            tensor([1.])
            >>> window.tensor_deregister()
        """
        not_in_graphs("fence", "the graph does not see what it changes; signal and wait_signal can be")
        self._comm._check_usable("fence")
        self._registered()
        self._c10d._window_fence(self._id)

    def signal(
        self,
        peer_rank: int | None = None,
        async_op: bool = False,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | float | None = None,
        *,
        dst_rank: int | None = None,
    ) -> TorchWork:
        """Signals a rank that the data put into its part so far is there.

        Args:
            peer_rank: the rank to signal.
            async_op: whether the call returns before the operation is done.
            hints: settings by name.
            timeout: the timeout; the communicator's if not given.
            dst_rank: another name for ``peer_rank``.

        Raises:
            TypeError: neither ``peer_rank`` nor ``dst_rank`` is given.
            RuntimeError: there is no such rank, no tensor is registered, or the operation failed.

        Examples:
            >>> window = comm.new_window(torch.zeros(1))
            >>> work = window.signal(1 - comm.rank)
            >>> work = window.wait_signal(1 - comm.rank)
            >>> window.tensor_deregister()
        """
        peer = dst_rank if peer_rank is None else peer_rank
        if peer is None:
            raise TypeError("signal: missing argument `peer_rank`")
        self._comm._check_rank("signal", "peer_rank", peer)
        return self._access("signal", OpOptions.of("signal", timeout, hints, None), peer, async_op)

    def wait_signal(
        self,
        peer_rank: int,
        async_op: bool = False,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | float | None = None,
    ) -> TorchWork:
        """Waits for a signal from a rank, and consumes it.

        Args:
            peer_rank: the rank that signals.
            async_op: whether the call returns before the operation is done.
            hints: settings by name.
            timeout: the timeout; the communicator's if not given.

        Raises:
            RuntimeError: there is no such rank, no tensor is registered, no signal came in time, or the rank is lost.

        Examples:
            >>> window = comm.new_window(torch.zeros(1))
            >>> work = window.put(torch.ones(1), dst_rank=1 - comm.rank)
            >>> work = window.signal(1 - comm.rank)
            >>> work = window.wait_signal(1 - comm.rank, timeout=30)
            >>> window.get_tensor()
            tensor([1.])
            >>> window.tensor_deregister()
        """
        self._comm._check_rank("wait_signal", "peer_rank", peer_rank)
        return self._access("wait_signal", OpOptions.of("wait_signal", timeout, hints, None), peer_rank, async_op)

    def map_remote_tensor(self, rank: int) -> torch.Tensor:
        """A rank's part as a tensor of this process. In a compiled graph it is a copy.

        This rank's own part is the registered tensor. Another rank's can be mapped if the rank is on this host and its
        tensor is memory of `TorchComm.get_mem_allocator` on the CPU; a CUDA tensor of another rank cannot. Reads and
        writes of it need synchronization, as by `signal` and `wait_signal`. It may be used after `tensor_deregister`,
        but no longer has the other rank's data once that rank has freed its tensor. `get` and `put` reach the parts of
        all ranks.

        Args:
            rank: the rank whose part it is.

        Returns:
            A tensor of the shape and dtype of this rank's.

        Raises:
            RuntimeError: there is no such rank, its part cannot be mapped or has another size than this rank's, or the
                window keeps no tensor and ``rank`` is this rank.

        Examples:
            >>> window = comm.new_window(torch.full((2,), comm.rank + 1.0))
            >>> window.map_remote_tensor(comm.rank) is window.get_tensor()
            True
            >>> window.tensor_deregister()
        """
        self._comm._check_rank("map_remote_tensor", "rank", rank)
        meta = self._registered()
        if torch.compiler.is_compiling():
            from ncclx_rs import _graph

            return _graph.window_contents(self._handle, rank, meta)
        if rank == self._comm._rank:
            if self._tensor is None:
                raise RuntimeError(f"map_remote_tensor: the window does not keep the tensor of rank {rank}, this rank")
            return self._tensor
        try:
            part = self._map(rank)
        except ValueError as error:
            raise RuntimeError(f"map_remote_tensor: the part of rank {rank} cannot be mapped: {error}") from error
        if part.nbytes != self._bytes:
            raise RuntimeError(
                f"map_remote_tensor: the part of rank {rank} has {part.nbytes} bytes, this rank's {self._bytes}"
            )
        dtype, shape, _ = meta
        return part.view(dtype).view(shape)

    def get_attr(self, peer_rank: int) -> TorchCommWindowAttr:
        """The attributes of a rank's part. It is unified if `map_remote_tensor` gives the part, and separate otherwise.

        `get_path` holds while nothing that this rank has put there is unflushed. It may change: the first `get` of a
        rank with which nothing was exchanged goes by messages, and so do all after a read that failed.

        Raises:
            RuntimeError: there is no such rank, or the window has no tensor.

        Example:
            >>> window = comm.new_window(torch.zeros(4))
            >>> window.get_attr(comm.rank).get_path
            'mapped'
            >>> window.tensor_deregister()
        """
        self._comm._check_rank("get_attr", "peer_rank", peer_rank)
        self._registered()
        attr = TorchCommWindowAttr()
        attr.get_path = self._c10d._window_get_path(self._id, peer_rank)
        if peer_rank == self._comm._rank or self._can_map(peer_rank):
            attr.access_type = TorchCommWinAccessType.WIN_ACCESS_TYPE_UNIFIED
        return attr

    def get_device_window(self, signal_count: int = -1, counter_count: int = -1, barrier_count: int = 1) -> NoReturn:
        """The window for kernels that communicate by themselves, which no device has here.

        Raises:
            RuntimeError: always.
        """
        raise no_device_side("get_device_window", "put, signal and wait_signal")

    def register_local_buffer(self, tensor: torch.Tensor) -> NoReturn:
        """Registers a buffer for such kernels; see `get_device_window`.

        Raises:
            RuntimeError: always.
        """
        raise no_device_side("register_local_buffer", "put, which takes any tensor")

    def deregister_local_buffer(self, handle: int) -> NoReturn:
        """Undoes `register_local_buffer`.

        Raises:
            RuntimeError: always.
        """
        raise no_device_side("deregister_local_buffer", "put, which takes any tensor")

    def __copy__(self) -> TorchCommWindow:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchCommWindow:
        """A new window with a copy of the tensor. Called on all ranks."""
        copied = TorchCommWindow(self._comm, self._c10d)
        memo[id(self)] = copied
        if self._tensor is not None:
            copied.tensor_register(self._tensor.clone())
        return copied

    def _registered(self) -> tuple[torch.dtype, torch.Size, torch.device]:
        if self._meta is None:
            raise RuntimeError("the window has no tensor; call tensor_register first")
        return self._meta

    def _map(self, rank: int) -> torch.Tensor:
        """The bytes of another rank's part. ValueError: they cannot be mapped."""
        if rank not in self._mapped:
            self._mapped[rank] = self._c10d._window_map(self._id, rank)
        return self._mapped[rank]

    def _can_map(self, rank: int) -> bool:
        try:
            return self._map(rank).nbytes == self._bytes
        except ValueError:
            return False

    def _move(
        self,
        operation: str,
        tensor: torch.Tensor,
        argument: str,
        rank: int,
        offset: int,
        async_op: bool,
        options: OpOptions,
    ) -> TorchWork:
        self._comm._check_rank(operation, argument, rank)
        self._comm._check_tensor(operation, tensor)
        return self._access(operation, options, tensor, rank, offset * tensor.element_size(), async_op)

    def _access(self, operation: str, options: OpOptions, *args: Any) -> TorchWork:
        """Runs an operation, or puts it into the graph that is being traced. The last of ``args`` is ``async_op``."""
        if torch.compiler.is_compiling():
            from ncclx_rs import _graph

            return _graph.issue(self._handle, f"window_{operation}", options, *args)
        self._comm._check_usable(operation)
        self._registered()
        if options.hints:
            warn_of_hints(operation, options.hints)
        access = getattr(self._c10d, f"_window_{operation}")
        try:
            work = TorchWork(access(self._id, *args, options.limit_ms))
        except ValueError as error:
            raise explained(operation, args, error) from None
        if not args[-1]:
            work.wait()
        return work
