"""Replicas that torchft's manager reconfigures. Skipped without torchft, which requirements-programs.txt installs."""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, needs

needs("torchft", "torchft is not installed; `make test` has it in requirements-programs.txt")

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="the process group of this package")

EXAMPLES = Path(__file__).parents[2] / "examples" / "torchft"


@pytest.mark.parametrize(
    "command",
    ["ddp.py", "ddp.py --process-group torchcomms", "hsdp.py", "diloco.py", "diloco.py --local-sgd"],
)
def test_a_replica_dies_and_comes_back(command: str) -> None:
    script, *options = command.split()
    process = [sys.executable, str(EXAMPLES / script), "--steps", "5", *options]
    done = subprocess.run(process, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killing replica 1" in done.stdout and "both models are" in done.stdout, done.stdout


def test_reconfiguring_ends_what_is_in_flight_at_once() -> None:
    from ncclx_rs.torchft import ProcessGroupNcclxRs
    from torchft.process_group import reconfigure_with_store

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    groups = [ProcessGroupNcclxRs(timeout=timedelta(seconds=100)) for _ in range(2)]

    def reconfigure(generation: int) -> None:
        def join(rank: int) -> None:
            place = f"localhost:{store.port}/generation/{generation}"
            reconfigure_with_store(groups[rank], place, rank, 2)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def all_reduce(rank: int) -> Any:
        return groups[rank].allreduce([torch.full((4,), rank + 1.0)], dist.AllreduceOptions())

    reconfigure(0)
    assert [group.size() for group in groups] == [2, 2]
    hung = all_reduce(0)
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(RuntimeError, match="aborted|rank 1 is lost"):
            hung.wait()
        ended.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    reconfigure(1)
    waiter.join()
    assert ended.is_set()
    works = [all_reduce(rank) for rank in range(2)]
    for work in works:
        work.wait()
    assert works[0].result()[0].tolist() == [3.0] * 4
    assert groups[0].errored() is None
    groups[1].shutdown()
    with pytest.raises(RuntimeError):
        all_reduce(0).wait()
    assert groups[0].errored() is not None
    groups[0].shutdown()
    assert groups[0].errored() is None
