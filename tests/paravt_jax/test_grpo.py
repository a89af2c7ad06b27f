"""PARA-GRPO on arrays: values computed by hand, gradients by differences, and invariances."""

import dataclasses
import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paravt_jax.method.grpo.advantages import (
    compute_advantages,
    kl_penalty,
    normalise,
    normalise_tokens,
    shape_rewards,
    token_advantages,
    varied,
)
from paravt_jax.method.grpo.anchor import (
    structural_tokens,
    structural_weights,
)
from paravt_jax.method.grpo.batch import GRPOBatch
from paravt_jax.method.grpo.loss import batch_totals, behaviour_weight, paravt_loss, policy_loss
from paravt_jax.method.grpo.settings import Anchor, GRPOSettings, Normalisation
from paravt_jax.method.structure import TAGS, Kind, Structure
from tests.token_batch import token_batch

SETTINGS = GRPOSettings(group_size=4)
IN_GROUPS = Normalisation("group", "group")


def make_batch(
    seed: int = 0, p: int = 3, g: int = 4, t: int = 12, s: int = 6, **changes
) -> GRPOBatch:
    """A batch with gaps in its masks. As in a real one, other tokens have arbitrary log-probs."""
    rng = np.random.default_rng(seed)
    b = p * g
    mask = rng.random((b, t)) < 0.7
    mask[:, 1] = True
    behaviour = np.where(mask, -rng.random((b, t)) * 3, np.nan)
    positions = np.stack([np.sort(rng.choice(t, s, replace=False)) for _ in range(b)]).astype(
        np.int32
    )
    kinds = rng.integers(0, len(Kind), (b, s)).astype(np.int8)
    structure = Structure(
        jnp.array(positions), jnp.array(kinds), jnp.array(rng.random((b, s)) < 0.8)
    )
    fields = {
        "mask": mask,
        "behaviour": behaviour,
        "reference": np.where(mask, behaviour + rng.normal(0, 0.3, (b, t)), np.nan),
        "rewards": rng.random((p, g)) * 2.5,
        "anchor_rewards": rng.choice([-0.3, 0.2, 0.7], (p, g)),
        "valid": np.ones((p, g), bool),
        "compliant": rng.random((p, g)) < 0.6,
    } | changes
    arrays = {
        name: jnp.asarray(x, jnp.float32 if np.asarray(x).dtype.kind == "f" else None)
        for name, x in fields.items()
    }
    return GRPOBatch(structure=structure, **arrays)


def current_logprobs(batch: GRPOBatch, seed: int = 5):
    noise = np.random.default_rng(seed).normal(0, 0.3, batch.mask.shape)
    return jnp.asarray(
        np.where(batch.mask, np.asarray(batch.behaviour) + noise, np.nan), jnp.float32
    )


@functools.partial(jax.jit, static_argnames="settings")
def advantages(batch: GRPOBatch, settings: GRPOSettings):
    return compute_advantages(batch, settings)


@functools.partial(jax.jit, static_argnames="settings")
def whole_loss(batch: GRPOBatch, settings: GRPOSettings, logprobs):
    credit, _ = advantages(batch, settings)
    return paravt_loss(logprobs, credit, batch, settings)[0]


# --- rewards of rollouts


def test_shape_rewards():
    rewards = jnp.array([[-2.8, 0.2, 1.2, 2.2, 2.8]])
    # The clip makes 2.8 as good as 2.2 (REFERENCE 4, 14).
    np.testing.assert_allclose(
        shape_rewards(rewards, GRPOSettings()), [[-20, 0, 10, 20, 20]], rtol=1e-6
    )
    np.testing.assert_allclose(
        shape_rewards(rewards, GRPOSettings(reward_clip=None)),
        [[-30, 0, 10, 20, 26]],
        rtol=1e-6,
    )


def test_a_reward_that_reaches_the_clip_counts_as_clipped():
    """In either direction; scaled they are -20, 20, 19.5 and 30, and three of four are clipped."""
    settings = dataclasses.replace(SETTINGS, reward_bias=0.5, reward_scaling=10.0, reward_clip=20.0)
    batch = make_batch(p=1, rewards=np.array([[-1.5, 2.5, 2.45, 3.5]]))
    _, metrics = advantages(batch, settings)
    assert metrics["clipped_rewards"] == 0.75
    _, metrics = advantages(batch, dataclasses.replace(settings, reward_clip=None))
    assert metrics["clipped_rewards"] == 0


def test_epsilon_is_added_to_the_deviation():
    normed = normalise(jnp.array([[1.0, 3.0]]), jnp.ones((1, 2), bool), IN_GROUPS, epsilon=0.5)
    np.testing.assert_allclose(normed[0], np.array([-1, 1]) / (np.sqrt(2) + 0.5), rtol=1e-6)


def test_a_group_of_equal_rewards_is_silent():
    values = jnp.full((1, 8), 0.1) * 10 / 3
    everyone = jnp.ones((1, 8), bool)
    assert not varied(values, everyone).any()
    assert (normalise(values, everyone, IN_GROUPS) == 0).all()


def test_invalid_rollouts_do_not_count():
    valid = jnp.array([[True, True, True, False], [True, False, False, False], [False] * 4])
    rewards = jnp.array([[1.0, 2.0, 3.0, 1e9], [1.0, 2.0, 3.0, 4.0], [jnp.nan] * 4])
    normed = normalise(rewards, valid, IN_GROUPS)
    np.testing.assert_allclose(normed[0], [-1, 0, 1, 0], atol=1e-4)
    assert varied(rewards, valid)[:, 0].tolist() == [True, False, False]
    assert (normed[1:] == 0).all()


# --- advantages of tokens


@pytest.mark.parametrize(
    "how",
    [
        Normalisation("batch", "batch"),
        Normalisation("group", "group"),
        Normalisation("group", "batch"),
    ],
)
def test_normalise_tokens(how):
    """Over the trained tokens of the batch, or of each group: a loop over groups says the same."""
    batch = make_batch()
    credit = np.random.default_rng(3).normal(size=batch.mask.shape).astype(np.float32)
    credit[~np.asarray(batch.mask)] = np.nan
    got = normalise_tokens(jnp.asarray(credit), batch.rewards, batch, how)
    groups = credit.reshape(3, -1)
    mean = np.nanmean(groups, 1, keepdims=True) if how.mean == "group" else np.nanmean(credit)
    left = groups - mean
    std = (
        np.nanstd(left, 1, ddof=1, keepdims=True) if how.std == "group" else np.nanstd(left, ddof=1)
    )
    np.testing.assert_allclose(
        got, np.nan_to_num(left / std).reshape(credit.shape), rtol=1e-4, atol=1e-5
    )


def test_a_batch_without_signal_is_not_blown_up():
    """The release makes unit-variance noise of the KL penalty (REFERENCE 4, 13)."""
    batch = make_batch(rewards=np.ones((3, 4)))
    credit, metrics = advantages(batch, SETTINGS)
    assert metrics["silent_groups"] == 1
    kl = kl_penalty(batch.behaviour, batch.reference)
    penalty = np.asarray(token_advantages(jnp.zeros(12), kl, batch.mask, SETTINGS.kl_coefficient))
    np.testing.assert_allclose(
        credit, np.where(batch.mask, penalty - penalty[np.asarray(batch.mask)].mean(), 0), atol=1e-6
    )
    assert 0 < np.abs(credit).max() < 0.1
    with_signal, _ = advantages(make_batch(), SETTINGS)
    assert np.std(np.asarray(with_signal)[np.asarray(batch.mask)], ddof=1) == pytest.approx(
        1, abs=1e-3
    )


def test_a_silent_group_is_not_blown_up_by_its_own_deviation():
    """Also in a batch with other groups, if the std is taken per group."""
    rewards = np.array([[1.0, 2.0, 0.5, 1.0], [1.5] * 4, [0.0, 1.0, 1.0, 2.0]])
    settings = dataclasses.replace(SETTINGS, anchor="none", advantage_normalisation="group")
    batch = make_batch(rewards=rewards)
    credit, metrics = advantages(batch, settings)
    rows = np.abs(np.asarray(credit)).max(1).reshape(3, 4)
    assert rows[1].max() < 0.1 < 0.5 < rows[[0, 2]].max(1).min()
    assert metrics["silent_groups"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("signal", "scale"), [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.0)], ids=lambda value: str(value)
)
def test_an_update_that_few_groups_decide_is_small(signal, scale):
    """With the batch's std alone, one group out of four would make an update of full size."""
    rewards = np.full((4, 4), 1.5)
    rewards[:signal] = make_batch(p=4).rewards[:signal]
    batch = make_batch(p=4, rewards=rewards)
    plain, _ = advantages(batch, dataclasses.replace(SETTINGS, anchor="none"))
    guarded = dataclasses.replace(SETTINGS, anchor="none", min_signal=0.5)
    credit, metrics = advantages(batch, guarded)
    assert metrics["silent_groups"] == pytest.approx(1 - signal / 4)
    assert metrics["advantage_scale"] == pytest.approx(scale)
    np.testing.assert_allclose(credit, scale * np.asarray(plain), rtol=1e-6)
    if signal:
        spread = np.std(np.asarray(credit)[np.asarray(batch.mask)], ddof=1)
        assert spread == pytest.approx(scale, abs=1e-3)


def test_empty_batches_stay_finite():
    batch = make_batch(mask=np.zeros((12, 12), bool))
    credit, metrics = advantages(batch, SETTINGS)
    assert (credit == 0).all()
    assert whole_loss(batch, SETTINGS, current_logprobs(batch)) == 0
    assert all(np.isfinite(x) for x in metrics.values())


# --- the anchor


def test_credit_reaches_structural_tokens_alone():
    batch = make_batch()
    plain, _ = advantages(batch, SETTINGS)
    credit, _ = advantages(batch, dataclasses.replace(SETTINGS, anchor="credit", anchor_weight=0.5))
    normed = normalise(batch.anchor_rewards, batch.valid, IN_GROUPS)
    expected = np.zeros(batch.mask.shape)
    for row, col in np.argwhere(batch.structure.valid):
        at = int(batch.structure.positions[row, col])
        kind = int(batch.structure.kinds[row, col])
        if batch.mask[row, at]:
            expected[row, at] += 0.5 * (
                -0.3 if kind == Kind.VIOLATION else float(normed.reshape(-1)[row])
            )
    np.testing.assert_allclose(credit - plain, expected, atol=1e-5)
    assert np.abs(expected).max() > 0


def test_a_token_named_twice_gets_both():
    structure = Structure(
        jnp.array([[2, 2, 0]]),
        jnp.array([[Kind.CALL_OPEN, Kind.VIOLATION, 0]]),
        jnp.array([[True, True, False]]),
    )
    got = structural_weights(structure, jnp.array([[0.25, -1.0, 9.0]]), 4)
    assert got.tolist() == [[0, 0, -0.75, 0]]


def test_the_likelihood_anchor_rewards_tags_of_compliant_rollouts_and_punishes_violations():
    """-weight * mean(sign * w * logp), in value and gradient; no gradient flows through w."""
    batch = make_batch()
    structure = batch.structure
    logprobs = current_logprobs(batch)
    compliant = batch.compliant.reshape(-1)
    signs = np.zeros(batch.mask.shape)
    for row, at in np.argwhere(structure.valid):
        token = int(structure.positions[row, at])
        violation = structure.kinds[row, at] == Kind.VIOLATION
        if batch.mask[row, token] and (violation or compliant[row]):
            signs[row, token] = -0.3 if violation else 1.0
    assert set(signs.reshape(-1)) == {-0.3, 0.0, 1.0}

    settings = dataclasses.replace(SETTINGS, anchor="likelihood", anchor_weight=2.0)
    loss_and_gradient = jax.value_and_grad(whole_loss, argnums=2)
    loss, gradient = loss_and_gradient(batch, settings, logprobs)
    plain_loss, plain_gradient = loss_and_gradient(batch, SETTINGS, logprobs)

    marked = signs != 0
    weight = np.exp(np.where(marked, logprobs - batch.behaviour, 0))
    expected = -2.0 * signs * weight / marked.sum()
    value = (expected * np.where(marked, logprobs, 0)).sum()
    assert float(loss - plain_loss) == pytest.approx(value, rel=1e-4)
    np.testing.assert_allclose(gradient - plain_gradient, expected, atol=1e-6)


def test_gamma_weighs_violations_alone_and_a_stale_token_above_the_cap_counts_for_nothing():
    batch = make_batch()
    settings = dataclasses.replace(SETTINGS, anchor="likelihood")
    logprobs = current_logprobs(batch)
    (credit, _) = advantages(batch, settings)
    tags, violations = (np.asarray(mask) for mask in structural_tokens(batch))

    def gradient(gamma: float, batch: GRPOBatch = batch) -> np.ndarray:
        return np.asarray(
            jax.grad(lambda x: paravt_loss(x, credit, batch, settings, gamma=gamma)[0])(logprobs)
        )

    none = gradient(0.0)
    some = gradient(1.0)
    assert (none == some)[~violations].all()
    assert (none != some)[violations & ~tags].all()
    # Weights of e^2 are above the cap of 5.
    behaviour = jnp.where(violations, logprobs - 2, batch.behaviour)
    stale = dataclasses.replace(batch, behaviour=behaviour)
    assert (gradient(1.0, stale)[violations & ~tags] == 0).all()


@functools.partial(jax.jit, static_argnames="settings")
def loss_metrics(batch: GRPOBatch, settings: GRPOSettings, logprobs):
    credit, _ = advantages(batch, settings)
    return paravt_loss(logprobs, credit, batch, settings)[1]


def tag_logprobs(batch: GRPOBatch, logprobs) -> dict[str, list[float]]:
    """The log-probs of the trained tags by kind, found one by one."""
    found: dict[str, list[float]] = {kind.name.lower(): [] for kind in TAGS}
    for row in range(batch.mask.shape[0]):
        group, member = divmod(row, batch.rewards.shape[1])
        for at in range(batch.structure.positions.shape[1]):
            token = int(batch.structure.positions[row, at])
            kind = Kind(int(batch.structure.kinds[row, at]))
            counts = batch.structure.valid[row, at] and batch.mask[row, token]
            if counts and batch.valid[group, member] and kind in TAGS:
                found[kind.name.lower()].append(float(logprobs[row, token]))
    return found


@pytest.mark.parametrize("anchor", get_args(Anchor))
def test_every_recipe_has_the_likelihood_of_the_tags_that_were_sampled(anchor):
    """Means per kind and over all of them; violations and invalid rollouts do not count."""
    valid = np.ones((3, 4), bool)
    valid[1, 2] = False
    batch = make_batch(valid=valid)
    logprobs = current_logprobs(batch)
    found = tag_logprobs(batch, logprobs)
    metrics = loss_metrics(batch, dataclasses.replace(SETTINGS, anchor=anchor), logprobs)

    for kind, values in found.items():
        assert metrics[f"tags/{kind}/count"] == len(values) > 0
        mean = np.mean(np.exp(values))
        assert float(metrics[f"tags/{kind}/probability"]) == pytest.approx(mean, rel=1e-5)
    everything = [value for values in found.values() for value in values]
    assert metrics["tags/count"] == len(everything)
    mean = np.mean(np.exp(everything))
    assert float(metrics["tags/probability"]) == pytest.approx(mean, rel=1e-5)
    assert float(metrics["tags/logprob"]) == pytest.approx(np.mean(everything), rel=1e-5)


# --- the loss


def test_policy_loss_by_hand():
    mask = jnp.ones((1, 4), bool)
    proximal = jnp.full((1, 4), -1.0)
    logprobs = proximal + jnp.log(jnp.array([[1.5, 0.5, 1.5, 1.0]]))
    behaviour = proximal - jnp.log(jnp.array([[1.0, 1.0, 2.0, 6.0]]))
    batch = token_batch(behaviour, mask, proximal)
    advantages = jnp.array([[1.0, 1.0, -1.0, 1.0]])
    loss, metrics = policy_loss(logprobs, advantages, batch, GRPOSettings())
    assert float(loss) == pytest.approx((-1.2 - 0.5 + 2 * 1.5 + 0) / 4, rel=1e-5)
    assert float(metrics["capped_fraction"]) == 0.25


def test_a_weight_that_equals_the_cap_is_kept():
    proximal = jnp.array([[-2.0, -2.0, -2.0]])
    # The sampler found the tokens as likely, less likely and more likely.
    behaviour = jnp.array([[-2.0, -2.001, -1.999]])
    mask = jnp.ones((1, 3), bool)
    capped = dataclasses.replace(SETTINGS, behaviour_cap=1.0)
    equal, above, below = behaviour_weight(proximal, behaviour, mask, capped)[0]
    assert equal == 1
    assert above == 0
    assert 0.99 < below < 1


def test_a_token_five_times_as_likely_is_kept_and_a_little_more_is_not():
    proximal = jnp.log(jnp.array([[4.999, 5.02]]) / 100)
    behaviour = jnp.log(jnp.full((1, 2), 1 / 100))
    weight = behaviour_weight(proximal, behaviour, jnp.ones((1, 2), bool), GRPOSettings())
    np.testing.assert_allclose(weight, [[4.999, 0]], rtol=1e-4)


def loss_at(ratios, advantages, mask=None, **changes):
    """Loss and metrics of one row of tokens with these policy ratios."""
    proximal = jnp.full((1, len(ratios)), -3.0)
    mask = jnp.ones(proximal.shape, bool) if mask is None else jnp.array([mask])
    logprobs = proximal + jnp.log(jnp.array([ratios]))
    advantages = jnp.broadcast_to(jnp.array(advantages), proximal.shape)
    settings = GRPOSettings(**changes)
    batch = token_batch(proximal, mask, proximal)
    loss, metrics = policy_loss(logprobs, advantages, batch, settings)
    return float(loss), {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "clips", "expected"),
    [
        (0.5, -1.0, {}, 0.8),  # no gain from making a bad token less likely still
        (0.5, 1.0, {}, -0.5),
        (3.0, 1.0, {"upper_clip": 0.28}, -1.28),
        (3.0, 1.0, {"clip": 0.3}, -1.3),
        (3.0, -1.0, {}, 3.0),
        (3.0, -1.0, {"dual_clip": 1.5}, 1.5),
        (1.0, -1.0, {"dual_clip": 1.5}, 1.0),
    ],
)
def test_each_bound_of_the_ratio_by_hand(ratio, advantage, clips, expected):
    assert loss_at([ratio], advantage, **clips)[0] == pytest.approx(expected, rel=1e-5)


def test_metrics_count_the_tokens_that_the_clips_change():
    """A clipped token has no gradient; the last two are outside the mask."""
    ratios = [0.5, 0.5, 1.25, 1.25, 3.0, 1.0, 9.0, 9.0]
    gains = [-1.0, 1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0]
    mask = [True] * 6 + [False] * 2
    _, metrics = loss_at(ratios, gains, mask, dual_clip=2.0)
    assert metrics["clip_fraction"] == pytest.approx(2 / 6)
    assert metrics["dual_clip_fraction"] == pytest.approx(1 / 6)
    assert metrics["ratio_mean"] == pytest.approx(7.5 / 6)
    assert metrics["ratio_max"] == pytest.approx(3.0)
    _, higher = loss_at(ratios, gains, mask, upper_clip=0.3)
    assert higher["clip_fraction"] == pytest.approx(1 / 6)
    assert "dual_clip_fraction" not in higher


def test_the_first_update_of_a_batch_has_no_ratio():
    """Its loss is that of a proximal policy equal to the current one."""
    batch = make_batch()
    credit, _ = advantages(batch, SETTINGS)
    logprobs = current_logprobs(batch)

    def result(proximal):
        def loss(x):
            some = dataclasses.replace(batch, proximal=proximal)
            return paravt_loss(x, credit, some, SETTINGS)

        (_, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(logprobs)
        return metrics, gradient

    first, gradient = result(None)
    equal, same_gradient = result(logprobs)
    np.testing.assert_array_equal(gradient, same_gradient)
    for name, value in first.items():
        np.testing.assert_array_equal(value, equal[name])
    assert not [name for name in first if "ratio" in name or "clip" in name]
    assert equal["ratio_mean"] == equal["ratio_max"] == 1
    assert equal["clip_fraction"] == 0
    later, _ = result(current_logprobs(batch, seed=6))
    assert later["clip_fraction"] > 0
    assert later["loss"] != first["loss"]


def test_the_anchor_needs_no_proximal_policy():
    """Its importance weight compares the current policy with the sampler's."""
    batch = make_batch()
    settings = dataclasses.replace(SETTINGS, anchor="likelihood")
    logprobs = current_logprobs(batch)
    zero = jnp.zeros_like(logprobs)

    def gradient(proximal):
        some = dataclasses.replace(batch, proximal=proximal)
        return jax.grad(lambda x: paravt_loss(x, zero, some, settings)[0])(logprobs)

    first, later = gradient(None), gradient(current_logprobs(batch, seed=6))
    np.testing.assert_array_equal(first, later)
    assert np.abs(first).max() > 0


def test_a_sequence_ratio_averages_over_a_rollout_from_the_first_update_on():
    """So the setting acts with one update per batch, too."""
    batch = make_batch()
    logprobs = current_logprobs(batch)
    gradient = jax.grad(whole_loss, argnums=2)

    def spread(ratio) -> float:
        """The largest difference between the gradients of a rollout's tokens."""
        settings = dataclasses.replace(SETTINGS, ratio=ratio)
        values = np.where(batch.mask, gradient(batch, settings, logprobs), np.nan)
        return float(np.max(np.nanmax(values, 1) - np.nanmin(values, 1)))

    assert spread("sequence") < 1e-6 < 1e-2 < spread("token")


@pytest.mark.parametrize("anchor", ["credit", "likelihood"])
def test_padding_and_order_change_nothing(anchor):
    settings = dataclasses.replace(SETTINGS, anchor=anchor)
    batch = make_batch(seed=3)
    logprobs = current_logprobs(batch)
    plain = whole_loss(batch, settings, logprobs)

    def wider(x):
        return jnp.pad(
            x, ((0, 0), (0, 5)), constant_values=jnp.nan if x.dtype == jnp.float32 else 0
        )

    padded = dataclasses.replace(
        batch,
        **{name: wider(getattr(batch, name)) for name in ("mask", "behaviour", "reference")},
        structure=Structure(*(wider(x) for x in batch.structure)),
    )
    np.testing.assert_allclose(whole_loss(padded, settings, wider(logprobs)), plain, rtol=1e-5)
    plain_metrics = loss_metrics(batch, settings, logprobs)
    padded_metrics = loss_metrics(padded, settings, wider(logprobs))
    for name, value in plain_metrics.items():
        np.testing.assert_allclose(padded_metrics[name], value, rtol=1e-5)

    groups = np.random.default_rng(1).permutation(3)
    inside = np.random.default_rng(2).permutation(4)
    rows = (groups[:, None] * 4 + inside).reshape(-1)
    moved = jax.tree.map(lambda x: x[groups][:, inside] if x.shape == (3, 4) else x[rows], batch)
    np.testing.assert_allclose(whole_loss(moved, settings, logprobs[rows]), plain, rtol=1e-5)


def test_only_current_tokens_count_in_the_gap():
    batch = make_batch(seed=4)
    logprobs = current_logprobs(batch)
    credit, _ = advantages(batch, SETTINGS)
    current = np.asarray(batch.mask) & (np.arange(batch.mask.shape[1]) % 2 == 0)
    some = dataclasses.replace(batch, current=jnp.asarray(current))
    loss, metrics = paravt_loss(logprobs, credit, some, SETTINGS)
    trained = np.asarray(batch.trained)
    gaps = np.abs(np.asarray(logprobs) - np.asarray(batch.behaviour))
    assert metrics["behaviour_gap"] == pytest.approx(
        gaps[trained & current].sum() / trained.sum(), rel=1e-5
    )
    assert loss == paravt_loss(logprobs, credit, batch, SETTINGS)[0]


@pytest.mark.parametrize("anchor", ["none", "likelihood"])
def test_parts_with_the_whole_batch_totals_add_up(anchor):
    settings = dataclasses.replace(SETTINGS, anchor=anchor)
    batch = make_batch(seed=4)
    totals = batch_totals(make_batch(seed=4))
    logprobs = current_logprobs(batch)
    batch = dataclasses.replace(batch, proximal=current_logprobs(batch, seed=6))
    credit, _ = advantages(batch, settings)

    def part(i):
        # A part need not hold whole groups.
        rows = jnp.arange(12)[:, None] % 3 == i
        some = dataclasses.replace(batch, mask=batch.mask & rows)
        return paravt_loss(logprobs, credit, some, settings, totals)[1]

    parts = [part(i) for i in range(3)]
    whole = paravt_loss(logprobs, credit, batch, settings)[1]
    assert whole["ratio_max"] > 1
    for name, value in whole.items():
        joined = max if name.endswith("_max") else sum
        joint = float(joined(some[name] for some in parts))
        assert joint == pytest.approx(float(value), rel=1e-4), name


def test_the_gradient_of_old_rollouts_is_that_of_fresh_ones():
    """In expectation over the sampler's tokens, the importance weight makes the gradients equal."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=5), jnp.float32)
    older = jnp.asarray(rng.normal(size=5), jnp.float32)
    values = jnp.asarray(rng.normal(size=5), jnp.float32)
    settings = dataclasses.replace(SETTINGS, behaviour_cap=None)

    def loss(logits, drawn_by):
        """Each token of the vocabulary once, weighted by its probability under `drawn_by`."""
        logprobs = jax.nn.log_softmax(logits)[None]
        behaviour = jax.nn.log_softmax(drawn_by)[None]
        credit = values[None] * jnp.exp(behaviour)
        batch = token_batch(behaviour, jnp.ones((1, 5), bool), logprobs)
        return policy_loss(logprobs, credit, batch, settings)[0]

    stale = jax.grad(loss)(logits, older)
    fresh = jax.grad(loss)(logits, logits)
    np.testing.assert_allclose(stale, fresh, atol=1e-6)
    assert np.abs(fresh).max() > 1e-2


def test_a_row_of_an_invalid_rollout_counts_like_one_without_generated_tokens():
    """For advantages, loss, gradient and metrics."""
    valid = np.ones((3, 4), bool)
    valid[1, 2] = False
    batch = make_batch(valid=valid)
    without = dataclasses.replace(batch, mask=batch.mask.at[6].set(False))
    assert batch.mask[6].any()
    expected, _ = advantages(without, SETTINGS)
    np.testing.assert_allclose(advantages(batch, SETTINGS)[0], expected, rtol=1e-6)

    logprobs = current_logprobs(batch)
    credit = jnp.ones(batch.mask.shape)

    def results(batch):
        def loss(logprobs):
            return paravt_loss(logprobs, credit, batch, SETTINGS)

        (_, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(logprobs)
        return metrics, gradient

    metrics, gradient = results(batch)
    expected_metrics, expected_gradient = results(without)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-6)
    for name, value in expected_metrics.items():
        assert float(metrics[name]) == pytest.approx(float(value), rel=1e-6), name


def test_contradicting_settings_are_refused():
    with pytest.raises(ValueError, match="rl.grpo.anchor: 'credit'"):
        GRPOSettings(ratio="sequence", anchor="credit")


@pytest.mark.parametrize(
    "name, value",
    [
        ("group_size", 1),
        ("behaviour_cap", -1.0),
        ("kl_coefficient", float("inf")),
        ("min_signal", 1.1),
        ("clip", 1.0),
        ("upper_clip", 0.0),
        ("dual_clip", 1.0),
    ],
)
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"rl.grpo.{name}: "):
        GRPOSettings(**{name: value})
