"""What a host offers to ranks: interfaces, limits, and what the kernel allows; for ``ncclx-rs info`` and ``doctor``."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from ncclx_rs._load import native

ROOT = Path("/")


@dataclass(frozen=True)
class Interface:
    """A network interface; `mtu` in bytes and `megabits` a second are None where the kernel does not tell."""

    name: str
    addresses: list[str]
    up: bool
    mtu: int | None
    megabits: int | None


@dataclass(frozen=True)
class Limits:
    """What this process may use; None where the kernel does not tell or sets no limit.

    `ptrace_scope` is Yama's: at 2 and above no process reads another's memory. `seccomp` says whether a filter of
    system calls is on. `reads_memory` says whether the system call for single copies within a host is let through.
    """

    descriptors: int
    descriptors_at_most: int
    locked_bytes: int | None
    shm_free_bytes: int | None
    memory_bytes: int | None
    memory_used_bytes: int | None
    ptrace_scope: int | None
    seccomp: bool
    reads_memory: bool
    memfd: bool


@dataclass(frozen=True)
class Node:
    """A NUMA node that is online.

    `cpus` are the first and the last number of each run of its CPUs; a node of memory alone has none. `distances` are
    those of all nodes from it, in their order; its own is 10.
    """

    number: int
    cpus: list[tuple[int, int]]
    distances: list[int]

    def has(self, cpu: int) -> bool:
        """Whether the CPU belongs to it."""
        return any(first <= cpu <= last for first, last in self.cpus)


def wrong_setting() -> str | None:
    """What is wrong with an environment variable that is a setting; None if all have values that they can have."""
    try:
        native().check_settings([])
    except ValueError as error:
        return str(error)
    return None


def nodes(root: Path = ROOT) -> list[Node]:
    """The host's NUMA nodes; none where the kernel does not know of them.

    Args:
        root: the folder that stands for the file system's root.
    """
    return [Node(*node) for node in native().numa_nodes(root / "sys")]


def interfaces(root: Path = ROOT) -> list[Interface]:
    """The host's interfaces that have addresses, in the kernel's order.

    Args:
        root: the folder that stands for the file system's root.

    Raises:
        OSError: the kernel does not list them.
    """
    found: dict[str, Interface] = {}
    for name, address, up in native().interfaces():
        if name in found:
            found[name].addresses.append(address)
            continue
        about = root / "sys/class/net" / name
        speed = _number(about / "speed")
        # The kernel says -1 where an interface has no speed of its own, as bridges have none.
        found[name] = Interface(name, [address], up, _number(about / "mtu"), speed if speed and speed > 0 else None)
    return list(found.values())


def limits(root: Path = ROOT) -> Limits:
    """This process's limits.

    Args:
        root: the folder that stands for the file system's root.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    most, used = _cgroup_memory(root)
    return Limits(
        descriptors=soft,
        descriptors_at_most=hard,
        locked_bytes=None if locked == resource.RLIM_INFINITY else locked,
        shm_free_bytes=_free(root / "dev/shm"),
        memory_bytes=most,
        memory_used_bytes=used,
        ptrace_scope=_number(root / "proc/sys/kernel/yama/ptrace_scope"),
        seccomp=_seccomp(root),
        reads_memory=_reads_memory(),
        memfd=_makes_memfd(),
    )


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def _free(path: Path) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _cgroup_memory(root: Path) -> tuple[int | None, int | None]:
    """The limit of this process's control group and what it uses: of the narrowest group above the process."""
    narrowest: tuple[int | None, int | None] = (None, None)
    base = root / "sys/fs/cgroup"
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = base / controllers
        names = (
            ("memory.max", "memory.current")
            if not controllers
            else (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        )
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            most = _number(folder / names[0])
            # Version 1 writes a number near 2**63 where there is no limit.
            if most is not None and most < 1 << 60 and (narrowest[0] is None or most < narrowest[0]):
                narrowest = (most, _number(folder / names[1]))
            if folder == top:
                break
    return narrowest


def _seccomp(root: Path) -> bool:
    for line in (_text(root / "proc/self/status") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "Seccomp":
            return value.strip() == "2"
    return False


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


def _reads_memory() -> bool:
    """Whether process_vm_readv works on this very process: filters refuse it for every process."""
    read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if read is None:
        return False
    source, target = ctypes.create_string_buffer(b"x", 1), ctypes.create_string_buffer(1)
    there, here = (_Piece(ctypes.addressof(memory), 1) for memory in (source, target))
    moved = read(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    return bool(moved == 1) or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS, errno.EACCES)


def _makes_memfd() -> bool:
    try:
        os.close(os.memfd_create("ncclx_rs"))
    except OSError:
        return False
    return True
