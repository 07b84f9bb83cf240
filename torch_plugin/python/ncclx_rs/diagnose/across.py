"""Follows ranks from one communicator into another: who waits there is not to blame for not coming here. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ncclx_rs.diagnose.analyze import Diagnosis, Finding
from ncclx_rs.diagnose.dumps import Dump, Record
from ncclx_rs.diagnose.processes import ranks
from ncclx_rs.diagnose.troubles import present

# What ranks are at fault for that did not come.
_ABSENCES = ("missing", "unmatched", "late")


def across(diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """The diagnoses of a job's communicators, each with what the others show.

    A rank that did not come because it waited in another communicator at the time is at fault no more: the finding says
    where it was, and for which ranks of the job in the end. Where communicators wait for each other, the finding is a
    "deadlock".
    """
    waits = _Waits(diagnoses)
    return [
        replace(diagnosis, findings=[_followed(waits, index, finding) for finding in diagnosis.findings])
        for index, diagnosis in enumerate(diagnoses)
    ]


@dataclass(frozen=True)
class _Wait:
    """An operation that a rank did not complete in a communicator, the one of this index."""

    index: int
    dump: Dump
    record: Record

    @property
    def begin(self) -> int:
        return self.record.submitted

    @property
    def end(self) -> int:
        return self.dump.time if self.record.ended is None else self.record.ended

    def meets(self, others: Sequence[_Wait]) -> bool:
        """Whether it lasted at a time when another one did."""
        return any(self.begin <= other.end and other.begin <= self.end for other in others)


class _Waits:
    """Who waited in which communicator."""

    def __init__(self, diagnoses: Sequence[Diagnosis]) -> None:
        self.diagnoses = diagnoses
        self.here: dict[int, list[_Wait]] = defaultdict(list)
        self.by_job: dict[int, list[_Wait]] = defaultdict(list)
        for index, diagnosis in enumerate(diagnoses):
            communicator = diagnosis.communicator
            for rank, records in present(communicator).items():
                waits = [_Wait(index, communicator.dumps[rank], record) for record in records]
                self.here[index] += waits
                self.by_job[communicator.members[rank]] += waits

    def elsewhere(self, index: int, job: int) -> _Wait | None:
        """Where a rank of the job waited for others while those of the communicator of this index waited for it."""
        for wait in self.by_job[job]:
            at_fault = self.diagnoses[wait.index].ranks_at_fault
            if (
                at_fault
                and wait.dump.rank not in at_fault
                and self._is_one_process(index, job, wait.dump)
                and wait.meets(self.here[index])
            ):
                return wait
        return None

    def _is_one_process(self, index: int, job: int, dump: Dump) -> bool:
        communicator = self.diagnoses[index].communicator
        own = communicator.dumps.get(communicator.members.index(job))
        return own is None or own.process == dump.process

    def last(self, index: int, job: int) -> set[int]:
        """The ranks of the job for which one waits in the end that did not come to this communicator.

        Empty if those that it waits for wait for it.
        """
        last, seen, open_ends = set(), set(), [(index, job)]
        while open_ends:
            end = open_ends.pop()
            if end in seen:
                continue
            seen.add(end)
            wait = self.elsewhere(*end)
            if wait is None:
                last.add(end[1])
                continue
            there = self.diagnoses[wait.index]
            open_ends += [(wait.index, there.communicator.members[rank]) for rank in there.ranks_at_fault]
        return last


def _followed(waits: _Waits, index: int, finding: Finding) -> Finding:
    """A finding of the communicator of this index, with where those at fault waited meanwhile."""
    if finding.kind not in _ABSENCES:
        return finding
    at_fault, details, waits_for_itself = [], list(finding.details), False
    for rank in finding.ranks:
        job = waits.diagnoses[index].communicator.members[rank]
        wait = waits.elsewhere(index, job)
        if wait is None:
            at_fault.append(rank)
            continue
        last = waits.last(index, job)
        waits_for_itself |= not last
        name, seconds = waits.diagnoses[wait.index].communicator.name, (wait.end - wait.begin) / 1e6
        why = f"in the end for {ranks(last)} of the job" if last else "and ranks there wait for this one"
        details.append(f"rank {rank} waited {seconds:.1f} s in communicator `{name}`, in {wait.record.call}, {why}")
    kind = "deadlock" if waits_for_itself and not at_fault else finding.kind
    return replace(finding, kind=kind, ranks=tuple(at_fault), details=tuple(details))
