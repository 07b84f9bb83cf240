"""Batches of sends and receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Protocol

import torch

from ncclx_rs._types import BatchP2POptions, OpOptions, P2POp, P2POpType
from ncclx_rs._work import TorchWork


class BatchIssuer(Protocol):
    """The methods of a communicator that a batch calls."""

    def _check_rank(self, method: str, parameter: str, rank: int) -> None: ...

    def _issue_batch(self, ops: Sequence[P2POp], async_op: bool, options: OpOptions) -> TorchWork: ...


class BatchSendRecv:
    """Sends and receives that run concurrently; made by `TorchComm.batch_op_create`.

    Messages between two ranks match in the order of the batch. What is called wrongly raises as in `TorchComm`.
    """

    def __init__(self, comm: BatchIssuer) -> None:
        self._comm = comm
        self.ops: list[P2POp] = []

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Adds a send of ``tensor`` to rank ``dst``.

        Examples:
            >>> batch = comm.batch_op_create()
            >>> batch.send(torch.ones(2), dst=comm.rank)  # to itself
            >>> batch.recv(torch.empty(2), src=comm.rank)
            >>> batch.issue().is_completed()
            True
        """
        self._comm._check_rank("send", "dst", dst)
        self.ops.append(P2POp(P2POpType.SEND, tensor, dst))

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Adds a receive into ``tensor`` from rank ``src``.

        Examples:
            >>> batch, received = comm.batch_op_create(), torch.empty(2)
            >>> batch.recv(received, src=1 - comm.rank)
            >>> batch.send(torch.ones(2), dst=1 - comm.rank)
            >>> work = batch.issue()
            >>> received
            tensor([1., 1.])
        """
        self._comm._check_rank("recv", "src", src)
        self.ops.append(P2POp(P2POpType.RECV, tensor, src))

    def issue(
        self,
        async_op: bool = False,
        options: BatchP2POptions | None = None,
        hints: Mapping[str, str] | None = None,
        timeout: timedelta | float | None = None,
    ) -> TorchWork:
        """Starts all operations of the batch. The work is done when all of them are.

        Raises:
            RuntimeError: the batch is empty, or an operation failed.

        Examples:
            >>> batch, received = comm.batch_op_create(), torch.empty(2)
            >>> batch.send(torch.ones(2), dst=1 - comm.rank)
            >>> batch.recv(received, src=1 - comm.rank)
            >>> work = batch.issue(async_op=True, timeout=30)
            >>> work.wait()
            >>> received
            tensor([1., 1.])
        """
        if not self.ops:
            raise RuntimeError("Cannot issue empty batch operation")
        opts = BatchP2POptions.of("issue", timeout, hints, options)
        return self._comm._issue_batch(self.ops, async_op, opts)
