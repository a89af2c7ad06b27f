"""`python tests/soon_lost.py SECONDS PROGRAM ...`: a program that soon notices a dead process.

PROGRAM is a file, or -m and a module.
"""

from __future__ import annotations

import runpy
import sys

from paravt_jax.processes import cluster

if __name__ == "__main__":
    seconds, *sys.argv = sys.argv[1:]
    cluster.HEARTBEAT = int(seconds)
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
