"""The command ``ncclx-rs top``: what the ranks of this host do at present, and those of others.

    NCCLX_RS_TOP=1 torchrun ... train.py
    ncclx-rs top
    ncclx-rs top --hosts node1 node2

It asks the processes of this user that were started with `NCCLX_RS_TOP=1` for their flight recorders. On other hosts
it starts itself, through ssh or another command, and reads what that prints.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict

from ncclx_rs import _live
from ncclx_rs._rates import Rates, present, slowest
from ncclx_rs._remote import Remote, first_views
from ncclx_rs.diagnose import dumps
from ncclx_rs.diagnose.dumps import Communicator

NOTHING = 1
_CLEAR = "\x1b[H\x1b[2J"

_EPILOG = f"""\
exit codes: 0; 1 no process of this user shows its recorder, with --once; 2 the command line is wrong.

Start the job with {_live.VARIABLE}=1. Other hosts have to be reached without a password.
"""

# What is replaced by the name of a host.
_HOST = "{host}"


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(
        prog="ncclx-rs top",
        description="Shows what the ranks of this host and others do: who waits for whom, and how fast operations are.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--interval", type=float, default=1.0, help="seconds from one view to the next (1)")
    made.add_argument("--once", action="store_true", help="show one view and end")
    output = made.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON, a line for each view")
    output.add_argument("--dumps", action="store_true", help="print the flight recorders themselves, for --hosts")
    made.add_argument("--hosts", nargs="+", default=[], metavar="HOST", help="show the ranks of these hosts too")
    made.add_argument(
        "--through",
        default=f"ssh -o BatchMode=yes {_HOST}",
        metavar="COMMAND",
        help="what runs a command on another host, with its name for {host} (%(default)s)",
    )
    made.add_argument(
        "--program",
        default=f"{sys.executable} -m ncclx_rs",
        metavar="COMMAND",
        help="the program ncclx-rs on other hosts (that at the place of this one: %(default)s)",
    )
    return made


# The dumps of a process or a host, each as JSON, with its name in messages.
Source = tuple[str, Sequence[str]]


def of_this_host() -> tuple[list[Source], list[str]]:
    """The dumps of this host's processes that show their recorders.

    Returns:
        The dumps, and a sentence for each process that does not answer.

    Raises:
        PermissionError: another user can enter the folder that this process would have.
    """
    found: list[Source] = []
    troubles = []
    for folder, user in _live.folders().items():
        if not os.path.lexists(folder):
            continue
        try:
            _live.check(folder, user)
        except PermissionError as error:
            if folder == _live.folder():
                raise
            troubles.append(str(error))
            continue
        for path in sorted(folder.glob("*.sock")):
            try:
                found.append((f"process {path.stem}", _live.ask(path)))
            except OSError as error:
                troubles.append(f"process {path.stem} is left out: {error}")
    return found, troubles


def communicators(sources: Iterable[Source]) -> tuple[list[Communicator], list[str]]:
    """The communicators that dumps tell of, by name.

    Returns:
        The communicators, and a sentence for each source that has something else, or dumps of another version.
    """
    found: dict[str, Communicator] = {}
    troubles = []
    for name, texts in sources:
        try:
            shown = [dumps.parse(text) for text in texts]
        except dumps.MALFORMED as error:
            troubles.append(f"{name} is left out: {error}")
            continue
        for dump in shown:
            found.setdefault(dump.id, Communicator(dump.id, dump.communicator, dump.size)).keep(dump)
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


def _reached(options: argparse.Namespace, made: argparse.ArgumentParser, closed: ExitStack) -> list[Remote]:
    """The hosts of the command line, each with the program started there."""
    if _HOST not in options.through:
        made.error(f"--through: expected a command with {_HOST} in it, got {options.through!r}")
    program = [*shlex.split(options.program), "top", "--dumps", "--interval", f"{options.interval:g}"]
    try:
        return [
            closed.enter_context(closing(Remote(host, [*shlex.split(options.through.replace(_HOST, host)), *program])))
            for host in options.hosts
        ]
    except OSError as error:
        made.error(f"--through: {error}")


def _view(options: argparse.Namespace, remotes: Sequence[Remote]) -> tuple[str, bool, list[str]]:
    """A view as it is printed, whether it shows anything, and a sentence for each process and host that is left out."""
    sources, troubles = of_this_host()
    if options.dumps:
        texts = [text for _, texts in sources for text in texts]
        return "".join(f"{text}\n" for text in texts), bool(texts), troubles
    for remote in remotes:
        dumped, wrong = remote.view(options.interval)
        sources.append((f"host {remote.host}", dumped))
        troubles += [f"host {remote.host}: {sentence}" for sentence in wrong]
    found, malformed = communicators(sources)
    nothing = (
        f"no process of this user shows its recorder here; start the job with {_live.VARIABLE}=1\n"
        f"looked in {', '.join(map(str, _live.folders()))}\n"
        "the job's own XDG_RUNTIME_DIR, or else its TMPDIR, says where it has its folder: set it to the same here"
    )
    return as_json(found) if options.json else text(found) or nothing, bool(found), troubles + malformed


def execute(options: argparse.Namespace, made: argparse.ArgumentParser) -> int:
    """Shows views until Ctrl-C, or one; returns the exit code."""
    if not options.interval > 0:
        made.error(f"--interval: expected a number of seconds above 0, got {options.interval:g}")
    if options.dumps and options.hosts:
        made.error("--dumps: it prints the recorders of this host alone, without --hosts")
    clear = _CLEAR if sys.stdout.isatty() and not (options.json or options.dumps or options.once) else ""
    try:
        with ExitStack() as closed:
            remotes = _reached(options, made, closed)
            first_views(remotes)
            while True:
                view, shown, troubles = _view(options, remotes)
                print(clear + view, flush=True)
                for trouble in troubles:
                    print(f"ncclx-rs top: {trouble}", file=sys.stderr, flush=True)
                if options.once:
                    return 0 if shown else NOTHING
                time.sleep(options.interval)
    except PermissionError as error:  # another user can enter the folder
        made.error(str(error))
    except (KeyboardInterrupt, BrokenPipeError):
        return 0
