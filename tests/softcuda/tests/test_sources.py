"""The rules of the software CUDA's own sources."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[1]
SOURCES = [file for suffix in ("cpp", "h", "py", "cu", "rs") for file in sorted(FOLDER.rglob(f"*.{suffix}"))]
MANUAL = (FOLDER / "README.md").read_text()
MAX_LINES = 500


def test_files_do_one_thing() -> None:
    assert len(SOURCES) > 50
    for file in SOURCES:
        lines = len(file.read_text().splitlines())
        assert lines < MAX_LINES, f"{file.relative_to(FOLDER)} has {lines} lines"


def test_the_manual_has_every_setting() -> None:
    read = set(re.findall(r'"(SOFTCUDA_[A-Z_]+)"', (FOLDER / "driver" / "settings.cpp").read_text()))
    told = set(re.findall(r"^\| `(SOFTCUDA_[A-Z_]+)` \|", MANUAL, re.MULTILINE))
    assert read == told and len(read) > 15


def test_the_manual_names_files_that_exist() -> None:
    named = re.findall(r"`((?:driver|ext|include|tests)/[\w./]+|probe/)`", MANUAL)
    named = [name for name in named if not name.startswith("tests/softcuda/")]
    assert len(named) > 15
    for name in named:
        assert (FOLDER / name).exists(), name
