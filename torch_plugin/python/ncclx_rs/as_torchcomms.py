"""Lets programs that import torchcomms run on this package.

    python -m ncclx_rs.as_torchcomms train.py --steps 100
    torchrun --nproc-per-node 2 --module ncclx_rs.as_torchcomms train.py --steps 100

PyTorch looks for torchcomms while it is imported itself, so for its own torchcomms mode
(``TORCH_DISTRIBUTED_USE_TORCHCOMMS=1``) this must come first, as it does here.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

# Where upstream's modules are here, where the names differ.
_RENAMED = {"_comms": "_api", "_backend_wrapper": "_api"}


class _Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``torchcomms`` and its modules in this package."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torchcomms" and not name.startswith("torchcomms."):
            return None
        ours = self._ours(name)
        if name != "torchcomms" and importlib.util.find_spec(ours) is None:
            return None
        return importlib.machinery.ModuleSpec(name, self)

    @staticmethod
    def _ours(name: str) -> str:
        package, *rest = name.split(".")
        return ".".join(["ncclx_rs", *(_RENAMED.get(part, part) for part in rest)])

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._ours(spec.name))
        # The import system writes these onto what it gets; the module keeps its own.
        self._kept = (module.__spec__, module.__loader__)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__, module.__loader__ = self._kept


def install_as_torchcomms() -> None:
    """Makes ``import torchcomms`` and its submodules resolve to this package. Idempotent.

    ``torch.distributed`` then knows this package's backend as ``ncclx``, too.

    Raises:
        RuntimeError: torchcomms itself was imported before.
    """
    loaded = sys.modules.get("torchcomms")
    if loaded is not None and loaded is not sys.modules.get("ncclx_rs"):
        raise RuntimeError("install_as_torchcomms: torchcomms was imported already; call this before")
    if is_installed():
        return
    sys.meta_path.insert(0, _Alias())
    if hasattr(sys.modules.get("torch.distributed"), "Backend"):
        from ncclx_rs._autoload import register

        register()


def is_installed() -> bool:
    """Whether `install_as_torchcomms` was called."""
    return any(isinstance(finder, _Alias) for finder in sys.meta_path)


def main() -> None:
    """Runs the program that the command line names."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m ncclx_rs.as_torchcomms program.py [arguments]")
    import runpy

    install_as_torchcomms()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    # The module of that name: this one is another.
    from ncclx_rs.as_torchcomms import main as run

    run()
