"""What a dump says of a rank's present: what it does, for whom it waits, and how fast its operations were. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ncclx_rs.diagnose.dumps import Communicator, Dump, Record

# How far back rates look, in microseconds.
WINDOW = 5_000_000
# When a rank has surely heard of the calls of ranks that left no dump, in microseconds after its own.
HEARD_AFTER = 1_000_000
# The bytes of an element, by PyTorch's names of types, and by the engine's for what it only moves.
_ITEM_BYTES = {
    "bool": 1,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float32": 4,
    "float": 4,
    "float64": 8,
    "double": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
} | {f"{size}-byte elements": size for size in (1, 2, 4, 8, 16)}


@dataclass(frozen=True)
class Rates:
    """A rank's present.

    Attributes:
        rank: the communicator's number of the rank.
        process: its process.
        calls: how many operations it has called.
        in_flight: how many of them have not ended.
        oldest: the call that has been in flight longest, if there is one.
        oldest_seconds: for how long it has been.
        waits_for: the ranks that it waits for: those that have not called its oldest collective, or the peer of its
            oldest message.
        per_second: how many operations a second ended of late.
        bytes_per_second: how many bytes these read and wrote a second.
        seconds: how long they took, on average.
        failed: how many of the operations in the recorder failed.
        lost: the ranks that it has lost.
    """

    rank: int
    process: int
    calls: int
    in_flight: int
    oldest: str | None
    oldest_seconds: float
    waits_for: tuple[int, ...]
    per_second: float
    bytes_per_second: float
    seconds: float
    failed: int
    lost: tuple[int, ...]


def item_bytes(dtype: str | None) -> int:
    """The bytes of an element; of what has no type, sizes are bytes."""
    if dtype is None:
        return 1
    name = dtype.removeprefix("torch.")
    if name in _ITEM_BYTES:
        return _ITEM_BYTES[name]
    if name.startswith("float8"):
        return 1
    digits = name.lstrip("uint")
    return int(digits) // 8 if digits.isdecimal() else 1


def rates(dump: Dump, others: Communicator) -> Rates:
    """A rank's present, from its dump and those of the ranks that there are."""
    flying = [record for record in dump.records if record.state in ("queued", "running")]
    oldest = min(flying, key=lambda record: record.submitted, default=None)
    ended = [record for record in dump.records if record.state == "completed" and record.ended is not None]
    recent = [record for record in ended if dump.time - (record.ended or 0) <= WINDOW]
    # A full recorder may reach less far back than the window.
    full = len(recent) == len(ended) and dump.operations > len(dump.records)
    first = min((record.submitted for record in recent), default=dump.time)
    span = max(min(dump.time - first, WINDOW) if full else WINDOW, 1) / 1e6
    moved = sum((record.read + record.written) * item_bytes(record.dtype) for record in recent)
    spent = sum((record.ended or 0) - record.submitted for record in recent) / 1e6
    return Rates(
        rank=dump.rank,
        process=dump.process,
        calls=dump.operations,
        in_flight=len(flying),
        oldest=oldest.call if oldest else None,
        oldest_seconds=max(dump.time - oldest.submitted, 0) / 1e6 if oldest else 0.0,
        waits_for=_waits_for(dump, oldest, others) if oldest else (),
        per_second=len(recent) / span,
        bytes_per_second=moved / span,
        seconds=spent / len(recent) if recent else 0.0,
        failed=sum(record.state == "failed" for record in dump.records),
        lost=tuple(peer.rank for peer in dump.peers if peer.lost is not None),
    )


def _waits_for(dump: Dump, record: Record, others: Communicator) -> tuple[int, ...]:
    if not record.collective:
        return () if record.peer is None else (record.peer,)
    if record.device:
        return ()
    waits = []
    for peer in dump.peers:
        other = others.dumps.get(peer.rank)
        if other is not None and other.host == dump.host:
            # Dumps are taken one after the other: one from before this call tells nothing about it.
            late = other.collectives <= record.sequence and other.time >= record.submitted
        else:
            # The clocks of hosts differ: what this rank has heard itself tells that its call is no news there.
            late = peer.called <= record.sequence and dump.time - record.submitted >= HEARD_AFTER
            late = late and (other is None or other.collectives <= record.sequence)
        if late:
            waits.append(peer.rank)
    return tuple(waits)


def present(communicator: Communicator) -> list[Rates]:
    """The present of all ranks that left a dump, by rank."""
    return [rates(dump, communicator) for _, dump in sorted(communicator.dumps.items())]


def slowest(found: Sequence[Rates]) -> int | None:
    """The rank that most of the others wait for, if any does."""
    waited = [rank for one in found for rank in one.waits_for]
    return max(sorted(set(waited)), key=waited.count, default=None)
