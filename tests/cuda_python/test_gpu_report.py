"""The report of `make gpu`, on the software CUDA: its shape, probes that fail or hang, parts without time, suites."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/gpu"))

import probe  # noqa: E402
import run_gpu  # noqa: E402
import suites  # noqa: E402
from report import FAILED, NOT_RUN, PASSED, Part, Report  # noqa: E402

MACHINE = {"driver": "570.1", "devices": ["H100"]}


def reported(folder: Path, *options: str, **environment: str) -> tuple[int, dict[str, Any], str]:
    """The exit code of a run, its JSON and its Markdown."""
    command = [sys.executable, str(ROOT / "tests/gpu/run_gpu.py"), "--report", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})
    assert (folder / "report.json").exists(), done.stdout + done.stderr
    return done.returncode, json.loads((folder / "report.json").read_text()), (folder / "report.md").read_text()


@pytest.mark.skipif(not run_gpu.is_software(), reason="is about the software CUDA")
def test_the_report_has_all_facts_and_says_that_there_was_no_gpu(tmp_path: Path) -> None:
    code, found, text = reported(tmp_path, "--only", "probes", "rust", "--probes", "P2", "P10", "P15")
    assert code == 0
    assert found["schema"] == 1 and found["is_software"] and "SOFTWARE CUDA" in found["note"]
    assert found["machine"]["driver"] == "a software CUDA" and found["machine"]["devices"]
    assert set(found["versions"]) == {"python", "torch", "cuda", "nccl", "ncclx_rs"}
    assert found["counts"] == {PASSED: 2, FAILED: 0, NOT_RUN: 2}
    assert [part["name"] for part in found["parts"]] == ["P2", "P10", "P15", "tests/cuda"]
    pages, nccl, order, rust = found["parts"]
    for part in (pages, order):
        assert part["facts"]["answer"] is True and part["facts"]["as_designed"] is True and part["seconds"] > 0
        assert part["facts"]["asks"].endswith("?") and part["facts"]["means"]
    assert pages["facts"]["numbers"] == {"read_before": True, "read_after": True}
    assert "NCCL" in nccl["why"] and rust["why"] == "no program was given"
    assert f"**{found['note']}**" in text and "### P10: not run" in text and "read_after: yes" in text


@pytest.mark.skipif(not run_gpu.is_software(), reason="has a call fail")
def test_a_probe_that_breaks_is_in_the_report_and_the_next_one_runs(tmp_path: Path) -> None:
    options = ("--only", "probes", "--probes", "P8", "P15")
    code, found, text = reported(tmp_path, *options, SOFTCUDA_FAULT="cuStreamBatchMemOp_v2:1")
    assert code == 1
    assert [part["status"] for part in found["parts"]] == [PASSED, FAILED]
    assert "cuStreamBatchMemOp_v2" in found["parts"][1]["why"] and "### P15: failed" in text


def test_there_are_fifteen_probes() -> None:
    assert list(probe.all_probes()) == [f"P{number}" for number in range(1, 16)]


def probed(body: str, seconds: float = 30) -> Part:
    part = Part("probe", "P0", facts={"asks": "?", "means": "."})
    run_gpu.run_probe(part, seconds, [sys.executable, "-c", body])
    return part


def test_a_probe_against_the_design_fails_and_one_without_its_needs_is_not_run() -> None:
    found = '{"answer": false, "numbers": {"n_us": 1.5}, "as_designed": %s}'
    against = probed(f"print('{found % 'false'}')")
    assert (against.status, against.why) == (FAILED, "not what the design relies on")
    assert against.facts["numbers"] == {"n_us": 1.5}
    assert probed(f"print('{found % 'null'}')").status == PASSED
    lacking = probed("""print('{"not_here": "no NCCL"}')""")
    assert (lacking.status, lacking.why) == (NOT_RUN, "no NCCL")
    assert probed("print('nothing')").status == FAILED
    assert probed("").status == FAILED
    broken = probed(f"print('{found % 'true'}'); raise SystemExit('gone')")
    assert broken.status == FAILED and "gone" in broken.why


def test_a_probe_that_hangs_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    started = tmp_path / "started"
    body = f"import subprocess, pathlib, time; p = subprocess.Popen(['sleep', '600']); \
pathlib.Path({str(started)!r}).write_text(str(p.pid)); time.sleep(600)"
    part = probed(body, 8)
    assert (part.status, part.why) == (FAILED, "did not end within 8 s")
    # It dies when it gets a core.
    until = time.monotonic() + 60
    while lives(int(started.read_text())):
        assert time.monotonic() < until, "what the probe has started lives on"
        time.sleep(0.05)


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_does_not_fit_is_not_run_and_a_part_gets_no_more_than_is_left(tmp_path: Path) -> None:
    now, given = [0.0], []

    def takes(seconds: float, status: str) -> Any:
        def job(part: Part, limit: float) -> None:
            given.append(limit)
            now[0] += seconds
            part.status = status

        return job

    jobs = [
        run_gpu.Job(Part("benchmark", "first"), 60, takes(40, PASSED)),
        run_gpu.Job(Part("benchmark", "second"), 60, takes(57, FAILED)),
        run_gpu.Job(Part("suite", "third"), 60, takes(1, PASSED)),
        run_gpu.Job(Part("suite", "short"), 60, takes(1, PASSED), least=1),
    ]
    report = Report("today", False, MACHINE, {}, limit=100)
    run_gpu.work(jobs, report, tmp_path, clock=lambda: now[0])
    assert given == [60, 60, 3]
    assert [part.status for part in report.parts] == [PASSED, FAILED, NOT_RUN, PASSED]
    assert report.parts[2].why == "3 s were left, it needs 5 s"
    assert [part.name for part in report.failures] == ["second"]
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["seconds"] == 98 and found["note"] == "" and "Run on a GPU" in (tmp_path / "report.md").read_text()


TESTS = """
import pytest, time
def test_a(): pass
def test_b(): assert 1 == 2, "not equal"
@pytest.mark.skip(reason="no reason")
def test_c(): pass
def test_d(): time.sleep({pause})
def test_e(): pass
"""


@pytest.mark.parametrize("pause", [0, 600])
def test_a_suite_has_each_outcome_also_of_tests_that_are_left(tmp_path: Path, pause: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(suites, "GRACE", 5.0)
    file = tmp_path / "test_some.py"
    file.write_text(TESTS.format(pause=pause))
    part = Part("suite", "some")
    suites.python_suite(part, 60 if pause == 0 else 20, [str(file)])
    facts = part.facts
    assert part.status == FAILED and part.why == "1 tests failed"
    assert [facts[name] for name in ("passed", "failed", "skipped", "left")] == [[3, 1, 1, 0], [1, 1, 1, 2]][pause > 0]
    assert facts["reasons"] == {"no reason": 1}
    ((failed, text),) = facts["failures"].items()
    assert failed.endswith("test_b") and "not equal" in text
    assert [name[-6:] for name in facts["not_run"]] == [[], ["test_d", "test_e"]][pause > 0]
    assert [name[-6:] for name in facts["running"]] == [[], ["test_d"]][pause > 0]


def test_no_test_is_begun_after_the_time(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(suites, "GRACE", 60.0)
    file = tmp_path / "test_some.py"
    file.write_text(TESTS.format(pause=0))
    part = Part("suite", "some")
    suites.python_suite(part, 60, [str(file)])
    assert part.status == NOT_RUN and part.facts["left"] == 5, part


PROGRAM = """#!/bin/sh
if [ "$1" = --list ]; then printf 'a::one: test\\nb::two: test\\nc::three: test\\nd::four: test\\n'; exit; fi
echo 'b::two: a GPU has no SOFTCUDA_FAULT' >> "$NCCLX_RS_TEST_NOT_RUN"
printf 'running 4 tests\\ntest a::one ... ok\\ntest b::two ... ok\\ntest c::three - should panic ... FAILED\\n'
printf '\\nfailures:\\n\\n---- c::three stdout ----\\nit broke\\n\\n\\nfailures:\\n    c::three\\n'
exec sleep {pause}
"""


@pytest.mark.parametrize("pause", [0, 600])
def test_the_tests_in_rust_have_each_outcome(tmp_path: Path, pause: int) -> None:
    program = tmp_path / "program"
    program.write_text(PROGRAM.format(pause=pause))
    program.chmod(0o755)
    part = Part("suite", "tests/cuda")
    suites.rust_suite(part, 5, str(program))
    assert part.status == FAILED
    assert part.facts == {
        "passed": 1,
        "failed": 1,
        "skipped": 1,
        "left": 1,
        "failures": {"c::three": "it broke"},
        "reasons": {"a GPU has no SOFTCUDA_FAULT": 1},
        "not_run": ["d::four"],
        "running": [],
    }


def test_a_suite_that_is_not_there_fails(tmp_path: Path) -> None:
    part = Part("suite", "none")
    suites.python_suite(part, 60, [str(tmp_path / "absent.py")])
    assert part.status == FAILED and "absent.py" in part.why
    (tmp_path / "test_bad.py").write_text("def test_a(): pass\nraise SystemError('unreadable')\n")
    (tmp_path / "test_good.py").write_text("def test_a(): pass\n")
    part = Part("suite", "bad")
    suites.python_suite(part, 60, [str(tmp_path)])
    assert part.status == FAILED and "unreadable" in part.why
    part = Part("suite", "none")
    suites.rust_suite(part, 10, "/bin/false")
    assert part.status == FAILED and "--list" in part.why


def test_the_rows_of_a_benchmark_are_a_table() -> None:
    case = {"operation": "all_reduce", "mode": "sync", "ranks": 2, "bytes": 8}
    lacking = {"time": 0.0, "bus_bandwidth": 0.0, "error": "Duplicate | GPU"}
    results = {"ncclx_rs": {"time": 12.5, "bus_bandwidth": 0.5, "error": ""}, "nccl": lacking}
    rows = [{"case": case, "results": results, "ratio": None, "memory": {"ncclx_rs": 0.25}}]
    report = Report("today", False, MACHINE, {}, 100, parts=[Part("benchmark", "b", PASSED, facts={"rows": rows})])
    text = report.markdown()
    assert "| all_reduce | sync | 2 | 8 | ncclx_rs | 12.50 | 0.500 | 25.0% |  |" in text
    assert "| nccl | not measured: Duplicate \\| GPU | |  |  |" in text
