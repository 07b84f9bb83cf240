"""The bootstrap store of a communicator, and this process's rank and size."""

from __future__ import annotations

import collections
import functools
import os
from datetime import timedelta

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ncclx_rs._load import native


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks, from the launcher's environment variables; see `new_comm`.

    A process without a launcher is the only rank of a world of its own.

    Raises:
        RuntimeError: the variables are invalid, or they are missing although the environment names a master or the
            launcher's method.
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
    # Under torchrun, its agent serves the store.
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    # As torch.distributed: not every PyTorch is built with libuv.
    with_libuv = os.environ.get("USE_LIBUV", "1") == "1"
    try:
        return c10d.TCPStore(
            host,
            port,
            is_master=serves,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            use_libuv=with_libuv,
        )
    except dist.DistNetworkError as error:
        if not serves or "EADDRINUSE" not in str(error):
            raise
        raise dist.DistNetworkError(
            f"new_comm: another program uses MASTER_PORT {port} of this host: choose a free port, the same on all "
            f"ranks; torchrun --standalone does so itself ({str(error).splitlines()[0]})"
        ) from None


# How many communicators of each name this process has made. All ranks of a communicator have the same number.
_made: collections.Counter[str] = collections.Counter()


def store_for(name: str, given: c10d.Store | None, rank: int, size: int, timeout: timedelta) -> c10d.Store:
    """A store for a new communicator, whose keys no other communicator uses."""
    _made[name] += 1
    root = _root_store(rank, size, timeout) if given is None else given
    return c10d.PrefixStore(f"ncclx_rs/{name}/{_made[name]}", root)
