"""Handlers of the worker server that PyTorch's debug server asks for flight recorders.

The pages "TorchComms FR" and "TorchComms Health" call every worker's handlers by torchcomms' names.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
from typing import Any

from torch._C import _distributed_c10d as c10d

from ncclx_rs import _trace
from ncclx_rs._alias import is_installed
from ncclx_rs._load import native
from ncclx_rs.diagnose import dumps, pytorch


def register() -> None:
    """Registers the handlers with this process's worker server, if this PyTorch has one. Called once a process.

    If torchcomms is installed, its own handlers stay: it would end the process if their names were taken.
    """
    if not hasattr(c10d, "_register_handler") or (not is_installed() and importlib.util.find_spec("torchcomms")):
        return
    handlers = {
        "torchcomms_fr_trace_json": _fr_trace_json,
        "torchcomms_fr_dump_file": _fr_dump_file,
        "torchcomms_health_check": _health_check,
    }
    for name, handler in handlers.items():
        # PyTorch drops handlers after the interpreter's end, when no Python object may be freed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(handler))
        c10d._register_handler(name, handler)


def _own_dumps() -> list[dumps.Dump]:
    return [dumps.parse(text) for text in native().dumps("the debug server")]


def _fr_trace_json(request: Any, response: Any) -> None:
    only_active = request.get_param("onlyactive") == "true"
    trace = pytorch.trace(_own_dumps(), include_completed=not only_active)
    if request.get_param("includecollectives") == "false":
        del trace["entries"]
    _answer(response, trace)


def _fr_dump_file(request: Any, response: Any) -> None:
    own = _own_dumps()
    if not own:
        response.set_status(503)
        response.set_content("there is no communicator", "text/plain")
        return
    path = _trace.path(pytorch.rank(own[0]))
    _trace.write(pytorch.trace(own), path)
    response.set_status(200)
    response.set_content(f"wrote {path}", "text/plain")


def _health_check(request: Any, response: Any) -> None:
    failed = any(record.state == "failed" for dump in _own_dumps() for record in dump.records)
    _answer(response, {"healthy": not failed})


def _answer(response: Any, content: Any) -> None:
    response.set_status(200)
    response.set_content(json.dumps(content), "application/json")
