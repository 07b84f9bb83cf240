"""What ranks did not complete at last, and which ranks have died: what dumps tell of what is over is left out. Pure."""

from __future__ import annotations

import re

from ncclx_rs.diagnose.dumps import Communicator, Dump, Record

# What did not complete, by rank, in the order of the calls.
Troubles = dict[int, list[Record]]

# Collectives that complete once all ranks have called them; unequal blocks let a rank be one ahead.
_OF_ALL = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"}


def present(communicator: Communicator) -> Troubles:
    """What the ranks did not complete, without what they have survived; if that is all, the last failure of each."""
    dumps = communicator.dumps
    troubles = {
        rank: [record for record in dump.records if record.state != "completed"] for rank, dump in dumps.items()
    }
    went_on = {rank: _went_on(dump) for rank, dump in dumps.items()}
    fresh = {
        rank: [record for record in records if record.ended is None or record.ended > went_on[rank]]
        for rank, records in troubles.items()
    }
    # What one rank has survived is over for all, also for those that have left no dump since.
    over = {place for rank in dumps for place in _places(troubles[rank]) - _places(fresh[rank])}
    old = _old(communicator)
    fresh = {
        rank: [record for record in records if rank not in old and not _places([record]) & over]
        for rank, records in fresh.items()
    }
    return fresh if any(fresh.values()) else {rank: records[-1:] for rank, records in troubles.items()}


def _places(records: list[Record]) -> set[tuple[bool, int]]:
    return {(record.device, record.sequence) for record in records if record.collective}


def _went_on(dump: Dump) -> int:
    """When the rank last called what it then completed. A send says nothing: it may complete without the other rank."""
    together = (record for record in dump.records if record.collective or record.operation in ("recv", "wait_signal"))
    return max((record.submitted for record in together if record.state == "completed"), default=-1)


def _old(communicator: Communicator) -> set[int]:
    """The ranks that have called collectives since they wrote their dumps, as those show that others completed."""
    old = set()
    for device in (False, True):
        on_device = {rank: dump.collectives_on(device) for rank, dump in communicator.dumps.items()}
        latest = max(
            (
                record.sequence
                for records in on_device.values()
                for record in records
                if record.state == "completed" and record.operation in _OF_ALL
            ),
            default=0,
        )
        for rank, records in on_device.items():
            last = max((record.sequence for record in records), default=-1)
            if not device:
                last = max(last, communicator.dumps[rank].collectives - 1)
            if latest > last + 1:
                old.add(rank)
    return old


def died(communicator: Communicator, troubles: Troubles) -> dict[int, str]:
    """The ranks that others have lost, and that have left no dump since; each with the reason that one recorded.

    A rank that has finished is lost to the others too. Where operations have failed, one of them, or the reason for a
    dump, names each rank whose loss did harm.
    """
    dead: dict[int, str] = {}
    named = _named_lost(communicator)
    have_failed = any(record.failure for records in troubles.values() for record in records)
    for rank, dump in communicator.dumps.items():
        for peer in dump.peers:
            if peer.lost is None or (have_failed and peer.rank not in named):
                continue
            if not _has_told(communicator, troubles, peer.rank, troubles[rank]):
                dead.setdefault(peer.rank, peer.lost)
    return dict(sorted(dead.items()))


# How the engine says that it blames a rank's loss.
_LOST = re.compile(r"\brank (\d+) is lost\b")


def _named_lost(communicator: Communicator) -> set[int]:
    """The ranks whose loss dumps were written for, or operations failed for."""
    texts = {dump.reason for dump in communicator.dumps.values()}
    texts |= {record.failure for dump in communicator.dumps.values() for record in dump.records if record.failure}
    return {int(rank) for text in texts for rank in _LOST.findall(text)}


def _has_told(communicator: Communicator, troubles: Troubles, lost: int, failed: list[Record]) -> bool:
    """Whether a rank wrote its dump after what failed on another one for its loss was called, or failed itself."""
    dump = communicator.dumps.get(lost)
    if dump is None:
        return False
    if any(record.failure for record in troubles[lost]):
        return True
    for_it = [record for record in failed if record.failure and f"rank {lost} is lost" in record.failure]
    return not for_it or dump.time >= for_it[0].submitted
