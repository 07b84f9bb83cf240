"""Writes the engine's flight recorders of this process down."""

from __future__ import annotations

import os
import pathlib
from typing import Literal

from ncclx_rs._load import native


def dump(
    folder: str | os.PathLike[str], reason: str = "on demand", format: Literal["json", "pytorch"] = "json"
) -> list[pathlib.Path]:
    """Writes what the engine remembers of this process's communicators.

    Call it on every rank. It may be called from any thread, also while another one waits for an operation.

    Args:
        folder: where to write; made if it is not there.
        reason: a text that becomes a part of files in JSON.
        format: "json" for ``ncclx-rs diagnose``, "pytorch" for ``torch.distributed.flight_recorder.fr_trace``.

    Returns:
        The files' names: in JSON one a communicator that is open, else one for the process. Only their owner can read
        them.

    Raises:
        OSError: a file cannot be written.
        ValueError: there is no such format.
    """
    if format == "json":
        written: list[pathlib.Path] = native().write_dumps(folder, reason)
        return written
    if format != "pytorch":
        raise ValueError(f'ncclx_rs.dump: argument `format`: expected "json" or "pytorch", got {format!r}')
    from ncclx_rs.diagnose import dumps, pytorch

    own = [dumps.parse(text) for text in native().dumps(reason)]
    return pytorch.write(own, pathlib.Path(folder))
