"""The fuzzer's targets in Python: what reads files and handles that this process has not written.

``make fuzz`` runs ``python targets.py TARGET CORPUS [options of libFuzzer]``, which needs ``atheris``. The tests replay
the corpora without it.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def dumps(data: bytes) -> None:
    """Several files of a folder, which ``ncclx-rs diagnose`` must judge or leave out.

    Version 0 stands for the one that is read, so that the corpus outlives a change of the format.
    """
    from ncclx_rs.diagnose.__main__ import main
    from ncclx_rs.diagnose.dumps import _VERSION

    data = data.replace(b'"version":0', b'"version":%d' % _VERSION)
    with tempfile.TemporaryDirectory() as folder:
        for index, content in enumerate(data.split(b"\0")[:4]):
            Path(folder, f"{index}.json").write_bytes(content)
        printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # refuses what a terminal's stream would
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            for options in (["--json"], ["--html", f"{folder}/page.html"]):
                assert main([folder, *options]) in range(4)


def init_handles(data: bytes) -> None:
    """Members of a generation, one a line, of which the last is this process: a RuntimeError, or every rank known."""
    from ncclx_rs._reconfigure import _host_and_port, _membership

    lines = data.decode("utf-8", "surrogateescape").split("\n")
    for given in (lines, set(lines)):
        try:
            members = _membership(given, lines[-1])
        except RuntimeError:
            continue
        assert len(set(members)) == len(members) == len(given) and lines[-1] in members
        assert all(host and 0 < port < 2**16 for host, port in map(_host_and_port, members))
        " ".join(members).encode()


TARGETS: dict[str, Callable[[bytes], None]] = {"dumps": dumps, "init_handles": init_handles}


def main() -> None:
    """Fuzzes the target that the command line names."""
    import atheris

    with atheris.instrument_imports(include=["ncclx_rs", "json"]):
        import ncclx_rs._reconfigure
        import ncclx_rs.diagnose.__main__  # noqa: F401
    name = sys.argv.pop(1)
    atheris.Setup(sys.argv, TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
