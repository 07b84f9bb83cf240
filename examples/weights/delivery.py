"""Three ways of weights from trainers to those who infer: one-sidedly, by gloo's send and recv, through files.

A trainer has a `Publisher`, an inferring process has a `Subscriber`. Both go on meanwhile. Whoever infers has two
slots: one is in use, the other one is filled. A trainer sends version n only when all have taken version n - 1, and
with it have left the slot that version n goes to.
"""

from __future__ import annotations

import os
import pickle
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from ncclx_rs import RdmaMemory, RdmaTransport, TorchComm
from network import Layout
from torch import Tensor

TIMEOUT = timedelta(seconds=120)
PAUSE = 0.0005


@dataclass(frozen=True)
class Header:
    """What a trainer tells of a version.

    Attributes:
        version: its number, from 1 on.
        step: how many steps it was trained for.
        last: 1 for the last one, otherwise 0.
        published: when it was published, by the host's clock in nanoseconds.
        checksum: the checksum of this trainer's shards.
    """

    version: int
    step: int
    last: int
    published: int
    checksum: int

    def tensor(self) -> Tensor:
        """The same as a tensor, int64 of shape [5]."""
        return torch.tensor(astuple(self))


NO_HEADER = Header(0, 0, 0, 0, 0).tensor()
BYTES_OF_VERSION = NO_HEADER.element_size()


@dataclass(frozen=True)
class Job:
    """What all processes know.

    Attributes:
        layout: where the weights lie.
        inferring: how many processes infer.
        store: the store in which they meet.
        folder: where files go.
    """

    layout: Layout
    inferring: int
    store: dist.Store
    folder: Path


class Publisher(ABC):
    """A trainer's side.

    Args:
        job: what all know.
        trainer: the number of this trainer.
    """

    def __init__(self, job: Job, trainer: int) -> None:
        self.job, self.trainer = job, trainer
        self.staged = torch.zeros(job.layout.count(trainer))
        self._thread = ThreadPoolExecutor(1)
        self._delivery: Future[None] | None = None

    def is_idle(self) -> bool:
        """Whether all have taken what was published. An error of the delivery is raised here."""
        if self._delivery is None:
            return True
        if not self._delivery.done():
            return False
        self._delivery.result()
        return True

    def publish(self, version: int, step: int, last: bool) -> None:
        """Begins to deliver what lies in `staged`, which must stay as it is until `is_idle`."""
        checksum = self.job.layout.checksum_of_staged(self.staged)
        header = Header(version, step, int(last), time.monotonic_ns(), checksum)
        self._delivery = self._thread.submit(self.deliver, header)

    def wait(self) -> None:
        """Waits until all have taken what was published."""
        if self._delivery is not None:
            self._delivery.result()

    @abstractmethod
    def deliver(self, header: Header) -> None:
        """Delivers, and returns when all have taken it. Runs on a thread of its own."""

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()


class Subscriber(ABC):
    """An inferring process's side.

    Args:
        job: what all know.
        number: the number of this process among those that infer.
    """

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number = job, number
        self.slots = [torch.zeros(job.layout.elements) for _ in range(2)]
        self.networks = [job.layout.network(slot) for slot in self.slots]

    @abstractmethod
    def arrived(self, version: int) -> list[Header] | None:
        """The headers of all trainers for that version, once it lies whole in slot version % 2. Never waits."""

    @abstractmethod
    def take(self, version: int) -> None:
        """Tells the trainers that this version is in use, and that they may fill the other slot."""

    def check(self, version: int, headers: list[Header]) -> None:
        """Compares a version that has arrived with its headers.

        Raises:
            RuntimeError: the bytes of a trainer are not those that it has sent, or the trainers' versions differ.
        """
        for trainer, header in enumerate(headers):
            got, expected = self.job.layout.checksum_in_model(self.slots[version % 2], trainer), header.checksum
            if got != expected:
                raise RuntimeError(f"version {version} of trainer {trainer}: checksum {got:08x}, not {expected:08x}")
        told = {(header.version, header.step, header.last) for header in headers}
        if told != {(version, headers[0].step, headers[0].last)}:
            raise RuntimeError(f"expected version {version} from all trainers, got {sorted(told)}")

    @abstractmethod
    def close(self) -> None:
        """Ends what is open."""


class OneSidedPublisher(Publisher):
    """Writes shards to where they lie in the whole model, in the memory of each inferring process.

    The version's number is written when all else is there. The other side looks at it, and calls nothing. It writes the
    number of the version that it has taken into this process's memory.
    """

    def __init__(self, job: Job, trainer: int, hints: dict[str, str]) -> None:
        super().__init__(job, trainer)
        self.taken = torch.zeros(job.inferring, dtype=torch.int64)
        self.header = NO_HEADER.clone()
        self._memories = [RdmaMemory(tensor) for tensor in (self.staged, self.header, self.taken)]
        self.transports = [RdmaTransport("cpu", TIMEOUT, hints) for _ in range(job.inferring)]
        for number, transport in enumerate(self.transports):
            taken = self._memories[2].to_remote_buffer(number * BYTES_OF_VERSION, BYTES_OF_VERSION)
            told = pickle.dumps((transport.bind(), taken))
            job.store.set(f"to_inferring{number}/from_trainer{trainer}", told)
        self.remote = []
        for number, transport in enumerate(self.transports):
            address, slots, headers = pickle.loads(job.store.get(f"to_trainer{trainer}/from_inferring{number}"))
            transport.connect(address)
            self.remote.append((slots, headers))

    def deliver(self, header: Header) -> None:
        staged, told, _ = self._memories
        self.header.copy_(header.tensor())
        slot, size = header.version % 2, self.staged.element_size()
        bodies = []
        for transport, (slots, headers) in zip(self.transports, self.remote, strict=True):
            spans = [
                (staged.to_view(s.at_trainer * size, s.count * size), slots[slot].to_view(s.in_model * size))
                for s in self.job.layout.spans(self.trainer)
                if s.count > 0
            ]
            rest = (told.to_view(BYTES_OF_VERSION), headers[slot].to_view(BYTES_OF_VERSION))
            bodies.append(transport.write_batch([*spans, rest]))
        for transport, (_, headers), body in zip(self.transports, self.remote, bodies, strict=True):
            body.wait()
            # A write has no order with others in flight, so the number goes when these have ended.
            transport.write(told.to_view(0, BYTES_OF_VERSION), headers[slot])
        deadline = time.monotonic() + TIMEOUT.total_seconds()
        while late := [number for number, taken in enumerate(self.taken.tolist()) if taken < header.version]:
            if time.monotonic() > deadline or not all(self.transports[number].connected() for number in late):
                raise RuntimeError(f"version {header.version} was not taken by the inferring processes {late}")
            time.sleep(PAUSE)

    def close(self) -> None:
        super().close()
        for transport in self.transports:
            transport.close()


class OneSidedSubscriber(Subscriber):
    """Exposes the slots, and a header for each slot and trainer. That is all: bytes come without its help."""

    def __init__(self, job: Job, number: int, hints: dict[str, str]) -> None:
        super().__init__(job, number)
        trainers = job.layout.trainers
        self.headers = NO_HEADER.repeat(2, trainers, 1)
        self.number_taken = torch.zeros(1, dtype=torch.int64)
        memories = [RdmaMemory(tensor) for tensor in (*self.slots, self.headers)]
        self._memories = [*memories, RdmaMemory(self.number_taken)]
        self.transports = [RdmaTransport("cpu", TIMEOUT, hints) for _ in range(trainers)]
        slots, each = [memory.to_remote_buffer() for memory in memories[:2]], NO_HEADER.nbytes
        for trainer, transport in enumerate(self.transports):
            headers = [memories[2].to_remote_buffer((slot * trainers + trainer) * each, each) for slot in range(2)]
            told = pickle.dumps((transport.bind(), slots, headers))
            job.store.set(f"to_trainer{trainer}/from_inferring{number}", told)
        self.taken = []
        for trainer, transport in enumerate(self.transports):
            address, taken = pickle.loads(job.store.get(f"to_inferring{number}/from_trainer{trainer}"))
            transport.connect(address)
            self.taken.append(taken)

    def arrived(self, version: int) -> list[Header] | None:
        of_slot = self.headers[version % 2]
        if any(told != version for told in of_slot[:, 0].tolist()):
            return None
        return [Header(*told) for told in of_slot.tolist()]

    def take(self, version: int) -> None:
        self.number_taken.fill_(version)
        for transport, taken in zip(self.transports, self.taken, strict=True):
            transport.write(self._memories[-1].to_view(), taken)

    def close(self) -> None:
        for transport in self.transports:
            transport.close()


class SendingPublisher(Publisher):
    """Sends shards through a communicator, in which the inferring processes come after the trainers."""

    def __init__(self, job: Job, trainer: int, comm: TorchComm) -> None:
        super().__init__(job, trainer)
        self.comm = comm

    def deliver(self, header: Header) -> None:
        ranks = range(self.job.layout.trainers, self.job.layout.trainers + self.job.inferring)
        for rank in ranks:
            self.comm.send(header.tensor(), rank)
            for span in self.job.layout.spans(self.trainer):
                if span.count > 0:
                    self.comm.send(self.staged[span.at_trainer : span.at_trainer + span.count], rank)
        for rank in ranks:
            self.comm.recv(NO_HEADER[:1].clone(), rank)

    def close(self) -> None:
        super().close()
        self.comm.finalize()


class WaitingSubscriber(Subscriber):
    """Receives on a thread, since no call of its own may wait."""

    def __init__(self, job: Job, number: int) -> None:
        super().__init__(job, number)
        self._thread = ThreadPoolExecutor(1)
        self._arrival: Future[list[Header]] = self._thread.submit(self.receive, 1)

    def arrived(self, version: int) -> list[Header] | None:
        return self._arrival.result() if self._arrival.done() else None

    def take(self, version: int) -> None:
        is_last = self._arrival.result()[0].last
        acknowledged = self._thread.submit(self.acknowledge, version)
        if is_last:
            acknowledged.result()
        else:
            self._arrival = self._thread.submit(self.receive, version + 1)

    @abstractmethod
    def receive(self, version: int) -> list[Header]:
        """Waits until that version lies in its slot."""

    @abstractmethod
    def acknowledge(self, version: int) -> None:
        """Tells the trainers what is in use."""

    def close(self) -> None:
        self._thread.shutdown()


class ReceivingSubscriber(WaitingSubscriber):
    """Receives each shard, through a communicator, where it lies in the whole model."""

    def __init__(self, job: Job, number: int, comm: TorchComm) -> None:
        self.comm = comm
        super().__init__(job, number)

    def receive(self, version: int) -> list[Header]:
        headers = []
        for trainer in range(self.job.layout.trainers):
            told = NO_HEADER.clone()
            self.comm.recv(told, trainer)
            for span in self.job.layout.spans(trainer):
                if span.count > 0:
                    self.comm.recv(self.slots[version % 2][span.in_model : span.in_model + span.count], trainer)
            headers.append(Header(*told.tolist()))
        return headers

    def acknowledge(self, version: int) -> None:
        for trainer in range(self.job.layout.trainers):
            self.comm.send(torch.tensor([version]), trainer)

    def close(self) -> None:
        super().close()
        self.comm.finalize()


class WritingPublisher(Publisher):
    """Writes shards to a file for each version, which appears in the folder when it is whole."""

    def deliver(self, header: Header) -> None:
        path = self.job.folder / f"version{header.version}.{self.trainer}.pt"
        torch.save({"header": header.tensor(), "shards": self.staged}, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)
        for number in range(self.job.inferring):
            _wait_for(self.job.folder / f"taken{header.version}.{number}")
        path.unlink()


class ReadingSubscriber(WaitingSubscriber):
    """Reads the files, and copies the shards to where they lie in the whole model."""

    def receive(self, version: int) -> list[Header]:
        headers = []
        for trainer in range(self.job.layout.trainers):
            path = self.job.folder / f"version{version}.{trainer}.pt"
            _wait_for(path)
            found = torch.load(path)
            for span in self.job.layout.spans(trainer):
                shard = found["shards"][span.at_trainer : span.at_trainer + span.count]
                self.slots[version % 2][span.in_model : span.in_model + span.count] = shard
            headers.append(Header(*found["header"].tolist()))
        return headers

    def acknowledge(self, version: int) -> None:
        (self.job.folder / f"taken{version}.{self.number}").touch()


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while not path.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{path.name} did not appear within {TIMEOUT.total_seconds():g} s")
        time.sleep(PAUSE)
