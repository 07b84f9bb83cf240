"""The program ``ncclx-rs``: ``ncclx-rs COMMAND ...``, or ``python -m ncclx_rs COMMAND ...``."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

# For each command its module and its description. The module has `parser()`, and `execute(options, parser)`, which
# returns the exit code.
COMMANDS = {
    "info": ("ncclx_rs.info", "says which versions, devices, interfaces and libraries are here"),
    "doctor": ("ncclx_rs.doctor.__main__", "finds what keeps ranks from meeting or slows them down"),
    "bench": ("ncclx_rs.bench.__main__", "measures collectives, alone or against another backend"),
    "tune": ("ncclx_rs.bench.tune", "finds the fastest algorithms on a machine, and writes them to a file"),
    "simulate": (
        "ncclx_rs.bench.simulate",
        "simulates collectives and the start of worlds of any size, by measured or given parameters",
    ),
    "diagnose": ("ncclx_rs.diagnose.__main__", "says from flight recorders which rank is to blame"),
    "top": ("ncclx_rs.top", "shows what the ranks of a job do: who waits for whom, how fast they are"),
    "completion": ("ncclx_rs.completion", "prints what bash, zsh or fish need to complete commands"),
}


def parser(command: str | None = None) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser | None]:
    """The tree of parsers, and in it that of a command.

    Args:
        command: the command whose options the tree knows. The modules of others are not imported: they need torch,
            which takes seconds.
    """
    tree = argparse.ArgumentParser(
        prog="ncclx-rs", description="Tools of ncclx_rs.", epilog="ncclx-rs COMMAND --help tells more."
    )
    version = f"ncclx_rs {importlib.metadata.version('ncclx_rs')}"
    tree.add_argument("--version", action="version", version=version)
    commands = tree.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = None
    for name, (module, meaning) in COMMANDS.items():
        if name != command:
            commands.add_parser(name, help=meaning, add_help=False)
            continue
        own: argparse.ArgumentParser = importlib.import_module(module).parser()
        chosen = commands.add_parser(
            name,
            help=meaning,
            parents=[own],
            add_help=False,
            description=own.description,
            epilog=own.epilog,
            formatter_class=own.formatter_class,
        )
    return tree, chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: The command line without the program; that of the process if not given.

    Returns:
        The exit code: 2 for a command line that is wrong, else the command's.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    command = next((word for word in words if not word.startswith("-")), None)
    tree, chosen = parser(command)
    try:
        options = tree.parse_args(words)
        assert chosen is not None, "a command line without a command is refused"
        module, _ = COMMANDS[options.command]
        return int(importlib.import_module(module).execute(options, chosen))
    except SystemExit as end:
        return int(end.code or 0)


if __name__ == "__main__":
    sys.exit(main())
