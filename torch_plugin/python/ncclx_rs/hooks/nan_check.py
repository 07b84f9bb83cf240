"""Finds NaNs before they spread to other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ncclx_rs._comm import TorchComm
from ncclx_rs._hooks import RemovableHandle
from ncclx_rs._types import OpName

# Operations that read what they call just ``tensor``.
_READS_TENSOR = {OpName.send, OpName.broadcast, OpName.all_reduce, OpName.reduce}


class NanCheckHook:
    """Refuses operations on tensors that hold a NaN.

    The check reads every tensor once more before it is sent.
    """

    def __init__(self, check_inputs: bool = True, check_outputs: bool = False) -> None:
        """Says what is checked.

        Args:
            check_inputs: whether tensors are checked before an operation reads them.
            check_outputs: whether outputs are checked too, before the operation writes them.
        """
        self._check_inputs = check_inputs
        self._check_outputs = check_outputs
        self._handles: list[RemovableHandle] = []

    def register_with_comm(self, comm: TorchComm) -> None:
        """Watches a communicator, whose operations then raise RuntimeError if a tensor holds a NaN."""

        def check(name: OpName, op_id: int, args: Any) -> None:
            if self._check_inputs:
                self._check(_tensors(args, "input", also_tensor=name in _READS_TENSOR), "input", name, comm)
            if self._check_outputs:
                self._check(_tensors(args, "output", also_tensor=name is OpName.recv), "output", name, comm)

        self._handles.append(comm.register_pre_hook(check))

    def is_enabled(self) -> bool:
        """Whether it watches a communicator."""
        return bool(self._handles)

    def unregister(self) -> None:
        """Watches nothing any more."""
        while self._handles:
            self._handles.pop().remove()

    def _check(self, tensors: Iterator[torch.Tensor], what: str, name: OpName, comm: TorchComm) -> None:
        for tensor in tensors:
            if (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.isnan().any()):
                raise RuntimeError(f"NaN detected in {what} tensor for '{name.name}' on comm '{comm.get_name()}'")


def _tensors(args: Any, field: str, also_tensor: bool) -> Iterator[torch.Tensor]:
    """The tensors in the field of a hook's arguments, one or a list, and the one that is called just ``tensor``."""
    named = getattr(args, field, [])
    yield from [named] if isinstance(named, torch.Tensor) else named
    if also_tensor:
        yield args.tensor
