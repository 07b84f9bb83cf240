"""How processes that know each other by handles alone become a communicator.

Every process that may be reconfigured runs a small store; its handle says where. The members of a new generation meet
in the store of the first of them, under keys that only this membership and uuid have, so that neither an older
generation nor another half of the world is ever met. Members that died take nothing with them that the others need.

A handle holds a random part that its process has told nobody else. A secret made of all members' handles goes into the
secret of the communicator, so that who reads or writes the store without them can take no member's place. Handles are
therefore kept as passwords are: none is printed or logged.
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import socket
from collections.abc import Sequence, Set
from datetime import timedelta

from torch._C import _distributed_c10d as c10d

InitHandle = str

_VERSION = "nrs1"


class Endpoint:
    """This process's end of later rendezvous: a store, and the handle that leads to it."""

    def __init__(self) -> None:
        self._store = c10d.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        self.handle = f"{_VERSION}:{secrets.token_hex(16)}:{_address()}:{self._store.port}"

    def meet(
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
        return _meeting_place(uuid, members, timeout), members.index(self.handle), len(members), _secret(uuid, members)


def _membership(handles: Sequence[InitHandle] | Set[InitHandle], own: InitHandle) -> list[InitHandle]:
    """The members in the order of their ranks: that of a list; of a set, the same one everywhere.

    Raises:
        RuntimeError: handles are repeated or are none, or this process is not among them.
    """
    members = sorted(handles) if isinstance(handles, Set) else list(handles)
    for handle in members:
        host, port = _location(handle)
        if members.count(handle) > 1:
            raise RuntimeError(f"reconfigure: argument `init_handles`: that of {host}:{port} is there twice")
    if own not in members:
        raise RuntimeError("reconfigure: argument `init_handles`: this process's own handle is not among them")
    return members


def _meeting_place(uuid: int, members: Sequence[InitHandle], timeout: timedelta) -> c10d.Store:
    """Where the members of one generation find each other."""
    host, port = _location(members[0])
    digest = hashlib.sha256(" ".join(members).encode()).hexdigest()
    store = c10d.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return c10d.PrefixStore(f"{uuid}/{digest}", store)


def _secret(uuid: int, members: Sequence[InitHandle]) -> str:
    """What only they know who hold all the handles; the hint ``group_secret``."""
    return hashlib.sha256(f"ncclx_rs secret {uuid} {' '.join(members)}".encode()).hexdigest()


def _location(handle: InitHandle) -> tuple[str, int]:
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
