"""What the object API forgives, and how it says what it cannot forgive: in the words of the call."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from harness import World, fresh_store, leaving_together
from ncclx_rs import (
    AllReduceOptions,
    CommOptions,
    ReconfigureOptions,
    RedOpType,
    ReduceOp,
    SendOptions,
    TorchComm,
    distwrap,
)

pytestmark = pytest.mark.worlds(sizes=(2,), modes=("shm",))


@pytest.fixture
def alone() -> Iterator[TorchComm]:
    """A communicator of this process alone."""
    with ncclx_rs.new_comm("ncclx", "cpu", "alone", rank=0, size=1) as comm:
        yield comm


def test_reductions_are_sums_unless_they_say_otherwise_and_calls_are_synchronous(alone: TorchComm) -> None:
    tensor, parts = torch.full((4,), 3.0), [torch.zeros(4)]
    for call in (
        lambda: alone.all_reduce(tensor),
        lambda: alone.reduce(tensor, 0),
        lambda: alone.reduce_scatter(parts[0], [tensor]),
        lambda: alone.reduce_scatter_v(parts[0], [tensor]),
        lambda: alone.reduce_scatter_single(parts[0], tensor),
        lambda: alone.broadcast(tensor, 0),
        lambda: alone.all_gather(parts, tensor),
        lambda: alone.all_gather_v(parts, tensor),
        lambda: alone.all_gather_single(parts[0], tensor),
        lambda: alone.all_to_all(parts, [tensor]),
        lambda: alone.all_to_all_single(parts[0], tensor),
        lambda: alone.all_to_all_v_single(parts[0], tensor, [4], [4]),
        lambda: alone.scatter(parts[0], [tensor], 0),
        lambda: alone.gather(parts, tensor, 0),
        lambda: alone.gather_single(parts[0], tensor, 0),
        lambda: alone.barrier(),
    ):
        parts[0].fill_(3.0)
        assert call().is_completed()
        assert tensor.tolist() == parts[0].tolist() == [3.0] * 4
    window = alone.new_window(parts[0])
    window.put(torch.ones(2), 0)
    assert parts[0].tolist() == [1.0, 1.0, 3.0, 3.0]
    window.accumulate(torch.ones(2), 0)
    window.flush(0, timeout=30)
    assert parts[0].tolist() == [2.0, 2.0, 3.0, 3.0]
    window.tensor_deregister()


def reductions_of_pytorch_are_taken(rank: int, size: int) -> None:
    with ncclx_rs.new_comm("ncclx", "cpu", store=fresh_store(), rank=rank, size=size) as comm:
        premultiplied = torch._C._distributed_c10d._make_nccl_premul_sum(10.0)
        for op, expected in (
            (dist.ReduceOp.MAX, 2.0),
            (dist.ReduceOp(dist.ReduceOp.MIN), 1.0),
            (RedOpType.PRODUCT, 2.0),
            (ReduceOp(opType=RedOpType.AVG), 1.5),
            (premultiplied, 30.0),
        ):
            tensor = torch.full((3,), rank + 1.0)
            comm.all_reduce(tensor, op)
            assert tensor.tolist() == [expected] * 3, op
        tensor = torch.full((3,), rank + 1.0)
        comm.all_reduce(tensor, options=AllReduceOptions(timeout=30, hints={}), async_op=True).wait()
        assert tensor.tolist() == [3.0] * 3


def splits_need_no_name(rank: int, size: int) -> None:
    with ncclx_rs.new_comm("ncclx", "cpu", "world", store=fresh_store(), rank=rank, size=size) as comm:
        for groups, names in (
            ([[0], [1]], ["world_0", "world_1"]),
            ([[1], [0]], ["world_0_2", "world_1_2"]),
            ([1, 0], ["world_0", "world_0"]),
        ):
            child = comm.split(groups)
            assert child is not None and child.get_name() == names[rank]
            child.barrier()
            child.finalize()
        child = comm.split([0, 1], options=CommOptions(name="given", timeout=7))
        assert child is not None and (child.name, child.get_options().timeout) == ("given", timedelta(seconds=7))
        child.finalize()


def an_exception_in_the_block_aborts(rank: int, size: int) -> None:
    made = ncclx_rs.new_comm(
        "ncclx", "cpu", store=fresh_store(), rank=rank, size=size, abort_process_on_timeout_or_error=False
    )
    start = time.monotonic()
    with leaving_together(), pytest.raises(RuntimeError if rank else KeyError), made as comm:
        comm.barrier()
        if rank == 0:
            raise KeyError("a mistake of the program")
        comm.all_reduce(torch.ones(1), timeout=60)
    assert time.monotonic() - start < 30
    with pytest.raises(RuntimeError, match="is finalized"):
        made.barrier()


def ctrl_c_ends_a_wait(rank: int, size: int) -> None:
    comm = ncclx_rs.new_comm("ncclx", "cpu", store=fresh_store(), rank=rank, size=size)
    start = fresh_store()
    works: list[ncclx_rs.TorchWork] = []
    tensors = [torch.ones(3), torch.ones(3)]

    def waits() -> None:
        works.append(comm.all_reduce(tensors[0], async_op=True))
        works[0].wait()

    for turn, blocked in enumerate((waits, lambda: comm.all_reduce(tensors[1]))):
        if rank == 0:
            before = signal.signal(signal.SIGINT, signal.default_int_handler)
            timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
            began = time.monotonic()
            timer.start()
            try:
                with pytest.raises(KeyboardInterrupt):
                    blocked()
                assert 0.4 < time.monotonic() - began < 60
            finally:
                timer.join()
                signal.signal(signal.SIGINT, before)
            start.set(f"interrupted{turn}", "yes")
        else:
            # The operation of the interrupted rank is still in flight.
            start.wait([f"interrupted{turn}"])
            comm.all_reduce(tensors[turn])
    comm.barrier()
    if works:
        works[0].wait()
    assert [tensor.tolist() for tensor in tensors] == [[2.0] * 3] * 2
    comm.finalize()


def distwrap_is_torch_distributed(rank: int, size: int) -> None:
    distwrap.init_process_group("ncclx", store=fresh_store(), rank=rank, world_size=size, use_torchcomms=True)
    assert dist.get_backend() == "ncclx_rs" and distwrap.get_world_size() == size
    alone = distwrap.split_group(split_ranks=[[1], [0]])
    both = distwrap.new_group([0, 1], backend="cpu:ncclx")
    for group, expected in ((alone, rank + 1.0), (both, 3.0), (distwrap.split_group(), 3.0)):
        tensor = torch.full((2,), rank + 1.0)
        distwrap.all_reduce(tensor, group=group)
        assert tensor.tolist() == [expected] * 2
    for call, said in (
        (lambda: distwrap.init_process_group(), "init_process_group: argument `backend`: expected a name"),
        (lambda: distwrap.split_group(split_ranks=[[1 - rank]]), "split_group: argument `split_ranks`: expected rank"),
        (lambda: distwrap.new_window(), "new_window: a process group has no windows"),
        (lambda: distwrap.reduce_scatter_quantized(), "reduce_scatter_quantized: ncclx_rs does not round"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=said):
            call()
    distwrap.destroy_process_group()


CHECKS = [
    distwrap_is_torch_distributed,
    reductions_of_pytorch_are_taken,
    splits_need_no_name,
    an_exception_in_the_block_aborts,
    ctrl_c_ends_a_wait,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_ranks(world: World, check: Callable[[int, int], None]) -> None:
    world.run(check, join=False)


def test_options_come_in_one_object_or_one_by_one() -> None:
    options = CommOptions(name="given", timeout=7, hints={"spin_microseconds": "9"})
    comm = ncclx_rs.new_comm("ncclx", "cpu", rank=0, size=1, options=options, hints={"eager_bytes": "1024"}, timeout=8)
    made = comm.get_options()
    assert (comm.name, made.timeout) == ("given", timedelta(seconds=8))
    assert made.hints == {"spin_microseconds": "9", "eager_bytes": "1024"}
    assert options.hints == {"spin_microseconds": "9"} and options.timeout == timedelta(seconds=7)
    comm.finalize()


def test_an_operations_own_arguments_win_over_its_options() -> None:
    given = AllReduceOptions(timeout=7, hints={"a": "1", "b": "1"})
    made = AllReduceOptions.of("all_reduce", None, {"b": "2"}, given)
    assert (made.timeout, made.hints) == (timedelta(seconds=7), {"a": "1", "b": "2"})
    assert AllReduceOptions.of("all_reduce", 8, None, given).timeout == timedelta(seconds=8)
    assert given.hints == {"a": "1", "b": "1"}


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises((RuntimeError, TypeError, ValueError)) as raised:
        call()
    return f"{raised.type.__name__}: {raised.value}".split("\n", maxsplit=1)[0]


def test_errors_speak_of_the_method_and_argument_of_the_call(alone: TorchComm) -> None:
    t, other = torch.ones(4), torch.ones(5)
    wrong: Any = alone
    window: Any = alone.new_window(torch.ones(4))
    for call, said in (
        (lambda: wrong.all_reduce(t, True), "TypeError: all_reduce: argument `op`: expected a reduction as ncclx_rs"),
        (lambda: wrong.all_reduce([1]), "TypeError: all_reduce: argument `tensor`: expected a tensor, got list"),
        (lambda: wrong.all_gather([3], t), "TypeError: all_gather: argument `tensor_list`: expected tensors, got int"),
        (lambda: wrong.all_reduce(t, timeout="3"), "TypeError: all_reduce: argument `timeout`: expected a timedelta"),
        (
            lambda: wrong.all_reduce(t, options=SendOptions()),
            "TypeError: all_reduce: argument `options`: expected AllReduceOptions, got SendOptions",
        ),
        (lambda: wrong.broadcast(t, "0"), "TypeError: broadcast: argument `root`: expected a rank, got str '0'"),
        (lambda: alone.broadcast(t, 1), "RuntimeError: broadcast: root must be in range [0, 1), but got 1"),
        (lambda: alone.all_gather([t, t], t), "RuntimeError: all_gather: tensor_list must hold 1 tensors"),
        (lambda: alone.all_gather_single(other, t), "ValueError: ncclx_rs: all_gather_single: argument `input`: "),
        (
            lambda: alone.all_gather_single(torch.ones(4, dtype=torch.int32), t),
            "ValueError: ncclx_rs: all_gather_single: argument `output`: ",
        ),
        (lambda: alone.all_gather_v([other], t), "ValueError: ncclx_rs: all_gather_v: argument `tensor`: "),
        (lambda: alone.all_to_all([t], [other]), "ValueError: ncclx_rs: all_to_all: argument `output_tensor_list`: "),
        (lambda: alone.all_to_all_single(t, other), "ValueError: ncclx_rs: all_to_all_single: argument `output`: "),
        (
            lambda: alone.reduce_scatter_single(other, t),
            "ValueError: ncclx_rs: reduce_scatter_single: argument `",
        ),
        (lambda: alone.gather([other], t, 0), "ValueError: ncclx_rs: gather: argument `output_tensor_list"),
        (lambda: alone.scatter(t, [other], 0), "ValueError: ncclx_rs: scatter: argument `input_tensor_list"),
        (
            lambda: alone.all_to_all_v_single(t, other, [3], [5]),
            "ValueError: ncclx_rs: all_to_all_v_single: argument `output_split_sizes`: ",
        ),
        (lambda: wrong.set_timeout("x"), "TypeError: set_timeout: argument `timeout`: expected a timedelta"),
        (lambda: wrong.split(3), "TypeError: split: argument `ranks`: expected a list of ranks"),
        (lambda: wrong.reconfigure(1), "TypeError: reconfigure: missing argument `init_handles`"),
        (
            lambda: alone.reconfigure(ReconfigureOptions(1, [])),
            "RuntimeError: reconfigure: the communicator was made without enable_reconfigure=True",
        ),
        (lambda: window.put(t, 1), "RuntimeError: put: dst_rank must be in range [0, 1), but got 1"),
        (lambda: window.put(t, 0, 1), "ValueError: ncclx_rs: put: argument `target_offset_nelems`: "),
        (lambda: alone.get_device_transport(), "RuntimeError: get_device_transport: no kernel communicates by itself"),
        (lambda: window.get_device_window(), "RuntimeError: get_device_window: no kernel communicates by itself"),
        (lambda: window.register_local_buffer(t), "RuntimeError: register_local_buffer: no kernel"),
        (lambda: window.deregister_local_buffer(1), "RuntimeError: deregister_local_buffer: no kernel"),
        (
            lambda: ncclx_rs.new_comm("ncclx", "cpu", options={"timeout": 3}),  # type: ignore[arg-type]
            "TypeError: new_comm: argument `options`: expected CommOptions, got dict",
        ),
    ):
        assert refused(call).startswith(said), f"{refused(call)}\nis not\n{said}"
        alone.barrier()


class Minimal(ncclx_rs.TorchCommBackend):
    """A backend with nothing that is not required."""

    def init(self, device: torch.device, name: str, options: CommOptions) -> None: ...

    def get_rank(self) -> int:
        return 0

    def get_size(self) -> int:
        return 1


def test_what_a_python_backend_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncclx_rs._backends._registered", {"minimal": Minimal})
    with ncclx_rs.new_comm("minimal", "cpu") as comm:
        for name, call in (
            ("split", lambda: comm.split([0])),
            ("set_timeout", lambda: comm.set_timeout(3)),
            ("barrier", lambda: comm.barrier()),
        ):
            assert refused(call).startswith(f"RuntimeError: {name}: the backend Minimal does not have it")
        assert comm.get_options().timeout != timedelta(seconds=3)


def test_hints_that_nobody_reads_are_warned_about_once(alone: TorchComm) -> None:
    window = alone.new_window(torch.ones(4))
    for call, said in (
        (lambda: alone.barrier(hints={"unread1": "x"}), "barrier: the hint 'unread1' is not known to any operation"),
        (lambda: window.put(torch.ones(1), 0, hints={"unread2": "x"}), "put: the hint 'unread2' is not known"),
        (
            lambda: window.accumulate(torch.ones(1), 0, hints={"unread4": "x"}),
            "accumulate: the hint 'unread4' is not known",
        ),
        (
            lambda: ncclx_rs.new_comm(
                "gloo", "cpu", rank=0, size=1, hints={"interface": "lo", "unread3": "x"}
            ).finalize(),
            "new_comm: the hint 'unread3' is ignored by the backend gloo",
        ),
    ):
        with pytest.warns(UserWarning, match=said) as caught:
            call()
        assert len(caught) == 1 and caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call()


def test_timeouts_mean_the_same_everywhere(alone: TorchComm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCLX_RS_TIMEOUT_SECONDS", "50")
    default, millisecond = timedelta(seconds=50), timedelta(milliseconds=1)

    def of_new_comm(**options: Any) -> timedelta:
        with ncclx_rs.new_comm("ncclx", "cpu", rank=0, size=1, **options) as comm:
            return comm.get_options().timeout

    def after_set_timeout(timeout: timedelta | float) -> timedelta:
        alone.set_timeout(timeout)
        alone.barrier()
        return alone.get_options().timeout

    assigned = CommOptions(timeout=3)
    assigned.timeout = timedelta(0)
    assert of_new_comm(options=assigned) == default
    assert of_new_comm(timeout=0, options=CommOptions(timeout=3)) == timedelta(seconds=3)
    for zero in (0, 0.0, timedelta(0)):
        assert CommOptions(timeout=zero).timeout == of_new_comm(timeout=zero) == after_set_timeout(zero) == default
        assert AllReduceOptions(zero).limit_ms == -1  # the communicator's
    for short in (0.0004, 1e-9, timedelta(microseconds=1)):
        assert CommOptions(timeout=short).timeout == of_new_comm(timeout=short) == millisecond
        assert AllReduceOptions(short).limit_ms == 1
    for long in (float("inf"), 1e300, timedelta.max):
        assert CommOptions(timeout=long).timeout == after_set_timeout(long) == timedelta(days=36_600)
        assert alone.all_reduce(torch.ones(1), timeout=long).is_completed()
    given = AllReduceOptions()
    given.timeout = timedelta(seconds=-1)
    for wrong in (-1, -0.0001, timedelta(microseconds=-1), float("nan")):
        for method, call in (
            ("CommOptions", lambda wrong=wrong: CommOptions(timeout=wrong)),
            ("new_comm", lambda wrong=wrong: of_new_comm(timeout=wrong)),
            ("set_timeout", lambda wrong=wrong: alone.set_timeout(wrong)),
            ("split", lambda wrong=wrong: alone.split([0], timeout=wrong)),
            ("all_reduce", lambda wrong=wrong: alone.all_reduce(torch.ones(1), timeout=wrong)),
            ("all_reduce", lambda: alone.all_reduce(torch.ones(1), options=given)),
            ("AllReduceOptions", lambda wrong=wrong: AllReduceOptions(wrong)),
        ):
            said = f"ValueError: {method}: argument `timeout`: expected a time, or zero for the default, got "
            assert refused(call).startswith(said), refused(call)


@pytest.mark.parametrize(("wrong", "got"), [({"tcp_streams": 2}, "int for 'tcp_streams'"), ([("a", "b")], "list")])
def test_hints_are_text(alone: TorchComm, wrong: Any, got: str) -> None:
    for method, call in (
        ("CommOptions", lambda: CommOptions(hints=wrong)),
        ("new_comm", lambda: ncclx_rs.new_comm("ncclx", "cpu", rank=0, size=1, hints=wrong)),
        ("new_comm", lambda: ncclx_rs.new_comm("ncclx", "cpu", rank=0, size=1, options=CommOptions(), hints=wrong)),
        ("split", lambda: alone.split([0], hints=wrong)),
        ("set_hints", lambda: alone.set_hints(wrong)),
        ("ReconfigureOptions", lambda: ReconfigureOptions(hints=wrong)),
        ("RdmaTransport", lambda: ncclx_rs.RdmaTransport(hints=wrong)),
    ):
        said = f"TypeError: {method}: argument `hints`: expected a mapping of text to text, got {got}"
        assert refused(call) == said, refused(call)


def test_a_secret_of_the_wrong_type_is_not_told() -> None:
    assert "secret!" not in refused(lambda: CommOptions(hints={"job_secret": b"secret!"}))  # type: ignore[dict-item]
