"""The report of a run on a GPU: what it consists of, as JSON and as Markdown."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The version of the JSON, raised when a reader would have to change.
SCHEMA = 1

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"

SOFTWARE = (
    "This ran on a SOFTWARE CUDA, without a GPU. It shows that the report can be made. It proves nothing about a GPU, "
    "and its times and bandwidths mean nothing."
)


@dataclass
class Part:
    """A probe, a suite of tests or a benchmark.

    Attributes:
        kind: "probe", "suite" or "benchmark".
        name: Its name.
        status: `PASSED`, `FAILED` or `NOT_RUN`.
        why: Why it failed, was not run, or did not run to its end; else empty.
        seconds: How long it took.
        facts: What it found; see the README for each kind.
    """

    kind: str
    name: str
    status: str = NOT_RUN
    why: str = ""
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """A run.

    Attributes:
        date: When it began, in UTC.
        is_software: Whether it ran on a software CUDA.
        machine: Driver, GPUs, processor, system.
        versions: Of Python, PyTorch, CUDA, NCCL and this project.
        limit: The seconds that it was to take at most.
        seconds: Those that it took.
        parts: What was to be run, in this order.
    """

    date: str
    is_software: bool
    machine: dict[str, Any]
    versions: dict[str, Any]
    limit: float
    seconds: float = 0.0
    parts: list[Part] = field(default_factory=list)

    @property
    def failures(self) -> list[Part]:
        """The parts that failed."""
        return [part for part in self.parts if part.status == FAILED]

    def document(self) -> dict[str, Any]:
        """The content of the JSON."""
        note = SOFTWARE if self.is_software else ""
        counts = {status: sum(part.status == status for part in self.parts) for status in (PASSED, FAILED, NOT_RUN)}
        return {"schema": SCHEMA, "note": note, "counts": counts, **dataclasses.asdict(self)}

    def markdown(self) -> str:
        """The report for people."""
        found = self.document()
        lines = [f"# Run on {'a software CUDA' if self.is_software else 'a GPU'}, {self.date}", ""]
        if found["note"]:
            lines += [f"**{found['note']}**", ""]
        counts = ", ".join(f"{count} {status}" for status, count in found["counts"].items())
        lines += [f"{counts}; {self.seconds:.0f} of {self.limit:.0f} s.", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {_cell(value)} |" for name, value in {**self.machine, **self.versions}.items()]
        for kind, title in (("probe", "Probes"), ("benchmark", "Benchmarks"), ("suite", "Tests")):
            parts = [part for part in self.parts if part.kind == kind]
            if parts:
                lines += ["", f"## {title}"]
            for part in parts:
                lines += _SECTIONS[kind](part)
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        """Writes report.json and report.md to a folder, which is made."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(self.document(), indent=1) + "\n")
        (folder / "report.md").write_text(self.markdown())


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(_cell, value))
    return str({True: "yes", False: "no"}[value] if isinstance(value, bool) else value).replace("|", "\\|")


def _head(part: Part) -> list[str]:
    why = f": {part.why.strip().splitlines()[-1]}" if part.why.strip() else ""
    return ["", f"### {part.name}: {part.status}, {part.seconds:.1f} s{why}", ""]


def _probe(part: Part) -> list[str]:
    facts = part.facts
    lines = [*_head(part), facts["asks"]]
    if "answer" in facts:
        lines += ["", f"**{_cell(facts['answer'])}**"]
        if facts["as_designed"] is None:
            lines[-1] += " (the design relies on neither)" if isinstance(facts["answer"], bool) else ""
        if facts["numbers"]:
            lines += ["", *(f"- {name}: {_cell(value)}" for name, value in facts["numbers"].items())]
    return [*lines, "", f"What it means: {facts['means']}"]


def _suite(part: Part) -> list[str]:
    lines = _head(part)
    if "passed" in part.facts:
        lines.append(", ".join(f"{part.facts[name]} {name}" for name in ("passed", "failed", "skipped", "left")))
        lines += ["", *(f"- failed: {name}" for name in part.facts["failures"])]
        lines += [f"- skipped, {count}: {reason}" for reason, count in part.facts["reasons"].items()]
    return lines


def _benchmark(part: Part) -> list[str]:
    lines, rows = _head(part), part.facts.get("rows", [])
    if rows:
        lines += ["| operation | mode | ranks | bytes | backend | µs | bus GB/s | of memory | ratio |"]
        lines += ["|---|---|---:|---:|---|---:|---:|---:|---:|"]
    for row in rows:
        case, ratio = row["case"], row["ratio"]
        for index, (name, result) in enumerate(row["results"].items()):
            times = f"{result['time']:.2f} | {result['bus_bandwidth']:.3f}"
            measured = f"not measured: {_cell(result['error'])} |" if result["error"] else times
            memory = f"{row['memory'][name]:.1%}" if name in row["memory"] else ""
            against = f"{ratio['median']:.2f}" if ratio and index == 0 else ""
            place = f"{case['operation']} | {case['mode']} | {case['ranks']} | {case['bytes']}"
            lines.append(f"| {place} | {name} | {measured} | {memory} | {against} |")
    return lines


_SECTIONS = {"probe": _probe, "suite": _suite, "benchmark": _benchmark}
