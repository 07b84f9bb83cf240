"""A job of two replicas that torchft keeps alive: one is killed during training, and comes back.

The program that imports this module has the function of a replica: see ddp.py, hsdp.py and diloco.py. The surviving
replica continues alone. The other one is started again, gets model and optimizer from the first, and both continue
together. At the end their models are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

# Read when torchft is imported, whose manager and lighthouse otherwise tell of every step.
os.environ.setdefault("RUST_LOG", "warn")

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager
from torchft.coordination import LighthouseServer

REPLICAS = 2
TIMEOUT = timedelta(seconds=30)


@dataclass
class ProcessConfig:
    """The parameters of one process of a replica.

    Attributes:
        replica: the number of its replica.
        rank: its rank in the replica.
        ranks: the number of processes in the replica.
        store_port: the port of the store that the replica's processes share.
        lighthouse: the address of torchft's lighthouse.
        last: the last step, which may still change; it does not depend on the replica's own number of steps.
        pace: the least duration of a step in seconds.
        process_group: the kind of process group between replicas.
        report: takes the process's reports.
    """

    replica: int
    rank: int
    ranks: int
    store_port: int
    lighthouse: str
    last: Any
    pace: float
    process_group: str
    report: Connection

    def manager(self, **options: Any) -> Manager:
        """torchft's manager for this process."""
        os.environ["TORCHFT_LIGHTHOUSE"] = self.lighthouse
        return Manager(
            pg=process_group(self.process_group),
            min_replica_size=1,
            replica_id=f"replica{self.replica}_",
            store_addr="localhost",
            store_port=self.store_port,
            rank=self.rank,
            world_size=self.ranks,
            hostname="localhost",
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            **options,
        )

    def stepped(self, manager: Manager, loss: float) -> None:
        """Reports a step that all replicas have taken."""
        self.report.send({"step": manager.current_step(), "loss": loss, "with": manager.num_participants()})

    def done(self, parameters: Iterable[torch.Tensor]) -> None:
        """Reports the model, so that it is compared with the other replica's, bit for bit."""
        together = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self.report.send({"digest": hashlib.sha256(together.numpy().tobytes()).hexdigest()[:16]})


class Regression:
    """A small model, and data that every process draws for itself."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
        self._truth = torch.sin(torch.arange(16.0))
        self._draw = torch.Generator().manual_seed(seed)

    def loss(self, model: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The loss of a model on the next batch."""
        inputs = torch.randn(64, 16, generator=self._draw)
        return (model(inputs).squeeze(1) - inputs @ self._truth).square().mean()


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


def run(train: Callable[[ProcessConfig], None], config: ProcessConfig) -> None:
    """Runs a process of a replica, which exits at once when it fails, for example after the loss of its peer."""
    try:
        train(config)
    except BaseException:
        traceback.print_exc()
        # An orderly exit would wait for torchft's threads, whose heartbeats make the replica look alive.
        os._exit(1)


class Job:
    """The replicas, from the launcher's side."""

    def __init__(self, train: Callable[[ProcessConfig], None], ranks: int, pace: float, kind: str) -> None:
        self.lighthouse = LighthouseServer(
            bind="[::]:0", min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=50, heartbeat_timeout_ms=1000
        )
        self._train, self._ranks, self._pace, self._kind = train, ranks, pace, kind
        # The server imports for all replicas, including the imports of optimizers' constructors.
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["torch._dynamo", "torchft"])
        self.last = self._processes.Value("q", sys.maxsize)
        self._stores: dict[int, dist.TCPStore] = {}
        self._running: dict[tuple[int, int], Any] = {}
        self._reports: dict[tuple[int, int], Connection] = {}

    def start(self, replica: int) -> None:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._stores[replica] = store
        for rank in range(self._ranks):
            ours, theirs = self._processes.Pipe(duplex=False)
            address = self.lighthouse.address()
            config = ProcessConfig(
                replica, rank, self._ranks, store.port, address, self.last, self._pace, self._kind, report=theirs
            )
            process = self._processes.Process(target=run, args=(self._train, config), daemon=True)
            process.start()
            theirs.close()
            self._running[replica, rank], self._reports[replica, rank] = process, ours

    def kill(self, replica: int) -> None:
        """Kills one process of a replica, and ends the others, which cannot continue without it, as torchrun does.

        One that waits for the dead one's vote would look alive to the other replica until its time is over.
        """
        os.kill(self._running[replica, self._ranks - 1].pid, signal.SIGKILL)
        for rank in range(self._ranks):
            self._running[replica, rank].terminate()
            self._running[replica, rank].join()
            self._reports.pop((replica, rank)).close()

    def events(self) -> Any:
        """The processes' reports as ``(replica, rank, report)``, until all are done."""
        while self._reports:
            for ready in wait(list(self._reports.values())):
                place = next((place for place, pipe in self._reports.items() if pipe is ready), None)
                if place is None:  # killed meanwhile
                    continue
                try:
                    yield *place, self._reports[place].recv()
                except EOFError:
                    self._reports.pop(place).close()
                    self._running[place].join()
                    if self._running[place].exitcode:
                        sys.exit(f"rank {place[1]} of replica {place[0]} failed with {self._running[place].exitcode}")


def parser() -> argparse.ArgumentParser:
    """The options that all programs have."""
    parser = argparse.ArgumentParser(description="Training in which a replica dies and comes back.")
    parser.add_argument("--steps", type=int, default=20, help="how many there are before the end, and between events")
    parser.add_argument("--pace", type=float, default=0.05, help="seconds that a step takes at least")
    parser.add_argument("--process-group", choices=["ncclx_rs", "torchcomms", "gloo"], default="ncclx_rs")
    return parser


def main(train: Callable[[ProcessConfig], None], options: argparse.Namespace, ranks: int = 1) -> None:
    """Runs the job.

    Args:
        train: the function of every process of a replica.
        options: the command line.
        ranks: how many processes a replica has.
    """
    job = Job(train, ranks, options.pace, options.process_group)
    for replica in range(REPLICAS):
        job.start(replica)
    phase, since = "together", 0
    first = loss = 0.0
    digests: dict[int, set[str]] = {rank: set() for rank in range(ranks)}
    done = 0
    for replica, rank, report in job.events():
        if "digest" in report:
            digests[rank].add(report["digest"])
            done += 1
        if rank != 0 or "step" not in report:
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
    if done != REPLICAS * ranks or any(len(models) != 1 for models in digests.values()):
        sys.exit(f"the models differ: {json.dumps({rank: sorted(models) for rank, models in digests.items()})}")
    models = " and ".join(model for own in digests.values() for model in own)
    print(f"the loss went from {first:.4f} to {loss:.4f}; both models are {models}")
