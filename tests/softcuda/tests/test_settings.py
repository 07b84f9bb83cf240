"""What the environment changes, and what is said at the end."""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

import pytest
from driver import (
    address,
    allocate,
    breaches,
    copy,
    cuda,
    event,
    fails_with,
    fill,
    free,
    host_word,
    library,
    living,
    pinned,
    read,
    start,
    stream,
    uses,
    wait,
    wait_word,
    write_word,
)
from isolated import alone

NO_BARRIER = 1


def a_child() -> None:
    start()
    child = os.fork()
    if not child:
        os._exit(library.cuStreamCreate(byref(c_void_p()), 0) * 10 + library.cuInit(0))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 33
    allocate(8)


def test_a_forked_child_has_no_cuda() -> None:
    said = alone(a_child).errors
    assert "cuStreamCreate called in a child of the process that called cuInit" in said


def a_forked_child_of_who_did_not_start() -> None:
    child = os.fork()
    if not child:
        start()
        allocate(8)
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


def test_a_child_of_a_process_that_never_called_cuda_has_it() -> None:
    alone(a_forked_child_of_who_did_not_start)


def things_are_left() -> None:
    start()
    memory = allocate(123)
    free(allocate(8))
    event()
    pinned(8)
    assert living("device memory") == 1 and living() == 3 and living("thing") == -1
    print(f"{memory:#x}")


def test_what_is_left_at_exit_is_listed_with_its_maker() -> None:
    outcome = alone(things_are_left, SOFTCUDA_LEAKS="1")
    expected = f"leak: device memory {outcome.output.strip()}, 123 bytes, made in cuMemAlloc_v2 by thread python"
    assert expected in outcome.errors and "leaks: 3" in outcome.errors
    assert "leak" not in alone(things_are_left).errors


def planted() -> None:
    start()
    allocate(8)
    fails_with("CUDA_ERROR_OUT_OF_MEMORY", allocate, 8)
    memory = allocate(8)
    fails_with("CUDA_ERROR_LAUNCH_FAILED", fill, memory, 1, 1)
    fill(memory, 1, 1)
    assert uses("cuMemAlloc_v2") == 3 and uses("cuMemFree_v2") == 0
    library.softcuda_plant(f"cuMemFree_v2:{uses('cuMemFree_v2') + 1}".encode())
    fails_with("CUDA_ERROR_UNKNOWN", free, memory)
    free(memory)


def test_any_call_can_be_made_to_fail() -> None:
    said = alone(planted, SOFTCUDA_FAULT="cuMemAlloc_v2:2,cuMemsetD32Async:1:719").errors
    assert "planted fault: use 2 of cuMemAlloc_v2 returns 2" in said


def no_driver() -> None:
    fails_with("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", start)


def test_the_driver_can_be_made_to_refuse_to_start() -> None:
    alone(no_driver, SOFTCUDA_FAULT="cuInit:1:803")


def a_device_falls_off() -> None:
    start()
    memory, words, on = allocate(8), pinned(4), stream()
    host_word(words).value = 0
    fill(memory, 1, 1, on)
    # What waits is let go.
    wait_word(on, words, 1)
    fill(memory, 2, 1, stream())
    fails_with("CUDA_ERROR_UNKNOWN", wait, on)
    fails_with("CUDA_ERROR_UNKNOWN", allocate, 8)
    start(1)
    assert allocate(8)


def test_a_device_falls_off_and_its_streams_end() -> None:
    alone(a_device_falls_off, SOFTCUDA_FALL_OFF="0:3")


def late_copies(fence: str) -> None:
    """Whether another stream sees a copy when a word says that it is done."""
    start()
    memory, words = allocate(4), pinned(12)
    writer, reader, done = stream(), stream(), event()
    for offset, value in ((0, 0), (4, 5), (8, 0)):
        host_word(words + offset).value = value
    fill(memory, 1, 1, writer)
    wait(writer)
    copy(memory, words + 4, 4, writer)
    if fence == "event":
        cuda.cuEventRecord(done, writer)
    write_word(writer, words, 1, 0 if fence == "word" else NO_BARRIER)
    while host_word(words).value == 0:
        pass
    copy(words + 8, memory, 4, reader)
    wait(reader)
    assert host_word(words + 8).value == (1 if fence == "none" else 5)
    copy(words + 8, memory, 4, writer)
    wait(writer)
    assert host_word(words + 8).value == 5 == read(memory)[0]


@pytest.mark.parametrize("fence", ["none", "word", "event"])
def test_a_copy_is_seen_after_a_fence(fence: str) -> None:
    alone(late_copies, fence, SOFTCUDA_WEAK="1")


def attributes() -> None:
    start()
    words = pinned(8)
    fails_with("CUDA_ERROR_NOT_SUPPORTED", cuda.cuStreamWriteValue64_v2, stream(), address(words), c_uint64(1), 0)
    value = c_int(1)
    cuda.cuDeviceGetAttribute(byref(value), 122, 0)
    assert value.value == 0
    cuda.cuDeviceCanAccessPeer(byref(value), 0, 1)
    assert value.value == 0
    cuda.cuDriverGetVersion(byref(value))
    assert value.value == 12080
    cuda.cuDeviceGetCount(byref(value))
    assert value.value == 3
    seen = set()
    for device in range(3):
        start(device)
        uuid, number = ctypes.create_string_buffer(16), c_uint64()
        cuda.cuDeviceGetUuid(uuid, device)
        cuda.cuCtxGetId(None, byref(number))
        seen |= {uuid.raw, number.value}
    assert len(seen) == 6, "no two devices have the same"


def test_devices_and_driver_are_what_the_settings_say() -> None:
    alone(
        attributes,
        SOFTCUDA_ATTRIBUTES="122=0",
        SOFTCUDA_PEERS="0",
        SOFTCUDA_DRIVER_VERSION="12080",
        SOFTCUDA_DEVICES="4",
        CUDA_VISIBLE_DEVICES="0,2,3",
    )


def devices_apart() -> None:
    start(1)
    theirs = allocate(64)
    start()
    ours, on = allocate(64), stream()
    # The driver copies by way of the host.
    copy(ours, theirs, 64, on)
    wait(on)
    write_word(on, theirs, 1)
    fails_with("CUDA_ERROR_ILLEGAL_ADDRESS", wait, on)


def test_a_device_that_does_not_reach_another_copies_but_touches_nothing() -> None:
    said = alone(devices_apart, SOFTCUDA_PEERS="0").errors
    assert "memory of another device, which this one does not reach) in cuStreamWriteValue32_v2" in said


def devices_mixed() -> None:
    start(1)
    theirs = event()
    start()
    fails_with("CUDA_ERROR_INVALID_HANDLE", cuda.cuEventRecord, theirs, stream())
    assert breaches() == 1


def test_an_event_is_recorded_on_streams_of_its_device() -> None:
    assert "an event of device 1 on a stream of device 0" in alone(devices_mixed).errors


def calls_are_counted() -> None:
    start()
    free(allocate(8))
    allocate(8)
    text = ctypes.create_string_buffer(4096)
    assert library.softcuda_calls(text, c_size_t(4096)) == len(text.value)
    lines = text.value.decode().splitlines()
    assert "cuMemAlloc_v2 2" in lines and "cuMemFree_v2 1" in lines


def test_calls_are_counted_by_name() -> None:
    alone(calls_are_counted)


def one_visible_device(number: str) -> None:
    import torch

    # Counting does not start CUDA: children may still have it.
    assert torch.cuda.device_count() == 1
    child = os.fork()
    if not child:
        start()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    assert int(uuid[-2:], 16) == int(number)


def test_processes_that_see_one_device_each_see_different_ones() -> None:
    for number in ("0", "1"):
        alone(one_visible_device, number, CUDA_VISIBLE_DEVICES=number)


def an_old_driver() -> None:
    import torch

    with pytest.raises(RuntimeError, match="driver on your system is too old"):
        torch.zeros(1, device="cuda")


def test_pytorch_refuses_an_old_driver() -> None:
    alone(an_old_driver, SOFTCUDA_DRIVER_VERSION="11080")


def blocking_calls(which: str) -> None:
    start()
    words, on = pinned(4), stream()
    host_word(words).value = 0
    buffer = ctypes.create_string_buffer(8192)
    wait_word(on, words, 1)

    def register() -> None:
        start()
        cuda.cuMemHostRegister_v2(buffer, c_size_t(8192), 0)

    thread = threading.Thread(target=register)
    thread.start()
    if which == "all":
        thread.join(0.2)
        assert thread.is_alive()
        host_word(words).value = 1
    thread.join()
    host_word(words).value = 1
    cuda.cuMemHostUnregister(buffer)


def test_calls_wait_for_the_device_as_drivers_may() -> None:
    alone(blocking_calls, "all", SOFTCUDA_BLOCKING="all")
    alone(blocking_calls, "")


def many_operations() -> None:
    start()
    memory, on = allocate(64), stream()
    before, files = living(), len(os.listdir("/proc/self/fd"))
    for _ in range(2000):
        side, done = stream(), event()
        fill(memory, 1, 1, side)
        cuda.cuEventRecord(done, side)
        cuda.cuStreamWaitEvent(on, done, 0)
        cuda.cuEventDestroy_v2(done)
        cuda.cuStreamDestroy_v2(side)
    wait(on)
    assert living() == before and len(os.listdir("/proc/self/fd")) == files and breaches() == 0
    while len(os.listdir("/proc/self/task")) > 3:
        pass


@pytest.mark.parametrize("queues", ["0", "1", "2", "8"])
def test_nothing_is_left_of_streams_and_events(queues: str) -> None:
    if queues == "0":
        alone(many_operations)
    else:
        # Their threads stay.
        alone(many_operations_of_shared_queues, SOFTCUDA_QUEUES=queues)


def many_operations_of_shared_queues() -> None:
    start()
    memory, on = allocate(64), stream()
    for number in range(500):
        side, done = stream(), event()
        fill(memory, number, 1, side)
        cuda.cuEventRecord(done, side)
        cuda.cuStreamWaitEvent(on, done, 0)
        cuda.cuEventDestroy_v2(done)
        cuda.cuStreamDestroy_v2(side)
    wait(on)
    assert len(os.listdir("/proc/self/task")) <= 9 and breaches() == 0
