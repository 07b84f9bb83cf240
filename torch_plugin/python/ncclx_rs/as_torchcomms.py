"""Lets programs that import torchcomms run on this package.

    python -m ncclx_rs.as_torchcomms train.py --steps 100
    torchrun --nproc-per-node 2 --module ncclx_rs.as_torchcomms train.py --steps 100

PyTorch looks for torchcomms during its own import. So for PyTorch's torchcomms mode
(``TORCH_DISTRIBUTED_USE_TORCHCOMMS=1``) the alias must be installed before torch is imported, as it is here.

Processes that the program spawns import it anew, without the alias. For them it begins with these lines, which change
nothing in the first process:

    import ncclx_rs
    ncclx_rs.install_as_torchcomms()
"""

from __future__ import annotations

import os
import sys

from ncclx_rs._alias import AliasFinder, is_installed
from ncclx_rs._autoload import register


def install_as_torchcomms() -> None:
    """Makes ``import torchcomms`` and its submodules resolve to this package. Idempotent.

    ``torch.distributed`` then also knows this package's backend as ``ncclx``.

    Raises:
        RuntimeError: the program has already imported torchcomms.
    """
    loaded = sys.modules.get("torchcomms")
    if loaded is not None and loaded is not sys.modules.get("ncclx_rs"):
        raise RuntimeError("install_as_torchcomms: torchcomms was imported already; call this before")
    if is_installed():
        return
    sys.meta_path.insert(0, AliasFinder())
    if hasattr(sys.modules.get("torch.distributed"), "Backend"):
        register()


def main() -> None:
    """Runs the program that the command line names."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m ncclx_rs.as_torchcomms program.py [arguments]")
    import runpy

    install_as_torchcomms()
    del sys.argv[0]
    if not sys.flags.safe_path:
        # As Python runs a program: in place of the current folder, which `-m` has put there.
        sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
