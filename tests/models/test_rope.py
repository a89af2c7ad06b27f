"""Positions and angles against small examples; test_parity compares them with transformers."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from models.qwen3_vl.sizes import tiny
from models.rope import (
    mrope_positions,
    next_position,
    visual_index,
)

CONFIG = tiny(300)
IMAGE, VIDEO = CONFIG.image_token_id, CONFIG.video_token_id


def test_images_span_their_merged_grid_and_text_continues_after_the_longer_side():
    ids = np.array([1, 2, *[IMAGE] * 6, 3, IMAGE, 4])
    positions = mrope_positions(ids, [(4, 6), (2, 2)], CONFIG)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7],
    ]
    assert next_position(positions) == 8


@hypothesis.given(st.lists(st.tuples(*(st.integers(1, 3),) * 3, st.integers(0, 2)), max_size=4))
def test_the_slices_of_a_video_get_the_positions_of_images(videos):
    grids = [(t, 2 * h, 2 * w) for t, h, w, _ in videos]
    ids = [1]
    for t, h, w, words in videos:
        ids += ([5] * words + [VIDEO] * (h * w) + [6]) * t
    frames = [grid[1:] for grid in grids for _ in range(grid[0])]
    as_images = np.where(np.array(ids) == VIDEO, IMAGE, ids)
    expected = mrope_positions(as_images, frames, CONFIG)
    np.testing.assert_array_equal(mrope_positions(np.array(ids), grids, CONFIG), expected)
    assert (np.diff(expected.max(0)) <= 1).all() and expected.min() == 0


@pytest.mark.parametrize(
    ("ids", "grids", "message"),
    [
        ([1, IMAGE, 2], [], r"grids = \[\]: .*0 visual tokens.* 1;"),
        ([IMAGE, 1, IMAGE], [(2, 4)], "token 0 needs 2 .*placeholders"),
        ([VIDEO, 1, VIDEO], [(3, 2, 2)], "3 visual tokens.* 2;"),
    ],
)
def test_placeholders_that_do_not_match_the_grids_are_refused(ids, grids, message):
    with pytest.raises(ValueError, match=message):
        mrope_positions(np.array(ids), grids, CONFIG)


def test_visual_tokens_are_numbered_over_images_and_videos_per_row():
    i = 7
    v = 8
    ids = np.array([[1, i, i, 2, v], [v, 3, 4, 5, i]])
    expected = [[-1, 0, 1, -1, 2], [0, -1, -1, -1, 1]]
    assert visual_index(ids, i, v).tolist() == expected
    assert visual_index(jnp.asarray(ids), i, v).tolist() == expected
    assert visual_index(ids[0], i).tolist() == [-1, 0, 1, -1, -1]
