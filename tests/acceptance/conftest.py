"""On the software CUDA, the tests that run are those that cuda.txt names.

Its lines are the name of a test, and perhaps `fails:` and why. What is named there has to end as it says. `EVERY=1`
runs all tests, for a new list.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("cuda.txt")


def listed() -> dict[str, str]:
    """The names of the tests, and what is said of each."""
    lines = [line for line in LIST.read_text().splitlines() if not line.startswith("#")]
    return {name: said for name, _, said in (line.partition(" ") for line in lines)}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "libcuda.so.1" not in os.environ.get("LD_PRELOAD", "") or os.environ.get("EVERY") == "1":
        return
    names = listed()
    gone = names.keys() - {item.name for item in items}
    if gone and not config.option.keyword:
        raise pytest.UsageError(f"{LIST.name} names tests that PyTorch does not have: {sorted(gone)}")
    chosen = [item for item in items if item.name in names]
    for item in chosen:
        if names[item.name].startswith("fails:"):
            item.add_marker(pytest.mark.xfail(reason=names[item.name], strict=True))
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
