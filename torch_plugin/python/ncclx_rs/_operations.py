"""The operations of a communicator."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from ncclx_rs import _hooks
from ncclx_rs._backend_class import TorchCommBackend
from ncclx_rs._backends import accepts_options
from ncclx_rs._batch import BatchSendRecv
from ncclx_rs._mistakes import explained, warn_of_hints
from ncclx_rs._persistent import AllGatherPHandle
from ncclx_rs._tracing import not_in_graphs
from ncclx_rs._types import (
    AllGatherOptions,
    AllGatherPExecOptions,
    AllGatherPInitOptions,
    AllGatherSingleOptions,
    AllReduceOptions,
    AllToAllOptions,
    AllToAllSingleOptions,
    AllToAllvSingleOptions,
    AnyReduceOp,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    OpName,
    OpOptions,
    P2POp,
    P2POpType,
    RecvOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ReduceScatterSingleOptions,
    ScatterOptions,
    SendOptions,
    as_reduce_op,
)
from ncclx_rs._work import TorchWork, together

Hints = Mapping[str, str] | None
Tensors = Sequence[torch.Tensor]


class Operations:
    """The operations of `TorchComm`, and the part of its state that they use.

    The examples are what both of two ranks type, with `comm` the communicator of the two.
    """

    _impl: TorchCommBackend
    _name: str
    _device: torch.device
    _rank: int
    _size: int
    _state: str
    _handle: str
    _pre_hooks: _hooks.HookList[OpName, int, Any]
    _post_hooks: _hooks.HookList[int, Any]

    # ---- point to point ----

    def send(
        self,
        tensor: torch.Tensor,
        dst: int,
        async_op: bool = False,
        hints: Hints = None,
        timeout: timedelta | float | None = None,
        options: SendOptions | None = None,
    ) -> TorchWork:
        """Sends ``tensor``, of any shape, to rank ``dst``. Messages between two ranks arrive in order.

        Raises:
            RuntimeError: there is no such rank, or the receiver did not receive in time.

        Examples:
            >>> if comm.rank == 0:
            ...     work = comm.send(torch.arange(3), dst=1)
            ... else:
            ...     tensor = torch.empty(3, dtype=torch.int64)
            ...     work = comm.recv(tensor, src=0)
            ...     assert tensor.tolist() == [0, 1, 2]
        """
        self._check_rank("send", "dst", dst)
        if self._ended("send", None, tensor, None, dst, async_op, hints, timeout, options):
            return TorchWork()
        hook_args = _hooks.SendPreHookArgs(tensor, dst, async_op)
        opts = SendOptions.of("send", timeout, hints, options)
        return self._issue(OpName.send, hook_args, opts, tensor, dst, async_op)

    def recv(
        self,
        tensor: torch.Tensor,
        src: int,
        async_op: bool = False,
        hints: Hints = None,
        timeout: timedelta | float | None = None,
        options: RecvOptions | None = None,
    ) -> TorchWork:
        """Receives the next message from rank ``src`` into ``tensor``, which has as many bytes; the shapes may differ.

        Raises:
            RuntimeError: there is no such rank, no message came in time, or it has another size.

        Examples:
            >>> sent, received = torch.full((2,), comm.rank), torch.empty(2, dtype=torch.int64)
            >>> work = comm.send(sent, dst=1 - comm.rank, async_op=True)
            >>> done = comm.recv(received, src=1 - comm.rank, timeout=30)
            >>> assert received.tolist() == [1 - comm.rank] * 2
            >>> work.wait()
        """
        self._check_rank("recv", "src", src)
        if self._ended("recv", tensor, None, None, src, async_op, hints, timeout, options):
            return TorchWork()
        hook_args = _hooks.RecvPreHookArgs(tensor, src, async_op)
        opts = RecvOptions.of("recv", timeout, hints, options)
        return self._issue(OpName.recv, hook_args, opts, tensor, src, async_op)

    def batch_op_create(self) -> BatchSendRecv:
        """An empty batch of sends and receives.

        Examples:
            >>> batch = comm.batch_op_create()
            >>> received = torch.empty(1)
            >>> batch.send(torch.tensor([comm.rank + 1.0]), dst=1 - comm.rank)
            >>> batch.recv(received, src=1 - comm.rank)
            >>> work = batch.issue()
            >>> received.item() + comm.rank
            2.0
        """
        return BatchSendRecv(self)

    def _issue_batch(self, ops: Sequence[P2POp], async_op: bool, options: OpOptions) -> TorchWork:
        if torch.compiler.is_compiling():
            from ncclx_rs import _graph

            is_send = [op.type is P2POpType.SEND for op in ops]
            sent = [op.tensor for op in ops if op.type is P2POpType.SEND]
            received = [op.tensor for op in ops if op.type is P2POpType.RECV]
            peers = [op.peer for op in ops]
            return _graph.issue(self._handle, "batch_op_issue", options, sent, received, is_send, peers, async_op)
        self._check_usable("batch")
        names = {P2POpType.SEND: OpName.send, P2POpType.RECV: OpName.recv}
        for op in ops:  # before the first is sent
            self._check_message(names[op.type].name, op.tensor)
        op_id = next(op_ids)
        self._pre_hooks(OpName.batch_op_issue, op_id, _hooks.BatchOpIssuePreHookArgs(len(ops), async_op, list(ops)))
        works: list[TorchWork] = []

        def issue() -> None:
            works.extend(self._perform(names[op.type], options, op.tensor, op.peer, True) for op in ops)

        coalesced = getattr(self._impl, "coalesced", None)
        whole = None
        if coalesced is None:
            issue()
        else:
            whole = coalesced(issue)
        work = together(works) if whole is None else TorchWork(whole)
        self._post_hooks(op_id, _hooks.BatchOpIssuePostHookArgs(work))
        if not async_op:
            work.wait()
        return work

    # ---- collectives ----

    def broadcast(
        self,
        tensor: torch.Tensor,
        root: int,
        async_op: bool = False,
        hints: Hints = None,
        timeout: timedelta | float | None = None,
        options: BroadcastOptions | None = None,
    ) -> TorchWork:
        """Copies the root's ``tensor`` into every rank's, which has as many elements of the same dtype.

        Raises:
            RuntimeError: there is no such root, or a rank called something else or nothing.

        Examples:
            >>> tensor = torch.full((2, 2), comm.rank + 1.0)
            >>> work = comm.broadcast(tensor, root=0)
            >>> tensor
            tensor([[1., 1.],
                    [1., 1.]])
        """
        self._check_rank("broadcast", "root", root)
        if self._ended("broadcast", tensor, None, None, root, async_op, hints, timeout, options):
            return TorchWork()
        hook_args = _hooks.BroadcastPreHookArgs(tensor, root, async_op)
        opts = BroadcastOptions.of("broadcast", timeout, hints, options)
        return self._issue(OpName.broadcast, hook_args, opts, tensor, root, async_op)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: AnyReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        hints: Hints = None,
        timeout: timedelta | float | None = None,
        options: AllReduceOptions | None = None,
    ) -> TorchWork:
        """Combines the ranks' tensors, of one shape and dtype, element by element; every rank gets the result in place.

        Raises:
            ValueError: ``op`` cannot combine that dtype.
            RuntimeError: a rank called something else or nothing.

        Examples:
            >>> tensor = torch.full((3,), comm.rank + 1.0)
            >>> work = comm.all_reduce(tensor)
            >>> tensor
            tensor([3., 3., 3.])
            >>> work = comm.all_reduce(tensor, ncclx_rs.ReduceOp.MAX, async_op=True, timeout=30)
            >>> work.wait()
        """
        reduction = as_reduce_op("all_reduce", op)
        if self._ended("all_reduce", tensor, None, reduction, 0, async_op, hints, timeout, options):
            return TorchWork()
        hook_args = _hooks.AllReducePreHookArgs(tensor, reduction, async_op)
        opts = AllReduceOptions.of("all_reduce", timeout, hints, options)
        return self._issue(OpName.all_reduce, hook_args, opts, tensor, reduction, async_op)

    allreduce = all_reduce

    def reduce(
        self,
        tensor: torch.Tensor,
        root: int,
        op: AnyReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        hints: Hints = None,
        timeout: timedelta | float | None = None,
        options: ReduceOptions | None = None,
    ) -> TorchWork:
        """As `all_reduce`, but only the root gets the result. Other ranks' ``tensor`` is undefined afterwards.

        Examples:
            >>> tensor = torch.full((3,), comm.rank + 1)
            >>> work = comm.reduce(tensor, root=0)
            >>> if comm.rank == 0:
            ...     assert tensor.tolist() == [3, 3, 3]
        """
        reduction = as_reduce_op("reduce", op)
        self._check_rank("reduce", "root", root)
        if self._ended("reduce", tensor, None, reduction, root, async_op, hints, timeout, options):
            return TorchWork()
        hook_args = _hooks.ReducePreHookArgs(tensor, root, reduction, async_op)
        opts = ReduceOptions.of("reduce", timeout, hints, options)
        return self._issue(OpName.reduce, hook_args, opts, tensor, root, reduction, async_op)

    def all_gather(
        self,
        tensor_list: Tensors,
        tensor: torch.Tensor,
        async_op: bool = False,
        hints: Hints = None,
        timeout: timedelta | float | None = None,
        options: AllGatherOptions | None = None,
    ) -> TorchWork:
        """Gives every rank each rank's ``tensor``: ``tensor_list[r]`` gets that of rank r. All have one size and dtype.

        Raises:
            ValueError: an element of ``tensor_list`` has another size or dtype than ``tensor``.
            RuntimeError: ``tensor_list`` has not one tensor for each rank, or a rank called something else or nothing.

        Examples:
            >>> parts = [torch.empty(2) for _ in range(comm.size)]
            >>> work = comm.all_gather(parts, torch.full((2,), float(comm.rank)))
            >>> parts
            [tensor([0., 0.]), tensor([1., 1.])]
        """
        self._check_length("all_gather", "tensor_list", tensor_list)
        hook_args = _hooks.AllGatherPreHookArgs(tensor, list(tensor_list), async_op)
        opts = AllGatherOptions.of("all_gather", timeout, hints, options)
        return self._issue(OpName.all_gather, hook_args, opts, tensor_list, tensor, async_op)

    def all_gather_v(
        self,
        tensor_list: Tensors,
        tensor: torch.Tensor,
        async_op: bool = False,
        hints: Hints = None,
        timeout: timedelta | float | None = None,
        options: AllGatherOptions | None = None,
    ) -> TorchWork:
        """As `all_gather`, but the ranks' tensors may differ in size: ``tensor_list[r]`` has the size of rank r's.

        Examples:
            >>> parts = [torch.empty(rank + 1) for rank in range(comm.size)]
            >>> work = comm.all_gather_v(parts, torch.full((comm.rank + 1,), float(comm.rank)))
            >>> parts
            [tensor([0.]), tensor([1., 1.])]
        """
        self._check_length("all_gather_v", "tensor_list", tensor_list)
        hook_args = _hooks.AllGatherVPreHookArgs(tensor, list(tensor_list), async_op)
        opts = AllGatherOptions.of("all_gather_v", timeout, hints, options)
        return self._issue(OpName.all_gather_v, hook_args, opts, tensor_list, tensor, async_op)

    def all_gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        async_op: bool = False,
        hints: Hints = None,
        timeout: timedelta | float | None = None,
        options: AllGatherSingleOptions | None = None,
    ) -> TorchWork:
        """As `all_gather`, into one tensor of ``size`` times the elements of ``input``, in the order of the ranks.

        Examples:
            >>> output = torch.empty(4)
            >>> work = comm.all_gather_single(output, torch.full((2,), float(comm.rank)))
            >>> output
            tensor([0., 0., 1., 1.])
        """
        if self._ended("all_gather_single", output, input, None, 0, async_op, hints, timeout, options):
            return TorchWork()
        hook_args = _hooks.AllGatherSinglePreHookArgs(input, output, async_op)
        opts = AllGatherSingleOptions.of("all_gather_single", timeout, hints, options)
        return self._issue(OpName.all_gather_single, hook_args, opts, output, input, async_op)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input_list: Tensors,
        op: AnyReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        hints: Hints = None,
        timeout: timedelta | float | None = None,
        options: ReduceScatterOptions | None = None,
    ) -> TorchWork:
        """Combines ``input_list[r]`` of all ranks into the ``output`` of rank r. All have one size and dtype.

        Raises:
            ValueError: an input has another size or dtype than ``output``, or ``op`` cannot combine that dtype.
            RuntimeError: ``input_list`` has not one tensor for each rank, or a rank called something else or nothing.

        Examples:
            >>> output = torch.empty(2)
            >>> work = comm.reduce_scatter(output, [torch.ones(2), torch.full((2,), 5.0)])
            >>> assert output.tolist() == ([2.0, 2.0] if comm.rank == 0 else [10.0, 10.0])
        """
        reduction = as_reduce_op("reduce_scatter", op)
        self._check_length("reduce_scatter", "input_list", input_list)
        hook_args = _hooks.ReduceScatterPreHookArgs(list(input_list), output, reduction, async_op)
        opts = ReduceScatterOptions.of("reduce_scatter", timeout, hints, options)
        return self._issue(OpName.reduce_scatter, hook_args, opts, output, input_list, reduction, async_op)

    def reduce_scatter_v(
        self,
        output: torch.Tensor,
        input_list: Tensors,
        op: AnyReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        hints: Hints = None,
        timeout: timedelta | float | None = None,
        options: ReduceScatterOptions | None = None,
    ) -> TorchWork:
        """As `reduce_scatter`, but the parts may differ in size: ``input_list[r]`` has that of rank r's ``output``.

        Examples:
            >>> output = torch.empty(comm.rank + 1)
            >>> work = comm.reduce_scatter_v(output, [torch.ones(1), torch.ones(2)])
            >>> assert output.tolist() == [2.0] * (comm.rank + 1)
        """
        reduction = as_reduce_op("reduce_scatter_v", op)
        self._check_length("reduce_scatter_v", "input_list", input_list)
        hook_args = _hooks.ReduceScatterVPreHookArgs(list(input_list), output, reduction, async_op)
        opts = ReduceScatterOptions.of("reduce_scatter_v", timeout, hints, options)
        return self._issue(OpName.reduce_scatter_v, hook_args, opts, output, input_list, reduction, async_op)

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: AnyReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        hints: Hints = None,
        timeout: timedelta | float | None = None,
        options: ReduceScatterSingleOptions | None = None,
    ) -> TorchWork:
        """As `reduce_scatter`, from one tensor of ``size`` times the elements of ``output``.

        Examples:
            >>> output = torch.empty(2)
            >>> work = comm.reduce_scatter_single(output, torch.arange(4.0))
            >>> assert output.tolist() == ([0.0, 2.0] if comm.rank == 0 else [4.0, 6.0])
        """
        reduction = as_reduce_op("reduce_scatter_single", op)
        if self._ended("reduce_scatter_single", output, input, reduction, 0, async_op, hints, timeout, options):
            return TorchWork()
        hook_args = _hooks.ReduceScatterSinglePreHookArgs(input, output, reduction, async_op)
        opts = ReduceScatterSingleOptions.of("reduce_scatter_single", timeout, hints, options)
        return self._issue(OpName.reduce_scatter_single, hook_args, opts, output, input, reduction, async_op)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        async_op: bool = False,
        hints: Hints = None,
        timeout: timedelta | float | None = None,
        options: AllToAllSingleOptions | None = None,
    ) -> TorchWork:
        """Sends the r-th of ``size`` equal blocks of ``input`` to rank r; block r of ``output`` comes from rank r.

        Blocks are parts of the first dimension; both tensors have as many elements.

        Raises:
            ValueError: the ranks cannot share the tensors equally.
            RuntimeError: a rank called something else or nothing.

        Examples:
            >>> output = torch.empty(2)
            >>> work = comm.all_to_all_single(output, torch.tensor([0.0, 1.0]) + 10 * comm.rank)
            >>> assert output.tolist() == [comm.rank, comm.rank + 10]
        """
        if self._ended("all_to_all_single", output, input, None, 0, async_op, hints, timeout, options):
            return TorchWork()
        hook_args = _hooks.AllToAllSinglePreHookArgs(input, output, async_op)
        opts = AllToAllSingleOptions.of("all_to_all_single", timeout, hints, options)
        return self._issue(OpName.all_to_all_single, hook_args, opts, output, input, async_op)

    def all_to_all_v_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        async_op: bool = False,
        hints: Hints = None,
        timeout: timedelta | float | None = None,
        options: AllToAllvSingleOptions | None = None,
    ) -> TorchWork:
        """As `all_to_all_single`, with one block for each rank, of the given number of rows of the first dimension.

        The block that rank a sends to rank b has as many elements as the block that b expects from a.

        Raises:
            ValueError: there is not one size for each rank, or the sizes do not add up to the tensor's rows.
            RuntimeError: two ranks disagree on the size of a message, or a rank called something else or nothing.

        Examples:
            >>> counts = [1, 2]  # rows for rank 0 and for rank 1
            >>> output = torch.empty(2 * counts[comm.rank])
            >>> input = torch.full((3,), float(comm.rank))
            >>> work = comm.all_to_all_v_single(output, input, [counts[comm.rank]] * 2, counts)
            >>> assert output.tolist() == [0.0] * counts[comm.rank] + [1.0] * counts[comm.rank]
        """
        outputs, inputs = list(output_split_sizes), list(input_split_sizes)
        hook_args = _hooks.AllToAllVSinglePreHookArgs(input, output, inputs, outputs, async_op)
        opts = AllToAllvSingleOptions.of("all_to_all_v_single", timeout, hints, options)
        return self._issue(OpName.all_to_all_v_single, hook_args, opts, output, input, outputs, inputs, async_op)

    def all_to_all(
        self,
        output_tensor_list: Tensors,
        input_tensor_list: Tensors,
        async_op: bool = False,
        hints: Hints = None,
        timeout: timedelta | float | None = None,
        options: AllToAllOptions | None = None,
    ) -> TorchWork:
        """Sends ``input_tensor_list[r]`` to rank r; ``output_tensor_list[r]`` comes from rank r. The sizes may differ.

        Raises:
            ValueError: the tensors differ in dtype, or what this rank sends to itself has another size than what it
                expects.
            RuntimeError: a list has not one tensor for each rank, two ranks disagree on the size of a message, or a
                rank called something else or nothing.

        Examples:
            >>> outputs = [torch.empty(3), torch.empty(3)]
            >>> inputs = [torch.full((3,), 10.0 * comm.rank + to) for to in range(comm.size)]
            >>> work = comm.all_to_all(outputs, inputs)
            >>> assert [output[0].item() for output in outputs] == [comm.rank, comm.rank + 10]
        """
        self._check_length("all_to_all", "output_tensor_list", output_tensor_list)
        self._check_length("all_to_all", "input_tensor_list", input_tensor_list)
        hook_args = _hooks.AllToAllPreHookArgs(list(input_tensor_list), list(output_tensor_list), async_op)
        opts = AllToAllOptions.of("all_to_all", timeout, hints, options)
        return self._issue(OpName.all_to_all, hook_args, opts, output_tensor_list, input_tensor_list, async_op)

    def barrier(
        self,
        async_op: bool = False,
        hints: Hints = None,
        timeout: timedelta | float | None = None,
        options: BarrierOptions | None = None,
    ) -> TorchWork:
        """Completes once every rank has called it.

        Raises:
            RuntimeError: a rank called something else or nothing.

        Examples:
            >>> comm.barrier().is_completed()
            True
        """
        if self._ended("barrier", None, None, None, 0, async_op, hints, timeout, options):
            return TorchWork()
        opts = BarrierOptions.of("barrier", timeout, hints, options)
        return self._issue(OpName.barrier, _hooks.BarrierPreHookArgs(async_op), opts, async_op)

    def scatter(
        self,
        output_tensor: torch.Tensor,
        input_tensor_list: Tensors,
        root: int,
        async_op: bool = False,
        hints: Hints = None,
        timeout: timedelta | float | None = None,
        options: ScatterOptions | None = None,
    ) -> TorchWork:
        """Gives rank r the root's ``input_tensor_list[r]``, of ``output_tensor``'s size. Others pass an empty list.

        Raises:
            ValueError: a tensor of the root's list has another size or dtype than ``output_tensor``.
            RuntimeError: there is no such root, its list has not one tensor for each rank, or a rank did not call it.

        Examples:
            >>> output = torch.empty(2)
            >>> parts = [torch.zeros(2), torch.ones(2)] if comm.rank == 0 else []
            >>> work = comm.scatter(output, parts, root=0)
            >>> assert output.tolist() == [comm.rank] * 2
        """
        self._check_rank("scatter", "root", root)
        if self._rank == root:
            self._check_length("scatter", "input_tensor_list", input_tensor_list)
        hook_args = _hooks.ScatterPreHookArgs(output_tensor, list(input_tensor_list), root, async_op)
        opts = ScatterOptions.of("scatter", timeout, hints, options)
        return self._issue(OpName.scatter, hook_args, opts, output_tensor, input_tensor_list, root, async_op)

    def gather(
        self,
        output_tensor_list: Tensors,
        input_tensor: torch.Tensor,
        root: int,
        async_op: bool = False,
        hints: Hints = None,
        timeout: timedelta | float | None = None,
        options: GatherOptions | None = None,
    ) -> TorchWork:
        """Gives the root each rank's ``input_tensor`` in ``output_tensor_list[r]``. Others pass an empty list.

        All tensors have one size and dtype.

        Raises:
            ValueError: a tensor of the root's list has another size or dtype than ``input_tensor``.
            RuntimeError: there is no such root, its list has not one tensor for each rank, or a rank did not call it.

        Examples:
            >>> parts = [torch.empty(2), torch.empty(2)] if comm.rank == 0 else []
            >>> work = comm.gather(parts, torch.full((2,), comm.rank + 1.0), root=0)
            >>> assert [part.tolist() for part in parts] == ([[1.0, 1.0], [2.0, 2.0]] if comm.rank == 0 else [])
        """
        self._check_rank("gather", "root", root)
        if self._rank == root:
            self._check_length("gather", "output_tensor_list", output_tensor_list)
        hook_args = _hooks.GatherPreHookArgs(input_tensor, list(output_tensor_list), root, async_op)
        opts = GatherOptions.of("gather", timeout, hints, options)
        return self._issue(OpName.gather, hook_args, opts, output_tensor_list, input_tensor, root, async_op)

    def gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        root: int,
        async_op: bool = False,
        hints: Hints = None,
        timeout: timedelta | float | None = None,
        options: GatherOptions | None = None,
    ) -> TorchWork:
        """As `gather`, into one tensor, whose first dimension is ``size`` times that of ``input``.

        Other ranks' ``output`` is left unchanged.

        Examples:
            >>> output = torch.zeros(4)
            >>> work = comm.gather_single(output, torch.full((2,), comm.rank + 1.0), root=0)
            >>> assert output.tolist() == ([1.0, 1.0, 2.0, 2.0] if comm.rank == 0 else [0.0] * 4)
        """
        self._check_rank("gather_single", "root", root)
        hook_args = _hooks.GatherSinglePreHookArgs(input, output, root, async_op)
        opts = GatherOptions.of("gather_single", timeout, hints, options)
        return self._issue(OpName.gather_single, hook_args, opts, output, input, root, async_op)

    # ---- persistent all_gather ----

    def all_gather_p_init(
        self,
        output: torch.Tensor,
        hints: Hints = None,
        timeout: timedelta | float | None = None,
        options: AllGatherPInitOptions | None = None,
    ) -> AllGatherPHandle:
        """Prepares an all_gather that will run repeatedly into the same ``output``. Called on all ranks.

        The ranks tell each other where their outputs are, once. If all are on one host, in memory of
        `TorchComm.get_mem_allocator`, each rank writes its input straight to the outputs of the others. The output
        belongs to the handle until `all_gather_p_free`.

        Args:
            output: a tensor of as many elements on each rank, which the ranks share equally. On a CUDA device it is
                memory that other ranks can map, as for windows.
            hints: settings by name.
            timeout: not used: to prepare takes the communicator's at most.
            options: the same in one object.

        Returns:
            What `all_gather_p_exec` and `all_gather_p_free` take.

        Raises:
            RuntimeError: ``output`` is not contiguous, its elements cannot be shared equally among the ranks, it cannot
                be mapped on a CUDA device, or a rank did not call it.

        Examples:
            >>> output = torch.empty(4)
            >>> handle = comm.all_gather_p_init(output)
            >>> for step in range(3):
            ...     work = comm.all_gather_p_exec(handle, torch.full((2,), float(comm.rank + step)))
            >>> output
            tensor([2., 2., 3., 3.])
            >>> comm.all_gather_p_free(handle)
        """
        opts = AllGatherPInitOptions.of("all_gather_p_init", timeout, hints, options)
        self._check_usable("all_gather_p_init")
        self._check_tensor("all_gather_p_init", output)
        warn_of_hints("all_gather_p_init", opts.hints)
        if output.numel() % self._size:
            raise RuntimeError(f"all_gather_p_init: output of {output.numel()} elements is not shared by {self._size}")
        return AllGatherPHandle(output, self._impl)

    def all_gather_p_exec(
        self,
        handle: AllGatherPHandle,
        input: torch.Tensor,
        async_op: bool = False,
        hints: Hints = None,
        timeout: timedelta | float | None = None,
        options: AllGatherPExecOptions | None = None,
    ) -> TorchWork:
        """Gathers every rank's ``input`` into the handle's output, in order of the ranks. Called on all ranks.

        Args:
            handle: what `all_gather_p_init` returned.
            input: a tensor of the output's dtype, with its elements divided by the number of ranks.
            async_op: whether the call returns before the operation is done.
            hints: settings by name.
            timeout: the timeout; the communicator's if not given.
            options: the same in one object.

        Raises:
            ValueError: the input has another size or dtype.
            RuntimeError: the handle was freed, the ranks disagree, an output differs in size, or the operation failed.

        Examples:
            >>> handle = comm.all_gather_p_init(torch.empty(2))
            >>> work = comm.all_gather_p_exec(handle, torch.tensor([comm.rank + 1.0]))
            >>> handle.output
            tensor([1., 2.])
            >>> comm.all_gather_p_free(handle)
        """
        not_in_graphs("all_gather_p_exec", "the graph does not know the output; all_gather_single can be")
        if handle.output is None:
            raise RuntimeError("all_gather_p_exec: the handle was freed")
        opts = AllGatherPExecOptions.of("all_gather_p_exec", timeout, hints, options)
        if handle.window is None:
            return self._perform(OpName.all_gather_single, opts, handle.output, input, async_op)
        self._check_usable("all_gather_p_exec")
        self._check_tensor("all_gather_p_exec", input)
        warn_of_hints("all_gather_p_exec", opts.hints)
        try:
            return TorchWork(handle.gather(input, async_op, opts.limit_ms))
        except (TypeError, ValueError) as error:
            raise explained("all_gather_p_exec", (input,), error) from None

    def all_gather_p_free(self, handle: AllGatherPHandle) -> None:
        """Releases a handle of `all_gather_p_init`, and its output. Called on all ranks.

        Raises:
            RuntimeError: a rank did not call it, or the communicator has failed.

        Examples:
            >>> handle = comm.all_gather_p_init(torch.empty(2))
            >>> comm.all_gather_p_free(handle)
        """
        handle.free()

    # ---- shared by all operations ----

    def _check_usable(self, operation: str) -> None:
        state = "aborted" if self._state == "ready" and self._impl.has_failed() else self._state
        if state != "ready":
            raise RuntimeError(f"{operation}: communicator `{self._name}` is {state}")

    def _check_rank(self, method: str, parameter: str, rank: int) -> None:
        if not hasattr(rank, "__index__"):
            raise TypeError(f"{method}: argument `{parameter}`: expected a rank, got {type(rank).__name__} {rank!r}")
        if not 0 <= rank < self._size:
            raise RuntimeError(f"{method}: {parameter} must be in range [0, {self._size}), but got {rank}")

    def _check_length(self, method: str, parameter: str, tensors: Tensors) -> None:
        if len(tensors) != self._size:
            raise RuntimeError(
                f"{method}: {parameter} must hold {self._size} tensors, one a rank, but holds {len(tensors)}"
            )

    def _check_tensor(self, operation: str, tensor: torch.Tensor) -> None:
        if not tensor.is_contiguous():
            raise RuntimeError(f"{operation}: tensors must be contiguous, got strides {tuple(tensor.stride())}")
        if tensor.device.type != self._device.type:
            raise RuntimeError(
                f"{operation}: tensors must be on {self._device}, as communicator `{self._name}` is, "
                f"got one on {tensor.device}"
            )

    def _check_message(self, operation: str, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{operation}: argument `tensor`: expected a tensor, got {type(tensor).__name__}")
        self._check_tensor(operation, tensor)

    def _ended(
        self,
        name: str,
        target: torch.Tensor | None,
        source: torch.Tensor | None,
        reduction: ReduceOp | None,
        peer: int,
        *how: Any,
    ) -> bool:
        """Runs an operation, if it is a blocking one on plain tensors that nobody looks at, and returns whether it did.

        Args:
            name: the operation.
            target: what it writes, and reads if it has no other tensor.
            source: what it reads.
            reduction: how it combines elements, if it does.
            peer: the other rank, or 0.
            how: the caller's ``async_op``, hints, timeout and options.
        """
        if torch.compiler.is_compiling() or self._pre_hooks or self._post_hooks or self._state != "ready":
            return False
        call = self._impl._direct.get(name)
        return call is not None and call(target, source, 0 if reduction is None else reduction._number, peer, *how)

    def _issue(self, name: OpName, hook_args: Any, options: OpOptions, *args: Any) -> TorchWork:
        """Runs an operation with its hooks, or puts it into the graph that is being traced."""
        if torch.compiler.is_compiling():
            from ncclx_rs import _graph

            return _graph.issue(self._handle, name.name, options, *args)
        if not (self._pre_hooks or self._post_hooks):
            return self._perform(name, options, *args)
        self._check_usable(name.name)
        op_id = next(op_ids)
        self._pre_hooks(name, op_id, hook_args)
        work = self._perform(name, options, *args)
        self._post_hooks(op_id, _hooks.CollectivePostHookArgs(work))
        return work

    def _perform(self, name: OpName, options: OpOptions, *args: Any) -> TorchWork:
        self._check_usable(name.name)
        for arg in args:
            for tensor in [arg] if isinstance(arg, torch.Tensor) else arg if isinstance(arg, list | tuple) else ():
                if isinstance(tensor, torch.Tensor):
                    self._check_tensor(name.name, tensor)
        if options.hints:
            warn_of_hints(name.name, options.hints)
        method = getattr(self._impl, name.name, None)
        if method is None:
            raise RuntimeError(f"{name.name}: the backend {self._impl.get_backend_name()} does not have it")
        extra = (options,) if accepts_options(getattr(method, "__func__", method)) else ()
        try:
            work = TorchWork(method(*args, *extra))
        except (TypeError, ValueError) as error:
            raise explained(name.name, args, error) from None
        async_op = args[-1]
        if not async_op:
            work.wait()
        return work


# One count for the process, so that the calls of hooks on several communicators have an order.
op_ids = itertools.count()
