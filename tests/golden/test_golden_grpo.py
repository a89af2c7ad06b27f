"""normalization, kl_estimator, advantages, ppo_loss and train_step against our algorithm.

The tables are aligned to the next token (index t scores token t + 1), this project to the token itself: `from_next` shifts.
Cases of knobs that no recipe here has are named in one table per test, with the reason; nothing else is left out.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paravt_jax import grpo
from paravt_jax.grpo import GRPOBatch, GRPOSettings
from paravt_jax.structure import Structure


def close(got, expected: np.ndarray, name: str, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(got), expected, rtol=rtol, atol=atol, err_msg=name)


def from_next(x: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], 1)


def groups_of(x: np.ndarray, size: int) -> jnp.ndarray:
    return jnp.asarray(x.reshape(-1, size))


NORMALISATIONS_LEFT_OUT = {
    "c06": "10 rewards in groups of 8: a batch here consists of whole groups",
    "c09": "leave-one-out mean: no recipe",
    "c10": "biased deviation: no recipe",
    "c11": "leave-one-out mean: no recipe",
    "c12": "no deviation: no recipe",
    "c13": "deviation over the batch, mean over the group: no recipe",
    "c14": "no mean: no recipe",
    "c22": "leave-one-out mean: no recipe",
    "c23": "groups of rows of tokens: no recipe",
    "c24": "biased deviation: no recipe",
}


def test_normalization(cases):
    run = 0
    for name, (config, arrays) in cases("normalization").items():
        if name in NORMALISATIONS_LEFT_OUT:
            continue
        x, y = arrays["x"], arrays["y"]
        if config["mean_level"] == "group":
            rewards = groups_of(x, config["group_size"])
            got, _ = grpo.normalise_in_group(rewards, jnp.ones(rewards.shape, bool), config["eps"])
            got = got.reshape(-1)
        else:
            mask = jnp.asarray(arrays.get("mask", np.ones_like(x)) > 0)
            got = grpo.normalise_advantages(jnp.atleast_2d(jnp.asarray(x)), jnp.atleast_2d(mask), True, config["eps"])
            got = np.where(mask, got.reshape(x.shape), y)  # what stands outside the mask means nothing in either
        close(got, y, name, atol=1e-4, rtol=1e-5)
        run += 1
    assert run + len(NORMALISATIONS_LEFT_OUT) == 25


def test_kl_estimator(cases):
    for name, (config, arrays) in cases("kl_estimator").items():
        clamp = 10.0 if config["apply_clamp"] else None
        got = grpo.kl_penalty(jnp.asarray(arrays["log_probs"]), jnp.asarray(arrays["log_probs_base"]), config["kl_estimator"], clamp)
        close(got, arrays["kl"], name)


ADVANTAGES_LEFT_OUT = {
    "c07": "10 rollouts in groups of 4: a batch here consists of whole groups",
    "c10": "mask_no_eos_with_zero: no recipe",
    "c14": "a critic's values: no recipe",
    "c15": "discount and lambda below one: no recipe",
    "c18": "advantages normalised in groups: no recipe",
    "c19": "leave-one-out reward mean: no recipe",
}
NOT_DECOUPLED = {"c12": "the KL is taken from the proximal policy: that policy is given as the behaviour"}


def ends_generated(config_mask: np.ndarray, attention: np.ndarray) -> np.ndarray:
    """Rows whose last real token was generated; the others' task reward vanishes in the release (REFERENCE 4, 6)."""
    last = np.maximum(attention.sum(1) - 1, 0)
    return config_mask[np.arange(len(last)), last]


def as_batch(name: str, config: dict, arrays: dict[str, np.ndarray]) -> tuple[GRPOBatch, GRPOSettings]:
    g = config["reward_norm"]["group_size"] if config["reward_norm"] else 4
    b, p = len(arrays["in_rewards"]), len(arrays["in_rewards"]) // g
    behaviour = from_next(arrays["in_prox_logp"]) if name in NOT_DECOUPLED else arrays["in_logprobs"]
    reference = from_next(arrays["in_ref_logp"]) if "in_ref_logp" in arrays else behaviour
    batch = GRPOBatch(
        mask=jnp.asarray(arrays["in_loss_mask"] > 0),
        behaviour=jnp.asarray(behaviour),
        reference=jnp.asarray(reference),
        rewards=groups_of(arrays["in_rewards"], g),
        anchor_rewards=jnp.zeros((p, g)),
        valid=jnp.ones((p, g), bool),
        parseable=jnp.ones(b, bool),
        structure=Structure(jnp.zeros((b, 1), jnp.int32), jnp.zeros((b, 1), jnp.int8), jnp.zeros((b, 1), bool)),
    )
    clip = config["reward_clip"]
    return batch, GRPOSettings(group_size=g, reward_clip=clip, kl_kind=config["kl_estimator"], kl_coefficient=config["kl_ctl"])


@functools.partial(jax.jit, static_argnames=("settings", "in_groups", "over_batch"))
def in_steps(batch: GRPOBatch, kept: jnp.ndarray, settings: GRPOSettings, in_groups: bool, over_batch: bool):
    """The steps of `grpo.advantages` with the release's defects: only `kept` rows have a reward, silent batches are normalised."""
    shaped = grpo.shape_rewards(batch.rewards, settings)
    normed, silent = grpo.normalise_in_group(shaped, batch.valid)
    rewards = normed if in_groups else shaped
    kl = grpo.kl_penalty(batch.behaviour, batch.reference, settings.kl_kind)
    raw = grpo.token_advantages(rewards.reshape(-1) * kept, kl, batch.mask, settings.kl_coefficient)
    return shaped, rewards, silent, grpo.normalise_advantages(raw, batch.mask) if over_batch else raw


def test_advantages(cases):
    """Step by step; then the whole function wherever the table shows neither of two defects: lost rewards, silent groups blown up."""
    run = whole = 0
    for name, (config, arrays) in cases("advantages").items():
        if name in ADVANTAGES_LEFT_OUT:
            continue
        batch, settings = as_batch(name, config, arrays)
        kept = ends_generated(np.asarray(batch.mask), arrays["in_attention_mask"])
        shaped, rewards, silent, expected = in_steps(batch, kept, settings, bool(config["reward_norm"]), bool(config["adv_norm"]))
        if config["reward_norm"]:
            close(shaped.reshape(-1), arrays["mid_reward_scaled_clipped"], name)
            close(rewards.reshape(-1), arrays["mid_reward_normed"], name)
        released = np.where(batch.mask, from_next(arrays["out_advantages"]), 0)  # unnormalised (c17), it leaves sums on other tokens
        close(expected, released, name, rtol=1e-4, atol=1e-4)
        run += 1
        written = np.asarray(batch.mask).any(1)
        if config["adv_norm"] and config["reward_norm"] and kept[written].all() and not silent.all():
            got, _ = jax.jit(grpo.advantages, static_argnames="settings")(batch, settings)
            close(got, released, name, rtol=1e-4, atol=1e-4)
            whole += 1
    assert run + len(ADVANTAGES_LEFT_OUT) == 28 and whole >= 10


def test_no_reward_is_lost_to_tool_tokens(cases):
    """c26 and c27: rows end with tool tokens, and their reward stands on the last generated token here (REFERENCE 4, 6)."""
    for name in ("c26", "c27"):
        config, arrays = cases("advantages")[name]
        batch, settings = as_batch(name, config, arrays)
        rewards, _ = grpo.normalise_in_group(grpo.shape_rewards(batch.rewards, settings), batch.valid)
        got = grpo.token_advantages(rewards.reshape(-1), jnp.zeros(batch.mask.shape), batch.mask, 0.0)
        lost = np.flatnonzero(~ends_generated(np.asarray(batch.mask), arrays["in_attention_mask"]) & np.asarray(batch.mask).any(1))
        assert len(lost)
        for row in lost:
            np.testing.assert_allclose(got[row][batch.mask[row]], rewards.reshape(-1)[row], rtol=1e-6)
            if config["kl_ctl"] == 0:
                assert (arrays["out_advantages"][row] == 0).all()


def test_silent_groups_are_not_blown_up(cases):
    """c05: every group's rewards are equal; the release makes unit-variance noise of the KL (REFERENCE 4, 13)."""
    config, arrays = cases("advantages")["c05"]
    batch, settings = as_batch("c05", config, arrays)
    got, metrics = grpo.advantages(batch, settings)
    assert np.abs(arrays["out_advantages"]).max() > 1 > 0.2 > np.abs(got).max() and metrics["silent_groups"] == 1


LOSSES_LEFT_OUT = {
    "c11": "another upper clip: no recipe",
    "c12": "dual clip: no recipe",
    "c13": "dual clip and another upper clip: no recipe",
    "c14": "sequence-level ratios: no recipe",
    "c15": "sequence-level ratios: no recipe",
    "c16": "sequence-level ratios: no recipe",
    "c17": "sequence-level ratios: no recipe",
    "c18": "sequence-level ratios: no recipe",
    "c19": "sequence-level ratios: no recipe",
    "c20": "sequence-level ratios: no recipe",
}


def test_ppo_loss(cases):
    run = 0
    for name, (config, arrays) in cases("ppo_loss").items():
        if name in LOSSES_LEFT_OUT:
            continue
        assert config["importance_sampling_level"] == "token" and config["c_clip"] is None and config["eps_clip_higher"] is None
        settings = GRPOSettings(clip=config["eps_clip"], behaviour_cap=config["behav_imp_weight_cap"] or np.inf)
        fields = ("in_proximal_logprobs", "in_old_logprobs", "in_advantages", "in_loss_mask")
        proximal, behaviour, credit, mask = (jnp.atleast_2d(arrays[field]) for field in fields)

        def loss(x, proximal=proximal, behaviour=behaviour, credit=credit, mask=mask, settings=settings):
            return grpo.policy_loss(x, proximal, behaviour, credit, mask, settings)

        logprobs = jnp.atleast_2d(arrays["in_logprobs"])
        (got, metrics), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(logprobs)
        close(got, arrays["out_loss"], name)
        close(gradient.reshape(arrays["grad_logprobs"].shape), arrays["grad_logprobs"], name)
        if mask.any():
            assert float(metrics["clip_fraction"]) == pytest.approx(float(arrays["derived_clip_ratio"]), abs=1e-5), name
            assert float(metrics["capped_fraction"]) == pytest.approx(1 - float(arrays["derived_behave_kept_ratio"]), abs=1e-5), name
        run += 1
    assert run + len(LOSSES_LEFT_OUT) == 24


def test_train_step(cases):
    """Gradients of the release's whole step on a bigram model, from its advantages: tempered log-probs, ratios, weights, denominators."""
    run = 0
    for name, (config, arrays) in cases("train_step").items():
        ids = jnp.asarray(arrays["in_input_ids"])
        settings = GRPOSettings(clip=config["eps_clip"], behaviour_cap=config["behav_imp_weight_cap"] or np.inf)
        mask, behaviour, proximal, credit = (
            jnp.asarray(from_next(arrays[f"out_{field}"])) for field in ("loss_mask", "logprobs", "prox_logp", "advantages")
        )
        order, sizes = np.array(config["minibatch_row_order"]), config["minibatch_sizes"]
        if config["importance_sampling_level"] == "sequence":  # c03: no recipe
            continue
        for i, rows in enumerate(np.split(order, np.cumsum(sizes)[:-1])):
            parts = [x[rows] for x in (proximal, behaviour, credit)]

            def loss(w, parts=tuple(parts), mask=mask[rows] > 0, ids=ids[rows], settings=settings, config=config):
                table = jax.nn.log_softmax(w / config["temperature"], axis=-1)
                logprobs = jnp.pad(table[ids[:, :-1], ids[:, 1:]], ((0, 0), (1, 0)))
                return grpo.policy_loss(logprobs, parts[0], parts[1], parts[2], mask, settings)[0]

            gradient = jax.jit(jax.grad(loss))(jnp.asarray(arrays["W"]))
            close(gradient, arrays[f"grad_W_minibatch{i}"], name, rtol=1e-4, atol=1e-5)
            run += 1
    assert run == 6  # five cases, one of them in two minibatches
