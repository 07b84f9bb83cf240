"""Finds the ranks at fault from all ranks' dumps. Pure: no input or output."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ncclx_rs.diagnose.dumps import Communicator, Record
from ncclx_rs.diagnose.links import SlowLink, slow_links
from ncclx_rs.diagnose.processes import ranks
from ncclx_rs.diagnose.troubles import Troubles, died, present

# Ranks, each with its operation.
Waiting = tuple[tuple[int, Record], ...]


@dataclass(frozen=True)
class Finding:
    """One thing that went wrong.

    Attributes:
        kind: "died"; "mismatch", the ranks called different collectives, or the two ends of a message differ;
            "missing", a rank did not call a collective that others wait in; "late", it called that when others had
            given it up; "unmatched", a send, a receive or a wait for a signal without its counterpart; "deadlock",
            ranks that did not come waited in other communicators for ranks that waited for each other (`across`);
            "slow_link", all ranks called the collective, and connections are slow; "hang", all ranks called it, or no
            certain one has to, and no rank is surely at fault.
        ranks: the ranks at fault; empty if they are not known.
        text: one sentence.
        details: further sentences.
        waiting: the ranks that could not go on for it, each with its operation.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str
    details: tuple[str, ...] = ()
    waiting: Waiting = field(default=(), repr=False, compare=False)


@dataclass(frozen=True)
class Straggler:
    """How late a rank called collectives, in microseconds after the first rank."""

    rank: int
    mean: float
    worst: int
    last: int


@dataclass
class Diagnosis:
    """The findings from a communicator's dumps."""

    communicator: Communicator
    findings: list[Finding] = field(default_factory=list)
    stragglers: list[Straggler] = field(default_factory=list)
    compared: int = 0
    """How many collectives the stragglers were measured on."""
    links: list[SlowLink] = field(default_factory=list)
    """Slow connections, also where nothing went wrong."""

    @property
    def ranks_at_fault(self) -> list[int]:
        """The ranks of all findings."""
        return sorted({rank for finding in self.findings for rank in finding.ranks})


def analyze(communicator: Communicator) -> Diagnosis:
    """Looks for dead ranks, for the first collective that failed, for unmatched messages and for slow connections."""
    diagnosis = Diagnosis(communicator)
    troubles = present(communicator)
    dead = died(communicator, troubles)
    # What one in its dump had not completed was before its death.
    troubles = {rank: [] if rank in dead else records for rank, records in troubles.items()}
    for rank, cause in dead.items():
        waiting = _messages_with(rank, troubles)
        diagnosis.findings.append(Finding("died", (rank,), f"rank {rank} died: {cause}", waiting=waiting))
    for device in (False, True):
        diagnosis.findings += _collective(communicator, troubles, dead, device)
    diagnosis.findings += _messages(communicator, troubles, dead)
    _compare_arrivals(diagnosis)
    diagnosis.links = slow_links(communicator)
    if diagnosis.links:
        slow = _ends(diagnosis.links)
        diagnosis.findings = [
            replace(finding, kind="slow_link", ranks=slow) if finding.kind == "hang" and not dead else finding
            for finding in diagnosis.findings
        ]
    # After those, since of these it is not known which connection they needed.
    diagnosis.findings += _others(troubles, dead)
    return diagnosis


def _ends(links: list[SlowLink]) -> tuple[int, ...]:
    """The ranks at fault for slow connections: the rank that all of the worst share, else both ends of the worst."""
    alike = [link for link in links if link.worse * _ALIKE >= links[0].worse]
    pairs = {frozenset((link.sender, link.receiver)) for link in alike}
    common = frozenset.intersection(*pairs)
    return tuple(sorted(common)) if common else tuple(sorted((links[0].sender, links[0].receiver)))


# Connections that are slow because of the same rank differ by less than this factor.
_ALIKE = 10


def _collective(communicator: Communicator, troubles: Troubles, dead: dict[int, str], device: bool) -> list[Finding]:
    """Compares the ranks at the first collective on the CPU, or on the device, that some rank did not complete."""
    stuck = [
        (rank, record)
        for rank, own in troubles.items()
        for record in own
        if record.collective and record.device is device
    ]
    if not stuck:
        return []
    first = min((record for _, record in stuck), key=lambda record: record.sequence)
    sequence, place = first.sequence, first.place
    waiting = tuple((rank, record) for rank, record in stuck if record.sequence == sequence)
    by_call: dict[str, list[int]] = defaultdict(list)
    records: dict[int, Record] = {}
    for rank, dump in communicator.dumps.items():
        if (record := dump.collective(sequence, device)) is not None:
            by_call[record.call].append(rank)
            records[rank] = record
    calls = sorted(by_call.items(), key=lambda item: (-len(item[1]), item[1]))
    what = f"{place}, {calls[0][0]}"
    if len(calls) > 1:
        most = len(calls[0][1])
        minority = [rank for _, called in calls if len(called) < most for rank in called]
        details = tuple(f"{ranks(called)} called {call}" for call, called in calls)
        return [Finding("mismatch", tuple(sorted(minority)), f"the ranks disagree on {place}", details, waiting)]
    came = set(calls[0][1])
    if not device:
        came |= {peer.rank for dump in communicator.dumps.values() for peer in dump.peers if peer.called > sequence}
    missing = [rank for rank in range(communicator.size) if rank not in came]
    late = [] if dead else _late(what, records, waiting)
    if missing:
        details = tuple(_instead(communicator, rank, dead, first) for rank in missing)
        text = f"{ranks(missing)} did not call {what}, which {ranks(came)} did"
        return [Finding("missing", _to_blame(missing, dead), text, details, waiting), *late]
    if dead:
        text = f"{what}: all ranks have called it; it cannot end without {ranks(dead)}"
        return [Finding("hang", (), text, waiting=waiting)]
    if late:
        return late
    failures = tuple(sorted({record.failure for _, record in waiting if record.failure}))
    return [Finding("hang", (), f"{what}: all ranks have called it, and not all could finish", failures, waiting)]


def _to_blame(suspects: Iterable[int], dead: dict[int, str]) -> tuple[int, ...]:
    """The ranks at fault among those that others waited for: if ranks have died, no other one."""
    return tuple(rank for rank in suspects if not dead or rank in dead)


# How the engine says that an operation's time was over, for want of ranks and not of a resource.
_TIMED_OUT = re.compile(r"timed out after a timeout of \S+: ")


def _late(what: str, records: dict[int, Record], waiting: Waiting) -> list[Finding]:
    """The ranks that called a collective after another one's time was over, by the clocks of their hosts."""
    over = [
        (record.ended, rank, record.failure)
        for rank, record in records.items()
        if record.ended is not None and record.failure and _TIMED_OUT.search(record.failure)
    ]
    if not over:
        return []
    end, first, failure = min(over)
    late = {rank: record.submitted - end for rank, record in sorted(records.items()) if record.submitted > end}
    details = tuple(f"rank {rank} called it {after / 1e6:.1f} s after that" for rank, after in late.items())
    text = f"{ranks(late)} called {what} after rank {first} had given it up"
    in_time = tuple((rank, record) for rank, record in waiting if rank not in late)
    return [Finding("late", tuple(late), text, (*details, failure), in_time)] if late else []


def _instead(communicator: Communicator, rank: int, dead: dict[int, str], stuck: Record) -> str:
    """What a rank did instead of calling the collective of another rank's record."""
    if rank in dead:
        return f"rank {rank} is dead"
    dump = communicator.dumps.get(rank)
    if dump is None:
        return f"rank {rank} left no dump: it may be stopped, or busy elsewhere"
    before = (stuck.submitted - dump.time) / 1e6
    note = f"; its dump is from {before:.0f} s before that call" if before >= 1 else ""
    waiting = next((record for record in dump.records if record.state in ("running", "queued")), None)
    if waiting is not None:
        return f"rank {rank} is in {_named(waiting)} since {(dump.time - waiting.submitted) / 1e6:.1f} s{note}"
    if not dump.records:
        return f"rank {rank} has called nothing{note}"
    last = dump.records[-1]
    return f"rank {rank} last called {_named(last)}, {(dump.time - last.submitted) / 1e6:.1f} s before its dump{note}"


def _named(record: Record) -> str:
    return f"{record.place}, {record.call}" if record.device else record.call


# What the other rank has to call. Windows' other accesses need nothing of it.
_COUNTERPART = {"send": "recv", "recv": "send", "wait_signal": "signal"}


def _counterpart(rank: int, record: Record) -> str | None:
    """What another rank has to call for an operation of `rank`; none if that is no certain rank."""
    return None if record.peer in (None, rank) else _COUNTERPART.get(record.operation)


def _others(troubles: Troubles, dead: dict[int, str]) -> list[Finding]:
    """What did not complete and is neither a collective nor has a rank to call its counterpart."""
    return [
        Finding(
            "hang",
            (),
            f"rank {rank} called {record.call}, and it did not finish",
            (record.failure,) if record.failure else (),
            ((rank, record),),
        )
        for rank, records in sorted(troubles.items())
        for record in records
        if not record.collective and _counterpart(rank, record) is None and record.peer not in dead
    ]


def _messages(communicator: Communicator, troubles: Troubles, dead: dict[int, str]) -> list[Finding]:
    """Sends, receives and waits for signals that did not complete.

    If the peer waits for a third rank, the ranks at the ends of the chains from there are at fault.
    """
    findings: list[Finding] = []
    waits: dict[int, set[int]] = defaultdict(set)
    for rank, records in sorted(troubles.items()):
        for record in records:
            wanted = _counterpart(rank, record)
            if wanted is None or record.peer is None:
                continue
            if record.peer in dead:
                waits[rank].add(record.peer)
                continue  # the finding of its death says so
            finding = replace(_unmatched(communicator, rank, record, record.peer, wanted), waiting=((rank, record),))
            if finding.ranks:
                waits[rank].add(record.peer)
            findings.append(finding)
    for index, finding in enumerate(findings):
        if finding.ranks and (last := _last(finding.ranks[0], waits)) != finding.ranks:
            detail = f"rank {finding.ranks[0]} waits itself, in the end for {ranks(last)}"
            findings[index] = finding = replace(finding, ranks=last, details=(detail,))
        findings[index] = replace(finding, ranks=_to_blame(finding.ranks, dead))
    return sorted(findings, key=lambda finding: len(finding.details))


def _messages_with(peer: int, troubles: Troubles) -> Waiting:
    """The messages and accesses to a rank that others did not complete."""
    return tuple(
        (rank, record)
        for rank, records in troubles.items()
        for record in records
        if not record.collective and record.peer == peer != rank
    )


def _last(rank: int, waits: dict[int, set[int]]) -> tuple[int, ...]:
    """The ranks that wait for nobody at the ends of the chains from `rank` on; `rank` itself if all are circles.

    A rank waits for several where it asks for messages ahead of time.
    """
    seen, reached, last = {rank}, [rank], []
    while reached:
        here = reached.pop()
        after = waits.get(here)
        if not after:
            last.append(here)
            continue
        reached += after - seen
        seen |= after
    return tuple(sorted(last)) or (rank,)


# How the engine says that the two ends of a message differ.
_DIFFER = re.compile(r"sent \d+ bytes, the receive expects|expected \d+ bytes, not|the ranks disagree on message")


def _unmatched(communicator: Communicator, rank: int, record: Record, peer: int, wanted: str) -> Finding:
    if record.failure and _DIFFER.search(record.failure):
        return Finding("mismatch", (), f"rank {rank} called {record.failure}")
    other = communicator.dumps.get(peer)
    if other is None:
        return Finding("unmatched", (peer,), f"rank {rank} waits in {record.call}; rank {peer} left no dump")
    # A short send completes also if nobody receives it: as one with a tag that this rank has not asked for.
    asked = {
        own.tag
        for own in communicator.dumps[rank].records
        if own.operation == record.operation and own.peer in (peer, None)
    }
    facing = [
        their
        for their in other.records
        if their.operation == wanted
        and their.peer in (rank, None)
        and (their.state != "completed" or (wanted == "send" and their.tag not in asked))
    ]
    if not facing:
        text = f"rank {rank} waits in {record.call}, for which rank {peer} has called no {wanted}"
        return Finding("unmatched", (peer,), text)
    if any(their.tag == record.tag for their in facing):
        return Finding("hang", (), f"rank {rank} called {record.call}, as rank {peer} its part, and it did not finish")
    details = tuple(f"rank {peer} called {their.call}" for their in facing)
    return Finding("unmatched", (), f"rank {rank} called {record.call}, which does not meet rank {peer}'s", details)


def _compare_arrivals(diagnosis: Diagnosis) -> None:
    """Measures how late each rank called the collectives that all dumps hold."""
    dumps = diagnosis.communicator.dumps
    if len(dumps) < 2:
        return
    arrivals: dict[tuple[bool, int], dict[int, int]] = defaultdict(dict)
    for rank, dump in dumps.items():
        for record in dump.records:
            if record.collective and record.state == "completed":
                arrivals[record.device, record.sequence][rank] = record.submitted
    complete = [times for times in arrivals.values() if len(times) == len(dumps)]
    diagnosis.compared = len(complete)
    if not complete:
        return
    span = [(min(times.values()), max(times.values())) for times in complete]
    for rank in sorted(dumps):
        late = [times[rank] - first for times, (first, _) in zip(complete, span, strict=True)]
        last = sum(times[rank] == latest for times, (_, latest) in zip(complete, span, strict=True))
        diagnosis.stragglers.append(Straggler(rank, sum(late) / len(late), max(late), last))
