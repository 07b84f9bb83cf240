"""Says from the flight recorders of all ranks which one is to blame, and for what.

Example::

    from ncclx_rs.diagnose import judge, read
    for communicator in read("/tmp/dumps").communicators:
        print(judge(communicator).findings)
"""

from ncclx_rs.diagnose.analyze import Finding, Verdict, judge
from ncclx_rs.diagnose.dumps import Communicator, Dump, Record, read

__all__ = ["Communicator", "Dump", "Finding", "Record", "Verdict", "judge", "read"]
