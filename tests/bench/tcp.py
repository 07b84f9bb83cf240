"""Lays the engine's TCP beside iperf3 and a bare ping-pong, between two network namespaces, in one run.

    cargo build --release --example bench
    sudo python tests/bench/tcp.py

Makes two namespaces with a pair of virtual interfaces between them, and removes them in the end; hence it needs root,
`ip` and iperf3. The engine and `tcp.c`, which has blocking sockets and nothing else, do what `mpi.py` describes:
ping-pongs, and long messages one after the other in one direction. iperf3 sends one stream for a second a round. Rounds
alternate. The ratio of latencies is the bare ping-pong's time by the engine's, that of bandwidths the engine's by
iperf3's: above 1, the engine is better.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from mpi import ENGINE, HERE, Contender, Measured, measure, ratios
from spread import spread

BARE = "bare"
NAMESPACES = (f"ncclx_rs-{os.getpid()}-0", f"ncclx_rs-{os.getpid()}-1")
# From a network kept for benchmarks, RFC 2544.
ADDRESSES = ("198.18.0.1", "198.18.0.2")
PORTS = {ENGINE: 29500, BARE: 29501}
LONG = 16 << 20


def inside(rank: int) -> list[str]:
    """What stands before a command that runs where a rank is."""
    return ["ip", "netns", "exec", NAMESPACES[rank]]


@contextlib.contextmanager
def namespaces() -> Iterator[None]:
    """Two network namespaces that see each other and nobody else."""
    try:
        for name in NAMESPACES:
            subprocess.run(["ip", "netns", "add", name], check=True)
        ends = [("name", "eth0", "netns", name) for name in NAMESPACES]
        subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]], check=True)
        for rank, address in enumerate(ADDRESSES):
            subprocess.run([*inside(rank), "ip", "address", "add", f"{address}/24", "dev", "eth0"], check=True)
            subprocess.run([*inside(rank), "ip", "link", "set", "eth0", "up"], check=True)
            subprocess.run([*inside(rank), "ip", "link", "set", "lo", "up"], check=True)
        for rank in range(2):
            # The kernel takes up to a second to notice that the other end is there.
            state = [*inside(rank), "ip", "link", "show", "eth0"]
            while "state UP" not in subprocess.run(state, check=True, capture_output=True, text=True).stdout:
                time.sleep(0.05)
        yield
    finally:
        for name in NAMESPACES:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def engine(program: Path) -> Contender:
    """The engine's two ranks."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORTS[ENGINE])}
    commands = [([*inside(rank), str(program), "--serve"], place | {"RANK": str(rank)}) for rank in range(2)]
    return Contender(ENGINE, commands, 2)


def bare(builds: Path) -> Contender:
    """The two ranks of the bare ping-pong."""
    program = builds / "tcp"
    subprocess.run(["cc", "-O2", "-std=gnu11", str(HERE / "tcp.c"), "-o", str(program)], check=True)
    words = [ADDRESSES[0], str(PORTS[BARE])]
    return Contender(BARE, [([*inside(rank), str(program), str(rank), *words], {}) for rank in range(2)], 2)


def iperf(seconds: float) -> float:
    """Bytes a microsecond of one stream."""
    server = subprocess.Popen([*inside(0), "iperf3", "--server", "--one-off"], stdout=subprocess.DEVNULL)
    try:
        command = ["iperf3", "--client", ADDRESSES[0], "--time", str(seconds), "--json", "--connect-timeout", "1000"]
        for _ in range(50):
            run = subprocess.run([*inside(1), *command], capture_output=True, text=True, check=False)
            told = json.loads(run.stdout)
            if "error" not in told:
                return float(told["end"]["sum_received"]["bits_per_second"]) / 8e6
        raise SystemExit(f"iperf3 failed: {told['error']}")
    finally:
        server.kill()
        server.wait()


def latencies(contenders: list[Contender], sizes: list[int], rounds: int) -> None:
    print(f"{'bytes':>10}{ENGINE + ' us':>14}{BARE + ' us':>12}   ratio [p10, p90]")
    for size in sizes:
        rows = measure(contenders, "PingPong", size, rounds, 20.0)
        times = [statistics.median(rows[name].times()) for name in (ENGINE, BARE)]
        middle, low, high = ratios(rows[BARE], rows[ENGINE])
        print(f"{size:>10}{times[0]:>14.2f}{times[1]:>12.2f}   {middle:.2f} [{low:.2f}, {high:.2f}]", flush=True)


def bandwidths(contenders: list[Contender], rounds: int, calls: int) -> None:
    ways = Measured(calls), Measured(calls)
    reference: list[float] = []
    for contender in contenders:
        contender.turn("Uniband", LONG, 5)
    for _ in range(rounds):
        turns = [*zip(contenders, ways, strict=True), None]
        random.shuffle(turns)
        for turn in turns:
            if turn is None:
                reference.append(iperf(1.0))
            else:
                turn[1].rounds.append(turn[0].turn("Uniband", LONG, calls))
    print(f"\n{LONG} bytes: GB/s a direction; ratio to iperf3 [p10, p90]")
    print(f"{'iperf3':>10} {statistics.median(reference) / 1e3:8.3f}")
    for contender, measured in zip(contenders, ways, strict=True):
        rates = [LONG / time for time in measured.times()]
        against = [rate / other for rate, other in zip(rates, reference, strict=True)]
        print(f"{contender.name:>10} {statistics.median(rates) / 1e3:8.3f}   {spread(against)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=HERE.parents[1] / "target/release/examples/bench")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=30, help="long messages in a round")
    parser.add_argument("--pin", action="store_true", help="give each rank a core of its own")
    arguments = parser.parse_args()
    with namespaces(), tempfile.TemporaryDirectory() as builds:
        contenders = [engine(arguments.program.resolve()), bare(Path(builds))]
        try:
            for contender in contenders if arguments.pin else []:
                contender.pin()
            latencies(contenders, [4, 64, 1024, 4096, 16384], arguments.rounds)
            bandwidths(contenders, arguments.rounds, arguments.calls)
        finally:
            for contender in contenders:
                contender.close()


if __name__ == "__main__":
    main()
