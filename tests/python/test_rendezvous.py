"""The rendezvous of ranks: every kind of store, and the number of calls on it."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, World, fresh_store, join, joined, meet
from reference import assert_same, data, reduced


def assert_group_works(rank: int, size: int) -> None:
    tensor = data(rank, 1000)
    dist.all_reduce(tensor)
    assert_same(tensor, reduced([data(r, 1000) for r in range(size)]), "all_reduce")
    dist.barrier()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment_variables_rendezvous(rank: int, size: int, port: int) -> None:
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ.update(variables)
    try:
        dist.init_process_group(BACKEND)
        assert_group_works(rank, size)
        # The default store must outlive the destruction of every rank's group.
        dist.destroy_process_group()
    finally:
        for name in variables:
            del os.environ[name]


def tcp_address_rendezvous(rank: int, size: int, port: int) -> None:
    dist.init_process_group(BACKEND, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    assert_group_works(rank, size)
    dist.destroy_process_group()


def file_rendezvous(rank: int, size: int, path: str) -> None:
    dist.init_process_group(BACKEND, init_method=f"file://{path}", rank=rank, world_size=size)
    assert_group_works(rank, size)
    dist.destroy_process_group()


def file_store_rendezvous(rank: int, size: int, path: str) -> None:
    with joined(store=dist.FileStore(path, size)):
        assert_group_works(rank, size)


def nested_prefixes_rendezvous(rank: int, size: int) -> None:
    with joined(store=dist.PrefixStore("a/b", dist.PrefixStore("", fresh_store()))):
        assert_group_works(rank, size)


def hash_store_serves_one_rank(rank: int, size: int) -> None:
    with joined(store=dist.HashStore()):
        assert_group_works(rank, size)


def one_store_serves_groups_one_after_another(rank: int, size: int) -> None:
    store = fresh_store()
    for i in range(5):
        with joined(store=dist.PrefixStore(f"group{i}", store)):
            assert_group_works(rank, size)


def a_store_that_has_ended_is_named(rank: int, size: int) -> None:
    if rank == 0:
        return
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    with pytest.raises(RuntimeError, match="(?i)store") as failed:
        join(store=store)
    assert "frame #" not in str(failed.value), failed.value


class CountingStore(dist.Store):
    """Forwards every call, and records it."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner = inner
        self.calls: list[str] = []
        self.lock = threading.Lock()

    def _count(self, what: str) -> None:
        with self.lock:
            self.calls.append(what)

    def set(self, key: str, value: str | bytes) -> None:
        self._count(f"set {key}")
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self._count(f"get {key}")
        return self.inner.get(key)

    def add(self, key: str, value: int) -> int:
        self._count(f"add {key}")
        return self.inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        self._count(f"check {keys}")
        return self.inner.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._count(f"compare_set {key}")
        return self.inner.compare_set(key, expected, desired)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._count(f"multi_get {keys}")
        return self.inner.multi_get(keys)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self._count(f"multi_set {keys}")
        self.inner.multi_set(keys, values)

    def append(self, key: str, value: str) -> None:
        self._count(f"append {key}")
        self.inner.append(key, value)

    def delete_key(self, key: str) -> bool:
        self._count(f"delete_key {key}")
        return self.inner.delete_key(key)

    def wait(self, keys: list[str], *timeout: datetime.timedelta) -> None:
        self._count(f"wait {keys}")
        self.inner.wait(keys, *timeout)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self.inner.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        return self.inner.has_extended_api()

    def clone(self) -> CountingStore:
        return self


def calls_on_the_store(rank: int, size: int) -> list[list[str]]:
    """The calls of the default group with its first operations, of a second group, and of everything after."""
    store = CountingStore(fresh_store())
    join(store=store)
    dist.barrier()
    assert_group_works(rank, size)
    first, store.calls = store.calls, []
    group = dist.new_group(list(range(size)))
    dist.barrier(group)
    second, store.calls = store.calls, []
    for _ in range(20):
        assert_group_works(rank, size)
        dist.barrier(group)
    return [first, second, store.calls]


# ---- communicators of the object API ----


@contextlib.contextmanager
def communicator(rank: int, size: int, **options: Any) -> Iterator[ncclx_rs.TorchComm]:
    options = {"backend": "ncclx", "device": "cpu", "timeout": 60, **options}
    with ncclx_rs.new_comm(rank=rank, size=size, **options) as comm:
        tensor = torch.ones(1)
        comm.all_reduce(tensor)
        assert tensor.item() == size
        yield comm


def pairs_meet_in_stores_of_their_own(rank: int, size: int, options: dict[str, Any]) -> None:
    stores = [fresh_store() for _ in range(size)]
    for other in range(1, size):
        if rank in (0, other):
            for _ in range(2):
                with communicator(min(rank, 1), 2, store=stores[other], **options) as comm:
                    made = comm.get_name()
            assert made == options.get("name", "comm1")
    with communicator(rank, size, store=stores[0], **options):
        pass


def one_name_serves_communicators_one_after_another(rank: int, size: int, options: dict[str, Any]) -> None:
    store = fresh_store()
    for _ in range(5):
        with communicator(rank, size, store=dist.PrefixStore("mine", store), name="again", **options):
            pass


def who_failed_alone_meets_the_others(rank: int, size: int, options: dict[str, Any]) -> None:
    store = fresh_store()
    if rank == 1:
        for _ in range(2):
            with pytest.raises(RuntimeError):
                ncclx_rs.new_comm("ncclx", "cpu", rank=rank, size=size, store=store, timeout=0.2, **options)
    meet()
    with communicator(rank, size, store=store, **options) as comm:
        assert comm.get_name() == options.get("name", "comm0")


def those_who_made_a_mistake_one_after_another_meet_anew(rank: int, size: int, options: dict[str, Any]) -> None:
    store = fresh_store()
    for at_fault in reversed(range(size)):
        if rank == at_fault:
            with pytest.raises(ValueError, match="transport is `pigeon`"):
                ncclx_rs.new_comm(
                    "ncclx", "cpu", rank=rank, size=size, store=store, hints={"transport": "pigeon"}, **options
                )
        meet()
    with communicator(rank, size, store=store, **options) as comm:
        assert comm.get_name() == options.get("name", "comm0")


def finds_no_secret(rank: int, size: int, store: dist.Store, options: dict[str, Any]) -> None:
    """Fails by what only this rank sees, and no check of hints."""
    with pytest.raises(ValueError, match="job_secret"):
        hints = {"job_secret": "short"}
        ncclx_rs.new_comm("ncclx", "cpu", rank=rank, size=size, store=store, hints=hints, timeout=5, **options)


def those_who_found_no_secret_one_after_another_meet_anew(rank: int, size: int, options: dict[str, Any]) -> None:
    for attempts in (1, 2):
        store = fresh_store()
        for at_fault in reversed(range(size)):
            for _ in range(attempts if rank == at_fault else 0):
                finds_no_secret(rank, size, store, options)
            meet()
        with communicator(rank, size, store=store, **options):
            pass


def those_who_found_no_secret_meet_anew(rank: int, size: int, options: dict[str, Any]) -> None:
    store = fresh_store()
    for _ in range(3):
        finds_no_secret(rank, size, store, options)
        meet()
    with communicator(rank, size, store=store, **options):
        pass


def who_failed_elsewhere_alone_meets_the_others(rank: int, size: int, options: dict[str, Any]) -> None:
    store = fresh_store()
    if rank == 1:
        finds_no_secret(0, 1, store, options)
        finds_no_secret(rank, size, store, options)
    meet()
    with communicator(rank, size, store=store, **options):
        pass


def those_who_failed_together_meet_anew(rank: int, size: int, options: dict[str, Any]) -> None:
    store = fresh_store()
    for _ in range(3):
        limit = 60 if rank else 0.3
        with pytest.raises(RuntimeError, match=rf"ranks \[{size}\] did not join"):  # there is no such rank
            ncclx_rs.new_comm("ncclx", "cpu", rank=rank, size=size + 1, store=store, timeout=limit, **options)
    with communicator(rank, size, store=store, **options):
        pass


def a_port_that_becomes_free_serves_those_who_wait(rank: int, size: int, port: int) -> None:
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    if rank == 0:
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))
            for _ in range(2):
                with pytest.raises(dist.DistNetworkError, match="another program uses MASTER_PORT"):
                    ncclx_rs.new_comm("ncclx", "cpu", rank=rank, size=size)
    with communicator(rank, size) as comm:
        assert comm.get_name() == "comm0"


@pytest.mark.worlds(sizes=(3,), modes=("shm",))
@pytest.mark.parametrize("options", [{}, {"name": "pair"}, {"name": "pair", "backend": "gloo"}], ids=str)
def test_pairs_meet_in_stores_of_their_own(world: World, options: dict[str, Any]) -> None:
    world.run(pairs_meet_in_stores_of_their_own, options, join=False)


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
@pytest.mark.parametrize("options", [{}, {"backend": "gloo"}], ids=str)
def test_one_name_serves_communicators_one_after_another(world: World, options: dict[str, Any]) -> None:
    world.run(one_name_serves_communicators_one_after_another, options, join=False)


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
@pytest.mark.parametrize("options", [{}, {"name": "named"}], ids=str)
@pytest.mark.parametrize(
    "check",
    [
        who_failed_alone_meets_the_others,
        those_who_made_a_mistake_one_after_another_meet_anew,
        those_who_found_no_secret_one_after_another_meet_anew,
        those_who_found_no_secret_meet_anew,
        who_failed_elsewhere_alone_meets_the_others,
        those_who_failed_together_meet_anew,
    ],
    ids=lambda c: c.__name__,
)
def test_who_failed_tries_again(world: World, check, options: dict[str, Any]) -> None:
    world.run(check, options, join=False)


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_a_port_that_becomes_free_serves_those_who_wait(fresh_world: World) -> None:
    fresh_world.run(a_port_that_becomes_free_serves_those_who_wait, free_port(), join=False)


def test_rank_and_size_may_be_given_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Placed(ncclx_rs.TorchCommBackend):
        def init(self, device: torch.device, name: str, options: ncclx_rs.CommOptions) -> None:
            self.place = (options.rank, options.size)

        def get_rank(self) -> int:
            return self.place[0]

        def get_size(self) -> int:
            return self.place[1]

    monkeypatch.setattr("ncclx_rs._backends._registered", {"placed": Placed})
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    for given, place in (({"rank": 3}, (3, 4)), ({"size": 8}, (1, 8)), ({"rank": 0, "size": 2}, (0, 2))):
        with ncclx_rs.new_comm("placed", "cpu", store=dist.HashStore(), **given) as comm:
            assert (comm.rank, comm.size) == place


# ---- the tests of groups ----


@pytest.mark.parametrize("check", [environment_variables_rendezvous, tcp_address_rendezvous], ids=lambda c: c.__name__)
def test_address_rendezvous(world: World, check) -> None:
    world.run(check, free_port(), join=False)


@pytest.mark.parametrize("check", [file_rendezvous, file_store_rendezvous], ids=lambda c: c.__name__)
def test_file_rendezvous(world: World, check, tmp_path: Path) -> None:
    world.run(check, str(tmp_path / "store"), join=False)


@pytest.mark.parametrize(
    "check", [nested_prefixes_rendezvous, one_store_serves_groups_one_after_another], ids=lambda c: c.__name__
)
def test_store_rendezvous(world: World, check) -> None:
    world.run(check, join=False)


@pytest.mark.worlds(sizes=(1,))
def test_hash_store_serves_one_rank(world: World) -> None:
    world.run(hash_store_serves_one_rank, join=False)


def test_one_rank_takes_any_port(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    ncclx_rs.new_comm("ncclx", "cpu", "alone").finalize()


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_a_store_that_has_ended_is_named(world: World) -> None:
    world.run(a_store_that_has_ended_is_named, join=False)


@pytest.mark.parametrize("mode", ["shm", "tcp"])
def test_store_calls_of_a_rank_do_not_grow_with_the_world(mode: str) -> None:
    counts = {}
    for size in (2, 4, 8):
        world = World(size, mode)
        try:
            counts[size] = world.run(calls_on_the_store, join=False)
        finally:
            world.close()
    for phase, what in enumerate(("the default group", "a second group", "operations after that")):
        most = {size: max(len(phases[phase]) for phases in ranks) for size, ranks in counts.items()}
        example = counts[8][1][phase]
        # The library itself makes a few calls on the backend's store, whose number does not depend on the size either.
        assert most[8] <= most[2] + 1, f"{what}: most calls of one rank by world size {most}; rank 1 of 8: {example}"
    assert not any(phases[2] for phases in counts[8]), f"operations use the store: {counts[8]}"
