"""What the hooks share: one object that is told of a communicator's operations, from before each to its end."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from ncclx_rs._comm import SplitPostHookArgs, TorchComm
from ncclx_rs._hooks import FinalizePostHookArgs, FinalizePreHookArgs, RemovableHandle
from ncclx_rs._types import OpName
from ncclx_rs._work import TorchWork

T = TypeVar("T")


class Observer(Generic[T]):
    """Is told what happens on one communicator; to be derived from."""

    def on_call(self, name: OpName, op_id: int, args: Any) -> T:
        """An operation is about to be issued. What this returns stands for it below."""
        raise NotImplementedError

    def on_issued(self, operation: T, work: TorchWork) -> None:
        """The operation was issued, and has ended if it was synchronous."""

    def on_refused(self, operation: T) -> None:
        """The operation raised where it was called: it was refused, or failed and left the communicator usable."""

    def on_split(self, child: TorchComm) -> None:
        """The communicator was split, and this is the part that the process is in."""

    def on_aborted(self) -> None:
        """An operation failed for good."""

    def on_finalized(self) -> None:
        """The communicator was finalized."""


def observe(comm: TorchComm, observer: Observer[T]) -> list[RemovableHandle]:
    """Has a observer told what happens on a communicator from now on."""
    # An operation that raises where it is called has no post-hook. Calls come one at a time, so the next one shows that
    # the one before has none.
    open_operation: list[T] = []

    def before(name: OpName, op_id: int, args: Any) -> None:
        if open_operation:
            observer.on_refused(open_operation.pop())
        if not isinstance(args, FinalizePreHookArgs):
            open_operation.append(observer.on_call(name, op_id, args))

    def after(op_id: int, args: Any) -> None:
        if open_operation:
            observer.on_issued(open_operation.pop(), getattr(args, "work", None) or TorchWork())
        elif isinstance(args, FinalizePostHookArgs):
            observer.on_finalized()
        if isinstance(args, SplitPostHookArgs) and args.comm is not None:
            observer.on_split(args.comm)

    def aborted() -> None:
        open_operation.clear()
        observer.on_aborted()

    return [
        comm.register_pre_hook(before),
        comm.register_post_hook(after),
        comm.register_abort_hook(aborted),
    ]
