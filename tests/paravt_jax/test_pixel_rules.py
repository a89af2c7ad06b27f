"""The sizes of frames, and what is left of them after resizing."""

from __future__ import annotations

import itertools

import pytest

from paravt_jax.data.frames import PixelRules

LARGE = PixelRules(max_pixels=602_112)


@pytest.mark.parametrize(
    ("rules", "size", "tokens"),
    [
        (PixelRules(), (720, 1280), 45),
        (LARGE, (720, 1280), 576),
        (LARGE, (360, 640), 220),
    ],
)
def test_tokens_of_known_frames(rules, size, tokens):
    assert rules.tokens(*size) == tokens


@pytest.mark.parametrize("rules", [PixelRules(), LARGE])
def test_no_ordinary_frame_has_more_tokens_than_the_bound(rules):
    sides = range(60, 2000, 67)
    for height, width in itertools.product(sides, sides):
        if max(height, width) <= 3.5 * min(height, width):
            assert rules.tokens(height, width) <= rules.most_tokens
    assert rules.most_tokens < 1.5 * rules.tokens(720, 1280)
