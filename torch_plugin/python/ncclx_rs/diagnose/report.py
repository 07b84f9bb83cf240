"""A diagnosis as text for a terminal and as an HTML page with a timeline."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ncclx_rs.diagnose.analyze import Diagnosis
from ncclx_rs.diagnose.dumps import Communicator, Record
from ncclx_rs.diagnose.processes import Processes, ranks

_MOST_DETAILS = 8
_MOST_FINDINGS = 6
_MOST_LINKS = 3
_MOST_BLAMED = 4
_MOST_MEMBERS = 16


def summary(diagnoses: Sequence[Diagnosis]) -> str:
    """The diagnoses of a job's communicators as text."""
    blamed = [(index, rank) for index, one in enumerate(diagnoses) for rank in one.ranks_at_fault]
    names = Processes([one.communicator for one in diagnoses]).names(blamed)
    head = [f"to blame: {names}"] if blamed and len(diagnoses) > 1 else []
    return "\n\n".join([*head, *map(text, diagnoses)])


def text(diagnosis: Diagnosis) -> str:
    """One communicator's diagnosis as text."""
    communicator = diagnosis.communicator
    silent = [rank for rank in range(communicator.size) if rank not in communicator.dumps]
    head = f"communicator `{communicator.name}`, {communicator.size} ranks{_in_the_job(communicator)}"
    lines = [head + (f"; no dump of {ranks(silent)}" if silent else "")]
    if diagnosis.ranks_at_fault:
        lines.append(f"  to blame: {ranks(diagnosis.ranks_at_fault)}")
        known = [line for rank in diagnosis.ranks_at_fault if (line := _known(communicator, rank))]
        lines += _few(known, _MOST_BLAMED, "    ")
    elif not diagnosis.findings:
        lines.append("  nothing went wrong")
    for finding in diagnosis.findings[:_MOST_FINDINGS]:
        lines.append(f"  {finding.text}")
        lines += _few([f"    {detail}" for detail in finding.details], _MOST_DETAILS, "    ")
    if len(diagnosis.findings) > _MOST_FINDINGS:
        lines.append(f"  and {len(diagnosis.findings) - _MOST_FINDINGS} findings more: --json tells all")
    if diagnosis.links:
        lines.append("  connections that stand out:")
        shown = [f"    rank {link.sender} to rank {link.receiver}: {link.text}" for link in diagnosis.links]
        lines += _few(shown, _MOST_LINKS, "    ")
    return "\n".join(lines + _stragglers(diagnosis))


def _is_part(communicator: Communicator) -> bool:
    """Whether the job has other numbers for the ranks."""
    return communicator.members != list(range(communicator.size))


def _in_the_job(communicator: Communicator) -> str:
    if not _is_part(communicator):
        return ""
    numbers = [str(member) for member in communicator.members[:_MOST_MEMBERS]]
    return f", in the job {', '.join(numbers)}{', …' if communicator.size > _MOST_MEMBERS else ''}"


def _known(communicator: Communicator, rank: int) -> str:
    """What a rank is outside the communicator, as far as that says more."""
    dump = communicator.dumps.get(rank)
    names = [f"rank {communicator.members[rank]} of the job"] if _is_part(communicator) else []
    names += [f"process {dump.process}"] if dump is not None else []
    return f"    rank {rank} is {', '.join(names)}" if names else ""


def _few(lines: list[str], most: int, indent: str) -> list[str]:
    return lines if len(lines) <= most else [*lines[:most], f"{indent}and {len(lines) - most} more"]


def _stragglers(diagnosis: Diagnosis) -> list[str]:
    late = sorted(diagnosis.stragglers, key=lambda straggler: -straggler.mean)[:3]
    if not late:
        return []
    hosts = {dump.host for dump in diagnosis.communicator.dumps.values()}
    clocks = ", if the hosts' clocks agree" if len(hosts) > 1 else ""
    lines = [f"  who came late to the last {diagnosis.compared} collectives that all completed{clocks}:"]
    for straggler in late:
        share = 100 * straggler.last / diagnosis.compared
        mean, worst = straggler.mean / 1e3, straggler.worst / 1e3
        lines.append(
            f"    rank {straggler.rank}: last in {share:.0f} %, {mean:.2f} ms on average, {worst:.2f} ms at worst"
        )
    return lines


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Flight recorders</title>
<style>
body {{ font: 14px system-ui, sans-serif; margin: 2em; }}
pre {{ background: #f4f4f4; padding: 1em; white-space: pre-wrap; }}
svg {{ width: 100%; background: #fafafa; }}
.completed {{ fill: #4c78a8; }} .running {{ fill: #f0a030; }} .queued {{ fill: #cccccc; }} .failed {{ fill: #d03030; }}
text {{ font-size: 11px; }}
</style>
<h1>Flight recorders</h1>
<p>Each row is a rank; blue operations completed, red ones failed, orange ones ran and grey ones waited for their turn
when the dump was written. Point at one for its call.</p>
{body}
</html>
"""
_WIDTH, _LEFT, _ROW = 1200, 60, 24
# As many as a browser shows without trouble; with many ranks, these are the last operations of each.
_MOST_SPANS = 20_000


def page(diagnoses: Sequence[Diagnosis]) -> str:
    """An HTML page with each communicator's findings and its operations over time."""
    parts = []
    for diagnosis in diagnoses:
        parts.append(f"<h2>{html.escape(diagnosis.communicator.name)}</h2>")
        parts.append(f"<pre>{html.escape(text(diagnosis))}</pre>")
        parts.append(_chart(diagnosis.communicator))
    return _PAGE.format(body="\n".join(parts))


def _chart(communicator: Communicator) -> str:
    each = max(_MOST_SPANS // max(len(communicator.dumps), 1), 1)
    spans = [
        (rank, record, record.submitted, record.ended or dump.time)
        for rank, dump in sorted(communicator.dumps.items())
        for record in dump.records[-each:]
    ]
    if not spans:
        return "<p>No operations.</p>"
    first, last = min(begin for *_, begin, _ in spans), max(end for *_, end in spans)
    scale = (_WIDTH - _LEFT) / max(last - first, 1)
    rows = {rank: row for row, rank in enumerate(sorted(communicator.dumps))}
    height = _ROW * (len(rows) + 1)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">']
    parts += [f'<text x="0" y="{_ROW * row + 15}">rank {rank}</text>' for rank, row in rows.items()]
    for rank, record, begin, end in spans:
        x, width = _LEFT + (begin - first) * scale, max((end - begin) * scale, 0.5)
        parts.append(
            f'<rect class="{html.escape(record.state)}" x="{x:.2f}" y="{_ROW * rows[rank] + 3}" width="{width:.2f}" '
            f'height="{_ROW - 6}"><title>{html.escape(_tip(record, begin - first, end - begin))}</title></rect>'
        )
    parts.append(f'<text x="{_LEFT}" y="{height - 8}">{(last - first) / 1e3:.3f} ms</text></svg>')
    return "\n".join(parts)


def _tip(record: Record, at: int, lasted: int) -> str:
    tip = f"{record.place}: {record.call}\n{record.state}, at {at / 1e3:.3f} ms for {lasted / 1e3:.3f} ms"
    return tip + (f"\n{record.failure}" if record.failure else "")
