"""Python programs in processes of their own, for tests that need other devices than this process has."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

# To compile for a TPU without one. Its compiler ends the process at flags that are for CPU alone.
FOR_TPU = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "XLA_FLAGS": ""}


def run(program: str, **environment: str) -> str:
    """Runs a program that ends with printing "done"; what it printed."""
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
