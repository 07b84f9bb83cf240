"""Breaks the engine of streams in one way after the other, and sees that its tests notice.

    make mutations-cuda                            # all
    make mutations-cuda MUTATIONS='"no credits"'   # one

Each mutation of `mutations.py` is made in a copy of the tree. There the tests that it names must fail, by an assertion
or because they do not end; unmutated they must pass. A mutation that no longer applies, or does not compile, is an
error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mutations import MUTATIONS, ROOT, Mutation

# What tests get at least before they are ended, in seconds, and how many times as long as all take unmutated.
LEAST, TIMES = 60.0, 3.0
OUTCOME = re.compile(r"^test (\S+) \.\.\. (ok|FAILED)$", re.MULTILINE)
# One at a time, so that those after one that does not end have no end either.
TESTS = ("--exact", "--test-threads", "1")


class CannotRun(Exception):
    """The tree, and not the tests, is at fault."""


def copy_tree(into: Path) -> None:
    """Makes `into` hold the files that git does not ignore. What is the same stays, so that it is not built again."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    files = {Path(name) for name in names if name and (ROOT / name).is_file()}
    for stale in [path for path in into.rglob("*") if path.is_file() and path.relative_to(into) not in files]:
        stale.unlink()
    for file in files:
        source, target = ROOT / file, into / file
        if not target.exists() or source.read_bytes() != target.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            shutil.copymode(source, target)


@contextmanager
def mutated(mutation: Mutation, tree: Path) -> Iterator[None]:
    """A mutation in a tree, for a while."""
    before: dict[Path, str] = {}
    try:
        for edit in mutation.edits:
            file = tree / edit.file
            text = edit.apply(tree)
            before.setdefault(file, file.read_text())
            file.write_text(text)
        yield
    finally:
        for file, text in before.items():
            file.write_text(text)


def build(tree: Path, target: Path) -> tuple[str, str]:
    """The program of the tests, to be run on the software CUDA.

    Raises:
        CannotRun: It does not compile.
    """
    command = ["cargo", "test", "--locked", "--quiet", "--test", "cuda", "--no-run", "--message-format", "json"]
    environment = {**os.environ, "CARGO_TARGET_DIR": str(target)}
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, env=environment)
    messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        errors = [message["message"]["rendered"] for message in messages if message.get("message")]
        raise CannotRun("\n".join([*errors, done.stderr]))
    programs = [message["executable"] for message in messages if message.get("executable")]
    if len(programs) != 1:
        raise CannotRun(f"cargo has made {programs}")
    return str(ROOT / "tests/softcuda/run"), programs[0]


def outcomes(program: Sequence[str], tests: Sequence[str], tree: Path, seconds: float) -> dict[str, str]:
    """What becomes of tests: "ok", "FAILED", or "no end" for those that have not ended in that time."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*program, *TESTS, *tests],
            cwd=tree,
            stdout=output,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "NCCLX_RS_CI": "1"},
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Also the processes that tests have begun.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        found = dict(OUTCOME.findall(output.read()))
    return {test: found.get(test, "no end") for test in tests}


def survivors(found: dict[str, str]) -> list[str]:
    """The tests that have not noticed a mutation."""
    return [test for test, outcome in found.items() if outcome == "ok"]


def check(mutations: Sequence[Mutation], folder: Path) -> int:
    """Tries mutations; returns how many of them some test has not noticed."""
    tree, target = folder / "tree", folder / "target"
    copy_tree(tree)
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    program = build(tree, target)
    began = time.monotonic()
    found = outcomes(program, tests, tree, 3600)
    took = time.monotonic() - began
    if broken := {test: outcome for test, outcome in found.items() if outcome != "ok"}:
        raise CannotRun(f"unmutated, tests do not pass: {broken}")
    print(f"unmutated: {len(tests)} tests pass in {took:.0f} s", flush=True)
    survived = 0
    for mutation in mutations:
        began = time.monotonic()
        with mutated(mutation, tree):
            found = outcomes(build(tree, target), mutation.tests, tree, max(LEAST, TIMES * took))
        left = survivors(found)
        survived += bool(left)
        verdict = f"NOT NOTICED by {', '.join(left)}" if left else "noticed"
        told = ", ".join(f"{test} {outcome}" for test, outcome in found.items())
        print(f"{mutation.name}: {verdict} ({told}; {time.monotonic() - began:.0f} s)", flush=True)
    return survived


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it; returns the exit code."""
    parser = argparse.ArgumentParser(description="Breaks the engine of streams, and sees that its tests notice.")
    parser.add_argument("names", nargs="*", help="the mutations (all)")
    parser.add_argument("--folder", type=Path, default=ROOT / "target/mutations", help="for the copy and its builds")
    options = parser.parse_args(arguments)
    by_name = {mutation.name: mutation for mutation in MUTATIONS}
    if unknown := set(options.names) - by_name.keys():
        parser.error(f"there is no {sorted(unknown)}; there are {sorted(by_name)}")
    chosen = [by_name[name] for name in options.names] or list(MUTATIONS)
    try:
        survived = check(chosen, options.folder.resolve())
    except (CannotRun, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{len(chosen) - survived} of {len(chosen)} mutations were noticed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
