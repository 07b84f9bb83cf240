"""What cannot be part of graphs of torch.compile says so."""

from __future__ import annotations

import torch


def not_in_graphs(call: str, reason: str) -> None:
    """Ends the graph that is being traced, if one is; with ``fullgraph=True`` that is an error, with the reason."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=f"ncclx_rs: {call} cannot be part of a compiled graph: {reason}")
