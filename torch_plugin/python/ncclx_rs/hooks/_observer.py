"""The base of the ready-made hooks: an observer of a communicator's operations, from each call to its end."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

from ncclx_rs._comm import SplitPostHookArgs, TorchComm
from ncclx_rs._hooks import FinalizePostHookArgs, FinalizePreHookArgs, RemovableHandle
from ncclx_rs._types import OpName
from ncclx_rs._work import TorchWork

T = TypeVar("T")


class Observer(Generic[T]):
    """The base class of observers of one communicator."""

    def on_call(self, name: OpName, op_id: int, args: Any) -> T:
        """An operation is about to be issued. The other methods get what this returns."""
        raise NotImplementedError

    def on_issued(self, operation: T, work: TorchWork) -> None:
        """The operation was issued; a synchronous one has ended."""

    def on_refused(self, operation: T) -> None:
        """The call raised: the operation was refused, or failed without aborting the communicator."""

    def on_split(self, child: TorchComm) -> None:
        """The communicator was split; ``child`` is the new communicator of this process."""

    def on_aborted(self) -> None:
        """An operation failed, and the communicator is about to be aborted."""

    def on_finalized(self) -> None:
        """The communicator was finalized."""


def observe(comm: TorchComm, observer: Observer[T]) -> list[RemovableHandle]:
    """Registers an observer with a communicator."""
    # An operation whose call raises has no post-hook. Calls come one at a time, so the next call shows that the one
    # before raised. A call of c10d may stand for several operations.
    open_operations: dict[int, T] = {}
    watched = weakref.proxy(comm)

    def before(name: OpName, op_id: int, args: Any) -> None:
        call = watched._c10d_call if op_id in watched._c10d_call else ()
        for refused in [known for known in reversed(open_operations) if known not in call]:
            observer.on_refused(open_operations.pop(refused))
        if not isinstance(args, FinalizePreHookArgs):
            open_operations[op_id] = observer.on_call(name, op_id, args)

    def after(op_id: int, args: Any) -> None:
        if op_id in open_operations:
            observer.on_issued(open_operations.pop(op_id), getattr(args, "work", None) or TorchWork())
        elif isinstance(args, FinalizePostHookArgs):
            observer.on_finalized()
        if isinstance(args, SplitPostHookArgs) and args.comm is not None:
            observer.on_split(args.comm)

    def aborted() -> None:
        open_operations.clear()
        observer.on_aborted()

    return [
        comm.register_pre_hook(before),
        comm.register_post_hook(after),
        comm.register_abort_hook(aborted),
    ]
