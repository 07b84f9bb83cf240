"""The program ``ncclx-rs``: ``ncclx-rs COMMAND ...``, or ``python -m ncclx_rs COMMAND ...``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# For each command its module and its description. The module's `main` takes the rest of the line and returns the exit
# code.
COMMANDS = {
    "info": ("ncclx_rs.info", "says which versions, devices and vendors' libraries are here"),
    "bench": ("ncclx_rs.bench.__main__", "measures collectives, alone or against another backend"),
    "tune": ("ncclx_rs.bench.tune", "finds the fastest algorithms on a machine, and writes them to a file"),
    "diagnose": ("ncclx_rs.diagnose.__main__", "says from flight recorders which rank is to blame"),
}


def usage() -> str:
    """The text of the usage."""
    listed = "\n".join(f"  {name:<10} {meaning}" for name, (_, meaning) in COMMANDS.items())
    return f"usage: ncclx-rs COMMAND ...\n\n{listed}\n\nncclx-rs COMMAND --help tells more."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: The command line without the program; that of the process if not given.

    Returns:
        The exit code: 2 for an unknown command, else the command's.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] in (["--help"], ["-h"]):
        print(usage())
        return 0
    if not words or words[0] not in COMMANDS:
        got = f"ncclx-rs: unknown command {words[0]!r}\n" if words else ""
        print(got + usage(), file=sys.stderr)
        return 2
    module, _ = COMMANDS[words[0]]
    return int(importlib.import_module(module).main(words[1:]))


if __name__ == "__main__":
    sys.exit(main())
