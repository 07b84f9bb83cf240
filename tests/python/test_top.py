"""`ncclx-rs top`, metrics for Prometheus, and completion: what a running job shows, and to whom."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import ncclx_rs
import pytest
import torch
from harness import BACKEND, WATCHDOG_SECONDS, needs
from ncclx_rs import _live, _metrics, _rates, _remote, completion, top
from ncclx_rs.__main__ import COMMANDS, main
from ncclx_rs.diagnose import Dump
from test_diagnose import collective, dump, message, of
from test_newcomers import program
from test_rendezvous import free_port

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="ncclx_rs is not under test")

SOURCES = Path(__file__).parents[2] / "src"

# ---- what a dump says of the present: a dump's time is 9 s ----


def test_a_rank_waits_for_those_that_have_not_called() -> None:
    done = collective(0, submitted=1, ended=2)
    caller = dump(0, 4, done, collective(1, "running", submitted=6_000_000), called={1: 1, 2: 2, 3: 1})
    late = dump(3, 4, done, collective(1, "queued", submitted=8_000_000), called={0: 2, 1: 1, 2: 2})
    world = of(4, caller, late)
    first, last = _rates.present(world)
    # Rank 0 has not heard yet that rank 3 has called it, and rank 3 says so itself.
    assert (first.rank, first.waits_for, first.oldest_seconds, first.in_flight) == (0, (1,), 3.0, 1)
    assert (last.rank, last.waits_for, last.oldest) == (3, (1,), "all_reduce(SUM, 4 × float32)")
    assert _rates.slowest([first, last]) == 1 and _rates.slowest([]) is None
    view = top.text([world])
    assert "communicator `main`: 2 of 4 ranks are here; most wait for rank 1" in view
    assert "all_reduce(SUM, 4 × float32) for 3.0 s, waits for 1" in view
    (one,) = json.loads(top.as_json([world]))["communicators"]
    assert (one["size"], [rank["waits_for"] for rank in one["ranks"]]) == (4, [[1], [1]])


def test_nothing_is_said_of_what_is_not_known_yet() -> None:
    def waits(submitted: int, *others: Dump) -> tuple[int, ...]:
        return _rates.present(of(3, dump(0, 3, collective(0, "running", submitted=submitted)), *others))[0].waits_for

    idle = dump(1, 3)
    assert waits(7_000_000) == (1, 2), "of ranks that are not here, only what was heard"
    assert waits(8_500_000) == () and waits(8_500_000, idle) == (1,)
    # Its dump was taken before rank 0 called.
    assert waits(8_500_000, replace(idle, time=8_400_000)) == ()


def test_clocks_of_other_hosts_are_not_compared() -> None:
    def waits(submitted: int, heard: int, clock: int) -> tuple[int, ...]:
        caller = dump(0, 2, collective(0, "running", submitted=submitted), called={1: heard})
        return _rates.present(of(2, caller, replace(dump(1, 2), host=1, time=clock)))[0].waits_for

    for clock in (1, 20_000_000):
        assert waits(7_000_000, 0, clock) == (1,)
        assert waits(8_500_000, 0, clock) == (), "the call may be news there"
        assert waits(7_000_000, 1, clock) == (), "its view is older than what was heard of it"
    called = replace(dump(1, 2, collective(0, "running", submitted=1)), host=1)
    caller = dump(0, 2, collective(0, "running", submitted=7_000_000))
    assert _rates.present(of(2, caller, called))[0].waits_for == (), "it has called, and that was not heard yet"


def test_a_message_waits_for_its_peer_and_a_lost_rank_is_told() -> None:
    (one,) = _rates.present(of(3, dump(0, 3, message("recv", 2), rank1="its process ended")))
    assert (one.waits_for, one.lost) == ((2,), (1,))
    assert "waits for 2; lost 1" in top.text([of(3, dump(0, 3, message("recv", 2), rank1="its process ended"))])


def test_rates_count_what_ended_of_late() -> None:
    old = collective(0, submitted=1_000_000, ended=1_000_100)
    recent = [collective(n, submitted=8_000_000, ended=8_000_200, read=1000, written=1000) for n in (1, 2)]
    failed = collective(3, "failed", submitted=8_500_000, ended=8_600_000)
    (one,) = _rates.present(of(2, dump(0, 2, old, *recent, failed)))
    assert (one.per_second, one.bytes_per_second, one.failed) == (2 / 5, 2 * 2000 * 4 / 5, 1)
    assert one.seconds == pytest.approx(200e-6) and one.oldest is None
    # A recorder that reaches back one second has only that second's operations.
    whole = dump(0, 2, *recent)
    (one,) = _rates.present(of(2, replace(whole, operations=100_000)))
    assert one.per_second == 2.0


def test_sizes_of_elements_are_known() -> None:
    names = ("bool", "bfloat16", "float16", "float32", "float64", "complex64", "int8", "uint16", "int64", "float8_e5m2")
    assert [_rates.item_bytes(name) for name in names] == [1, 2, 2, 4, 8, 8, 1, 2, 8, 1]
    for name in names:
        assert _rates.item_bytes(f"torch.{name}") == getattr(torch, name).itemsize
    assert _rates.item_bytes(None) == 1
    engine = (SOURCES / "types.rs").read_text()
    of_engine = re.findall(r'^    [A-Z]\w+, "([^"]+)", (\d+), \w+;', engine, re.MULTILINE)
    assert {"complex32", "16-byte elements"} <= {name for name, _ in of_engine}
    assert {name: _rates.item_bytes(name) for name, _ in of_engine} == {name: int(size) for name, size in of_engine}


# ---- the socket ----


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A process that shows its recorders, with one communicator; its socket."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("NCCLX_RS_TOP", "1")
    _live.start()
    with ncclx_rs.new_comm("ncclx", "cpu", "shown", rank=0, size=1) as comm:
        comm.all_reduce(torch.ones(4))
        yield _live.folder() / f"{os.getpid()}.sock"


def test_top_shows_the_processes_of_this_user(shown: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stat.S_IMODE(shown.stat().st_mode) == 0o600 and stat.S_IMODE(shown.parent.stat().st_mode) == 0o700
    dead = shown.with_name("1.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(dead))
    assert main(["top", "--once", "--json"]) == 0
    found = {one["communicator"]: one for one in json.loads(capsys.readouterr().out)["communicators"]}
    (rank,) = found["shown"]["ranks"]
    assert (rank["rank"], rank["process"], rank["calls"]) == (0, os.getpid(), 1)
    assert not dead.exists(), "what a dead process leaves behind is removed"
    assert main(["top", "--once"]) == 0
    assert "communicator `shown`: 1 of 1 ranks are here\n" in capsys.readouterr().out


def test_top_shows_nothing_to_other_users(
    shown: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(shown))
        assert _live.user_of(connection) == os.getuid()
    monkeypatch.setattr(_live, "user_of", lambda _: os.getuid() + 1)
    assert _live.ask(shown) == []
    assert main(["top", "--once"]) == top.NOTHING
    assert "start the job with NCCLX_RS_TOP=1" in capsys.readouterr().out
    shown.parent.chmod(0o755)
    assert main(["top", "--once"]) == 2
    assert "is not a folder that only this user can enter" in capsys.readouterr().err
    with pytest.warns(UserWarning, match="NCCLX_RS_TOP: `ncclx-rs top` will not see this process: .*only this user"):
        _live.start()
    assert main(["top", "--interval", "0"]) == 2


def test_top_looks_where_a_job_of_another_environment_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("NCCLX_RS_TOP", "1")
    _live.start()
    with ncclx_rs.new_comm("ncclx", "cpu", "elsewhere", rank=0, size=1):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "login"))
        assert main(["top", "--once"]) == 0
        assert "communicator `elsewhere`: 1 of 1 ranks are here" in capsys.readouterr().out
        (tmp_path / f"ncclx_rs-{os.getuid()}").chmod(0o755)  # as if another user had made it
        assert main(["top", "--once"]) == top.NOTHING
    told = capsys.readouterr()
    assert f"top: {tmp_path}/ncclx_rs-{os.getuid()} is not a folder that only this user can enter" in told.err
    assert f"looked in {tmp_path}/login/ncclx_rs-{os.getuid()}, " in told.out and "XDG_RUNTIME_DIR" in told.out
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setenv("SUDO_UID", "1000")
    assert {(Path("/run/user/1000/ncclx_rs-1000"), 1000), (Path("/tmp/ncclx_rs-0"), 0)} <= _live.folders().items()


def test_a_process_of_another_version_is_told_and_left_out(shown: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(str(shown.with_name("7.sock")), family=socket.AF_UNIX) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b'{"version": 0}\n')

        other = threading.Thread(target=answer)
        other.start()
        assert main(["top", "--once"]) == 0
        other.join()
    told = capsys.readouterr()
    assert "communicator `shown`" in told.out
    assert told.err == "ncclx-rs top: process 7 is left out: not a flight recorder's dump of version 5\n"


# A rank on a host of its own, which stays in its second all_reduce until a file tells rank 1 to call it too.
RANK = """
import os, pathlib, time
import torch, ncclx_rs

rank, go = int(os.environ["RANK"]), pathlib.Path(os.environ["GO"])
with ncclx_rs.new_comm("ncclx", "cpu", "far") as comm:
    comm.all_reduce(torch.ones(4))
    pathlib.Path(f"{go}.{rank}").touch()
    while rank == 1 and not go.exists():
        time.sleep(0.01)
    comm.all_reduce(torch.ones(4))
"""
# Stands for ssh: a host is a folder here.
REACH = """
import os, sys
folder, host, *command = sys.argv[1:]
if host == "nowhere":
    sys.exit("cannot resolve nowhere")
os.environ["XDG_RUNTIME_DIR"] = os.path.join(folder, host)
os.execvp(command[0], command)
"""


def test_top_shows_other_hosts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # no rank of the job is on the host of `top`
    go = tmp_path / "go"
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    job = []
    for rank in range(2):
        (tmp_path / f"node{rank}").mkdir()
        own = {"RANK": str(rank), "XDG_RUNTIME_DIR": str(tmp_path / f"node{rank}"), "NCCLX_RS_HOST_ID": f"node{rank}"}
        environment = os.environ | meeting | own | {"NCCLX_RS_TOP": "1", "GO": str(go)}
        job.append(subprocess.Popen([sys.executable, "-c", RANK], env=environment))
    reach = tmp_path / "reach.py"
    reach.write_text(REACH)
    hosts = ["--once", "--json", "--through", f"{sys.executable} {reach} {tmp_path} {{host}}", "--hosts"]
    try:
        deadline = time.monotonic() + WATCHDOG_SECONDS
        while not all(Path(f"{go}.{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline and all(rank.poll() is None for rank in job)
            time.sleep(0.05)
        while True:  # until rank 0 knows by the time that has passed that its call is no news to the other host
            assert main(["top", *hosts, "node0", "node1", "nowhere"]) == 0
            told = capsys.readouterr()
            (far,) = json.loads(told.out)["communicators"]
            if far["ranks"][0]["waits_for"] or time.monotonic() > deadline:
                break
        assert [(rank["rank"], rank["waits_for"]) for rank in far["ranks"]] == [(0, [1]), (1, [])]
        assert [rank["process"] for rank in far["ranks"]] == [rank.pid for rank in job]
        assert "host nowhere: its `ncclx-rs top` has ended with exit code 1: cannot resolve nowhere" in told.err
    finally:
        go.touch()
        assert [rank.wait(WATCHDOG_SECONDS) for rank in job] == [0, 0]


def test_mistakes_with_other_hosts_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        (("--through", "ssh"), "--through: expected a command with {host} in it, got 'ssh'"),
        (("--through", "no-such-command {host}"), "--through: .*no-such-command"),
        (("--dumps",), "--dumps: it prints the recorders of this host alone, without --hosts"),
    ):
        assert main(["top", *words, "--hosts", "node1"]) == 2
        assert re.search(told if ".*" in told else re.escape(told), capsys.readouterr().err)


def test_a_host_that_ends_or_falls_silent_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = _remote.Remote("far", ["sh", "-c", "echo one; echo; echo two; echo oops >&2; exec sleep 1000"])
    with closing(remote):
        _remote.first_views([remote])
        while not (told := remote.view(1.0))[1]:
            time.sleep(0.01)
        assert told == (["one\n"], ["oops"]), "a view that has not ended is not shown"
        assert remote.view(1.0) == (["one\n"], []), "what was said is said once"
        monkeypatch.setattr(_remote, "_LIMIT", -2.0)
        texts, (sentence,) = remote.view(1.0)
        assert not texts and sentence.startswith("nothing has come from it for ")
    while "ended" not in sentence:
        texts, (sentence,) = remote.view(1.0)
    assert not texts and "has ended with exit code -15: it did not say why" in sentence


def test_nothing_is_shown_unless_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for value in ("", "0"):
        monkeypatch.setenv("NCCLX_RS_TOP", value)
        _live.start()
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("NCCLX_RS_TOP", "yes")
    with pytest.raises(ValueError, match="NCCLX_RS_TOP must be 0 or 1, got 'yes'"):
        _live.start()


# ---- metrics ----


def test_the_address_of_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _metrics._LOCAL_RANK:
        monkeypatch.delenv(name, raising=False)

    def address(given: str, local_rank: str = "") -> tuple[str, int] | None:
        monkeypatch.setenv("NCCLX_RS_METRICS", given)
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        return _metrics.address()

    assert address("") is None
    assert address("127.0.0.1:9400") == ("127.0.0.1", 9400) and address("[::1]:9400", "3") == ("::1", 9403)
    for wrong in ("9400", ":9400", "host:", "host:many", "host:70000"):
        with pytest.raises(ValueError, match="NCCLX_RS_METRICS must be a host and a port, as in 127.0.0.1:9400"):
            address(wrong)


def test_metrics_count_ranks_of_a_host_as_each_launcher_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCLX_RS_METRICS", "127.0.0.1:9400")
    launchers = re.findall(r"local_rank: &\[([^\]]+)\]", (SOURCES / "comm" / "launch.rs").read_text())
    names = [name for names in launchers for name in re.findall(r'"(\w+)"', names)]
    assert _metrics._LOCAL_RANK == tuple(dict.fromkeys(names))
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for number, name in reversed(list(enumerate(_metrics._LOCAL_RANK))):
        monkeypatch.setenv(name, f"{number}")
        assert _metrics.address() == ("127.0.0.1", 9400 + number), "the first one counts"


def test_what_stands_in_the_way_of_metrics_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("NCCLX_RS_METRICS", "127.0.0.1:9400")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "prometheus_client", None)
        with pytest.warns(UserWarning, match=r"they need prometheus_client \(pip install prometheus_client\)"):
            _metrics.start()
    needs("prometheus_client", "metrics are served by prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("NCCLX_RS_METRICS", f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.warns(UserWarning, match="NCCLX_RS_METRICS: there are no metrics: 127.0.0.1 port .* in use"):
            _metrics.start()


JOB = """
import os, sys, urllib.request
import torch, ncclx_rs
from ncclx_rs.__main__ import main

with ncclx_rs.new_comm("ncclx", "cpu", "job") as comm:
    for _ in range(3):
        comm.all_reduce(torch.ones(4))
    if os.fork() == 0:  # shows nothing, and takes nothing from its parent
        os._exit(0)
    os.wait()
    print(urllib.request.urlopen(f"http://{os.environ['NCCLX_RS_METRICS']}/metrics").read().decode())
    main(["top", "--once"])
"""


def test_a_job_shows_itself_and_its_metrics(tmp_path: Path) -> None:
    needs("prometheus_client", "metrics are served by prometheus_client")
    variables = {"NCCLX_RS_TOP": "1", "NCCLX_RS_METRICS": f"127.0.0.1:{free_port()}", "XDG_RUNTIME_DIR": str(tmp_path)}
    done = program(JOB, **variables)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if 'communicator="job"' in line]
    assert any(line.startswith("ncclx_rs_operations_total{") and line.endswith(" 3.0") for line in told), told
    assert any(line.startswith("ncclx_rs_in_flight{") and line.endswith(" 0.0") for line in told), told
    assert "communicator `job`: 1 of 1 ranks are here" in done.stdout
    assert not list(tmp_path.glob("*/*.sock")), "the socket goes with its process"
    refused = program(JOB, **{**variables, "NCCLX_RS_METRICS": "nowhere"})
    assert "NCCLX_RS_METRICS must be a host and a port" in refused.stderr


# ---- completion ----


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ncclx-rs di", ["diagnose"]),
        ("ncclx-rs top --on", ["--once"]),
        ("ncclx-rs info ''", []),
        ("ncclx-rs to", ["top"]),
    ],
)
def test_bash_completes_commands_and_options(
    line: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = line.split()
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    script += f'COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _ncclx_rs; echo "${{COMPREPLY[*]}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == expected


def test_other_shells_know_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 0
    fish = capsys.readouterr().out
    assert all(f"-a {name} -d " in fish for name in COMMANDS)
    assert "complete -c ncclx-rs -n '__fish_seen_subcommand_from top' -l once -d 'show one view and end'" in fish
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("autoload -U +X compinit bashcompinit\n")
    assert r"-d 'a\'b'" in completion.fish({"x": ("a'b", {})})
    assert main(["completion", "csh"]) == 2
