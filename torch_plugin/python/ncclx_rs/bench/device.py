"""What is different about measuring on a CUDA device: when a call has ended, and what the device's memory could do."""

from __future__ import annotations

import array
import collections
import itertools
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ncclx_rs.bench.operations import Job, Place

# What is copied to find the memory's bandwidth: more than any cache of a device.
_COPIED = 256 << 20
_COPIES = 10


class Exchange(Protocol):
    """What ranks tell each other by: `measure.Control`."""

    place: Place

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""


def choose(device: str, local_rank: int) -> None:
    """Makes a CUDA device this rank's: the host's ranks take its devices in turn. Does nothing for the CPU."""
    if device == "cuda":
        torch.cuda.set_device(local_rank % torch.cuda.device_count())


def shared_bandwidth(device: str, control: Exchange) -> float | None:
    """What the memory of the one device of all ranks can read and write in GB/s; None on CPUs and several devices.

    Every rank calls it.
    """
    if device != "cuda":
        return None
    names = set(control.all_gather(str(torch.cuda.get_device_properties().uuid)))
    # One rank after the other would measure the same; together they would measure a part of it.
    measures = len(names) == 1 and control.place.rank == 0
    found: float | None = control.all_gather(copy_bandwidth() if measures else None)[0]
    return found


def copy_bandwidth(size: int = _COPIED, copies: int = _COPIES) -> float:
    """What the current device's memory reads and writes in GB/s while it copies `size` bytes within it."""
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    began, ended = _event(), _event()
    target.copy_(source)
    began.record()
    for _ in range(copies):
        target.copy_(source)
    ended.record()
    ended.synchronize()
    return 2 * size * copies / float(began.elapsed_time(ended)) / 1e6


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # PyTorch has no types for it


def turn(jobs: Sequence[Job], group: dist.ProcessGroup, calls: int, *, later: bool) -> array.array[int]:
    """Makes so many calls on the current stream.

    Args:
        jobs: One of them, or as many as operations are to be in flight.
        group: Where the calls go.
        calls: Their number.
        later: Whether they are asynchronous.

    Returns:
        The nanoseconds of each call: of a blocking one until the host has seen its end, of an asynchronous one from the
        end of the one before, as the device sees it.
    """
    return _later(jobs, group, calls) if later else _at_once(jobs[0], group, calls)


def _at_once(job: Job, group: dist.ProcessGroup, calls: int) -> array.array[int]:
    call, clock, stream = job.call, time.perf_counter_ns, torch.cuda.current_stream()
    stream.synchronize()
    stamps = array.array("q", [clock()])
    for _ in range(calls):
        call(group, False)
        stream.synchronize()
        stamps.append(clock())
    return array.array("q", [after - before for before, after in itertools.pairwise(stamps)])


def _later(jobs: Sequence[Job], group: dist.ProcessGroup, calls: int) -> array.array[int]:
    ends = [_event() for _ in range(calls + 1)]
    in_flight: collections.deque[Any] = collections.deque()
    waited = 0

    def wait_for_first() -> None:
        nonlocal waited
        pending = in_flight.popleft()
        if pending is not None:
            pending.wait()
        waited += 1
        ends[waited].record()

    ends[0].record()
    for index in range(calls):
        if len(in_flight) == len(jobs):
            wait_for_first()
        in_flight.append(jobs[index % len(jobs)].call(group, True))
    while in_flight:
        wait_for_first()
    torch.cuda.synchronize()
    return array.array("q", [int(first.elapsed_time(next_) * 1e6) for first, next_ in itertools.pairwise(ends)])
