"""Runs probes, benchmarks and tests on a machine with a GPU, and writes one report.

    python tests/gpu/run_gpu.py --report gpu-report --rust PROGRAM

The exit code is 1 if a part failed, else 0. What does not fit into the time is in the report as not run.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import suites
from report import FAILED, NOT_RUN, PASSED, Part, Report

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# A part is not begun with less time than this, in seconds.
LEAST = 5.0
SUITE_LEAST = 20.0 + suites.GRACE
KINDS = ("probes", "benchmarks", "rust", "python")


@dataclass(frozen=True)
class Job:
    """A part to run: it gets so many seconds at most, and is not begun with less than `least`."""

    part: Part
    seconds: float
    run: Callable[[Part, float], None]
    least: float = LEAST


def is_software() -> bool:
    """Whether the driver of this process is the software CUDA."""
    return "libcuda.so.1" in os.environ.get("LD_PRELOAD", "")


def slower(seconds: float) -> float:
    """What a part may take that takes so many seconds on a GPU."""
    return seconds * 3 if is_software() else seconds


# ---- probes ----


def probes(names: Sequence[str] | None) -> list[Job]:
    """The probes of these names, or all."""
    import probe  # loads the driver

    chosen = [each for each in probe.all_probes().values() if names is None or each.name in names]
    return [
        Job(
            Part("probe", each.name, facts={"asks": each.asks, "means": each.means}),
            slower(each.seconds),
            functools.partial(run_probe, command=[sys.executable, str(HERE / "probe.py"), each.name]),
        )
        for each in chosen
    ]


def run_probe(part: Part, seconds: float, command: Sequence[str]) -> None:
    """Runs a probe in a process of its own."""
    ended = suites.run(command, seconds)
    lines = ended.output.strip().splitlines()
    if ended.code is None:
        part.status, part.why = FAILED, f"did not end within {seconds:.0f} s"
        return
    try:
        found = json.loads(lines[-1]) if ended.code == 0 else None
    except (IndexError, ValueError):
        found = None
    if not isinstance(found, dict):
        part.status, part.why = FAILED, f"exit code {ended.code}: {ended.output[-2000:]}"
    elif "not_here" in found:
        part.why = found["not_here"]
    else:
        part.facts.update(found)
        part.status = FAILED if found["as_designed"] is False else PASSED
        part.why = "not what the design relies on" if part.status == FAILED else ""


# ---- benchmarks ----

OPERATIONS = "all_reduce,all_gather_into_tensor,reduce_scatter_tensor,all_to_all_single,broadcast,send_recv"


def benchmarks(devices: int, software: bool) -> list[Job]:
    """Our ranks on one GPU against its memory, and one rank a GPU against NCCL."""
    short = ["--max", "4K", "--factor", "512", "--rounds", "2", "--calls", "2", "--warmup", "1"]
    full = ["--max", "64M", "--factor", "128", "--rounds", "5", "--round-ms", "20"]
    shared = [
        "--ops",
        "all_reduce" if software else OPERATIONS,
        "--modes",
        "sync,async",
        *(short if software else full),
    ]
    nccl = ["--ops", OPERATIONS.removesuffix(",send_recv"), "--modes", "async", *full]
    alone = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    ranks = str(max(devices, 1))
    return [
        bench_job(f"{count} ranks on one GPU", ["--ranks", count, *shared], seconds, alone)
        for count, seconds in (("2", 60), ("4", 60))[: 1 if software else 2]
    ] + [
        Job(
            Part("benchmark", "one rank a GPU, against NCCL", why="the software CUDA runs no kernels of NCCL"),
            0,
            lambda part, seconds: None,
            0,
        )
        if software
        else bench_job("one rank a GPU, against NCCL", ["--ranks", ranks, "--vs", "nccl", *nccl], 60, {})
    ]


def bench_job(name: str, arguments: Sequence[str], seconds: float, environment: dict[str, str]) -> Job:
    """A run of `ncclx-rs bench`."""
    return Job(
        Part("benchmark", name),
        slower(seconds),
        functools.partial(run_bench, arguments=arguments, environment=environment),
    )


def run_bench(part: Part, seconds: float, arguments: Sequence[str], environment: dict[str, str]) -> None:
    """Runs the benchmark; all its numbers become facts."""
    with tempfile.TemporaryDirectory() as folder:
        numbers = Path(folder) / "numbers.json"
        command = [sys.executable, "-m", "ncclx_rs.bench", "--device", "cuda", *arguments, "--json", str(numbers)]
        if is_software():
            # Where RANK is set, PyTorch's operators run by CPU kernels.
            paths = [str(ROOT / "tests/softcuda/site"), str(ROOT / "tests/softcuda/tests")]
            paths += filter(None, [os.environ.get("PYTHONPATH")])
            environment = {**environment, "RANK": "0", "PYTHONPATH": os.pathsep.join(paths)}
        ended = suites.run(command, seconds, **environment)
        if numbers.exists():
            part.facts = json.loads(numbers.read_text())
    if ended.code == 0:
        part.status = PASSED
    else:
        end = f"exit code {ended.code}" if ended.code is not None else f"did not end within {seconds:.0f} s"
        part.status, part.why = FAILED, f"{end}: {ended.output[-2000:]}"


# ---- tests ----

# The most telling first, since time may run out.
FILES = (
    "collectives streams messages graphs windows premul_sum mempool setup training ends failures bench hosts programs "
    "surroundings chaos costs footprint torchtitan"
).split()


def python_tests(selected: str | None) -> Job:
    """The tests of CUDA tensors in Python."""
    files = [f"tests/cuda_python/test_cuda_{name}.py" for name in FILES]
    arguments = [*files, *(["-k", selected] if selected else [])]
    return Job(
        Part("suite", "tests/cuda_python"),
        slower(200),
        functools.partial(suites.python_suite, arguments=arguments),
        SUITE_LEAST,
    )


def rust_tests(program: str | None) -> Job:
    """The tests of CUDA in Rust."""
    part = Part("suite", "tests/cuda")
    if program is None:
        part.why = "no program was given"
        return Job(part, 0, lambda part, seconds: None, 0)
    return Job(part, slower(110), functools.partial(suites.rust_suite, program=program), SUITE_LEAST)


# ---- the whole ----


def work(jobs: Sequence[Job], report: Report, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
    """Runs the jobs within the report's limit, and writes the report after each."""
    began = clock()
    report.parts = [job.part for job in jobs]
    for job in jobs:
        part, left = job.part, report.limit - (clock() - began)
        if left < job.least:
            part.status, part.why = NOT_RUN, f"{max(left, 0):.0f} s were left, it needs {job.least:.0f} s"
        else:
            start = clock()
            job.run(part, min(job.seconds, left))
            part.seconds = round(clock() - start, 2)
        report.seconds = round(clock() - began, 2)
        print(f"{part.kind} {part.name}: {part.status}{': ' + part.why[-300:] if part.why else ''}", flush=True)
        report.write(folder)


def describe(software: bool, limit: float) -> tuple[Report, int]:
    """A report without parts, and the number of devices. It asks processes of their own, since CUDA has no way back."""
    asked = suites.run([sys.executable, str(HERE / "devices.py")], 300 if software else 60)
    if asked.code != 0:
        raise SystemExit(f"no CUDA here: {asked.output}")
    found = json.loads(asked.output.strip().splitlines()[-1])
    cards = found.pop("devices")
    if not cards:
        raise SystemExit("no CUDA device here; `make try-gpu` tries this out on a software CUDA")
    machine = {
        "driver": "a software CUDA" if software else driver(),
        "devices": cards,
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
    }
    versions = {
        "python": platform.python_version(),
        **found,
        "ncclx_rs": importlib.metadata.version("ncclx_rs"),
    }
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return Report(now, software, machine, versions, limit), len(cards)


def driver() -> str:
    """The version of NVIDIA's driver."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        version = Path("/proc/driver/nvidia/version")
        return version.read_text().splitlines()[0] if version.exists() else "unknown: no nvidia-smi"


def processor() -> str:
    """The model of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.machine())


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(description="Runs probes, benchmarks and tests on a GPU, and writes one report.")
    made.add_argument("--report", type=Path, default=ROOT / "target/gpu", help="the folder of the report (target/gpu)")
    made.add_argument("--seconds", type=float, default=520, help="what all takes at most (520)")
    made.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="some kinds of parts")
    made.add_argument("--probes", nargs="+", metavar="P", help="some probes, as in P1 P2")
    made.add_argument("--tests", help="some tests in Python, as pytest's -k takes it")
    made.add_argument("--rust", metavar="PROGRAM", help="the program of the tests in Rust")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it; returns the exit code."""
    options = parser().parse_args(arguments)
    software = is_software()
    report, devices = describe(software, options.seconds)
    jobs: list[Job] = []
    if "probes" in options.only:
        jobs += probes(options.probes)
    if "benchmarks" in options.only:
        jobs += benchmarks(devices, software)
    if "rust" in options.only:
        jobs.append(rust_tests(options.rust))
    if "python" in options.only:
        jobs.append(python_tests(options.tests))
    work(jobs, report, options.report)
    print(f"\n{options.report / 'report.md'}: {len(report.failures)} of {len(report.parts)} parts failed")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
