"""Checks that every Rust dependency comes from crates.io under a licence that we accept.

Reads what `cargo metadata --locked --format-version 1` prints.
"""

from __future__ import annotations

import json
import re
import sys

# Permissive licences without conditions beyond attribution.
ACCEPTED = {
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
}
SOURCE = "registry+https://github.com/rust-lang/crates.io-index"


def accepted(expression: str) -> bool:
    """Whether an SPDX expression can be met with accepted licences; `/` is how old crates write OR."""
    tokens = re.findall(r"[()]|[^\s()]+", expression.replace("/", " OR ").replace(" WITH ", "\0"))
    position = 0

    def next_is(token: str) -> bool:
        nonlocal position
        found = position < len(tokens) and tokens[position] == token
        position += found
        return found

    def alternatives() -> bool:
        result = conjunction()
        while next_is("OR"):
            result |= conjunction()
        return result

    def conjunction() -> bool:
        result = atom()
        while next_is("AND"):
            result &= atom()
        return result

    def atom() -> bool:
        nonlocal position
        if next_is("("):
            result = alternatives()
            return next_is(")") and result
        if position == len(tokens):
            return False
        position += 1
        return tokens[position - 1].replace("\0", " WITH ") in ACCEPTED

    result = alternatives()
    return result and position == len(tokens)


def main() -> None:
    packages = json.load(sys.stdin)["packages"]
    problems = []
    for package in packages:
        name = f"{package['name']} {package['version']}"
        if package["source"] not in (None, SOURCE):
            problems.append(f"{name} comes from {package['source']}")
        if not accepted(package["license"] or ""):
            problems.append(f"{name} has the licence {package['license']}")
    if problems:
        sys.exit("\n".join(problems))
    print(f"licences of {len(packages)} packages are accepted")


if __name__ == "__main__":
    main()
