"""Ten mistakes of newcomers: the text that each gets, as docs/troubleshooting.md has it, or that it does no harm."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from harness import BACKEND, lacking

WATCHDOG_SECONDS = 300

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="the texts are those of ncclx_rs")

# What launchers and rendezvous read: a newcomer's shell has none of it.
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


def program(code: str, *before: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program that no launcher has started, after the words `before`, which may start it otherwise."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    return subprocess.run(
        [*(before or (sys.executable,)), "-c", code],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
        check=False,
    )


def printed(code: str, **variables: str) -> str:
    """What a program prints that has to succeed."""
    done = program(code, **variables)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


# The text of what a call raises.
REFUSED = """
def refused(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was not refused")
"""

ALONE = (
    REFUSED
    + """
import os
import torch, torch.distributed as dist, ncclx_rs

comm = ncclx_rs.new_comm("ncclx", "cpu")
tensor = torch.ones(3)
comm.all_reduce(tensor)
assert (comm.rank, comm.size, tensor.tolist()) == (0, 1, [1.0] * 3)
comm.finalize()
for arguments in ({"backend": "ncclx_rs"}, {"backend": "cpu:NCCLX_RS", "init_method": "env://"}):
    dist.init_process_group(**arguments)
    dist.all_reduce(tensor)
    gathered = [None]
    dist.all_gather_object(gathered, "here")
    assert (dist.get_rank(), dist.get_world_size(), gathered) == (0, 1, ["here"])
    dist.destroy_process_group()

os.environ["MASTER_ADDR"] = "localhost"  # who names a host expects other ranks
for call in (lambda: dist.init_process_group("ncclx_rs"), lambda: ncclx_rs.new_comm("ncclx", "cpu")):
    assert "torchrun --standalone --nproc-per-node 2" in refused(call), refused(call)
del os.environ["MASTER_ADDR"]
os.environ |= {"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}
said = refused(lambda: dist.init_process_group("ncclx_rs"))
assert "init_process_group: this process was not started by torchrun: start the ranks with " in said, said
assert "or pass rank=1 and world_size=4, as its launcher calls it" in said, said
said = refused(lambda: dist.init_process_group("gloo"))  # no other backend's errors change
assert said.startswith("ValueError: Error initializing torch.distributed") and "torchrun" not in said, said
said = refused(lambda: dist.init_process_group("ncclx_rs", no_such_argument=1))
assert "init_process_group() got an unexpected keyword argument" in said, said
print("alone")
"""
)


def test_a_process_without_a_launcher_is_a_world_of_one() -> None:
    assert printed(ALONE) == "alone"


SINGLE = (
    REFUSED
    + """
import os, socket
import torch, torch.distributed as dist, ncclx_rs

version = torch.__version__
torch.__version__ = torch.torch_version.TorchVersion("1.99.0")
print("two versions of PyTorch:", refused(lambda: ncclx_rs.new_comm("ncclx", "cpu")))
torch.__version__ = version
print("wrong name in new_comm:", refused(lambda: ncclx_rs.new_comm("nccxl", "cpu")))
print("wrong name in torch.distributed:", refused(lambda: dist.init_process_group("cpu:ncclx")))

os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "NCCLX_RS_CONNECT_TIMEOUT_SECONDS": "1"}
taken = socket.create_server(("", 0))
os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
print("busy port:", refused(lambda: ncclx_rs.new_comm("ncclx", "cpu")))
taken.close()
free = socket.create_server(("", 0))
os.environ["MASTER_PORT"] = str(free.getsockname()[1])
free.close()
print("a rank that was not started:", refused(lambda: ncclx_rs.new_comm("ncclx", "cpu", "pair")))
os.environ["NCCLX_RS_SOCKET_IFNAME"] = "nosuch0"
print("wrong interface:", refused(lambda: ncclx_rs.new_comm("ncclx", "cpu")))
del os.environ["NCCLX_RS_SOCKET_IFNAME"]

comm = ncclx_rs.new_comm("ncclx", "cpu", "alone", rank=0, size=1)
# Stands for a CUDA tensor, which a machine without a GPU does not have.
print("wrong device:", refused(lambda: comm.all_reduce(torch.ones(1, device="meta"))))
comm.all_reduce(torch.ones(1))
comm.finalize()
"""
)

# The beginning of each line that the program prints.
SINGLE_TEXTS = (
    "two versions of PyTorch: ImportError: ncclx_rs was built for torch ",
    "wrong name in new_comm: ModuleNotFoundError: failed to find backend nccxl: it is none of ",
    "wrong name in torch.distributed: ValueError: ncclx_rs: init_process_group: argument `backend`: expected ncclx_rs",
    "busy port: DistNetworkError: new_comm: another program uses MASTER_PORT ",
    "a rank that was not started: DistBackendError: ncclx_rs: communicator `pair`: ranks [1] did not join within 1s",
    "wrong interface: ValueError: ncclx_rs: socket_ifname `nosuch0` matches no network interface that can be used; ",
    "wrong device: RuntimeError: all_reduce: tensors must be on cpu, as communicator `alone` is, got one on meta",
)


def test_mistakes_of_one_process() -> None:
    lines = printed(SINGLE).splitlines()
    told = [line for line in lines if line.startswith(tuple(text.split(":")[0] + ":" for text in SINGLE_TEXTS))]
    assert len(told) == len(SINGLE_TEXTS), lines
    for line, text in zip(told, SINGLE_TEXTS, strict=True):
        assert line.startswith(text), line


# A program that forks itself to become two ranks, for which one limit or mount holds.
PAIR = (
    REFUSED
    + """
import os, sys, tempfile, traceback
import torch, torch.distributed as dist, ncclx_rs


def joined(number, store):
    return ncclx_rs.new_comm(
        "ncclx",
        "cpu",
        "pair",
        store=store,
        rank=number,
        size=2,
        timeout=20,
        abort_process_on_timeout_or_error=False,
    )


def on_both(what):
    # What it returns on rank 0.
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store")
        child = os.fork()
        store = dist.FileStore(path, 2)
        if child == 0:
            try:
                what(1, store)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        told = what(0, store)
        os.waitpid(child, 0)
    return told
"""
)

DISAGREEING = (
    PAIR
    + """
def mismatched(number, store):
    comm = joined(number, store)
    told = refused(lambda: comm.all_reduce(torch.ones(3 + number)))
    comm.barrier()  # it works on
    comm.finalize()
    return told


def forgotten(number, store):
    comm = joined(number, store)
    if number == 0:
        told = refused(lambda: comm.all_reduce(torch.ones(1), timeout=1))
        store.set("told", "yes")
        comm.finalize()
        return told
    store.wait(["told"])


def of_another_build(number, store):
    if number == 1:
        root = store

        class Other(dist.Store):
            # What rank 0 writes reads as if it came from another version.
            def get(self, key):
                return root.get(key).replace(VERSION, OTHER)

            def set(self, key, value):
                root.set(key, value)

            def wait(self, keys, timeout=None):
                root.wait(keys)

        store = Other()
    return refused(lambda: joined(number, store))


VERSION = ncclx_rs.__version__.encode()
OTHER = VERSION[::-1] if VERSION[::-1] != VERSION else b"9" + VERSION[1:]
print("mismatched sizes:", on_both(mismatched))
print("forgotten rank:", on_both(forgotten))
print("two versions:", on_both(of_another_build))
"""
)


def test_mistakes_of_two_ranks() -> None:
    told = dict(line.split(": ", 1) for line in printed(DISAGREEING).splitlines() if ": " in line)
    sizes, forgotten, versions = told["mismatched sizes"], told["forgotten rank"], told["two versions"]
    assert "all_reduce" in sizes and "3" in sizes and "4" in sizes, sizes
    assert "all_reduce" in forgotten and "timed out after a timeout of 1" in forgotten, forgotten
    assert "rank 1 on host" in versions and "has build" in versions and "rank 0 has" in versions, versions


WORKS = (
    PAIR
    + """
def sums(number, store):
    comm = joined(number, store)
    tensor = torch.full((1_000_000,), number + 1.0)
    comm.all_reduce(tensor)
    comm.finalize()
    return tensor[0].item()


print(on_both(sums))
if "read-only" in sys.argv:
    print(refused(lambda: open("/dev/shm/ncclx_rs_test", "w")))
"""
)


def test_few_file_descriptors_are_enough_for_two_ranks() -> None:
    few = ("bash", "-c", 'ulimit -n 64 && exec "$0" "$@"', sys.executable)
    assert program(WORKS, *few).stdout == "3.0\n"


def test_a_read_only_dev_shm_does_no_harm() -> None:
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], check=False).returncode != 0:
        lacking("only root can make /dev/shm read-only, in a namespace of mounts")
    # `bind`: this mount alone, and not the file system, which everybody shares.
    within = ("unshare", "--mount", "bash", "-c", 'mount -o remount,bind,ro /dev/shm && exec "$0" "$@" read-only')
    done = program(WORKS, *within, sys.executable)
    assert done.stdout.startswith("3.0\nOSError: [Errno 30] Read-only file system"), done.stderr
