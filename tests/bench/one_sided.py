"""Lays one-sided writes beside UCX's own `ucx_perftest`, gloo's messages and memcpy, in alternating rounds of one run.

    cargo build --release --example bench
    pip install libucx-cu12                                          # has ucx_perftest
    sudo chrt -r 10 python tests/bench/one_sided.py                  # without other load, chrt is not needed

Two ranks, each on a core of its own. A ratio is the other's time by the engine's: above 1, the engine is faster.

    put      rank 0 puts into a window and signals, rank 1 waits for the signal; one after the other without a pause
    write    rank 0 writes by a transport (RdmaTransport) and waits until the bytes are there, one after the other
    read     rank 0 reads by a transport, one after the other
    there    put and signal there and back, one way of it

`ucx_perftest` does the like of put by `ucp_put_bw`, of read by `ucp_get`, and of there by `ucp_put_lat`. Gloo sends
messages. memcpy is that of one process while the other does nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mpi import HERE, Contender, engine, launched
from spread import spread

WAYS = ("posix,cma", "tcp")
# What a turn moves at most.
TURN_BYTES = 256 << 20
# UCX refuses a transport of ours over its TCP (docs/object_api.md).
SHARED = "posix,cma"


def serve_gloo(directory: Path) -> None:
    """Sends messages over gloo, as `examples/bench.rs --serve` does."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with (directory / f"in{rank}").open() as lines, (directory / f"out{rank}").open("w", buffering=1) as answers:
        answers.write(f"{os.getpid()}\n")
        for line in lines:
            _, size, calls = line.split()
            data = torch.ones(int(size), dtype=torch.uint8)
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(int(calls)):
                if rank == 0:
                    dist.send(data, 1)
                else:
                    dist.recv(data, 0)
            answers.write(f"{time.perf_counter() - begin}\n")
    dist.destroy_process_group()


def perftest(folder: Path, way: str, test: str, size: int, calls: int) -> float:
    """Microseconds a call of a test of `ucx_perftest`, whose two sides are pinned as the ranks are."""
    program = [str(folder / "bin/ucx_perftest"), "-p", "13337"]
    variables = os.environ | {"UCX_TLS": way, "LD_LIBRARY_PATH": str(folder / "lib"), "UCX_WARN_UNUSED_ENV_VARS": "n"}
    cores = sorted(os.sched_getaffinity(0))
    server = subprocess.Popen([*program, "-c", str(cores[1 % len(cores)])], env=variables, stdout=subprocess.DEVNULL)
    words = ["-c", str(cores[0]), "-t", test, "-s", str(size), "-n", str(calls), "-w", str(max(calls // 10, 2)), "-f"]
    try:
        for _ in range(50):  # until the server listens
            done = subprocess.run([*program, "127.0.0.1", *words], env=variables, capture_output=True, text=True)
            if done.returncode == 0:
                # The iterations, three latencies in microseconds, the last of them over all, and rates.
                return float(done.stdout.split("\n")[-2].split()[3])
            time.sleep(0.05)
        raise SystemExit(f"ucx_perftest failed: {done.stdout}{done.stderr}")
    finally:
        server.kill()
        server.wait()


Turn = Callable[[int, int], float]


def turn_of(contender: Contender, operation: str) -> Turn:
    """Microseconds a call on the slowest rank."""
    return lambda size, calls: max(contender.turn(operation, size, calls))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=HERE.parents[1] / "target/release/examples/bench")
    sizes = [8, 512, 8 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20]
    parser.add_argument("--bytes", type=int, nargs="+", default=sizes)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ways", nargs="+", default=WAYS, help="each what UCX_TLS is to be")
    parser.add_argument("--serve-gloo", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_gloo:
        return serve_gloo(arguments.serve_gloo)
    found = importlib.util.find_spec("libucx")
    if found is None or found.origin is None:
        raise SystemExit("pip install libucx-cu12")
    folder, program = Path(found.origin).parent, arguments.program.resolve()

    with contextlib.ExitStack() as stack:

        def started(contender: Contender) -> Contender:
            stack.callback(contender.close)
            contender.pin()
            return contender

        shm = started(engine(program, 2, variables={"NCCLX_RS_TRANSPORT": "shm"}))
        gloo = started(launched("gloo", [sys.executable, __file__, "--serve-gloo"], 2, {"OMP_NUM_THREADS": "1"}))
        alone = started(engine(program, 1))
        turns: dict[str, Turn] = {
            "shm put": turn_of(shm, "Uniput"),
            "shm write": turn_of(shm, "Write"),
            "shm read": turn_of(shm, "Read"),
            "shm there": turn_of(shm, "PutPingPong"),
            "shm message": turn_of(shm, "PingPong"),
            "gloo message": turn_of(gloo, "Uniband"),
            "memcpy": turn_of(alone, "Memcpy"),
        }
        # Ours by the other's, in this order.
        pairs = [("shm put", "gloo message"), ("shm put", "memcpy"), ("shm there", "shm message")]
        for way in arguments.ways:
            library = str(folder / "lib/libucp.so.0")
            ucx = started(
                engine(program, 2, variables={"NCCLX_RS_TRANSPORT": "ucx", "NCCLX_RS_UCX": library, "UCX_TLS": way})
            )
            turns |= {f"{way} put": turn_of(ucx, "Uniput"), f"{way} there": turn_of(ucx, "PutPingPong")}
            turns[f"{way} message"] = turn_of(ucx, "PingPong")
            for test in ("ucp_put_bw", "ucp_put_lat"):
                turns[f"{way} {test}"] = functools.partial(perftest, folder, way, test)
            pairs += [(f"{way} put", f"{way} ucp_put_bw"), (f"{way} there", f"{way} ucp_put_lat")]
            pairs += [(f"{way} there", f"{way} message")]
            if way == SHARED:
                turns |= {f"{way} write": turn_of(ucx, "Write"), f"{way} read": turn_of(ucx, "Read")}
                turns[f"{way} ucp_get"] = functools.partial(perftest, folder, way, "ucp_get")
                pairs += [(f"{way} read", f"{way} ucp_get"), ("shm read", f"{way} ucp_get"), ("shm read", "memcpy")]
                pairs += [(f"{way} write", f"{way} ucp_put_bw"), ("shm put", f"{way} ucp_put_bw")]
                pairs += [("shm write", f"{way} ucp_put_bw"), ("shm there", f"{way} ucp_put_lat")]
        for size in arguments.bytes:
            calls = max(2, min(2000, TURN_BYTES // max(size, 128 << 10)))
            rounds: dict[str, list[float]] = {name: [] for name in turns}
            for number in range(-1, arguments.rounds):
                for name in turns if number % 2 == 0 else reversed(turns):
                    microseconds = turns[name](size, calls)
                    if number >= 0:  # what comes before is to warm up
                        rounds[name].append(microseconds)
            for name, times in rounds.items():
                print(f"{size:>10} {name:<22} {spread(times)} us, {size / statistics.median(times) / 1e3:.2f} GB/s")
            for ours, other in pairs:
                ratios = [one / own for one, own in zip(rounds[other], rounds[ours], strict=True)]
                print(f"{size:>10} {ours:<22} against {other:<22} {spread(ratios)}", flush=True)


if __name__ == "__main__":
    main()
