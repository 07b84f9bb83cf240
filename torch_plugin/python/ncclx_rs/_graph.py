"""Operations while torch.compile traces a program: they put operators of `_graph_operators` into its graph.

One operator starts an operation, and one waits for it. Where the program waits, the results are copied into the
program's tensors.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from ncclx_rs._graph_operators import start_operator, wait_operator, window_read
from ncclx_rs._graph_state import in_flight
from ncclx_rs._operands import written
from ncclx_rs._tracing import not_in_graphs
from ncclx_rs._types import OpOptions, ReduceOp, WorkStatus
from ncclx_rs._work import TorchWork


def issue(handle: str, name: str, options: OpOptions, *args: Any) -> TorchWork:
    """Puts an operation into the graph.

    Args:
        handle: the handle of the communicator or window.
        name: the operation's name in the table of operators.
        options: its options.
        args: the arguments of its method, up to and including ``async_op``.
    """
    *operands, async_op = args
    values: list[Any] = []
    for operand in operands:
        if isinstance(operand, ReduceOp):
            factor = operand._factor
            values += [operand._type.name, *((None, factor) if isinstance(factor, torch.Tensor) else (factor, None))]
        elif isinstance(operand, list | tuple):
            values.append(list(operand))
        else:
            values.append(operand)
    limit = options.timeout.days * 86400 + options.timeout.seconds + options.timeout.microseconds / 1e6
    hints = [text for hint in options.hints.items() for text in hint]
    token = start_operator[name](*values, handle, async_op, limit, hints)
    work = GraphWork(name, token, values, handle)
    if not async_op:
        work.wait()
    return work


def window_contents(handle: str, rank: int, meta: tuple[torch.dtype, torch.Size, torch.device]) -> torch.Tensor:
    """Puts a copy of this rank's part of a window into the graph. The copy is made when the graph runs."""
    dtype, shape, device = meta
    contents: torch.Tensor = window_read(handle, rank, list(shape), dtype, device)
    return contents


class GraphWork(TorchWork):
    """An operation that a graph started. The graph waits for it, or returns it to code that waits later."""

    def __init__(self, name: str, token: torch.Tensor, values: Sequence[Any], handle: str) -> None:
        self._name = name
        self._token = token
        self._values = values
        self._handle = handle
        self._waited = False

    def wait(self) -> None:
        if self._waited:
            return
        results = wait_operator[self._name](self._token, *self._values, self._handle)
        for target, result in zip(written(self._name, self._values), results or [], strict=True):
            target.copy_(result)
        self._waited = True

    def wait_blocking(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._waited or self._started().is_completed()

    @property
    def status(self) -> WorkStatus:
        return WorkStatus.COMPLETED if self._waited else self._started().status

    def exception(self) -> BaseException | None:
        return None if self._waited else self._started().exception()

    def __await__(self) -> Generator[Any, None, None]:
        if not self._waited:
            yield from self._started().__await__()
            self.wait()

    def _started(self) -> TorchWork:
        not_in_graphs("the state of an operation", "it is not known when the graph is made; `wait` can be")
        return in_flight[int(self._token)].work
