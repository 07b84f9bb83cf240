"""Which ranks of different communicators are the same process, as far as dumps tell, and names of ranks. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ncclx_rs.diagnose.dumps import Communicator, Dump

_MOST_COMMUNICATORS = 4


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
    return f"rank{'s' if many else ''} {_listed(words)}"


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


class Processes:
    """The processes of a job's communicators.

    The same number in two communicators need not mean the same process: communicators that are made of a part of the
    job number their own ranks from 0 on. A process's number in its system says more, but not all where containers have
    such numbers of their own; hosts have numbers for each communicator alone.
    """

    def __init__(self, communicators: Sequence[Communicator]) -> None:
        """Compares these communicators, which the methods take by their indices."""
        self._communicators = communicators
        self._ranks = [{job: rank for rank, job in enumerate(one.members)} for one in communicators]
        self._homes: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, communicator in enumerate(communicators):
            members = communicator.members
            for rank, dump in communicator.dumps.items():
                self._homes[members[rank], dump.process].append(index)
        self._compared: dict[tuple[int, int], bool | None] = {}

    def names(self, members: Iterable[tuple[int, int]]) -> str:
        """Names for ranks, each given with its communicator: those of the job, if these mean one process each."""
        by_index: dict[int, set[int]] = defaultdict(set)
        for index, rank in members:
            by_index[index].add(rank)
        if len({job for job, _ in self._homes}) == len(self._homes):
            numbers = {self._communicators[index].members[rank] for index, own in by_index.items() for rank in own}
            return f"{ranks(numbers)} of the job"
        words = [f"{ranks(own)} of `{self._communicators[index].name}`" for index, own in sorted(by_index.items())]
        if (more := len(words) - _MOST_COMMUNICATORS) > 0:
            words = [*words[:_MOST_COMMUNICATORS], f"those of {more} communicators more"]
        return _listed(words)

    def is_same(self, index: int, rank: int, other: int, dump: Dump) -> bool | None:
        """Whether a rank of one communicator is the process that left a dump of another; None if no dump tells."""
        if self._number_alike(index, other) is False:
            return False
        if (own := self._communicators[index].dumps.get(rank)) is not None:
            return own.process == dump.process
        # The two have its number, which says little: a third one that numbers its ranks as the first does has to agree.
        thirds = self._homes.get((self._communicators[index].members[rank], dump.process), [])
        return any(third not in (index, other) and self._number_alike(index, third) for third in thirds) or None

    def _number_alike(self, one: int, other: int) -> bool | None:
        """Whether two communicators have the same numbers for processes; None if no process is known in both."""
        pair = (min(one, other), max(one, other))
        if pair not in self._compared:
            self._compared[pair] = self._compare(*sorted(pair, key=lambda index: len(self._ranks[index])))
        return self._compared[pair]

    def _compare(self, small: int, large: int) -> bool | None:
        one, other = self._communicators[small], self._communicators[large]
        both = [
            (rank, self._ranks[large][job]) for job, rank in self._ranks[small].items() if job in self._ranks[large]
        ]
        here, there = one.hosts, other.hosts
        hosts = {(here[a], there[b]) for a, b in both if a in here and b in there}
        if not len(hosts) == len({a for a, _ in hosts}) == len({b for _, b in hosts}):
            return False
        same = [one.dumps[a].process == other.dumps[b].process for a, b in both if a in one.dumps and b in other.dumps]
        return all(same) if same else None
