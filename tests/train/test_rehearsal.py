"""Rehearsals: cut settings, random weights and a few scenes."""

from __future__ import annotations

import pytest

from benchmarks.killing import environment
from benchmarks.rehearsal import RUN, Machine, cached, finish
from configs import RECIPES
from configs.paravt_tiny import paravt_tiny
from paravt_extras.rehearsal import cut
from paravt_extras.report.page import write_report
from train.durable.metrics import read_metrics


@pytest.mark.parametrize("name", [name for name in RECIPES if name.endswith("_8b")])
def test_sizes_are_cut_and_the_recipe_stays(name):
    real = RECIPES[name]()
    run = cut(real)
    assert run.name == f"{real.name}-rehearsal" and run.model.size == "rehearsal"
    assert (run.sft is None, run.rl is None) == (real.sft is None, real.rl is None)
    assert run.frames.max_pixels < real.frames.max_pixels
    if real.sft is not None and run.sft is not None:
        assert run.sft.steps < real.sft.steps
        assert run.sft.optimizer == real.sft.optimizer
    if real.rl is not None and run.rl is not None:
        assert run.rl.steps < real.rl.steps
        assert (run.rl.grpo, run.rl.rewards) == (real.rl.grpo, real.rl.rewards)
        assert 0 < run.rl_shape.trajectory <= run.engine_sizes.longest


def test_a_recipe_of_the_small_world_has_no_rehearsal():
    with pytest.raises(ValueError, match="--config=paravt_tiny: it has no published data"):
        cut(paravt_tiny())


FEW = (
    "--sft.steps=1",
    "--rl.steps=1",
    "--rl.frame-budgets=4",
    "--evaluation.questions=1",
    "--evaluation.frames=4",
    "--evaluation.dispatch=parallel",
    "--evaluation.temperatures=0",
)


@pytest.fixture
def optimised(monkeypatch):
    """Without the flags of tests/conftest.py: a rehearsal computes more than it compiles."""
    monkeypatch.delenv("XLA_FLAGS")


@pytest.mark.long
@pytest.mark.usefixtures("optimised")
def test_the_literal_command_ends_with_a_report(assets, tmp_path):
    """`benchmarks.rehearsal` kills it in every phase."""
    tokenizer = assets / "qwen3_vl"
    home = tmp_path / "home"
    home.mkdir()
    variables = environment(tmp_path / "compiled") | cached(tokenizer, tmp_path / "hub")
    finish(Machine(str(tokenizer), arguments=FEW), home, variables)
    steps = [(line["phase"], line["step"]) for line in read_metrics(home / RUN / "metrics.jsonl")]
    assert steps == [("sft", 1), ("rl", 1)]
    assert "A rehearsal:" in write_report(home / RUN).read_text()
