"""PyTorch's own flight recorder, and what stands in for it in process groups.

From 2.15 on PyTorch attaches its recorder to groups whose backends do not record themselves. The engine does, for a
fortieth of the time, so a group is left out unless the setting `pytorch_recorder` says otherwise, and its failures are
written down where PyTorch's would be, in the same format.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ncclx_rs import _trace
from ncclx_rs._load import native
from ncclx_rs.diagnose import dumps, pytorch

# What the backend is called in groups.
_NAMES = ("ncclx_rs", "ncclx")
_log = logging.getLogger("ncclx_rs.recorder")


def attend(backend: Any, pg_options: Any) -> None:
    """Sees to the recorder of a group that is made on ``backend``."""
    if not takes_pytorchs(pg_options.hints if pg_options is not None else {}):
        backend._on_failure(_write_down, _NUMBER)


def takes_pytorchs(hints: Mapping[str, str]) -> bool:
    """Whether a group with these hints has PyTorch's recorder, which PyTorch is told for the group it makes next."""
    takes: bool = native().pytorch_recorder(list(hints.items()))
    # Where PyTorch's own backends stand; there is no public way.
    known: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    known.difference_update(_NAMES) if takes else known.update(_NAMES)
    return takes


def _write_down() -> None:
    """Writes what this process's communicators have done last, unless the environment forbids it."""
    if not _trace.dumps_on_failure():
        return
    own = [dumps.parse(text) for text in native().dumps("an operation failed")]
    if not any(dump.records for dump in own):
        return
    path = _trace.path(pytorch.rank(own[0]))
    try:
        _trace.write(pytorch.trace(own), path)
    except OSError as error:
        _log.warning("the flight recorder could not be written to %s: %s", path, error)
    else:
        _log.warning("the flight recorder was written to %s", path)


# Of the hook; before that of the object API, which may end the process.
_NUMBER = -2
