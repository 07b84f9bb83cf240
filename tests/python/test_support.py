"""The tables of docs/support.md are what comes out when every operation is tried with every type of elements.

They are written anew with NCCLX_RS_UPDATE_DOCS=1.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, World, fresh_store
from reference import MOVABLE
from torch.torch_version import TorchVersion

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="the document is that of ncclx_rs")

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/support.md"
sys.path.insert(0, str(ROOT / "packaging"))
import wheels  # noqa: E402  # packaging/ is no package

REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
# Two numbers of four bits are one element.
DTYPES = (*MOVABLE, torch.float4_e2m1fn_x2)
# What PyTorch itself has only from a version on, by a name of its interface, or only there by this package.
SINCE = {
    "process groups that lose and gain members": ("2.14", lambda: hasattr(dist, "_reconfigure")),
    "`torch.distributed.set_timeout`": ("2.14", lambda: hasattr(dist, "set_timeout")),
    "`torch.distributed.monitored_barrier` of groups that are not named `gloo`": (
        "2.14",
        lambda: "only implemented for GLOO" not in inspect.getsource(dist.monitored_barrier),
    ),
    "windows of process groups": ("2.14", lambda: hasattr(dist.ProcessGroup, "new_window")),
}


def moves(device: str, dtype: torch.dtype, rank: int, size: int) -> Iterator[Callable[[], object]]:
    """A call of every operation of torch.distributed that moves elements as they are."""

    def made(count: int = 4) -> torch.Tensor:
        return torch.zeros(count * dtype.itemsize, dtype=torch.uint8, device=device).view(dtype)

    whole = [made() for _ in range(size)]
    at_root = whole if rank == 0 else None
    yield lambda: dist.broadcast(made(), 0)
    yield lambda: dist.all_gather(whole, made())
    yield lambda: dist.all_gather_into_tensor(made(4 * size), made())
    yield lambda: dist.all_to_all_single(made(4 * size), made(4 * size))
    yield lambda: dist.all_to_all(whole, [made() for _ in range(size)])
    yield lambda: dist.gather(made(), at_root, 0)
    yield lambda: dist.scatter(made(), at_root, 0)
    messages = [dist.P2POp(dist.isend, made(), (rank + 1) % size), dist.P2POp(dist.irecv, made(), (rank - 1) % size)]
    yield lambda: [work.wait() for work in dist.batch_isend_irecv(messages)]


def reductions(device: str, dtype: torch.dtype, name: str, size: int) -> Iterator[Callable[[], object]]:
    """A call of every operation of torch.distributed that reduces."""
    op = dist._make_nccl_premul_sum(2.0) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)

    def made(count: int = 4) -> torch.Tensor:
        return torch.zeros(count * dtype.itemsize, dtype=torch.uint8, device=device).view(dtype)

    yield lambda: dist.all_reduce(made(), op)
    yield lambda: dist.reduce(made(), 0, op)
    yield lambda: dist.reduce_scatter_tensor(made(), made(4 * size), op)
    yield lambda: dist.reduce_scatter(made(), [made() for _ in range(size)], op)


def works(calls: Iterator[Callable[[], object]], what: str) -> bool:
    """Whether calls are taken, or all refused as wrong calls: by PyTorch, or by every rank before it sends."""
    outcomes = []
    for call in calls:
        try:
            call()
            outcomes.append(True)
        except ValueError as error:
            assert "support" in str(error), f"{what}: {error}"
            outcomes.append(False)
    assert len(set(outcomes)) == 1, f"{what}: {outcomes}"
    return outcomes[0]


def elements(rank: int, size: int, device: str = "cpu") -> list[str]:
    """The table of types, of a group that exists."""
    lines = ["| elements | moved | " + " | ".join(REDUCTIONS) + " |", "|---" * (2 + len(REDUCTIONS)) + "|"]
    for dtype in DTYPES:
        cells = [works(moves(device, dtype, rank, size), f"{dtype} moved")]
        cells += [works(reductions(device, dtype, name, size), f"{name} of {dtype}") for name in REDUCTIONS]
        name = str(dtype).removeprefix("torch.")
        lines.append(f"| {name} | " + " | ".join("yes" if cell else "–" for cell in cells) + " |")
    return lines


def windows(rank: int, size: int) -> list[str]:
    """The table of accesses to windows of CPU tensors."""
    comm = ncclx_rs.new_comm("ncclx", "cpu", "support", store=fresh_store(), rank=rank, size=size)
    window = comm.new_window(torch.zeros(4))
    peer, there = (rank + 1) % size, (rank - 1) % size
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: window.put(torch.ones(4), peer, 0, False),
        "get": lambda: window.get(torch.ones(4), peer, 0, False),
        "accumulate": lambda: window.accumulate(torch.ones(4), peer, 0, False),
        "flush": lambda: window.flush(peer),
        "fence": lambda: window.fence(),
        "signal, wait_signal": lambda: (window.signal(peer), window.wait_signal(there)),
        "all_gather_p": lambda: comm.all_gather_p_exec(comm.all_gather_p_init(torch.empty(size)), torch.ones(1)),
    }
    for call in calls.values():
        call()
    comm.finalize()
    return list(calls)


# Where an operation runs on CUDA tensors, and the files of tests that show it on the software CUDA.
CUDA = {
    "all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all, gather, scatter, barrier": (
        "yes",
        "yes",
        "within a host; by a vendor's library between hosts too",
        ("test_cuda_collectives", "test_cuda_hosts", "test_cuda_graphs", "test_cuda_nccl_graphs"),
    ),
    "send, recv and batches of them": (
        "yes",
        "yes",
        "within a host",
        ("test_cuda_messages", "test_cuda_hosts", "test_cuda_graphs", "test_cuda_nccl_graphs"),
    ),
    "put, get, signal, wait_signal, all_gather_p": (
        "yes",
        "yes",
        "within a host",
        ("test_cuda_windows", "test_cuda_hosts", "test_cuda_graphs"),
    ),
    "accumulate, flush, fence": ("–", "–", "–", ()),
}


def operations(accesses: list[str]) -> list[str]:
    lines = [
        "| operation | CPU | CUDA, one host | CUDA, several hosts | CUDA graphs | seen on the software CUDA by |",
        "|---|---|---|---|---|---|",
    ]
    tried = {name for names in accesses for name in names.split(", ")}
    for names, (host, hosts, graphs, files) in CUDA.items():
        for file in files:
            assert (ROOT / f"tests/cuda_python/{file}.py").exists()
        links = ", ".join(f"[{file}](../tests/cuda_python/{file}.py)" for file in files)
        if "put" in names or "flush" in names:
            assert set(names.split(", ")) <= tried
        lines.append(f"| {names} | yes | {host} | {hosts} | {graphs} | {links or '–'} |")
    return lines


def versions() -> list[str]:
    makefile = (ROOT / "Makefile").read_text()
    (tested,) = re.findall(r"^COMPAT \?= (.*)$", makefile, re.MULTILINE)
    lines = ["| PyTorch | wheels for Python | built and tested by `make compat` |", "|---|---|---|"]
    for torch_version, pythons in wheels.PYTHONS.items():
        lines.append(
            f"| {torch_version} | {', '.join(pythons)} | {'yes' if torch_version in tested.split() else '–'} |"
        )
    lines += ["", "| only from a PyTorch on | |", "|---|---|"]
    for name, (since, has) in SINCE.items():
        assert has() == (TorchVersion(torch.__version__) >= since), f"{name} with PyTorch {torch.__version__}"
        lines.append(f"| {name} | {since} |")
    return lines


def table(name: str, text: str | None = None, instead: str | None = None) -> str:
    """A table of the document as it is; or the document with another one in its place."""
    text = DOCUMENT.read_text() if text is None else text
    found = re.search(rf"<!-- generated: {name} -->\n(.*?)<!-- end: {name} -->", text, re.DOTALL)
    assert found, f"docs/support.md has no place for the table {name}"
    return found[1] if instead is None else text[: found.start(1)] + instead + text[found.end(1) :]


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_the_tables_of_what_is_supported_are_current(world: World) -> None:
    seen = world.run(elements)
    assert seen[0] == seen[1]
    (accesses, _) = world.run(windows, join=False)
    lines = {"elements": seen[0], "operations": operations(accesses), "versions": versions()}
    tables = {name: "\n".join(rows) + "\n" for name, rows in lines.items()}
    if os.environ.get("NCCLX_RS_UPDATE_DOCS") == "1":
        text = DOCUMENT.read_text()
        for name, rows in tables.items():
            text = table(name, text, rows)
        DOCUMENT.write_text(text)
    stale = [name for name, rows in tables.items() if table(name) != rows]
    assert not stale, (
        f"docs/support.md is stale: run NCCLX_RS_UPDATE_DOCS=1 pytest tests/python/test_support.py ({stale})"
    )
