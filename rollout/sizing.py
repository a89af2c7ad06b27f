"""How large an engine has to be for episodes of a known protocol: lengths of prompts, reports and whole trajectories.

Owns no setting of its own. Invariant: what the protocol allows fits; lengths are multiples of `BUCKET`, so that videos of one size share
their compiled programs.
"""

from __future__ import annotations

from collections.abc import Sequence

from paravt_jax.protocol import Protocol
from paravt_jax.records import Frame
from rollout.settings import EngineSettings

BUCKET = 256
_LATER = (512, 2048)  # tokens after a prompt: a first turn's, and later what was written and reported, too


def engine_settings(protocol: Protocol, overview: int, crop: int, episodes: int = 1, cache_tokens: int = 0) -> EngineSettings:
    """An engine for so many episodes side by side, each with a prompt of up to `overview` tokens and sub-agents' of up to `crop`.

    `cache_tokens`: keys and values that are kept; 0 for room for every episode and its sub-agents at their longest.
    """
    limits = protocol.settings
    overview, crop = round_up(overview), round_up(crop)
    report, longest = round_up(crop + limits.summary_tokens), round_up(overview + limits.trajectory_tokens)
    kept = max(longest, cache_tokens or episodes * (longest + limits.max_calls * report))
    return EngineSettings(
        own=tuple(sorted({report, longest, *(min(round_up(overview + later), longest) for later in _LATER)})),
        prefill=tuple(sorted({BUCKET, crop, overview})),
        slots=episodes * limits.max_calls,
        fan=limits.max_calls,
        pages=-(-kept // EngineSettings.page),
        prefill_tokens=overview,
    )


def overview_tokens(protocol: Protocol, frames: int, frame_tokens: int, last: float, tools: bool = True) -> int:
    """Tokens before the question: the system turn and so many frames, none later than `last` seconds."""
    return len(protocol.overview(_frames(frames, last), frame_tokens, tools).ids)


def crop_tokens(protocol: Protocol, frame_tokens: int, last: float) -> int:
    """Tokens of a sub-agent's prompt."""
    return len(protocol.window(_frames(protocol.settings.crop_frames, last), frame_tokens).ids)


def round_up(tokens: int) -> int:
    return -(-tokens // BUCKET) * BUCKET


def _frames(count: int, last: float) -> Sequence[Frame]:
    return [Frame("", 0, last)] * count
