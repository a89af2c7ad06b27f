"""Every phase of a run with each further model family."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from benchmarks import golden_run
from models.family import FAMILIES, family
from models.weights.hf import load
from paravt_jax.data import tokenizer_file
from rollout.agent.episode import EpisodeSettings
from rollout.ask import Assistant
from tests import marked_family
from train.durable.metrics import read_metrics
from train.run import execute
from train.settings import ModelSettings, change


@pytest.mark.parametrize("name", FAMILIES)
def test_a_size_that_a_family_does_not_have_is_refused_with_those_that_it_has(name):
    sizes = ", ".join(("tiny", *family(name).sizes))
    with pytest.raises(ValueError, match=rf"model\.size: '9b' is no size of .*give one of {sizes}"):
        ModelSettings(family=name, size="9b")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recipe"), [("qwen2_5_vl", "small_merger"), ("qwen3_vl_moe", "small")]
)
def test_a_run_goes_through_all_phases(small, tmp_path, name, recipe):
    """With adapters and the merger, and with all weights of the decoder."""
    run = small.shortened(getattr(small, recipe)(), tmp_path / "run", **{"model.family": name})
    execute(run)
    folder = tmp_path / "run"
    result = json.loads((folder / "result.json").read_text())
    assert result["token_mismatches"] == 0
    assert 0 <= result["logprob_gap"] < 1e-3
    steps = [row for row in read_metrics(folder / "metrics.jsonl") if row["phase"] == "rl"]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(math.isfinite(row["grad_norm"]) and row["grad_norm"] > 0 for row in steps)
    # The exported model opens and answers.
    model = load(folder / "model")
    assert model.config.family == name
    assistant = Assistant(
        model, tokenizer_file.load(folder / "model", family(name).dialect), run.protocol
    )
    video = next((folder / "videos").rglob("*.mp4"))
    question = "What is the number in the scene that starts at 8 s?"
    assert assistant.ask(video, question, EpisodeSettings(4, 0.0)).turns


@pytest.mark.slow
def test_a_family_with_other_marks_and_calls_trains(tmp_path, monkeypatch):
    """The cold start, and two steps of RL with calls in XML that are carried out."""
    monkeypatch.setitem(FAMILIES, marked_family.NAME, marked_family.__name__)
    changes = {
        "model.family": marked_family.NAME,
        "sft.steps": 2,
        "rl.steps": 2,
        # A call takes more tokens than in JSON.
        "protocol.turn_tokens": 96,
        "protocol.trajectory_tokens": 224,
    }
    run = change(golden_run.recipe(tmp_path), "golden_run", changes)
    golden_run.execute_scripted(dataclasses.replace(run, align=None))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["phase"] for row in rows] == ["sft"] * 2 + ["rl"] * 2
    assert all(math.isfinite(row["grad_norm"]) and row["grad_norm"] > 0 for row in rows)
    assert sum(row["call/executed"] for row in rows if row["phase"] == "rl") > 0
    assert json.loads((tmp_path / "result.json").read_text())["token_mismatches"] == 0
    # The exported model has the marks of its family.
    vocabulary = tokenizer_file.load(tmp_path / "model", marked_family.DIALECT)
    assert load(tmp_path / "model").config.image_token_id == vocabulary["[image]"]
    assert "<|im_start|>" not in (tmp_path / "model" / "chat_template.jinja").read_text()
