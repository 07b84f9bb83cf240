"""The command ``ncclx-rs top``: what the ranks of this host do at present.

    NCCLX_RS_TOP=1 torchrun ... train.py
    ncclx-rs top

It asks the processes of this user that were started with `NCCLX_RS_TOP=1` for their flight recorders.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from ncclx_rs import _live
from ncclx_rs._rates import Rates, present, slowest
from ncclx_rs.diagnose import dumps
from ncclx_rs.diagnose.dumps import Communicator

NOTHING = 1
_CLEAR = "\x1b[H\x1b[2J"

_EPILOG = f"""\
exit codes: 0; 1 no process of this user shows its recorder, with --once; 2 the command line is wrong.

Start the job with {_live.VARIABLE}=1. Each host shows its own ranks; --once --json on each of them is for programs.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(
        prog="ncclx-rs top",
        description="Shows what the ranks of this host do: who waits for whom, and how fast operations are.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--interval", type=float, default=1.0, help="seconds from one view to the next (1)")
    made.add_argument("--once", action="store_true", help="show one view and end")
    made.add_argument("--json", action="store_true", help="print JSON, a line for each view")
    return made


def communicators() -> tuple[list[Communicator], list[str]]:
    """The communicators of the processes that show their recorders, by name.

    Returns:
        The communicators, and a sentence for each process that does not answer or runs another version.

    Raises:
        PermissionError: another user can enter the folder of the sockets.
    """
    found: dict[str, Communicator] = {}
    troubles = []
    for path in sorted(_live.own_folder().glob("*.sock")):
        try:
            shown = [dumps.parse(text) for text in _live.ask(path)]
        except (OSError, ValueError) as error:
            troubles.append(f"process {path.stem} is left out: {error}")
            continue
        for dump in shown:
            found.setdefault(dump.id, Communicator(dump.id, dump.communicator, dump.size)).dumps[dump.rank] = dump
    return sorted(found.values(), key=lambda communicator: (communicator.name, communicator.id)), troubles


def text(found: Sequence[Communicator]) -> str:
    """A view as lines for people."""
    lines = []
    for communicator in found:
        here = present(communicator)
        waited_for = slowest(here)
        note = "" if waited_for is None else f"; most wait for rank {waited_for}"
        lines.append(f"communicator `{communicator.name}`: {len(here)} of {communicator.size} ranks are here{note}")
        lines.append(f"{'rank':>6} {'process':>9} {'calls':>10} {'calls/s':>9} {'MB/s':>9} {'us':>9}  now")
        lines += [_line(one) for one in here]
        lines.append("")
    return "\n".join(lines).rstrip()


def _line(one: Rates) -> str:
    numbers = f"{one.rank:>6} {one.process:>9} {one.calls:>10} {one.per_second:>9.1f}"
    numbers += f" {one.bytes_per_second / 1e6:>9.1f} {one.seconds * 1e6:>9.0f}  "
    if one.oldest is None:
        now = "-"
    else:
        now = f"{one.oldest} for {one.oldest_seconds:.1f} s"
        if one.waits_for:
            now += f", waits for {', '.join(map(str, one.waits_for))}"
    if one.lost:
        now += f"; lost {', '.join(map(str, one.lost))}"
    return numbers + now


def as_json(found: Sequence[Communicator]) -> str:
    """A view as one line of JSON."""
    views = [
        {
            "communicator": communicator.name,
            "id": communicator.id,
            "size": communicator.size,
            "ranks": [asdict(one) for one in present(communicator)],
        }
        for communicator in found
    ]
    return json.dumps({"time": time.time(), "communicators": views})


def execute(options: argparse.Namespace, made: argparse.ArgumentParser) -> int:
    """Shows views until Ctrl-C, or one; returns the exit code."""
    if not options.interval > 0:
        made.error(f"--interval: expected a number of seconds above 0, got {options.interval:g}")
    clear = _CLEAR if sys.stdout.isatty() and not options.json and not options.once else ""
    nothing = f"no process of this user shows its recorder here; start the job with {_live.VARIABLE}=1"
    try:
        while True:
            try:
                found, troubles = communicators()
            except PermissionError as error:
                made.error(str(error))
            if options.json:
                print(as_json(found), flush=True)
            else:
                print(clear + (text(found) or nothing), flush=True)
            for trouble in troubles:
                print(f"ncclx-rs top: {trouble}", file=sys.stderr)
            if options.once:
                return 0 if found else NOTHING
            time.sleep(options.interval)
    except (KeyboardInterrupt, BrokenPipeError):
        return 0
