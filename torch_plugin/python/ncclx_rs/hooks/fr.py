"""A flight recorder: it keeps the last operations of communicators for the analysis of hangs and failures.

The dumps have the format of PyTorch's own recorder, version 2.10, so PyTorch's analyser reads them:

    python -m torch.distributed.flight_recorder.fr_trace DIRECTORY --prefix PREFIX
    python -m torch.distributed.flight_recorder.fr_trace -j DIRECTORY --prefix PREFIX    # every operation
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from typing import Any

import torch

from ncclx_rs import _trace
from ncclx_rs._comm import TorchComm
from ncclx_rs._once import once
from ncclx_rs._trace import Group
from ncclx_rs._types import OpName, P2POpType
from ncclx_rs._work import TorchWork
from ncclx_rs.hooks._observer import Observer, observe
from ncclx_rs.hooks._ring_buffer import Entry, RingBuffer, shapes, stacked

_DEFAULT_ENTRIES = 2000
# The analyser refuses names of operations that PyTorch does not have.
_NAMES = {OpName.gather_single: "gather"}


class FlightRecorderHook:
    """Records the last operations of its communicators, and of those split from them.

    When an operation times out or a rank is lost, it writes its records to the file that
    ``TORCHCOMM_FR_DUMP_TEMP_FILE`` names, before the communicator is aborted; not if ``TORCH_FR_DUMP_ON_TIMEOUT`` or
    ``TORCH_NCCL_DUMP_ON_TIMEOUT`` is false.

    Example::

        recorder = FlightRecorderHook()
        recorder.register_with_comm(comm)
        ...
        print(recorder.dump_json())
    """

    def __init__(self, max_entries: int | None = None, isolated: bool = False) -> None:
        """Makes a recorder.

        Args:
            max_entries: how many operations are kept; zero turns the recorder off. The default is the value of
                ``TORCHCOMM_FR_BUFFER_SIZE``, ``TORCH_FR_BUFFER_SIZE`` or ``TORCH_NCCL_TRACE_BUFFER_SIZE``, else
                2000.
            isolated: whether the recorder has a ring buffer of its own. The process's other recorders share one, of
                the largest size that any of them asked for.

        Raises:
            ValueError: the size is no number, or negative.
        """
        if max_entries is None:
            max_entries = _default_entries()
        if max_entries < 0:
            raise ValueError(f"FlightRecorderHook: max_entries must not be negative, got {max_entries}")
        self._off = max_entries == 0
        self._ring_buffer = RingBuffer(max_entries) if isolated else _shared_ring_buffer()
        self._ring_buffer.grow(max_entries)
        self._enabled = False

    def register_with_comm(self, comm: TorchComm) -> None:
        """Records the communicator's operations from now on."""
        if not self._off:
            observe(comm, _CommRecorder(self, comm))
            self._enabled = True

    def dump_json(self, include_completed: bool = True) -> str:
        """The records as JSON.

        Args:
            include_completed: whether completed operations are included.
        """
        return json.dumps(self._ring_buffer.dump(include_completed))

    def dump_file(self, rank: int, include_completed: bool = True) -> str:
        """Writes the records to a file, as a pickle, and returns the file's name.

        The name is ``TORCHCOMM_FR_DUMP_TEMP_FILE`` (or ``TORCH_FR_DUMP_TEMP_FILE``, or
        ``TORCH_NCCL_DEBUG_INFO_TEMP_FILE``, or ``~/.cache/torchcomm_fr_trace_``) followed by the rank. If
        ``TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME`` or ``TORCH_FR_DUMP_DYNAMIC_FILE_NAME`` is true, the rank is left out.

        Args:
            rank: this process's rank.
            include_completed: whether completed operations are included.

        Raises:
            OSError: the file cannot be written.
            RuntimeError: no variable names it, and there is no home folder.
        """
        path = _trace.path(rank)
        _trace.write(self._ring_buffer.dump(include_completed), path)
        return str(path)

    def reset(self) -> None:
        """Removes every record."""
        self._ring_buffer.reset()

    def is_enabled(self) -> bool:
        """Whether it is registered with a communicator."""
        return self._enabled

    def size(self) -> int:
        """The number of records. A batch has one for each message."""
        return self._ring_buffer.size()

    __len__ = size


class _CommRecorder(Observer[list[Entry]]):
    """Records one communicator."""

    def __init__(self, hook: FlightRecorderHook, comm: TorchComm) -> None:
        self._hook = hook
        self._ring_buffer = hook._ring_buffer
        self._comm = weakref.proxy(comm)
        self._group = self._new_group()

    def on_call(self, name: OpName, op_id: int, args: Any) -> list[Entry]:
        if self._group.members is not self._comm._members:  # reconfigured: a new group, which counts from zero
            self._ring_buffer.drop_group(self._group)
            self._group = self._new_group()
        if name is OpName.batch_op_issue:
            return [self._message(op.type is P2POpType.SEND, op_id, op.tensor, op.peer) for op in args.ops]
        if name in (OpName.send, OpName.recv):
            return [self._message(name is OpName.send, op_id, args.tensor, args.peer)]
        tensors = [args.tensor] if hasattr(args, "tensor") else []
        inputs = shapes(tensors or _listed(getattr(args, "input", None)))
        outputs = shapes(tensors or _listed(getattr(args, "output", None)))
        if name is OpName.all_gather:  # as PyTorch's backends record it: analysers before 2.15 need it
            outputs = stacked(args.output)
        elif name is OpName.reduce_scatter:
            inputs = stacked(args.input)
        return [self._ring_buffer.begin(self._group, op_id, _NAMES.get(name, name.name), inputs, outputs)]

    def on_issued(self, operation: list[Entry], work: TorchWork) -> None:
        ring_buffer = self._ring_buffer

        def ended(succeeded: bool) -> None:
            for entry in operation if succeeded else ():
                ring_buffer.complete(entry)

        work._on_end(ended)

    def on_refused(self, operation: list[Entry]) -> None:
        for entry in reversed(operation):
            self._ring_buffer.discard(entry)

    def on_split(self, child: TorchComm) -> None:
        self._hook.register_with_comm(child)

    def on_aborted(self) -> None:
        if not _trace.dumps_on_failure():
            return
        comm = self._comm
        try:
            # Not the group's members, which may be those before a reconfiguration: the next call would tell.
            rank = comm._members[comm.get_rank()]
            path = self._hook.dump_file(rank)
        except Exception as error:
            place = f"rank {comm.get_rank()} of communicator `{comm.get_name()}`"
            _say(f"the flight recorder could not write what {place} did last: {error}")
        else:
            _say(f"the flight recorder wrote what rank {rank} did last to {path}")

    def on_finalized(self) -> None:
        self._ring_buffer.drop_group(self._group)

    def _new_group(self) -> Group:
        comm = self._comm
        timeout_ms = int(comm.get_options().timeout.total_seconds() * 1000)
        return self._ring_buffer.add_group(comm.get_name(), comm.get_backend(), timeout_ms, comm._members)

    def _message(self, sends: bool, op_id: int, tensor: torch.Tensor, peer: int) -> Entry:
        members = self._group.members
        here, there = members[self._comm.get_rank()], members[peer] if peer >= 0 else _trace.ANY_RANK
        if sends:
            return self._ring_buffer.begin(self._group, op_id, "send", shapes([tensor]), [], (here, there))
        return self._ring_buffer.begin(self._group, op_id, "recv", [], shapes([tensor]), (there, here))


@once
def _shared_ring_buffer() -> RingBuffer:
    return RingBuffer(0)


def _default_entries() -> int:
    for variable in ("TORCHCOMM_FR_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        if text := os.environ.get(variable):
            if not text.isdecimal():
                raise ValueError(f"FlightRecorderHook: {variable} must be a number from zero on, got {text!r}")
            return int(text)
    return _DEFAULT_ENTRIES


def _listed(operand: Any) -> list[torch.Tensor]:
    return [operand] if isinstance(operand, torch.Tensor) else list(operand or [])


def _say(text: str) -> None:
    print(f"ncclx_rs: {text}", file=sys.stderr, flush=True)
