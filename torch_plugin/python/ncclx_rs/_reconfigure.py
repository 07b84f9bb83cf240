"""The rendezvous of reconfiguration: processes that have only each other's handles become a communicator.

Every process that may be reconfigured serves a small store; its handle contains the address. The members of a new
generation use the store of the first member. Their keys depend on the members and the uuid, so they never meet
an older generation or another half of the world. No member depends on a store of a process that has died.

A handle contains a random token. A store serves only clients that know its token, and the communicator's secret is made
from the handles of all members. So handles are passwords: they are never printed or logged.
"""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import os
import secrets
import socket
from collections.abc import Sequence, Set
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ncclx_rs._load import native
from ncclx_rs._types import InitHandle

if TYPE_CHECKING:
    from ncclx_rs._native import SecretStore

_VERSION = "nrs1"


class Endpoint:
    """This process's store for later rendezvous, and its handle."""

    def __init__(self) -> None:
        token = secrets.token_hex(16)
        self._served = native().SecretStore.serve(_key(token))
        self._rendezvous: c10d.Store | None = None
        self.handle = f"{_VERSION}:{token}:{_address()}:{self._served.port}"

    def rendezvous(
        self, uuid: int, handles: Sequence[InitHandle] | Set[InitHandle], timeout: timedelta
    ) -> tuple[c10d.Store, int, int, str]:
        """The store of one generation's members, this process's rank, the number of members, and their secret.

        Args:
            uuid: the generation.
            handles: the members' handles. A list has them in the order of the ranks; a set leaves the order open.
            timeout: the timeout of the connection to the first member's store.

        Raises:
            RuntimeError: a handle is repeated or invalid, or this process's handle is missing.
            torch.distributed.DistNetworkError: the first member's store does not answer.
        """
        members = _membership(handles, self.handle)
        # C++ keeps the store alive, but not its Python part.
        self._rendezvous = _rendezvous_store(uuid, members, timeout)
        return self._rendezvous, members.index(self.handle), len(members), _secret(uuid, members)


class RendezvousStore(c10d.Store):
    """A c10d store over a part of a `SecretStore`.

    Args:
        store: the whole store.
        prefix: the prefix of the part's keys.
        timeout: the timeout of calls that have none of their own.
    """

    def __init__(self, store: SecretStore, prefix: str, timeout: timedelta) -> None:
        super().__init__()
        self._store, self._prefix, self._timeout = store, prefix, timeout

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # as C++ calls it
        """Sets ``key`` to ``value``."""
        self._store.set(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> bytes:
        """The value of ``key``; waits until it is set."""
        return self._store.get(f"{self._prefix}/{key}", self._timeout)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for all of ``keys``, each up to ``timeout``."""
        for key in keys:
            self._store.get(f"{self._prefix}/{key}", self._timeout if timeout is None else timeout)

    def delete_key(self, key: str) -> bool:
        """Deletes nothing: each generation has keys of its own."""
        return False


def _membership(handles: Sequence[InitHandle] | Set[InitHandle], own: InitHandle) -> list[InitHandle]:
    """The members in the order of their ranks: the order of a list; for a set, the same order on every process.

    Raises:
        RuntimeError: a handle is repeated or invalid, or this process's handle is missing.
    """
    members = sorted(handles) if isinstance(handles, Set) else list(handles)
    for handle in members:
        host, port = _host_and_port(handle)
        if members.count(handle) > 1:
            raise RuntimeError(f"reconfigure: argument `init_handles`: that of {host}:{port} is there twice")
    if own not in members:
        raise RuntimeError("reconfigure: argument `init_handles`: this process's own handle is not among them")
    return members


def _rendezvous_store(uuid: int, members: Sequence[InitHandle], timeout: timedelta) -> c10d.Store:
    """Connects to the store of one generation's members."""
    host, port = _host_and_port(members[0])
    digest = hashlib.sha256(" ".join(members).encode()).hexdigest()
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        store = native().SecretStore.connect(address, _key(members[0].split(":")[1]), timeout)
    except RuntimeError as error:
        raise dist.DistNetworkError(f"reconfigure: {error}") from None
    return RendezvousStore(store, f"{uuid}/{digest}", timeout)


def _key(token: str) -> bytes:
    """The secret of the store of the process with this token."""
    return hashlib.sha256(f"ncclx_rs store {token}".encode()).digest()


def _secret(uuid: int, members: Sequence[InitHandle]) -> str:
    """The secret of a generation, which takes all handles to compute; the value of the hint ``group_secret``."""
    return hashlib.sha256(f"ncclx_rs secret {uuid} {' '.join(members)}".encode()).hexdigest()


def _host_and_port(handle: InitHandle) -> tuple[str, int]:
    version, _, rest = handle.partition(":")
    _, _, address = rest.partition(":")
    host, _, port = address.rpartition(":")
    known = version == _VERSION and host and handle.isascii() and port.isdecimal() and len(port) <= 5
    if not known or not 0 < int(port) < 2**16:
        raise RuntimeError(
            "reconfigure: argument `init_handles`: expected results of get_init_handle, "
            f"got {len(handle)} characters that are none"
        )
    return host, int(port)


@functools.cache
def _address() -> str:
    """This host's address for other hosts, as the engine advertises it.

    A host's own name often resolves to a loopback address there, which leads other hosts to themselves. So that counts
    only if ``MASTER_ADDR`` asks for it, or if there is no other.
    """
    master = os.environ.get("MASTER_ADDR") or socket.gethostname()
    if _is_loopback(master):
        return "127.0.0.1" if master == "localhost" else master
    return str(native().advertised_addresses(master)[0])


def _is_loopback(host: str) -> bool:
    """Whether an address, or a name by itself, means this host alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
