"""The command line of the doctor.

ncclx-rs doctor
torchrun --nnodes 2 ... --module -- ncclx_rs.doctor
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from ncclx_rs.doctor.checks import Finding, Level, host

_EPILOG = """\
exit codes: 0 nothing keeps ranks from working; 1 something does; 2 the command line is wrong.

Under torchrun, all ranks look at their hosts and try to reach each other, and rank 0 prints what they found:
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST --module -- ncclx_rs.doctor
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(
        prog="ncclx-rs doctor",
        description="Looks for what keeps ranks from meeting or slows them down, and says what to do about it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument(
        "--ranks", type=int, help="how many ranks a communicator shall have (those of the launcher, or 8)"
    )
    return made


def execute(options: argparse.Namespace, made: argparse.ArgumentParser) -> int:
    """Runs the checks of these options."""
    rank, size = _number(made, "RANK", 0), _number(made, "WORLD_SIZE", 1)
    ranks = options.ranks if options.ranks is not None else size if size > 1 else 8
    if ranks < 1:
        made.error(f"--ranks: expected a number above 0, got {ranks}")
    findings = host(ranks)
    if size > 1:
        _number(made, "MASTER_PORT", 0)  # PyTorch's own error does not name it
        findings = _meet(rank, findings)
        if not findings:  # rank 0 tells what this rank has found
            return 0
    print(json.dumps([asdict(finding) for finding in findings], indent=2) if options.json else text(findings))
    return int(any(finding.level is Level.PROBLEM for finding in findings))


def _number(made: argparse.ArgumentParser, variable: str, default: int) -> int:
    """A variable of the launcher's."""
    value = os.environ.get(variable) or str(default)
    if not value.isdecimal():
        made.error(f"{variable} is `{value}`: expected a whole number, as launchers set it")
    return int(value)


def _meet(rank: int, own: Sequence[Finding]) -> list[Finding]:
    """The findings that this rank is to print: those of all ranks on rank 0, none on the others if all goes well."""
    from torch._C import _distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    from ncclx_rs.doctor.meeting import MEETING, meet

    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=MEETING)))
    except (RuntimeError, ValueError) as error:
        cause = str(error).split("\n", maxsplit=1)[0]
        remedy = "see whether the hosts reach MASTER_ADDR at MASTER_PORT, and whether rank 0 was started"
        return [Finding("meeting", Level.PROBLEM, f"rank {rank} does not reach the store: {cause}", remedy), *own]
    return meet(c10d.PrefixStore("doctor", store), rank, size, own)


def text(findings: Sequence[Finding]) -> str:
    """The findings as lines for people, the worst first."""
    order = [Level.PROBLEM, Level.WARNING, Level.OK]
    lines = []
    for finding in sorted(findings, key=lambda finding: order.index(finding.level)):
        lines.append(f"{finding.level.value:<8} {finding.check}: {finding.text}")
        if finding.remedy:
            lines.append(f"{'':<8} -> {finding.remedy}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the doctor.

    Args:
        arguments: The command line after the command; that of the process if not given.

    Returns:
        The exit code; see ``--help``.
    """
    made = parser()
    return execute(made.parse_args(arguments), made)


if __name__ == "__main__":
    sys.exit(main())
