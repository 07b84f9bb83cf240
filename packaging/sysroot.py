"""Libraries to link with, so that what is built on a newer system runs on every one with glibc 2.28 and its libstdc++.

The linker takes versions of symbols from the libraries it finds. Here it finds those of glibc 2.28, which Zig
generates, and a libstdc++ without newer symbols. What is lacking in these is linked in: from libstdc++.a and from
``compat.c``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

GLIBC = "2.28"
# The newest versions that manylinux_2_28 allows.
NEWEST = {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
_HERE = Path(__file__).parent
_GLIBC_PARTS = ("libc.so.6", "libpthread.so.0", "libdl.so.2", "libm.so.6", "librt.so.1", "libutil.so.1", "libld.so.2")


def make(folder: Path, machine: str = "x86_64", prefix: str = "") -> Path:
    """Makes the libraries in a folder, unless they are there; returns the folder, for ``-L`` where a library is linked.

    Args:
        folder: where they are put.
        machine: the processor, as in the name of a target.
        prefix: of the names of the compiler's programs, such as ``aarch64-linux-gnu-``.

    Raises:
        subprocess.CalledProcessError: a compiler or linker refuses.
    """
    done = folder / ".done"
    if done.exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _glibc(folder, machine)
    _compat(folder, prefix)
    _libstdcxx(folder, prefix)
    done.touch()
    return folder


def _run(*command: str | Path, **variables: str) -> str:
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables}
    ).stdout


def _glibc(folder: Path, machine: str) -> None:
    cache = str(folder / "zig")
    zig = (sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{GLIBC}")
    _run(
        *zig, "-shared", "-x", "c", "/dev/null", "-o", folder / "unused.so", "-lpthread", "-ldl", "-lm",
        ZIG_GLOBAL_CACHE_DIR=cache, ZIG_LOCAL_CACHE_DIR=cache,
    )  # fmt: skip
    for name in (*_GLIBC_PARTS, "libc_nonshared.a"):
        (found,) = folder.glob(f"zig/o/*/{name}")
        shutil.copy(found, folder / name)
    shutil.rmtree(folder / "zig")
    (folder / "unused.so").unlink()
    for name in ("libpthread", "libdl", "libm", "librt", "libutil"):
        (found,) = folder.glob(f"{name}.so.*")
        (folder / f"{name}.so").symlink_to(found.name)


def _compat(folder: Path, prefix: str) -> None:
    _run(f"{prefix}gcc", "-O2", "-fPIC", "-c", _HERE / "compat.c", "-o", folder / "compat.o")
    _run(f"{prefix}ar", "rcs", folder / "libcompat.a", folder / "compat.o")
    libraries = " ".join(str(folder / name) for name in ("libc.so.6", "libc_nonshared.a", "libcompat.a"))
    as_needed = " ".join(str(folder / name) for name in ("libpthread.so.0", "libdl.so.2", "libld.so.2"))
    (folder / "libc.so").write_text(f"GROUP({libraries} AS_NEEDED({as_needed}))\n")


def _libstdcxx(folder: Path, prefix: str) -> None:
    library = _run(f"{prefix}g++", "-print-file-name=libstdc++.so.6").strip()
    archive = _run(f"{prefix}g++", "-print-file-name=libstdc++.a").strip()
    symbols = dict(_allowed(_run(f"{prefix}readelf", "--dyn-syms", "--wide", library)))
    assembly = ['.section .note.GNU-stack,"",%progbits']
    for name, (kind, _) in symbols.items():
        section = '.section .tbss,"awT",%nobits' if kind == "TLS" else ".data"
        assembly += [section, f'.globl "{name}"', f'.type "{name}", {_TYPES[kind]}', f'"{name}": .zero 8']
    (folder / "libstdc++.s").write_text("\n".join(assembly) + "\n")
    versions: dict[str, list[str]] = {}
    for name, (_, version) in symbols.items():
        versions.setdefault(version, []).append(name)
    script = [f"{version} {{ {'; '.join(names)}; }};" for version, names in versions.items()]
    (folder / "libstdc++.map").write_text("\n".join(script) + "\n")
    stub = folder / "libstdc++.so.6"
    _run(
        f"{prefix}gcc", "-shared", "-nostdlib", folder / "libstdc++.s", "-Wl,-soname,libstdc++.so.6",
        f"-Wl,--version-script={folder / 'libstdc++.map'}", "-o", stub,
    )  # fmt: skip
    (folder / "libstdc++.so").write_text(f"GROUP({stub} {archive} {folder / 'libcompat.a'})\n")


_TYPES = {"FUNC": "%function", "IFUNC": "%function", "OBJECT": "%object", "UNIQUE": "%object", "TLS": "%tls_object"}


def _allowed(table: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """The symbols that an old enough libstdc++ has, each with its type and its version, from what readelf prints."""
    row = re.compile(
        r"^ *\d+: \w+ +\w+ (\w+) +(GLOBAL|WEAK|UNIQUE) +\w+ +(\w+) ([^@ ]+)@@((\w+?)_([\d.]+))$", re.MULTILINE
    )
    for kind, _, index, name, version, family, number in row.findall(table):
        newest = NEWEST.get(family)
        if index != "UND" and kind in _TYPES and newest and tuple(map(int, number.split("."))) <= newest:
            yield name, (kind, version)
