"""Memory and events between processes; addresses and pages apart."""

from __future__ import annotations

import multiprocessing
import os
from ctypes import byref, c_int, c_size_t, c_uint64, c_ulonglong, c_void_p
from multiprocessing.connection import Connection

from driver import (
    CHUNK,
    DISABLE_TIMING,
    INTERPROCESS,
    POSIX_FILE,
    Handle,
    address,
    allocate,
    allow,
    cuda,
    event,
    fails_with,
    fill,
    free,
    living,
    map_at,
    pages,
    read,
    reserve,
    start,
    stream,
    wait,
    wait_word,
    write_word,
)
from isolated import alone

SECONDS = 60


def peer(pipe: Connection) -> None:
    """Opens memory and an event, waits for a word of the other process, answers by a word and an event."""
    start(1)
    memory_handle, event_handle = Handle.from_buffer_copy(pipe.recv()), Handle.from_buffer_copy(pipe.recv())
    memory, again, done = c_uint64(), c_uint64(), c_void_p()
    cuda.cuIpcOpenMemHandle_v2(byref(memory), memory_handle, 1)
    cuda.cuIpcOpenMemHandle_v2(byref(again), memory_handle, 1)
    assert memory.value == again.value
    cuda.cuIpcOpenEventHandle(byref(done), event_handle)
    on = stream()
    wait_word(on, memory.value, 1)
    fill(memory.value + 4, 77, 1, on)
    write_word(on, memory.value, 2)
    cuda.cuEventRecord(done, on)
    pipe.send("submitted")
    wait(on)
    for _ in range(2):
        cuda.cuIpcCloseMemHandle(memory)
    fails_with("CUDA_ERROR_INVALID_VALUE", cuda.cuIpcCloseMemHandle, memory)
    pipe.send("closed")
    pipe.recv()
    fails_with("CUDA_ERROR_INVALID_VALUE", cuda.cuIpcOpenMemHandle_v2, byref(memory), memory_handle, 1)
    cuda.cuEventDestroy_v2(done)
    cuda.cuStreamDestroy_v2(on)
    assert living() == 0
    pipe.send("ended")


def between_processes() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=peer, args=(theirs,), daemon=True)
    process.start()
    start()
    memory, done, on = allocate(8), event(DISABLE_TIMING | INTERPROCESS), stream()
    fill(memory, 0, 2)
    wait()
    memory_handle, event_handle = Handle(), Handle()
    cuda.cuIpcGetMemHandle(byref(memory_handle), address(memory))
    cuda.cuIpcGetEventHandle(byref(event_handle), done)
    fails_with("CUDA_ERROR_INVALID_CONTEXT", cuda.cuIpcOpenMemHandle_v2, byref(c_uint64()), memory_handle, 1)
    pipe.send(bytes(memory_handle))
    pipe.send(bytes(event_handle))
    assert pipe.poll(SECONDS) and pipe.recv() == "submitted"
    fails_with("CUDA_ERROR_NOT_READY", cuda.cuEventQuery, done)
    cuda.cuStreamWaitEvent(on, done, 0)
    write_word(stream(), memory, 1)
    wait(on)
    assert read(memory, 2) == [2, 77]
    assert pipe.poll(SECONDS) and pipe.recv() == "closed"
    free(memory)
    pipe.send("freed")
    assert pipe.poll(SECONDS) and pipe.recv() == "ended"
    process.join(SECONDS)
    assert process.exitcode == 0


def test_processes_share_memory_words_and_events() -> None:
    alone(between_processes)


def addresses_and_pages() -> None:
    start()
    room, first, second = reserve(3), pages(), pages()
    map_at(room, first)
    map_at(room + CHUNK, second)
    fails_with("CUDA_ERROR_INVALID_VALUE", map_at, room + CHUNK, second)
    fails_with("CUDA_ERROR_INVALID_VALUE", map_at, room + 3 * CHUNK, second)
    allow(room, 2)
    # Across the border of two mappings.
    fill(room + CHUNK - 4, 5, 2)
    assert read(room + CHUNK - 4, 2) == [5, 5]
    # The same pages elsewhere, by way of a file.
    file, imported, other = c_int(), c_ulonglong(), reserve(1)
    cuda.cuMemExportToShareableHandle(byref(file), second, POSIX_FILE, c_ulonglong(0))
    cuda.cuMemImportFromShareableHandle(byref(imported), c_void_p(file.value), POSIX_FILE)
    os.close(file.value)
    map_at(other, imported)
    allow(other)
    assert read(other) == [5]
    fails_with("CUDA_ERROR_INVALID_VALUE", cuda.cuMemAddressFree, address(room), c_size_t(3 * CHUNK))
    cuda.cuMemUnmap(address(room), c_size_t(2 * CHUNK))
    cuda.cuMemUnmap(address(other), c_size_t(CHUNK))
    cuda.cuMemAddressFree(address(room), c_size_t(3 * CHUNK))
    cuda.cuMemAddressFree(address(other), c_size_t(CHUNK))
    for handle in (first, second, imported):
        cuda.cuMemRelease(handle)
    fails_with("CUDA_ERROR_INVALID_VALUE", cuda.cuMemRelease, first)
    unused, total = c_size_t(), c_size_t()
    cuda.cuMemGetInfo_v2(byref(unused), byref(total))
    assert unused.value == total.value and living() == 0


def test_addresses_are_reserved_mapped_and_shared_as_files() -> None:
    alone(addresses_and_pages)


def no_access() -> None:
    start()
    room = reserve(1)
    map_at(room, pages())
    fill(room, 1, 1)
    fails_with("CUDA_ERROR_ILLEGAL_ADDRESS", wait)


def test_a_mapping_without_access_is_an_illegal_address() -> None:
    assert "no access set for" in alone(no_access).errors


def in_order() -> None:
    start()
    on, gate, memory = stream(), allocate(4), c_uint64()
    fill(gate, 0, 1)
    wait()
    cuda.cuMemAllocAsync(byref(memory), c_size_t(64), on)
    wait_word(on, gate, 1)
    fill(memory.value, 9, 1, on)
    cuda.cuMemFreeAsync(memory, on)
    write_word(stream(), gate, 1)
    wait(on)
    fill(memory.value, 9, 1, on)
    fails_with("CUDA_ERROR_ILLEGAL_ADDRESS", wait, on)


def test_memory_in_a_streams_order_lives_until_the_stream_frees_it() -> None:
    assert "freed in cuMemFreeAsync" in alone(in_order).errors
