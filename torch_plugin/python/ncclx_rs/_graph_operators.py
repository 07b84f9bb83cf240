"""The custom operators of operations in graphs of torch.compile: two for each operation of `_operands`.

``torch.ops.ncclx_rs.all_reduce`` copies the tensors that the operation changes, starts it on the copies and returns a
token; ``torch.ops.ncclx_rs.all_reduce_wait`` waits for it and returns the copies. So the operators change no tensor
of the graph. The wait takes the arguments of the start too, so that no compiler reuses their memory in between. The
operators call the communicator's own methods, with hooks and checks. They are registered as side effects: compilers
drop none of them and keep their order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._library.effects import EffectType

from ncclx_rs import _graph_gradients, _graph_state
from ncclx_rs._graph_state import InFlight, in_flight
from ncclx_rs._operands import OPERANDS, written
from ncclx_rs._types import BatchP2POptions, OpOptions, RedOpType, ReduceOp

if TYPE_CHECKING:
    from ncclx_rs._work import TorchWork

# ---- implementations of the operators ----

_tokens = itertools.count(1)


def _start(name: str, *values: Any) -> torch.Tensor:
    *operands, handle, async_op, limit, hints = values
    args: list[Any] = []
    results: list[torch.Tensor] = []
    rest = iter(operands)
    for operand in OPERANDS[name]:
        value = next(rest)
        if operand.type == "ReduceOp":
            number, tensor = next(rest), next(rest)
            value = ReduceOp(RedOpType[value], number if tensor is None else tensor)
        elif operand.access != "in":
            copy = torch.clone if operand.access == "inout" else torch.empty_like
            value = [copy(t) for t in value] if isinstance(value, list | tuple) else copy(value)
            results += value if isinstance(value, list) else [value]
        args.append(value)
    timeout = timedelta(seconds=limit)
    found = _graph_state.find(handle)
    if name.startswith("window_"):
        window: _graph_state.Window = found
        work = window._access(name.removeprefix("window_"), OpOptions(timeout), *args, async_op)
        handle = window._comm_handle
    else:
        batch = functools.partial(_issue_batch, found)
        method: Callable[..., TorchWork] = batch if name == "batch_op_issue" else getattr(found, name)
        work = method(*args, async_op, dict(zip(hints[::2], hints[1::2], strict=True)), timeout)
    token = next(_tokens)
    in_flight[token] = InFlight(work, results, values, handle)
    return torch.tensor(token, device="cpu")


def _issue_batch(
    comm: _graph_state.Communicator,
    sent: Sequence[torch.Tensor],
    received: Sequence[torch.Tensor],
    is_send: Sequence[bool],
    peers: Sequence[int],
    async_op: bool,
    hints: dict[str, str],
    timeout: timedelta,
) -> TorchWork:
    batch = comm.batch_op_create()
    sends, receives = iter(sent), iter(received)
    for sending, peer in zip(is_send, peers, strict=True):
        if sending:
            batch.send(next(sends), peer)
        else:
            batch.recv(next(receives), peer)
    return batch.issue(async_op, BatchP2POptions(timeout, hints))


def _start_fake(*values: Any) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _wait(name: str, token: torch.Tensor, *values: Any) -> list[torch.Tensor] | None:
    call = in_flight.get(int(token))
    if call is None:
        raise RuntimeError(f"{name}: the communicator of `{values[-1]}` was finalized before its work was waited for")
    call.waited = True
    if not call.work._waited:
        call.work.wait()
    del in_flight[int(token)]
    return call.results if _writes(name) else None


def _wait_fake(name: str, token: torch.Tensor, *values: Any) -> list[torch.Tensor] | None:
    return [torch.empty_like(t) for t in written(name, values)] if _writes(name) else None


def _writes(name: str) -> bool:
    return any(operand.access != "in" for operand in OPERANDS[name])


def _window_read(handle: str, rank: int, *_: Any) -> torch.Tensor:
    window: _graph_state.Window = _graph_state.find(handle)
    return window.map_remote_tensor(rank).clone()


def _window_read_fake(
    handle: str, rank: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


# ---- gradients ----


def _save(name: str, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Saves what the gradient needs: shapes and numbers, but no tensor's content."""
    _, *values, ctx.handle = inputs
    rest = iter(values)
    ctx.values = {}
    for operand in OPERANDS[name]:
        value = next(rest)
        if operand.type == "Tensor":
            value = value.shape
        elif operand.type == "Tensor[]":
            value = [t.shape for t in value]
        elif operand.type == "ReduceOp":
            next(rest), next(rest)  # the reduction's factor
        ctx.values[operand.name] = value


def _backward(name: str, ctx: Any, grads: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    def run(name: str, *values: Any) -> list[torch.Tensor]:
        token = start_operator[name](*values, ctx.handle, False, 0.0, [])
        return list(wait_operator[name](token, *values, ctx.handle))

    backward = _graph_gradients.Backward(run, ctx.values, _graph_state.find(ctx.handle).get_size())
    by_name = _graph_gradients.of(name, backward, grads)
    gradients: list[Any] = [None]  # the token's
    for operand in OPERANDS[name]:
        none = [None] * len(ctx.values[operand.name]) if operand.type == "Tensor[]" else None
        gradients.append(by_name.get(operand.name, none))
        if operand.type == "ReduceOp":
            gradients += [None, None]
    return (*gradients, None)


# ---- registration ----

_library: Any = torch.library.Library("ncclx_rs", "DEF")  # type: ignore[no-untyped-call]
start_operator: dict[str, Any] = {}
wait_operator: dict[str, Any] = {}


def _register(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    _library.define(name + schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ncclx_rs::{name}", fake, lib=_library)
    # There is no public way to say that an operator has side effects.
    torch.library._register_effectful_op(f"ncclx_rs::{name}", EffectType.ORDERED, lib=_library)
    operator = getattr(torch.ops.ncclx_rs, name).default
    torch.fx.node.has_side_effect(operator)
    return operator


def _register_all() -> None:
    for name, operands in OPERANDS.items():
        declared = "".join(f"{operand.schema}, " for operand in operands)
        schema = f"({declared}str handle, bool async_op, float timeout, str[] hints) -> Tensor"
        start_operator[name] = _register(name, schema, functools.partial(_start, name), _start_fake)
        schema = f"(Tensor token, {declared}str handle) -> {'Tensor[]' if _writes(name) else '()'}"
        wait = f"{name}_wait"
        run, fake = functools.partial(_wait, name), functools.partial(_wait_fake, name)
        wait_operator[name] = _register(wait, schema, run, fake)
        if _writes(name):

            def save(ctx: Any, inputs: tuple[Any, ...], output: Any, name: str = name) -> None:
                _save(name, ctx, inputs, output)

            backward = functools.partial(_backward, name)
            torch.library.register_autograd(f"ncclx_rs::{wait}", backward, setup_context=save, lib=_library)


_register_all()
window_read = _register(
    "window_read",
    "(str handle, int rank, SymInt[] shape, ScalarType dtype, Device device) -> Tensor",
    _window_read,
    _window_read_fake,
)
