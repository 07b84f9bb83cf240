"""Probes of device memory between processes: handles, bandwidth."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import time
from ctypes import byref, c_uint64
from multiprocessing.reduction import DupFd

from probing import Found, Page, Probe, Ranks, amount, cu, put, take, together

OFFSET = 4096


def legacy_handle(ranks: Ranks) -> bool:
    """Whether rank 1 reads at an offset what rank 0 has in memory of cuMemAlloc."""
    cu.start()
    if ranks.rank == 0:
        memory, handle = cu.allocate(2 * OFFSET), cu.Handle()
        put(memory + OFFSET, 12345)
        cu.cuda.cuIpcGetMemHandle(byref(handle), cu.address(memory))
        ranks.all_gather(bytes(handle))
        ranks.all_gather()
        return True
    handle, memory = cu.Handle.from_buffer_copy(ranks.all_gather()[0]), c_uint64()
    cu.cuda.cuIpcOpenMemHandle_v2(byref(memory), handle, 1)
    right = take(memory.value + OFFSET, 1) == [12345]
    cu.cuda.cuIpcCloseMemHandle(memory)
    ranks.all_gather()
    return right


def p1() -> Found:
    return Found(all(together(legacy_handle, 2)))


def own_and_wait(pipe: multiprocessing.connection.Connection) -> None:
    cu.start()
    page = Page.new()
    put(page.at + OFFSET, 67890)
    pipe.send(DupFd(page.export()))
    time.sleep(600)


def p2() -> Found:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    owner = context.Process(target=own_and_wait, args=(theirs,), daemon=True)
    owner.start()
    theirs.close()
    cu.start()
    page = Page.of_file(pipe.recv().detach())
    before = take(page.at + OFFSET, 1) == [67890]
    owner.kill()
    owner.join()
    after = take(page.at + OFFSET, 1) == [67890]
    put(page.at, 1)
    return Found(
        before and after and take(page.at, 1) == [1], {"read_before": before, "read_after": after}, before and after
    )


def copying(ranks: Ranks, size: int, seconds: float) -> float:
    """Gigabytes a second that this rank's copies read and write beside those of the others."""
    cu.start()
    source, target, on = cu.allocate(size), cu.allocate(size), cu.stream()
    cu.copy(target, source, size, on)
    cu.wait(on)
    ranks.all_gather()
    began, copies = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(4):
            cu.copy(target, source, size, on)
        cu.wait(on)
        copies += 4
    return 2 * size * copies / (time.perf_counter() - began) / 1e9


def p6() -> Found:
    numbers: dict[str, bool | int | float | str] = {}
    for size in (1, 2, 4, 8)[: amount(4, 2)]:
        rates = together(copying, size, amount(256 << 20, 1 << 20), 0.3, seconds=40)
        numbers[f"{size}_processes_gbytes_per_s"] = round(sum(rates), 2)
    most = max(value for value in numbers.values() if isinstance(value, float))
    alone = float(numbers["1_processes_gbytes_per_s"])
    numbers["lost_by_sharing"] = round(1 - min(float(value) for value in numbers.values()) / alone, 3)
    return Found(most, numbers)


PROBES = [
    Probe(
        "P1",
        "Can a process map memory of cuMemAlloc that another on the same GPU hands over, and read it at an offset?",
        "Nothing rests on it: staging memory and windows are handed over as file descriptors (P2). A yes says that "
        "programs which use such handles beside the engine work on this GPU.",
        p1,
    ),
    Probe(
        "P2",
        "Does device memory that came as a file descriptor stay readable when its owner is killed?",
        "With a no, the death of a rank would take staging memory from the others while their streams run: setup would "
        "have to copy through pinned memory of the host.",
        p2,
    ),
    Probe(
        "P6",
        "How many gigabytes a second do copies within the GPU read and write, by one process and by several at once?",
        "The most that several ranks on one GPU can have together. If it falls with the number of processes, ranks "
        "that share a GPU should copy less and later.",
        p6,
        60,
    ),
]
