"""`dump`, which writes this process's flight recorders to files."""

from __future__ import annotations

import os
import pathlib
from typing import Literal

from ncclx_rs._load import native


def dump(
    folder: str | os.PathLike[str], reason: str = "on demand", format: Literal["json", "pytorch"] = "json"
) -> list[pathlib.Path]:
    """Writes the flight recorders of this process's communicators to files.

    Call it on every rank. Any thread may call it, also while another thread waits for an operation.

    Args:
        folder: the folder for the files; created if it does not exist.
        reason: a text that files in JSON contain.
        format: "json" for ``ncclx-rs diagnose``, "pytorch" for ``torch.distributed.flight_recorder.fr_trace``.

    Returns:
        The files' names: in JSON one for each open communicator, else one for the process. Only their owner can read
        the files.

    Raises:
        OSError: a file cannot be written.
        ValueError: the format is unknown.
    """
    if format == "json":
        written: list[pathlib.Path] = native().write_dumps(folder, reason)
        return written
    if format != "pytorch":
        raise ValueError(f'ncclx_rs.dump: argument `format`: expected "json" or "pytorch", got {format!r}')
    from ncclx_rs.diagnose import dumps, pytorch

    own = [dumps.parse(text) for text in native().dumps(reason)]
    return pytorch.write(own, pathlib.Path(folder))
