"""PyTorch's own test suite for backends, from the installed version, on the backend that `BACKEND` names.

The suite knows the names of PyTorch's backends only, and asks by name what a backend can do. Here the name under test
answers to "gloo" as well, so that it has to do all that gloo does; what reaches `init_process_group` is the real name.
With the software CUDA preloaded it answers to "nccl" instead, and the tests run that cuda.txt names. See
docs/acceptance.md.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from unittest import mock

os.environ.setdefault("BACKEND", "ncclx_rs")
os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("TEMP_DIR", tempfile.gettempdir())
# Spawned ranks import this file again and get the real one from their parent.
os.environ.setdefault("INIT_METHOD", f"file://{tempfile.gettempdir()}/ncclx_rs_acceptance")
# Without it, to ask for GPUs while the suite is loaded would set CUDA up, which no forked process could use then.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch  # noqa: F401 - registers backends
from torch.testing._internal import common_distributed, common_utils
from torch.testing._internal.common_distributed import DistTestCases

# Also all_to_all on CPU, which the suite keeps for MPI, and from three ranks on what it keeps for eight.
EXTRA = os.environ.get("EXTRA", "0") == "1"
ON_CUDA = "libcuda.so.1" in os.environ.get("LD_PRELOAD", "")
# The backend of PyTorch's own whose tests apply.
POSE = "nccl" if ON_CUDA else "gloo"
MPI_ONLY = ("Only MPI supports CPU all_to_all_single", "Only MPI supports all_to_all")


class Posing(str):
    """A backend's name that is equal to `POSE` too."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == POSE

    def __ne__(self, other: object) -> bool:
        return not self == other

    # Equal values have equal hashes; members of sets that hold the other name are found.
    __hash__ = POSE.__hash__


@contextlib.contextmanager
def extra_tests():
    """Has the suite keep the tests that `EXTRA` asks for, while it is imported."""
    skip_if = common_utils.skip_but_pass_in_sandcastle_if

    def skip_unless_wanted(condition, reason):
        return skip_if(condition and not (EXTRA and reason in MPI_ONLY), reason)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(common_utils, skip_if.__name__, skip_unless_wanted))
        if EXTRA and int(os.environ["WORLD_SIZE"]) >= 3:
            patches.enter_context(mock.patch.object(common_distributed, "skip_if_small_worldsize", lambda test: test))
        yield


def load_suite():
    """Imports the suite such that it reads the backend's name as `Posing`."""
    name = os.environ["BACKEND"]
    if name != "gloo":
        for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
            DistTestCases.backend_feature[feature].add(name)
    environment = type(os.environ)
    look_up = environment.__getitem__

    def posing(self, key: str) -> str:
        value = look_up(self, key)
        return Posing(value) if key == "BACKEND" and value != "gloo" else value

    with mock.patch.object(environment, "__getitem__", posing), extra_tests():
        from torch.testing._internal.distributed import distributed_test
    if name != "gloo":
        distributed_test.CUDA_PROFILING_SUPPORTED_BACKENDS.append(name)
        distributed_test.PROFILING_SUPPORTED_BACKENDS.append(name)
        distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(name)
    return distributed_test


suite = load_suite()


class TestBackend(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    """The suite, with a process a rank."""

    def setUp(self) -> None:
        super().setUp()
        if ON_CUDA:
            self._start_processes(forked_process)
        else:
            self._spawn_processes()

    @classmethod
    def _run(cls, *arguments: object, environment: dict[str, str] | None = None, **named: object) -> None:
        if environment is not None:
            import fallback

            os.environ.update(environment)
            fallback.install()
        super()._run(*arguments, **named)


def forked_process(**named):
    """A process of a server that has PyTorch loaded: the suite's own take seconds each to load it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch._dynamo", "torch.distributed.fsdp", "torch.testing._internal.common_distributed"]
    )
    # The server has the environment of the first test.
    named["kwargs"]["environment"] = dict(os.environ)
    return context.Process(**named)
