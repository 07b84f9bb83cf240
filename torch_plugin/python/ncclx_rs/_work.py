"""`TorchWork`, the handle of an operation."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from ncclx_rs._load import native
from ncclx_rs._tracing import not_in_graphs
from ncclx_rs._types import WorkStatus


class TorchWork:
    """An operation in flight or done. The program must not touch its tensors before it is done.

    It is awaitable: during ``await work``, other tasks of the running asyncio loop run.
    """

    # Those of a completed operation: to set them for each would take as long as a short operation.
    _parts: Sequence[Any] = ()
    _waited = True
    _forced: WorkStatus | None = None
    _wait_hooks: Sequence[Callable[[], object]] = ()
    _end_hooks: Sequence[Callable[[bool], object]] = ()

    def __init__(self, *parts: Any) -> None:
        """Wraps the results of a backend: c10d works, objects with a ``wait()``, or None for a completed operation."""
        if parts:
            self._parts = [part for part in parts if part is not None]
            self._waited = not self._parts

    def wait(self) -> None:
        """Waits for the operation: with CPU tensors blocks the thread, with CUDA tensors the current stream.

        Raises:
            RuntimeError: the operation failed; the text names the operation and the rank at fault.
        """
        not_in_graphs("wait", "the operation was not started in the graph")
        for hook in self._wait_hooks:
            hook()
        try:
            for part in self._parts:
                part.wait()
        except Exception:
            self._end(False)
            raise
        # On a stream, what follows is in order, and the operation may still be in flight.
        if all(part.is_completed() for part in self._parts if hasattr(part, "is_completed")):
            self._waited = True
            self._end(True)

    def wait_blocking(self) -> None:
        """Blocks the thread until the operation is done.

        Raises:
            RuntimeError: as for `wait`.
        """
        for part in self._parts:
            if isinstance(part, dist.Work):
                try:
                    native()._wait_blocking(part)
                except Exception:
                    self._end(False)
                    raise
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation has ended, with or without an error."""
        not_in_graphs("is_completed", "the operation was not started in the graph")
        if self._waited:
            return True
        return all(part.is_completed() for part in self._parts if hasattr(part, "is_completed")) and all(
            hasattr(part, "is_completed") for part in self._parts
        )

    @property
    def status(self) -> WorkStatus:
        """The operation's state, and how it ended."""
        if self._forced is not None:
            return self._forced
        if not self.is_completed():
            return WorkStatus.INPROGRESS
        failed = self._failed()
        if not failed:
            return WorkStatus.COMPLETED
        timed_out = any(_timed_out(part) for part in failed)
        return WorkStatus.TIMEDOUT if timed_out else WorkStatus.ERROR

    def exception(self) -> BaseException | None:
        """The operation's error; None while it is in flight and after success."""
        for part in self._failed():
            try:
                part.wait()
            except (RuntimeError, ValueError) as error:
                return error
        return None

    def _failed(self) -> list[Any]:
        return [part for part in self._parts if _has_failed(part)]

    def __await__(self) -> Generator[Any, None, None]:
        loop = asyncio.get_running_loop()
        for part in self._parts:
            future = _future(part)
            if future is not None:
                done = loop.create_future()
                future.add_done_callback(functools.partial(_resolve, loop, done))
                yield from done
            else:
                yield from loop.run_in_executor(None, part.wait)
        self.wait()

    def _set_status(self, status: WorkStatus) -> None:
        """Sets `status`, for backends written in Python."""
        self._forced = status
        self._waited = status not in (WorkStatus.NOT_STARTED, WorkStatus.INPROGRESS)
        if self._waited:
            self._end(status is WorkStatus.COMPLETED)

    def _on_wait(self, hook: Callable[[], object]) -> None:
        """Calls ``hook()`` whenever a thread is about to wait."""
        self._wait_hooks = (*self._wait_hooks, hook)

    def _on_end(self, hook: Callable[[bool], object]) -> None:
        """Calls ``hook(succeeded)`` once: now if the operation has ended, else on the thread that ends it.

        A work without a future shows its end only in ``wait``, which then calls the hook.
        """
        if self._waited:
            hook(self._forced in (None, WorkStatus.COMPLETED))
            return
        futures = [future for part in self._parts if (future := _future(part)) is not None]
        if len(futures) < len(self._parts):
            self._end_hooks = (*self._end_hooks, hook)
            return
        ended: torch.futures.Future[Any] = futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)

        def call(_: object) -> None:
            hook(all(map(_succeeded, futures)))

        ended.add_done_callback(call)

    def _end(self, succeeded: bool) -> None:
        hooks, self._end_hooks = self._end_hooks, ()
        for hook in hooks:
            hook(succeeded)

    def __repr__(self) -> str:
        return f"TorchWork({self.status.name})"


def _resolve(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None], _: object) -> None:
    """Resolves a future of a loop that another thread runs, unless the future's task was cancelled."""
    loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))


def _has_failed(part: Any) -> bool:
    if isinstance(part, TorchWork):  # of a communicator that is behind a backend
        return part.status in (WorkStatus.TIMEDOUT, WorkStatus.ERROR)
    return hasattr(part, "is_success") and part.is_completed() and not part.is_success()


def _timed_out(part: Any) -> bool:
    if isinstance(part, TorchWork):
        return part.status is WorkStatus.TIMEDOUT
    if hasattr(part, "timed_out"):
        return bool(part.timed_out())
    if isinstance(part, dist.Work):
        with contextlib.suppress(RuntimeError):  # gloo's works lack it
            return bool(cast(Any, part).get_future_result().wait() == _TIMEOUT)
    return False


def _future(part: Any) -> torch.futures.Future[Any] | None:
    """The future that completes when a part ends."""
    if not isinstance(part, dist.Work):
        return None
    # The second, of an operation on a stream, completes as soon as it is there. Gloo's works lack the first, and its
    # messages both.
    for get in (cast(Any, part).get_future_result, part.get_future):
        with contextlib.suppress(RuntimeError):
            return get()
    return None


def _succeeded(future: torch.futures.Future[Any]) -> bool:
    try:
        outcome = future.value()
    except Exception:
        return False
    return outcome == _SUCCESS if isinstance(outcome, int) else True


def together(works: Sequence[TorchWork]) -> TorchWork:
    """The work that is done when all of ``works`` are."""
    return TorchWork(*(part for work in works for part in work._parts))


# c10d's WorkResult.
_SUCCESS = 0
_TIMEOUT = 1
