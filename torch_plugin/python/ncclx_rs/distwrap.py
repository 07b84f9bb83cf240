"""torch.distributed for programs that import it as ``torchcomms.distwrap``.

torchcomms wraps the functions of ``torch.distributed`` to put its own communicators below them. Here
``torch.distributed`` runs on this package's engine by itself, so that this module has the very same functions. Only
those that make groups differ: they take torchcomms' names of backends and its additional arguments.

Example::

    from ncclx_rs import distwrap as dist
    dist.init_process_group("ncclx", use_torchcomms=True)
    dist.all_reduce(tensor)
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import Work as Work
from torch.distributed import GroupMember as GroupMember
from torch.distributed import P2POp as P2POp
from torch.distributed import ProcessGroup as ProcessGroup
from torch.distributed import ReduceOp as ReduceOp
from torch.distributed import all_gather as all_gather
from torch.distributed import all_gather_into_tensor as all_gather_into_tensor
from torch.distributed import all_gather_object as all_gather_object
from torch.distributed import all_reduce as all_reduce
from torch.distributed import all_to_all as all_to_all
from torch.distributed import all_to_all_single as all_to_all_single
from torch.distributed import barrier as barrier
from torch.distributed import batch_isend_irecv as batch_isend_irecv
from torch.distributed import broadcast as broadcast
from torch.distributed import broadcast_object_list as broadcast_object_list
from torch.distributed import destroy_process_group as destroy_process_group
from torch.distributed import gather as gather
from torch.distributed import gather_object as gather_object
from torch.distributed import get_process_group_ranks as get_process_group_ranks
from torch.distributed import get_rank as get_rank
from torch.distributed import get_world_size as get_world_size
from torch.distributed import group as group
from torch.distributed import irecv as irecv
from torch.distributed import is_available as is_available
from torch.distributed import is_initialized as is_initialized
from torch.distributed import isend as isend
from torch.distributed import recv as recv
from torch.distributed import reduce as reduce
from torch.distributed import reduce_scatter as reduce_scatter
from torch.distributed import reduce_scatter_tensor as reduce_scatter_tensor
from torch.distributed import scatter as scatter
from torch.distributed import scatter_object_list as scatter_object_list
from torch.distributed import send as send


def _backend(function: str, backend: str | None) -> str:
    """PyTorch's name of what torchcomms calls ``backend``, which may name one for each device."""
    if backend is None:
        raise ValueError(f"{function}: argument `backend`: expected a name such as ncclx, got None")
    pairs = [pair.rsplit(":", 1) for pair in backend.split(",")]
    return ",".join(":".join([*pair[:-1], "ncclx_rs" if pair[-1] == "ncclx" else pair[-1]]) for pair in pairs)


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: torch.device | int | None = None,
    use_torchcomms: bool = False,
) -> None:
    """As ``torch.distributed.init_process_group``, with a backend's name of torchcomms.

    Args:
        backend: the backend, which torchcomms requires.
        init_method: as PyTorch's, as are the following.
        timeout: the timeout of operations.
        world_size: the number of ranks.
        rank: this process's rank.
        store: the store in which the ranks meet.
        group_name: the group's name.
        pg_options: ``ncclx_rs.Options`` for the group.
        device_id: the device that the group is bound to.
        use_torchcomms: makes no difference: the engine is the same with and without.

    Raises:
        ValueError: no backend is given.
    """
    dist.init_process_group(
        _backend("init_process_group", backend),
        init_method,
        timeout,
        world_size,
        rank,
        store,
        group_name,
        pg_options,
        device_id,
    )


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
) -> Any:
    """As ``torch.distributed.new_group``, with a backend's name of torchcomms, which is required.

    Raises:
        ValueError: no backend is given.
    """
    return dist.new_group(
        None if ranks is None else list(ranks),
        timeout,
        _backend("new_group", backend),
        pg_options,
        use_local_synchronization,
        group_desc,
        device_id,
    )


def split_group(
    parent_pg: Any = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> Any:
    """Makes a group of each list of ranks. Called on all ranks of the parent, with the same lists.

    Args:
        parent_pg: the group to split; the default group if not given.
        split_ranks: lists of ranks of the parent; one of all if not given.
        timeout: the timeout of operations; PyTorch's default if not given.
        pg_options: ``ncclx_rs.Options`` for the groups.
        group_desc: what the groups are for.
        backend: the backend; the parent's if not given.

    Returns:
        The caller's group.

    Raises:
        ValueError: the caller is in no list.
    """
    parent = dist.group.WORLD if parent_pg is None else parent_pg
    members = dist.get_process_group_ranks(parent)
    own = dist.get_rank(parent)
    lists = [range(len(members))] if split_ranks is None else split_ranks
    if not any(own in ranks for ranks in lists):
        raise ValueError(f"split_group: argument `split_ranks`: expected rank {own} in one of the lists, got {lists}")
    name = dist.get_backend_config(parent) if backend is None else _backend("split_group", backend)
    chosen = next(ranks for ranks in lists if own in ranks)
    # Only the members of a group meet to make it.
    return dist.new_group(
        [members[rank] for rank in chosen],
        timeout,
        name,
        pg_options,
        use_local_synchronization=True,
        group_desc=group_desc,
    )


def new_window(group: Any = None, backend: str | None = None) -> NoReturn:
    """Refuses torchcomms' windows of process groups.

    Communicators of `new_comm` have windows. From PyTorch 2.14 on, process groups have PyTorch's own: their method
    ``new_window`` makes one.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "new_window: a process group has no windows of torchcomms; make a communicator by ncclx_rs.new_comm, "
        "or call the group's own new_window, from PyTorch 2.14 on"
    )


def reduce_scatter_quantized(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses torchcomms' reduce_scatter of rounded numbers, which the engine does not have.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("reduce_scatter_quantized: ncclx_rs does not round what it sends; use reduce_scatter_tensor")
