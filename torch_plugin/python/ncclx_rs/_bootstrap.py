"""Where a communicator's ranks meet, and which of them this process is."""

from __future__ import annotations

import collections
import functools
import os
from datetime import timedelta

from torch._C import _distributed_c10d as c10d

from ncclx_rs._load import native


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks, as the launcher's environment variables say; see `new_comm`.

    Raises:
        RuntimeError: the variables are missing or are not what they should be.
    """
    return native().launch_rank_and_size()  # type: ignore[no-any-return]


@functools.cache
def _root_store(rank: int, size: int, timeout: timedelta) -> c10d.Store:
    if size == 1:
        return c10d.HashStore()
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise RuntimeError(
            "new_comm: give a store, or set MASTER_ADDR and MASTER_PORT to where rank 0 listens "
            f"({type(error).__name__}: {error})"
        ) from error
    # Under torchrun its agent listens there.
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return c10d.TCPStore(host, port, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True)


# How often this process has made a communicator of each name: the ranks of one come with the same number.
_made: collections.Counter[str] = collections.Counter()


def store_for(name: str, given: c10d.Store | None, rank: int, size: int, timeout: timedelta) -> c10d.Store:
    """The keys of a new communicator, apart from those of all others."""
    _made[name] += 1
    root = _root_store(rank, size, timeout) if given is None else given
    return c10d.PrefixStore(f"ncclx_rs/{name}/{_made[name]}", root)
