"""Device memory, pinned memory, and what becomes of who uses them wrongly."""

from __future__ import annotations

import ctypes
import threading
from ctypes import byref, c_size_t, c_uint64

from driver import (
    PAGE,
    address,
    allocate,
    copy,
    cuda,
    fails_with,
    fill,
    free,
    host_word,
    is_done,
    pinned,
    read,
    start,
    stream,
    wait,
    wait_word,
    write_word,
)
from isolated import alone, run


def bytes_go_to_the_device_and_back() -> None:
    start()
    memory, host = allocate(1 << 20), pinned(1 << 20)
    ctypes.memmove(host, bytes(range(256)) * 4096, 1 << 20)
    copy(memory, host, 1 << 20)
    wait()
    ctypes.memset(host, 0, 1 << 20)
    copy(host, memory, 1 << 20)
    wait()
    assert ctypes.string_at(host, 1 << 20) == bytes(range(256)) * 4096
    fill(memory + 8, 0xABCD, 2)
    assert read(memory + 4, 4) == [0x07060504, 0xABCD, 0xABCD, 0x13121110]


def test_bytes_go_to_the_device_and_back() -> None:
    alone(bytes_go_to_the_device_and_back)


def memory_ends() -> None:
    start()
    memory = allocate(3 << 20)
    fails_with("CUDA_ERROR_OUT_OF_MEMORY", allocate, 2 << 20)
    unused, total = c_size_t(), c_size_t()
    cuda.cuMemGetInfo_v2(byref(unused), byref(total))
    assert (unused.value, total.value) == (1 << 20, 4 << 20)
    free(memory)
    allocate(4 << 20)


def test_memory_ends_and_comes_back() -> None:
    alone(memory_ends, SOFTCUDA_MEMORY_MB="4")


def use_after_free() -> None:
    start()
    memory, other = allocate(PAGE), allocate(PAGE)
    free(memory)
    copy(other, memory, 64)
    fails_with("CUDA_ERROR_ILLEGAL_ADDRESS", wait)
    fails_with("CUDA_ERROR_ILLEGAL_ADDRESS", allocate, PAGE)
    start(1)
    allocate(PAGE)


def test_use_after_free_breaks_the_device_and_names_the_thread_that_freed() -> None:
    said = alone(use_after_free).errors
    assert "illegal address" in said and "read) in cuMemcpyAsync on stream" in said
    assert "4096 bytes of cuMemAlloc_v2 by thread" in said and "freed in cuMemFree_v2" in said


def overrun() -> None:
    start()
    memory = allocate(100)
    fill(memory, 1, 26)
    fails_with("CUDA_ERROR_ILLEGAL_ADDRESS", wait)


def test_a_byte_too_much_is_an_illegal_address() -> None:
    assert "never allocated" in alone(overrun).errors or "beyond the end" in alone(overrun).errors


def new_memory_is_poisoned() -> None:
    start()
    assert read(allocate(PAGE), 2) == [0xCBCBCBCB] * 2


def test_new_memory_is_no_zeros() -> None:
    alone(new_memory_is_poisoned)


def host_touches_device_memory() -> None:
    start()
    ctypes.string_at(allocate(PAGE) + 12, 4)


def test_the_host_that_touches_device_memory_dies_and_hears_why() -> None:
    outcome = run(host_touches_device_memory)
    assert outcome.status == -11
    assert "the host touched device memory" in outcome.errors
    assert "offset 12 in 4096 bytes of cuMemAlloc_v2" in outcome.errors


def free_waits() -> None:
    start()
    gate, memory, on = allocate(4), allocate(PAGE), stream()
    fill(gate, 0, 1)
    wait()
    wait_word(on, gate, 1)
    fill(memory, 7, 1, on)
    other = stream()
    assert not is_done(on)
    write_word(other, gate, 1)
    # Without that write this would never return.
    free(memory)
    assert is_done(on)


def test_free_waits_for_the_device() -> None:
    alone(free_waits)


def free_waits_for_the_rest_of_a_stream() -> None:
    start()
    words, memory, other = pinned(4), allocate(PAGE), allocate(PAGE)
    host_word(words).value = 0
    on = stream()
    wait_word(on, words, 1)
    copy(other, memory, PAGE, on)
    cuda.cuStreamDestroy_v2(on)
    timer = threading.Timer(0.1, lambda: setattr(host_word(words), "value", 1))
    timer.start()
    free(memory)
    assert host_word(words).value == 1
    cuda.cuCtxSynchronize()


def test_free_waits_for_what_a_destroyed_stream_has_left() -> None:
    alone(free_waits_for_the_rest_of_a_stream)


def registered(differ: str) -> None:
    start()
    buffer = ctypes.create_string_buffer(3 * PAGE)
    host = ctypes.addressof(buffer)
    cuda.cuMemHostRegister_v2(ctypes.c_void_p(host), c_size_t(3 * PAGE), 0)
    fails_with("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", cuda.cuMemHostRegister_v2, ctypes.c_void_p(host), 8, 0)
    device = c_uint64()
    cuda.cuMemHostGetDevicePointer_v2(byref(device), ctypes.c_void_p(host + 64), 0)
    assert (device.value != host + 64) == (differ == "1")
    aligned = (host + 7) // 8 * 8
    cuda.cuMemHostGetDevicePointer_v2(byref(device), ctypes.c_void_p(aligned), 0)
    on = stream()
    write_word(on, device.value, 42)
    wait(on)
    assert host_word(aligned).value == 42
    if differ == "1":
        write_word(on, aligned, 43)
        fails_with("CUDA_ERROR_ILLEGAL_ADDRESS", wait, on)
    else:
        cuda.cuMemHostUnregister(ctypes.c_void_p(host))
        fails_with("CUDA_ERROR_INVALID_VALUE", write_word, on, aligned, 44)


def test_registered_memory_is_used_by_the_devices_pointer() -> None:
    alone(registered, "0")
    said = alone(registered, "1", SOFTCUDA_HOST_POINTERS_DIFFER="1").errors
    assert "illegal address" in said and "a word" in said


def pageable_copies() -> None:
    start()
    memory, on = allocate(PAGE), stream()
    source = ctypes.create_string_buffer(b"a" * 8, 8)
    cuda.cuMemcpyHtoDAsync_v2(address(memory), source, c_size_t(8), on)
    # The driver has taken what it needs.
    source.raw = b"b" * 8
    target = ctypes.create_string_buffer(8)
    cuda.cuMemcpyDtoHAsync_v2(target, address(memory), c_size_t(8), on)
    assert target.raw == b"a" * 8


def test_copies_of_memory_that_is_not_pinned_are_done_with_it_when_they_return() -> None:
    alone(pageable_copies, SOFTCUDA_DELAY_US="2000", SOFTCUDA_SEED="1")


def peak_of_addresses() -> None:
    start()
    seen = set()
    for _ in range(50):
        memory = allocate(PAGE)
        seen.add(memory)
        free(memory)
    assert len(seen) == 50


def test_addresses_are_not_reused_soon() -> None:
    alone(peak_of_addresses)
