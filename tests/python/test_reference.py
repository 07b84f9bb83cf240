"""The reference: the docstring of every operation has an example, and two ranks that type it see what it says."""

from __future__ import annotations

import doctest
import inspect
import io

import ncclx_rs
import pytest
import torch
from harness import BACKEND, World, fresh_store
from ncclx_rs import BatchSendRecv, TorchComm, TorchCommWindow
from ncclx_rs._operations import Operations

pytestmark = [
    pytest.mark.skipif(BACKEND != "ncclx_rs", reason="the reference is that of ncclx_rs"),
    pytest.mark.worlds(sizes=(2,), modes=("shm",)),
]

# What does not communicate, or only says that no device can.
OTHERS = {
    BatchSendRecv: set(),
    Operations: set(),
    TorchCommWindow: {
        "deregister_local_buffer",
        "get_attr",
        "get_device_window",
        "get_size",
        "get_tensor",
        "register_local_buffer",
    },
}


def examples(home: type) -> list[doctest.DocTest]:
    """The examples in the docstrings of a class's methods."""
    finder = doctest.DocTestFinder(recurse=True, exclude_empty=True)
    return [found for found in finder.find(home, home.__name__, module=False) if found.examples]


def test_every_operation_has_an_example() -> None:
    for home, others in OTHERS.items():
        methods = {name for name, value in vars(home).items() if inspect.isfunction(value) and name[0] != "_"}
        shown = {found.name.rpartition(".")[2] for found in examples(home)}
        assert methods - others - shown == {"allreduce"} & methods, home  # another name of all_reduce


def what_goes_wrong_in_examples(rank: int, size: int) -> str:
    told = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False)
    with ncclx_rs.new_comm("ncclx", "cpu", "pair", store=fresh_store(), rank=rank, size=size, timeout=60) as comm:
        for home in (*OTHERS, TorchComm):
            for example in examples(home):
                example.globs = {"comm": comm, "torch": torch, "ncclx_rs": ncclx_rs}
                runner.run(example, out=told.write)
    return told.getvalue()


def test_examples_show_what_happens(world: World) -> None:
    assert world.run(what_goes_wrong_in_examples, join=False) == ["", ""]
