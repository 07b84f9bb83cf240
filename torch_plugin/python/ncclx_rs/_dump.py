"""Writes the engine's flight recorders of this process down."""

from __future__ import annotations

import os
import pathlib

from ncclx_rs import _backend as plugin


def dump(folder: str | os.PathLike[str], reason: str = "on demand") -> list[pathlib.Path]:
    """Writes what the engine remembers of this process's communicators, for ``ncclx-rs diagnose``.

    Call it on every rank. It may be called from any thread, also while another one waits for an operation.

    Args:
        folder: where to write; made if it is not there.
        reason: a text that becomes a part of the files.

    Returns:
        The files' names, one a communicator that is open. Only their owner can read them.

    Raises:
        OSError: a file cannot be written.
    """
    written: list[pathlib.Path] = plugin.native().write_dumps(folder, reason)
    return written
