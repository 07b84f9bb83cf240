"""What a communicator's hooks get for calls that come from ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ncclx_rs import _hooks
from ncclx_rs._types import OpName, RedOpType, ReduceOp

HookArgs = list[tuple[OpName, Any]]
Tensors = Sequence[torch.Tensor]
TensorLists = Sequence[Sequence[torch.Tensor]]


def c10d_hook_args(name: str, args: Sequence[Any]) -> HookArgs:
    """The operations that a c10d call stands for, each with the arguments of its pre-hook.

    A coalesced call stands for several operations.

    Args:
        name: the call's name in c10d.
        args: its arguments there.
    """
    return _HOOK_ARGS[name](*args)


def _broadcast(tensors: Tensors, opts: Any) -> HookArgs:
    return [(OpName.broadcast, _hooks.BroadcastPreHookArgs(each, opts.rootRank, opts.asyncOp)) for each in tensors]


def _allreduce(tensors: Tensors, opts: Any) -> HookArgs:
    op = _reduce_op(opts)
    return [(OpName.all_reduce, _hooks.AllReducePreHookArgs(each, op, opts.asyncOp)) for each in tensors]


def _reduce(tensors: Tensors, opts: Any) -> HookArgs:
    op = _reduce_op(opts)
    return [(OpName.reduce, _hooks.ReducePreHookArgs(each, opts.rootRank, op, opts.asyncOp)) for each in tensors]


def _allgather(outputs: TensorLists, inputs: Tensors, opts: Any) -> HookArgs:
    hook_args: HookArgs = []
    for output, each in zip(outputs, inputs, strict=True):
        if all(tensor.numel() == each.numel() for tensor in output):
            hook_args.append((OpName.all_gather, _hooks.AllGatherPreHookArgs(each, list(output), opts.asyncOp)))
        else:
            hook_args.append((OpName.all_gather_v, _hooks.AllGatherVPreHookArgs(each, list(output), opts.asyncOp)))
    return hook_args


def _allgather_coalesced(outputs: TensorLists, inputs: Tensors, opts: Any) -> HookArgs:
    # c10d has a list for each rank, hooks have one for each operation.
    return _allgather([list(output) for output in zip(*outputs, strict=True)], inputs, opts)


def _all_gather_single(outputs: Tensors, inputs: Tensors, opts: Any) -> HookArgs:
    pairs = zip(outputs, inputs, strict=True)
    return [
        (OpName.all_gather_single, _hooks.AllGatherSinglePreHookArgs(input, output, opts.asyncOp))
        for output, input in pairs
    ]


def _reduce_scatter(outputs: Tensors, inputs: TensorLists, opts: Any) -> HookArgs:
    op, hook_args = _reduce_op(opts), HookArgs()
    for output, each in zip(outputs, inputs, strict=True):
        if all(tensor.numel() == output.numel() for tensor in each):
            arguments: Any = _hooks.ReduceScatterPreHookArgs(list(each), output, op, opts.asyncOp)
            hook_args.append((OpName.reduce_scatter, arguments))
        else:
            arguments = _hooks.ReduceScatterVPreHookArgs(list(each), output, op, opts.asyncOp)
            hook_args.append((OpName.reduce_scatter_v, arguments))
    return hook_args


def _reduce_scatter_single(outputs: Tensors, inputs: Tensors, opts: Any) -> HookArgs:
    op, pairs = _reduce_op(opts), zip(outputs, inputs, strict=True)
    return [
        (OpName.reduce_scatter_single, _hooks.ReduceScatterSinglePreHookArgs(input, output, op, opts.asyncOp))
        for output, input in pairs
    ]


def _alltoall_base(
    output: torch.Tensor,
    input: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    opts: Any,
) -> HookArgs:
    if not output_splits and not input_splits:
        return [(OpName.all_to_all_single, _hooks.AllToAllSinglePreHookArgs(input, output, opts.asyncOp))]

    # One of the two has an entry a rank.
    ranks = max(len(output_splits), len(input_splits))

    def sizes(splits: Sequence[int], tensor: torch.Tensor) -> list[int]:
        return list(splits) or [tensor.size(0) // ranks] * ranks

    arguments = _hooks.AllToAllVSinglePreHookArgs(
        input, output, sizes(input_splits, input), sizes(output_splits, output), opts.asyncOp
    )
    return [(OpName.all_to_all_v_single, arguments)]


def _alltoall(outputs: Tensors, inputs: Tensors, opts: Any) -> HookArgs:
    return [(OpName.all_to_all, _hooks.AllToAllPreHookArgs(list(inputs), list(outputs), opts.asyncOp))]


def _barrier(opts: Any) -> HookArgs:
    return [(OpName.barrier, _hooks.BarrierPreHookArgs(opts.asyncOp))]


def _scatter(outputs: Tensors, inputs: TensorLists, opts: Any) -> HookArgs:
    # Only the root has inputs.
    blocks = list(inputs[0]) if inputs else []
    return [(OpName.scatter, _hooks.ScatterPreHookArgs(outputs[0], blocks, opts.rootRank, opts.asyncOp))]


def _gather(outputs: TensorLists, inputs: Tensors, opts: Any) -> HookArgs:
    blocks = list(outputs[0]) if outputs else []
    return [(OpName.gather, _hooks.GatherPreHookArgs(inputs[0], blocks, opts.rootRank, opts.asyncOp))]


def _gather_single(output: torch.Tensor, input: torch.Tensor, opts: Any) -> HookArgs:
    return [(OpName.gather_single, _hooks.GatherSinglePreHookArgs(input, output, opts.rootRank, opts.asyncOp))]


def _send(tensors: Tensors, peer: int) -> HookArgs:
    return [(OpName.send, _hooks.SendPreHookArgs(each, peer, True)) for each in tensors]


def _recv(tensors: Tensors, peer: int) -> HookArgs:
    return [(OpName.recv, _hooks.RecvPreHookArgs(each, peer, True)) for each in tensors]


def _new_window() -> HookArgs:
    return [(OpName.new_window, _hooks.NewWindowPreHookArgs())]


def _reduce_op(opts: Any) -> ReduceOp:
    # How it pickles is the one public way to its factor.
    kind, factor = opts.reduceOp.__getstate__()
    return ReduceOp(RedOpType[kind.name], factor)


_HOOK_ARGS: dict[str, Callable[..., HookArgs]] = {
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
