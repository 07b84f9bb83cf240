"""The flight recorder, and PyTorch's analyser on its dumps."""

from __future__ import annotations

import html
import http.client
import io
import json
import linecache
import logging
import os
import pickle
import signal
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from harness import WATCHDOG_SECONDS, World, fresh_store, lacking, leaving_together, this_worker
from ncclx_rs import ReduceOp, TorchComm, _pytorch_recorder
from ncclx_rs.diagnose import dumps
from ncclx_rs.hooks import FlightRecorderHook, NanCheckHook
from torch._C._distributed_c10d import _WorkerServer

pytestmark = pytest.mark.worlds(sizes=(1, 2), modes=("shm",))


@contextmanager
def communicator(rank: int, size: int, name: str = "watched", **options: Any) -> Iterator[TorchComm]:
    comm = ncclx_rs.new_comm("ncclx", "cpu", name, store=fresh_store(), rank=rank, size=size, **options)
    try:
        yield comm
    finally:
        comm.finalize()


def recorder_of(comm: TorchComm, max_entries: int | None = None) -> FlightRecorderHook:
    recorder = FlightRecorderHook(max_entries, isolated=True)
    recorder.register_with_comm(comm)
    return recorder


def entries(recorder: FlightRecorderHook, include_completed: bool = True) -> list[dict[str, Any]]:
    return json.loads(recorder.dump_json(include_completed))["entries"]


# Earlier analysers only know the backends NCCL and XCCL.
ANALYSER_KNOWS_US = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
needs_analyser = pytest.mark.skipif(not ANALYSER_KNOWS_US, reason="this PyTorch's analyser does not know ours")


def analyse(folder: Path, *flags: str) -> str:
    """The analyser's output for the dumps in a folder."""
    from torch.distributed.flight_recorder import fr_trace

    said = io.StringIO()
    logger, handler = logging.getLogger("Flight Recorder"), logging.StreamHandler(said)
    logger.addHandler(handler)
    try:
        fr_trace.main([*flags, str(folder), "--prefix", "trace_"])
    except SystemExit as end:
        assert not end.code, said.getvalue()
    finally:
        logger.removeHandler(handler)
    return said.getvalue()


# ---- what is remembered ----


def the_last_operations_are_remembered(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        recorder = recorder_of(comm, 5)
        for count in range(1, 9):
            comm.all_reduce(torch.ones(count, 2), ReduceOp.SUM, count % 2 == 0).wait()
        child = comm.split([rank], "child")
        assert child is not None
        child.broadcast(torch.ones(3, dtype=torch.int64), 0, False)
        assert recorder.size() == len(recorder) == 5
        dump = json.loads(recorder.dump_json())
        last = dump["entries"][-1]
        assert last["process_group"] == ["child", "ncclx"] and last["input_dtypes"] == ["Long"]
        assert [entry["input_sizes"] for entry in dump["entries"][:3]] == [[[6, 2]], [[7, 2]], [[8, 2]]]
        assert [entry["collective_seq_id"] for entry in dump["entries"]] == [6, 7, 8, 9, 1]
        assert all(entry["state"] == "completed" and entry["duration_ms"] > 0 for entry in dump["entries"])
        assert dump["pg_config"]["watched"]["ranks"] == f"[{','.join(map(str, range(size)))}]"
        assert dump["pg_config"]["child"]["ranks"] == f"[{rank}]"
        assert dump["pg_status"]["0"]["last_completed_collective"] == "9"
        assert entries(recorder, include_completed=False) == []
        recorder.reset()
        assert recorder.size() == 0
        child.finalize()


def what_is_in_flight_is_told_from_what_is_done(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        recorder = recorder_of(comm)
        received = torch.empty(1)
        work = comm.recv(received, (rank - 1) % size, True)
        comm.barrier(False)
        (in_flight,) = entries(recorder, include_completed=False)
        assert in_flight["state"] == "started" and not in_flight["retired"] and "duration_ms" not in in_flight
        assert json.loads(recorder.dump_json())["pg_status"]["0"]["last_completed_collective"] == "1"
        comm.barrier(False)
        comm.send(torch.ones(1), (rank + 1) % size, False)
        work.wait()
        comm.barrier(False)
        assert {entry["state"] for entry in entries(recorder)} == {"completed"}


def messages_are_numbered_by_route(rank: int, size: int) -> None:
    other = size - 1 - rank
    with communicator(rank, size) as comm:
        recorder = recorder_of(comm)
        for _ in range(2):
            comm.barrier(False)
            batch = comm.batch_op_create()
            batch.send(torch.ones(7), other)
            batch.recv(torch.empty(7), other)
            batch.issue(True).wait()
        listed = [
            (e["process_group"][0], e["profiling_name"], e["p2p_seq_id"]) for e in entries(recorder) if e["is_p2p"]
        ]
        if size == 2:
            out, back = f"watched {rank}->{other}", f"watched {other}->{rank}"
            send, recv = f"ncclx:send {rank}->{other}", f"ncclx:recv {rank}<-{other}"
            assert listed == [(out, send, 1), (back, recv, 1), (out, send, 2), (back, recv, 2)]
            assert json.loads(recorder.dump_json())["pg_config"][out]["ranks"] == "[0,1]"
        assert [entry["op_id"] for entry in entries(recorder)][1] == [entry["op_id"] for entry in entries(recorder)][2]


def a_receive_from_any_rank_is_on_no_ranks_route(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        group = dist.ProcessGroup(dist.HashStore(), rank, size)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        group._register_backend(torch.device("cpu"), kind, ncclx_rs._BackendWrapper(comm))
        group._set_default_backend(kind)
        recorder = recorder_of(comm)
        if rank == 1:
            for _ in range(2):
                comm.send(torch.ones(2), 0)
        else:
            group.recv_anysource([torch.empty(2)], 0).wait()
            comm.recv(torch.empty(2), 1)
            dump = json.loads(recorder.dump_json())
            received = [e for e in dump["entries"] if "recv" in e["profiling_name"]]
            listed = [(e["process_group"][0], e["profiling_name"], e["p2p_seq_id"]) for e in received]
            assert listed == [("watched ?->0", "ncclx:recv 0<-?", 1), ("watched 1->0", "ncclx:recv 0<-1", 1)]
            assert dump["pg_config"]["watched ?->0"]["ranks"] == "[0]"


def a_refused_operation_is_not_remembered(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        recorder = recorder_of(comm)
        NanCheckHook().register_with_comm(comm)
        comm.barrier(False)
        with pytest.raises(RuntimeError, match="NaN"):
            comm.all_reduce(torch.tensor([float("nan")]), ReduceOp.SUM, True)
        with pytest.raises(RuntimeError, match="contiguous"):
            comm.broadcast(torch.ones(4, 4).t(), 0, True)
        comm.all_reduce(torch.ones(1), ReduceOp.SUM, False)
        listed = [(entry["profiling_name"], entry["collective_seq_id"]) for entry in entries(recorder)]
        assert listed == [("ncclx:barrier", 1), ("ncclx:all_reduce", 2)]


def memory_does_not_grow_with_communicators(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        recorder = recorder_of(comm, 4)
        for number in range(10):
            child = comm.split(list(range(size)), f"child{number}")
            assert child is not None
            child.barrier(False)
            child.finalize()
        assert recorder.size() == 4
        known = json.loads(recorder.dump_json())["pg_config"]
        assert sorted(known) == ["child8", "child9", "watched"]


def other_members_are_another_group(rank: int, size: int) -> None:
    store = fresh_store()
    comm = ncclx_rs.new_comm("ncclx", "cpu", "changing", enable_reconfigure=True)
    recorder = recorder_of(comm)
    store.set(f"handle{rank}", comm.get_init_handle())
    handles = [store.get(f"handle{r}").decode() for r in range(size)]
    comm.reconfigure(1, handles).wait()
    comm.barrier(False)
    comm.reconfigure(2, [comm.get_init_handle()]).wait()
    comm.barrier(False)
    first, second = entries(recorder)
    assert first["pg_id"] != second["pg_id"] and first["collective_seq_id"] == second["collective_seq_id"] == 1
    assert json.loads(recorder.dump_json())["pg_config"]["changing"]["ranks"] == "[0]"
    comm.finalize()


@pytest.mark.parametrize(
    "check",
    [
        the_last_operations_are_remembered,
        what_is_in_flight_is_told_from_what_is_done,
        messages_are_numbered_by_route,
        a_refused_operation_is_not_remembered,
        memory_does_not_grow_with_communicators,
        other_members_are_another_group,
    ],
    ids=lambda check: check.__name__,
)
def test_recorder(world: World, check) -> None:
    world.run(check, join=False)


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_a_receive_from_any_rank_is_on_no_ranks_route(world: World) -> None:
    world.run(a_receive_from_any_rank_is_on_no_ranks_route, join=False)


def test_the_size_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "6")
    assert FlightRecorderHook(isolated=True)._ring_buffer.max_entries == 6
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    assert FlightRecorderHook(isolated=True)._ring_buffer.max_entries == 7
    monkeypatch.setenv("TORCHCOMM_FR_BUFFER_SIZE", "8")
    assert FlightRecorderHook(isolated=True)._ring_buffer.max_entries == 8
    shared = FlightRecorderHook(max_entries=3)
    assert FlightRecorderHook()._ring_buffer is shared._ring_buffer and shared._ring_buffer.max_entries == 8
    monkeypatch.setenv("TORCHCOMM_FR_BUFFER_SIZE", "many")
    with pytest.raises(ValueError, match="TORCHCOMM_FR_BUFFER_SIZE must be a number from zero on, got 'many'"):
        FlightRecorderHook()
    with pytest.raises(ValueError, match="negative"):
        FlightRecorderHook(max_entries=-1)


def test_a_recorder_of_no_size_is_off() -> None:
    comm = ncclx_rs.new_comm("fake", "cpu", "unwatched")
    recorder = FlightRecorderHook(max_entries=0)
    recorder.register_with_comm(comm)
    comm.barrier(False)
    assert not recorder.is_enabled() and not comm._pre_hooks
    comm.finalize()


# ---- dumps ----


def failures_are_dumped_to(name: str) -> None:
    os.environ["TORCHCOMM_FR_DUMP_TEMP_FILE"] = name
    del os.environ["TORCH_FR_DUMP_ON_TIMEOUT"]  # the default outside of tests


def a_timeout_leaves_a_dump(rank: int, size: int, folder: str) -> None:
    failures_are_dumped_to(f"{folder}/trace_")
    with communicator(rank, size, abort_process_on_timeout_or_error=False) as comm:
        recorder = recorder_of(comm)
        comm.split([rank], "child").finalize()  # type: ignore[union-attr]
        comm.barrier(False)
        comm.set_timeout(timedelta(seconds=1))
        with leaving_together():
            if rank == 0:
                with pytest.raises(RuntimeError, match="timed out"):
                    comm.all_reduce(torch.ones(10), ReduceOp.SUM, False)
            else:
                recorder.dump_file(rank)
    dump = pickle.loads(Path(f"{folder}/trace_{rank}").read_bytes())
    states = [(entry["profiling_name"], entry["state"]) for entry in dump["entries"]]
    assert states[:2] == [("ncclx:split", "completed"), ("ncclx:barrier", "completed")]
    assert rank != 0 or states[2] == ("ncclx:all_reduce", "started")


def a_process_that_is_aborted_leaves_a_dump(rank: int, size: int, folder: str) -> None:
    failures_are_dumped_to(f"{folder}/trace_")
    with communicator(rank, size, abort_process_on_timeout_or_error=rank == 0) as comm:
        recorder_of(comm)
        if rank == 0:
            comm.set_timeout(timedelta(seconds=1))
            comm.barrier(False)
        deadline = time.monotonic() + WATCHDOG_SECONDS
        while not Path(f"{folder}/trace_0").exists() and time.monotonic() < deadline:
            time.sleep(0.05)


def a_dump_that_cannot_be_written_does_no_harm(rank: int, size: int, folder: str) -> None:
    (Path(folder) / "file").touch()
    failures_are_dumped_to(f"{folder}/file/trace_")
    with communicator(rank, size, abort_process_on_timeout_or_error=False) as comm:
        recorder = recorder_of(comm)
        comm.set_timeout(timedelta(seconds=1))
        with leaving_together():
            if rank == 0:
                with pytest.raises(RuntimeError, match="timed out"):
                    comm.barrier(True).wait()
                assert comm.is_aborted()
                assert [entry["state"] for entry in entries(recorder)] == ["started"]


def a_dump_can_be_switched_off(rank: int, size: int, folder: str) -> None:
    failures_are_dumped_to(f"{folder}/trace_")
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
    with communicator(rank, size, abort_process_on_timeout_or_error=False) as comm:
        recorder_of(comm)
        comm.set_timeout(timedelta(seconds=1))
        with leaving_together():
            if rank == 0:
                with pytest.raises(RuntimeError, match="timed out"):
                    comm.barrier(False)
                assert comm.is_aborted()


def every_operation_is_dumped(rank: int, size: int, folder: str) -> None:
    os.environ["TORCHCOMM_FR_DUMP_TEMP_FILE"] = f"{folder}/trace_"
    with communicator(rank, size) as comm:
        recorder = recorder_of(comm)
        one, some = torch.ones(2), [torch.ones(2) for _ in range(size)]
        at_root = some if rank == 0 else []
        comm.all_reduce(one, ReduceOp.SUM, False)
        if rank < 2:  # the third rank takes no part
            works = [comm.send(one, 1 - rank, True), comm.recv(one.clone(), 1 - rank, True)]
            for work in works:
                work.wait()
        comm.all_gather(some, one, False)
        comm.gather(at_root, one, 0, False)
        comm.gather_single(torch.ones(2 * size), one, 0, False)
        comm.scatter(one, at_root, 0, False)
        batch = comm.batch_op_create()
        for peer in range(size):
            batch.send(one, peer)
            batch.recv(some[peer], peer)
        batch.issue(False)
        comm.reduce_scatter(one, some, ReduceOp.SUM, False)
        comm.reduce_scatter_single(one, torch.ones(2 * size), ReduceOp.SUM, False)
        turned = comm.split(list(reversed(range(size))), "turned")
        assert turned is not None
        if rank in (0, 2):
            (turned.send if rank == 0 else turned.recv)(one, 0 if rank == 0 else 2, False)
        turned.all_to_all_single(torch.ones(size), torch.ones(size), False)
        (file,) = ncclx_rs.dump(f"{folder}/engine", format="pytorch")
        assert file.name == f"trace_{rank}" and stat.S_IMODE(file.stat().st_mode) == 0o600
        turned.finalize()
        recorder.dump_file(rank)


@needs_analyser
@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_a_timeout_leaves_a_dump_that_the_analyser_reads(fresh_world: World, tmp_path: Path) -> None:
    fresh_world.run(a_timeout_leaves_a_dump, str(tmp_path), join=False)
    assert "all_reduce" in analyse(tmp_path, "-j")
    assert "missing ranks: {1}" in analyse(tmp_path)


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_a_process_that_is_aborted_leaves_a_dump(fresh_world: World, tmp_path: Path) -> None:
    fresh_world.run(a_process_that_is_aborted_leaves_a_dump, str(tmp_path), join=False, dies=[0])
    (entry,) = pickle.loads((tmp_path / "trace_0").read_bytes())["entries"]
    assert (entry["profiling_name"], entry["state"]) == ("ncclx:barrier", "started")


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_a_dump_that_cannot_be_written_does_no_harm(fresh_world: World, tmp_path: Path) -> None:
    fresh_world.run(a_dump_that_cannot_be_written_does_no_harm, str(tmp_path), join=False)


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_a_dump_can_be_switched_off(fresh_world: World, tmp_path: Path) -> None:
    fresh_world.run(a_dump_can_be_switched_off, str(tmp_path), join=False)
    assert not list(tmp_path.iterdir())


def test_a_signal_writes_dumps_of_open_communicators_alone(tmp_path: Path) -> None:
    hints = {"dump_directory": str(tmp_path), "dump_signal": "USR2"}

    def made(name: str) -> TorchComm:
        return ncclx_rs.new_comm("ncclx", "cpu", name=name, store=dist.HashStore(), rank=0, size=1, hints=hints)

    ended, still_open = made("ended"), made("open")
    ended.finalize()
    os.kill(os.getpid(), signal.SIGUSR2)
    deadline = time.monotonic() + WATCHDOG_SECONDS
    while not list(tmp_path.glob("*open*rank0.json")):
        assert time.monotonic() < deadline, "no dump comes"
        time.sleep(0.01)
    assert list(tmp_path.glob("*ended*")) == []
    still_open.finalize()


def test_a_dumps_name_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorder = FlightRecorderHook(isolated=True)
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(tmp_path / "nccl_"))
    assert recorder.dump_file(1) == str(tmp_path / "nccl_1")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "trace_"))
    assert recorder.dump_file(1) == str(tmp_path / "trace_1")
    monkeypatch.setenv("TORCH_FR_DUMP_DYNAMIC_FILE_NAME", "1")
    assert recorder.dump_file(1) == str(tmp_path / "trace_")


def test_a_failure_before_the_first_call_of_new_members_leaves_a_dump(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_ON_TIMEOUT", "1")
    monkeypatch.setenv("TORCHCOMM_FR_DUMP_TEMP_FILE", str(tmp_path / "trace_"))
    comm = ncclx_rs.new_comm("ncclx", "cpu", "changing", enable_reconfigure=True)
    recorder_of(comm)
    comm.reconfigure(1, [comm.get_init_handle()]).wait()
    comm._abort_hooks()
    assert (tmp_path / "trace_0").exists()
    comm.finalize()


def test_a_home_folder_is_needed_only_where_no_variable_names_the_file(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def home() -> Path:
        raise RuntimeError("there is no home")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.setenv("TORCH_FR_DUMP_ON_TIMEOUT", "1")
    comm = ncclx_rs.new_comm("ncclx", "cpu", "homeless", store=dist.HashStore(), rank=0, size=1)
    recorder_of(comm)
    comm.barrier(False)
    comm._abort_hooks()
    said = "could not write what rank 0 of communicator `homeless` did last: there is no home"
    assert said in capsys.readouterr().err
    _pytorch_recorder._write_trace()
    assert "could not be written: there is no home" in caplog.text
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "trace_"))
    comm._abort_hooks()
    assert (tmp_path / "trace_0").exists()
    comm.finalize()


@needs_analyser
@pytest.mark.worlds(sizes=(3,), modes=("shm",))
def test_the_analyser_finds_nothing_where_nothing_is_wrong(fresh_world: World, tmp_path: Path) -> None:
    fresh_world.run(every_operation_is_dumped, str(tmp_path), join=False)
    of_engine = (tmp_path / "engine").rename(tmp_path.with_name("engine"))
    for folder, exchange in ((tmp_path, "all_to_all_single("), (of_engine, "all_to_all(")):
        said = analyse(folder)
        for complaint in ("Not all ranks", "has errors", "mismatch", "cannot decide", "missing", "unrecognized"):
            assert complaint not in said, said
        printed = analyse(folder, "-j")
        for operation in ("send(s=0 d=1", "recv(s=1 d=0", "send(s=0 d=2", "gather(", "scatter(", exchange):
            assert operation in printed, printed


# ---- the engine's recorder ----


def subgroups_are_told_by_the_jobs_ranks(rank: int, size: int, folder: str) -> None:
    group = dist.new_group([2, 0])
    if rank != 1:
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        if rank == 0:
            dist.send(tensor, 2, group=group)
        else:
            dist.recv(tensor, group=group)
    dist.barrier()
    (file,) = ncclx_rs.dump(folder, format="pytorch")
    content = pickle.loads(file.read_bytes())
    members = {config["ranks"] for config in content["pg_config"].values()}
    assert file.name == f"trace_{rank}" and members == ({"[0,1,2]", "[0,2]"} if rank != 1 else {"[0,1,2]"})
    listed = [(entry["profiling_name"], entry["input_sizes"], entry["output_dtypes"]) for entry in content["entries"]]
    if rank == 2:  # a receive from any rank, whose sender is known by then
        assert listed[:2] == [("ncclx:all_reduce", [[3]], ["Float"]), ("ncclx:recv 1<-0", [], ["Byte"])]
    times = [entry["time_created_ns"] for entry in content["entries"]]
    assert times == sorted(times) and all(entry["duration_ms"] >= 0 for entry in content["entries"])
    with pytest.raises(ValueError, match="argument `format`"):
        ncclx_rs.dump(folder, format="yaml")  # type: ignore[arg-type]


@pytest.mark.worlds(sizes=(3,), modes=("shm",))
def test_subgroups_are_told_by_the_jobs_ranks(world: World, tmp_path: Path) -> None:
    world.run(subgroups_are_told_by_the_jobs_ranks, str(tmp_path))


def the_callers_stack_is_told(rank: int, size: int, folder: str) -> None:
    with communicator(rank, size, hints={"stack_frames": "6"}) as comm, communicator(rank, size, "plain") as plain:
        plain.barrier(False)
        comm.barrier(False)
        asynchronous = comm.all_reduce(torch.ones(2), ReduceOp.SUM, True)
        files = ncclx_rs.dump(f"{folder}/json")
        written = {dump.communicator: dump for dump in (dumps.parse(file.read_text()) for file in files)}
        assert [record.stack for record in written["plain"].records] == [[]]
        for record, line in zip(written["watched"].records, ("comm.barrier", "comm.all_reduce"), strict=True):
            assert len(record.stack) == 6
            own = next(frame for frame in record.stack if frame["name"] == "the_callers_stack_is_told")
            assert line in linecache.getline(own["filename"], own["line"])
        (trace,) = ncclx_rs.dump(folder, format="pytorch")
        frames = [entry.get("frames") for entry in pickle.loads(trace.read_bytes())["entries"]]
        assert frames == [None, *(record.stack for record in written["watched"].records)]
        asynchronous.wait()


@pytest.mark.worlds(sizes=(1,), modes=("shm",))
def test_the_callers_stack_is_told(world: World, tmp_path: Path) -> None:
    world.run(the_callers_stack_is_told, str(tmp_path), join=False)


def page(port: int, path: str) -> str:
    connection = http.client.HTTPConnection("localhost", port, timeout=WATCHDOG_SECONDS)
    connection.request("GET", path)
    answer = connection.getresponse()
    text = html.unescape(answer.read().decode())
    assert answer.status == 200, text
    return text


def the_debug_server_shows_the_recorder(rank: int, size: int, folder: str) -> None:
    known = pytest.importorskip("torch.distributed.debug._debug_handlers", reason="this PyTorch has no such pages")
    if not hasattr(known, "TorchCommsHealthCheckHandler"):
        pytest.skip("this PyTorch has no such pages")
    from torch.distributed.debug._frontend import FrontendServer
    from torch.distributed.debug._store import tcpstore_client

    if not socket.has_dualstack_ipv6():
        lacking("PyTorch's servers need IPv6")
    assert this_worker is not None
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "TORCHCOMM_FR_DUMP_TEMP_FILE": f"{folder}/trace_"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(this_worker.store_port)}
    dist.barrier()
    work = dist.all_reduce(torch.ones(5), async_op=True) if rank == 0 else None
    # As start_debug_server does it, but without a process of its own: a daemon like this one must not start any.
    server = _WorkerServer("::", 0)
    tcpstore_client().set(f"rank{rank}", f"http://localhost:{server.port}")
    with leaving_together():
        if rank == 0:
            port = FrontendServer(0)._server.server_port
            in_flight = page(port, "/torchcomms_fr_trace")
            assert "ncclx:all_reduce" in in_flight and "ncclx:barrier" not in in_flight, "what is over is left out"
            assert "ncclx:all_reduce" in page(port, "/torchcomms_fr_trace_json")
            assert '"healthy": true' in page(port, "/torchcomms_health_check")
    with leaving_together():
        with pytest.raises(RuntimeError, match="disagree"):
            work.wait() if work is not None else dist.all_reduce(torch.ones(6))
    with leaving_together():
        if rank == 0:
            health = page(port, "/torchcomms_health_check")
            assert '"healthy": false' in health and all(f"wrote {folder}/trace_{r}" in health for r in range(size))
            for r in range(size):
                last = pickle.loads(Path(f"{folder}/trace_{r}").read_bytes())["entries"][-1]
                assert last["profiling_name"] == "ncclx:all_reduce" and last["input_sizes"] == [[5 + r]]
    server.shutdown()


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_the_debug_server_shows_the_recorder(fresh_world: World, tmp_path: Path) -> None:
    fresh_world.run(the_debug_server_shows_the_recorder, str(tmp_path))
