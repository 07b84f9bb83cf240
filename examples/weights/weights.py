"""A trainer's FSDP2 shards go to processes that infer, while both keep running, in three ways that are compared.

    python examples/weights/weights.py
    python examples/weights/weights.py --width 512 --layers 4 --steps 40      # 50 MB of weights

Two processes train, two infer. The ways: one-sided writes (`RdmaTransport`), through shared memory and through TCP;
gloo's send and recv; files. The training is the same in all of them. Exits with 1 when a checksum is wrong, when
weights at the end are not those of the trainers bit for bit, or when losses differ between the ways.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import delivery
import ncclx_rs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from network import Layout, Network, Shape, batch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

TRAINERS, INFERRING = 2, 2
WAYS = ("one-sided, shared memory", "one-sided, TCP", "gloo send and recv", "files")
TIMEOUT = timedelta(seconds=120)


@dataclass
class Report:
    """What a process has done.

    Attributes:
        digest: of all of the model's weights, at the end.
        versions: how many versions it published or took.
        units: steps of training, or batches of inference.
        seconds: how long that took.
        losses: of each step, averaged over the trainers; none in a process that infers.
        delays: seconds from publication to use, of each version; none in a trainer.
    """

    digest: str
    versions: int
    units: int
    seconds: float
    losses: list[float]
    delays: list[float]


def digest(weights: list[Tensor]) -> str:
    """The digest of weights one after the other."""
    together = hashlib.sha256()
    for weight in weights:
        together.update(weight.detach().contiguous().numpy().tobytes())
    return together.hexdigest()[:16]


def train(job: delivery.Job, publisher: delivery.Publisher, group: dist.ProcessGroup, steps: int) -> Report:
    """Trains, and publishes after each step before which all have taken the last version, and after the last one."""
    torch.manual_seed(0)
    network = Network(job.layout.shape)
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in network.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2, momentum=0.9)
    losses, versions, begin = [], 0, time.monotonic()
    for step in range(1, steps + 1):
        tokens, targets = batch(step, publisher.trainer)
        loss = F.cross_entropy(network(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / TRAINERS
        dist.all_reduce(mean, group=group)
        losses.append(mean.item())
        if step == steps:
            publisher.wait()
        # The trainers must agree, for a version has shards of all of them.
        is_idle = torch.tensor(float(publisher.is_idle()))
        dist.all_reduce(is_idle, dist.ReduceOp.MIN, group=group)
        if is_idle:
            versions += 1
            job.layout.stage((shard(p) for p in network.parameters()), publisher.trainer, publisher.staged)
            publisher.publish(versions, step, last=step == steps)
    seconds = time.monotonic() - begin
    publisher.wait()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in network.parameters()]
    return Report(digest(whole), versions, steps, seconds, losses, [])


def shard(weight: Tensor) -> Tensor:
    """This trainer's part of a weight."""
    return (weight.to_local() if isinstance(weight, DTensor) else weight).detach()


def infer(subscriber: delivery.Subscriber) -> Report:
    """Infers with the newest version that is there, until the last one has come."""
    version, is_last, batches, delays, begin = 0, False, 0, [], 0.0
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while not is_last:
        headers = subscriber.arrived(version + 1)
        if headers is not None:
            version += 1
            subscriber.check(version, headers)
            delays.append((time.monotonic_ns() - min(header.published for header in headers)) / 1e9)
            is_last = bool(headers[0].last)
            begin = begin or time.monotonic()
            # From here on nothing reads the other slot.
            subscriber.take(version)
            deadline = time.monotonic() + TIMEOUT.total_seconds()
        elif time.monotonic() > deadline:
            raise RuntimeError(f"version {version + 1} did not come within {TIMEOUT.total_seconds():g} s")
        if version == 0:
            time.sleep(delivery.PAUSE)
        else:
            subscriber.networks[version % 2](batch(batches, subscriber.number)[0]).argmax(-1)
            batches += 1
    seconds = time.monotonic() - begin
    return Report(digest([subscriber.slots[version % 2]]), version, batches, seconds, [], delays)


def perform(way: str, rank: int, store: dist.Store, folder: Path, shape: Shape, steps: int) -> Report:
    """Runs one process's part: the first ranks train, the others infer. All have the same store and folder."""
    job = delivery.Job(Layout(shape, TRAINERS), INFERRING, store, folder)
    trains, number = rank < TRAINERS, rank if rank < TRAINERS else rank - TRAINERS
    group = None
    if trains:
        # A group of the trainers. Who infers is in no group.
        place = dist.PrefixStore("trainers", store)
        dist.init_process_group("ncclx_rs", store=place, rank=rank, world_size=TRAINERS, timeout=TIMEOUT)
        group = dist.group.WORLD
    side = sides(way, job, trains, number)
    try:
        report = train(job, side, group, steps) if isinstance(side, delivery.Publisher) else infer(side)
        # A process that closes its side ends what others have in flight with it.
        store.set(f"ended{rank}", "yes")
        store.wait([f"ended{other}" for other in range(TRAINERS + INFERRING)], TIMEOUT)
        return report
    finally:
        side.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def sides(way: str, job: delivery.Job, trains: bool, number: int) -> delivery.Publisher | delivery.Subscriber:
    """The trainer's or the inferring side of a way."""
    if way.startswith("one-sided"):
        hints = {"transport": "tcp" if way.endswith("TCP") else "shm"}
        of_way = delivery.OneSidedPublisher if trains else delivery.OneSidedSubscriber
        return of_way(job, number, hints)
    if way == "files":
        return delivery.WritingPublisher(job, number) if trains else delivery.ReadingSubscriber(job, number)
    place, rank = dist.PrefixStore("all", job.store), number if trains else TRAINERS + number
    size = TRAINERS + INFERRING
    comm = ncclx_rs.new_comm("gloo", "cpu", "weights", timeout=TIMEOUT, store=place, rank=rank, size=size)
    return delivery.SendingPublisher(job, number, comm) if trains else delivery.ReceivingSubscriber(job, number, comm)


def compare(reports: dict[str, list[Report]]) -> None:
    """Compares what the processes of each way have told.

    Raises:
        RuntimeError: weights or losses differ, or a process did nothing meanwhile.
    """
    expected = next(iter(reports.values()))[0]
    for way, of_way in reports.items():
        if len({report.digest for report in of_way}) != 1:
            raise RuntimeError(f"{way}: the weights at the end differ: {[report.digest for report in of_way]}")
        if len({report.versions for report in of_way}) != 1 or of_way[0].versions < 2:
            raise RuntimeError(f"{way}: the versions differ, or are few: {[report.versions for report in of_way]}")
        if any(report.losses != expected.losses for report in of_way[:TRAINERS]) or of_way[0].digest != expected.digest:
            raise RuntimeError(f"{way}: the training differs: {of_way[0].losses} and {expected.losses}")
        if any(report.units < report.versions for report in of_way):
            raise RuntimeError(f"{way}: a process has stood still: {[report.units for report in of_way]}")


def show(reports: dict[str, list[Report]], layout: Layout) -> None:
    """Prints a line for each way."""
    first = next(iter(reports.values()))[0]
    print(f"{4 * layout.elements / 1e6:.1f} MB of weights, loss {first.losses[0]:.4f} -> {first.losses[-1]:.4f}\n")
    print("| way | versions | ms from publication to use, median | training steps/s | batches inferred/s |")
    print("|---|---|---|---|---|")
    for way, of_way in reports.items():
        trainers, inferring = of_way[:TRAINERS], of_way[TRAINERS:]
        delay = 1000 * max(statistics.median(report.delays) for report in inferring)
        steps = min(report.units / report.seconds for report in trainers)
        batches = sum(report.units / max(report.seconds, 1e-9) for report in inferring)
        print(f"| {way} | {trainers[0].versions} | {delay:.1f} | {steps:.1f} | {batches:.0f} |")
    print("\nall weights are the trainers', bit for bit, and the training is the same in all ways")


def work(arguments: argparse.Namespace) -> None:
    """Runs all ways in this process, and leaves the reports in the folder."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    # torchrun's own store, in which every way gets a place of its own.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    reports: dict[str, Any] = {}
    for index, way in enumerate(arguments.ways):
        place, folder = dist.PrefixStore(f"way{index}", store), arguments.worker / f"way{index}"
        folder.mkdir(exist_ok=True)
        reports[way] = asdict(perform(way, rank, place, folder, shape_of(arguments), arguments.steps))
    torch.save(reports, arguments.worker / f"reports{rank}.pt")


def shape_of(arguments: argparse.Namespace) -> Shape:
    return Shape(arguments.layers, arguments.width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help="; ".join(WAYS))
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--width", type=int, default=Shape.width, help="a multiple of 4")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    ranks = TRAINERS + INFERRING
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    quiet = {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        worker = [*command, *sys.argv, "--worker", folder]
        finished = subprocess.run(worker, env=quiet | os.environ, check=False)
        if finished.returncode != 0:
            sys.exit(f"a process has failed: exit code {finished.returncode}")
        parts = [torch.load(Path(folder) / f"reports{rank}.pt") for rank in range(ranks)]
    reports = {way: [Report(**part[way]) for part in parts] for way in arguments.ways}
    try:
        compare(reports)
    except RuntimeError as error:
        sys.exit(str(error))
    show(reports, Layout(shape_of(arguments), TRAINERS))


if __name__ == "__main__":
    main()
