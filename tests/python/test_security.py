"""Unauthenticated peers are refused, data is encrypted where asked for, and secrets are never written."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from harness import World, fresh_store
from ncclx_rs import ReduceOp, TorchComm, _backends, _reconfigure
from ncclx_rs._load import native
from ncclx_rs._types import CommOptions
from reference import assert_same, data, reduced

SECRET = "a secret of the ranks alone"
PROTECTED = {"NCCLX_RS_TLS": "on", "NCCLX_RS_JOB_SECRET": SECRET}


def assert_works(comm: TorchComm, rank: int, size: int) -> None:
    for count in (10, 300_000):
        tensor = data(rank, count)
        comm.all_reduce(tensor, ReduceOp.SUM, False)
        assert_same(tensor, reduced([data(r, count) for r in range(size)]), f"all_reduce of {count}")


def elastic(rank: int, size: int) -> tuple[TorchComm, list[str]]:
    """A communicator without members, and every rank's handle."""
    store = fresh_store()
    comm = ncclx_rs.new_comm("ncclx", "cpu", "elastic", enable_reconfigure=True, timeout=timedelta(seconds=60))
    store.set(f"handle{rank}", comm.get_init_handle())
    return comm, [store.get(f"handle{r}").decode() for r in range(size)]


def everything_works_protected(rank: int, size: int) -> Sequence[str]:
    """Runs operations of all kinds; returns the secrets that only the ranks know."""
    print("begins", file=sys.stderr)
    with pytest.raises(dist.DistBackendError, match="timed out"):
        dist.recv(torch.empty(1), (rank + 1) % size)
    dist.barrier()
    comm, handles = elastic(rank, size)
    for uuid in (1, 2):
        comm.reconfigure(uuid, handles).wait()
        assert_works(comm, rank, size)
    child = comm.split(list(range(size)), "child")
    assert child is not None
    assert_works(child, rank, size)
    child.finalize()
    with pytest.raises(RuntimeError, match="is there twice") as twice:
        comm.reconfigure(3, [*handles, handles[0]])
    with pytest.raises(RuntimeError, match="expected results of get_init_handle") as garbled:
        comm.reconfigure(3, ["x" + handles[0]])
    comm.finalize()
    tokens = [handle.split(":")[1] for handle in handles]
    assert not [token for token in tokens if token in f"{twice.value} {garbled.value}"]
    return [SECRET, *tokens]


def test_secrets_are_in_no_log_and_no_dump(tmp_path: Path) -> None:
    # PyTorch's own recorder takes long to name the lines of a stack.
    verbose = {"TORCH_CPP_LOG_LEVEL": "INFO", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_INCLUDE_STACK_TRACE": "0"}
    world = World(2, "hier", PROTECTED | verbose | {"NCCLX_RS_DUMP_DIRECTORY": str(tmp_path)})
    try:
        secrets = {secret for known in world.run(everything_works_protected, timeout=3.0) for secret in known}
        logs = "".join(log.read_text() for log in world._logs)
    finally:
        world.close()
    dumps = list(tmp_path.iterdir())
    assert dumps and {dump.stat().st_mode & 0o777 for dump in dumps} == {0o600}
    assert logs.count("begins") == 2
    assert not [secret for secret in secrets if secret in logs + "".join(dump.read_text() for dump in dumps)]


def only_members_get_in(rank: int, size: int) -> None:
    comm, handles = elastic(rank, size)
    if rank == 1:
        host, port = _reconfigure._host_and_port(handles[0])
        with pytest.raises(RuntimeError, match="does not know the secret|no store answers"):
            native().SecretStore.connect(f"{host}:{port}", bytes(32), timedelta(seconds=5))
        with pytest.raises(RuntimeError):
            dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5)).set("key", "value")
        # An outsider that knows the store's content, but not the handles.
        seen = _reconfigure._rendezvous_store(1, handles, timedelta(seconds=60)).get("ncclx_rs/root")
        for hints, error in (({}, "has no job secret"), ({"group_secret": "g" * 16}, "does not know the secret")):
            options = CommOptions()
            options.store, options.rank, options.size = dist.HashStore(), 1, size
            options.name, options.timeout, options.hints = "elastic", timedelta(seconds=60), hints
            options.store.set("ncclx_rs/root", seen)
            assert "g" * 16 not in repr(options)
            with pytest.raises((RuntimeError, ValueError), match=error):
                _backends._make_ncclx(options)
    comm.reconfigure(1, handles).wait()
    assert_works(comm, rank, size)
    comm.finalize()


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_only_members_get_in(world: World) -> None:
    world.run(only_members_get_in, join=False)


def joins_with_a_secret_of_its_own(rank: int, size: int) -> str:
    os.environ["NCCLX_RS_JOB_SECRET"] = f"the secret of rank {rank}"
    try:
        with pytest.raises((RuntimeError, ValueError)) as refused:
            limit = timedelta(seconds=5)
            ncclx_rs.new_comm("ncclx", "cpu", "apart", store=fresh_store(), rank=rank, size=size, timeout=limit)
        return str(refused.value)
    finally:
        del os.environ["NCCLX_RS_JOB_SECRET"]


@pytest.mark.worlds(sizes=(2,), modes=("tcp",))
def test_ranks_with_different_job_secrets_do_not_meet(world: World) -> None:
    root, guest = world.run(joins_with_a_secret_of_its_own, join=False)
    assert "ranks [1] did not join" in root and "does not know the secret" in guest
