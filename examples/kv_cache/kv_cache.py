"""Prefill to decode: one process fills blocks of keys and values for prompts, another one reads them and decodes.

torchrun --standalone --nproc-per-node 2 examples/kv_cache/kv_cache.py

The decoding process reads the blocks of a prompt, many spans, in one batch of `RdmaTransport`, and decodes other
sequences meanwhile. Then it writes a word into the other one's memory, which frees the blocks there. The prefilling
process calls nothing for either. Blocks are compared by checksums, and tokens with those of a process that does both.
"""

from __future__ import annotations

import argparse
import os
import pickle
import time
import zlib
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from ncclx_rs import RdmaFuture, RdmaMemory, RdmaRemoteBuffer, RdmaTransport
from paged import VOCABULARY, Decoder, PagedCache, Shape, generate

TIMEOUT = timedelta(seconds=120)
PAUSE = 0.0005
WORD = 8


@dataclass(frozen=True)
class Work:
    """What is to be done.

    Attributes:
        shape: the size of the model.
        requests: how many prompts there are.
        longest: the longest prompt, in tokens.
        count: how many tokens are to be made for each.
        blocks: how many blocks either process has.
    """

    shape: Shape = Shape()
    requests: int = 24
    longest: int = 300
    count: int = 12
    blocks: int = 64

    def prompt(self, request: int) -> list[int]:
        """The prompt of a request, of any length."""
        generator = torch.Generator().manual_seed(request)
        length = int(torch.randint(1, self.longest + 1, (), generator=generator))
        return torch.randint(VOCABULARY, (length,), generator=generator).tolist()


@dataclass(frozen=True)
class Handover:
    """What the prefilling process tells of a prompt.

    Attributes:
        table: its blocks there.
        first: the first token behind it.
        checksum: of the blocks' bytes.
    """

    table: list[int]
    first: int
    checksum: int


@dataclass
class Sequence:
    """A sequence in the decoding process."""

    request: int
    prompt: list[int]
    table: list[int]
    told: Handover
    arrival: RdmaFuture
    made: list[int]


@dataclass
class Report:
    """What a process has done.

    Attributes:
        tokens: those of each request; in the prefilling process, the first one alone.
        spans: how many were read.
        bytes: how many were read.
        meanwhile: how many tokens were made while blocks were on their way.
        seconds: how long it took.
        wire: how bytes moved.
    """

    tokens: list[list[int]]
    spans: int = 0
    bytes: int = 0
    meanwhile: int = 0
    seconds: float = 0.0
    wire: str | None = None


def checksum(cache: PagedCache, table: list[int]) -> int:
    """The checksum of a table's blocks, in the order of its spans."""
    found, pages = 0, cache.pages.view(torch.uint8).flatten()
    for offset, length in cache.spans(table):
        found = zlib.crc32(pages[offset : offset + length].numpy(), found)
    return found


def prefill(work: Work, transport: RdmaTransport, store: dist.Store) -> Report:
    """Fills the cache for each prompt in turn. Blocks come back when the other process has them."""
    decoder, cache = Decoder(work.shape), PagedCache(work.shape, work.blocks)
    released = torch.zeros(work.requests, dtype=torch.int64)
    memory, words = RdmaMemory(cache.pages), RdmaMemory(released)
    store.set("memory", pickle.dumps((memory.to_remote_buffer(), words.to_remote_buffer())))
    lent: dict[int, list[int]] = {}
    begin, firsts = time.monotonic(), []

    def take_back(until: int) -> None:
        deadline = time.monotonic() + TIMEOUT.total_seconds()
        while True:
            for request in [request for request in lent if released[request]]:
                cache.give_back(lent.pop(request))
            if cache.free() >= until:
                return
            if time.monotonic() > deadline or not transport.connected():
                raise RuntimeError(
                    f"expected {until} free blocks, got {cache.free()}: requests {sorted(lent)} are lent"
                )
            time.sleep(PAUSE)

    for request in range(work.requests):
        prompt = work.prompt(request)
        take_back(cache.blocks_for(len(prompt)))
        table = cache.take(cache.blocks_for(len(prompt)))
        first = decoder(torch.tensor(prompt), 0, cache, table)
        lent[request] = table
        firsts.append([first])
        store.set(f"request{request}", pickle.dumps(Handover(table, first, checksum(cache, table))))
    take_back(work.blocks)
    return Report(firsts, seconds=time.monotonic() - begin)


def decode(work: Work, transport: RdmaTransport, store: dist.Store) -> Report:
    """Reads the blocks of prompts as they are announced, and makes tokens for all sequences whose blocks have come.

    Raises:
        RuntimeError: a block is not as it was sent.
    """
    decoder, cache = Decoder(work.shape), PagedCache(work.shape, work.blocks)
    memory, released = RdmaMemory(cache.pages), RdmaMemory(torch.ones(1, dtype=torch.int64))
    remote, words = pickle.loads(store.get("memory"))
    report, begin, announced = Report([[] for _ in range(work.requests)]), time.monotonic(), 0
    coming: list[Sequence] = []
    running: list[Sequence] = []
    deadline = begin + TIMEOUT.total_seconds()
    while announced < work.requests or coming or running:
        if announced < work.requests and store.check([f"request{announced}"]):
            sequence = begin_reading(work, transport, cache, memory, remote, announced, store)
            if sequence is not None:
                coming.append(sequence)
                announced += 1
                spans = cache.spans(sequence.told.table)
                report.spans, report.bytes = report.spans + len(spans), report.bytes + sum(n for _, n in spans)
        for sequence in [sequence for sequence in coming if sequence.arrival.done()]:
            sequence.arrival.wait()
            told, mine = sequence.told, sequence.table[: len(sequence.told.table)]
            if checksum(cache, mine) != told.checksum:
                raise RuntimeError(f"request {sequence.request}: the blocks are not as they were sent")
            transport.write(released.to_view(), words.to_view(WORD * sequence.request, WORD))
            coming.remove(sequence)
            running.append(sequence)
        report.meanwhile += len(running) if coming else 0
        for sequence in list(running):
            if len(sequence.made) < work.count:
                position = len(sequence.prompt) + len(sequence.made) - 1
                token = decoder(torch.tensor(sequence.made[-1:]), position, cache, sequence.table)
                sequence.made.append(token)
            if len(sequence.made) == work.count:
                running.remove(sequence)
                cache.give_back(sequence.table)
                report.tokens[sequence.request] = sequence.made
        if running:
            deadline = time.monotonic() + TIMEOUT.total_seconds()
        elif time.monotonic() > deadline:
            raise RuntimeError(f"request {announced} of {work.requests} did not come in {TIMEOUT.total_seconds():g} s")
        else:
            time.sleep(PAUSE)
    report.seconds = time.monotonic() - begin
    return report


def begin_reading(
    work: Work,
    transport: RdmaTransport,
    cache: PagedCache,
    memory: RdmaMemory,
    remote: RdmaRemoteBuffer,
    request: int,
    store: dist.Store,
) -> Sequence | None:
    """Begins to read a prompt's blocks into blocks of this process; None if too few are free now."""
    prompt = work.prompt(request)
    needed = cache.blocks_for(len(prompt) + work.count)
    if needed > cache.free():
        return None
    told: Handover = pickle.loads(store.get(f"request{request}"))
    table = cache.take(needed)
    mine, theirs = cache.spans(table[: len(told.table)]), cache.spans(told.table)
    spans = [(memory.to_mutable_view(*ours), remote.to_view(*there)) for ours, there in zip(mine, theirs, strict=True)]
    return Sequence(request, prompt, table, told, transport.read_batch(spans), [told.first])


def perform(work: Work, rank: int, store: dist.Store, hints: dict[str, str]) -> Report:
    """Runs one process's part: rank 0 fills, rank 1 decodes. They meet in the store, which only they may read."""
    transport = RdmaTransport("cpu", TIMEOUT, hints)
    store.set(f"address{rank}", transport.bind())
    transport.connect(store.get(f"address{1 - rank}"))
    try:
        report = (prefill if rank == 0 else decode)(work, transport, store)
        report.wire = transport.wire
        store.set(f"done{rank}", "yes")
        store.wait([f"done{1 - rank}"], TIMEOUT)
        return report
    finally:
        transport.close()


def check(work: Work, report: Report) -> None:
    """Compares the tokens with those of one process that does both.

    Raises:
        RuntimeError: they differ.
    """
    decoder = Decoder(work.shape)
    for request, tokens in enumerate(report.tokens):
        expected = generate(decoder, work.prompt(request), work.count)
        if tokens != expected:
            raise RuntimeError(f"request {request}: expected the tokens {expected}, got {tokens}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=("auto", "shm", "tcp"), default="auto")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("it takes two processes: torchrun --standalone --nproc-per-node 2 examples/kv_cache/kv_cache.py")
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    # torchrun's own store.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    work = Work()
    report = perform(work, rank, dist.PrefixStore("kv_cache", store), {"transport": arguments.transport})
    if rank == 0:
        print(f"prefill: {work.requests} prompts in {report.seconds:.2f} s")
        return
    check(work, report)
    tokens = sum(map(len, report.tokens))
    print(f"decode: {report.spans} spans, {report.bytes / 1e6:.1f} MB read through {report.wire}")
    print(f"decode: {tokens} tokens in {report.seconds:.2f} s, of which {report.meanwhile} while blocks came")
    print("decode: all blocks and tokens are those of a single process")


if __name__ == "__main__":
    main()
