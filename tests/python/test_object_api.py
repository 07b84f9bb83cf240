"""The object API: every operation of a communicator, split, batches, errors, finalize and abort."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from harness import WATCHDOG_SECONDS, World, fresh_store, leaving_together, meet, without_cuda_driver
from ncclx_rs import OpName, RedOpType, ReduceOp, TorchComm, WorkStatus, _backends, objcol
from reference import SIZES, assert_same, data, reduced, without_memory
from test_failures import missing_and_callers
from torch._C import _distributed_c10d as c10d

pytestmark = pytest.mark.worlds(modes=("shm",))


@contextmanager
def communicator(rank: int, size: int, backend: str = "ncclx", **options: Any) -> Iterator[TorchComm]:
    comm = ncclx_rs.new_comm(backend, "cpu", "tested", store=fresh_store(), rank=rank, size=size, **options)
    try:
        yield comm
    finally:
        comm.finalize()


def both_ways(run: Callable[[bool], ncclx_rs.TorchWork], check: Callable[[], None]) -> None:
    """Issues an operation synchronously, which needs no wait, and then asynchronously."""
    for async_op in (False, True):
        work = run(async_op)
        if async_op:
            work.wait_blocking()
        assert work.is_completed() and work.status is WorkStatus.COMPLETED and work.exception() is None
        check()


# ---- operations ----


def all_reduce_combines(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.AVG, ReduceOp.PRODUCT):
            for count in SIZES:
                tensor = torch.empty(count)
                everybodys = [data(r, count) for r in range(size)]

                def run(async_op: bool, tensor=tensor, op=op, everybodys=everybodys):
                    return comm.all_reduce(tensor.copy_(everybodys[rank]), op, async_op)

                expected = reduced(everybodys, op.type.name)
                both_ways(run, lambda t=tensor, e=expected, op=op: assert_same(t, e, f"all_reduce {op}"))
        bits = torch.tensor([1 << rank, 7])
        comm.allreduce(bits, ReduceOp.BOR, False)
        assert bits.tolist() == [(1 << size) - 1, 7]
        for factor in (2.0, torch.tensor([2.0])):
            tensor = torch.ones(5)
            comm.all_reduce(tensor, ReduceOp.PREMUL_SUM(factor), False)
            assert tensor.tolist() == [2.0 * size] * 5


def rooted_operations_serve_every_root(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        for root in range(size):
            tensor = torch.empty(100)
            both_ways(
                lambda a, t=tensor, root=root: comm.broadcast(t.copy_(data(rank, 100)), root, a),
                lambda t=tensor, root=root: assert_same(t, data(root, 100), "broadcast"),
            )
            both_ways(
                lambda a, t=tensor, root=root: comm.reduce(t.copy_(data(rank, 100)), root, ReduceOp.SUM, a),
                lambda t=tensor, root=root: (
                    assert_same(t, reduced([data(r, 100) for r in range(size)]), "reduce") if rank == root else None
                ),
            )
            parts = [data(root, 9, salt=r) for r in range(size)] if rank == root else []
            mine = torch.empty(9)
            both_ways(
                lambda a, m=mine, p=parts, root=root: comm.scatter(m, p, root, a),
                lambda m=mine, root=root: assert_same(m, data(root, 9, salt=rank), "scatter"),
            )
            all_parts = [torch.empty(9) for _ in range(size)] if rank == root else []
            both_ways(
                lambda a, p=all_parts, root=root: comm.gather(p, data(rank, 9), root, a),
                lambda p=all_parts: [assert_same(part, data(r, 9), "gather") for r, part in enumerate(p)],
            )
            stacked = torch.full((2 * size, 3), 99.0)
            both_ways(
                lambda a, s=stacked, root=root: comm.gather_single(s, data(rank, (2, 3)), root, a),
                lambda s=stacked, root=root: assert_same(
                    s,
                    torch.cat([data(r, (2, 3)) for r in range(size)]) if rank == root else torch.full_like(s, 99.0),
                    "gather_single",
                ),
            )


def gathering_and_scattering_take_equal_and_other_sizes(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        parts = [torch.empty(11) for _ in range(size)]
        both_ways(
            lambda a: comm.all_gather(parts, data(rank, 11), a),
            lambda: [assert_same(part, data(r, 11), "all_gather") for r, part in enumerate(parts)],
        )
        uneven = [torch.empty(r + 1, 2) for r in range(size)]
        both_ways(
            lambda a: comm.all_gather_v(uneven, data(rank, (rank + 1, 2)), a),
            lambda: [assert_same(part, data(r, (r + 1, 2)), "all_gather_v") for r, part in enumerate(uneven)],
        )
        whole = torch.empty(11 * size)
        both_ways(
            lambda a: comm.all_gather_single(whole, data(rank, 11), a),
            lambda: assert_same(whole, torch.cat([data(r, 11) for r in range(size)]), "all_gather_single"),
        )
        mine = torch.empty(11)
        expected = reduced([data(r, 11, salt=rank) for r in range(size)])
        both_ways(
            lambda a: comm.reduce_scatter(mine, [data(rank, 11, salt=r) for r in range(size)], ReduceOp.SUM, a),
            lambda: assert_same(mine, expected, "reduce_scatter"),
        )
        own = torch.empty(rank + 1)
        expected_own = reduced([data(r, rank + 1, salt=rank) for r in range(size)])
        both_ways(
            lambda a: comm.reduce_scatter_v(own, [data(rank, r + 1, salt=r) for r in range(size)], ReduceOp.SUM, a),
            lambda: assert_same(own, expected_own, "reduce_scatter_v"),
        )
        joined = torch.cat([data(rank, 11, salt=r) for r in range(size)])
        both_ways(
            lambda a: comm.reduce_scatter_single(mine, joined, ReduceOp.SUM, a),
            lambda: assert_same(mine, expected, "reduce_scatter_single"),
        )


def all_to_all_exchanges(rank: int, size: int) -> None:
    def block(source: int, target: int, rows: int) -> torch.Tensor:
        return data(source, (rows, 2), salt=target)

    with communicator(rank, size) as comm:
        parts = [torch.empty(3, 2) for _ in range(size)]
        both_ways(
            lambda a: comm.all_to_all(parts, [block(rank, r, 3) for r in range(size)], a),
            lambda: [assert_same(part, block(r, rank, 3), "all_to_all") for r, part in enumerate(parts)],
        )
        output = torch.empty(3 * size, 2)
        both_ways(
            lambda a: comm.all_to_all_single(output, torch.cat([block(rank, r, 3) for r in range(size)]), a),
            lambda: assert_same(output, torch.cat([block(r, rank, 3) for r in range(size)]), "all_to_all_single"),
        )
        rows = [[(source + target) % 3 for target in range(size)] for source in range(size)]
        incoming = [rows[r][rank] for r in range(size)]
        uneven = torch.empty(sum(incoming), 2)
        mine = torch.cat([block(rank, r, rows[rank][r]) for r in range(size)])
        both_ways(
            lambda a: comm.all_to_all_v_single(uneven, mine, incoming, rows[rank], a),
            lambda: assert_same(
                uneven, torch.cat([block(r, rank, rows[r][rank]) for r in range(size)]), "all_to_all_v_single"
            ),
        )


def messages_and_batches_go_round_a_ring(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    with communicator(rank, size) as comm:
        tensor = torch.empty(50)
        received = comm.recv(tensor, before, True)
        comm.send(data(rank, 50), after, True).wait()
        received.wait()
        assert_same(tensor, data(before, 50), "recv")
        for async_op in (False, True):
            batch = comm.batch_op_create()
            incoming = [torch.empty(20) for _ in range(2)]
            for i, place in enumerate(incoming):
                batch.send(data(rank, 20, salt=i), after)
                batch.recv(place, before)
            work = batch.issue(async_op)
            del batch
            work.wait()
            for i, place in enumerate(incoming):
                assert_same(place, data(before, 20, salt=i), f"message {i} of a batch")
        with pytest.raises(RuntimeError, match="Cannot issue empty batch operation"):
            comm.batch_op_create().issue(False)


def a_batch_with_a_wrong_message_sends_nothing(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    wrong: list[tuple[Any, str]] = [
        (torch.ones(4, 4).t(), "send: tensors must be contiguous"),
        (torch.ones(4, device="meta"), "send: tensors must be on cpu"),
        ([1.0], "send: argument `tensor`: expected a tensor, got list"),
    ]
    called: list[OpName] = []
    with communicator(rank, size) as comm:
        handle = comm.register_pre_hook(lambda name, op_id, args: called.append(name))
        for message, text in wrong:
            batch = comm.batch_op_create()
            batch.send(torch.full((4,), -1.0), after)
            batch.send(message, after)
            with pytest.raises((RuntimeError, TypeError), match=text):
                batch.issue()
        assert called == []
        handle.remove()
        tensor = torch.empty(4)
        received = comm.recv(tensor, before, True)
        comm.send(torch.full((4,), float(rank)), after)
        received.wait()
        assert tensor.tolist() == [float(before)] * 4


def persistent_all_gather_repeats(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        output = torch.empty(4 * size)
        handle = comm.all_gather_p_init(output)
        for turn in range(3):
            comm.all_gather_p_exec(handle, data(rank, 4, salt=turn), turn % 2 == 0).wait()
            assert_same(output, torch.cat([data(r, 4, salt=turn) for r in range(size)]), f"turn {turn}")
        comm.all_gather_p_free(handle)
        with pytest.raises(RuntimeError, match="freed"):
            comm.all_gather_p_exec(handle, data(rank, 4), False)


def persistent_all_gathers_go_into_windows(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        for count, shared in ((4, False), (4, True), (100_000, False), (100_000, True)):
            output = comm.get_mem_allocator().empty(count * size) if shared else torch.empty(count * size)
            handle = comm.all_gather_p_init(output)
            for turn in range(4):
                own = data(rank, count, salt=turn)
                comm.all_gather_p_exec(handle, own, turn % 2 == 0).wait()
                expected = torch.cat([data(r, count, salt=turn) for r in range(size)])
                assert_same(output, expected, f"{count}, shared {shared}, turn {turn}")
            # In place: this rank's block of the output is the input.
            comm.all_gather_p_exec(handle, output[rank * count : (rank + 1) * count])
            assert_same(output, expected, "in place")
            with pytest.raises(ValueError, match="all_gather_p_exec: argument `input`: expected .* elements"):
                comm.all_gather_p_exec(handle, data(rank, count - 1))
            comm.all_gather_p_free(handle)
            with pytest.raises(RuntimeError, match="freed"):
                comm.all_gather_p_exec(handle, data(rank, count), False)


def works_can_be_awaited(rank: int, size: int) -> None:
    async def use(comm: TorchComm) -> list[torch.Tensor]:
        tensors = [data(rank, 100, salt=i) for i in range(8)]
        works = [comm.all_reduce(tensor, ReduceOp.SUM, True) for tensor in tensors]

        async def waited(work: ncclx_rs.TorchWork) -> None:
            await work

        await asyncio.gather(*(waited(work) for work in works))
        return tensors

    with communicator(rank, size) as comm:
        for i, tensor in enumerate(asyncio.run(use(comm))):
            assert_same(tensor, reduced([data(r, 100, salt=i) for r in range(size)]), f"operation {i}")


def objects_travel(rank: int, size: int) -> None:
    def thing(r: int) -> dict[str, Any]:
        return {"rank": r, "tensor": torch.arange(r), "text": "x" * 1000 * r}

    def same(a: Any, b: Any) -> bool:
        return a["rank"] == b["rank"] and torch.equal(a["tensor"], b["tensor"]) and a["text"] == b["text"]

    with communicator(rank, size) as comm:
        everything: list[Any] = [None] * size
        objcol.all_gather_object(comm, everything, thing(rank))
        assert all(same(got, thing(r)) for r, got in enumerate(everything))
        root = size - 1
        at_root: list[Any] | None = [None] * size if rank == root else None
        objcol.gather_object(comm, thing(rank), root, at_root)
        assert at_root is None or all(same(got, thing(r)) for r, got in enumerate(at_root))
        told: list[Any] = [thing(rank), rank]
        objcol.broadcast_object_list(comm, told, root)
        assert same(told[0], thing(root)) and told[1] == root
        handed: list[Any] = [None]
        objcol.scatter_object_list(comm, root, handed, [thing(r) for r in range(size)] if rank == root else None)
        assert same(handed[0], thing(rank))
        if size > 1 and rank < 2:
            got: list[Any] = [None, None]
            if rank == 0:
                objcol.send_object_list(comm, [thing(4), "two"], 1)
            else:
                objcol.recv_object_list(comm, got, 0)
                assert same(got[0], thing(4)) and got[1] == "two"


class Unsafe:
    """An object that only an unpickler can make."""


def objects_of_any_class_need_consent(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        everything: list[Any] = [None] * size
        with pytest.raises(Exception, match="weights_only|Weights only"):
            objcol.all_gather_object(comm, everything, Unsafe())
        objcol.all_gather_object(comm, everything, Unsafe(), weights_only=False)
        assert all(isinstance(thing, Unsafe) for thing in everything)


def windows_are_written_by_others(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    with communicator(rank, size) as comm:
        window = comm.new_window(torch.full((size, 100), -1.0))
        tensor = window.get_tensor()
        assert tensor is not None and window.get_size() == 400 * size and window.shape == [size, 100]
        assert window.map_remote_tensor(rank) is tensor
        access = ncclx_rs.TorchCommWinAccessType
        expected = [access.WIN_ACCESS_TYPE_SEPARATE] * size
        expected[rank] = access.WIN_ACCESS_TYPE_UNIFIED
        assert [window.get_attr(r).access_type for r in range(size)] == expected
        for turn in range(3):
            window.put(data(rank, 100, salt=turn), after, 100 * rank, True).wait()
            window.signal(after, False)
            window.wait_signal(before, False)
            assert_same(tensor[before], data(before, 100, salt=turn), f"turn {turn}")
            comm.barrier(False)
        with pytest.raises((RuntimeError, ValueError), match=r"Requested size .* exceeds the window size"):
            window.put(torch.ones(100), after, 100 * size - 50, False)
        for source in range(size):
            # Put there in the last turn by the rank before that one, without the first 20 elements.
            writer, read = (source - 1) % size, torch.zeros(4, 20)
            window.get(read, source, 100 * writer + 20, async_op=source % 2 == 0).wait()
            assert_same(read.flatten(), data(writer, 100, salt=2)[20:], f"the part of rank {source}")
        with pytest.raises(ValueError, match=r"Requested size .* exceeds the window size"):
            window.get(torch.ones(100), after, 100 * size - 50, False)
        with pytest.raises(RuntimeError, match="src_rank must be in range"):
            window.get(torch.ones(1), size, 0, False)
        with pytest.raises(RuntimeError, match="get: tensors must be contiguous"):
            window.get(torch.ones(2, 2).t(), after, 0, False)
        with pytest.raises(RuntimeError, match="no tensor"):
            comm.new_window().get(torch.ones(1), after, 0, False)
        comm.barrier(False)
        with pytest.raises(RuntimeError, match="Double registration"):
            window.tensor_register(torch.ones(3))
        twin = copy.deepcopy(window)
        assert twin.get_tensor() is not tensor and copy.copy(window) is window
        for one in (window, twin):
            one.tensor_deregister()
        with pytest.raises(RuntimeError, match="Double deregistration"):
            window.tensor_deregister()
        with pytest.raises(RuntimeError, match="no tensor"):
            window.signal(after, False)


def windows_are_added_to_and_flushed(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
            window = comm.new_window(torch.zeros(3, 100, dtype=dtype))
            tensor = window.get_tensor()
            assert tensor is not None
            for target in range(size):
                window.put(torch.full((100,), rank + 1, dtype=dtype), target, 100, True) if rank == 0 else None
            window.fence()
            for target in range(size):
                addend = (torch.arange(100) % 10).to(dtype) + rank
                window.accumulate(addend, target, 100, target % 2 == 0).wait()
                addend.zero_()
            window.flush(0)
            window.flush_all()
            window.fence()
            expected = torch.zeros(3, 100, dtype=dtype)
            expected[1] = 1 + size * (torch.arange(100) % 10).to(dtype) + sum(range(size))
            assert_same(tensor, expected, f"sums of {dtype}")
            with pytest.raises(ValueError, match=r"accumulate.*Requested size .* exceeds the window size"):
                window.accumulate(torch.ones(200, dtype=dtype), 0, 200, False)
            window.fence()
            window.tensor_deregister()
        window = comm.new_window(torch.zeros(4))
        with pytest.raises(ValueError, match="accumulate: argument `tensor`: expected elements of a type that can be"):
            window.accumulate(torch.zeros(4, dtype=torch.float8_e4m3fn), 0, 0, False)
        with pytest.raises(RuntimeError, match="dst_rank must be in range"):
            window.accumulate(torch.ones(1), size, 0, False)
        with pytest.raises(RuntimeError, match="dst_rank must be in range"):
            window.flush(-1)
        window.tensor_deregister()
        for call in (window.fence, window.flush_all, lambda: window.flush(0)):
            with pytest.raises(RuntimeError, match="no tensor"):
                call()


def windows_are_mapped_by_others(rank: int, size: int) -> None:
    access = ncclx_rs.TorchCommWinAccessType
    with communicator(rank, size) as comm:
        memory = comm.get_mem_allocator().empty(2, 50)
        memory.fill_(rank)
        window = comm.new_window(memory)
        assert all(window.get_attr(r).access_type == access.WIN_ACCESS_TYPE_UNIFIED for r in range(size))
        comm.barrier(False)
        parts = [window.map_remote_tensor(other) for other in range(size)]
        for other, part in enumerate(parts):
            assert part.shape == (2, 50) and part.dtype == torch.float32
            assert_same(part[0], torch.full((50,), float(other)), f"the part of rank {other}")
            part[1, rank] = float(rank * 10)
        window.fence()
        assert memory[1, :size].tolist() == [float(10 * other) for other in range(size)]
        window.tensor_deregister()
        comm.barrier(False)
        del window
        assert [part[0, 0].item() for part in parts] == [float(other) for other in range(size)]
        window = comm.new_window(torch.zeros(2))
        for other in set(range(size)) - {rank}:
            with pytest.raises(RuntimeError, match=rf"map_remote_tensor: the part of rank {other} cannot be mapped.*"):
                window.map_remote_tensor(other)
        window.tensor_deregister()
        window = comm.new_window(comm.get_mem_allocator().empty(1 + rank))
        for other in set(range(size)) - {rank}:
            assert window.get_attr(other).access_type == access.WIN_ACCESS_TYPE_SEPARATE
            with pytest.raises(
                RuntimeError, match=rf"rank {other} has {4 * (other + 1)} bytes, this rank's {4 * rank + 4}"
            ):
                window.map_remote_tensor(other)
        window.tensor_deregister()


# ---- splitting ----


def tensors_of_the_allocator_are_communicated(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        allocator = comm.get_mem_allocator()
        tensor = allocator.empty(300, 1000)
        assert tensor.shape == (300, 1000) and tensor.dtype == torch.float32 and not tensor.any()
        tensor += rank
        comm.all_reduce(tensor, ReduceOp.SUM, False)
        assert (tensor == sum(range(size))).all()
        assert comm.mem_allocator.empty(0, 3, dtype=torch.bool).numel() == 0
        view = allocator.empty(4, dtype=torch.int64)[2:]
        del tensor
        assert view.fill_(7).tolist() == [7, 7]  # a view keeps the memory
        with pytest.raises(ValueError, match=r"MemAllocator.empty: argument `size`: .* got \(2, -1\)"):
            allocator.empty(2, -1)
        with pytest.raises(ValueError, match="less than 2\\*\\*63 bytes"):
            allocator.empty(1 << 40, 1 << 40)
        with pytest.raises(RuntimeError, match="4611686018427387904 bytes of shared memory: this machine has less"):
            allocator.empty(1 << 60)
        comm.barrier(False)


def communicators_split(rank: int, size: int) -> None:
    def assert_works(child: TorchComm | None, members: list[int]) -> None:
        if rank not in members:
            assert child is None
            return
        assert child is not None
        assert (child.rank, child.size) == (members.index(rank), len(members))
        tensor = data(rank, 30)
        child.all_reduce(tensor, ReduceOp.SUM, False)
        assert_same(tensor, reduced([data(r, 30) for r in members]), f"members {members}")

    with communicator(rank, size) as comm:
        even = list(range(0, size, 2))
        backwards = list(range(size))[::-1]
        for members in (even, backwards, [size - 1]):
            child = comm.split(members if rank in members else [], "child")
            assert_works(child, members)
            if child is not None:
                grandchild = child.split(list(range(child.size))[::-1], "grandchild")
                assert_works(grandchild, members[::-1])
                assert grandchild is not None and grandchild.get_name() == "grandchild"
                grandchild.finalize()
                child.finalize()
        groups = [even, [r for r in range(size) if r % 2]] if size > 1 else [[0]]
        child = comm.split(groups, "by groups")
        assert_works(child, groups[rank % 2])
        assert child is not None
        child.finalize()
        tensor = torch.ones(1)
        comm.all_reduce(tensor, ReduceOp.SUM, False)
        assert tensor.item() == size


def a_rank_that_missed_a_split_finds_the_others_again(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        everybody, limit = list(range(size)), timedelta(seconds=1)
        if rank != size - 1:
            with pytest.raises(RuntimeError):
                comm.split(everybody, "child", timeout=limit)
        comm.barrier(False)
        # The last rank comes to what has failed, and so fails once more than the others.
        child = None
        for seconds in (1, 60):
            if child is None:
                with suppress(RuntimeError):
                    child = comm.split(everybody, "child", timeout=seconds)
            comm.barrier(False)
        assert child is not None
        tensor = torch.ones(1)
        child.all_reduce(tensor, ReduceOp.SUM, False)
        assert tensor.item() == size
        child.finalize()


def wrong_splits_are_refused(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        for ranks, text in (
            ([0, 0], "Rank 0 appears multiple times in ranks"),
            ([size], rf"Invalid rank {size} in ranks. Valid ranks are 0 to {size - 1}"),
            ([-1], "Invalid rank -1"),
            ([[0], [0]], "Rank 0 appears multiple times"),
            ([0, [0]], "not a mixture"),
            ([r for r in range(size) if r != rank], "is not included|^$"),
        ):
            if ranks:
                with pytest.raises(RuntimeError, match=text):
                    comm.split(ranks, "wrong")
        comm.barrier(False)


# ---- errors ----


def wrong_calls_are_refused_and_change_nothing(rank: int, size: int) -> None:
    t = torch.ones(4)
    with communicator(rank, size) as comm:
        for call, text in (
            (lambda: comm.broadcast(t, size, False), rf"root must be in range \[0, {size}\), but got {size}"),
            (lambda: comm.send(t, -1, False), rf"dst must be in range \[0, {size}\), but got -1"),
            (lambda: comm.recv(t, size, False), "src must be in range"),
            (lambda: comm.all_gather([t] * (size + 1), t, False), f"tensor_list must hold {size} tensors"),
            (lambda: comm.all_to_all([t] * size, [], False), "input_tensor_list must hold"),
            (lambda: comm.all_reduce(torch.ones(4, 4).t(), ReduceOp.SUM, False), "all_reduce: tensors must be contig"),
            (lambda: comm.all_reduce(torch.ones(4, device="meta"), ReduceOp.SUM, False), "must be on cpu"),
            (lambda: comm.all_reduce(torch.ones(4), ReduceOp.BAND, False), "BAND"),
            (lambda: comm.all_gather_single(torch.ones(4 * size + 1), t, False), "all_gather"),
            (lambda: comm.all_to_all_v_single(t, t, [4], [1], False), "split_sizes"),
            *((lambda lost=lost: comm.all_reduce(lost), "memory of its own") for lost in without_memory()),
        ):
            with pytest.raises((RuntimeError, ValueError), match=text):
                call()
            tensor = torch.ones(3)
            comm.all_reduce(tensor, ReduceOp.SUM, False)
            assert tensor.tolist() == [float(size)] * 3


def numbers_below_zero_are_no_place_in_a_world(rank: int, size: int) -> None:
    for place, text in (
        ({"rank": -1, "size": 2}, r"`rank`: expected a rank in \[0, 2\), got -1"),
        ({"rank": 0, "size": -2}, "`size`: expected a number of at least 1, got -2"),
    ):
        with pytest.raises(ValueError, match=rf"communicator `tested`: argument {text}"):
            ncclx_rs.new_comm("ncclx", "cpu", "tested", store=dist.HashStore(), timeout=5, **place)


def a_finalized_communicator_refuses_everything(rank: int, size: int) -> None:
    comm = ncclx_rs.new_comm("ncclx", "cpu", store=fresh_store(), rank=rank, size=size)
    comm.barrier(False)
    comm.finalize()
    t = torch.ones(size)
    for call in (
        lambda: comm.all_reduce(t, ReduceOp.SUM, False),
        lambda: comm.barrier(True),
        lambda: comm.split([rank], "child"),
        lambda: comm.all_gather_p_init(t),
        lambda: comm.batch_op_create().send(t, 0) or comm.all_reduce(t, ReduceOp.SUM, True),
    ):
        with pytest.raises(RuntimeError, match="finalized"):
            call()
    with pytest.raises(RuntimeError, match="already finalized"):
        comm.finalize()


def a_late_rank_is_named_and_ends_the_communicator(rank: int, size: int) -> None:
    aborted = []
    comm = ncclx_rs.new_comm(
        "ncclx", "cpu", store=fresh_store(), rank=rank, size=size, abort_process_on_timeout_or_error=False
    )
    comm.register_abort_hook(lambda: aborted.append(True))
    comm.barrier(False)
    with leaving_together():
        if rank != 0:
            work = comm.all_reduce(torch.ones(1), ReduceOp.SUM, True, timeout=timedelta(seconds=3))
            with pytest.raises(RuntimeError, match=r"all_reduce(.|\n)*timed out") as raised:
                work.wait()
            assert missing_and_callers(str(raised.value)) == ([0], list(range(1, size)))
            assert work.status in (WorkStatus.TIMEDOUT, WorkStatus.ERROR) and work.exception() is not None
            assert comm.is_aborted()
            with pytest.raises(RuntimeError, match="barrier: communicator .* is aborted"):
                comm.barrier(False)
    comm.finalize()
    assert aborted == [True] * (rank != 0)


def the_error_comes_before_the_hooks(rank: int, size: int, waits: str) -> None:
    comm = ncclx_rs.new_comm(
        "ncclx", "cpu", store=fresh_store(), rank=rank, size=size, abort_process_on_timeout_or_error=False
    )
    comm.barrier(False)
    is_known, found = threading.Event(), []
    comm.register_abort_hook(lambda: found.append((is_known.wait(20), threading.current_thread())))
    limit = timedelta(milliseconds=200)
    with leaving_together():
        if rank == 0:
            if waits == "blocking":
                with pytest.raises(RuntimeError, match="timed out"):
                    comm.all_reduce(torch.ones(1), ReduceOp.SUM, False, timeout=limit)
            else:
                work = comm.all_reduce(torch.ones(1), ReduceOp.SUM, True, timeout=limit)
                while waits == "polling" and not work.is_completed():
                    time.sleep(0.005)
                with pytest.raises(RuntimeError, match="timed out"):
                    work.wait()
            assert comm.is_aborted()
            is_known.set()
    comm.finalize()  # does not overtake the hooks
    assert [known for known, _ in found] == [True] * (rank == 0)
    assert all(thread is not threading.current_thread() for _, thread in found)


def hooks_may_end_other_communicators(rank: int, size: int) -> None:
    both_run, ended = threading.Barrier(2), []
    a, b = (
        ncclx_rs.new_comm(
            "ncclx", "cpu", name, store=dist.HashStore(), rank=0, size=1, abort_process_on_timeout_or_error=False
        )
        for name in "ab"
    )

    def ends(other: TorchComm) -> Callable[[], None]:
        def hook() -> None:
            both_run.wait(WATCHDOG_SECONDS)
            other.finalize()
            ended.append(time.monotonic())

        return hook

    a.register_abort_hook(ends(b))
    b.register_abort_hook(ends(a))
    began = time.monotonic()
    for comm in (a, b):
        work = comm.recv(torch.ones(1), 0, True, timeout=timedelta(milliseconds=50))
        with pytest.raises(RuntimeError, match="timed out"):
            work.wait()
    while len(ended) < 2:
        time.sleep(0.005)
    assert max(ended) - began < 15, "each has waited for the other as long as anybody waits for hooks"


@pytest.mark.worlds(sizes=(1,))
def test_hooks_may_end_other_communicators(world: World) -> None:
    world.run(hooks_may_end_other_communicators, join=False)


@pytest.mark.parametrize("waits", ["blocking", "waiting", "polling"])
@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_the_error_comes_before_the_hooks(world: World, waits: str) -> None:
    world.run(the_error_comes_before_the_hooks, waits, join=False)


def a_timeout_ends_the_process_by_default(rank: int, size: int) -> None:
    comm = ncclx_rs.new_comm(
        "ncclx",
        "cpu",
        store=fresh_store(),
        rank=rank,
        size=size,
        abort_process_on_timeout_or_error=None if rank == 1 else False,
    )
    comm.set_timeout(timedelta(seconds=1))
    if rank == 0:
        while not comm.is_aborted():  # which it is once its peer is gone
            time.sleep(0.05)
        comm.finalize()
        return
    comm.all_reduce(torch.ones(1), ReduceOp.SUM, True)  # the program does not wait for it
    time.sleep(60)


def abort_ends_what_is_in_flight(rank: int, size: int) -> None:
    comm = ncclx_rs.new_comm("ncclx", "cpu", store=fresh_store(), rank=rank, size=size)
    comm.barrier(False)
    with leaving_together():
        if rank == 0:
            assert comm.is_abort_supported() and not comm.is_aborted()
            work = comm.recv(torch.ones(3), size - 1, True)
            comm.abort()
            with pytest.raises(RuntimeError, match="abort"):
                work.wait()
            assert comm.is_aborted()
            comm.abort()
    comm.finalize()


# ---- life, hooks, backends ----


def it_says_what_it_is(rank: int, size: int) -> None:
    with communicator(rank, size, hints={"spin": "off"}, timeout=timedelta(seconds=33)) as comm:
        assert (comm.get_rank(), comm.get_size(), comm.rank, comm.size) == (rank, size, rank, size)
        assert comm.get_name() == "tested" and comm.get_device() == torch.device("cpu")
        assert comm.get_backend() == "ncclx" and comm.get_backend_version() == ncclx_rs.__version__
        options = comm.get_options()
        assert options.timeout == timedelta(seconds=33) and options.hints == {"spin": "off"}
        assert comm.get_backend_impl() is comm.unsafe_get_backend()
        assert copy.copy(comm) is comm and copy.deepcopy(comm) is comm
        comm.set_timeout(timedelta(seconds=44))
        assert comm.get_options().timeout == timedelta(seconds=44)
        with pytest.warns(UserWarning, match="no_such_hint"):
            comm.barrier(False, hints={"no_such_hint": "1"})


def hooks_see_every_operation(rank: int, size: int) -> None:
    before: list[tuple[OpName, int, Any]] = []
    after: list[int] = []
    comm = ncclx_rs.new_comm("ncclx", "cpu", store=fresh_store(), rank=rank, size=size)
    handle = comm.register_pre_hook(lambda name, op_id, args: before.append((name, op_id, args)))
    comm.register_post_hook(lambda op_id, args: after.append(op_id))
    tensor = torch.ones(2)
    comm.all_reduce(tensor, ReduceOp.SUM, False)
    comm.broadcast(tensor, 0, True).wait()
    child = comm.split([rank], "child")
    assert [name for name, *_ in before] == [OpName.all_reduce, OpName.broadcast, OpName.split]
    assert before[0][2].tensor is tensor and not before[0][2].async_op
    assert before[1][2].root == 0 and before[1][2].async_op
    assert [op_id for _, op_id, _ in before] == after == sorted(set(after))
    handle.remove()
    handle.remove()

    def refuse(name: OpName, op_id: int, args: object) -> None:
        raise KeyError("not now")

    handle = comm.register_pre_hook(refuse)
    with pytest.raises(KeyError, match="not now"):
        comm.all_reduce(tensor, ReduceOp.SUM, False)
    handle.remove()
    comm.barrier(False)
    assert child is not None
    child.finalize()
    comm.finalize()
    assert after[-1] == 2**64 - 1


def forgetting_to_finalize_is_warned_about(rank: int, size: int) -> None:
    comm = ncclx_rs.new_comm("ncclx", "cpu", "forgotten", store=fresh_store(), rank=rank, size=size)
    comm.barrier(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del comm
        gc.collect()
    assert any("`forgotten` was not finalized" in str(warning.message) for warning in caught)


def gloo_is_bridged(rank: int, size: int) -> None:
    with communicator(rank, size, backend="gloo") as comm:
        tensor = data(rank, 100)
        comm.all_reduce(tensor, ReduceOp.SUM, False)
        assert_same(tensor, reduced([data(r, 100) for r in range(size)]), "all_reduce on gloo")
        parts = [torch.empty(5) for _ in range(size)]
        comm.all_gather(parts, data(rank, 5), True).wait()
        for r, part in enumerate(parts):
            assert_same(part, data(r, 5), "all_gather on gloo")
        child = comm.split(list(range(size))[::-1], "child")
        assert child is not None and child.get_backend() == "gloo" and child.rank == size - 1 - rank
        child.barrier(False)
        child.finalize()


def gloos_failures_have_a_status(rank: int, size: int, operation: str, async_op: bool) -> None:
    with communicator(rank, size, backend="gloo", timeout=120) as comm:
        assert not comm.is_abort_supported()
        with pytest.raises(RuntimeError, match="abort: the backend gloo cannot abort"):
            comm.abort()
        comm.barrier()
        if rank == 0:
            tensor, batch = torch.ones(1), comm.batch_op_create()
            batch.recv(tensor, 1)
            start: dict[str, Callable[[], ncclx_rs.TorchWork]] = {
                "recv": lambda: comm.recv(tensor, 1, async_op, timeout=0.2),
                "batch": lambda: batch.issue(async_op, timeout=0.2),
                "all_reduce": lambda: comm.all_reduce(tensor, async_op=async_op, timeout=0.2),
            }
            began = time.monotonic()
            with pytest.raises(RuntimeError, match=r"(?i)timed out"):
                work = start[operation]()
                assert work.status is WorkStatus.INPROGRESS
                work.wait()
            assert time.monotonic() - began < 60
            if async_op:
                # Of its other works, gloo does not tell why they failed.
                assert work.status is (WorkStatus.ERROR if operation == "all_reduce" else WorkStatus.TIMEDOUT)
                assert repr(work) == f"TorchWork({work.status.name})"
                assert isinstance(work.exception(), RuntimeError)
        meet()


def a_window_can_be_used_after_it_failed(rank: int, size: int) -> None:
    comm = ncclx_rs.new_comm(
        "ncclx", "cpu", store=fresh_store(), rank=rank, size=size, abort_process_on_timeout_or_error=False
    )
    window = comm.new_window(torch.zeros(4))
    backend, undone = window._c10d, []

    class Captured:
        def _window_deregister(self, window: int) -> None:
            undone.append(window)
            raise ValueError("expected a call outside of CUDA graph captures")

    window._c10d = Captured()
    with pytest.raises(ValueError, match="captures"):
        window.tensor_deregister()
    window._c10d = backend
    assert undone == [window._id] and window.get_size() == 16
    with leaving_together():
        if rank == 0:
            comm.set_timeout(0.5)
            with pytest.raises(RuntimeError, match="did not call it"):
                window.tensor_deregister()
            assert window.get_size() == 0 and window.get_tensor() is None
            with pytest.raises(RuntimeError, match="Double deregistration"):
                window.tensor_deregister()
            with pytest.raises(RuntimeError) as raised:
                window.tensor_register(torch.zeros(4))
            assert "Double registration" not in str(raised.value)
    comm.finalize()


class Doubling(ncclx_rs.TorchCommBackend):
    """A backend of one rank whose all_reduce doubles the tensor."""

    def init(self, device: torch.device, name: str, options: ncclx_rs.CommOptions) -> None:
        self.name = name

    def get_rank(self) -> int:
        return 0

    def get_size(self) -> int:
        return 1

    def get_backend_name(self) -> str:
        return "doubling"

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> None:
        assert op.type is RedOpType.SUM
        tensor.mul_(2)

    def barrier(self, async_op: bool, options: ncclx_rs.BarrierOptions) -> None:
        self.told = options

    def triple(self, tensor: torch.Tensor) -> None:
        tensor.mul_(3)


def test_backends_may_be_python_classes() -> None:
    ncclx_rs.register_backend("doubling", Doubling)
    assert ncclx_rs._is_backend_registered("doubling")
    comm = ncclx_rs.new_comm("doubling", "cpu", "mine")
    tensor = torch.ones(2)
    work = comm.all_reduce(tensor, ReduceOp.SUM, True)
    work.wait()
    assert tensor.tolist() == [2.0, 2.0] and work.status is WorkStatus.COMPLETED
    comm.barrier(False, timeout=timedelta(seconds=3))
    backend = comm.unsafe_get_backend()
    assert isinstance(backend, Doubling) and backend.told.timeout == timedelta(seconds=3)
    backend.triple(tensor)
    assert tensor.tolist() == [6.0, 6.0]
    with pytest.raises(RuntimeError, match="broadcast: the backend doubling does not have it"):
        comm.broadcast(tensor, 0, False)
    comm.finalize()


class Within(ncclx_rs.TorchCommBackend):
    """A backend of one rank that returns the works of a communicator within."""

    def init(self, device: torch.device, name: str, options: ncclx_rs.CommOptions) -> None:
        self.inner = ncclx_rs.new_comm(
            "ncclx", device, f"{name}/inner", rank=0, size=1, abort_process_on_timeout_or_error=False
        )

    def finalize(self) -> None:
        self.inner.finalize()

    def get_rank(self) -> int:
        return self.inner.get_rank()

    def get_size(self) -> int:
        return self.inner.get_size()

    def barrier(self, async_op: bool) -> ncclx_rs.TorchWork:
        return self.inner.barrier(async_op)

    def recv(self, tensor: torch.Tensor, src: int, async_op: bool, options: Any) -> ncclx_rs.TorchWork:
        return self.inner.recv(tensor, src, async_op, options=options)


def test_works_of_a_communicator_within_tell_how_they_ended() -> None:
    ncclx_rs.register_backend("within", Within)
    comm = ncclx_rs.new_comm("within", "cpu", "outer")
    done = comm.barrier(True)
    done.wait()
    assert done.status is WorkStatus.COMPLETED and done.exception() is None
    late = comm.recv(torch.ones(1), 0, True, timeout=0.2)  # nobody sends
    with pytest.raises(RuntimeError, match="timed out"):
        late.wait()
    assert late.is_completed() and late.status is WorkStatus.TIMEDOUT
    assert isinstance(late.exception(), RuntimeError) and "timed out" in str(late.exception())
    comm.finalize()


def test_names_mean_the_same_before_and_after_pytorch_registers_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def creator(options: object, own_options: object) -> None:
        raise AssertionError("it is not made here")

    monkeypatch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, "nccl"])
    monkeypatch.setitem(dist.Backend._plugins, "NCCL", dist.Backend._BackendPlugin(creator, True))
    assert not _backends.make_backend("nccl").has_allocators, "somebody's own backend has the name"
    creator.__module__ = "torch.distributed.distributed_c10d"
    assert _backends.make_backend("nccl").has_allocators, "that of this package"


def test_unknown_backends_are_named() -> None:
    with pytest.raises(ModuleNotFoundError, match="failed to find backend nonesuch: it is none of .*gloo"):
        ncclx_rs.new_comm("nonesuch", "cpu", "x")
    assert "ncclx" in ncclx_rs.built_backends() and ncclx_rs.is_backend_built("ncclx")


@pytest.mark.parametrize("name", ["nccl", "nccl-lazy", "rccl"])
def test_vendors_libraries_serve_no_tensors_on_the_cpu(name: str) -> None:
    assert name in ncclx_rs.built_backends() and ncclx_rs.is_backend_built(name)
    with pytest.raises(ValueError, match=f"expected a CUDA device, which alone the backend {name} serves, got cpu"):
        ncclx_rs.new_comm(name, "cpu", "main", store=dist.HashStore(), rank=0, size=1)


def test_only_some_backends_have_an_allocator() -> None:
    assert isinstance(ncclx_rs.get_mem_allocator("ncclx"), ncclx_rs.MemAllocator)
    with pytest.raises(RuntimeError, match="get_mem_allocator: the backend gloo has no memory allocator"):
        ncclx_rs.get_mem_allocator("gloo")


@without_cuda_driver
@pytest.mark.parametrize("name", ["ncclx", "ncclx_rs"])
@pytest.mark.parametrize("device", ["cuda", torch.device("cuda:1"), "meta"])
def test_other_devices_than_the_cpu_are_refused_before_anybody_is_waited_for(name: str, device: Any) -> None:
    said = rf"argument `device`: expected the CPU, which alone is served here, got {device}: \S"
    with pytest.raises(ValueError, match=said):
        ncclx_rs.new_comm(name, device)


def test_reduce_ops_compare_and_copy() -> None:
    assert ReduceOp.SUM == copy.deepcopy(ReduceOp.SUM) and ReduceOp.SUM != ReduceOp.AVG
    assert ReduceOp.PREMUL_SUM(2.0) == ReduceOp.PREMUL_SUM(2.0) != ReduceOp.PREMUL_SUM(3.0)
    with pytest.raises(ValueError, match="PREMUL_SUM"):
        ReduceOp(RedOpType.SUM, 2.0)


# ---- changing members ----


def handles_of_all(comm: TorchComm, store: dist.Store, rank: int, size: int) -> list[str]:
    store.set(f"handle{rank}", comm.get_init_handle())
    return [store.get(f"handle{r}").decode() for r in range(size)]


def members_change(rank: int, size: int) -> None:
    store = fresh_store()
    comm = ncclx_rs.new_comm("ncclx", "cpu", "elastic", enable_reconfigure=True)
    assert comm.get_init_handle() == comm.get_init_handle()
    with pytest.raises(RuntimeError, match="not reconfigured yet"):
        comm.barrier(False)
    handles = handles_of_all(comm, store, rank, size)
    orders = [list(range(size)), list(range(size))[::-1], [size - 1], list(range(size)), list(range(1, size)) or [0]]
    for uuid, members in enumerate(orders):
        if rank not in members:
            continue
        comm.reconfigure(uuid, [handles[r] for r in members]).wait()
        assert (comm.rank, comm.size) == (members.index(rank), len(members))
        for count in (10, 100_000):
            tensor = data(rank, count)
            comm.all_reduce(tensor, ReduceOp.SUM, False)
            assert_same(tensor, reduced([data(r, count) for r in members]), f"generation {uuid}")
    if rank in orders[-1]:
        comm.reconfigure(99, {handles[r] for r in orders[-1]}).wait()
        comm.abort()
        comm.reconfigure(100, {handles[r] for r in orders[-1]}).wait()
        comm.barrier(False)
    comm.finalize()


def wrong_memberships_are_refused(rank: int, size: int) -> None:
    comm = ncclx_rs.new_comm("ncclx", "cpu", "elastic", enable_reconfigure=True, timeout=timedelta(seconds=10))
    own = comm.get_init_handle()
    for handles, text in (
        ([own, own], "twice"),
        ([], "not among them"),
        (["nonsense"], "expected results of get_init_handle"),
    ):
        with pytest.raises(RuntimeError, match=text):
            comm.reconfigure(1, handles)
    comm.reconfigure(1, [own])
    comm.barrier(False)
    comm.finalize()
    with communicator(rank, size) as fixed, pytest.raises(RuntimeError, match="without enable_reconfigure"):
        fixed.reconfigure(1, [fixed.get_init_handle()])


def survivors_go_on_without_a_killed_member(rank: int, size: int) -> None:
    store = fresh_store()
    comm = ncclx_rs.new_comm("ncclx", "cpu", "elastic", enable_reconfigure=True, timeout=timedelta(seconds=60))
    handles = handles_of_all(comm, store, rank, size)
    comm.reconfigure(1, handles)
    comm.barrier(False)
    meet()
    if rank == 0:  # the first member's store also served the first generation
        os.kill(os.getpid(), signal.SIGKILL)
    with leaving_together(range(1, size)):
        with pytest.raises(RuntimeError, match="all_reduce"):
            while True:
                comm.all_reduce(torch.ones(1000), ReduceOp.SUM, False)
        comm.reconfigure(2, handles[1:])
        tensor = torch.ones(1000)
        comm.all_reduce(tensor, ReduceOp.SUM, False)
        assert tensor[0].item() == size - 1
        comm.finalize()


CHECKS = [
    all_reduce_combines,
    rooted_operations_serve_every_root,
    gathering_and_scattering_take_equal_and_other_sizes,
    all_to_all_exchanges,
    messages_and_batches_go_round_a_ring,
    a_batch_with_a_wrong_message_sends_nothing,
    persistent_all_gather_repeats,
    persistent_all_gathers_go_into_windows,
    works_can_be_awaited,
    objects_travel,
    objects_of_any_class_need_consent,
    windows_are_written_by_others,
    windows_are_added_to_and_flushed,
    windows_are_mapped_by_others,
    communicators_split,
    a_rank_that_missed_a_split_finds_the_others_again,
    tensors_of_the_allocator_are_communicated,
    wrong_splits_are_refused,
    wrong_calls_are_refused_and_change_nothing,
    numbers_below_zero_are_no_place_in_a_world,
    a_finalized_communicator_refuses_everything,
    it_says_what_it_is,
    hooks_see_every_operation,
    forgetting_to_finalize_is_warned_about,
    members_change,
    wrong_memberships_are_refused,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_communicator(world: World, check) -> None:
    world.run(check, join=False)


@pytest.mark.worlds(sizes=(8,), modes=("shm",))
@pytest.mark.parametrize(
    "check",
    [
        all_reduce_combines,
        rooted_operations_serve_every_root,
        all_to_all_exchanges,
        messages_and_batches_go_round_a_ring,
        objects_travel,
        communicators_split,
        members_change,
    ],
    ids=lambda check: check.__name__,
)
def test_eight_ranks(world: World, check) -> None:
    world.run(check, join=False)


@pytest.mark.worlds(sizes=(1, 2, 3), modes=("shm",))
def test_gloo_is_bridged(world: World) -> None:
    world.run(gloo_is_bridged, join=False)


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
@pytest.mark.parametrize("operation", ["recv", "batch", "all_reduce"])
@pytest.mark.parametrize("async_op", [True, False])
def test_gloos_failures_have_a_status(world: World, operation: str, async_op: bool) -> None:
    world.run(gloos_failures_have_a_status, operation, async_op, join=False)


def test_c10d_backends_abort_if_they_have_an_abort_of_their_own() -> None:
    class Inheriting(c10d.Backend):
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 1

    class Aborting(Inheriting):
        def abort(self) -> None: ...

    options = ncclx_rs.CommOptions()
    for kind, aborts in ((Aborting, True), (Inheriting, False)):
        # Without c10d's part, which Python cannot make before PyTorch 2.15.
        made = kind.__new__(kind)
        backend = _backends.C10dBackend("others", lambda _, made=made: made)
        backend.init(torch.device("cpu"), "name", options)
        assert TorchComm(backend, "name", torch.device("cpu"), options).is_abort_supported() is aborts


@pytest.mark.worlds(sizes=(2, 3), modes=("shm", "tcp"))
@pytest.mark.parametrize(
    "check",
    [
        a_late_rank_is_named_and_ends_the_communicator,
        abort_ends_what_is_in_flight,
        a_window_can_be_used_after_it_failed,
    ],
    ids=lambda check: check.__name__,
)
def test_failure(fresh_world: World, check) -> None:
    fresh_world.run(check, join=False)


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_a_timeout_ends_the_process_by_default(fresh_world: World) -> None:
    fresh_world.run(a_timeout_ends_the_process_by_default, join=False, dies={1})


@pytest.mark.worlds(sizes=(2, 4), modes=("shm", "tcp"))
def test_survivors_go_on_without_a_killed_member(fresh_world: World) -> None:
    fresh_world.run(survivors_go_on_without_a_killed_member, join=False, dies={0})


# ---- programs written for torchcomms ----

PROGRAM = """
import torch
import torchcomms
from helper import names  # beside the program
from torchcomms import ReduceOp, objcol
from torchcomms._comms import TorchComm

comm = torchcomms.new_comm("ncclx", torch.device("cpu"), name=names[0])
tensor = torch.full((1024,), float(comm.get_rank() + 1))
comm.all_reduce(tensor, ReduceOp.SUM, async_op=False)
assert isinstance(comm, TorchComm)
print(f"sum {tensor[0].item()} {objcol.__name__}\\n", end="")
comm.finalize()
"""


def test_torchcomms_programs_run_as_they_are(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    (tmp_path / "helper.py").write_text("names = ['main_comm']\n")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "--module", "ncclx_rs.as_torchcomms", str(program)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"sum 3\.0 ncclx_rs\.objcol", done.stdout)) == 2, done.stdout


SPAWNING = """
import ncclx_rs
ncclx_rs.install_as_torchcomms()
import multiprocessing
import sys
import torchcomms
from helper import greeting

def child():
    print(torchcomms.__name__, greeting)

if __name__ == "__main__":
    print(sys.argv[1:], sys.path[0])
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


def test_torchcomms_programs_find_what_is_beside_them_and_spawn(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNING)
    (tmp_path / "helper.py").write_text("greeting = 'from beside'\n")
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.py"
    link.symlink_to(tmp_path / "train.py")
    done = subprocess.run(
        [sys.executable, "-m", "ncclx_rs.as_torchcomms", str(link), "--steps", "3"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"['--steps', '3'] {tmp_path}\nncclx_rs from beside\n"
