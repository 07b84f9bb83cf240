"""The process group of torchft's replicas, which is made anew whenever the members of the job change.

    from torchft import Manager
    from ncclx_rs.torchft import ProcessGroupNcclxRs

    manager = Manager(pg=ProcessGroupNcclxRs(), ...)

This module alone needs the package torchft (``pip install torchft``).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torchft.process_group import ProcessGroupWrapper

from ncclx_rs._backends import _make_ncclx
from ncclx_rs._types import CommOptions


class ProcessGroupNcclxRs(ProcessGroupWrapper):
    """A process group over this package's engine whose members torchft's ``Manager`` chooses.

    When they change, operations in flight end at once with an error, and the new members join each other. The loss of a
    member is an error of the operations that need it, and of `errored`.

    Args:
        timeout: the timeout of operations, and of joining, which takes at most ``connect_timeout_seconds``, 300 s.
        hints: settings by name, as those of `ncclx_rs.Options`.

    Raises:
        torch.distributed.DistBackendError: at joining: members did not join in time.
        torch.distributed.DistNetworkError: at joining: the store or a member cannot be reached.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60), hints: Mapping[str, str] | None = None) -> None:
        """A process group without members, which the manager configures."""
        super().__init__(timeout)
        self._hints = dict(hints or {})
        self._backend: c10d.Backend | None = None

    def _create_pg(self, store: c10d.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        options = CommOptions()
        options.name, options.timeout, options.hints = "torchft", self._timeout, self._hints
        options.store, options.rank, options.size = store, rank, world_size
        self._backend = _make_ncclx(options)
        group = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, self._backend)
        return group

    def abort(self, errored: bool = True) -> None:
        """Ends operations in flight with an error, and leaves the other members. Does not block."""
        self._backend = None
        super().abort(errored)

    def shutdown(self) -> None:
        """Leaves the other members."""
        self.abort(errored=False)

    def errored(self) -> Exception | None:
        """The error that ended the current membership: a lost member or a timeout; None if there is none."""
        if self._backend is None:
            return None
        error = self._backend.get_error()
        if error == c10d.ErrorType.SUCCESS:
            return None
        return dist.DistBackendError(f"ncclx_rs: the process group failed: {error.name}")

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of joining and of later operations."""
        super().set_timeout(timeout)
        if self._backend is not None:
            self._backend.set_timeout(timeout)

    def getBackendName(self) -> str:
        """The name that torchft shows."""
        return "torchft-ncclx_rs"
