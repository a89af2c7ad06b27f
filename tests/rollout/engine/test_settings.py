"""Sizes that follow from the lengths of a run fit every sequence, and other sizes are checked."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paravt_jax.method.protocol import Lengths, Protocol, ProtocolSettings
from paravt_jax.method.records import Frame
from paravt_jax.world import text as world_text
from paravt_jax.world.videos import SECONDS
from rollout.engine.settings import (
    LABEL_TOKENS,
    REQUEST_TOKENS,
    EngineSettings,
    EngineSizes,
    engine_sizes,
)

tokens = st.integers(1, 40_000)
tunings = st.builds(EngineSettings, slots=st.integers(1, 200), cache_tokens=tokens)
longest = st.builds(
    Lengths,
    prompt=tokens,
    visual=st.just(0),
    response=tokens,
    crop_prompt=tokens,
    report=tokens,
)


@settings(max_examples=300, deadline=None)
@given(longest, tunings, st.integers(1, 16))
def test_every_sequence_of_a_run_fits(longest, tuning, rows_per_prefix):
    # EngineSizes itself refuses sizes that contradict each other.
    engine = engine_sizes(longest, tuning, rows_per_prefix)
    main = longest.prompt + longest.response
    sub_agent = longest.crop_prompt + longest.report
    assert engine.longest >= max(main, sub_agent)
    assert engine.pages * engine.page >= max(engine.longest, tuning.cache_tokens)
    assert engine.slots >= tuning.slots
    assert engine.slots % rows_per_prefix == 0


@pytest.mark.parametrize(
    ("tokenizer", "reserved", "time"),
    [
        ("cut_vocabulary", LABEL_TOKENS, 99_999.9),
        ("small_vocabulary", world_text.LABEL_TOKENS, float(SECONDS)),
    ],
)
def test_labels_and_requests_fit_what_is_reserved_for_them(tokenizer, reserved, time, request):
    protocol = Protocol(request.getfixturevalue(tokenizer), ProtocolSettings())
    label, marks = protocol.images([Frame("a.mp4", 0, time)], 0)
    assert len(label) + len(marks) <= reserved
    assert len(protocol.window((), 0).ids) <= REQUEST_TOKENS


VALID = EngineSizes(
    longest=136,
    slots=8,
    rows_per_prefix=4,
    few_rows=4,
    page=8,
    pages=120,
)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("prefill_tokens", 12, "multiple of page = 8"),
        ("slots", 6, "multiple of rows_per_prefix = 4"),
        ("few_rows", 16, "at most slots = 8"),
        ("pages", 16, "at least 17"),
    ],
)
def test_sizes_that_make_no_engine_are_refused(name, value, rule):
    with pytest.raises(ValueError) as refused:
        dataclasses.replace(VALID, **{name: value})
    message = str(refused.value)
    assert message.startswith(f"EngineSizes.{name}: {value}")
    assert rule in message
