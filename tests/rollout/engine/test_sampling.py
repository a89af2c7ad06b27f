"""Draws against sorting in NumPy, and what a draw may depend on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from rollout.engine.sampling import Choices, draw_at, sample

ROWS, WORDS = 64, 12
draw = jax.jit(sample)


def rows(
    logits: Any,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    seeds: Any = None,
    numbers: Any = 0,
    count: Any = ROWS,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probs of `count` rows. A single value is used in every row.

    By default every row has a seed of its own.
    """
    seeds = np.arange(count) if seeds is None else seeds
    fields = zip(
        (seeds, temperature, top_k, top_p),
        (np.uint32, np.float32, np.int32, np.float32),
        strict=True,
    )
    choices = Choices(*(np.broadcast_to(np.asarray(x, kind), (count,)) for x, kind in fields))
    scores = np.broadcast_to(np.asarray(logits, np.float32), (count, np.shape(logits)[-1]))
    token, logprob = draw(scores, choices, np.broadcast_to(np.asarray(numbers, np.int32), (count,)))
    return np.asarray(token), np.asarray(logprob)


def log_softmax(scores: np.ndarray) -> np.ndarray:
    scores = scores - scores.max()
    return scores - np.log(np.exp(scores).sum())


def by_sorting(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Log-probs in transformers' order: temperature, then top-k, then top-p.

    Tokens as likely as the last one that stays, stay too.
    """
    scores = log_softmax(np.asarray(logits, np.float64) / temperature)
    if top_k:
        last = np.sort(scores)[::-1][min(top_k, len(scores)) - 1]
        scores = log_softmax(np.where(scores >= last, scores, -np.inf))
    if top_p < 1:
        order = np.argsort(-scores, kind="stable")
        before = np.cumsum(np.exp(scores[order])) - np.exp(scores[order])
        last = scores[order][before < top_p].min()
        scores = log_softmax(np.where(scores >= last, scores, -np.inf))
    return scores


def cut_by_transformers(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float
) -> np.ndarray:
    """The same by transformers itself."""
    torch = pytest.importorskip("torch", reason="the oracle; install the extra parity")
    from transformers import (
        LogitsProcessorList,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    ids: Any = None  # these warpers look at scores only
    return torch.log_softmax(warpers(ids, torch.tensor(logits)[None]), -1)[0].numpy()


# Scores on a grid: some are equal, and those that differ still do so in float32.
SCORES = st.lists(st.integers(-400, 400), min_size=WORDS, max_size=WORDS).map(
    lambda x: np.array(x, np.float32) / 64
)
EQUAL = st.lists(st.integers(-3, 3), min_size=WORDS, max_size=WORDS).map(
    lambda x: np.array(x, np.float32)
)
TEMPERATURES = st.sampled_from([0.25, 0.7, 1.0, 2.5])


@given(
    st.one_of(SCORES, EQUAL),
    TEMPERATURES,
    st.integers(0, WORDS + 2),
    st.one_of(st.just(1.0), st.floats(0.001, 0.999)),
)
# After top-k two tokens reach p. Of all tokens it would take more.
@example(np.arange(WORDS, dtype=np.float32), 1.0, 3, 0.88)
# All tokens are equally likely, so all stay.
@example(np.zeros(WORDS, np.float32), 1.0, 5, 0.3)
def test_a_draw_is_from_the_tokens_that_sorting_keeps(logits, temperature, top_k, top_p):
    expected = by_sorting(logits, temperature, top_k, top_p)
    if top_p < 1:
        # Not where rounding decides whether the sum reaches p.
        for near in (top_p - 1e-5, top_p + 1e-5):
            assume(np.array_equal(expected, by_sorting(logits, temperature, top_k, near)))
    tokens, logprobs = rows(logits, temperature, top_k, top_p)
    assert np.isfinite(expected[tokens]).all()
    # The log-probs would be larger if a token that should stay were missing.
    np.testing.assert_allclose(logprobs, expected[tokens], atol=2e-5)


@pytest.mark.parity
def test_sorting_here_is_what_transformers_does():
    rng = np.random.default_rng(0)
    for number in range(200):
        # No two are equal: of equal tokens transformers drops some.
        logits = rng.normal(0, 3, WORDS).astype(np.float32)
        temperature = rng.choice([0.3, 1.0, 2.0])
        top_k = number % (WORDS + 1)
        top_p = 1.0 if number % 5 == 0 else rng.uniform(0.05, 0.999)
        mine = by_sorting(logits, temperature, top_k, top_p)
        theirs = cut_by_transformers(logits, temperature, top_k, top_p)
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


DRAWS = 20_000


def assert_follow(tokens: np.ndarray, chances: np.ndarray) -> None:
    """No token is drawn 4.5 standard deviations more or less often than its chance says."""
    count = len(tokens)
    seen = np.bincount(tokens, minlength=len(chances)) / count
    deviation = np.sqrt(chances * (1 - chances) / count)
    assert (np.abs(seen - chances) <= 4.5 * deviation + 1e-9).all(), (seen, chances)


LOGITS = np.array([2.0, 1.5, 1.0, 1.0, 0.0, -1.0, -3.0, -np.inf], np.float32)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (3.0, 0, 1.0),
        (1.0, 3, 1.0),
        (1.0, 0, 0.7),
        (2.0, 6, 0.9),
    ],
)
@pytest.mark.parametrize("over", ["seeds", "numbers"])
def test_draws_follow_the_exact_distribution(temperature, top_k, top_p, over):
    """20,000 seeds, or 20,000 draws of one seed."""
    if over == "seeds":
        settings = {"seeds": np.arange(DRAWS)}
    else:
        settings = {"seeds": 7, "numbers": np.arange(DRAWS)}
    tokens, logprobs = rows(LOGITS, temperature, top_k, top_p, count=DRAWS, **settings)
    with np.errstate(divide="ignore"):
        expected = by_sorting(LOGITS, temperature, top_k, top_p)
    np.testing.assert_allclose(logprobs, expected[tokens], atol=1e-5)
    assert_follow(tokens, np.exp(expected))


def test_draws_among_many_words_follow_the_exact_distribution():
    """More tokens than a block, not a whole number of blocks, and every third without a chance."""
    words = 300
    logits = np.random.default_rng(0).normal(0, 1, words)
    logits[::3] = -np.inf
    tokens, logprobs = rows(logits, count=DRAWS)
    with np.errstate(divide="ignore"):
        expected = log_softmax(logits)
    np.testing.assert_allclose(logprobs, expected[tokens], atol=1e-5)
    assert_follow(tokens, np.exp(expected))


def test_rounding_draws_no_token_without_a_chance():
    """The cumulative sum of a large vocabulary moves by rounding even where 0 is added."""
    rng = np.random.default_rng(0)
    weights = (rng.exponential(size=(1187, 128)) * (rng.random((1187, 1)) < 0.4)).astype(np.float32)
    weights[:2] = 0  # a uniform number of 0 must not draw the first token
    sums = np.asarray(jax.jit(lambda x: jnp.cumsum(x.sum(-1)))(weights))
    moved = np.flatnonzero((np.diff(sums) > 0) & ~weights[1:].any(-1))
    ulp = 2.0**-24
    near = [sums[moved] / sums[-1] + step * ulp for step in range(-3, 4)]
    ends = [np.arange(3) * ulp, 1 - np.arange(1, 4) * ulp]
    uniforms = np.clip(np.concatenate(near + ends), 0, 1 - ulp).astype(np.float32)
    words = weights.reshape(1, -1)
    tokens, _ = jax.jit(draw_at)(np.broadcast_to(words, (len(uniforms), words.size)), uniforms)
    assert words[0, np.asarray(tokens)].all()


def test_neighbouring_draws_are_independent():
    """Of one seed, of neighbouring seeds, and with seed and number swapped."""
    logits = np.zeros(4, np.float32)
    n = np.arange(DRAWS)
    first, _ = rows(logits, seeds=n, numbers=n + 1, count=DRAWS)
    for seeds, numbers in ((n, n + 2), (n + 1, n + 1), (n + 1, n), (n + 2**31, n + 1)):
        second, _ = rows(logits, seeds=seeds, numbers=numbers, count=DRAWS)
        pairs = np.bincount(4 * first + second, minlength=16)
        assert np.abs(pairs - DRAWS / 16).max() < 4.5 * np.sqrt(DRAWS / 16)


def test_a_draw_is_determined_by_its_seed_and_number():
    logits = np.random.default_rng(0).normal(size=300)
    seeds = np.repeat([0, 5, 2**32 - 1], 4)
    numbers = np.tile([0, 1, 2, 1000], 3)
    tokens, logprobs = rows(logits, seeds=seeds, numbers=numbers, count=12)
    reversed_tokens, reversed_logprobs = rows(
        logits, seeds=seeds[::-1], numbers=numbers[::-1], count=12
    )
    assert tokens.tolist() == reversed_tokens[::-1].tolist()
    assert logprobs.tolist() == reversed_logprobs[::-1].tolist()
    assert len(set(tokens.tolist())) > 8


def test_temperature_0_takes_the_likeliest_token_and_its_log_prob_at_temperature_1():
    """Whatever top-k and top-p say. Of equal tokens it takes the first."""
    logits = np.random.default_rng(0).normal(0, 2, (ROWS, WORDS)).astype(np.float32)
    logits[5, [7, 3]] = 9.0
    for cut in ({}, {"top_k": 2, "top_p": 0.3}):
        tokens, logprobs = rows(logits, 0.0, **cut)
        assert tokens.tolist() == logits.argmax(-1).tolist()
        assert tokens[5] == 3
        expected = [log_softmax(row)[token] for row, token in zip(logits, tokens, strict=True)]
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)


@pytest.mark.parametrize(
    "top_p",
    [
        1e-9,
        1e-6,
        1e-3,
    ],
)
def test_the_likeliest_token_always_stays(top_p):
    tokens, logprobs = rows(np.arange(WORDS), top_p=top_p)
    assert set(tokens.tolist()) == {WORDS - 1}
    assert not logprobs.any()


def test_tokens_without_a_chance_are_never_drawn():
    """Also if top-k is larger than the number of tokens with a chance."""
    logits = np.full(WORDS, -np.inf)
    logits[[2, 9]] = 1.0, 0.0
    for settings in (
        {},
        {"top_k": 5},
        {"top_p": 0.999},
        {"top_k": 5, "top_p": 0.999},
        {"temperature": 0.0},
    ):
        tokens, logprobs = rows(logits, **settings)
        assert set(tokens.tolist()) <= {2, 9}
        assert np.isfinite(logprobs).all()
        expected = np.where(tokens == 2, -0.31326166, -1.31326166)
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    logits[9] = -np.inf
    tokens, logprobs = rows(logits)
    assert set(tokens.tolist()) == {2}
    assert not logprobs.any()


def test_a_row_depends_on_its_own_numbers_only():
    """Bit for bit, in another order and among other rows, with every kind of setting."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (ROWS, 300)).astype(np.float32)
    settings = {
        "temperature": rng.choice([0, 0.5, 1, 2], ROWS),
        "top_k": rng.choice([0, 0, 3, 50, 299], ROWS),
        "top_p": rng.choice([1.0, 1.0, 0.3, 0.95], ROWS),
        "seeds": rng.integers(0, 2**32, ROWS),
        "numbers": rng.integers(0, 100, ROWS),
    }
    tokens, logprobs = rows(logits, **settings)
    order = rng.permutation(ROWS)
    moved = rows(logits[order], **{name: x[order] for name, x in settings.items()})
    np.testing.assert_array_equal(np.stack(moved), np.stack((tokens, logprobs))[:, order])
    plain = (settings["temperature"] == 0) | ((settings["top_k"] == 0) & (settings["top_p"] == 1))
    assert 5 < plain.sum() < ROWS - 5
    # Without the others, no row is cut.
    subset = {name: x[plain] for name, x in settings.items()}
    among = rows(logits[plain], **subset, count=int(plain.sum()))
    np.testing.assert_array_equal(np.stack(among), np.stack((tokens, logprobs))[:, plain])
