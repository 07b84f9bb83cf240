"""torchcomms' operators on communicators of this package: alone, in graphs, with gradients, beside torchcomms' own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ncclx_rs
import pytest
import torch
from harness import BACKEND, World
from ncclx_rs import ReduceOp, TorchComm, TorchWork, _torchcomms_operators
from ncclx_rs._operands import OPERANDS
from reference import assert_same, data
from test_compile import communicator, compiled, quick_inductor
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="the operators are those of ncclx_rs")

ops = torch.ops.torchcomms
SUM = ReduceOp.SUM


class Tensors:
    """The tensors of a program, in the order in which it writes them."""

    def __init__(self, rank: int, size: int) -> None:
        self.own = [data(rank, 2 * size, salt=salt) for salt in range(6)]
        self.parts = [data(rank, 4, salt=10 + r) for r in range(size)]
        self.small = [torch.full((4,), -1.0) for _ in range(6)]
        self.wholes = [torch.full((2 * size,), -1.0) for _ in range(2)]
        self.gathered = torch.full((4 * size,), -1.0)
        self.at_root = torch.full((4 * size,), -1.0)
        self.lists = [[torch.full((4,), -1.0) for _ in range(size)] for _ in range(4)]

    def all(self) -> list[torch.Tensor]:
        lists = [tensor for tensors in self.lists for tensor in tensors]
        return [*self.own, *self.parts, *self.small, *self.wholes, self.gathered, self.at_root, *lists]


def calls(t: Tensors, rank: int, size: int) -> list[tuple[str, tuple[Any, ...]]]:
    """A call of every operation with its operands. Messages go around, so a receive is started before its send."""
    last, splits = size - 1, [2] * size
    return [
        ("all_reduce", (t.own[0], SUM)),
        ("all_reduce", (t.own[1], ReduceOp.MAX)),
        ("broadcast", (t.own[2], last)),
        ("reduce", (t.own[3], 0, SUM)),
        ("barrier", ()),
        ("all_gather", (t.lists[0], t.parts[0])),
        ("all_gather_v", (t.lists[1], t.parts[0])),
        ("all_gather_single", (t.gathered, t.parts[1])),
        ("reduce_scatter", (t.small[0], t.parts, SUM)),
        ("reduce_scatter_v", (t.small[1], t.parts, SUM)),
        ("reduce_scatter_single", (t.small[2][:2], t.own[4], ReduceOp.AVG)),
        ("all_to_all_single", (t.wholes[0], t.own[4])),
        ("all_to_all_v_single", (t.wholes[1], t.own[5], splits, splits)),
        ("all_to_all", (t.lists[2], t.parts)),
        ("scatter", (t.small[3], t.parts if rank == last else [], last)),
        ("gather", (t.lists[3] if rank == 0 else [], t.parts[1], 0)),
        ("gather_single", (t.at_root, t.parts[1], last)),
        ("recv", (t.small[4], (rank - 1) % size)),
        ("send", (t.parts[0], (rank + 1) % size)),
    ]


def by_methods(comm: TorchComm, t: Tensors, rank: int, size: int) -> None:
    works = [getattr(comm, name)(*args, async_op=True) for name, args in calls(t, rank, size)]
    for work in works:
        work.wait()


def in_place(comm: TorchComm, t: Tensors, rank: int, size: int, async_op: bool) -> torch.Tensor:
    waiting: list[torch.Tensor] = []
    for name, args in calls(t, rank, size):
        writes = name not in ("send", "barrier")
        operator = getattr(torch.ops.torchcomms, f"torchcomm_{name}_" if writes else f"torchcomm_{name}")
        # A receive that is not yet done must not keep its rank from sending.
        later = async_op or name == "recv"
        result = operator(comm, *args, later, None, None)
        if later:
            waiting += result if isinstance(result, list) and result else [args[1] if result == [] else result]
    between = t.parts[0].sum() + 1
    torch.ops.torchcomms.torchcomm_wait_tensors_(waiting)
    return between


def in_place_is_as_by_methods(rank: int, size: int) -> None:
    assert {name for name, _ in calls(Tensors(rank, size), rank, size)} == {
        name for name in OPERANDS if name != "batch_op_issue" and not name.startswith("window_")
    }
    with communicator(rank, size) as comm:
        expected = Tensors(rank, size)
        by_methods(comm, expected, rank, size)
        for run in (in_place, compiled(in_place)):
            for async_op in (False, True):
                got = Tensors(rank, size)
                run(comm, got, rank, size, async_op)
                for i, (tensor, right) in enumerate(zip(got.all(), expected.all(), strict=True)):
                    assert_same(tensor, right, f"tensor {i}, async_op={async_op}")
        assert not _torchcomms_operators._pending_in_graphs


def functional(comm: TorchComm, x: torch.Tensor, part: torch.Tensor, async_op: bool) -> list[torch.Tensor]:
    whole = part.new_empty(comm.get_size() * part.shape[0])
    results = [
        torch.ops.torchcomms.torchcomm_all_reduce(comm, x, SUM, async_op, None, None),
        torch.ops.torchcomms.torchcomm_all_gather_single(comm, whole, part, async_op, None, None),
        torch.ops.torchcomms.torchcomm_reduce_scatter_single(comm, part, whole.fill_(2), SUM, async_op, None, None),
        *torch.ops.torchcomms.torchcomm_all_gather(comm, [part, part], part, async_op, None, None),
    ]
    return torch.ops.torchcomms.torchcomm_wait_tensors(results) if async_op else results


def functional_leaves_its_inputs(rank: int, size: int) -> None:
    part = data(rank, 4)
    parts = [data(r, 4) for r in range(size)]
    expected = [torch.stack(parts).sum(0), torch.cat(parts), torch.full((4,), 2.0 * size), *parts]
    with communicator(rank, size) as comm, quick_inductor():
        for run in (functional, compiled(functional), compiled(functional, "inductor")):
            for async_op in (False, True):
                x = part.clone()
                for got, right in zip(run(comm, x, x, async_op), expected, strict=True):
                    assert_same(got, right, "a result")
                assert_same(x, part, "the input")


def gradients_flow(rank: int, size: int) -> None:
    def alone(comm: TorchComm, x: torch.Tensor, async_op: bool) -> torch.Tensor:
        y = torch.ops.torchcomms.torchcomm_all_reduce(comm, x * 2, SUM, async_op, None, None)
        if async_op:
            y = torch.ops.torchcomms.torchcomm_wait_tensors([y])[0]
        return (y * (rank + 1)).sum()

    def inside(comm: TorchComm, x: torch.Tensor, async_op: bool) -> torch.Tensor:
        y = x * 2
        torch.ops.torchcomms.torchcomm_all_reduce_(comm, y, SUM, async_op, None, None)
        if async_op:
            torch.ops.torchcomms.torchcomm_wait_tensors_([y])
        return (y * (rank + 1)).sum()

    right = torch.full((4,), 2.0 * sum(range(1, size + 1)))
    with communicator(rank, size) as comm:
        for program in (alone, inside):
            for run in (program, compiled(program)):
                for async_op in (False, True):
                    x = data(rank, 4).requires_grad_()
                    run(comm, x, async_op).backward()
                    assert x.grad is not None
                    assert_same(x.grad, right, f"{program.__name__}, async_op={async_op}")
        # A wait for what has no operation is the identity.
        x = data(rank, 4).requires_grad_()
        ops.torchcomm_wait_tensors([x * 3])[0].sum().backward()
        assert x.grad is not None and x.grad.eq(3).all()


def windows_and_batches_work(rank: int, size: int) -> None:
    right, left = (rank + 1) % size, (rank - 1) % size

    def program(comm: TorchComm, window: Any, x: torch.Tensor, async_op: bool) -> tuple[torch.Tensor, torch.Tensor]:
        ops = torch.ops.torchcomms
        waiting = [
            ops.torchcommwindow_put(window, x, right, 1, async_op),
            ops.torchcommwindow_signal(window, right, async_op),
            ops.torchcommwindow_wait_signal(window, left, async_op),
        ]
        if async_op:
            ops.torchcomm_wait_tensors_(waiting)
        got = torch.empty_like(x)
        batch = comm.batch_op_create()
        ops.batchsendrecv_send(batch, x, right)
        ops.batchsendrecv_recv_(batch, got, left)
        batch.issue(False)
        return ops.torchcommwindow_map_remote_tensor(window, rank) + 0, got

    with communicator(rank, size) as comm:
        for run in (program, compiled(program)):
            for async_op in (False, True):
                window = comm.new_window(torch.zeros(5))
                contents, got = run(comm, window, data(rank, 4), async_op)
                assert_same(contents, torch.cat([torch.zeros(1), data(left, 4)]), "the window")
                assert_same(got, data(left, 4), "the message")
                comm.barrier()
        # What requires gradients goes another way.
        window = comm.new_window(torch.zeros(5))
        ops.torchcommwindow_put(window, data(rank, 4).requires_grad_(), right, 1, False)
        window.fence()
        assert_same(window.map_remote_tensor(rank), torch.cat([torch.zeros(1), data(left, 4)]), "without a graph")


def tensors_without_data_send_nothing(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        if rank > 0:
            return  # no other rank takes part
        x = torch.empty(4, device="meta")
        assert ops.torchcomm_all_reduce_(comm, x, SUM, False, None, None) is x
        gathered = ops.torchcomm_all_gather_single(comm, torch.empty(4 * size, device="meta"), x, True, None, None)
        (waited,) = ops.torchcomm_wait_tensors([gathered])
        assert waited.shape == (4 * size,) and waited.is_meta
        with FakeTensorMode():
            y = torch.ones(3)
            assert ops.torchcomm_all_reduce(comm, y, SUM, False, None, None).shape == (3,)
            window = comm.new_window()
            window._meta = (y.dtype, y.shape, y.device)
            assert ops.torchcommwindow_put(window, y, 0, 0, False) is None


def wrong_calls_name_the_operator(rank: int, size: int) -> None:
    x = torch.ones(2)
    with communicator(rank, size) as comm:
        for args, kwargs, text in (
            ((comm,), {}, r"torchcomm_all_reduce_: argument `tensor` is missing"),
            ((comm, x, SUM, False, None, None, 1), {}, r"expected at most 5 arguments after `self`, got 6"),
            ((comm, x), {"tensor": x}, r"argument `tensor` is unknown, or given twice"),
            ((comm, [x]), {}, r"argument `tensor`: expected a tensor, got list"),
            ((x, x), {}, r"torchcomm_all_reduce_: argument `self`: expected TorchComm, got Tensor"),
        ):
            with pytest.raises(TypeError, match=text):
                ops.torchcomm_all_reduce_(*args, **kwargs)
        ops.torchcomm_all_reduce_(comm, x, op=SUM, timeout=20)
        assert_same(x, torch.full((2,), float(size)), "after wrong calls")
        # What nobody waits for is not kept once it has ended.
        for _ in range(20):
            ops.torchcomm_all_reduce_(comm, torch.ones(2), SUM, True, None, None)
        comm.barrier()
        for _, work in _torchcomms_operators._pending:
            work.wait()
        ops.torchcomm_all_reduce_(comm, torch.ones(2), SUM, True, None, None)
        assert len(_torchcomms_operators._pending) == 1


class Counted(TorchWork):
    """A work that counts the waits for it, and may fail."""

    def __init__(self, error: str | None = None) -> None:
        self.waits = 0
        self._error = error

    def wait(self) -> None:
        self.waits += 1
        if self._error is not None:
            raise RuntimeError(self._error)


def test_a_wait_is_for_all_operations_of_a_tensor() -> None:
    tensor, other = torch.ones(1), torch.ones(1)
    works = [Counted(), Counted("the second failed"), Counted()]
    for work in works:
        _torchcomms_operators._remember([tensor], work)
    apart = Counted()
    _torchcomms_operators._remember([other], apart)
    with pytest.raises(RuntimeError, match="the second failed"):
        ops.torchcomm_wait_tensors_([tensor])
    assert [work.waits for work in works] == [1, 1, 0]
    assert ops.torchcomm_wait_tensors_([tensor])[0] is tensor
    assert [work.waits for work in works] == [1, 1, 1] and apart.waits == 0
    ops.torchcomm_wait_tensors_([other])
    assert apart.waits == 1 and not _torchcomms_operators._pending


CHECKS = [
    in_place_is_as_by_methods,
    functional_leaves_its_inputs,
    gradients_flow,
    windows_and_batches_work,
    tensors_without_data_send_nothing,
    wrong_calls_name_the_operator,
]


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_operators(world: World, check: Callable[..., None]) -> None:
    world.run(check, join=False)


BESIDE = """
import torch

def theirs():
    # As torchcomms does, with a class of its own in place of a communicator.
    library = torch.library.Library("torchcomms", "DEF")
    for name, result in (("torchcomm_all_reduce_", "Tensor(a!)"), ("torchcomm_wait_tensors_", "Tensor(a!)[]")):
        argument = "Tensor(a!)[] inputs" if "wait" in name else "str self, Tensor(a!) tensor, int op"
        library.define(f"{name}({argument}) -> {result}")
    library.impl("torchcomm_all_reduce_", lambda self, tensor, op: tensor.mul_(op), "CompositeExplicitAutograd")
    library.impl("torchcomm_wait_tensors_", lambda inputs: [t.add_(1) for t in inputs], "CompositeExplicitAutograd")
    return library

def ours():
    import ncclx_rs
    return ncclx_rs.new_comm("ncclx", "cpu", "alone")

first, second = (theirs, ours) if ORDER == "theirs first" else (ours, theirs)
kept = first(), second()
comm = kept[0] if ORDER == "ours first" else kept[1]
ops = torch.ops.torchcomms
x = torch.ones(2)
ops.torchcomm_all_reduce_("a communicator of theirs", x, 3)
assert x.tolist() == [3, 3], x
ops.torchcomm_all_reduce_(comm, x, torch.distributed.ReduceOp.SUM, True, None, None)
ops.torchcomm_wait_tensors_([x])
assert x.tolist() == [4, 4], x
assert isinstance(ops.torchcomm_all_reduce_.default, torch._ops.OpOverload)
assert ops.torchcomm_all_reduce_.overloads() == ["default"]
assert not hasattr(ops.torchcomm_barrier, "overloads") and ops.torchcomm_barrier.default(comm) is None
comm.finalize()
"""


@pytest.mark.parametrize("order", ["theirs first", "ours first"])
def test_torchcomms_own_operators_stay_beside_ours(order: str) -> None:
    program = f"ORDER = {order!r}\n{BESIDE}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_nothing_is_registered_under_torchcomms_name() -> None:
    assert ncclx_rs.TorchComm  # loads the object API
    found = [schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("torchcomms::")]
    assert not found
    assert "torchcomm_all_reduce_" in repr(ops.torchcomm_all_reduce_)
