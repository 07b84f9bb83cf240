"""What an all_gather that runs repeatedly into the same tensor keeps."""

from __future__ import annotations

from typing import Any

import torch


class AllGatherPHandle:
    """A prepared all_gather; see `TorchComm.all_gather_p_init`.

    Attributes:
        output: the output, until the handle is freed.
        window: the number of the window that the output is a part of; None if the backend has no windows, and each
            all_gather is an ordinary one.
    """

    def __init__(self, output: torch.Tensor, impl: Any) -> None:
        """Registers the output. Programs call `TorchComm.all_gather_p_init` instead."""
        self.output: torch.Tensor | None = output
        self.window: int | None = None
        self._c10d: Any = None
        if hasattr(getattr(impl, "c10d", None), "_window_register"):
            self._c10d = impl.c10d
            self.window = self._c10d._window_register(output, True)

    def gather(self, input: torch.Tensor, async_op: bool, limit: int) -> Any:
        """Gathers into the window within ``limit`` ms. Programs call `TorchComm.all_gather_p_exec` instead."""
        return self._c10d._window_all_gather(self.window, self.output, input, async_op, limit)

    def free(self) -> None:
        """Takes the output back, once on all ranks. Programs call `TorchComm.all_gather_p_free` instead."""
        window, self.window, self.output = self.window, None, None
        if window is not None:
            self._c10d._window_deregister(window)
