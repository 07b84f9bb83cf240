"""Backends in shared libraries, which environment variables name; the native module calls them."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _distributed_c10d as c10d

from ncclx_rs._backend_class import TorchCommBackend
from ncclx_rs._load import native
from ncclx_rs._types import CommOptions, OpOptions, ReduceOp

if TYPE_CHECKING:
    from ncclx_rs._native import Library
    from ncclx_rs._native import LibraryBackend as NativeBackend
    from ncclx_rs._native import LibraryWork as NativeWork

Tensors = Sequence[torch.Tensor]

OWN_VARIABLE = "NCCLX_RS_BACKEND_LIB_PATH_"
TORCHCOMMS_VARIABLE = "TORCHCOMMS_BACKEND_LIB_PATH_"


def find_library(name: str, *prefixes: str) -> LibraryBackend | None:
    """The backend in the library that an environment variable names for ``name``; None if no variable does.

    Args:
        name: the backend's name; the variables' names end in it, in upper case.
        prefixes: the beginnings of the variables' names, in the order of their search. An empty value counts as unset.

    Raises:
        ImportError: the library cannot be loaded, has no backend, or has another version; the text names the variable.
    """
    for prefix in prefixes:
        variable = prefix + name.upper()
        if path := os.environ.get(variable):
            try:
                library = _load(os.path.abspath(path))
            except ImportError as error:
                raise ImportError(f"new_comm: the backend {name}, by {variable}: {error}") from error
            return LibraryBackend(library)
    return None


@functools.cache
def _load(path: str) -> Library:
    return native().Library(Path(path))  # type: ignore[no-any-return]


class LibraryBackend(TorchCommBackend):
    """A backend in a shared library, which implements the trait of the Rust crate ``ncclx_rs_backend``.

    The backend's own methods are attributes. They take contiguous tensors by position, which must not overlap,
    and values that JSON can express by name; they return a value that JSON can express. A wrong call raises
    ValueError, a failure RuntimeError.
    """

    def __init__(self, library: Library) -> None:
        super().__init__()
        self._library = library
        self._native: NativeBackend | None = None
        self._device = torch.device("cpu")
        self._rank_and_size = (-1, 0)
        self._timeout = timedelta(0)
        self._failure_hook: Callable[[], None] | None = None

    def init(self, device: torch.device, name: str, options: CommOptions) -> None:
        self._device = device
        self._timeout = options.timeout
        if not options.enable_reconfigure:
            self._join(options)

    def _join(self, options: CommOptions) -> None:
        self._native = self._library.join(
            options.name,
            str(self._device),
            options.rank,
            options.size,
            _milliseconds(options.timeout),
            list(options.hints.items()),
            options.store,
            _host(options.store),
        )
        self._rank_and_size = (options.rank, options.size)

    def reconfigure(self, options: CommOptions) -> None:
        """Leaves the present generation, if there is one, and joins the one that ``options`` describes."""
        if self._native is not None:
            self.abort()
        self._join(options)
        self.set_timeout(self._timeout)

    def split(self, ranks: Sequence[int], name: str, options: CommOptions) -> LibraryBackend:
        child = LibraryBackend(self._library)
        child.init(self._device, name, options)
        return child

    def finalize(self) -> None:
        if self._native is not None:
            self._native.finalize()

    def abort(self) -> None:
        if self._native is not None:
            self._native.abort("abort was called")

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self._native is not None:
            self._native.set_timeout(_milliseconds(timeout))

    def on_failure(self, hook: Callable[[], None]) -> None:
        """Calls ``hook`` when a wait reports that an operation has timed out or a rank was lost."""
        self._failure_hook = hook

    def get_rank(self) -> int:
        return self._rank_and_size[0]

    def get_size(self) -> int:
        return self._rank_and_size[1]

    def get_backend_name(self) -> str:
        return self._library.name

    def get_backend_version(self) -> str:
        return self._library.version

    # ---- the backend's own methods ----

    def __getattr__(self, name: str) -> Any:
        library = self.__dict__.get("_library")
        if library is not None and name in library.methods:
            return functools.partial(self._call, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._library.methods]

    def _call(self, method: str, *tensors: torch.Tensor, **arguments: Any) -> Any:
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(f"{method}: expected tensors by position and others by name, got {tensor!r}")
            if not tensor.is_contiguous():
                raise ValueError(f"{method}: tensors must be contiguous, got strides {tuple(tensor.stride())}")
            if tensor.device.type != "cpu":
                raise ValueError(f"{method}: tensors must be on the cpu, got one on {tensor.device}")
        try:
            text = json.dumps(arguments)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{method}: expected arguments by name that JSON can say: {error}") from error
        answer = self._joined().call(method, text, list(tensors))
        return json.loads(answer) if answer else None

    # ---- operations ----

    def send(self, tensor: torch.Tensor, dst: int, async_op: bool, options: OpOptions) -> LibraryWork:
        return self._submit("send", "send", [tensor], [], async_op, options, peer=dst)

    def recv(self, tensor: torch.Tensor, src: int, async_op: bool, options: OpOptions) -> LibraryWork:
        return self._submit("recv", "recv", [], [tensor], async_op, options, peer=src)

    def broadcast(self, tensor: torch.Tensor, root: int, async_op: bool, options: OpOptions) -> LibraryWork:
        return self._submit("broadcast", "broadcast", [tensor], [tensor], async_op, options, peer=root)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool, options: OpOptions) -> LibraryWork:
        return self._submit("all_reduce", "all_reduce", [tensor], [tensor], async_op, options, op=op)

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp, async_op: bool, options: OpOptions) -> LibraryWork:
        return self._submit("reduce", "reduce", [tensor], [tensor], async_op, options, peer=root, op=op)

    def all_gather(self, tensor_list: Tensors, tensor: torch.Tensor, async_op: bool, options: OpOptions) -> LibraryWork:
        return self._submit("all_gather", "all_gather", [tensor], tensor_list, async_op, options)

    def all_gather_v(
        self, tensor_list: Tensors, tensor: torch.Tensor, async_op: bool, options: OpOptions
    ) -> LibraryWork:
        return self._submit("all_gather_v", "all_gather", [tensor], tensor_list, async_op, options)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, async_op: bool, options: OpOptions
    ) -> LibraryWork:
        return self._submit("all_gather_single", "all_gather", [input], [output], async_op, options)

    def reduce_scatter(
        self, output: torch.Tensor, input_list: Tensors, op: ReduceOp, async_op: bool, options: OpOptions
    ) -> LibraryWork:
        return self._submit("reduce_scatter", "reduce_scatter", input_list, [output], async_op, options, op=op)

    def reduce_scatter_v(
        self, output: torch.Tensor, input_list: Tensors, op: ReduceOp, async_op: bool, options: OpOptions
    ) -> LibraryWork:
        return self._submit("reduce_scatter_v", "reduce_scatter", input_list, [output], async_op, options, op=op)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, async_op: bool, options: OpOptions
    ) -> LibraryWork:
        return self._submit("reduce_scatter_single", "reduce_scatter", [input], [output], async_op, options, op=op)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, async_op: bool, options: OpOptions
    ) -> LibraryWork:
        name = "all_to_all_single"
        counts = (self._shares(name, "input", input), self._shares(name, "output", output))
        return self._submit(name, "all_to_all", [input], [output], async_op, options, counts=counts)

    def all_to_all_v_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        async_op: bool,
        options: OpOptions,
    ) -> LibraryWork:
        name = "all_to_all_v_single"
        counts = (
            self._rows(name, "input", input, input_split_sizes),
            self._rows(name, "output", output, output_split_sizes),
        )
        return self._submit(name, "all_to_all", [input], [output], async_op, options, counts=counts)

    def all_to_all(
        self, output_tensor_list: Tensors, input_tensor_list: Tensors, async_op: bool, options: OpOptions
    ) -> LibraryWork:
        counts = ([tensor.numel() for tensor in input_tensor_list], [tensor.numel() for tensor in output_tensor_list])
        return self._submit(
            "all_to_all", "all_to_all", input_tensor_list, output_tensor_list, async_op, options, counts=counts
        )

    def barrier(self, async_op: bool, options: OpOptions) -> LibraryWork:
        return self._submit("barrier", "barrier", [], [], async_op, options)

    def scatter(
        self, output_tensor: torch.Tensor, input_tensor_list: Tensors, root: int, async_op: bool, options: OpOptions
    ) -> LibraryWork:
        inputs = input_tensor_list if self.get_rank() == root else []
        return self._submit("scatter", "scatter", inputs, [output_tensor], async_op, options, peer=root)

    def gather(
        self, output_tensor_list: Tensors, input_tensor: torch.Tensor, root: int, async_op: bool, options: OpOptions
    ) -> LibraryWork:
        outputs = output_tensor_list if self.get_rank() == root else []
        return self._submit("gather", "gather", [input_tensor], outputs, async_op, options, peer=root)

    def gather_single(
        self, output: torch.Tensor, input: torch.Tensor, root: int, async_op: bool, options: OpOptions
    ) -> LibraryWork:
        outputs = [output] if self.get_rank() == root else []
        return self._submit("gather_single", "gather", [input], outputs, async_op, options, peer=root)

    def _shares(self, name: str, argument: str, tensor: torch.Tensor) -> list[int]:
        size, count = self.get_size(), tensor.numel()
        if count % size:
            expected = f"a number of elements that {size} ranks can share equally"
            raise ValueError(f"{name}: argument `{argument}`: expected {expected}, got {count}")
        return [count // size] * size

    def _rows(self, name: str, argument: str, tensor: torch.Tensor, sizes: Sequence[int]) -> list[int]:
        if not sizes:
            return self._shares(name, argument, tensor)
        if len(sizes) != self.get_size() or min(sizes) < 0:
            expected = f"{self.get_size()} sizes, one a rank"
            raise ValueError(f"{name}: argument `{argument}_split_sizes`: expected {expected}, got {list(sizes)}")
        row = tensor[0].numel() if tensor.dim() and tensor.shape[0] else 1
        return [rows * row for rows in sizes]

    def _submit(
        self,
        name: str,
        kind: str,
        inputs: Tensors,
        outputs: Tensors,
        async_op: bool,
        options: OpOptions,
        *,
        peer: int = 0,
        op: ReduceOp | None = None,
        counts: tuple[list[int], list[int]] = ([], []),
    ) -> LibraryWork:
        timeout = options.timeout or self._timeout
        factor = 0.0 if op is None or op._factor is None else float(op._factor)
        work = self._joined().submit(
            name,
            kind,
            list(inputs),
            list(outputs),
            ("SUM" if op is None else op.type.name, factor),
            peer,
            *counts,
            _milliseconds(timeout),
            not async_op,
        )
        return LibraryWork(work, self, name, timeout)

    def _joined(self) -> NativeBackend:
        if self._native is None:
            raise RuntimeError(f"the backend {self.get_backend_name()} has not joined")
        return self._native

    def _failed(self) -> None:
        if self._failure_hook is not None:
            self._failure_hook()


class LibraryWork:
    """An operation of a `LibraryBackend`."""

    def __init__(self, work: NativeWork, backend: LibraryBackend, name: str, timeout: timedelta) -> None:
        self._work = work
        self._backend = backend
        self._name = name
        self._timeout = timeout

    def wait(self) -> None:
        """Blocks until the operation has ended.

        Raises:
            ValueError: the operation was called wrongly.
            RuntimeError: it failed, with the backend's text; or the backend did not end it long after its timeout.
        """
        if not self._ended_within(_milliseconds(self._timeout) + _OVERTIME_MILLISECONDS):
            self._backend._failed()
            limit = f"its time limit of {self._timeout.total_seconds():g} s"
            raise RuntimeError(f"{self._name}: the backend {self._backend.get_backend_name()} has ignored {limit}")

    def is_completed(self) -> bool:
        """Whether the operation has ended, with or without an error."""
        try:
            return self._ended_within(0)
        except (ValueError, RuntimeError):
            return True

    def _ended_within(self, milliseconds: int) -> bool:
        try:
            return self._work.wait(milliseconds)
        except (ValueError, RuntimeError):
            if self._work.failure in ("timeout", "lost"):
                self._backend._failed()
            raise

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self.is_completed() and self._work.failure is None

    def timed_out(self) -> bool:
        """Whether it has timed out."""
        return self.is_completed() and self._work.failure == "timeout"


def _milliseconds(timeout: timedelta) -> int:
    return max(1, round(timeout.total_seconds() * 1000))


def _host(store: c10d.Store) -> str:
    """The host that serves a store; empty if unknown."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, c10d.TCPStore) else os.environ.get("MASTER_ADDR", "")


# How long a backend may take to end an operation that has timed out.
_OVERTIME_MILLISECONDS = 30_000
