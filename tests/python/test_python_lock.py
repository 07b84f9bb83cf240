"""No thread waits for Python's lock while it holds a lock of the backend: the holder of Python's may want that one."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch.distributed as dist
from harness import BACKEND, WATCHDOG_SECONDS, World, join, leaving_together, meet
from ncclx_rs import _native
from test_peer_loss import backend, run_ranks, until

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="ncclx_rs is not under test")

# One rank sends itself a message, which times out while this thread has Python's lock and calls the backend. A call
# that hangs never releases the lock, so a timer that does not need the lock ends the process.
HOLDER = """
import ctypes, faulthandler, sys
from datetime import timedelta
import ncclx_rs, torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

faulthandler.dump_traceback_later(60, exit=True)
sys.setswitchinterval(1e6)  # no other thread is let in between two instructions
holding = ctypes.PyDLL(None)  # whose functions are called with Python's lock
limit = timedelta(milliseconds=50)


class Owned(torch.Tensor):
    "A tensor whose Python object goes when the backend drops it."


def group():
    comm = ncclx_rs.new_comm(
        "ncclx", "cpu", store=dist.HashStore(), rank=0, size=1, abort_process_on_timeout_or_error=False
    )
    made.append(comm)
    return comm.get_backend_impl().c10d


def abort_hooks(backend):
    backend.register_abort_hook(7, lambda: called.append("again"))
    backend.register_abort_hook(7, lambda: called.append("once more"))
    backend.unregister_abort_hook(7)


def hook(backend):
    backend._on_failure(lambda: called.append("late"))
    backend._on_failure(lambda: called.append("later"))


def coalesced(backend):
    for _ in range(2):
        backend._start_coalescing()
        backend.broadcast([torch.ones(3).as_subclass(Owned)], c10d.BroadcastOptions())
    backend._end_coalescing()


def window(backend):
    for _ in range(2):
        window = backend._window_register(torch.ones(3).as_subclass(Owned))
    backend._window_deregister(window)


def one_sided(backend):
    window_tensor = torch.zeros(3).as_subclass(Owned)
    window = backend._window_register(window_tensor)
    three = lambda: torch.ones(3).as_subclass(Owned)
    backend._window_put(window, three(), 0, 0)
    backend._window_get(window, three(), 0, 0)
    backend._window_accumulate(window, three(), 0, 0)
    backend._window_flush(window, 0)
    backend._window_fence(window)
    backend._window_all_gather(window, window_tensor, three())
    backend._window_signal(window, 0)
    backend._window_wait_signal(window, 0)
    backend._window_wait_signal(window, 0, True, 50)  # times out, and its hooks run while nobody waits
    holding.usleep(200_000)
    assert backend._window_get_path(window, 0) == "mapped"
    try:
        backend._window_map(window, 0)  # such memory cannot be mapped
    except ValueError:
        pass
    backend._window_deregister(window)


def direct(backend):
    for call in backend._direct_calls().values():
        try:
            call()  # it reads its arguments first
        except TypeError:
            pass


def parts(backend):
    assert backend._part([0]) is None  # no library runs operations here
    try:
        backend._inherit(None)
    except TypeError:
        pass


def device(backend):
    try:
        backend._set_device(torch.device("cuda", 0))
    except RuntimeError:
        pass  # there is none


def memory(backend):
    assert backend._allocates() == (False, "")  # no library runs operations here
    for call in (backend._register, backend._deregister):
        try:
            call(torch.ones(3).as_subclass(Owned))
        except ValueError:
            pass  # it is the host's


def future(backend):
    work = backend._message(False, torch.ones(3).as_subclass(Owned), 0, 2, limit)
    while not work.is_completed():
        holding.usleep(1_000)
    work.get_future()
    assert not work.is_success() and work.is_completed() and work.exception() is not None


ENTRIES = {
    "none": lambda backend: None,  # makes the threads
    "get_error": lambda backend: backend.get_error(),
    "options": lambda backend: backend.options,
    "host": lambda backend: backend._host(0),
    "name_ranks": lambda backend: backend._name_ranks([0]),
    "default_timeout": lambda backend: backend._set_default_timeout(timedelta(seconds=20)),
    "sequence": lambda backend: backend._get_sequence_number_for_group(),
    "call": lambda backend: backend.barrier(c10d.BarrierOptions()).wait(),
    "hook": hook,
    "abort_hooks": abort_hooks,
    "coalesced": coalesced,
    "window": window,
    "one_sided": one_sided,
    "parts": parts,
    "memory": memory,
    "direct": direct,
    "device": device,
    "barrier": lambda backend: backend._barrier(False, limit * 100),
    "failed": lambda backend: backend._has_failed(),
    "rendezvous": lambda backend: backend._set_rendezvous("no handle", lambda *arguments: None),
    "split": lambda backend: backend.perform_nocolor_split(torch.device("cpu")),
    "hooks": lambda backend: backend._wait_for_hooks(),
    "future": future,
    "settle": lambda backend: backend._settle(),
    "abort": lambda backend: backend.abort(),
    "shutdown": lambda backend: backend.shutdown(),
}
if not hasattr(c10d.Backend, "register_abort_hook"):
    del ENTRIES["abort_hooks"]
if not hasattr(c10d.Backend, "_start_coalescing"):
    del ENTRIES["coalesced"]

for name, entry in ENTRIES.items():
    called, made = [], []
    backend = group()
    if hasattr(backend, "_register_on_completion_hook"):
        backend._register_on_completion_hook(lambda info: called.append("ended"))
    backend._on_failure(lambda: called.append("failed"))
    work = backend._message(False, torch.ones(3).as_subclass(Owned), 0, 1, limit)
    holding.usleep(200_000)  # in which it fails, on a thread that wants Python's lock for the hooks
    print(name, flush=True)
    entry(backend)
    backend._settle()
    assert called.count("failed") == 1, (name, called)
    made.pop().finalize()
print("all")
"""


def test_every_entry_is_called_so() -> None:
    entries = {name for name in vars(_native.Backend) if not name.startswith(("__", "_pybind11"))}
    assert {name for name in entries if f"backend.{name}" not in HOLDER} == set()


def test_an_entry_is_called_with_pythons_lock(tmp_path: Path) -> None:
    ((code, output),) = run_ranks(HOLDER, 1, tmp_path)
    assert code == 0 and "all" in output.splitlines(), output


# Another thread waits for Python's lock and has asked for it, so that whoever lets the lock go hands it over. Nothing
# but the drop can: all between the two looks is done by one call of `next`, which runs no instruction of Python's.
DROPPED = """
import ctypes, functools, threading, time
import ncclx_rs, torch

holding = ctypes.PyDLL(None)  # whose functions are called with Python's lock
hold = functools.partial(holding.usleep, 20_000)  # longer than the interval after which a thread asks for the lock
waits, came, never = threading.Semaphore(0), [], object()


def other():
    while True:
        waits.acquire()
        came.append(1)


def is_let_in(drop):
    waits.release()
    before, _, _, after = next(zip(*(iter(call, never) for call in (came.copy, hold, drop, came.copy))))
    time.sleep(0.001)
    return len(after) > len(before)


threading.Thread(target=other, daemon=True).start()
kept = []
assert not any(is_let_in(kept.clear) for _ in range(20))


def transport():
    made = ncclx_rs.RdmaTransport()
    made.bind()
    return made._connection


def memory():
    made = ncclx_rs.RdmaMemory(torch.zeros(4))
    made.to_remote_buffer()
    return made._registration


for make in (transport, memory):
    assert any(kept.append(make()) or is_let_in(kept.clear) for _ in range(100)), make
print("all")
"""


def test_transports_and_their_memory_are_dropped_without_pythons_lock(tmp_path: Path) -> None:
    ((code, output),) = run_ranks(DROPPED, 1, tmp_path)
    assert code == 0 and "all" in output.splitlines(), output


def errors_are_polled_while_a_rank_dies(rank: int, size: int) -> None:
    join(timeout=300)
    if not hasattr(backend(), "get_error"):
        pytest.skip("this torch does not show a group's error")
    dist.barrier()
    meet()
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with leaving_together(range(size - 1)):
        polled = [0]
        ended = threading.Event()

        def poll() -> None:
            while not ended.is_set():
                backend().get_error()
                polled[0] += 1

        threads = [threading.Thread(target=poll, daemon=True) for _ in range(2)]
        for number in range(20 if hasattr(backend(), "register_abort_hook") else 0):
            backend().register_abort_hook(number, lambda: None)
        for thread in threads:
            thread.start()
        until(lambda: backend().get_error().name == "COMM_ERROR", "the loss is known")
        ended.set()
        for thread in threads:
            thread.join(WATCHDOG_SECONDS)
        assert polled[0] > 0 and not any(thread.is_alive() for thread in threads)


@pytest.mark.worlds(sizes=(3,), modes=("shm",))
def test_errors_are_polled_while_a_rank_dies(fresh_world: World) -> None:
    fresh_world.run(errors_are_polled_while_a_rank_dies, join=False, dies={fresh_world.size - 1})
