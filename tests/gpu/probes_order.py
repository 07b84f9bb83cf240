"""Probes of the order on streams: words that streams write and wait for, kernels beside them, graphs, releases."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from ctypes import byref, c_float, c_size_t, c_ulonglong, c_void_p

from probing import (
    Busy,
    Found,
    Number,
    Page,
    Probe,
    Ranks,
    Words,
    amount,
    batch,
    captured,
    cu,
    ends,
    image,
    percentile,
    put,
    take,
    timed,
    together,
    wait_for,
    write,
)

# ---- P3, P5: waits and spins beside kernels of another process ----


def busy_beside_a_wait(ranks: Ranks) -> tuple[float, float]:
    """Milliseconds of rank 1's kernels while rank 0 has nothing on the device, and while its stream waits."""
    cu.start()
    words, times = Words.alone(1), []
    busy = Busy() if ranks.rank == 1 else None
    on = cu.stream()
    for waits in (False, True):
        if waits and ranks.rank == 0:
            wait_for(on, words.at(0), 1)
        ranks.all_gather()
        if busy is not None:
            times.append(percentile([busy.milliseconds(lasting=50) for _ in range(5)], 50))
        ranks.all_gather()
    words[0] = 1
    assert ends(on, 5), "the wait was not released"
    return (times[0], times[1]) if busy is not None else (0.0, 0.0)


def around_the_ring(ranks: Ranks, laps: int, chunks: int) -> list[float]:
    """Microseconds of a hand-off from stream to stream, each the mean of so many laps; of rank 0."""
    cu.start()
    words, on = Words.of(ranks, ranks.size), cu.stream()
    following, lap = (ranks.rank + 1) % ranks.size, 0
    events = [cu.event(0) for _ in range(chunks + 1)]
    cu.cuda.cuEventRecord(events[0], on)
    for chunk in range(chunks):
        for _ in range(laps):
            lap += 1
            if ranks.rank == 0:
                write(on, words.at(following), lap)
            wait_for(on, words.at(ranks.rank), lap)
            if ranks.rank != 0:
                write(on, words.at(following), lap)
        cu.cuda.cuEventRecord(events[chunk + 1], on)
    cu.wait(on)
    return [elapsed(a, b) * 1e3 / laps / ranks.size for a, b in zip(events, events[1:], strict=False)]


def elapsed(first: c_void_p, second: c_void_p) -> float:
    """Milliseconds between two events."""
    found = c_float()
    cu.cuda.cuEventElapsedTime(byref(found), first, second)
    return found.value


def p3() -> Found:
    alone, beside = together(busy_beside_a_wait, 2)[1]
    numbers: dict[str, Number] = {"kernel_alone_ms": round(alone, 2), "kernel_beside_ms": round(beside, 2)}
    for size in (2, 4, 8)[: amount(3, 1)]:
        times = together(around_the_ring, size, 10, amount(200, 10), seconds=30)[0]
        numbers[f"{size}_processes_p50_us"] = round(percentile(times, 50), 2)
        numbers[f"{size}_processes_p99_us"] = round(percentile(times, 99), 2)
    stalls = beside > 1.5 * alone
    return Found(stalls, numbers, timed(not stalls))


def small_beside_a_spin(ranks: Ranks) -> tuple[float, float]:
    """Milliseconds of rank 1's small kernel alone, and while rank 0's kernel spins for a second at most."""
    cu.start()
    words, on = Words.alone(1), cu.stream()
    times = []
    if ranks.rank == 1:
        busy = Busy()
        for _ in range(2):
            ranks.all_gather()
            times.append(percentile([busy.milliseconds(lasting=0.1) for _ in range(20)], 50))
            ranks.all_gather()
        return times[0], times[1]
    spin, rounds = cu.function(cu.load(image()), b"spin"), cu.allocate(8)
    for spins in (False, True):
        if spins:
            words[0] = 0
            most = c_ulonglong(amount(1 << 40, 1 << 22))
            cu.launch(spin, (1, 1, 1), (1, 1, 1), on, cu.address(words.at(0)), most, cu.address(rounds))
            threading.Timer(1.0, lambda: words.__setitem__(0, 1)).start()
        ranks.all_gather()
        ranks.all_gather()
    words[0] = 1
    assert ends(on, 10), "the kernel spins on"
    return 0.0, 0.0


def p5() -> Found:
    alone, beside = together(small_beside_a_spin, 2)[1]
    return Found(round(beside / alone, 1), {"kernel_alone_ms": round(alone, 3), "kernel_beside_ms": round(beside, 3)})


# ---- P4: where words may lie ----


def back_and_forth(ranks: Ranks, place: str, rounds: int) -> tuple[int, float]:
    """Wrong data words and microseconds of a round trip, where the words that announce data lie in a place."""
    cu.start()
    on, me, peer = cu.stream(), ranks.rank, 1 - ranks.rank
    page = Page.new()
    put(page.at, *[0] * 64)
    pages = [Page.of_file(file) for file in ranks.all_gather_files(page.export())]
    words = Words.of(ranks, 2)
    chunk = min(rounds, 1000)
    numbers, log = cu.allocate(8 * chunk), cu.allocate(8 * chunk)
    announced = {
        "pinned": (words.at(peer), words.at(me)),
        "peers": (pages[peer].at, page.at),
        "copied": (pages[peer].at, page.at),
        "own": (page.at, pages[peer].at),
    }
    target, waited = announced[place]
    data, incoming = pages[peer].at + 256, page.at + 256
    wrong, took = 0, 0.0
    for first in range(1, rounds + 1, chunk):
        values = list(range(first, first + chunk))
        put(numbers, *values)
        ranks.all_gather()
        began = time.perf_counter()

        def send(index: int, value: int) -> None:
            cu.copy(data, numbers + 8 * index, 8, on)
            if place == "copied":
                cu.copy(target, numbers + 8 * index, 8, on)
            else:
                write(on, target, value)

        for index, value in enumerate(values):
            if me == 0:
                send(index, value)
            wait_for(on, waited, value)
            cu.copy(log + 8 * index, incoming, 8, on)
            if me == 1:
                send(index, value)
        assert ends(on, 10), f"a word in the place `{place}` was not seen"
        took += time.perf_counter() - began
        wrong += sum(got != value for got, value in zip(take(log, chunk), values, strict=True))
    return wrong, took * 1e6 / rounds


def p4() -> Found:
    numbers: dict[str, Number] = {}
    right = {}
    for place, rounds in (("pinned", 100_000), ("peers", 20_000), ("copied", 20_000), ("own", 20_000)):
        try:
            found = together(back_and_forth, 2, place, amount(rounds, 200), seconds=25)
        except RuntimeError as error:
            right[place] = False
            numbers[f"{place}_error"] = str(error).strip().splitlines()[-1]
        else:
            right[place] = not any(wrong for wrong, _ in found)
            numbers[f"{place}_wrong"] = sum(wrong for wrong, _ in found)
            numbers[f"{place}_round_trip_us"] = round(found[0][1], 2)
    return Found(right["pinned"], numbers, right["pinned"])


# ---- P7: tokens in graphs ----


def replayed(ranks: Ranks, replays: int) -> int:
    """Wrong words of a graph that exchanges one in each replay; ranks replay at different speeds."""
    cu.start()
    on, me, peer = cu.stream(), ranks.rank, 1 - ranks.rank
    page = Page.new()
    staging = [Page.of_file(file) for file in ranks.all_gather_files(page.export())]
    words = Words.of(ranks, 4)  # of each sender: ready, free
    if me == 0:
        words[1] = words[3] = 1
    source, result, numbers, log = (cu.allocate(8 * replays) for _ in range(4))
    put(numbers, *(1000 * me + turn for turn in range(replays)))
    put(log, *[0] * replays)
    ranks.all_gather()
    with captured(on) as graphs:
        free, ready = words.at(2 * me + 1), words.at(2 * me)
        batch(on, (cu.WAIT_64, free, 1), (cu.WRITE_64, free, 0))
        cu.copy(page.at, source, 8, on)
        write(on, ready, 1)
        ready = words.at(2 * peer)
        batch(on, (cu.WAIT_64, ready, 1), (cu.WRITE_64, ready, 0))
        cu.copy(result, staging[peer].at, 8, on)
        write(on, words.at(2 * peer + 1), 1)
    skew = random.Random(me)
    for turn in range(replays):
        cu.copy(source, numbers + 8 * turn, 8, on)
        cu.cuda.cuGraphLaunch(graphs[0], on)
        cu.copy(log + 8 * turn, result, 8, on)
        if skew.random() < 0.05:
            time.sleep(skew.random() * 0.002)
    assert ends(on, 20), "the replays do not end"
    expected = [1000 * peer + turn for turn in range(replays)]
    return sum(got != value for got, value in zip(take(log, replays), expected, strict=True))


def p7() -> Found:
    replays = amount(1000, 100)
    wrong = sum(together(replayed, 2, replays, seconds=35))
    return Found(wrong == 0, {"replays": replays, "wrong": wrong}, wrong == 0)


# ---- P8, P13, P14, P15: one process ----


def released(submit: Callable[[], None], on: c_void_p, words: Words) -> float:
    """Milliseconds from the host's store of a word until the stream that waits for it has ended; -1 if it does not."""
    words[0] = 0
    submit()
    time.sleep(0.05)
    assert not cu.is_done(on), "the stream does not wait"
    began = time.perf_counter()
    words[0] = 1 << 62
    return (time.perf_counter() - began) * 1e3 if ends(on, 5) else -1.0


def p8() -> Found:
    cu.start()
    words, on = Words.alone(1), cu.stream()
    with captured(on) as graphs:
        wait_for(on, words.at(0), 1)
    eager = [released(lambda: wait_for(on, words.at(0), 1), on, words) for _ in range(10)]
    graph = [released(lambda: cu.cuda.cuGraphLaunch(graphs[0], on), on, words) for _ in range(10)]
    in_time = min(*eager, *graph) >= 0 and max(*eager, *graph) < amount(100, 5000)
    return Found(in_time, {"eager_most_ms": round(max(eager), 2), "graph_most_ms": round(max(graph), 2)}, in_time)


def stalled_streams(ranks: Ranks, connections: int) -> int:
    """How many of 40 streams do nothing while one of them waits."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(connections)
    cu.start()
    words, streams, memory = Words.alone(1), [cu.stream() for _ in range(40)], cu.allocate(40 * 4)
    wait_for(streams[0], words.at(0), 1)
    for index, on in enumerate(streams):
        cu.fill(memory + 4 * index, index, 1, on)
    time.sleep(0.5)
    stalled = sum(not cu.is_done(on) for on in streams[1:])
    words[0] = 1
    assert all(ends(on, 5) for on in streams), "the streams do not end"
    return stalled


def p13() -> Found:
    numbers: dict[str, Number] = {}
    for connections in (1, 8, 32):
        numbers[f"{connections}_connections_stalled"] = together(stalled_streams, 1, connections)[0]
    return Found(numbers["8_connections_stalled"], numbers)


def p14() -> Found:
    cu.start()
    words, on = Words.alone(1), cu.stream()
    code = image()
    freed, kept = cu.allocate(1 << 20), Words.alone(64)
    spare, pages = cu.reserve(1), cu.pages()
    calls: dict[str, Callable[[], object]] = {
        "allocate": lambda: cu.allocate(1 << 20),
        "free": lambda: cu.free(freed),
        "create_stream": cu.stream,
        "create_event": cu.event,
        "load_module": lambda: cu.load(code),
        "register_host_memory": lambda: Words.alone(64),
        "unregister_host_memory": lambda: cu.cuda.cuMemHostUnregister(c_void_p(kept.host)),
        "create_pages": cu.pages,
        "map_pages": lambda: (cu.map_at(spare, pages), cu.allow(spare)),
        "unmap_pages": lambda: cu.cuda.cuMemUnmap(cu.address(spare), c_size_t(cu.CHUNK)),
    }
    numbers: dict[str, Number] = {}
    for turn, (name, call) in enumerate(calls.items(), 1):
        wait_for(on, words.at(0), turn)
        failure: list[BaseException] = []

        def run(call: Callable[[], object] = call, failure: list[BaseException] = failure) -> None:
            try:
                cu.start()
                call()
            except cu.CudaError as error:
                failure.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(0.4)
        numbers[f"{name}_waits"] = thread.is_alive()
        words[0] = turn
        thread.join(10)
        assert not thread.is_alive() and ends(on, 5), f"{name} does not return after the wait"
        if failure:
            numbers[f"{name}_error"] = str(failure[0])
    return Found(sum(value is True for value in numbers.values()), numbers)


def p15() -> Found:
    cu.start()
    words, on = Words.alone(3), cu.stream()
    early = late = 0
    for turn in range(1, amount(1001, 51)):
        batch(on, (cu.WRITE_64, words.at(0), turn), (cu.WAIT_64, words.at(1), turn), (cu.WRITE_64, words.at(2), turn))
        until = time.monotonic() + 2
        while words[0] != turn and time.monotonic() < until:
            pass
        late += words[0] != turn
        if turn % 100 == 1:
            time.sleep(0.02)
        early += words[2] == turn
        words[1] = turn
        assert ends(on, 5), "the batch does not end"
        assert words[2] == turn, "the last write is missing"
    return Found(early == late == 0, {"writes_before_the_wait": early, "writes_that_waited": late}, early == late == 0)


PROBES = [
    Probe(
        "P3",
        "Does a stream of one process that waits for a word slow down a kernel of another process on the same GPU?",
        "With a yes, ranks on one GPU would hold each other up while they wait, and collectives of several ranks on a "
        "GPU would have to wait on the host. The times are those of a hand-off from stream to stream.",
        p3,
        110,
    ),
    Probe(
        "P4",
        "Are data always there when a word in pinned memory of the host announces them, and where else may words lie?",
        "With a no, every collective could read stale data. Words lie in pinned memory (`pinned`), so that the host "
        "can read and release them. Others (`peers`, `copied`, `own`: memory of the device) would be worth it if right "
        "and much faster.",
        p4,
        110,
    ),
    Probe(
        "P5",
        "How many times longer does a small kernel take while a kernel of another process spins?",
        "What the engine's kernels would cost others on the same GPU if they waited for data. They never do.",
        p5,
        40,
    ),
    Probe(
        "P7",
        "Do tokens in a graph keep ranks together that replay it at different speeds?",
        "With a no, captured collectives would read what is not theirs: capture would have to be refused.",
        p7,
        40,
    ),
    Probe(
        "P8",
        "Does a store of the host release a stream that waits, also in a graph, within 100 ms?",
        "With a no, abort and time limits could not end an operation without calls that may block.",
        p8,
        30,
    ),
    Probe(
        "P13",
        "How many of 40 streams stand still while one of them waits, with 8 connections to the device?",
        "The programs are right with a single queue, too. The number says how much a program loses with as many "
        "streams, and what to advise for CUDA_DEVICE_MAX_CONNECTIONS.",
        p13,
        60,
    ),
    Probe(
        "P14",
        "How many kinds of calls wait for a stream that waits?",
        "Those that do must not be made while something is in flight; the engine defers all that free or unmap. A kind "
        "that waits although the engine makes it in flight is an error of the design.",
        p14,
        60,
    ),
    Probe(
        "P15",
        "Do the operations of a batch on words run in their order?",
        "With a no, waits and the writes that follow them have to be submitted apart.",
        p15,
        40,
    ),
]
