"""`ncclx-rs info`, and the vendors' libraries that it finds."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import BACKEND, WATCHDOG_SECONDS, lacking, two_nodes
from ncclx_rs import _host
from ncclx_rs import info as gathered

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="ncclx_rs is not under test")

# What came with each minor version of NCCL, by its header.
NEW_IN = {
    28: {"all_to_all, gather and scatter as calls", "revoke"},
    29: {"grow", "put and signal"},
}


def info(*options: str, **environment: str) -> str:
    command = [sys.executable, "-m", "ncclx_rs", "info", *options]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG_SECONDS, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def found(**environment: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(info("--json", **environment))
    return answer


def installed() -> str:
    """The version of NCCL among Python's packages."""
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    lacking("the package nvidia-nccl-cu13")


def test_versions_and_libraries_are_told() -> None:
    lines = dict(line.split(maxsplit=1) for line in info().splitlines() if not line.startswith(" "))
    assert lines["PyTorch"].startswith(torch.__version__)
    assert lines["CUDA"].startswith(("there is no CUDA driver", "a driver of CUDA "))
    assert lines["NCCL"].startswith(f"{installed()}, /")
    assert lines["RCCL"].startswith("none: librccl.so.1 is in none of ")


def test_nodes_are_told_where_there_are_several(tmp_path: Path) -> None:
    told = found()
    here = [(node["number"], node["distances"]) for node in told["nodes"]]
    assert here == [(node.number, node.distances) for node in _host.nodes()]
    assert len(here) > 1 or (told["home"] is None and "\nNUMA       one node\n" in info())
    two_nodes(tmp_path)
    nodes = _host.nodes(tmp_path)
    assert [(node.number, node.cpus) for node in nodes] == [(0, [(0, 3)]), (2, [(4, 5), (8, 11)]), (3, [])]
    for home, place in {
        None: "no one of them",
        (2, None): "node 2, and so is the memory that others write to for it",
        (2, "not permitted"): "node 2, but not its memory: not permitted",
    }.items():
        text = gathered.text(dataclasses.replace(gathered.gather(), nodes=nodes, home=home))
        expected = [
            "NUMA       node 0: CPUs 0-3, distances 10 21 17",
            "           node 2: CPUs 4-5,8-11, distances 31 10 28",
            "           node 3: no CPUs",
            f"           a rank that runs where this process may is on {place}",
        ]
        assert "\n".join(expected) in text


def test_a_library_is_known_by_its_version_and_functions() -> None:
    version = installed()
    library = found()["libraries"]["nccl"]
    assert library["version"] == version and Path(library["path"]).name == "libnccl.so.2"
    minor = int(version.split(".")[1])
    later = set().union(*(features for since, features in NEW_IN.items() if since > minor))
    assert set(library["lacks"]) == later


# Unpacked packages of several versions: `make nccl-versions` fetches them.
VERSIONS = sorted(Path(os.environ.get("NCCLX_RS_TEST_NCCL", "/nonexistent")).glob("*/nvidia/nccl/lib/libnccl.so.2"))


@pytest.mark.parametrize("library", VERSIONS, ids=lambda path: path.parts[-5])
def test_every_version_is_known(library: Path) -> None:
    version = library.parts[-5]
    told = found(NCCLX_RS_NCCL_LIBRARY=str(library))["libraries"]["nccl"]
    minor = int(version.split(".")[1])
    later = set().union(*(features for since, features in NEW_IN.items() if since > minor))
    assert told == {"path": str(library), "version": version, "lacks": told["lacks"]}
    assert set(told["lacks"]) == later


def test_a_library_that_is_none_is_named_and_no_other_is_taken(tmp_path: Path) -> None:
    problem = found(NCCLX_RS_NCCL_LIBRARY="libm.so.6")["problems"]["nccl"]
    assert problem == "libm.so.6 is no NCCL: it lacks ncclGetVersion"
    missing = tmp_path / "libnccl.so.2"
    problem = found(NCCLX_RS_NCCL_LIBRARY=str(missing))["problems"]["nccl"]
    assert problem.startswith(f"{missing} cannot be loaded: ") and "No such file" in problem


def test_ucx_is_found_or_named_or_off(tmp_path: Path) -> None:
    assert found(NCCLX_RS_UCX="off")["problems"]["ucx"] == "the setting `ucx` is off"
    missing = tmp_path / "libucp.so.0"
    assert found(NCCLX_RS_UCX=str(missing))["problems"]["ucx"].startswith(f"{missing} cannot be loaded: ")
    named = os.environ.get("NCCLX_RS_TEST_UCX", "")
    try:
        version = "" if named else metadata.version("libucx-cu12")
    except metadata.PackageNotFoundError:
        lacking("the package libucx-cu12")
    lines = dict(line.split(maxsplit=1) for line in info(NCCLX_RS_UCX=named).splitlines() if not line.startswith(" "))
    told, path = lines["UCX"].split(", ")
    assert told.startswith(version) and Path(path).name.startswith("libucp.so.0")
