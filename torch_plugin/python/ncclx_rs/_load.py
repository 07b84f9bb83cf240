"""Loads the native module at its first use, and chooses the part of it that fits the torch and the Python that run."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import re
import sys
from typing import Any

_SHIMS = pathlib.Path(__file__).with_name("shims")
_REBUILD = "type `pip install --no-build-isolation --force-reinstall --no-deps .` in the source folder of ncclx_rs"


def native() -> Any:
    """The native module.

    Raises:
        ImportError: it has no part for this torch and this Python, or cannot be loaded.
    """
    # The native classes derive from classes of torch.distributed.
    import torch
    import torch.distributed

    if importlib.util.find_spec("ncclx_rs._native") is None:
        raise ImportError(f"ncclx_rs has no native module; {_REBUILD}")
    try:
        # Waits if another thread is loading it.
        return importlib.import_module("ncclx_rs._native")
    except ImportError as error:
        if not re.search(r"lib(c10|torch_cpu|torch_python)\.so: cannot open", str(error)):
            raise
        raise ImportError(
            f"the libraries of torch {torch.__version__} have other names here than in PyTorch's own wheels, as where "
            f"a distribution has packaged it; type `pip install torch` in an environment of its own ({error})"
        ) from error


def shim() -> str:
    """The file of the native module's part in C++, which fits one minor version of torch and of Python.

    Raises:
        ImportError: there is none for those that run.
    """
    import torch

    minor = ".".join(torch.__version__.split(".")[:2])
    python = f"cpython{sys.version_info[0]}{sys.version_info[1]}{sys.abiflags}"
    file = _SHIMS / f"torch{minor}-{python}.so"
    if file.exists():
        return str(file)
    running = f"torch {torch.__version__} with {_python_name(python)}"
    raise ImportError(f"ncclx_rs was built for {_built_for()}, and this is {running}; {_REBUILD}")


def _built_for() -> str:
    """What there are shims for, in words."""
    pythons: dict[str, list[str]] = {}
    for file in _SHIMS.glob("torch*-cpython*.so"):
        torch_minor, python = file.stem.removeprefix("torch").split("-")
        pythons.setdefault(torch_minor, []).append(python)

    def number(name: str) -> list[int]:
        return [int(digits) for digits in re.findall(r"\d+", name)]

    rows = [
        f"torch {minor} with {', '.join(_python_name(python) for python in sorted(pythons[minor], key=number))}"
        for minor in sorted(pythons, key=number)
    ]
    return "; ".join(rows) or "no torch"


def _python_name(tag: str) -> str:
    """``Python 3.11`` of ``cpython311``."""
    return re.sub(r"cpython(\d)(\d+)", r"Python \1.\2", tag)
