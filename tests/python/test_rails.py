"""Several connections to a peer, over several networks: two network namespaces are hosts with cables between them."""

from __future__ import annotations

import json
import logging
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from distance import Way, far_apart, set_tcp
from harness import BACKEND, World, lacking
from test_network import PORT, Host, connect, hosts, ip

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
            limit = ("tbf", "rate", rate, "burst", "32k", "latency", "50ms")
            for name in names:
                command = ["tc", "-n", name, "qdisc", "add", "dev", f"wire{number}", "root", *limit]
                if subprocess.run(command, check=False).returncode != 0:
                    lacking("this kernel cannot shape traffic")
        yield names


def group(rank: int, size: int, streams: int, **hints: str) -> dist.ProcessGroup:
    """A group whose messages take so many connections; the default group is made first."""
    if not dist.is_initialized():
        dist.init_process_group(BACKEND, init_method=f"tcp://{MASTER}:{PORT}", rank=rank, world_size=size)
    return dist.new_group(backend=BACKEND, pg_options=ncclx_rs.Options(hints={"tcp_streams": str(streams)} | hints))


def content(turn: int, length: int = LONG) -> torch.Tensor:
    return torch.arange(length, dtype=torch.int64).mul_(2654435761 + turn).bitwise_right_shift_(9).to(torch.uint8)


def send(rank: int, turn: int, over: dist.ProcessGroup, length: int = LONG) -> None:
    """Rank 0 sends a long message to rank 1, which checks every byte."""
    if rank == 0:
        dist.send(content(turn, length), 1, group=over)
        return
    received = torch.zeros(length, dtype=torch.uint8)
    dist.recv(received, 0, group=over)
    assert torch.equal(received, content(turn, length)), f"message {turn}"


def ratio_to_one_connection(rank: int, size: int, streams: int, length: int, turns: int) -> float:
    """How many times as long a message takes over one connection as over several, by turns."""
    ways = [group(rank, size, number) for number in (1, streams)]
    message, ratios = torch.zeros(length, dtype=torch.uint8), []
    for way in ways:
        # Opens the connections.
        send(rank, 0, way, 300_000)
    for _ in range(turns):
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
    return statistics.median(ratios)


def run(function, names: tuple[str, ...], *args, **variables: str) -> list:
    world = World(2, "tcp", {"NCCLX_RS_SOCKET_IFNAME": "wire"} | variables, Host(names))
    try:
        return world.run(function, *args, join=False)
    finally:
        world.close()


def test_two_networks_carry_almost_twice_as_much_as_one() -> None:
    # So slow that what else the machine does counts for little.
    with two_networks("10mbit") as names:
        ratios = run(ratio_to_one_connection, names, 2, 3 * LONG, 3)
    assert min(ratios) >= 1.8, ratios


def test_over_a_long_distance_four_connections_carry_more_than_twice_as_much_as_one() -> None:
    with far_apart(2, Way(0.04)) as names:
        # At most 64 KiB under way on each connection.
        set_tcp(names, rmem="4096 65536 65536")
        ratios = run(ratio_to_one_connection, names, 4, LONG, 3)
    assert min(ratios) > 2, ratios


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def kept() -> Kept:
    """What this process logs from now on."""
    handler = Kept()
    logging.getLogger("ncclx_rs").addHandler(handler)
    logging.getLogger("ncclx_rs").setLevel(logging.DEBUG)
    return handler


def lose_a_network(rank: int, size: int, loser: int, moment: str) -> list[str]:
    """Sends long messages, and a cable comes off at a rank; returns what was logged of the stream."""
    log = kept()
    way = group(rank, size, 2)
    for turn in range(12):
        if turn == 4 and moment == "between messages":
            # Nothing is under way.
            time.sleep(0.5)
            if rank == loser:
                ip("link", "set", "wire1", "down")
            dist.barrier()
        elif turn == 4 and rank == loser:
            # In the midst of a message, which takes a tenth of a second.
            subprocess.Popen(["sh", "-c", "sleep 0.03; exec ip link set wire1 down"])
        send(rank, turn, way)
    stream = ("of the connections to rank 1", "of the connections from rank 0")[rank]
    while True:
        flows = torch.ones(50_000)
        for _ in range(20):
            dist.all_reduce(flows, group=way)
        assert torch.equal(flows, torch.full((50_000,), 2.0**20))
        # The loss is noticed by what is sent; the cable may have come off late.
        lines = [line for line in log.lines if stream in line]
        heard = torch.tensor([int(bool(lines))])
        dist.all_reduce(heard, dist.ReduceOp.MIN)
        if heard.item():
            break
    dist.barrier()
    return lines


@pytest.mark.parametrize("loser", [0, 1])
@pytest.mark.parametrize("moment", ["within a message", "between messages"])
@pytest.mark.parametrize("tls", ["off", "on"])
def test_a_message_arrives_though_one_network_breaks(loser: int, moment: str, tls: str) -> None:
    with two_networks("200mbit") as names:
        sender, receiver = run(lose_a_network, names, loser, moment, NCCLX_RS_TLS=tls, NCCLX_RS_LOG="warn")
    assert [len(sender), len(receiver)] == [1, 1], (sender, receiver)
    rail = "connections to rank 1, rail 2 of 2 (wire1, 10.213.9.1 to 10.213.9.2:"
    assert rail in sender[0] and sender[0].endswith("; 1 go on without it"), sender
    rail = "connections from rank 0, rail 2 of 2 (wire1, 10.213.9.2 from 10.213.9.1:"
    assert rail in receiver[0] and "the other end has given it up; 1 go on without it" in receiver[0], receiver


def carried() -> int:
    """How many bytes this host has sent over the second cable."""
    [interface] = json.loads(ip("-s", "-j", "link", "show", "dev", "wire1"))
    return int(interface["stats64"]["tx"]["bytes"])


def counts(folder: str) -> dict[str, int]:
    """What this rank tells of its connections to the other, in the one communicator that has several."""
    ncclx_rs.dump(folder)
    dumps = [json.loads(file.read_text()) for file in Path(folder).iterdir()]
    rails: dict[str, int]
    [rails] = [peer["rails"] for dump in dumps for peer in dump["peers"] if peer["rails"]]
    return rails


def lose_a_network_for_a_while(rank: int, size: int, loser: int, times: int) -> tuple[int, dict[str, int]]:
    """A cable comes off at a rank and is plugged in again, more than once; returns what went over it after that."""
    log = kept()
    way = group(rank, size, 2)
    stream = ("of the connections to rank 1, rail 2 of 2", "of the connections from rank 0, rail 2 of 2")[rank]
    # Both rails are open.
    send(rank, 0, way)
    turn = 1
    for time_lost in range(1, times + 1):
        for state, word in (("down", " has failed: "), ("up", " is back; 2 work now")):
            dist.barrier()
            if rank == loser:
                ip("link", "set", "wire1", state)
            dist.barrier()
            # While the stream is used: nobody takes a connection in at a rank that does nothing.
            while True:
                send(rank, turn, way)
                turn += 1
                heard = len([line for line in log.lines if stream in line and word in line]) >= time_lost
                all_heard = torch.tensor(int(heard))
                dist.all_reduce(all_heard, dist.ReduceOp.MIN)
                if all_heard:
                    break
                time.sleep(0.1)
    dist.barrier()
    before = carried()
    for _ in range(6):
        send(rank, turn, way)
        turn += 1
    dist.barrier()
    over = carried() - before
    with tempfile.TemporaryDirectory() as folder:
        found = counts(folder) if rank == 0 else {}
    dist.barrier()
    return over, found


@pytest.mark.parametrize("loser", [0, 1])
@pytest.mark.parametrize("tls", ["off", "on"])
def test_a_network_that_comes_back_is_used_again(loser: int, tls: str) -> None:
    with two_networks("200mbit") as names:
        sender, _ = run(lose_a_network_for_a_while, names, loser, 2, NCCLX_RS_TLS=tls, NCCLX_RS_LOG="warn")
    over, rails = sender
    assert over > LONG, sender
    assert rails == {"rails": 2, "working": 2, "dropped": 2, "reopened": 2}, rails


def leave(rank: int, size: int) -> None:
    """A rank that leaves ends all rails, which is not worth a warning."""
    log = kept()
    way = group(rank, size, 4)
    for turn in range(2):
        send(rank, turn, way)
    dist.barrier(group=way)
    if rank == 0:
        dist.destroy_process_group(way)
    time.sleep(1)
    if rank == 1:
        dist.destroy_process_group(way)
    assert not [line for line in log.lines if "rail" in line], log.lines
    dist.barrier()


def test_a_rank_that_leaves_is_not_taken_for_a_broken_rail() -> None:
    with two_networks("2gbit") as names:
        run(leave, names, NCCLX_RS_LOG="warn")


def different_settings(rank: int, size: int, streams: str, interfaces: tuple[str, str]) -> list[str]:
    """Sends with settings of each rank's own; returns the ways of the rails that it has opened."""
    log = kept()
    way = group(rank, size, int(streams[rank]), socket_ifname=interfaces[rank])
    send(rank, 3, way)
    dist.barrier(group=way)
    found = [re.fullmatch(r"rank \d: rail \d to rank \d: (.*):\d+", line) for line in log.lines]
    return sorted(line[1] for line in found if line)


@pytest.mark.parametrize(
    ("streams", "interfaces", "rails"),
    [("41", ("wire", "wire"), 0), ("42", ("wire", "wire0"), 2), ("33", ("wire0", "wire"), 3)],
)
def test_ranks_with_different_settings_agree(streams: str, interfaces: tuple[str, str], rails: int) -> None:
    with two_networks("2gbit") as names:
        ways = run(different_settings, names, streams, interfaces, NCCLX_RS_LOG="debug")
    # The smaller number counts, and the network that both allow. One connection is opened as ever.
    assert ways == [["wire0, 10.213.8.1 to 10.213.8.2"] * rails, ["wire0, 10.213.8.2 to 10.213.8.1"] * rails]
