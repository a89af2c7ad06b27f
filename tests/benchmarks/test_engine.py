"""The benchmark's work fits its engine, is counted as it should be, and runs at toy size; both sides agree there."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks import engine as benchmark
from models.qwen3_vl.model import Qwen3VL

TOY = benchmark.WORKS["toy"]
ALL = [*benchmark.WORKS.values(), *benchmark.FEW.values()]


def distinct_frames(work: benchmark.Work) -> int:
    seen: set[tuple[int, int]] = set()
    for number in range(work.prompts):
        crops = [
            benchmark.crop(work, number, sample, call)
            for sample in range(work.samples)
            for call in range(sum(work.rounds))
        ]
        seen |= {
            (number, frame)
            for part in (benchmark.opening(work, number), *crops)
            for frame in part.frames.tolist()
        }
    return len(seen)


@pytest.fixture(scope="module")
def engine():
    return benchmark.warm_engine(nnx.jit(lambda: Qwen3VL(TOY.case.config, rngs=nnx.Rngs(0)))(), TOY)


@pytest.mark.parametrize("work", ALL)
def test_the_work_is_what_it_says_and_fits_the_engine(work):
    most = 6 if work in benchmark.FEW.values() else 0
    for rounds in {
        work.rounds,
        *((n,) for n in range(1, most + 1)),
        *((1,) * n for n in range(1, most + 1)),
    }:
        opening = benchmark.opening(work, 0)
        tokens = work.grid[0] * work.grid[1] // 4
        assert (opening.ids == work.case.config.image_token_id).sum() == work.frames * tokens
        assert (
            len(opening.ids) == work.frames * (work.time + 1 + tokens) + work.question
            and len(set(opening.frames)) == work.frames
        )
        crops = [
            benchmark.crop(work, 0, sample, call).frames
            for sample in range(work.samples)
            for call in range(sum(rounds))
        ]
        assert all(0 <= frames.min() < frames.max() < work.video for frames in crops)
        assert len({tuple(frames) for frames in crops}) > len(crops) // 2  # windows of their own
        longest = len(opening.ids) + (len(rounds) + 1) * work.turn + sum(rounds) * work.response
        window = len(benchmark.crop(work, 0, 0, 0).ids) + work.summary
        assert (
            longest <= work.settings.row_lengths[-1]
            and len(opening.ids) - 1 <= work.settings.prefill_lengths[-1]
        )
        pages = (
            work.prompts
            * (
                len(opening.ids)
                + work.samples * (longest - len(opening.ids) + sum(rounds) * window)
            )
            / work.settings.page
        )
        assert pages < work.settings.pages  # nothing has to give way
        assert (
            benchmark.greedy(work).prompts == 1 and benchmark.greedy(work).settings == work.settings
        )


def test_prompts_are_prefilled_once_however_many_samples_they_have(engine):
    prompt = len(benchmark.opening(TOY, 0).ids) - 1
    rollout = sum(TOY.rounds) * (len(benchmark.crop(TOY, 0, 0, 0).ids) - 1 + TOY.response)
    for samples in (TOY.samples, 2):
        work = dataclasses.replace(TOY, samples=samples)
        said, counts = benchmark.rollouts(work, engine)
        assert counts["prefilled_tokens"] == work.prompts * (prompt + samples * rollout)
        assert (
            counts["sampled_tokens"]
            == work.generated
            == sum(len(ids) for rollout in said for ids in rollout)
        )
        assert counts["encoded_frames"] == distinct_frames(work)
        assert (
            0 < counts["tower"] < counts["device"] < counts["seconds"]
            and counts["host"] == 1 - counts["device"] / counts["seconds"]
        )
        assert 0 < counts["occupancy"] <= 1


def test_the_plan_is_what_lies_on_the_device(engine):
    planned, runner = benchmark.plan(TOY), engine.runner
    weights = jax.tree.leaves(
        nnx.state(nnx.jit(lambda: Qwen3VL(TOY.case.config, rngs=nnx.Rngs(0)))(), nnx.Param)
    )
    real = {
        "weights": weights,
        "pages": [runner.pool],
        "copies of shared prefixes": jax.tree.leaves(runner.prefixes),
    }
    for name, arrays in real.items():
        assert planned[name] * benchmark.GIB == pytest.approx(
            sum(array.nbytes for array in arrays)
        ), name


def test_a_difference_is_refused():
    benchmark.check([[[1, 2]], [[3]]], [[[1, 2]], [[3]]])
    with pytest.raises(AssertionError, match="greedy rollout 1"):
        benchmark.check([[[1, 2]], [[3]]], [[[1, 2]], [[4]]])


def test_the_crops_table_has_a_column_for_each_number():
    table = benchmark.crops_table({"parallel": [1.0, 1.25], "sequential": [1.0, 2.0]})
    assert table.splitlines() == [
        "| crops | 1 | 2 |",
        "|---|---|---|",
        "| parallel, s | 1.0 | 1.2 |",
        "| sequential, s | 1.0 | 2.0 |",
    ]


@pytest.mark.slow
def test_crops_run_at_toy_size(tmp_path):
    record = tmp_path / "record.json"
    table = _command("--crops", "2", "--json", str(record))
    assert {
        name: len(values) for name, values in json.loads(record.read_text())["found"].items()
    } == {"parallel": 2, "sequential": 2}
    assert table.startswith("| crops | 1 | 2 |")


@pytest.mark.parity
@pytest.mark.slow
def test_both_sides_agree_at_toy_size_and_are_timed(tmp_path):
    pytest.importorskip("torch", reason="the other side; install the extra parity")
    record = tmp_path / "record.json"
    table = _command("--plain", "--together", "2", "--json", str(record))
    found = json.loads(record.read_text())["found"]
    (mine,), (other,) = found["here"], found["transformers"]
    assert (
        mine["sampled_tokens"] == TOY.generated
        and min(mine["seconds"], other["seconds"], other["plain_seconds_a_prompt"]) > 0
    )
    assert (
        np.isclose(sum(other["parts"].values()), other["seconds"], rtol=0.2)
        and mine["memory_gib"] > 0 < other["memory_gib"]
    )
    assert sum(line.startswith("| ") for line in table.splitlines()) == 7


def _command(*arguments: str) -> str:
    root = pathlib.Path(benchmark.__file__).parents[1]
    command = [sys.executable, "-m", "benchmarks.engine", "--case", "toy", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=500, cwd=root, env=environment
    ).stdout
