"""Loading: `import torch` finds the backend, and a broken build harms no program that does not use it."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import BACKEND, without_cuda_driver

WATCHDOG_SECONDS = 120

PACKAGE = importlib.util.find_spec("ncclx_rs")

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs" or PACKAGE is None, reason="ncclx_rs is not under test")

USE = """
import torch.distributed as dist
dist.init_process_group("ncclx_rs", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
dist.destroy_process_group()
print("works")
"""


def python(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments, "-c", code],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
        check=False,
    )


def printed(code: str, *arguments: str, **variables: str) -> str:
    done = python(code, *arguments, **variables)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def with_broken_native(tmp_path: Path) -> str:
    """A directory with a copy of the package whose native module the loader refuses."""
    assert PACKAGE is not None and PACKAGE.submodule_search_locations
    copy = tmp_path / "ncclx_rs"
    shutil.copytree(PACKAGE.submodule_search_locations[0], copy)
    (native,) = copy.glob("_native*.so")
    with native.open("r+b") as library:
        library.write(b"\0\0\0\0")  # no longer ELF
    return str(tmp_path)


@functools.cache
def after_importing_torch(**variables: str) -> dict[str, Any]:
    """The output of a process that imports only torch."""
    code = """
import json, sys, torch
native = "ncclx_rs._native" in sys.modules
import torch.distributed as dist
backend = dist.Backend
print(json.dumps({
    "native": native,
    "backends": backend.backend_list,
    "devices": backend.backend_capability.get("ncclx_rs"),
    "defaults": backend.default_device_backend_map,
}))
"""
    found: dict[str, Any] = json.loads(printed(code, **variables))
    return found


def test_importing_torch_registers_the_backend() -> None:
    assert "ncclx_rs" in after_importing_torch()["backends"]


def test_backend_serves_the_cpu() -> None:
    assert after_importing_torch()["devices"] == ["cpu"]


def test_registration_leaves_the_defaults_alone() -> None:
    without = after_importing_torch(TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "ncclx_rs" not in without["backends"]
    assert after_importing_torch()["defaults"] == without["defaults"]


def test_importing_torch_does_not_load_the_native_module() -> None:
    assert after_importing_torch()["native"] is False


@pytest.mark.parametrize(
    "imports",
    [
        "import torch",
        "import ncclx_rs; import torch",
        "import torch; import ncclx_rs",
        "import torch.distributed; import ncclx_rs; import torch",
        "from torch import nn; import torch",
        "import ncclx_rs, importlib; importlib.reload(ncclx_rs); import torch",
    ],
)
def test_imports_work_in_every_order(imports: str) -> None:
    assert printed(f"{imports}\n{USE}") == "works"


def test_import_is_silent() -> None:
    done = python("import torch, ncclx_rs", "-W", "error::DeprecationWarning:ncclx_rs")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_explicit_import_registers_without_autoload() -> None:
    code = f"import torch, ncclx_rs\n{USE}"
    assert printed(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "works"


def test_broken_native_module_fails_only_when_used(tmp_path: Path) -> None:
    used = python(f"import torch; print(torch.ones(2).sum().item())\n{USE}", PYTHONPATH=with_broken_native(tmp_path))
    assert used.returncode != 0 and used.stdout == "2.0\n"
    assert "ImportError" in used.stderr and "_native" in used.stderr, used.stderr


def test_other_torch_version_is_a_clear_import_error() -> None:
    # The check compares torch.__version__ with the version that the extension was built for; a test may fake either.
    pretend = "import torch, ncclx_rs\ntorch.__version__ = torch.torch_version.TorchVersion('1.99.0')\n"
    used = python(pretend + USE)
    assert used.returncode != 0
    assert "ImportError" in used.stderr and "1.99" in used.stderr, used.stderr
    assert ".".join(torch.__version__.split(".")[:2]) in used.stderr.splitlines()[-1], used.stderr


def test_process_may_exit_without_destroying_its_group() -> None:
    code = """
import torch, torch.distributed as dist
dist.init_process_group("ncclx_rs", store=dist.HashStore(), rank=0, world_size=1)
future = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda f: None)
print("leaving")
"""
    assert printed(code) == "leaving"


def test_fork_after_import_works() -> None:
    code = f"""
import os, torch
child = os.fork()
if child == 0:
    exec({USE!r})
    import sys; sys.stdout.flush()
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
"""
    assert printed(code) == "works"


def test_torchrun_starts_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('ncclx_rs')\n"
        "t = torch.ones(3) * (dist.get_rank() + 1)\n"
        "dist.all_reduce(t)\n"
        "assert t.tolist() == [3.0] * 3, t\n"
        "dist.destroy_process_group()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG_SECONDS, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


DEFAULT = """
import torch, torch.distributed as dist
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
print(dist.group.WORLD._get_backend(torch.device("cpu")).name())
dist.destroy_process_group()
"""


def test_a_variable_makes_it_the_default() -> None:
    assert printed(DEFAULT, NCCLX_RS_DEFAULT="cpu, cuda") == "ncclx_rs"
    called = "import ncclx_rs, torch; ncclx_rs.set_default('cpu')"
    assert printed(DEFAULT + called + DEFAULT).splitlines() == ["gloo", "ncclx_rs"]


# Makes `import torch` find a GPU, on any machine.
WITH_GPU = """
import glob
found = glob.glob
glob.glob = lambda pattern, **options: [pattern] if pattern.startswith("/dev/nvidia") else found(pattern, **options)
"""


NO_DRIVER = "there is no CUDA driver: no libcuda.so.1 could be loaded, nor HIP's libamdhip64.so.7"

# One program for all: most of its time is the import of torch.
REFUSED = f"""{WITH_GPU}
import torch, torch.distributed as dist

place = {{"rank": 0, "world_size": 1}}
cuda = torch.device("cuda:0")
arguments = [
    {{"backend": "cuda:ncclx_rs"}},
    {{"backend": "cpu:ncclx_rs,cuda:ncclx_rs"}},
    {{"backend": "CPU:gloo,CUDA:ncclx_rs"}},
    {{"backend": "ncclx_rs", "device_id": cuda}},
]

def refused(make):
    try:
        make()
    except ValueError as error:
        print(error)

def works():
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()

for each in arguments:
    refused(lambda: dist.init_process_group(**each, store=dist.HashStore(), **place))
    assert not dist.is_initialized()
    dist.init_process_group("ncclx_rs", store=dist.HashStore(), **place)
    works()
for each in arguments:
    dist.init_process_group("ncclx_rs", store=dist.HashStore(), **place)
    refused(lambda: dist.new_group([0], **each))
    works()
"""


@without_cuda_driver
def test_groups_for_cuda_are_refused_when_they_are_made() -> None:
    assert printed(REFUSED).splitlines() == [
        f"ncclx_rs: {function}: CUDA tensors are not served here: {NO_DRIVER}; "
        'give each device its backend, as in backend="cpu:ncclx_rs,cuda:nccl"'
        for function in ("init_process_group", "new_group")
        for _ in range(4)
    ]


def test_groups_that_serve_the_cpu_are_made_where_there_is_a_gpu() -> None:
    assert printed(f"{WITH_GPU}\nimport torch\n{USE}") == "works"


@without_cuda_driver
def test_cuda_stays_with_its_default_where_there_is_a_gpu_and_no_driver() -> None:
    code = f"""{WITH_GPU}
import torch.distributed as dist
print(dist.Backend.default_device_backend_map["cpu"], dist.Backend.default_device_backend_map["cuda"])
"""
    done = python(code, NCCLX_RS_DEFAULT="cpu,cuda")
    assert (done.returncode, done.stdout) == (0, "ncclx_rs nccl\n"), done.stderr
    assert (
        "ncclx_rs: set_default: CUDA tensors are not served without a CUDA driver, and stay with `nccl`" in done.stderr
    )


GROUPS = """
import torch.distributed as dist
for backend in {backends}:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    dist.new_group(backend={other!r})
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(("backends", "other", "warned"), [("(None, 'ncclx_rs')", None, 0), ("('gloo',)", "gloo", 2)])
def test_groups_of_another_backend_than_the_default_are_warned_about(backends: str, other: str, warned: int) -> None:
    program = GROUPS.format(backends=backends, other=other)
    done = python(program, NCCLX_RS_DEFAULT="cpu", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ncclx_rs was made the default for cpu tensors, and this group does not") == warned, (
        done.stderr
    )
    assert "does not run on it" not in python(program).stderr


ROCM = """
import ctypes
import torch
asked = []
def load(name, *rest, **more):
    asked.append(name)
    if name != {there!r}:
        raise OSError(name)
torch.version.cuda, torch.version.hip, ctypes.CDLL = None, "7.1", load
from ncclx_rs._gpu import has_driver
has_driver.cache_clear()
print(has_driver(), *asked)
"""


def test_a_pytorch_for_rocm_has_a_driver_where_there_is_hip() -> None:
    assert printed(ROCM.format(there="libamdhip64.so.7")) == "True libamdhip64.so.7"
    assert printed(ROCM.format(there="libcuda.so.1")) == "False libamdhip64.so.7 libamdhip64.so"


def test_a_wrong_default_is_a_warning_and_torch_loads() -> None:
    done = python("import torch; print('loaded')", NCCLX_RS_DEFAULT="tpu")
    assert done.returncode == 0 and done.stdout.strip() == "loaded"
    assert "expected one of cpu, cuda, got 'tpu'" in done.stderr
