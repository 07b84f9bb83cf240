"""What a simulation says beside what is measured between hosts that are far apart: worlds of 2 to 64 ranks.

The way between the hosts takes so long that it counts little what else the machine does. That is measured too, by the
same collectives over a way that takes no time, and left out: some machines take 0.1 ms to wake a thread.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distance import Way, address, far_apart, set_tcp
from harness import BACKEND, World
from ncclx_rs.bench import simulate
from test_network import PORT, Host

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from spread import spread  # noqa: E402  # tests/bench is no package

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="only the engine's schedules are simulated")

# What a message takes of the way besides its bytes: headers of the frame, of TCP and of IP, and the acknowledgement.
HEADERS = 150
SHORT, LONG = 4096, 1 << 18
ROUNDS = 3
# By which part the median of what is measured may differ from what is simulated.
TOLERANCE = 0.25

Case = tuple[str, int]


@dataclass(frozen=True)
class Posed(Host):
    """Also gives the host of each rank a name."""

    def __call__(self, rank: int) -> None:
        os.environ["NCCLX_RS_HOST_ID"] = self.namespaces[rank]
        super().__call__(rank)


def parameters(way: Way) -> dict[str, Any]:
    """Those of hosts of `far_apart`."""
    gap = HEADERS * way.gap_per_byte
    between = {"latency": way.latency, "overhead": 1e-5, "gap": gap, "gap_per_byte": way.gap_per_byte}
    within = {"latency": 1e-6, "overhead": 1e-6, "gap": 1e-7, "gap_per_byte": 1e-10}
    return {"version": 1, "within_host": within, "between_hosts": between, "reduce_per_byte": 1e-10}


def operations(size: int, length: int) -> dict[str, Callable[[], Any]]:
    """Collectives on so many bytes, as the simulation counts them."""
    whole, block = torch.zeros(length // 4), torch.zeros(length // 4 // size)
    mixed = torch.zeros_like(whole)
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, block),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(block, whole),
        "all_to_all": lambda: dist.all_to_all_single(mixed, whole),
    }


def measured(rank: int, size: int, pauses: dict[Case, float]) -> dict[Case, list[tuple[float, float]]]:
    """When this rank began each collective and when it had ended there, in seconds by the clock of the machine.

    Each begins so many seconds after the one before.
    """
    dist.init_process_group(BACKEND, init_method=f"tcp://{address(0)}:{PORT}", rank=rank, world_size=size)
    runs = {(name, length): run for length in (SHORT, LONG) for name, run in operations(size, length).items()}
    for case in pauses:
        runs[case]()  # opens the connections
    dist.barrier()
    # One clock serves all that are on one machine.
    begin = torch.tensor([time.monotonic() + 1], dtype=torch.float64)
    dist.broadcast(begin, 0)
    at, times = begin.item(), {case: list[tuple[float, float]]() for case in pauses}
    for case, pause in pauses.items():
        for _ in range(ROUNDS):
            time.sleep(max(0, at - time.monotonic()))
            begun = time.monotonic()
            runs[case]()
            times[case].append((begun, time.monotonic()))
            # What stops the machine for a while is to fall on one round.
            at += pause
    dist.barrier()
    dist.destroy_process_group()
    return times


def fastest(by_rank: Sequence[dict[Case, list[tuple[float, float]]]], case: Case) -> tuple[float, list[float]]:
    """The time of the fastest round, to which the machine's other work adds least, and those of all."""
    ranks_of_rounds = zip(*(times[case] for times in by_rank), strict=True)
    rounds = [max(end for _, end in ranks) - beginning(case[0], ranks) for ranks in ranks_of_rounds]
    return min(rounds), rounds


def beginning(collective: str, ranks: Sequence[tuple[float, float]]) -> float:
    """When a collective began of which the ranks tell when they have begun and ended.

    Where many ranks share a core, the last one is awake long after the first. A broadcast begins with its root. In
    others each rank needs something of the last one to begin.
    """
    return ranks[0][0] if collective == "broadcast" else max(begun for begun, _ in ranks)


@pytest.mark.alone
# More ranks share the machine's cores, so that what they compute is to count less.
@pytest.mark.parametrize(
    ("count", "ranks", "latency"), [(2, 1, 0.03), (4, 4, 0.04), (8, 8, 0.05)], ids=["2", "16", "64"]
)
def test_times_between_hosts_are_those_measured(
    count: int, ranks: int, latency: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size, way, file = count * ranks, Way(latency, latency / 40_000), tmp_path / "network.json"
    file.write_text(json.dumps(parameters(way)))
    words = ["--parameters", str(file), "--hosts", str(count), "--ranks-per-host", str(ranks), "--json"]
    assert simulate.main([*words, "--collectives", ",".join(operations(1, 4)), "--sizes", f"{SHORT},{LONG}"]) == 0
    told = json.loads(capsys.readouterr().out)["findings"]
    simulated = {(one["collective"], one["bytes"]): one["algorithms"][one["chosen"]]["seconds"] for one in told}
    with far_apart(count, way) as hosts:
        # What the way holds, there and back, is more than TCP has under way by default.
        set_tcp(hosts, rmem="4096 2097152 2097152", wmem="4096 2097152 2097152", slow_start_after_idle="0")
        posed = Posed(tuple(hosts[rank // ranks] for rank in range(size)))
        world = World(size, "shm", {"NCCLX_RS_TRANSPORT": "auto"}, posed)
        try:
            far = world.run(measured, {case: 1.5 * expected + 0.2 for case, expected in simulated.items()}, join=False)
            way.latency = way.gap_per_byte = 0.0
            near = world.run(measured, dict.fromkeys(simulated, 0.25), join=False)
        finally:
            world.close()
    ratios = []
    with capsys.disabled():
        print(
            f"\n{size} ranks on {count} hosts, in milliseconds: simulated; measured, median [p10, p90] of rounds;"
            " over a way that takes no time; how many times as long the fastest round takes without that"
        )
        for case, expected in simulated.items():
            (took, rounds), (machines, _) = fastest(far, case), fastest(near, case)
            ratios.append((took - machines) / expected)
            name, length = case
            told = spread([seconds * 1e3 for seconds in rounds])
            print(f"{name:>15} {length:>8} {expected * 1e3:>8.1f}   {told}   {machines * 1e3:>6.1f}   {ratios[-1]:.2f}")
        median = statistics.median(ratios)
        print(f"they take {spread(ratios)} times as long, and may take {1 + TOLERANCE} in the median")
    assert 1 / (1 + TOLERANCE) <= median <= 1 + TOLERANCE, ratios
    assert max(ratios) <= 3, "far more than what is shared otherwise than in the model"
