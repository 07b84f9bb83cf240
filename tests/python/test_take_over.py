"""Programs that name gloo run on this backend, with `NCCLX_RS_INSTEAD_OF=gloo` or `ncclx_rs.take_over("gloo")`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from harness import BACKEND

WATCHDOG_SECONDS = 240

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="the entry point of this package")

# What serves a device, what PyTorch calls the group, and a call of it.
TOOLS = """
import datetime, logging, sys
import torch, torch.distributed as dist

def shown(group=None):
    group = group or dist.group.WORLD
    serves = {d.type: group._get_backend(d).name() for d in group._device_types}
    print(dist.get_backend(group), dist.get_backend_config(group), sorted(serves.items()))

def alone(backend, **more):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **more)
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [1.0] * 3
"""


def run(code: str, ranks: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program by itself, or with this number of ranks; it must succeed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--no-python"]
    done = subprocess.run(
        [sys.executable, *(launcher + [sys.executable] if ranks else []), "-c", TOOLS + code],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


GROUPS = """
logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
alone("gloo", pg_options=dist.ProcessGroupGloo._Options())
shown()
shown(dist.new_group([0]))
shown(dist.new_group([0], backend="GLOO"))
shown(dist.new_group([0], backend="ncclx_rs"))
shown(dist.init_device_mesh("cpu", (1,)).get_group())
dist.monitored_barrier()
dist.destroy_process_group()
from torch.testing._internal.distributed import fake_pg
for backend in (None, "cpu:gloo", "CPU:GLOO,CUDA:gloo", "cpu:gloo,mps:fake", "cpu:fake"):
    alone(backend)
    shown()
    dist.destroy_process_group()
"""

TAKEN = "ncclx_rs.groups: groups that the program makes of gloo run on ncclx_rs"


def test_groups_of_gloo_are_made_of_this_backend_and_keep_their_name() -> None:
    done = run(GROUPS, NCCLX_RS_INSTEAD_OF="gloo", NCCLX_RS_DEFAULT="")
    ours = "[('cpu', 'ncclx_rs')]"
    both = "[('cpu', 'ncclx_rs'), ('cuda', 'ncclx_rs')]"
    assert done.stdout.splitlines() == [
        f"gloo cpu:gloo,cuda:gloo {ours}",
        f"gloo cpu:gloo,cuda:gloo {ours}",
        f"gloo cpu:gloo,cuda:gloo {ours}",
        f"ncclx_rs cpu:ncclx_rs {ours}",
        f"gloo cpu:gloo,cuda:gloo {ours}",
        f"undefined cpu:gloo {ours}",
        f"cpu:gloo cpu:gloo {ours}",
        f"cpu:gloo,cuda:gloo cpu:gloo,cuda:gloo {both}",
        "cpu:gloo,mps:fake cpu:gloo,mps:fake [('cpu', 'gloo'), ('mps', 'fake')]",
        "cpu:fake cpu:fake [('cpu', 'fake')]",
    ]
    assert "a group of cpu:gloo,mps:fake stays on gloo, which PyTorch can combine with {'fake'}" in done.stderr
    assert done.stderr.count(TAKEN) == 1, done.stderr


CALLED = """
import ncclx_rs

try:
    ncclx_rs.take_over("nccl")
except ValueError as error:
    print(error)
alone("gloo")
shown()
for _ in range(2):
    try:
        ncclx_rs.take_over("gloo")
    except RuntimeError as error:
        print(error)
    shown(dist.new_group([0], backend="gloo"))
dist.destroy_process_group()
ncclx_rs.take_over("gloo")
alone("gloo")
ncclx_rs.take_over("gloo")
shown()
dist.destroy_process_group()
"""


def test_a_call_takes_over_before_the_first_group_and_is_refused_after_it() -> None:
    gloo = "gloo cpu:gloo,cuda:gloo [('cpu', 'gloo'), ('cuda', 'gloo')]"
    late = (
        "ncclx_rs: take_over: called too late, there {} already; call it before init_process_group, "
        "or set NCCLX_RS_INSTEAD_OF=gloo in the environment"
    )
    assert run(CALLED).stdout.splitlines() == [
        "ncclx_rs: take_over: argument `backend`: expected gloo, got 'nccl'",
        gloo,
        late.format("is 1 process group"),
        gloo,
        late.format("are 2 process groups"),
        gloo,
        "gloo cpu:gloo,cuda:gloo [('cpu', 'ncclx_rs')]",
    ]


WITHOUT_CUDA_HERE = """
import ncclx_rs._gpu, ncclx_rs._take_over as take_over

def refuse():
    raise ValueError("ncclx_rs: no device here can be served")

class Native:
    _cuda_devices = staticmethod(refuse)
    Options = take_over.native().Options

take_over.has_driver = lambda: True
take_over.native = lambda: Native
alone("gloo")
shown()
dist.destroy_process_group()
"""


def test_gloo_keeps_cuda_tensors_that_the_engine_cannot_serve() -> None:
    done = run(WITHOUT_CUDA_HERE, NCCLX_RS_INSTEAD_OF="gloo")
    assert done.stdout == "gloo cpu:gloo,cuda:gloo [('cpu', 'ncclx_rs'), ('cuda', 'gloo')]\n"


def test_a_wrong_name_is_a_warning_and_groups_stay_as_they_are() -> None:
    done = run("alone('gloo'); shown(); dist.destroy_process_group()", NCCLX_RS_INSTEAD_OF="nccl")
    assert "take_over: argument `backend`: expected gloo, got 'nccl'" in done.stderr
    assert "('cpu', 'gloo')" in done.stdout


def test_the_default_device_warns_of_no_group_that_was_taken_over() -> None:
    code = "alone('gloo'); shown(); dist.destroy_process_group()"
    done = run(code, NCCLX_RS_INSTEAD_OF="gloo", NCCLX_RS_DEFAULT="cpu")
    assert "('cpu', 'ncclx_rs')" in done.stdout
    assert "does not run on it" not in done.stderr, done.stderr


TWO_RANKS = """
dist.init_process_group("cpu:gloo")
rank = dist.get_rank()
objects = [None, None]
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": 0}, {"rank": 1}], objects
only = dist.new_group([1], backend="gloo")
if rank == 1:
    dist.all_reduce(torch.ones(1), group=only)
    assert dist.get_backend(only) == "gloo" and only._get_backend(torch.device("cpu")).name() == "ncclx_rs"
else:
    assert only == dist.GroupMember.NON_GROUP_MEMBER
mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
for name in ("a", "b"):
    group = mesh.get_group(name)
    assert group._get_backend(torch.device("cpu")).name() in ("ncclx_rs", "wrapper:ncclx_rs"), name
    total = torch.ones(2)
    dist.all_reduce(total, group=group)
    assert total.tolist() == [float(group.size())] * 2
late = torch.zeros(4)
if rank == 0:
    dist.send(torch.ones(4), 1)
else:
    assert dist.recv(late) == 0 and late.sum() == 4
dist.barrier()
dist.destroy_process_group()
print("done", flush=True)
"""


def test_ranks_use_sub_groups_meshes_and_objects_of_gloo() -> None:
    done = run(TWO_RANKS, ranks=2, NCCLX_RS_INSTEAD_OF="gloo")
    assert done.stdout.count("done") == 2
