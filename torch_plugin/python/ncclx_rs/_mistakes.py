"""What callers get wrong: errors in the words of the object API, and warnings of hints that nobody reads."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ncclx_rs._logging import warn
from ncclx_rs._operands import OPERANDS

# How the engine names arguments whose names are others here. Its names of operations are those of torch.distributed,
# or of the collective that runs.
_OUTPUT_SPLITS = "output_split_sizes"
_ARGUMENTS = {
    "all_gather": {"input": "tensor", "tensors": "tensor_list"},
    "all_gather_v": {"input": "tensor", "tensors": "tensor_list"},
    "all_gather_single": {"output_tensor": "output", "input_tensor": "input", "tensors": "output"},
    "reduce_scatter": {"tensors": "input_list"},
    "reduce_scatter_v": {"tensors": "input_list"},
    "reduce_scatter_single": {"tensors": "input"},
    "all_to_all": {_OUTPUT_SPLITS: "output_tensor_list"},
    "all_to_all_single": {_OUTPUT_SPLITS: "output"},
    "gather": {"gather_list": "output_tensor_list", "tensor": "input_tensor"},
    "gather_single": {"gather_list": "output", "tensor": "input"},
    "scatter": {"scatter_list": "input_tensor_list", "tensor": "output_tensor"},
    "put": {"offset": "target_offset_nelems"},
    "get": {"offset": "source_offset_nelems"},
}
_ENGINE = re.compile(r"ncclx_rs: (\w+): argument `(\w+)`: ")


def explained(method: str, args: Sequence[Any], error: TypeError | ValueError) -> TypeError | ValueError:
    """An error of a backend in the words of the method that the program has called.

    Args:
        method: the method.
        args: its arguments, in the order of its parameters.
        error: what the backend has raised; returned as it is if nothing is known about it.
    """
    if isinstance(error, TypeError):
        return _type_error(method, args) or error
    named = _ENGINE.match(str(error))
    if named is None:
        return error
    argument = _ARGUMENTS.get(method, {}).get(named[2], named[2])
    return ValueError(f"ncclx_rs: {method}: argument `{argument}`: {str(error)[named.end() :]}")


def _type_error(method: str, args: Sequence[Any]) -> TypeError | None:
    """What is said of the first argument of the wrong type; None if there is none."""
    for operand, value in zip(OPERANDS.get(method, []), args, strict=False):
        where = f"{method}: argument `{operand.name}`: expected"
        if operand.type == "Tensor" and not isinstance(value, torch.Tensor):
            return TypeError(f"{where} a tensor, got {type(value).__name__}")
        if operand.type == "Tensor[]":
            for index, element in enumerate(value):
                if not isinstance(element, torch.Tensor):
                    return TypeError(f"{where} tensors, got {type(element).__name__} at index {index}")
        if operand.type == "SymInt[]" and not all(hasattr(size, "__index__") for size in value):
            return TypeError(f"{where} whole numbers, got {list(value)!r}")
    return None


_warned: set[tuple[str, str]] = set()
_warned_lock = threading.Lock()


def warn_of_hints(method: str, hints: Iterable[str], backend: str | None = None) -> None:
    """Warns of hints that nobody reads, once for each.

    Args:
        method: the method that got them.
        hints: their names.
        backend: the backend that ignores them; None if no backend knows hints of that method.
    """
    for hint in hints:
        with _warned_lock:
            if (key := (backend or "", hint)) in _warned:
                continue
            _warned.add(key)
        why = "is not known to any operation and is ignored" if backend is None else f"is ignored by {backend}"
        warn(f"{method}: the hint {hint!r} {why}")


def no_device_side(method: str, instead: str) -> RuntimeError:
    """The error of a method of torchcomms that serves kernels which communicate by themselves."""
    return RuntimeError(f"{method}: no kernel communicates by itself on ncclx_rs; use {instead}")
