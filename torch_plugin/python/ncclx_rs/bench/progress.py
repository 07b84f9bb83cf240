"""The progress bar of commands that take minutes, by tqdm, which the extra `bench` installs."""

from __future__ import annotations

import contextlib
import importlib
import sys
from types import TracebackType
from typing import Any


class Progress:
    """A bar on the standard error, if that is a terminal and tqdm is installed; else nothing is shown.

    with Progress(rows, unit="row") as progress:
        for row in measured:
            with progress.aside():
                print(row)
            progress.step()
    """

    def __init__(self, total: int | None, unit: str) -> None:
        """Shows a bar of so many units; of an unknown number if None."""
        self._bar: Any = None
        if not sys.stderr.isatty():
            return
        try:
            tqdm = importlib.import_module("tqdm").tqdm
        except ImportError:
            print("no progress bar: it needs tqdm (pip install tqdm)", file=sys.stderr)
        else:
            self._bar = tqdm(total=total, unit=unit, leave=False)

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        """Makes room for lines on the standard output."""
        return contextlib.nullcontext() if self._bar is None else self._bar.external_write_mode(file=sys.stdout)

    def step(self) -> None:
        """Says that one more unit is done."""
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Removes the bar."""
        self.close()
