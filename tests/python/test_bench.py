"""The benchmark: its computations, its check of results, and its command line."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, World, fresh_store, needs, two_nodes
from ncclx_rs.__main__ import COMMANDS
from ncclx_rs.__main__ import main as program
from ncclx_rs.bench import __main__ as command_line
from ncclx_rs.bench import link, measure, plot, report
from ncclx_rs.bench.measure import Case, Plan, Ratio, Result, Row, compare, percentile
from ncclx_rs.bench.operations import OPERATIONS, Job, Place

ALL = tuple(OPERATIONS)


# ---- arithmetic ----


@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("all_reduce", 2 * 3 / 4),
        ("all_gather", 3 / 4),
        ("all_gather_into_tensor", 3 / 4),
        ("reduce_scatter", 3 / 4),
        ("reduce_scatter_tensor", 3 / 4),
        ("all_to_all", 3 / 4),
        ("all_to_all_single", 3 / 4),
        ("gather", 3 / 4),
        ("scatter", 3 / 4),
        ("broadcast", 1),
        ("reduce", 1),
        ("send_recv", 1),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(operation: str, factor: float) -> None:
    algorithm, bus = measure.bandwidths(OPERATIONS[operation], ranks=4, size_bytes=1_000_000, microseconds=500.0)
    assert algorithm == pytest.approx(2.0)
    assert bus == pytest.approx(2.0 * factor)


@pytest.mark.parametrize(
    ("operation", "least"),
    [("all_reduce", 8), ("all_gather", 5), ("broadcast", 4), ("all_to_all", 8), ("gather", 2), ("send_recv", 4)],
)
def test_the_share_of_memory_is_that_of_the_least_traffic(operation: str, least: int) -> None:
    case = Case(operation, "sync", 4, "int8", 1_000_000, 1)
    row = Row(case, {"a": Result(time=500.0), "b": Result(error="no")}, None)
    shared = measure.with_memory(row, OPERATIONS[operation], bandwidth=100.0)
    assert shared.memory == {"a": pytest.approx(least * 2.0 / 100.0)}
    assert "of memory" in report.lines(shared) and "of memory" not in report.lines(row)
    assert measure.with_memory(row, OPERATIONS[operation], None) == row


def test_a_device_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit) as ended:
        command_line.main(["--device", "cuda"])
    assert ended.value.code == 2
    assert "--device: PyTorch finds no CUDA device" in capsys.readouterr().err


def test_percentiles_lie_between_neighbours() -> None:
    values = [5.0, 1.0, 2.0, 4.0, 3.0]
    assert [percentile(values, p) for p in (0, 50, 90, 100)] == pytest.approx([1.0, 3.0, 4.6, 5.0])
    with pytest.raises(ValueError, match="percentile: argument `values`"):
        percentile([], 50)


def test_a_ratio_is_that_of_rounds_taken_together() -> None:
    ours, theirs = Result(rounds=[1.0, 2.0, 4.0], p50=2.0), Result(rounds=[3.0, 4.0, 40.0], p50=3.0)
    assert compare(ours, theirs) == Ratio(3.0, pytest.approx(2.2), pytest.approx(8.6), 1.5)
    assert compare(ours, Result(error="cannot")) is None


def test_times_are_those_of_the_slowest_rank() -> None:
    def turn(calls: list[int], whole: int, cpu: int) -> Any:
        return measure._Turn(measure.array.array("q", calls), whole, cpu)

    case = Case("send_recv", "sync", 2, "int8", 10, 10)
    first = [turn([4000, 8000], 12000, 2000), turn([2000, 2000], 4000, 2000)]
    second = [turn([6000, 2000], 8000, 6000), turn([2000, 4000], 6000, 6000)]
    result = Result(calls=2)
    measure._evaluate(result, case, OPERATIONS["send_recv"], [first, second], trips=2)
    assert result.rounds == [3.0, 1.5]  # (12, 6) microseconds for two calls of two trips
    assert result.p50 == percentile([3.0, 4.0, 1.0, 2.0], 50)
    assert result.cpu == 1.0
    assert result.algorithm_bandwidth == pytest.approx(10 / 2.25 / 1e3)


def test_sizes_are_what_ranks_can_share() -> None:
    plan = Plan(operations=("all_reduce", "all_gather", "send_recv", "barrier"), sizes=(8, 16, 64))
    rows = [(case.operation, case.bytes, case.count) for case in plan.rows(3)]
    assert rows[:3] == [("all_reduce", 8, 2), ("all_reduce", 16, 4), ("all_reduce", 64, 16)]
    assert rows[3:5] == [("all_gather", 12, 1), ("all_gather", 60, 5)]  # 8 and 16 bytes both give 12
    assert rows[-1] == ("barrier", 0, 0)
    assert not any(case.operation == "send_recv" for case in plan.rows(1))


def test_geometric_mean_is_for_ratios() -> None:
    assert report.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    with pytest.raises(ValueError, match="above 0"):
        report.geometric_mean([1.0, 0.0])


# ---- measuring ----

QUICK = Plan(
    backends=(BACKEND, "gloo"),
    operations=ALL,
    sizes=(8, 1024),
    dtypes=("float32", "bfloat16"),
    modes=("sync", "async"),
    rounds=2,
    calls=2,
    warmup=1,
    depth=2,
    pin=True,
)


def measures_all_operations(rank: int, size: int) -> None:
    cores = os.sched_getaffinity(0)
    rows = list(measure.run(QUICK, fresh_store(), rank, size, local_rank=rank))
    assert os.sched_getaffinity(0) == cores
    if rank != 0:
        assert rows == []
        return
    assert [row.case for row in rows] == QUICK.rows(size)
    for row in rows:
        for name, result in row.results.items():
            if name == "gloo" and result.error:
                continue  # an unsupported operation
            assert not result.error, f"{row.case} on {name}: {result.error}"
            assert result.wrong == 0, f"{row.case} on {name}: {result.wrong} wrong"
            assert len(result.rounds) == 2 and result.calls == 2
            assert 0 < result.p50 <= result.p95 <= result.p99
            assert result.time > 0 and result.cpu > 0
            assert (result.bus_bandwidth > 0) == (row.case.bytes > 0)
        if not row.results["gloo"].error:
            assert row.ratio is not None and 0 < row.ratio.p10 <= row.ratio.median <= row.ratio.p90
    assert "| geometric mean |" in report.summary(rows, QUICK.backends)
    assert {row.case.operation for row in rows if row.ratio is not None} >= {"all_reduce", "send_recv", "barrier"}


def a_spoilt_operation(at: Place, count: int, dtype: torch.dtype, name: str) -> Job:
    """An operation whose result has one wrong element on one rank."""
    job = OPERATIONS[name].build(at, count, dtype)
    # The last rank with a result: in some operations only the root has one, or the last rank has no partner.
    culprit = {"reduce": 0, "gather": 0, "send_recv": 1}.get(name, at.size - 1)

    def call(group: dist.ProcessGroup, later: bool) -> Any:
        done = job.call(group, False)
        for tensor, _ in job.results()[:1]:
            if at.rank == culprit:
                tensor[-1] += 1
        return done

    return dataclasses.replace(job, call=call)


def wrong_results_are_seen(rank: int, size: int) -> None:
    operations = tuple(name for name in ALL if name != "barrier" and (BACKEND != "gloo" or name != "all_to_all"))
    spoilt = {
        name: dataclasses.replace(OPERATIONS[name], build=functools.partial(a_spoilt_operation, name=name))
        for name in operations
    }
    plan = dataclasses.replace(QUICK, backends=(BACKEND,), operations=operations, modes=("sync",))
    rows = list(measure.run(plan, fresh_store(), rank, size, spoilt))
    unchecked = list(measure.run(dataclasses.replace(plan, check=False), fresh_store(), rank, size, spoilt))
    assert [row.results[BACKEND].wrong for row in unchecked] == [None] * len(rows)
    if rank != 0:
        return
    assert len(rows) == len(plan.rows(size))
    for row in rows:
        assert row.results[BACKEND].wrong == 1, f"{row.case}: {row.results[BACKEND].wrong}"
        assert row.ratio is None
    code, reasons = command_line.verdict(rows, None)
    assert code == 1 and len(reasons) == len(rows)
    assert f"all_reduce, sync, {size} ranks, float32, 8 bytes: 1 wrong elements on {BACKEND}" in reasons


def what_a_backend_cannot_do_is_told(rank: int, size: int) -> None:
    def build(at: Place, count: int, dtype: torch.dtype) -> Job:
        def refuse(group: dist.ProcessGroup, later: bool) -> None:
            if dist.get_backend(group) == "gloo":
                raise RuntimeError("no such thing\nhere")

        return Job(refuse, [], lambda: [], lambda: [])

    def fail_alone(at: Place, count: int, dtype: torch.dtype) -> Job:
        def refuse(group: dist.ProcessGroup, later: bool) -> None:
            if at.rank == 0:
                raise RuntimeError("not today")

        return Job(refuse, [], lambda: [], lambda: [])

    barrier = OPERATIONS["barrier"]
    plan = dataclasses.replace(QUICK, operations=("barrier",), modes=("sync",))
    with pytest.raises(RuntimeError, match=f"barrier of 0 bytes failed on 1 of {size} ranks: rank 0: not today"):
        list(measure.run(plan, fresh_store(), rank, size, {"barrier": dataclasses.replace(barrier, build=fail_alone)}))
    rows = list(measure.run(plan, fresh_store(), rank, size, {"barrier": dataclasses.replace(barrier, build=build)}))
    for row in rows:
        assert row.results["gloo"].error == "no such thing"
        assert row.ratio is None and row.results[BACKEND].time > 0
        assert "not measured: no such thing" in report.lines(row)
        assert command_line.verdict(rows, None)[0] == 0


@pytest.mark.skipif(BACKEND == "gloo", reason="it compares the backend under test with gloo")
@pytest.mark.worlds(sizes=(2, 3), modes=("shm",))
@pytest.mark.parametrize(
    "check",
    [measures_all_operations, wrong_results_are_seen, what_a_backend_cannot_do_is_told],
    ids=lambda check: check.__name__,
)
def test_measuring(world: World, check: Any) -> None:
    world.run(check, join=False)


# ---- what comes out ----


def row_of(ratio: float | None, wrong: int = 0, error: str = "") -> Row:
    case = Case("all_reduce", "sync", 2, "float32", 1024, 256)
    ours = Result(time=2.0, p50=2.0, p95=3.0, p99=4.0, rounds=[2.0, 3.0], calls=7, wrong=wrong, error=error)
    theirs = Result(time=8.0, p50=8.0, p95=9.0, p99=9.5, rounds=[8.0, 9.0], calls=7, wrong=0)
    return Row(case, {"ncclx_rs": ours, "gloo": theirs}, None if ratio is None else Ratio(ratio, ratio, ratio, 4.0))


@pytest.mark.parametrize(
    ("row", "fail_below", "code"),
    [
        (row_of(1.4), None, 0),
        (row_of(1.4), 1.4, 0),
        (row_of(1.4), 1.5, 3),
        (row_of(1.4, wrong=2), 1.5, 1),
        (row_of(None, error="cannot"), None, 1),
    ],
)
def test_exit_codes(row: Row, fail_below: float | None, code: int) -> None:
    got, reasons = command_line.verdict([row], fail_below)
    assert got == code
    assert bool(reasons) == bool(code)


def test_a_row_is_a_line_a_backend() -> None:
    ours, theirs = report.lines(row_of(4.0)).splitlines()
    assert ours.split()[:4] == ["1K", "ncclx_rs", "2.00", "2.00"]
    assert ours.endswith("4.00 [4.00, 4.00]   4.00")
    assert theirs.split()[:3] == ["1K", "gloo", "8.00"]


def test_plots_need_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as ended:
        command_line.main(["--plot", "times.svg"])
    assert ended.value.code == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_plot_is_an_svg(tmp_path: Path) -> None:
    needs("matplotlib", "plots need matplotlib")
    plot.draw([row_of(4.0)], tmp_path / "times.svg")
    text = (tmp_path / "times.svg").read_text()
    assert "<svg" in text and "all_reduce, sync, 2 ranks, float32" in text and "gloo" in text
    with pytest.raises(ValueError, match="ends in .svg or .png"):
        plot.check(tmp_path / "times.pdf")


# ---- the command line ----


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--min", "0"], "expected a size such as 8, 64K or 1M, got '0'"),
        (["--min", "2K", "--max", "1K"], "--min: expected at most --max"),
        (["--ops", "all_reduce,dance"], "unknown: dance"),
        (["--dtypes", "float12"], "unknown: float12"),
        (["--ranks", "2,x"], "expected numbers of ranks such as 2,4,8, got '2,x'"),
        (["--backend", "pigeon"], "--backend: expected one of "),
        (["--vs", "ncclx_rs"], "--vs: expected another backend"),
        (["--fail-below", "2"], "--fail-below: needs --vs"),
        (["--rounds", "0"], "expected a number of at least 1, got '0'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_bad_command_line_is_told(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main(words)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "measure", lambda _: pytest.fail("nothing is to be measured"))
    monkeypatch.setattr(command_line, "_rows", lambda *_: pytest.fail("nothing is to be measured"))
    for words in (["--json"], ["--link", "--json"], ["--plot"]):
        for file, told in ((tmp_path, "Is a directory"), (tmp_path / "nowhere" / "times.svg", "No such file")):
            with pytest.raises(SystemExit, match="2"):
                command_line.main([*words, str(file)])
            assert f"{words[-1]}: " in (error := capsys.readouterr().err) and told in error


def test_the_check_of_a_file_leaves_what_is_there(tmp_path: Path) -> None:
    kept, new, pointing = tmp_path / "kept.json", tmp_path / "new.json", tmp_path / "link.json"
    kept.write_text("kept")
    pointing.symlink_to(new)
    os.mkfifo(tmp_path / "pipe")
    for file in (kept, new, pointing, tmp_path / "pipe"):
        command_line.check_output(command_line.parser(), "--json", file)
    assert kept.read_text() == "kept" and not new.exists() and pointing.is_symlink()


def test_json_without_a_file_is_all_that_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Result(time=1.0, p50=1.0, rounds=[1.0])
    row = Row(Case("barrier", "sync", 2, "float32", 0, 0), {BACKEND: result}, None)
    monkeypatch.setattr(command_line, "_rows", lambda *_: iter([row]))
    assert command_line.main(["--backend", BACKEND, "--ops", "barrier", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["rows"]
    assert told["case"]["operation"] == "barrier"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_a_link_between_two_cores_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert command_line.main(["--link", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    figures = {name: found[name] for name in found if name not in ("schema", "cpus", "nodes", "distance", "page")}
    assert found["cpus"] == cores[:2] and len(figures) == 6
    assert all(figure > 0 for figure in figures.values()) and (found["page"] is None or found["page"] > 0)
    file = tmp_path / "link.json"
    assert command_line.main(["--link", f"{cores[1]},{cores[0]}", "--json", str(file)]) == 0
    assert f"from core {cores[1]} to core {cores[0]}" in capsys.readouterr().out
    assert json.loads(file.read_text())["cpus"] == [cores[1], cores[0]]
    assert sorted(os.sched_getaffinity(0)) == cores


def test_two_cores_are_on_the_nodes_that_the_kernel_tells(tmp_path: Path) -> None:
    assert link._place((0, 1), tmp_path) == {"nodes": [None, None], "distance": None}
    two_nodes(tmp_path)
    places = {(0, 4): ([0, 2], 21), (9, 0): ([2, 0], 31), (4, 8): ([2, 2], 10), (0, 16): ([0, None], None)}
    for cpus, (nodes, distance) in places.items():
        assert link._place(cpus, tmp_path) == {"nodes": nodes, "distance": distance}


def test_a_link_on_one_core_is_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["--link"])
    assert "--link: this process may run on one core alone, 3" in capsys.readouterr().err


def test_the_figures_of_a_link_are_shares_of_a_copy() -> None:
    rates = {"write_shared": 1.0, "write_owned": 2.0, "read": 3.0, "read_owning": 6.0, "memcpy": 4.0}
    place = {"cpus": [5, 7], "nodes": [0, 1], "distance": 21}
    found = {**place, "round_trip": 120.0, **rates, "page": 2048.0}
    heading, *lines = link.table(found).splitlines()
    assert "from core 5 to core 7, NUMA nodes 0 and 1 at distance 21: rates" in heading
    assert "from core 5 to core 7: rates" in link.table({**found, "nodes": [None, None], "distance": None})
    assert [line.split()[-1] for line in lines[1:6]] == ["0.25", "0.50", "0.75", "1.50", "1.00"]
    assert lines[0].split()[-2:] == ["120", "ns"] and lines[-1].split()[-7:] == "2.00 GB/s 0.50 2048 ns a page".split()
    assert link.table({**found, "page": None}).splitlines()[-1].startswith("this process may not read another one's")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--link", "1"], "expected the numbers of two cores such as 0,1, got '1'"),
        (["--link", "0,4294967296"], "expected the numbers of two cores such as 0,1, got '0,4294967296'"),
        (["--link", "0,0"], "--link: measure_link: two cores are expected, got 0 twice"),
        (["--link", "0,99999"], "this process may not run on core 99999"),
    ],
)
def test_a_link_needs_two_cores(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command_line.main(words)
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--ops", "barrier"], "--ops"),
        (["--ranks", "2"], "--ranks"),
        (["--round-ms", "5"], "--round-ms"),
        (["--no-check"], "--no-check"),
        (["--plot", "link.svg"], "--plot"),
    ],
)
def test_a_link_goes_with_no_option_of_collectives(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "measure", lambda _: pytest.fail("nothing is to be measured"))
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="ncclx-rs")
    for run in (command_line.main, lambda words: sys.exit(script.load()(["bench", *words]))):
        with pytest.raises(SystemExit, match="2"):
            run(["--link", "--json", *words])
        assert f"{named}: does not go with --link" in capsys.readouterr().err


def test_sizes_have_units() -> None:
    assert [command_line.parse_size(text) for text in ("8", "64k", "1M", "2G")] == [8, 1 << 16, 1 << 20, 2 << 30]
    assert [report.size_text(size) for size in (8, 1 << 16, 3 << 20, 1000)] == ["8", "64K", "3M", "1000"]


def test_the_program_knows_its_commands() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="ncclx-rs")
    main = script.load()
    assert main([]) == 2 and main(["dance"]) == 2 and main(["--help"]) == 0
    for command, (module, _) in COMMANDS.items():
        assert main([command, "--help"]) == 0
        assert callable(importlib.import_module(module).execute)


QUICK_WORDS = ["--ops", "all_reduce", "--max", "1K", "--factor", "128", "--rounds", "2", "--calls", "2"]


@pytest.mark.skipif(BACKEND != "ncclx_rs", reason="the command line's default is ncclx_rs")
def test_it_starts_its_ranks_and_writes_json(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    words = [*QUICK_WORDS, "--ranks", "1,2", "--vs", "gloo", "--json", str(numbers), "--fail-below", "1000000"]
    run = subprocess.run(
        [sys.executable, "-m", "ncclx_rs", "bench", *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 3, run.stdout + run.stderr
    assert run.stderr.count("is below 1e+06") == 4
    assert "# all_reduce, sync, 2 ranks, float32" in run.stdout
    written = json.loads(numbers.read_text())
    assert written["schema"] == report.SCHEMA
    assert set(written) == {"schema", "date", "command", "machine", "versions", "plan", "rows"}
    assert written["command"][-len(words) :] == words
    assert [(row["case"]["ranks"], row["case"]["bytes"]) for row in written["rows"]] == [
        (1, 8),
        (1, 1024),
        (2, 8),
        (2, 1024),
    ]
    for row in written["rows"]:
        assert set(row) == {"case", "results", "ratio", "memory"}
        assert not row["memory"]  # of a device
        assert set(row["results"]) == {"ncclx_rs", "gloo"}
        for result in row["results"].values():
            assert set(result) == {field.name for field in dataclasses.fields(Result)}
        assert set(row["ratio"]) == {"median", "p10", "p90", "typical"}


@pytest.mark.skipif(BACKEND != "ncclx_rs", reason="the command line's default is ncclx_rs")
def test_it_takes_the_ranks_of_torchrun() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--module", "--"]
    run = subprocess.run(
        [*launch, "ncclx_rs.bench", *QUICK_WORDS], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert [line.split()[0] for line in run.stdout.splitlines() if " ncclx_rs " in line] == ["8", "1K"]


@pytest.mark.parametrize("command", ["bench", "tune", "simulate"])
def test_a_terminal_sees_how_far_it_is(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs("tqdm", "the progress bar needs tqdm")
    words = {
        "bench": ["--ops", "barrier", "--rounds", "1"],
        "tune": [
            str(tmp_path / "tuning.json"),
            "--collectives",
            "broadcast",
            "--max",
            "4",
            "--min",
            "4",
            "--rounds",
            "1",
        ],
        "simulate": [
            "--within-host",
            "1e-6,1e-6,1e-6,1e-9",
            "--collectives",
            "broadcast",
            "--sizes",
            "8",
            "--hosts",
            "1",
        ],
    }
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert program([command, *words[command]]) == 0
    assert "row" in capsys.readouterr().err
    if command == "simulate":  # which starts no ranks
        monkeypatch.setitem(sys.modules, "tqdm", None)
        assert program([command, *words[command]]) == 0
        assert "no progress bar: it needs tqdm (pip install tqdm)" in capsys.readouterr().err


def test_worlds_of_many_ranks_are_compared_with_gloos() -> None:
    command = [sys.executable, str(Path(__file__).parents[1] / "bench" / "scale.py"), "--ranks", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["5", "gloo"], ["5", "ncclx_rs"]], done.stdout
    assert all(cell.endswith(" s") for row in rows for cell in row[2:-2]), done.stdout
