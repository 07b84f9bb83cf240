"""A backend in a shared library, written in Rust, with a collective of its own: an all_reduce that sends 8-bit blocks.

The library is the crate in this folder:

    cargo build --release --package quantized_backend
    export NCCLX_RS_BACKEND_LIB_PATH_QUANTIZED=$PWD/target/release/libquantized_backend.so
    torchrun --standalone --nproc-per-node 2 examples/quantized_backend/quantized_all_reduce.py
"""

import os
import socket
import stat
import struct
from collections.abc import Callable
from typing import Any

import ncclx_rs
import torch
from ncclx_rs import ReduceOp

COUNT = 1 << 20


def bytes_sent() -> int:
    """The bytes that this process has sent through TCP, as Linux counts them, with the engine's headers.

    What Linux sent a second time, since an acknowledgement came late, is taken off.
    """
    total = 0
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as tcp:
                info = tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # gone since it was listed, or a socket of another kind
            continue
        sent, sent_again = struct.unpack_from("=QQ", info, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans of linux/tcp.h
        total += sent - sent_again
    return total


def main() -> None:
    # Through TCP, also within a host, so that the system counts the bytes.
    comm = ncclx_rs.new_comm("quantized", torch.device("cpu"), name="main", hints={"transport": "tcp"})
    rank, size = comm.get_rank(), comm.get_size()
    backend: Any = comm.unsafe_get_backend()

    def sent_by(operation: Callable[[], Any]) -> tuple[int, Any]:
        """The bytes that this rank sends for an operation, and the operation's result."""
        comm.barrier(async_op=False)  # as any ordinary operation, one of the library; ranks are connected after it
        before = bytes_sent()
        returned = operation()
        comm.barrier(async_op=False)  # the receivers now have all bytes
        sent = bytes_sent() - before
        comm.barrier(async_op=False)  # no rank leaves, which closes connections, before all have counted
        return sent, returned

    torch.manual_seed(rank)
    exact = torch.randn(COUNT)
    approximate = exact.clone()
    plain, _ = sent_by(lambda: comm.all_reduce(exact, ReduceOp.SUM, async_op=False))
    quantized, result = sent_by(lambda: backend.quantized_all_reduce(approximate, block=256))

    error = ((approximate - exact).norm() / exact.norm()).item()
    print(
        f"rank {rank}: float32 sent {plain} bytes, 8 bits {quantized} ({quantized / plain:.1%}), "
        f"off by {error:.2%} on {size} ranks\n",
        end="",
    )
    if size > 1:
        assert result["bytes_sent"] <= quantized <= 0.3 * plain
    assert error < 0.02
    comm.finalize()


if __name__ == "__main__":
    main()
