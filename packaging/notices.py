"""The notices of the crates that the extension contains, as their licences ask for."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

PACKAGE = "ncclx_rs_torch"
_NAMES = ("LICENSE*", "LICENCE*", "COPYING*", "COPYRIGHT*", "NOTICE*", "UNLICENSE*", "license*")


def notices(root: Path, target: str) -> str:
    """The notices of every crate that is compiled for a target into the extension.

    Args:
        root: the folder of the workspace.
        target: the name of the target, such as ``x86_64-unknown-linux-gnu``.

    Returns:
        The text: for each crate its name, its licence and the files about it that it comes with.

    Raises:
        subprocess.CalledProcessError: cargo refuses.
        ValueError: a crate has neither such a file nor the name of a licence.
    """
    command = ("cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", target)
    metadata = json.loads(subprocess.run(command, check=True, cwd=root, stdout=subprocess.PIPE).stdout)
    parts = ["The extension of ncclx_rs contains these crates.\n", *map(_notice, linked(metadata))]
    return f"\n{'=' * 80}\n".join(parts)


def linked(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """The packages that end up in the extension: what it needs, but for builds and tests, and none of ours."""
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    waiting = [name for name, package in packages.items() if package["name"] == PACKAGE]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            needed = [dep for dep in nodes[name]["deps"] if any(kind["kind"] is None for kind in dep["dep_kinds"])]
            waiting += [dep["pkg"] for dep in needed if not _is_macro(packages[dep["pkg"]])]
    found = [packages[name] for name in seen if packages[name]["source"]]
    return sorted(found, key=lambda package: (package["name"], package["version"]))


def _is_macro(package: dict[str, Any]) -> bool:
    return any("proc-macro" in target["kind"] for target in package["targets"])


def _notice(package: dict[str, Any]) -> str:
    folder = Path(package["manifest_path"]).parent
    files = sorted({file for name in _NAMES for file in folder.glob(name) if file.is_file()})
    if not files and not package["license"]:
        raise ValueError(f"{package['name']} comes without a licence")
    head = f"{package['name']} {package['version']}\n{package['license'] or 'see below'}\n"
    if package["repository"]:
        head += f"{package['repository']}\n"
    return head + "".join(f"\n--- {file.name}\n\n{file.read_text(errors='replace').strip()}\n" for file in files)
