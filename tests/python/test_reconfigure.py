"""Process groups whose members change, by PyTorch's interface for that, which exists from version 2.14 on."""

from __future__ import annotations

import functools
import os
import signal
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import World, fresh_store, leaving_together, meet
from test_peer_loss import until
from torch._C._distributed_c10d import Backend

pytestmark = [
    pytest.mark.worlds(sizes=(3,), modes=("shm", "tcp")),
    pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="this PyTorch cannot reconfigure process groups"),
]


def begin(rank: int, size: int) -> dist.Store:
    """Makes the default group, without members yet."""
    limit = timedelta(seconds=20)
    store = fresh_store()
    dist.init_process_group("ncclx_rs", store=store, rank=rank, world_size=size, timeout=limit, enable_reconfigure=True)
    return store


def handles(store: dist.Store, rank: int, size: int) -> list[str]:
    store.set(f"handle{rank}", dist._get_reconfigure_handle())
    return [store.get(f"handle{rank}").decode() for rank in range(size)]


def assert_sum(size: int) -> None:
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(size)] * 1000


def members_change(rank: int, size: int) -> None:
    everyone = handles(begin(rank, size), rank, size)
    assert dist._supports_reconfigure()
    with pytest.raises(RuntimeError, match="has no members: call reconfigure first"):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(RuntimeError, match="`init_handles`"):
        dist._reconfigure(1, [*everyone, everyone[0]])
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    dist._reconfigure(1, everyone).wait()
    assert (backend.rank(), backend.size()) == (rank, size)
    assert_sum(size)
    dist._reconfigure(2, everyone[::-1], timeout=timedelta(seconds=10), hints={"transport": "tcp"}).wait()
    assert backend.rank() == size - 1 - rank
    assert_sum(size)
    if rank < 2:  # without the last one, which makes a group of its own
        dist._reconfigure(3, set(everyone[:2])).wait()
        assert_sum(2)
    else:
        dist._reconfigure(4, [everyone[2]]).wait()
        assert_sum(1)
    dist._reconfigure(5, everyone).wait()
    assert_sum(size)


def what_is_in_flight_ends(rank: int, size: int) -> None:
    everyone = handles(begin(rank, size), rank, size)
    dist._reconfigure(1, everyone).wait()
    work = dist.irecv(torch.empty(5), (rank + 1) % size)
    dist.barrier()
    dist._reconfigure(2, everyone).wait()
    assert work is not None
    with pytest.raises(dist.DistBackendError, match="reconfigured|is lost"):
        work.wait()
    assert_sum(size)


def windows_end_with_their_members(rank: int, size: int) -> None:
    everyone = handles(begin(rank, size), rank, size)
    dist._reconfigure(1, everyone).wait()
    group = dist.group.WORLD
    window = group.new_window(torch.zeros(4))
    dist._reconfigure(2, everyone).wait()
    memory = torch.zeros(4)
    other = group.new_window(memory)  # of the same number in the engine
    for call in (
        lambda: window.put(torch.ones(4), (rank + 1) % size, 0, False),
        lambda: window.signal(rank, False),
        lambda: window.wait_signal(rank, False),
        lambda: window.map_remote_tensor(rank),
    ):
        with pytest.raises(RuntimeError, match="the members of its process group have changed"):
            call()
    window.tensor_deregister()
    dist.barrier()
    assert memory.tolist() == [0.0] * 4
    window.tensor_register(torch.zeros(4))
    for usable in (window, other):
        usable.put(torch.ones(4), (rank + 1) % size, 0, False)
        usable.signal((rank + 1) % size, False)
        usable.wait_signal((rank - 1) % size, False)
        usable.tensor_deregister()
    assert memory.tolist() == [1.0] * 4


def survivors_go_on(rank: int, size: int) -> None:
    everyone = handles(begin(rank, size), rank, size)
    dist._reconfigure(1, everyone).wait()
    dist.barrier()
    meet()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with leaving_together(range(1, size)):
        with pytest.raises(dist.DistBackendError, match="rank 0"):
            while True:
                dist.all_reduce(torch.ones(100))
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.get_error() != type(backend.get_error()).SUCCESS
        dist._reconfigure(2, everyone[1:]).wait()
        assert backend.get_error() == type(backend.get_error()).SUCCESS
        assert_sum(size - 1)


def hooks_outlive_an_abort(rank: int, size: int) -> None:
    everyone = handles(begin(rank, size), rank, size)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    generation, called = 1, []
    backend.register_abort_hook(7, lambda: called.append(generation))
    dist._reconfigure(1, everyone).wait()
    assert_sum(size)
    meet()
    backend.abort()
    dist._reconfigure(2, everyone).wait()
    assert_sum(size)
    generation = 2  # in the first one, the hook is called where others are seen to leave
    meet()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with leaving_together(range(1, size)):
        with pytest.raises(dist.DistBackendError, match="rank 0"):
            while True:
                dist.all_reduce(torch.ones(100))
        until(lambda: 2 in called, "the hook is called once rank 0 is lost")
        assert called.count(2) == 1


def groups_of_other_kinds_refuse(rank: int, size: int) -> None:
    dist.init_process_group("ncclx_rs", store=fresh_store(), rank=rank, world_size=size)
    for call in (dist._get_reconfigure_handle, lambda: dist._reconfigure(1, ["x"])):
        with pytest.raises(RuntimeError, match="made without enable_reconfigure=True"):
            call()
    assert_sum(size)


def the_configured_limit_stays(rank: int, size: int) -> None:
    os.environ["NCCLX_RS_TIMEOUT_SECONDS"] = "1"
    try:
        dist.init_process_group("ncclx_rs", store=dist.HashStore(), rank=0, world_size=1, enable_reconfigure=True)
        dist._reconfigure(1, [dist._get_reconfigure_handle()], timeout=timedelta(seconds=60)).wait()
    finally:
        del os.environ["NCCLX_RS_TIMEOUT_SECONDS"]
    with pytest.raises(RuntimeError, match="timed out"):
        dist.recv(torch.ones(1), tag=7)


def a_signals_handler_changes_members_amid_a_blocking_call(rank: int, size: int) -> None:
    everyone = handles(begin(rank, size), rank, size)
    group, tensor = dist.group.WORLD, torch.ones(5)
    backend = group._get_backend(torch.device("cpu"))
    calls = (
        lambda: dist.recv(tensor, 1),
        lambda: dist.all_reduce(tensor),
        lambda: torch.ops.ncclx_rs.all_reduce_(tensor, str(group.group_name)),
    )
    for turn, call in enumerate(calls):
        dist._reconfigure(2 * turn + 1, everyone).wait()
        if rank == 0:
            alone = functools.partial(dist._reconfigure, 2 * turn + 2, everyone[:1])
            before = signal.signal(signal.SIGUSR2, lambda *_, alone=alone: alone())
            timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR2))
            timer.start()
            try:
                with pytest.raises(RuntimeError, match="the process group was reconfigured"):
                    call()
            finally:
                timer.join()
                signal.signal(signal.SIGUSR2, before)
            assert backend.get_error() == type(backend.get_error()).SUCCESS
            assert_sum(1)
        meet()


def a_callback_changes_members(rank: int, size: int) -> None:
    everyone = handles(begin(rank, size), rank, size)
    dist._reconfigure(1, everyone).wait()
    work = dist.irecv(torch.empty(5), 1) if rank == 0 else None
    if work is not None:
        changed = work.get_future().then(lambda _: dist._reconfigure(2, everyone[:1]))
    meet()
    if work is None:
        dist.send(torch.ones(5), 0)
    else:
        changed.wait()
        work.wait()
        assert_sum(1)
    meet()


@pytest.mark.parametrize(
    "check",
    [
        members_change,
        what_is_in_flight_ends,
        windows_end_with_their_members,
        groups_of_other_kinds_refuse,
        the_configured_limit_stays,
    ],
    ids=lambda check: check.__name__,
)
def test_reconfigure(world: World, check) -> None:
    world.run(check, join=False)


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
@pytest.mark.parametrize(
    "check",
    [a_signals_handler_changes_members_amid_a_blocking_call, a_callback_changes_members],
    ids=lambda check: check.__name__,
)
def test_reconfigure_within_an_operation(world: World, check) -> None:
    world.run(check, join=False)


@pytest.mark.parametrize(
    "check",
    [
        survivors_go_on,
        pytest.param(
            hooks_outlive_an_abort,
            marks=pytest.mark.skipif(
                not hasattr(Backend, "register_abort_hook"), reason="this PyTorch has no abort hooks"
            ),
        ),
    ],
    ids=lambda check: check.__name__,
)
def test_a_member_dies(fresh_world: World, check) -> None:
    fresh_world.run(check, join=False, dies={0})
