"""Converts an episode to JSON for people and the report: one line of episodes.jsonl.

Tokens are decoded one by one, for display only: their texts are never encoded again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float

from paravt_jax.method.records import (
    Author,
    CallOutcome,
    CropCall,
    Episode,
    Segment,
    ToolCall,
    Turn,
)
from paravt_jax.method.rewards import Rewards
from paravt_jax.method.structure import Kind, find_structure
from paravt_jax.method.tokenizer import Vocabulary
from rollout.agent.episode import EpisodeSettings, split_prompt

_REWARDS = ("accuracy", "format", "anchor", "tool", "total")


def transcript(
    episode: Episode,
    rewards: Rewards,
    settings: EpisodeSettings,
    vocabulary: Vocabulary,
    credit: Float[np.ndarray, " t"] | None = None,
) -> dict[str, Any]:
    """Return everything that happened in an episode, as JSON values.

    Args:
        episode: The episode.
        rewards: Its rewards.
        settings: How it was played.
        vocabulary: Decodes the tokens.
        credit: Advantage of each token after the cut of `split_prompt`. It is shown at structural
            tokens.
    """
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
        "k": settings.frames,
        "dispatch": settings.dispatch,
        "temperature": settings.temperature,
        "overview": overview_times(episode),
        "turns": _turns(episode, vocabulary, credit),
        "answer": episode.answer,
        "stop": str(episode.stop),
        "rewards": {
            name: getattr(rewards, name) for name in _REWARDS if name not in rewards.uncounted
        },
        "compliant": rewards.compliant,
    }


def overview_times(episode: Episode) -> list[float]:
    """Return the times of the overview frames, in seconds."""
    return [frame.time for frame in episode.trajectory.frames]


def _turns(
    episode: Episode, vocabulary: Vocabulary, credit: Float[np.ndarray, " t"] | None
) -> list[dict[str, Any]]:
    """Return each turn's text, tokens and calls."""
    trajectory = episode.trajectory
    positions, kinds = find_structure(vocabulary.token_bytes, trajectory.ids, trajectory.authors)
    kind_at = dict(zip(positions.tolist(), kinds.tolist(), strict=True))
    # `credit` starts at the cut of `split_prompt`, positions with the trajectory.
    credit_offset = len(split_prompt(trajectory)[0])
    turns: list[dict[str, Any]] = []
    tokens: list[dict[str, Any]] = []
    position = 0
    for segment in trajectory.segments:
        # A turn is a pinned opening, if there is one, and the MODEL segment after it.
        written = segment.author in (Author.PINNED, Author.MODEL)
        logprobs = _logprobs(segment)
        for n, id in enumerate(segment.ids if written else ()):
            token: dict[str, Any] = {
                "id": int(id),
                "text": vocabulary.decode([int(id)]),
                "author": segment.author.name.lower(),
                "kind": None,
                "credit": None,
                "logprob": logprobs[n],
            }
            if position + n in kind_at:
                token["kind"] = Kind(kind_at[position + n]).name.lower().replace("_", "-")
                if credit is not None:
                    token["credit"] = float(credit[position + n - credit_offset])
            tokens.append(token)
        position += len(segment.ids)
        if segment.author is Author.MODEL:
            number = len(turns)
            turn = episode.turns[number] if number < len(episode.turns) else Turn("")
            calls = [_call(call) for call in turn.calls]
            turns.append({"text": turn.text, "tokens": tokens, "calls": calls})
            tokens = []
    return turns


def _call(outcome: CallOutcome) -> dict[str, Any]:
    """Return one call: the window of crop_video, or another tool's name and arguments."""
    call = outcome.call
    record: dict[str, Any] = {}
    if isinstance(call, ToolCall):
        record = {"tool": call.tool, "arguments": call.arguments}
    window = call if isinstance(call, CropCall) else None
    frames = outcome.subagent.frames if outcome.subagent else ()
    sampled = outcome.subagent.segments[1:] if outcome.subagent else ()
    if sampled:
        ids, logprobs = sampled[0].ids.tolist(), _logprobs(sampled[0])
        record["report"] = {"ids": ids, "logprobs": logprobs}
    return record | {
        "start": window.start if window else None,
        "end": window.end if window else None,
        "status": str(outcome.status),
        "times": [frame.time for frame in frames],
        "response": outcome.response,
    }


def _logprobs(segment: Segment) -> list[float] | list[None]:
    """Return the log-prob of each token; None for those that were not sampled."""
    if segment.logprobs is None:
        return [None] * len(segment.ids)
    return segment.logprobs.tolist()
