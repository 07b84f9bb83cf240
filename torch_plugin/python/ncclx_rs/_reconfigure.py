"""How processes that know each other by handles alone become a communicator.

Every process that may be reconfigured runs a small store; its handle says where. The members of a new generation meet
in the store of the first of them, under keys that only this membership and uuid have, so that neither an older
generation nor another half of the world is ever met. Members that died take nothing with them that the others need.

A handle holds a random part that its process has told nobody else. The store serves those alone that know it, and a
secret made of all members' handles goes into that of the communicator. Handles are therefore kept as passwords are:
none is printed or logged.
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import socket
from collections.abc import Sequence, Set
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ncclx_rs._load import native

if TYPE_CHECKING:
    from ncclx_rs._native import SecretStore

InitHandle = str

_VERSION = "nrs1"


class Endpoint:
    """This process's end of later rendezvous: a store, and the handle that leads to it."""

    def __init__(self) -> None:
        token = secrets.token_hex(16)
        self._served = native().SecretStore.serve(_key(token))
        self._rendezvous: c10d.Store | None = None
        self.handle = f"{_VERSION}:{token}:{_address()}:{self._served.port}"

    def rendezvous(
        self, uuid: int, handles: Sequence[InitHandle] | Set[InitHandle], timeout: timedelta
    ) -> tuple[c10d.Store, int, int, str]:
        """Where the members of one generation find each other, this process's rank, their number, and their secret.

        Args:
            uuid: the generation.
            handles: every member's; a list gives the ranks in its order, a set leaves that open.
            timeout: how long the first member's store may take to answer.

        Raises:
            RuntimeError: handles are repeated or are none, or this process is not among them.
            torch.distributed.DistNetworkError: the first member's store does not answer.
        """
        members = _membership(handles, self.handle)
        # C++ keeps a store, but not what makes it one of Python's.
        self._rendezvous = _rendezvous_store(uuid, members, timeout)
        return self._rendezvous, members.index(self.handle), len(members), _secret(uuid, members)


class RendezvousStore(c10d.Store):
    """A part of a store that asks for a secret.

    Args:
        store: the whole store.
        prefix: how the part's keys begin.
        timeout: how long to wait for a key where nothing else is said.
    """

    def __init__(self, store: SecretStore, prefix: str, timeout: timedelta) -> None:
        super().__init__()
        self._store, self._prefix, self._timeout = store, prefix, timeout

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # as C++ calls it
        """Binds ``key`` to ``value``."""
        self._store.set(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> bytes:
        """The value of ``key``, which it waits for."""
        return self._store.get(f"{self._prefix}/{key}", self._timeout)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for all of ``keys``, each up to ``timeout``."""
        for key in keys:
            self._store.get(f"{self._prefix}/{key}", timeout or self._timeout)

    def delete_key(self, key: str) -> bool:
        """Nothing: each generation has keys of its own."""
        return False


def _membership(handles: Sequence[InitHandle] | Set[InitHandle], own: InitHandle) -> list[InitHandle]:
    """The members in the order of their ranks: that of a list; of a set, the same one everywhere.

    Raises:
        RuntimeError: handles are repeated or are none, or this process is not among them.
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
    """Where the members of one generation find each other."""
    host, port = _host_and_port(members[0])
    digest = hashlib.sha256(" ".join(members).encode()).hexdigest()
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        store = native().SecretStore.connect(address, _key(members[0].split(":")[1]), timeout)
    except RuntimeError as error:
        raise dist.DistNetworkError(f"reconfigure: {error}") from None
    return RendezvousStore(store, f"{uuid}/{digest}", timeout)


def _key(token: str) -> bytes:
    """What the store of the process with this token asks for."""
    return hashlib.sha256(f"ncclx_rs store {token}".encode()).digest()


def _secret(uuid: int, members: Sequence[InitHandle]) -> str:
    """What only they know who hold all the handles; the hint ``group_secret``."""
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
    """This host's address as the others see it: the one that its packets to ``MASTER_ADDR`` carry."""
    for target in (os.environ.get("MASTER_ADDR"), socket.gethostname()):
        if not target:
            continue
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(target, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"
