"""Restricted processes: without rights, shared memory's file system or address space; and very long messages."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, World, lacking
from reference import assert_same, data, reduced
from test_network import CLONE_NEWNS, MS_PRIVATE, MS_REC

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="of this engine's ways within a host")

PR_SET_DUMPABLE = 4
CAPABILITY_VERSION_3 = 0x20080522
CAP_SYS_PTRACE = 1 << 19
LIBC = ctypes.CDLL(None, use_errno=True)

SPARE_BYTES = 512 << 20
FOUR_GIB = 4 << 30


def must(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def hide_memory(rank: int) -> None:
    """Forbids all other processes to read this one's memory; see ptrace(2), access mode checks."""
    must(LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then their high halves
    must(LIBC.capget(header, sets), "capget")
    sets[0] &= ~CAP_SYS_PTRACE
    must(LIBC.capset(header, sets), "capset")


def shrink_shared_memory(rank: int) -> None:
    """Limits the file system of POSIX shared memory to a page, as in containers with the least memory for it."""
    must(LIBC.unshare(CLONE_NEWNS), "unshare")
    must(LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount private")
    must(LIBC.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=4k"), "mount /dev/shm")


def limit_address_space(rank: int) -> None:
    """Limits the address space to slightly more than PyTorch itself takes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def short_and_long_operations(rank: int, size: int) -> None:
    for count in (1, 1000, 2 << 20):
        tensor = data(rank, count)
        dist.all_reduce(tensor)
        assert_same(tensor, reduced([data(r, count) for r in range(size)]), f"all_reduce of {count}")
        tensor = data(rank, count)
        if rank == 0:
            dist.send(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
            assert_same(tensor, data(0, count), f"message of {count}")


def run_in(surroundings: Callable[[int], None], mode: str) -> None:
    world = World(2, mode, {}, surroundings)
    try:
        world.run(short_and_long_operations)
    finally:
        world.close()


def memory_cannot_be_read(rank: int, size: int) -> bool:
    """Whether the other rank's memory is unreadable, which the test requires."""
    pids: list[int | None] = [None] * size
    dist.all_gather_object(pids, os.getpid())
    byte = ctypes.create_string_buffer(1)
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(byte), 1)
    result = LIBC.process_vm_readv(pids[1 - rank], vector, 1, vector, 1, 0)
    dist.barrier()
    return result < 0


def test_ranks_that_may_not_read_each_others_memory() -> None:
    world = World(2, "shm", {}, hide_memory)
    try:
        assert world.run(memory_cannot_be_read) == [True, True]
        world.run(short_and_long_operations)
    finally:
        world.close()


@pytest.mark.parametrize("mode", ["shm", "tcp"])
def test_a_small_file_system_of_shared_memory(mode: str) -> None:
    if os.geteuid() != 0:
        lacking("only root can mount a small /dev/shm")
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode != 0:
        lacking("no mount namespaces here")
    run_in(shrink_shared_memory, mode)


@pytest.mark.parametrize("mode", ["shm", "tcp"])
def test_little_address_space(mode: str) -> None:
    run_in(limit_address_space, mode)


def a_message_of_more_than_four_gib(rank: int, size: int) -> None:
    def filled() -> torch.Tensor:
        tensor = torch.zeros(FOUR_GIB + 9, dtype=torch.uint8)
        tensor[:: 1 << 20] = torch.arange(len(tensor[:: 1 << 20])) % 251
        tensor[-5:] = 7
        return tensor

    expected = filled()
    for exchange in ("broadcast", "message"):
        tensor = expected if rank == 0 else torch.full_like(expected, 9)
        if exchange == "broadcast":
            dist.broadcast(tensor, 0)
        elif rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
        assert torch.equal(tensor, expected), exchange
        del tensor


@pytest.mark.skipif("NCCLX_RS_LARGE" not in os.environ, reason="takes 16 GB of memory: `make nightly` runs it")
@pytest.mark.parametrize("mode", ["shm", "tcp"])
def test_messages_of_more_than_four_gib(mode: str) -> None:
    world = World(2, mode)
    try:
        world.run(a_message_of_more_than_four_gib)
    finally:
        world.close()
