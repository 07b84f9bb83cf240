"""Tries wheels: each in a fresh environment for every PyTorch and Python that it serves and this machine has.

python packaging/check_wheels.py [--dist dist] [--pairs 2.15:3.11 ...] [--torch-index URL | --torch-from FOLDER]

An environment has an empty home and no compiler on its PATH. PyTorch is installed first; the wheel must leave it as it
is. Two ranks then run packaging/smoke.py. Only after that come the packages that PyTorch's own tests need, and some of
these run on two ranks, too (tests/acceptance).
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wheels import PAIRS, Pair, interpreter

ROOT = Path(__file__).resolve().parents[1]
SMOKE = Path(__file__).with_name("smoke.py")
SUITE = ROOT / "tests/acceptance/test_pytorch_suite.py"
# What PyTorch's modules for tests import.
SUITE_NEEDS = ("expecttest", "numpy", "pytest")
# Of PyTorch's own tests for backends, short ones that every version has: collectives, messages, training.
SUITE_TESTS = (
    "test_all_reduce_sum",
    "test_all_gather",
    "test_broadcast",
    "test_send_recv",
    "test_DistributedDataParallelCPU",
)
# What ends a trial that hangs, in seconds: PyTorch's download is the longest part.
LIMIT = 3600


@dataclass(frozen=True)
class Torch:
    """Where an environment has PyTorch from.

    Attributes:
        index: the index that it is downloaded from, such as that of builds without CUDA; pip's own if None.
        folder: a folder with installed packages, PyTorch's among them, instead of a download.
    """

    index: str | None = None
    folder: Path | None = None


def pairs_of(wheel: Path) -> list[Pair]:
    """The PyTorchs and Pythons that a wheel has a part for."""
    with zipfile.ZipFile(wheel) as archive:
        names = "\n".join(archive.namelist())
    found = re.findall(r"^ncclx_rs/shims/torch([\d.]+)-cpython3(\d+)\.so$", names, re.MULTILINE)
    return [pair for pair in PAIRS if (pair.torch, pair.python.removeprefix("3.")) in found]


def wheels_in(folder: Path) -> list[Path]:
    """The wheels in a folder that are for this machine's processor."""
    # With their whole paths: a trial runs in a folder of its own.
    return sorted(folder.resolve().glob(f"ncclx_rs-*{platform.machine()}.whl"))


def check(wheel: Path, pair: Pair, python: Path, torch: Torch) -> str:
    """Installs a wheel into a fresh environment, and runs the smoke test and some of PyTorch's own tests there.

    Returns:
        What the smoke test printed, how many of PyTorch's tests passed, and how long it took from the wheel's
        installation on.

    Raises:
        RuntimeError: a step failed; the text has its output.
    """
    with tempfile.TemporaryDirectory(prefix="check-wheels-") as name:
        folder = Path(name)
        (folder / "home").mkdir()
        for file in (SMOKE, SUITE):  # away from the sources, which must not be imported
            shutil.copy(file, folder)
        environment = {
            name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "REQUESTS_"))
        }
        environment |= {"HOME": str(folder / "home"), "PATH": str(folder / "venv/bin"), "OMP_NUM_THREADS": "1"}
        # Ranks of the suite meet at a file in the folder for temporary ones, of which each trial needs its own.
        environment["TMPDIR"] = name
        # The addresses of proxies have names in either case.
        environment |= {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}

        def run(*command: str | Path, variables: dict[str, str] = environment) -> str:
            done = subprocess.run(
                command, cwd=folder, env=variables, capture_output=True, text=True, timeout=LIMIT, check=False
            )
            if done.returncode != 0:
                words = " ".join(map(str, command))
                raise RuntimeError(f"{words}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
            return done.stdout.strip()

        # What starts the interpreter may be a script, which needs more than the fresh environment has.
        run(python, "-m", "venv", folder / "venv", variables=dict(os.environ))
        inside = folder / "venv/bin/python"
        version = "import importlib.metadata as m; print(m.version('torch'))"
        if torch.folder is None:
            index = ("--index-url", torch.index) if torch.index else ()
            run(inside, "-m", "pip", "install", "--quiet", "--no-cache-dir", *index, f"torch=={pair.torch}.*")
            before = run(inside, "-c", version)
        started = time.monotonic()
        run(inside, "-m", "pip", "install", "--quiet", *(("--no-deps",) if torch.folder else ()), wheel)
        if torch.folder is None:
            after = run(inside, "-c", version)
            if before != after:
                raise RuntimeError(f"the wheel has replaced PyTorch {before} by {after}")
        else:
            (site,) = (folder / "venv/lib").glob("python*/site-packages")
            (site / "torch.pth").write_text(f"{torch.folder.resolve()}\n")
        run(folder / "venv/bin/ncclx-rs", "--version")
        said = run(inside, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SMOKE.name)
        run(inside, "-m", "pip", "install", "--quiet", *SUITE_NEEDS)
        tests = (f"{SUITE.name}::TestBackend::{test}" for test in SUITE_TESTS)
        said += f"; {suite_verdict(run(inside, '-m', 'pytest', '--quiet', *tests))}"
        return f"{said} ({time.monotonic() - started:.0f} s)"


def suite_verdict(printed: str) -> str:
    """What to say of PyTorch's own tests after what pytest printed.

    Raises:
        RuntimeError: some did not run; those that fail also end pytest with another exit code.
    """
    passed = f"{len(SUITE_TESTS)} passed"
    if not printed.rpartition("\n")[2].startswith(passed):
        raise RuntimeError(f"PyTorch's own tests were to have {passed}\n{printed}")
    return f"{passed} of PyTorch's own tests"


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries the wheels; returns 1 if one fails or there is nothing to try."""
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    made.add_argument("--dist", type=Path, default=ROOT / "dist", help="the folder of the wheels (dist)")
    made.add_argument("--pairs", type=Pair.parse, nargs="+", help="some PyTorchs and Pythons only, as 2.15:3.11")
    source = made.add_mutually_exclusive_group()
    source.add_argument("--torch-index", metavar="URL", help="the package index that PyTorch is downloaded from")
    source.add_argument("--torch-from", type=Path, metavar="FOLDER", help="the site-packages of an installed PyTorch")
    options = made.parse_args(arguments)
    if options.torch_from is not None and len(options.pairs or ()) != 1:
        made.error("--torch-from: expected one pair in --pairs, that of the PyTorch there")
    torch = Torch(options.torch_index, options.torch_from)
    tried = failed = 0
    for wheel in wheels_in(options.dist):
        served = pairs_of(wheel)
        for pair in options.pairs or served:
            python = interpreter(pair.python)
            if pair not in served or python is None:
                why = "the wheel has no part for it" if pair not in served else f"there is no Python {pair.python}"
                print(f"{wheel.name}, {pair}: not tried: {why}", flush=True)
                failed += options.pairs is not None
                continue
            tried += 1
            try:
                print(f"{wheel.name}, {pair}: {check(wheel, pair, python, torch)}", flush=True)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                failed += 1
                print(f"{wheel.name}, {pair}: failed: {error}", flush=True)
    if not tried:
        print(f"nothing was tried: {options.dist} has no wheel for a Python of this machine; `make wheels` builds one")
    return int(failed > 0 or tried == 0)


if __name__ == "__main__":
    sys.exit(main())
