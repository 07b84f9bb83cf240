"""A log of communicators' operations, one short line for each event, in the format of torchcomms' clog, version 1.

    logger = clog(output=f"/tmp/clog{comm.get_rank()}.log", events=["ALL"])
    logger.register_with_comm(comm)

The lines; the last field of events is the seconds since ``base_timestamp``:

    V|1|base_timestamp=1714234567.890
    new_comm|comm=main|rank=0|world_size=2
    C1|sig|all_reduce|in_count=8|out_count=8|dtype=f32|red_op=sum|async_op=f|comm=main     an operation's first call
    C1|Q|work_id=1|+0.001       each call of it
    C1|S|+0.001                 it begins
    C1|E|+0.002                 it has ended
    C1|W|+0.002                 the program waits for it, if it is asynchronous
    split|parent=main|child=half|ranks=0,1
    WARN|...
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ncclx_rs._comm import TorchComm
from ncclx_rs._hooks import NewWindowPreHookArgs, SplitPreHookArgs
from ncclx_rs._types import OpName
from ncclx_rs._work import TorchWork
from ncclx_rs.hooks._observer import Observer, observe
from ncclx_rs.hooks._signature import signature


@dataclass
class _Call:
    """One call of an operation.

    Attributes:
        operation: the number of its signature.
        work: its own number.
        pending: the events that have not happened yet.
    """

    operation: int
    work: int
    comm_name: str
    pending: list[str]
    began: float = field(default_factory=time.time)


class clog:
    """Logs the operations of its communicators, and of those split from them, to a file.

    Each line is in the file before the operation continues.
    """

    def __init__(self, output: str | os.PathLike[str], events: Sequence[str], verbose: Sequence[str] = ()) -> None:
        """Begins the log.

        Args:
            output: the file, which is overwritten.
            events: ``"LIFECYCLE"`` or ``"ALL"`` also logs when operations begin, end and are waited for. Calls are
                always logged; other names are ignored.
            verbose: ``"buffers"`` adds the addresses of tensors to signatures. That makes more signatures, which are
                all kept in memory.

        Raises:
            RuntimeError: the file cannot be written.
        """
        self._lifecycle = not {"ALL", "LIFECYCLE"}.isdisjoint(events)
        self._buffers = "buffers" in verbose
        self._lock = threading.RLock()
        self._signatures: dict[str, int] = {}
        self._calls = 0
        self._in_flight: dict[int, _Call] = {}
        self._comms: weakref.WeakSet[TorchComm] = weakref.WeakSet()
        self._open_comms = 0
        try:
            self._file = open(output, "w", buffering=1)
        except OSError as error:
            raise RuntimeError(f"clog: failed to open log file {os.fspath(output)}: {error.strerror}") from error
        weakref.finalize(self, self._file.close).atexit = False
        self._base = round(time.time(), 3)
        self._write(f"V|1|base_timestamp={self._base:.3f}")

    def register_with_comm(self, comm: TorchComm) -> None:
        """Logs the communicator's operations from now on.

        Raises:
            RuntimeError: it is already registered with the communicator.
        """
        self._register(comm, announces=True)

    def _register(self, comm: TorchComm, announces: bool) -> None:
        if comm in self._comms:
            raise RuntimeError(f"clog: already registered with comm {comm.get_name()}")
        self._comms.add(comm)
        self._open_comms += 1
        observe(comm, _CommLogger(self, comm, announces))

    def _write(self, line: str) -> None:
        with self._lock:
            self._file.write(line + "\n")

    def _write_event(self, call: _Call, event: str, at: float | None = None) -> None:
        since = max(0.0, (time.time() if at is None else at) - self._base)
        self._write(f"C{call.operation}|{event}|+{since:.3f}")

    def _log_call(self, operation: str, comm_name: str, async_op: bool) -> _Call:
        with self._lock:
            known = len(self._signatures)
            number = self._signatures.setdefault(operation, known + 1)
            if number > known:
                self._write(f"C{number}|sig|{operation}")
            self._calls += 1
            call = _Call(number, self._calls, comm_name, ["S", "E", "W"] if async_op else ["S", "E"])
            self._write_event(call, f"Q|work_id={call.work}")
            if self._lifecycle:
                self._in_flight[call.work] = call
            return call

    def _log_event(self, call: _Call, event: str, at: float | None = None) -> None:
        with self._lock:
            if event in call.pending:
                call.pending.remove(event)
                self._write_event(call, event, at)
            if event == "E":
                self._in_flight.pop(call.work, None)

    def _log_finalize(self) -> None:
        with self._lock:
            self._open_comms -= 1
            for call in self._in_flight.values() if self._open_comms == 0 else ():
                self._write(
                    f"WARN|comm={call.comm_name}|leaked work_id={call.work}|corr_id={call.operation}"
                    f"|pending_events={','.join(call.pending)}"
                )


class _CommLogger(Observer[_Call | None]):
    """Logs one communicator."""

    def __init__(self, log: clog, comm: TorchComm, announces: bool) -> None:
        self._log = log
        self._comm = weakref.proxy(comm)
        self._place = None if announces else self._here()
        self._announce()

    def on_call(self, name: OpName, op_id: int, args: Any) -> _Call | None:
        self._announce()
        comm_name = self._comm.get_name()
        if isinstance(args, SplitPreHookArgs):
            ranks = ",".join(map(str, args.ranks))
            self._log._write(f"split|parent={comm_name}|child={args.name}|ranks={ranks}")
        if isinstance(args, SplitPreHookArgs | NewWindowPreHookArgs):
            return None
        operation = f"{signature(name, args, self._log._buffers)}|comm={comm_name}"
        return self._log._log_call(operation, comm_name, args.async_op)

    def on_issued(self, operation: _Call | None, work: TorchWork) -> None:
        if operation is None or not self._log._lifecycle:
            return
        log, call = self._log, operation
        log._log_event(call, "S", call.began)
        work._on_wait(lambda: log._log_event(call, "W"))
        work._on_end(lambda _: log._log_event(call, "E"))

    def on_split(self, child: TorchComm) -> None:
        self._log._register(child, announces=False)

    def on_finalized(self) -> None:
        self._log._log_finalize()

    def _here(self) -> tuple[int, int]:
        return self._comm.get_rank(), self._comm.get_size()

    def _announce(self) -> None:
        """Writes rank and size once they are known, and again when a reconfiguration changes them."""
        if self._comm.get_size() > 0 and self._here() != self._place:
            self._place = self._here()
            rank, size = self._place
            self._log._write(f"new_comm|comm={self._comm.get_name()}|rank={rank}|world_size={size}")
