"""Says what is here: versions, devices, interfaces, limits, the vendors' libraries, and what a world would take.

ncclx-rs info
ncclx-rs info --ranks 16 --hosts 2
ncclx-rs info --json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from ncclx_rs import _host
from ncclx_rs._host import Interface, Limits, Node
from ncclx_rs._load import native
from ncclx_rs._vendor import LIBRARIES, VendorLibrary, find_vendor_library
from ncclx_rs.bench.report import size_text


@dataclass(frozen=True)
class Info:
    """What is here.

    `problems` says why a vendor's library cannot be used, for those that cannot; `cuda` is the driver's version, or why
    there is no driver. `nodes` are the host's NUMA nodes, and `home` is that of a rank which may run where this process
    may, with the reason why its memory may not lie there, if so; None if it is on no one of several. `advertised` are
    the addresses that ranks of this host tell the others, the best first.
    """

    ncclx_rs: str
    python: str
    torch: str
    built_for_torch: str
    cuda: str
    devices: list[str]
    libraries: dict[str, VendorLibrary]
    problems: dict[str, str]
    interfaces: list[Interface]
    advertised: list[str]
    limits: Limits
    nodes: list[Node]
    home: tuple[int, str | None] | None
    world: World


@dataclass(frozen=True)
class World:
    """What the engine would take for a world of `ranks` on `hosts`, unless settings or a tuning file say otherwise.

    `transports` says how bytes move between which ranks, and `gets` how a get of a window does, by the names of
    `window.get_attr(rank).get_path`. `algorithms` has for each collective the algorithms by size: the least number of
    bytes that each is taken for, and its name.
    """

    ranks: int
    hosts: int
    transports: dict[str, str]
    gets: dict[str, str]
    algorithms: dict[str, list[tuple[int, str]]]


# UCX is for transports between two processes, the others are for collectives.
_LIBRARIES = (*LIBRARIES, "ucx")

# The sizes that are asked for: powers of two from 8 bytes to 1 GiB.
_SIZES = tuple(1 << power for power in range(3, 31))
_COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
)


# From this version of UCX on, gets are read through `cma`.
_READS_BY_CMA = (1, 22)


def world_of(ranks: int, hosts: int, limits: Limits, ucx: str | None = None) -> World:
    """What the engine would take for such a world, with this version of UCX if there is one."""
    algorithms: dict[str, list[tuple[int, str]]] = {}
    for collective in _COLLECTIVES:
        chosen: list[tuple[int, str]] = []
        for size in _SIZES:
            name = native().preferred_algorithm(collective, ranks, hosts, size)
            if not chosen or chosen[-1][1] != name:
                chosen.append((size if chosen else 0, name))
        algorithms[collective] = chosen
    transports = {}
    reads = limits.reads_memory and (limits.ptrace_scope or 0) < 2
    if ranks > hosts:
        copies = "one copy" if reads else "two copies"
        within = f"shared memory, {copies} of long messages" if limits.memfd else "TCP: memfd_create is refused"
        transports["within a host"] = within
    if hosts > 1:
        transports["between hosts"] = "TCP"
    return World(ranks, hosts, transports, _gets(ranks, hosts, limits.memfd, reads, ucx), algorithms)


def _gets(ranks: int, hosts: int, shares: bool, reads: bool, ucx: str | None) -> dict[str, str]:
    if ranks == 1:
        return {}
    gets = {"by default": "messages"}
    if hosts == 1 and shares:
        gets["by default"] = "mapped in memory of get_mem_allocator(), messages elsewhere"
    if ucx is not None:
        by_cma = ranks > hosts and reads and tuple(int(part) for part in ucx.split(".")[:2]) >= _READS_BY_CMA
        ways = "cma and RDMA devices" if by_cma else "RDMA devices"
        gets["with transport=ucx"] = f"remote_reads through {ways}, messages elsewhere"
    return gets


def gather(ranks: int = 8, hosts: int = 1) -> Info:
    """Looks. It makes no context on a device.

    Args:
        ranks: the number of ranks in the world that is spoken of.
        hosts: the number of its hosts.
    """
    module = native()
    try:
        advertised = module.advertised_addresses(os.environ.get("MASTER_ADDR") or None)
    except ValueError:  # `ncclx-rs doctor` says what is wrong
        advertised = []
    limits = _host.limits()
    libraries: dict[str, VendorLibrary] = {}
    problems: dict[str, str] = {}
    for name in _LIBRARIES:
        try:
            libraries[name] = find_vendor_library(name)
        except OSError as error:
            problems[name] = str(error)
    try:
        driver, devices = module.cuda_devices()
    except OSError as error:
        driver, devices = str(error), []
    return Info(
        ncclx_rs=module.__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        built_for_torch=module.torch_build_version,
        cuda=driver,
        devices=devices,
        libraries=libraries,
        problems=problems,
        interfaces=_host.interfaces(),
        advertised=advertised,
        limits=limits,
        nodes=_host.nodes(),
        home=module.home_node(),
        world=world_of(ranks, hosts, limits, libraries["ucx"].version if "ucx" in libraries else None),
    )


def text(info: Info) -> str:
    """The same as lines for people."""
    lines = [
        ("ncclx_rs", f"{info.ncclx_rs}, built for PyTorch {info.built_for_torch}"),
        ("PyTorch", f"{info.torch}, Python {info.python}"),
        ("CUDA", info.cuda),
        *((f"cuda:{number}", name) for number, name in enumerate(info.devices)),
    ]
    for name in _LIBRARIES:
        if library := info.libraries.get(name):
            lines.append((name.upper(), f"{library.version}, {library.path}"))
            if library.lacks:
                lines.append(("", f"lacks {', '.join(library.lacks)}"))
        else:
            lines.append((name.upper(), f"none: {info.problems[name]}"))
    return "\n".join(f"{name:<10} {what}" for name, what in [*lines, *_host_lines(info), *_world_lines(info.world)])


def _host_lines(info: Info) -> list[tuple[str, str]]:
    lines = []
    for one in info.interfaces:
        facts = [*one.addresses, "up" if one.up else "down"]
        facts += [f"MTU {one.mtu}"] if one.mtu is not None else []
        facts += [f"{one.megabits} Mbit/s"] if one.megabits is not None else []
        facts += ["taken"] if info.advertised and info.advertised[0] in one.addresses else []
        lines.append((one.name, ", ".join(facts)))
    limits = info.limits
    lines.append(("files", f"{limits.descriptors} descriptors, raised to {limits.descriptors_at_most} at need"))
    memory = "no limit of the control group"
    if limits.memory_bytes is not None:
        memory = f"{limits.memory_bytes >> 20} MiB by the control group, {(limits.memory_used_bytes or 0) >> 20} used"
    lines.append(("memory", memory))
    locked = "unlimited" if limits.locked_bytes is None else f"{limits.locked_bytes >> 10} KiB"
    shm = "not there" if limits.shm_free_bytes is None else f"{limits.shm_free_bytes >> 20} MiB free"
    lines.append(("shared", f"/dev/shm {shm} (not needed here), locked memory {locked}"))
    lines += _node_lines(info)
    scope = "not set" if limits.ptrace_scope is None else str(limits.ptrace_scope)
    allowed = "allowed" if limits.reads_memory else "refused"
    seccomp = ", under a seccomp filter" if limits.seccomp else ""
    lines.append(("ptrace", f"process_vm_readv {allowed}, kernel.yama.ptrace_scope {scope}{seccomp}"))
    return lines


def _node_lines(info: Info) -> list[tuple[str, str]]:
    if len(info.nodes) < 2:
        return [("NUMA", "one node" if info.nodes else "the kernel tells of no nodes")]
    lines: list[tuple[str, str]] = []
    for node in info.nodes:
        runs = [str(first) if first == last else f"{first}-{last}" for first, last in node.cpus]
        cpus = f"CPUs {','.join(runs)}" if runs else "no CPUs"
        distances = f", distances {' '.join(map(str, node.distances))}" if node.distances else ""
        lines.append(("" if lines else "NUMA", f"node {node.number}: {cpus}{distances}"))
    if info.home is None:
        return [*lines, ("", "a rank that runs where this process may is on no one of them")]
    number, refused = info.home
    memory = "and so is the memory that others write to for it" if refused is None else f"but not its memory: {refused}"
    return [*lines, ("", f"a rank that runs where this process may is on node {number}, {memory}")]


def _world_lines(world: World) -> list[tuple[str, str]]:
    lines = [("world", f"{world.ranks} ranks on {world.hosts} {'host' if world.hosts == 1 else 'hosts'} would take")]
    lines += [("", f"{where}: {how}") for where, how in world.transports.items()]
    lines += [("", f"gets of windows {where}: {how}") for where, how in world.gets.items()]
    for collective, chosen in world.algorithms.items():
        parts = [name if least == 0 else f"{name} from {size_text(least)}" for least, name in chosen]
        lines.append(("", f"{collective}: {', '.join(parts)}"))
    return lines


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(prog="ncclx-rs info", description=__doc__.split("\n")[0])
    made.add_argument("--json", action="store_true", help="prints one JSON object")
    made.add_argument("--ranks", type=int, default=8, help="the ranks of the world that is spoken of (8)")
    made.add_argument("--hosts", type=int, default=1, help="its hosts (1)")
    return made


def execute(options: argparse.Namespace, made: argparse.ArgumentParser) -> int:
    """Prints what is here; returns the exit code."""
    if not 0 < options.hosts <= options.ranks:
        made.error(f"--hosts: expected 1 to --ranks, which is {options.ranks}, got {options.hosts}")
    if (wrong := _host.wrong_setting()) is not None:
        made.error(wrong)
    info = gather(options.ranks, options.hosts)
    print(json.dumps(asdict(info), indent=2) if options.json else text(info))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: The command line after the command; that of the process if not given.

    Returns:
        The exit code.
    """
    made = parser()
    return execute(made.parse_args(arguments), made)


if __name__ == "__main__":
    sys.exit(main())
