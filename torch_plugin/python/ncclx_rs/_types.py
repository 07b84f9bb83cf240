"""The plain types of the object API: reductions, names, options."""

from __future__ import annotations

import enum
import functools
import os
from collections.abc import Mapping, Sequence, Set
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from typing_extensions import Self


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

    def __init__(self, opType: RedOpType = RedOpType.SUM, factor: float | torch.Tensor | None = None) -> None:
        """Makes a reduction; the constants of this class are those without a factor.

        Args:
            opType: the kind; the name is torchcomms'.
            factor: a number or a one-element tensor, for `RedOpType.PREMUL_SUM` alone.

        Raises:
            ValueError: there is a factor without PREMUL_SUM, or PREMUL_SUM without a factor.
        """
        if (opType is RedOpType.PREMUL_SUM) != (factor is not None):
            raise ValueError(f"ReduceOp: a factor belongs to PREMUL_SUM and to nothing else, got {opType}, {factor!r}")
        self._type = opType
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

    @functools.cached_property
    def _number(self) -> int:
        """PyTorch's number of the reduction; -1 if it has a factor."""
        return -1 if self._factor is not None else int(getattr(dist.ReduceOp, self._type.name))

    def _c10d(self) -> Any:
        """The same reduction as PyTorch's type."""
        if self._factor is not None:
            return torch._C._distributed_c10d._make_nccl_premul_sum(self._factor)
        return getattr(dist.ReduceOp, self._type.name)


for _type in RedOpType:
    if _type is not RedOpType.PREMUL_SUM:
        setattr(ReduceOp, _type.name, ReduceOp(_type))


# What operations take as their reduction: also PyTorch's, which is a kind or, with a factor, an object. A text, since
# PyTorch's torchcomms mode imports this module before torch.distributed has its types.
AnyReduceOp: TypeAlias = "ReduceOp | RedOpType | dist.ReduceOp.RedOpType | dist.ReduceOp"


def as_reduce_op(operation: str, op: Any) -> ReduceOp:
    """The reduction that a caller means.

    Args:
        operation: the method that was called.
        op: a `ReduceOp`, or what stands for one: a `RedOpType`, or a reduction of ``torch.distributed``.

    Raises:
        TypeError: ``op`` is something else.
    """
    if isinstance(op, ReduceOp):
        return op
    if isinstance(op, RedOpType):
        return ReduceOp(op)
    if isinstance(op, dist.ReduceOp.RedOpType):
        return ReduceOp(RedOpType[op.name])
    if isinstance(op, dist.ReduceOp):
        # Its pickled form is the one way to its factor.
        kind, factor = cast(Any, op).__getstate__()
        return ReduceOp(RedOpType[dist.ReduceOp.RedOpType(int(kind)).name], factor)
    raise TypeError(
        f"{operation}: argument `op`: expected a reduction as ncclx_rs.ReduceOp.SUM, got {type(op).__name__} {op!r}"
    )


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
    """The options of a communicator, for `new_comm`.

    Attributes:
        abort_process_on_timeout_or_error: whether the process ends when an operation times out or a rank is lost.
        timeout: the timeout of operations that have none of their own, and of joining as `new_comm` says; zero stands
            for the default.
        store: the store of the bootstrap.
        rank: this process's rank.
        size: the number of ranks.
        name: the communicator's name.
        enable_reconfigure: whether `TorchComm.reconfigure` may change its members.
        hints: settings by name.
    """

    def __init__(
        self,
        *,
        abort_process_on_timeout_or_error: bool | None = None,
        timeout: timedelta | float | None = None,
        store: Any = None,
        name: str = "",
        enable_reconfigure: bool = False,
        hints: Mapping[str, str] | None = None,
    ) -> None:
        """Makes options. `new_comm` says their defaults; it sets rank and size.

        Raises:
            TypeError: the timeout is neither a duration nor a number of seconds, or the hints do not map text to text.
            ValueError: the timeout is negative, or the hint ``timeout_seconds`` has no valid value.
            RuntimeError: an environment variable has no valid value.
        """
        self.hints = as_hints("CommOptions", hints)
        self.abort_process_on_timeout_or_error = (
            _flag("TORCHCOMM_ABORT_ON_ERROR", True)
            if abort_process_on_timeout_or_error is None
            else abort_process_on_timeout_or_error
        )
        self.timeout = as_timeout("CommOptions", timeout) or default_timeout(self.hints)
        self.store = store
        self.rank = 0
        self.size = 1
        self.name = name
        self.enable_reconfigure = enable_reconfigure

    def __repr__(self) -> str:
        hints = {name: "..." if name.endswith("_secret") else value for name, value in self.hints.items()}
        shown = {**vars(self), "hints": hints}
        return f"CommOptions({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def default_timeout(hints: Mapping[str, str]) -> timedelta:
    """The timeout of a communicator that is given none: the hint's, that of an environment variable, or 600 s.

    Raises:
        ValueError: the hint is no number of seconds above 0.
        RuntimeError: the variable is none.
    """
    if text := hints.get("timeout_seconds"):
        return _setting("the hint timeout_seconds", text, ValueError)
    for variable in ("NCCLX_RS_TIMEOUT_SECONDS", "TORCHCOMM_TIMEOUT_SECONDS"):
        if text := os.environ.get(variable):
            return _setting(variable, text, RuntimeError)
    return timedelta(seconds=600)


def _setting(name: str, text: str, error: type[Exception]) -> timedelta:
    try:
        limit = as_timeout("new_comm", float(text))
    except ValueError:
        limit = NO_TIMEOUT
    if not limit:
        raise error(f"new_comm: {name} must be a number of seconds above 0, got {text!r}")
    return limit


def _flag(variable: str, default: bool) -> bool:
    text = os.environ.get(variable)
    if text is None:
        return default
    if text.lower() in ("1", "true", "yes", "y"):
        return True
    if text.lower() in ("0", "false", "no", "n"):
        return False
    raise RuntimeError(f"new_comm: {variable} must be true or false, got {text!r}")


# torchcomms' name of the type of timeouts.
Timeout = timedelta

# A process's handle for `TorchComm.reconfigure`.
InitHandle = str

NO_TIMEOUT = timedelta(0)


_MILLISECOND = timedelta(milliseconds=1)
# As good as forever, and it adds to any clock without overflow. The engine's settings end there, too.
_CENTURY = timedelta(days=36_600)


def as_timeout(method: str, timeout: timedelta | float | None) -> timedelta:
    """A timeout as a duration: zero, which stands for the default, if none is given; else 1 ms to a century.

    Args:
        method: what was called.
        timeout: a duration, or a number of seconds.

    Raises:
        TypeError: it is something else.
        ValueError: it is negative, or not a number.
    """
    if timeout is None:
        return NO_TIMEOUT
    if isinstance(timeout, timedelta):
        # torch.compile can trace this. It cannot compare durations or make one.
        seconds: float = timeout.days * 86_400 + timeout.seconds + timeout.microseconds / 1e6
    elif isinstance(timeout, int | float) and not isinstance(timeout, bool):
        seconds = timeout
    else:
        raise TypeError(f"{method}: argument `timeout`: expected a timedelta or a number of seconds, got {timeout!r}")
    if not seconds >= 0:
        raise ValueError(f"{method}: argument `timeout`: expected a time, or zero for the default, got {timeout}")
    if seconds == 0:
        return NO_TIMEOUT
    if seconds < 0.001:
        return _MILLISECOND
    if seconds > 36_600 * 86_400:
        return _CENTURY
    return timeout if isinstance(timeout, timedelta) else timedelta(seconds=seconds)


def as_hints(method: str, hints: Mapping[str, str] | None) -> dict[str, str]:
    """Hints of their own, which the caller may change.

    Args:
        method: what was called.
        hints: its hints.

    Raises:
        TypeError: they do not map text to text.
    """
    expected = f"{method}: argument `hints`: expected a mapping of text to text, got"
    if not isinstance(hints, Mapping | None):
        raise TypeError(f"{expected} {type(hints).__name__}")
    made = dict(hints or {})
    for name, value in made.items():
        if not isinstance(name, str) or not isinstance(value, str):
            # Not the value, which may be a secret.
            raise TypeError(f"{expected} {type(value).__name__} for {name!r}")
    return made


class ReconfigureOptions:
    """The arguments of `TorchComm.reconfigure` in one object.

    Attributes:
        uuid: a number that no earlier call with these members had.
        init_handles: every member's `TorchComm.get_init_handle`; a list has them in the order of their ranks.
        timeout: the timeout of joining, at most ``connect_timeout_seconds``, 300 s; the communicator's if None.
        hints: settings in addition to the communicator's.
    """

    def __init__(
        self,
        uuid: int = 0,
        init_handles: Sequence[InitHandle] | Set[InitHandle] = (),
        timeout: timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> None:
        self.uuid = uuid
        self.init_handles = init_handles
        self.timeout = timeout
        self.hints = as_hints("ReconfigureOptions", hints)


class OpOptions:
    """The options of every operation.

    Attributes:
        timeout: the timeout; zero stands for the communicator's.
        hints: settings by name.
    """

    def __init__(self, timeout: timedelta | float | None = None, hints: Mapping[str, str] | None = None) -> None:
        self.timeout = as_timeout(type(self).__name__, timeout)
        self.hints = dict(hints or {})

    @classmethod
    def of(
        cls,
        method: str,
        timeout: timedelta | float | None,
        hints: Mapping[str, str] | None,
        options: OpOptions | None,
    ) -> Self:
        """The options of a call that has them one by one, in one object, or both; then those one by one win.

        Raises:
            TypeError: ``options`` are not those of the method, or the timeout is no duration.
            ValueError: the timeout is negative.
        """
        if options is None:
            return cls(None if timeout is None else as_timeout(method, timeout), hints)
        if not isinstance(options, cls):
            raise TypeError(f"{method}: argument `options`: expected {cls.__name__}, got {type(options).__name__}")
        limit = as_timeout(method, options.timeout if timeout is None else timeout)
        return cls(limit, {**options.hints, **(hints or {})})

    @property
    def limit_ms(self) -> int:
        """The timeout as the native module takes it: in milliseconds, negative for the communicator's."""
        return round(self.timeout.total_seconds() * 1000) if self.timeout else -1

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
