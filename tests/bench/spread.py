"""The spread of what alternating rounds have measured."""

from __future__ import annotations

import statistics


def summary(values: list[float]) -> tuple[float, float, float]:
    """The median, the 10th and the 90th percentile."""
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return statistics.median(values), tenths[0], tenths[-1]


def spread(values: list[float], unit: float = 1.0) -> str:
    """The same in words, in multiples of ``unit``: the median, and the percentiles in brackets."""
    median, low, high = (value * unit for value in summary(values))
    return f"{median:.2f} [{low:.2f}, {high:.2f}]"
