"""Positions and angles against small examples; test_parity compares them with transformers."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("ids", "grids", "message"),
    [
        ([1, IMAGE, 2], [], r"grids = \[\]: .*0 visual tokens.* 1;"),
        ([IMAGE, 1, IMAGE], [(2, 4)], "token 0 needs 2 .*placeholders"),
        ([VIDEO, 1, VIDEO], [(2, 2)] * 3, "3 visual tokens.* 2;"),
    ],
)
def test_placeholders_that_do_not_match_the_grids_are_refused(ids, grids, message):
    with pytest.raises(ValueError, match=message):
        mrope_positions(np.array(ids), grids, CONFIG)


def test_visual_tokens_are_numbered_per_row():
    ids = np.array([[1, 7, 7, 2, 7], [7, 3, 4, 5, 7]])
    expected = [[-1, 0, 1, -1, 2], [0, -1, -1, -1, 1]]
    assert visual_index(ids, 7).tolist() == expected
    assert visual_index(jnp.asarray(ids), 7).tolist() == expected
