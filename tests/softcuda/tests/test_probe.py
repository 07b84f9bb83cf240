"""The Rust crate cudarc on the software CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from harness import lacking

PROBE = Path(__file__).parents[1] / "probe" / "Cargo.toml"


def test_cudarc_finds_the_driver_and_works_on_it(twins: str) -> None:
    if not shutil.which("cargo"):
        lacking("cargo builds the probe")
    # It loads the driver itself. The compiler needs none.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    environment |= {"CARGO_TARGET_DIR": f"{os.environ['SOFTCUDA_HOME']}/probe", "SOFTCUDA_TWINS": twins}
    environment |= {"SOFTCUDA_LEAKS": "1"}
    command = ["cargo", "run", "--quiet", "--locked", "--manifest-path", str(PROBE)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0 and result.stdout == "cudarc works\n", result.stderr
    # What cudarc makes, it takes down.
    assert "leaks: 0" in result.stderr, result.stderr
