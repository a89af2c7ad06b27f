"""A recipe's programs on the TPU slice here, beside the plan: about ten minutes.

    python -m pytest tests/tpu

Start it on all hosts of the slice at the same time. PARAVT_TPU_RECIPE names another recipe than
paravt_8b. It prints the JSON of `benchmarks.slice`.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from paravt_jax.processes.cluster import has_tpu_chips

ROOT = pathlib.Path(__file__).parents[2]
RECIPE = os.environ.get("PARAVT_TPU_RECIPE", "paravt_8b")
SECONDS = 1800.0
# What the tests of this project set for CPUs.
FOR_TESTS = ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_NUMPY_RANK_PROMOTION", "JAX_COMPILATION_CACHE_DIR")
# Bytes beside a program: other programs, and what the allocator cannot use.
SPARE = 2**29

pytestmark = pytest.mark.skipif(
    not has_tpu_chips(), reason="this host has no TPU chips; it is for every host of a TPU slice"
)


def test_programs_keep_to_their_plan(capsys):
    environment = {name: value for name, value in os.environ.items() if name not in FOR_TESTS}
    command = [sys.executable, "-m", "benchmarks.slice", f"--config={RECIPE}"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=SECONDS
    )
    with capsys.disabled():
        print(done.stdout)
    assert done.returncode == 0
    if not done.stdout:
        return  # Only the first process of a slice prints.
    programs = json.loads(done.stdout)["programs"]
    assert programs, "nothing was compiled in time"
    for name, row in programs.items():
        used = row["bytes"]["measured"]
        assert used is None or used <= row["bytes"]["planned"] + SPARE, f"{name}: too much memory"
        seconds = row["seconds"]
        assert seconds["measured"] >= seconds["least"], f"{name}: the plan counts work twice"
