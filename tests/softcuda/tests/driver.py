"""The driver's functions for tests, by ctypes: `cuda.cuMemAlloc_v2(...)` raises CudaError if it fails.

What only the software CUDA can be asked is at the end; the rest works on a GPU too, where tests/gpu uses it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_long, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

NON_BLOCKING = 1
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
DISABLE_TIMING, INTERPROCESS = 2, 4
GREATER_OR_EQUAL, EQUAL = 0, 1
POSIX_FILE = 1
HOST_FUNCTION = ctypes.CFUNCTYPE(None, c_void_p)
PAGE = 4096

library = ctypes.CDLL("libcuda.so.1")
IS_SOFTWARE = hasattr(library, "softcuda_uses")
if IS_SOFTWARE:
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


class Handle(ctypes.Structure):
    """What names memory or an event to other processes; passed by value."""

    _fields_ = [("bytes", ctypes.c_byte * 64)]


class Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class Properties(ctypes.Structure):
    """CUmemAllocationProp: pinned memory of a device, to be shared as a file."""

    _fields_ = [
        ("type", c_int),
        ("handles", c_int),
        ("location", Location),
        ("meta", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", c_int)]


CHUNK = 2 << 20
ON_DEVICE = Location(1, 0)


def pages(count: int = 1) -> c_ulonglong:
    made = c_ulonglong()
    wanted = Properties(1, POSIX_FILE, ON_DEVICE)
    cuda.cuMemCreate(byref(made), c_size_t(count * CHUNK), byref(wanted), c_ulonglong(0))
    return made


def reserve(count: int) -> int:
    found = c_uint64()
    cuda.cuMemAddressReserve(byref(found), c_size_t(count * CHUNK), c_size_t(0), c_uint64(0), c_ulonglong(0))
    return found.value


def map_at(where: int, handle: c_ulonglong) -> None:
    cuda.cuMemMap(address(where), c_size_t(CHUNK), c_size_t(0), handle, c_ulonglong(0))


def allow(where: int, count: int = 1) -> None:
    cuda.cuMemSetAccess(address(where), c_size_t(count * CHUNK), byref(Access(ON_DEVICE, 3)), c_size_t(1))


class BatchStep(ctypes.Structure):
    """CUstreamBatchMemOpParams, as far as waits and writes use it."""

    _fields_ = [
        ("operation", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", c_uint),
        ("rest", ctypes.c_uint64 * 2),
    ]


WAIT_32, WRITE_32, WAIT_64, WRITE_64 = 1, 2, 4, 5


def nvrtc() -> ctypes.CDLL:
    """The compiler in NVIDIA's wheel, with the library that it looks for by name."""
    found = [path for folder in sys.path for path in Path(folder).glob("nvidia/*/lib/libnvrtc.so.*")]
    compiler = next(path for path in found if "alt" not in path.name)
    for builtins in compiler.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(compiler))


def compile_for(architecture: str, source: Path) -> bytes:
    """A source's machine code for an architecture."""
    compiler, program = nvrtc(), c_void_p()
    assert compiler.nvrtcCreateProgram(byref(program), source.read_bytes(), source.name.encode(), 0, None, None) == 0
    options = (c_char_p * 2)(f"--gpu-architecture={architecture}".encode(), b"--fmad=false")
    failed = compiler.nvrtcCompileProgram(program, 2, options)
    size = c_size_t()
    if failed:
        compiler.nvrtcGetProgramLogSize(program, byref(size))
        log = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetProgramLog(program, log)
        raise AssertionError(log.value.decode())
    assert compiler.nvrtcGetCUBINSize(program, byref(size)) == 0
    code = ctypes.create_string_buffer(size.value)
    assert compiler.nvrtcGetCUBIN(program, code) == 0
    return code.raw


def load(image: bytes) -> c_void_p:
    module = c_void_p()
    cuda.cuModuleLoadData(byref(module), image)
    return module


def function(module: c_void_p, name: bytes) -> c_void_p:
    found = c_void_p()
    cuda.cuModuleGetFunction(byref(found), module, name)
    return found


def launch(
    what: c_void_p, grid: tuple[int, ...], block: tuple[int, ...], on: c_void_p | None, *arguments: object
) -> None:
    pointers = (c_void_p * len(arguments))(*(ctypes.cast(ctypes.pointer(it), c_void_p) for it in arguments))
    cuda.cuLaunchKernel(what, *map(c_uint, (*grid, *block)), c_uint(0), on, pointers, None)


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
