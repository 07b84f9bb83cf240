"""Tokens a second of a Llama-shaped model that is cut over the ranks of a host, by each way of adding up its parts.

    python examples/inference/decode.py
    python examples/inference/decode.py --ranks 4 --layers 8 --batches 1 8 32

The ways: PyTorch's tensor-parallel plans on gloo and on ncclx_rs, and a model cut by hand that calls `dist.all_reduce`
of gloo, the operator `torch.ops.ncclx_rs.all_reduce_`, or DeepSpeed's shared memory, if DeepSpeed is installed and has
built it. Exits with 1 when a way makes other tokens: a sum over two ranks has one result. On more ranks the ways add in
different orders, so that only the ranks of one way must agree.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from llama import Llama, Reduce, Shape, cut_by_hand, cut_by_plan
from torch.distributed.device_mesh import DeviceMesh

PLAN_GLOO, PLAN_OURS = "plans, gloo", "plans, ncclx_rs"
GLOO, OURS, DEEPSPEED = "dist.all_reduce, gloo", "operator, ncclx_rs", "inference_all_reduce, DeepSpeed"
WAYS = (PLAN_GLOO, PLAN_OURS, GLOO, OURS, DEEPSPEED)
TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Task:
    """What is decoded.

    Attributes:
        shape: the size of the model.
        batches: numbers of sequences, one run each.
        prompt: tokens of a prompt.
        count: tokens to be made for each sequence.
    """

    shape: Shape = Shape()
    batches: tuple[int, ...] = (1, 8)
    prompt: int = 16
    count: int = 64


@dataclass
class Result:
    """What a way has made: the tokens of each sequence of each batch, and tokens a second; or why it could not run."""

    tokens: list[list[list[int]]]
    rates: list[float]
    lacking: str = ""


def run(way: str, task: Task, rank: int, ranks: int, store: dist.Store) -> Result:
    """Decodes on this rank by one of the ways, in a default group of its own."""
    if way == DEEPSPEED:
        lacking = join_deepspeed(rank, ranks, store)
        if lacking:
            return Result([], [], lacking)
    else:
        backend = "gloo" if way in (PLAN_GLOO, GLOO) else "ncclx_rs"
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    try:
        model = Llama(task.shape)
        if way in (PLAN_GLOO, PLAN_OURS):
            cut_by_plan(model, DeviceMesh.from_group(dist.group.WORLD, "cpu"))
        else:
            cut_by_hand(model, rank, ranks, reduction(way))
        with torch.no_grad():
            made = [decode(model, task, batch, ranks) for batch in task.batches]
        return Result([tokens for tokens, _ in made], [rate for _, rate in made])
    finally:
        dist.destroy_process_group()


def reduction(way: str) -> Reduce:
    """What adds up a tensor over the default group."""
    if way == GLOO:
        return dist.all_reduce
    if way == DEEPSPEED:
        import deepspeed.comm

        return deepspeed.comm.inference_all_reduce
    return functools.partial(torch.ops.ncclx_rs.all_reduce_, group_name=dist.group.WORLD.group_name)


def join_deepspeed(rank: int, ranks: int, store: dist.Store) -> str:
    """Makes the default group for DeepSpeed, and has it set up its shared memory.

    Returns:
        what is lacking; then there is no group.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    # By this it knows that all ranks are on one host.
    os.environ["LOCAL_SIZE"] = str(ranks)
    import deepspeed.comm

    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
    # Otherwise its call is an all_reduce of gloo.
    if not hasattr(torch.ops.deepspeed, "inference_all_reduce_"):
        # Nobody leaves while others still join.
        dist.barrier()
        dist.destroy_process_group()
        return "deepspeed has not built its shared memory here"
    return ""


def decode(model: Llama, task: Task, batch: int, ranks: int) -> tuple[list[list[int]], float]:
    """Decodes twice and times the second time, from the first token on: the tokens, and how many a second."""
    generator = torch.Generator().manual_seed(batch)
    prompt = torch.randint(task.shape.vocabulary, (batch, task.prompt), generator=generator)
    for _ in range(2):
        model.begin(batch, task.prompt + task.count, ranks)
        made = [model(prompt, 0)]
        begin = time.monotonic()
        for position in range(task.prompt, task.prompt + task.count - 1):
            made.append(model(made[-1], position))
        seconds = time.monotonic() - begin
    return torch.cat(made, 1).tolist(), batch * (task.count - 1) / seconds


def compare(results: dict[str, list[Result]]) -> None:
    """Compares the tokens of all ranks of each way; on two ranks also those of the ways.

    Raises:
        RuntimeError: some differ, or there are none.
    """
    done = {way: of_way for way, of_way in results.items() if not any(result.lacking for result in of_way)}
    if not done:
        raise RuntimeError("no way could run")
    expected = next(iter(done.values()))[0].tokens
    for way, of_way in done.items():
        if any(result.tokens != of_way[0].tokens for result in of_way):
            raise RuntimeError(f"{way}: the ranks made different tokens")
        if len(of_way) <= 2 and of_way[0].tokens != expected:
            raise RuntimeError(f"{way}: made other tokens than {next(iter(done))}")


def show(results: dict[str, list[Result]], batches: tuple[int, ...]) -> None:
    """Prints a line for each way."""
    print("| way |" + "".join(f" tokens/s, batch {batch} |" for batch in batches))
    print("|---|" + "---|" * len(batches))
    for way, of_way in results.items():
        lacking = next((result.lacking for result in of_way if result.lacking), "")
        rates = [min(result.rates[index] for result in of_way) for index in range(len(batches))] if not lacking else []
        print(f"| {way} |" + "".join(f" {rate:.1f} |" for rate in rates) + f" {lacking} |" * bool(lacking))


def work(arguments: argparse.Namespace, task: Task) -> None:
    """Runs all ways in this process, and leaves the results in the folder."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    # torchrun's own store, in which every way gets a place of its own.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    results = {}
    for index, way in enumerate(arguments.ways):
        results[way] = asdict(run(way, task, rank, ranks, dist.PrefixStore(f"way{index}", store)))
    torch.save(results, arguments.worker / f"results{rank}.pt")
    # Rank 0 of the launcher serves the store as long as a process runs.
    store.set(f"done{rank}", "yes")
    store.wait([f"done{other}" for other in range(ranks)], TIMEOUT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help="; ".join(WAYS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=list(Task.batches))
    parser.add_argument("--count", type=int, default=Task.count, help="tokens to be made for each sequence")
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if Shape.kv_heads % arguments.ranks:
        parser.error(f"argument --ranks: expected a divisor of {Shape.kv_heads}, got {arguments.ranks}")
    task = Task(Shape(layers=arguments.layers), tuple(arguments.batches), count=arguments.count)
    if arguments.worker:
        work(arguments, task)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(arguments.ranks)]
    with tempfile.TemporaryDirectory() as folder:
        worker = [*command, *sys.argv, "--worker", folder]
        finished = subprocess.run(worker, env={"OMP_NUM_THREADS": "1"} | os.environ, check=False)
        if finished.returncode != 0:
            sys.exit(f"a process has failed: exit code {finished.returncode}")
        parts = [torch.load(Path(folder) / f"results{rank}.pt") for rank in range(arguments.ranks)]
    results = {way: [Result(**part[way]) for part in parts] for way in arguments.ways}
    try:
        compare(results)
    except RuntimeError as error:
        sys.exit(str(error))
    show(results, task.batches)
    print(f"\nall ranks {'and ways ' if arguments.ranks <= 2 else ''}made the same tokens")


if __name__ == "__main__":
    main()
