"""Transcripts: an episode as JSON, with tokens, authors, calls and rewards."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paravt_jax.method.protocol import PINNED, render_call
from paravt_jax.method.records import CropCall
from paravt_jax.method.rewards import RewardSettings
from paravt_jax.world.videos import STEP
from rollout.agent.episode import EpisodeSettings, play, split_prompt
from rollout.agent.transcript import transcript
from rollout.engine.requests import run
from tests.turns import score

PLAN = (
    "look closer\n</think>\n"
    + render_call(CropCall(0, 16))
    + "\n"
    + render_call(CropCall(500, 516))
)
ANSWER = "the crops show seven\n</think>\n<answer> seven</answer>"


@pytest.fixture
def written(scripted, small_environment, small_questions):
    """written(turns) plays an episode and returns it with its transcript, read back from JSON."""

    def make(turns, credit=None, report=" seven from 8 to 10"):
        setting = EpisodeSettings(4, 0.7)
        (episode,) = run(
            scripted(turns, report=report),
            [play(small_environment, small_questions[0], setting, 0)],
        )
        rewards = score(episode.question, episode.turns, RewardSettings())
        content = transcript(
            episode, rewards, setting, small_environment.protocol.vocabulary, credit
        )
        return episode, json.loads(json.dumps(content, allow_nan=False))

    return make


def test_it_has_question_overview_calls_and_rewards(written, small_questions):
    episode, content = written([PLAN, ANSWER])
    question = small_questions[0]
    assert content["question"]["id"] == question.id
    assert content["question"]["options"] == list(question.options)
    assert content["overview"] == [frame.time for frame in episode.trajectory.frames]
    assert content["answer"] == "seven"
    good, bad = content["turns"][0]["calls"]
    assert good["start"] == 0
    assert good["end"] == 16
    assert good["status"] == "executed"
    assert good["times"] == list(range(0, 16, STEP))
    assert good["response"] == " seven from 8 to 10"
    assert bad["status"] == "bad_window"
    assert bad["times"] == []
    assert bad["response"].startswith("error")
    assert content["turns"][1]["calls"] == []
    rewards = content["rewards"]
    assert rewards["total"] == pytest.approx(
        rewards["accuracy"] + rewards["format"] + rewards["tool"]
    )


def test_a_turns_tokens_join_to_its_text(written):
    episode, content = written([PLAN, ANSWER])
    assert len(content["turns"]) == len(episode.turns) == 2
    for turn, shown in zip(episode.turns, content["turns"], strict=True):
        assert "".join(token["text"] for token in shown["tokens"]) == turn.text + "<|im_end|>"
        pinned = [token for token in shown["tokens"] if token["author"] == "pinned"]
        assert "".join(token["text"] for token in pinned) == PINNED
        assert all(token["logprob"] is None for token in pinned)
        sampled = [token["logprob"] for token in shown["tokens"] if token["author"] == "model"]
        assert sampled == [-(n + 1) / 8 for n in range(len(sampled))]


def test_structural_tokens_are_marked(written):
    _, content = written([PLAN, ANSWER])

    def marks(turn: int) -> list[tuple[str, str]]:
        return [
            (token["text"].strip(), token["kind"])
            for token in content["turns"][turn]["tokens"]
            if token["kind"]
        ]

    calls = [("<tool_call>", "call-open"), ("</tool_call>", "call-close")]
    assert marks(0) == [("</think>", "think-close"), *calls, *calls]
    assert marks(1) == [
        ("</think>", "think-close"),
        ("<answer>", "answer-open"),
        ("</answer>", "answer-close"),
    ]
    assert all(token["credit"] is None for turn in content["turns"] for token in turn["tokens"])


def test_credit_is_shown_at_structural_tokens_only(written):
    """credit[0] is of the prompt's last token, credit[n] of the n-th token after it."""
    _, content = written([PLAN, ANSWER], credit=np.arange(200, dtype=np.float32))
    episode, _ = written([PLAN, ANSWER])
    ids = split_prompt(episode.trajectory)[1]
    tokens = [token for turn in content["turns"] for token in turn["tokens"]]
    credited = [token for token in tokens if token["credit"] is not None]
    assert credited == [token for token in tokens if token["kind"]]
    assert len(credited) == 8
    first = content["turns"][0]["tokens"]
    index = next(n for n, token in enumerate(first) if token["kind"])
    assert first[index]["credit"] == index + 1
    last = next(token for token in reversed(tokens) if token["kind"] == "answer-close")
    assert last["credit"] == len(ids) - 2  # the end of the turn follows it
