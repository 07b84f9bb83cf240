"""Finds the ranks at fault, and the reason, from the flight recorders of all ranks.

Example::

    from ncclx_rs.diagnose import analyze, read
    for communicator in read("/tmp/dumps").communicators:
        print(analyze(communicator).findings)
"""

from ncclx_rs.diagnose.analyze import Diagnosis, Finding, analyze
from ncclx_rs.diagnose.dumps import Communicator, Dump, Record, read

__all__ = ["Communicator", "Dump", "Finding", "Record", "Diagnosis", "analyze", "read"]
