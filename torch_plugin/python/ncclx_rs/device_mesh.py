"""Device meshes over communicators.

`build` splits one communicator into a mesh; `init_device_mesh` makes a mesh of existing communicators. Both return a
``torch.distributed.DeviceMesh``, which slicing, flattening, DTensor, FSDP2 and everything else for meshes accept.
PyTorch has no public interface to make process groups of existing backends, so this module uses private names of
``torch.distributed``.
"""

from __future__ import annotations

import importlib
import itertools
import math
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from ncclx_rs._comm import TorchComm
from ncclx_rs._load import native
from ncclx_rs._wrapper import _BackendWrapper


def build(
    comm: TorchComm,
    dimensions: Mapping[str, int],
    *,
    innermost: str | None = None,
    by_host: bool = True,
) -> DeviceMesh:
    """A mesh of all ranks of a communicator, which is split along each dimension. Called on all ranks.

    The communicator becomes PyTorch's default process group if there is none yet. So groups that PyTorch derives from
    the mesh, such as those of flattened dimensions, run on it too. It stays the caller's, who finalizes it.

    Args:
        comm: the communicator.
        dimensions: names and sizes. The last dimension's ranks vary fastest; the product of the sizes is the number of
            ranks.
        innermost: the dimension with the most communication, which is kept inside a host where possible. The default is
            the last dimension.
        by_host: whether ranks are laid out host by host; otherwise in the order of their numbers.

    Returns:
        The mesh. Its groups are freed with it, or by `close`. A default group made here is freed with its last mesh.

    Raises:
        ValueError: names are repeated or unknown, or the product of the sizes is not the number of ranks.
        RuntimeError: a default process group of other ranks exists, or splitting failed.
    """
    size = comm.get_size()
    hosts = [comm.get_backend_impl().host(rank) if by_host else 0 for rank in range(size)]  # type: ignore[attr-defined]
    ranks, groups = native().mesh_grid(list(dimensions.items()), hosts, innermost)
    number = next(_built)
    meshes = _become_world(comm)
    names, children = [], []
    for dimension, members in groups:
        child = comm.split(members, f"{comm.get_name()}/{dimension}")
        assert child is not None, "the groups along a dimension cover every rank"
        own = next(group for group in members if comm.get_rank() in group)
        name = f"{comm.get_name()}/{number}/{dimension}"
        _create_torchcomm_process_group(child, name, global_ranks_mapping={r: i for i, r in enumerate(own)})
        names.append(name)
        children.append(child)
    shape = tuple(dimensions.values())
    mesh = _device_mesh(torch.tensor(ranks, dtype=torch.int).view(shape), tuple(dimensions), names, comm)
    if meshes is not None:
        meshes.add(number)
    _closers[id(mesh)] = weakref.finalize(mesh, _free, number, names, children, meshes)
    weakref.finalize(mesh, _closers.pop, id(mesh), None)
    return mesh


def close(mesh: DeviceMesh) -> None:
    """Frees the groups of a mesh made by `build`. The program must not use the mesh afterwards. Idempotent.

    Raises:
        ValueError: `build` did not make the mesh.
    """
    closer = _closers.get(id(mesh))
    if closer is None:
        raise ValueError("device mesh: only a whole mesh made by `build` can be closed")
    closer()


def init_device_mesh(
    mesh_dim_comms: Sequence[TorchComm],
    mesh_dim_names: Sequence[str],
    _global_comm: TorchComm | None = None,
) -> DeviceMesh:
    """A mesh over existing communicators, one for each dimension. The last dimension's ranks vary fastest.

    Args:
        mesh_dim_comms: this rank's communicator along each dimension.
        mesh_dim_names: the names of the dimensions and of their process groups.
        _global_comm: the communicator of all ranks, required for more than one dimension.

    Raises:
        RuntimeError: the communicator of all ranks is missing, or does not fit the others.
        ValueError: the numbers of names and communicators differ, or names are repeated.
    """
    comms, names = tuple(mesh_dim_comms), tuple(mesh_dim_names)
    if not 1 <= len(comms) <= 5 or len(comms) != len(names) or len(set(names)) != len(names):
        raise ValueError(
            "init_device_mesh: expected one to five communicators and as many different names, "
            f"got {len(comms)} and {list(names)}"
        )
    shape = tuple(comm.get_size() for comm in comms)
    if _global_comm is None and len(comms) > 1:
        raise RuntimeError("init_device_mesh: a mesh of more than one dimension needs a global comm (_global_comm)")
    whole = comms[0] if _global_comm is None else _global_comm
    if whole.get_size() != math.prod(shape):
        raise RuntimeError(f"init_device_mesh: {shape} make {math.prod(shape)} ranks, the world has {whole.get_size()}")
    ranks = torch.arange(math.prod(shape), dtype=torch.int).view(shape)
    here = tuple(comm.get_rank() for comm in comms)
    if int(ranks[here]) != whole.get_rank():
        raise RuntimeError(f"init_device_mesh: rank {whole.get_rank()} is at {here} of {shape}, where {ranks[here]} is")
    world = _create_torchcomm_process_group(whole, whole.get_name()) if _global_comm is not None else None
    for dimension, (comm, name) in enumerate(zip(comms, names, strict=True)):
        along = [here[:dimension] + (i,) + here[dimension + 1 :] for i in range(comm.get_size())]
        members = {int(ranks[place]): i for i, place in enumerate(along)}
        group = _create_torchcomm_process_group(comm, name, global_ranks_mapping=members)
        world = world or group
    distributed_c10d._update_default_pg(world)
    return _device_mesh(ranks, names, list(names), whole)


def _flatten_with_comm(
    mesh: DeviceMesh, mesh_dim_name: str, comm: TorchComm, global_ranks: list[int], layout: Any
) -> DeviceMesh:
    """The one-dimensional mesh over ``comm``, which becomes the flattened dimension ``mesh_dim_name`` of ``mesh``."""
    mapping = {rank: i for i, rank in enumerate(global_ranks)}
    _create_torchcomm_process_group(comm, mesh_dim_name, global_ranks_mapping=mapping)
    if hasattr(layout, "coalesce"):
        flat_layout = layout.coalesce()
    else:
        from torch.distributed._mesh_layout import _MeshLayout

        flat_layout = _MeshLayout([layout.collapse()])
    root = mesh._get_root_mesh()
    flat: Any = DeviceMesh(
        comm.get_device().type,
        mesh_dim_names=(mesh_dim_name,),
        _init_backend=False,
        _rank=comm.get_rank(),
        _layout=flat_layout,
        _rank_map=mesh._rank_map,
        _root_mesh=root,
    )
    flat._dim_group_names = [mesh_dim_name]
    root._flatten_mapping[mesh_dim_name] = flat
    return flat  # type: ignore[no-any-return]


def _create_torchcomm_process_group(
    comm: TorchComm,
    group_name: str,
    backend_str: str | None = None,
    global_ranks_mapping: dict[int, int] | None = None,
    owns: bool = True,
) -> dist.ProcessGroup:
    """Makes a process group over a communicator's backend, and registers it with ``torch.distributed``.

    Args:
        comm: the communicator.
        group_name: the group's name.
        backend_str: PyTorch's name of the backend. The default is the communicator's backend.
        global_ranks_mapping: maps global ranks to ranks in the group. The default maps each rank to itself.
        owns: whether the communicator ends with the group.
    """
    name: Any = group_name
    backend = dist.Backend(backend_str or _C10D_NAMES.get(comm.get_backend(), comm.get_backend()))
    store = comm.get_options().store
    group: Any = dist.ProcessGroup(store, comm.get_rank(), comm.get_size())
    kind = dist.ProcessGroup.BackendType.GLOO if backend == "gloo" else dist.ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(kind)
    group._register_backend(comm.get_device(), kind, _BackendWrapper(comm, owns))
    group._set_group_name(name)
    world: Any = distributed_c10d._world
    world.pg_map[group] = (backend, store)
    world.pg_names[group] = name
    world.pg_backend_config[group] = str(distributed_c10d.BackendConfig(backend))
    world.pg_group_ranks[group] = global_ranks_mapping or {rank: rank for rank in range(comm.get_size())}
    torch._C._distributed_c10d._register_process_group(name, group)
    tag = f"ptd:{group_name}"
    world.tags_to_pg.setdefault(tag, []).append(group)
    world.pg_to_tag[group] = tag
    return group  # type: ignore[no-any-return]


def _become_world(comm: TorchComm) -> set[int] | None:
    """Makes the communicator the default process group, unless there is one with the same ranks.

    Returns:
        The numbers of the meshes on the default group; None if another module made the group.
    """
    if not dist.is_initialized():
        # The last mesh destroys the group, and the caller goes on with the communicator.
        world = _create_torchcomm_process_group(comm, comm.get_name(), owns=False)
        distributed_c10d._update_default_pg(world)
        _on_own_world[world] = set()
    if (dist.get_rank(), dist.get_world_size()) != (comm.get_rank(), comm.get_size()):
        raise RuntimeError(
            f"device mesh: this is rank {comm.get_rank()} of {comm.get_size()} in communicator `{comm.get_name()}`, "
            f"but rank {dist.get_rank()} of {dist.get_world_size()} in the default process group"
        )
    return _meshes_on_world()


def _meshes_on_world() -> set[int] | None:
    world = dist.group.WORLD
    return None if world is None else _on_own_world.get(world)


def _device_mesh(ranks: torch.Tensor, dimensions: tuple[str, ...], groups: list[str], comm: TorchComm) -> DeviceMesh:
    _forget_shardings()
    mesh: Any = DeviceMesh(
        comm.get_device().type, ranks, mesh_dim_names=dimensions, _init_backend=False, _rank=comm.get_rank()
    )
    mesh._dim_group_names = groups
    return mesh  # type: ignore[no-any-return]


def _forget_shardings() -> None:
    """Empties DTensor's cache of shardings.

    The cache identifies a mesh by shape and names. It would return earlier meshes, whose groups no longer exist.
    """
    if "torch.distributed.tensor" in sys.modules:
        importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()


def _free(number: int, names: list[str], children: list[TorchComm], meshes: set[int] | None) -> None:
    world: Any = distributed_c10d._world
    by_name = {name: group for group, name in world.pg_names.items()}
    for name in names:
        if name in by_name:  # with the default group, the program may have destroyed all groups
            dist.destroy_process_group(by_name[name])
    for child in children:
        # PyTorch has finalized those of the groups above if it could import torchcomms.
        if child._state != "finalized":
            child.finalize()
    if meshes is not None:
        meshes.remove(number)
        if not meshes and _meshes_on_world() is meshes:
            dist.destroy_process_group()


# torch.distributed's names of backends that have another name here.
_C10D_NAMES = {"ncclx": "ncclx_rs"}

_built = itertools.count()
# The default groups made here, each with the numbers of its meshes. A group is destroyed with its last mesh.
_on_own_world: weakref.WeakKeyDictionary[dist.ProcessGroup, set[int]] = weakref.WeakKeyDictionary()
# By the meshes' identity: meshes with the same ranks and names are equal, even with different groups.
_closers: dict[int, weakref.finalize[Any, DeviceMesh]] = {}
