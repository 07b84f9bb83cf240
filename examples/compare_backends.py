"""Trains the same model on two backends and compares the losses of every step.

    python examples/compare_backends.py --backends ncclx_rs gloo

Exits with 1 when a run fails, when losses differ by more than the tolerance, or when the model has not learned.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("train_fsdp2.py")
SHOWN = 5


def run(backend: str, arguments: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Runs the training under torchrun and returns its report."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(arguments.ranks), str(PROGRAM)]
    command += ["--backend", backend, "--steps", str(arguments.steps), "--out", str(out), "--profile"]
    # Above the highest level of messages that the profiler has.
    quiet = {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
    finished = subprocess.run(command, env=quiet | os.environ)
    if finished.returncode != 0:
        sys.exit(f"training on {backend} failed with exit code {finished.returncode}")
    return json.loads(out.read_text())


def relative(a: float, b: float) -> float:
    """The difference of two losses, relative to the larger."""
    return abs(a - b) / max(abs(a), abs(b))


def show(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Prints two reports side by side and returns the largest relative difference."""
    losses = list(zip(first["losses"], second["losses"], strict=True))
    print(f"\n{'':>14}{first['backend']:>14}{second['backend']:>14}{'difference':>14}")
    for step, (a, b) in list(enumerate(losses))[-SHOWN:]:
        print(f"{f'loss, step {step}':>14}{a:>14.6f}{b:>14.6f}{abs(a - b):>14.1e}")
    print(f"{'seconds':>14}{first['seconds']:>14.1f}{second['seconds']:>14.1f}")
    shares = [report["communication_share"] for report in (first, second)]
    if None not in shares:
        print(f"{'in FSDP comm.':>14}{shares[0]:>14.0%}{shares[1]:>14.0%}")
    # One that is not a number is larger than all: max() alone passes it over.
    largest = max((relative(a, b) for a, b in losses), key=lambda difference: (math.isnan(difference), difference))
    print(f"\nlargest relative difference over {len(losses)} steps: {largest:.1e}")
    return largest


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs=2, default=["ncclx_rs", "gloo"], metavar=("A", "B"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--rtol", type=float, default=1e-4, help="the largest relative difference allowed")
    parser.add_argument("--learned", type=float, help="what the last loss must be below")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"losses{index}.json" for index in range(2)]
        first, second = (run(backend, arguments, out) for backend, out in zip(arguments.backends, outs, strict=True))
    # Written so that a loss that is not a number fails too.
    if not show(first, second) <= arguments.rtol:
        sys.exit(f"the losses differ by more than {arguments.rtol:g}")
    if arguments.learned is not None and not first["losses"][-1] < arguments.learned:
        sys.exit(f"the last loss is not below {arguments.learned:g}")
    print(f"the losses agree within {arguments.rtol:g}")


if __name__ == "__main__":
    main()
