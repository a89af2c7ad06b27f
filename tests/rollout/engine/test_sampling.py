"""Draws against the exact distribution, what a draw may depend on, and what a mesh exchanges."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.qwen3_vl.sizes import tiny
from models.sharding import constrain, make_mesh, param_shardings
from models.text import TextDecoder
from rollout.engine.sampling import Choices, draw_at, sample
from tests.collectives import find_collectives
from tests.processes import on_eight_devices

ROWS, WORDS = 64, 12
DRAWS = 20_000
draw = jax.jit(lambda logits, *settings: sample(constrain(logits, None, "tensor"), *settings))


def draws(
    logits: Any, temperature: Any = 1.0, seeds: Any = None, numbers: Any = 0, count: int = ROWS
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probs of `count` slots. A single value is used in every slot.

    By default every slot has a seed of its own.
    """
    seeds = np.arange(count) if seeds is None else seeds

    def each(value: Any, kind: type) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, kind), (count,))

    choices = Choices(each(seeds, np.uint32), each(temperature, np.float32))
    scores = np.broadcast_to(np.asarray(logits, np.float32), (count, np.shape(logits)[-1]))
    token, logprob = draw(scores, choices, each(numbers, np.int32))
    return np.asarray(token), np.asarray(logprob)


def log_softmax(scores: np.ndarray) -> np.ndarray:
    scores = scores - scores.max()
    return scores - np.log(np.exp(scores).sum())


def assert_follow(tokens: np.ndarray, chances: np.ndarray) -> None:
    """No token is drawn 4.5 standard deviations more or less often than its chance says."""
    count = len(tokens)
    seen = np.bincount(tokens, minlength=len(chances)) / count
    deviation = np.sqrt(chances * (1 - chances) / count)
    assert (np.abs(seen - chances) <= 4.5 * deviation + 1e-9).all(), (seen, chances)


FEW = np.array([2.0, 1.5, 1.0, 1.0, 0.0, -1.0, -3.0, -np.inf], np.float32)
# More tokens than a block, not a whole number of blocks, and every third without a chance.
MANY = np.where(np.arange(300) % 3, np.random.default_rng(0).normal(0, 1, 300), -np.inf)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("logits", [FEW, MANY], ids=["few words", "many words"])
@pytest.mark.parametrize("over", ["seeds", "numbers"])
def test_draws_follow_the_exact_distribution(logits, temperature, over):
    """20,000 seeds, or 20,000 draws of one seed."""
    if over == "seeds":
        settings = {"seeds": np.arange(DRAWS)}
    else:
        settings = {"seeds": 7, "numbers": np.arange(DRAWS)}
    tokens, logprobs = draws(logits, temperature, count=DRAWS, **settings)
    with np.errstate(divide="ignore"):
        expected = log_softmax(np.asarray(logits, np.float64) / temperature)
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
    first, _ = draws(logits, seeds=n, numbers=n + 1, count=DRAWS)
    for seeds, numbers in ((n, n + 2), (n + 1, n + 1), (n + 1, n), (n + 2**31, n + 1)):
        second, _ = draws(logits, seeds=seeds, numbers=numbers, count=DRAWS)
        pairs = np.bincount(4 * first + second, minlength=16)
        assert np.abs(pairs - DRAWS / 16).max() < 4.5 * np.sqrt(DRAWS / 16)


def test_temperature_0_takes_the_likeliest_token_and_its_log_prob_at_temperature_1():
    """Of equal tokens it takes the first."""
    logits = np.random.default_rng(0).normal(0, 2, (ROWS, WORDS)).astype(np.float32)
    logits[5, [7, 3]] = 9.0
    tokens, logprobs = draws(logits, 0.0)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert tokens[5] == 3
    expected = [log_softmax(scores)[token] for scores, token in zip(logits, tokens, strict=True)]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_a_draw_depends_on_its_own_numbers_only():
    """Bit for bit, in another order and among other slots, with every kind of setting."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (ROWS, 300)).astype(np.float32)
    settings = {
        "temperature": rng.choice([0, 0.5, 1, 2], ROWS),
        "seeds": rng.integers(0, 2**32, ROWS),
        "numbers": rng.integers(0, 100, ROWS),
    }
    whole = np.stack(draws(logits, **settings))
    assert len(set(whole[0].tolist())) > 8
    order = rng.permutation(ROWS)
    sampled = settings["temperature"] > 0
    # Without the others, nothing is greedy.
    for chosen in (order, np.flatnonzero(sampled)):
        some = {name: x[chosen] for name, x in settings.items()}
        alone = draws(logits[chosen], **some, count=len(chosen))
        np.testing.assert_array_equal(np.stack(alone), whole[:, chosen])


@pytest.mark.slow
def test_a_vocabulary_over_four_devices():
    """Runs this file as a program with fake devices."""
    on_eight_devices(__file__)


def check_exchanges() -> None:
    """From tokens to the next tokens, at most a vector or a block per row is exchanged at a time.

    Embeddings are gathered: the only product is that with the head.
    """
    graph, state = nnx.split(TextDecoder(tiny(2400).text, rngs=nnx.Rngs(0)))

    def step(state, ids, choices, numbers):
        text = nnx.merge(graph, state)
        return sample(text.logits(text.embed(ids)), choices, numbers)

    n = np.arange(ROWS)
    choices = Choices(n.astype(np.uint32), (n % 4 / 2).astype(np.float32))
    tokens, logprobs = jax.jit(step)(state, n, choices, n)
    mesh = make_mesh(tensor=4)
    placed = jax.device_put(state, param_shardings(state, mesh))
    with jax.set_mesh(mesh):
        program = jax.jit(step).lower(placed, n, choices, n).compile()
        many = program(placed, n, choices, n)
    np.testing.assert_array_equal(many[0], tokens)
    np.testing.assert_allclose(many[1], logprobs, atol=1e-5)
    hlo = str(program.as_text())
    found = find_collectives(hlo, 4)
    assert 0 < len(found) < 8 and max(one.sent for one in found) < 2 * ROWS * 128 * 4
    assert "slice_sizes={1,128}" in hlo and hlo.count(" dot(") == 1


if __name__ == "__main__":
    check_exchanges()
    with jax.set_mesh(make_mesh(tensor=4)):
        test_temperature_0_takes_the_likeliest_token_and_its_log_prob_at_temperature_1()
        test_a_draw_depends_on_its_own_numbers_only()
