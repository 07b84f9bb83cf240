"""Hooks of a communicator: their lists, handles and arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, ParamSpec

import torch

if TYPE_CHECKING:
    from ncclx_rs._types import P2POp, ReduceOp
    from ncclx_rs._work import TorchWork

P = ParamSpec("P")


class RemovableHandle:
    """Removes a registered hook. Dropping the handle does not remove the hook."""

    def __init__(self, remove: Callable[[], object]) -> None:
        self._remove = remove

    def remove(self) -> None:
        """Removes the hook. Idempotent."""
        self._remove()


class HookList(Generic[P]):
    """The hooks of one kind, called in the order of their registration."""

    def __init__(self) -> None:
        self._hooks: dict[int, Callable[P, object]] = {}
        self._keys = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def add(self, hook: Callable[P, object]) -> RemovableHandle:
        key = next(self._keys)
        self._hooks[key] = hook
        return RemovableHandle(lambda: self._hooks.pop(key, None))

    def __iter__(self) -> Iterator[Callable[P, object]]:
        return iter(list(self._hooks.values()))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for hook in self:
            hook(*args, **kwargs)


# ---- arguments of pre-hooks, by operation ----


@dataclass(frozen=True)
class SendPreHookArgs:
    tensor: torch.Tensor
    peer: int
    async_op: bool


@dataclass(frozen=True)
class RecvPreHookArgs:
    tensor: torch.Tensor
    peer: int
    async_op: bool


@dataclass(frozen=True)
class BroadcastPreHookArgs:
    tensor: torch.Tensor
    root: int
    async_op: bool


@dataclass(frozen=True)
class AllReducePreHookArgs:
    tensor: torch.Tensor
    op: ReduceOp
    async_op: bool


@dataclass(frozen=True)
class ReducePreHookArgs:
    tensor: torch.Tensor
    root: int
    op: ReduceOp
    async_op: bool


@dataclass(frozen=True)
class AllGatherPreHookArgs:
    input: torch.Tensor
    output: list[torch.Tensor]
    async_op: bool


@dataclass(frozen=True)
class AllGatherVPreHookArgs:
    input: torch.Tensor
    output: list[torch.Tensor]
    async_op: bool


@dataclass(frozen=True)
class AllGatherSinglePreHookArgs:
    input: torch.Tensor
    output: torch.Tensor
    async_op: bool


@dataclass(frozen=True)
class ReduceScatterPreHookArgs:
    input: list[torch.Tensor]
    output: torch.Tensor
    op: ReduceOp
    async_op: bool


@dataclass(frozen=True)
class ReduceScatterVPreHookArgs:
    input: list[torch.Tensor]
    output: torch.Tensor
    op: ReduceOp
    async_op: bool


@dataclass(frozen=True)
class ReduceScatterSinglePreHookArgs:
    input: torch.Tensor
    output: torch.Tensor
    op: ReduceOp
    async_op: bool


@dataclass(frozen=True)
class AllToAllSinglePreHookArgs:
    input: torch.Tensor
    output: torch.Tensor
    async_op: bool


@dataclass(frozen=True)
class AllToAllVSinglePreHookArgs:
    input: torch.Tensor
    output: torch.Tensor
    input_split_sizes: list[int]
    output_split_sizes: list[int]
    async_op: bool


@dataclass(frozen=True)
class AllToAllPreHookArgs:
    input: list[torch.Tensor]
    output: list[torch.Tensor]
    async_op: bool


@dataclass(frozen=True)
class BarrierPreHookArgs:
    async_op: bool


@dataclass(frozen=True)
class ScatterPreHookArgs:
    output: torch.Tensor
    input: list[torch.Tensor]
    root: int
    async_op: bool


@dataclass(frozen=True)
class GatherPreHookArgs:
    input: torch.Tensor
    output: list[torch.Tensor]
    root: int
    async_op: bool


@dataclass(frozen=True)
class GatherSinglePreHookArgs:
    input: torch.Tensor
    output: torch.Tensor
    root: int
    async_op: bool


@dataclass(frozen=True)
class SplitPreHookArgs:
    ranks: list[int]
    name: str


@dataclass(frozen=True)
class BatchOpIssuePreHookArgs:
    num_ops: int
    async_op: bool
    ops: list[P2POp]


class NewWindowPreHookArgs:
    """A window is about to be made."""


class FinalizePreHookArgs:
    """The communicator is about to be finalized."""


# ---- arguments of post-hooks ----


@dataclass(frozen=True)
class CollectivePostHookArgs:
    """An operation was issued; its work says whether it is done."""

    work: TorchWork


class NewWindowPostHookArgs:
    """A window was made."""


@dataclass(frozen=True)
class BatchOpIssuePostHookArgs:
    """A batch was issued."""

    work: TorchWork


class FinalizePostHookArgs:
    """The communicator was finalized."""


# torchcomms' type stubs name one for each operation.
SendPostHookArgs = CollectivePostHookArgs
RecvPostHookArgs = CollectivePostHookArgs
BroadcastPostHookArgs = CollectivePostHookArgs
AllReducePostHookArgs = CollectivePostHookArgs
ReducePostHookArgs = CollectivePostHookArgs
AllGatherPostHookArgs = CollectivePostHookArgs
AllGatherVPostHookArgs = CollectivePostHookArgs
AllGatherSinglePostHookArgs = CollectivePostHookArgs
ReduceScatterPostHookArgs = CollectivePostHookArgs
ReduceScatterVPostHookArgs = CollectivePostHookArgs
ReduceScatterSinglePostHookArgs = CollectivePostHookArgs
AllToAllSinglePostHookArgs = CollectivePostHookArgs
AllToAllVSinglePostHookArgs = CollectivePostHookArgs
AllToAllPostHookArgs = CollectivePostHookArgs
BarrierPostHookArgs = CollectivePostHookArgs
ScatterPostHookArgs = CollectivePostHookArgs
GatherPostHookArgs = CollectivePostHookArgs
GatherSinglePostHookArgs = CollectivePostHookArgs

# What a pre-hook gets.
PreHookArgs = (
    SendPreHookArgs
    | RecvPreHookArgs
    | BroadcastPreHookArgs
    | AllReducePreHookArgs
    | ReducePreHookArgs
    | AllGatherPreHookArgs
    | AllGatherVPreHookArgs
    | AllGatherSinglePreHookArgs
    | ReduceScatterPreHookArgs
    | ReduceScatterVPreHookArgs
    | ReduceScatterSinglePreHookArgs
    | AllToAllSinglePreHookArgs
    | AllToAllVSinglePreHookArgs
    | AllToAllPreHookArgs
    | BarrierPreHookArgs
    | ScatterPreHookArgs
    | GatherPreHookArgs
    | GatherSinglePreHookArgs
    | SplitPreHookArgs
    | NewWindowPreHookArgs
    | BatchOpIssuePreHookArgs
    | FinalizePreHookArgs
)
