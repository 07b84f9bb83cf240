"""torch.compile over the object API, c10d's functional collectives, DDP and FSDP2: the same numbers as without it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from harness import World, fresh_store, joined
from ncclx_rs import BatchSendRecv, OpName, ReduceOp, TorchComm, TorchCommWindow, TorchWork
from reference import assert_same, data, reduced
from test_frameworks import assert_parameters_close, model, train
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

LIMIT = timedelta(seconds=20)  # torch.compile cannot construct durations

Fn = Callable[..., Any]


@contextlib.contextmanager
def communicator(rank: int, size: int, backend: str = "ncclx", name: str = "compiled") -> Iterator[TorchComm]:
    comm = ncclx_rs.new_comm(backend, "cpu", name, store=fresh_store(), rank=rank, size=size)
    try:
        yield comm
    finally:
        comm.finalize()


def quick_inductor() -> contextlib.AbstractContextManager[None]:
    """Turns off what is slow before the first kernel: worker processes, trials of the compiler, prepared headers."""
    import torch._inductor.config

    settings = {"compile_threads": 1, "cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": False}
    return torch._inductor.config.patch(settings)


def compiled(fn: Fn, backend: str = "aot_eager", fullgraph: bool = True) -> Fn:
    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, fullgraph=fullgraph)


# ---- every operation ----


class Tensors:
    """The tensors of `every_operation`."""

    def __init__(self, rank: int, size: int) -> None:
        self.changed = [data(rank, (3, 4), salt=salt) for salt in range(5)]
        self.parts = [data(rank, 4 + r, salt=r) for r in range(size)]
        self.equal_parts = [data(rank, 4, salt=10 + r) for r in range(size)]
        self.own = data(rank, 4 + rank, salt=20)
        self.whole = data(rank, 4 * size, salt=21)
        self.outputs = [torch.full((4,), -1.0) for _ in range(4)]
        self.own_output = torch.full((4 + rank,), -1.0)
        self.wholes = [torch.full((4 * size,), -1.0) for _ in range(3)]
        self.lists = [[torch.full((4,), -1.0) for _ in range(size)] for _ in range(3)]
        self.uneven = [torch.full((4 + r,), -1.0) for r in range(size)]
        self.messages = [torch.full((4,), -1.0) for _ in range(2)]

    def all(self) -> list[torch.Tensor]:
        single = [*self.changed, *self.parts, *self.equal_parts, self.own, self.whole, *self.outputs, self.own_output]
        return [*single, *self.wholes, *(t for tensors in self.lists for t in tensors), *self.uneven, *self.messages]


def every_operation(comm: TorchComm, t: Tensors, rank: int, size: int, async_op: bool) -> torch.Tensor:
    """Calls every operation once; the result depends on values between and after them."""
    works: list[TorchWork] = []

    def done(work: TorchWork) -> None:
        if async_op:
            works.append(work)

    last, right, left = size - 1, (rank + 1) % size, (rank - 1) % size
    t.changed[0] *= 2
    done(comm.all_reduce(t.changed[0], ReduceOp.SUM, async_op))
    done(comm.all_reduce(t.changed[1], ReduceOp.PREMUL_SUM(0.5), async_op=async_op, hints={}))
    done(comm.all_reduce(t.changed[2], op=ReduceOp.MAX, async_op=async_op, timeout=LIMIT))
    done(comm.broadcast(t.changed[3], last, async_op))
    done(comm.reduce(t.changed[4], 0, ReduceOp.SUM, async_op))
    done(comm.barrier(async_op))
    done(comm.all_gather(t.lists[0], t.outputs[0] + rank, async_op))
    done(comm.all_gather_v(t.uneven, t.own, async_op))
    done(comm.all_gather_single(t.wholes[0], t.equal_parts[0], async_op))
    done(comm.reduce_scatter(t.outputs[1], t.equal_parts, ReduceOp.AVG, async_op))
    done(comm.reduce_scatter_v(t.own_output, t.parts, ReduceOp.SUM, async_op))
    done(comm.reduce_scatter_single(t.outputs[2], t.whole, ReduceOp.SUM, async_op))
    done(comm.all_to_all_single(t.wholes[1], t.whole * 3, async_op))
    done(comm.all_to_all_v_single(t.wholes[2], t.whole, [4] * size, [4] * size, async_op))
    done(comm.all_to_all(t.lists[1], t.equal_parts, async_op))
    done(comm.scatter(t.outputs[3], t.equal_parts if rank == last else [], last, async_op))
    done(comm.gather(t.lists[2] if rank == 0 else [], t.equal_parts[-1], 0, async_op))
    done(comm.gather_single(t.whole if async_op else t.wholes[1], t.equal_parts[-1], last, async_op))
    receive = comm.recv(t.messages[0], left, True)
    done(comm.send(t.equal_parts[0], right, async_op))
    receive.wait()
    batch = comm.batch_op_create()
    batch.recv(t.messages[1], left)
    batch.send(t.messages[0], right)
    done(batch.issue(async_op))
    between = t.own.sum() + 1
    for work in works:
        work.wait()
    return between + sum(tensor.sum() for tensor in t.all())


def every_operation_is_as_without(rank: int, size: int, async_op: bool) -> None:
    expected, got = Tensors(rank, size), Tensors(rank, size)
    with communicator(rank, size) as comm:
        total = every_operation(comm, expected, rank, size, async_op)
        assert_same(compiled(every_operation)(comm, got, rank, size, async_op), total, "the sum")
        for i, (tensor, right) in enumerate(zip(got.all(), expected.all(), strict=True)):
            assert_same(tensor, right, f"tensor {i}")


def shapes_may_vary(rank: int, size: int) -> None:
    def program(comm: TorchComm, x: torch.Tensor) -> torch.Tensor:
        whole, mine = x.new_empty(size * x.shape[0]), torch.empty_like(x)
        comm.all_gather_single(whole, x * 1, True).wait()
        parts = [x.shape[0] // size] * size
        comm.all_to_all_v_single(mine, x * 2, parts, parts, False)
        return (whole.sum() + mine.sum()) * (rank + 1)

    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Fn:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    run = torch.compile(program, backend=count, fullgraph=True, dynamic=True)
    with communicator(rank, size) as comm:
        for length in (2 * size, 3 * size, 5 * size):
            x = data(rank, length).requires_grad_()
            result = run(comm, x)
            assert_same(result, program(comm, x.detach()), f"{length} elements")
            result.backward()
            total = sum(r + 1 for r in range(size))
            gathered = torch.full((length,), float(total))
            exchanged = torch.arange(1.0, size + 1).repeat_interleave(length // size) * 2
            assert_same(x.grad, gathered + exchanged, f"gradient of {length} elements")
        assert graphs == 1


def windows_are_as_without(rank: int, size: int) -> None:
    """Data that a rank has put is there after its signal, also if nothing else in the graph orders the two."""
    right, left = (rank + 1) % size, (rank - 1) % size

    def program(window: TorchCommWindow, x: torch.Tensor, async_op: bool) -> torch.Tensor:
        works = [window.put(x * 2, right, 2, async_op), window.signal(right, async_op)]
        before = window.wait_signal(left, async_op)
        if async_op:
            before.wait()
        arrived = window.map_remote_tensor(rank) + 1
        if async_op:
            for work in works:
                work.wait()
        return arrived

    with communicator(rank, size) as comm:
        for salt, async_op in enumerate((False, True)):
            window = comm.new_window(torch.zeros(6))
            expected = torch.zeros(6)
            expected[2:5] = data(left, 3, salt=salt) * 2
            assert_same(compiled(program)(window, data(rank, 3, salt=salt), async_op), expected + 1, "what was put")
            comm.barrier(False)
            window.tensor_deregister()


def windows_are_read_as_without(rank: int, size: int) -> None:
    right = (rank + 1) % size

    def program(window: TorchCommWindow, x: torch.Tensor, async_op: bool) -> torch.Tensor:
        got = torch.zeros_like(x)
        work = window.get(got, right, 2, async_op)
        doubled = x * 2
        if async_op:
            work.wait()
        return got + doubled

    with communicator(rank, size) as comm:
        window = comm.new_window(data(rank, 6))
        for salt, async_op in enumerate((False, True)):
            x = data(rank, 3, salt=salt)
            assert_same(compiled(program)(window, x, async_op), data(right, 6)[2:5] + x * 2, "what was got")
        window.tensor_deregister()


def windows_are_added_to_as_without(rank: int, size: int) -> None:
    right, left = (rank + 1) % size, (rank - 1) % size

    def program(window: TorchCommWindow, x: torch.Tensor, async_op: bool) -> torch.Tensor:
        works = [window.accumulate(x * 2, right, 2, async_op), window.flush(right, async_op)]
        if async_op:
            for work in works:
                work.wait()
        window.flush_all()
        window.signal(right)
        window.wait_signal(left)
        return window.map_remote_tensor(rank) + 1

    with communicator(rank, size) as comm:
        window = comm.new_window(torch.zeros(6))
        expected = torch.ones(6)
        for salt, async_op in enumerate((False, True)):
            expected[2:5] += data(left, 3, salt=salt) * 2
            assert_same(compiled(program)(window, data(rank, 3, salt=salt), async_op), expected, "what was added")
            comm.barrier(False)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="fence cannot be part of a compiled graph"):
            compiled(lambda x: (window.fence(), x + 1)[1])(torch.ones(4))
        window.tensor_deregister()


def batches_may_be_made_outside(rank: int, size: int) -> None:
    def fill(batch: BatchSendRecv, sent: torch.Tensor, received: torch.Tensor) -> None:
        batch.recv(received, (rank - 1) % size)
        batch.send(sent, (rank + 1) % size)

    def issue(batch: BatchSendRecv, received: torch.Tensor) -> torch.Tensor:
        batch.issue(True).wait()
        return received * 2

    with communicator(rank, size) as comm:
        expected = data((rank - 1) % size, 4)
        for graph in (fill, issue):
            batch, received = comm.batch_op_create(), torch.empty(4)
            (compiled(fill) if graph is fill else fill)(batch, data(rank, 4), received)
            doubled = (compiled(issue) if graph is issue else issue)(batch, received)
            assert_same(received, expected, f"{graph.__name__} compiled")
            assert_same(doubled, expected * 2, f"{graph.__name__} compiled")


def gloo_is_as_without(rank: int, size: int) -> None:
    def program(comm: TorchComm, tensor: torch.Tensor) -> torch.Tensor:
        work = comm.all_reduce(tensor, ReduceOp.SUM, True)
        parts = [torch.empty_like(tensor) for _ in range(size)]
        comm.all_gather(parts, tensor.new_full(tensor.shape, rank), False)
        work.wait()
        return tensor * 2 + sum(parts)

    with communicator(rank, size, "gloo") as comm:
        got = compiled(program)(comm, data(rank, 10))
        assert_same(got, reduced([data(r, 10) for r in range(size)]) * 2 + sum(range(size)), "gloo")


# ---- order, hooks, names ----


def operations_keep_their_order(rank: int, size: int) -> None:
    """The order is kept also without dependencies, and for unused results."""

    def program(first: TorchComm, second: TorchComm, tensors: list[torch.Tensor]) -> torch.Tensor:
        works = [
            comm.all_reduce(t * 2, ReduceOp.SUM, True) for t, comm in zip(tensors, (first, second) * 3, strict=True)
        ]
        first.barrier(False)
        for work in reversed(works):
            work.wait()
        first.all_gather_single(torch.empty(size * 4), tensors[1], False)
        return tensors[0] + 1

    called: list[tuple[str, OpName, bool]] = []
    ended: list[int] = []

    def note(comm: TorchComm, op: OpName, args: Any) -> None:
        if op is not OpName.finalize:
            called.append((comm.get_name(), op, args.async_op))

    def run(fn: Fn) -> list[tuple[str, OpName, bool]]:
        called.clear()
        fn(first, second, [data(rank, 4, salt=salt) for salt in range(6)])
        return list(called)

    with communicator(rank, size, name="first") as first, communicator(rank, size, name="second") as second:
        for comm in (first, second):
            comm.register_pre_hook(lambda op, _, args, c=comm: note(c, op, args))
            comm.register_post_hook(lambda op_id, _: ended.append(op_id))
        expected = run(program)
        assert len(expected) == 8
        for backend in ("eager", "aot_eager"):
            assert run(compiled(program, backend)) == expected, backend
        assert len(ended) == 3 * 8


def graphs_find_their_communicator(rank: int, size: int) -> None:
    """By name: a second communicator of that name gets its own graph; a later one reuses the first graph."""
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: Any) -> Fn:
        nonlocal graphs
        graphs += 1
        return graph.forward

    @torch.compile(backend=count, fullgraph=True)
    def total(comm: TorchComm, tensor: torch.Tensor) -> torch.Tensor:
        comm.all_reduce(tensor, ReduceOp.SUM, False)
        return tensor

    torch._dynamo.reset()
    with communicator(rank, size) as outer, communicator(rank, size) as inner:
        numbers: list[int] = []
        outer.register_pre_hook(lambda *_: numbers.append(1))
        inner.register_pre_hook(lambda *_: numbers.append(2))
        for comm in (outer, inner, outer):
            assert_same(total(comm, torch.ones(3)), torch.full((3,), float(size)), "all_reduce")
        assert numbers == [1, 2, 1] and graphs == 2
        half = outer.split([rank], "alone")
        assert half is not None
        assert_same(total(half, torch.ones(3)), torch.ones(3), "all_reduce of one rank")
        half.finalize()
    with pytest.raises(RuntimeError, match="all_reduce: communicator `compiled` is finalized"):
        total(outer, torch.ones(3))
    del outer, inner, comm
    made = graphs
    with communicator(rank, size) as again:
        assert_same(total(again, torch.ones(3)), torch.full((3,), float(size)), "all_reduce")
    assert graphs == made


# ---- works ----


def works_may_leave_the_graph(rank: int, size: int) -> None:
    def start(comm: TorchComm, tensor: torch.Tensor, parts: list[torch.Tensor]) -> tuple[TorchWork, TorchWork]:
        return comm.all_reduce(tensor, ReduceOp.SUM, True), comm.all_gather(parts, tensor + 1, True)

    async def waited(work: TorchWork) -> None:
        await work

    expected = reduced([data(r, 5) for r in range(size)])
    with communicator(rank, size) as comm:
        for backend in ("eager", "aot_eager"):
            run = compiled(start, backend)
            tensor, parts = data(rank, 5), [torch.empty(5) for _ in range(size)]
            work, gather = run(comm, tensor, parts)
            assert isinstance(work, TorchWork)
            work.wait()
            work.wait()
            assert work.is_completed() and work.status is ncclx_rs.WorkStatus.COMPLETED and work.exception() is None
            assert_same(tensor, expected, "after wait")
            asyncio.run(waited(gather))
            assert gather.is_completed()
            for r, part in enumerate(parts):
                assert_same(part, data(r, 5) + 1, "after await")
        unfinished = run(comm, data(rank, 5), parts)
    with pytest.raises(RuntimeError, match="finalized before its work was waited for"):
        unfinished[0].wait()


def a_lost_result_is_warned_about(rank: int, size: int) -> None:
    def lose(t: torch.Tensor) -> torch.Tensor:
        comm.broadcast(t, 0, True)
        return t + 1

    comm = ncclx_rs.new_comm("ncclx", "cpu", "lossy", store=fresh_store(), rank=rank, size=size)
    assert_same(compiled(lose)(data(rank, 3)), data(rank, 3) + 1, "what nobody waited for is not there")
    with pytest.warns(UserWarning, match="nobody waited for 1 operations"):
        comm.finalize()


# ---- gradients ----


def gradients_are_operations(rank: int, size: int) -> None:
    """Each operation's result is weighted per rank; the gradients are compared with those computed by hand."""
    weight = float(rank + 1)
    total = float(sum(r + 1 for r in range(size)))
    weights = torch.arange(1.0, size + 1)

    def all_reduce(comm: TorchComm, x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        comm.all_reduce(y, ReduceOp.SUM, True).wait()
        return (y * weight).sum()

    def average(comm: TorchComm, x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        comm.all_reduce(y, ReduceOp.AVG, True).wait()
        return (y * weight).sum()

    def all_gather(comm: TorchComm, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(size)]
        comm.all_gather(parts, x * 1, True).wait()
        return sum((part * weight).sum() for part in parts)

    def all_gather_single(comm: TorchComm, x: torch.Tensor) -> torch.Tensor:
        whole = x.new_empty(size * x.numel())
        comm.all_gather_single(whole, x * 1, True).wait()
        return (whole * weight).sum()

    def reduce_scatter(comm: TorchComm, x: torch.Tensor) -> torch.Tensor:
        mine = x.new_empty(2)
        comm.reduce_scatter(mine, list((x * 1).chunk(size)), ReduceOp.SUM, True).wait()
        return (mine * weight).sum()

    def reduce_scatter_single(comm: TorchComm, x: torch.Tensor) -> torch.Tensor:
        mine = x.new_empty(2)
        comm.reduce_scatter_single(mine, x * 1, ReduceOp.AVG, True).wait()
        return (mine * weight).sum()

    def all_to_all(comm: TorchComm, x: torch.Tensor) -> torch.Tensor:
        parts = [x.new_empty(2) for _ in range(size)]
        comm.all_to_all(parts, list((x * 1).chunk(size)), True).wait()
        return sum((part * weight).sum() for part in parts)

    def all_to_all_single(comm: TorchComm, x: torch.Tensor) -> torch.Tensor:
        whole = torch.empty_like(x)
        comm.all_to_all_single(whole, x * 1, True).wait()
        return (whole * weight).sum()

    def all_to_all_v_single(comm: TorchComm, x: torch.Tensor) -> torch.Tensor:
        whole = torch.empty_like(x)
        comm.all_to_all_v_single(whole, x * 1, [2] * size, [2] * size, True).wait()
        return (whole * weight).sum()

    everywhere, per_rank = torch.full((2 * size,), total), weights.repeat_interleave(2)
    cases: list[tuple[Fn, torch.Tensor]] = [
        (all_reduce, everywhere),
        (average, everywhere / size),
        (all_gather, everywhere),
        (all_gather_single, everywhere),
        (reduce_scatter, per_rank),
        (reduce_scatter_single, per_rank / size),
        (all_to_all, per_rank),
        (all_to_all_single, per_rank),
        (all_to_all_v_single, per_rank),
    ]

    def losses(comm: TorchComm, inputs: list[torch.Tensor]) -> torch.Tensor:
        return sum(loss(comm, x) for (loss, _), x in zip(cases, inputs, strict=True))  # type: ignore[return-value]

    with communicator(rank, size) as comm:
        inputs = [data(rank, 2 * size).requires_grad_() for _ in cases]
        compiled(losses)(comm, inputs).backward()
        for (loss, expected), x in zip(cases, inputs, strict=True):
            assert x.grad is not None, loss.__name__
            assert_same(x.grad, expected, loss.__name__)

        def broadcast(x: torch.Tensor) -> torch.Tensor:
            y = x * 1
            comm.broadcast(y, 0, False)
            return y.sum()

        def maximum(x: torch.Tensor) -> torch.Tensor:
            y = x * 1
            comm.all_reduce(y, ReduceOp.MAX, False)
            return y.sum()

        for fn, text in ((broadcast, "broadcast has no gradient"), (maximum, "only for SUM and AVG")):
            with pytest.raises(Exception, match=text):
                compiled(fn)(data(rank, 4).requires_grad_()).backward()
            with torch.no_grad():
                compiled(fn)(data(rank, 4).requires_grad_())


# ---- what cannot be compiled ----


def what_cannot_be_in_a_graph_says_so(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        outside = comm.barrier(True)
        window = comm.new_window(torch.zeros(4))

        def split(t: torch.Tensor) -> torch.Tensor:
            child = comm.split([rank], f"child{len(children)}")
            assert child is not None
            children.append(child)
            child.all_reduce(t, ReduceOp.SUM, False)
            return t + 1

        def wait(t: torch.Tensor) -> torch.Tensor:
            outside.wait()
            return t + 1

        def look(t: torch.Tensor) -> torch.Tensor:
            window.get_tensor()
            return t + 1

        def ask(t: torch.Tensor) -> torch.Tensor:
            work = comm.all_reduce(t, ReduceOp.MAX, True)
            work.is_completed()
            work.wait()
            return t + 1

        children: list[TorchComm] = []
        cases = [
            (split, "split cannot be part of a compiled graph: it makes a communicator"),
            (wait, "wait cannot be .*: the operation was not started in the graph"),
            (look, "get_tensor cannot be .*: other ranks change it .*; map_remote_tensor can be"),
            (ask, "state of an operation cannot be .*: it is not known when the graph is made"),
        ]
        for fn, reason in cases:
            with pytest.raises(torch._dynamo.exc.Unsupported, match=reason):
                compiled(fn)(torch.ones(4))
        assert_same(compiled(split, fullgraph=False)(torch.ones(4)), torch.full((4,), 2.0), "not in one graph")
        for child in children:
            child.finalize()
        window.tensor_deregister()


def wrong_calls_raise(rank: int, size: int) -> None:
    def transposed(comm: TorchComm, t: torch.Tensor) -> torch.Tensor:
        comm.all_reduce(t.t(), ReduceOp.SUM, False)
        return t

    def nobody(comm: TorchComm, t: torch.Tensor) -> torch.Tensor:
        comm.broadcast(t, 99, False)
        return t

    def too_few(comm: TorchComm, t: torch.Tensor) -> torch.Tensor:
        comm.all_gather([t], t, False)
        return t

    cases = [(transposed, "must be contiguous"), (nobody, r"root must be in range \[0, "), (too_few, "one a rank")]
    with communicator(rank, size) as comm:
        for fn, text in cases:
            with pytest.raises(RuntimeError, match=text):
                compiled(fn)(comm, torch.ones(2, 3))
        tensor = torch.ones(2, 3)
        comm.all_reduce(tensor, ReduceOp.SUM, False)
        assert_same(tensor, torch.full((2, 3), float(size)), "the communicator works on")


# ---- c10d's own ----


def functional(tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Many collectives in flight, waited for in another order; compiler passes may move the computation between."""
    group = dist.group.WORLD
    total = funcol.all_reduce(tensor * 2, "sum", group)
    gathered = funcol.all_gather_tensor(tensor + 1, gather_dim=0, group=group)
    between = (tensor @ tensor.t()).relu()
    part = funcol.reduce_scatter_tensor(gathered * 1, "sum", scatter_dim=0, group=group)
    highest = funcol.all_reduce(between, "max", group)
    exchanged = funcol.all_to_all_single(gathered - 1, None, None, group)
    several = funcol.all_reduce_coalesced([tensor + 3, between], "sum", group)
    spread = funcol.broadcast(tensor * 1, size - 1, group)
    in_place = tensor.clone()
    dist.all_reduce(in_place)
    dist.all_gather_into_tensor(whole := tensor.new_empty(size * tensor.shape[0], tensor.shape[1]), in_place)
    return [highest + between, exchanged + 0, part + 0, *several, spread + 0, gathered + 0, total + 0, in_place, whole]


def tensor_parallel(mesh: dist.DeviceMesh, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    columns, rows = DTensor.from_local(up, mesh, [Shard(1)]), DTensor.from_local(down, mesh, [Shard(0)])
    partial = (DTensor.from_local(x, mesh, [Replicate()]) @ columns).relu() @ rows
    return partial.redistribute(mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local()


def collectives_equal_those_of_gloo(rank: int, size: int) -> None:
    """Small whole numbers, so that sums are exact in every order."""
    inputs = data(rank, (2 * size, 3)), data(0, (2 * size, 6)), data(rank, (6, 4)), data(rank, (4, 6), salt=1)

    def program(x: torch.Tensor, y: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> list[torch.Tensor]:
        return [*functional(x, size), tensor_parallel(mesh, y, up, down)]

    with joined(backend="gloo"):
        mesh = dist.init_device_mesh("cpu", (size,))
        expected = program(*inputs)
    with joined():
        mesh = dist.init_device_mesh("cpu", (size,))
        run = compiled(program)
        for _ in range(2):
            for i, (got, want) in enumerate(zip(run(*inputs), expected, strict=True)):
                assert_same(got + 0, want + 0, f"result {i}")


def compiled_models_train_in_wrappers(rank: int, size: int) -> None:
    """PyTorch's wrappers break graphs themselves, with any backend; the wrapped model is one graph."""
    from torch.distributed.fsdp import fully_shard

    def parameters(net: nn.Module) -> dict[str, torch.Tensor]:
        named = {name.replace("_orig_mod.", ""): parameter for name, parameter in net.named_parameters()}
        return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in named.items()}

    with joined():
        replicated = nn.parallel.DistributedDataParallel(compiled(model()))
        train(replicated, rank, size)
        assert_parameters_close(parameters(replicated.module), size, "DDP")
        sharded = nn.Sequential(*(fully_shard(compiled(layer)) for layer in model()))
        train(fully_shard(sharded), rank, size)
        assert_parameters_close(parameters(sharded), size, "FSDP2")


# ---- inductor ----


def memory_in_flight_is_left_alone(rank: int, size: int) -> None:
    """Inductor reuses memory as soon as its graph no longer needs it."""
    store = fresh_store()

    def program(comm: TorchComm, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = torch.empty(size * x.shape[0], x.shape[1])
        gather = comm.all_gather_single(whole, x * 2, True)
        product = x @ x  # takes the memory of x * 2 unless it is held
        reduce = comm.all_reduce(product, ReduceOp.SUM, True)
        gather.wait()
        reduce.wait()
        return whole, product

    def let_the_first_go_ahead(op: OpName, *_: Any) -> None:
        """Makes the other ranks gather only after rank 0 has its product."""
        if rank == 0 and op is OpName.all_reduce:
            store.set("product", "there")
        if rank != 0 and op is OpName.all_gather_single:
            store.wait(["product"])

    inputs = [data(r, (512, 512)) for r in range(size)]
    with communicator(rank, size) as comm:
        comm.register_pre_hook(let_the_first_go_ahead)
        whole, product = compiled(program, "inductor")(comm, inputs[rank])
        assert_same(whole, torch.cat(inputs) * 2, "all_gather_single")
        assert_same(product, reduced([x @ x for x in inputs]), "all_reduce")


class Gathered(nn.Module):
    """Gathers a sharded parameter; its gradients are averaged over the ranks."""

    def forward(self, parameter: DTensor) -> torch.Tensor:
        return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def sharded_parameters_get_their_gradients(rank: int, size: int) -> None:
    """FSDP as functional collectives in one graph: all_gather forward, reduce_scatter backward."""
    inputs = [data(r, (3, 6)) for r in range(size)]
    alone = nn.Linear(6, 2 * size)
    with joined():
        dist.broadcast(alone.weight.data, 0)
        dist.broadcast(alone.bias.data, 0)
        alone(torch.stack(inputs)).square().mean().backward()
        mesh = dist.init_device_mesh("cpu", (size,))
        layer = nn.Linear(6, 2 * size)
        for name, parameter in alone.named_parameters():
            setattr(layer, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
            nn.utils.parametrize.register_parametrization(layer, name, Gathered(), unsafe=True)
        compiled(lambda x: layer(x).square().mean(), "inductor")(inputs[rank]).backward()
        for name, parameter in alone.named_parameters():
            gradient = layer.parametrizations[name].original.grad.full_tensor()
            torch.testing.assert_close(gradient, parameter.grad, msg=lambda text, name=name: f"{name}: {text}")


def inductor_is_as_without(rank: int, size: int) -> None:
    with quick_inductor():
        memory_in_flight_is_left_alone(rank, size)
        sharded_parameters_get_their_gradients(rank, size)


# ---- the tests ----


def test_programs_can_ask() -> None:
    functional = ncclx_rs.functional
    for ask in (functional.is_torch_compile_supported, functional.is_torch_compile_supported_and_enabled):
        assert ask() and not ask(_current_version="2.10.1") and ask("2.10", "2.10.1")


CHECKS = [
    shapes_may_vary,
    windows_are_as_without,
    windows_are_read_as_without,
    windows_are_added_to_as_without,
    batches_may_be_made_outside,
    gloo_is_as_without,
    operations_keep_their_order,
    graphs_find_their_communicator,
    works_may_leave_the_graph,
    a_lost_result_is_warned_about,
    gradients_are_operations,
    what_cannot_be_in_a_graph_says_so,
    wrong_calls_raise,
    collectives_equal_those_of_gloo,
    compiled_models_train_in_wrappers,
    inductor_is_as_without,
]


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_compile(world: World, check) -> None:
    world.run(check, join=False)


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
@pytest.mark.parametrize("async_op", [False, True])
def test_every_operation(world: World, async_op: bool) -> None:
    world.run(every_operation_is_as_without, async_op, join=False)
