"""The environment variables that the Python package reads: docs/configuration.md lists them, each has a test.

The engine's settings and the launchers' variables are read in Rust. Tests in src/config.rs and src/comm/launch.rs go
through the tables that the manual is generated from.
"""

from __future__ import annotations

import pickle
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import ncclx_rs
import pytest
import torch.distributed as dist
from harness import BACKEND
from ncclx_rs import CommOptions, _bootstrap, _trace, objcol
from test_rendezvous import free_port

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="ncclx_rs is not under test")

ROOT = Path(__file__).parents[2]


def test_every_variable_that_the_package_reads_is_in_a_test() -> None:
    manual = (ROOT / "docs/configuration.md").read_text()
    # What lies between these marks is generated from the tables that tests of the engine go through.
    by_hand = re.sub(r"<!-- generated: .*?<!-- end: ", "", manual, flags=re.DOTALL)
    variables = set(re.findall(r"`([A-Z][A-Z0-9]+_[A-Z0-9_]+)(?:=[^`]*)?`", by_hand))
    variables -= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}  # torchrun's own
    assert {"NCCLX_RS_LOG", "TORCHCOMM_ABORT_ON_ERROR", "TORCHCOMMS_SERIALIZATION"} <= variables
    tests = "\n".join(path.read_text() for path in sorted((ROOT / "tests/python").glob("*.py")))
    untested = {variable for variable in variables if not re.search(rf"\b{variable}\b", tests)}
    assert not untested


def test_the_method_chooses_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "8", "SLURM_PROCID": "2", "SLURM_NTASKS": "4"}.items():
        monkeypatch.setenv(name, value)
    assert _bootstrap.rank_and_size() == (1, 8)
    monkeypatch.setenv("TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD", "slurm")
    assert _bootstrap.rank_and_size() == (2, 4)
    monkeypatch.delenv("SLURM_NTASKS")
    with pytest.raises(RuntimeError, match="SLURM_PROCID is set, but SLURM_NTASKS is not"):
        _bootstrap.rank_and_size()


@pytest.mark.parametrize(("text", "expected"), [("0", False), ("No", False), ("true", True), ("Y", True), (None, True)])
def test_abort_on_error(monkeypatch: pytest.MonkeyPatch, text: str | None, expected: bool) -> None:
    if text is not None:
        monkeypatch.setenv("TORCHCOMM_ABORT_ON_ERROR", text)
    assert CommOptions().abort_process_on_timeout_or_error is expected
    assert CommOptions(abort_process_on_timeout_or_error=not expected).abort_process_on_timeout_or_error is not expected


def test_a_wrong_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHCOMM_ABORT_ON_ERROR", "perhaps")
    with pytest.raises(RuntimeError, match="TORCHCOMM_ABORT_ON_ERROR must be true or false, got 'perhaps'"):
        ncclx_rs.new_comm("ncclx", "cpu", rank=0, size=1)


def test_timeout_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CommOptions().timeout == timedelta(seconds=600)
    monkeypatch.setenv("TORCHCOMM_TIMEOUT_SECONDS", "11")
    assert CommOptions().timeout == timedelta(seconds=11)
    monkeypatch.setenv("NCCLX_RS_TIMEOUT_SECONDS", "12.5")
    assert CommOptions().timeout == timedelta(seconds=12.5)
    assert CommOptions(hints={"timeout_seconds": "13"}).timeout == timedelta(seconds=13)
    assert CommOptions(hints={"timeout_seconds": "13"}, timeout=14).timeout == timedelta(seconds=14)
    assert CommOptions(hints={"timeout_seconds": "inf"}).timeout == timedelta(days=36_600)


@pytest.mark.parametrize("text", ["10s", "0", "-1", "nan"])
def test_wrong_timeout_seconds_are_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    said = f"must be a number of seconds above 0, got '{text}'"
    with pytest.raises(ValueError, match=f"new_comm: the hint timeout_seconds {said}"):
        ncclx_rs.new_comm("ncclx", "cpu", rank=0, size=1, hints={"timeout_seconds": text})
    for variable in ("TORCHCOMM_TIMEOUT_SECONDS", "NCCLX_RS_TIMEOUT_SECONDS"):
        monkeypatch.setenv(variable, text)
        with pytest.raises(RuntimeError, match=f"new_comm: {variable} {said}"):
            ncclx_rs.new_comm("ncclx", "cpu", rank=0, size=1)


@pytest.mark.parametrize(
    ("variable", "value", "argument"),
    [
        ("TORCHCOMM_GLOO_HOSTNAME", "127.0.0.1", "hostname"),
        ("TORCHCOMM_GLOO_INTERFACE", "lo", "interface"),
    ],
)
def test_where_gloo_listens(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, argument: str) -> None:
    asked: list[dict[str, Any]] = []
    create = dist.ProcessGroupGloo.create_device

    def remembered(**arguments: Any) -> Any:
        asked.append(arguments)
        return create(**arguments)

    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", remembered)
    monkeypatch.setenv(variable, value)
    ncclx_rs.new_comm("gloo", "cpu", rank=0, size=1).finalize()
    assert asked == [{argument: value}]


def test_the_file_of_the_flight_recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("TORCH_FR_DUMP_TEMP_FILE", "TORCHCOMM_FR_DUMP_TEMP_FILE"):  # the second wins
        monkeypatch.setenv(variable, str(tmp_path / variable))
        assert str(_trace.path(3)) == str(tmp_path / f"{variable}3")
    monkeypatch.setenv("TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME", "true")
    assert str(_trace.path(3)) == str(tmp_path / "TORCHCOMM_FR_DUMP_TEMP_FILE")


def test_objects_travel_as_pickles_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with ncclx_rs.new_comm("ncclx", "cpu", rank=0, size=1) as comm:
        for chosen, is_pickle in ((None, False), ("pickle", True)):
            if chosen is not None:
                monkeypatch.setenv("TORCHCOMMS_SERIALIZATION", chosen)
            sent = objcol._to_bytes({"a": 1}, comm).numpy().tobytes()
            assert sent.startswith(b"PK") is not is_pickle  # torch.save makes a zip file
            if is_pickle:
                assert pickle.loads(sent) == {"a": 1}
            everything: list[Any] = [None]
            objcol.all_gather_object(comm, everything, {"a": 1})
            assert everything == [{"a": 1}]


@pytest.mark.parametrize(("text", "expected"), [(None, True), ("1", True), ("0", False)])
def test_the_store_is_of_the_kind_that_pytorch_takes(
    monkeypatch: pytest.MonkeyPatch, text: str | None, expected: bool
) -> None:
    monkeypatch.delenv("USE_LIBUV", raising=False)
    if text is not None:
        monkeypatch.setenv("USE_LIBUV", text)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    store = _bootstrap._root_store.__wrapped__(0, 2, timedelta(seconds=10))
    assert store.libuvBackend is expected
