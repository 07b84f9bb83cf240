"""`TorchComm`, the communicator of the object API."""

from __future__ import annotations

import copy
import hashlib
import itertools
import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._C import _distributed_c10d as c10d

from ncclx_rs import _bootstrap, _graph_state, _hooks, _logging, _reconfigure
from ncclx_rs._backend_class import TorchCommBackend
from ncclx_rs._backends import C10dBackend
from ncclx_rs._c10d_hook_args import c10d_hook_args
from ncclx_rs._load import native
from ncclx_rs._mistakes import no_device_side
from ncclx_rs._once import once
from ncclx_rs._operations import Hints, Operations, op_ids
from ncclx_rs._tracing import not_in_graphs
from ncclx_rs._types import (
    CommOptions,
    InitHandle,
    OpName,
    ReconfigureOptions,
    as_hints,
    as_timeout,
    default_timeout,
)
from ncclx_rs._window import TorchCommWindow
from ncclx_rs._work import TorchWork

if TYPE_CHECKING:
    from typing_extensions import Self


class TorchComm(Operations):
    """A communicator: one rank's handle on a group of ranks; made by `new_comm` and by `split`.

    Every rank issues the same operations in the same order, by one thread at a time. With ``async_op=False`` an
    operation is done when the call returns (CUDA tensors: in the order of the current stream). With ``async_op=True``
    the call returns at once, and the program must not touch the tensors until the returned work is done. ``timeout``
    and ``hints`` apply to the one operation. Tensors must be contiguous and on the communicator's device.

    An operation that is called wrongly raises TypeError for an argument of the wrong type (what is no tensor, rank,
    reduction or timeout, or options of another operation), otherwise ValueError or RuntimeError. The error names the
    argument and the expected value; nothing is sent, and the communicator stays usable. A negative timeout is a
    ValueError. An operation that fails raises RuntimeError, which names the operation and the ranks at fault.
    """

    def __init__(self, backend: TorchCommBackend, name: str, device: torch.device, options: CommOptions) -> None:
        """Wraps a backend that has joined. Programs call `new_comm` instead."""
        self._impl = backend
        self._name = name
        self._device = device
        self._options = options
        self._rank = backend.get_rank()
        self._size = backend.get_size()
        # The ranks' numbers in the communicator that all others were split from.
        self._members = list(range(self._size))
        self._state = "not reconfigured yet" if options.enable_reconfigure else "ready"
        self._has_handled_failure = False
        self._splits: Counter[str] = Counter()
        self._failed_splits: set[str] = set()
        self._pre_hooks: _hooks.HookList[OpName, int, Any] = _hooks.HookList()
        self._post_hooks: _hooks.HookList[int, Any] = _hooks.HookList()
        self._abort_hooks: _hooks.HookList[[]] = _hooks.HookList()
        # The operations of the last c10d call, for hooks to tell them from those of another call.
        self._c10d_call: list[int] = []
        self._registered: dict[int, torch.Tensor] = {}
        self._endpoint = once(_reconfigure.Endpoint)
        self._handle = _graph_state.handle(self, name)
        if hasattr(backend, "on_failure"):
            itself = weakref.ref(self)
            backend.on_failure(lambda: _handle_failure(itself))

    # ---- properties ----

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
        """The options that it was made with."""
        return self._options

    def get_device(self) -> torch.device:
        """The device of its tensors."""
        return self._device

    def get_backend(self) -> str:
        """The backend's name."""
        return self._impl.get_backend_name()

    def get_backend_version(self) -> str:
        """The backend's version."""
        return self._impl.get_backend_version()

    def get_backend_impl(self) -> TorchCommBackend:
        """The backend object, with its own methods."""
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

    # ---- end, abort and settings ----

    def finalize(self) -> None:
        """Waits until the operations in flight have ended, and leaves the communicator.

        Raises:
            RuntimeError: it is already finalized.
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
        """Ends every operation in flight on this rank with an error. Any thread may call it.

        It waits for nothing but copies that other threads of this process make to or from parts of windows.

        Raises:
            RuntimeError: the backend does not support it.
        """
        if not self.is_abort_supported():
            raise RuntimeError(f"abort: the backend {self.get_backend()} cannot abort")
        if self._state not in ("aborted", "finalized"):
            # Operations that end by this abort are no failure.
            self._has_handled_failure = self._has_handled_failure or not self._impl.has_failed()
            self._state = "aborted"
            self._impl.abort()  # type: ignore[attr-defined]

    def is_abort_supported(self) -> bool:
        """Whether the backend supports `abort`."""
        if isinstance(self._impl, C10dBackend):
            return self._impl.can_abort
        return callable(getattr(self._impl, "abort", None))

    def is_aborted(self) -> bool:
        """Whether the communicator was aborted, by `abort` or because an operation failed for good."""
        return self._state == "aborted" or (self._state == "ready" and self._impl.has_failed())

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Sets the timeout of later operations that have none of their own. Zero stands for `new_comm`'s default.

        Raises:
            TypeError: the timeout is neither a duration nor a number of seconds.
            ValueError: it is negative.
            RuntimeError: the backend does not support it.

        Examples:
            >>> comm.set_timeout(60)
            >>> comm.get_options().timeout
            datetime.timedelta(seconds=60)
        """
        limit = as_timeout("set_timeout", timeout) or default_timeout(self._options.hints)
        if not callable(getattr(self._impl, "set_timeout", None)):
            raise RuntimeError(
                f"set_timeout: the backend {self.get_backend()} does not have it; give each operation its `timeout`"
            )
        self._options.timeout = limit
        self._impl.set_timeout(limit)  # type: ignore[attr-defined]

    def set_hints(self, hints: Mapping[str, str]) -> None:
        """Adds hints that later splits and reconfigurations take; the communicator itself stays as it is until then.

        Raises:
            TypeError: the hints do not map text to text.
        """
        self._options.hints.update(as_hints("set_hints", hints))

    def __enter__(self) -> Self:
        """The communicator itself: at the end of the ``with`` block it is finalized.

        If the block ends by an exception, it is aborted before that, where its backend can: other ranks may wait for
        operations that this rank will never call.
        """
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._state == "finalized":
            return
        if kind is not None and self.is_abort_supported():
            self.abort()
        self.finalize()

    def __del__(self) -> None:
        # At the interpreter's end, modules may be gone.
        if getattr(self, "_state", "finalized") == "ready" and warnings is not None:
            warnings.warn(f"communicator `{self._name}` was not finalized", ResourceWarning, stacklevel=2)

    # ---- splitting ----

    def split(
        self,
        ranks: Sequence[int] | Sequence[Sequence[int]],
        name: str | None = None,
        hints: Hints = None,
        timeout: timedelta | float | None = None,
        options: CommOptions | None = None,
    ) -> TorchComm | None:
        """Makes a communicator of some of the ranks. Called on all ranks.

        Where NCCL runs operations on the device, its communicator is split, which waits for all ranks.

        Args:
            ranks: the ranks of the caller's new communicator; a rank's position in this list is its new rank. The list
                is empty for a caller that is in no new communicator. Or a list of such lists, the same on all ranks:
                the caller gets the communicator of the list that it is in.
            name: the new communicator's name, the same on all its ranks. The default is this one's name, the lowest of
                the ranks, and from the second split of these ranks on a number.
            hints: settings in addition to those of this communicator.
            timeout: the new communicator's timeout; this one's if not given.
            options: name, hints and timeout in one object; the arguments above win.

        Returns:
            The new communicator, or None for a caller in no list.

        Raises:
            TypeError: ``ranks`` is no list of ranks and no list of such lists, the timeout is neither a duration nor a
                number of seconds, or the hints do not map text to text.
            ValueError: the timeout is negative, or a hint has no valid value.
            RuntimeError: a rank is not in this communicator or is repeated, the list lacks the caller, or the backend
                cannot split; with NCCL also, a rank did not call it in time, or the ranks' lists do not go together.

        Examples:
            >>> pair = comm.split([0, 1], name="pair")
            >>> pair.size
            2
            >>> pair.finalize()
            >>> own = comm.split([[0], [1]])
            >>> own.size
            1
            >>> own.finalize()
        """
        not_in_graphs("split", "it makes a communicator")
        self._check_usable("split")
        members = self._own_group(ranks)
        if not callable(getattr(self._impl, "split", None)):
            raise RuntimeError(f"split: the backend {self.get_backend()} does not have it; make it with `new_comm`")
        if options is not None:
            name, hints = name or options.name or None, {**options.hints, **(hints or {})}
            timeout = options.timeout if timeout is None else timeout
        own = as_hints("split", hints)
        number = self._next_split(_digest(members))
        if name is None:
            name = f"{self._name}_{min(members, default='none')}" + (f"_{number}" if number > 1 else "")
        limit = as_timeout("split", timeout)
        hook_args = _hooks.SplitPreHookArgs(members, name)
        op_id = next(op_ids)
        self._pre_hooks(OpName.split, op_id, hook_args)
        child = None
        if members:
            child = self._split(members, number, name, own, limit)
        elif callable(split_none := getattr(self._impl, "split_none", None)):
            split_none()
        self._post_hooks(op_id, SplitPostHookArgs(child))
        return child

    def _own_group(self, ranks: Sequence[int] | Sequence[Sequence[int]]) -> list[int]:
        try:
            nested = [list(group) for group in ranks if not hasattr(group, "__index__")]
            if nested and len(nested) != len(ranks):
                raise RuntimeError("split: ranks must be a list of ranks or a list of such lists, not a mixture")
            flat = [int(rank) for rank in itertools.chain(*nested)] if nested else [int(rank) for rank in ranks]  # type: ignore
        except (TypeError, ValueError):
            raise TypeError(
                f"split: argument `ranks`: expected a list of ranks or a list of such lists, got {ranks!r}"
            ) from None
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

    def _next_split(self, key: str) -> int:
        """The number of the next split of these members, which they agree on as `_bootstrap.meeting` says.

        Only splits of these members are counted: PyTorch lets other ranks split any number of times.
        """
        number = self._splits[key] + 1
        if key in self._failed_splits and (part := self._part(key)) is not None:
            while _bootstrap.has_failed(part, number):
                number += 1
        return number

    def _part(self, key: str) -> c10d.Store | None:
        """The part of the store for the splits of these members."""
        store = self._options.store
        return None if store is None else c10d.PrefixStore(f"split/{key}", store)

    def _split(
        self, members: list[int], number: int, name: str, hints: Mapping[str, str], timeout: timedelta
    ) -> TorchComm:
        options = copy.copy(self._options)
        options.name, options.enable_reconfigure = name, False
        options.rank, options.size = members.index(self._rank), len(members)
        options.hints = {**self._options.hints, **hints}
        options.timeout = timeout or self._options.timeout
        # What a rank finds wrong by itself is not counted, as other ranks may wait for it.
        if isinstance(self._impl, C10dBackend):
            self._impl.check(self._device, options.hints)
        key = _digest(members)
        part = self._part(key)
        try:
            with _bootstrap.attempt(part, number, options.rank, options.size) as options.store:
                backend = self._impl.split(members, name, options)  # type: ignore[attr-defined]
        except BaseException:
            if part is None or _bootstrap.is_used_up(part, number, options.rank):
                self._splits[key] = number
            self._failed_splits.add(key)
            raise
        self._splits[key] = number
        self._failed_splits.discard(key)
        child = TorchComm(backend, name, self._device, options)
        child._members = [self._members[rank] for rank in members]
        c10d_backend = getattr(backend, "c10d", None)
        if c10d_backend is not None and hasattr(c10d_backend, "_name_ranks"):
            c10d_backend._name_ranks(child._members)
        return child

    # ---- reconfiguration ----

    def get_init_handle(self) -> str:
        """This process's handle, a secret that the other members need for `reconfigure`. The same at every call.

        Raises:
            RuntimeError: the backend does not support reconfiguration.
        """
        if not hasattr(self._impl, "reconfigure"):
            raise RuntimeError(f"getInitHandle not implemented by the backend {self.get_backend()}")
        return self._endpoint().handle

    def reconfigure(
        self,
        uuid: int | ReconfigureOptions,
        init_handles: Sequence[InitHandle] | Set[InitHandle] | None = None,
        timeout: timedelta | float | None = None,
        hints: Hints = None,
    ) -> TorchWork:
        """Makes the processes of ``init_handles`` the members of this communicator.

        All of them call it with the same arguments. Operations in flight end with an error; ranks and size are new. It
        may be called again, with fewer, more or other members, also after an abort or the loss of a rank.

        Args:
            uuid: a number that no earlier call with these members had; or all arguments in one object.
            init_handles: every member's `get_init_handle`. A list has the members in the order of their ranks; a set
                leaves the order open.
            timeout: the timeout of joining, at most ``connect_timeout_seconds``, 300 s; the communicator's if not
                given.
            hints: settings in addition to the communicator's.

        Returns:
            A completed work.

        Raises:
            TypeError: ``init_handles`` is missing, the timeout is neither a duration nor a number of seconds, or the
                hints do not map text to text.
            ValueError: the timeout is negative, or a hint has no valid value.
            RuntimeError: the backend or the communicator does not support reconfiguration, the handles are wrong, or
                members did not join in time.
        """
        not_in_graphs("reconfigure", "it changes the communicator")
        if isinstance(uuid, ReconfigureOptions):
            given = uuid
            uuid, init_handles = given.uuid, given.init_handles if init_handles is None else init_handles
            timeout = given.timeout if timeout is None else timeout
            hints = {**given.hints, **(hints or {})}
        if init_handles is None:
            raise TypeError("reconfigure: missing argument `init_handles`")
        if not hasattr(self._impl, "reconfigure"):
            raise RuntimeError(f"reconfigure not implemented by the backend {self.get_backend()}")
        if not self._options.enable_reconfigure:
            raise RuntimeError("reconfigure: the communicator was made without enable_reconfigure=True")
        if self._state == "finalized":
            raise RuntimeError(f"reconfigure: communicator `{self._name}` was finalized")
        own = as_hints("reconfigure", hints)
        self._impl.wait_for_hooks()
        options = copy.copy(self._options)
        options.timeout = as_timeout("reconfigure", timeout) or self._options.timeout
        rendezvous = self._endpoint().rendezvous(uuid, init_handles, options.timeout)
        options.store, options.rank, options.size, secret = rendezvous
        options.hints = {**self._options.hints, **own, "group_secret": secret}
        self._state = "not reconfigured yet"
        self._impl.reconfigure(options)
        self._options.rank, self._options.size, self._options.store = options.rank, options.size, options.store
        self._rank, self._size = options.rank, options.size
        self._members = list(range(self._size))
        self._splits.clear()
        self._failed_splits.clear()
        self._state = "ready"
        self._has_handled_failure = False
        return TorchWork()

    # ---- windows ----

    def new_window(self, tensor: torch.Tensor | None = None) -> TorchCommWindow:
        """A window: memory that other ranks access. Called on all ranks.

        Args:
            tensor: the tensor to register at once. `TorchCommWindow.tensor_register` registers one later.

        Raises:
            RuntimeError: the backend has no windows.

        Examples:
            >>> window = comm.new_window(torch.zeros(4))
            >>> window.get_size()
            16
            >>> window.tensor_deregister()
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
        """Calls ``callback(name, op_id, args)`` before every operation that `OpName` lists.

        If it raises, the operation is not issued. Accesses to windows, `all_gather_p_init`, `all_gather_p_exec`,
        `all_gather_p_free` and `reconfigure` have no hooks.
        """
        return self._pre_hooks.add(callback)

    def register_post_hook(self, callback: Callable[[int, Any], object]) -> _hooks.RemovableHandle:
        """Calls ``callback(op_id, args)`` after every operation that `OpName` lists was issued."""
        return self._post_hooks.add(callback)

    def register_abort_hook(self, callback: Callable[[], object]) -> _hooks.RemovableHandle:
        """Calls ``callback()`` when an operation timed out or a rank was lost, before the communicator is aborted.

        The call runs on a thread of its own, after the waiting threads have got their error.
        """
        return self._abort_hooks.add(callback)

    # ---- called by `_BackendWrapper` ----

    def _c10d_backend(self) -> Any:
        """The c10d backend that this communicator runs on.

        Raises:
            RuntimeError: its backend is not one of c10d's, or it has no members yet.
        """
        if not isinstance(self._impl, C10dBackend):
            raise RuntimeError(f"the backend {self.get_backend()} is no c10d backend, which a process group needs")
        if self._impl.c10d is None:
            raise RuntimeError(f"communicator `{self._name}` has no members: call reconfigure first")
        return self._impl.c10d

    def _has_hooks(self) -> bool:
        return bool(self._pre_hooks or self._post_hooks)

    def _before_c10d(self, name: str, *args: Any) -> list[int]:
        """Calls the pre-hooks for each operation of a c10d call; returns the operations' ids."""
        self._check_usable(name)
        operations = c10d_hook_args(name, args)
        self._c10d_call = [next(op_ids) for _ in operations]
        for op_id, (operation, hook_args) in zip(self._c10d_call, operations, strict=True):
            self._pre_hooks(operation, op_id, hook_args)
        return self._c10d_call

    def _after_c10d(self, name: str, ids: Sequence[int], work: Any) -> None:
        for op_id in ids:
            if name == "new_window":
                self._post_hooks(op_id, _hooks.NewWindowPostHookArgs())
            else:
                self._post_hooks(op_id, _hooks.CollectivePostHookArgs(TorchWork(work)))

    def _split_for_c10d(self, ranks: Sequence[int], timeout: timedelta) -> TorchComm | None:
        # Not PyTorch's name of the group: in 2.13 it can differ between the ranks.
        name = f"{self._name}/{_digest(ranks)[:8]}"
        return self.split(list(ranks) if self._rank in ranks else [], name, timeout=timeout)

    # ---- memory ----

    def get_device_transport(self) -> NoReturn:
        """The transport for kernels that communicate by themselves, which no device has here.

        Raises:
            RuntimeError: always.
        """
        raise no_device_side("get_device_transport", "the operations of the communicator, or a window")

    def get_mem_allocator(self) -> Any:
        """The allocator of tensors that the backend communicates fastest.

        It is a `MemAllocator` if the communicator's device is the CPU, and one for `torch.cuda.MemPool` if it is CUDA.

        Raises:
            RuntimeError: the backend has no allocator.
        """
        return self._impl.get_mem_allocator()

    @property
    def mem_allocator(self) -> Any:
        return self.get_mem_allocator()

    def tensor_register(self, tensor: torch.Tensor) -> None:
        """Registers a tensor that will be communicated often.

        Where tensors go by NCCL or RCCL, the library then takes a CUDA tensor in place in collectives, as it does
        memory of `get_mem_allocator` anyway. Ranks need not register together, but to each collective all pass
        registered tensors, or none does. A warning says so where the library cannot. The memory is kept until
        `tensor_deregister`, or the end of the communicator.

        Raises:
            RuntimeError: it is already registered.
            ValueError: where tensors go by a library, the tensor is not contiguous.
        """
        if tensor.data_ptr() in self._registered:
            raise RuntimeError("tensor_register: the tensor is registered already")
        if isinstance(self._impl, C10dBackend):
            self._impl.register(tensor)
        self._registered[tensor.data_ptr()] = tensor

    def tensor_deregister(self, tensor: torch.Tensor) -> None:
        """Undoes `tensor_register`. Waits for what the tensor's device does, where a library had it.

        Raises:
            RuntimeError: it is not registered.
        """
        registered = self._registered.pop(tensor.data_ptr(), None)
        if registered is None:
            raise RuntimeError("tensor_deregister: the tensor is not registered")
        if isinstance(self._impl, C10dBackend):
            self._impl.deregister(registered)


@dataclass(frozen=True)
class SplitPostHookArgs:
    """What a post-hook gets of a split: the caller's new communicator, or None if the caller is in none."""

    comm: TorchComm | None


# What a post-hook gets.
PostHookArgs = (
    _hooks.CollectivePostHookArgs
    | SplitPostHookArgs
    | _hooks.NewWindowPostHookArgs
    | _hooks.BatchOpIssuePostHookArgs
    | _hooks.FinalizePostHookArgs
)


def _digest(ranks: Sequence[int]) -> str:
    return hashlib.sha256(str(list(ranks)).encode()).hexdigest()


def _handle_failure(itself: weakref.ref[TorchComm]) -> None:
    """Aborts a communicator whose backend has failed, on the thread that noticed it."""
    comm = itself()
    if comm is None or comm._has_handled_failure or comm._state == "finalized":
        return
    comm._has_handled_failure = True
    comm._state = "aborted"
    try:
        for hook in comm._abort_hooks:
            # Its exception is told before the process ends, and does not keep the next hook from running.
            native()._call_hook(hook)
    finally:
        if comm._options.abort_process_on_timeout_or_error and not comm._options.enable_reconfigure:
            # The communicator is not aborted first, which would be a goodbye: the other ranks must see a dead rank.
            _abort_process(comm)
        if comm._state == "aborted" and comm.is_abort_supported():  # unless a hook has reconfigured it
            comm._impl.abort()  # type: ignore[attr-defined]


def _abort_process(comm: TorchComm) -> NoReturn:
    try:
        print(
            f"ncclx_rs: Aborting process due to timeout or error of communicator `{comm._name}`, rank {comm._rank}; "
            "abort_process_on_timeout_or_error=False would raise an exception instead",
            file=sys.stderr,
            flush=True,
        )
    finally:  # also if nobody reads the standard error any more
        # Shows what the engine has logged about the failure.
        _logging.flush(1.0)
        os.abort()


_FINALIZE_OP_ID = 2**64 - 1
