"""Ready-made hooks for communicators."""

from __future__ import annotations

from ncclx_rs.hooks import fr as fr
from ncclx_rs.hooks.clog import clog
from ncclx_rs.hooks.fr import FlightRecorderHook
from ncclx_rs.hooks.nan_check import NanCheckHook
from ncclx_rs.hooks.timeline import TimelineHook

__all__ = ["FlightRecorderHook", "NanCheckHook", "TimelineHook", "clog"]
