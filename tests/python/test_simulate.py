"""The simulation of collectives: its command line, and what it says beside what is measured."""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import BACKEND
from ncclx_rs._load import native
from ncclx_rs.bench import launch, measure, simulate
from ncclx_rs.bench.measure import Plan

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from spread import spread, summary  # noqa: E402  # tests/bench is no package

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="only the engine's schedules are simulated")

LINKS = {
    "within_host": {"latency": 5e-7, "overhead": 2e-7, "gap": 1e-7, "gap_per_byte": 1e-10},
    "between_hosts": {"latency": 2.5e-6, "overhead": 1.5e-6, "gap": 1e-6, "gap_per_byte": 8e-11},
}
START = {"admit": 4e-5, "relay": 1e-5, "table_per_rank": 3e-6}
PARAMETERS = {"version": 1, "note": "a test", "reduce_per_byte": 1e-10, **LINKS, "start": START}


@pytest.fixture
def parameters(tmp_path: Path) -> Path:
    file = tmp_path / "parameters.json"
    file.write_text(json.dumps(PARAMETERS))
    return file


def found(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert simulate.main([*map(str, words), "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_each_algorithm_has_times_and_counts(parameters: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = found(capsys, "--parameters", parameters, "--hosts", "2,4", "--ranks-per-host", 4, "--sizes", "1K,1M")
    assert told["schema"] == simulate.SCHEMA and told["parameters"] == PARAMETERS
    seen = {(one["collective"], one["ranks"], one["hosts"], one["bytes"]) for one in told["findings"]}
    sized = [name for name in simulate.COLLECTIVES if name != "barrier"]
    expected = {(name, 4 * hosts, hosts, size) for name in sized for hosts in (2, 4) for size in (1024, 1 << 20)}
    assert seen == expected | {("barrier", 8, 2, 0), ("barrier", 16, 4, 0)}
    for one in told["findings"]:
        names = native().algorithms(one["collective"], one["ranks"], one["hosts"], all=True)
        assert ("forwarding" in names) == (one["collective"] == "all_to_all")
        assert list(one["algorithms"]) == names and one["chosen"] in names and not one["refused"]
        times = {name: each["seconds"] for name, each in one["algorithms"].items()}
        assert times[one["fastest"]] == min(times.values()) > 0
        for each in one["algorithms"].values():
            assert each["rank_messages_max"] >= each["rank_messages_mean"] > 0
            assert each["host_bytes_max"] <= 4 * each["rank_bytes_max"]
            assert each["late_costs"] == 0


def test_the_table_names_the_fastest(parameters: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--parameters", str(parameters), "--collectives", "all_reduce", "--hosts", "1", "--sizes", "64,64M"]
    assert simulate.main(words) == 0
    out = capsys.readouterr().out
    assert "# simulated: all_reduce, 8 ranks, 1 host\n" in out
    lines = [line.split() for line in out.splitlines() if "fastest" in line]
    assert [line[0] for line in lines] == ["64", "64M"]
    assert lines[0][1] == "recursive_doubling"


def test_options_stand_for_a_file(parameters: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--collectives", "broadcast", "--sizes", "4K"]
    links = [",".join(map(str, link.values())) for link in LINKS.values()]
    words = ["--within-host", links[0], "--between-hosts", links[1], "--reduce-per-byte", "1e-10"]
    by_file, by_words = found(capsys, "--parameters", parameters, *few), found(capsys, *words, *few)
    assert by_file["findings"] == by_words["findings"]
    slower = found(capsys, "--parameters", parameters, "--within-host", "1e-3,1e-3,0,0", *few)
    assert slower["findings"][0]["algorithms"]["binomial"]["seconds"] > 1e-3


def test_long_messages_wait_for_their_receivers_between_hosts(
    parameters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def takes(between: dict[str, Any], *words: str) -> float:
        parameters.write_text(json.dumps({**PARAMETERS, "between_hosts": between}))
        words = ("--parameters", str(parameters), "--hosts", "2", "--ranks-per-host", "1", *words)
        told = found(capsys, *words, "--collectives", "all_gather", "--sizes", "256K", "--algorithms", "ring")
        seconds: float = told["findings"][0]["algorithms"]["ring"]["seconds"]
        return seconds

    link = LINKS["between_hosts"]
    notice = 2 * link["overhead"] + link["latency"]
    by_default, never = takes(link), takes({**link, "eager_bytes": 1 << 17})
    assert by_default - never == pytest.approx(notice) and takes({**link, "eager_bytes": (1 << 17) - 1}) == by_default
    # Options give the other numbers of a link.
    slow = {**link, "latency": 1.0, "eager_bytes": 1 << 17}
    assert takes(slow, "--between-hosts", ",".join(map(str, link.values()))) == never


def test_a_late_rank_costs_what_others_wait_for_it(parameters: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--parameters", parameters, "--collectives", "all_reduce", "--sizes", "1K", "--late", "3=0.5"]
    for each in found(capsys, *words)["findings"][0]["algorithms"].values():
        # What has come meanwhile is taken in another order, so that it may be a little more than the half second.
        assert 0.4 < each["late_costs"] < 0.51 and each["seconds"] > 0.5


def test_the_fastest_become_a_tuning_file(parameters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tuning.json"
    words = ["--parameters", parameters, "--collectives", "all_reduce,all_to_all", "--output", file]
    told = found(capsys, *words, "--sizes", "64,64M", "--hosts", 1)
    written = json.loads(file.read_text())
    assert written["rows"] == told["rows"] and written["note"].startswith("simulated")
    # What has one algorithm has no row.
    assert {(row["collective"], row["ranks"], row["hosts"]) for row in written["rows"]} == {("all_reduce", 8, 1)}
    assert written["rows"][0]["algorithm"] == "recursive_doubling" and written["rows"][0]["max_bytes"] == 64
    from test_tune import open_with

    open_with(file)


@pytest.mark.parametrize("ranks", [1, 8])
def test_what_takes_no_time_has_a_tuning_file_too(
    ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tuning.json"
    words = ["--within-host", "0,0,0,0", "--hosts", 1, "--ranks-per-host", ranks, "--collectives", "all_gather"]
    told = found(capsys, *words, "--sizes", "1K,64K", "--output", file)
    times = [each["seconds"] for one in told["findings"] for each in one["algorithms"].values()]
    assert len(times) > 2 and not any(times)
    # The first algorithm is as fast as any other, for both sizes.
    first = native().algorithms("all_gather", ranks, 1)[0]
    row = {"collective": "all_gather", "ranks": ranks, "hosts": 1, "max_bytes": 65536, "algorithm": first}
    assert json.loads(file.read_text())["rows"] == [row]


def test_the_start_of_a_world_has_a_time_and_counts(parameters: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = found(capsys, "--parameters", parameters, "--start", "--hosts", "1,512", "--late", "3=60")
    assert told["schema"] == simulate.SCHEMA and told["late"] == {"3": 60.0}
    few, many = told["starts"]
    assert [(one["ranks"], one["hosts"]) for one in (few, many)] == [(8, 1), (4096, 512)]
    # Rank 0 takes those of its group and 31 leaders in, and hears of the others, one by one. Then comes the table.
    joined = (127 + 31) * START["admit"] + 31 * 127 * START["relay"]
    assert joined < many["seconds"] - many["late_costs"] < joined + 7 * 4096 * START["table_per_rank"]
    assert all(59 < one["late_costs"] < one["seconds"] < 61 for one in (few, many))
    # Rank 0 of a few tells each once. A leader joins, takes 127 in, and passes the table to 16 hosts and its own.
    assert many["rank_messages_max"] == 4 + 4 * 127 + 3 * (16 + 7) and few["rank_messages_max"] == 3 * 7
    # The table goes down a tree of which no rank has more than 32 below it, and of a rank it says less than 100 bytes.
    assert few["bytes"] < many["bytes"] < 100 * 4096
    assert many["rank_bytes_max"] < 32 * many["bytes"] + 4095 * 1000
    assert many["rank_bytes_mean"] < many["bytes"] + 10_000


def test_the_table_of_starts_has_a_line_a_world(parameters: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--parameters", str(parameters), "--start", "--hosts", "1,131072"]) == 0
    out, err = capsys.readouterr()
    heading, line = out.splitlines()[2:]
    assert heading.split()[:4] == ["ranks", "hosts", "table", "time"] and line.split()[:2] == ["8", "1"]
    assert err.startswith("1048576 ranks on 131072 hosts: not simulated: a world of 1048576 ranks does not come about")


def test_a_world_that_is_too_large_for_an_algorithm_is_told(
    parameters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--parameters",
        str(parameters),
        "--hosts",
        "100000",
        "--ranks-per-host",
        "1",
        "--collectives",
        "all_reduce",
    ]
    assert simulate.main([*words, "--algorithms", "ring", "--sizes", "1K"]) == 1
    assert "at most 33554432 are simulated: take fewer ranks" in capsys.readouterr().err


def test_an_algorithm_that_takes_more_than_five_hours_leaves_the_others(
    parameters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--parameters", parameters, "--between-hosts", "5e-5,1e-5,1e-5,8e-9", "--collectives", "broadcast"]
    [told] = found(capsys, *words, "--hosts", 8, "--ranks-per-host", 8, "--sizes", "64G")["findings"]
    assert told["refused"] == {"direct": "it takes longer than five hours, and no more is counted"}
    assert "hierarchical" in told["algorithms"] and told["bytes"] == 64 << 30


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--parameters: expected a file, or --within-host"),
        (["--parameters", "nowhere.json"], "--parameters: nowhere.json cannot be read: "),
        (["--within-host", "1e-6,2e-7"], "expected seconds L,o,g,G such as"),
        (["--within-host", "1,1,1,-1"], "--within-host: expected seconds from 0 to 3600.0, got '-1'"),
        (["--within-host", "1,1,1,nan"], "--within-host: expected seconds from 0 to 3600.0, got 'nan'"),
        (["--reduce-per-byte", "inf"], "--reduce-per-byte: expected seconds from 0 to 3600.0, got 'inf'"),
        (["--within-host", "0,0,0,0"], "between_hosts: missing, and the world has 8 hosts"),
        (["--collectives", "send"], "unknown: send"),
        (["--within-host", "0,0,0,0", "--algorithms", "fast"], "unknown: fast; expected all, or some of "),
        (["--hosts", "0"], "expected numbers of ranks such as"),
        (["--within-host", "0,0,0,0", "--hosts", "1000000"], "ranks: expected from 1 to 1048576, got 8 on each of"),
        (["--hosts", f"{10**20}"], "--hosts: expected at most 1048576"),
        (["--sizes", f"{10**20}"], "--sizes: expected at most 64G"),
        (["--sizes", "0"], "expected a size such as"),
        (["--late", "3"], "expected RANK=SECONDS such as 3=0.01"),
        (["--late", f"{10**20}=1"], "expected RANK=SECONDS"),
        (["--late", "3=-1"], "--late: expected seconds from 0 to 3600.0, got '-1'"),
        (["--within-host", "0,0,0,0", "--hosts", "1", "--late", "8=1"], "late: expected a rank below 8, got 8"),
        (["--within-host", "0,0,0,0", "--hosts", "1", "--start"], "start: missing, and the start of a world"),
        (["--start", "--output", "tuning.json"], "--output: a start has no algorithms to choose from"),
        (["--output", "nowhere/tuning.json"], "--output: expected a path in a folder that exists"),
        (["--measure", "nowhere/host.json"], "--measure: expected a path in a folder that exists"),
    ],
)
def test_a_bad_command_line_is_told(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        simulate.main(words)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_told_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for work in ("simulated", "_measure"):
        monkeypatch.setattr(simulate, work, lambda *_: pytest.fail("nothing is to be simulated or measured"))
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes")
    for words, told in (
        (["--measure", str(tmp_path)], "--measure: [Errno 21] Is a directory"),
        (["--output", str(notes)], f"--output: {notes}: expected a tuning file of version 1"),
    ):
        with pytest.raises(SystemExit, match="2"):
            simulate.main(["--within-host", "0,0,0,0", "--hosts", "1", *words])
        assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"version": 2}, "version: expected 1, got 2"),
        ({"reduce_per_byte": -1}, "reduce_per_byte: expected seconds from 0 to 3600, got -1"),
        ({"between_hosts": {"latency": 1}}, "between_hosts: missing field `overhead`"),
        ({"hosts": 2}, "unknown field `hosts`"),
    ],
)
def test_a_bad_file_is_told_with_its_field(
    change: dict[str, Any], told: str, parameters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parameters.write_text(json.dumps({**PARAMETERS, **change}))
    with pytest.raises(SystemExit):
        simulate.main(["--parameters", str(parameters)])
    assert f"--parameters: {parameters}: {told}" in capsys.readouterr().err


# ---- beside what is measured ----

# Long enough for PyTorch's part of a call, which is not simulated, to count little in unoptimised builds, too.
SIZES = (1 << 20, 1 << 22, 1 << 24)
OPERATIONS = {"all_reduce": "all_reduce", "all_gather": "all_gather_into_tensor", "broadcast": "broadcast"}
# The goal, for the median over collectives and sizes.
TOLERANCE = 0.25
# Where rounds of one size differ more than this, from the 10th to the 90th percentile, other work has the cores.
BUSY = 1.5
TRIES = 5
# By operation and size, in microseconds.
Times = dict[tuple[str, int], float]


def growths(times: dict[int, float]) -> list[float]:
    """How many times as long each size takes as the one before."""
    ascending = [times[size] for size in sorted(times)]
    return [after / before for before, after in itertools.pairwise(ascending)]


def compared(file: Path, fastest: Times, capsys: pytest.CaptureFixture[str]) -> tuple[float, float]:
    """Measures and simulates collectives of two ranks, and prints both.

    Args:
        file: Where parameters go.
        fastest: The fastest rounds of all tries, which count: other work only adds to them.
        capsys: What keeps the output.

    Returns:
        By which share they differ in how times grow with sizes, and how far measured rounds are apart: medians.
    """
    assert simulate.main(["--measure", str(file)]) == 0
    capsys.readouterr()
    plan = Plan(operations=tuple(OPERATIONS.values()), sizes=SIZES, rounds=9, round_seconds=0.01, check=False)
    rows = list(launch.run_world(plan, 2, measure.run))
    words = ["--parameters", file, "--hosts", 1, "--ranks-per-host", 2, "--sizes", ",".join(map(str, SIZES))]
    told = found(capsys, *words, "--collectives", ",".join(OPERATIONS))["findings"]
    factors, apart = [], []
    with capsys.disabled():
        for collective, operation in OPERATIONS.items():
            measured = {row.case.bytes: row.results["ncclx_rs"] for row in rows if row.case.operation == operation}
            by_size = {one["bytes"]: one for one in told if one["collective"] == collective}
            expected = {size: one["algorithms"][one["chosen"]]["seconds"] * 1e6 for size, one in by_size.items()}
            print(f"\n{collective} in microseconds: simulated; measured, as the median [p10, p90] of rounds")
            for size in SIZES:
                print(f"{size:>10} {expected[size]:>10.1f}   {spread(measured[size].rounds)}")
                _, low, high = summary(measured[size].rounds)
                apart.append(high / low)
                best = fastest.get((operation, size), math.inf)
                fastest[operation, size] = min(best, *measured[size].rounds)
            here, there = growths(expected), growths({size: fastest[operation, size] for size in SIZES})
            print("  from size to size", [f"{one:.2f}" for one in here], [f"{one:.2f}" for one in there])
            factors += [max(one / other, other / one) for one, other in zip(here, there, strict=True)]
        print(f"they differ by {spread([factor - 1 for factor in factors])}, and may by {TOLERANCE}")
    return statistics.median(factors) - 1, statistics.median(apart)


@pytest.mark.skipif("NCCLX_RS_QUIET" not in os.environ, reason="takes an idle machine: `make nightly` runs it")
def test_times_of_long_messages_grow_as_those_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fastest: Times = {}
    for _ in range(TRIES):
        differ, apart = compared(tmp_path / "host.json", fastest, capsys)
        if differ <= TOLERANCE:
            return
    if apart > BUSY:
        pytest.skip(f"other work has the cores: rounds of one size differ {apart:.1f}-fold")
    pytest.fail(f"simulated and measured times differ by {differ:.2f}")
