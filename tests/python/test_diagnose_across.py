"""`ncclx-rs diagnose` on the dumps of several communicators: who waits in another one is not to blame."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import ncclx_rs
import pytest
import torch
from harness import World, fresh_store, leaving_together, meet
from ncclx_rs.diagnose import Communicator, Diagnosis, Dump, Record, across, analyze, report
from ncclx_rs.diagnose.__main__ import BLAMED, UNCLEAR, main
from ncclx_rs.diagnose.dumps import Peer
from test_diagnose import CALL, TIMED_OUT, collective, dump, message


def named(name: str, members: list[int], *dumps: Dump) -> Communicator:
    """A communicator of these ranks of the job, which are a process each."""
    own = [replace(one, id=name, communicator=name, members=members, process=members[one.rank]) for one in dumps]
    return Communicator(name, name, len(members), {one.rank: one for one in own})


def made_apart(name: str, processes: list[int], *dumps: Dump) -> Communicator:
    """A communicator of these processes, which took their own numbers for the job's."""
    communicator = named(name, list(range(len(processes))), *dumps)
    for rank, own in communicator.dumps.items():
        communicator.dumps[rank] = replace(own, process=processes[rank])
    return communicator


def of_all(*communicators: Communicator) -> list[Diagnosis]:
    return across([analyze(communicator) for communicator in communicators])


def found(diagnosis: Diagnosis) -> tuple[str, tuple[int, ...], str]:
    (finding,) = diagnosis.findings
    return finding.kind, finding.ranks, finding.details[0]


WAITS = collective(1, "running")


def test_who_waits_elsewhere_is_not_to_blame() -> None:
    # Of the job's ranks, 5 has not come to 4, as it waits for 6, which does nothing.
    data = named("data", [4, 5], dump(0, 2, collective(0), WAITS), dump(1, 2, collective(0)))
    tensor = named("tensor", [5, 6], dump(0, 2, WAITS), dump(1, 2))
    alone = analyze(data)
    assert alone.ranks_at_fault == [1]
    first, second = of_all(data, tensor)
    kind, at_fault, detail = found(first)
    assert (kind, at_fault) == ("missing", ())
    assert detail == f"rank 1 waited 9.0 s in communicator `tensor`, in {CALL}, in the end for rank 6 of the job"
    assert second.findings == analyze(tensor).findings and second.ranks_at_fault == [1]


def test_a_receive_excuses_nobody_as_it_may_be_asynchronous() -> None:
    data = named("data", [4, 5], dump(0, 2, collective(0), WAITS), dump(1, 2, collective(0)))
    tensor = named("tensor", [5, 6], dump(0, 2, message("recv", 1)), dump(1, 2))
    first, _ = of_all(data, tensor)
    kind, at_fault, detail = found(first)
    assert (kind, at_fault) == ("missing", (1,))
    assert detail == (
        "rank 1 may have waited 9.0 s in communicator `tensor`, in recv(16 bytes from rank 1, tag 0), in the end for "
        "rank 6 of the job, unless that call was asynchronous"
    )
    # Where its rank is elsewhere for sure, that counts, whichever came first.
    both = [tensor, named("other", [5, 7], dump(0, 2, collective(1, "running", submitted=2)), dump(1, 2))]
    for others in (both, both[::-1]):
        kind, at_fault, detail = found(of_all(data, *others)[0])
        assert (kind, at_fault) == ("missing", ()) and "`other`" in detail and "rank 7" in detail


def test_a_chain_leads_through_communicators_to_its_end() -> None:
    chain = [named(f"pair {rank}", [rank, rank + 1], dump(0, 2, WAITS), dump(1, 2, collective(0))) for rank in range(5)]
    *behind, last = of_all(*chain)
    assert last.ranks_at_fault == [1]
    for rank, diagnosis in enumerate(behind):
        kind, at_fault, detail = found(diagnosis)
        assert (kind, at_fault) == ("missing", ()) and f"`pair {rank + 1}`" in detail, detail
        assert detail.endswith("in the end for rank 5 of the job")


def test_communicators_may_wait_for_each_other() -> None:
    one = named("one", [0, 1], dump(0, 2, WAITS), dump(1, 2, collective(0)))
    two = named("two", [0, 1], dump(0, 2, collective(0)), dump(1, 2, WAITS))
    three = named("three", [2, 0], dump(0, 2, WAITS), dump(1, 2, collective(0)))
    first, second, behind = of_all(one, two, three)
    assert [found(first)[:2], found(second)[:2], found(behind)[:2]] == [("deadlock", ())] * 3
    end = "in the end for ranks that wait for each other"
    assert found(first)[2] == f"rank 1 waited 9.0 s in communicator `two`, in {CALL}, {end}"
    assert found(second)[2] == f"rank 0 waited 9.0 s in communicator `one`, in {CALL}, {end}"
    assert report.text(first).splitlines()[1].startswith("  deadlock: rank 1 did not call collective 1, ")


def failed(submitted: int, ended: int) -> Record:
    return collective(1, "failed", submitted=submitted, ended=ended, failure=TIMED_OUT)


def test_who_waited_at_another_time_is_to_blame() -> None:
    def at_fault(here: Record, there: Record) -> list[int]:
        data = named("data", [0, 1], dump(0, 2, collective(0), here), dump(1, 2, collective(0)))
        other = named("other", [1, 2], dump(0, 2, there), dump(1, 2))
        first, second = of_all(data, other)
        assert second.ranks_at_fault == [1]
        return first.ranks_at_fault

    assert at_fault(WAITS, failed(10, 900)) == [1]
    # It has had all the time since then, or until then.
    assert at_fault(WAITS, failed(500, 1500)) == [1]
    assert at_fault(failed(1000, 1_000_000), collective(1, "running", submitted=999_999)) == [1]
    assert at_fault(failed(1000, 1_000_000), failed(2_000_000, 3_000_000)) == [1]
    # Their time limits are over at about the same time, or both wait on.
    assert at_fault(failed(100_000, 1_600_000), failed(90_000, 1_590_000)) == []
    assert at_fault(failed(100_000, 1_600_000), failed(800_000, 2_300_000)) == []
    assert at_fault(failed(100_000, 1_600_000), collective(1, "running", submitted=200_000)) == []
    assert at_fault(WAITS, collective(1, "running", submitted=8_000_000)) == []


def test_another_process_of_that_number_excuses_nobody() -> None:
    data = named("data", [0, 1], dump(0, 2, collective(0), WAITS), dump(1, 2, collective(0)))
    # The same rank of an earlier job.
    earlier = named("other", [1, 2], dump(0, 2, WAITS))
    earlier.dumps[0] = replace(earlier.dumps[0], process=555)
    assert of_all(data, earlier)[0].ranks_at_fault == [1]
    # Rank 1 is stopped and leaves no dump, and another pair's rank 1 waits.
    stopped = made_apart("a", [10, 11], dump(0, 2, WAITS))
    for waits in ([dump(1, 2, WAITS)], [dump(0, 2), dump(1, 2, WAITS)]):
        pair = made_apart("b", [12, 13], *waits)
        for diagnoses in (of_all(stopped, pair), of_all(pair, stopped)[::-1]):
            assert [one.ranks_at_fault for one in diagnoses] == [[1], [0]]
            assert all(finding.kind == "missing" for one in diagnoses for finding in one.findings)
    # Nor does it help that it has the same number in its container, which runs on another host.
    near, far = (made_apart(name, [7, 8], dump(0, 2, *own), dump(1, 2, *rest)) for name, own, rest in APART)
    assert of_all(near, far)[0].findings[0].kind == "deadlock"
    for rank, own in far.dumps.items():
        far.dumps[rank] = replace(own, host=rank, peers=[Peer(1 - rank, 1 - rank, 0, None, None, None)])
    assert [one.ranks_at_fault for one in of_all(near, far)] == [[1], [0]]


# Two communicators whose ranks would wait for each other if they were the same.
APART = [("near", [WAITS], [collective(0)]), ("far", [collective(0)], [WAITS])]


def test_a_third_communicator_tells_who_left_no_dump() -> None:
    one, two = named("one", [0, 1], dump(0, 2, WAITS)), named("two", [0, 1], dump(1, 2, WAITS))
    world = named("world", [0, 1, 2], *(dump(rank, 3, collective(0)) for rank in range(3)))
    assert [diagnosis.findings[0].kind for diagnosis in of_all(one, two, world)[:2]] == ["deadlock"] * 2
    kind, at_fault, detail = found(of_all(one, two)[0])
    assert (kind, at_fault) == ("missing", (1,))
    assert detail == (
        f"rank 1 may have waited 9.0 s in communicator `two`, in {CALL}, in the end for rank 0 of the job; no dump "
        "from here shows that it is the same process"
    )
    # One that was made apart as well says nothing, nor does one that may have been.
    for apart in (made_apart("apart", [5, 1], dump(0, 2), dump(1, 2)), made_apart("apart", [0, 1], dump(1, 2))):
        assert of_all(one, two, apart)[0].ranks_at_fault == [1]


def test_who_went_on_after_a_call_was_not_blocked_in_it() -> None:
    # Rank 1 asks for a message ahead of time, completes a collective elsewhere, and does nothing any more.
    waiting = message("recv", 0)
    other = named("other", [0, 1, 2], *(dump(rank, 3, collective(0, submitted=500)) for rank in range(3)))
    for call in (waiting, collective(0, "running", submitted=100)):
        ahead = named("pipe", [0, 1], dump(0, 2), dump(1, 2, call))
        data = named("data", [0, 1], dump(0, 2, collective(0, submitted=0), WAITS), dump(1, 2, collective(0)))
        for order in ([ahead, other, data], [data, other, ahead]):
            diagnoses = {one.communicator.name: one for one in of_all(*order)}
            assert found(diagnoses["data"])[:2] == ("missing", (1,)), "as without the others"
            assert diagnoses["data"].findings[0].details == analyze(data).findings[0].details
            assert diagnoses["pipe"].ranks_at_fault == [], "rank 0 waits for rank 1"
            assert "in the end for rank 1 of the job" in diagnoses["pipe"].findings[0].details[0]


def test_a_hang_elsewhere_excuses_nobody() -> None:
    data = named("data", [0, 1], dump(0, 2, collective(0), WAITS), dump(1, 2, collective(0)))
    hang = named("hang", [1, 2], dump(0, 2, WAITS), dump(1, 2, WAITS))
    first, second = of_all(data, hang)
    assert (first.ranks_at_fault, [finding.kind for finding in second.findings]) == ([1], ["hang"])
    # Nor does it where another rank there is to blame for something else.
    unmet = [dump(0, 3, WAITS), dump(1, 3, WAITS), dump(2, 3, WAITS, message("recv", 1))]
    first, second = of_all(data, named("hang", [1, 2, 3], *unmet))
    assert [(finding.kind, finding.ranks) for finding in second.findings] == [("hang", ()), ("unmatched", (1,))]
    assert first.ranks_at_fault == [1] and len(first.findings[0].details) == 1


def test_who_waits_for_the_dead_waits_for_them_alone() -> None:
    data = named("data", [0, 1], dump(0, 2, collective(0), WAITS), dump(1, 2, collective(0)))
    for call in (WAITS, message("recv", 1)):
        lost = named(
            "lost", [1, 2, 3], dump(0, 3, call, rank1="its process ended", called={1: 9, 2: 9}), dump(2, 3, WAITS)
        )
        first, _ = of_all(data, lost)
        assert found(first)[2].split(", in the end for ")[1].startswith("rank 2 of the job")


def test_who_waits_for_several_waits_for_all_of_them() -> None:
    # Of the job's ranks, 1 waits for 2, which calls when 1 has given up, and for 3, which never does.
    data = named("data", [0, 1], dump(0, 2, failed(2000, 1_500_000)), dump(1, 2, collective(0)))
    late = collective(1, "failed", submitted=4_000_000, ended=4_000_100, failure="rank 0 reported")
    others = named("others", [1, 2, 3], dump(0, 3, failed(1000, 1_501_000)), dump(1, 3, late))
    first, second = of_all(data, others)
    assert second.ranks_at_fault == [1, 2]
    assert found(first)[2].endswith("in the end for ranks 2-3 of the job")


def test_within_a_communicator_nothing_is_followed() -> None:
    on_device = collective(1, "running", device=True)
    both = named("both", [0, 1], dump(0, 2, collective(0), on_device), dump(1, 2, collective(0), WAITS))
    alone = analyze(both)
    assert alone.ranks_at_fault == [0, 1]
    assert of_all(both)[0].findings == alone.findings


def test_who_is_to_blame_there_too_stays_so() -> None:
    one = named("one", [0, 1], dump(0, 2, collective(0), WAITS), dump(1, 2, collective(0)))
    differs = collective(1, "running", call="broadcast(4 × float32 from rank 0)")
    two = named("two", [1, 2, 3], dump(0, 3, differs), dump(1, 3, WAITS), dump(2, 3, WAITS))
    first, second = of_all(one, two)
    assert first.ranks_at_fault == [1] and second.ranks_at_fault == [0]


def test_those_of_whom_the_same_is_true_are_told_of_together() -> None:
    # Of the job's ranks, 1 to 11 have not come to 0: they wait for 12.
    size = 12
    data = named("data", list(range(size)), dump(0, size, WAITS), *(dump(rank, size) for rank in range(1, size)))
    late = [collective(1, "running", submitted=1000 * rank * 100) for rank in range(size)]
    tensor = named("tensor", list(range(1, 13)), *(dump(rank, size, late[rank]) for rank in range(size - 1)))
    shown = report.text(of_all(data, tensor)[0]).splitlines()
    assert shown[1].startswith("  ranks 1-11 did not call collective 1, ")
    told = f"ranks 1-11 waited 8.0-9.0 s in communicator `tensor`, in {CALL}, in the end for rank 12 of the job"
    assert shown[2:4] == [f"    {told}", "    rank 1 has called nothing"]


def test_ranks_are_numbered_by_the_job_only_where_that_means_one_process() -> None:
    fine = made_apart("one", [10, 11], dump(0, 2, collective(0)), dump(1, 2, collective(0)))
    absent = made_apart("two", [12, 13], dump(0, 2, collective(0), WAITS))
    diagnoses = of_all(fine, absent)
    assert report.summary(diagnoses).startswith("to blame: rank 1 of `two`\n\n")
    many = [made_apart(f"{number}", [20 + number, 0], dump(0, 2, WAITS)) for number in range(9)]
    head = report.summary(of_all(*many)).splitlines()[0]
    assert (
        head == "to blame: rank 1 of `0`, rank 1 of `1`, rank 1 of `2`, rank 1 of `3` and those of 5 communicators more"
    )
    # Of one job all along.
    job = [named("one", [0, 1], *fine.dumps.values()), named("two", [2, 3], *absent.dumps.values())]
    assert report.summary(of_all(*job)).startswith("to blame: rank 3 of the job\n")


def halves(size: int) -> list[Diagnosis]:
    """Two communicators of all ranks, of which half wait in each."""

    def told(rank: int, *records: Record) -> Dump:
        return replace(dump(rank, 0, *records), size=size, peers=[])

    members = list(range(size))
    worlds = [
        named(name, members, *(told(rank, *[WAITS][: rank % 2 == place]) for rank in members))
        for place, name in enumerate(("one", "two"))
    ]
    return [analyze(world) for world in worlds]


def steps(size: int) -> int:
    """How many steps the interpreter takes to follow the ranks of so large a job."""
    diagnoses, count = halves(size), 0

    def seen(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += 1
        return seen

    before = sys.gettrace()
    sys.settrace(seen)
    try:
        across(diagnoses)
    finally:
        sys.settrace(before)
    return count


def test_the_work_grows_as_the_ranks_do() -> None:
    assert steps(128) < 2.5 * steps(64)
    # For which the watchdog would not wait if each rank looked at all others.
    for diagnosis in across(halves(4096)):
        (finding,) = diagnosis.findings
        assert finding.kind == "deadlock" and finding.details[0].startswith("ranks ")


def made(rank: int, size: int, name: str, folder: str) -> ncclx_rs.TorchComm:
    return ncclx_rs.new_comm(
        "ncclx",
        "cpu",
        name,
        abort_process_on_timeout_or_error=False,
        store=fresh_store(),
        rank=rank,
        size=size,
        timeout=timedelta(seconds=20),
        hints={"dump_directory": folder},
    )


def one_keeps_others_waiting(rank: int, size: int, folder: str) -> None:
    """Rank 0 waits for the others, rank 1 for rank 2, which does nothing."""
    everyone = made(rank, size, "everyone", folder)
    pair = everyone.split([1, 2] if rank else [], "pair")
    meet()
    with leaving_together():
        for comm in (everyone, pair):
            if comm is not None:
                comm.set_timeout(1.5 if comm is everyone else 2.0)
        if rank == 2:
            return
        waits = everyone if rank == 0 else pair
        assert waits is not None
        with pytest.raises(RuntimeError, match="did not call it") as raised:
            waits.all_reduce(torch.ones(9), ncclx_rs.ReduceOp.SUM, False)
        absent = rf"\d\.\ds ago rank\(s\) {2 - rank} had no operation in flight"
        if rank == 0:
            in_pair = r"all_reduce\(SUM, 9 × float32\) of communicator `pair` in flight, for \d\.\ds"
            absent += rf"; \d\.\ds ago rank\(s\) 1 had {in_pair}"
        assert re.search(rf" did; {absent}$", str(raised.value)), raised.value
        ncclx_rs.dump(folder)


def orders_differ(rank: int, size: int, folder: str, tells_all: bool) -> None:
    comms = [made(rank, size, name, folder) for name in ("one", "two")]
    meet()
    with leaving_together():
        waits = comms[rank % 2]
        waits.set_timeout((1.5, 2.0)[rank])  # rank 1 is still there when rank 0 gives up
        with pytest.raises(RuntimeError, match="did not call it") as raised:
            waits.all_reduce(torch.ones(9), ncclx_rs.ReduceOp.SUM, False)
        elsewhere = "s ago rank(s) 1 had all_reduce(SUM, 9 × float32) of communicator `two` in flight, for "
        assert rank == 1 or elsewhere in str(raised.value), raised.value
        if tells_all:
            ncclx_rs.dump(folder)


@pytest.mark.worlds(sizes=(3,), modes=("shm",))
def test_the_end_of_a_chain_is_found(fresh_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fresh_world.run(one_keeps_others_waiting, str(tmp_path), join=False)
    assert main([str(tmp_path), "--json"]) == BLAMED
    everyone, pair = json.loads(capsys.readouterr().out)
    assert (everyone["communicator"], everyone["ranks_at_fault"]) == ("everyone", [2])
    assert (pair["communicator"], pair["ranks_at_fault"]) == ("pair", [1])
    (finding,) = everyone["findings"]
    assert set(finding) == {"kind", "ranks", "text", "details"}
    assert finding["details"][0].startswith(
        "rank 1 waited 2.0 s in communicator `pair`, in all_reduce(SUM, 9 × float32)"
    )
    assert finding["details"][0].endswith("in the end for rank 2 of the job")
    assert main([str(tmp_path)]) == BLAMED
    assert capsys.readouterr().out.startswith("to blame: rank 2 of the job\n\ncommunicator `everyone`, 3 ranks")


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_calls_in_different_orders_are_found(
    fresh_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh_world.run(orders_differ, str(tmp_path), True, join=False)
    assert main([str(tmp_path)]) == UNCLEAR
    out = capsys.readouterr().out
    assert "deadlock: rank 1 did not call collective 0" in out and "to blame" not in out, out
    assert "rank 1 waited 2.0 s in communicator `two`" in out and "for ranks that wait for each other" in out, out


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_dumps_of_failures_alone_do_not_show_who_waits_elsewhere(
    fresh_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh_world.run(orders_differ, str(tmp_path), False, join=False)
    assert main([str(tmp_path)]) == BLAMED
    out = capsys.readouterr().out
    assert "rank 1 may have waited 2.0 s in communicator `two`" in out and "to blame: rank 1" in out, out
