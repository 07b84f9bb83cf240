"""The driver's functions for tests, by ctypes: `cuda.cuMemAlloc_v2(...)` raises CudaError if it fails."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_long, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

NON_BLOCKING = 1
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
DISABLE_TIMING, INTERPROCESS = 2, 4
GREATER_OR_EQUAL, EQUAL = 0, 1
POSIX_FILE = 1
HOST_FUNCTION = ctypes.CFUNCTYPE(None, c_void_p)
PAGE = 4096

library = ctypes.CDLL("libcuda.so.1")
library.softcuda_uses.restype = library.softcuda_breaches.restype = c_uint64
library.softcuda_living.restype = c_long
library.softcuda_alias.restype = c_void_p
library.softcuda_alias.argtypes = [c_uint64, c_size_t]


class CudaError(Exception):
    """A call of the driver that failed; its text is the error's name."""

    def __init__(self, call: str, code: int) -> None:
        name = c_char_p()
        library.cuGetErrorName(code, byref(name))
        super().__init__(name.value.decode() if name.value else str(code))
        self.call = call


class _Driver:
    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(library, name)

        def call(*arguments: Any) -> None:
            if code := function(*arguments):
                raise CudaError(name, code)

        return call


cuda: Any = _Driver()


def address(value: int) -> c_uint64:
    return c_uint64(value)


def start(device: int = 0) -> None:
    """Makes this thread's context one of a device."""
    cuda.cuInit(0)
    context = c_void_p()
    cuda.cuDevicePrimaryCtxRetain(byref(context), device)
    cuda.cuCtxSetCurrent(context)


def allocate(size: int) -> int:
    found = c_uint64()
    cuda.cuMemAlloc_v2(byref(found), c_size_t(size))
    return found.value


def free(memory: int) -> None:
    cuda.cuMemFree_v2(address(memory))


def pinned(size: int) -> int:
    found = c_void_p()
    cuda.cuMemHostAlloc(byref(found), c_size_t(size), 0)
    assert found.value is not None
    return found.value


def stream(flags: int = NON_BLOCKING) -> c_void_p:
    found = c_void_p()
    cuda.cuStreamCreate(byref(found), flags)
    return found


def event(flags: int = DISABLE_TIMING) -> c_void_p:
    found = c_void_p()
    cuda.cuEventCreate(byref(found), flags)
    return found


def wait(on: c_void_p | None = None) -> None:
    cuda.cuStreamSynchronize(on)


def is_done(on: c_void_p) -> bool:
    return library.cuStreamQuery(on) == 0


def fill(memory: int, word: int, count: int, on: c_void_p | None = None) -> None:
    cuda.cuMemsetD32Async(address(memory), c_uint(word), c_size_t(count), on)


def copy(to: int, source: int, size: int, on: c_void_p | None = None) -> None:
    cuda.cuMemcpyAsync(address(to), address(source), c_size_t(size), on)


def read(memory: int, count: int = 1) -> list[int]:
    """Words of device memory, after what the default stream has to wait for."""
    words = (c_uint * count)()
    cuda.cuMemcpyDtoH_v2(words, address(memory), c_size_t(4 * count))
    return list(words)


def write_word(on: c_void_p, memory: int, value: int, flags: int = 0) -> None:
    cuda.cuStreamWriteValue32_v2(on, address(memory), c_uint(value), flags)


def wait_word(on: c_void_p, memory: int, value: int, flags: int = GREATER_OR_EQUAL) -> None:
    cuda.cuStreamWaitValue32_v2(on, address(memory), c_uint(value), flags)


def host_word(memory: int) -> c_uint:
    """A word of memory that the host may touch."""
    return c_uint.from_address(memory)


def call_on(on: c_void_p, function: Callable[[], None]) -> Any:
    """Has the stream call a function; the caller keeps what this returns until then."""
    callback = HOST_FUNCTION(lambda _: function())
    cuda.cuLaunchHostFunc(on, callback, None)
    return callback


def fails_with(error: str, function: Callable[..., Any], *arguments: Any) -> None:
    try:
        function(*arguments)
    except CudaError as failure:
        assert str(failure) == error, failure
    else:
        raise AssertionError(f"no {error}")


def breaches() -> int:
    return int(library.softcuda_breaches())


def uses(call: str) -> int:
    return int(library.softcuda_uses(call.encode()))


def living(kind: str = "") -> int:
    return int(library.softcuda_living(kind.encode()))


__all__ = [name for name in globals() if not name.startswith("_")] + ["c_int"]
