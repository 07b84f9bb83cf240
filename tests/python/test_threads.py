"""Several threads of a process use the package for the first time at once."""

from __future__ import annotations

import subprocess
import sys

import pytest
from harness import BACKEND

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="ncclx_rs is not under test")

# The first of several threads makes what a process makes once; the interpreter switches between them all the time.
THREADS = """
import sys
import threading

import ncclx_rs
import torch
import torch.distributed as dist

failed = []
threading.excepthook = failed.append
sys.setswitchinterval(1e-6)
everyone = threading.Barrier(8)


def member(number):
    everyone.wait()
    comm = ncclx_rs.new_comm("ncclx", "cpu", f"of_{number}", store=dist.HashStore(), rank=0, size=1)
    tensor = torch.ones(3)
    comm.all_reduce(tensor, ncclx_rs.ReduceOp.SUM, False)
    handles = []
    askers = [threading.Thread(target=lambda: handles.append(comm.get_init_handle())) for _ in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert len(set(handles)) == 1 and len(handles) == 4, handles
    comm.finalize()


threads = [threading.Thread(target=member, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(f"{len(failed)} threads failed: {failed[0].exc_value!r}" if failed else 0)
"""


def test_threads_make_their_first_communicators_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
