"""Data-parallel training that goes on while replicas die and come back, with torchft's manager on ncclx_rs.

    pip install torchft
    python examples/torchft_ddp.py

Starts torchft's lighthouse and two replicas, each a process that trains the same small model on data of its own. One
replica is killed in the midst of training: the other goes on alone. Then it is started anew, gets model and optimizer
from the other, and both go on together. At the end their models are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

# Read when torchft is imported, whose manager and lighthouse otherwise tell of every step.
os.environ.setdefault("RUST_LOG", "warn")

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.coordination import LighthouseServer

REPLICAS = 2
TIMEOUT = timedelta(seconds=30)


def process_group(kind: str) -> Any:
    """The process group that torchft's manager reconfigures."""
    if kind == "gloo":
        from torchft import ProcessGroupGloo

        return ProcessGroupGloo(timeout=TIMEOUT)
    if kind == "torchcomms":  # torchft's own, which takes this package for torchcomms
        import ncclx_rs

        ncclx_rs.install_as_torchcomms()
        from torchft.torchcomms import ProcessGroupTorchComms

        comm = ncclx_rs.new_comm("ncclx", "cpu", name="replicas", timeout=TIMEOUT, enable_reconfigure=True)
        return ProcessGroupTorchComms(comm, timeout=TIMEOUT)
    from ncclx_rs.torchft import ProcessGroupNcclxRs

    return ProcessGroupNcclxRs(timeout=TIMEOUT)


def digest(model: nn.Module) -> str:
    """The same for models whose parameters are the same, bit for bit."""
    together = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return hashlib.sha256(together.numpy().tobytes()).hexdigest()[:16]


def train(replica: int, lighthouse: str, last: Any, pace: float, kind: str, report: Connection) -> None:
    """One replica: trains until step ``last``, which may still change, however many steps it took part in."""
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=process_group(kind),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        load_state_dict=lambda state: (
            model.load_state_dict(state["model"]),
            inner.load_state_dict(state["optimizer"]),
        ),
        min_replica_size=1,
        replica_id=f"replica{replica}_",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="localhost",
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
    )
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    truth = torch.sin(torch.arange(16.0))
    draw = torch.Generator().manual_seed(100 + replica)
    while manager.current_step() < last.value:
        inputs = torch.randn(64, 16, generator=draw)
        optimizer.zero_grad()
        loss = (parallel(inputs).squeeze(1) - inputs @ truth).square().mean()
        loss.backward()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            report.send({"step": manager.current_step(), "loss": loss.item(), "with": manager.num_participants()})
        time.sleep(pace)
    report.send({"digest": digest(model)})
    manager.shutdown()


class Job:
    """The replicas, as seen from outside."""

    def __init__(self, pace: float, kind: str) -> None:
        self.lighthouse = LighthouseServer(
            bind="[::]:0", min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=50, heartbeat_timeout_ms=1000
        )
        self._pace, self._kind = pace, kind
        # The server imports for all replicas, also what optimizers import when they are made.
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["torch._dynamo", "torchft"])
        self.last = self._processes.Value("q", sys.maxsize)
        self.replicas: dict[int, Any] = {}
        self.reports: dict[int, Connection] = {}
        self.digests: dict[int, str] = {}

    def start(self, replica: int) -> None:
        ours, theirs = self._processes.Pipe(duplex=False)
        arguments = (replica, self.lighthouse.address(), self.last, self._pace, self._kind, theirs)
        self.replicas[replica] = self._processes.Process(target=train, args=arguments, daemon=True)
        self.replicas[replica].start()
        theirs.close()
        self.reports[replica] = ours

    def kill(self, replica: int) -> None:
        os.kill(self.replicas[replica].pid, signal.SIGKILL)
        self.replicas[replica].join()
        self.reports.pop(replica).close()

    def events(self) -> Any:
        """What replicas report, as ``(replica, report)``, until all are done."""
        while self.reports:
            for ready in wait(list(self.reports.values())):
                replica = next((name for name, pipe in self.reports.items() if pipe is ready), None)
                if replica is None:  # killed meanwhile
                    continue
                try:
                    yield replica, self.reports[replica].recv()
                except EOFError:
                    self.reports.pop(replica).close()
                    self.replicas[replica].join()
                    if self.replicas[replica].exitcode:
                        sys.exit(f"replica {replica} failed with {self.replicas[replica].exitcode}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Training in which a replica dies and comes back.")
    parser.add_argument("--steps", type=int, default=20, help="how many there are before the end, and between events")
    parser.add_argument("--pace", type=float, default=0.05, help="seconds that a step takes at least")
    parser.add_argument("--process-group", choices=["ncclx_rs", "torchcomms", "gloo"], default="ncclx_rs")
    options = parser.parse_args()

    job = Job(options.pace, options.process_group)
    for replica in range(REPLICAS):
        job.start(replica)
    phase, since = "together", 0
    first = loss = 0.0
    for replica, report in job.events():
        if "digest" in report:
            job.digests[replica] = report["digest"]
            continue
        step, loss, participants = report["step"], report["loss"], report["with"]
        print(f"replica {replica}: step {step}, loss {loss:.4f}, {participants} replicas", flush=True)
        first = first or loss
        if phase == "together" and participants == REPLICAS:
            since = since or step
            if step >= since + options.steps:
                print("killing replica 1", flush=True)
                job.kill(1)
                phase, since = "alone", step
        elif phase == "alone" and participants == 1 and step >= since + options.steps:
            print("starting replica 1 again", flush=True)
            job.start(1)
            phase = "coming back"
        elif phase == "coming back" and participants == REPLICAS:
            phase = "together again"
            job.last.value = step + options.steps
    job.lighthouse.shutdown()
    if phase != "together again":
        sys.exit(f"the replicas ended in phase `{phase}`")
    if loss > first:
        sys.exit(f"the loss went from {first:.4f} to {loss:.4f}")
    if len(set(job.digests.values())) != 1 or len(job.digests) != REPLICAS:
        sys.exit(f"the models differ: {json.dumps(job.digests)}")
    print(f"the loss went from {first:.4f} to {loss:.4f}; both models are {job.digests[0]}")


if __name__ == "__main__":
    main()
