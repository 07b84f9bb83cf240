"""Measures the rows of a plan, on every rank of one world.

Machines are noisy, so backends are compared within one run: they are process groups of the same processes. Each row is
measured in short rounds. In a round each backend gets a turn, and the order alternates. A comparison reports the median
of the rounds' ratios and their spread.

The time of a call is that of the slowest rank. The time of a round is that of all its calls, divided by their number.
On CUDA tensors a call lasts until the device has run it.
"""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import pickle
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ncclx_rs.bench import device
from ncclx_rs.bench.operations import OPERATIONS, Job, Operation, Place

DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
}
MODES = ("sync", "async")
# The most calls of a turn, however fast they are.
_MOST_CALLS = 2000
_WARM_TURNS = 3


@dataclass(frozen=True)
class Plan:
    """What to measure, and for how long.

    Attributes:
        backends: Names of c10d backends; the first is the one under test.
        operations: Names from `OPERATIONS`.
        sizes: Bytes.
        dtypes: Names from `DTYPES`.
        modes: From `MODES`.
        rounds: Rounds of each row.
        round_seconds: How long a backend's turn should take.
        calls: Calls in a turn; None for as many as fit into `round_seconds`.
        warmup: Calls in each of the turns before the first round.
        depth: Operations in flight at once in mode async.
        check: Whether to check results.
        timeout: The groups' timeout in seconds.
        pin: Whether each rank's calling thread is pinned to a core. Backends' own threads are not.
        device: Where tensors are: "cpu" or "cuda", in which case ranks take the host's devices in turn.
    """

    backends: tuple[str, ...] = ("ncclx_rs",)
    operations: tuple[str, ...] = ("all_reduce",)
    sizes: tuple[int, ...] = (8,)
    dtypes: tuple[str, ...] = ("float32",)
    modes: tuple[str, ...] = ("sync",)
    rounds: int = 15
    round_seconds: float = 0.01
    calls: int | None = None
    warmup: int = 5
    depth: int = 4
    check: bool = True
    timeout: float = 120.0
    pin: bool = False
    device: str = "cpu"

    def rows(self, ranks: int) -> list[Case]:
        """The rows of a world of `ranks` in the order of measurement. Sizes that give the same case are one row."""
        found: dict[Case, None] = {}
        for name in self.operations:
            operation = OPERATIONS[name]
            if ranks < operation.least_ranks:
                continue
            for mode in self.modes:
                for dtype in self.dtypes if operation.sized else self.dtypes[:1]:
                    for size in self.sizes if operation.sized else (0,):
                        count = operation.count(size, ranks, DTYPES[dtype])
                        found[Case(name, mode, ranks, dtype, operation.bytes(count, ranks, DTYPES[dtype]), count)] = (
                            None
                        )
        return list(found)


@dataclass(frozen=True)
class Case:
    """The parameters of a row. `bytes` is the size, `count` the elements of a tensor or of one block."""

    operation: str
    mode: str
    ranks: int
    dtype: str
    bytes: int
    count: int


@dataclass
class Result:
    """One backend's measurements in one row. Times are microseconds of a call, bandwidths gigabytes a second.

    Attributes:
        time: The median of the rounds.
        p50, p95, p99: Percentiles of the calls' times.
        algorithm_bandwidth: The size divided by the time.
        bus_bandwidth: The bus bandwidth, as nccl-tests define it.
        cpu: Processor time of a call, summed over a rank's threads; the mean of the ranks.
        calls: The calls of a round.
        rounds: The time of each round.
        wrong: The number of wrong elements on all ranks; None if unchecked.
        error: The reason why there is no measurement; empty if there is one.
    """

    time: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    algorithm_bandwidth: float = 0.0
    bus_bandwidth: float = 0.0
    cpu: float = 0.0
    calls: int = 0
    rounds: list[float] = field(default_factory=list)
    wrong: int | None = None
    error: str = ""


@dataclass(frozen=True)
class Ratio:
    """How many times faster the first backend was than the second.

    Attributes:
        median, p10, p90: Percentiles of the ratios of the rounds' times.
        typical: The ratio of `Result.p50`, the typical calls. On a loaded machine it hides stalls, which the others
            contain.
    """

    median: float
    p10: float
    p90: float
    typical: float


@dataclass(frozen=True)
class Row:
    """A line of the report.

    Attributes:
        case: What was measured.
        results: Those of each backend by its name.
        ratio: The first backend against the second, if there is one.
        memory: The share of the device's memory bandwidth that the least traffic of the operation took in the time of
            each backend; empty unless all ranks share one CUDA device.
    """

    case: Case
    results: dict[str, Result]
    ratio: Ratio | None
    memory: dict[str, float] = field(default_factory=dict)


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile, by linear interpolation between neighbours.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("percentile: argument `values`: expected at least one")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def compare(first: Result, second: Result) -> Ratio | None:
    """The ratios of two backends' rounds; None if one backend was not measured."""
    if first.error or second.error:
        return None
    ratios = [theirs / ours for ours, theirs in zip(first.rounds, second.rounds, strict=True)]
    return Ratio(percentile(ratios, 50), percentile(ratios, 10), percentile(ratios, 90), second.p50 / first.p50)


def bandwidths(operation: Operation, ranks: int, size_bytes: int, microseconds: float) -> tuple[float, float]:
    """Algorithm and bus bandwidth in GB/s, as nccl-tests define them."""
    algorithm = size_bytes / microseconds / 1e3
    return algorithm, algorithm * operation.bus_factor(ranks)


class Control:
    """Exchanges values between the ranks through the store. Every rank must make the same calls."""

    def __init__(self, store: c10d.Store, place: Place) -> None:
        """Exchanges values of the rank at ``place`` through ``store``."""
        self.place = place
        self._store = store
        self._turn = 0

    def from_root(self, value: Any = None) -> Any:
        """Rank 0's value, on every rank."""
        self._turn += 1
        key = f"root{self._turn}"
        if self.place.rank == 0:
            self._put(key, value)
            return value
        return pickle.loads(self._store.get(key))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value by rank on rank 0, an empty list elsewhere."""
        self._turn += 1
        keys = [f"all{self._turn}/{rank}" for rank in range(self.place.size)]
        if self.place.rank != 0:
            self._put(keys[self.place.rank], value)
            return []
        values = [value]
        for key in keys[1:]:
            values.append(pickle.loads(self._store.get(key)))
            self._store.delete_key(key)
        return values

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value by rank, on every rank."""
        return list(self.from_root(self.gather(value)))

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # it takes bytes too, which the stub omits


@dataclass
class _Turn:
    """A backend's turn in a round on one rank, in nanoseconds: each call, the whole turn, and its processor time."""

    calls: array.array[int]
    whole: int
    cpu: int


def run(
    plan: Plan,
    store: c10d.Store,
    rank: int,
    ranks: int,
    operations: dict[str, Operation] | None = None,
    local_rank: int = 0,
) -> Iterator[Row]:
    """Measures the rows of a plan in this world. Every rank calls it and must exhaust the iterator.

    Args:
        plan: What to measure; the same on every rank.
        store: The ranks' store, which no other run uses.
        rank: This rank.
        ranks: The size of the world.
        operations: The operations by the names in the plan; `OPERATIONS` if not given.
        local_rank: The number of this rank on its host, for pinning.

    Yields:
        On rank 0, each row as soon as it is measured. On other ranks nothing.

    Raises:
        RuntimeError: a backend failed on only some ranks, or during the measurement.
        ValueError: PyTorch does not know a backend.
    """
    known = OPERATIONS if operations is None else operations
    timeout = timedelta(seconds=plan.timeout)

    # Each backend gets a group of its own: calls on the default group take a shorter path in PyTorch.
    def groups() -> dict[str, Any]:
        return {name: dist.new_group(backend=name, timeout=timeout) for name in plan.backends}

    with world(plan, store, Place(rank, ranks), local_rank, groups) as (made, control):
        bandwidth = device.shared_bandwidth(plan.device, control)
        for case in plan.rows(ranks):
            row = measure_row(plan, case, known[case.operation], made, control)
            if row is not None:
                yield with_memory(row, known[case.operation], bandwidth)


def with_memory(row: Row, operation: Operation, bandwidth: float | None) -> Row:
    """The row with its shares of a memory's bandwidth in GB/s; unchanged if that is None."""
    least = operation.traffic(row.case.ranks) * row.case.bytes
    if bandwidth is None or not least:
        return row
    times = {name: result.time for name, result in row.results.items() if not result.error}
    return dataclasses.replace(row, memory={name: least / time / 1e3 / bandwidth for name, time in times.items()})


@contextlib.contextmanager
def on_a_core_of_its_own(local_rank: int) -> Iterator[None]:
    """Pins the calling thread to a core. The ranks of a host get different cores as long as there are enough."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[local_rank % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def world(
    plan: Plan, store: c10d.Store, place: Place, local_rank: int, groups: Callable[[], dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], Control]]:
    """Makes the default group and the groups of `groups`; destroys them at the end of the block.

    Args:
        plan: What to measure.
        store: The ranks' store, which no other run uses.
        place: This rank and the number of ranks.
        local_rank: The number of this rank on its host, for pinning.
        groups: Makes the groups to measure.

    Yields:
        The groups by name, and the `Control`.
    """
    device.choose(plan.device, local_rank)
    dist.init_process_group(
        plan.backends[0],
        store=c10d.PrefixStore("c10d", store),
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=plan.timeout),
    )
    try:
        made = groups()
        # Pinned after the groups exist: backends' threads inherit their creator's cores, and some backends count these.
        with on_a_core_of_its_own(local_rank) if plan.pin else contextlib.nullcontext():
            yield made, Control(c10d.PrefixStore("control", store), place)
    finally:
        dist.destroy_process_group()


def measure_row(
    plan: Plan, case: Case, operation: Operation, groups: dict[str, dist.ProcessGroup], control: Control
) -> Row | None:
    """Measures a row on the groups in alternating rounds. Every rank calls it; returns None on ranks other than 0."""
    place = control.place
    depth = plan.depth if case.mode == "async" else 1
    with torch.device(plan.device):
        jobs = [operation.build(place, case.count, DTYPES[case.dtype]) for _ in range(depth)]
    in_flight = min(depth, plan.warmup)
    results = {name: _check(plan, case, jobs[0], place, group, control) for name, group in groups.items()}
    for job in jobs:
        job.clear()
    measured = {name: group for name, group in groups.items() if not results[name].error}

    def turn(group: dist.ProcessGroup, calls: int) -> _Turn:
        if plan.device == "cuda":
            return _timed(group, functools.partial(device.turn, jobs, group, calls, later=case.mode == "async"))
        return _sync_turn(jobs[0], group, calls) if case.mode == "sync" else _async_turn(jobs, group, calls)

    for name, group in measured.items():
        # The best median of several turns: after a stall in a single one, the rounds would have too few calls.
        medians = [percentile(turn(group, plan.warmup).calls, 50) for _ in range(_WARM_TURNS)]
        typical = max(control.all_gather(min(medians)))
        fitting = min(max(int(plan.round_seconds * 1e9 * in_flight / max(typical, 1.0)), 1), _MOST_CALLS)
        results[name].calls = fitting if plan.calls is None else plan.calls
    # Rank 0 chooses the first backend at random; then the order alternates.
    order = list(measured)
    if control.from_root(random.random()) < 0.5:
        order.reverse()
    turns: dict[str, list[_Turn]] = {name: [] for name in measured}
    for _ in range(plan.rounds):
        for name in order:
            turns[name].append(turn(groups[name], results[name].calls))
        order.reverse()

    gathered = control.gather(turns)
    if not gathered:
        return None
    trips = operation.trips if case.mode == "sync" else 1
    for name in measured:
        _evaluate(results[name], case, operation, [turns[name] for turns in gathered], trips)
    first, *rest = plan.backends
    ratio = compare(results[first], results[rest[0]]) if rest else None
    return Row(case, results, ratio)


def _check(plan: Plan, case: Case, job: Job, place: Place, group: dist.ProcessGroup, control: Control) -> Result:
    """Makes the first call, which shows whether the backend supports it, and checks the result."""
    if plan.check:
        job.fill()
    else:
        job.clear()
    error = ""
    try:
        pending = job.call(group, case.mode == "async")
        if pending is not None and case.mode == "async":
            pending.wait()
    except (RuntimeError, NotImplementedError, ValueError) as failure:
        error = str(failure).splitlines()[0]
    wrong = job.wrong(place.size) if plan.check and not error else 0
    outcomes = control.all_gather((error, wrong))
    errors = [(rank, text) for rank, (text, _) in enumerate(outcomes) if text]
    if errors and len(errors) < place.size:
        causes = "; ".join(f"rank {rank}: {text}" for rank, text in errors)
        raise RuntimeError(
            f"{case.operation} of {case.bytes} bytes failed on {len(errors)} of {place.size} ranks: {causes}"
        )
    if errors:
        return Result(error=errors[0][1])
    return Result(wrong=sum(wrong for _, wrong in outcomes) if plan.check else None)


def _sync_turn(job: Job, group: dist.ProcessGroup, calls: int) -> _Turn:
    """Makes the calls one after the other."""

    def body() -> array.array[int]:
        call, clock = job.call, time.perf_counter_ns
        stamps = array.array("q", bytes(8 * (calls + 1)))
        stamps[0] = clock()
        for index in range(1, calls + 1):
            call(group, False)
            stamps[index] = clock()
        return array.array("q", [after - before for before, after in itertools.pairwise(stamps)])

    return _timed(group, body)


def _async_turn(jobs: Sequence[Job], group: dist.ProcessGroup, calls: int) -> _Turn:
    """Keeps one operation in flight for each job. A call lasts from its issue until its wait returns."""

    def body() -> array.array[int]:
        clock = time.perf_counter_ns
        lasted = array.array("q")
        in_flight: collections.deque[tuple[int, Any]] = collections.deque()

        def wait_for_first() -> None:
            issued, pending = in_flight.popleft()
            if pending is not None:
                pending.wait()
            lasted.append(clock() - issued)

        for index in range(calls):
            if len(in_flight) == len(jobs):
                wait_for_first()
            issued = clock()
            in_flight.append((issued, jobs[index % len(jobs)].call(group, True)))
        while in_flight:
            wait_for_first()
        return lasted

    return _timed(group, body)


def _timed(group: dist.ProcessGroup, body: Callable[[], array.array[int]]) -> _Turn:
    """Runs `body`, which returns the time of each call, after a barrier."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        dist.barrier(group=group)
        cpu, began = time.process_time_ns(), time.perf_counter_ns()
        lasted = body()
        return _Turn(lasted, time.perf_counter_ns() - began, time.process_time_ns() - cpu)
    finally:
        if collecting:
            gc.enable()


def _evaluate(result: Result, case: Case, operation: Operation, by_rank: Sequence[Sequence[_Turn]], trips: int) -> None:
    """Computes a result from the turns of all ranks."""
    rounds = list(zip(*by_rank, strict=True))
    unit = 1e3 * trips  # nanoseconds of a call to microseconds of a trip
    result.rounds = [max(turn.whole for turn in turns) / result.calls / unit for turns in rounds]
    calls = [max(lasted) / unit for turns in rounds for lasted in zip(*(turn.calls for turn in turns), strict=True)]
    result.time = percentile(result.rounds, 50)
    result.p50, result.p95, result.p99 = (percentile(calls, percent) for percent in (50, 95, 99))
    used = [turn.cpu for turns in rounds for turn in turns]
    result.cpu = sum(used) / len(used) / result.calls / unit
    result.algorithm_bandwidth, result.bus_bandwidth = bandwidths(operation, case.ranks, case.bytes, result.time)
