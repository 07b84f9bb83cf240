"""PyTorch's features on top of a backend: DDP, FSDP2, DTensor, functional collectives, compile, futures, profiler."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from harness import BACKEND, World, joined
from reference import assert_same, data, reduced
from torch import nn

SIZES = (2, 3)


def model() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4))


def batches(size: int, steps: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    shapes = (size * 6, 12), (size * 6, 4)
    return [tuple(torch.randn(shape, generator=generator) for shape in shapes) for _ in range(steps)]  # type: ignore


def train(net: nn.Module, rank: int | None, size: int) -> None:
    """Trains on this rank's share of each batch, or on all of it without a rank."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    share = slice(None) if rank is None else slice(rank * 6, rank * 6 + 6)
    for inputs, targets in batches(size):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs[share]), targets[share]).backward()
        optimizer.step()


def trained_alone(size: int) -> nn.Module:
    net = model()
    train(net, None, size)
    return net


def assert_parameters_close(got: dict[str, torch.Tensor], size: int, what: str) -> None:
    for name, expected in trained_alone(size).named_parameters():
        torch.testing.assert_close(got[name], expected, msg=lambda text, name=name: f"{what}, {name}: {text}")


def ddp_training_equals_one_process(rank: int, size: int) -> None:
    net = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.001)  # several buckets
    train(net, rank, size)
    assert_parameters_close(dict(net.module.named_parameters()), size, "DDP")


def average_of_bucket(group, bucket):  # DDP refuses annotations that are strings
    average = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, group=group, async_op=True).get_future()
    return average.then(lambda future: future.value()[0])


def ddp_takes_the_future_of_a_communication_hook(rank: int, size: int) -> None:
    net = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.001)
    net.register_comm_hook(dist.group.WORLD, average_of_bucket)
    train(net, rank, size)
    assert_parameters_close(dict(net.module.named_parameters()), size, "DDP with a hook")


def ddp_synchronizes_batch_statistics(rank: int, size: int) -> None:
    torch.manual_seed(rank)  # the ranks start with different weights; DDP must make them equal
    net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for _ in range(2):
        net(torch.randn(8, 4)).sum().backward()
    net(torch.randn(8, 4))
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, {k: v.tolist() for k, v in net.module.named_parameters()})
    assert all(state == gathered[0] for state in gathered)


def fully_sharded_training_equals_one_process(rank: int, size: int) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (size,))
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net, rank, size)
    full = {name: parameter.full_tensor() for name, parameter in net.named_parameters()}
    assert_parameters_close(full, size, "FSDP2")


def distributed_tensors_redistribute(rank: int, size: int) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (size,))
    whole = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)  # not divisible by any number of ranks
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert_same(sharded.full_tensor(), whole, "full_tensor")
    assert_same(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), whole, "Shard(0) to Shard(1)")
    assert_same(sharded.redistribute(mesh, [Replicate()]).to_local(), whole, "Shard(0) to Replicate")
    total = torch.distributed.tensor.DTensor.from_local(whole.clone(), mesh, [Partial()])
    assert_same(total.redistribute(mesh, [Replicate()]).to_local(), whole * size, "Partial to Replicate")
    assert_same(total.redistribute(mesh, [Shard(0)]).full_tensor(), whole * size, "Partial to Shard(0)")
    product = distribute_tensor(whole, mesh, [Shard(1)]) @ distribute_tensor(whole.t().contiguous(), mesh, [Shard(0)])
    torch.testing.assert_close(product.full_tensor(), whole @ whole.t())


def functional(tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
    group = dist.group.WORLD
    total = funcol.all_reduce(tensor * 2, "sum", group)
    gathered = funcol.all_gather_tensor(tensor + 1, gather_dim=0, group=group)
    part = funcol.reduce_scatter_tensor(gathered * 1, "sum", scatter_dim=0, group=group)
    exchanged = funcol.all_to_all_single(gathered - 1, None, None, group)
    return [total + 0, gathered + 0, part + 0, exchanged + 0]


def assert_functional_results(results: list[torch.Tensor], rank: int, size: int) -> None:
    inputs = [data(r, (4, 3)) for r in range(size)]
    gathered = torch.cat([t + 1 for t in inputs])
    expected = [reduced(inputs) * 2, gathered, (inputs[rank] + 1) * size, torch.cat([inputs[rank]] * size)]
    names = ("all_reduce", "all_gather_tensor", "reduce_scatter_tensor", "all_to_all_single")
    for name, got, want in zip(names, results, expected, strict=True):
        assert_same(got, want, name)


def functional_collectives_match_reference(rank: int, size: int) -> None:
    assert_functional_results(functional(data(rank, (4, 3)), size), rank, size)


def functional_collectives_compile(rank: int, size: int) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(functional, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert_functional_results(compiled(data(rank, (4, 3)), size), rank, size)


def temporaries_of_functional_collectives_live(rank: int, size: int) -> None:
    for i in range(20):
        gathered = funcol.all_gather_tensor(data(rank, 10_000, salt=i) + 0, 0, dist.group.WORLD)
        torch.full((10_000,), float("nan"))  # takes the memory of the input unless it is held
        assert_same(gathered + 0, torch.cat([data(r, 10_000, salt=i) for r in range(size)]), f"round {i}")


def futures_chain(rank: int, size: int) -> None:
    work = dist.all_reduce(data(rank, 1000), async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2).then(lambda future: future.value() + 1)
    assert_same(doubled.wait(), reduced([data(r, 1000) for r in range(size)]) * 2 + 1, "chained callbacks")
    assert work.get_future().done()
    chained = [dist.all_reduce(data(rank, 10), async_op=True).get_future() for _ in range(5)]
    for future in torch.futures.collect_all(chained).wait():
        assert_same(future.value()[0], reduced([data(r, 10) for r in range(size)]), "collected futures")


def callbacks_may_wait_for_other_futures(rank: int, size: int) -> None:
    """As PowerSGD's callbacks do; here for messages, which may run at any time beside collectives."""

    def passed_on(tag: int, future: torch.futures.Future) -> torch.Tensor:
        total, other = future.value()[0], torch.empty(10)
        works = dist.isend(total, (rank + 1) % size, tag=tag), dist.irecv(other, (rank - 1) % size, tag=tag)
        torch.futures.wait_all([work.get_future() for work in works])
        return other

    def reduced_and_passed_on(tag: int) -> torch.futures.Future:
        work = dist.all_reduce(torch.ones(10), async_op=True)
        return work.get_future().then(functools.partial(passed_on, tag))

    for future in [reduced_and_passed_on(tag) for tag in range(3)]:
        assert_same(future.wait(), torch.full((10,), float(size)), "while nobody waits for a work")
    future = reduced_and_passed_on(3)
    dist.all_reduce(torch.ones(10))
    assert_same(future.wait(), torch.full((10,), float(size)), "while the caller waits for another work")


def callbacks_may_raise(rank: int, size: int) -> None:
    def refuse(future: torch.futures.Future) -> None:
        raise KeyError("from a callback")

    failed = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(refuse)
    with pytest.raises(Exception, match="from a callback"):
        failed.wait()
    dist.barrier()


def works_tell_their_state(rank: int, size: int) -> None:
    tensor = torch.ones(5)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait() and work.is_completed() and work.is_success()
    assert_same(work.result()[0] if isinstance(work.result(), list) else work.result(), tensor, "result()")


def profiler_shows_the_collectives(rank: int, size: int) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(100))
        dist.all_gather_into_tensor(torch.empty(size * 10), torch.ones(10))
        dist.broadcast(torch.ones(3), src=0, async_op=True).wait()
    names = {event.name for event in profile.events()}
    ours = sorted(name for name in names if name.startswith(f"{BACKEND}:"))
    for what in ("all_reduce", "broadcast"):
        assert any(what in name for name in ours), f"no {BACKEND} event for {what} among {sorted(names)}"
    assert any("all_gather" in name or "allgather" in name for name in ours), ours


def detail_debugging_wraps_the_backend(rank: int, size: int) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with joined():
            tensor = data(rank, 100)
            dist.all_reduce(tensor)
            assert_same(tensor, reduced([data(r, 100) for r in range(size)]), "all_reduce under DETAIL")
            group = dist.new_group([0])
            if rank == 0:
                dist.all_reduce(torch.ones(1), group=group)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def device_maps_choose_the_backend(rank: int, size: int) -> None:
    for backend in (f"cpu:{BACKEND}", f"cpu:{BACKEND},cuda:nccl", f"cpu:{BACKEND},cuda:{BACKEND}"):
        if backend.endswith(":nccl") and not torch.cuda.is_available():
            print(f"{backend}: not tried, NCCL wants a GPU")
            continue
        with joined(backend=backend):
            assert dist.group.WORLD._get_backend(torch.device("cpu")).name() == BACKEND, backend
            tensor = data(rank, 100)
            dist.all_reduce(tensor)
            assert_same(tensor, reduced([data(r, 100) for r in range(size)]), backend)
            dist.barrier()


CHECKS = [
    ddp_training_equals_one_process,
    ddp_takes_the_future_of_a_communication_hook,
    ddp_synchronizes_batch_statistics,
    fully_sharded_training_equals_one_process,
    distributed_tensors_redistribute,
    functional_collectives_match_reference,
    functional_collectives_compile,
    temporaries_of_functional_collectives_live,
    futures_chain,
    callbacks_may_wait_for_other_futures,
    callbacks_may_raise,
    works_tell_their_state,
    profiler_shows_the_collectives,
]


@pytest.mark.worlds(sizes=SIZES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_framework(world: World, check) -> None:
    world.run(check)


@pytest.mark.worlds(sizes=(1,))
@pytest.mark.parametrize(
    "check",
    [ddp_training_equals_one_process, fully_sharded_training_equals_one_process, futures_chain],
    ids=lambda check: check.__name__,
)
def test_framework_alone(world: World, check) -> None:
    world.run(check)


@pytest.mark.worlds(sizes=SIZES)
@pytest.mark.parametrize(
    "check", [detail_debugging_wraps_the_backend, device_maps_choose_the_backend], ids=lambda check: check.__name__
)
def test_framework_makes_the_group(world: World, check) -> None:
    world.run(check, join=False)
