"""Finds the ranks at fault, and the reason, from the flight recorders of all ranks.

Example::

    from ncclx_rs.diagnose import across, analyze, read
    for diagnosis in across([analyze(communicator) for communicator in read("/tmp/dumps").communicators]):
        print(diagnosis.findings)
"""

from ncclx_rs.diagnose.across import across
from ncclx_rs.diagnose.analyze import Diagnosis, Finding, analyze
from ncclx_rs.diagnose.dumps import Communicator, Dump, Record, read

__all__ = ["Communicator", "Dump", "Finding", "Record", "Diagnosis", "across", "analyze", "read"]
