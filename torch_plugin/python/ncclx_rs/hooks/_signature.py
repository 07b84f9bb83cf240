"""The signatures of operations in clog, such as ``broadcast|in_count=8|...|root=0``."""

from __future__ import annotations

from typing import Any

import torch

from ncclx_rs._types import OpName, RedOpType, ReduceOp

_REDUCE_OPS = {RedOpType.PRODUCT: "prod"}
_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.float8_e4m3fn: "fp8e4m3",
    torch.float8_e5m2: "fp8e5m2",
}

Operand = torch.Tensor | list[torch.Tensor]


def signature(name: OpName, args: Any, buffers: bool) -> str:
    """The signature of an operation.

    Args:
        name: the operation.
        args: the arguments of its pre-hook.
        buffers: whether the signature includes the tensors' addresses.
    """
    fields = {**_sizes(name, args), **_numbers(args), "async_op": "t" if args.async_op else "f"}
    if buffers:
        fields |= _addresses(name, args)
    return "|".join([name.name, *(f"{key}={value}" for key, value in fields.items())])


def _sizes(name: OpName, args: Any) -> dict[str, object]:
    if hasattr(args, "tensor"):
        count = args.tensor.numel()
        return {
            "in_count": 0 if name is OpName.recv else count,
            "out_count": 0 if name is OpName.send else count,
            "dtype": _dtype(args.tensor),
        }
    if hasattr(args, "input_split_sizes"):
        splits = {"in_splits": _joined(args.input_split_sizes), "out_splits": _joined(args.output_split_sizes)}
        return {**splits, "dtype": _dtype(args.input)}
    if hasattr(args, "input"):
        return {**_counts("in", args.input), **_counts("out", args.output), "dtype": _dtype(args.input, args.output)}
    return {}


def _numbers(args: Any) -> dict[str, object]:
    fields: dict[str, object] = {"red_op": _reduce_op(args.op)} if hasattr(args, "op") else {}
    return fields | {key: getattr(args, key) for key in ("root", "peer", "num_ops") if hasattr(args, key)}


def _addresses(name: OpName, args: Any) -> dict[str, object]:
    if hasattr(args, "tensor"):
        return {{OpName.send: "in", OpName.recv: "out"}.get(name, "buf"): _address(args.tensor)}
    return {
        key: _address(getattr(args, long)) for key, long in (("in", "input"), ("out", "output")) if hasattr(args, long)
    }


def _counts(side: str, operand: Operand) -> dict[str, object]:
    if isinstance(operand, torch.Tensor):
        return {f"{side}_count": operand.numel()}
    return {f"{side}_counts": _joined([tensor.numel() for tensor in operand])}


def _dtype(*operands: Operand) -> str:
    """The dtype of the first tensor; ``other`` if there is none."""
    listed = ([operand] if isinstance(operand, torch.Tensor) else operand for operand in operands)
    return next((_DTYPES.get(tensor.dtype, "other") for tensors in listed for tensor in tensors), "other")


def _reduce_op(op: ReduceOp) -> str:
    return _REDUCE_OPS.get(op.type, op.type.name.lower())


def _address(operand: Operand) -> str:
    return ",".join(hex(t.data_ptr()) for t in ([operand] if isinstance(operand, torch.Tensor) else operand))


def _joined(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))
