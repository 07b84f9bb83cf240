"""Values that a process makes once, at their first use, also if several threads use them at the same time.

`functools.cache` is not enough: it runs the function again for a thread that calls it during the first run.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def once(make: Callable[[], T]) -> Callable[[], T]:
    """Runs ``make`` at the first call. All calls return its result; calls during the run wait for it.

    If ``make`` raises, its caller gets the exception, and the next call runs ``make`` again. ``make`` must not call the
    function that this returns.
    """
    made = list[T]()
    lock = threading.Lock()

    @functools.wraps(make)
    def get() -> T:
        if not made:
            with lock:
                if not made:
                    made.append(make())
        return made[0]

    return get
