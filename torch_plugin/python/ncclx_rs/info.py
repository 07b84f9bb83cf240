"""Says what is here: versions, CUDA devices, and the vendors' libraries with what they lack.

ncclx-rs info
ncclx-rs info --json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from ncclx_rs._load import native
from ncclx_rs._vendor import LIBRARIES, VendorLibrary, find_vendor_library


@dataclass(frozen=True)
class Info:
    """What is here.

    `problems` says why a vendor's library cannot be used, for those that cannot; `cuda` is the driver's version, or why
    there is no driver.
    """

    ncclx_rs: str
    python: str
    torch: str
    built_for_torch: str
    cuda: str
    devices: list[str]
    libraries: dict[str, VendorLibrary]
    problems: dict[str, str]


def gather() -> Info:
    """Looks. It makes no context on a device."""
    module = native()
    libraries: dict[str, VendorLibrary] = {}
    problems: dict[str, str] = {}
    for name in LIBRARIES:
        try:
            libraries[name] = find_vendor_library(name)
        except OSError as error:
            problems[name] = str(error)
    try:
        driver, devices = module.cuda_devices()
    except OSError as error:
        driver, devices = str(error), []
    return Info(
        ncclx_rs=module.__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        built_for_torch=module.torch_build_version,
        cuda=driver,
        devices=devices,
        libraries=libraries,
        problems=problems,
    )


def text(info: Info) -> str:
    """The same as lines for people."""
    lines = [
        ("ncclx_rs", f"{info.ncclx_rs}, built for PyTorch {info.built_for_torch}"),
        ("PyTorch", f"{info.torch}, Python {info.python}"),
        ("CUDA", info.cuda),
        *((f"cuda:{number}", name) for number, name in enumerate(info.devices)),
    ]
    for name in LIBRARIES:
        if library := info.libraries.get(name):
            lines.append((name.upper(), f"{library.version}, {library.path}"))
            if library.lacks:
                lines.append(("", f"lacks {', '.join(library.lacks)}"))
        else:
            lines.append((name.upper(), f"none: {info.problems[name]}"))
    return "\n".join(f"{name:<10} {what}" for name, what in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: The command line after the command; that of the process if not given.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="ncclx-rs info", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="prints one JSON object")
    options = parser.parse_args(arguments)
    info = gather()
    print(json.dumps(asdict(info), indent=2) if options.json else text(info))
    return 0


if __name__ == "__main__":
    sys.exit(main())
