#!/usr/bin/env bash
# bundle.sh ARCHIVE PYTHON WHEEL PROGRAM: packs what a machine needs that has PyTorch and a GPU, and neither network nor compiler.
# PYTHON is that of an environment with the PyTorch that WHEEL was built for; PROGRAM is that of the tests in Rust.
set -euo pipefail
archive=$1 python=$2 wheel=$3 program=$4
MOST=$((60 << 20))
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bundle=$work/ncclx-rs-gpu
mkdir -p "$bundle/wheels" "$bundle/bin"
cp "$wheel" "$bundle/wheels/"
# What the tests import beside PyTorch, for the same interpreter.
"$python" -m pip download --quiet --only-binary :all: --dest "$bundle/wheels" pytest pytest-timeout numpy
strip -o "$bundle/bin/cuda-tests" "$program"
# The tests, and what they read: sources of kernels, examples, bounds.
git -C "$root" ls-files -z --cached --others --exclude-standard pyproject.toml LICENSE tests/gpu tests/cuda_python tests/python \
    tests/softcuda tests/cuda tests/engine src/device examples docs/cuda.md docs/object_api.md \
    | xargs -0 tar --create --file - --directory "$root" | tar --extract --file - --directory "$bundle"
cp "$root/tests/gpu/on_target.sh" "$bundle/run.sh"
{
    git -C "$root" describe --always --dirty
    "$python" -c 'import sys, torch; print("python", *sys.version_info[:2]); print("torch", *torch.__version__.split("+")[0].split(".")[:2])'
} > "$bundle/BUILT"
mkdir -p "$(dirname "$archive")"
tar --create --gzip --file "$archive" --directory "$work" ncclx-rs-gpu
size=$(stat --format %s "$archive")
echo "$archive: $((size >> 20)) MiB"
if ((size >= MOST)); then
    echo "the archive is larger than $((MOST >> 20)) MiB" >&2
    exit 1
fi
