"""Gradients of operations in graphs of torch.compile. Each gradient is an operation again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Grads = list[torch.Tensor]


@dataclass(frozen=True)
class Backward:
    """The inputs of a gradient, besides the gradients of the results.

    Attributes:
        run: runs an operation with the arguments of its operator; returns the tensors that it wrote.
        values: the operation's operands by name, with shapes in place of tensors.
        size: the number of ranks.
    """

    run: Callable[..., Grads]
    values: dict[str, Any]
    size: int


def of(name: str, backward: Backward, grads: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The gradients of an operation's operands, by name.

    Args:
        name: the operation.
        backward: the other inputs.
        grads: the gradients of the tensors that the operation wrote.

    Raises:
        NotImplementedError: the operation has no gradient, or none for this reduction.
    """
    formula = _FORMULAS.get(name)
    if formula is None:
        raise NotImplementedError(f"{name} has no gradient: detach what it is given, or call it under torch.no_grad()")
    return formula(backward, [grad.contiguous() for grad in grads])


def _reduction(backward: Backward, operation: str) -> str:
    op = str(backward.values["op"])
    if op not in ("SUM", "AVG"):
        raise NotImplementedError(f"{operation} has no gradient for {op}, only for SUM and AVG")
    return op


def _all_reduce(backward: Backward, grads: Grads) -> dict[str, Any]:
    op = _reduction(backward, "all_reduce")
    return {"tensor": backward.run("all_reduce", grads[0], op, None, None)[0]}


def _all_gather(backward: Backward, grads: Grads) -> dict[str, Any]:
    mine = grads[0].new_empty(backward.values["tensor"])
    return {"tensor": backward.run("reduce_scatter_v", mine, grads, "SUM", None, None)[0]}


def _all_gather_single(backward: Backward, grads: Grads) -> dict[str, Any]:
    mine = grads[0].new_empty(backward.values["input"])
    return {"input": backward.run("reduce_scatter_single", mine, grads[0], "SUM", None, None)[0]}


def _reduce_scatter(backward: Backward, grads: Grads) -> dict[str, Any]:
    op = _reduction(backward, "reduce_scatter")
    all = [grads[0].new_empty(shape) for shape in backward.values["input_list"]]
    parts = backward.run("all_gather_v", all, grads[0])
    return {"input_list": [part / backward.size for part in parts] if op == "AVG" else parts}


def _reduce_scatter_single(backward: Backward, grads: Grads) -> dict[str, Any]:
    op = _reduction(backward, "reduce_scatter_single")
    whole = backward.run("all_gather_single", grads[0].new_empty(backward.values["input"]), grads[0])[0]
    return {"input": whole / backward.size if op == "AVG" else whole}


def _all_to_all(backward: Backward, grads: Grads) -> dict[str, Any]:
    mine = [grads[0].new_empty(shape) for shape in backward.values["input_tensor_list"]]
    return {"input_tensor_list": backward.run("all_to_all", mine, grads)}


def _all_to_all_single(backward: Backward, grads: Grads) -> dict[str, Any]:
    mine = grads[0].new_empty(backward.values["input"])
    return {"input": backward.run("all_to_all_single", mine, grads[0])[0]}


def _all_to_all_v_single(backward: Backward, grads: Grads) -> dict[str, Any]:
    mine = grads[0].new_empty(backward.values["input"])
    sizes = backward.values["input_split_sizes"], backward.values["output_split_sizes"]
    return {"input": backward.run("all_to_all_v_single", mine, grads[0], *sizes)[0]}


_FORMULAS: dict[str, Callable[[Backward, Grads], dict[str, Any]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "all_gather_v": _all_gather,
    "all_gather_single": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_v": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "all_to_all_v_single": _all_to_all_v_single,
}
