"""The flight recorders of another host: `ncclx-rs top --dumps` runs there, and what it prints comes here."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

# How long a host may take for its first view, and be silent later, in seconds. Its program imports PyTorch first.
_LIMIT = 30.0


class Remote:
    """A program on another host that prints views, each of them dumps, one a line, and an empty line."""

    def __init__(self, host: str, command: Sequence[str]) -> None:
        """Starts the program.

        Args:
            host: its name in messages.
            command: what starts the program there, and passes on what it prints.

        Raises:
            OSError: there is no such command.
        """
        self.host = host
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._heard = time.monotonic()
        self._view: list[str] = []
        self._complaint = ""
        self._code: int | None = None
        self._first_or_end = threading.Event()
        assert self._process.stdout is not None and self._process.stderr is not None, "both are pipes"
        self._complaining = threading.Thread(target=self._read_complaints, args=(self._process.stderr,), daemon=True)
        self._complaining.start()
        threading.Thread(target=self._read_views, args=(self._process.stdout,), daemon=True).start()

    def _read_views(self, lines: IO[str]) -> None:
        view: list[str] = []
        for line in lines:
            if line != "\n":
                view.append(line)
                continue
            self._view, self._heard, view = view, time.monotonic(), []
            self._first_or_end.set()
        code = self._process.wait()
        self._complaining.join()  # what it said last is why it ended
        self._code = code
        self._first_or_end.set()

    def _read_complaints(self, lines: IO[str]) -> None:
        for line in lines:
            self._complaint = line.strip() or self._complaint

    def wait(self, deadline: float) -> None:
        """Waits for the first view or the program's end, at most until the deadline of `time.monotonic`."""
        self._first_or_end.wait(max(deadline - time.monotonic(), 0))

    def view(self, interval: float) -> tuple[list[str], list[str]]:
        """The dumps of the host's last view, and what is wrong, as sentences without the host's name.

        Args:
            interval: the seconds from one view to the next.
        """
        told, self._complaint = self._complaint, ""
        if self._code is not None:
            self._complaint = told  # to be said in every view
            return [], [f"its `ncclx-rs top` has ended with exit code {self._code}: {told or 'it did not say why'}"]
        silent = time.monotonic() - self._heard
        if silent > interval + _LIMIT:
            return [], [f"nothing has come from it for {silent:.0f} s"]
        return self._view, [told] if told else []

    def close(self) -> None:
        """Ends the command here; the program there ends when it prints its next view."""
        self._process.terminate()
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1)


def first_views(hosts: Sequence[Remote]) -> None:
    """Waits until each host has sent a view or ended, or is late."""
    deadline = time.monotonic() + _LIMIT
    for host in hosts:
        host.wait(deadline)
