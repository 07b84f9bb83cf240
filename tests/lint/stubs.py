"""Compares the extension module's stub with the module, which loads only after torch.

python tests/lint/stubs.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed  # noqa: F401 - the extension's classes derive from its
from mypy import stubtest

ALLOWED = Path(__file__).with_name("stubs_allowed.txt")


def main() -> int:
    options = stubtest.parse_options(["ncclx_rs._native", "--concise", "--allowlist", str(ALLOWED)])
    return stubtest.test_stubs(options)


if __name__ == "__main__":
    sys.exit(main())
