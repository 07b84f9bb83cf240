"""Finds NaNs before operations spread them to other ranks.

NanCheckHook().register_with_comm(comm)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from ncclx_rs._comm import TorchComm
from ncclx_rs._hooks import RemovableHandle
from ncclx_rs._types import OpName, P2POpType

# Operations whose one tensor is both input and output. That of a broadcast is one of them: an input on the root.
_IN_PLACE = (OpName.all_reduce, OpName.reduce)


class NanCheckHook:
    """Refuses operations on tensors that contain a NaN.

    The check reads every tensor once before the operation.
    """

    def __init__(self, check_inputs: bool = True, check_outputs: bool = False) -> None:
        """Makes a hook.

        Args:
            check_inputs: whether tensors are checked before an operation reads them.
            check_outputs: whether outputs are checked too, before the operation writes them.
        """
        self._check_inputs = check_inputs
        self._check_outputs = check_outputs
        self._handles: list[RemovableHandle] = []

    def register_with_comm(self, comm: TorchComm) -> None:
        """Checks a communicator's operations from now on: they raise RuntimeError if a tensor contains a NaN."""
        comm_name, watched = comm.get_name(), weakref.proxy(comm)

        def check(name: OpName, op_id: int, args: Any) -> None:
            sends = name is not OpName.broadcast or args.root == watched.get_rank()
            if self._check_inputs or (self._check_outputs and name in _IN_PLACE):
                _check(_inputs(name, args, sends), "input", name, comm_name)
            if self._check_outputs:
                _check(_outputs(name, args, sends), "output", name, comm_name)

        self._handles.append(comm.register_pre_hook(check))

    def is_enabled(self) -> bool:
        """Whether it is registered with a communicator."""
        return bool(self._handles)

    def unregister(self) -> None:
        """Removes the hook from all communicators."""
        while self._handles:
            self._handles.pop().remove()


def _check(tensors: Iterator[torch.Tensor], what: str, name: OpName, comm_name: str) -> None:
    for tensor in tensors:
        if (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.isnan().any()):
            raise RuntimeError(f"NaN detected in {what} tensor for '{name.name}' on comm '{comm_name}'")


def _inputs(name: OpName, args: Any, sends: bool) -> Iterator[torch.Tensor]:
    if name is OpName.send or name in _IN_PLACE or (name is OpName.broadcast and sends):
        yield args.tensor
    elif name is OpName.batch_op_issue:
        yield from (op.tensor for op in args.ops if op.type is P2POpType.SEND)
    else:
        yield from _listed(getattr(args, "input", []))


def _outputs(name: OpName, args: Any, sends: bool) -> Iterator[torch.Tensor]:
    if name is OpName.recv or (name is OpName.broadcast and not sends):
        yield args.tensor
    elif name is OpName.batch_op_issue:
        yield from (op.tensor for op in args.ops if op.type is P2POpType.RECV)
    else:
        yield from _listed(getattr(args, "output", []))


def _listed(operand: Any) -> list[torch.Tensor]:
    return [operand] if isinstance(operand, torch.Tensor) else list(operand)
