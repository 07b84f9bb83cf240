"""The operands of each operation, from which operators are made: those of graphs, and those with torchcomms' names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

# The operands of each operation, in the order of its method. An ``out`` operand is overwritten. An ``inout`` operand
# may be read, and some ranks may leave it as it is.
TABLE = {
    "send": "Tensor tensor, int dst",
    "recv": "out Tensor tensor, int src",
    "broadcast": "inout Tensor tensor, int root",
    "all_reduce": "inout Tensor tensor, ReduceOp op",
    "reduce": "inout Tensor tensor, int root, ReduceOp op",
    "all_gather": "out Tensor[] tensor_list, Tensor tensor",
    "all_gather_v": "out Tensor[] tensor_list, Tensor tensor",
    "all_gather_single": "out Tensor output, Tensor input",
    "reduce_scatter": "out Tensor output, Tensor[] input_list, ReduceOp op",
    "reduce_scatter_v": "out Tensor output, Tensor[] input_list, ReduceOp op",
    "reduce_scatter_single": "out Tensor output, Tensor input, ReduceOp op",
    "all_to_all_single": "out Tensor output, Tensor input",
    "all_to_all_v_single": "out Tensor output, Tensor input, SymInt[] output_split_sizes, SymInt[] input_split_sizes",
    "all_to_all": "out Tensor[] output_tensor_list, Tensor[] input_tensor_list",
    "barrier": "",
    "scatter": "out Tensor output_tensor, Tensor[] input_tensor_list, int root",
    "gather": "inout Tensor[] output_tensor_list, Tensor input_tensor, int root",
    "gather_single": "inout Tensor output, Tensor input, int root",
    # The messages of a batch in their order: for each, whether it is a send, and its peer.
    "batch_op_issue": "Tensor[] sent, out Tensor[] received, bool[] is_send, int[] peers",
    # The offset is in bytes.
    "window_put": "Tensor tensor, int dst_rank, SymInt offset",
    "window_get": "out Tensor tensor, int src_rank, SymInt offset",
    "window_accumulate": "Tensor tensor, int dst_rank, SymInt offset",
    "window_flush": "int dst_rank",
    "window_signal": "int peer_rank",
    "window_wait_signal": "int peer_rank",
}


class Operand(NamedTuple):
    """One operand of an operation in the table."""

    access: str
    type: str
    name: str

    @property
    def schema(self) -> str:
        """The operand in an operator's schema. A reduction is its name and its factor, a number or a tensor."""
        if self.type == "ReduceOp":
            return f"str {self.name}, float? factor, Tensor? factor_tensor"
        return f"{self.type} {self.name}"


def _parse(operands: str) -> list[Operand]:
    words = [operand.split() for operand in operands.split(", ") if operand]
    return [Operand(*word) if len(word) == 3 else Operand("in", *word) for word in words]


OPERANDS = {name: _parse(operands) for name, operands in TABLE.items()}


def written(name: str, values: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments that its operation writes."""
    # No reduction comes before a tensor, so operands and arguments of tensors have the same positions.
    found: list[torch.Tensor] = []
    for operand, value in zip(OPERANDS[name], values, strict=False):
        if operand.access != "in":
            found += value if isinstance(value, list | tuple) else [value]
    return found
