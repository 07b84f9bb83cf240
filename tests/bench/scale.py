"""Worlds of many ranks on this machine, by gloo and by this package, in turn: what they take to start and to work.

    python tests/bench/scale.py --ranks 64 128 256

Ranks are threads, so many to a process; those of this package are on posed hosts of sixteen. Times are from when all
ranks of rank 0's process have begun until they are done. Memory and descriptors are those that a rank of that process
adds, after all operations. Hundreds of ranks share a few cores: compare rows, and take no row for a cluster's.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

HOST = 16
PROCESS = 32
LONG = timedelta(seconds=300)
STEPS = ("start", "first all_reduce", "100th all_reduce", "first all_gather", "first all_to_all", "barrier")


def by_gloo(store: c10d.Store, rank: int, size: int) -> Any:
    return c10d.ProcessGroupGloo(store, rank, size, LONG)


def by_ncclx_rs(store: c10d.Store, rank: int, size: int) -> Any:
    """As PyTorch makes it for a group."""
    import ncclx_rs

    options = c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size, options.timeout = store, rank, size, LONG
    options.group_id = GroupName("scale")
    hints = {"host_id": f"host {rank // HOST}", "connect_timeout_seconds": str(LONG.seconds)}
    return dist.Backend._plugins["NCCLX_RS"].creator_fn(options, ncclx_rs.Options(LONG, hints))


WAYS = {"gloo": by_gloo, "ncclx_rs": by_ncclx_rs}


class Member:
    """One rank, whose operations return when they are done."""

    def __init__(self, group: Any) -> None:
        """Its tensors have an element for each rank."""
        self.group, size = group, group.size()
        self.one, self.parts, self.mixed = torch.ones(1), torch.empty(size), torch.empty(size)
        self.own = torch.full((size,), float(group.rank()))

    def all_reduce(self) -> None:
        self.one.fill_(1)
        self.group.allreduce([self.one]).wait()

    def all_gather(self) -> None:
        self.group._allgather_base(self.parts, self.own[:1].clone()).wait()

    def all_to_all(self) -> None:
        self.group.alltoall_base(self.mixed, self.own, [], []).wait()

    def barrier(self) -> None:
        self.group.barrier().wait()

    def check(self) -> None:
        everyone = list(range(self.group.size()))
        assert self.one.item() == len(everyone) and self.parts.tolist() == self.mixed.tolist() == everyone


def holdings() -> tuple[int, int]:
    """Bytes in memory and descriptors of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))


def run_rank(rank: int, size: int, way: str, port: int, together: threading.Barrier) -> None:
    store = c10d.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=LONG)
    together.wait()
    member = Member(WAYS[way](c10d.PrefixStore(way, store), rank, size))
    together.wait()
    member.all_reduce()
    together.wait()
    for _ in range(98):
        member.all_reduce()
    for operation in (member.all_reduce, member.all_gather, member.all_to_all, member.barrier):
        together.wait()
        operation()
    together.wait()
    member.check()
    # What all hold is counted here; and nobody leaves before all are done.
    together.wait()
    member.barrier()


def run_part(number: int, size: int, way: str, port: int) -> None:
    """The ranks of one process; that of rank 0 prints its row."""
    torch.set_num_threads(1)
    server = c10d.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if number == 0 else None
    ranks = range(number * PROCESS, min((number + 1) * PROCESS, size))
    together = threading.Barrier(len(ranks) + 1)

    def run(rank: int) -> None:
        try:
            run_rank(rank, size, way, port, together)
        except BaseException as error:
            print(f"rank {rank} of {size} by {way}: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    together.wait()
    before, times, since = holdings(), [], time.monotonic()
    for _ in range(7):
        together.wait()
        now = time.monotonic()
        times.append(now - since)
        since = now
    del times[2]  # 98 of them
    after = holdings()
    together.wait()
    if number == 0:
        memory, descriptors = ((a - b) / len(ranks) for a, b in zip(after, before, strict=True))
        cells = [f"{seconds:.2f} s" for seconds in times] + [f"{memory / 1024:.0f}", f"{descriptors:.0f}"]
        print(f"| {size} | {way} | {' | '.join(cells)} |", flush=True)
    for thread in threads:
        thread.join()
    del server


def run_world(size: int, way: str) -> bool:
    """Whether all ranks have come to their end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    parts = [
        subprocess.Popen([sys.executable, __file__, "--part", f"{number} {size} {way} {port}"])
        for number in range(-(-size // PROCESS))
    ]
    # One that fails is never waited for by the others.
    while any(part.poll() is None for part in parts):
        if any(part.poll() for part in parts):
            for part in parts:
                part.kill()
        time.sleep(0.1)
    return not any(part.returncode for part in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        number, size, way, port = arguments.part.split()
        return run_part(int(number), int(size), way, int(port))
    columns = ["ranks", "by", *STEPS, "KiB a rank", "descriptors a rank"]
    print(f"| {' | '.join(columns)} |\n|{'---:|' * len(columns)}", flush=True)
    failed = False
    for size in arguments.ranks:
        for way in arguments.ways:
            if not run_world(size, way):
                failed = True
                print(f"| {size} | {way} | it has failed; see above |", flush=True)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
