"""The tutorials: each program and each command of docs/tutorials runs, on machines and schedulers that are posed.

A block of code whose first line, but for `#!`, is a comment with a file's name is that file. Every other block of shell
is run, line by line. Two machines are two shells on this one, whose ranks take each other for other hosts'. Slurm's and
Kubernetes' commands are small programs, which start processes as these do. The tutorial in Rust is run by
`cargo test --doc`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import BACKEND, needs
from test_newcomers import LAUNCHED
from test_rendezvous import free_port

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="the documents are those of ncclx_rs")

TUTORIALS = Path(__file__).parents[2] / "docs/tutorials"
WATCHDOG_SECONDS = 240
SUMS = "[3.0, 3.0, 3.0, 3.0]"


class Tutorial:
    """A page's files, written to a folder, and its commands."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.files: list[str] = []
        self.commands: list[str] = []
        text = (TUTORIALS / f"{name}.md").read_text()
        for language, code in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            file = re.match(r"(?:#!.*\n)?# (\w+\.(?:py|sh|yaml))\n", code)
            code = self.here(code)
            if file:
                self.files.append(file[1])
                (folder / file[1]).write_text(code)
            elif language == "sh":
                self.commands += code.splitlines()
            else:
                raise AssertionError(f"{name}: nobody runs this: {code}")

    def here(self, code: str) -> str:
        """A block of code with this machine's address and a free port."""
        return code.replace("HOST ", "127.0.0.1 ").replace("29500", str(self.port))

    def start(self, command: str, machine: str = "", **variables: str) -> subprocess.Popen[str]:
        """Starts a command in a shell of a machine."""
        bin = self.folder / "bin"
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
        environment |= {"PATH": f"{bin}:{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        if machine:
            environment["NCCLX_RS_HOST_ID"] = machine
        return subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.folder,
            env=environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *started: subprocess.Popen[str]) -> list[str]:
        """What commands print that have to succeed."""
        try:
            printed = [process.communicate(timeout=WATCHDOG_SECONDS)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        everything = "\n----\n".join(printed)
        for process in started:
            assert process.returncode == 0, f"{process.args}: exit code {process.returncode}\n{everything}"
        return printed

    def program(self, name: str, code: str) -> None:
        """Puts a program into the machine's path."""
        file = self.folder / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!{sys.executable}\n{code}")
        file.chmod(0o700)


def test_fsdp2_on_two_machines(tmp_path: Path) -> None:
    page = Tutorial("fsdp2_two_machines", tmp_path)
    assert len(page.commands) == 4
    pairs = list(zip(page.commands[::2], page.commands[1::2], strict=True))
    results = [page.run(*(page.start(command, f"machine{i}") for i, command in enumerate(pair))) for pair in pairs]
    for text in results[1]:
        assert re.search(r"rank \d of 2: loss", text), text
    losses = {match for text in results[1] for match in re.findall(r"loss ([\d.]+) -> ([\d.]+)", text)}
    assert len(losses) == 1, results
    ((first, last),) = losses
    assert float(last) < float(first) / 2


# Starts a task on each of two nodes, as Slurm does.
SRUN = """
import os, subprocess, sys

def variables(rank):
    return {"SLURM_PROCID": f"{rank}", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NNODES": "2",
            "SLURM_NODEID": f"{rank}", "NCCLX_RS_HOST_ID": f"node{rank}"}

tasks = [subprocess.Popen(sys.argv[1:], env={**os.environ, **variables(rank)}) for rank in range(2)]
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """
import sys
assert sys.argv[1:] == ["show", "hostnames", "node[0-1]"], sys.argv
print("127.0.0.1", "node1", sep=chr(10))
"""
SBATCH = """
import os, sys
os.execvpe("bash", ["bash", "-e", sys.argv[1]], {**os.environ, "SLURM_JOB_NODELIST": "node[0-1]"})
"""


def test_slurm(tmp_path: Path) -> None:
    page = Tutorial("slurm", tmp_path)
    for name, code in (("srun", SRUN), ("scontrol", SCONTROL), ("sbatch", SBATCH)):
        page.program(name, code)
    assert page.commands == ["sbatch job.sh"]
    assert page.files == ["job.sh", "train.py", "torchrun.sh", "first.py"]
    (job,) = page.run(page.start(page.commands[0]))
    (torchrun,) = page.run(page.start("sbatch torchrun.sh"))
    for rank in range(2):
        for line in ("process group", "communicator"):
            assert f"{line}: rank {rank} of 2: {SUMS}" in job, job
        assert f"torchrun: rank {rank} of 2: {SUMS}" in torchrun, torchrun


# Keeps a secret, and runs the pods of a job with what their manifest gives them.
KUBECTL = """
import os, pathlib, subprocess, sys, yaml

if sys.argv[1:4] == ["create", "secret", "generic"]:
    name, literal = sys.argv[4:]
    key, value = literal.removeprefix("--from-literal=").split("=")
    pathlib.Path(f"secret-{name}-{key}").write_text(value)
    sys.exit()
assert sys.argv[1:3] == ["apply", "-f"], sys.argv
service, job = yaml.safe_load_all(open(sys.argv[3]))
assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
name, spec = job["metadata"]["name"], job["spec"]
pod = spec["template"]["spec"]
assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": name}
assert pod["subdomain"] == service["metadata"]["name"] and pod["restartPolicy"] == "Never"
assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
(container,) = pod["containers"]
address = f"{name}-0.{pod['subdomain']}"
assert f"--master-addr {address} " in container["args"][0]
assert f"--nnodes {spec['completions']} " in container["args"][0]
command = [*container["command"], container["args"][0].replace(address, "127.0.0.1")]

def value(variable):
    if "value" in variable:
        return variable["value"]
    reference = variable["valueFrom"]["secretKeyRef"]
    return pathlib.Path(f"secret-{reference['name']}-{reference['key']}").read_text()

given = {**os.environ, **{variable["name"]: value(variable) for variable in container["env"]}}
assert len(given["NCCLX_RS_JOB_SECRET"]) == 64 and given["NCCLX_RS_TLS"] == "on"
pods = [
    subprocess.Popen(command, env={**given, "JOB_COMPLETION_INDEX": f"{i}", "NCCLX_RS_HOST_ID": f"pod{i}"})
    for i in range(spec["completions"])
]
sys.exit(max(pod.wait() for pod in pods))
"""


def test_kubernetes(tmp_path: Path) -> None:
    needs("yaml", "the manifest is read with PyYAML")
    page = Tutorial("kubernetes", tmp_path)
    page.program("kubectl", KUBECTL)
    assert len(page.commands) == 2 and page.files == ["job.yaml", "train.py"]
    printed = [page.run(page.start(command))[0] for command in page.commands]
    for rank in range(2):
        assert f"rank {rank} of 2: {SUMS}" in printed[-1], printed


def test_elastic_training(tmp_path: Path) -> None:
    page = Tutorial("elastic", tmp_path)
    restarted, shrunk = (page.run(page.start(command))[0] for command in page.commands)
    for rank in range(2):
        for line in ("restart 0 begins with step 0", "restart 1 begins with step 2", "4 steps, total 8.0"):
            assert f"rank {rank}: {line}" in restarted, restarted
    for rank in range(3):
        assert f"rank {rank} of 3: [3.0, 3.0, 3.0, 3.0]" in shrunk, shrunk
    for rank in range(2):
        assert re.search(rf"rank {rank}: .*rank 2", shrunk), shrunk
        assert f"rank {rank} of 2: [2.0, 2.0, 2.0, 2.0]" in shrunk, shrunk


def test_every_tutorial_is_tried() -> None:
    tried = set(re.findall(r'Tutorial\("(\w+)"', Path(__file__).read_text()))
    of_rust = {"algorithm"}
    assert {page.stem for page in TUTORIALS.glob("*.md")} == tried | of_rust
    library = (TUTORIALS.parents[1] / "src/lib.rs").read_text()
    code = (TUTORIALS / "algorithm.md").read_text()
    assert 'include_str!("../docs/tutorials/algorithm.md")' in library
    assert re.findall(r"^```(.+)$", code, re.MULTILINE) == ["rust"]
