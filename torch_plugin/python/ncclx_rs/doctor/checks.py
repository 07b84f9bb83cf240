"""The checks of one host. Each gives a finding, and for what is wrong a remedy."""

from __future__ import annotations

import contextlib
import enum
import ipaddress
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ncclx_rs import _host
from ncclx_rs._host import Interface, Limits
from ncclx_rs._load import native


class Level(str, enum.Enum):
    """How bad a finding is: a problem keeps ranks from working, a warning slows them down or may do so."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """What a check found; `remedy` is empty where nothing is wrong."""

    check: str
    level: Level
    text: str
    remedy: str = ""


# A connection within one host takes far less.
_CONNECT_SECONDS = 2.0
_FREE_PART = 0.1


def host(ranks: int) -> list[Finding]:
    """The findings on this host.

    Args:
        ranks: the number of ranks that a communicator shall have.
    """
    interfaces, limits = _host.interfaces(), _host.limits()
    valid = settings()
    found = [valid, name()]
    if valid.level is Level.OK:  # these read settings
        found += [*addresses(interfaces), port(), descriptors(limits, ranks)]
    return [*found, memory(limits), shared_memory(limits), single_copy(limits)]


def settings() -> Finding:
    """Whether the environment variables that are settings have values that these can have."""
    if (wrong := _host.wrong_setting()) is not None:
        remedy = "correct the variable, or unset it: docs/configuration.md has the values of each"
        return Finding("settings", Level.PROBLEM, wrong, remedy)
    return Finding("settings", Level.OK, "the environment has no invalid ones")


def name(look_up: Callable[[str], list[str]] | None = None) -> Finding:
    """Whether this host's name stands for an address that other hosts can reach.

    Args:
        look_up: gives a name's addresses, or raises OSError; the system's resolver if not given.
    """
    own = socket.gethostname()
    try:
        found = (look_up or _addresses)(own)
    except OSError as error:
        return Finding(
            "host name",
            Level.WARNING,
            f"the name {own} has no address: {error}",
            f"add a line for {own} to /etc/hosts, or set MASTER_ADDR to an address",
        )
    if all(ipaddress.ip_address(address).is_loopback for address in found):
        return Finding(
            "host name",
            Level.WARNING,
            f"the name {own} stands for {', '.join(found)}, which no other host can reach",
            f"remove {own} from the loopback lines of /etc/hosts, or set MASTER_ADDR to an address",
        )
    return Finding("host name", Level.OK, f"{own} is {', '.join(found)}")


def _addresses(name: str) -> list[str]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(row[4][0]).split("%")[0] for row in found))


def addresses(interfaces: list[Interface]) -> Iterator[Finding]:
    """Which addresses ranks of this host tell the others, and what the best one's interface is like."""
    master = os.environ.get("MASTER_ADDR") or None
    try:
        told = native().advertised_addresses(master)
    except ValueError as error:
        yield Finding(
            "interface",
            Level.PROBLEM,
            str(error),
            "correct NCCLX_RS_SOCKET_IFNAME (or NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME); `ncclx-rs info` lists them",
        )
        return
    chosen = next(one for one in interfaces if told[0] in one.addresses)
    if ipaddress.ip_address(told[0]).is_loopback:
        yield Finding(
            "interface",
            Level.WARNING,
            f"{chosen.name} ({told[0]}) is taken, which no other host can reach",
            "for ranks on several hosts, bring another interface up or name it in NCCLX_RS_SOCKET_IFNAME",
        )
        return
    others = f"; also told: {', '.join(told[1:])}" if told[1:] else ""
    yield Finding("interface", Level.OK, f"{chosen.name} ({told[0]}) is taken{others}")
    if chosen.mtu is not None:
        low = chosen.mtu < 1500
        yield Finding(
            "MTU",
            Level.WARNING if low else Level.OK,
            f"{chosen.name} has an MTU of {chosen.mtu}",
            f"raise it to 1500 or more: ip link set {chosen.name} mtu 1500" if low else "",
        )


def port() -> Finding:
    """Whether this host reaches a port of its own at its best address, which the kernel chooses."""
    check = "ports"
    try:
        address = native().advertised_addresses(None)[0]
    except ValueError as error:
        return Finding(check, Level.PROBLEM, str(error), "correct NCCLX_RS_SOCKET_IFNAME")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.closing(socket.socket(family)) as listener:
        try:
            listener.bind((address, 0))
            listener.listen(1)
            place = listener.getsockname()[:2]
            socket.create_connection(place, _CONNECT_SECONDS).close()
        except OSError as error:
            return Finding(
                check,
                Level.PROBLEM,
                f"a port of {address} cannot be reached from this very host: {error}",
                "let the firewall pass the ports that ranks listen at: net.ipv4.ip_local_port_range",
            )
    return Finding(check, Level.OK, f"a port that the kernel chose at {address} can be reached from this host")


def descriptors(limits: Limits, ranks: int) -> Finding:
    """Whether a communicator of `ranks` gets its file descriptors. It raises the soft limit to the hard one."""
    need = native().descriptors_of(ranks)
    text = f"{limits.descriptors_at_most} are allowed, and a communicator of {ranks} ranks takes up to {need}"
    if limits.descriptors_at_most < need:
        return Finding("file descriptors", Level.PROBLEM, text, f"raise the hard limit: ulimit -Hn {max(need, 4096)}")
    if limits.descriptors_at_most < 2 * need:
        remedy = "raise the hard limit if the program has several communicators or many files"
        return Finding("file descriptors", Level.WARNING, text, remedy)
    return Finding("file descriptors", Level.OK, text)


def memory(limits: Limits) -> Finding:
    """Whether the control group of this process has memory left."""
    if limits.memory_bytes is None:
        return Finding("memory", Level.OK, "the control group sets no limit")
    used = limits.memory_used_bytes or 0
    text = f"{used >> 20} of the control group's {limits.memory_bytes >> 20} MiB are used"
    if used > (1 - _FREE_PART) * limits.memory_bytes:
        remedy = "give the container or job more memory: the kernel ends processes that take more"
        return Finding("memory", Level.WARNING, text, remedy)
    return Finding("memory", Level.OK, text)


def shared_memory(limits: Limits) -> Finding:
    """Whether ranks of this host can share memory. They need no /dev/shm for that."""
    if limits.memfd:
        return Finding("shared memory", Level.OK, "ranks of this host can share memory")
    return Finding(
        "shared memory",
        Level.WARNING,
        "memfd_create is refused, so that ranks of this host use TCP",
        "let the container's seccomp profile pass memfd_create",
    )


def single_copy(limits: Limits) -> Finding:
    """Whether a rank can read long messages where they lie in another's memory."""
    check = "single copies"
    if not limits.reads_memory:
        return Finding(
            check,
            Level.WARNING,
            "process_vm_readv is refused: long messages within this host are copied twice",
            "let the container's seccomp profile pass process_vm_readv, or start it with --cap-add SYS_PTRACE",
        )
    if limits.ptrace_scope is not None and limits.ptrace_scope > 1:
        return Finding(
            check,
            Level.WARNING,
            f"kernel.yama.ptrace_scope is {limits.ptrace_scope}: long messages within this host are copied twice",
            "sysctl kernel.yama.ptrace_scope=1",
        )
    return Finding(check, Level.OK, "ranks of this host may read each other's memory")
