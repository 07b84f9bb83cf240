"""Communicators as objects."""

from __future__ import annotations

import copy
import itertools
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch._C import _distributed_c10d as c10d

from ncclx_rs import _bootstrap, _hooks, _reconfigure
from ncclx_rs._backends import C10dBackend, TorchCommBackend, accepts_options, make_backend
from ncclx_rs._batch import BatchSendRecv, P2POp
from ncclx_rs._types import (
    AllGatherOptions,
    AllGatherPExecOptions,
    AllGatherSingleOptions,
    AllReduceOptions,
    AllToAllOptions,
    AllToAllSingleOptions,
    AllToAllvSingleOptions,
    BarrierOptions,
    BroadcastOptions,
    CommOptions,
    GatherOptions,
    OpName,
    OpOptions,
    P2POpType,
    RecvOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ReduceScatterSingleOptions,
    ScatterOptions,
    SendOptions,
)
from ncclx_rs._work import TorchWork, together

Hints = Mapping[str, str] | None
Tensors = Sequence[torch.Tensor]


class TorchComm:
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
        self._endpoint: _reconfigure.Endpoint | None = None
        self._splits = itertools.count()
        self._pre_hooks: _hooks.HookList[OpName, int, Any] = _hooks.HookList()
        self._post_hooks: _hooks.HookList[int, Any] = _hooks.HookList()
        self._abort_hooks: _hooks.HookList[[]] = _hooks.HookList()
        self._registered: dict[int, torch.Tensor] = {}
        if isinstance(backend, C10dBackend):
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
        if self._state == "finalized":
            raise RuntimeError(f"communicator `{self._name}` is already finalized")
        self._pre_hooks(OpName.finalize, _FINALIZE_OP_ID, _hooks.FinalizePreHookArgs())
        self._state = "finalized"
        self._impl.finalize()
        self._post_hooks(_FINALIZE_OP_ID, _hooks.FinalizePostHookArgs())

    def abort(self) -> None:
        """Ends every operation in flight on this rank with an error. Does not block; may be called from any thread.

        Raises:
            RuntimeError: the backend cannot.
        """
        if not self.is_abort_supported():
            raise RuntimeError(f"abort: the backend {self.get_backend()} cannot abort")
        if self._state not in ("aborted", "finalized"):
            self._state = "aborted"
            self._impl.abort()  # type: ignore[attr-defined]

    def is_abort_supported(self) -> bool:
        """Whether `abort` works."""
        return callable(getattr(self._impl, "abort", None))

    def is_aborted(self) -> bool:
        """Whether the communicator was aborted, by `abort` or because an operation failed for good."""
        return self._state == "aborted"

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

    # ---- point to point ----

    def send(
        self, tensor: torch.Tensor, dst: int, async_op: bool, hints: Hints = None, timeout: timedelta | None = None
    ) -> TorchWork:
        """Sends ``tensor`` to rank ``dst``. Messages between two ranks arrive in the order they were sent."""
        self._check_rank("dst", dst)
        told = _hooks.SendPreHookArgs(tensor, dst, async_op)
        return self._issue(OpName.send, told, SendOptions(timeout, hints), tensor, dst, async_op)

    def recv(
        self, tensor: torch.Tensor, src: int, async_op: bool, hints: Hints = None, timeout: timedelta | None = None
    ) -> TorchWork:
        """Receives into ``tensor`` the next message from rank ``src``, of the same size."""
        self._check_rank("src", src)
        told = _hooks.RecvPreHookArgs(tensor, src, async_op)
        return self._issue(OpName.recv, told, RecvOptions(timeout, hints), tensor, src, async_op)

    def batch_op_create(self) -> BatchSendRecv:
        """An empty batch of sends and receives."""
        return BatchSendRecv(self)

    def _issue_batch(self, ops: Sequence[P2POp], async_op: bool, options: OpOptions) -> TorchWork:
        self._check_usable("batch")
        op_id = next(_op_ids)
        self._pre_hooks(OpName.batch_op_issue, op_id, _hooks.BatchOpIssuePreHookArgs(len(ops), async_op, list(ops)))
        names = {P2POpType.SEND: OpName.send, P2POpType.RECV: OpName.recv}
        work = together([self._perform(names[op.type], options, op.tensor, op.peer, True) for op in ops])
        self._post_hooks(op_id, _hooks.BatchOpIssuePostHookArgs(work))
        if not async_op:
            work.wait()
        return work

    # ---- collectives ----

    def broadcast(
        self, tensor: torch.Tensor, root: int, async_op: bool, hints: Hints = None, timeout: timedelta | None = None
    ) -> TorchWork:
        """Copies the root's ``tensor`` into everybody's."""
        self._check_rank("root", root)
        told = _hooks.BroadcastPreHookArgs(tensor, root, async_op)
        return self._issue(OpName.broadcast, told, BroadcastOptions(timeout, hints), tensor, root, async_op)

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp, async_op: bool, hints: Hints = None, timeout: timedelta | None = None
    ) -> TorchWork:
        """Combines the ranks' tensors, of one shape, element by element; every rank gets the result in place."""
        told = _hooks.AllReducePreHookArgs(tensor, op, async_op)
        return self._issue(OpName.all_reduce, told, AllReduceOptions(timeout, hints), tensor, op, async_op)

    allreduce = all_reduce

    def reduce(
        self,
        tensor: torch.Tensor,
        root: int,
        op: ReduceOp,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """As `all_reduce`, for the root alone. What others have in ``tensor`` afterwards is undefined."""
        self._check_rank("root", root)
        told = _hooks.ReducePreHookArgs(tensor, root, op, async_op)
        return self._issue(OpName.reduce, told, ReduceOptions(timeout, hints), tensor, root, op, async_op)

    def all_gather(
        self,
        tensor_list: Tensors,
        tensor: torch.Tensor,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Gives everybody each rank's ``tensor``: ``tensor_list[r]`` is that of rank r. All are of one size."""
        self._check_length("tensor_list", tensor_list)
        told = _hooks.AllGatherPreHookArgs(tensor, list(tensor_list), async_op)
        return self._issue(OpName.all_gather, told, AllGatherOptions(timeout, hints), tensor_list, tensor, async_op)

    def all_gather_v(
        self,
        tensor_list: Tensors,
        tensor: torch.Tensor,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """As `all_gather`, where each rank's tensor may be of its own size."""
        self._check_length("tensor_list", tensor_list)
        told = _hooks.AllGatherVPreHookArgs(tensor, list(tensor_list), async_op)
        return self._issue(OpName.all_gather_v, told, AllGatherOptions(timeout, hints), tensor_list, tensor, async_op)

    def all_gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """As `all_gather`, into one tensor of ``size`` times the elements of ``input``."""
        told = _hooks.AllGatherSinglePreHookArgs(input, output, async_op)
        options = AllGatherSingleOptions(timeout, hints)
        return self._issue(OpName.all_gather_single, told, options, output, input, async_op)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input_list: Tensors,
        op: ReduceOp,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Combines ``input_list[r]`` of all ranks into the ``output`` of rank r. All are of one size."""
        self._check_length("input_list", input_list)
        told = _hooks.ReduceScatterPreHookArgs(list(input_list), output, op, async_op)
        options = ReduceScatterOptions(timeout, hints)
        return self._issue(OpName.reduce_scatter, told, options, output, input_list, op, async_op)

    def reduce_scatter_v(
        self,
        output: torch.Tensor,
        input_list: Tensors,
        op: ReduceOp,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """As `reduce_scatter`, where each rank's part may be of its own size."""
        self._check_length("input_list", input_list)
        told = _hooks.ReduceScatterVPreHookArgs(list(input_list), output, op, async_op)
        options = ReduceScatterOptions(timeout, hints)
        return self._issue(OpName.reduce_scatter_v, told, options, output, input_list, op, async_op)

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: ReduceOp,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """As `reduce_scatter`, from one tensor of ``size`` times the elements of ``output``."""
        told = _hooks.ReduceScatterSinglePreHookArgs(input, output, op, async_op)
        options = ReduceScatterSingleOptions(timeout, hints)
        return self._issue(OpName.reduce_scatter_single, told, options, output, input, op, async_op)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sends the r-th of ``size`` equal blocks of ``input`` to rank r; block r of ``output`` comes from rank r."""
        told = _hooks.AllToAllSinglePreHookArgs(input, output, async_op)
        options = AllToAllSingleOptions(timeout, hints)
        return self._issue(OpName.all_to_all_single, told, options, output, input, async_op)

    def all_to_all_v_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """As `all_to_all_single`, with blocks of the given numbers of rows of the first dimension, one a rank."""
        outputs, inputs = list(output_split_sizes), list(input_split_sizes)
        told = _hooks.AllToAllVSinglePreHookArgs(input, output, inputs, outputs, async_op)
        options = AllToAllvSingleOptions(timeout, hints)
        return self._issue(OpName.all_to_all_v_single, told, options, output, input, outputs, inputs, async_op)

    def all_to_all(
        self,
        output_tensor_list: Tensors,
        input_tensor_list: Tensors,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sends ``input_tensor_list[r]`` to rank r; ``output_tensor_list[r]`` comes from rank r."""
        self._check_length("output_tensor_list", output_tensor_list)
        self._check_length("input_tensor_list", input_tensor_list)
        told = _hooks.AllToAllPreHookArgs(list(input_tensor_list), list(output_tensor_list), async_op)
        options = AllToAllOptions(timeout, hints)
        return self._issue(OpName.all_to_all, told, options, output_tensor_list, input_tensor_list, async_op)

    def barrier(self, async_op: bool, hints: Hints = None, timeout: timedelta | None = None) -> TorchWork:
        """Is done once every rank has called it."""
        return self._issue(
            OpName.barrier, _hooks.BarrierPreHookArgs(async_op), BarrierOptions(timeout, hints), async_op
        )

    def scatter(
        self,
        output_tensor: torch.Tensor,
        input_tensor_list: Tensors,
        root: int,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Gives rank r the root's ``input_tensor_list[r]``. Others pass an empty list."""
        self._check_rank("root", root)
        if self._rank == root:
            self._check_length("input_tensor_list", input_tensor_list)
        told = _hooks.ScatterPreHookArgs(output_tensor, list(input_tensor_list), root, async_op)
        options = ScatterOptions(timeout, hints)
        return self._issue(OpName.scatter, told, options, output_tensor, input_tensor_list, root, async_op)

    def gather(
        self,
        output_tensor_list: Tensors,
        input_tensor: torch.Tensor,
        root: int,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Gives the root each rank's ``input_tensor`` in ``output_tensor_list[r]``. Others pass an empty list."""
        self._check_rank("root", root)
        if self._rank == root:
            self._check_length("output_tensor_list", output_tensor_list)
        told = _hooks.GatherPreHookArgs(input_tensor, list(output_tensor_list), root, async_op)
        options = GatherOptions(timeout, hints)
        return self._issue(OpName.gather, told, options, output_tensor_list, input_tensor, root, async_op)

    def gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        root: int,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """As `gather`, into one tensor, whose first dimension is ``size`` times that of ``input``.

        What others than the root pass as ``output`` is left alone.
        """
        self._check_rank("root", root)
        told = _hooks.GatherSinglePreHookArgs(input, output, root, async_op)
        return self._issue(OpName.gather_single, told, GatherOptions(timeout, hints), output, input, root, async_op)

    # ---- persistent all_gather ----

    def all_gather_p_init(
        self, output: torch.Tensor, hints: Hints = None, timeout: timedelta | None = None
    ) -> AllGatherPHandle:
        """Prepares an all_gather that is repeated into the same ``output``. Called on all ranks."""
        self._check_usable("all_gather_p_init")
        self._check_tensor("all_gather_p_init", output)
        if output.numel() % self._size:
            raise RuntimeError(f"all_gather_p_init: output of {output.numel()} elements is not shared by {self._size}")
        return AllGatherPHandle(output)

    def all_gather_p_exec(
        self,
        handle: AllGatherPHandle,
        input: torch.Tensor,
        async_op: bool,
        hints: Hints = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Gathers every rank's ``input`` into the output that the handle was made for."""
        if handle.output is None:
            raise RuntimeError("all_gather_p_exec: the handle was freed")
        options = AllGatherPExecOptions(timeout, hints)
        return self._perform(OpName.all_gather_single, options, handle.output, input, async_op)

    def all_gather_p_free(self, handle: AllGatherPHandle) -> None:
        """Releases a handle of `all_gather_p_init`."""
        handle.output = None

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
        self._check_usable("split")
        number = next(self._splits)
        members = self._own_group(ranks)
        told = _hooks.SplitPreHookArgs(members, name)
        op_id = next(_op_ids)
        self._pre_hooks(OpName.split, op_id, told)
        child = self._split(members, name, number, hints, timeout) if members else None
        self._post_hooks(op_id, _hooks.SplitPostHookArgs(child))
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

    def _split(self, members: list[int], name: str, number: int, hints: Hints, timeout: timedelta | None) -> TorchComm:
        options = copy.copy(self._options)
        options.name, options.enable_reconfigure = name, False
        options.rank, options.size = members.index(self._rank), len(members)
        options.hints = {**self._options.hints, **(hints or {})}
        options.timeout = timeout or self._options.timeout
        if self._options.store is not None:
            prefix = f"split/{number}/{min(members)}/{name}"
            options.store = c10d.PrefixStore(prefix, self._options.store)
        backend = self._impl.split(members, name, options)  # type: ignore[attr-defined]
        child = TorchComm(backend, name, self._device, options)
        child._members = [self._members[rank] for rank in members]
        return child

    # ---- changing members ----

    def get_init_handle(self) -> str:
        """What other processes need to `reconfigure` with this one. The same at every call.

        Raises:
            RuntimeError: the backend cannot be reconfigured.
        """
        if not hasattr(self._impl, "reconfigure"):
            raise RuntimeError(f"getInitHandle not implemented by the backend {self.get_backend()}")
        if self._endpoint is None:
            self._endpoint = _reconfigure.Endpoint()
        return self._endpoint.handle

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
        if not hasattr(self._impl, "reconfigure"):
            raise RuntimeError(f"reconfigure not implemented by the backend {self.get_backend()}")
        if not self._options.enable_reconfigure:
            raise RuntimeError("reconfigure: the communicator was made without enable_reconfigure=True")
        if self._state == "finalized":
            raise RuntimeError(f"reconfigure: communicator `{self._name}` was finalized")
        members = _reconfigure.membership(init_handles, self.get_init_handle())
        options = copy.copy(self._options)
        options.timeout = timeout or self._options.timeout
        options.hints = {**self._options.hints, **(hints or {})}
        options.rank, options.size = members.index(self.get_init_handle()), len(members)
        options.store = _reconfigure.meeting_place(uuid, members, options.timeout)
        self._state = "not reconfigured yet"
        self._impl.reconfigure(options)
        self._options.rank, self._options.size, self._options.store = options.rank, options.size, options.store
        self._rank, self._size = options.rank, options.size
        self._members = list(range(self._size))
        self._splits = itertools.count()
        self._state = "ready"
        return TorchWork()

    # ---- windows ----

    def new_window(self, tensor: torch.Tensor | None = None) -> Any:
        """Memory that other ranks write to. Called on all ranks.

        Raises:
            RuntimeError: the backend has no windows.
        """
        self._check_usable("new_window")
        if not hasattr(self._impl, "new_window"):
            raise RuntimeError(f"new_window: the backend {self.get_backend()} has no windows")
        op_id = next(_op_ids)
        self._pre_hooks(OpName.new_window, op_id, _hooks.NewWindowPreHookArgs())
        window = self._impl.new_window(tensor)
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
        """Has ``callback()`` called when an operation timed out or a rank was lost, before anything else is done."""
        return self._abort_hooks.add(callback)

    # ---- memory ----

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

    # ---- what all operations share ----

    def _check_usable(self, operation: str) -> None:
        if self._state != "ready":
            raise RuntimeError(f"{operation}: communicator `{self._name}` is {self._state}")

    def _check_rank(self, parameter: str, rank: int) -> None:
        if not 0 <= rank < self._size:
            raise RuntimeError(f"{parameter} must be in range [0, {self._size}), but got {rank}")

    def _check_length(self, parameter: str, tensors: Tensors) -> None:
        if len(tensors) != self._size:
            raise RuntimeError(f"{parameter} must hold {self._size} tensors, one a rank, but holds {len(tensors)}")

    def _check_tensor(self, operation: str, tensor: torch.Tensor) -> None:
        if not tensor.is_contiguous():
            raise RuntimeError(f"{operation}: tensors must be contiguous, got strides {tuple(tensor.stride())}")
        if tensor.device.type != self._device.type:
            raise RuntimeError(
                f"{operation}: tensors must be on {self._device}, as communicator `{self._name}` is, "
                f"got one on {tensor.device}"
            )

    def _issue(self, name: OpName, told: Any, options: OpOptions, *args: Any) -> TorchWork:
        """Runs the hooks around an operation of the backend."""
        self._check_usable(name.name)
        if not (self._pre_hooks or self._post_hooks):
            return self._perform(name, options, *args)
        op_id = next(_op_ids)
        self._pre_hooks(name, op_id, told)
        work = self._perform(name, options, *args)
        self._post_hooks(op_id, _hooks.CollectivePostHookArgs(work))
        return work

    def _perform(self, name: OpName, options: OpOptions, *args: Any) -> TorchWork:
        self._check_usable(name.name)
        for arg in args:
            for tensor in [arg] if isinstance(arg, torch.Tensor) else arg if isinstance(arg, list | tuple) else ():
                if isinstance(tensor, torch.Tensor):
                    self._check_tensor(name.name, tensor)
        for hint in options.hints:
            _warn_unknown_hint(hint)
        method = getattr(self._impl, name.name, None)
        if method is None:
            raise RuntimeError(f"{name.name}: the backend {self.get_backend()} does not have it")
        extra = (options,) if accepts_options(getattr(method, "__func__", method)) else ()
        work = TorchWork(method(*args, *extra))
        async_op = args[-1]
        if not async_op:
            work.wait()
        return work


class AllGatherPHandle:
    """A prepared all_gather; see `TorchComm.all_gather_p_init`."""

    def __init__(self, output: torch.Tensor) -> None:
        self.output: torch.Tensor | None = output


def new_comm(
    backend: str,
    device: torch.device | str,
    name: str | None = None,
    abort_process_on_timeout_or_error: bool | None = None,
    timeout: timedelta | None = None,
    is_high_priority_stream: bool | None = None,
    store: c10d.Store | None = None,
    enable_reconfigure: bool = False,
    hints: Hints = None,
    *,
    rank: int | None = None,
    size: int | None = None,
) -> TorchComm:
    """Makes a communicator of all ranks. Called on all of them; returns when all have come.

    Args:
        backend: ``ncclx`` (the engine of this package), ``gloo`` or another backend of the installed PyTorch, or one
            that was registered.
        device: where the tensors are.
        name: the name, in messages; the same on every rank. Made up if not given.
        abort_process_on_timeout_or_error: whether the process ends when an operation times out or a rank is lost;
            otherwise the operation raises, and so does every later one. The default is true, or what
            ``TORCHCOMM_ABORT_ON_ERROR`` says.
        timeout: the time limit of joining and of operations that have none of their own. The default is 600 s, or
            ``TORCHCOMM_TIMEOUT_SECONDS``.
        is_high_priority_stream: whether CUDA operations run on a stream of high priority.
        store: where the ranks meet. The default is a TCP store at ``MASTER_ADDR`` and ``MASTER_PORT``.
        enable_reconfigure: whether the members may change later.
        hints: settings by name; unknown ones are warned about.
        rank: this process's rank. The default is what the launcher's environment says, as for ``size``.
        size: the number of ranks.

    Raises:
        ModuleNotFoundError: there is no such backend.
        RuntimeError: rank, size or the meeting place are not known, or ranks did not come in time.
    """
    impl = make_backend(backend)
    if enable_reconfigure and not hasattr(impl, "reconfigure"):
        raise RuntimeError(f"new_comm: the backend {backend} does not support enable_reconfigure")
    options = CommOptions()
    options.name = f"comm{next(_unnamed)}" if name is None else name
    options.abort_process_on_timeout_or_error = (
        _flag("TORCHCOMM_ABORT_ON_ERROR", True)
        if abort_process_on_timeout_or_error is None
        else abort_process_on_timeout_or_error
    )
    options.timeout = timeout or timedelta(seconds=float(os.environ.get("TORCHCOMM_TIMEOUT_SECONDS", "600")))
    options.enable_reconfigure = enable_reconfigure
    options.hints = dict(hints or {})
    if is_high_priority_stream is not None:
        options.hints.setdefault("is_high_priority_stream", str(is_high_priority_stream).lower())
    device = torch.device(device)
    if enable_reconfigure:
        pass  # members come by `reconfigure`, from whatever places their handles name
    elif isinstance(impl, C10dBackend) or rank is not None or size is not None:
        if rank is None or size is None:
            rank, size = (0, 1) if backend == "fake" else _bootstrap.place()
        options.rank, options.size = rank, size
        options.store = _bootstrap.store_for(options.name, store, rank, size, options.timeout)
    else:
        options.store = store
    impl.init(device, options.name, options)
    return TorchComm(impl, options.name, device, options)


def _BackendWrapper(comm: TorchComm) -> Any:
    """The c10d backend under a communicator, for a ``torch.distributed.ProcessGroup``; ``get_comm()`` is the way back.

    Raises:
        RuntimeError: the communicator's backend is not one of c10d's.
    """
    impl = comm.get_backend_impl()
    if not isinstance(impl, C10dBackend):
        raise RuntimeError(f"the backend {comm.get_backend()} is no c10d backend, which a process group needs")
    if hasattr(impl.c10d, "__dict__"):
        impl.c10d.get_comm = lambda: comm
    return impl.c10d


def _failed(itself: weakref.ref[TorchComm]) -> None:
    """Acts on a failure for good, on whatever thread saw it."""
    comm = itself()
    if comm is None or comm._state != "ready":
        return
    comm._state = "aborted"
    try:
        comm._abort_hooks()
    finally:
        if comm.is_abort_supported():
            comm._impl.abort()  # type: ignore[attr-defined]
        if comm._options.abort_process_on_timeout_or_error and not comm._options.enable_reconfigure:
            _abort_process(comm)


def _abort_process(comm: TorchComm) -> NoReturn:
    print(
        f"ncclx_rs: Aborting process due to timeout or error of communicator `{comm._name}`, rank {comm._rank}; "
        "abort_process_on_timeout_or_error=False would raise an exception instead",
        file=sys.stderr,
        flush=True,
    )
    os.abort()


def _flag(variable: str, default: bool) -> bool:
    text = os.environ.get(variable)
    if text is None:
        return default
    if text.lower() in ("1", "true", "yes", "y"):
        return True
    if text.lower() in ("0", "false", "no", "n"):
        return False
    raise RuntimeError(f"new_comm: {variable} must be true or false, got {text!r}")


_warned: set[str] = set()
_warned_lock = threading.Lock()


def _warn_unknown_hint(name: str) -> None:
    with _warned_lock:
        if name in _warned:
            return
        _warned.add(name)
    warnings.warn(f"ncclx_rs: the hint {name!r} is not known to any operation and is ignored", stacklevel=4)


# One count for the process, so that hooks on several communicators can be put in order.
_op_ids = itertools.count()
_unnamed = itertools.count()
_FINALIZE_OP_ID = 2**64 - 1
