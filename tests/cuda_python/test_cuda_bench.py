"""The benchmark on CUDA tensors: its calls, its check of results, and its shares of the memory's bandwidth."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# PyTorch's operators by CPU kernels in every process; `RANK` says that they are wanted there.
COMPUTES = {"RANK": "0", "PYTHONPATH": f"{ROOT / 'tests/softcuda/site'}:{ROOT / 'tests/softcuda/tests'}"}


def bench(report: Path, devices: int, *arguments: str) -> list[dict[str, Any]]:
    """The rows of a run on two ranks."""
    paths = os.pathsep.join([COMPUTES["PYTHONPATH"], *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, **COMPUTES, "PYTHONPATH": paths, "SOFTCUDA_DEVICES": str(devices)}
    command = [sys.executable, "-m", "ncclx_rs.bench", "--device", "cuda", "--rounds", "2", "--calls", "2"]
    done = subprocess.run(
        [*command, *arguments, "--json", str(report)], env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["machine"]["device"] != "cpu"
    rows: list[dict[str, Any]] = found["rows"]
    return rows


@pytest.mark.parametrize(("devices", "operations"), [(1, "all_reduce,send_recv,barrier"), (2, "broadcast")])
def test_the_benchmark_measures_and_checks_cuda_tensors(tmp_path: Path, devices: int, operations: str) -> None:
    size = ("--min", "4K", "--max", "4K")
    rows = bench(tmp_path / "rows.json", devices, "--ops", operations, "--modes", "sync,async", *size)
    assert len(rows) == 2 * len(operations.split(","))
    for row in rows:
        result = row["results"]["ncclx_rs"]
        assert result["wrong"] == 0 and result["time"] > 0 and min(result["rounds"]) > 0, row
        shares = devices == 1 and row["case"]["operation"] != "barrier"
        assert [share > 0 for share in row["memory"].values()] == ([True] if shares else []), row
