"""The part of the native module in C++ is chosen by the torch and the Python that run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ncclx_rs import _load

MINOR = ".".join(torch.__version__.split(".")[:2])
PYTHON = f"{sys.version_info[0]}{sys.version_info[1]}{sys.abiflags}"
OWN = f"torch{MINOR}-cpython{PYTHON}.so"
PACKAGE = Path(_load.__file__).parent


@pytest.fixture
def shims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands in for the package's shims; it has none yet."""
    monkeypatch.setattr(_load, "_SHIMS", tmp_path)
    return tmp_path


@pytest.mark.smoke
def test_the_shim_of_this_torch_is_loaded() -> None:
    native = _load.native()
    assert _load.shim() == str(PACKAGE / "shims" / OWN)
    assert _load.shim() in Path("/proc/self/maps").read_text()
    assert native.__file__.endswith("_native.abi3.so")
    assert native.torch_build_version.startswith(f"{MINOR}.")


def test_it_is_chosen_among_others(shims: Path) -> None:
    for name in ("torch2.9-cpython310.so", f"torch{MINOR}-cpython39.so", OWN, f"torch2.9-cpython{PYTHON}.so"):
        (shims / name).touch()
    assert _load.shim() == str(shims / OWN)


@pytest.mark.parametrize(
    ("others", "built_for"),
    [
        (["torch2.9-cpython310"], "torch 2.9 with Python 3.10"),
        (
            ["torch2.10-cpython310", "torch2.9-cpython311", "torch2.9-cpython39"],
            "torch 2.9 with Python 3.9, Python 3.11; torch 2.10 with Python 3.10",
        ),
        ([f"torch{MINOR}-cpython39"], f"torch {MINOR} with Python 3.9"),
        ([f"torch{MINOR}-cpython{PYTHON}t"], f"torch {MINOR} with Python 3.{sys.version_info[1]}t"),
        ([], "no torch"),
    ],
)
def test_a_lack_is_said_with_what_to_do(shims: Path, others: list[str], built_for: str) -> None:
    for name in others:
        (shims / f"{name}.so").touch()
    with pytest.raises(ImportError) as raised:
        _load.shim()
    running = f"torch {torch.__version__} with Python {sys.version_info[0]}.{sys.version_info[1]}{sys.abiflags}"
    assert str(raised.value) == (
        f"ncclx_rs was built for {built_for}, and this is {running}; type `pip install --no-build-isolation "
        "--force-reinstall --no-deps .` in the source folder of ncclx_rs"
    )


def test_a_broken_shim_is_an_import_error_and_may_be_repaired(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "ncclx_rs")
    shim = tmp_path / "ncclx_rs/shims" / OWN
    shim.write_text("not a library")
    code = f"""
import shutil, sys
sys.path.insert(0, {str(tmp_path)!r})
from ncclx_rs._load import native
try:
    native()
except ImportError as error:
    assert {str(shim)!r} in str(error), error
else:
    raise AssertionError("a file of text was loaded")
shutil.copy({str(PACKAGE / "shims" / OWN)!r}, {str(shim)!r})
print(native().__file__)
"""
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "ncclx_rs/_native.abi3.so")


def test_a_missing_module_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="ncclx_rs has no native module; type `pip install"):
        _load.native()


def test_a_pytorch_with_libraries_of_other_names_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "shims/torch2.14-cpython314.so: libc10.so: cannot open shared object file: No such file or directory"

    def refuse(name: str) -> None:
        raise ImportError(reason)

    monkeypatch.setattr(_load.importlib, "import_module", refuse)
    with pytest.raises(ImportError, match="have other names here than in PyTorch's own wheels, .* `pip install torch`"):
        _load.native()
    reason = "another reason"
    with pytest.raises(ImportError, match="^another reason$"):
        _load.native()
