"""The command line of the diagnosis."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ncclx_rs.diagnose import dumps, pytorch, report
from ncclx_rs.diagnose.analyze import Verdict, judge

# What the process ends with.
FINE, BLAMED, UNUSABLE, UNCLEAR = range(4)

_EPILOG = """\
exit codes: 0 nothing went wrong; 1 a rank is to blame; 2 the command line is wrong or there is no dump;
3 something went wrong, and it is not clear whose doing it was.

Ranks leave dumps in the folder that NCCLX_RS_DUMP_DIRECTORY names when an operation fails, at the signal that
NCCLX_RS_DUMP_SIGNAL names, and where a program calls ncclx_rs.dump(folder). Bring those of all hosts into one folder.
"""


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="ncclx-rs diagnose",
        description="Says from the flight recorders of all ranks which one is to blame, and for what.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where the dumps are")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with a timeline")
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
    options = parser().parse_args(arguments)
    try:
        folder = dumps.read(options.folder)
        verdicts = [judge(communicator) for communicator in folder.communicators]
        if options.html is not None:
            options.html.write_text(report.page(verdicts))
        if options.pytorch is not None:
            every = (dump for communicator in folder.communicators for dump in communicator.dumps.values())
            pytorch.write(every, options.pytorch)
    except OSError as error:
        print(f"ncclx-rs diagnose: {error}", file=sys.stderr)
        return UNUSABLE
    for file, why in folder.unreadable.items():
        print(f"ncclx-rs diagnose: {file} is left out: {why}", file=sys.stderr)
    if not verdicts:
        print(f"ncclx-rs diagnose: there is no dump in {options.folder}", file=sys.stderr)
        return UNUSABLE
    print(json.dumps([_plain(verdict) for verdict in verdicts], indent=2) if options.json else _screen(verdicts))
    if any(verdict.culprits for verdict in verdicts):
        return BLAMED
    return UNCLEAR if any(verdict.findings for verdict in verdicts) else FINE


def _screen(verdicts: Sequence[Verdict]) -> str:
    return "\n\n".join(report.text(verdict) for verdict in verdicts)


def _plain(verdict: Verdict) -> dict[str, object]:
    communicator = verdict.communicator
    return {
        "communicator": communicator.name,
        "id": communicator.id,
        "size": communicator.size,
        "dumps": sorted(communicator.dumps),
        "culprits": verdict.culprits,
        "findings": [asdict(finding) for finding in verdict.findings],
        "stragglers": [asdict(straggler) for straggler in verdict.stragglers],
        "links": [asdict(link) for link in verdict.links],
    }


if __name__ == "__main__":
    sys.exit(main())
