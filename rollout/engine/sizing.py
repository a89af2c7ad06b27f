"""Derives the longest sequences of a run, and the sizes of an engine that fits them.

A recipe states each length once: tokens of a response and of a report in `ProtocolSettings`, pixels
of a frame in `FrameSettings`, numbers of frames in budgets. The lengths of prompts, the shapes of
batches and the sizes of the engine's compiled programs follow from these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paravt_jax.checks import require_at_least
from paravt_jax.method.protocol import Lengths, Protocol, ProtocolSettings
from paravt_jax.method.records import Frame
from rollout.engine.pages import page_count
from rollout.engine.settings import EngineSizes

# Prompts of single episodes are rounded up to multiples of this many tokens, so that videos of
# similar length share programs.
BUCKET = 256
_STEP = 16  # the lengths of a run are multiples of this
LABEL_TOKENS = 12  # a frame's time and vision marks: up to 99,999.9 seconds in Qwen's tokenizer
REQUEST_TOKENS = 32  # a sub-agent's prompt without its frames: 24 with Qwen's tokenizer
_LONG = 4096  # tokens of a long sequence
_SHORTEST_READ = 1024  # tokens; programs for shorter reads would save little
# Tokens of a sequence that are prefilled in one call. Longer prompts take several calls: the
# activations and visual vectors of a call take memory.
MOST_PREFILL = 8192
# Cached tokens that a call may read, over all rows, if sequences are short. Where decoding copies
# the pages that it reads, this bounds the copies, so long sequences get one of the shortest reads
# per slot.
_SHORT_READS = 65_536
# Room of a call of prefill; with short prompts it serves several sequences.
_LEAST_PREFILL = 1024


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """Sizes that a recipe chooses. All lengths follow from the run."""

    slots: int = 64
    """Sequences decoded side by side, in whole groups; 0: chosen for the devices."""
    cache_tokens: int = 65_536
    """Tokens in the KV cache; at least one whole rollout. 0: chosen for the devices."""

    def __post_init__(self):
        require_at_least("engine", self, 0, "slots", "cache_tokens")


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


def engine_sizes(
    longest: Lengths, settings: EngineSettings, rows_per_prefix: int, share_prompts: bool = True
) -> EngineSizes:
    """Return the sizes of an engine that fits every sequence of a run.

    Args:
        longest: the run's longest sequences.
        settings: the sizes that the recipe chooses.
        rows_per_prefix: rollouts per prompt.
        share_prompts: whether the rollouts of a prompt read one copy of it.
    """
    # Long sequences have larger pages and longer calls: fewer pages and calls to keep track of.
    is_long = max(longest.prompt + longest.response, longest.crop_prompt) >= _LONG
    page, steps = (64, 32) if is_long else (16, 16)
    prompt = round_up(longest.prompt, page)
    crop = round_up(longest.crop_prompt, page)
    whole = round_up(max(prompt + longest.response, crop + longest.report), page)
    # Tokens that a row reads on its own pages if prompts are shared. Only full pages are shared, so
    # the last page of the prompt is added to the response.
    own = max(longest.response + page, crop + longest.report)
    row_lengths = _row_lengths(min(own, _SHORTEST_READ), whole, page)
    prefix_lengths: tuple[int, ...] = ()
    if share_prompts:
        # Short prompts get a program of half the length, unless that would save little.
        half = round_up(prompt // 2, page)
        prefix_lengths = (half, prompt) if half >= _SHORTEST_READ else (prompt,)
    # A turn's tool results are much shorter than a crop, so they get a length of their own.
    tool_results = min(2 * page, crop)
    piece = round_up(MOST_PREFILL, page)
    slots = round_up(max(1, settings.slots), rows_per_prefix)
    reads = whole if is_long else _SHORT_READS
    return EngineSizes(
        row_lengths=row_lengths,
        prefix_lengths=prefix_lengths,
        prefill_lengths=tuple(sorted({tool_results, min(crop, piece), min(prompt, piece)})),
        slots=slots,
        rows_per_prefix=rows_per_prefix,
        page=page,
        pages=page_count(max(whole, settings.cache_tokens), page),
        prefill_tokens=max(min(prompt, piece), _LEAST_PREFILL),
        read_tokens=max(slots * row_lengths[0], reads),
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
    episode = longest.prompt + longest.response
    episode += limits.max_calls * (longest.crop_prompt + longest.report)
    settings = EngineSettings(slots=episodes * limits.max_calls, cache_tokens=episodes * episode)
    return engine_sizes(longest, settings, rows_per_prefix=limits.max_calls, share_prompts=False)


def _row_lengths(first: int, last: int, page: int) -> tuple[int, ...]:
    """Return `first`, then doublings of `_SHORTEST_READ`, then `last`, as multiples of `page`.

    With doublings, a sequence reads at most about twice its own length.
    """
    lengths = {round_up(first, page), round_up(_SHORTEST_READ, page)}
    while max(lengths) < last:
        lengths.add(2 * max(lengths))
    return tuple(sorted({length for length in lengths if length < last} | {last}))


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
