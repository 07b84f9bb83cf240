"""Follows ranks from one communicator into another: who waits there is not to blame for not coming here. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ncclx_rs.diagnose.analyze import Diagnosis, Finding
from ncclx_rs.diagnose.dumps import Dump, Record
from ncclx_rs.diagnose.processes import Processes, ranks


def across(diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """The diagnoses of a job's communicators, each with what the others show.

    A rank that did not come because it waited in another communicator at the time is at fault no more: the finding says
    where it was, and for which ranks in the end. Where communicators wait for each other, the finding is a "deadlock".
    A rank that may have waited stays at fault if dumps do not show it for sure, and the finding says where that was.
    """
    job = _Job(diagnoses)
    return [
        replace(diagnosis, findings=[job.followed((index, place)) for place in range(len(diagnosis.findings))])
        for index, diagnosis in enumerate(diagnoses)
    ]


# What ranks are at fault for that did not come.
_ABSENCES = ("missing", "unmatched", "late")

# Why it is not sure that a rank waited.
_MAY_BE_ASYNCHRONOUS = ", unless that call was asynchronous"
_MAY_BE_ANOTHER = "; no dump from here shows that it is the same process"

# A finding: the index of its communicator, and its place among those of that one.
_Key = tuple[int, int]


@dataclass(frozen=True)
class _Wait:
    """An operation in which a rank waited for those whom a finding blames."""

    finding: _Key
    dump: Dump
    record: Record

    @property
    def end(self) -> int:
        return self.dump.time if self.record.ended is None else self.record.ended


@dataclass(frozen=True)
class _Stay:
    """Where a rank was instead of coming.

    Attributes:
        findings: those of the communicator that blame others for its wait.
        doubt: why it is not sure; empty if it is.
    """

    wait: _Wait
    findings: frozenset[_Key]
    doubt: str


class _Job:
    """Who waited in which communicator for whom."""

    def __init__(self, diagnoses: Sequence[Diagnosis]) -> None:
        self._diagnoses = diagnoses
        self._processes = Processes([diagnosis.communicator for diagnosis in diagnoses])
        self._findings = {
            (index, place): finding
            for index, diagnosis in enumerate(diagnoses)
            for place, finding in enumerate(diagnosis.findings)
        }
        dead = [
            {rank for finding in diagnosis.findings if finding.kind == "died" for rank in finding.ranks}
            for diagnosis in diagnoses
        ]
        self._blamed = {
            key: frozenset(finding.ranks or (() if finding.kind == "mismatch" else dead[key[0]]))
            for key, finding in self._findings.items()
        }
        self._waits = self._find_waits()
        self._went_on = self._find_progress()
        self._stays = {key: self._find_stays(key) for key in self._findings}
        self._ends = self._find_ends()

    def followed(self, key: _Key) -> Finding:
        """A finding with where those at fault waited meanwhile."""
        finding, stays = self._findings[key], self._stays[key]
        at_fault = tuple(rank for rank in finding.ranks if rank not in stays or stays[rank].doubt)
        circular = any(not self._ends_of(findings) for findings in {stay.findings for stay in stays.values()})
        details = (*self._told(stays), *finding.details)
        if circular and not at_fault:
            return replace(finding, kind="deadlock", ranks=(), text=f"deadlock: {finding.text}", details=details)
        return replace(finding, ranks=at_fault, details=details)

    def _told(self, stays: dict[int, _Stay]) -> list[str]:
        """Where ranks waited, in one sentence for those of which the same is true."""
        ends = {findings: self._names(findings) for findings in {stay.findings for stay in stays.values()}}
        alike: dict[tuple[int, str, str, str], dict[int, float]] = defaultdict(dict)
        for rank, stay in stays.items():
            wait = stay.wait
            lasted = (wait.end - wait.record.submitted) / 1e6
            alike[wait.finding[0], wait.record.call, ends[stay.findings], stay.doubt][rank] = lasted
        sentences = []
        for (index, call, end, doubt), times in alike.items():
            name, verb = self._diagnoses[index].communicator.name, "may have waited" if doubt else "waited"
            least, most = f"{min(times.values()):.1f}", f"{max(times.values()):.1f}"
            seconds = least if least == most else f"{least}-{most}"
            place = f"in communicator `{name}`, in {call}"
            sentences.append(f"{ranks(times)} {verb} {seconds} s {place}, in the end for {end}{doubt}")
        return sentences

    def _names(self, findings: frozenset[_Key]) -> str:
        ends = self._ends_of(findings)
        return self._processes.names(ends) if ends else "ranks that wait for each other"

    def _find_waits(self) -> dict[int, list[_Wait]]:
        """The waits for ranks at fault, by the job's number of the rank that waits."""
        waits: dict[int, list[_Wait]] = defaultdict(list)
        for key, finding in self._findings.items():
            communicator, blamed = self._diagnoses[key[0]].communicator, self._blamed[key]
            members = communicator.members
            for rank, record in finding.waiting if blamed else ():
                if rank not in blamed:
                    waits[members[rank]].append(_Wait(key, communicator.dumps[rank], record))
        return waits

    def _find_progress(self) -> dict[tuple[int, int], int]:
        """When processes last called what they then completed."""
        latest: dict[tuple[int, int], int] = {}
        for diagnosis in self._diagnoses:
            members = diagnosis.communicator.members
            for rank, dump in diagnosis.communicator.dumps.items():
                process = (members[rank], dump.process)
                done = (record.submitted for record in dump.records if record.state == "completed")
                latest[process] = max(latest.get(process, -1), max(done, default=-1))
        return latest

    def _find_stays(self, key: _Key) -> dict[int, _Stay]:
        """Where the ranks waited that did not come, as far as that is why others waited for them."""
        finding, members = self._findings[key], self._diagnoses[key[0]].communicator.members
        if finding.kind not in _ABSENCES or not finding.waiting:
            return {}
        kept = _Kept.by(finding, self._diagnoses[key[0]])
        stays = {}
        for rank in finding.ranks:
            found = [
                (wait, doubt)
                for wait in self._waits.get(members[rank], [])
                if wait.finding[0] != key[0]
                and kept.explained_by(wait)
                and self._went_on[members[rank], wait.dump.process] <= wait.record.submitted
                and (doubt := self._doubt(key[0], rank, wait)) is not None
            ]
            if found:
                wait, doubt = max(found, key=_preference)
                findings = frozenset(other.finding for other, _ in found if other.record is wait.record)
                stays[rank] = _Stay(wait, findings, doubt)
        return stays

    def _doubt(self, index: int, rank: int, wait: _Wait) -> str | None:
        """Why it may not be this rank that waited there; none at all if it is another one for sure."""
        same = self._processes.is_same(index, rank, wait.finding[0], wait.dump)
        if same is None:
            return _MAY_BE_ANOTHER
        if not same:
            return None
        return "" if wait.record.collective else _MAY_BE_ASYNCHRONOUS

    def _find_ends(self) -> dict[_Key, set[tuple[int, int]]]:
        """Who is at fault in the end for each finding, as indices of communicators with ranks there."""
        ends: dict[_Key, set[tuple[int, int]]] = defaultdict(set)
        behind: dict[_Key, set[_Key]] = defaultdict(set)
        reached = []
        for key, blamed in self._blamed.items():
            for rank in blamed:
                stay = self._stays[key].get(rank)
                if stay is None or stay.doubt:
                    reached.append((key, (key[0], rank)))
                else:
                    for other in stay.findings:
                        behind[other].add(key)
        while reached:
            key, end = reached.pop()
            if end not in ends[key]:
                ends[key].add(end)
                reached += [(other, end) for other in behind[key]]
        return ends

    def _ends_of(self, findings: frozenset[_Key]) -> set[tuple[int, int]]:
        return {end for key in findings for end in self._ends[key]}


@dataclass(frozen=True)
class _Kept:
    """When ranks waited for those at fault.

    Attributes:
        begin: when the first one began to wait.
        end: when the last one gave up, or told of it.
        goes_on: whether that one still waited.
    """

    begin: int
    end: int
    goes_on: bool

    @classmethod
    def by(cls, finding: Finding, diagnosis: Diagnosis) -> _Kept:
        dumps = diagnosis.communicator.dumps
        return cls(
            min(record.submitted for _, record in finding.waiting),
            max(dumps[rank].time if record.ended is None else record.ended for rank, record in finding.waiting),
            any(record.ended is None for _, record in finding.waiting),
        )

    def explained_by(self, wait: _Wait) -> bool:
        """Whether a rank may have kept them waiting because it waited itself.

        If both last on, it is enough that they do. If one is over, the rank must have waited for half of their time, as
        it is not known what it did in the rest.
        """
        if wait.end < self.begin or wait.record.submitted > self.end:
            return False
        lasts = wait.record.ended is None
        if lasts and self.goes_on:
            return True
        shared = (self.end if lasts else min(wait.end, self.end)) - max(wait.record.submitted, self.begin)
        return 2 * shared >= self.end - self.begin


def _preference(found: tuple[_Wait, str]) -> tuple[bool, bool, int, str, int]:
    """What is sure comes first, then what was called last; the rest keeps the order of communicators out of it."""
    wait, doubt = found
    return not doubt, doubt != _MAY_BE_ANOTHER, wait.record.submitted, wait.dump.id, wait.record.number
