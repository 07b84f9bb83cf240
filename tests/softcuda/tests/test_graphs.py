"""Capture, graphs and user objects."""

from __future__ import annotations

import ctypes
import threading
import time
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p

import pytest
from driver import (
    DISABLE_TIMING,
    GLOBAL,
    HOST_FUNCTION,
    RELAXED,
    THREAD_LOCAL,
    allocate,
    breaches,
    call_on,
    cuda,
    event,
    fails_with,
    fill,
    host_word,
    is_done,
    library,
    living,
    pinned,
    read,
    start,
    stream,
    wait,
    wait_word,
    write_word,
)
from isolated import alone


def begin(on: c_void_p, mode: int = GLOBAL) -> None:
    cuda.cuStreamBeginCapture_v2(on, mode)


def end(on: c_void_p) -> c_void_p:
    graph = c_void_p()
    cuda.cuStreamEndCapture(on, byref(graph))
    return graph


def instantiate(graph: c_void_p) -> c_void_p:
    made = c_void_p()
    cuda.cuGraphInstantiateWithFlags(byref(made), graph, ctypes.c_ulonglong(0))
    return made


def after(second: c_void_p, first: c_void_p) -> c_void_p:
    """Orders a stream after what is in another; the event, which may go at once."""
    done = event(DISABLE_TIMING)
    cuda.cuEventRecord(done, first)
    cuda.cuStreamWaitEvent(second, done, 0)
    return done


def branches_run() -> None:
    start()
    memory, words = allocate(8), pinned(8)
    fill(memory, 0, 2)
    wait()
    main, side = stream(), stream()
    begin(main)
    after(side, main)
    # One branch waits for a word that the other writes: they must not be one after the other.
    wait_word(main, words, 1)
    fill(memory, 1, 1, main)
    fill(memory + 4, 2, 1, side)
    write_word(side, words, 1)
    after(main, side)
    write_word(main, words + 4, 1)
    graph = end(main)
    count = c_size_t()
    cuda.cuGraphGetNodes(graph, None, byref(count))
    assert count.value == 5
    program = instantiate(graph)
    cuda.cuGraphDestroy(graph)
    assert read(memory, 2) == [0, 0]
    for _ in range(3):
        host_word(words).value = host_word(words + 4).value = 0
        fill(memory, 0, 2)
        wait()
        cuda.cuGraphLaunch(program, main)
        wait(main)
        assert read(memory, 2) == [1, 2] and host_word(words + 4).value == 1
    cuda.cuGraphExecDestroy(program)
    assert living("graph") == living("graph exec") == 0


def test_branches_of_a_graph_run_beside_each_other_and_again() -> None:
    alone(branches_run)
    alone(branches_run, SOFTCUDA_DELAY_US="300")


def launches_are_in_order() -> None:
    start()
    words, first, second = pinned(8), stream(), stream()
    host_word(words).value = 0
    begin(first)
    wait_word(first, words, 1)
    program = instantiate(end(first))
    cuda.cuGraphLaunch(program, first)
    cuda.cuGraphLaunch(program, second)
    write_word(second, words + 4, 1)
    assert not is_done(second)
    # A graph that runs may be destroyed.
    cuda.cuGraphExecDestroy(program)
    host_word(words).value = 1
    wait(second)


def test_launches_of_one_graph_follow_each_other_on_any_stream() -> None:
    alone(launches_are_in_order)


def violation(kind: str) -> None:
    start()
    memory, main, side, before = allocate(8), stream(), stream(), event()
    cuda.cuEventRecord(before, side)
    begin(main)
    if kind == "synchronise":
        fails_with("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", wait, main)
    elif kind == "free":
        fails_with("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", cuda.cuMemFree_v2, ctypes.c_uint64(memory))
    elif kind == "outside":
        fails_with("CUDA_ERROR_STREAM_CAPTURE_ISOLATION", cuda.cuStreamWaitEvent, main, before, 0)
    elif kind == "default":
        blocking = stream(0)
        after(blocking, main)
        fails_with("CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", fill, memory, 1, 1)
    elif kind == "merge":
        begin(side)
        done = event()
        cuda.cuEventRecord(done, side)
        fails_with("CUDA_ERROR_STREAM_CAPTURE_MERGE", cuda.cuStreamWaitEvent, main, done, 0)
    elif kind == "thread":
        thread = threading.Thread(target=lambda: fails_with("CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", end, main))
        thread.start()
        thread.join()
    elif kind == "destroy":
        after(side, main)
        cuda.cuStreamDestroy_v2(side)
    fails_with("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", end, main)
    # The stream is as before.
    fill(memory, 3, 1, main)
    wait(main) if kind != "merge" else None


@pytest.mark.parametrize(
    ("kind", "culprit"),
    [
        ("synchronise", "cuStreamSynchronize"),
        ("free", "cuMemFree_v2"),
        ("outside", "cuStreamWaitEvent: it waited for an event from outside of it"),
        ("default", "cuMemsetD32Async: the default stream was used"),
        ("merge", "cuStreamWaitEvent: it waited for an event of another capture"),
        ("thread", "cuStreamEndCapture: it was ended by another thread"),
        ("destroy", "cuStreamDestroy_v2: a stream of it was destroyed"),
    ],
)
def test_what_spoils_a_capture_is_named(kind: str, culprit: str) -> None:
    assert f"is spoilt by {culprit}" in alone(violation, kind).errors


def unjoined() -> None:
    start()
    memory, main, side = allocate(8), stream(), stream()
    begin(main)
    fill(memory, 1, 1, main)
    after(side, main)
    fill(memory, 1, 1, side)
    fails_with("CUDA_ERROR_STREAM_CAPTURE_UNJOINED", end, main)
    status = c_int(5)
    cuda.cuStreamIsCapturing(side, byref(status))
    assert status.value == 0 and living("graph") == 0


def test_a_branch_that_does_not_join_is_an_error() -> None:
    alone(unjoined)


def other_threads(mode: str) -> None:
    """In a capture in global mode no thread may call what waits; else only its own may not."""
    start()
    main, results = stream(), []
    begin(main, int(mode))

    def work() -> None:
        start()
        results.append(library.cuMemAlloc_v2(byref(ctypes.c_uint64()), c_size_t(8)))
        relaxed = c_int(RELAXED)
        cuda.cuThreadExchangeStreamCaptureMode(byref(relaxed))
        results.append(library.cuMemAlloc_v2(byref(ctypes.c_uint64()), c_size_t(8)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [900 if int(mode) == GLOBAL else 0, 0]
    if int(mode) == RELAXED:
        allocate(8)
        end(main)


def test_captures_mind_other_threads_by_their_mode() -> None:
    for mode in (GLOBAL, THREAD_LOCAL, RELAXED):
        alone(other_threads, str(mode))


def objects() -> None:
    start()
    main, seen = stream(), []

    @HOST_FUNCTION
    def destroy(_: int) -> None:
        seen.append(library.cuStreamQuery(main))

    thing = c_void_p()
    cuda.cuUserObjectCreate(byref(thing), None, destroy, c_uint(1), c_uint(1))
    begin(main)
    kept = call_on(main, lambda: None)
    graph = end(main)
    cuda.cuGraphRetainUserObject(graph, thing, c_uint(1), c_uint(1))
    program = instantiate(graph)
    cuda.cuGraphDestroy(graph)
    cuda.cuGraphLaunch(program, main)
    wait(main)
    assert not seen and kept
    cuda.cuGraphExecDestroy(program)
    while not seen:
        time.sleep(0.001)
    assert seen == [800] and breaches() == 1


def test_a_user_object_goes_with_the_last_of_its_graphs_and_must_not_call_cuda() -> None:
    assert "cuStreamQuery called in the destructor of a user object" in alone(objects).errors
