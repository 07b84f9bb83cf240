"""`ncclx-rs diagnose` on the dumps of several communicators: who waits in another one is not to blame."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import ncclx_rs
import pytest
import torch
from harness import World, fresh_store, leaving_together, meet
from ncclx_rs.diagnose import Communicator, Diagnosis, Dump, across, analyze
from ncclx_rs.diagnose.__main__ import BLAMED, UNCLEAR, main
from test_diagnose import CALL, collective, dump, message


def named(name: str, members: list[int], *dumps: Dump) -> Communicator:
    """A communicator of these ranks of the job, which are a process each."""
    own = [replace(one, id=name, communicator=name, members=members, process=members[one.rank]) for one in dumps]
    return Communicator(name, name, len(members), {one.rank: one for one in own})


def of_all(*communicators: Communicator) -> list[Diagnosis]:
    return across([analyze(communicator) for communicator in communicators])


def found(diagnosis: Diagnosis) -> tuple[str, tuple[int, ...], str]:
    (finding,) = diagnosis.findings
    return finding.kind, finding.ranks, finding.details[-1]


WAITS = collective(1, "running")


def test_who_waits_elsewhere_is_not_to_blame() -> None:
    # Of the job's ranks, 5 has not come to 4, as it waits for 6, which sends nothing.
    data = named("data", [4, 5], dump(0, 2, collective(0), WAITS), dump(1, 2, collective(0)))
    tensor = named("tensor", [5, 6], dump(0, 2, message("recv", 1)), dump(1, 2))
    alone = analyze(data)
    assert alone.ranks_at_fault == [1]
    first, second = of_all(data, tensor)
    kind, at_fault, detail = found(first)
    assert (kind, at_fault) == ("missing", ())
    call = "recv(16 bytes from rank 1, tag 0)"
    assert detail == f"rank 1 waited 9.0 s in communicator `tensor`, in {call}, in the end for rank 6 of the job"
    assert second.findings == analyze(tensor).findings and second.ranks_at_fault == [1]


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
    assert found(first)[2].startswith(f"rank 1 waited 9.0 s in communicator `two`, in {CALL}, and ranks there wait")
    assert found(second)[2].startswith(f"rank 0 waited 9.0 s in communicator `one`, in {CALL}")


def test_who_waited_at_another_time_is_to_blame() -> None:
    data = named("data", [0, 1], dump(0, 2, collective(0), WAITS), dump(1, 2, collective(0)))
    before = collective(1, "failed", submitted=10, ended=900, failure="timed out")
    other = named("other", [1, 2], dump(0, 2, before))
    assert [diagnosis.ranks_at_fault for diagnosis in of_all(data, other)] == [[1], [1]]
    # Nor does it help that the same rank of an earlier job waited.
    earlier = named("other", [1, 2], dump(0, 2, WAITS))
    earlier.dumps[0] = replace(earlier.dumps[0], process=555)
    assert of_all(data, earlier)[0].ranks_at_fault == [1]


def test_a_hang_elsewhere_excuses_nobody() -> None:
    data = named("data", [0, 1], dump(0, 2, collective(0), WAITS), dump(1, 2, collective(0)))
    hang = named("hang", [1, 2], dump(0, 2, WAITS), dump(1, 2, WAITS))
    first, second = of_all(data, hang)
    assert (first.ranks_at_fault, [finding.kind for finding in second.findings]) == ([1], ["hang"])


def test_who_is_to_blame_there_too_stays_so() -> None:
    one = named("one", [0, 1], dump(0, 2, collective(0), WAITS), dump(1, 2, collective(0)))
    differs = collective(1, "running", call="broadcast(4 × float32 from rank 0)")
    two = named("two", [1, 2, 3], dump(0, 3, differs), dump(1, 3, WAITS), dump(2, 3, WAITS))
    first, second = of_all(one, two)
    assert first.ranks_at_fault == [1] and second.ranks_at_fault == [0]


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
                comm.set_timeout(1.5)
        if rank == 2:
            return
        waits = everyone if rank == 0 else pair
        assert waits is not None
        with pytest.raises(RuntimeError, match="did not call it"):
            waits.all_reduce(torch.ones(9), ncclx_rs.ReduceOp.SUM, False)


def orders_differ(rank: int, size: int, folder: str) -> None:
    comms = [made(rank, size, name, folder) for name in ("one", "two")]
    meet()
    with leaving_together():
        waits = comms[rank % 2]
        waits.set_timeout(1.5)
        with pytest.raises(RuntimeError, match="did not call it"):
            waits.all_reduce(torch.ones(9), ncclx_rs.ReduceOp.SUM, False)


@pytest.mark.worlds(sizes=(3,), modes=("shm",))
def test_the_end_of_a_chain_is_found(fresh_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fresh_world.run(one_keeps_others_waiting, str(tmp_path), join=False)
    assert main([str(tmp_path), "--json"]) == BLAMED
    everyone, pair = json.loads(capsys.readouterr().out)
    assert (everyone["communicator"], everyone["ranks_at_fault"]) == ("everyone", [2])
    assert (pair["communicator"], pair["ranks_at_fault"]) == ("pair", [1])
    (finding,) = everyone["findings"]
    assert finding["details"][-1].startswith(
        "rank 1 waited 1.5 s in communicator `pair`, in all_reduce(SUM, 9 × float32)"
    )
    assert finding["details"][-1].endswith("in the end for rank 2 of the job")
    assert main([str(tmp_path)]) == BLAMED
    assert capsys.readouterr().out.startswith("to blame: rank 2 of the job\n\ncommunicator `everyone`, 3 ranks")


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_calls_in_different_orders_are_found(
    fresh_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh_world.run(orders_differ, str(tmp_path), join=False)
    assert main([str(tmp_path)]) == UNCLEAR
    out = capsys.readouterr().out
    assert "rank 1 waited 1.5 s in communicator `two`" in out and "and ranks there wait for this one" in out, out
    assert "to blame" not in out
