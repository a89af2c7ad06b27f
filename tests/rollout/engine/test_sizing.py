"""Sizes of an engine follow from the lengths of a run, and whatever these are, every sequence fits."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.engine.settings import EngineSettings, Lengths
from rollout.engine.sizing import engine_sizes

tokens = st.integers(1, 40_000)
tunings = st.builds(
    EngineSettings,
    slots=st.integers(1, 200),
    page=st.sampled_from((1, 16, 48, 64)),
    cache_tokens=tokens,
    prefill_tokens=tokens,
    read_tokens=tokens,
)
longest = st.builds(
    Lengths,
    prompt=tokens,
    visual=st.just(0),
    response=tokens,
    crop_prompt=tokens,
    crop_visual=st.just(0),
    report=tokens,
)


@settings(max_examples=300, deadline=None)
@given(longest, tunings, st.integers(1, 16), st.booleans())
def test_every_sequence_of_a_run_fits(longest, tuning, rows_per_prefix, shared):
    engine = engine_sizes(
        longest, tuning, rows_per_prefix, shared
    )  # refuses what contradicts itself
    whole = longest.prompt + longest.response
    assert engine.row_lengths[-1] >= max(whole, longest.crop_prompt + longest.report)
    assert engine.pages * engine.page >= max(engine.row_lengths[-1], tuning.cache_tokens)
    assert (
        engine.prefill_lengths[-1] >= max(longest.prompt, longest.crop_prompt)
        and engine.prefill_tokens >= longest.prompt
    )
    assert engine.slots >= tuning.slots and engine.slots % rows_per_prefix == 0
    assert bool(engine.prefix_lengths) is shared and (
        not shared or engine.prefix_lengths[-1] >= longest.prompt
    )


@settings(max_examples=300, deadline=None)
@given(longest, tunings, st.integers(1025, 80_000))
def test_a_long_sequence_reads_at_most_about_twice_its_length(longest, tuning, length):
    engine = engine_sizes(longest, tuning, 8)
    if length <= engine.row_lengths[-1]:
        assert engine.width(length) <= 2 * (length + tuning.page)
