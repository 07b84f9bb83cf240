"""What a process makes at the first use, and once only, whichever of its threads comes first.

`functools.cache` runs a function again for a thread that comes while the first run goes on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def once(make: Callable[[], T]) -> Callable[[], T]:
    """Runs ``make`` at the first call; all calls return its result, and those that come meanwhile wait for it.

    After an exception, which goes to its caller, the next call runs ``make`` again. ``make`` may not call the result.
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
