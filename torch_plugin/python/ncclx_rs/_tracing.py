"""The check of calls that cannot be part of a graph of torch.compile."""

from __future__ import annotations

import torch


def not_in_graphs(call: str, reason: str) -> None:
    """Breaks the graph if one is being traced. With ``fullgraph=True`` that is an error, which contains the reason."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=f"ncclx_rs: {call} cannot be part of a compiled graph: {reason}")
