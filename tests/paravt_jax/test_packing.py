from __future__ import annotations

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paravt_jax.data.loader import pack

LENGTHS = st.lists(st.integers(1, 40), max_size=60)


def plainly(lengths, length):
    """First fit, said in the plainest words."""
    rows = []
    left = []
    for sample, tokens in enumerate(lengths):
        fitting = [row for row in rows if sum(lengths[s] for s in row) + tokens <= length]
        if tokens > length:
            left.append(sample)
        elif fitting:
            fitting[0].append(sample)
        else:
            rows.append([sample])
    return tuple(map(tuple, rows)), tuple(left)


@given(LENGTHS, st.integers(1, 50))
def test_packing_is_first_fit(lengths, length):
    packing = pack(lengths, length)
    assert (packing.rows, packing.left_out) == plainly(lengths, length)


def published_lengths(rng: np.random.Generator, count: int) -> np.ndarray:
    """Lengths like those of the published mixture.

    Clips of half a minute to hours, at one frame per second and at most 64 frames of 49 tokens with
    timestamps; pictures; texts of a few hundred tokens; conversations with crops. A few are longer
    than a row.
    """
    seconds = np.where(
        rng.random(count) < 0.6, rng.lognormal(3.4, 0.5, count), rng.lognormal(5.5, 1.0, count)
    )
    frames = np.where(rng.random(count) < 0.15, 1, np.clip(seconds, 1, 64).astype(int))
    crops = np.where(
        rng.random(count) < 0.16, rng.integers(1, 4, count) * rng.integers(4, 17, count), 0
    )
    return ((frames + crops) * (49 + 9) + rng.lognormal(6.0, 0.5, count).astype(int) + 120).astype(
        int
    )


def test_padding_is_below_five_percent_on_lengths_like_the_published_ones():
    rng = np.random.default_rng(0)
    lengths = published_lengths(rng, 20_000)
    start = time.thread_time()
    packing = pack(lengths.tolist(), 8192)
    assert time.thread_time() - start < 5
    assert len(packing.left_out) < 0.01 * len(lengths)
    padding = 1 - lengths[lengths <= 8192].sum() / (len(packing.rows) * 8192)
    assert padding < 0.05
    print(f"padding {padding:.4f}, {len(packing.rows)} rows, {len(packing.left_out)} left out")
