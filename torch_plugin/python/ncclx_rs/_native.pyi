"""The native module: the engine and its c10d classes."""

import os
import pathlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from os import PathLike
from typing import Any, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as _C10dBackend
from torch._C._distributed_c10d import ErrorType as _ErrorType
from torch._C._distributed_c10d import Store as _Store

__version__: str
torch_build_version: str

def settings() -> list[tuple[str, list[str], str, str, str]]:
    """Every setting: name, environment variables, values, default and meaning."""

def launch_rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks, from the launcher's environment; (0, 1) without a launcher."""

def algorithms(collective: str, ranks: int, hosts: int, *, all: bool = False) -> list[str]:
    """The names of the algorithms for a collective, such as ``all_reduce``, of ``ranks`` ranks on ``hosts`` hosts.

    Those that a tuning file may name, or ``all``, also those that run only where a program names them.
    """

def interfaces() -> list[tuple[str, str, bool]]:
    """This host's addresses: the interface's name, the address, and whether it is up.

    Raises:
        OSError: the kernel does not list them.
    """

def advertised_addresses(host: str | None) -> list[str]:
    """The addresses that a rank of this host tells the others, the best first.

    Args:
        host: where the rendezvous is, if that is known.

    Raises:
        ValueError: no interface is usable, or the setting `socket_ifname` matches none.
    """

def preferred_algorithm(collective: str, ranks: int, hosts: int, bytes: int) -> str:
    """The algorithm that the engine takes for a collective of so many bytes in such a world.

    Raises:
        ValueError: there is no such collective, or fewer ranks than hosts.
    """

def descriptors_of(ranks: int) -> int:
    """How many file descriptors a communicator of so many ranks takes at most, as this process is set.

    Raises:
        ValueError: a setting of this process is invalid.
    """

def cuda_devices() -> tuple[str, list[str]]:
    """The version of CUDA that the driver serves, and the devices' names. OSError: there is no driver."""

def numa_nodes(sys: str | PathLike[str]) -> list[tuple[int, list[tuple[int, int]], list[int]]]:
    """The NUMA nodes that the folder ``sys`` tells of, ``/sys`` outside tests.

    Of each node its number, the first and last number of each run of its CPUs, and how far the nodes are from it.
    """

def home_node() -> tuple[int, str | None] | None:
    """The NUMA node that a rank is on which may run where this thread may; None if that is no one of several.

    Beside its number: why the system does not let the rank's memory lie there, None if it does.

    Raises:
        ValueError: a setting has a value that is none of its own.
    """

def measure_link(writer: int, reader: int) -> list[tuple[str, float | None]]:
    """Measures what two cores of this host can exchange through memory, in about a second: figures by name.

    `round_trip` of a line of cache in nanoseconds; `write_shared`, `write_owned`, `read`, `read_owning` and `memcpy` in
    GB/s; `page` in nanoseconds, None where a process may not read another one's memory.

    Raises:
        OSError: the cores are one, or this process may not run on one of them.
    """

def check_parameters(parameters: str) -> None:
    """Checks parameters of the model of `simulate` as JSON. ValueError: which field is wrong."""

def check_world(ranks_per_host: int, hosts: int) -> None:
    """Checks the size of a world that is to be simulated. ValueError: there are no ranks, or too many."""

def simulate(
    parameters: str,
    collective: str,
    algorithm: str,
    bytes: int,
    *,
    ranks_per_host: int,
    hosts: int,
    late: list[tuple[int, float]],
) -> dict[str, float]:
    """Simulates one collective in one world.

    Args:
        parameters: JSON; docs/scale.md has the fields.
        collective: Its name.
        algorithm: The name of one that does it in this world.
        bytes: The size, which is rounded down to whole blocks.
        ranks_per_host: How many ranks each host has.
        hosts: How many hosts there are.
        late: Ranks, and how many seconds after the others each begins.

    Returns:
        `bytes` after rounding; `seconds`; `late_costs`, in seconds; of what a `rank` sends, and a `host` to others,
        `_messages_max`, `_messages_mean`, `_bytes_max` and `_bytes_mean`.

    Raises:
        ValueError: an argument is wrong.
        RuntimeError: the schedules have too many steps, or it takes more than five hours.
    """

def simulate_start(
    parameters: str, *, ranks_per_host: int, hosts: int, late: list[tuple[int, float]]
) -> dict[str, float]:
    """Simulates how the ranks of one world meet.

    Args:
        parameters: JSON; docs/scale.md has the fields.
        ranks_per_host: How many ranks each host has.
        hosts: How many hosts there are.
        late: Ranks, and how many seconds after the others each comes.

    Returns:
        What `simulate` returns; `bytes` are those of the message with the table of all ranks.

    Raises:
        ValueError: an argument is wrong, or the parameters say nothing of a start.
        RuntimeError: there are too many ranks, or it takes more than five hours.
    """

def measure_parameters() -> list[tuple[str, float]]:
    """Measures the parameters of that model between two ranks of this host: seconds by name."""

def allocates(library: str | None, packages: list[str]) -> tuple[bool, str]:
    """Whether the library `nccl` or `rccl`, or that of the settings, allocates; else why not, if it should."""

def vendor_library(name: str, packages: list[str]) -> tuple[pathlib.Path, str, list[str]]:
    """Loads the library `nccl`, `rccl` or `ucx`: its file, version, and what it lacks. OSError: none can be used."""

def write_dumps(folder: str | os.PathLike[str], reason: str) -> list[pathlib.Path]:
    """Writes the flight recorders of this process's communicators to a folder; returns the files' names."""

def check_settings(hints: list[tuple[str, str]]) -> None: ...
def pytorch_recorder(hints: list[tuple[str, str]]) -> bool:
    """Whether PyTorch's own flight recorder should record a process group with these hints."""

def dumps(reason: str) -> list[str]:
    """The flight recorders of this process's communicators, each as JSON."""

def flush_log(seconds: float) -> bool:
    """Waits up to ``seconds`` until Python's logging has got all records so far; returns whether it has."""

def finish_log() -> bool:
    """Delivers the records so far up to a timeout, and prints the rest; returns whether none were left."""

def mesh_grid(
    dimensions: list[tuple[str, int]], hosts: list[int], innermost: str | None = None
) -> tuple[list[int], list[tuple[str, list[list[int]]]]]:
    """Lays out ranks in a grid; returns them in the grid's order, and the groups along each dimension."""

@final
class SecretStore:
    """A store of this or another process. It serves only clients that prove that they know its secret of 32 bytes."""

    @staticmethod
    def serve(secret: bytes) -> SecretStore:
        """Serves a store at a free port of all of this host's addresses, until the store is dropped."""

    @staticmethod
    def connect(address: str, secret: bytes, timeout: timedelta) -> SecretStore:
        """Connects to a store at a host or IP address with a port; waits for it up to ``timeout``."""

    @property
    def port(self) -> int | None:
        """The port of a store that this process serves."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str, timeout: timedelta) -> bytes:
        """The value of ``key``; waits for it up to ``timeout``."""

@final
class RdmaRegistration:
    """The registered memory of a contiguous tensor on the CPU or a CUDA device. ValueError: it is another one."""

    def __new__(cls, tensor: torch.Tensor) -> RdmaRegistration: ...
    def remote_buffer(self, offset: int, length: int) -> tuple[int, int, str]:
        """The address, the length and the key of ``length`` bytes from ``offset`` on, for other processes."""

    def deregister(self) -> None:
        """Takes all keys back."""

@final
class RdmaConnection:
    """A transport to another process."""

    def __new__(cls, hints: list[tuple[str, str]], packages: list[str]) -> RdmaConnection: ...
    def bind(self) -> bytes: ...
    def connect(self, peer: bytes, timeout: timedelta | None) -> None: ...
    def is_connected(self) -> bool: ...
    def wire(self) -> str | None:
        """How bytes move, once it is connected."""

    def devices(self) -> list[str]:
        """What UCX goes through."""

    def post(
        self, writes: bool, spans: list[tuple[RdmaRegistration, int, int, int, int, str]], timeout: timedelta | None
    ) -> RdmaOperation:
        """Begins to write or read spans."""

    def close(self) -> None:
        """Ends what is in flight, and both connections."""

@final
class RdmaOperation:
    """An operation in flight or done."""

    def wait(self, limit: timedelta | None) -> None:
        """Waits for its end, and at most for ``limit``; raises its error."""

    def is_done(self) -> bool: ...

def _end_all() -> None: ...
def _call_hook(hook: Callable[[], object]) -> None: ...
def _shared_memory(bytes: int) -> torch.Tensor: ...
def _wait_blocking(work: dist.Work) -> None: ...
def _cuda_devices() -> int: ...

class Options(_C10dBackend.Options):
    """A group's own settings, as ``pg_options`` of ``init_process_group`` and ``new_group``.

    Args:
        timeout: the timeout of operations that have none of their own. The default is the value of the hint
            ``timeout_seconds`` or of ``NCCLX_RS_TIMEOUT_SECONDS``. The ``timeout`` of ``init_process_group`` or
            ``new_group`` wins, unless it is PyTorch's default, 30 minutes: a backend cannot see whether the program
            gave it.
        hints: settings by name; see docs/configuration.md. The attribute is read-only, but may be assigned as a whole.

    A group copies the options, so a program can use them for several groups.
    """

    def __init__(self, timeout: timedelta | None = None, hints: Mapping[str, str] = ...) -> None: ...
    @property
    def hints(self) -> Mapping[str, str]: ...
    @hints.setter
    def hints(self, hints: Mapping[str, str]) -> None: ...
    def __deepcopy__(self, memo: Any) -> Options: ...

class Backend(_C10dBackend):
    """A process group's backend; made by ``init_process_group``."""

    @property
    def options(self) -> Options: ...
    def _set_default_timeout(self, timeout: timedelta) -> None: ...
    def get_error(self) -> _ErrorType: ...
    def _host(self, rank: int) -> int: ...
    def _name_ranks(self, members: list[int]) -> None: ...
    def _on_failure(self, hook: Callable[[], object], number: int = -1) -> None: ...
    def _settle(self) -> None: ...
    def _has_failed(self) -> bool: ...
    def _wait_for_hooks(self) -> None: ...
    def _set_rendezvous(
        self, handle: str, rendezvous: Callable[[int, set[str] | list[str], timedelta], tuple[_Store, int, int, str]]
    ) -> None: ...
    def _message(
        self, sends: bool, tensor: torch.Tensor, peer: int, tag: int, timeout: timedelta, async_op: bool = True
    ) -> dist.Work: ...
    def _barrier(self, async_op: bool, timeout: timedelta) -> dist.Work: ...
    def _direct_calls(self) -> dict[str, Callable[..., bool]]: ...
    def _set_device(self, device: torch.device) -> None: ...
    def _part(self, ranks: list[int]) -> object | None: ...
    def _inherit(self, part: object) -> None: ...
    def _allocates(self) -> tuple[bool, str]: ...
    def _register(self, tensor: torch.Tensor) -> None: ...
    def _deregister(self, tensor: torch.Tensor) -> None: ...
    def _window_register(self, tensor: torch.Tensor, owning: bool = True) -> int: ...
    def _window_deregister(self, window: int) -> None: ...
    def _window_put(
        self,
        window: int,
        tensor: torch.Tensor,
        dst: int,
        byte_offset: int,
        async_op: bool = False,
        timeout_ms: int = -1,
    ) -> dist.Work: ...
    def _window_get(
        self,
        window: int,
        tensor: torch.Tensor,
        src: int,
        byte_offset: int,
        async_op: bool = False,
        timeout_ms: int = -1,
    ) -> dist.Work: ...
    def _window_accumulate(
        self,
        window: int,
        tensor: torch.Tensor,
        dst: int,
        byte_offset: int,
        async_op: bool = False,
        timeout_ms: int = -1,
    ) -> dist.Work: ...
    def _window_flush(self, window: int, dst: int, async_op: bool = False, timeout_ms: int = -1) -> dist.Work: ...
    def _window_all_gather(
        self,
        window: int,
        output: torch.Tensor,
        input: torch.Tensor,
        async_op: bool = False,
        timeout_ms: int = -1,
    ) -> dist.Work: ...
    def _window_fence(self, window: int) -> None: ...
    def _window_map(self, window: int, rank: int) -> torch.Tensor: ...
    def _window_get_path(self, window: int, rank: int) -> str: ...
    def _window_signal(self, window: int, dst: int, async_op: bool = False, timeout_ms: int = -1) -> dist.Work: ...
    def _window_wait_signal(self, window: int, src: int, async_op: bool = False, timeout_ms: int = -1) -> dist.Work: ...
    def perform_nocolor_split(self, device: torch.device) -> None: ...

class BackendWrapper(_C10dBackend):
    """A communicator of the object API as a process group's backend.

    Args:
        comm: a `TorchComm` over a c10d backend.
        owns: whether it ends with the process group.
    """

    def __init__(self, comm: Any, owns: bool = True) -> None: ...
    @property
    def options(self) -> _C10dBackend.Options: ...
    def get_comm(self) -> Any: ...
    def get_error(self) -> _ErrorType: ...
    def _set_default_timeout(self, timeout: timedelta) -> None: ...
    def perform_nocolor_split(self, device: torch.device) -> None: ...

def create_backend(opts: Any, pg_options: Options | None = None) -> Backend:
    """The backend of a new process group; returns once every rank has joined."""

@final
class Library:
    """A shared library with a backend. It stays loaded until the process ends.

    Raises:
        ImportError: the file cannot be read or loaded, has no backend, or has another version of the interface.
    """

    def __new__(cls, path: str | PathLike[str]) -> Library: ...
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def methods(self) -> list[str]: ...
    def join(
        self,
        name: str,
        device: str,
        rank: int,
        size: int,
        timeout_ms: int,
        hints: list[tuple[str, str]],
        store: _Store,
        store_host: str,
    ) -> LibraryBackend: ...

@final
class LibraryBackend:
    """One rank's membership in a communicator of a library's backend."""

    def submit(
        self,
        name: str,
        kind: str,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        reduce: tuple[str, float],
        peer: int,
        send_counts: list[int],
        recv_counts: list[int],
        timeout_ms: int,
        blocking: bool,
    ) -> LibraryWork: ...
    def call(self, method: str, arguments: str, tensors: list[torch.Tensor]) -> str: ...
    def set_timeout(self, timeout_ms: int) -> None: ...
    def abort(self, reason: str) -> None: ...
    def finalize(self) -> None: ...

@final
class LibraryWork:
    """An operation of a library's backend."""

    def wait(self, timeout_ms: int) -> bool: ...
    @property
    def failure(self) -> str | None: ...
