"""PyTorch's torchcomms mode finds this package, and process groups over communicators call their hooks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, World, fresh_store, this_worker
from ncclx_rs import OpName
from ncclx_rs.hooks import FlightRecorderHook, NanCheckHook, TimelineHook

MINOR = tuple(int(part) for part in torch.__version__.split(".")[:2])

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="the mode of this package's backend")

# Operations of ordinary programs: on the default group, on groups of some ranks, and of libraries on top.
PROGRAM = """
import sys
import warnings
from datetime import timedelta

warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchcomms._comms import TorchComm, _BackendWrapper

backend, minor = sys.argv[1], int(sys.argv[2])
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
under = dist.group.WORLD._get_backend(torch.device("cpu"))
assert dist.distributed_c10d._use_torchcomms_enabled()
assert isinstance(under, _BackendWrapper) and not isinstance(under.get_comm(), _BackendWrapper)
comm = under.get_comm()
assert isinstance(comm, TorchComm) and (comm.get_rank(), comm.get_size()) == (rank, size)
called = []
comm.register_pre_hook(lambda name, op_id, args: called.append(name.name))

tensor = torch.full((4,), float(rank + 1))
dist.all_reduce(tensor)
assert tensor.tolist() == [3.0] * 4
parts = [torch.zeros(2) for _ in range(size)]
dist.all_gather(parts, torch.full((2,), float(rank)))
assert torch.stack(parts)[:, 0].tolist() == [0.0, 1.0]
parts = [torch.zeros(2) for _ in range(size)] if rank == 0 else None
dist.gather(torch.full((2,), float(rank)), parts, dst=0)
assert parts is None or parts[1].tolist() == [1.0, 1.0]
dist.scatter(tensor, [torch.full((4,), 7.0 + i) for i in range(size)] if rank == 0 else None, src=0)
assert tensor[0] == 7.0 + rank
other = torch.empty(4)
for work in dist.batch_isend_irecv(
    [dist.P2POp(dist.isend, tensor, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
):
    work.wait()
assert other[0] == 8.0 - rank
dist.barrier()
with dist._coalescing_manager(async_ops=True) as together:
    one, two = torch.ones(3), torch.ones(5)
    dist.all_reduce(one)
    dist.all_reduce(two)
together.wait()
assert one[0] == two[0] == 2.0
assert functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD).tolist() == [2.0] * 3
words = [None] * size
dist.all_gather_object(words, f"rank {rank}")
assert words == ["rank 0", "rank 1"]
assert called[:7] == ["all_reduce", "all_gather", "gather", "scatter", "send", "recv", "barrier"], called
getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)(timedelta(seconds=100), dist.group.WORLD)
if minor >= 15:
    assert comm.get_options().timeout == timedelta(seconds=100)

group = dist.new_group([0, 1])
mesh = init_device_mesh("cpu", (2,))
if minor >= 13:  # that of 2.11 makes groups of all ranks alone
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    alone = dist.new_group([0])
    if alone is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.barrier(alone)
    half = dist.split_group(split_ranks=[[0], [1]])
    assert half.size() == 1 and isinstance(half._get_backend(torch.device("cpu")), _BackendWrapper)
    both = dist.split_group(split_ranks=[[0, 1]])
    dist.all_reduce(one, group=both)
    assert one[0] == 4.0

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
for module in (model[0], model):
    fully_shard(module, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
for _ in range(3):
    loss = model(torch.ones(2, 8) * (rank + 1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[2] < losses[0]

plain = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
plain(torch.full((2, 8), float(rank))).sum().backward()
assert plain.module.weight.grad[0, 0] == 1.0  # the mean of 0 and 2
if group is not dist.group.WORLD:
    dist.destroy_process_group(group)
dist.destroy_process_group()
print(f"rank {rank} is done\\n", end="")
"""


@pytest.mark.smoke
def test_programs_run_in_pytorchs_torchcomms_mode(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # From 2.15 on a bare name is enough.
    backend = "ncclx" if MINOR >= (2, 15) else "cpu:ncclx"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "--module", "ncclx_rs.as_torchcomms", str(program), backend, str(MINOR[1])],
        env={**os.environ, "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("is done") == 2, done.stdout


def hooks_hear_of_c10d_calls(rank: int, size: int) -> None:
    assert this_worker is not None
    comm = ncclx_rs.new_comm("ncclx", "cpu", name="wrapped", store=fresh_store(), rank=rank, size=size)
    group = dist.ProcessGroup(dist.HashStore(), rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, ncclx_rs._BackendWrapper(comm))
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    before, after = [], []
    told = comm.register_pre_hook(lambda name, op_id, args: before.append((name, op_id, args)))
    heard = comm.register_post_hook(lambda op_id, args: after.append((op_id, args.work)))

    tensor = torch.ones(size)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    group.allreduce([tensor], options).wait()
    group.broadcast(tensor, root=1).wait()
    group.allgather([[torch.empty(size) for _ in range(size)]], [tensor]).wait()
    group.allgather([[torch.empty(i + 1) for i in range(size)]], [torch.ones(rank + 1)]).wait()
    group.reduce_scatter([torch.empty(1)], [list(tensor.split(1))]).wait()
    group.alltoall_base(torch.empty(size), tensor, [], []).wait()
    group.alltoall_base(torch.empty(size), tensor, [1] * size, [1] * size).wait()
    group.scatter([torch.empty(1)], [list(tensor.split(1))] if rank == 0 else []).wait()
    group.reduce(tensor, root=0).wait()
    group.allreduce_coalesced([torch.ones(2), torch.ones(3)]).wait()
    group.barrier().wait()

    expected = [
        OpName.all_reduce,
        OpName.broadcast,
        OpName.all_gather,
        OpName.all_gather_v,
        OpName.reduce_scatter,
        OpName.all_to_all_single,
        OpName.all_to_all_v_single,
        OpName.scatter,
        OpName.reduce,
        OpName.all_reduce,
        OpName.all_reduce,
        OpName.barrier,
    ]
    assert [name for name, _, _ in before] == expected
    assert [op_id for op_id, _ in after] == [op_id for _, op_id, _ in before]
    assert all(work.is_completed() for _, work in after)
    assert before[0][2].op == ncclx_rs.ReduceOp.MAX and before[0][2].tensor is not None
    assert before[1][2].root == 1 and before[7][2].root == 0
    assert before[6][2].input_split_sizes == [1] * size

    def refuse(name: OpName, op_id: int, args: object) -> None:
        raise ValueError("not this one")

    told.remove()
    refusal = comm.register_pre_hook(refuse)
    with pytest.raises(ValueError, match="not this one"):
        group.allreduce([tensor], options)
    refusal.remove()
    heard.remove()
    group.allreduce([tensor], options).wait()
    assert len(before) == len(expected)
    comm.finalize()


def observers_see_every_operation_of_a_c10d_call(rank: int, size: int) -> None:
    comm = ncclx_rs.new_comm("ncclx", "cpu", name="seen", store=fresh_store(), rank=rank, size=size)
    group = dist.ProcessGroup(dist.HashStore(), rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, ncclx_rs._BackendWrapper(comm))
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    timeline, recorder = TimelineHook(), FlightRecorderHook(isolated=True)
    for hook in (timeline, recorder):
        hook.register_with_comm(comm)
    NanCheckHook().register_with_comm(comm)
    good, bad = torch.ones(2), torch.full((3,), float("nan"))
    group.allreduce_coalesced([good, good.clone(), good.clone()]).wait()
    with pytest.raises(RuntimeError, match="NaN detected"):
        group.allreduce_coalesced([good, bad])
    with pytest.raises(RuntimeError, match="NaN detected"):
        comm.all_reduce(bad)
    group.allreduce_coalesced([good, good.clone()]).wait()
    comm.barrier()
    comm.finalize()
    expected = ["all_reduce"] * 5 + ["barrier"]
    shown = [event for event in timeline.events() if event["ph"] != "M"]
    assert sorted(event["name"] for event in shown) == expected
    assert all(event["ph"] == "X" and event["args"]["succeeded"] for event in shown)
    entries = json.loads(recorder.dump_json())["entries"]
    assert [entry["profiling_name"].partition(":")[2] for entry in entries] == expected, entries
    assert [entry["collective_seq_id"] for entry in entries] == [1, 2, 3, 4, 5, 6]
    assert all(entry["state"] == "completed" for entry in entries)


def group_over(comm: ncclx_rs.TorchComm) -> dist.ProcessGroup:
    group = dist.ProcessGroup(dist.HashStore(), comm.rank, comm.size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, ncclx_rs._BackendWrapper(comm))
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group


def assert_reduces(group: dist.ProcessGroup, size: int) -> None:
    tensor = torch.ones(3)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [float(size)] * 3


def a_group_over_a_communicator_ends_with_its_members(rank: int, size: int) -> None:
    store = fresh_store()
    comm = ncclx_rs.new_comm("ncclx", "cpu", name="changing", enable_reconfigure=True)
    with pytest.raises(RuntimeError, match="communicator `changing` has no members: call reconfigure first"):
        ncclx_rs._BackendWrapper(comm)
    store.set(f"handle{rank}", comm.get_init_handle())
    handles = [store.get(f"handle{r}").decode() for r in range(size)]
    comm.reconfigure(1, handles)
    former = group_over(comm)
    assert_reduces(former, size)
    comm.reconfigure(2, handles)
    for call in (
        lambda: former.allreduce([torch.ones(1)]),
        lambda: former.send([torch.ones(1)], 1 - rank, 0),
        lambda: former._start_coalescing(torch.device("cpu")),
    ):
        with pytest.raises(RuntimeError, match="communicator `changing` was reconfigured"):
            call()
    # Neither ends what the new members have.
    former.abort()
    former.shutdown()
    comm.barrier()
    assert_reduces(group_over(comm), size)
    comm.finalize()


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
@pytest.mark.parametrize(
    "check",
    [hooks_hear_of_c10d_calls, observers_see_every_operation_of_a_c10d_call],
    ids=lambda check: check.__name__,
)
def test_hooks_hear_of_c10d_calls(world: World, check) -> None:
    world.run(check, join=False)


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_a_group_over_a_communicator_ends_with_its_members(world: World) -> None:
    world.run(a_group_over_a_communicator_ends_with_its_members, join=False)


MESHES = """
import torch
import torch.distributed as dist
import torchcomms
from torchcomms import device_mesh

assert getattr(dist.distributed_c10d, "_TORCHCOMM_AVAILABLE", True)
with torchcomms.new_comm("ncclx", "cpu", "whole") as comm:
    for _ in range(2):
        mesh = device_mesh.build(comm, {"dp": 1})
        dist.all_reduce(torch.ones(2), group=mesh.get_group())
        device_mesh.close(mesh)
        assert not dist.is_initialized()
    comm.barrier()
"""


def test_meshes_are_closed_where_pytorch_knows_torchcomms(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(MESHES)
    process = [sys.executable, "-m", "ncclx_rs.as_torchcomms", str(program)]
    done = subprocess.run(process, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_c10d_backends_can_be_wrapped() -> None:
    class Silent(ncclx_rs.TorchCommBackend):
        def init(self, device: torch.device, name: str, options: ncclx_rs.CommOptions) -> None:
            pass

        def get_rank(self) -> int:
            return 0

        def get_size(self) -> int:
            return 1

    ncclx_rs.register_backend("silent", Silent)
    comm = ncclx_rs.new_comm("silent", "cpu")
    with pytest.raises(RuntimeError, match="Silent is no c10d backend"):
        ncclx_rs._BackendWrapper(comm)
    comm.finalize()
