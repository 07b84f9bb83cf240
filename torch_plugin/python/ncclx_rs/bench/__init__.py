"""Measures the collectives of c10d backends, alone or one against another.

    python -m ncclx_rs.bench --ranks 2 --ops all_reduce --vs gloo
    torchrun --nproc-per-node 2 --module -- ncclx_rs.bench --max 1M --vs gloo

See docs/performance.md. ``--help`` lists the options.
"""
