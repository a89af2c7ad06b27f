"""The engine benchmark: its work fits its engine, is counted right, and both sides agree."""

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
from models.model import VisionLanguageModel

TOY = benchmark.WORKS["toy"]
ALL = [*benchmark.WORKS.values(), *benchmark.FEW.values()]


def distinct_frames(work: benchmark.Work) -> int:
    """Frames that all prompts and crops show, each counted once."""
    seen: set[tuple[int, int]] = set()
    for number in range(work.prompts):
        parts = [benchmark.opening(work, number)]
        for sample in range(work.samples):
            for call in range(sum(work.rounds)):
                parts.append(benchmark.crop(work, number, sample, call))
        for part in parts:
            seen |= {(number, frame) for frame in part.frames.tolist()}
    return len(seen)


def toy_model() -> VisionLanguageModel:
    return nnx.jit(lambda: VisionLanguageModel(TOY.case.config, rngs=nnx.Rngs(0)))()


@pytest.fixture(scope="module")
def engine():
    return benchmark.warm_engine(toy_model(), TOY)


@pytest.mark.parametrize("work", ALL)
def test_the_work_has_its_lengths_and_fits_the_engine(work):
    assert benchmark.greedy(work).prompts == 1
    assert benchmark.greedy(work).settings == work.settings
    opening = benchmark.opening(work, 0)
    tokens = work.grid[0] * work.grid[1] // 4
    assert (opening.ids == work.case.config.image_token_id).sum() == work.frames * tokens
    assert len(opening.ids) == work.frames * (work.time + 1 + tokens) + work.question
    assert len(set(opening.frames)) == work.frames
    assert len(opening.ids) - 1 <= work.settings.prefill_lengths[-1]
    all_rounds = {work.rounds}
    if work in benchmark.FEW.values():
        for crops in range(1, 7):
            all_rounds |= {(crops,), (1,) * crops}
    for rounds in all_rounds:
        check_rounds(work, rounds, len(opening.ids))


def check_rounds(work: benchmark.Work, rounds: tuple[int, ...], prompt: int) -> None:
    """Crops are windows of the video, and the longest rollout and all pages fit."""
    crops = sum(rounds)
    windows = [
        benchmark.crop(work, 0, sample, call).frames
        for sample in range(work.samples)
        for call in range(crops)
    ]
    assert all(0 <= frames.min() < frames.max() < work.video for frames in windows)
    assert len({tuple(frames) for frames in windows}) > len(windows) // 2, "too few different ones"
    longest = prompt + (len(rounds) + 1) * work.turn + crops * work.response
    assert longest <= work.settings.row_lengths[-1]
    sub_agent = len(benchmark.crop(work, 0, 0, 0).ids) + work.summary
    rollout = longest - prompt + crops * sub_agent
    needed = work.prompts * (prompt + work.samples * rollout)
    assert needed / work.settings.page < work.settings.pages, "pages would be evicted"


def test_prompts_are_prefilled_once_however_many_samples_they_have(engine):
    prompt = len(benchmark.opening(TOY, 0).ids) - 1
    rollout = sum(TOY.rounds) * (len(benchmark.crop(TOY, 0, 0, 0).ids) - 1 + TOY.response)
    for samples in (TOY.samples, 2):
        work = dataclasses.replace(TOY, samples=samples)
        rollouts, counts = benchmark.rollouts(work, engine)
        assert counts["prefilled_tokens"] == work.prompts * (prompt + samples * rollout)
        sampled = sum(len(ids) for ids_of_rollout in rollouts for ids in ids_of_rollout)
        assert counts["sampled_tokens"] == work.generated == sampled
        assert counts["encoded_frames"] == distinct_frames(work)
        assert 0 < counts["tower"] < counts["device"] < counts["seconds"]
        assert counts["host"] == 1 - counts["device"] / counts["seconds"]
        assert 0 < counts["occupancy"] <= 1


def test_the_plan_is_what_the_arrays_take(engine):
    planned = benchmark.plan(TOY)
    runner = engine.runner
    arrays = {
        "weights": nnx.state(toy_model(), nnx.Param),
        "pages": runner.pool,
        "copies of shared prefixes": runner.prefixes,
    }
    for name, tree in arrays.items():
        size = sum(array.nbytes for array in jax.tree.leaves(tree))
        assert planned[name] * benchmark.GIB == pytest.approx(size), name


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
    found = json.loads(record.read_text())["found"]
    assert {name: len(values) for name, values in found.items()} == {
        "parallel": 2,
        "sequential": 2,
    }
    assert table.startswith("| crops | 1 | 2 |")


@pytest.mark.parity
@pytest.mark.slow
def test_both_sides_agree_at_toy_size_and_are_timed(tmp_path):
    pytest.importorskip("torch", reason="the other side; install the extra parity")
    record = tmp_path / "record.json"
    table = _command("--plain", "--together", "2", "--json", str(record))
    found = json.loads(record.read_text())["found"]
    (mine,), (other,) = found["here"], found["transformers"]
    assert mine["sampled_tokens"] == TOY.generated
    assert min(mine["seconds"], other["seconds"], other["plain_seconds_a_prompt"]) > 0
    assert np.isclose(sum(other["parts"].values()), other["seconds"], rtol=0.2)
    assert min(mine["memory_gib"], other["memory_gib"]) > 0
    assert sum(line.startswith("| ") for line in table.splitlines()) == 7


def _command(*arguments: str) -> str:
    root = pathlib.Path(benchmark.__file__).parents[1]
    command = [sys.executable, "-m", "benchmarks.engine", "--case", "toy", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=500, cwd=root, env=environment
    ).stdout
