"""Builds the wheel for every PyTorch and Python, and the source distribution.

python packaging/wheels.py [--shims 2.15:3.11 ... | --here] [--headers 3.14=FOLDER ...] [--machine aarch64] [--out dist]

The extension itself is compiled once. Its part in C++, the shim, is compiled for each PyTorch and Python with nothing
but the headers of both: PyTorch's are taken from its wheel. The result runs on every system of manylinux_2_28, which
auditwheel checks.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import sysroot
from notices import notices

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "target" / "wheels"
PLATFORM = "manylinux_2_28"
# What a shim needs of PyTorch, which is not to be in the wheel.
TORCH_LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libtorch_python.so")
# The Pythons that each PyTorch is published for.
PYTHONS = {
    "2.11": ("3.10", "3.11", "3.12", "3.13", "3.14"),
    "2.12": ("3.10", "3.11", "3.12", "3.13", "3.14"),
    "2.13": ("3.10", "3.11", "3.12", "3.13", "3.14"),
    "2.14": ("3.10", "3.11", "3.12", "3.13", "3.14"),
    "2.15": ("3.11", "3.12", "3.13", "3.14", "3.15"),
}


@dataclass(frozen=True)
class Pair:
    """A minor version of PyTorch and one of Python."""

    torch: str
    python: str

    @classmethod
    def parse(cls, text: str) -> Pair:
        """Reads ``2.15:3.11``; ``argparse`` reports the ValueError of anything else."""
        torch, _, python = text.partition(":")
        if python not in PYTHONS.get(torch, ()):
            raise ValueError(f"expected a PyTorch and a Python it is published for, as 2.15:3.11, got {text}")
        return cls(torch, python)

    def __str__(self) -> str:
        return f"{self.torch}:{self.python}"


PAIRS = tuple(Pair(torch, python) for torch, pythons in PYTHONS.items() for python in pythons)


def interpreter(python: str) -> Path | None:
    """An interpreter of a version that is installed with its headers: on the PATH, or where tools put theirs."""
    tag = python.replace(".", "")
    places = [
        *([Path(found)] if (found := shutil.which(f"python{python}")) else []),
        *sorted(Path.home().glob(f".pyenv/versions/{python}.*/bin/python{python}"), reverse=True),
        *sorted(Path("/opt/python").glob(f"cp{tag}-cp{tag}/bin/python{python}")),
    ]
    return next((place for place in places if _include(place)), None)


def _include(python: Path) -> str | None:
    code = (
        "import os, sysconfig; p = sysconfig.get_path('include'); print(p if os.path.exists(p + '/Python.h') else '')"
    )
    asked = subprocess.run((python, "-c", code), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return asked.stdout.strip() or None if asked.returncode == 0 else None


def python_headers(python: str, given: dict[str, str]) -> str:
    """The folders of a Python's headers, with colons between them.

    Raises:
        SystemExit: they are neither given nor installed.
    """
    if python in given:
        return given[python]
    found = interpreter(python)
    include = _include(found) if found else None
    if include is None:
        raise SystemExit(f"no headers of Python {python}: install it, or unpack them and add --headers {python}=FOLDER")
    return include


def pairs_here(given: dict[str, str]) -> list[Pair]:
    """The pairs whose Python has headers: they are given, or it is installed with them."""
    return [pair for pair in PAIRS if pair.python in given or interpreter(pair.python)]


def torch_headers(torch: str) -> Path:
    """The folder of PyTorch's headers, which are the same for each Python and processor."""
    folder = WORK / "torch" / torch / "include"
    if folder.exists():
        return folder
    downloads = WORK / "download"
    shutil.rmtree(downloads, ignore_errors=True)
    python = PYTHONS[torch][-1]
    subprocess.run(
        (
            sys.executable, "-m", "pip", "download", "--quiet", "--no-cache-dir", "--no-deps", "--only-binary=:all:",
            "--python-version", python, "--platform", f"{PLATFORM}_x86_64", "--dest", downloads, f"torch=={torch}.*",
        ),
        check=True,
    )  # fmt: skip
    (wheel,) = downloads.glob("torch-*.whl")
    unpacked = WORK / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(unpacked, [name for name in names if name.startswith("torch/include/")])
        # Those of what the headers compile into a shim.
        licences = [name for name in names if re.search(r"dist-info/licenses/(.*/pybind11/)?LICENSE$", name)]
        text = "\n".join(archive.read(name).decode() for name in licences)
    folder.parent.mkdir(parents=True, exist_ok=True)
    (folder.parent / "LICENSE").write_text(text)
    (unpacked / "torch/include").rename(folder)
    shutil.rmtree(downloads)
    return folder


def write_list(pairs: list[Pair], given: dict[str, str]) -> Path:
    """The list that the build script reads: torch_plugin/build.rs says what a line is."""
    rows = []
    for pair in pairs:
        tag = "cpython" + pair.python.replace(".", "")
        headers = torch_headers(pair.torch), tag, python_headers(pair.python, given)
        rows.append("\t".join((f"{pair.torch}.0", *map(str, headers), "1")))
    file = WORK / "shims.tsv"
    file.write_text("\n".join(rows) + "\n")
    return file


def build(pairs: list[Pair], given: dict[str, str], machine: str, profile: str) -> Path:
    """Compiles; returns maturin's wheel, which nothing is known of yet."""
    target = f"{machine}-unknown-linux-gnu"
    native = machine == os.uname().machine
    prefix = "" if native else f"{machine}-linux-gnu-"
    libraries = sysroot.make(WORK / f"sysroot-{machine}", machine, prefix)
    built = WORK / "built" / machine
    shutil.rmtree(built, ignore_errors=True)
    environment = {
        **os.environ,
        "NCCLX_RS_SHIMS": str(write_list(pairs, given)),
        f"CXXFLAGS_{target.replace('-', '_')}": f"-s -L{libraries} -Wl,--exclude-libs,ALL",
        **({} if native else {f"CARGO_TARGET_{target.replace('-', '_').upper()}_LINKER": f"{prefix}gcc"}),
    }
    options = ("--interpreter", sys.executable) if native else ("--target", target)
    maturin = (sys.executable, "-m", "maturin", "build", "--locked", "--profile", profile, "--strip", *options)
    # What stands behind the dashes is for the extension alone: build scripts run here.
    ends = ("--compatibility", "off", "--out", built, "--", "-C", f"link-arg=-L{libraries}")
    subprocess.run((*maturin, *ends), check=True, cwd=ROOT, env=environment)
    (wheel,) = built.glob("*.whl")
    return wheel


def add_notices(wheel: Path, pairs: list[Pair], target: str) -> Path:
    """Puts the notices of the crates and of PyTorch's headers beside the licence; returns the new wheel."""
    folder = wheel.parent / "unpacked"
    subprocess.run((sys.executable, "-m", "wheel", "unpack", "--dest", folder, wheel), check=True)
    (unpacked,) = folder.iterdir()
    (info,) = unpacked.glob("*.dist-info")
    newest = torch_headers(pairs[-1].torch).parent / "LICENSE"
    headers = f"Its shims contain code of PyTorch's headers and of pybind11's.\n\n{newest.read_text()}"
    (info / "licenses/THIRD-PARTY.txt").write_text(f"{notices(ROOT, target)}\n{'=' * 80}\n{headers}")
    metadata = info / "METADATA"
    metadata.write_text(
        metadata.read_text().replace("\nLicense-File:", "\nLicense-File: THIRD-PARTY.txt\nLicense-File:", 1)
    )
    wheel.unlink()
    subprocess.run((sys.executable, "-m", "wheel", "pack", "--dest-dir", wheel.parent, unpacked), check=True)
    return wheel


def check_symbols(wheel: Path, machine: str) -> None:
    """Checks that no library in the wheel lacks a symbol of the system's libraries; auditwheel checks versions alone.

    Raises:
        SystemExit: one does.
    """
    prefix = "" if machine == os.uname().machine else f"{machine}-linux-gnu-"
    system: set[str] = set()
    for name in ("libc.so.6", "libm.so.6", "libstdc++.so.6"):
        command = (f"{prefix}g++", f"-print-file-name={name}")
        found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        system |= {symbol.split("@")[0] for symbol in _symbols(f"{prefix}nm", Path(found), "--defined-only")}
    folder = wheel.parent / "unpacked"
    for library in folder.rglob("*.so"):
        undefined = _symbols(f"{prefix}nm", library, "--undefined-only")
        lacking = sorted(symbol for symbol in undefined if "@" not in symbol and symbol in system)
        if lacking:
            raise SystemExit(f"{library.name} takes newer symbols of the system's libraries: {' '.join(lacking)}")


def _symbols(nm: str, library: Path, which: str) -> list[str]:
    printed = subprocess.run((nm, "-D", which, library), check=True, stdout=subprocess.PIPE, text=True).stdout
    return re.findall(r"^ *(?:[0-9a-f]+)? *[A-TU-Zi] (\S+)$", printed, re.MULTILINE)


def repair(wheel: Path, machine: str, out: Path) -> Path:
    """Gives the wheel its platform's tag, if auditwheel finds that it keeps the rules; returns the wheel in ``out``.

    Raises:
        SystemExit: the wheel needs another platform than it is to have.
    """
    excluded = [f"--exclude={library}" for library in TORCH_LIBRARIES]
    platform = f"{PLATFORM}_{machine}"
    # It takes names of this machine's platforms alone. For another processor it finds the oldest that the wheel fits.
    asked = platform if machine == os.uname().machine else "auto"
    command = (sys.executable, "-m", "auditwheel", "repair", "--plat", asked, "--only-plat", *excluded)
    subprocess.run((*command, "--wheel-dir", out, wheel), check=True)
    (repaired,) = out.glob(f"*{machine}.whl")
    if not repaired.name.endswith(f"{platform}.whl"):
        raise SystemExit(f"expected a wheel for {platform}, got {repaired.name}")
    return repaired


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--shims", nargs="*", type=Pair.parse, help="only these, each as 2.15:3.11; all without it")
    which.add_argument("--here", action="store_true", help="only those of Pythons that have headers here")
    parser.add_argument("--headers", nargs="*", default=[], metavar="VERSION=FOLDERS", help="a Python's headers")
    parser.add_argument("--machine", choices=("x86_64", "aarch64"), default="x86_64")
    parser.add_argument("--profile", default="release", help="cargo's profile (%(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    given = dict(entry.split("=", 1) for entry in arguments.headers)
    pairs: list[Pair] = pairs_here(given) if arguments.here else arguments.shims or list(PAIRS)
    if not pairs:
        parser.error("--here: there are no headers of any Python")
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob(f"ncclx_rs-*{arguments.machine}.whl"):
        old.unlink()
    WORK.mkdir(parents=True, exist_ok=True)
    wheel = build(pairs, given, arguments.machine, arguments.profile)
    wheel = add_notices(wheel, pairs, f"{arguments.machine}-unknown-linux-gnu")
    check_symbols(wheel, arguments.machine)
    repaired = repair(wheel, arguments.machine, out)
    print(f"{repaired}: {repaired.stat().st_size / 1e6:.1f} MB, for {', '.join(map(str, pairs))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
