"""Streams, events, callbacks and words."""

from __future__ import annotations

import ctypes
import threading
from ctypes import byref, c_void_p

from driver import (
    EQUAL,
    WAIT_32,
    WAIT_64,
    WRITE_32,
    WRITE_64,
    BatchStep,
    address,
    allocate,
    breaches,
    call_on,
    copy,
    cuda,
    event,
    fails_with,
    fill,
    host_word,
    is_done,
    library,
    pinned,
    read,
    start,
    stream,
    wait,
    wait_word,
    write_word,
)
from isolated import alone


def events_order_streams() -> None:
    start()
    gate, memory = allocate(4), allocate(4)
    fill(gate, 0, 1)
    fill(memory, 1, 1)
    wait()
    first, second, done = stream(), stream(), event()
    wait_word(first, gate, 1)
    fill(memory, 2, 1, first)
    cuda.cuEventRecord(done, first)
    cuda.cuStreamWaitEvent(second, done, 0)
    fill(memory, 3, 1, second)
    fails_with("CUDA_ERROR_NOT_READY", cuda.cuEventQuery, done)
    assert not is_done(second)
    write_word(stream(), gate, 1)
    wait(second)
    cuda.cuEventQuery(done)
    assert read(memory) == [3]


def test_events_order_streams() -> None:
    alone(events_order_streams)


def the_default_stream() -> None:
    start()
    gate, memory = allocate(4), allocate(4)
    fill(gate, 0, 1)
    wait()
    blocking, free_running = stream(0), stream()
    wait_word(blocking, gate, 1)
    fill(memory, 5, 1, blocking)
    write_word(free_running, memory, 9)
    wait(free_running)
    fill(memory, 6, 1)
    assert not is_done(None)
    write_word(free_running, gate, 1)
    assert read(memory) == [6]


def test_the_default_stream_waits_for_blocking_streams_alone() -> None:
    alone(the_default_stream)


def words_are_waited_for() -> None:
    start()
    host = pinned(64)
    for offset in range(0, 64, 4):
        host_word(host + offset).value = 0
    on = stream()
    # Across the end of the numbers: 2^32 - 1 comes before 1.
    host_word(host).value = 0xFFFFFFFF
    wait_word(on, host, 1)
    write_word(on, host + 4, 10)
    assert not is_done(on)
    host_word(host).value = 2
    wait(on)
    assert host_word(host + 4).value == 10
    wait_word(on, host, 3, EQUAL)
    assert not is_done(on)
    host_word(host).value = 4
    assert not is_done(on)
    host_word(host).value = 3
    wait(on)
    cuda.cuStreamWriteValue64_v2(on, address(host + 8), address(1 << 40), 0)
    cuda.cuStreamWaitValue64_v2(on, address(host + 8), address(1 << 40), EQUAL)
    wait(on)
    assert ctypes.c_uint64.from_address(host + 8).value == 1 << 40


def test_words_are_written_and_waited_for() -> None:
    alone(words_are_waited_for)


def batches_run_in_order() -> None:
    start()
    assert ctypes.sizeof(BatchStep) == 48
    host = pinned(16)
    for offset in (0, 4, 8, 12):
        host_word(host + offset).value = 0
    on = stream()
    steps = (BatchStep * 4)(
        BatchStep(WRITE_32, host, 1),
        BatchStep(WAIT_32, host + 4, 1),
        BatchStep(WRITE_64, host + 8, 7),
        BatchStep(WAIT_64, host + 8, 7),
    )
    cuda.cuStreamBatchMemOp_v2(on, 4, steps, 0)
    while host_word(host).value == 0:
        pass
    assert not is_done(on) and host_word(host + 8).value == 0
    host_word(host + 4).value = 1
    wait(on)
    assert host_word(host + 8).value == 7
    # All or nothing: a bad address in the last keeps the first from being submitted.
    steps = (BatchStep * 2)(BatchStep(WRITE_32, host, 2), BatchStep(WRITE_32, host + 1, 2))
    fails_with("CUDA_ERROR_INVALID_VALUE", cuda.cuStreamBatchMemOp_v2, on, 2, steps, 0)
    wait(on)
    assert host_word(host).value == 1


def test_batches_run_in_order_also_with_gaps() -> None:
    alone(batches_run_in_order)
    alone(batches_run_in_order, SOFTCUDA_GAP_US="500")


def callbacks_may_not_call() -> None:
    start()
    on, seen = stream(), []

    def calls_cuda() -> None:
        seen.append(library.cuStreamQuery(on))
        seen.append(library.cuMemAlloc_v2(byref(ctypes.c_uint64()), ctypes.c_size_t(8)))

    kept = call_on(on, calls_cuda)
    wait(on)
    assert seen == [800, 800] and breaches() == 2 and kept


def test_a_callback_that_calls_cuda_gets_an_error_and_is_named() -> None:
    said = alone(callbacks_may_not_call).errors
    assert "cuStreamQuery called in a callback of the host" in said


def threads_may_not_call() -> None:
    start()
    results = []

    def work() -> None:
        ctypes.CDLL(None).prctl(15, b"watch-1", 0, 0, 0)  # PR_SET_NAME
        results.append(library.cuCtxSynchronize())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [800] and breaches() == 1


def test_threads_that_must_not_call_cuda_are_named() -> None:
    said = alone(threads_may_not_call, SOFTCUDA_FORBIDDEN_THREADS="progress,watch").errors
    assert "cuCtxSynchronize called on thread watch-1" in said


def dead_handles() -> None:
    start()
    done = event()
    cuda.cuEventDestroy_v2(done)
    fails_with("CUDA_ERROR_INVALID_HANDLE", cuda.cuEventRecord, done, None)
    fails_with("CUDA_ERROR_INVALID_HANDLE", cuda.cuEventDestroy_v2, done)
    on = stream()
    cuda.cuStreamDestroy_v2(on)
    fails_with("CUDA_ERROR_INVALID_HANDLE", fill, allocate(4), 1, 1, on)


def test_handles_that_were_destroyed_are_none() -> None:
    said = alone(dead_handles).errors
    assert "is no stream, or one destroyed" in said and "is no event, or one destroyed" in said


def shared_queues(queues: str) -> None:
    start()
    gate, memory = pinned(4), allocate(4)
    host_word(gate).value = 0
    streams = [stream() for _ in range(3)]
    wait_word(streams[0], gate, 1)
    for on in streams[1:]:
        fill(memory, 1, 1, on)
    ended = event()
    cuda.cuEventRecord(ended, streams[2])
    if queues == "1":
        # What waits holds up what came later, of other streams too.
        assert not is_done(streams[1]) and not is_done(streams[2])
    else:
        cuda.cuEventSynchronize(ended)
    host_word(gate).value = 1
    cuda.cuCtxSynchronize()


def test_streams_may_share_queues() -> None:
    alone(shared_queues, "1", SOFTCUDA_QUEUES="1")
    alone(shared_queues, "0")


def unordered_copies() -> None:
    """Prints what a copy reads that nothing orders after the fill of its source."""
    start()
    memory, other = allocate(4), allocate(4)
    found = set()
    for value in range(20):
        first, second = stream(), stream()
        fill(memory, value, 1, first)
        copy(other, memory, 4, second)
        cuda.cuCtxSynchronize()
        found.add(read(other)[0] == value)
    print(sorted(found))


def test_delays_show_a_missing_event_and_print_their_seed() -> None:
    first = alone(unordered_copies, SOFTCUDA_DELAY_US="3000", SOFTCUDA_SEED="7")
    assert "False" in first.output and "SOFTCUDA_SEED=7" in first.errors
    assert "SOFTCUDA_SEED=" in alone(unordered_copies, SOFTCUDA_DELAY_US="10").errors


def long_waits() -> None:
    start()
    words, first, second, done = pinned(4), stream(), stream(), event()
    host_word(words).value = 3
    wait_word(first, words, 7)
    cuda.cuEventRecord(done, first)
    cuda.cuStreamWaitEvent(second, done, 0)
    print(f"{words:#x}")
    while library.softcuda_long_waits() < 2:
        pass
    host_word(words).value = 7
    wait(second)


def test_a_wait_that_takes_long_says_what_for() -> None:
    outcome = alone(long_waits, SOFTCUDA_WARN_AFTER_MS="50")
    word = f"the word at {outcome.output.strip()}: it is 3, compared with 7 by flags 0"
    assert f"cuStreamWaitValue32_v2 on stream 1 of device 0 has waited for {word}" in outcome.errors
    assert "has waited for record 1 of an event, of which 0 are done" in outcome.errors


def timing() -> None:
    start()
    before, after, untimed = event(0), event(0), event()
    on = stream()
    cuda.cuEventRecord(before, on)
    cuda.cuEventRecord(after, on)
    wait(on)
    elapsed = ctypes.c_float(-1)
    cuda.cuEventElapsedTime_v2(byref(elapsed), before, after)
    assert elapsed.value >= 0
    fails_with("CUDA_ERROR_INVALID_HANDLE", cuda.cuEventElapsedTime_v2, byref(elapsed), before, untimed)
    names = c_void_p()
    fails_with("CUDA_ERROR_INVALID_VALUE", cuda.cuGetErrorName, 12345, byref(names))


def test_events_tell_time_unless_they_were_made_without() -> None:
    alone(timing)
