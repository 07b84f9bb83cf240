"""Communicators as c10d backends: what their hooks are told of calls that come from ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ncclx_rs import _backend as plugin
from ncclx_rs import _hooks
from ncclx_rs._types import OpName, RedOpType, ReduceOp

if TYPE_CHECKING:
    from ncclx_rs._comm import TorchComm

Told = list[tuple[OpName, Any]]
Lists = Sequence[Sequence[torch.Tensor]]


class _Kind(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, plugin.native().BackendWrapper)


class _BackendWrapper(metaclass=_Kind):
    """The c10d backend under a communicator, for a ``torch.distributed.ProcessGroup``.

    Its operations call the communicator's hooks; ``get_comm()`` is the communicator. What is made is an object of the
    native module, which this name does not load: ``torch.distributed`` imports it when it is imported itself.

    Args:
        comm: a communicator over a c10d backend.

    Raises:
        RuntimeError: the communicator's backend is not one of c10d's.
    """

    def __new__(cls, comm: TorchComm) -> Any:
        from ncclx_rs import _pytorch_recorder

        if comm.get_backend() == "ncclx":
            _pytorch_recorder.takes_pytorchs(comm.get_options().hints)
        return plugin.native().BackendWrapper(comm)


def told(comm: TorchComm, name: str, args: Sequence[Any]) -> Told:
    """What pre-hooks are told of a call: the operations it stands for, several if it is a coalesced one.

    Args:
        comm: the communicator.
        name: the call's name in c10d.
        args: its arguments there.
    """
    return _TOLD[name](comm, *args)


def _broadcast(comm: TorchComm, tensors: Sequence[torch.Tensor], opts: Any) -> Told:
    return [(OpName.broadcast, _hooks.BroadcastPreHookArgs(each, opts.rootRank, opts.asyncOp)) for each in tensors]


def _allreduce(comm: TorchComm, tensors: Sequence[torch.Tensor], opts: Any) -> Told:
    op = _reduce_op(opts)
    return [(OpName.all_reduce, _hooks.AllReducePreHookArgs(each, op, opts.asyncOp)) for each in tensors]


def _reduce(comm: TorchComm, tensors: Sequence[torch.Tensor], opts: Any) -> Told:
    op = _reduce_op(opts)
    return [(OpName.reduce, _hooks.ReducePreHookArgs(each, opts.rootRank, op, opts.asyncOp)) for each in tensors]


def _allgather(comm: TorchComm, outputs: Lists, inputs: Sequence[torch.Tensor], opts: Any) -> Told:
    made: Told = []
    for output, each in zip(outputs, inputs, strict=True):
        if all(tensor.numel() == each.numel() for tensor in output):
            made.append((OpName.all_gather, _hooks.AllGatherPreHookArgs(each, list(output), opts.asyncOp)))
        else:
            made.append((OpName.all_gather_v, _hooks.AllGatherVPreHookArgs(each, list(output), opts.asyncOp)))
    return made


def _allgather_coalesced(comm: TorchComm, outputs: Lists, inputs: Sequence[torch.Tensor], opts: Any) -> Told:
    # A list a rank there, a list an operation here.
    return _allgather(comm, [list(output) for output in zip(*outputs, strict=True)], inputs, opts)


def _all_gather_single(
    comm: TorchComm, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any
) -> Told:
    pairs = zip(outputs, inputs, strict=True)
    return [
        (OpName.all_gather_single, _hooks.AllGatherSinglePreHookArgs(input, output, opts.asyncOp))
        for output, input in pairs
    ]


def _reduce_scatter(comm: TorchComm, outputs: Sequence[torch.Tensor], inputs: Lists, opts: Any) -> Told:
    op, made = _reduce_op(opts), Told()
    for output, each in zip(outputs, inputs, strict=True):
        if all(tensor.numel() == output.numel() for tensor in each):
            arguments: Any = _hooks.ReduceScatterPreHookArgs(list(each), output, op, opts.asyncOp)
            made.append((OpName.reduce_scatter, arguments))
        else:
            arguments = _hooks.ReduceScatterVPreHookArgs(list(each), output, op, opts.asyncOp)
            made.append((OpName.reduce_scatter_v, arguments))
    return made


def _reduce_scatter_single(
    comm: TorchComm, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any
) -> Told:
    op, pairs = _reduce_op(opts), zip(outputs, inputs, strict=True)
    return [
        (OpName.reduce_scatter_single, _hooks.ReduceScatterSinglePreHookArgs(input, output, op, opts.asyncOp))
        for output, input in pairs
    ]


def _alltoall_base(
    comm: TorchComm,
    output: torch.Tensor,
    input: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    opts: Any,
) -> Told:
    if not output_splits and not input_splits:
        return [(OpName.all_to_all_single, _hooks.AllToAllSinglePreHookArgs(input, output, opts.asyncOp))]

    def sizes(splits: Sequence[int], tensor: torch.Tensor) -> list[int]:
        return list(splits) or [tensor.size(0) // comm.get_size()] * comm.get_size()

    arguments = _hooks.AllToAllVSinglePreHookArgs(
        input, output, sizes(input_splits, input), sizes(output_splits, output), opts.asyncOp
    )
    return [(OpName.all_to_all_v_single, arguments)]


def _alltoall(comm: TorchComm, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any) -> Told:
    return [(OpName.all_to_all, _hooks.AllToAllPreHookArgs(list(inputs), list(outputs), opts.asyncOp))]


def _barrier(comm: TorchComm, opts: Any) -> Told:
    return [(OpName.barrier, _hooks.BarrierPreHookArgs(opts.asyncOp))]


def _scatter(comm: TorchComm, outputs: Sequence[torch.Tensor], inputs: Lists, opts: Any) -> Told:
    # Only the root has inputs.
    blocks = list(inputs[0]) if inputs else []
    return [(OpName.scatter, _hooks.ScatterPreHookArgs(outputs[0], blocks, opts.rootRank, opts.asyncOp))]


def _gather(comm: TorchComm, outputs: Lists, inputs: Sequence[torch.Tensor], opts: Any) -> Told:
    blocks = list(outputs[0]) if outputs else []
    return [(OpName.gather, _hooks.GatherPreHookArgs(inputs[0], blocks, opts.rootRank, opts.asyncOp))]


def _gather_single(comm: TorchComm, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Told:
    return [(OpName.gather_single, _hooks.GatherSinglePreHookArgs(input, output, opts.rootRank, opts.asyncOp))]


def _send(comm: TorchComm, tensors: Sequence[torch.Tensor], peer: int) -> Told:
    return [(OpName.send, _hooks.SendPreHookArgs(each, peer, True)) for each in tensors]


def _recv(comm: TorchComm, tensors: Sequence[torch.Tensor], peer: int) -> Told:
    return [(OpName.recv, _hooks.RecvPreHookArgs(each, peer, True)) for each in tensors]


def _new_window(comm: TorchComm) -> Told:
    return [(OpName.new_window, _hooks.NewWindowPreHookArgs())]


def _reduce_op(opts: Any) -> ReduceOp:
    # How it pickles is the one public way to its factor.
    kind, factor = opts.reduceOp.__getstate__()
    return ReduceOp(RedOpType[kind.name], factor)


_TOLD: dict[str, Callable[..., Told]] = {
    "all_gather_single": _all_gather_single,
    "allgather": _allgather,
    "allgather_coalesced": _allgather_coalesced,
    "allreduce": _allreduce,
    "alltoall": _alltoall,
    "alltoall_base": _alltoall_base,
    "barrier": _barrier,
    "broadcast": _broadcast,
    "gather": _gather,
    "gather_single": _gather_single,
    "new_window": _new_window,
    "recv": _recv,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "scatter": _scatter,
    "send": _send,
}
