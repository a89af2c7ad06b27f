"""The benchmark runs, at toy size, and both sides agree."""

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


def test_the_prompt_has_as_many_tokens_and_frames_as_it_says():
    for case in benchmark.CASES.values():
        ids, patches = benchmark.frames_prompt(case)
        assert ids.shape == (case.tokens,) and patches.shape[0] == case.frames
        assert (ids == case.config.image_token_id).sum() == case.frames * case.grid[0] * case.grid[
            1
        ] // 4


def test_a_difference_is_refused():
    result = {
        "prefill": {"outputs": [np.zeros(3)]},
        "decode": {"outputs": [np.zeros((2, 2))]},
        "train": {"outputs": [1.0, 0.9]},
    }
    benchmark.check(result, result, tuple(benchmark.JOBS))
    for job, wrong in {
        "prefill": [np.full(3, 0.01)],
        "decode": [np.eye(2)],
        "train": [1.0, 0.91],
    }.items():
        with pytest.raises(AssertionError):
            benchmark.check(result, result | {job: {"outputs": wrong}}, tuple(benchmark.JOBS))


@pytest.mark.parity
@pytest.mark.slow
def test_the_toy_case_agrees_and_every_job_is_timed(tmp_path):
    pytest.importorskip("torch", reason="the other side; install the extra parity")
    record = tmp_path / "record.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.model",
        "--case",
        "toy",
        "--rounds",
        "1",
        "--json",
        str(record),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    table = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=300, cwd=ROOT, env=environment
    ).stdout
    written = json.loads(record.read_text())
    seconds = written["seconds"]
    assert {job: set(sides) for job, sides in seconds.items()} == dict.fromkeys(
        (*benchmark.JOBS, "matmul"), {"here", "transformers"}
    )
    assert (
        set(written["memory_gib"]) == {"here", "transformers"}
        and min(written["memory_gib"].values()) > 0
    )
    assert {job: len(sides["here"]) for job, sides in seconds.items()} == {
        **benchmark.JOBS,
        "matmul": 10,
    }
    assert all(min(values) > 0 for sides in seconds.values() for values in sides.values())
    assert sum(line.startswith("| ") for line in table.splitlines()) == 9
