"""Runs Python programs in their own process, for tests that need other devices."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

# Environment to compile for a TPU without having one. Flags for CPU would end the process.
FOR_TPU = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "XLA_FLAGS": ""}


def run(program: str, **environment: str) -> str:
    """Runs a program, which must print "done" at its end, and returns what it printed."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0 and "done" in done.stdout, done.stderr[-4000:]
    return done.stdout
