#!/usr/bin/env bash
# run.sh [OPTIONS OF run_gpu.py]: the probes, benchmarks and tests of this archive, with the PyTorch of PYTHON (python3) on this machine.
# It installs into folders of its own here, and needs no network. The report lies in ./report.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3}
built=$(tail -n 2 BUILT)
here=$("$python" -c 'import sys, torch; print("python", *sys.version_info[:2]); print("torch", *torch.__version__.split("+")[0].split(".")[:2])')
if [[ $built != "$here" ]]; then
    printf 'this archive was built for\n%s\nand PYTHON=%s has\n%s\n' "$built" "$python" "$here" >&2
    exit 2
fi
if [[ ! -e site/.installed ]]; then
    rm -rf site
    # Without pip, which may be another's: a wheel of no scripts is an archive of what is to lie in a folder.
    for wheel in wheels/*.whl; do "$python" -m zipfile -e "$wheel" site; done
    touch site/.installed
fi
nvrtc=$("$python" -c 'import pathlib, sys; print(":".join(str(p.parent) for f in sys.path for p in pathlib.Path(f or ".").glob("nvidia/*/lib/libnvrtc.so.*")))')
export PYTHONPATH="$PWD/site${PYTHONPATH:+:$PYTHONPATH}"
export LD_LIBRARY_PATH="$nvrtc${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" tests/gpu/run_gpu.py --report report --rust "$PWD/bin/cuda-tests" "$@"
