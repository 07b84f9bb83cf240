"""Metrics of this process's communicators for Prometheus, where ``NCCLX_RS_METRICS`` asks for them.

The package `prometheus_client` serves them. They are made of the flight recorders when Prometheus asks; between two
requests they cost nothing. A rank serves them at the port that the variable names plus its rank on the host.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

from ncclx_rs._load import native
from ncclx_rs._rates import rates
from ncclx_rs.diagnose import dumps
from ncclx_rs.diagnose.dumps import Communicator

VARIABLE = "NCCLX_RS_METRICS"
# Where launchers put a rank's number on its host, in the order of `src/comm/launch.rs`.
_LOCAL_RANK = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "SLURM_LOCALID",
)
_LABELS = ("communicator", "id", "rank")


def address() -> tuple[str, int] | None:
    """Where this process serves metrics, if it does.

    Raises:
        ValueError: the variable is no host with a port.
    """
    given = os.environ.get(VARIABLE, "")
    if not given:
        return None
    host, _, port = given.rpartition(":")
    number = int(port) + _local_rank() if port.isdecimal() else 0
    if not host or not 0 < number < 1 << 16:
        raise ValueError(f"ncclx_rs: {VARIABLE} must be a host and a port, as in 127.0.0.1:9400, got {given!r}")
    return host.strip("[]"), number


def _local_rank() -> int:
    """This process's number on its host; 0 if no launcher tells it."""
    values = (os.environ.get(name, "").strip() for name in _LOCAL_RANK)
    return int(next(filter(None, values), "0"))


def start() -> None:
    """Serves metrics if `NCCLX_RS_METRICS` asks for them; a warning says why that cannot be done.

    Raises:
        ValueError: the variable is no host with a port.
    """
    from ncclx_rs._logging import warn

    where = address()
    if where is None:
        return
    host, port = where
    try:
        client = importlib.import_module("prometheus_client")
    except ImportError:
        warn(f"{VARIABLE}: there are no metrics: they need prometheus_client (pip install prometheus_client)")
        return
    try:
        registry = client.CollectorRegistry()
        registry.register(Collector(client))
        client.start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        warn(f"{VARIABLE}: there are no metrics: {host} port {port}: {error}")


class Collector:
    """The metrics, as `prometheus_client` asks for them."""

    def __init__(self, client: Any) -> None:
        """A collector that makes its metrics of the classes of the module ``prometheus_client``."""
        self._core = importlib.import_module(f"{client.__name__}.core")

    def collect(self) -> Iterator[Any]:
        """The metrics of all communicators of this process."""
        counter, gauge = self._core.CounterMetricFamily, self._core.GaugeMetricFamily
        calls = counter("ncclx_rs_operations", "Operations called.", labels=_LABELS)
        collectives = counter("ncclx_rs_collectives", "Collectives on the CPU called.", labels=_LABELS)
        gauges = {
            "in_flight": gauge("ncclx_rs_in_flight", "Operations in flight.", labels=_LABELS),
            "oldest_seconds": gauge("ncclx_rs_oldest_seconds", "Age of the oldest one in flight.", labels=_LABELS),
            "per_second": gauge(
                "ncclx_rs_operations_per_second", "Operations ended a second, of late.", labels=_LABELS
            ),
            "bytes_per_second": gauge("ncclx_rs_bytes_per_second", "Bytes they read and wrote.", labels=_LABELS),
            "seconds": gauge("ncclx_rs_operation_seconds", "How long they took, on average.", labels=_LABELS),
            "failed": gauge("ncclx_rs_failed", "Failed operations in the recorder.", labels=_LABELS),
            "lost": gauge("ncclx_rs_lost_ranks", "Ranks that this one has lost.", labels=_LABELS),
        }
        for text in native().dumps("metrics"):
            dump = dumps.parse(text)
            labels = (dump.communicator, dump.id, str(dump.rank))
            calls.add_metric(labels, dump.operations)
            collectives.add_metric(labels, dump.collectives)
            now = rates(dump, Communicator(dump.id, dump.communicator, dump.size, {dump.rank: dump}))
            for name, metric in gauges.items():
                value = getattr(now, name)
                metric.add_metric(labels, len(value) if isinstance(value, tuple) else value)
        yield from (calls, collectives, *gauges.values())
