"""Hosts that are far apart: network namespaces between which a thread carries packets at a given pace."""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import math
import os
import select
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from harness import lacking
from test_network import CLONE_NEWNET, hosts, ip

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 9000
# Of IPv4: where a packet's header has the last byte of the destination's address.
DESTINATION = 19


@dataclass
class Way:
    """What packets between hosts take, in seconds: to get there, and more for each byte. It may change meanwhile."""

    latency: float
    gap_per_byte: float = 0.0


def address(host: int) -> str:
    """The address of a host of `far_apart`."""
    return f"10.213.8.{host + 1}"


def tunnel(namespace: str, host: int) -> int:
    """Makes a network interface in the namespace whose packets this process reads and writes."""
    made: list[int] = []

    def enter() -> None:
        # A thread of its own stays in the namespace.
        try:
            with open(f"/run/netns/{namespace}") as other:
                ctypes.CDLL(None).setns(other.fileno(), CLONE_NEWNET)
            descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", b"wire0", IFF_TUN | IFF_NO_PI))
            made.append(descriptor)
        except OSError:
            pass

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if not made:
        lacking("this kernel has no tunnels")
    ip("-n", namespace, "addr", "add", f"{address(host)}/24", "dev", "wire0")
    ip("-n", namespace, "link", "set", "wire0", "mtu", str(MTU), "txqueuelen", "100000", "up")
    # Nothing gets lost, so that nothing is to be sent twice because it waits in a queue.
    ip("-n", namespace, "route", "change", "10.213.8.0/24", "dev", "wire0", "rto_min", "10s")
    return made[0]


def carry(ends: list[int], way: Way, stopped: threading.Event) -> None:
    """Takes packets from one of the interfaces to another, and loses none.

    An interface sends one packet at a time, while it receives one, for the way's gap a byte each. In between they are
    under way for its latency.
    """
    # Whoever waits for a packet is to wait for the way, and not for this thread among all that run here.
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -20)
    sent, received = [0.0] * len(ends), [0.0] * len(ends)
    number = itertools.count()
    # When the first byte is there, and then when the last one is.
    arriving: list[tuple[float, int, bytes]] = []
    arrived: list[tuple[float, int, bytes]] = []
    while not stopped.is_set():
        due = min((queue[0][0] for queue in (arriving, arrived) if queue), default=math.inf) - time.monotonic()
        for end in select.select(ends, [], [], max(0, min(due, 0.1)))[0]:
            here, now = ends.index(end), time.monotonic()
            for packet in packets(end):
                if packet[0] >> 4 != 4:  # the kernel looks for neighbours by IPv6
                    continue
                begin = max(sent[here], now)
                sent[here] = begin + len(packet) * way.gap_per_byte
                heapq.heappush(arriving, (begin + way.latency, next(number), packet))
        now = time.monotonic()
        while arriving and arriving[0][0] <= now:
            begin, order, packet = heapq.heappop(arriving)
            there = packet[DESTINATION] - 1
            received[there] = max(received[there], begin) + len(packet) * way.gap_per_byte
            heapq.heappush(arrived, (received[there], order, packet))
        while arrived and arrived[0][0] <= now:
            packet = heapq.heappop(arrived)[2]
            os.write(ends[packet[DESTINATION] - 1], packet)


def packets(end: int) -> Iterator[bytes]:
    """What waits at an interface now, at most as much as leaves time for the others."""
    for _ in range(64):
        try:
            yield os.read(end, MTU)
        except BlockingIOError:
            return


def set_tcp(namespaces: Sequence[str], **settings: str) -> None:
    """Settings of TCP for what is opened in these namespaces from now on (tcp(7))."""
    for name in namespaces:
        for setting, value in settings.items():
            ip("netns", "exec", name, "sh", "-c", f"echo {value} >/proc/sys/net/ipv4/tcp_{setting}")


@contextmanager
def far_apart(count: int, way: Way) -> Iterator[tuple[str, ...]]:
    """So many hosts, whose packets to each other go that way."""
    with hosts([f"h{host}" for host in range(count)]) as names:
        ends = [tunnel(name, host) for host, name in enumerate(names)]
        stopped = threading.Event()
        carrier = threading.Thread(target=carry, args=(ends, way, stopped))
        carrier.start()
        try:
            yield names
        finally:
            stopped.set()
            carrier.join()
            for end in ends:
                os.close(end)
