"""The plain types of the object API: reductions, names, options."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class RedOpType(enum.Enum):
    """The kinds of `ReduceOp`."""

    SUM = enum.auto()
    PRODUCT = enum.auto()
    MIN = enum.auto()
    MAX = enum.auto()
    BAND = enum.auto()
    BOR = enum.auto()
    BXOR = enum.auto()
    PREMUL_SUM = enum.auto()
    AVG = enum.auto()


class ReduceOp:
    """How elements of different ranks are combined.

    ``PREMUL_SUM(factor)`` multiplies each rank's elements by a number or a one-element tensor, and adds them. ``AVG``
    divides the sum by the number of ranks and rounds once. Its sums of integers are exact, and its results truncate;
    its sums of 16-bit floats are computed in single precision.
    """

    SUM: ReduceOp
    PRODUCT: ReduceOp
    MIN: ReduceOp
    MAX: ReduceOp
    BAND: ReduceOp
    BOR: ReduceOp
    BXOR: ReduceOp
    AVG: ReduceOp

    def __init__(self, type: RedOpType = RedOpType.SUM, factor: float | torch.Tensor | None = None) -> None:
        if (type is RedOpType.PREMUL_SUM) != (factor is not None):
            raise ValueError(f"ReduceOp: a factor belongs to PREMUL_SUM and to nothing else, got {type}, {factor!r}")
        self._type = type
        self._factor = factor

    @staticmethod
    def PREMUL_SUM(factor: float | torch.Tensor) -> ReduceOp:
        """The sum of all ranks' elements, each multiplied by its rank's ``factor``."""
        return ReduceOp(RedOpType.PREMUL_SUM, factor)

    @property
    def type(self) -> RedOpType:
        return self._type

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ReduceOp):
            return NotImplemented
        return self._type is other._type and (self._factor is other._factor or bool(self._factor == other._factor))

    def __hash__(self) -> int:
        return hash(self._type)

    def __repr__(self) -> str:
        return f"ReduceOp.{self._type.name}" + ("" if self._factor is None else f"({self._factor})")

    def _c10d(self) -> Any:
        """The same reduction as PyTorch's type."""
        if self._factor is not None:
            return torch._C._distributed_c10d._make_nccl_premul_sum(self._factor)
        return getattr(dist.ReduceOp, self._type.name)


for _type in RedOpType:
    if _type is not RedOpType.PREMUL_SUM:
        setattr(ReduceOp, _type.name, ReduceOp(_type))


class OpName(enum.Enum):
    """The operations that hooks are called for."""

    send = enum.auto()
    recv = enum.auto()
    broadcast = enum.auto()
    all_reduce = enum.auto()
    reduce = enum.auto()
    all_gather = enum.auto()
    all_gather_v = enum.auto()
    all_gather_single = enum.auto()
    reduce_scatter = enum.auto()
    reduce_scatter_v = enum.auto()
    reduce_scatter_single = enum.auto()
    all_to_all_single = enum.auto()
    all_to_all_v_single = enum.auto()
    all_to_all = enum.auto()
    barrier = enum.auto()
    scatter = enum.auto()
    gather = enum.auto()
    gather_single = enum.auto()
    split = enum.auto()
    new_window = enum.auto()
    batch_op_issue = enum.auto()
    finalize = enum.auto()


class WorkStatus(enum.Enum):
    """The state of an operation."""

    NOT_STARTED = enum.auto()
    INPROGRESS = enum.auto()
    COMPLETED = enum.auto()
    TIMEDOUT = enum.auto()
    ERROR = enum.auto()


class P2POpType(enum.Enum):
    """The direction of a `P2POp`."""

    SEND = enum.auto()
    RECV = enum.auto()


class P2POp:
    """One send or receive of a batch.

    Attributes:
        type: which of the two.
        tensor: the tensor to send, or to receive into.
        peer: the other rank.
    """

    def __init__(self, type: P2POpType, tensor: torch.Tensor, peer: int) -> None:
        self.type = type
        self.tensor = tensor
        self.peer = peer


class CommOptions:
    """The options of a communicator.

    Attributes:
        abort_process_on_timeout_or_error: whether the process ends when an operation times out or a rank is lost.
        timeout: the timeout of operations that have none of their own.
        store: the store of the bootstrap.
        rank: this process's rank.
        size: the number of ranks.
        name: the communicator's name.
        enable_reconfigure: whether `TorchComm.reconfigure` may change its members.
        hints: settings by name.
    """

    def __init__(self) -> None:
        self.abort_process_on_timeout_or_error = True
        self.timeout = timedelta(seconds=600)
        self.store: Any = None
        self.rank = 0
        self.size = 1
        self.name = ""
        self.enable_reconfigure = False
        self.hints: dict[str, str] = {}

    def __repr__(self) -> str:
        hints = {name: "..." if name.endswith("_secret") else value for name, value in self.hints.items()}
        shown = {**vars(self), "hints": hints}
        return f"CommOptions({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


# torchcomms' name of the type of timeouts.
Timeout = timedelta

NO_TIMEOUT = timedelta(0)


class OpOptions:
    """The options of every operation.

    Attributes:
        timeout: the timeout; zero stands for the communicator's.
        hints: settings by name.
    """

    def __init__(self, timeout: timedelta | None = None, hints: Mapping[str, str] | None = None) -> None:
        # Not by `or`: torch.compile cannot trace whether a duration is zero.
        self.timeout = NO_TIMEOUT if timeout is None else timeout
        self.hints = dict(hints or {})

    def __repr__(self) -> str:
        return f"{type(self).__name__}(timeout={self.timeout}, hints={self.hints})"


class SendOptions(OpOptions):
    """Options of ``send``."""


class RecvOptions(OpOptions):
    """Options of ``recv``."""


class BatchP2POptions(OpOptions):
    """Options of a batch's ``issue``."""


class BroadcastOptions(OpOptions):
    """Options of ``broadcast``."""


class AllReduceOptions(OpOptions):
    """Options of ``all_reduce``."""


class ReduceOptions(OpOptions):
    """Options of ``reduce``."""


class AllGatherOptions(OpOptions):
    """Options of ``all_gather`` and ``all_gather_v``."""


class AllGatherSingleOptions(OpOptions):
    """Options of ``all_gather_single``."""


class ReduceScatterOptions(OpOptions):
    """Options of ``reduce_scatter`` and ``reduce_scatter_v``."""


class ReduceScatterSingleOptions(OpOptions):
    """Options of ``reduce_scatter_single``."""


class AllToAllOptions(OpOptions):
    """Options of ``all_to_all``."""


class AllToAllSingleOptions(OpOptions):
    """Options of ``all_to_all_single``."""


class AllToAllvSingleOptions(OpOptions):
    """Options of ``all_to_all_v_single``."""


class BarrierOptions(OpOptions):
    """Options of ``barrier``."""


class ScatterOptions(OpOptions):
    """Options of ``scatter``."""


class GatherOptions(OpOptions):
    """Options of ``gather`` and ``gather_single``."""


class AllGatherPInitOptions(OpOptions):
    """Options of ``all_gather_p_init``."""


class AllGatherPExecOptions(OpOptions):
    """Options of ``all_gather_p_exec``."""
