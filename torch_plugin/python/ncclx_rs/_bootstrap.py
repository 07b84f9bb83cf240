"""Where a communicator's ranks meet, and which of them this process is."""

from __future__ import annotations

import collections
import functools
import os
from datetime import timedelta

from torch._C import _distributed_c10d as c10d

# Launchers, in the order they are asked: the variables of the rank and of the number of ranks.
_LAUNCHERS = {
    "torchcomm": ("TORCHCOMM_RANK", "TORCHCOMM_SIZE"),
    "mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "pmi": ("PMI_RANK", "PMI_SIZE"),
    "pals": ("PALS_RANKID", "PALS_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS"),
    "torchrun": ("RANK", "WORLD_SIZE"),
}
_METHODS = {"auto": tuple(_LAUNCHERS), "torchrun": ("torchrun",), "mpi": ("mpi", "pmi"), "pals": ("pals",)}


def place() -> tuple[int, int]:
    """This process's rank and the number of ranks, from the launcher's environment variables.

    ``TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD`` (``auto``, ``torchrun``, ``mpi``, ``pals``) says which launcher.

    Raises:
        RuntimeError: the variables are missing or are not what they should be.
    """
    variable = "TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD"
    method = os.environ.get(variable, "auto").lower()
    if method not in _METHODS:
        raise RuntimeError(f"new_comm: {variable} must be one of {', '.join(_METHODS)}, got {method!r}")
    for launcher in _METHODS[method]:
        rank, size = (os.environ.get(name) for name in _LAUNCHERS[launcher])
        if rank is not None and size is not None:
            return _checked(_LAUNCHERS[launcher], rank, size)
    asked = "; ".join(" and ".join(_LAUNCHERS[launcher]) for launcher in _METHODS[method])
    raise RuntimeError(f"new_comm: the rank is not known: set {asked}, or start this program with torchrun")


def _checked(names: tuple[str, str], rank: str, size: str) -> tuple[int, int]:
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise RuntimeError(f"new_comm: {names[0]}={rank!r} must be a number below {names[1]}={size!r}")
    return int(rank), int(size)


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
