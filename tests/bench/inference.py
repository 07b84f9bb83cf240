"""Lays an all_reduce within a host beside DeepSpeed's shared memory, in alternating rounds of one run.

    pip install deepspeed ninja                   # g++ is needed, too: it compiles its shared memory at its first use
    python tests/bench/inference.py --pin
    python tests/bench/inference.py --pin --dtype bfloat16

The engine is called by `torch.ops.ncclx_rs.all_reduce_`, as inference engines would call it, and DeepSpeed by its own
operator, which works in place, too. The time of a round is that of the slowest rank. A ratio is DeepSpeed's time by the
engine's, so that above 1 the engine is faster: the median of the rounds, with the 10th and 90th percentile.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from spread import spread
from torch._C import _distributed_c10d as c10d

OURS, THEIRS = "ncclx_rs", "DeepSpeed"
ROUND_BYTES = 64 << 20
MOST_CALLS = 500


def joined(rank: int, ranks: int, folder: str) -> dict[str, Callable[[torch.Tensor], object]]:
    """Makes a group for each, and returns what adds a tensor up by it.

    Raises:
        RuntimeError: DeepSpeed has not built its shared memory, and would call gloo.
    """
    os.environ["LOCAL_SIZE"] = str(ranks)  # by this it knows that all ranks are on one host
    import deepspeed.comm

    store = c10d.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
    if not hasattr(torch.ops.deepspeed, "inference_all_reduce_"):
        raise RuntimeError("DeepSpeed has not built its shared memory here")
    group = dist.new_group(backend=OURS)
    assert isinstance(group, dist.ProcessGroup)
    ours, name = torch.ops.ncclx_rs.all_reduce_, group.group_name
    return {
        OURS: lambda tensor: ours(tensor, name),
        THEIRS: torch.ops.deepspeed.inference_all_reduce_,
    }


def timed(call: Callable[[torch.Tensor], object], tensor: torch.Tensor, calls: int) -> float:
    """Microseconds a call takes the slowest rank."""
    dist.barrier()
    call(tensor)
    began = time.perf_counter()
    for _ in range(calls):
        call(tensor)
    took = torch.tensor([(time.perf_counter() - began) / calls * 1e6])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def run_rank(rank: int, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    ways = joined(rank, arguments.ranks, arguments.folder)
    if arguments.pin:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    dtype = getattr(torch, arguments.dtype)
    length = arguments.min
    while length <= arguments.max:
        for call in ways.values():
            tensor = torch.full((length // dtype.itemsize,), rank + 1, dtype=dtype)
            call(tensor)
            assert bool((tensor == sum(range(1, arguments.ranks + 1))).all()), "a wrong sum"
        # Zeros stay zeros.
        tensor, calls = torch.zeros(length // dtype.itemsize, dtype=dtype), min(MOST_CALLS, ROUND_BYTES // length)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(arguments.rounds):
            for way in ways if turn % 2 == 0 else reversed(ways):
                times[way].append(timed(ways[way], tensor, calls))
        if rank == 0:
            ours, theirs = statistics.median(times[OURS]), statistics.median(times[THEIRS])
            ratio = spread([other / own for own, other in zip(times[OURS], times[THEIRS], strict=True)])
            print(f"{length:>10} {ours:>10.1f} {theirs:>10.1f}   {ratio}", flush=True)
        length *= arguments.factor
    dist.barrier()
    # DeepSpeed's groups end with the process.
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--min", type=int, default=64, help="bytes of a tensor")
    parser.add_argument("--max", type=int, default=32 << 20)
    parser.add_argument("--factor", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pin", action="store_true", help="give each rank a core of its own")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return run_rank(arguments.rank, arguments)
    print(f"{'bytes':>10} {OURS:>10} {THEIRS:>10}   ratio [p10, p90]; times in microseconds", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--folder", folder, "--rank"]
        parts = [subprocess.Popen([*command, str(rank)]) for rank in range(arguments.ranks)]
        if any([part.wait() for part in parts]):
            sys.exit("a rank has failed; see above")


if __name__ == "__main__":
    main()
