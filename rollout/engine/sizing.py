"""How long sequences can be, and how large an engine has to be for them.

A recipe states each length once: tokens of a response and a report in `ProtocolSettings`, pixels of a
frame in `FrameSettings`, numbers of frames in budgets. Lengths of prompts, the shapes of batches and
the sizes of the engine's compiled programs follow from these.
"""

from __future__ import annotations

from collections.abc import Sequence

from paravt_jax.method.protocol import Protocol, ProtocolSettings
from paravt_jax.method.records import Frame
from rollout.engine.settings import EngineSettings, EngineSizes, Lengths

BUCKET = 256  # single questions are rounded up to it, so that videos of one size share programs
_STEP = 16  # lengths of a run are multiples of it
REQUEST_TOKENS = 32  # a sub-agent's prompt without its frames: 24 with Qwen's tokenizer
_SHORTEST_READ = 1024  # tokens; programs for shorter reads would save little


def lengths(limits: ProtocolSettings, frame_tokens: int, frames: int) -> Lengths:
    """Lengths where a prompt shows up to `frames` frames of up to `frame_tokens` visual tokens each.

    No tokenizer is needed: `limits` bounds the text (`text_tokens`, `label_tokens`). `train.prepare`
    holds these bounds, and REQUEST_TOKENS, against the run's own tokenizer before it begins.
    """
    labelled = frame_tokens + limits.label_tokens
    return Lengths(
        prompt=round_up(frames * labelled + limits.text_tokens, _STEP),
        visual=frames * frame_tokens,
        response=limits.trajectory_tokens,
        crop_prompt=round_up(limits.most_crop_frames * labelled + REQUEST_TOKENS, _STEP),
        crop_visual=limits.most_crop_frames * frame_tokens,
        report=limits.summary_tokens + 1,
    )


def engine_sizes(
    longest: Lengths, settings: EngineSettings, rows_per_prefix: int, share_prompts: bool = True
) -> EngineSizes:
    """An engine in which every sequence of these lengths fits.

    `rows_per_prefix` is the number of rollouts of one prompt; they read it in one copy where `share_prompts`.
    """
    page = settings.page
    prompt, crop = round_up(longest.prompt, page), round_up(longest.crop_prompt, page)
    whole = round_up(max(prompt + longest.response, crop + longest.report), page)
    # Where a prompt is shared, a row reads by itself what follows, and the prompt's last, partial page.
    row = max(longest.response + page, crop + longest.report)
    row_lengths = _sizes(min(row, _SHORTEST_READ), whole, page)
    half = round_up(prompt // 2, page)
    slots = round_up(settings.slots, rows_per_prefix)
    return EngineSizes(
        row_lengths=row_lengths,
        prefix_lengths=((half, prompt) if half >= _SHORTEST_READ else (prompt,))
        if share_prompts
        else (),
        # A turn's tool results are much shorter than a crop, so they get a size of their own.
        prefill_lengths=tuple(sorted({min(2 * page, crop), crop, prompt})),
        slots=slots,
        rows_per_prefix=rows_per_prefix,
        page=page,
        pages=-(-max(whole, settings.cache_tokens) // page),
        prefill_tokens=max(prompt, settings.prefill_tokens),
        read_tokens=max(slots * row_lengths[0], settings.read_tokens),
        steps=settings.steps,
        paged=settings.paged,
    )


def sizes_for_single_episodes(
    protocol: Protocol, overview: int, crop: int, episodes: int = 1, cache_tokens: int = 0
) -> EngineSizes:
    """An engine for `episodes` episodes side by side, of which no two have a prompt in common.

    `overview` and `crop` are tokens of a main agent's and of a sub-agent's prompt. `cache_tokens`: keys
    and values that are kept; 0 for every episode and its sub-agents at their longest.
    """
    limits = protocol.settings
    longest = Lengths(
        prompt=round_up(overview, BUCKET),
        visual=0,
        response=limits.trajectory_tokens,
        crop_prompt=round_up(crop, BUCKET),
        crop_visual=0,
        report=limits.summary_tokens + 1,
    )
    episode = longest.prompt + longest.response
    episode += limits.max_calls * (longest.crop_prompt + longest.report)
    settings = EngineSettings(
        slots=episodes * limits.max_calls, page=64, cache_tokens=cache_tokens or episodes * episode
    )
    return engine_sizes(longest, settings, rows_per_prefix=limits.max_calls, share_prompts=False)


def _sizes(first: int, last: int, page: int) -> tuple[int, ...]:
    """`first`, doublings from `_SHORTEST_READ` on, and `last`, as multiples of `page`: a sequence then
    reads at most about twice its own length."""
    sizes = {round_up(first, page), round_up(_SHORTEST_READ, page)}
    while max(sizes) < last:
        sizes.add(2 * max(sizes))
    return tuple(sorted({size for size in sizes if size < last} | {last}))


def overview_tokens(
    protocol: Protocol, frames: int, frame_tokens: int, last: float, tools: bool = True
) -> int:
    """Tokens before the question: the system turn and so many frames, none later than `last` seconds."""
    return len(protocol.overview(_frames(frames, last), frame_tokens, tools).ids)


def crop_tokens(protocol: Protocol, frame_tokens: int, last: float) -> int:
    """Tokens of a sub-agent's prompt."""
    return len(protocol.window(_frames(protocol.settings.most_crop_frames, last), frame_tokens).ids)


def _frames(count: int, last: float) -> Sequence[Frame]:
    return [Frame("", 0, last)] * count


def round_up(tokens: int, step: int) -> int:
    """`tokens` rounded up to a multiple of `step`."""
    return -(-tokens // step) * step
