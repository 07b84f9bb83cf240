"""Runs every example of this folder on ncclx_rs and on gloo, and prints the differences of their numbers.

    python examples/strategies/run.py --ranks 2 4 8

The table is that of docs/parallelism.md. Exits with 1 when an example fails, when losses or weights differ by more than
the tolerance, or when another backend than the requested one served an operation.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import tiny
import torch
import torch.distributed as dist

BACKEND, REFERENCE = "ncclx_rs", "gloo"
PROGRAMS = "ddp ddp_compressed fsdp2 hsdp tp redistribute pp ep cp three_d checkpoint elastic".split()
# The largest difference allowed. `redistribute` adds up to numbers near 100. `ddp_compressed` adds in bfloat16, and
# makes much of the last bit in PowerSGD.
TOLERANCE, TOLERANCES = 1e-5, {"redistribute": 1e-4, "ddp_compressed": 1e-2}

FOLDER = Path(__file__).parent


def launch(ranks: int, *arguments: str) -> None:
    """Runs a program of this folder under torchrun; exits if it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    quiet = {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
    finished = subprocess.run([*command, *arguments], env=quiet | os.environ, check=False)
    if finished.returncode != 0:
        sys.exit(f"`{' '.join(arguments)}` on {ranks} ranks failed with exit code {finished.returncode}")


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference between numbers of the same name; infinite if their shapes differ."""
    if [(k, v.shape) for k, v in ours.items()] != [(k, v.shape) for k, v in theirs.items()]:
        return float("inf")
    apart = [(ours[name].double() - theirs[name].double()).abs() for name in ours if ours[name].numel() > 0]
    return float(torch.stack([x.max() for x in apart]).max())


def work(programs: list[str], folder: Path) -> None:
    """Runs programs on this rank, on one backend after the other, and writes the comparison to `folder`."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    # torchrun's own store, in which every group gets a place of its own.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)

    compared = {}
    for name in programs:
        theirs = report(name, REFERENCE, dist.PrefixStore(f"{name}/{REFERENCE}", store), rank, size)
        saved = folder / f"{name}{rank}.pt"
        if saved.exists():
            ours = tiny.Report(**torch.load(saved))
        else:
            ours = report(name, BACKEND, dist.PrefixStore(f"{name}/{BACKEND}", store), rank, size)
        compared[name] = (difference(ours.numbers, theirs.numbers), sum(ours.operations.values()))
        if rank == 0:
            print(f"{name} on {size} ranks: {ours.line}; {ours.operations}", file=sys.stderr, flush=True)
    torch.save(compared, folder / f"compared{rank}.pt")


def report(name: str, backend: str, store: dist.Store, rank: int, size: int) -> tiny.Report:
    """The report of a program that runs in a default group of that backend."""
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        return tiny.perform(importlib.import_module(name).main, backend)
    finally:
        dist.destroy_process_group()


def compare(programs: list[str], ranks: int) -> dict[str, tuple[float, int]]:
    """The largest difference of any rank, and the operations of rank 0, for each program."""
    with tempfile.TemporaryDirectory() as folder:
        if "elastic" in programs:  # kills a rank, so it gets processes of its own
            launch(ranks, "--max-restarts", "1", str(FOLDER / "elastic.py"), "--out", folder)
        launch(ranks, str(FOLDER / "run.py"), "--programs", *programs, "--worker", folder)
        parts = [torch.load(Path(folder) / f"compared{rank}.pt") for rank in range(ranks)]
    # Not Python's `max`, which may ignore NaN.
    largest = {name: torch.tensor([part[name][0] for part in parts], dtype=torch.double).max() for name in programs}
    return {name: (float(largest[name]), parts[0][name][1]) for name in programs}


def what(name: str) -> str:
    """A program's subject: the beginning of its docstring."""
    first = (importlib.import_module(name).__doc__ or "").splitlines()[0]
    return first.split(":")[0].rstrip(".")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.programs, arguments.worker)
        return

    columns = {ranks: compare(arguments.programs, ranks) for ranks in arguments.ranks}
    today = datetime.date.today()
    print(f"PyTorch {torch.__version__}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores, {today}:\n")
    print("| program | shows |" + "".join(f" {ranks} ranks |" for ranks in columns))
    print("|---|---|" + "---|" * len(columns))
    for name in arguments.programs:
        cells = [f" {column[name][0]:.0e} ({column[name][1]}) |" for column in columns.values()]
        print(f"| [{name}](../examples/strategies/{name}.py) | {what(name)} |{''.join(cells)}")

    # Written so that a difference that is not a number fails too.
    wrong = [
        f"{name} on {ranks} ranks: {column[name][0]:.1e}"
        for ranks, column in columns.items()
        for name in arguments.programs
        if not column[name][0] <= TOLERANCES.get(name, TOLERANCE)
    ]
    if wrong:
        sys.exit(f"{BACKEND} and {REFERENCE} differ by too much: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
