"""One source of kernels, for NVRTC and for the host: the software CUDA runs the host's."""

from __future__ import annotations

import ctypes
import struct
import threading
from ctypes import byref, c_float, c_uint, c_uint64, c_ulonglong, c_void_p
from pathlib import Path

import pytest
from driver import (
    address,
    allocate,
    compile_for,
    copy,
    cuda,
    event,
    fails_with,
    fill,
    free,
    function,
    host_word,
    launch,
    living,
    load,
    pinned,
    read,
    start,
    stream,
    wait,
    wait_word,
    write_word,
)
from isolated import alone

SOURCE = Path(__file__).with_name("sample.cu")
NO_BARRIER = 1


Sources = ctypes.c_uint64 * 4


def kernels_run(cubin: str) -> None:
    start()
    module = load(Path(cubin).read_bytes())
    fold, places = function(module, b"fold"), function(module, b"places")
    fails_with("CUDA_ERROR_NOT_FOUND", function, module, b"absent")
    size, on = 1000, stream()
    values, host = allocate(4 * 4 * size), pinned(4 * 4 * size)
    numbers = [struct.unpack("f", struct.pack("f", (i * 7919 % 1000) / 7))[0] for i in range(3 * size)]
    ctypes.memmove(host, struct.pack(f"{3 * size}f", *numbers), 12 * size)
    copy(values, host, 12 * size, on)
    target = values + 12 * size
    # The last place of the structure is not used: what lies there is nobody's pointer.
    sources = Sources(values, values + 4 * size, values + 8 * size, 0x1234)
    launch(fold, (3, 1, 1), (64, 1, 1), on, c_uint64(target), sources, c_uint(3), c_ulonglong(size), c_float(0.5))
    copy(host, target, 4 * size, on)
    wait(on)
    found = struct.unpack(f"{size}f", ctypes.string_at(host, 4 * size))
    single = lambda value: struct.unpack("f", struct.pack("f", value))[0]  # noqa: E731
    for i in range(size):
        expected = single(single(single(numbers[i] + numbers[size + i]) + numbers[2 * size + i]) * 0.5)
        assert found[i] == expected, i
    launch(places, (2, 1, 3), (4, 2, 1), on, c_uint64(values))
    wait(on)
    assert read(values, 48) == [block * 1000 + thread for block in range(6) for thread in range(8)]
    fails_with("CUDA_ERROR_INVALID_VALUE", launch, places, (1, 1, 1), (1025, 1, 1), on, c_uint64(values))
    cuda.cuModuleUnload(module)
    assert living("module") == 0


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_a_kernel_compiles_for_the_gpu_and_its_twin_runs(architecture: str, twins: str, tmp_path: Path) -> None:
    cubin = tmp_path / "sample.cubin"
    cubin.write_bytes(compile_for(architecture, SOURCE))
    alone(kernels_run, str(cubin), SOFTCUDA_TWINS=twins)
    alone(kernels_run, str(cubin), SOFTCUDA_TWINS=twins, SOFTCUDA_WEAK="1")


PTX = b".version 9.0\n.target sm_90\n fold places lonely\0"


def loading_waits() -> None:
    start()
    words, on = pinned(4), stream()
    host_word(words).value = 0
    wait_word(on, words, 1)

    def work() -> None:
        start()
        load(PTX)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    host_word(words).value = 1
    thread.join()


def test_loading_a_module_waits_for_the_device() -> None:
    alone(loading_waits)


def without_a_twin() -> None:
    start()
    fails_with("CUDA_ERROR_NOT_FOUND", function, load(PTX), b"lonely")


def test_a_kernel_without_a_twin_is_not_found_and_named(twins: str) -> None:
    assert "kernel lonely has no twin" in alone(without_a_twin, SOFTCUDA_TWINS=twins).errors


def freed_parameter() -> None:
    start()
    places, memory, on = function(load(PTX), b"places"), allocate(64), stream()
    free(memory)
    launch(places, (1, 1, 1), (1, 1, 1), on, c_uint64(memory))
    fails_with("CUDA_ERROR_ILLEGAL_ADDRESS", wait, on)


def test_a_kernel_that_gets_freed_memory_breaks_the_device(twins: str) -> None:
    said = alone(freed_parameter, SOFTCUDA_TWINS=twins).errors
    assert "a kernel's parameter) in cuLaunchKernel on stream" in said and "freed in cuMemFree_v2" in said


def captured() -> None:
    start()
    places, memory, on = function(load(PTX), b"places"), allocate(32), stream()
    cuda.cuStreamBeginCapture_v2(on, 0)
    launch(places, (2, 1, 1), (4, 1, 1), on, c_uint64(memory))
    graph, program = c_void_p(), c_void_p()
    cuda.cuStreamEndCapture(on, byref(graph))
    cuda.cuGraphInstantiateWithFlags(byref(program), graph, c_ulonglong(0))
    for _ in range(2):
        fill(memory, 0, 8, on)
        cuda.cuGraphLaunch(program, on)
        wait(on)
        assert read(memory, 8) == [0, 1, 2, 3, 1000, 1001, 1002, 1003]


def test_a_kernel_is_captured_with_its_parameters(twins: str) -> None:
    alone(captured, SOFTCUDA_TWINS=twins)


def late_stores(fence: str) -> None:
    """What another stream sees of a kernel's stores when a word says that they are done."""
    start()
    places, memory, words, done = function(load(PTX), b"places"), allocate(8), pinned(16), event()
    writer, reader = stream(), stream()
    host_word(words).value = 0
    fill(memory, 7, 2, writer)
    wait(writer)
    launch(places, (2, 1, 1), (1, 1, 1), writer, c_uint64(memory))
    if fence == "event":
        cuda.cuEventRecord(done, writer)
    write_word(writer, words, 1, 0 if fence == "word" else NO_BARRIER)
    while host_word(words).value == 0:
        pass
    copy(words + 8, memory, 8, reader)
    wait(reader)
    seen = [host_word(words + 8).value, host_word(words + 12).value]
    assert seen == ([7, 7] if fence == "none" else [0, 1000]), seen
    # Its own stream sees them in any case.
    copy(words + 8, memory, 8, writer)
    wait(writer)
    assert host_word(words + 12).value == 1000
    cuda.cuMemFree_v2(address(memory))


@pytest.mark.parametrize("fence", ["none", "word", "event"])
def test_a_kernels_stores_are_seen_after_a_fence(fence: str, twins: str) -> None:
    alone(late_stores, fence, SOFTCUDA_TWINS=twins, SOFTCUDA_WEAK="1")
