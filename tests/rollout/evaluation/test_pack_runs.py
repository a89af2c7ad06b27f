"""Evaluations with prompt packs: what agents read, token by token, and what the folder keeps."""

from __future__ import annotations

import json

import pytest

from paravt_jax.method.protocol import render_call
from paravt_jax.method.records import CropCall
from rollout import evaluate as command
from rollout.evaluation import players
from rollout.evaluation.folder import read_json
from rollout.evaluation.packs import own_pack
from tests.paravt_jax.benchmarks import published
from tests.rollout.evaluation.release_stand_in import write_release

LOOK = f"look closer\n</think>\n{render_call(CropCall(2, 6))}"
ANSWER = "x\n</think>\n<answer>B</answer>"
IMAGE = "<|vision_start|><|image_pad|>"


@pytest.fixture
def play(checkpoint, split, videos, scripted, small_model, monkeypatch, tmp_path, capfd):
    """play(*argv) runs the command on one question; returns code, prompts, printed text.

    Only the engine is replaced, by a sampler that calls the tool once and then answers.
    """

    def run(*argv: str, turns=(LOOK, ANSWER)) -> tuple[int, list[str], str]:
        sampler = scripted(turns)

        monkeypatch.setattr(players, "Engine", lambda *_: sampler)
        places = {"--model": checkpoint, "--data": split, "--videos": videos}
        defaults = {name: str(place) for name, place in places.items() if name not in argv}
        defaults |= {"--benchmark": "videomme"} if "--benchmark" not in argv else {}
        defaults |= {"--out": str(tmp_path / "out")} if "--out" not in argv else {}
        words = [word for pair in defaults.items() for word in pair]
        code = command.main([*words, "--limit", "1", *argv])
        return code, [shown(sampler, request) for request in sampler.asked], capfd.readouterr().err

    return run


def shown(sampler, request) -> str:
    """A prompt as text, with one placeholder per frame."""
    text = sampler.vocabulary.decode(request.ids)
    while "<|image_pad|><|image_pad|>" in text:
        text = text.replace("<|image_pad|><|image_pad|>", "<|image_pad|>")
    return text.replace(f"{IMAGE}<|vision_end|>", "[F]")


def test_a_written_copy_of_our_pack_asks_the_same_tokens(play, tmp_path):
    assert command.main(["--write-protocol", str(tmp_path / "copy")]) == 0
    _, ours, _ = play("--frames", "2")
    _, copied, _ = play(
        "--frames", "2", "--protocol", str(tmp_path / "copy"), "--out", str(tmp_path / "other")
    )
    assert ours == copied
    assert len(ours) == 3  # the plan, the sub-agent, the answer
    configs = [read_json(tmp_path / name / "config.json")["identity"] for name in ("out", "other")]
    assert [config["protocol"] for config in configs] == ["own", "copy"]
    assert configs[0]["protocol_digest"] == configs[1]["protocol_digest"] == own_pack().digest


def test_a_changed_pack_is_read_by_every_agent_and_does_not_continue_the_folder(play, tmp_path):
    folder = tmp_path / "mine"
    assert command.main(["--write-protocol", str(folder)]) == 0
    words = {
        "system.agentic": "S {tools}",
        "question.mcq": "Q {question}{options} {video}",
        "option": " ({letter}) {option}",
        "subagent": "From {start} to {end}: {question}",
    }
    for name, text in words.items():
        (folder / f"{name}.txt").write_text(text + "\n")
    about = (folder / "pack.toml").read_text()
    (folder / "pack.toml").write_text(about.replace("text_first = false", "text_first = true"))
    schema = {"type": "function", "function": {"name": "crop_video"}}
    (folder / "schemas.crop_video.json").write_text(json.dumps(schema))
    argv = ("--frames", "2", "--protocol", str(folder))
    code, (first, crop, second), _ = play(*argv)
    assert code == 0
    times = "<0.0 seconds>[F]<126.0 seconds>[F]"
    asked = "Q How many apples are there? (A) One. (B) Two. (C) Three. (D) Four. w0.mp4"
    assert first == (
        f"<|im_start|>system\nS {json.dumps(schema)}<|im_end|>\n<|im_start|>user\n{asked}{times}"
        "<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    assert crop.startswith(
        "<|im_start|>user\nFrom 2.0 to 6.0: How many apples are there?<2.0 seconds>[F]"
    )
    assert second.startswith(first)
    (folder / "option.txt").write_text(" {letter} {option}\n")
    code, prompts, printed = play(*argv)
    assert (code, prompts) == (2, [])
    assert "protocol_digest: " in printed
    assert "holds another evaluation" in printed


def test_the_release_is_asked_and_played_as_its_evaluator_does(play, tmp_path):
    checkout = write_release(tmp_path / "release")
    argv = ("--protocol", "published", "--release", str(checkout))
    bare = render_call(CropCall(2, 6))
    code, prompts, _ = play(*argv, turns=(bare, bare, bare, "<answer>B</answer>"))
    assert code == 0
    tool = (
        '{"type": "function", "function": {"name": "crop_video", "description": "Cut out a piece.",'
        ' "parameters": {"type": "object", "properties": {"start_time": {"type": "number"}}}}}'
    )
    opening = (
        f"<|im_start|>system\nYou cut videos.\n<tools>\n{tool}\n</tools>\n"
        'Write <tool_call>{"name": "crop_video"}</tool_call>.<|im_end|>\n<|im_start|>user\n'
        + "[F]"
        * 64
        + "Asked: How many apples are there?\nChoices:\n"
        "A. A. One.\nB. B. Two.\nC. C. Three.\nD. D. Four.\nJust the letter. Its file is w0.mp4"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    result = (
        f"{bare}<|im_end|>\n<|im_start|>user\n"
        + "[F]" * 2
        + "<tool_response>\n2 pictures, 2.0s until 6.0s.\n</tool_response><|im_end|>\n"
    )
    turn = f"{result}<|im_start|>assistant\n"
    forced = f"{result}<|im_start|>user\nOnly the letter now.<|im_end|>\n<|im_start|>assistant\n"
    assert prompts == [
        opening,
        opening + turn,
        opening + turn + turn,
        opening + turn + turn + forced,
    ]
    config = read_json(tmp_path / "out" / "config.json")
    assert config["identity"]["protocol"] == "published"
    assert (config["identity"]["snap"], config["identity"]["jpeg"]) == (28, 85)
    assert command.main(["--table", str(tmp_path / "out")]) == 0


def test_the_release_asks_charades_about_a_native_video_in_its_minimal_prompt(play, tmp_path):
    checkout = write_release(tmp_path / "release")
    data = published.write_split("charades", tmp_path / "rows", [published.charades("w0.mp4")])
    argv = ("--protocol", "published", "--release", str(checkout), "--benchmark", "charades")
    turns = ("The event happens in the 24.3 - 30.4 seconds.",)
    code, (prompt,), _ = play(*argv, "--data", str(data), turns=turns)
    assert code == 0
    assert prompt.startswith("<|im_start|>system\n# Cut\n{")
    assert "<|vision_start|><1.0 seconds><|vision_start|><|video_pad|>" in prompt
    assert prompt.endswith(
        'Look for "person turn a light on.". Say from and to. Its file is w0.mp4'
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert read_json(tmp_path / "out" / "summary.json")["miou"] == 1.0


def test_a_refused_run_leaves_no_folder(play, tmp_path):
    checkout = write_release(tmp_path / "release")
    published_argv = ("--protocol", "published", "--release", str(checkout))
    for argv, message in (
        (("--protocol", "nowhere"), "--protocol nowhere: no such folder"),
        ((*published_argv, "--max-pixels", "50176"), "--max-pixels 50176: --protocol published"),
        ((*published_argv, "--no-pin-think", "--frames", "8"), "--frames 8: --protocol published"),
    ):
        code, prompts, printed = play(*argv)
        assert (code, prompts) == (2, [])
        assert message in printed
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("system.agentic.txt", None, "system.agentic.txt: missing; write it"),
        ("question.mcq.txt", None, "question.mcq.txt: missing; write it"),
        ("question.mcq.txt", "{row.nosuch}", "question.mcq.txt: {row.nosuch}: no row has this"),
        ("hints.nosuch.txt", "Look.", "hints.nosuch.txt: no such tool; rename it to one of crop_"),
    ],
)
def test_a_text_that_the_run_needs_is_missed_before_the_model_is_loaded(
    play, tmp_path, file, content, message
):
    folder = tmp_path / "mine"
    assert command.main(["--write-protocol", str(folder)]) == 0
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    code, prompts, printed = play("--protocol", str(folder))
    assert (code, prompts) == (2, [])
    assert f"--protocol {folder}: {message}" in printed
    assert not (tmp_path / "out").exists()


def test_one_row_that_a_pack_cannot_ask_is_left_out_as_broken(play, tmp_path):
    folder = tmp_path / "mine"
    assert command.main(["--write-protocol", str(folder)]) == 0
    (folder / "question.mcq.txt").write_text("{row.task_type}: {row.question}{options}")
    rows = [
        published.videomme("1-1", "w0", "B"),
        published.videomme("1-2", "w0", "B", task_type=None),
    ]
    data = published.write_split("videomme", tmp_path / "rows", rows)
    argv = ("--protocol", str(folder), "--data", str(data), "--frames", "2", "--limit", "2")
    code, prompts, printed = play(*argv, turns=(ANSWER,))
    assert code == 0
    assert len(prompts) == 1
    assert "Counting Problem: How many apples are there?\nA. One." in prompts[0]
    assert "left out, broken: 1 questions" in printed
    assert "task_type is missing" in printed


@pytest.mark.slow
def test_a_small_model_plays_with_every_pack(checkpoint, split, videos, tmp_path, capfd):
    checkout = write_release(tmp_path / "release")
    assert command.main(["--write-protocol", str(tmp_path / "copy")]) == 0
    packs = (
        ["--frames", "4", "--turn-tokens", "32"],
        ["--frames", "4", "--turn-tokens", "32", "--protocol", str(tmp_path / "copy")],
        ["--protocol", "published", "--release", str(checkout), "--episodes", "1"],
    )
    for number, argv in enumerate(packs):
        out = tmp_path / f"out-{number}"
        places = [f"--model={checkpoint}", f"--data={split}", f"--videos={videos}", f"--out={out}"]
        assert command.main([*places, "--benchmark=videomme", "--limit=1", *argv]) == 0
        assert read_json(out / "summary.json")["n"] == 1
