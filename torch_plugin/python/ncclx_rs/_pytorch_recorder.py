"""Replaces PyTorch's own flight recorder in process groups by the engine's.

From 2.15 on, PyTorch attaches its recorder to groups whose backends do not record themselves. The engine records for a
fortieth of the time. So a group gets PyTorch's recorder only if the setting `pytorch_recorder` asks for it. When an
operation of another group fails, the engine's trace is written to PyTorch's file, in PyTorch's format.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ncclx_rs import _trace
from ncclx_rs._load import native
from ncclx_rs.diagnose import dumps, pytorch

# The names of the backend in groups.
_NAMES = ("ncclx_rs", "ncclx")
_log = logging.getLogger("ncclx_rs.recorder")


def configure(backend: Any, pg_options: Any) -> None:
    """Chooses the recorder of the group that is being made on ``backend``."""
    if not uses_pytorchs(pg_options.hints if pg_options is not None else {}):
        backend._on_failure(_write_trace, _HOOK_NUMBER)


def uses_pytorchs(hints: Mapping[str, str]) -> bool:
    """Whether a group with these hints uses PyTorch's recorder. Sets that in PyTorch for the group it makes next."""
    uses: bool = native().pytorch_recorder(list(hints.items()))
    # PyTorch's list of backends that record themselves; there is no public interface.
    known: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    known.difference_update(_NAMES) if uses else known.update(_NAMES)
    return uses


def _write_trace() -> None:
    """Writes the last operations of this process's communicators, unless the environment forbids it."""
    if not _trace.dumps_on_failure():
        return
    own = [dumps.parse(text) for text in native().dumps("an operation failed")]
    if not any(dump.records for dump in own):
        return
    try:
        path = _trace.path(pytorch.rank(own[0]))
        _trace.write(pytorch.trace(own), path)
    except (OSError, RuntimeError) as error:  # the latter where there is no home folder
        _log.warning("the flight recorder could not be written: %s", error)
    else:
        _log.warning("the flight recorder was written to %s", path)


# Hooks run in the order of their numbers. This one precedes the object API's, which may end the process.
_HOOK_NUMBER = -2
