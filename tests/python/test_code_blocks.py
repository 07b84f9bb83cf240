"""Every block of code in the documents is run or, where it takes another machine or hours, looked at word by word.

Whole programs and the tutorials have tests of their own (`test_docs.py`, `test_tutorials.py`), as has what is in Rust
(`cargo test --doc`). Here are the parts of programs, each with what the text around it takes for granted, the commands
and the files. A block that nothing here knows fails.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import ncclx_rs
import pytest
import torch.distributed as dist
import torch.distributed.run
from harness import BACKEND, lacking
from ncclx_rs.__main__ import main, parser
from test_docs import COMMAND, DOCUMENTS, ROOT, blocks, printed_by
from test_rendezvous import free_port

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="the documents are those of ncclx_rs")

WATCHDOG_SECONDS = 240
# The languages of blocks. What has none is a picture or what a program prints.
LANGUAGES = {"", "json", "python", "rust", "rust,no_run", "sh", "toml", "yaml"}


def without_tutorials(language: str) -> list[tuple[str, str]]:
    """The blocks in a language. Each block of a tutorial is run by `test_tutorials.py`, which checks that it is."""
    return [(document, code) for document, code in blocks(language) if not document.startswith("docs/tutorials/")]


def test_every_block_has_a_language_that_is_tested() -> None:
    found = {language for text in DOCUMENTS.values() for language in re.findall(r"^ *```(.*)$", text, re.MULTILINE)}
    assert found == LANGUAGES
    # The blocks of Rust are documentation of the crate, which `cargo test --doc` runs.
    library = (ROOT / "src/lib.rs").read_text()
    assert all(f'include_str!("../{document}")' in library for document, _ in blocks("rust") + blocks("rust,no_run"))
    assert {document for document, _ in blocks("yaml")} == {"docs/tutorials/kubernetes.md"}


@dataclass(frozen=True)
class Part:
    """A part of a program.

    Attributes:
        document: where it is.
        begins: how its text begins.
        before: what the text around it takes for granted.
        after: what the program does next: it sees that the part has done what the text says.
        ranks: how many ranks run it; without any, a process that nothing has launched.
        launched: whether it takes processes of its own.
    """

    document: str
    begins: str
    before: str = ""
    after: str = ""
    ranks: int = 2
    launched: bool = False

    def __str__(self) -> str:
        return f"{self.document}:{self.begins}"


COMM = """
import ncclx_rs, torch
comm = ncclx_rs.new_comm("ncclx", "cpu", name="main")
"""

PARTS = [
    Part(
        "README.md",
        'dist.init_process_group("ncclx_rs")\nfully_shard',
        """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
model = torch.nn.Linear(4, 4)
""",
        """
assert isinstance(model, FSDPModule)
model(torch.ones(2, 4)).sum().backward()
dist.destroy_process_group()
""",
    ),
    Part(
        "docs/backends.md",
        "class Quiet(",
        "import ncclx_rs",
        """
ncclx_rs.register_backend("quiet", Quiet)
with ncclx_rs.new_comm("quiet", "cpu") as comm:
    assert (comm.size, comm.get_backend()) == (2, "Quiet")
    comm.barrier()
""",
    ),
    Part(
        "docs/diagnosis.md",
        "from torch.distributed.debug",
        """
import torch, torch.distributed as dist
dist.init_process_group("ncclx_rs")
""",
        """
import time
from urllib.error import URLError
from urllib.request import urlopen

def page(name):
    while True:  # the server is a process that starts by and by
        try:
            return urlopen(f"http://localhost:25999/{name}", timeout=60).read().decode()
        except URLError:
            time.sleep(0.1)

seen = dist.distributed_c10d._get_default_store()
work = dist.all_reduce(torch.ones(5), async_op=True) if dist.get_rank() == 0 else None
if work is not None:
    assert "ncclx:all_reduce" in page("torchcomms_fr_trace")
    seen.set("seen", "yes")
else:
    seen.wait(["seen"])
    dist.all_reduce(torch.ones(5))
dist.barrier()
dist.destroy_process_group()
""",
        launched=True,
    ),
    Part(
        "docs/hooks.md",
        "recorder = FlightRecorderHook()",
        COMM + "from ncclx_rs.hooks import FlightRecorderHook",
        """
comm.all_reduce(torch.ones(3))
assert "all_reduce" in recorder.dump_json()
comm.finalize()
""",
    ),
    Part(
        "docs/inference.md",
        "import torch\n",
        after="""
assert tensor.eq(2).all()
dist.destroy_process_group()
""",
    ),
    Part("docs/migration.md", "import ncclx_rs as torchcomms", ranks=0),
    Part(
        "docs/object_api.md", "import ncclx_rs as torchcomms", after="torchcomms.new_comm, torchcomms.ReduceOp", ranks=0
    ),
    Part(
        "docs/nccl.md",
        "import ncclx_rs, torch\n\n# On ranks",
        after="assert gradients.tolist() == [2.0] * 1000; comm.finalize()",
    ),
    Part(
        "docs/object_api.md",
        'comm = ncclx_rs.new_comm("ncclx", torch.device("cpu")',
        "import ncclx_rs, torch",
        "assert comm.size == 2; comm.finalize()",
    ),
    Part(
        "docs/object_api.md",
        "comm.all_reduce(tensor)  # a sum",
        COMM + "tensor = torch.full((2,), comm.rank + 1.0)",
        """
work.wait()
assert tensor.tolist() == [3.0, 3.0]
comm.finalize()
""",
    ),
    Part(
        "docs/object_api.md",
        "transport = ncclx_rs.RdmaTransport",
        COMM
        + """
import pickle
from datetime import timedelta
tensor = torch.full((1024,), float(comm.rank))

def send(message):
    global received
    both = [None, None]
    ncclx_rs.objcol.all_gather_object(comm, both, message)
    received = both[1 - comm.rank]

def receive():
    return received
""",
        """
assert transport.connected()
comm.barrier()
memory.deregister()
comm.finalize()
""",
    ),
    Part(
        "docs/object_api.md",
        "@torch.compile",
        COMM,
        """
summed = forward(torch.ones(2, 2), torch.ones(2, 2))
assert summed.tolist() == [[5.0, 5.0]] * 2, summed
comm.finalize()
""",
    ),
    Part(
        "docs/object_api.md",
        'comm = ncclx_rs.new_comm("ncclx", "cpu")\ntensor',
        "import ncclx_rs, torch",
        """
assert tensor.tolist() == [2.0] * 4 and summed.tolist() == [4.0] * 4
comm.finalize()
""",
    ),
    Part(
        "docs/programs.md",
        'dist.init_process_group("ncclx_rs", store=store',
        """
import os
import torch, torch.distributed as dist
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, rank == 0)
""",
        """
tensor = torch.ones(2)
dist.all_reduce(tensor)
assert tensor.tolist() == [2.0, 2.0]
dist.destroy_process_group()
""",
    ),
]
# What takes a GPU, and the test that runs it on the software CUDA.
OF_CUDA = {
    ("docs/object_api.md", "pool = torch.cuda.MemPool("): (
        "tests/cuda_python/test_cuda_windows.py",
        "the_documents_pool",
    )
}


def code_of(document: str, begins: str) -> str:
    (code,) = (code for where, code in without_tutorials("python") if where == document and code.startswith(begins))
    return code


def test_every_part_of_a_program_is_run() -> None:
    known = {(part.document, code_of(part.document, part.begins)) for part in PARTS}
    for (document, begins), (file, test) in OF_CUDA.items():
        known.add((document, code_of(document, begins)))
        assert f"def test_{test}(" in (ROOT / file).read_text(), f"{file} does not run it"
    found = {(document, code) for document, code in without_tutorials("python") if not COMMAND.match(code)}
    assert found == known


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_part_of_a_program_runs(part: Part, tmp_path: Path) -> None:
    if "_get_reconfigure_handle" in code_of(part.document, part.begins) and not hasattr(
        dist, "_get_reconfigure_handle"
    ):
        pytest.skip("this PyTorch has no such groups")
    program = f"{part.before}\n{code_of(part.document, part.begins)}\n{part.after}\nprint('done')\n"
    if not part.launched:
        printed = printed_by(program, part.ranks, tmp_path)
        assert all(text.endswith("done\n") for text in printed) and len(printed) == max(part.ranks, 1), printed
        return
    if importlib.util.find_spec("torch.distributed.debug") is None:
        pytest.skip("this PyTorch has no such server")
    if not socket.has_dualstack_ipv6():
        lacking("PyTorch's servers need IPv6")
    script = tmp_path / "program.py"
    script.write_text(program.replace("25999", str(free_port())))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(part.ranks))
    done = subprocess.run((*torchrun, script), capture_output=True, text=True, timeout=WATCHDOG_SECONDS, check=False)
    assert done.returncode == 0 and done.stdout.count("done") == part.ranks, done.stdout + done.stderr


# Programs that are the reader's own.
READERS = {"first.py", "program.py", "train.py"}
# Commands of the system and of other programs, with nothing of ours in their words.
OF_OTHERS = {".", "cargo", "export", "kubectl", "pip", "pkill", "rustup"}


def looked_at(document: str, line: str) -> None:
    """Looks at the words of a command: the files, modules, targets and options that it names exist."""
    words = shlex.split(line, comments=True)
    while words and re.match(r"[A-Z][A-Za-z0-9_]*=", words[0]):
        words = words[1:]
    if not words:
        return
    program, *rest = words
    if program == "make":
        makefile = (ROOT / "Makefile").read_text()
        for word in rest:
            name = word.partition("=")[0]
            built = "$(call installed," in makefile and re.fullmatch(r"\.venv/\.installed-[\d.]+", name)
            assert built or re.search(rf"^{name}:|^{name} [?:]?=|\$\({name}\)", makefile, re.MULTILINE), (
                document,
                word,
            )
    elif program == "ncclx-rs":
        parser(rest[0])[0].parse_args(rest)
    elif program == "source":
        assert line.startswith("source <(ncclx-rs completion bash)")
    elif program == "torchrun":
        rest = [word for word in rest if word != "..."]  # what is left to the reader
        options = torch.distributed.run.get_args_parser().parse_args(rest)
        module = options.module or "--module" in rest
        runs(document, options.training_script, module)
        if options.training_script.startswith("ncclx_rs") and options.training_script_args[:1] == ["tune"]:
            parser("tune")[0].parse_args(options.training_script_args)
    elif program in ("python", "python3"):
        runs(document, rest[1] if rest[0] == "-m" else rest[0], rest[0] == "-m")
    else:
        assert program in OF_OTHERS, f"{document}: nobody knows what this does: {line}"
        for package in re.findall(r"--package (\w+)", line):
            assert re.search(rf'^name = "{package}"$', manifests(), re.MULTILINE), (document, package)


def runs(document: str, script: str, is_module: bool) -> None:
    """Looks at what a command runs: a module, or a file of the repository or of the reader."""
    if is_module:
        # Those of other packages are where these are.
        there = script.partition(".")[0] == "torchtitan" or importlib.util.find_spec(script) is not None
    else:
        there = script in READERS or (ROOT / script).is_file() or (ROOT / script).is_dir()
    assert there, f"{document}: there is no {script}"


def manifests() -> str:
    return "\n".join(
        (ROOT / folder / "Cargo.toml").read_text() for folder in (".", "examples/quantized_backend", "backend_api")
    )


def lines_of(code: str) -> list[str]:
    return [line.partition(" | ")[0] for line in code.replace("\\\n", " ").splitlines()]


def test_what_commands_name_exists() -> None:
    seen = 0
    for document, code in without_tutorials("sh"):
        for line in lines_of(code):
            looked_at(document, line)
            seen += 1
    assert seen > 50


def cluster() -> str:
    """The parameters that docs/scale.md writes down."""
    ((_, code),) = (block for block in without_tutorials("json") if "within_host" in block[1])
    return code


# What takes seconds. The others run in the tests of the command, in smaller worlds.
QUICK = [
    (document, line)
    for document, code in without_tutorials("sh")
    for line in lines_of(code)
    if line.startswith(("ncclx-rs info", "ncclx-rs completion", "ncclx-rs doctor"))
    or (line.startswith("ncclx-rs simulate --parameters cluster.json") and ",128" not in line)
]


@pytest.mark.parametrize(("document", "line"), QUICK, ids=[line.partition("  ")[0] for _, line in QUICK])
def test_a_command_of_a_document_runs(
    document: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cluster.json").write_text(cluster())
    code = main(shlex.split(line, comments=True)[1:])
    assert code == 0 or (code == 1 and "doctor" in line), f"{document}: {line}"
    assert capsys.readouterr().out


def test_files_in_documents_are_read(tmp_path: Path) -> None:
    for document, code in without_tutorials("json"):
        file = tmp_path / "file.json"
        file.write_text(code)
        if "within_host" in code:
            continue  # test_a_command_of_a_document_runs takes it
        assert json.loads(code)["rows"], document
        with ncclx_rs.new_comm("ncclx", "cpu", rank=0, size=1, hints={"tuning_file": str(file)}) as comm:
            comm.barrier()
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    for document, code in blocks("toml"):
        ((group, entries),) = tomllib.loads(code)["project"]["entry-points"].items()
        source = (ROOT / "torch_plugin/python/ncclx_rs/_backends.py").read_text()
        assert f'"{group}"' in source and '"torchcomms.backends"' in source and entries, document


def test_a_block_that_nobody_knows_is_found() -> None:
    for line in ("make nothing", "frobnicate now", "python -m ncclx_rs.nothing", "torchrun examples/nothing.py"):
        with pytest.raises((AssertionError, SystemExit)):
            looked_at("a document", line)
