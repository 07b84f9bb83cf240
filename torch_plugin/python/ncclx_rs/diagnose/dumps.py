"""Reads dumps, the files that hold the ranks' flight recorders; `src/engine/dump.rs` writes them."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

_VERSION = 5

T = TypeVar("T")

_types = functools.cache(get_type_hints)

# What `parse` raises for a text that is no dump.
MALFORMED = (ValueError, KeyError, TypeError, RecursionError)


@dataclass(frozen=True)
class Record:
    """An operation on one rank. Times are microseconds of Unix time by the clock of the rank's host.

    Attributes:
        collective: whether every rank calls it, in the same order; `sequence` then means the same on every rank.
        device: whether it runs on a device. Such operations have sequence numbers of their own.
        call: the operation with its arguments. Those of a collective are the ones that all ranks must agree on.
        dtype: a collective's element type, by PyTorch's name.
        read: how many elements of the caller's memory it reads, or how many bytes if there is no `dtype`.
        written: how many it writes.
        state: queued, running, completed or failed.
        device_microseconds: how long it took by the clock of its device, if that was measured (`device_timing`).
        stack: the stack of the call, the innermost frame first, each with name, filename and line.
    """

    number: int
    operation: str
    collective: bool
    device: bool
    sequence: int
    call: str
    peer: int | None
    tag: int | None
    dtype: str | None
    read: int
    written: int
    state: str
    submitted: int
    started: int | None
    ended: int | None
    device_microseconds: float | None
    failure: str | None
    stack: list[dict[str, Any]]

    @property
    def place(self) -> str:
        """What it is, with its number."""
        kind = "collective" if self.collective else "operation"
        return f"{'device ' if self.device else ''}{kind} {self.sequence}"


@dataclass(frozen=True)
class Link:
    """The kernel's statistics of a TCP connection on which a rank sends to another.

    Attributes:
        round_trip: the least round-trip time in microseconds.
        bytes: how many bytes were acknowledged.
        sending: microseconds during which there was data to send and the receiver had room for it.
        segments: how many segments were sent.
        resent: how many of them were sent again.
    """

    round_trip: int
    bytes: int
    sending: int
    segments: int
    resent: int


@dataclass(frozen=True)
class Ring:
    """How a rank reads the shared memory through which another's messages come.

    Attributes:
        lines: who holds the cache lines that it has read, `shared` by both cores or `owned` by the reader's.
        shared: picoseconds that a byte costs writer and reader together while lines are shared, if measured.
        owned: the same while they are owned.
    """

    lines: str
    shared: int | None
    owned: int | None


@dataclass(frozen=True)
class Peer:
    """What a rank knows of another.

    Attributes:
        called: how many collectives on the CPU the peer has called at least.
        lost: why it cannot be reached any more.
        link: the connection to the peer, if it is a TCP connection.
        ring: the shared memory through which the peer's messages come, if they do.
    """

    rank: int
    host: int
    called: int
    lost: str | None
    link: Link | None
    ring: Ring | None


@dataclass(frozen=True)
class Dump:
    """What a rank knew of a communicator when it wrote its file.

    Attributes:
        members: the job's numbers of the communicator's ranks, in the communicator's order.
        operations: how many operations it had called. `records` holds the last of them and those in flight.
        collectives: how many collectives on the CPU it had called.
    """

    id: str
    communicator: str
    rank: int
    size: int
    members: list[int]
    host: int
    process: int
    reason: str
    time: int
    operations: int
    collectives: int
    peers: list[Peer]
    records: list[Record]

    def collectives_on(self, device: bool) -> list[Record]:
        """The collectives that run on the device, or those that do not."""
        return [record for record in self.records if record.collective and record.device is device]

    def collective(self, sequence: int, device: bool) -> Record | None:
        """The collective of that number there, if the dump holds it."""
        return next((record for record in self.collectives_on(device) if record.sequence == sequence), None)


@dataclass
class Communicator:
    """The dumps of one communicator by rank. A rank may have left none."""

    id: str
    name: str
    size: int
    dumps: dict[int, Dump] = field(default_factory=dict)

    @property
    def members(self) -> list[int]:
        """The job's numbers of the ranks, in the order of their ranks here; every dump has them."""
        return next((dump.members for dump in self.dumps.values()), list(range(self.size)))

    @property
    def hosts(self) -> dict[int, int]:
        """The ranks' hosts, by numbers that mean nothing in another communicator; every dump has them."""
        dump = next(iter(self.dumps.values()), None)
        return {} if dump is None else {dump.rank: dump.host} | {peer.rank: peer.host for peer in dump.peers}

    @property
    def newest(self) -> int:
        """When the newest dump was written."""
        return max(dump.time for dump in self.dumps.values())

    def keep(self, dump: Dump) -> None:
        """Adds a dump. If a rank has several, the newest counts."""
        other = self.dumps.get(dump.rank)
        if other is None or other.time < dump.time:
            self.dumps[dump.rank] = dump


@dataclass
class Folder:
    """A folder's communicators, and the reason for each file that could not be read."""

    communicators: list[Communicator]
    unreadable: dict[Path, str]


def read(folder: str | Path) -> Folder:
    """Reads the dumps in a folder.

    Raises:
        OSError: the folder cannot be read.
    """
    found: dict[str, Communicator] = {}
    unreadable: dict[Path, str] = {}
    for file in sorted(file for file in Path(folder).iterdir() if file.suffix == ".json"):
        try:
            dump = parse(file.read_text())
        except (OSError, *MALFORMED) as error:
            unreadable[file] = str(error)
            continue
        communicator = found.setdefault(dump.id, Communicator(dump.id, dump.communicator, dump.size))
        if dump.size != communicator.size:
            unreadable[file] = f"other dumps of its communicator tell of {communicator.size} ranks, not {dump.size}"
            continue
        communicator.keep(dump)
    return Folder(sorted(found.values(), key=lambda communicator: (communicator.name, communicator.newest)), unreadable)


def parse(text: str) -> Dump:
    """A dump from its JSON.

    Raises:
        ValueError: the text is no dump, or a dump of another version; others of `MALFORMED` too, if a part is missing.
    """
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        raise ValueError(f"not a flight recorder's dump of version {_VERSION}")
    peers = [_peer(peer) for peer in content["peers"]]
    records = [_filled(Record, record) for record in content["records"]]
    dump = _filled(Dump, content | {"peers": peers, "records": records})
    ranks = range(len(dump.members))
    named = [dump.rank, *(r.peer for r in records if r.peer is not None)]
    if dump.size != len(ranks) or any(rank not in ranks for rank in named) or {*map(type, dump.members)} != {int}:
        raise ValueError(f"it tells of ranks that there are not among {dump.size}")
    if [peer.rank for peer in peers] != [rank for rank in ranks if rank != dump.rank]:
        raise ValueError(f"it does not tell of each of {dump.size} ranks")
    return dump


def _peer(content: dict[str, Any]) -> Peer:
    link, ring = content["link"], content["ring"]
    parts = {"link": link and _filled(Link, link), "ring": ring and _filled(Ring, ring)}
    return _filled(Peer, content | parts)


def _filled(kind: type[T], content: dict[str, Any]) -> T:
    names = [entry.name for entry in fields(kind)]  # type: ignore[arg-type]  # of dataclasses alone
    missing = [name for name in names if name not in content]
    if missing:
        raise ValueError(f"a {kind.__name__} has no {', '.join(missing)}")
    for name, expected in _types(kind).items():  # type: ignore[arg-type]  # as above
        _check(f"a {kind.__name__}'s {name}", content[name], expected)
    return kind(**{name: content[name] for name in names})


def _check(what: str, value: object, expected: Any) -> None:
    if not isinstance(value, list if get_origin(expected) is list else expected):
        raise ValueError(f"{what} is {value!r:.50}, not {expected}")
    if isinstance(value, int) and not 0 <= value < 2**64:
        raise ValueError(f"{what} is no number of 64 bits")
    if isinstance(value, str):
        value.encode()  # JSON can spell lone surrogates
