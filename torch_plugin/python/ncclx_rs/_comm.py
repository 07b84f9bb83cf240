"""Communicators as objects."""

from __future__ import annotations

import copy
import hashlib
import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch._C import _distributed_c10d as c10d

from ncclx_rs import _graph_state, _hooks, _logging, _reconfigure
from ncclx_rs._backend_class import TorchCommBackend
from ncclx_rs._backends import C10dBackend
from ncclx_rs._c10d_hook_args import c10d_hook_args
from ncclx_rs._once import once
from ncclx_rs._operations import Hints, Operations, op_ids
from ncclx_rs._tracing import not_in_graphs
from ncclx_rs._types import CommOptions, OpName
from ncclx_rs._window import TorchCommWindow
from ncclx_rs._work import TorchWork


class TorchComm(Operations):
    """A communicator: one rank's handle on a group of ranks; made by `new_comm` and by `split`.

    Operations are issued in the same order on every rank, by one thread at a time. With ``async_op=False`` they are
    done when the call returns (CUDA tensors: in the order of the current stream); with ``async_op=True`` they return at
    once, and their tensors must be left alone until the returned work is done. ``timeout`` limits the one operation;
    ``hints`` are settings of it by name. Tensors are contiguous and on the communicator's device.

    Every operation raises ValueError or RuntimeError, with the argument and what was expected, if it was called
    wrongly: nothing is sent then, and the communicator works on. It raises RuntimeError if it failed: the text names
    the operation and the ranks at fault.
    """

    def __init__(self, backend: TorchCommBackend, name: str, device: torch.device, options: CommOptions) -> None:
        """Wraps a backend that has joined; programs call `new_comm`."""
        self._impl = backend
        self._name = name
        self._device = device
        self._options = options
        self._rank = backend.get_rank()
        self._size = backend.get_size()
        # Its ranks as the communicator that all others were split from numbers them.
        self._members = list(range(self._size))
        self._state = "not reconfigured yet" if options.enable_reconfigure else "ready"
        self._has_told_of_failure = False
        self._splits: Counter[str] = Counter()
        self._pre_hooks: _hooks.HookList[OpName, int, Any] = _hooks.HookList()
        self._post_hooks: _hooks.HookList[int, Any] = _hooks.HookList()
        self._abort_hooks: _hooks.HookList[[]] = _hooks.HookList()
        self._registered: dict[int, torch.Tensor] = {}
        self._endpoint = once(_reconfigure.Endpoint)
        self._handle = _graph_state.handle(self, name)
        if hasattr(backend, "on_failure"):
            itself = weakref.ref(self)
            backend.on_failure(lambda: _failed(itself))

    # ---- what it is ----

    def get_rank(self) -> int:
        """This process's rank."""
        return self._rank

    def get_size(self) -> int:
        """The number of ranks."""
        return self._size

    def get_name(self) -> str:
        """The communicator's name."""
        return self._name

    def get_options(self) -> CommOptions:
        """What it was made with."""
        return self._options

    def get_device(self) -> torch.device:
        """Where its tensors are."""
        return self._device

    def get_backend(self) -> str:
        """The backend's name."""
        return self._impl.get_backend_name()

    def get_backend_version(self) -> str:
        """The backend's version."""
        return self._impl.get_backend_version()

    def get_backend_impl(self) -> TorchCommBackend:
        """The backend object, with whatever methods of its own it has."""
        return self._impl

    unsafe_get_backend = get_backend_impl

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def name(self) -> str:
        return self._name

    @property
    def device(self) -> torch.device:
        return self._device

    def __copy__(self) -> TorchComm:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchComm:
        memo[id(self)] = self
        return self

    def __repr__(self) -> str:
        place = f"rank {self._rank} of {self._size}"
        return f"TorchComm({self._name!r}, {self.get_backend()}, {place}, {self._device}, {self._state})"

    # ---- its life ----

    def finalize(self) -> None:
        """Lets what is in flight finish, and leaves.

        Raises:
            RuntimeError: it was finalized before.
        """
        not_in_graphs("finalize", "it ends the communicator")
        if self._state == "finalized":
            raise RuntimeError(f"communicator `{self._name}` is already finalized")
        self._impl.wait_for_hooks()
        self._pre_hooks(OpName.finalize, _FINALIZE_OP_ID, _hooks.FinalizePreHookArgs())
        self._state = "finalized"
        self._impl.finalize()
        if dropped := _graph_state.forget(self._handle):
            warnings.warn(
                f"nobody waited for {dropped} operations that compiled code started on communicator `{self._name}`; "
                "their results were not written to their tensors",
                stacklevel=2,
            )
        self._post_hooks(_FINALIZE_OP_ID, _hooks.FinalizePostHookArgs())

    def abort(self) -> None:
        """Ends every operation in flight on this rank with an error. Does not block; may be called from any thread.

        Raises:
            RuntimeError: the backend cannot.
        """
        if not self.is_abort_supported():
            raise RuntimeError(f"abort: the backend {self.get_backend()} cannot abort")
        if self._state not in ("aborted", "finalized"):
            # What ends by this is no failure.
            self._has_told_of_failure = self._has_told_of_failure or not self._impl.has_failed()
            self._state = "aborted"
            self._impl.abort()  # type: ignore[attr-defined]

    def is_abort_supported(self) -> bool:
        """Whether `abort` works."""
        return callable(getattr(self._impl, "abort", None))

    def is_aborted(self) -> bool:
        """Whether the communicator was aborted, by `abort` or because an operation failed for good."""
        return self._state == "aborted" or (self._state == "ready" and self._impl.has_failed())

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time limit of operations issued from now on that have none of their own."""
        self._options.timeout = timeout
        self._impl.set_timeout(timeout)  # type: ignore[attr-defined]

    def set_hints(self, hints: Mapping[str, str]) -> None:
        """Adds to the communicator's hints, which its splits inherit."""
        self._options.hints.update(hints)

    def __del__(self) -> None:
        if getattr(self, "_state", "finalized") == "ready":
            warnings.warn(f"communicator `{self._name}` was not finalized", ResourceWarning, stacklevel=2)

    # ---- splitting ----

    def split(
        self,
        ranks: Sequence[int] | Sequence[Sequence[int]],
        name: str,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchComm | None:
        """Makes a communicator of some of the ranks. Called on all ranks.

        Args:
            ranks: the ranks of the caller's new communicator, which get ranks by their position in this list; empty for
                a caller that belongs to none. Or a list of such lists, the same on all ranks, of which the caller gets
                the one that it is in.
            name: the new communicator's name.
            hints: settings beside those of this communicator.
            timeout: the new communicator's time limit; this one's if not given.

        Returns:
            The new communicator, or None for callers in none.

        Raises:
            RuntimeError: ranks are not of this communicator, are repeated, or leave the caller out.
        """
        not_in_graphs("split", "it makes a communicator")
        self._check_usable("split")
        members = self._own_group(ranks)
        hook_args = _hooks.SplitPreHookArgs(members, name)
        op_id = next(op_ids)
        self._pre_hooks(OpName.split, op_id, hook_args)
        child = self._split(members, name, hints, timeout) if members else None
        self._post_hooks(op_id, SplitPostHookArgs(child))
        return child

    def _own_group(self, ranks: Sequence[int] | Sequence[Sequence[int]]) -> list[int]:
        nested = [list(group) for group in ranks if not isinstance(group, int)]
        if nested and len(nested) != len(ranks):
            raise RuntimeError("split: ranks must be a list of ranks or a list of such lists, not a mixture")
        flat = [rank for group in nested for rank in group] if nested else [int(rank) for rank in ranks]  # type: ignore
        for rank in flat:
            if not 0 <= rank < self._size:
                raise RuntimeError(f"Invalid rank {rank} in ranks. Valid ranks are 0 to {self._size - 1}")
        for rank in flat:
            if flat.count(rank) > 1:
                raise RuntimeError(f"Rank {rank} appears multiple times in ranks")
        if nested:
            return next((group for group in nested if self._rank in group), [])
        if flat and self._rank not in flat:
            raise RuntimeError(f"Current rank {self._rank} is not included in the provided ranks list")
        return flat

    def _split(self, members: list[int], name: str, hints: Hints, timeout: timedelta | None) -> TorchComm:
        options = copy.copy(self._options)
        options.name, options.enable_reconfigure = name, False
        options.rank, options.size = members.index(self._rank), len(members)
        options.hints = {**self._options.hints, **(hints or {})}
        options.timeout = timeout or self._options.timeout
        if self._options.store is not None:
            # By members alone, who have called as often: PyTorch has the others call any number of times.
            key = _digest(members)
            self._splits[key] += 1
            options.store = c10d.PrefixStore(f"split/{key}/{self._splits[key]}", self._options.store)
        backend = self._impl.split(members, name, options)  # type: ignore[attr-defined]
        child = TorchComm(backend, name, self._device, options)
        child._members = [self._members[rank] for rank in members]
        c10d_backend = getattr(backend, "c10d", None)
        if c10d_backend is not None and hasattr(c10d_backend, "_name_ranks"):
            c10d_backend._name_ranks(child._members)
        return child

    # ---- changing members ----

    def get_init_handle(self) -> str:
        """What other processes need to `reconfigure` with this one, and nobody else may know. The same at every call.

        Raises:
            RuntimeError: the backend cannot be reconfigured.
        """
        if not hasattr(self._impl, "reconfigure"):
            raise RuntimeError(f"getInitHandle not implemented by the backend {self.get_backend()}")
        return self._endpoint().handle

    def reconfigure(
        self,
        uuid: int,
        init_handles: Sequence[_reconfigure.InitHandle] | Set[_reconfigure.InitHandle],
        timeout: timedelta | None = None,
        hints: Hints = None,
    ) -> TorchWork:
        """Makes the processes of ``init_handles`` the members of this communicator, which joins them.

        Called by all of them, with the same arguments. What was in flight before ends with an error; ranks and size are
        new. May be called again, with fewer, more or other members, also after an abort or a lost rank.

        Args:
            uuid: a number that this membership has not been given before.
            init_handles: every member's `get_init_handle`. A list gives the ranks in its order; a set leaves that open.
            timeout: the time limit of joining; the communicator's if not given.
            hints: settings beside the communicator's.

        Returns:
            A work that is done.

        Raises:
            RuntimeError: the backend or the communicator cannot be reconfigured, the handles are wrong, or members did
                not come in time.
        """
        not_in_graphs("reconfigure", "it changes the communicator")
        if not hasattr(self._impl, "reconfigure"):
            raise RuntimeError(f"reconfigure not implemented by the backend {self.get_backend()}")
        if not self._options.enable_reconfigure:
            raise RuntimeError("reconfigure: the communicator was made without enable_reconfigure=True")
        if self._state == "finalized":
            raise RuntimeError(f"reconfigure: communicator `{self._name}` was finalized")
        self._impl.wait_for_hooks()
        options = copy.copy(self._options)
        options.timeout = timeout or self._options.timeout
        rendezvous = self._endpoint().rendezvous(uuid, init_handles, options.timeout)
        options.store, options.rank, options.size, secret = rendezvous
        options.hints = {**self._options.hints, **(hints or {}), "group_secret": secret}
        self._state = "not reconfigured yet"
        self._impl.reconfigure(options)
        self._options.rank, self._options.size, self._options.store = options.rank, options.size, options.store
        self._rank, self._size = options.rank, options.size
        self._members = list(range(self._size))
        self._splits.clear()
        self._state = "ready"
        self._has_told_of_failure = False
        return TorchWork()

    # ---- windows ----

    def new_window(self, tensor: torch.Tensor | None = None) -> TorchCommWindow:
        """Memory that other ranks write to. Called on all ranks.

        Args:
            tensor: what this rank lends at once; more comes by `TorchCommWindow.tensor_register`.

        Raises:
            RuntimeError: the backend has no windows.
        """
        not_in_graphs("new_window", "it makes a window")
        self._check_usable("new_window")
        c10d_backend = getattr(self._impl, "c10d", None)
        if not hasattr(c10d_backend, "_window_register"):
            raise RuntimeError(f"new_window: the backend {self.get_backend()} has no windows")
        op_id = next(op_ids)
        self._pre_hooks(OpName.new_window, op_id, _hooks.NewWindowPreHookArgs())
        window = TorchCommWindow(self, c10d_backend)
        if tensor is not None:
            window.tensor_register(tensor)
        self._post_hooks(op_id, _hooks.NewWindowPostHookArgs())
        return window

    # ---- hooks ----

    def register_pre_hook(self, callback: Callable[[OpName, int, Any], object]) -> _hooks.RemovableHandle:
        """Has ``callback(name, op_id, args)`` called before every operation, which is not issued if it raises."""
        return self._pre_hooks.add(callback)

    def register_post_hook(self, callback: Callable[[int, Any], object]) -> _hooks.RemovableHandle:
        """Has ``callback(op_id, args)`` called after every operation was issued."""
        return self._post_hooks.add(callback)

    def register_abort_hook(self, callback: Callable[[], object]) -> _hooks.RemovableHandle:
        """Has ``callback()`` called when an operation timed out or a rank was lost, before the communicator ends.

        It is called on a thread of its own, once those who wait have their error.
        """
        return self._abort_hooks.add(callback)

    # ---- as a c10d backend: what `_BackendWrapper` calls ----

    def _c10d_backend(self) -> Any:
        """The c10d backend that this communicator runs on.

        Raises:
            RuntimeError: it runs on another kind of backend.
        """
        if not isinstance(self._impl, C10dBackend):
            raise RuntimeError(f"the backend {self.get_backend()} is no c10d backend, which a process group needs")
        return self._impl.c10d

    def _has_hooks(self) -> bool:
        return bool(self._pre_hooks or self._post_hooks)

    def _before_c10d(self, name: str, *args: Any) -> list[int]:
        """Calls the pre-hooks for each operation of a c10d call, and gives their ids."""
        self._check_usable(name)
        ids = []
        for operation, hook_args in c10d_hook_args(name, args):
            ids.append(next(op_ids))
            self._pre_hooks(operation, ids[-1], hook_args)
        return ids

    def _after_c10d(self, name: str, ids: Sequence[int], work: Any) -> None:
        for op_id in ids:
            if name == "new_window":
                self._post_hooks(op_id, _hooks.NewWindowPostHookArgs())
            else:
                self._post_hooks(op_id, _hooks.CollectivePostHookArgs(TorchWork(work)))

    def _split_for_c10d(self, ranks: Sequence[int], timeout: timedelta) -> TorchComm | None:
        # Not PyTorch's name for the group, which in 2.13 can differ between its ranks.
        name = f"{self._name}/{_digest(ranks)[:8]}"
        return self.split(list(ranks) if self._rank in ranks else [], name, timeout=timeout)

    # ---- memory ----

    def get_mem_allocator(self) -> Any:
        """What makes tensors that the backend communicates best: see `MemAllocator`.

        Raises:
            RuntimeError: the backend has none.
        """
        return self._impl.get_mem_allocator()

    @property
    def mem_allocator(self) -> Any:
        return self.get_mem_allocator()

    def tensor_register(self, tensor: torch.Tensor) -> None:
        """Announces a tensor that will be communicated often.

        Raises:
            RuntimeError: it is registered already.
        """
        if tensor.data_ptr() in self._registered:
            raise RuntimeError("tensor_register: the tensor is registered already")
        self._registered[tensor.data_ptr()] = tensor

    def tensor_deregister(self, tensor: torch.Tensor) -> None:
        """Takes `tensor_register` back.

        Raises:
            RuntimeError: it is not registered.
        """
        if self._registered.pop(tensor.data_ptr(), None) is None:
            raise RuntimeError("tensor_deregister: the tensor is not registered")


@dataclass(frozen=True)
class SplitPostHookArgs:
    """What a post-hook gets of a split: the caller's new communicator, or None if the caller is in none."""

    comm: TorchComm | None


def _digest(ranks: Sequence[int]) -> str:
    return hashlib.sha256(str(list(ranks)).encode()).hexdigest()


def _failed(itself: weakref.ref[TorchComm]) -> None:
    """Acts on a failure for good, on whatever thread saw it."""
    comm = itself()
    if comm is None or comm._has_told_of_failure or comm._state == "finalized":
        return
    comm._has_told_of_failure = True
    comm._state = "aborted"
    try:
        comm._abort_hooks()
    finally:
        if comm._options.abort_process_on_timeout_or_error and not comm._options.enable_reconfigure:
            # Without an abort of the communicator, by which this rank would leave: to the others it dies.
            _abort_process(comm)
        if comm._state == "aborted" and comm.is_abort_supported():  # unless a hook has reconfigured it
            comm._impl.abort()  # type: ignore[attr-defined]


def _abort_process(comm: TorchComm) -> NoReturn:
    print(
        f"ncclx_rs: Aborting process due to timeout or error of communicator `{comm._name}`, rank {comm._rank}; "
        "abort_process_on_timeout_or_error=False would raise an exception instead",
        file=sys.stderr,
        flush=True,
    )
    # What the engine said of it.
    _logging.flush(1.0)
    os.abort()


_FINALIZE_OP_ID = 2**64 - 1
