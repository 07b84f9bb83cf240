"""Several connections to a peer, over several networks: two network namespaces act as hosts with two cables between them."""

from __future__ import annotations

import logging
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, World, lacking
from test_network import PORT, Host, connect, hosts

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="its own setting")

RAILS = (("10.213.8.1/24", "10.213.8.2/24"), ("10.213.9.1/24", "10.213.9.2/24"))
MASTER = "10.213.8.1"
LONG = 2 << 20


@contextmanager
def two_networks(rate: str) -> Iterator[tuple[str, ...]]:
    """Two hosts with two cables between them, each of which carries so much each way."""
    with hosts("ab") as names:
        for number, addresses in enumerate(RAILS):
            connect(f"wire{number}", (names[0], names[1]), addresses)
            limit = ("tbf", "rate", rate, "burst", "64k", "latency", "100ms")
            for name in names:
                command = ["tc", "-n", name, "qdisc", "add", "dev", f"wire{number}", "root", *limit]
                if subprocess.run(command, check=False).returncode != 0:
                    lacking("this kernel cannot shape traffic")
        yield names


def group(rank: int, size: int, streams: int) -> dist.ProcessGroup:
    """A group whose messages take so many connections; the default group is made first."""
    if not dist.is_initialized():
        dist.init_process_group(BACKEND, init_method=f"tcp://{MASTER}:{PORT}", rank=rank, world_size=size)
    return dist.new_group(backend=BACKEND, pg_options=ncclx_rs.Options(hints={"tcp_streams": str(streams)}))


def content(turn: int) -> torch.Tensor:
    return torch.arange(LONG, dtype=torch.int64).mul_(2654435761 + turn).bitwise_right_shift_(9).to(torch.uint8)


def send(rank: int, turn: int, over: dist.ProcessGroup) -> None:
    """Rank 0 sends a long message to rank 1, which checks every byte."""
    if rank == 0:
        dist.send(content(turn), 1, group=over)
        return
    received = torch.zeros(LONG, dtype=torch.uint8)
    dist.recv(received, 0, group=over)
    assert torch.equal(received, content(turn)), f"message {turn}"


def ratio_of_two_rails_to_one(rank: int, size: int) -> float:
    ways = [group(rank, size, streams) for streams in (1, 2)]
    message, ratios = torch.zeros(2 * LONG, dtype=torch.uint8), []
    for _ in range(5):
        times = []
        for way in ways:
            dist.barrier()
            begun = time.perf_counter()
            if rank == 0:
                dist.send(message, 1, group=way)
            else:
                dist.recv(message, 0, group=way)
            dist.barrier()
            times.append(time.perf_counter() - begun)
        ratios.append(times[0] / times[1])
    dist.barrier()
    # The first messages fill buckets and open connections.
    return statistics.median(ratios[1:])


def run(function, names: tuple[str, ...], *args, **variables: str) -> list:
    world = World(2, "tcp", {"NCCLX_RS_SOCKET_IFNAME": "wire"} | variables, Host(names))
    try:
        return world.run(function, *args, join=False)
    finally:
        world.close()


def test_two_networks_carry_almost_twice_as_much_as_one() -> None:
    with two_networks("50mbit") as names:
        ratios = run(ratio_of_two_rails_to_one, names)
    assert min(ratios) >= 1.8, ratios


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def lose_a_network(rank: int, size: int, loser: int) -> list[str]:
    """Sends long messages, in the midst of which a cable comes off at the rank `loser`; returns what was logged."""
    kept = Kept()
    logging.getLogger("ncclx_rs").addHandler(kept)
    way = group(rank, size, 2)
    for turn in range(12):
        if turn == 4 and rank == loser:
            # In the midst of a message, which takes a tenth of a second.
            subprocess.Popen(["sh", "-c", "sleep 0.03; exec ip link set wire1 down"])
        send(rank, turn, way)
    flows = torch.ones(50_000)
    for _ in range(20):
        dist.all_reduce(flows, group=way)
    assert torch.equal(flows, torch.full((50_000,), 2.0**20))
    dist.barrier(group=way)
    return kept.lines


@pytest.mark.parametrize("loser", [0, 1])
@pytest.mark.parametrize("tls", ["off", "on"])
def test_a_message_arrives_though_one_network_breaks(loser: int, tls: str) -> None:
    with two_networks("200mbit") as names:
        lines = run(lose_a_network, names, loser, NCCLX_RS_TLS=tls, NCCLX_RS_LOG="warn")
    # Rank 1 need not notice: its short messages take the first rail.
    lost = [line for line in lines[0] if "go on without it" in line]
    assert len(lost) == 1, lines
    assert "of the connections to rank 1, rail 2 of 2 (wire1, 10.213.9.1 to 10.213.9.2:" in lost[0], lost


def leave(rank: int, size: int) -> None:
    """A rank that leaves ends all rails, which is not worth a warning."""
    kept = Kept()
    logging.getLogger("ncclx_rs").addHandler(kept)
    way = group(rank, size, 4)
    for turn in range(2):
        send(rank, turn, way)
    dist.barrier(group=way)
    if rank == 0:
        dist.destroy_process_group(way)
    time.sleep(1)
    if rank == 1:
        dist.destroy_process_group(way)
    assert not [line for line in kept.lines if "rail" in line], kept.lines
    dist.barrier()


def test_a_rank_that_leaves_is_not_taken_for_a_broken_rail() -> None:
    with two_networks("2gbit") as names:
        run(leave, names, NCCLX_RS_LOG="warn")


def different_settings(rank: int, size: int) -> None:
    dist.init_process_group(BACKEND, init_method=f"tcp://{MASTER}:{PORT}", rank=rank, world_size=size)
    way = dist.new_group(backend=BACKEND, pg_options=ncclx_rs.Options(hints={"tcp_streams": "41"[rank]}))
    send(rank, 3, way)
    dist.barrier(group=way)


def test_of_different_settings_the_smaller_counts() -> None:
    with two_networks("2gbit") as names:
        run(different_settings, names)
