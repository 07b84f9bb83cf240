"""Addresses: two network namespaces act as two hosts, connected by one virtual cable."""

from __future__ import annotations

import ctypes
import functools
import ipaddress
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, World, connected_store, lacking, leaving_together
from reference import assert_same, data, operation, reduced

PORT = 29_611
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18

V4 = ("10.213.7.1/24", "10.213.7.2/24")
V6 = ("fd13:7::1/64", "fd13:7::2/64")


@dataclass(frozen=True)
class Host:
    """Moves a worker to one of the pretended hosts before its first run. It still reaches the tests' store."""

    namespaces: tuple[str, ...]
    hosts_file: str | None = None

    def __call__(self, rank: int) -> None:
        connected_store()
        libc = ctypes.CDLL(None, use_errno=True)

        def must(result: int, what: str) -> None:
            if result != 0:
                raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")

        with open(f"/run/netns/{self.namespaces[rank % len(self.namespaces)]}") as namespace:
            must(libc.setns(namespace.fileno(), CLONE_NEWNET), "setns")
        if self.hosts_file is not None:
            must(libc.unshare(CLONE_NEWNS), "unshare")
            must(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount private")
            must(libc.mount(self.hosts_file.encode(), b"/etc/hosts", None, MS_BIND, None), "bind /etc/hosts")


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def bring_up(interface: str, namespaces: Sequence[str]) -> None:
    """Sets an interface up in each namespace, and waits until the kernel reports all as up, which can take a second."""
    for name in namespaces:
        ip("-n", name, "link", "set", interface, "up")
    while not all("state UP" in ip("-n", name, "link", "show", interface) for name in namespaces):
        time.sleep(0.01)


def add_dead_end(namespace: str, interface: str, address: str) -> None:
    """Adds an interface that is up, has an address, and reaches no host."""
    ip("-n", namespace, "link", "add", interface, "type", "veth", "peer", "name", f"{interface}x")
    ip("-n", namespace, "link", "set", f"{interface}x", "up")
    ip("-n", namespace, "link", "set", interface, "up")
    ip("-n", namespace, "addr", "add", address, "dev", interface)


@contextmanager
def hosts(letters: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Makes a namespace for each letter or name, without connections."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        lacking("network namespaces need root and the ip command")
    names = tuple(f"ncclxrs{os.getpid()}{letter}" for letter in letters)
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as refusal:
            lacking(f"no network namespaces here: {refusal.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def connect(wire: str, names: tuple[str, str], *addresses: tuple[str, str]) -> None:
    """Connects two namespaces by interfaces of that name with the given pairs of addresses."""
    ip("link", "add", wire, "netns", names[0], "type", "veth", "peer", "name", wire, "netns", names[1])
    bring_up(wire, names)
    for pair in addresses:
        for name, address in zip(names, pair, strict=True):
            ip("-n", name, "addr", "add", address, "dev", wire, *(["nodad"] if ":" in address else []))


@contextmanager
def two_hosts(*addresses: tuple[str, str]) -> Iterator[tuple[str, ...]]:
    """Two namespaces whose `wire0` interfaces are connected and have the given pairs of addresses."""
    with hosts("ab") as names:
        connect("wire0", (names[0], names[1]), *addresses)
        yield names


def collectives_cross_the_wire(rank: int, size: int, master: str) -> None:
    method = f"tcp://[{master}]:{PORT}" if ":" in master else f"tcp://{master}:{PORT}"
    dist.init_process_group(BACKEND, init_method=method, rank=rank, world_size=size)
    for count in (1, 100_000):
        tensor = data(rank, count)
        dist.all_reduce(tensor)
        assert_same(tensor, reduced([data(r, count) for r in range(size)]), f"all_reduce of {count}")
    dist.barrier()


def moved(collective: str, rank: int, size: int, count: int, group: dist.ProcessGroup) -> list[tuple[str, Any, Any]]:
    """Runs a collective on float64; returns what was run, what came of it and what should have."""
    inputs = [data(r, size * count, dtype=torch.float64) for r in range(size)]
    blocks = [block.reshape(size, count) for block in inputs]
    mine, own, root = inputs[rank], blocks[rank][0].clone(), size - 1
    done = []
    if collective in ("all_reduce", "reduce", "reduce_scatter"):
        for op in ("SUM", "AVG", "MAX"):
            expected = reduced(inputs, op)
            if collective == "reduce_scatter":
                output = mine.new_empty(count)
                dist.reduce_scatter_tensor(output, mine, operation(op), group=group)
                expected = expected.reshape(size, count)[rank]
            else:
                output = mine.clone()
                if collective == "all_reduce":
                    dist.all_reduce(output, operation(op), group=group)
                else:
                    dist.reduce(output, root, operation(op), group=group)
            if collective != "reduce" or rank == root:
                done.append((op, output, expected))
        return done
    first = torch.cat([block[0] for block in blocks])
    if collective == "all_gather":
        output, expected = torch.empty_like(first), first
        dist.all_gather_into_tensor(output, own, group=group)
    elif collective == "all_to_all":
        output, expected = torch.empty_like(mine), torch.cat([block[rank] for block in blocks])
        dist.all_to_all_single(output, mine, group=group)
    elif collective == "broadcast":
        output, expected = mine.clone(), inputs[root]
        dist.broadcast(output, root, group=group)
    elif collective == "gather":
        parts = [torch.empty_like(own) for _ in range(size)] if rank == root else None
        dist.gather(own, parts, root, group=group)
        output, expected = (torch.cat(parts), first) if parts else (own, own)
    else:
        output, expected = torch.empty_like(own), blocks[root][rank]
        dist.scatter(output, list(blocks[root].unbind()) if rank == root else None, root, group=group)
    return [("", output, expected)]


COLLECTIVES = ("all_reduce", "reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "gather", "scatter")


def algorithms_cross_the_wire(rank: int, size: int, master: str) -> dict[str, list[str]]:
    """Runs each algorithm of each collective, with messages of up to a mebibyte; returns their names."""
    dist.init_process_group(BACKEND, init_method=f"tcp://{master}:{PORT}", rank=rank, world_size=size)
    known = {collective: ncclx_rs._native.algorithms(collective, size, 2) for collective in COLLECTIVES}
    for name in sorted({name for names in known.values() for name in names}):
        options = ncclx_rs.Options(hints={"algorithm": name})
        group = dist.new_group(backend="ncclx_rs", pg_options=options)
        for collective in (collective for collective, names in known.items() if name in names):
            for count in (0, 1, 1003, (1 << 20) // 8 // size):
                for op, output, expected in moved(collective, rank, size, count, group):
                    assert_same(output, expected, f"{name}: {collective} {op} of {count}")
        dist.destroy_process_group(group)
    dist.barrier()
    return known


def failure_to_join(rank: int, size: int, master: str) -> str:
    # Rank 0 serves the store, from which the other rank gets rank 0's host.
    with pytest.raises((ValueError, RuntimeError)) as refused, leaving_together():
        collectives_cross_the_wire(rank, size, master)
    return str(refused.value)


def addresses_of_connections(rank: int, size: int, master: str) -> list[str]:
    """The distinct remote addresses that this rank's TCP sockets are connected to."""
    collectives_cross_the_wire(rank, size, master)
    remotes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(descriptor))) as duplicate:
                if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type & socket.SOCK_STREAM:
                    remotes.add(duplicate.getpeername()[0])
        except OSError:
            continue  # not a socket, not connected, or gone already
    dist.barrier()
    return sorted(remotes)


def run_on_two_hosts(
    function,
    namespaces: tuple[str, ...],
    master: str,
    size: int = 2,
    hosts: Path | None = None,
    mode: str = "tcp",
    **variables: str,
) -> list:
    if BACKEND == "gloo":  # gloo takes the address of the host name unless the interface is given
        variables = {"GLOO_SOCKET_IFNAME": "wire0"} | variables
    world = World(size, mode, variables, Host(namespaces, str(hosts) if hosts else None))
    try:
        return world.run(function, master, join=False)
    finally:
        world.close()


@functools.cache
def master(addresses: tuple[str, str]) -> str:
    return str(ipaddress.ip_interface(addresses[0]).ip)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_of_two_hosts_meet(size: int) -> None:
    with two_hosts(V4) as namespaces:
        run_on_two_hosts(collectives_cross_the_wire, namespaces, master(V4), size)


@pytest.mark.skipif(BACKEND != "ncclx_rs", reason="only the engine has algorithms to choose from")
@pytest.mark.parametrize("size", [2, 3, 5, 9, 17])
def test_every_algorithm_runs_between_hosts_and_within_them(size: int) -> None:
    with two_hosts(V4) as namespaces:
        known = run_on_two_hosts(algorithms_cross_the_wire, namespaces, master(V4), size=size, mode="auto")
    assert ("hierarchical" in known[0]["all_reduce"]) == (size > 2) and all(others == known[0] for others in known)


@pytest.mark.parametrize("loopback", ["127.0.0.1", "127.0.1.1"])
def test_hostname_that_resolves_to_loopback_is_not_advertised(loopback: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{loopback} {socket.gethostname()}\n")
    with two_hosts(V4) as namespaces:
        remotes = run_on_two_hosts(addresses_of_connections, namespaces, master(V4), hosts=hosts, GLOO_SOCKET_IFNAME="")
    assert "10.213.7.2" in remotes[0] and "10.213.7.1" in remotes[1], remotes


def addresses_of_handles(rank: int, size: int, master: str) -> list[str]:
    from ncclx_rs._reconfigure import _address

    found = []
    for known in ({"MASTER_ADDR": master}, {}, {"MASTER_ADDR": "localhost"}):
        os.environ.pop("MASTER_ADDR", None)
        os.environ.update(known)
        found.append(_address.__wrapped__())
    return found


@pytest.mark.skipif(BACKEND != "ncclx_rs", reason="gloo has no handles")
@pytest.mark.parametrize("loopback", ["127.0.0.1", "127.0.1.1"])
def test_handles_lead_to_their_host_though_its_name_resolves_to_loopback(loopback: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{loopback} {socket.gethostname()}\n")
    with two_hosts(V4) as namespaces:
        for name in namespaces:
            ip("-n", name, "route", "add", "default", "dev", "wire0")
        found = run_on_two_hosts(addresses_of_handles, namespaces, master(V4), hosts=hosts)
    for own, (by_master, without, on_one_host) in zip(["10.213.7.1", "10.213.7.2"], found, strict=True):
        assert (by_master, without, on_one_host) == (own, own, "127.0.0.1")


def test_hostname_without_address_does_not_matter(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    with two_hosts(V4) as namespaces:
        run_on_two_hosts(collectives_cross_the_wire, namespaces, master(V4), hosts=hosts)


def test_hosts_with_ipv6_only_meet() -> None:
    with two_hosts(V6) as namespaces:
        run_on_two_hosts(collectives_cross_the_wire, namespaces, master(V6))


@pytest.mark.parametrize("choice", ["wire0", "wire", "^lo,dead0", "10.213.7.0/24", "wire0,lo"])
def test_interfaces_are_chosen_by_name_or_network(choice: str) -> None:
    with two_hosts(V4) as namespaces:
        for name, number in zip(namespaces, "12", strict=True):
            add_dead_end(name, "dead0", f"10.213.{number}00.1/24")
        run_on_two_hosts(collectives_cross_the_wire, namespaces, master(V4), NCCLX_RS_SOCKET_IFNAME=choice)


def test_interface_is_chosen_by_ipv6_network() -> None:
    with two_hosts(V4, V6) as namespaces:
        remotes = run_on_two_hosts(
            addresses_of_connections, namespaces, master(V4), NCCLX_RS_SOCKET_IFNAME="fd13:7::/64"
        )
    assert "fd13:7::2" in remotes[0] and "fd13:7::1" in remotes[1], remotes


def test_unknown_interface_is_named() -> None:
    with two_hosts(V4) as namespaces:
        messages = run_on_two_hosts(
            failure_to_join, namespaces, master(V4), NCCLX_RS_SOCKET_IFNAME="nosuch7", GLOO_SOCKET_IFNAME="nosuch7"
        )
    assert all("nosuch7" in message for message in messages), messages


def test_addresses_that_lead_nowhere_are_not_the_only_ones_tried() -> None:
    with two_hosts(V4) as namespaces:
        for name in namespaces:
            # The same address on both sides, as with container bridges: a rank that connects to it reaches itself.
            add_dead_end(name, "bridge0", "10.0.17.1/16")
        run_on_two_hosts(collectives_cross_the_wire, namespaces, master(V4))
