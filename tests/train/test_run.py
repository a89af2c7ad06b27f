"""The training command from end to end, on a model that trains in seconds."""

from __future__ import annotations

import itertools
import json
import pathlib
import re
import shlex
import shutil
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import train.export
import train.run
from benchmarks.killing import kill_again_and_again
from models.qwen3_vl.dialect import DIALECT
from models.weights.hf import load
from paravt_extras.report.page import write_report
from paravt_jax.data import tokenizer_file
from paravt_jax.method.tools.crop_video import CropVideo
from paravt_jax.world import text as world_text
from paravt_jax.world.vocabulary import build_vocabulary, recurring_texts
from rollout.agent.episode import EpisodeSettings
from rollout.ask import Assistant
from train.durable.checkpoint import Checkpoints
from train.durable.metrics import read_metrics
from train.durable.run_folder import begin_with, read_config

RESULT_FIELDS = """
    name seed before curve after token_mismatches logprob_gap
    recompilations_after_warmup seconds
""".split()
ROW_FIELDS = """
    k dispatch temperature accuracy compliance calls turns n interval
    without_answer unread stops groups format_reward tool_gap
""".split()


def command(folder: pathlib.Path, *arguments: str) -> int:
    return train.run.main(["--config=small", "--run-dir", str(folder), *arguments])


# They share a whole run.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(small, tmp_path_factory) -> pathlib.Path:
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("run") / "small"
    assert command(folder) == 0
    return folder


def result_of(folder: pathlib.Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def lines_of(file: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# --- the files of a finished run ---


def test_the_result_has_a_row_for_every_setting(finished, small):
    settings = small.small().evaluation
    result = result_of(finished)
    for moment in ("before", "after"):
        rows = result[moment]
        asked = itertools.product(settings.frames, settings.dispatch, settings.temperatures)
        assert [(row["k"], row["dispatch"], row["temperature"]) for row in rows] == list(asked)
        for row in rows:
            assert set(row) == set(ROW_FIELDS)
            assert row["n"] == settings.questions
            assert row["turns"] >= 1
            assert 0 <= row["accuracy"] <= 1
            assert 0 <= row["compliance"] <= 1
            assert row["calls"] == 0 or row["dispatch"] != "none"
    assert set(result) == set(RESULT_FIELDS)


def test_greedy_evaluations_come_from_rl(finished, small):
    settings = small.small().evaluation
    result = result_of(finished)
    # Steps 0 and 6 are the evaluations before and after.
    points = [(row["step"], row["k"]) for row in result["curve"]]
    assert points == list(itertools.product((2, 4), settings.frames))
    for row in result["curve"]:
        assert (row["dispatch"], row["temperature"]) == ("parallel", 0)
        assert row["n"] == settings.questions


def test_sampler_and_trainer_agree_and_nothing_compiles_late(finished):
    result = result_of(finished)
    assert result["token_mismatches"] == 0
    assert 0 < result["logprob_gap"] < 1e-3
    assert result["recompilations_after_warmup"] == 0
    assert result["seconds"] > 1
    steps = [s for s in read_metrics(finished / "metrics.jsonl") if s["phase"] == "rl"]
    assert [step["recompilations"] for step in steps[3:]] == [0, 0, 0]


def test_metrics_have_a_line_for_every_step(finished, small):
    run = small.small()
    lines = read_metrics(finished / "metrics.jsonl")
    steps = [
        *(("align", step) for step in range(1, run.align.steps + 1)),
        *(("sft", step) for step in range(1, run.sft.steps + 1)),
        *(("rl", step) for step in range(1, run.rl.steps + 1)),
    ]
    assert [(line["phase"], line["step"]) for line in lines] == steps
    assert any((finished / "tensorboard" / "rl").iterdir())
    fields = """
        reward/tool length/response time/rollout speed/tokens groups/silent kl_reference
        grad_norm
    """
    assert set(fields.split()) <= set(lines[-1])


def test_episodes_are_kept_and_shown_in_the_report(finished):
    episodes = lines_of(finished / "episodes.jsonl")
    phases = [phase for phase, _ in itertools.groupby(episode["phase"] for episode in episodes)]
    assert phases == ["before", "curve", "rl", "after"]
    for episode in episodes:
        assert (finished / episode["video"]).is_file()
        assert episode["turns"]
        assert len(episode["overview"]) == episode["k"]
    trained = [episode for episode in episodes if episode["phase"] == "rl"]
    assert {episode["step"] for episode in trained} == {2, 4, 6}
    turns = [turn for episode in trained for turn in episode["turns"]]
    tokens = [token for turn in turns for token in turn["tokens"] if token["kind"]]
    assert tokens and all(isinstance(token["credit"], float) for token in tokens)
    report = write_report(finished).read_text()
    assert episodes[0]["question"]["text"] in report
    assert "<svg" in report


def test_the_trained_model_answers_questions(finished, small):
    model = load(finished / "model")
    assistant = Assistant(
        model, tokenizer_file.load(finished / "model", DIALECT), small.small().protocol
    )
    video = next((finished / "videos").rglob("*.mp4"))
    question = "What is the number in the scene that starts at 8 s?"
    assert assistant.ask(video, question, EpisodeSettings(4, 0.0)).turns


# --- train.export ---


def exported(run: pathlib.Path, phase: str, step: str, to: pathlib.Path) -> int:
    """The exit code of the export command."""
    return train.export.main(
        ["--run-dir", str(run), "--phase", phase, "--step", step, "--to", str(to)]
    )


@pytest.mark.parametrize(
    ("phase", "step", "number"), [("rl", "latest", 6), ("rl", "4", 4), ("align", "3", 3)]
)
def test_a_checkpoint_is_exported_bit_for_bit(finished, tmp_path, phase, step, number):
    assert exported(finished, phase, step, tmp_path / "model") == 0
    model = load(tmp_path / "model")
    weights = {"text": nnx.state(model.text), "vision": nnx.state(model.vision)}
    checkpoints = Checkpoints(finished / "checkpoints" / phase, read_only=True)
    saved, _ = checkpoints.restore(weights, number, part=True)
    jax.tree.map(np.testing.assert_array_equal, weights, saved)


def test_the_last_checkpoint_is_exported_as_the_runs_model(finished, tmp_path):
    assert exported(finished, "rl", "latest", tmp_path / "model") == 0
    names = {file.name for file in (finished / "model").iterdir()}
    assert {file.name for file in (tmp_path / "model").iterdir()} == names
    for name in names:
        file = tmp_path / "model" / name
        assert file.read_bytes() == (finished / "model" / name).read_bytes()


def test_an_impossible_export_gets_one_line(finished, tmp_path, capsys):
    there = tmp_path / "there"
    there.mkdir()
    odd = tmp_path / "odd"  # a run with sft checkpoints only, and another tokenizer
    shutil.copytree(finished / "checkpoints" / "sft", odd / "checkpoints" / "sft")
    shutil.copy(finished / "config.json", odd)
    tokenizer_file.save(build_vocabulary(("another",), DIALECT), odd / "tokenizer")
    new = tmp_path / "new"
    cases = [
        (finished, "rl", "5", new, r"--step 5: .* 4, 6 \(best: 6\)"),
        (finished, "sft", "best", new, r"--step best: .* 3, 4 \(none was evaluated"),
        (finished, "rl", "6", there, r"--to .*there: exists"),
        (tmp_path, "rl", "6", new, r"--phase rl: .*: no phase"),
        (odd, "rl", "6", new, r"--phase rl: .*: sft"),
        (odd, "sft", "4", new, r"--run-dir .*tokenizer/"),
    ]
    for run, phase, step, to, pattern in cases:
        assert exported(run, phase, step, to) == 1
        message = capsys.readouterr().err
        assert re.search(pattern, message) and message.count("\n") == 1, message
    assert not new.exists()


# --- the same command again, and other commands in the same folder ---


def test_the_same_command_again_changes_nothing_and_another_is_refused(finished, capsys):
    folders = [finished / name for name in ("checkpoints", "evaluation", "records", "videos")]
    files = [path for folder in folders for path in folder.rglob("*")]
    before = [file.stat().st_mtime_ns for file in files]
    metrics = (finished / "metrics.jsonl").read_bytes()
    result = result_of(finished)
    assert command(finished) == 0
    assert command(finished, "--seed", "1", "--rl.steps", "7") == 1
    assert "seed: 0 -> 1 rl.steps: 6 -> 7" in capsys.readouterr().err
    assert [file.stat().st_mtime_ns for file in files] == before
    assert (finished / "metrics.jsonl").read_bytes() == metrics
    again = result_of(finished)
    assert again.pop("seconds") >= result.pop("seconds")
    assert again == result


def test_a_finished_run_needs_no_file_of_its_past(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    for name in ("checkpoints", "evaluation", "videos"):
        shutil.rmtree(tmp_path / "run" / name)
    assert command(tmp_path / "run") == 0
    assert not (tmp_path / "run" / "videos").exists()


def test_checkpoints_of_another_vocabulary_are_refused_with_the_difference(
    finished, tmp_path, capsys
):
    shutil.copytree(finished, tmp_path / "run")
    pieces = (*world_text.PIECES, *recurring_texts((CropVideo(),), DIALECT), "another")
    tokenizer_file.save(build_vocabulary(pieces, DIALECT), tmp_path / "run" / "tokenizer")
    (tmp_path / "run" / "result.json").unlink()
    size = tokenizer_file.load(finished / "tokenizer", DIALECT).size
    assert command(tmp_path / "run") == 1
    message = capsys.readouterr().err
    for part in ("checkpoints/align/3", f"vocabulary.size: {size} -> {size + 1}\n", "\n  model."):
        assert part in message


# --- from a checkpoint, with other settings ---


def test_a_run_that_diverged_is_saved_by_the_command_that_it_prints(finished, tmp_path, capsys):
    files = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    begin = ("--resume-from", str(finished / "checkpoints/rl/4"))
    bad, saved = tmp_path / "bad run", tmp_path / "bad run-2"
    assert command(bad, *begin, "--rl.optimizer.learning-rate", "1e38") == 1
    flags = shlex.split(capsys.readouterr().err.partition(": add ")[2].partition(" at its end")[0])
    # A tenth of an absurd rate still is one.
    assert command(bad, *begin, *flags[:-1], "1e-3") == 0
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == files
    changes = [
        json.loads((folder / "config.json").read_text())["resumed"][-1]["changed"]
        for folder in (bad, saved)
    ]
    rates = ["0.001", "1e+38", "0.001"]
    assert changes == [{"rl.optimizer.learning_rate": rates[i : i + 2]} for i in range(2)]
    lines, sound = (read_metrics(folder / "metrics.jsonl") for folder in (saved, finished))
    assert [line["loss"] for line in lines] == [line["loss"] for line in sound]
    assert [line["step"] for line in lines if "changed_after" in line] == [4]
    assert result_of(saved)["after"] == result_of(finished)["after"]
    assert command(saved, "--resume-from", str(finished / "checkpoints/rl/6")) == 1
    assert "did not begin with --resume-from" in capsys.readouterr().err
    assert "After rl 4 of" in write_report(saved).read_text()
    # Of a run that began with steps of RL, only what was made before them.
    older = tmp_path / "older"
    begin_with(str(saved / "checkpoints/sft/4"), read_config(finished, ""), str(older))
    (start,) = read_config(older, "")["resumed"]
    assert (start["phase"], start["step"], start["changed"]) == ("sft", 4, {})
    assert {line["phase"] for line in read_metrics(older / "metrics.jsonl")} == {"align", "sft"}
    assert not list((older / "evaluation").iterdir())


@pytest.mark.parametrize(
    ("step", "flags", "words"),
    [
        ("rl/5", (), r"no such checkpoint; give one of .*rl/4 .*rl/6\n"),
        ("rl/4", ("--seed", "1", "--sft.steps", "5"), r"keeps seed = 0, sft.steps = 4: "),
        ("rl/4", ("--rl.optimizer.name", "muon"), r'rl.optimizer.name = "adamw"'),
    ],
)
def test_what_a_checkpoint_depends_on_is_named(finished, tmp_path, capsys, step, flags, words):
    start = ("--resume-from", str(finished / "checkpoints" / step))
    assert command(tmp_path / "new", *start, *flags) == 1
    assert re.search(words, capsys.readouterr().err) and not list(tmp_path.iterdir())


# --- killed in the middle ---


def test_a_run_killed_at_random_moments_ends_like_an_uninterrupted_one(tmp_path, compiled):
    """Episodes are in flight at every checkpoint; benchmarks.killing has more kills."""
    tally = kill_again_and_again(3, 3, tmp_path, compiled, max_staleness=1)
    assert tally.kills.total() == 3
    assert tally.runs >= 1
    assert len(tally.kills) >= 2
