"""The benchmark has the work that it claims, and both sides agree at toy size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import model as benchmark

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", benchmark.CASES)
def test_the_prompt_has_the_tokens_and_frames_of_its_case(name):
    case = benchmark.CASES[name]
    ids, patches = benchmark.frames_prompt(case)
    assert ids.shape == (case.tokens,)
    assert patches.shape[0] == case.frames
    visual_tokens = case.frames * case.patches // 4
    assert (ids == case.config.image_token_id).sum() == visual_tokens


@pytest.mark.parametrize(
    ("job", "right", "wrong"),
    [
        ("prefill", [np.zeros(3)], [np.full(3, 0.01)]),
        ("decode", [np.zeros((2, 2))], [np.eye(2)]),
        ("train", [1.0, 0.9], [1.0, 0.91]),
    ],
)
def test_a_difference_is_refused(job, right, wrong):
    benchmark.check(job, right, right)
    with pytest.raises(AssertionError):
        benchmark.check(job, right, wrong)


@pytest.mark.parity
@pytest.mark.slow
def test_the_toy_case_agrees_and_every_job_is_timed(tmp_path):
    pytest.importorskip("torch", reason="the other side; install the extra parity")
    record = tmp_path / "record.json"
    command = [sys.executable, "-m", "benchmarks.model", "--case", "toy", "--rounds", "1"]
    command += ["--json", str(record)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run(command, check=True, timeout=300, cwd=ROOT, env=environment)
    written = json.loads(record.read_text())
    assert set(written["figures"]) == set(benchmark.JOBS)
    for job, sides in written["figures"].items():
        assert set(sides) == {"here", "transformers"}
        for measured in sides.values():
            assert len(measured["seconds"]) == benchmark.JOBS[job]
            assert min(measured["seconds"]) > 0
            assert measured["memory"] > 0
