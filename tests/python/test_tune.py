"""The tuning file: the command computes it from measurements, and the engine reads it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import BACKEND
from ncclx_rs._load import native
from ncclx_rs.bench import tune
from ncclx_rs.bench.measure import Case, Result, Row

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="only the engine has algorithms to choose from")


def finding(size: int, times: dict[str, float], collective: str = "all_reduce", ranks: int = 4) -> tune.Finding:
    results = {name: Result(time=time, p50=time, rounds=[time]) for name, time in times.items()}
    return tune.Finding(collective, 1, Row(Case(collective, "sync", ranks, "float32", size, size // 4), results, None))


def rows(text: str) -> list[dict[str, Any]]:
    """Rows of words such as `all_reduce 4 1024 ring`, with `-` for no limit."""
    found = []
    for line in text.split(","):
        collective, ranks, most, algorithm = line.split()
        row = {"collective": collective, "ranks": int(ranks), "hosts": 1, "algorithm": algorithm}
        found.append(row if most == "-" else {**row, "max_bytes": int(most)})
    return found


def test_the_fastest_is_chosen_and_neighbours_are_one_row() -> None:
    findings = [
        finding(8, {"direct": 1.0, "ring": 2.0}),
        finding(64, {"direct": 1.5, "ring": 2.0}),
        finding(8 << 20, {"direct": 3.0, "ring": 2.0}),
        finding(8 << 20, {"direct": 3.0, "ring": 2.0}, ranks=8),
        finding(4 << 20, {"direct": 2.0, "ring": 3.0}, "all_gather"),
    ]
    expected = "all_reduce 4 64 direct, all_reduce 4 - ring, all_reduce 8 - ring, all_gather 4 - direct"
    assert tune.table(findings) == rows(expected)


def test_what_is_much_longer_than_all_that_was_measured_is_left_to_the_engine() -> None:
    findings = [finding(8, {"direct": 1.0, "ring": 2.0}), finding(16 << 10, {"direct": 3.0, "ring": 2.0})]
    assert tune.table(findings) == rows("all_reduce 4 8 direct, all_reduce 4 16384 ring")


def test_a_small_gain_is_no_reason_to_change() -> None:
    findings = [
        finding(8, {"direct": 1.00, "ring": 2.00}),
        finding(64, {"direct": 2.08, "ring": 2.00}),
        finding(512, {"direct": 2.12, "ring": 2.00}),
        finding(4 << 20, {"direct": 2.00, "ring": 2.00}),
    ]
    assert tune.table(findings) == rows("all_reduce 4 64 direct, all_reduce 4 - ring")


def test_what_takes_no_time_is_kept_and_takes_over_from_what_takes_some() -> None:
    findings = [
        finding(8, {"direct": 0.0, "ring": 1.0}),
        finding(64, {"ring": 0.0, "direct": 0.0}),
        finding(512, {"ring": 1.0, "direct": 2.0}),
        finding(4096, {"ring": 1.0, "direct": 0.0}),
    ]
    assert tune.table(findings) == rows("all_reduce 4 64 direct, all_reduce 4 512 ring, all_reduce 4 4096 direct")


def test_every_collective_with_a_choice_is_measured() -> None:
    kinds = {"all_to_all", "barrier", *tune.COLLECTIVES}
    assert {kind for kind in kinds if len(native().algorithms(kind, 4, 2)) > 1} == set(tune.COLLECTIVES)


def test_what_was_not_measured_stays(tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    tune.write(file, rows("all_reduce 2 8 direct, all_reduce 2 - ring, all_gather 2 - ring"), "first")
    tune.write(file, rows("all_reduce 2 - direct, all_reduce 4 - direct"), "second")
    written = json.loads(file.read_text())
    assert written["version"] == tune.VERSION and written["note"] == "second"
    assert written["rows"] == rows("all_gather 2 - ring, all_reduce 2 - direct, all_reduce 4 - direct")
    file.write_text('{"version": 0, "rows": []}')
    with pytest.raises(ValueError, match=f"{file}: expected a tuning file of version 1, got another: version 0"):
        tune.write(file, [], "third")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere/tuning.json"], "file: expected a path in a folder that exists"),
        (["tuning.json", "--collectives", "send"], "unknown: send"),
        (["tuning.json", "--min", "2K", "--max", "1K"], "--min: expected at most --max"),
    ],
)
def test_a_bad_command_line_is_told(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        tune.main(words)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune.launch, "run_world", lambda *_: pytest.fail("nothing is to be measured"))
    for name, content in (("notes.txt", "my notes"), ("rows.json", '{"version": 1, "rows": [{"ranks": 2}]}')):
        (tmp_path / name).write_text(content)
        with pytest.raises(SystemExit, match="2"):
            tune.main([str(tmp_path / name)])
        assert f"file: {tmp_path / name}: expected a tuning file of version 1" in capsys.readouterr().err
        assert (tmp_path / name).read_text() == content
    with pytest.raises(SystemExit, match="2"):
        tune.main([str(tmp_path)])
    assert "Is a directory" in capsys.readouterr().err
    # Rank 0 alone writes.
    for variable, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(tune.launch, "run_here", lambda *_: (1, 2, iter([])))
    assert tune.main([str(tmp_path / "notes.txt")]) == 0


def open_with(file: Path) -> None:
    """Makes a group of one rank that reads the file."""
    from ncclx_rs import Options

    options = Options(hints={"tuning_file": str(file)})
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1, pg_options=options)
    dist.destroy_process_group()


def test_the_engine_reads_what_the_command_writes(tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    words = [str(file), "--collectives", "all_gather,reduce", "--ranks", "2,3", "--min", "1K", "--max", "1K"]
    command = [sys.executable, "-m", "ncclx_rs", "tune", *words, "--rounds", "2", "--round-ms", "1", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    written = json.loads(file.read_text())["rows"]
    algorithms = {"all_gather": {"direct", "bruck", "ring"}, "reduce": {"binomial", "rabenseifner", "chain"}}
    assert [(row["collective"], row["ranks"], row["hosts"]) for row in written] == [
        (collective, ranks, 1) for ranks in (2, 3) for collective in algorithms
    ]
    assert all(row["algorithm"] in algorithms[row["collective"]] for row in written)
    told = json.loads(run.stdout)
    assert (told["file"], told["rows"]) == (str(file), written)
    measured = [(time["collective"], time["ranks"], time["bytes"], set(time["microseconds"])) for time in told["times"]]
    assert measured == [
        ("all_gather", 2, 1024, algorithms["all_gather"]),
        ("reduce", 2, 1024, algorithms["reduce"]),
        ("all_gather", 3, 1020, algorithms["all_gather"]),
        ("reduce", 3, 1024, algorithms["reduce"]),
    ]
    open_with(file)
    file.write_text(file.read_text().replace('"algorithm": "', '"algorithm": "not_'))
    with pytest.raises(ValueError, match=rf"tuning_file `{file}`: row 1: algorithm: expected one of direct, bruck"):
        open_with(file)
