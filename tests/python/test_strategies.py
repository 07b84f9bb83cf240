"""The programs of examples/strategies: their numbers equal gloo's, and the right backend served their operations."""

from __future__ import annotations

import functools
import math
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, World, fresh_store

FOLDER = Path(__file__).parents[2] / "examples" / "strategies"
sys.path.insert(0, str(FOLDER))

import run  # noqa: E402
import tiny  # noqa: E402

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="the programs name their backend")

# A program that needs processes of its own runs by the command below.
PROGRAMS = [name for name in run.PROGRAMS if name != "elastic"]


def program_equals_reference(rank: int, size: int, name: str) -> None:
    """Runs a program on both backends; its communicators use the store of the tests."""
    new_comm = functools.partial(ncclx_rs.new_comm, store=fresh_store(), rank=rank, size=size)
    theirs = run.report(name, run.REFERENCE, fresh_store(), rank, size)
    with mock.patch.object(ncclx_rs, "new_comm", new_comm):
        ours = run.report(name, run.BACKEND, fresh_store(), rank, size)
    apart = run.difference(ours.numbers, theirs.numbers)
    assert apart <= run.TOLERANCES.get(name, run.TOLERANCE), f"{name}, rank {rank}: {apart}"


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_equals_gloo(world: World, name: str) -> None:
    world.run(program_equals_reference, name, join=False)


# The programs that behave differently on four ranks than on two.
@pytest.mark.worlds(sizes=(4,), modes=("shm",))
@pytest.mark.parametrize("name", ["hsdp", "tp", "redistribute", "pp", "ep", "cp", "three_d"])
def test_program_equals_gloo_on_four_ranks(world: World, name: str) -> None:
    world.run(program_equals_reference, name, join=False)


@pytest.mark.worlds(sizes=(8,), modes=("shm",))
def test_three_dimensions_equal_gloo_on_eight_ranks(world: World) -> None:
    world.run(program_equals_reference, "three_d", join=False)


def test_the_command_makes_the_table() -> None:
    command = [sys.executable, str(FOLDER / "run.py"), "--ranks", "2", "--programs", "ep", "elastic"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert re.search(r"^\| \[ep\]\(.*\) \| Expert parallelism \| \S+ \(\d+\) \|$", finished.stdout, re.MULTILINE)
    assert re.search(r"^\| \[elastic\]\(.*\) \| Elastic training \| \S+ \(\d+\) \|$", finished.stdout, re.MULTILINE)
    assert "elastic on 2 ranks: restarted 1 times" in finished.stderr


def test_the_command_knows_every_program() -> None:
    assert {*run.PROGRAMS, "run", "tiny"} == {path.stem for path in FOLDER.glob("*.py")}
    for name in run.PROGRAMS:
        text = (FOLDER / f"{name}.py").read_text()
        assert re.search(rf"^torchrun .* examples/strategies/{name}\.py$", text, re.MULTILINE), name


def test_numbers_that_differ_are_told() -> None:
    one, two, none = torch.ones(2), torch.tensor([1.0, 3.0]), torch.tensor([1.0, math.nan])
    assert run.difference({"a": one}, {"a": one.clone()}) == 0
    assert run.difference({"a": one, "b": one}, {"a": one, "b": two}) == 2
    assert math.isnan(run.difference({"a": one}, {"a": none}))
    assert run.difference({"a": one}, {"b": one}) == run.difference({"a": one}, {"a": one[:1]}) == math.inf


def reduce_over(group: dist.ProcessGroup | None) -> tiny.Result:
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3), group=group)
    return "reduced", {}


def own_operations_are_counted(rank: int, size: int) -> None:
    report = tiny.perform(lambda: reduce_over(dist.new_group()), run.BACKEND)
    assert report.operations["all_reduce"] == 2


def operations_of_another_backend_are_refused(rank: int, size: int) -> None:
    group = dist.new_group(backend="gloo")
    with pytest.raises(RuntimeError, match=r"others served some: \['gloo:all_reduce'\]"):
        tiny.perform(lambda: reduce_over(group), run.BACKEND)


def operations_that_nobody_records_are_refused(rank: int, size: int) -> None:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    group = dist.new_group(backend="fake")
    with pytest.raises(RuntimeError, match="to serve all operations, got 1 of 2"):
        tiny.perform(lambda: reduce_over(group), run.BACKEND)


def a_run_without_operations_is_refused(rank: int, size: int) -> None:
    with pytest.raises(RuntimeError, match="to serve all operations, got 0 of 0"):
        tiny.perform(lambda: ("nothing", {}), run.BACKEND)


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
@pytest.mark.parametrize(
    "check",
    [
        own_operations_are_counted,
        operations_of_another_backend_are_refused,
        operations_that_nobody_records_are_refused,
        a_run_without_operations_is_refused,
    ],
    ids=lambda check: check.__name__,
)
def test_proof_of_the_backend(world: World, check) -> None:
    world.run(check)
