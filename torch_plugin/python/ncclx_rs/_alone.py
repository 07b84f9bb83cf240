"""``init_process_group`` without a launcher: the process is a world of one, or is told how to start a world."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

# What PyTorch's rendezvous reads. A program that sets one of them means it.
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The beginning of PyTorch's error if one of them is missing.
_MISSING = "Error initializing torch.distributed using env://"


def init_process_group(original: Callable[..., Any], call: inspect.BoundArguments) -> Any:
    """Calls PyTorch's ``init_process_group`` for a group on this backend.

    Args:
        original: PyTorch's function.
        call: the program's arguments. If they and the environment say nothing of other processes, the process is the
            only rank of its world.

    Raises:
        ValueError: the environment is incomplete; the text says how to start ranks.
    """
    if _names_others(call.arguments) or any(os.environ.get(name) for name in _RENDEZVOUS):
        return _explaining(original, call)
    from ncclx_rs._bootstrap import rank_and_size

    try:
        rank, size = rank_and_size()
    except RuntimeError:  # PyTorch does not read what is wrong there
        return _explaining(original, call)
    if size > 1:
        return _explaining(original, call, f", or pass rank={rank} and world_size={size}, as its launcher calls it")
    from torch._C._distributed_c10d import HashStore

    call.arguments.pop("init_method", None)
    call.arguments.update(store=HashStore(), rank=0, world_size=1)
    return original(*call.args, **call.kwargs)


def _names_others(given: Mapping[str, Any]) -> bool:
    return (
        given.get("store") is not None
        or given.get("init_method") not in (None, "env://")
        or any(given.get(name) not in (None, -1) for name in ("rank", "world_size"))
    )


def _explaining(original: Callable[..., Any], call: inspect.BoundArguments, otherwise: str = "") -> Any:
    try:
        return original(*call.args, **call.kwargs)
    except ValueError as error:
        if not str(error).startswith(_MISSING):
            raise
        raise ValueError(
            f"{error}; ncclx_rs: init_process_group: this process was not started by torchrun: start the ranks with "
            f"`torchrun --standalone --nproc-per-node 2 program.py`{otherwise}"
        ) from None
