"""The program `ncclx-rs`: its commands, and what `doctor` and `info` say of a host and of a launcher's ranks."""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from harness import BACKEND
from ncclx_rs import _host, info
from ncclx_rs.__main__ import COMMANDS, main
from ncclx_rs._host import Interface, Limits
from ncclx_rs._load import native
from ncclx_rs.doctor import checks, meeting
from ncclx_rs.doctor.checks import Finding, Level
from ncclx_rs.doctor.meeting import Member, compare

WATCHDOG_SECONDS = 300

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="ncclx_rs is not under test")

ROOMY = Limits(
    descriptors=1024,
    descriptors_at_most=1 << 20,
    locked_bytes=None,
    shm_free_bytes=1 << 30,
    memory_bytes=None,
    memory_used_bytes=None,
    ptrace_scope=0,
    seccomp=False,
    reads_memory=True,
    memfd=True,
)


def test_the_version_is_told_and_wrong_commands_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ncclx_rs {importlib.metadata.version('ncclx_rs')}\n"
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out.split()
    assert all(name in listed and meaning.split()[0] in listed for name, (_, meaning) in COMMANDS.items())
    assert main(["dance"]) == 2 and "'dance' (choose from " in capsys.readouterr().err
    assert main(["info", "--hosts", "9"]) == 2
    assert "ncclx-rs info: error: --hosts: expected 1 to --ranks, which is 8, got 9" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: ncclx-rs {command} ")


def test_info_tells_of_the_host_and_of_a_world(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json", "--ranks", "8", "--hosts", "2"]) == 0
    told = json.loads(capsys.readouterr().out)
    (loopback,) = (one for one in told["interfaces"] if "127.0.0.1" in one["addresses"])
    assert loopback["up"] and loopback["mtu"] > 0 and told["advertised"]
    assert told["limits"]["descriptors"] > 0
    world = told["world"]
    assert world["transports"]["between hosts"] == "TCP" and "within a host" in world["transports"]
    assert world["algorithms"]["all_reduce"] == [[0, "hierarchical"]]
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert "127.0.0.1" in text and "8 ranks on 1 host would take" in text
    gets = info.gather().world.gets
    assert gets and all(f"gets of windows {where}: {how}" in text for where, how in gets.items())


def test_the_algorithms_of_a_world_change_with_the_size() -> None:
    chosen = info.world_of(4, 1, ROOMY).algorithms["all_reduce"]
    assert chosen[0] == (0, "recursive_doubling") and chosen[-1][1] == "direct"
    assert [least for least, _ in chosen] == sorted({least for least, _ in chosen})
    alone = info.world_of(1, 1, ROOMY)
    assert alone.transports == {} and set(alone.algorithms["broadcast"]) == {(0, "local")}
    strict = info.world_of(2, 1, replace(ROOMY, ptrace_scope=2)).transports
    assert strict == {"within a host": "shared memory, two copies of long messages"}


def test_the_paths_of_gets_are_told() -> None:
    mapped = "mapped in memory of get_mem_allocator(), messages elsewhere"
    assert info.world_of(1, 1, ROOMY, "1.22.0").gets == {}
    assert info.world_of(2, 1, ROOMY).gets == {"by default": mapped}
    assert info.world_of(2, 1, replace(ROOMY, memfd=False)).gets == {"by default": "messages"}
    assert info.world_of(4, 2, ROOMY).gets == {"by default": "messages"}
    strict = replace(ROOMY, ptrace_scope=2)
    for ranks, hosts, limits, version, ways in (
        (4, 2, ROOMY, "1.22.0", "cma and RDMA devices"),
        (2, 1, ROOMY, "2.0.1", "cma and RDMA devices"),
        (2, 1, ROOMY, "1.9.3", "RDMA devices"),
        (2, 1, strict, "1.22.0", "RDMA devices"),
        (2, 2, ROOMY, "1.22.0", "RDMA devices"),
    ):
        told = info.world_of(ranks, hosts, limits, version).gets["with transport=ucx"]
        assert told == f"remote_reads through {ways}, messages elsewhere"


def test_limits_are_read_where_the_kernel_writes_them(tmp_path: Path) -> None:
    for path, content in {
        "sys/fs/cgroup/job/step/memory.max": "max",
        "sys/fs/cgroup/job/memory.max": "1000",
        "sys/fs/cgroup/job/memory.current": "990",
        "proc/self/cgroup": "0::/job/step",
        "proc/self/status": "Name:\tx\nSeccomp:\t2\n",
        "proc/sys/kernel/yama/ptrace_scope": "3",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    found = _host.limits(tmp_path)
    assert (found.memory_bytes, found.memory_used_bytes) == (1000, 990)
    assert found.seccomp and found.ptrace_scope == 3 and found.shm_free_bytes is None
    nothing = _host.limits(tmp_path / "nothing")
    assert (nothing.memory_bytes, nothing.seccomp, nothing.ptrace_scope) == (None, False, None)


def of(finding: Finding) -> tuple[Level, str]:
    """A finding's level and text; what is wrong has a remedy, and nothing else has."""
    assert bool(finding.remedy) == (finding.level is not Level.OK), finding
    return finding.level, finding.text


def unknown(name: str) -> list[str]:
    raise OSError(f"no address for {name}")


def test_the_host_name_must_not_stand_for_loopback_alone() -> None:
    level, text = of(checks.name(lambda _: ["127.0.1.1", "::1"]))
    assert level is Level.WARNING and "127.0.1.1, ::1, which no other host can reach" in text
    assert of(checks.name(unknown))[0] is Level.WARNING
    assert of(checks.name(lambda _: ["127.0.1.1", "10.0.0.1"]))[0] is Level.OK


def test_the_chosen_interface_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(*told: str, mtu: int = 1500) -> list[tuple[Level, str]]:
        monkeypatch.setattr(checks, "native", lambda: FakeNative(list(told)))
        interfaces = [Interface("lo", ["127.0.0.1"], True, 65536, None), Interface("eth0", ["10.0.0.1"], True, mtu, 10)]
        return [of(finding) for finding in checks.addresses(interfaces)]

    assert judged("127.0.0.1") == [(Level.WARNING, "lo (127.0.0.1) is taken, which no other host can reach")]
    fine = [(Level.OK, "eth0 (10.0.0.1) is taken"), (Level.OK, "eth0 has an MTU of 1500")]
    assert judged("10.0.0.1") == fine
    assert judged("10.0.0.1", mtu=576)[1] == (Level.WARNING, "eth0 has an MTU of 576")
    monkeypatch.undo()
    monkeypatch.setenv("NCCLX_RS_SOCKET_IFNAME", "nosuch0")
    (found,) = checks.addresses(_host.interfaces())
    assert of(found)[0] is Level.PROBLEM and "nosuch0" in found.text and "NCCLX_RS_SOCKET_IFNAME" in found.remedy
    assert of(checks.port())[0] is Level.PROBLEM


class FakeNative:
    """The native module of a host with these addresses."""

    def __init__(self, told: list[str]) -> None:
        self._told = told

    def advertised_addresses(self, host: str | None) -> list[str]:
        return self._told


def test_limits_are_judged() -> None:
    need = native().descriptors_of(64)
    for at_most, level in ((need - 1, Level.PROBLEM), (need, Level.WARNING), (2 * need, Level.OK)):
        assert of(checks.descriptors(replace(ROOMY, descriptors_at_most=at_most), 64))[0] is level
    assert of(checks.memory(ROOMY))[0] is Level.OK
    full = replace(ROOMY, memory_bytes=100 << 20, memory_used_bytes=95 << 20)
    assert of(checks.memory(full)) == (Level.WARNING, "95 of the control group's 100 MiB are used")
    assert of(checks.memory(replace(full, memory_used_bytes=50 << 20)))[0] is Level.OK
    assert of(checks.shared_memory(ROOMY))[0] is Level.OK
    assert of(checks.shared_memory(replace(ROOMY, memfd=False)))[0] is Level.WARNING
    assert of(checks.single_copy(replace(ROOMY, ptrace_scope=1)))[0] is Level.OK
    assert "ptrace_scope is 2" in of(checks.single_copy(replace(ROOMY, ptrace_scope=2)))[1]
    assert "process_vm_readv is refused" in of(checks.single_copy(replace(ROOMY, reads_memory=False)))[1]


def test_ranks_are_compared() -> None:
    def member(rank: int, **other: object) -> Member:
        fields = {"host": f"host{rank}", "ncclx_rs": "1", "torch": "2", "python": "3", "seconds": 100.0}
        return Member(rank=rank, addresses=[], port=1, **(fields | other))  # type: ignore[arg-type]

    def compared(*members: Member, size: int = 2) -> list[tuple[Level, str]]:
        return [of(finding) for finding in compare(members, size, 100.0, 101.0)]

    met = (Level.OK, "all 2 ranks met, on 2 hosts: host0, host1")
    assert compared(member(0), member(1)) == [met]
    absent = (Level.PROBLEM, "ranks 1, 2 did not come within 60 s")
    assert compared(member(0), size=3) == [absent]
    # What the others have found may be why.
    assert compared(member(0), member(3, unreachable=["host1"]), size=4) == [
        absent,
        (Level.PROBLEM, "rank 3 on host3 cannot reach host1"),
    ]
    assert compared(member(0), member(1, torch="9")) == [
        met,
        (Level.PROBLEM, "torch differs: 2 on ranks 0; 9 on ranks 1"),
    ]
    assert compared(member(0), member(1, unreachable=["host0 (10.0.0.1 port 5, rank 0)"])) == [
        met,
        (Level.PROBLEM, "rank 1 on host1 cannot reach host0 (10.0.0.1 port 5, rank 0)"),
    ]
    for seconds in (90.0, 111.0):
        assert compared(member(0), member(1, seconds=seconds)) == [
            met,
            (Level.WARNING, "the clock of host1 differs from rank 0's by 10 s"),
        ]
    own = [{"check": "memory", "level": "warning", "text": "little", "remedy": "buy"}]
    assert compared(member(0), member(1, findings=own), member(2, host="host1", findings=own), size=3)[1:] == [
        (Level.WARNING, "host1: little")
    ]


def a_member(rank: int, *addresses: str) -> Member:
    return Member(rank, f"host{rank}", list(addresses), 5, "1", "2", "3")


def test_all_connections_are_tried_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each attempt waits until the last one has begun, as one to a host that is cut off does.
    others = [a_member(rank, "10.0.0.1", f"10.0.1.{rank}") for rank in range(1, 9)]
    all_try = threading.Barrier(2 * len(others), timeout=WATCHDOG_SECONDS)

    def connect(place: tuple[str, int], timeout: float) -> socket.socket:
        all_try.wait()
        if place != ("10.0.1.3", 5):
            raise TimeoutError
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", connect)
    found = meeting._unreachable(a_member(0), [a_member(0, "10.0.1.0"), *others, a_member(9)])
    assert found == [
        f"host{rank} (10.0.0.1 port 5, 10.0.1.{rank} port 5, rank {rank})" for rank in range(1, 9) if rank != 3
    ]


def test_a_rank_tells_that_rank_0_has_fallen_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MEETING", timedelta(seconds=0.2))
    store = dist.HashStore()
    store.set("here0", json.dumps(asdict(a_member(0))))
    (silent,) = meeting.meet(store, 1, 2, [])
    assert silent.level is Level.PROBLEM and silent.text.startswith("rank 1 has heard nothing more of rank 0: ")


def doctor(*launcher: str, **variables: str) -> tuple[int, list[dict[str, str]]]:
    command = [*(launcher or (sys.executable, "-m")), "ncclx_rs.doctor", "--json"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
        check=False,
        env=os.environ | variables,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def test_the_doctor_looks_at_one_host() -> None:
    code, found = doctor()
    assert code == int(any(finding["level"] == "problem" for finding in found))
    assert {"host name", "interface", "file descriptors", "memory"} <= {finding["check"] for finding in found}


def test_wrong_variables_are_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = "NCCLX_RS_TIMEOUT_SECONDS is `soon`: expected a number of seconds above 0"
    with monkeypatch.context() as environment:
        environment.setenv("NCCLX_RS_TIMEOUT_SECONDS", "soon")
        assert main(["info"]) == 2
        assert f"ncclx-rs info: error: {wrong}\n" in capsys.readouterr().err
        assert main(["doctor"]) == 1
        assert capsys.readouterr().out.startswith(f"problem  settings: {wrong}\n         -> correct the variable")
    for variable in ("WORLD_SIZE", "RANK", "MASTER_PORT"):
        with monkeypatch.context() as environment:
            environment.setenv("WORLD_SIZE", "2")
            environment.setenv(variable, "x2")
            assert main(["doctor"]) == 2
            assert f"{variable} is `x2`: expected a whole number" in capsys.readouterr().err


LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--module", "--"]


def test_ranks_meet_though_their_settings_are_wrong() -> None:
    for variable, value, check in (("TIMEOUT_SECONDS", "soon", "settings"), ("SOCKET_IFNAME", "nosuch0", "interface")):
        code, found = doctor(*LAUNCHER, **{f"NCCLX_RS_{variable}": value})
        assert code == 1 and found[0]["text"].startswith("all 2 ranks met, on 1 host: ")
        (wrong,) = (finding for finding in found if finding["check"] == check)
        assert wrong["level"] == "problem" and value in wrong["text"]


def test_the_doctor_has_ranks_meet() -> None:
    _, found = doctor(*LAUNCHER)
    assert found[0]["check"] == "meeting" and found[0]["text"].startswith("all 2 ranks met, on 1 host: ")
