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

    Messages between two ranks match in the order of the batch.
    """

    def __init__(self, comm: BatchIssuer) -> None:
        self._comm = comm
        self.ops: list[P2POp] = []

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Adds a send of ``tensor`` to rank ``dst``."""
        self._comm._check_rank("send", "dst", dst)
        self.ops.append(P2POp(P2POpType.SEND, tensor, dst))

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Adds a receive into ``tensor`` from rank ``src``."""
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
        """
        if not self.ops:
            raise RuntimeError("Cannot issue empty batch operation")
        opts = BatchP2POptions.of("issue", timeout, hints, options)
        return self._comm._issue_batch(self.ops, async_op, opts)
