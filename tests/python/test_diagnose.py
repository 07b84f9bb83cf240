"""`ncclx-rs diagnose` on dumps written by hand and on dumps of ranks."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness
import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, World, fresh_store, lacking, leaving_together, meet
from ncclx_rs import ReduceOp, TorchComm
from ncclx_rs.diagnose import Communicator, Dump, Record, analyze, perfetto, read, report
from ncclx_rs.diagnose.__main__ import BLAMED, FINE, UNCLEAR, UNUSABLE, main
from ncclx_rs.diagnose.dumps import Link, Peer
from ncclx_rs.diagnose.processes import ranks
from ncclx_rs.diagnose.pytorch import _NAMES, _UNKNOWN, trace
from test_flight_recorder import ANALYSER_KNOWS_US, analyse
from test_network import Host, connect, hosts
from test_newcomers import program

# ---- dumps written by hand ----

CALL = "all_reduce(SUM, 4 × float32)"


def collective(sequence: int, state: str = "completed", call: str = CALL, **more: Any) -> Record:
    values = {
        "number": sequence,
        "operation": call.split("(")[0],
        "collective": True,
        "sequence": sequence,
        "device": False,
    }
    values |= {"call": call, "peer": None, "tag": None, "dtype": "float32", "read": 4, "written": 4, "state": state}
    values |= {"submitted": 1000 * sequence, "started": None, "ended": None}
    values |= {"device_microseconds": None, "failure": None, "stack": []}
    return Record(**(values | more))


def message(operation: str, peer: int | None, tag: int = 0, state: str = "running") -> Record:
    call = f"{operation}(16 bytes {'to' if operation == 'send' else 'from'} rank {peer}, tag {tag})"
    return collective(0, state, call, collective=False, peer=peer, tag=tag)


def access(operation: str, peer: int, state: str = "running", failure: str | None = None) -> Record:
    """An access to a window."""
    call = f"{operation}(16 bytes of rank {peer}, window 3)"
    return collective(0, state, call, collective=False, peer=peer, failure=failure)


def dump(rank: int, size: int, *records: Record, called: dict[int, int] | None = None, **lost: str) -> Dump:
    """A dump; `called` and `lost` (as rank2="reason") are its knowledge of other ranks."""
    peers = [Peer(r, 0, (called or {}).get(r, 0), lost.get(f"rank{r}"), None, None) for r in range(size) if r != rank]
    collectives, members = sum(record.collective for record in records), list(range(size))
    told = (len(records), collectives, peers, list(records))
    return Dump("00ff", "main", rank, size, members, 0, 77, "test", 9_000_000, *told)


def linked(dump: Dump, links: dict[int, Link]) -> Dump:
    """The dump of a rank with these connections to others."""
    return replace(dump, peers=[replace(peer, link=links.get(peer.rank)) for peer in dump.peers])


def grown(dump: Dump, size: int) -> Dump:
    """The dump in a larger communicator, of whose further ranks nothing was heard."""
    more = [Peer(rank, 0, 0, None, None, None) for rank in range(dump.size, size)]
    return replace(dump, size=size, members=list(range(size)), peers=dump.peers + more)


def of(size: int, *dumps: Dump) -> Communicator:
    return Communicator("00ff", "main", size, {dump.rank: dump for dump in dumps})


def test_ranks_have_short_names() -> None:
    assert [ranks([3]), ranks([2, 0, 1]), ranks([5, 0, 1])] == ["rank 3", "ranks 0-2", "ranks 0-1 and 5"]


def test_a_trace_for_perfetto_has_every_operation(tmp_path: Path) -> None:
    stack = [{"name": "step", "filename": "train.py", "line": 7}]
    failed = collective(2, "failed", started=2100, ended=2600, failure="rank 1 is lost", stack=stack)
    records = [collective(0, ended=1500), collective(1, "running"), failed]
    named = replace(dump(1, 2, *records), members=[4, 6])
    path = tmp_path / "trace.json"
    perfetto.write([of(2, dump(0, 2), named)], path)
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["rank 0", "rank 6"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(span["pid"], span["ts"], span["dur"]) for span in spans] == [
        (6, 0, 1500),
        (6, 1000, 9_000_000 - 1000),  # in flight when the dump was written
        (6, 2000, 600),
    ]
    # The second begins while the first lasts, and the third is in the row that the first has left.
    assert spans[0]["tid"] == spans[2]["tid"] != spans[1]["tid"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert rows == {spans[0]["tid"]: "main", spans[1]["tid"]: "main"}
    about = spans[2]["args"]
    assert about["failure"] == "rank 1 is lost" and about["waited_us"] == 100
    assert about["called_at"] == "train.py:7 in step" and about["state"] == "failed"


def test_nothing_is_wrong_where_all_completed() -> None:
    diagnosis = analyze(of(2, *(dump(rank, 2, collective(0), collective(1)) for rank in range(2))))
    assert not diagnosis.findings and not diagnosis.ranks_at_fault and diagnosis.compared == 2


def test_a_rank_that_did_not_call_is_to_blame() -> None:
    waiting = collective(1, "failed", failure="timed out")
    one, two = (dump(rank, 3, collective(0), waiting, called={2: 1}) for rank in (0, 1))
    (finding,) = analyze(of(3, one, two)).findings
    assert (finding.kind, finding.ranks) == ("missing", (2,))
    assert "rank 2 did not call collective 1, all_reduce(SUM, 4 × float32), which ranks 0-1 did" in finding.text
    assert "left no dump" in finding.details[0]
    busy = dump(2, 3, collective(0), message("recv", 0, 7))
    absent, unmatched = analyze(of(3, one, two, busy)).findings
    assert absent.ranks == (2,) and "rank 2 is in recv(16 bytes from rank 0, tag 7) since" in absent.details[0]
    assert unmatched.ranks == (0,) and "rank 0 has called no send" in unmatched.text


def test_findings_know_who_waits_in_what() -> None:
    called, lost = message("recv", 2), message("recv", 3)
    ranks = [dump(0, 4, collective(0), WAITS, rank3="its process ended"), dump(1, 4, called, lost), dump(2, 4)]
    found = {finding.kind: finding.waiting for finding in analyze(of(4, *ranks)).findings}
    assert found == {"died": ((1, lost),), "missing": ((0, WAITS),), "unmatched": ((1, called),)}
    gave_up = collective(0, "failed", ended=1_500_000, failure=TIMED_OUT)
    late = collective(0, "failed", submitted=4_000_000, ended=4_000_100, failure="rank 0 reported")
    (finding,) = analyze(of(2, dump(0, 2, gave_up), dump(1, 2, late))).findings
    assert finding.kind == "late" and finding.waiting == ((0, gave_up),)


WAITS = collective(1, "running")


def test_collectives_on_a_device_are_counted_apart() -> None:
    on_device = collective(2, "running", device=True)
    apart = [collective(2), collective(1, device=True)]
    waiting, busy = dump(0, 2, *apart, on_device, called={1: 4}), dump(1, 2, *apart, collective(3, "running"))
    absent, elsewhere = analyze(of(2, waiting, busy)).findings
    assert "rank 0 did not call collective 3, all_reduce(SUM, 4 × float32), which rank 1 did" in absent.text
    assert "rank 0 is in device collective 2, all_reduce(SUM" in absent.details[0]
    assert (elsewhere.kind, elsewhere.ranks) == ("missing", (1,))
    assert "rank 1 did not call device collective 2, all_reduce(SUM" in elsewhere.text
    assert "rank 1 is in all_reduce(SUM" in elsewhere.details[0]
    # Nor are they compared with each other, or taken for one in PyTorch's format.
    assert analyze(of(2, waiting, busy)).compared == 2
    content = trace([waiting])
    listed = [(entry["process_group"][0], entry["collective_seq_id"]) for entry in content["entries"]]
    assert sorted(listed) == [("main-00ff", 3), ("main-00ff-cuda", 1), ("main-00ff-cuda", 2)]


def test_what_a_device_has_measured_is_the_duration(tmp_path: Path) -> None:
    times = {"started": 1000, "ended": 5000, "device": True}
    measured = collective(1, device_microseconds=1234.5, **times)
    records = dump(0, 2, collective(0, **times), measured)
    assert [entry["duration_ms"] for entry in trace([records])["entries"]] == [4, 1.2345]
    path = tmp_path / "trace.json"
    perfetto.write([of(2, records)], path)
    about = [event["args"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert "device_us" not in about[0] and about[1]["device_us"] == 1234.5


def test_a_rank_that_is_known_to_have_called_is_not_to_blame() -> None:
    diagnosis = analyze(of(2, dump(0, 2, collective(0, "failed"), called={1: 1})))
    assert [(finding.kind, finding.ranks) for finding in diagnosis.findings] == [("hang", ())]


def test_the_dead_are_named_with_what_was_seen() -> None:
    diagnosis = analyze(of(2, dump(0, 2, collective(0), collective(1, "failed"), rank1="it closed the connection")))
    died, absent = diagnosis.findings
    assert (died.kind, died.ranks, died.text) == ("died", (1,), "rank 1 died: it closed the connection")
    assert absent.ranks == (1,) and absent.details == ("rank 1 is dead",)


def test_a_rank_that_left_after_a_failure_is_not_dead() -> None:
    one = dump(0, 3, collective(0, "failed"), called={1: 1}, rank1="it closed the connection")
    diagnosis = analyze(of(3, one, dump(1, 3, collective(0, "failed"))))
    assert diagnosis.ranks_at_fault == [2]


def test_the_living_are_not_to_blame_for_a_death() -> None:
    # Rank 1 waits for rank 0, and that for rank 3.
    waiting = dump(0, 4, message("recv", 3), rank3="it closed the connection")
    diagnosis = analyze(of(4, waiting, dump(1, 4, message("recv", 0))))
    assert diagnosis.ranks_at_fault == [3]
    (chained,) = (finding for finding in diagnosis.findings if finding.kind == "unmatched")
    assert chained.details == ("rank 0 waits itself, in the end for rank 3",)
    diagnosis = analyze(of(4, dump(0, 4, message("recv", 2), rank3="it closed the connection")))
    assert diagnosis.ranks_at_fault == [3] and "rank 2 left no dump" in diagnosis.findings[1].text
    failed = collective(1, "failed", failure="rank 3 is lost")
    diagnosis = analyze(of(4, *(dump(rank, 4, collective(0), failed, rank3="its process ended") for rank in (0, 1))))
    died, absent = diagnosis.findings
    assert "ranks 2-3 did not call" in absent.text and absent.ranks == died.ranks == (3,)


def test_who_has_finished_is_not_dead_where_a_failure_names_nobody_lost() -> None:
    # Rank 1 has closed its communicator in good order, rank 2 does something else.
    timed_out = "recv(16 bytes from rank 2, tag 0) timed out after a timeout of 1.5s: rank 2 has called no send"
    failed = replace(message("recv", 2, state="failed"), ended=2000, failure=timed_out)
    waiting = dump(0, 3, collective(0), failed, rank1="it closed the connection")
    (finding,) = analyze(of(3, waiting)).findings
    assert (finding.kind, finding.ranks) == ("unmatched", (2,))
    # A failure, or the reason for a dump, says who has died.
    lost = replace(failed, failure="rank 2 reported: recv(16 bytes from rank 1, tag 0): rank 1 is lost: it closed")
    for died in (
        dump(0, 3, lost, rank1="it closed the connection"),
        replace(waiting, reason="communicator `main`: rank 1 is lost: it closed the connection"),
    ):
        diagnosis = analyze(of(3, died))
        assert diagnosis.findings[0].kind == "died" and diagnosis.ranks_at_fault == [1]
    # Another rank is named, whose number begins alike.
    other = replace(failed, failure="rank 11 is lost: its process ended")
    many = grown(dump(0, 3, other, rank1="it closed the connection"), 12)
    assert "died" not in {finding.kind for finding in analyze(of(12, many)).findings}


def test_an_old_dump_does_not_hide_a_death() -> None:
    survived = collective(0, "failed", ended=500, failure="the ranks disagree")
    lost = collective(2, "failed", ended=3000, failure="rank 1 is lost: its process ended")
    one = dump(0, 2, survived, collective(1), lost, rank1="its process ended")
    for records in ([survived], [survived, collective(1)], [collective(0)]):
        old = replace(dump(1, 2, *records), time=1900)
        died, absent = analyze(of(2, one, old)).findings
        assert (died.kind, died.ranks, absent.kind, absent.ranks) == ("died", (1,), "missing", (1,)), records
        assert absent.details == ("rank 1 is dead",)
    # Who wrote it since has left.
    assert "died" not in {finding.kind for finding in analyze(of(2, one, replace(old, time=2100))).findings}
    # It was written on demand, in the middle of a message or of a collective.
    for record in (message("recv", 0), collective(1, "running")):
        old = replace(dump(1, 2, collective(0), record), time=1900)
        died, absent = analyze(of(2, one, old)).findings
        assert (died.kind, died.ranks, absent.kind, absent.ranks) == ("died", (1,), "missing", (1,)), record


def test_what_was_survived_does_not_hide_the_present() -> None:
    survived = collective(0, "failed", ended=500, failure="timed out")
    unread = replace(message("recv", 1, state="failed"), ended=400)
    waiting = [dump(rank, 3, survived, unread, collective(1), collective(2, "running")) for rank in (0, 1)]
    # Rank 2 has written one at the first failure, or of late.
    for late in (dump(2, 3, survived, collective(1)), replace(dump(2, 3, survived), time=600)):
        (finding,) = analyze(of(3, *waiting, late)).findings
        assert (finding.kind, finding.ranks) == ("missing", (2,)) and "did not call collective 2" in finding.text
    # The others' recorders have forgotten that failure.
    forgetful = [dump(rank, 3, collective(98), collective(99, "running")) for rank in (0, 1)]
    old = replace(dump(2, 3, survived, collective(1, "queued")), time=1_000_000)
    (finding,) = analyze(of(3, *(replace(one, collectives=100) for one in forgetful), old)).findings
    assert finding.ranks == (2,) and "did not call collective 99" in finding.text
    forgetful = [dump(rank, 3, collective(98), collective(99, "running", submitted=9_000_000)) for rank in (0, 1)]
    (finding,) = analyze(of(3, *forgetful, old)).findings
    assert finding.details[0].endswith("; its dump is from 8 s before that call")
    # If nothing is wrong since, the last failure is shown.
    last = collective(2, "failed", ended=2500, failure="timed out")
    both = [dump(rank, 2, survived, collective(1), last, collective(3)) for rank in (0, 1)]
    (finding,) = analyze(of(2, *both)).findings
    assert finding.text.startswith("collective 2, ")


TIMED_OUT = f"{CALL} timed out after a timeout of 1.5s: collective 0: rank(s) 2 did not call it; rank(s) 0, 1 did"


def test_a_rank_that_calls_when_others_have_given_up_is_late() -> None:
    gave_up = [dump(rank, 3, collective(0, "failed", ended=1_500_000, failure=TIMED_OUT)) for rank in (0, 1)]
    late = dump(2, 3, collective(0, "failed", submitted=4_000_000, ended=4_000_100, failure="rank 0 reported"))
    (finding,) = analyze(of(3, *gave_up, late)).findings
    assert (finding.kind, finding.ranks) == ("late", (2,))
    assert finding.text == f"rank 2 called collective 0, {CALL} after rank 0 had given it up"
    assert finding.details == ("rank 2 called it 2.5 s after that", TIMED_OUT)
    # Another one has not come at all.
    kinds = {
        finding.kind: finding.ranks for finding in analyze(of(4, *(grown(one, 4) for one in (*gave_up, late)))).findings
    }
    assert kinds == {"missing": (3,), "late": (2,)}
    # Others failed for another reason, such as sizes that differ.
    disagree = [dump(rank, 3, collective(0, "failed", ended=1500, failure="the ranks disagree")) for rank in (0, 1)]
    assert not analyze(of(3, *disagree, late)).ranks_at_fault


def test_the_minority_disagrees() -> None:
    other = "all_reduce(SUM, 5 × float32)"
    dumps = [dump(rank, 3, collective(0, "failed", *([other] if rank == 1 else []))) for rank in range(3)]
    (finding,) = analyze(of(3, *dumps)).findings
    assert (finding.kind, finding.ranks) == ("mismatch", (1,))
    assert finding.details[1] == f"rank 1 called {other}"
    (finding,) = analyze(of(2, *dumps[:2])).findings
    assert finding.kind == "mismatch" and not finding.ranks, "of two, nobody knows who is right"


def test_messages_that_do_not_meet_are_shown_together() -> None:
    one, two = dump(0, 2, message("recv", 1, 3)), dump(1, 2, message("send", 0, 4))
    findings = analyze(of(2, one, two)).findings
    assert all(finding.kind == "unmatched" and not finding.ranks for finding in findings)
    assert "rank 0 called recv(16 bytes from rank 1, tag 3)" in findings[0].text
    assert findings[0].details == ("rank 1 called send(16 bytes to rank 0, tag 4)",)


def test_a_short_message_with_another_tag_is_shown_though_its_send_is_over() -> None:
    one = dump(0, 2, message("recv", 1, 2, "completed"), message("recv", 1, 3))
    two = dump(1, 2, message("send", 0, 2, "completed"), message("send", 0, 4, "completed"))
    (finding,) = analyze(of(2, one, two)).findings
    assert not finding.ranks and finding.details == ("rank 1 called send(16 bytes to rank 0, tag 4)",)


def test_the_two_ends_of_a_message_may_differ_in_size() -> None:
    for failure in (
        "recv(16 bytes from rank 1, tag 3): rank 1 sent 32 bytes, the receive expects 16",
        "recv(16 bytes from rank 1, tag 3): the ranks disagree on message 1 from rank 1 to rank 0: rank 0 called",
    ):
        failed = replace(message("recv", 1, 3, "failed"), failure=failure)
        for other in ([dump(1, 2, message("send", 0, 3, "completed"))], []):
            (finding,) = analyze(of(2, dump(0, 2, failed), *other)).findings
            assert (finding.kind, finding.ranks, finding.text) == ("mismatch", (), f"rank 0 called {failure}")


def test_a_message_that_both_are_in_is_nobodys_fault() -> None:
    one, two = dump(0, 2, message("recv", 1, 3)), dump(1, 2, message("send", 0, 3))
    findings = analyze(of(2, one, two)).findings
    assert [(finding.kind, finding.ranks) for finding in findings] == [("hang", ())] * 2


def test_the_end_of_a_chain_of_waiting_ranks_is_to_blame() -> None:
    waiting = [dump(rank, 5, message("recv", rank - 1)) for rank in range(1, 5)]
    diagnosis = analyze(of(5, dump(0, 5, collective(0)), *waiting))
    assert diagnosis.ranks_at_fault == [0] and len(diagnosis.findings) == 4
    assert diagnosis.findings[0].text.startswith("rank 1 waits in recv") and not diagnosis.findings[0].details
    assert diagnosis.findings[1].details == ("rank 1 waits itself, in the end for rank 0",)
    circle = [dump(rank, 3, message("recv", (rank + 1) % 3)) for rank in range(3)]
    assert analyze(of(3, *circle)).ranks_at_fault == [0, 1, 2]


def test_a_receive_ahead_of_time_makes_no_innocents_guilty() -> None:
    # Rank 2 has asked for a message of rank 1, which waits for it; both wait for rank 3 in the end.
    one, two = dump(1, 4, message("recv", 2)), dump(2, 4, message("recv", 1), message("recv", 3))
    diagnosis = analyze(of(4, dump(0, 4), one, two, dump(3, 4)))
    assert diagnosis.ranks_at_fault == [3] and len(diagnosis.findings) == 3
    # Who waits for several ranks that wait for nobody waits for all of them.
    both = dump(2, 5, message("recv", 3), message("recv", 4))
    first = analyze(of(5, grown(one, 5), both)).findings[-1]
    assert first.ranks == (3, 4) and first.details == ("rank 2 waits itself, in the end for ranks 3-4",)


def test_who_did_not_signal_is_to_blame() -> None:
    waits = access("wait_signal", 1)
    for others in ([dump(1, 3, access("signal", 0, "completed"))], []):
        (finding,) = analyze(of(3, dump(0, 3, waits), *others)).findings
        assert (finding.kind, finding.ranks, finding.waiting) == ("unmatched", (1,), ((0, waits),))
    # It waits itself.
    diagnosis = analyze(of(3, dump(0, 3, waits), dump(1, 3, message("recv", 2))))
    assert diagnosis.ranks_at_fault == [2]
    # It has, and the signal is on its way.
    one, two = analyze(of(3, dump(0, 3, waits), dump(1, 3, access("signal", 0)))).findings
    assert [(finding.kind, finding.ranks) for finding in (one, two)] == [("hang", ())] * 2
    # It is dead, as its finding says.
    (died,) = analyze(of(3, dump(0, 3, waits, rank1="its process ended"))).findings
    assert (died.kind, died.ranks, died.waiting) == ("died", (1,), ((0, waits),))


def test_what_needs_no_certain_rank_is_a_hang(tmp_path: Path) -> None:
    accesses = [access(name, 1) for name in ("get", "put", "accumulate", "flush", "signal")]
    for stuck in (*accesses, message("recv", None), message("recv", 0), message("send", 0), access("wait_signal", 0)):
        for state, failure in (("running", None), ("failed", "timed out")):
            record = replace(stuck, state=state, failure=failure)
            (finding,) = analyze(of(2, dump(0, 2, record), dump(1, 2))).findings
            assert (finding.kind, finding.ranks, finding.waiting) == ("hang", (), ((0, record),))
            assert finding.text == f"rank 0 called {record.call}, and it did not finish"
            assert finding.details == ((failure,) if failure else ())
    save(tmp_path, dump(0, 2, access("get", 1)), dump(1, 2))
    assert main([str(tmp_path)]) == UNCLEAR
    # It is not known that connections have to do with it, however slow some are.
    slow = {0: replace(GOOD, round_trip=90_000)}
    world = [linked(dump(0, 4, message("recv", None)), {peer: GOOD for peer in (1, 2, 3)})]
    world += [linked(dump(rank, 4), dict.fromkeys(range(4), GOOD) | (slow if rank == 1 else {})) for rank in (1, 2, 3)]
    diagnosis = analyze(of(4, *world))
    assert diagnosis.links and [finding.kind for finding in diagnosis.findings] == ["hang"]


def operations() -> set[str]:
    """The names of all operations that the engine writes."""
    sources = Path(__file__).parents[2] / "src"
    calls = re.findall(r'Call::\w+ \{ \.\. \} => "(\w+)"', (sources / "engine" / "call.rs").read_text())
    collectives = re.findall(r'^ .*\b[A-Z]\w+ = \d+, "(\w+)";', (sources / "op.rs").read_text(), re.MULTILINE)
    return {*calls, *collectives}


def test_the_analyser_knows_each_operation_or_does_not_see_it() -> None:
    assert {"send", "flush", "wait_signal", "all_reduce", "window_fence", "all_gather_p"} <= operations()
    gathers = collective(0, call="all_gather_p(4 × float32, window 3)", written=8)
    left_out = [collective(1, call="window_fence(window 3)")]
    left_out += [access(name, 1, "completed") for name in ("put", "get", "accumulate", "flush", "signal")]
    (entry,) = trace([dump(0, 2, gathers, *left_out)])["entries"]
    assert (entry["profiling_name"], entry["output_sizes"]) == ("ncclx:all_gather", [[8]])
    if ANALYSER_KNOWS_US:
        types = importlib.import_module("torch.distributed.flight_recorder.components.types")
        known = {_NAMES.get(name, name) for name in operations() - _UNKNOWN}
        assert known <= types.COLLECTIVES | types.P2P


GOOD = Link(round_trip=120, bytes=80 << 20, sending=100_000, segments=5000, resent=0)


def test_slow_connections_stand_out() -> None:
    def world(bad: Link, pairs: set[tuple[int, int]], state: str = "completed") -> Communicator:
        def links(rank: int) -> dict[int, Link]:
            return {peer: bad if {(rank, peer), (peer, rank)} & pairs else GOOD for peer in range(4)}

        return of(4, *(linked(dump(rank, 4, collective(0, state)), links(rank)) for rank in range(4)))

    slow, far, lossy = (
        replace(GOOD, **worse) for worse in ({"sending": 9_000_000}, {"round_trip": 9000}, {"resent": 250})
    )
    for bad, text in (
        (slow, "9.32 MB/s, others 839 MB/s"),
        (far, "9.0 ms, others 0.1 ms"),
        (lossy, "5.0 % sent again"),
    ):
        diagnosis = analyze(world(bad, {(1, 3)}))
        assert not diagnosis.findings, "what completed is no failure"
        assert [(link.sender, link.receiver) for link in diagnosis.links] == [(1, 3), (3, 1)]
        assert text in diagnosis.links[0].text
    (finding,) = analyze(world(slow, {(1, 3)}, "running")).findings
    assert (finding.kind, finding.ranks) == ("slow_link", (1, 3))
    (finding,) = analyze(world(slow, {(2, 0), (2, 1), (2, 3)}, "running")).findings
    assert finding.ranks == (2,), "all of them are its own"
    assert not analyze(world(replace(slow, bytes=1000), {(1, 3)})).links, "too little to tell"


def test_hundreds_of_ranks_fit_on_a_screen_and_a_page() -> None:
    size = 200
    late = dump(7, size, *(collective(s, submitted=1000 * s + 90) for s in range(120)))
    rest = (
        dump(rank, size, *map(collective, range(120)), collective(120, "running")) for rank in range(size) if rank != 7
    )
    diagnosis = analyze(of(size, late, *rest))
    assert diagnosis.ranks_at_fault == [7]
    waiting = (dump(rank, size, message("recv", rank - 1)) for rank in range(1, size))
    for shown in (diagnosis, analyze(of(size, dump(0, size), *waiting))):
        text = report.text(shown)
        assert len(text.splitlines()) <= 24 and max(map(len, text.splitlines())) < 160, text
    assert report.page([diagnosis]).count("<rect") <= 20_000


def test_stragglers_are_measured_where_all_completed() -> None:
    on_time = dump(0, 2, *(collective(s, submitted=1000 * s) for s in range(4)))
    late = dump(1, 2, *(collective(s, submitted=1000 * s + 250) for s in range(3)), collective(3, "running"))
    diagnosis = analyze(of(2, on_time, late))
    assert diagnosis.compared == 3
    assert [(s.rank, s.mean, s.worst, s.last) for s in diagnosis.stragglers] == [(0, 0, 0, 0), (1, 250, 250, 3)]


def save(folder: Path, *dumps: Dump) -> None:
    for dump in dumps:
        content = {"version": 5} | asdict(dump)
        (folder / f"{dump.rank}-{dump.time}.json").write_text(json.dumps(content))


def test_what_is_no_dump_is_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == UNUSABLE and "no dump in" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == UNUSABLE and "nowhere" in capsys.readouterr().err
    bad = {"cut": '{"version": 5, "id"', "old": '{"version": 1}', "list": "[]", "bare": '{"version": 3}'}
    for name, content in bad.items():
        (tmp_path / f"{name}.json").write_text(content)
    (tmp_path / "note.txt").write_text("not looked at")
    fine = dump(0, 1, collective(0))
    strange = {"foreign": replace(fine, records=[message("send", 9)]), "few": replace(fine, members=[])}
    strange["path"] = replace(fine, members=["/../0"])  # type: ignore[list-item]
    strange["size"] = dump(1, 2, message("send", 0))
    for name, wrong in strange.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"version": 5} | asdict(wrong)))
    save(tmp_path, fine)
    assert main([str(tmp_path), "--pytorch", str(tmp_path / "traces")]) == FINE
    out, err = capsys.readouterr()
    assert "nothing went wrong" in out
    names = ("cut", "old", "list", "bare", "foreign", "few", "path", "size", "note")
    assert [f"{name}.json" in err for name in names] == [True] * 8 + [False]


def test_the_newest_dump_of_a_rank_counts(tmp_path: Path) -> None:
    old, new = dump(0, 2, collective(0, "running")), dump(0, 2, collective(0))
    save(tmp_path, Dump(**(vars(old) | {"time": 1})), new)
    (communicator,) = read(tmp_path).communicators
    assert communicator.dumps[0].records[0].state == "completed"
    # The job was started again.
    save(tmp_path, replace(new, id="0001", time=9_000_001), replace(new, id="0fff", time=2))
    assert [communicator.id for communicator in read(tmp_path).communicators] == ["0fff", "00ff", "0001"]


def test_exit_codes_json_and_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = collective(0, "failed", failure="<late>")
    save(tmp_path, dump(0, 2, failed, called={1: 1}))
    page, trace_file = tmp_path / "page.html", tmp_path / "perfetto.json"
    assert main([str(tmp_path), "--json", "--html", str(page), "--perfetto", str(trace_file)]) == UNCLEAR
    assert json.loads(trace_file.read_text())["traceEvents"]
    (shown,) = json.loads(capsys.readouterr().out)
    assert shown["ranks_at_fault"] == [] and shown["findings"][0]["kind"] == "hang" and shown["dumps"] == [0]
    text = page.read_text()
    assert text.count("<rect") == 1 and "&lt;late&gt;" in text and "<late>" not in text
    save(tmp_path, dump(1, 2))
    assert main([str(tmp_path)]) == UNCLEAR  # rank 0 knows that rank 1 has called it
    save(tmp_path, Dump(**(vars(dump(0, 2, failed)) | {"time": 9_900_000})))
    assert main([str(tmp_path)]) == BLAMED and "to blame: rank 1" in capsys.readouterr().out


def test_ranks_of_a_part_of_the_job_are_named_as_the_job_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = {0: [collective(0, "failed")], 1: []}
    save(tmp_path, *(replace(dump(rank, 2, *own), members=[6, 4], process=70 + rank) for rank, own in records.items()))
    assert main([str(tmp_path)]) == BLAMED
    out = capsys.readouterr().out
    assert "communicator `main`, 2 ranks, in the job 6, 4\n" in out
    assert "to blame: rank 1\n    rank 1 is rank 4 of the job, process 71\n" in out
    assert main([str(tmp_path), "--json"]) == BLAMED
    assert json.loads(capsys.readouterr().out)[0]["members"] == [6, 4]
    whole = report.text(analyze(of(2, *(dump(rank, 2, *own) for rank, own in records.items()))))
    assert "2 ranks\n  to blame: rank 1\n    rank 1 is process 77\n" in whole


# ---- dumps that ranks leave ----


@contextmanager
def recorded(rank: int, size: int, folder: str, **hints: str) -> Iterator[TorchComm]:
    comm = ncclx_rs.new_comm(
        "ncclx",
        "cpu",
        "job/main",
        abort_process_on_timeout_or_error=False,
        store=fresh_store(),
        rank=rank,
        size=size,
        timeout=timedelta(seconds=20),
        hints={"dump_directory": folder} | hints,
    )
    for _ in range(3):
        comm.all_reduce(torch.ones(4), ReduceOp.SUM, False)
    meet()
    yield comm


def one_does_not_call(rank: int, size: int, folder: str) -> None:
    with recorded(rank, size, folder) as comm, leaving_together():
        comm.set_timeout(1.5)
        if rank == 1:
            assert len(ncclx_rs.dump(folder, "asked")) == 1
            return
        with pytest.raises(RuntimeError, match="rank.s. 1 did not call it"):
            comm.all_reduce(torch.ones(9), ReduceOp.SUM, False)


def one_is_killed(rank: int, size: int, folder: str) -> None:
    with recorded(rank, size, folder) as comm:
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with leaving_together(range(size - 1)), pytest.raises(RuntimeError, match="lost"):
            while True:
                comm.all_reduce(torch.ones(4), ReduceOp.SUM, False)


def one_calls_another_size(rank: int, size: int, folder: str) -> None:
    with recorded(rank, size, folder) as comm, leaving_together():
        with pytest.raises(RuntimeError, match="disagree"):
            comm.all_reduce(torch.ones(6 if rank == 2 else 5), ReduceOp.SUM, False)


def tags_differ(rank: int, size: int, folder: str) -> None:
    """A signal makes the ranks dump while all of them wait."""
    with recorded(rank, size, folder, dump_signal="USR2") as comm, leaving_together():
        backend = comm.unsafe_get_backend().c10d if rank < 2 else None
        tensor = torch.ones(100_000)
        if backend is not None:
            work = backend.send([tensor], 1, 5) if rank == 0 else backend.recv([tensor], 0, 6)
            assert not work.is_completed()
        os.kill(os.getpid(), signal.SIGUSR2)
        deadline = time.monotonic() + 30
        while len(list(Path(folder).glob("*rank?.json"))) < size and time.monotonic() < deadline:
            time.sleep(0.01)
        comm.abort()


def one_calls_late(rank: int, size: int, folder: str) -> None:
    with recorded(rank, size, folder) as comm, leaving_together():
        comm.set_timeout(1.5)
        if rank == 1:
            time.sleep(3)
        with pytest.raises(RuntimeError, match="timed out"):
            comm.all_reduce(torch.ones(9), ReduceOp.SUM, False)


def sizes_differ(rank: int, size: int, folder: str) -> None:
    with recorded(rank, size, folder) as comm, leaving_together():
        if rank == 0:
            comm.send(torch.ones(8), 1, False)
        elif rank == 1:
            with pytest.raises(RuntimeError, match="rank 0 sent 32 bytes, the receive expects 16"):
                comm.recv(torch.ones(4), 0, False)
        if rank != 1:
            ncclx_rs.dump(folder)


CASES = {
    one_does_not_call: (
        BLAMED,
        "to blame: rank 1",
        "collective 3, all_reduce(SUM, 9 × float32), which rank",
    ),
    one_calls_late: (BLAMED, "to blame: rank 1\n    rank 1 is process ", "rank 1 called it "),
    sizes_differ: (UNCLEAR, "rank 1 called recv(16 bytes from rank 0", "rank 0 sent 32 bytes, the receive expects 16"),
    one_is_killed: (BLAMED, "to blame: rank 2", "rank 2 died: "),
    one_calls_another_size: (BLAMED, "to blame: rank 2", "rank 2 called all_reduce(SUM, 6 × float32)"),
    tags_differ: (UNCLEAR, "rank 0 called send(400000 bytes to rank 1, tag 5)", "rank 1 called recv(400000 bytes"),
}


WARNED = "UserWarning: ncclx_rs: NCCLX_RS_DUMP_SIGNAL: the signal will write no flight recorder"
TWO_GROUPS = """
import torch.distributed as dist
from ncclx_rs import Options

dist.init_process_group("ncclx_rs", pg_options=Options(hints={"dump_directory": "dumps"}))
dist.new_group()
dist.new_group()
"""


def test_a_signal_that_writes_nothing_is_a_warning(tmp_path: Path) -> None:
    for variables, warnings in (({}, 1), ({"NCCLX_RS_DUMP_DIRECTORY": str(tmp_path)}, 0)):
        done = program(TWO_GROUPS, NCCLX_RS_DUMP_SIGNAL="USR2", **variables)
        assert done.returncode == 0 and done.stderr.count(WARNED) == warnings, done.stderr


def test_the_documented_signal_reaches_ranks_and_not_torchrun() -> None:
    if shutil.which("pkill") is None:
        lacking("pkill")
    document = (Path(__file__).parents[2] / "docs" / "diagnosis.md").read_text()
    (line,) = (line.split("  #")[0] for line in document.splitlines() if line.startswith("pkill "))
    # This host may have other jobs: only the oldest process of this name is found.
    name = f"torchrun-{os.getpid()}"
    rank = "import signal, time; signal.signal(signal.SIGUSR2, lambda *_: exit(7)); print(flush=True); time.sleep(100)"
    agent = (
        f"import subprocess, sys; done = subprocess.run([sys.executable, '-c', {rank!r}]); sys.exit(done.returncode)"
    )
    with subprocess.Popen([sys.executable, "-c", agent, name, "train.py"], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None and launcher.stdout.readline() == b"\n"
        subprocess.run(["bash", "-c", line.replace("torchrun", name)], check=True)
        assert launcher.wait(30) == 7


@pytest.mark.worlds(sizes=(3,), modes=("shm",))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_culprit_is_found(fresh_world: World, case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "dumps"
    fresh_world.run(case, str(folder), join=False, dies={2} if case is one_is_killed else set())
    traces = tmp_path / "traces"
    code = main([str(folder), "--html", str(tmp_path / "page.html"), "--pytorch", str(traces)])
    out = capsys.readouterr().out
    assert (code, *(text in out for text in CASES[case][1:])) == (CASES[case][0], True, True), out
    assert "last 3 collectives that all completed" in out
    left = read(folder).communicators[0].dumps
    assert sorted(file.name for file in traces.iterdir()) == sorted(f"trace_{rank}" for rank in left)
    if case is one_does_not_call and ANALYSER_KNOWS_US:
        assert "missing ranks: {1}" in analyse(traces)
    files = list(folder.iterdir())
    assert all(file.name.startswith("ncclx_rs-job_main-") and file.suffix == ".json" for file in files)
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)


def a_wire_is_slow(rank: int, size: int, folder: str) -> None:
    # Rank 0's address on the network of each other rank.
    method = f"tcp://10.214.{max(rank, 1)}.1:29612"
    hints = {"dump_directory": folder, "algorithm": "ring"}
    options = ncclx_rs.Options(timeout=timedelta(seconds=60), hints=hints)
    dist.init_process_group(BACKEND, init_method=method, rank=rank, world_size=size, pg_options=options)
    dist.all_reduce(torch.ones(3 << 18))
    harness.set_timeout(dist.group.WORLD, 2)
    with pytest.raises(RuntimeError, match="timed out|gave the operation up|reported"):
        dist.all_reduce(torch.ones(8 << 20))
    dist.distributed_c10d._abort_process_group()


@pytest.mark.skipif(BACKEND != "ncclx_rs", reason="its dumps")
def test_a_slow_connection_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with hosts("abc") as names:
        for a, b in ((0, 1), (0, 2), (1, 2)):
            connect(f"wire{a}{b}", (names[a], names[b]), (f"10.214.{a * 2 + b}.1/24", f"10.214.{a * 2 + b}.2/24"))
        for name in (names[0], names[2]):
            limit = ("tbf", "rate", "80mbit", "burst", "32k", "latency", "400ms")
            shaped = subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "wire02", "root", *limit], check=False)
            if shaped.returncode != 0:
                lacking("this kernel cannot shape traffic")
        world = World(3, "tcp", {}, Host(names))
        try:
            world.run(a_wire_is_slow, str(tmp_path), join=False)
        finally:
            world.close()
    code = main([str(tmp_path)])
    out = capsys.readouterr().out
    assert code == BLAMED and "to blame: ranks 0 and 2" in out, out
    assert "connections that stand out:\n    rank 2 to rank 0: " in out, out
