"""The ranks of a launcher meet in its store, and find out who cannot reach whom and who differs."""

from __future__ import annotations

import json
import platform
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from ncclx_rs._load import native
from ncclx_rs.doctor.checks import Finding, Level

# How long a rank waits for the others, and for a connection.
MEETING = timedelta(seconds=60)
_CONNECT_SECONDS = 5.0
# How many connections a rank tries at once: firewalls that say nothing shall not take their time one after the other.
_AT_ONCE = 256
# Clocks that differ by more make logs of several ranks hard to compare, and certificates invalid.
_SKEW_SECONDS = 1.0


@dataclass(frozen=True)
class Member:
    """What a rank tells the others. `seconds` is its clock when rank 0 asked."""

    rank: int
    host: str
    addresses: list[str]
    port: int
    ncclx_rs: str
    torch: str
    python: str
    seconds: float = 0.0
    findings: list[dict[str, Any]] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)


def meet(store: c10d.Store, rank: int, size: int, own: Sequence[Finding]) -> list[Finding]:
    """Compares the ranks. All ranks call it.

    Args:
        store: a store of these ranks alone.
        rank: this process's rank.
        size: the number of ranks.
        own: what this rank has found on its host.

    Returns:
        On rank 0 the findings of all ranks, on others an empty list, unless rank 0 falls silent.
    """
    with _Listener() as listener:
        member = Member(
            rank,
            socket.gethostname(),
            _own_addresses(),
            listener.port,
            native().__version__,
            torch.__version__,
            platform.python_version(),
            findings=[asdict(finding) for finding in own],
        )
        store.set(f"here{rank}", json.dumps(asdict(member)))
        everyone = _told(store, "here", range(size))
        unreachable = _unreachable(member, everyone)
        asked = time.time()
        if rank == 0:
            store.set("clock", "tell")
        try:
            store.wait(["clock"], MEETING)
        except RuntimeError as error:
            return [_silent(rank, error)]
        told = {**asdict(member), "seconds": time.time(), "unreachable": unreachable}
        store.set(f"done{rank}", json.dumps(told))
        # Nobody stops listening before all have tried.
        everyone = _told(store, "done", range(size))
        return compare(everyone, size, asked, time.time()) if rank == 0 else []


def compare(members: Sequence[Member], size: int, asked: float, answered: float) -> list[Finding]:
    """The findings about these members.

    Args:
        members: those that came, in the order of their ranks.
        size: how many should have come.
        asked: rank 0's clock before it asked for the others'.
        answered: the same after all answers.
    """
    found = [_met(members, size), *_versions(members)]
    for member in members:
        found += [
            Finding(
                "connections",
                Level.PROBLEM,
                f"rank {member.rank} on {member.host} cannot reach {other}",
                "let firewalls pass the ports of net.ipv4.ip_local_port_range between these hosts, or name an "
                "interface that joins them in NCCLX_RS_SOCKET_IFNAME",
            )
            for other in member.unreachable
        ]
        behind = asked - member.seconds if member.seconds < asked else max(0.0, member.seconds - answered)
        if behind > _SKEW_SECONDS:
            found.append(
                Finding(
                    "clock",
                    Level.WARNING,
                    f"the clock of {member.host} differs from rank 0's by {behind:.0f} s",
                    "have the hosts set their clocks by NTP",
                )
            )
    seen = set()
    for member in members:
        for finding in member.findings:
            if (key := (member.host, finding["check"], finding["text"])) not in seen:
                seen.add(key)
                text = f"{member.host}: {finding['text']}"
                found.append(Finding(finding["check"], Level(finding["level"]), text, finding["remedy"]))
    return found


def _met(members: Sequence[Member], size: int) -> Finding:
    missing = sorted(set(range(size)) - {member.rank for member in members})
    if missing:
        return Finding(
            "meeting",
            Level.PROBLEM,
            f"ranks {', '.join(map(str, missing))} did not come within {MEETING.seconds} s",
            "see whether they were started, and whether they reach MASTER_ADDR at MASTER_PORT",
        )
    hosts = dict.fromkeys(member.host for member in members)
    text = f"all {size} ranks met, on {len(hosts)} {'host' if len(hosts) == 1 else 'hosts'}: {', '.join(hosts)}"
    return Finding("meeting", Level.OK, text)


def _silent(rank: int, error: RuntimeError) -> Finding:
    cause = str(error).split("\n", maxsplit=1)[0]
    return Finding(
        "meeting",
        Level.PROBLEM,
        f"rank {rank} has heard nothing more of rank 0: {cause}",
        "see whether rank 0 still runs, and whether its store at MASTER_ADDR and MASTER_PORT does",
    )


def _versions(members: Sequence[Member]) -> list[Finding]:
    found = []
    for what in ("ncclx_rs", "torch", "python"):
        ranks: dict[str, list[int]] = {}
        for member in members:
            ranks.setdefault(getattr(member, what), []).append(member.rank)
        if len(ranks) > 1:
            listed = "; ".join(f"{version} on ranks {', '.join(map(str, of))}" for version, of in ranks.items())
            level = Level.WARNING if what == "python" else Level.PROBLEM
            remedy = f"install one version of {what} everywhere"
            found.append(Finding("versions", level, f"{what} differs: {listed}", remedy))
    return found


def _told(store: c10d.Store, key: str, ranks: Sequence[int]) -> list[Member]:
    """What the ranks have told under this key, without those that do not within the time of a meeting."""
    deadline, found = time.monotonic() + MEETING.total_seconds(), []
    for rank in ranks:
        left = timedelta(seconds=max(0.1, deadline - time.monotonic()))
        try:
            store.wait([f"{key}{rank}"], left)
        except RuntimeError:  # of its kind, a store's errors have nothing in common but that
            continue
        told: Mapping[str, Any] = json.loads(store.get(f"{key}{rank}"))
        found.append(Member(**told))
    return found


def _own_addresses() -> list[str]:
    try:
        return native().advertised_addresses(None)  # type: ignore[no-any-return]
    except ValueError:  # this rank's own findings say what is wrong
        return []


def _addresses(member: Member) -> str:
    return ", ".join(f"{address} port {member.port}" for address in member.addresses)


def _unreachable(member: Member, everyone: Sequence[Member]) -> list[str]:
    """The ranks of other hosts that this one cannot connect to at any of their addresses."""
    others = [other for other in everyone if other.host != member.host]
    places = [(address, other.port) for other in others for address in other.addresses]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        reached = dict(zip(places, pool.map(_reaches, places), strict=True))
    return [
        f"{other.host} ({_addresses(other)}, rank {other.rank})"
        for other in others
        if other.addresses and not any(reached[address, other.port] for address in other.addresses)
    ]


def _reaches(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


class _Listener:
    """Takes connections at a port that the kernel chooses, until the end of the block."""

    def __init__(self) -> None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, backlog=128, dualstack_ipv6=both)
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> _Listener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            connection.close()
