"""Messages of CUDA tensors: send, receive, batches, and what is built on them."""

from __future__ import annotations

import datetime
import os
import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
from harness import World, fresh_store
from reference import any_bits, assert_same, data, reduced

COUNTS = (0, 1, 1000, 300_000)


def here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def messages_go_round_a_ring(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in COUNTS:
        got = torch.zeros(count, device="cuda")
        sent = data(rank, count).cuda()
        # Half of the ranks receive first.
        if rank % 2 == 0:
            dist.send(sent, after, tag=3)
        assert dist.recv(got, before, tag=3) == before
        if rank % 2 == 1:
            dist.send(sent, after, tag=3)
        assert_same(got.cpu(), data(before, count), f"{count} blocking")
        got = torch.zeros(count, device="cuda")
        works = [dist.irecv(got, before), dist.isend(sent, after)]
        for work in works:
            work.wait()
        assert_same(got.cpu(), data(before, count), f"{count} in both directions")


def test_messages_go_round_a_ring(cuda_world: World) -> None:
    cuda_world.run(messages_go_round_a_ring)


def any_type_and_layout(rank: int, size: int) -> None:
    if rank > 1:
        return
    for dtype in (torch.float8_e4m3fn, torch.bool, torch.complex64, torch.bfloat16, torch.int16):
        sent = any_bits(5, 77, dtype)
        if rank == 0:
            dist.send(sent.cuda(), 1)
        else:
            got = any_bits(6, 77, dtype).cuda()
            dist.recv(got, 0)
            assert_same(got.cpu(), sent, f"{dtype}")
    whole = data(3, (40, 30))
    if rank == 0:
        work = dist.isend(whole.cuda().t(), 1)
        dist.send(whole.cuda()[:, ::3], 1)
        work.wait()
    else:
        first, second = torch.zeros(40, 30, device="cuda"), torch.zeros(40, 30, device="cuda")
        works = [dist.irecv(first.t(), 0), dist.irecv(second[:, ::3], 0)]
        for work in works:
            work.wait()
        assert_same(first.cpu(), whole, "transposed")
        assert_same(second[:, ::3].cpu().contiguous(), whole[:, ::3].contiguous(), "every third column")
        assert_same(second[:, 1::3].cpu().contiguous(), torch.zeros(40, 10), "the columns between")


def test_messages_of_any_type_and_layout(cuda_world: World) -> None:
    cuda_world.run(any_type_and_layout)


def a_late_sender_holds_up_no_other(rank: int, size: int) -> None:
    """A receive from rank 1, which sends only after rank 0 has received from itself or from rank 2, is posted first."""
    other = size - 1
    store = fresh_store()
    if size > 2:
        # The pairs set up: that waits for both ends.
        for peer in (1, 2):
            if rank == 0:
                dist.recv(torch.zeros(1, device="cuda"), peer)
            elif rank == peer:
                dist.send(torch.zeros(1, device="cuda"), 0)
    if rank == 0 and size > 2:
        late, soon = torch.zeros(5, device="cuda"), torch.zeros(5, device="cuda")
        first = dist.irecv(late, 1)
        second = dist.irecv(soon, other)
        second.wait()
        assert_same(soon.cpu(), data(other, 5), "from the last rank")
        assert not first.is_completed()
        store.set("go", "on")
        first.wait()
        assert_same(late.cpu(), data(1, 5), "from rank 1")
    elif rank == 1:
        if size > 2:
            store.wait(["go"])
            dist.send(data(1, 5).cuda(), 0)
    elif rank == other:
        dist.send(data(other, 5).cuda(), 0)


def test_a_receive_whose_sender_is_late_holds_up_no_other(cuda_world: World) -> None:
    if cuda_world.size == 2:
        pytest.skip("there is no other sender")
    cuda_world.run(a_late_sender_holds_up_no_other)


def sends_block_nobody(rank: int, size: int) -> None:
    """The host goes on although nothing can be sent yet: the data come from a collective that waits for rank 1."""
    dist.all_reduce(torch.zeros(1, device="cuda"))
    if rank < 2:
        for sender in (0, 1):
            if rank == sender:
                dist.send(torch.zeros(1, device="cuda"), 1 - rank)
            else:
                dist.recv(torch.zeros(1, device="cuda"), 1 - rank)
    torch.cuda.synchronize()
    store = fresh_store()
    tensor = data(rank, 1000).cuda()
    # Not made below: an operator that the software CUDA computes on the CPU would wait for the stream.
    poison = torch.full((1000,), 1e9, device="cuda")
    if rank == 1:
        store.wait(["sent"])
    dist.all_reduce(tensor)
    if rank == 0:
        dist.send(tensor, 1)
        work = dist.isend(tensor, 1)
        work.wait()
        del tensor
        garbage = [torch.empty_like(poison).copy_(poison) for _ in range(4)]
        store.set("sent", "yes")
        torch.cuda.synchronize()
        assert work.is_completed()
        del garbage
    elif rank == 1:
        for turn in range(2):
            got = torch.zeros(1000, device="cuda")
            dist.recv(got, 0)
            assert_same(got.cpu(), sum(data(r, 1000) for r in range(size)), f"turn {turn}")


def test_messages_are_ordered_by_streams_and_block_no_host(cuda_world: World) -> None:
    cuda_world.run(sends_block_nobody)


def batches(rank: int, size: int) -> None:
    for count in COUNTS:
        outputs = [torch.zeros(count + peer, device="cuda") for peer in range(size)]
        ops = []
        for peer in range(size):
            if peer != rank:
                ops.append(dist.P2POp(dist.isend, data(rank, count + rank, salt=peer).cuda(), peer))
                ops.append(dist.P2POp(dist.irecv, outputs[peer], peer))
        works = dist.batch_isend_irecv(ops)
        assert len(works) == 1
        del ops
        garbage = [torch.full((count + peer,), 1e9, device="cuda") for peer in range(size)]
        for work in works:
            work.wait()
        for peer in range(size):
            if peer != rank:
                assert_same(outputs[peer].cpu(), data(peer, count + peer, salt=rank), f"{count} from {peer}")
        del garbage
    # With tensors that are copied, and collectives in the same block.
    after, before = (rank + 1) % size, (rank - 1) % size
    got, total = torch.zeros(30, 20, device="cuda"), torch.ones(7, device="cuda")
    group = dist.distributed_c10d._get_default_group()
    group._start_coalescing(here())
    received = dist.irecv(got.t(), before)
    dist.all_reduce(total, async_op=True) if size > 9 else group.allreduce([total])
    sent = dist.isend(data(rank, (30, 20)).cuda().t(), after)
    with pytest.raises(RuntimeError, match="before the end of the block"):
        received.wait()
    whole = group._end_coalescing(here())
    whole.wait()
    assert_same(got.cpu(), data(before, (30, 20)), "transposed")
    assert_same(total.cpu(), torch.full((7,), float(size)), "the collective")
    sent.wait()
    torch.cuda.synchronize()
    assert received.is_completed() and whole.is_completed()


def test_batches_exchange_messages_of_any_length(cuda_world: World) -> None:
    cuda_world.run(batches)


def after_collectives_of_the_block(rank: int, size: int) -> None:
    store, group = fresh_store(), dist.group.WORLD
    after, before = (rank + 1) % size, (rank - 1) % size
    parts = [data(r, 5000) for r in range(size)]
    for is_warm in (False, True):  # the first operations on a device block until all ranks have called them
        tensor, got = parts[rank].cuda(), torch.zeros(5000, device="cuda")
        if is_warm and rank > 0:
            # Until rank 0 has called its block: its message could leave before there is a sum.
            store.wait(["called"])
        group._start_coalescing(here())
        group.allreduce([tensor])
        dist.isend(tensor, after)
        dist.irecv(got, before)
        whole = group._end_coalescing(here())
        if is_warm and rank == 0:
            store.set("called", "yes")
        whole.wait()
        assert_same(got.cpu(), reduced(parts), f"the sum, sent by the rank before, warm {is_warm}")


def test_messages_come_after_the_collectives_before_them_in_a_block(cuda_world: World) -> None:
    cuda_world.run(after_collectives_of_the_block)


def refusals(rank: int, size: int) -> None:
    tensor = torch.ones(4, device="cuda")
    group = dist.distributed_c10d._get_default_group()
    if size > 2:
        with pytest.raises(ValueError, match="name the source"):
            dist.recv(tensor)
    group._start_coalescing(here())
    with pytest.raises(ValueError, match=r"dst.*99"):
        group.send([tensor], 99, 0)
        group._end_coalescing(here()).wait()
    group._start_coalescing(here())
    with pytest.raises(ValueError, match=r"tensor.*expanded"):
        group.recv([torch.ones(1, device="cuda").expand(5)], (rank + 1) % size, 0)
    with pytest.raises(ValueError, match="the block has ended already"):
        group._end_coalescing(here())
    # So does one on tensors elsewhere.
    device, host = torch.ones(4, device="cuda"), torch.ones(4)
    for begin, other in (
        (lambda: group.send([device], 0, 0), host),
        (lambda: group.allreduce([device]), host),
        (lambda: group.allreduce([host]), device),
    ):
        group._start_coalescing(here())
        begin()
        with pytest.raises(ValueError, match="some on the CPU and some on a CUDA device"):
            group.allreduce([other])
        total = torch.ones(4)
        dist.all_reduce(total)
        assert total.tolist() == [float(size)] * 4
    # The block is over. What comes next is sent at once.
    after, before = (rank + 1) % size, (rank - 1) % size
    # As a batch: a pair's first message waits for the peer's, and all ranks of a ring would.
    ops = [dist.P2POp(dist.isend, tensor * rank, after), dist.P2POp(dist.irecv, tensor, before)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert_same(tensor.cpu(), torch.full((4,), float(before)), "the group works on")


def test_what_is_refused_leaves_the_group_alive(cuda_world: World) -> None:
    cuda_world.run(refusals)


def other_tags(rank: int, size: int) -> None:
    if rank > 1:
        return
    tensor = torch.full((3,), float(rank), device="cuda")
    # Longer than all cells of a ring: a send that fits in them may end before the receiver calls.
    long = torch.zeros(12 << 20, device="cuda")
    with pytest.raises(RuntimeError, match=r"tag"):
        work = dist.isend(long, 1, tag=4) if rank == 0 else dist.irecv(long, 0, tag=5)
        assert work is not None
        work.wait(datetime.timedelta(seconds=30))
    torch.cuda.synchronize()
    dist.send(tensor, 1, tag=6) if rank == 0 else dist.recv(tensor, 0, tag=6)
    assert_same(tensor.cpu(), torch.zeros(3), "the pair works on")


def test_other_tags_are_an_error_of_both(cuda_world: World) -> None:
    cuda_world.run(other_tags)


def of_any_source(rank: int, size: int) -> None:
    if rank == 0:
        dist.send(data(0, 50).cuda(), 1)
    else:
        got = torch.zeros(50, device="cuda")
        assert dist.recv(got) == 0
        assert_same(got.cpu(), data(0, 50), "from anybody")


def test_two_ranks_receive_from_anybody(cuda_world: World) -> None:
    if cuda_world.size != 2:
        pytest.skip("the source must be named")
    cuda_world.run(of_any_source)


def objects(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    got: list[object] = [None, None]
    sent = [{"rank": rank}, "x" * 5000]
    if rank == 0:
        dist.send_object_list(sent, dst=after, device=here())
        dist.recv_object_list(got, src=before, device=here())
    else:
        dist.recv_object_list(got, src=before, device=here())
        dist.send_object_list(sent, dst=after, device=here())
    assert got == [{"rank": before}, "x" * 5000]


def test_objects_travel_as_tensors_of_the_device(cuda_world: World) -> None:
    cuda_world.run(objects)


def object_api(rank: int, size: int) -> None:
    import ncclx_rs

    comm = ncclx_rs.new_comm("ncclx", here(), store=fresh_store(), rank=rank, size=size)
    after, before = (rank + 1) % size, (rank - 1) % size
    # The batch sets up all pairs; a ring of first messages would wait for itself.
    for is_async in (False, True):
        batch = comm.batch_op_create()
        outputs = {peer: torch.zeros(200_000, device="cuda") for peer in range(size) if peer != rank}
        for peer, output in outputs.items():
            batch.send(data(rank, 200_000, salt=peer).cuda(), peer)
            batch.recv(output, peer)
        work = batch.issue(is_async)
        work.wait_blocking()
        assert work.is_completed()
        for peer, output in outputs.items():
            assert_same(output.cpu(), data(peer, 200_000, salt=rank), f"from {peer}, async {is_async}")
    got = torch.zeros(5000, device="cuda")
    works = [comm.recv(got, before, True), comm.send(data(rank, 5000).cuda(), after, True)]
    for work in works:
        work.wait()
    assert_same(got.cpu(), data(before, 5000), "asynchronous")
    got.zero_()
    if rank == 0:
        comm.send(data(rank, 5000).cuda(), after, False)
        comm.recv(got, before, False)
    else:
        comm.recv(got, before, False)
        comm.send(data(rank, 5000).cuda(), after, False)
    assert_same(got.cpu(), data(before, 5000), "blocking, on the current stream")
    # Of a batch that fails nothing is sent, and what follows is in no batch.
    batch = comm.batch_op_create()
    batch.send(data(rank, 5000).cuda(), after)
    batch.send(data(rank, 5000), after)
    with pytest.raises(RuntimeError, match="cuda"):
        batch.issue(False)
    got.zero_()
    works = [comm.recv(got, before, True), comm.send(data(rank, 5000, salt=9).cuda(), after, True)]
    for work in works:
        work.wait()
    assert_same(got.cpu(), data(before, 5000, salt=9), "after a batch that failed")
    comm.finalize()


def test_the_object_api_sends_and_receives(cuda_world: World) -> None:
    cuda_world.run(object_api, join=False)


def few_queues(rank: int, size: int) -> None:
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    before = os.dup(2)
    with tempfile.TemporaryFile() as file, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        os.dup2(file.fileno(), 2)
        try:
            for _ in range(2):
                messages_go_round_a_ring(rank, size)
        finally:
            os.dup2(before, 2)
            os.close(before)
            del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
        file.seek(0)
        said = file.read().decode() + "".join(str(warning.message) for warning in caught)
    assert said.count("CUDA_DEVICE_MAX_CONNECTIONS=1 is less than the 2 streams") == 1, said


def test_too_few_queues_are_warned_of_once(cuda_world: World) -> None:
    cuda_world.run(few_queues)


def pipelines(rank: int, size: int) -> None:
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    def stage_of(device: torch.device) -> nn.Module:
        torch.manual_seed(11 + rank)
        return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).to(device)

    for schedule_class in (ScheduleGPipe, Schedule1F1B):
        results = []
        for device in (torch.device("cpu"), here()):
            module = stage_of(device)
            stage = PipelineStage(module, rank, size, device)
            loss_of = nn.functional.mse_loss
            schedule = schedule_class(stage, n_microbatches=2 * size, loss_fn=loss_of)
            generator = torch.Generator().manual_seed(5)
            batch = torch.randn(8 * size, 16, generator=generator).to(device)
            target = torch.randn(8 * size, 16, generator=generator).to(device)
            losses: list[torch.Tensor] = []
            for _ in range(2):
                if rank == 0:
                    schedule.step(batch)
                elif rank == size - 1:
                    schedule.step(target=target, losses=losses)
                else:
                    schedule.step()
            gradients = [parameter.grad.cpu() for parameter in module.parameters()]
            results.append((gradients, [loss.detach().cpu() for loss in losses]))
        torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_pipelines_train_as_on_the_cpu(cuda_world: World) -> None:
    cuda_world.run(pipelines)


def barrier_after_some_exchanged(rank: int, size: int) -> None:
    group = dist.new_group()
    assert group is not None
    tensor = data(rank, 1000).cuda()
    if rank < 2:
        got = torch.zeros_like(tensor)
        works = [dist.irecv(got, 1 - rank, group=group), dist.isend(tensor, 1 - rank, group=group)]
        for work in works:
            work.wait()
    # The other ranks have not used the device in this group.
    dist.barrier(group)
    if rank < 2:
        assert torch.cuda.current_stream().query(), "the barrier comes after what is on the stream"
        assert_same(got.cpu(), data(1 - rank, 1000), "exchanged")
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    dist.barrier(group)
    assert_same(total.cpu(), sum(data(peer, 1000) for peer in range(size)), "summed")
    dist.destroy_process_group(group)


def test_a_barrier_is_the_same_on_all_ranks_where_some_have_exchanged_messages(four: World) -> None:
    four.run(barrier_after_some_exchanged)
