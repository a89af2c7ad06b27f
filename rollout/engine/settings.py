"""Sizes of the engine, and the longest sequences of a run, from which they follow.

A recipe states each length once: tokens of a response and of a report in `ProtocolSettings`, pixels
of a frame in `FrameSettings`, numbers of frames in budgets. The lengths of prompts, the shapes of
batches and the sizes of the engine's calls follow from these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paravt_jax.checks import require_at_least
from paravt_jax.method.protocol import Lengths, Protocol, ProtocolSettings
from paravt_jax.method.records import Frame
from rollout.engine.pages import page_count

# Prompts of single episodes are rounded up to multiples of this many tokens, so that videos of
# similar length share programs: page tables have room for the longest sequence.
BUCKET = 256
_STEP = 16  # the lengths of a run are multiples of this
LABEL_TOKENS = 12  # a frame's time and vision marks: up to 99,999.9 seconds in Qwen's tokenizer
LATEST = 99_999.9  # seconds: prompts have room for labels as long as that of this time
REQUEST_TOKENS = 32  # a sub-agent's prompt without its frames: 24 with Qwen's tokenizer
_LONG = 4096  # tokens of a long sequence


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """Sizes that a recipe chooses. All lengths follow from the run."""

    slots: int = 64
    """Sequences decoded side by side, in whole groups; 0: chosen for the devices."""
    cache_tokens: int = 65_536
    """Tokens in the KV cache; at least one whole rollout. 0: chosen for the devices."""

    def __post_init__(self):
        require_at_least("engine", self, 0, "slots", "cache_tokens")


@dataclasses.dataclass(frozen=True)
class EngineSizes:
    """All sizes of an engine.

    A call has one of three sizes: prefill (`prefill_tokens`), and decoding of all slots or of few
    rows (`few_rows`).
    """

    longest: int
    """Tokens of the longest sequence: its prompt and all that may follow."""
    slots: int = 64
    """Sequences decoded side by side."""
    rows_per_prefix: int = 8
    """Rows of a decoding call that read their common pages together."""
    page: int = 16
    """Tokens per page of the KV cache, and of a job of prefill."""
    pages: int = 4096
    """Pages in the KV cache."""
    prefill_tokens: int = 1024
    """Tokens prefilled per call, over all sequences. Longer prompts take several calls."""
    few_rows: int = 8
    """Up to this many sequences are decoded in a smaller call, with drafts."""
    drafts: int | None = None
    """Tokens of a sequence that are guessed and verified per step of such a call. None: 5, but none
    on a CPU, where the time of a step grows with its tokens."""
    steps: int = 16
    """Steps of a decoding call, between scheduling decisions."""

    def __post_init__(self):
        counts = ("longest", "slots", "rows_per_prefix", "page", "pages", "few_rows", "steps")
        require_at_least("EngineSizes", self, 1, *counts)
        if self.drafts is not None:
            require_at_least("EngineSizes", self, 0, "drafts")
        multiples = {"prefill_tokens": "page"}
        multiples |= {"slots": "rows_per_prefix", "few_rows": "rows_per_prefix"}
        if self.few_rows > self.slots:
            raise ValueError(
                f"EngineSizes.few_rows: {self.few_rows}; give at most slots = {self.slots}"
            )
        for name, of in multiples.items():
            value, factor = getattr(self, name), getattr(self, of)
            if value < 1 or value % factor:
                raise ValueError(
                    f"EngineSizes.{name}: {value}; make it a multiple of {of} = {factor}"
                )
        if self.pages * self.page < self.longest:
            raise ValueError(
                f"EngineSizes.pages: {self.pages} of {self.page} tokens; one sequence may have "
                f"{self.longest} tokens, give at least {-(-self.longest // self.page)}"
            )


def lengths(
    limits: ProtocolSettings,
    frame_tokens: int,
    frames: int,
    crop_frame_tokens: int | None = None,
    label_tokens: int = LABEL_TOKENS,
) -> Lengths:
    """Return the longest sequences of a run.

    No tokenizer is needed, because texts are bounded: `limits.text_tokens`, `label_tokens` and
    REQUEST_TOKENS. Tests hold these bounds against the families' tokenizers.

    Args:
        limits: the limits of the protocol.
        frame_tokens: visual tokens of the largest frame of an overview.
        frames: upper bound on the frames in a prompt.
        crop_frame_tokens: visual tokens of the largest frame of a crop; None: as in overviews.
        label_tokens: upper bound on the tokens of a frame's time and vision marks.
    """
    labelled = frame_tokens + label_tokens
    if crop_frame_tokens is None:
        crop_frame_tokens = frame_tokens
    labelled_in_crop = crop_frame_tokens + label_tokens
    return Lengths(
        prompt=round_up(frames * labelled + limits.text_tokens, _STEP),
        visual=frames * frame_tokens,
        response=limits.trajectory_tokens,
        crop_prompt=round_up(limits.crop_frames * labelled_in_crop + REQUEST_TOKENS, _STEP),
        report=limits.summary_tokens + 1,
        frames=frames,
    )


def engine_sizes(longest: Lengths, settings: EngineSettings, rows_per_prefix: int) -> EngineSizes:
    """Return the sizes of an engine that fits every sequence of a run.

    Args:
        longest: the run's longest sequences.
        settings: the sizes that the recipe chooses.
        rows_per_prefix: rollouts per prompt.
    """
    whole = max(longest.prompt + longest.response, longest.crop_prompt + longest.report)
    # Long sequences have larger pages and longer calls: fewer pages and calls to keep track of. A
    # call of prefill keeps any accelerator busy, and short ones waste little at their end.
    page, steps, prefill_tokens = (64, 32, 1024) if whole >= _LONG else (16, 16, 256)
    return EngineSizes(
        longest=round_up(whole, page),
        slots=round_up(max(1, settings.slots), rows_per_prefix),
        rows_per_prefix=rows_per_prefix,
        page=page,
        pages=page_count(max(whole, settings.cache_tokens), page),
        prefill_tokens=prefill_tokens,
        few_rows=rows_per_prefix,
        steps=steps,
    )


def sizes_for_single_episodes(
    protocol: Protocol, overview: int, crop: int, episodes: int = 1
) -> EngineSizes:
    """Return the sizes of an engine for episodes that share no prompts.

    The KV cache has room for all episodes and their sub-agents at full length.

    Args:
        protocol: the protocol with its limits.
        overview: tokens of a main agent's prompt.
        crop: tokens of a sub-agent's prompt.
        episodes: number of episodes that run side by side.
    """
    limits = protocol.settings
    longest = Lengths(
        prompt=round_up(overview, BUCKET),
        visual=0,
        response=limits.trajectory_tokens,
        crop_prompt=round_up(crop, BUCKET),
        report=limits.summary_tokens + 1,
    )
    # Rounded, because every sequence has pages of its own.
    episode = round_up(longest.prompt + longest.response, BUCKET)
    episode += limits.max_calls * round_up(longest.crop_prompt + longest.report, BUCKET)
    settings = EngineSettings(slots=episodes * limits.max_calls, cache_tokens=episodes * episode)
    return engine_sizes(longest, settings, rows_per_prefix=limits.max_calls)


def overview_tokens(
    protocol: Protocol, frames: int, frame_tokens: int, last: float, tools: bool = True
) -> int:
    """Return the tokens of a main agent's prompt before the question.

    Args:
        protocol: renders the system turn and the labels of frames.
        frames: number of frames in the prompt.
        frame_tokens: visual tokens per frame.
        last: seconds of the last frame. Later times have longer labels.
        tools: whether the system turn describes tools.
    """
    return len(protocol.overview(_frames(frames, last), frame_tokens, tools).ids)


def crop_tokens(protocol: Protocol, frame_tokens: int, last: float) -> int:
    """Return the tokens of a sub-agent's longest prompt. Arguments are as in `overview_tokens`."""
    return len(protocol.window(_frames(protocol.settings.crop_frames, last), frame_tokens).ids)


def _frames(count: int, last: float) -> Sequence[Frame]:
    return [Frame("", 0, last)] * count


def round_up(tokens: int, step: int) -> int:
    """Return `tokens` rounded up to a multiple of `step`."""
    return page_count(tokens, step) * step
