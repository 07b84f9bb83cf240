"""c10d backends behind the object API, and the registry of backends by name."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib.metadata import entry_points
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from ncclx_rs import _backend, _vendor
from ncclx_rs._backend_class import TorchCommBackend
from ncclx_rs._library import OWN_VARIABLE, TORCHCOMMS_VARIABLE, find_library
from ncclx_rs._load import native
from ncclx_rs._memory import MemAllocator, allocator_of
from ncclx_rs._mistakes import warn_of_hints
from ncclx_rs._types import CommOptions, OpOptions, ReduceOp


class C10dBackend(TorchCommBackend):
    """A c10d backend, this package's or another, behind the object API."""

    def __init__(self, name: str, make: Callable[[CommOptions], Any], library: str | None = None) -> None:
        """Makes one that is not in use.

        Args:
            name: the backend's name.
            make: makes the c10d backend.
            library: the vendor's library that it stands for, if it does.
        """
        super().__init__()
        self._backend_name = name
        self._make = make
        self._library = library
        self.c10d: Any = None
        self._timeout = timedelta(0)
        self._device = torch.device("cpu")
        self._failure_hook: Callable[[], None] | None = None
        # What it takes over of the vendor's library, until it has.
        self._part: Any = None

    def check(self, device: torch.device, hints: Mapping[str, str]) -> None:
        """Raises ValueError if the backend is this package's and does not serve the device, or not with these hints.

        What is told here has not failed on the other ranks, which may meet while this one makes up for it.
        """
        if self._library is not None:
            _vendor.check(self._backend_name, self._library, device, hints)
        if self._make is not _make_ncclx or _vendor.is_pytorchs(self._library, hints):
            return
        native().check_settings(list(self._engine_hints(hints).items()))
        if device.type == "cpu":
            return
        if (lacking := _lacking_for(device)) is not None:
            served = "the CPU, which alone is served here" if self._library is None else "a CUDA device of this host"
            raise ValueError(f"ncclx_rs: new_comm: argument `device`: expected {served}, got {device}: {lacking}")

    def init(self, device: torch.device, name: str, options: CommOptions) -> None:
        self._timeout = options.timeout
        self._device = device
        if self._library is not None:
            is_pytorchs = _vendor.is_pytorchs(self._library, options.hints)
            self._make = functools.partial(_vendor.make_process_group, device) if is_pytorchs else _make_ncclx
        if not options.enable_reconfigure:
            self.c10d = self._make_on_device(options)

    def _engine_hints(self, hints: Mapping[str, str]) -> dict[str, str]:
        return dict(hints) if self._library is None else _vendor.engine_hints(self._library, hints)

    def _make_on_device(self, options: CommOptions) -> Any:
        if self._make is _make_ncclx:
            options = copy.copy(options)
            options.hints = self._engine_hints(options.hints)
        made = self._make(options)
        if self._part is not None:
            made._inherit(self._part)
            self._part = None
        if self._device.type == "cuda" and hasattr(made, "_set_device"):
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            try:
                made._set_device(torch.device("cuda", index))
            except ValueError as error:
                instead = "" if self._library is None else f"; {_vendor.instead(self._library)}"
                raise ValueError(f"{error}{instead}") from None
        return made

    def finalize(self) -> None:
        if self.c10d is not None:
            self.c10d.shutdown()

    def abort(self) -> None:
        if self.c10d is not None:
            self.c10d.abort()

    @property
    def can_abort(self) -> bool:
        """Whether the backend has an abort of its own: c10d's, which all inherit, does nothing."""
        if self._make is _make_ncclx or isinstance(self.c10d, getattr(c10d, "ProcessGroupNCCL", ())):
            return True
        return getattr(type(self.c10d), "abort", None) is not c10d.Backend.abort

    def get_rank(self) -> int:
        return -1 if self.c10d is None else int(self.c10d.rank())

    def get_size(self) -> int:
        return 0 if self.c10d is None else int(self.c10d.size())

    def get_backend_name(self) -> str:
        return self._backend_name

    def get_backend_version(self) -> str:
        return str(native().__version__) if self._make is _make_ncclx else torch.__version__

    @property
    def has_allocators(self) -> bool:
        """Whether the engine's allocators serve the backend."""
        return self._make is _make_ncclx

    def get_mem_allocator(self) -> Any:
        if not self.has_allocators:
            return super().get_mem_allocator()
        return self.allocator(self._device)

    def allocator(self, device: torch.device) -> Any:
        """The allocator of tensors on a type of device."""
        if device.type != "cuda":
            return MemAllocator()
        if hasattr(self.c10d, "_allocates"):
            return allocator_of(*self.c10d._allocates())
        return allocator_of(*_vendor.allocates(self._library))

    def register(self, tensor: torch.Tensor) -> None:
        """Has a vendor's library take a tensor in place, if the communicator goes by one."""
        if not tensor.is_cuda or not hasattr(self.c10d, "_register"):
            return
        by_library, why_not = self.c10d._allocates()
        if by_library:
            self.c10d._register(tensor)
        elif why_not:
            warnings.warn(f"tensor_register: the tensor is not registered: {why_not}", UserWarning, stacklevel=3)

    def deregister(self, tensor: torch.Tensor) -> None:
        """Undoes `register`."""
        if tensor.is_cuda and hasattr(self.c10d, "_deregister") and self.c10d._allocates()[0]:
            self.c10d._deregister(tensor)

    def host(self, rank: int) -> int:
        """The number of a rank's host. Zero for all ranks if the backend does not know the hosts."""
        return int(self.c10d._host(rank)) if hasattr(self.c10d, "_host") else 0

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self.c10d is not None:
            self.c10d.set_timeout(timeout)

    def on_failure(self, hook: Callable[[], None]) -> None:
        """Calls ``hook`` once an operation has timed out or a rank was lost, if the backend reports that."""
        self._failure_hook = hook
        self._watch()

    def wait_for_hooks(self) -> None:
        """Waits for a limited time until the failure hook has run; returns at once if called by that hook."""
        if hasattr(self.c10d, "_wait_for_hooks"):
            self.c10d._wait_for_hooks()

    def _watch(self) -> None:
        if hasattr(self.c10d, "_has_failed"):
            # Every operation calls it; a wrapper function would make it slower.
            self.has_failed = self.c10d._has_failed  # type: ignore[method-assign]  # the same function, called directly
            if self._device.type == "cpu":
                self._direct = self.c10d._direct_calls()
        if self._failure_hook is not None and hasattr(self.c10d, "_on_failure"):
            self.c10d._on_failure(self._failure_hook)

    def _options(self, kind: type[Any], async_op: bool, options: OpOptions, **fields: Any) -> Any:
        made = kind()
        made.asyncOp = async_op
        made.timeout = options.timeout or self._timeout
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    def reconfigure(self, options: CommOptions) -> None:
        """Leaves the current generation, if there is one, and joins that of ``options``."""
        if self.c10d is not None:
            self.c10d.abort()
        self.c10d = self._make_on_device(options)
        self.set_timeout(self._timeout)
        self._watch()

    # ---- operations ----

    def send(self, tensor: torch.Tensor, dst: int, async_op: bool, options: OpOptions) -> Any:
        return self._message("send", tensor, dst, async_op, options)

    def recv(self, tensor: torch.Tensor, src: int, async_op: bool, options: OpOptions) -> Any:
        return self._message("recv", tensor, src, async_op, options)

    def _message(self, operation: str, tensor: torch.Tensor, peer: int, async_op: bool, options: OpOptions) -> Any:
        # What blocks on a device goes on the current stream, which c10d's own methods do not know.
        if (options.timeout or self._device.type == "cuda") and hasattr(self.c10d, "_message"):
            timeout = options.timeout or self._timeout
            return self.c10d._message(operation == "send", tensor, peer, 0, timeout, async_op)
        work = getattr(self.c10d, operation)([tensor], peer, 0)
        # c10d's messages take no timeout, but the wait for them does.
        return _LimitedWork(work, options.timeout) if options.timeout and work is not None else work

    def coalesced(self, issue: Callable[[], object]) -> Any:
        """Calls ``issue``, whose messages on a device go on together; the work of all, if there they have one."""
        if self._device.type != "cuda" or not getattr(self.c10d, "supports_coalescing", False):
            issue()
            return None
        self.c10d._start_coalescing()
        try:
            issue()
        except BaseException:
            # A new block takes the place of this one, whose messages are never sent.
            self.c10d._start_coalescing()
            self.c10d._end_coalescing()
            raise
        return self.c10d._end_coalescing()

    def broadcast(self, tensor: torch.Tensor, root: int, async_op: bool, options: OpOptions) -> Any:
        return self.c10d.broadcast([tensor], self._options(c10d.BroadcastOptions, async_op, options, rootRank=root))

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool, options: OpOptions) -> Any:
        made = self._options(c10d.AllreduceOptions, async_op, options, reduceOp=op._c10d())
        return self.c10d.allreduce([tensor], made)

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp, async_op: bool, options: OpOptions) -> Any:
        made = self._options(c10d.ReduceOptions, async_op, options, reduceOp=op._c10d(), rootRank=root)
        return self.c10d.reduce([tensor], made)

    def all_gather(
        self, tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, async_op: bool, options: OpOptions
    ) -> Any:
        made = self._options(c10d.AllgatherOptions, async_op, options)
        return self.c10d.allgather([list(tensor_list)], [tensor], made)

    all_gather_v = all_gather

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, async_op: bool, options: OpOptions) -> Any:
        return self.c10d._allgather_base(output, input, self._options(c10d.AllgatherOptions, async_op, options))

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input_list: Sequence[torch.Tensor],
        op: ReduceOp,
        async_op: bool,
        options: OpOptions,
    ) -> Any:
        made = self._options(c10d.ReduceScatterOptions, async_op, options, reduceOp=op._c10d())
        return self.c10d.reduce_scatter([output], [list(input_list)], made)

    reduce_scatter_v = reduce_scatter

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, async_op: bool, options: OpOptions
    ) -> Any:
        made = self._options(c10d.ReduceScatterOptions, async_op, options, reduceOp=op._c10d())
        return self.c10d._reduce_scatter_base(output, input, made)

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor, async_op: bool, options: OpOptions) -> Any:
        return self.all_to_all_v_single(output, input, [], [], async_op, options)

    def all_to_all_v_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        async_op: bool,
        options: OpOptions,
    ) -> Any:
        made = self._options(c10d.AllToAllOptions, async_op, options)
        return self.c10d.alltoall_base(output, input, list(output_split_sizes), list(input_split_sizes), made)

    def all_to_all(
        self,
        output_tensor_list: Sequence[torch.Tensor],
        input_tensor_list: Sequence[torch.Tensor],
        async_op: bool,
        options: OpOptions,
    ) -> Any:
        made = self._options(c10d.AllToAllOptions, async_op, options)
        return self.c10d.alltoall(list(output_tensor_list), list(input_tensor_list), made)

    def barrier(self, async_op: bool, options: OpOptions) -> Any:
        if hasattr(self.c10d, "_barrier"):
            return self.c10d._barrier(async_op, options.timeout or self._timeout)
        return self.c10d.barrier(self._options(c10d.BarrierOptions, async_op, options))

    def scatter(
        self,
        output_tensor: torch.Tensor,
        input_tensor_list: Sequence[torch.Tensor],
        root: int,
        async_op: bool,
        options: OpOptions,
    ) -> Any:
        inputs = [list(input_tensor_list)] if self.get_rank() == root else []
        made = self._options(c10d.ScatterOptions, async_op, options, rootRank=root)
        return self.c10d.scatter([output_tensor], inputs, made)

    def gather(
        self,
        output_tensor_list: Sequence[torch.Tensor],
        input_tensor: torch.Tensor,
        root: int,
        async_op: bool,
        options: OpOptions,
    ) -> Any:
        outputs = [list(output_tensor_list)] if self.get_rank() == root else []
        made = self._options(c10d.GatherOptions, async_op, options, rootRank=root)
        return self.c10d.gather(outputs, [input_tensor], made)

    def gather_single(
        self, output: torch.Tensor, input: torch.Tensor, root: int, async_op: bool, options: OpOptions
    ) -> Any:
        blocks = list(output.chunk(self.get_size())) if self.get_rank() == root else []
        return self.gather(blocks, input, root, async_op, options)

    def split(self, ranks: Sequence[int], name: str, options: CommOptions) -> C10dBackend:
        child = C10dBackend(self._backend_name, self._make, self._library)
        child._part = self._split_library(ranks)
        child.init(self._device, name, options)
        return child

    def split_none(self) -> None:
        """Takes part in a split as a rank that is in no new communicator."""
        self._split_library([])

    def _split_library(self, ranks: Sequence[int]) -> Any:
        return self.c10d._part(list(ranks)) if hasattr(self.c10d, "_part") else None


class _LimitedWork:
    """A message of another backend, which may take a limited time from now on."""

    def __init__(self, work: Any, limit: timedelta) -> None:
        self._work = work
        self._end = time.monotonic() + limit.total_seconds()
        self._timed_out = False

    def wait(self) -> None:
        # c10d counts milliseconds.
        left = max(1, math.ceil((self._end - time.monotonic()) * 1000))
        try:
            self._work.wait(timedelta(milliseconds=left))
        except RuntimeError:
            self._timed_out = time.monotonic() >= self._end
            raise

    def is_completed(self) -> bool:
        return self._timed_out or bool(self._work.is_completed())

    def is_success(self) -> bool:
        return not self._timed_out and bool(self._work.is_success())

    def timed_out(self) -> bool:
        return self._timed_out


def _lacking_for(device: torch.device) -> str | None:
    """What the engine lacks to serve tensors on a device."""
    if device.type != "cuda":
        return f"it does not serve {device.type}"
    try:
        devices = native()._cuda_devices()
    except ValueError as error:
        return str(error).removeprefix("ncclx_rs: ")
    return None if (device.index or 0) < devices else f"there are {devices} CUDA devices"


# ---- the registry ----

_ENTRY_POINTS = ("ncclx_rs.backends", "torchcomms.backends")

_registered: dict[str, Callable[[], TorchCommBackend]] = {}


def register_backend(name: str, backend_class: Callable[[], TorchCommBackend]) -> None:
    """Registers a backend for `new_comm`.

    Args:
        name: the name; replaces a registered backend of the same name.
        backend_class: makes the backend object; called without arguments, once for each communicator.
    """
    _registered[name] = backend_class


def _is_backend_registered(name: str) -> bool:
    return name in _registered


def built_backends() -> list[str]:
    """The names of backends that `new_comm` takes without a registration."""
    found = (entry.name for group in _ENTRY_POINTS for entry in entry_points(group=group))
    return sorted({"ncclx", *_vendor.BACKENDS, *(("gloo",) if dist.is_gloo_available() else ()), *found})


def is_backend_built(backend: str) -> bool:
    """Whether `backend` is one of `built_backends`."""
    return backend in (*built_backends(), "ncclx_rs")


def get_mem_allocator(backend: str, device: str | torch.device = "cpu") -> Any:
    """The allocator of tensors that a backend communicates fastest; see `TorchComm.get_mem_allocator`.

    Args:
        backend: the backend's name, as `new_comm` takes it.
        device: the type of device that the tensors are for.

    Raises:
        ModuleNotFoundError: there is no such backend.
        RuntimeError: the backend has no allocator.
    """
    made = make_backend(backend)
    if isinstance(made, C10dBackend) and made.has_allocators:
        return made.allocator(torch.device(device))
    return made.get_mem_allocator()


def make_backend(name: str) -> TorchCommBackend:
    """A new backend object, of the first source that has the name; `new_comm` lists the sources.

    Raises:
        ModuleNotFoundError: there is no backend of that name; the text lists where it was searched.
        ImportError: the shared library of that name cannot be used.
    """
    if name in _registered:
        return _registered[name]()
    if (library := find_library(name, OWN_VARIABLE)) is not None:
        return library
    if name in ("ncclx", "ncclx_rs"):
        return C10dBackend(name, _make_ncclx)
    for group in _ENTRY_POINTS:
        for found in entry_points(group=group, name=name):
            loaded = found.load()
            if name in _registered:  # the module registers itself
                return _registered[name]()
            if callable(loaded):
                return cast(TorchCommBackend, loaded())
    if name == "gloo" and dist.is_gloo_available():
        return C10dBackend("gloo", _make_gloo)
    if name == "fake":  # PyTorch's, which does nothing; for tests of programs. It registers itself at its import
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
    if _is_plugin(name):
        return C10dBackend(name, functools.partial(_make_plugin, name))
    # Last, so that backends of ncclx_rs win over libraries that torchcomms' variables name, and after the entry points,
    # whose modules may set variables.
    if (library := find_library(name, OWN_VARIABLE, TORCHCOMMS_VARIABLE)) is not None:
        return library
    if name in _vendor.BACKENDS:
        return C10dBackend(name, _make_ncclx, _vendor.BACKENDS[name])
    plugins = (plugin.lower() for plugin in dist.Backend._plugins)
    known = sorted({"ncclx", "gloo", *_vendor.BACKENDS, *_registered, *plugins} - {"ncclx_rs"})
    raise ModuleNotFoundError(
        f"failed to find backend {name}: it is none of {', '.join(known)}, no entry point of the groups "
        "`ncclx_rs.backends` and `torchcomms.backends`, no backend of this torch.distributed, and "
        f"{OWN_VARIABLE}{name.upper()} names no library"
    )


def _is_plugin(name: str) -> bool:
    """Whether torch.distributed has a backend of that name from somebody.

    PyTorch registers its own ``nccl`` once a program makes a group: that must not change what the name means here.
    """
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None or name not in dist.Backend.backend_list:
        return False
    return name not in _vendor.BACKENDS or getattr(plugin.creator_fn, "__module__", "") != distributed_c10d.__name__


def _make_ncclx(options: CommOptions) -> Any:
    pg_options = native().Options(options.timeout, dict(options.hints))
    return _backend.create(_distributed_options(options), pg_options)


_GLOO_HINTS = ("hostname", "interface", "timeout_seconds")


def _make_gloo(options: CommOptions) -> Any:
    warn_of_hints("new_comm", options.hints.keys() - _GLOO_HINTS, "the backend gloo")
    made: Any = cast(Any, dist.ProcessGroupGloo)._Options()
    hostname = options.hints.get("hostname") or os.environ.get("TORCHCOMM_GLOO_HOSTNAME")
    interface = options.hints.get("interface") or os.environ.get("TORCHCOMM_GLOO_INTERFACE")
    create = dist.ProcessGroupGloo.create_device
    if hostname or interface:
        made._devices = [create(hostname=hostname) if hostname else create(interface=interface)]
    else:
        made._devices = [dist.ProcessGroupGloo.create_default_device()]
    made._timeout = options.timeout
    return dist.ProcessGroupGloo(options.store, options.rank, options.size, made)


def _make_plugin(name: str, options: CommOptions) -> Any:
    warn_of_hints("new_comm", options.hints.keys() - {"timeout_seconds"}, f"the backend {name}")
    creator = dist.Backend._plugins[name.upper()]
    if creator.extended_api:
        return creator.creator_fn(_distributed_options(options), None)
    return creator.creator_fn(options.store, options.rank, options.size, options.timeout)


def _distributed_options(options: CommOptions) -> Any:
    made: Any = c10d._DistributedBackendOptions()
    made.store = options.store
    made.group_rank = options.rank
    made.group_size = options.size
    made.timeout = options.timeout
    made.group_id = options.name
    made.global_ranks_in_group = list(range(options.size))
    return made


@functools.cache
def accepts_options(method: Callable[..., Any]) -> bool:
    """Whether a backend's method has a parameter for the call's options."""
    return "options" in inspect.signature(method).parameters
