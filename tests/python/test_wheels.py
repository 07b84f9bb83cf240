"""`make wheels` and `make check-wheels`: what a wheel is for, what it is tried in, and what is told of a trial."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import zipfile
from pathlib import Path

import pytest
from harness import BACKEND

sys.path.insert(0, str(Path(__file__).parents[2] / "packaging"))
import check_wheels  # noqa: E402  # packaging/ is no package
import wheels  # noqa: E402

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="ncclx_rs is not under test")

NAME = f"ncclx_rs-{importlib.metadata.version('ncclx_rs')}-cp310-abi3-linux_{platform.machine()}.whl"


def packed(folder: Path, *names: str) -> Path:
    wheel = folder / NAME
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return wheel


def test_a_wheel_is_tried_for_the_pairs_that_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = packed(tmp_path, "ncclx_rs/shims/torch2.15-cpython315.so", "ncclx_rs/shims/torch2.11-cpython310.so")
    assert [str(pair) for pair in check_wheels.pairs_of(wheel)] == ["2.11:3.10", "2.15:3.15"]
    assert check_wheels.wheels_in(tmp_path) == [wheel.resolve()]
    with contextlib.chdir(tmp_path.parent) if sys.version_info >= (3, 11) else contextlib.nullcontext():
        assert check_wheels.wheels_in(Path(os.path.relpath(tmp_path))) == [wheel.resolve()]
    assert check_wheels.main(["--dist", str(tmp_path), "--pairs", "2.13:3.12"]) == 1
    assert "2.13:3.12: not tried: the wheel has no part for it" in capsys.readouterr().out
    assert check_wheels.main(["--dist", str(tmp_path / "nothing")]) == 1
    assert "has no wheel for a Python of this machine" in capsys.readouterr().out


def test_a_trial_that_fails_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(tmp_path, "ncclx_rs/shims/torch2.15-cpython311.so")
    arguments = ["--dist", str(tmp_path), "--pairs", "2.15:3.11", "--torch-from", str(tmp_path)]
    monkeypatch.setattr(check_wheels, "interpreter", lambda _: Path("/bin/false"))
    assert check_wheels.main(arguments) == 1
    assert f"{NAME}, 2.15:3.11: failed: /bin/false -m venv " in capsys.readouterr().out
    monkeypatch.setattr(check_wheels, "interpreter", lambda _: None)
    assert check_wheels.main(arguments) == 1
    assert "2.15:3.11: not tried: there is no Python 3.11" in capsys.readouterr().out
    monkeypatch.setattr(check_wheels, "interpreter", lambda _: Path(sys.executable))
    monkeypatch.setattr(check_wheels, "check", lambda *_: "it works")
    assert check_wheels.main(arguments) == 0
    assert capsys.readouterr().out == f"{NAME}, 2.15:3.11: it works\n"
    # What was asked for by name and cannot be tried is a failure.
    assert check_wheels.main(["--dist", str(tmp_path), "--pairs", "2.15:3.11", "2.15:3.12"]) == 1


@pytest.mark.smoke
def test_this_pytorch_has_the_tests_that_wheels_are_tried_by() -> None:
    suite = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    assert suite is not None and suite.origin is not None
    text = Path(suite.origin).read_text()
    assert [test for test in check_wheels.SUITE_TESTS if f"def {test}(self)" not in text] == []
    assert check_wheels.SUITE.is_file()


def test_each_of_pytorchs_own_tests_has_to_pass() -> None:
    warned, skipped = ".....\n5 passed, 2 warnings in 20.00s", "....s\n4 passed, 1 skipped in 20.00s"
    assert check_wheels.suite_verdict(warned) == "5 passed of PyTorch's own tests"
    for printed in (skipped, "no tests ran in 0.01s", ""):
        with pytest.raises(RuntimeError, match="were to have 5 passed"):
            check_wheels.suite_verdict(printed)


def test_a_machine_has_the_pairs_of_its_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "interpreter", lambda python: Path("python") if python == "3.10" else None)
    pairs = [str(pair) for pair in wheels.pairs_here({"3.15": "/headers"})]
    assert pairs == ["2.11:3.10", "2.12:3.10", "2.13:3.10", "2.14:3.10", "2.15:3.15"]


def test_the_nightly_run_tries_a_wheel_for_all_that_the_machine_can_have() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    (nightly,) = re.findall(r"^nightly:.*\n(?:\t.*\n)+", makefile, re.MULTILINE)
    (all_wheels,) = re.findall(r"^all-wheels:\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert " all-wheels " in nightly and " package " in nightly
    assert all_wheels.split() == (
        "$(MAKE) wheels SHIMS=here DIST=target/nightly $(MAKE) check-wheels DIST=target/nightly".split()
    )
