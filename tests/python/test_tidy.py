"""The rules of the package's sources that no linter knows."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[2] / "torch_plugin"
Graph = dict[str, set[str]]

# The package's floors, the lowest first: a module uses only modules of lower ones.
FLOORS = [
    # What needs nothing of the package.
    """_alias _gpu _graph_gradients _load _logging _once _operands _persistent _remote _trace _tracing _types __main__
    distwrap functional bench bench.operations bench.progress diagnose.dumps doctor""",
    # One thing each: works, memory, hosts, what users get wrong.
    """_backend_class _bootstrap _host _live _memory _mistakes _rates _reconfigure _take_over _transport _work
    completion bench.device diagnose.links diagnose.perfetto diagnose.processes diagnose.pytorch diagnose.troubles
    hooks._ring_buffer hooks._signature""",
    # What a backend has beside it: batches, hooks, dumps, metrics, libraries.
    """_alone _batch _debug_server _dump _hooks _library _metrics _pytorch_recorder _vendor
    bench.link bench.measure diagnose.analyze doctor.checks top""",
    # The backend of process groups, and what graphs know.
    "_backend _c10d_hook_args _graph_state bench.launch bench.report diagnose.across diagnose.report doctor.meeting",
    # All backends by name; operators.
    "_autoload _backends _graph_operators bench.plot diagnose diagnose.__main__ doctor.__main__ info",
    "_graph as_torchcomms bench.__main__ torchft",
    # Communicators: their operations, their windows, they themselves.
    "_operations bench.tune",
    "_window bench.simulate",
    "_comm",
    # What makes them and stands on them.
    "_torchcomms_operators _wrapper hooks._observer hooks.nan_check objcol",
    "_new_comm device_mesh hooks.clog hooks.fr hooks.timeline",
    "_api hooks",
]


def python_modules() -> dict[str, Path]:
    """The package's files by module name; a package is its ``__init__.py``."""
    root = PLUGIN / "python"
    names = ((path.relative_to(root).with_suffix("").parts, path) for path in root.rglob("*.py"))
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for parts, path in names}


def imported(module: str, path: Path) -> Iterator[tuple[str, str]]:
    """The modules and names that a file imports, also inside functions and only for type checkers."""
    package = module.split(".") if path.stem == "__init__" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((source, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            if isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value), ""


def python_imports() -> Graph:
    modules = python_modules()
    graph: Graph = {}
    for module, path in modules.items():
        found = ((f"{source}.{name}", source) for source, name in imported(module, path))
        graph[module] = {whole if whole in modules else source for whole, source in found if source in modules}
    return graph


def rust_uses() -> Graph:
    """For each module of the extension, the modules whose items it names; the crate's root is ``lib``."""
    root = PLUGIN / "src"
    files = {
        path.relative_to(root).with_suffix("").as_posix().removesuffix("/mod"): path for path in root.rglob("*.rs")
    }
    graph: Graph = {}
    for module, path in files.items():
        code = "\n".join(line.split("//")[0] for line in path.read_text().splitlines())
        own, above = f"{module}/".removeprefix("lib/"), f"{module.rpartition('/')[0]}/".lstrip("/")
        named = [own + name for name in re.findall(r"^mod (\w+);", code, re.MULTILINE)]
        for start, group, name in re.findall(r"\b(crate|super)::(?:\{([^}]*)\}|(\w+))", code):
            names = re.findall(r"\w+", group) or [name]
            named += [("" if start == "crate" else above) + name for name in names]
        # A name of no file is an item of the module itself.
        graph[module] = {name if name in files else name.rpartition("/")[0] or "lib" for name in named}
    return graph


def test_the_walk_sees_imports() -> None:
    graph = python_imports()
    assert "ncclx_rs._api" in graph["ncclx_rs"], "an import by name"
    assert "ncclx_rs._types" in graph["ncclx_rs._work"]
    assert rust_uses()["abi"] == {"abi/entry", "abi/memory", "convert", "logging", "shim", "stack"}
    assert rust_uses()["library/instance"] == {"library/store"}


@pytest.mark.parametrize("graph", [python_imports, rust_uses])
def test_no_file_needs_itself(graph: Callable[[], Graph]) -> None:
    try:
        graphlib.TopologicalSorter(graph()).prepare()
    except graphlib.CycleError as error:
        # The next module imports the one before.
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_modules_use_only_what_stands_below_them() -> None:
    graph = python_imports()
    floors = {f"ncclx_rs.{name}": number for number, names in enumerate(FLOORS) for name in names.split()}
    floors["ncclx_rs"] = len(FLOORS)
    assert floors.keys() == graph.keys(), "each module has a floor"
    wrong = [f"{module} uses {used}" for module in graph for used in graph[module] if floors[used] >= floors[module]]
    assert wrong == []
