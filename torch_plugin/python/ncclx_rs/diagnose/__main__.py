"""The command line of the diagnosis."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ncclx_rs.diagnose import dumps, perfetto, pytorch, report
from ncclx_rs.diagnose.across import across
from ncclx_rs.diagnose.analyze import Diagnosis, analyze

# The exit codes.
FINE, BLAMED, UNUSABLE, UNCLEAR = range(4)

_EPILOG = """\
exit codes: 0 nothing went wrong; 1 a rank is to blame; 2 the command line is wrong or there is no dump;
3 something went wrong, and it is not clear whose doing it was.

Ranks leave dumps in the folder that NCCLX_RS_DUMP_DIRECTORY names when an operation fails, at the signal that
NCCLX_RS_DUMP_SIGNAL names, and where a program calls ncclx_rs.dump(folder). Bring those of all hosts into one folder.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="ncclx-rs diagnose",
        description="Says from the flight recorders of all ranks which one is to blame, and for what.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where the dumps are")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with a timeline")
    parser.add_argument("--perfetto", type=Path, metavar="FILE", help="also write a trace for https://ui.perfetto.dev")
    parser.add_argument(
        "--pytorch",
        type=Path,
        metavar="FOLDER",
        help="also write trace_<rank> files there, for torch.distributed.flight_recorder.fr_trace",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the diagnosis.

    Args:
        arguments: the command line without the program; that of the process if not given.

    Returns:
        The exit code; see ``--help``.
    """
    made = parser()
    return execute(made.parse_args(arguments), made)


def execute(options: argparse.Namespace, made: argparse.ArgumentParser) -> int:
    """Runs the diagnosis of these options; returns the exit code."""
    try:
        folder = dumps.read(options.folder)
        diagnoses = across([analyze(communicator) for communicator in folder.communicators])
        if options.html is not None:
            options.html.write_text(report.page(diagnoses))
        if options.perfetto is not None:
            perfetto.write(folder.communicators, options.perfetto)
        if options.pytorch is not None:
            every = (dump for communicator in folder.communicators for dump in communicator.dumps.values())
            pytorch.write(every, options.pytorch)
    except OSError as error:
        print(f"ncclx-rs diagnose: {error}", file=sys.stderr)
        return UNUSABLE
    for file, why in folder.unreadable.items():
        print(f"ncclx-rs diagnose: {file} is left out: {why}", file=sys.stderr)
    if not diagnoses:
        print(f"ncclx-rs diagnose: there is no dump in {options.folder}", file=sys.stderr)
        return UNUSABLE
    if options.json:
        print(json.dumps([_as_json(diagnosis) for diagnosis in diagnoses], indent=2))
    else:
        print(report.summary(diagnoses))
    if any(diagnosis.ranks_at_fault for diagnosis in diagnoses):
        return BLAMED
    return UNCLEAR if any(diagnosis.findings for diagnosis in diagnoses) else FINE


def _as_json(diagnosis: Diagnosis) -> dict[str, object]:
    communicator = diagnosis.communicator
    return {
        "communicator": communicator.name,
        "id": communicator.id,
        "size": communicator.size,
        "members": communicator.members,
        "dumps": sorted(communicator.dumps),
        "ranks_at_fault": diagnosis.ranks_at_fault,
        "findings": [
            {"kind": one.kind, "ranks": one.ranks, "text": one.text, "details": one.details}
            for one in diagnosis.findings
        ],
        "stragglers": [asdict(straggler) for straggler in diagnosis.stragglers],
        "links": [asdict(link) for link in diagnosis.links],
    }


if __name__ == "__main__":
    sys.exit(main())
