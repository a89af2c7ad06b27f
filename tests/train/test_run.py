"""The command from end to end, at a size of seconds: what it leaves behind, and that it can be stopped at any moment."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import train.export
import train.run
from benchmarks.killing import kill_again_and_again
from models.processor import Processor
from models.qwen3_vl.hf import load
from paravt_jax.method import protocol, tokenizer
from paravt_jax.method.tools.crop_video import CropVideo
from paravt_jax.world import text as world_text
from paravt_jax.world.vocabulary import build_tokenizer, save_tokenizer
from rollout.ask import Assistant
from train.durable.checkpoint import Checkpoints
from train.durable.metrics import read_metrics

ROOT, PROGRAM = pathlib.Path(__file__).parents[2], pathlib.Path(__file__).with_name("small.py")


def command(folder: pathlib.Path, *arguments: str) -> int:
    return train.run.main(["--config=small", "--run-dir", str(folder), *arguments])


@pytest.fixture(scope="module")
def finished(small, tmp_path_factory) -> pathlib.Path:
    """The folder of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("run") / "small"
    assert command(folder) == 0
    return folder


def result_of(folder: pathlib.Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def metrics_of(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock says."""
    return [
        {k: v for k, v in line.items() if k != "wall" and not k.startswith(("time/", "speed/"))}
        for line in read_metrics(folder / "metrics.jsonl")
    ]


# --- what a run leaves behind ---


def test_the_result_has_a_row_for_every_setting(finished, small):
    settings, result = small.small().evaluation, result_of(finished)
    for moment in ("before", "after"):
        rows = result[moment]
        asked = itertools.product(settings.frames, settings.dispatch, settings.temperatures)
        assert [(row["k"], row["dispatch"], row["temperature"]) for row in rows] == list(asked)
        for row in rows:
            assert set(row) == {
                "k",
                "dispatch",
                "temperature",
                "accuracy",
                "format",
                "calls",
                "turns",
                "n",
                "interval",
                "share_with_calls",
                "refused_reports",
                "without_answer",
                "unread",
                "stops",
            }
            often = row["dispatch"] == "parallel" and row["temperature"] > 0
            assert row["n"] == settings.questions * (settings.samples if often else 1)
            assert row["turns"] >= 1 and 0 <= row["accuracy"] <= 1 and 0 <= row["format"] <= 1
            assert row["calls"] == 0 or row["dispatch"] != "none"
    assert set(result) == {
        *(
            "name",
            "seed",
            "before",
            "after",
            "token_mismatches",
            "logprob_gap",
            "recompilations_after_warmup",
            "seconds",
        ),
    }


def test_nothing_differs_between_sampler_and_trainer_and_nothing_compiles_late(finished):
    result = result_of(finished)
    assert result["token_mismatches"] == 0 and 0 < result["logprob_gap"] < 1e-3
    assert result["recompilations_after_warmup"] == 0 and result["seconds"] > 1
    assert [
        line["recompilations"]
        for line in read_metrics(finished / "metrics.jsonl")
        if line["phase"] == "rl"
    ][3:] == [0, 0, 0]


def test_metrics_are_one_history(finished, small):
    run, lines = small.small(), read_metrics(finished / "metrics.jsonl")
    wanted = [
        (phase, n + 1) for phase in ("align", "sft", "rl") for n in range(getattr(run, phase).steps)
    ]
    assert [(line["phase"], line["step"]) for line in lines] == wanted
    assert any((finished / "tensorboard" / "rl").iterdir())
    assert {
        "reward/tool",
        "length/response",
        "time/rollout",
        "speed/tokens",
        "speed/mfu",
        "groups/silent",
        "kl_reference",
        "grad_norm",
    } <= set(lines[-1])


def test_episodes_are_written_down_and_shown(finished):
    episodes = [json.loads(line) for line in (finished / "episodes.jsonl").read_text().splitlines()]
    assert [phase for phase, _ in itertools.groupby(e["phase"] for e in episodes)] == [
        "before",
        "rl",
        "after",
    ]
    assert {e["step"] for e in episodes if e["phase"] == "rl"} == {2, 4, 6}
    for episode in episodes:
        assert (
            (finished / episode["video"]).is_file()
            and episode["turns"]
            and len(episode["overview"]) == episode["k"]
        )
    credit = [
        t["credit"]
        for e in episodes
        if e["phase"] == "rl"
        for turn in e["turns"]
        for t in turn["tokens"]
        if t["kind"]
    ]
    assert credit and all(isinstance(value, float) for value in credit)
    report = (finished / "report.html").read_text()
    assert episodes[0]["question"]["text"] in report and "<svg" in report


def test_the_trained_model_can_be_opened_and_asked(finished, small):
    model, run = load(finished / "model"), small.small()
    weights = nnx.state(model.text)
    saved = Checkpoints(finished / "checkpoints" / "rl", read_only=True).restore_part(
        {"text": weights}, run.rl.steps
    )
    jax.tree.map(np.testing.assert_array_equal, weights, saved["text"])
    assistant = Assistant(model, tokenizer.load(finished / "model"), run.protocol)
    video = next((finished / "videos").rglob("*.mp4"))
    assert assistant.ask(
        video, "What is the number in the scene that starts at 8 s?", frames=4
    ).turns


def test_every_checkpoint_is_exported_bit_for_bit_and_opens_with_its_processor(
    finished, tmp_path, capsys
):
    for phase, step, kept in (
        ("rl", "latest", 6),
        ("rl", "4", 4),
        ("sft", "best", None),
        ("align", "3", 3),
    ):
        to = tmp_path / f"{phase}-{step}"
        code = train.export.main(
            ["--run-dir", str(finished), "--phase", phase, "--step", step, "--to", str(to)]
        )
        assert code == (kept is None), capsys.readouterr().err
        if kept is None:
            continue
        model = load(to)
        weights = {"text": nnx.state(model.text), "vision": nnx.state(model.vision)}
        saved = Checkpoints(finished / "checkpoints" / phase, read_only=True).restore_part(
            weights, kept
        )
        jax.tree.map(np.testing.assert_array_equal, weights, saved)
    assert {file.name for file in (finished / "model").iterdir()} == {
        file.name for file in (tmp_path / "rl-latest").iterdir()
    }
    assert (tmp_path / "rl-latest" / "model.safetensors").read_bytes() == (
        finished / "model" / "model.safetensors"
    ).read_bytes()
    processor = Processor.load(tmp_path / "rl-4", model.config)
    image, clip = np.zeros((32, 32, 3), np.uint8), np.zeros((4, 32, 32, 3), np.uint8)
    content = [
        {"type": "image", "image": image},
        {"type": "video", "video": (clip, [0.0, 1.0, 2.0, 3.0])},
        {"type": "text", "text": "Which?"},
    ]
    inputs = processor(
        [{"role": "system", "content": "Look."}, {"role": "user", "content": content}]
    )
    text = processor.tokenizer.decode(inputs.ids)
    assert text.startswith(
        "<|im_start|>system\nLook.<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|>"
    )
    assert text.endswith("Which?<|im_end|>\n<|im_start|>assistant\n") and len(inputs.grids) == 2
    with pytest.raises(Exception, match="writes no tools"):
        processor([{"role": "user", "content": "Which?"}], tools=[{"type": "function"}])


def test_runs_of_an_older_format_are_exported_and_of_a_newer_one_refused_in_a_line(
    finished, tmp_path, capsys
):
    shutil.copytree(finished, tmp_path / "run")
    config = json.loads((finished / "config.json").read_text())
    for number, code in ((1, 0), (config["format"] + 1, 1)):
        (tmp_path / "run" / "config.json").write_text(json.dumps(config | {"format": number}))
        to = tmp_path / str(number)
        assert train.export.main(
            ["--run-dir", str(tmp_path / "run"), "--to", str(to)]
        ) == code and to.exists() is (code == 0)
    said = capsys.readouterr().err
    assert "has format 4" in said and said.count("\n") == 1


def test_what_cannot_be_exported_is_said_in_a_line(finished, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    shutil.copytree(finished / "checkpoints" / "sft", tmp_path / "odd" / "checkpoints" / "sft")
    (tmp_path / "odd" / "config.json").write_text("{}")
    save_tokenizer(build_tokenizer(("another",)), tmp_path / "odd" / "tokenizer")
    new = str(tmp_path / "new")
    cases = [
        (
            finished,
            "rl",
            "5",
            new,
            "--step 5: no such checkpoint of rl in .*; kept are 4, 6 \\(best: 6\\)",
        ),
        (
            finished,
            "sft",
            "best",
            new,
            "--step best: no such checkpoint of sft in .*; kept are 2, 4\n",
        ),
        (finished, "rl", "6", str(tmp_path / "there"), "--to .*there: exists; name a new folder"),
        (tmp_path, "rl", "6", new, "no run's folder, it has no config.json"),
        (
            tmp_path / "odd",
            "rl",
            "6",
            new,
            "--phase rl: .*odd has no checkpoints of it; it has those of sft",
        ),
        (tmp_path / "odd", "sft", "4", new, "tokenizer/ has another vocabulary"),
    ]
    for folder, phase, step, to, words in cases:
        assert (
            train.export.main(
                ["--run-dir", str(folder), "--phase", phase, "--step", step, "--to", to]
            )
            == 1
        )
        said = capsys.readouterr().err
        assert re.search(words, said) and said.count("\n") == 1, said
    assert not (tmp_path / "new").exists()


# --- the same command again, and others in the same folder ---


def test_the_same_command_again_does_nothing_twice(finished):
    before = {
        p: p.stat().st_mtime_ns
        for part in ("checkpoints", "evaluation", "records", "videos")
        for p in (finished / part).rglob("*")
    }
    metrics, result = (finished / "metrics.jsonl").read_bytes(), result_of(finished)
    assert command(finished) == 0
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert (finished / "metrics.jsonl").read_bytes() == metrics
    again = result_of(finished)
    assert again.pop("seconds") >= result.pop("seconds") and again == result


def test_a_folder_of_another_configuration_is_refused_with_the_difference(finished, capsys):
    result = (finished / "result.json").read_bytes()
    assert command(finished, "--seed", "1", "--rl.steps", "7") == 1
    message = capsys.readouterr().err
    assert (
        "seed: 0 -> 1" in message
        and "rl.steps: 6 -> 7" in message
        and "Name another --run-dir" in message
    )
    assert (finished / "result.json").read_bytes() == result


def test_checkpoints_of_another_vocabulary_are_refused_with_the_difference(
    finished, tmp_path, capsys
):
    shutil.copytree(finished, tmp_path / "run")
    pieces = (*world_text.PIECES, *protocol.recurring_texts((CropVideo(),)), "another")
    save_tokenizer(build_tokenizer(pieces), tmp_path / "run" / "tokenizer")
    size = tokenizer.load(finished / "tokenizer").size
    assert command(tmp_path / "run") == 1
    said = capsys.readouterr().err
    assert "checkpoints/align/3 is another run's (stored -> wanted):\n" in said
    assert (
        f"\n  vocabulary.size: {size} -> {size + 1}\n  vocabulary.digest: " in said
        and "\n  model." in said
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_asked_to_stop_says_how_to_go_on(
    small, tmp_path, monkeypatch, capsys, number, code
):
    def prepare(run, folder, check, questions):
        signal.raise_signal(number)
        check()
        pytest.fail("it went on")

    monkeypatch.setattr(train.run, "prepare", prepare)
    assert command(tmp_path / "run") == code
    assert (
        "preparing the data; finished videos are kept; the same command goes on"
        in capsys.readouterr().err
    )


def test_a_mesh_of_more_devices_than_there_are_costs_no_data(small, tmp_path, capsys):
    assert command(tmp_path / "run", "--mesh.fsdp", "64", "--mesh.tensor", "32") == 1
    said = capsys.readouterr().err
    assert (
        "error: mesh = 1 x 64 x 32 (data, fsdp, tensor): it takes 2048 devices" in said
        and "at most 1" in said
    )
    assert not (tmp_path / "run").exists()


def test_mistakes_on_the_command_line_cost_no_device(small):
    """In a process whose JAX has no device to touch."""
    program = """
import sys, small, train.run
for arguments in (["--config=smal"], ["--config=small", "--rl.steps", "x"], ["--config=small", "--rl.stepz", "3"],
                  ["--config=small", "--sft.save-every", "1.5"], ["--config=small", "--unreadable-share", "1"]):
    try:
        train.run.main(arguments)
    except SystemExit as stop:
        print("code", stop.code, file=sys.stderr)
import jax
try:
    jax.devices()
except RuntimeError:
    print("no device", file=sys.stderr)
"""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{PROGRAM.parent}",
        "JAX_PLATFORMS": "absent",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.stderr.count("code 2") == 5 and "no device" in done.stderr, done.stderr
    for words in (
        "Did you mean small?",
        "rl.steps",
        "rl.stepz",
        "sft.save-every",
        "unreadable_share: 1",
    ):
        assert words in done.stderr, done.stderr


# --- stopped in the middle ---


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_like_one_that_was_not(tmp_path, compiled):
    tally = kill_again_and_again(6, 3, tmp_path, compiled)
    assert tally.kills.total() == 6 and tally.runs >= 1 and len(tally.ends) >= 2
