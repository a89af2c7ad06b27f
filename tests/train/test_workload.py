"""Lengths of a step: drawn, stored, read, and derived from a run's metrics."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks.lengths import SEED, STEPS, distributions, drawn, file_of
from configs import RECIPES
from paravt_extras.plan.workload import (
    RESULT_TOKENS,
    Rollout,
    at_limits,
    draw,
    from_metrics,
    read,
    write,
)
from train.settings import change

LARGE = RECIPES["paravt_8b"]()
TINY = RECIPES["paravt_tiny"]()


@pytest.mark.parametrize("recipe", ["paravt_8b", "paravt_2b_lora", "paravt_tiny"])
def test_the_committed_lengths_are_those_that_are_drawn(recipe, tmp_path):
    committed = read(file_of(recipe), RECIPES[recipe]())
    assert committed == drawn(recipe)
    write(tmp_path / "again.json", distributions()[recipe], SEED, committed)
    assert (tmp_path / "again.json").read_text() == file_of(recipe).read_text()


def test_committed_responses_have_a_tenth_of_the_limit_on_average():
    workload = read(file_of("paravt_8b"), LARGE)
    lengths = [rollout.response for rollout in workload.rollouts]
    assert len(lengths) == STEPS * 7 * 8
    assert sum(lengths) / len(lengths) == pytest.approx(819.2, rel=0.05)
    assert {group.frames for step in workload.steps for group in step} == {4, 8, 16, 32, 64}
    assert 0.8 < sum(len(rollout.reports) for rollout in workload.rollouts) / len(lengths) < 1.2
    assert workload.crop_prompt == 16 * 61 + 32


@pytest.mark.parametrize("size", ["4b", "8b"])
def test_recipes_with_adapters_share_their_committed_lengths(size):
    run = RECIPES[f"paravt_{size}_lora"]()
    assert read(file_of("paravt_2b_lora"), run) == drawn("paravt_2b_lora")


def test_a_rollout_samples_what_is_no_tool_result():
    assert Rollout(100).sampled == 100
    assert Rollout(100, (10, 20)).sampled == 100 - 30 - 2 * RESULT_TOKENS
    workload = drawn("paravt_8b")
    assert min(rollout.sampled / rollout.response for rollout in workload.rollouts) >= 0.5


def test_at_the_limits_every_sequence_is_as_long_as_the_recipe_allows():
    workload = at_limits(LARGE)
    ((first, *others),) = workload.steps
    assert (first.prompt, first.visual, first.frames) == (5120, 3136, 64)
    assert first.rollouts == (Rollout(8192),) * 8
    assert others == [first] * 6
    assert workload.tokens == 7 * (5120 + 8 * 8192)


def test_the_same_seed_draws_the_same_lengths():
    distribution = distributions()["paravt_8b"]
    assert draw(distribution, 2, 1, "") == draw(distribution, 2, 1, "")
    assert draw(distribution, 2, 1, "") != draw(distribution, 2, 2, "")


def row(step: int, **figures: float) -> dict[str, float | str]:
    metrics = {"length/response": 50.0, "calls": 1.0, "k8/rollouts": 16.0, "k64/rollouts": 48.0}
    return {"phase": "rl", "step": step} | metrics | figures


def test_metrics_give_prompts_lengths_and_calls_of_the_last_steps(tmp_path):
    rows = [{"phase": "sft", "loss": 1.0}, *[row(n) for n in range(1, 12)]]
    rows[-1] |= {"k8/calls": 0.0}
    file = tmp_path / "metrics.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in rows))
    workload = read(file, TINY)
    assert len(workload.steps) == 8
    # Two prompts with 8 frames and six with 64: a token and 5 of its label each, and the text.
    for step in workload.steps:
        assert [group.prompt for group in step] == [8 * 6 + 48] * 2 + [64 * 6 + 48] * 6
    last = workload.steps[-1]
    assert not any(rollout.reports for group in last[:2] for rollout in group.rollouts)
    rollouts = workload.rollouts
    # The sampled tokens are measured; tool results come on top.
    assert sum(r.sampled for r in rollouts) / len(rollouts) == pytest.approx(50, rel=0.1)
    assert 0.5 < sum(len(r.reports) for r in rollouts) / len(rollouts) <= 1
    assert from_metrics(rows, TINY) == workload


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.json", None, "No such file"),
        ("a.json", "{", r"a\.json: not JSON"),
        ("a.json", "{}", r"a\.json: no entry 'distribution'"),
        ("a.json", '{"distribution": 1}', r"a\.json: not in the form"),
        ("a.jsonl", '{"phase": "sft"}', r"a\.jsonl: no step of RL"),
        ("a.jsonl", "", r"a\.jsonl: no step of RL"),
        ("a.jsonl", json.dumps(row(1, **{"k8/rollouts": 0.0, "k64/rollouts": 0.0})), "8 rollouts"),
    ],
)
def test_files_without_lengths_are_refused(name, text, message, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as refusal:
        read(tmp_path / name, TINY)
    assert "\n" not in str(refusal.value) and "Error" not in str(refusal.value)


def test_metrics_of_another_recipe_are_refused_by_the_settings_beside_them(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps(row(1)))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(dataclasses.asdict(TINY)))
    described = read(file, TINY).describe()
    assert described.startswith(f"the last 1 steps of a run's metrics ({file}): prompts of ")
    with pytest.raises(ValueError, match="metrics of paravt_tiny, whose model.size, .* differ"):
        read(file, LARGE)


def test_drawn_lengths_of_other_frame_budgets_are_refused():
    other = change(TINY, "few_frames", {"rl.frame_budgets": (4, 64)})
    with pytest.raises(ValueError, match="K = 4, 8, 16, 32, 64, while few_frames has K = 4, 64"):
        read(file_of("paravt_tiny"), other)


def test_tools_of_the_small_world_read_faster_than_those_of_real_videos():
    assert from_metrics([row(1)], TINY).tool_seconds == 0.01
    assert from_metrics([row(1)], LARGE).tool_seconds == 1.2


def test_lengths_of_another_recipe_are_refused():
    with pytest.raises(ValueError, match="a prompt above 432 tokens or a response above 144"):
        read(file_of("paravt_8b"), TINY)
    no_rl = dataclasses.replace(LARGE, rl=None)
    with pytest.raises(ValueError, match="rl: None"):
        read(file_of("paravt_8b"), no_rl)
