"""Writes what the build takes from a PyTorch wheel and its CUDA headers.

    python tests/softcuda/generate.py errors cuda.h CUDA_ERROR > driver_errors.inc
    python tests/softcuda/generate.py runtime libcudart.o TORCH_LIB > stubs.cpp

`errors`: the names of the errors that a header has. `runtime`: stubs, which fail and say so, of the functions that the
wheel's libraries import from the CUDA runtime and an object file does not have; what it exports bears their version.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

STUB = """\
extern "C" __attribute__((visibility("default"))) int {name}() {{
  static const bool said = [] {{
    fprintf(stderr, "softcuda: {name} is not done here\\n");
    return true;
  }}();
  return said ? NOT_SUPPORTED : 0;
}}
"""


def errors(header: Path, prefix: str) -> str:
    """Rows of a table from number to name."""
    # Deprecated names share a number with none.
    found = re.findall(rf"^\s+({prefix}\w+|CUDA_SUCCESS|cudaSuccess)\s*=\s*(\d+)", header.read_text(), re.MULTILINE)
    return "".join(f'{{{number}, "{name}"}},\n' for name, number in found)


def symbols(file: Path, *options: str) -> list[str]:
    return subprocess.run(["nm", *options, str(file)], capture_output=True, text=True, check=True).stdout.splitlines()


def imported(libraries: Path) -> dict[str, str]:
    """The runtime's functions that a folder's libraries import, each with its version."""
    found = {}
    for library in sorted(libraries.glob("*.so")):
        for line in symbols(library, "-D", "--undefined-only"):
            if match := re.search(r" U (\w+)@(libcudart\.so\.\d+)$", line):
                found[match[1]] = match[2]
    return found


def runtime(objects: list[Path], libraries: Path, version_script: Path) -> str:
    needed = imported(libraries)
    done = {line.split()[-1] for file in objects for line in symbols(file, "-g", "--defined-only")}
    versions = set(needed.values())
    if len(versions) != 1:
        raise SystemExit(f"{libraries} has no CUDA libraries of one version: {sorted(versions)}")
    version_script.write_text(f"{versions.pop()} {{ global: cuda*; __cuda*; local: *; }};\n")
    stubs = "".join(STUB.format(name=name) for name in sorted(set(needed) - done))
    return f"#include <cstdio>\nstatic constexpr int NOT_SUPPORTED = 801;\n{stubs}"


def main() -> None:
    what, *arguments = sys.argv[1:]
    if what == "errors":
        print(errors(Path(arguments[0]), arguments[1]), end="")
    else:
        *objects, libraries, version_script = map(Path, arguments)
        print(runtime(objects, libraries, version_script), end="")


if __name__ == "__main__":
    main()
