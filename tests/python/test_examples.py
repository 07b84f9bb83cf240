"""Every example runs with the command line in its own text."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from harness import BACKEND, World
from test_rendezvous import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
OBJECT_API = EXAMPLES / "object_api"

names_its_backend = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="these examples name their backend")


def run(*command: str) -> str:
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=EXAMPLES.parent)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_a_gpt_trains_as_on_gloo() -> None:
    script = str(EXAMPLES / "compare_backends.py")
    assert "the losses agree" in run(sys.executable, script, "--backends", BACKEND, "gloo", "--steps", "5")


def test_a_loss_that_is_no_number_agrees_with_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compare = runpy.run_path(str(EXAMPLES / "compare_backends.py"))
    losses = {"a": [2.0, 1.0, 0.5], "b": [2.0, float("nan"), 0.5]}

    def run(backend: str, *_: object) -> dict[str, object]:
        return {"backend": backend, "losses": losses[backend], "seconds": 1.0, "communication_share": None}

    monkeypatch.setitem(compare["main"].__globals__, "run", run)
    for backends, agree in ((["a", "a"], True), (["a", "b"], False), (["b", "a"], False)):
        monkeypatch.setattr(sys, "argv", ["compare_backends.py", "--backends", *backends])
        if agree:
            compare["main"]()
        else:
            with pytest.raises(SystemExit, match="the losses differ"):
                compare["main"]()
        assert ("the losses agree" in capsys.readouterr().out) is agree


@names_its_backend
def test_torchrun_runs_an_example() -> None:
    ranks, arguments = command_of(OBJECT_API / "all_reduce.py")
    assert_every_rank_prints(run(sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments), ranks)


def runs_a_program(rank: int, size: int, script: str, port: int | None) -> str:
    """Runs a program as a rank in the worker: with torchrun, each process would load PyTorch first.

    Without a port, it runs as a process that nothing has launched.
    """
    if port is not None:
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ.update({name: str(value) for name, value in variables.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


@names_its_backend
@pytest.mark.parametrize("script", sorted(OBJECT_API.glob("*.py")), ids=lambda script: script.stem)
def test_object_api_example(script: Path) -> None:
    ranks, arguments = command_of(script)
    assert arguments == ["--nproc-per-node", str(ranks), str(script.relative_to(EXAMPLES.parent))]
    world = World(ranks, "shm")
    try:
        printed = world.run(runs_a_program, str(script), free_port(), join=False)
    finally:
        world.close()
    assert_every_rank_prints("".join(printed), ranks)


def command_of(script: Path) -> tuple[int, list[str]]:
    """The command line in an example's text: the number of ranks, and torchrun's arguments."""
    command = re.search(r"^ *torchrun (.*)$", script.read_text(), re.MULTILINE)
    assert command, f"{script.name} does not say how it is run"
    arguments = shlex.split(command.group(1))
    return int(arguments[arguments.index("--nproc-per-node") + 1]), arguments


def assert_every_rank_prints(printed: str, ranks: int) -> None:
    assert sorted(re.findall(r"rank (\d+): ", printed)) == [str(rank) for rank in range(ranks)], printed
