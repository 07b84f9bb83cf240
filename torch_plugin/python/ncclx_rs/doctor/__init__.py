"""Looks for what keeps ranks from meeting or slows them down, on one host or, under a launcher, on all of them.

Modules: `checks` looks at this host. `meeting` has the ranks of a launcher meet and compares them. `__main__` is the
command line.
"""
