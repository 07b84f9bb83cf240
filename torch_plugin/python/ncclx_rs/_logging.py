"""Python's part of logging and warnings. `src/logging.rs` passes the engine's records on to Python's logging."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator

_LOGGER = "ncclx_rs"
_OURS = ("ncclx_rs", "torch")
_delivering_to: logging.Logger | None = None


class _LastResortHandler(logging.Handler):
    """Writes records to the standard error that no other handler gets."""

    def emit(self, record: logging.LogRecord) -> None:
        if any(handler is not self for handler in _handlers(logging.getLogger(record.name))):
            return
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def show(level: int) -> None:
    """Shows records of that level and above, also if the program does not configure logging."""
    logging.addLevelName(5, "TRACE")
    logger = logging.getLogger(_LOGGER)
    if logger.level == logging.NOTSET:
        logger.setLevel(level)
    handler = _LastResortHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)


def deliver(name: str, level: int, path: str, line: int, text: str) -> None:
    """Passes a record of the engine to Python's logging."""
    global _delivering_to
    logger = logging.getLogger(name)
    if not logger.isEnabledFor(level):
        return
    _delivering_to = logger
    try:
        logger.handle(logger.makeRecord(name, level, path, line, text, (), None))
    finally:
        _delivering_to = None


def finish() -> None:
    """Delivers all records at the interpreter's end; waits for a slow handler up to a timeout."""
    if sys.modules["ncclx_rs._native"].finish_log():
        return
    for handler in _handlers(_delivering_to):
        # The slow handler holds its lock, for which `logging.shutdown` would wait.
        if handler.lock is not None and not handler.lock.acquire(blocking=False):
            handler.createLock()
        elif handler.lock is not None:
            handler.lock.release()


def _handlers(logger: logging.Logger | None) -> Iterator[logging.Handler]:
    """The handlers that get a record of this logger."""
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


def warn_of_hints(names: list[str]) -> None:
    """Warns of unknown hints."""
    for name in names:
        warn(f"the hint `{name}` is not known and has no effect")


def warn(text: str) -> None:
    """Warns with the location of the program's own line that led to this call."""
    frame, depth = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OURS:
        frame, depth = frame.f_back, depth + 1
    warnings.warn(f"ncclx_rs: {text}", UserWarning, depth)


def flush(seconds: float) -> None:
    """Waits until Python's logging has got the engine's records; for processes that end without exit handlers."""
    native = sys.modules.get("ncclx_rs._native")
    if native is not None:
        native.flush_log(seconds)
