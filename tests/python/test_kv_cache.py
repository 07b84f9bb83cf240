"""examples/kv_cache: blocks change processes bit for bit, and give the tokens of a single process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, World, fresh_store

FOLDER = Path(__file__).parents[2] / "examples" / "kv_cache"
sys.path.insert(0, str(FOLDER))

import kv_cache  # noqa: E402
import paged  # noqa: E402

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="the program names its package")

# So few blocks that both sides have to wait for some.
WORK = kv_cache.Work(paged.Shape(layers=2, width=32, heads=2, block=4), requests=10, longest=40, count=5, blocks=14)


def hands_over(rank: int, size: int, hints: dict[str, str]) -> kv_cache.Report:
    return kv_cache.perform(WORK, rank, fresh_store(), hints)


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
@pytest.mark.parametrize("hints", [{"transport": "shm"}, {"transport": "tcp"}], ids=["shm", "tcp"])
def test_blocks_change_over(world: World, hints: dict[str, str]) -> None:
    filled, decoded = world.run(hands_over, hints, join=False)
    kv_cache.check(WORK, decoded)
    assert [tokens[:1] for tokens in decoded.tokens] == filled.tokens
    blocks = sum(-(-len(WORK.prompt(request)) // WORK.shape.block) for request in range(WORK.requests))
    assert decoded.spans == 2 * WORK.shape.layers * blocks
    assert decoded.bytes == decoded.spans * WORK.shape.block * WORK.shape.width * 2
    wrong = replace(decoded, tokens=[[-1, *decoded.tokens[0][1:]], *decoded.tokens[1:]])
    with pytest.raises(RuntimeError, match=r"request 0: expected the tokens .*, got \[-1, "):
        kv_cache.check(WORK, wrong)


def notices_other_blocks(rank: int, size: int) -> None:
    """The prefilling side tells of other bytes than it has."""
    store, shape = fresh_store(), WORK.shape
    transport = kv_cache.RdmaTransport()
    store.set(f"address{rank}", transport.bind())
    transport.connect(store.get(f"address{1 - rank}"))
    if rank == 0:
        cache = paged.PagedCache(shape, WORK.blocks)
        memory = kv_cache.RdmaMemory(cache.pages)
        words = kv_cache.RdmaMemory(torch.zeros(WORK.requests, dtype=torch.int64))
        store.set("memory", kv_cache.pickle.dumps((memory.to_remote_buffer(), words.to_remote_buffer())))
        table = cache.take(cache.blocks_for(len(WORK.prompt(0))))
        told = kv_cache.Handover(table, 1, kv_cache.checksum(cache, table) ^ 1)
        store.set("request0", kv_cache.pickle.dumps(told))
    else:
        with pytest.raises(RuntimeError, match="request 0: the blocks are not as they were sent"):
            kv_cache.decode(WORK, transport, store)
    wait_for_all(store, rank, size)
    transport.close()


def wait_for_all(store: dist.Store, rank: int, size: int) -> None:
    store.set(f"through{rank}", "yes")
    store.wait([f"through{other}" for other in range(size)])


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_other_blocks_are_noticed(world: World) -> None:
    world.run(notices_other_blocks, join=False)


def test_a_cache_gives_what_was_put() -> None:
    shape = WORK.shape
    cache = paged.PagedCache(shape, 8)
    assert cache.blocks_for(1) == 1 and cache.blocks_for(4) == 1 and cache.blocks_for(5) == 2
    first, table = cache.take(1), cache.take(3)
    cache.give_back(first)
    table = [table[2], table[0], table[1]]
    keys = torch.randn(10, shape.heads, shape.width // shape.heads).bfloat16()
    cache.put(1, table, 0, keys[:7], -keys[:7])
    cache.put(1, table, 7, keys[7:], -keys[7:])
    got, negated = cache.get(1, table, 10)
    assert torch.equal(got, keys) and torch.equal(negated, -keys)
    length = cache.pages[0, 0, 0].nbytes
    spans = cache.spans(table)
    assert len(spans) == 2 * shape.layers * 3 and {count for _, count in spans} == {length}
    first_keys = cache.pages.view(torch.uint8).flatten()[spans[6][0] :][:length].view(torch.bfloat16)
    assert torch.equal(first_keys, keys[:4].flatten()), "layer 1, keys, first block"
    with pytest.raises(RuntimeError, match="expected 6 free blocks, got 5"):
        cache.take(6)
