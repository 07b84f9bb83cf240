"""Python's part of logging and warnings. `src/logging.rs` passes the engine's records on to Python's logging."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator

_LOGGER = "ncclx_rs"
_OURS = ("ncclx_rs", "torch")
_at_work: logging.Logger | None = None


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


def hand_over(name: str, level: int, path: str, line: int, text: str) -> None:
    """Gives Python's logging a record of the engine's."""
    global _at_work
    logger = logging.getLogger(name)
    if not logger.isEnabledFor(level):
        return
    _at_work = logger
    try:
        logger.handle(logger.makeRecord(name, level, path, line, text, (), None))
    finally:
        _at_work = None


def finish() -> None:
    """Has all handed over at the interpreter's end, which waits a while for a handler, and not for its lock."""
    if sys.modules["ncclx_rs._native"].finish_log():
        return
    for handler in _handlers(_at_work):
        # The handler that takes so long has it, and `logging.shutdown` would wait for it.
        if handler.lock is not None and not handler.lock.acquire(blocking=False):
            handler.createLock()
        elif handler.lock is not None:
            handler.lock.release()


def _handlers(logger: logging.Logger | None) -> Iterator[logging.Handler]:
    """Those that get a record of this logger."""
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
