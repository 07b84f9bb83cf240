"""Finds the ranks at fault from all ranks' dumps. Pure: no input or output."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ncclx_rs.diagnose.dumps import Communicator, Dump, Record
from ncclx_rs.diagnose.links import SlowLink, slow_links


@dataclass(frozen=True)
class Finding:
    """One thing that went wrong.

    Attributes:
        kind: "died"; "mismatch", the ranks called different collectives; "missing", a rank did not call a collective
            that others wait in; "unmatched", a send or receive without its counterpart; "slow_link", all ranks called
            the collective, and connections are slow; "hang", all ranks called it, and no rank is surely at fault.
        ranks: the ranks at fault; empty if they are not known.
        text: one sentence.
        details: further sentences.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str
    details: tuple[str, ...] = ()


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


def ranks(numbers: Iterable[int]) -> str:
    """Ranks in words: "rank 3", "ranks 0-2 and 5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    words = ["-".join(map(str, run)) for run in runs]
    many = len(words) > 1 or (bool(runs) and len(runs[0]) > 1)
    listed = " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
    return f"rank{'s' if many else ''} {listed}"


def analyze(communicator: Communicator) -> Diagnosis:
    """Looks for dead ranks, for the first collective that failed, for unmatched messages and for slow connections."""
    diagnosis = Diagnosis(communicator)
    dead = _dead(communicator)
    diagnosis.findings += [Finding("died", (rank,), f"rank {rank} died: {cause}") for rank, cause in dead.items()]
    for device in (False, True):
        collective = _collective(communicator, dead, device)
        if collective is not None:
            diagnosis.findings.append(collective)
    diagnosis.findings += _messages(communicator, dead)
    _compare_arrivals(diagnosis)
    diagnosis.links = slow_links(communicator)
    if diagnosis.links:
        slow = _ends(diagnosis.links)
        diagnosis.findings = [
            replace(finding, kind="slow_link", ranks=slow) if finding.kind == "hang" and not dead else finding
            for finding in diagnosis.findings
        ]
    return diagnosis


def _ends(links: list[SlowLink]) -> tuple[int, ...]:
    """The ranks at fault for slow connections: the rank that all of the worst share, else both ends of the worst."""
    alike = [link for link in links if link.worse * _ALIKE >= links[0].worse]
    pairs = {frozenset((link.sender, link.receiver)) for link in alike}
    common = frozenset.intersection(*pairs)
    return tuple(sorted(common)) if common else tuple(sorted((links[0].sender, links[0].receiver)))


# Connections that are slow because of the same rank differ by less than this factor.
_ALIKE = 10


def _dead(communicator: Communicator) -> dict[int, str]:
    """The ranks that others have lost and that left no dump, each with the reason that another rank recorded."""
    dead: dict[int, str] = {}
    for dump in communicator.dumps.values():
        for peer in dump.peers:
            if peer.lost is not None and peer.rank not in communicator.dumps:
                dead.setdefault(peer.rank, peer.lost)
    return dict(sorted(dead.items()))


def _unfinished(dump: Dump, device: bool) -> Record | None:
    """The first collective that a rank called there and did not complete."""
    return min(
        (record for record in dump.collectives_on(device) if record.state != "completed"),
        key=lambda record: record.sequence,
        default=None,
    )


def _collective(communicator: Communicator, dead: dict[int, str], device: bool) -> Finding | None:
    """Compares the ranks at the first collective on the CPU, or on the device, that some rank did not complete."""
    stuck = [record for dump in communicator.dumps.values() if (record := _unfinished(dump, device))]
    if not stuck:
        return None
    sequence = min(record.sequence for record in stuck)
    by_call: dict[str, list[int]] = defaultdict(list)
    for rank, dump in communicator.dumps.items():
        if (record := dump.collective(sequence, device)) is not None:
            by_call[record.call].append(rank)
    calls = sorted(by_call.items(), key=lambda item: (-len(item[1]), item[1]))
    place = next(record.place for record in stuck if record.sequence == sequence)
    what = f"{place}, {calls[0][0]}"
    if len(calls) > 1:
        most = len(calls[0][1])
        minority = [rank for _, called in calls if len(called) < most for rank in called]
        details = tuple(f"{ranks(called)} called {call}" for call, called in calls)
        return Finding("mismatch", tuple(sorted(minority)), f"the ranks disagree on {place}", details)
    came = set(calls[0][1])
    if not device:
        came |= {peer.rank for dump in communicator.dumps.values() for peer in dump.peers if peer.called > sequence}
    missing = [rank for rank in range(communicator.size) if rank not in came]
    if missing:
        details = tuple(_instead(communicator, rank, dead) for rank in missing)
        text = f"{ranks(missing)} did not call {what}, which {ranks(came)} did"
        return Finding("missing", tuple(missing), text, details)
    if dead:
        return Finding("hang", (), f"{what}: all ranks have called it; it cannot end without {ranks(dead)}")
    failures = {record.failure for record in stuck if record.sequence == sequence and record.failure}
    return Finding("hang", (), f"{what}: all ranks have called it, and not all could finish", tuple(sorted(failures)))


def _instead(communicator: Communicator, rank: int, dead: dict[int, str]) -> str:
    """What a rank did instead of calling the collective."""
    dump = communicator.dumps.get(rank)
    if dump is None:
        return f"rank {rank} {'is dead' if rank in dead else 'left no dump: it may be stopped, or busy elsewhere'}"
    waiting = next((record for record in dump.records if record.state in ("running", "queued")), None)
    if waiting is not None:
        return f"rank {rank} is in {_named(waiting)} since {(dump.time - waiting.submitted) / 1e6:.1f} s"
    if not dump.records:
        return f"rank {rank} has called nothing"
    last = dump.records[-1]
    return f"rank {rank} last called {_named(last)}, {(dump.time - last.submitted) / 1e6:.1f} s before its dump"


def _named(record: Record) -> str:
    return f"{record.place}, {record.call}" if record.device else record.call


_COUNTERPART = {"send": "recv", "recv": "send"}


def _messages(communicator: Communicator, dead: dict[int, str]) -> list[Finding]:
    """Sends and receives that did not complete.

    If the peer waits for a third rank, the rank at the end of that chain is at fault.
    """
    findings: list[Finding] = []
    waits: dict[int, int] = {}
    for rank, dump in sorted(communicator.dumps.items()):
        for record in dump.records:
            wanted = _COUNTERPART.get(record.operation)
            if wanted is None or record.state == "completed" or record.peer is None or record.peer == rank:
                continue
            other = communicator.dumps.get(record.peer)
            if other is None and record.peer in dead:
                continue  # the finding of its death says so
            finding = _unmatched(rank, record, record.peer, wanted, other)
            if finding.ranks:
                waits.setdefault(rank, record.peer)
            findings.append(finding)
    for index, finding in enumerate(findings):
        if finding.ranks and (last := _last(finding.ranks[0], waits)) not in finding.ranks:
            detail = f"rank {finding.ranks[0]} waits itself, in the end for rank {last}"
            findings[index] = replace(finding, ranks=(last,), details=(detail,))
    return sorted(findings, key=lambda finding: len(finding.details))


def _last(rank: int, waits: dict[int, int]) -> int:
    """The rank at the end of the chain of waiting ranks from `rank` on; `rank` itself if the chain is a circle."""
    seen, last = {rank}, rank
    while (after := waits.get(last)) is not None:
        if after in seen:
            return rank
        seen.add(after)
        last = after
    return last


def _unmatched(rank: int, record: Record, peer: int, wanted: str, other: Dump | None) -> Finding:
    if other is None:
        return Finding("unmatched", (peer,), f"rank {rank} waits in {record.call}; rank {peer} left no dump")
    unfinished = [their for their in other.records if their.operation == wanted and their.state != "completed"]
    facing = [their for their in unfinished if their.peer in (rank, None)]
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
