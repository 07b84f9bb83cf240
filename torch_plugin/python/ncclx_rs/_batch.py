"""Sends and receives that are issued together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ncclx_rs._types import BatchP2POptions, P2POpType
from ncclx_rs._work import TorchWork

if TYPE_CHECKING:
    from ncclx_rs._operations import Operations


class P2POp:
    """One send or receive of a batch.

    Attributes:
        type: which of the two.
        tensor: what is sent or received into.
        peer: the other rank.
    """

    def __init__(self, type: P2POpType, tensor: torch.Tensor, peer: int) -> None:
        self.type = type
        self.tensor = tensor
        self.peer = peer


class BatchSendRecv:
    """Sends and receives that run at the same time, whatever their order; made by `TorchComm.batch_op_create`.

    Messages between two ranks still match in the order of the batch.
    """

    def __init__(self, comm: Operations) -> None:
        self._comm = comm
        self.ops: list[P2POp] = []

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Adds a send of ``tensor`` to rank ``dst``."""
        self._comm._check_rank("dst", dst)
        self.ops.append(P2POp(P2POpType.SEND, tensor, dst))

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Adds a receive into ``tensor`` from rank ``src``."""
        self._comm._check_rank("src", src)
        self.ops.append(P2POp(P2POpType.RECV, tensor, src))

    def issue(self, async_op: bool, options: BatchP2POptions | None = None) -> TorchWork:
        """Starts all of them; the work is done when all are.

        Raises:
            RuntimeError: the batch is empty, or an operation failed.
        """
        if not self.ops:
            raise RuntimeError("Cannot issue empty batch operation")
        return self._comm._issue_batch(self.ops, async_op, options or BatchP2POptions())
