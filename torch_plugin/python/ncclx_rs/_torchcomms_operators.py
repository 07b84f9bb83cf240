"""torchcomms' operators on communicators of this package: ``torch.ops.torchcomms.torchcomm_all_reduce_`` and the rest.

The names, arguments and results are torchcomms'. An operator whose name ends in ``_`` writes into the tensors that it
is given and returns them; one without writes into new tensors. After ``async_op=True`` the results are there once
``torchcomm_wait_tensors_``, or ``torchcomm_wait_tensors``, has been given them.

They are functions and not operators of PyTorch's dispatcher: its schemas cannot name a communicator of this package.
They call methods of the communicator. Where a graph is made, and for tensors with gradients, fake tensors and meta
tensors, the methods' operators of `_graph_operators` run, which have what these need. So nothing is registered under
torchcomms' name, and torchcomms itself may register there, before or after: what is not of this package goes to it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import _OpNamespace

from ncclx_rs._batch import BatchSendRecv
from ncclx_rs._comm import TorchComm
from ncclx_rs._operands import OPERANDS, Operand
from ncclx_rs._types import OpOptions, ReduceOp, WorkStatus, as_reduce_op
from ncclx_rs._window import TorchCommWindow
from ncclx_rs._work import TorchWork

_LAST = {"async_op": False, "hints": None, "timeout": None}
_PLAIN = (torch.Tensor, torch.nn.Parameter)

# What torchcomms itself has registered, if it is here. Only a namespace of our own finds operators past `install`.
_theirs = _OpNamespace("torchcomms")


# ---- works that nobody has waited for, with their tensors ----

_Pending = list[tuple[list[torch.Tensor], TorchWork]]
_lock = threading.Lock()
_pending: _Pending = []
# Of operations in a graph, while it is made, and after it has run without waiting for them. torch.compile writes the
# list's changes after the graph, and cannot take a lock.
_pending_in_graphs: _Pending = []


def _remember(tensors: list[torch.Tensor], work: TorchWork) -> None:
    if torch.compiler.is_compiling():
        _pending_in_graphs.append((tensors, work))
        return
    with _lock:
        # What has ended well needs no wait, so that works that nobody waits for do not pile up. A work that a graph's
        # operators have started is another class: its wait writes the results.
        _pending[:] = [(t, w) for t, w in _pending if type(w) is not TorchWork or w.status is not WorkStatus.COMPLETED]
        _pending.append((tensors, work))


def _take(pending: _Pending, tensor: torch.Tensor) -> TorchWork | None:
    for index in range(len(pending)):
        for known in pending[index][0]:
            if known is tensor:
                return pending.pop(index)[1]
    return None


def _next(tensor: torch.Tensor) -> TorchWork | None:
    work = _take(_pending_in_graphs, tensor)
    if work is None and not torch.compiler.is_compiling():
        with _lock:
            work = _take(_pending, tensor)
    return work


def _wait_for(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        while (work := _next(tensor)) is not None:
            work.wait()


# ---- calls ----


def _bound(operator: str, names: Sequence[str], defaults: Mapping[str, Any], args: Any, kwargs: Any) -> list[Any]:
    """The arguments of a call in the order of their names."""
    where = f"torch.ops.torchcomms.{operator}"
    if len(args) > len(names):
        raise TypeError(f"{where}: expected at most {len(names)} arguments after `self`, got {len(args)}")
    bound = list(args)
    for name in names[len(args) :]:
        if name in kwargs:
            bound.append(kwargs[name])
        elif name in defaults:
            bound.append(defaults[name])
        else:
            raise TypeError(f"{where}: argument `{name}` is missing")
    for name in kwargs:
        if name not in names[len(args) :]:
            raise TypeError(f"{where}: argument `{name}` is unknown, or given twice")
    return bound


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, torch.Tensor):
                yield part


def _needs_operators(values: Sequence[Any]) -> bool:
    """Whether a call outside of graphs must go by operators of PyTorch: for gradients, and for tensors without data."""
    for tensor in _tensors(values):
        if type(tensor) not in _PLAIN or tensor.is_meta or (tensor.requires_grad and torch.is_grad_enabled()):
            return True
    return False


def _written(operands: Sequence[Operand], values: Sequence[Any]) -> int | None:
    for index, operand in enumerate(operands[: len(values)]):
        if operand.access != "in":
            return index
    return None


class Operator:
    """What one of torchcomms' operators does for objects of this package; for other objects, torchcomms' own runs."""

    def __init__(self, name: str, owner: type, run: Callable[..., Any]) -> None:
        self._name = name
        self._owner = owner
        self._run = run
        # What PyTorch reads and replaces when torchcomms registers an operator of this name after us.
        self._qualified_op_name = f"torchcomms::{name}"
        self._op: Any = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], self._owner):
            return self._run(self._name, *args, **kwargs)
        return self._other(*args, **kwargs)

    def _other(self, *args: Any, **kwargs: Any) -> Any:
        if hasattr(_theirs, self._name):
            return getattr(_theirs, self._name)(*args, **kwargs)
        got = type(args[0]).__name__ if args else "nothing"
        raise TypeError(
            f"torch.ops.torchcomms.{self._name}: argument `self`: expected {self._owner.__name__}, got {got}"
        )

    @property
    def default(self) -> Any:
        """The one overload: torchcomms' own if it is here, which its compiler passes ask for; otherwise this."""
        return getattr(_theirs, self._name).default if hasattr(_theirs, self._name) else self

    def __getattr__(self, name: str) -> Any:
        # What else an operator of PyTorch has, torchcomms' own has.
        if name.startswith("_") or not hasattr(_theirs, self._name):
            raise AttributeError(f"torch.ops.torchcomms.{self._name} has no attribute {name!r}")
        return getattr(getattr(_theirs, self._name), name)

    def __repr__(self) -> str:
        return f"<torch.ops.torchcomms.{self._name} of ncclx_rs>"


class Wait(Operator):
    """The wait for tensors. Among them may be tensors of torchcomms' own operations, or of none."""

    def __init__(self, name: str) -> None:
        super().__init__(name, torch.Tensor, _wait_for)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        (inputs,) = _bound(self._name, ("inputs",), {}, args, kwargs)
        _wait_for(inputs)
        if not torch.compiler.is_compiling() and hasattr(_theirs, self._name):
            return getattr(_theirs, self._name)(inputs)
        return list(inputs) if self._name.endswith("_") else [tensor.clone() for tensor in inputs]


def _operation(method: str, functional: bool) -> Callable[..., Any]:
    """The operator of a communicator's method."""
    operands = OPERANDS[method]
    names = [*(operand.name for operand in operands), *_LAST]
    defaults = {**_LAST, "op": ReduceOp.SUM}

    def run(operator: str, comm: TorchComm, *args: Any, **kwargs: Any) -> Any:
        *values, async_op, hints, timeout = _bound(operator, names, defaults, args, kwargs)
        target = _written(operands, values)
        if functional and target is not None:
            copy = torch.clone if operands[target].access == "inout" else torch.empty_like
            given = values[target]
            values[target] = [copy(t) for t in given] if isinstance(given, list | tuple) else copy(given)
        if torch.compiler.is_compiling() or not _needs_operators(values):
            work = getattr(comm, method)(*values, async_op=async_op, hints=hints, timeout=timeout)
        else:
            from ncclx_rs import _graph

            for index, operand in enumerate(operands):
                if operand.type == "ReduceOp":
                    values[index] = as_reduce_op(method, values[index])
            work = _graph.issue(comm._handle, method, OpOptions.of(method, timeout, hints, None), *values, async_op)
        return _result(work, values, target, async_op)

    return run


def _result(work: TorchWork, values: Sequence[Any], target: int | None, async_op: bool) -> Any:
    """What an operator returns: what it writes; without that, what can be waited for, if it has to be."""
    written = None if target is None else values[target]
    if not async_op:
        return written
    if written is None:
        written = torch.empty(0, dtype=torch.int32)
        _remember([written], work)
    else:
        # A rank whose list is empty, as in a gather to another rank, can wait for what it gives.
        _remember(list(written) if isinstance(written, list | tuple) and written else list(_tensors(values)), work)
    return written


def _access(method: str, names: Sequence[str]) -> Callable[..., Any]:
    """The operator of a window's method."""

    def run(operator: str, window: TorchCommWindow, *args: Any, **kwargs: Any) -> Any:
        *values, async_op = _bound(operator, names, {"async_op": False}, args, kwargs)
        if torch.compiler.is_compiling() or not _needs_operators(values):
            work = getattr(window, method)(*values, async_op=async_op)
        else:
            from ncclx_rs import _graph

            if method == "put":
                values[-1] *= values[0].element_size()  # that operator's offset is in bytes
            work = _graph.issue(window._handle, f"window_{method}", OpOptions(), *values, async_op)
        return _result(work, values, None, async_op)

    return run


def _map_remote_tensor(operator: str, window: TorchCommWindow, *args: Any, **kwargs: Any) -> torch.Tensor:
    return window.map_remote_tensor(*_bound(operator, ("rank",), {}, args, kwargs))


def _batch_send(operator: str, batch: BatchSendRecv, *args: Any, **kwargs: Any) -> None:
    batch.send(*_bound(operator, ("tensor", "dst"), {}, args, kwargs))


def _batch_recv(operator: str, batch: BatchSendRecv, *args: Any, **kwargs: Any) -> torch.Tensor:
    tensor, src = _bound(operator, ("tensor", "src"), {}, args, kwargs)
    target = tensor if operator.endswith("_") else torch.empty_like(tensor)
    batch.recv(target, src)
    return target


def _operators() -> Iterator[Operator]:
    for name, operands in OPERANDS.items():
        if name == "batch_op_issue" or name.startswith("window_"):
            continue  # of objects that have their own operators below
        operator = f"torchcomm_{name}"
        yield Operator(operator, TorchComm, _operation(name, functional=True))
        if any(operand.access != "in" for operand in operands):
            yield Operator(f"{operator}_", TorchComm, _operation(name, functional=False))
    window = "torchcommwindow"
    yield Operator(f"{window}_put", TorchCommWindow, _access("put", ("tensor", "dst_rank", "target_disp", "async_op")))
    yield Operator(f"{window}_signal", TorchCommWindow, _access("signal", ("dst_rank", "async_op")))
    yield Operator(f"{window}_wait_signal", TorchCommWindow, _access("wait_signal", ("peer_rank", "async_op")))
    yield Operator(f"{window}_map_remote_tensor", TorchCommWindow, _map_remote_tensor)
    yield Operator("batchsendrecv_send", BatchSendRecv, _batch_send)
    yield Operator("batchsendrecv_recv", BatchSendRecv, _batch_recv)
    yield Operator("batchsendrecv_recv_", BatchSendRecv, _batch_recv)
    for name in ("torchcomm_wait_tensors", "torchcomm_wait_tensors_"):
        yield Wait(name)


@functools.cache
def install() -> None:
    """Puts the operators into ``torch.ops.torchcomms``. Idempotent."""
    for operator in _operators():
        setattr(torch.ops.torchcomms, operator._name, operator)
