"""An episode as JSON: what a person reads and the report draws.

Owns the format of a line of episodes.jsonl. Text is decoded token by token for display; nothing is made from it again.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jaxtyping import Float

from paravt_jax.method.records import Author, CallOutcome, CropCall, Episode, Segment, ToolCall
from paravt_jax.method.rewards import Rewards
from paravt_jax.method.structure import Kind, find_structure
from paravt_jax.method.tokenizer import Vocabulary
from rollout.agent.episode import EpisodeSettings, split_prompt


def transcript(
    episode: Episode,
    rewards: Rewards,
    setting: EpisodeSettings,
    vocabulary: Vocabulary,
    credit: Float[np.ndarray, " t"] | None = None,
) -> dict[str, Any]:
    """The whole course of an episode. `credit` is the advantage of each token from the prompt's last one on (as
    `split_prompt` cuts), shown at the structural tokens."""
    trajectory = episode.trajectory
    start = len(split_prompt(trajectory)[0])
    positions, kinds = find_structure(vocabulary.token_bytes, trajectory.ids, trajectory.authors)
    marks = {
        int(p): Kind(int(k)).name.lower().replace("_", "-")
        for p, k in zip(positions, kinds, strict=True)
    }
    turns, at = [], 0
    pending: list[dict[str, Any]] = []
    for segment in trajectory.segments:
        if segment.author in (Author.PINNED, Author.MODEL):
            pending += _tokens(segment, at, start, marks, vocabulary, credit)
        if segment.author is Author.MODEL:
            calls = episode.turns[len(turns)].calls if len(turns) < len(episode.turns) else ()
            turns.append({"tokens": pending, "calls": [_call(call) for call in calls]})
            pending = []
        at += len(segment.ids)
    question = episode.question
    return {
        "question": {
            "id": question.id,
            "text": question.text,
            "kind": str(question.kind),
            "options": question.options,
            "answer": question.answer,
        },
        "video": question.video,
        "k": setting.frames,
        "dispatch": setting.dispatch,
        "temperature": setting.temperature,
        "overview": [
            frame.time
            for segment in trajectory.segments
            if segment.author is Author.PROMPT
            for frame in segment.frames
        ],
        "turns": turns,
        "answer": episode.answer,
        "stop": str(episode.stop),
        "rewards": {
            name: getattr(rewards, name)
            for name in ("accuracy", "format", "anchor", "tool", "total")
        },
        "compliant": rewards.compliant,
    }


def _tokens(
    segment: Segment,
    at: int,
    start: int,
    marks: dict[int, str],
    vocabulary: Vocabulary,
    credit: Float[np.ndarray, " t"] | None,
) -> list[dict[str, Any]]:
    tokens = []
    for n, token in enumerate(segment.ids):
        kind = marks.get(at + n)
        tokens.append(
            {
                "text": vocabulary.decode([int(token)]),
                "author": segment.author.name.lower(),
                "kind": kind,
                "credit": float(credit[at + n - start]) if credit is not None and kind else None,
                "logprob": _number(segment.logprobs[n]) if segment.logprobs is not None else None,
            }
        )
    return tokens


def _number(value: float) -> float | None:
    """None for a log-prob that the sampler did not know."""
    return float(value) if math.isfinite(value) else None


def _call(outcome: CallOutcome) -> dict[str, Any]:
    """A call of crop_video has its window's times; others have the tool's name and arguments."""
    call, seen = outcome.call, outcome.subagent
    window = call if isinstance(call, CropCall) else None
    return {
        **({"tool": call.tool, "arguments": call.arguments} if isinstance(call, ToolCall) else {}),
        "start": window.start if window else None,
        "end": window.end if window else None,
        "status": str(outcome.status),
        "times": [frame.time for frame in (seen.frames if seen else outcome.frames)],
        "response": outcome.response,
    }
