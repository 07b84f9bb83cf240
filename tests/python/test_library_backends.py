"""Backends in shared libraries, written in Rust: the example passes our own tests, and every failure is reported."""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import ncclx_rs
import pytest
import test_object_api as api
import torch
import torch.distributed as dist
from harness import World, fresh_store, lacking
from ncclx_rs import ReduceOp, TorchComm, WorkStatus, _backends, _library
from reference import assert_same, data, reduced

ROOT = Path(__file__).parents[2]
VARIABLE = "NCCLX_RS_BACKEND_LIB_PATH_"


@functools.cache
def libraries() -> dict[str, str]:
    """Builds this workspace's shared libraries with cargo; returns their paths by name."""
    if shutil.which("cargo") is None:
        lacking("there is no cargo to build the libraries with")
    # With the packages, profile and features of `cargo test`, so that the engine is not built again.
    command = ["cargo", "build", "--locked", "--profile", "test", "--lib", "--example", "faulty_backend"]
    command += ["--message-format", "json-render-diagnostics"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    artifacts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    files = [Path(file) for artifact in artifacts for file in artifact.get("filenames", ())]
    return {file.stem.removeprefix("lib"): str(file) for file in files if file.suffix == ".so"}


def quantized_library() -> str:
    return libraries()["quantized_backend"]


def faulty_library() -> str:
    return libraries()["faulty_backend"]


# ---- the example backend ----


@pytest.fixture(scope="module")
def quantized_world() -> Iterator[World]:
    world = World(3, "shm", {f"{VARIABLE}QUANTIZED": quantized_library()})
    yield world
    world.close()


def on_quantized(rank: int, size: int, check: str) -> None:
    """Runs a check of the object API on the example in place of our own backend."""
    make = ncclx_rs.new_comm

    def new_comm(backend: str, *args: Any, **kwargs: Any) -> TorchComm:
        return make("quantized" if backend == "ncclx" else backend, *args, **kwargs)

    with mock.patch.object(ncclx_rs, "new_comm", new_comm):
        getattr(api, check)(rank, size)


@pytest.mark.parametrize(
    "check",
    [
        api.all_reduce_combines,
        api.rooted_operations_serve_every_root,
        api.gathering_and_scattering_take_equal_and_other_sizes,
        api.all_to_all_exchanges,
        api.messages_and_batches_go_round_a_ring,
        api.persistent_all_gather_repeats,
        api.works_can_be_awaited,
        api.objects_travel,
        api.communicators_split,
        api.wrong_splits_are_refused,
        api.wrong_calls_are_refused_and_change_nothing,
        api.a_finalized_communicator_refuses_everything,
        api.hooks_see_every_operation,
        api.members_change,
        api.a_late_rank_is_named_and_ends_the_communicator,
        api.abort_ends_what_is_in_flight,
    ],
    ids=lambda check: check.__name__,
)
def test_a_library_does_what_our_backend_does(quantized_world: World, check: Callable[..., None]) -> None:
    quantized_world.run(on_quantized, check.__name__, join=False)


def its_own_method_sums_in_8_bits(rank: int, size: int) -> None:
    comm = ncclx_rs.new_comm("quantized", "cpu", "tested", store=fresh_store(), rank=rank, size=size)
    backend: Any = comm.get_backend_impl()
    assert backend is comm.unsafe_get_backend() and "quantized_all_reduce" in dir(backend)
    assert comm.get_backend() == "quantized" and comm.get_backend_version() == "0.1.0"
    for count, block in ((1, 256), (1000, 64), (5000, 256)):
        tensor = data(rank, count)
        told = backend.quantized_all_reduce(tensor, block=block)
        exact = reduced([data(r, count) for r in range(size)])
        assert (tensor - exact).norm() < 0.02 * exact.norm() + 1e-6
        assert set(told) == {"bytes_sent"}
        if count == 5000:
            assert told["bytes_sent"] < 0.3 * 2 * 4 * count * (size - 1) / size
    for call, text in (
        (lambda: backend.quantized_all_reduce(torch.ones(4, dtype=torch.int32)), "expected a tensor of float32"),
        (lambda: backend.quantized_all_reduce(torch.ones(4, 4).t()), "must be contiguous"),
        (lambda: backend.quantized_all_reduce(torch.ones(4), torch.ones(4)), "expected one tensor, got 2"),
        (lambda: backend.quantized_all_reduce(torch.ones(4), 256), "expected tensors by position"),
        (lambda: backend.quantized_all_reduce(torch.ones(4), block=0), "at least 1"),
        (lambda: backend.quantized_all_reduce(torch.ones(4), blocks=3), "unknown field `blocks`"),
    ):
        with pytest.raises(ValueError, match=f"quantized_all_reduce: .*{text}"):
            call()
    with pytest.raises(AttributeError, match="no_such_method"):
        backend.no_such_method()
    assert not hasattr(backend, "c10d")
    with pytest.raises(RuntimeError, match="has no windows"):
        comm.new_window()
    comm.finalize()
    with pytest.raises(RuntimeError, match="shut down|closed"):
        backend.quantized_all_reduce(torch.ones(4))


def forgotten_works_keep_their_tensors(rank: int, size: int) -> None:
    comm = ncclx_rs.new_comm("quantized", "cpu", "tested", store=fresh_store(), rank=rank, size=size)
    after, before = (rank + 1) % size, (rank - 1) % size
    received = torch.empty(100_000)
    work = comm.recv(received, before, True)
    for turn in range(20):
        comm.all_reduce(data(rank, 10_000, salt=turn), ReduceOp.SUM, True)
    comm.send(data(rank, 100_000), after, True)
    work.wait()
    assert_same(received, data(before, 100_000), "recv")
    comm.recv(torch.empty(5), before, True)  # no rank sends to it
    comm.barrier(False)
    comm.abort()


@pytest.mark.parametrize("check", [its_own_method_sums_in_8_bits, forgotten_works_keep_their_tensors])
def test_the_example(quantized_world: World, check: Callable[..., None]) -> None:
    quantized_world.run(check, join=False)


def test_the_examples_program_runs() -> None:
    script = ROOT / "examples/quantized_backend/quantized_all_reduce.py"
    assert f"torchrun --standalone --nproc-per-node 2 {script.relative_to(ROOT)}" in script.read_text()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    variables = {**os.environ, f"{VARIABLE}QUANTIZED": quantized_library()}
    done = subprocess.run(launcher, capture_output=True, text=True, timeout=120, check=False, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.findall(r"rank (\d): float32 sent \d+ bytes, 8 bits \d+ \((\d+)\.\d%\), off by 0\.", done.stdout)
    assert sorted(told) == [("0", "25"), ("1", "25")], done.stdout


# ---- what goes wrong within a library ----


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[..., TorchComm]:
    monkeypatch.setenv(f"{VARIABLE}FAULTY", faulty_library())

    def make(**hints: str) -> TorchComm:
        return ncclx_rs.new_comm(
            "faulty",
            "cpu",
            "tested",
            abort_process_on_timeout_or_error=False,
            store=dist.HashStore(),
            hints=hints,
            rank=0,
            size=1,
        )

    return make


def test_a_join_that_fails_is_told(faulty: Callable[..., TorchComm]) -> None:
    with pytest.raises(RuntimeError, match="^no way into tested for rank 0$"):
        faulty(fault="error")
    with pytest.raises(RuntimeError, match="^the backend panicked: join fell over$"):
        faulty(fault="panic")


def test_panics_are_errors_of_the_call(faulty: Callable[..., TorchComm]) -> None:
    comm = faulty()
    with pytest.raises(RuntimeError, match="the backend panicked: submit fell over"):
        comm.all_reduce(torch.ones(3), ReduceOp.SUM, False)
    with pytest.raises(RuntimeError, match="the backend panicked: wait fell over"):
        comm.broadcast(torch.ones(3), 0, False)
    work = comm.broadcast(torch.ones(3), 0, True)
    assert work.is_completed() and work.status is WorkStatus.ERROR and "wait fell over" in str(work.exception())
    backend: Any = comm.unsafe_get_backend()
    with pytest.raises(RuntimeError, match="the backend panicked: call fell over"):
        backend.panic()
    with pytest.raises(RuntimeError, match="^it failed as asked$"):
        backend.fail()
    assert not comm.is_aborted()
    comm.finalize()


def test_what_a_backend_does_not_have_is_named(faulty: Callable[..., TorchComm]) -> None:
    comm = faulty()
    with pytest.raises(RuntimeError, match="^send: the backend faulty does not have it$"):
        comm.send(torch.ones(3), 0, False)
    with pytest.raises(ValueError, match="all_gather_single: argument `output`: expected 3 elements|`input`"):
        comm.all_gather_single(torch.ones(4), torch.ones(3), False)
    comm.finalize()


def test_failures_have_their_kinds(faulty: Callable[..., TorchComm]) -> None:
    comm = faulty()
    aborted: list[bool] = []
    comm.register_abort_hook(lambda: aborted.append(True))
    work = comm.barrier(True)
    with pytest.raises(RuntimeError, match="it went wrong"):
        work.wait()
    assert work.status is WorkStatus.ERROR and not comm.is_aborted()
    in_flight = comm.recv(torch.ones(3), 0, True)
    assert not in_flight.is_completed() and in_flight.status is WorkStatus.INPROGRESS
    work = comm.reduce(torch.ones(3), 0, ReduceOp.SUM, True)
    assert work.status is WorkStatus.TIMEDOUT
    assert comm.is_aborted() and aborted == [True], "a timeout is the communicator's end"
    with pytest.raises(RuntimeError, match="aborted"):
        in_flight.wait()
    comm.finalize()


def test_a_tensor_is_held_while_the_library_may_use_it(faulty: Callable[..., TorchComm]) -> None:
    comm = faulty()
    received, reduced = torch.ones(3), torch.ones(3)
    held = [weakref.ref(received), weakref.ref(reduced)]
    comm.recv(received, 0, True)  # the work is dropped in flight
    with pytest.raises(RuntimeError, match="submit fell over"):  # and so it may have started
        comm.all_reduce(reduced, ReduceOp.SUM, True)
    del received, reduced
    with pytest.raises(RuntimeError, match="it went wrong"):
        comm.barrier(False)
    assert [tensor() is not None for tensor in held] == [True, True]
    comm.abort()
    comm.finalize()
    del comm
    gc.collect()
    assert [tensor() is not None for tensor in held] == [False, False]


def test_a_wait_outlasts_a_limit_that_the_library_ignores(
    faulty: Callable[..., TorchComm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_library, "_OVERTIME_MILLISECONDS", 10)
    comm = faulty()
    with pytest.raises(RuntimeError, match=r"^recv: the backend faulty has ignored its time limit of 0\.02 s$"):
        comm.recv(torch.ones(3), 0, False, timeout=timedelta(milliseconds=20))
    assert comm.is_aborted()
    comm.finalize()


def test_views_that_memory_does_not_show_are_refused(faulty: Callable[..., TorchComm]) -> None:
    comm = faulty()
    with pytest.raises(ValueError, match=r"^broadcast: a library's backend takes no views that `resolve_conj\(\)`"):
        comm.broadcast(torch.ones(3, dtype=torch.complex64).conj(), 0, False)
    comm.finalize()


def test_methods_take_tensors_and_json(faulty: Callable[..., TorchComm]) -> None:
    comm = faulty()
    backend: Any = comm.unsafe_get_backend()
    tensor = torch.ones(4)
    assert backend.echo(tensor, scale=0.5, names=["a", "ü"]) == {"scale": 0.5, "names": ["a", "ü"]}
    assert tensor.tolist() == [7.0] * 4
    assert backend.echo() == {}
    backend.echo(tensor, tensor[1:1])
    with pytest.raises(ValueError, match="echo: expected arguments by name that JSON can say: .*set"):
        backend.echo(names={"a"})
    with pytest.raises(ValueError, match="echo: tensors 0 and 1 share memory"):
        backend.echo(tensor[:3], tensor[2:])
    with pytest.raises(ValueError, match="expected a tensor whose memory is aligned for float32"):
        backend.echo(torch.frombuffer(bytearray(64), dtype=torch.float32, offset=1, count=4))
    comm.finalize()


# ---- what goes wrong before ----


def library_of(folder: Path, source: str) -> str:
    """Compiles Rust source text to a shared library."""
    if shutil.which("rustc") is None:
        lacking("there is no rustc to build the libraries with")
    code, library = folder / "source.rs", folder / "library.so"
    code.write_text(source)
    command = ["rustc", "--edition", "2024", "--crate-type", "cdylib", "-o", str(library), str(code)]
    subprocess.run(command, check=True, timeout=120)
    return str(library)


TABLE = """
static TABLE: [u32; 2] = [{version}, {size}];
#[unsafe(no_mangle)]
pub extern "C" fn ncclx_rs_backend_table() -> *const [u32; 2] {{ &TABLE }}
"""
OF_TORCHCOMMS = """
#[unsafe(no_mangle)]
pub extern "C" fn create_dynamic_loader_other() {}
"""
OF_NOTHING = """
#[unsafe(no_mangle)]
pub extern "C" fn unrelated() {}
"""


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (TABLE.format(version=99, size=8), r"for version 99 of the interface of backends, .* has version 1;"),
        (TABLE.format(version=1, size=8), "its table has 8 bytes, and version 1 of the interface has 120"),
        (OF_NOTHING, "has no symbol `ncclx_rs_backend_table`, which a backend for ncclx_rs exports with .*!`$"),
        (OF_TORCHCOMMS, "has no symbol `ncclx_rs_backend_table`, .*it is a backend in C\\+\\+ for torchcomms"),
    ],
    ids=["other version", "short table", "no backend", "backend of torchcomms"],
)
@pytest.mark.parametrize("prefix", [VARIABLE, "TORCHCOMMS_BACKEND_LIB_PATH_"])
def test_a_library_that_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prefix: str, source: str, text: str
) -> None:
    monkeypatch.setenv(f"{prefix}OTHER", library_of(tmp_path, source))
    with pytest.raises(ImportError, match=rf"new_comm: the backend other, by {prefix}OTHER: .*library\.so.*{text}"):
        ncclx_rs.new_comm("other", "cpu")


def test_a_file_that_is_no_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(f"{VARIABLE}OTHER", str(tmp_path / "missing.so"))
    with pytest.raises(ImportError, match=r"missing\.so cannot be read: No such file"):
        ncclx_rs.new_comm("other", "cpu")
    text = tmp_path / "text.so"
    text.write_text("ncclx_rs_backend_table")
    monkeypatch.setenv(f"{VARIABLE}OTHER", str(text))
    with pytest.raises(ImportError, match=r"text\.so cannot be loaded: .*(too short|invalid ELF)"):
        ncclx_rs.new_comm("other", "cpu")
    monkeypatch.setenv(f"{VARIABLE}OTHER", "")
    with pytest.raises(ModuleNotFoundError, match="NCCLX_RS_BACKEND_LIB_PATH_OTHER names no library"):
        ncclx_rs.new_comm("other", "cpu")


# ---- which of several of one name counts ----


def install(folder: Path, distribution: str, group: str, target: str, source: str) -> None:
    """Writes the files that pip would install for a package with one module and one entry point, `shared`."""
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\nshared = {target}\n")
    (folder / f"{distribution}_module.py").write_text(source)


CLASS = """
import ncclx_rs

class Shared(ncclx_rs.TorchCommBackend):
    def init(self, device, name, options): pass
    def get_rank(self): return 0
    def get_size(self): return 1
    def get_backend_name(self): return {name!r}
"""


def name_of_shared() -> str:
    comm = ncclx_rs.new_comm("shared", "cpu", store=dist.HashStore(), rank=0, size=1)
    comm.finalize()
    return comm.get_backend()


def test_the_first_place_that_has_a_name_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Adds sources from the last to the first in the order of `new_comm`'s docstring."""
    monkeypatch.setenv("TORCHCOMMS_BACKEND_LIB_PATH_SHARED", faulty_library())
    assert name_of_shared() == "faulty"

    install(tmp_path / "a", "theirs", "torchcomms.backends", "theirs_module:Shared", CLASS.format(name="torchcomms"))
    monkeypatch.syspath_prepend(str(tmp_path / "a"))
    assert name_of_shared() == "torchcomms"
    assert "shared" in ncclx_rs.built_backends() and ncclx_rs.is_backend_built("shared")

    install(tmp_path / "b", "ours", "ncclx_rs.backends", "ours_module:Shared", CLASS.format(name="ncclx_rs"))
    monkeypatch.syspath_prepend(str(tmp_path / "b"))
    assert name_of_shared() == "ncclx_rs"

    monkeypatch.setenv(f"{VARIABLE}SHARED", faulty_library())
    assert name_of_shared() == "faulty"

    monkeypatch.setitem(_backends._registered, "shared", api.Doubling)
    assert name_of_shared() == "doubling"


def test_an_entry_point_may_be_a_module_that_registers_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = CLASS.format(name="by itself") + "\nncclx_rs.register_backend('shared', Shared)\n"
    install(tmp_path, "itself", "torchcomms.backends", "itself_module", source)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert name_of_shared() == "by itself"
    finally:
        _backends._registered.pop("shared", None)


def test_an_entry_points_module_may_name_a_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variable = f"{VARIABLE}SHARED"
    source = f"import os\nos.environ[{variable!r}] = {faulty_library()!r}\n"
    monkeypatch.delenv(variable, raising=False)
    install(tmp_path, "naming", "ncclx_rs.backends", "naming_module", source)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert name_of_shared() == "faulty"
    finally:
        os.environ.pop(variable, None)
