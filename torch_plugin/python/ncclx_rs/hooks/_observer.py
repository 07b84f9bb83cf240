"""What the hooks share: one object that is told of a communicator's operations, from before each to its end."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from ncclx_rs._comm import SplitPostHookArgs, TorchComm
from ncclx_rs._hooks import FinalizePostHookArgs, FinalizePreHookArgs, RemovableHandle
from ncclx_rs._types import OpName
from ncclx_rs._work import TorchWork

T = TypeVar("T")


class Follower(Generic[T]):
    """Is told what happens on one communicator; to be derived from."""

    def begin(self, name: OpName, op_id: int, args: Any) -> T:
        """An operation is about to be issued. What this returns stands for it below."""
        raise NotImplementedError

    def issued(self, operation: T, work: TorchWork) -> None:
        """The operation was issued, and has ended if it was synchronous."""

    def withdrawn(self, operation: T) -> None:
        """The operation raised where it was called: it was refused, or failed and left the communicator usable."""

    def split(self, child: TorchComm) -> None:
        """The communicator was split, and this is the part that the process is in."""

    def aborted(self) -> None:
        """An operation failed for good."""

    def finalized(self) -> None:
        """The communicator was finalized."""


def follow(comm: TorchComm, follower: Follower[T]) -> list[RemovableHandle]:
    """Has a follower told what happens on a communicator from now on."""
    # An operation that raises where it is called has no post-hook. Calls come one at a time, so the next one shows that
    # the one before has none.
    open_operation: list[T] = []

    def before(name: OpName, op_id: int, args: Any) -> None:
        if open_operation:
            follower.withdrawn(open_operation.pop())
        if not isinstance(args, FinalizePreHookArgs):
            open_operation.append(follower.begin(name, op_id, args))

    def after(op_id: int, args: Any) -> None:
        if open_operation:
            follower.issued(open_operation.pop(), getattr(args, "work", None) or TorchWork())
        elif isinstance(args, FinalizePostHookArgs):
            follower.finalized()
        if isinstance(args, SplitPostHookArgs) and args.comm is not None:
            follower.split(args.comm)

    def aborted() -> None:
        open_operation.clear()
        follower.aborted()

    return [
        comm.register_pre_hook(before),
        comm.register_post_hook(after),
        comm.register_abort_hook(aborted),
    ]
