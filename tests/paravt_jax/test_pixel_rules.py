"""Sizes and pixels of frames as a client of a server and the server's processor make them."""

from __future__ import annotations

import io
import itertools
import math

import numpy as np
import pytest
from PIL import Image

from paravt_jax.data.frames import resize, shown
from paravt_jax.data.sizes import PixelRules

OVERVIEW = PixelRules(max_pixels=602_112, snap=28, jpeg=85)
CROP = PixelRules(snap=28, jpeg=85)
TRAINING = PixelRules(snap=28, processor_min_pixels=65_536)


def fit(sides, step, least, most):
    """Both sides as multiples of `step`, the area within the limits: computed side by side."""
    rounded = [max(step, step * round(side / step)) for side in sides]
    area = math.prod(rounded)
    if area > most:
        scale = math.sqrt(most / math.prod(sides))
        return [max(step, step * math.floor(side * scale / step)) for side in sides]
    if area < least:
        scale = math.sqrt(least / math.prod(sides))
        return [step * math.ceil(side * scale / step) for side in sides]
    return rounded


@pytest.mark.parametrize(
    ("rules", "size", "tokens"),
    [
        (PixelRules(), (720, 1280), 45),
        (PixelRules(max_pixels=602_112), (720, 1280), 576),
        (PixelRules(max_pixels=602_112), (360, 640), 220),
        (OVERVIEW, (720, 1280), 576),
        (CROP, (720, 1280), 45),
        (TRAINING, (720, 1280), 77),
        (TRAINING, (480, 640), 70),
        (CROP, (480, 640), 40),
    ],
)
def test_tokens_of_known_frames(rules, size, tokens):
    assert rules.tokens(*size) == tokens


def test_each_size_is_that_of_the_step_before_it():
    steps = OVERVIEW.sizes(720, 1280)
    assert steps == ((560, 1008), (576, 1024))
    assert TRAINING.sizes(720, 1280) == ((168, 280), (224, 352))
    assert PixelRules().sizes(720, 1280) == ((160, 288),)
    assert PixelRules(processor_min_pixels=65_536).sizes(720, 1280) == ((160, 288), (192, 352))


def test_sizes_equal_those_computed_side_by_side():
    for height, width in itertools.product((90, 240, 361, 720, 1081), (161, 322, 854, 1277)):
        for rules in (OVERVIEW, CROP, TRAINING):
            first = fit((height, width), 28, rules.min_pixels, rules.max_pixels)
            least = rules.processor_min_pixels
            expected = tuple(fit(first, 32, least, 16_777_216))
            assert rules.sizes(height, width) == (tuple(first), expected)


@pytest.mark.parametrize("rules", [PixelRules(), OVERVIEW, CROP, TRAINING])
def test_no_ordinary_frame_has_more_tokens_than_the_bound(rules):
    sides = range(60, 2000, 67)
    for height, width in itertools.product(sides, sides):
        if max(height, width) <= 3.5 * min(height, width):
            assert rules.tokens(height, width) <= rules.most_tokens
    assert rules.most_tokens < 1.5 * rules.tokens(720, 1280)


def test_a_frame_goes_through_the_steps_in_their_order():
    frame = np.random.default_rng(0).integers(0, 256, (90, 160, 3), np.uint8)
    rules = PixelRules(max_pixels=80 * 140, snap=28, jpeg=85, processor_min_pixels=96 * 160)
    small = Image.fromarray(resize(frame, (56, 140)))
    file = io.BytesIO()
    small.save(file, format="jpeg", quality=85)
    decoded = np.asarray(Image.open(file))
    assert not np.array_equal(decoded, np.asarray(small))
    expected = resize(decoded, rules.sizes(90, 160)[-1])
    np.testing.assert_array_equal(shown(frame, rules), expected)


def test_without_rules_a_frame_stays_as_it_is():
    frame = np.zeros((5, 7, 3), np.uint8)
    assert shown(frame, None) is frame


def test_rules_that_ask_for_one_size_only_resize():
    frame = np.random.default_rng(0).integers(0, 256, (90, 160, 3), np.uint8)
    rules = PixelRules(max_pixels=4096)
    np.testing.assert_array_equal(shown(frame, rules), resize(frame, rules.sizes(90, 160)[0]))
