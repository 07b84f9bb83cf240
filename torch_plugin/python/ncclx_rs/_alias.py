"""The import finder that resolves ``torchcomms`` to this package."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

# torchcomms' modules whose names differ here.
_RENAMED = {"_comms": "_api", "_backend_wrapper": "_api"}


class AliasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
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


def is_installed() -> bool:
    """Whether `install_as_torchcomms` was called."""
    return any(isinstance(finder, AliasFinder) for finder in sys.meta_path)
