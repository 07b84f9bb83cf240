"""The bootstrap store of a communicator, and this process's rank and size."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import secrets
from collections.abc import Iterator
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


# How many communicators this process has made, by where their ranks met and by name; those without one under "", too.
_made: collections.Counter[tuple[str, str]] = collections.Counter()

# Where, and under which given name, this process has failed to make the last one as another rank than rank 0.
_failed: set[tuple[str, str]] = set()


@contextlib.contextmanager
def meeting(
    name: str, given: c10d.Store | None, place: tuple[int, int] | None, timeout: timedelta
) -> Iterator[tuple[str, c10d.Store | None]]:
    """Gives a new communicator its name and a store, whose keys no other communicator uses, while its ranks meet.

    Communicators of one name in one store have numbers, which their ranks agree on if each has made as many there. One
    that has not come about has used its number up if rank 0 had begun: it has failed on all ranks, and what it has left
    in the store is not for the next. Otherwise the next has the same number, under which others may still wait: unless
    rank 0 has failed there meanwhile, as where all ranks have made the same mistake, and rank 0 later than others. Who
    has failed leaves out the numbers that rank 0 has noted as failed.

    Args:
        name: the communicator's name; empty for a default.
        given: the program's store.
        place: this process's rank and the number of ranks; None if the ranks do not meet in a store, or not here.
        timeout: the timeout of the connection to the default store.
    """
    store, where = given, "no store"
    if place is not None:
        rank, size = place
        store = _root_store(rank, size, timeout) if given is None else given
        where = "alone" if size == 1 else "default" if given is None else _identity(given)
    given_name = name
    name, counted = _count(where, given_name)
    if store is not None and (where, given_name) in _failed:
        _failed.discard((where, given_name))
        while has_failed(c10d.PrefixStore(f"ncclx_rs/{name}", store), _made[where, name]):
            name, counted = _count(where, given_name)
    number, part = _made[where, name], None
    try:
        if store is None or place is None:
            yield name, store
        else:
            part = c10d.PrefixStore(f"ncclx_rs/{name}", store)
            with attempt(part, number, rank, size) as own:
                yield name, own
    except BaseException:
        if part is None or not is_used_up(part, number, rank):
            _made.subtract(counted)
        if part is not None and rank != 0:
            _failed.add((where, given_name))
        raise


@contextlib.contextmanager
def attempt(part: c10d.Store | None, number: int, rank: int, size: int) -> Iterator[c10d.Store | None]:
    """Gives the communicator of this number its store, while its ranks meet; rank 0 notes for the others how it goes.

    Args:
        part: the part of a store for the communicators that are made one after the other; None where none is used.
        number: this one's among them.
        rank: this process's rank in it.
        size: the number of its ranks.
    """
    told = part if rank == 0 and size > 1 else None
    if told is not None:
        _note(told, _BEGUN, number)
    try:
        yield None if part is None else c10d.PrefixStore(str(number), part)
    except BaseException:
        if told is not None:
            _note(told, _FAILED, number)
        raise


def is_used_up(part: c10d.Store, number: int, rank: int) -> bool:
    """Whether the number of a communicator that has not come about is not for the next."""
    return rank == 0 or _is_past(part, _BEGUN, number)


def has_failed(part: c10d.Store, number: int) -> bool:
    """Whether rank 0 has noted that the communicator of this number, or a later one, has not come about."""
    return _is_past(part, _FAILED, number)


def _count(where: str, name: str) -> tuple[str, list[tuple[str, str]]]:
    """Counts one more communicator of that name, or of a default one; returns its name and the keys of its counts."""
    counted = [(where, "")] if not name else []
    name = name or f"comm{_made[where, '']}"
    counted.append((where, name))
    _made.update(counted)
    return name, counted


# The keys of the numbers of the last communicators that rank 0 has begun to make, and has not made.
_BEGUN, _FAILED = "begun", "failed"


def _note(part: c10d.Store, key: str, number: int) -> None:
    with contextlib.suppress(RuntimeError):  # whoever uses a store that fails says more of it
        part.set(key, str(number))


def _is_past(part: c10d.Store, key: str, number: int) -> bool:
    """Whether rank 0 has noted this number there, or a later one."""
    try:
        return part.check([key]) and int(part.get(key)) >= number
    except (RuntimeError, ValueError):
        return False  # no store is left in which to meet


def _identity(store: c10d.Store) -> str:
    """What tells a store from others, also where another object leads to it."""
    try:
        return store.compare_set("ncclx_rs/store", "", secrets.token_hex(8)).decode()
    except RuntimeError:  # it cannot do that, as PyTorch's FakeStore
        return "unknown store"
