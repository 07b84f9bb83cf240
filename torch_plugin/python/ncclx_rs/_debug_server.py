"""The engine's flight recorder behind the worker server of PyTorch's debug server.

Its pages "TorchComms FR" and "TorchComms Health" ask every worker by names that torchcomms has given them.
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
    """Has this process's worker server answer, where this PyTorch has one. Called once a process.

    Where torchcomms is there, its own recorder answers: it would end the process if somebody else did.
    """
    if not hasattr(c10d, "_register_handler") or (not is_installed() and importlib.util.find_spec("torchcomms")):
        return
    handlers = {
        "torchcomms_fr_trace_json": _fr_trace_json,
        "torchcomms_fr_dump_file": _fr_dump_file,
        "torchcomms_health_check": _health_check,
    }
    for name, handler in handlers.items():
        # PyTorch lets go of handlers after the interpreter's end, when nothing of Python's may be freed any more.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(handler))
        c10d._register_handler(name, handler)


def _own() -> list[dumps.Dump]:
    return [dumps.parse(text) for text in native().dumps("the debug server")]


def _fr_trace_json(request: Any, response: Any) -> None:
    only_active = request.get_param("onlyactive") == "true"
    trace = pytorch.trace(_own(), include_completed=not only_active)
    if request.get_param("includecollectives") == "false":
        del trace["entries"]
    _answer(response, trace)


def _fr_dump_file(request: Any, response: Any) -> None:
    own = _own()
    if not own:
        response.set_status(503)
        response.set_content("there is no communicator", "text/plain")
        return
    path = _trace.path(pytorch.rank(own[0]))
    _trace.write(pytorch.trace(own), path)
    response.set_status(200)
    response.set_content(f"wrote {path}", "text/plain")


def _health_check(request: Any, response: Any) -> None:
    failed = any(record.state == "failed" for dump in _own() for record in dump.records)
    _answer(response, {"healthy": not failed})


def _answer(response: Any, content: Any) -> None:
    response.set_status(200)
    response.set_content(json.dumps(content), "application/json")
