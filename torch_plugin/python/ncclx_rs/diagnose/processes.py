"""Names of ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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
