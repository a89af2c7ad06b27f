"""The tables of normalisation, KL, advantages, losses, log-probs and steps against our algorithm.

The tables are aligned with the next token (index t is about token t + 1), this project with the
token itself: `from_next` shifts.

Some records contain a mistake of the release. Their configuration and data put them under one of
`REASONS`, and the tests say what happens here instead. `formulas.released` is REFERENCE 3 in plain
NumPy: with the release's mistakes it equals every record, and without them it equals our result.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.text import TextDecoder
from paravt_jax.method.grpo.advantages import compute_advantages, kl_penalty, normalise
from paravt_jax.method.grpo.batch import GRPOBatch
from paravt_jax.method.grpo.loss import policy_loss
from paravt_jax.method.grpo.settings import (
    NORMALISATIONS,
    GRPOSettings,
    Normalisation,
    NormalisationName,
)
from paravt_jax.method.structure import Structure
from tests.golden.formulas import (
    Arrays,
    Config,
    all_equal_in_groups,
    in_rows,
    normalise_as_released,
    published_loss,
    released,
)
from tests.token_batch import token_batch

REASONS = {
    "leftover": "The batch is not whole groups. The release divides the remainder by epsilon; "
    "here a batch is always whole groups.",
    "alone": "A group of one, normalised by the others. The release passes the value through; "
    "here it is 0.",
    "biased": "The biased deviation. Here there is one formula, the published recipe's.",
    "lost": "A rollout that ends in tool tokens loses its reward (REFERENCE 4, 6). Here its last "
    "generated token has the reward.",
    "silent": "All groups have equal rewards, and the batch normalisation scales the KL up "
    "(REFERENCE 4, 13). Here only its mean is removed.",
    "no_eos": "Rows that fill the width lose their reward. Here scoring decides what a rollout "
    "that was cut off earns.",
    "discounted": "A critic's values, or a discount or lambda below 1. The method has neither "
    "(REFERENCE 3, step 2).",
    "outside": "Sequence level: the release counts advantages outside the mask, here they are "
    "ignored.",
    "another loss": "M2PO and SAPO are other algorithms.",
    "guessed": "The release interpolates the proximal log-probs between versions; here they are "
    "computed.",
    "refused": "The release refuses a combination of settings that do not exist here.",
}


def close(got, expected, name: str, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(got), expected, rtol=rtol, atol=atol, err_msg=name)


def from_next(x: np.ndarray) -> np.ndarray:
    """Shift next-token alignment [b, t] to the token itself."""
    return np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], 1)


def normalisation(config: Config | None) -> Normalisation:
    if config is None:
        return Normalisation("none", "none")
    return Normalisation(
        config["mean_level"] or "none", config["std_level"] or "none", config["mean_leave1out"]
    )


def named(config: Config | None) -> NormalisationName:
    """The name of a normalisation in the settings."""
    (name,) = (name for name, how in NORMALISATIONS.items() if how == normalisation(config))
    return cast(NormalisationName, name)


# --- normalisation ---


def normalisation_reason(x: np.ndarray, mask: np.ndarray, config: Config) -> str | None:
    grouped = "group" in (config["mean_level"], config["std_level"])
    if grouped and len(x) % config["group_size"]:
        return "leftover"
    if grouped and config["group_size"] == 1 and x.shape[1] == 1 and config["mean_leave1out"]:
        return "alone"
    if not config["std_unbiased"] and not np.allclose(
        normalise_as_released(x, mask, config), normalise_as_released(x, mask, config, biased=False)
    ):
        return "biased"
    return None


def test_normalization(cases, seen):
    for name, (config, arrays) in cases("normalization").items():
        x = arrays["x"] if arrays["x"].ndim == 2 else arrays["x"][:, None]
        mask = np.ones(x.shape, bool)
        if "mask" in arrays:
            mask = arrays["mask"].reshape(x.shape) > 0
        y = arrays["y"].reshape(x.shape)
        why = seen(normalisation_reason(x, mask, config))
        groups, rows = 1, len(x)
        if "group" in (config["mean_level"], config["std_level"]):
            groups = len(x) // config["group_size"]
            rows = groups * config["group_size"]
        x, mask, y = x[:rows], mask[:rows], y[:rows]
        shape = (groups, -1)
        got = jax.jit(normalise, static_argnums=(2, 3))(
            jnp.asarray(x).reshape(shape),
            jnp.asarray(mask).reshape(shape),
            normalisation(config),
            config["eps"],
        )
        got = np.asarray(got).reshape(x.shape)
        if why in (None, "leftover"):  # for "leftover", the whole groups
            close(got[mask], y[mask], name, atol=1e-4)
        elif why == "alone":
            assert (got == 0).all(), name
        elif why == "biased":
            close(normalise_as_released(x, mask, config)[mask], y[mask], name, atol=1e-4)
            close(got, normalise_as_released(x, mask, config, biased=False), name, atol=1e-4)


def test_kl_estimator(cases, seen):
    for name, (config, arrays) in cases("kl_estimator").items():
        seen(None)
        clamp = 10.0 if config["apply_clamp"] else None
        got = kl_penalty(
            jnp.asarray(arrays["log_probs"]),
            jnp.asarray(arrays["log_probs_base"]),
            config["kl_estimator"],
            clamp,
        )
        close(got, arrays["kl"], name)


# --- advantages ---


def advantages_reason(config: Config, arrays: Arrays) -> str | None:
    norm = config["reward_norm"]
    b = len(arrays["in_rewards"])
    mask = arrays["in_loss_mask"] > 0
    real = arrays["in_attention_mask"] > 0
    if norm and b % norm["group_size"]:
        return "leftover"
    if "in_values" in arrays or config["discount"] != 1 or config["gae_lambda"] != 1:
        return "discounted"
    if config["mask_no_eos_with_zero"] and (real.sum(1) == real.shape[1]).any():
        return "no_eos"
    if any(n and n["std_level"] and not n["std_unbiased"] for n in (norm, config["adv_norm"])):
        return "biased"
    ends = mask[np.arange(b), np.maximum(real.sum(1) - 1, 0)]
    if (mask.any(1) & ~ends).any():
        return "lost"
    scaled, _, _ = released(config, arrays, mistakes=True)
    normalised = norm and config["adv_norm"] and config["kl_ctl"] and mask.any()
    if normalised and all_equal_in_groups(scaled, norm["group_size"]):
        return "silent"
    return None


def as_batch(config: Config, arrays: Arrays) -> tuple[GRPOBatch, GRPOSettings]:
    b = len(arrays["in_rewards"])
    g = group_size(config, arrays)
    p = b // g
    undecoupled = not config["use_decoupled_loss"] and config["recompute_logprob"]
    behaviour = from_next(arrays["in_prox_logp"]) if undecoupled else arrays["in_logprobs"]
    reference = from_next(arrays["in_ref_logp"]) if "in_ref_logp" in arrays else behaviour
    batch = GRPOBatch(
        # A first token is never generated: there is nothing before it.
        mask=jnp.asarray(arrays["in_loss_mask"] > 0).at[:, 0].set(False),
        behaviour=jnp.asarray(behaviour),
        reference=jnp.asarray(reference),
        structure=Structure(
            jnp.zeros((b, 1), jnp.int32), jnp.zeros((b, 1), jnp.int8), jnp.zeros((b, 1), bool)
        ),
        rewards=jnp.asarray(arrays["in_rewards"]).reshape(p, g),
        anchor_rewards=jnp.zeros((p, g)),
        valid=jnp.ones((p, g), bool),
        compliant=jnp.ones((p, g), bool),
    )
    settings = GRPOSettings(
        group_size=g,
        reward_bias=-config["reward_bias"],
        reward_scaling=config["reward_scaling"],
        reward_clip=config["reward_clip"],
        reward_normalisation=named(config["reward_norm"]),
        advantage_normalisation=named(config["adv_norm"]),
        kl_kind=config["kl_estimator"],
        kl_coefficient=config["kl_ctl"],
        behaviour_cap=config["behav_imp_weight_cap"],
        **ratio_settings(config),
    )
    return batch, settings


def epsilon_of(config: Config) -> float:
    return (config["adv_norm"] or config["reward_norm"])["eps"]


@functools.partial(jax.jit, static_argnames=("settings", "epsilon"))
def our_advantages(batch: GRPOBatch, settings: GRPOSettings, epsilon: float) -> jax.Array:
    return compute_advantages(batch, settings, epsilon=epsilon)[0]


def ratio_settings(config: Config) -> dict[str, Any]:
    """The kind of policy ratio and its clips, as fields of `GRPOSettings`."""
    return {
        "ratio": config["importance_sampling_level"],
        "clip": config["eps_clip"],
        "upper_clip": config["eps_clip_higher"],
        "dual_clip": config["c_clip"],
    }


def group_size(config: Config, arrays: Arrays) -> int:
    """The size of a group; without reward normalisation, the batch is one group."""
    norm = config["reward_norm"]
    return norm["group_size"] if norm else len(arrays["in_rewards"])


def whole_groups(config: Config, arrays: Arrays) -> Arrays:
    """The rows that form whole groups."""
    size = group_size(config, arrays)
    rows = len(arrays["in_rewards"]) // size * size
    return {name: x[:rows] if name.startswith("in_") else x for name, x in arrays.items()}


def test_advantages(cases, seen):
    for name, (config, arrays) in cases("advantages").items():
        why = seen(advantages_reason(config, arrays))
        scaled, normed, expected = released(config, arrays, mistakes=True)
        mask = arrays["in_loss_mask"] > 0
        mask[:, 0] = False  # a first token is never generated
        if "mid_reward_scaled_clipped" in arrays:
            close(scaled, arrays["mid_reward_scaled_clipped"], name)
            close(normed, arrays["mid_reward_normed"], name, rtol=1e-4, atol=1e-4)
        # Without normalisation, the release leaves sums on tokens outside the mask.
        table = np.where(mask, from_next(arrays["out_advantages"]), 0)
        close(from_next(expected), table, name, rtol=1e-4, atol=1e-4)
        arrays = whole_groups(config, arrays)
        batch, settings = as_batch(config, arrays)
        got = np.asarray(our_advantages(batch, settings, epsilon_of(config)))
        mended = from_next(released(config, arrays, mistakes=False)[2])
        close(got, mended, name, rtol=1e-4, atol=1e-4)
        if why is None:
            close(got, table, name, rtol=1e-4, atol=1e-4)
        if why == "silent":
            assert np.abs(table).max() > 1 > 0.2 > np.abs(got).max(), name
        if why == "lost" and settings.kl_coefficient == 0:
            lost = batch.mask.any(1) & (table == 0).all(1) & (mended != 0).any(1)
            assert lost.any() and (got[np.asarray(lost)] != 0).any(), name


# --- losses ---


def loss_reason(config: Config, arrays: Arrays) -> str | None:
    if config.get("error"):
        return "refused"
    if config.get("m2_threshold") is not None or config.get("use_sapo_loss"):
        return "another loss"
    if config.get("prox_logp_method", "recompute") == "loglinear":
        return "guessed"
    padded = arrays["in_logprobs"].ndim == 2
    outside = np.where(arrays["in_loss_mask"] > 0, 0, arrays["in_advantages"]).any()
    if config["importance_sampling_level"] == "sequence" and padded and outside:
        return "outside"
    return None


def our_loss(config: Config, arrays: Arrays) -> tuple[jax.Array, dict[str, jax.Array], np.ndarray]:
    """Loss, metrics and gradient in the record's own layout."""
    settings = GRPOSettings(behaviour_cap=config["behav_imp_weight_cap"], **ratio_settings(config))
    ends = arrays.get("in_cu_seqlens")
    # The two loss tables name them differently.
    names = {"in_proximal_logprobs": "in_prox_logp", "in_old_logprobs": "in_old_logp"}
    arrays = {names.get(name, name): x for name, x in arrays.items()}
    behaviour = jnp.asarray(in_rows(arrays["in_old_logp"], ends))
    proximal = behaviour
    if config.get("use_decoupled_loss", True):
        proximal = jnp.asarray(in_rows(arrays["in_prox_logp"], ends))
    credit = jnp.asarray(in_rows(arrays["in_advantages"], ends))
    mask = in_rows(arrays["in_loss_mask"] > 0, ends)
    batch = token_batch(behaviour, mask, proximal)

    def loss(x):
        return policy_loss(x, credit, batch, settings)

    logprobs = jnp.asarray(in_rows(arrays["in_logprobs"], ends))
    loss_and_gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, metrics), gradient = loss_and_gradient(logprobs)
    gradient = np.asarray(gradient)
    if arrays["in_logprobs"].ndim == 1:
        if ends is None:
            ends = np.array([0, gradient.shape[1]])
        gradient = np.concatenate([row[:n] for row, n in zip(gradient, np.diff(ends), strict=True)])
    return value, metrics, gradient


@pytest.mark.parametrize("table", ["ppo_loss", "grpo_loss"])
def test_loss(cases, seen, table):
    for name, (config, arrays) in cases(table).items():
        why = seen(loss_reason(config, arrays))
        if why is None:
            value, metrics, gradient = our_loss(config, arrays)
            close(value, arrays["out_loss"], name)
            close(gradient, arrays["grad_logprobs"], name)
            if "derived_behave_kept_ratio" in arrays and arrays["in_loss_mask"].any():
                capped = 1 - float(arrays["derived_behave_kept_ratio"])
                close(metrics["capped_fraction"], capped, name, rtol=0)
        elif why == "outside":
            credit = np.where(arrays["in_loss_mask"] > 0, arrays["in_advantages"], 0)
            inside = arrays | {"in_advantages": credit}
            value, _, gradient = our_loss(config, arrays)
            value_inside, _, gradient_inside = our_loss(config, inside)
            assert value == value_inside, name
            assert (gradient == gradient_inside).all(), name
            assert abs(float(value) - float(arrays["out_loss"])) > 1e-3, name
        else:  # the settings do not exist here, so they cannot be silently ignored
            for field in ("m2_threshold", "use_sapo_loss", "prox_logp_method"):
                with pytest.raises(TypeError, match=field):
                    GRPOSettings(**{field: config[field]})
        if "in_prox_logp" in arrays and why != "outside":
            # The published loss of the same numbers, also for records of other algorithms.
            value, _, _ = our_loss(config, arrays)
            close(value, published_loss(config, arrays), name, rtol=1e-4)


# --- log-probs and the whole step ---


def test_logprobs(cases, seen):
    """The decoder's log-probs, with a head that passes logits through."""
    for name, (config, arrays) in cases("logprobs").items():
        seen(None)
        logits, labels = arrays["in_logits"], arrays["in_labels"]
        for chunk in (None, 5):
            logprobs, gradient = head_logprobs(
                logits, labels, config["temperature"], chunk, arrays["in_weight"]
            )
            close(logprobs, arrays["out_logprobs"], name)
            close(gradient, arrays["grad_logits_of_weighted_sum"], name)


class _Head(TextDecoder):
    """A decoder whose hidden states are the logits."""

    def __init__(self, words: int):
        self.head: Any = jnp.eye(words)


def head_logprobs(
    logits: np.ndarray,
    labels: np.ndarray,
    temperature: float,
    chunk: int | None,
    weight: np.ndarray,
):
    def weighted(x):
        head = _Head(x.shape[-1])
        rows = head.token_logprobs(x[None], jnp.asarray(labels)[None], temperature, chunk)
        return (rows[0] * weight).sum(), rows[0]

    loss_and_gradient = jax.jit(jax.value_and_grad(weighted, has_aux=True))
    (_, values), gradient = loss_and_gradient(jnp.asarray(logits))
    return values, gradient


def rows_of_microbatches(config: Config, lengths: np.ndarray, minibatch: int) -> list[np.ndarray]:
    """The rows of each micro-batch: the minibatch's order, cut at the plan's numbers of tokens."""
    plan = config["microbatches"][minibatch]
    order = np.array(plan["order"])
    ends = np.cumsum(lengths[order])
    cuts = [int(np.flatnonzero(ends == total)[0]) + 1 for total in np.cumsum(plan["group_lens"])]
    return [order[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]


def bigram_loss(
    config: Config, arrays: Arrays, batch: GRPOBatch, settings: GRPOSettings, credit: jax.Array
) -> Callable[[jax.Array, np.ndarray, jax.Array], tuple[jax.Array, jax.Array]]:
    """The loss of some rows over a number of tokens, with its gradient.

    The model has logits w [words, words]: a word's log-probs depend on the word before it only.
    """
    ids = jnp.asarray(arrays["in_input_ids"])
    behaviour = jnp.asarray(from_next(arrays["out_logprobs"]))
    proximal = behaviour
    if config["use_decoupled_loss"]:
        proximal = jnp.asarray(from_next(arrays["out_prox_logp"]))

    @jax.jit
    @jax.value_and_grad
    def loss(w: jax.Array, chosen: jax.Array, tokens: jax.Array) -> jax.Array:
        table = jax.nn.log_softmax(w / config["temperature"], axis=-1)
        logprobs = table[ids[:, :-1], ids[:, 1:]]
        logprobs = jnp.pad(logprobs, ((0, 0), (1, 0)))  # a first token has no log-prob
        some = token_batch(behaviour, batch.mask & chosen[:, None], proximal)
        return policy_loss(logprobs, credit, some, settings, tokens)[0]

    return lambda w, rows, tokens: loss(w, jnp.zeros(len(ids), bool).at[rows].set(True), tokens)


def test_train_step(cases, seen):
    """From rewards and log-probs to the gradient of a bigram model.

    It covers advantages, log-probs at a temperature, ratios, importance weights, denominators, and
    micro-batches whose losses add up to the whole.
    """
    for name, (config, arrays) in cases("train_step").items():
        why = seen(advantages_reason(config, arrays))
        batch, settings = as_batch(config, arrays)
        expected = np.where(batch.mask, from_next(arrays["out_advantages"]), 0)
        credit = jnp.asarray(expected)
        if why is None:
            credit = our_advantages(batch, settings, epsilon_of(config))
            close(credit, expected, name, rtol=1e-4, atol=1e-4)
        loss_and_gradient = bigram_loss(config, arrays, batch, settings, credit)
        w = jnp.asarray(arrays["W"])
        lengths = arrays["in_attention_mask"].sum(1)
        cuts = np.cumsum(config["minibatch_sizes"])[:-1]
        micro_losses = iter(config["microbatch_scaled_losses"])
        for i, rows in enumerate(np.split(np.array(config["minibatch_row_order"]), cuts)):
            # All losses of a minibatch are divided by its number of tokens.
            tokens = batch.mask[rows].sum().astype(jnp.float32)
            expected = arrays[f"grad_W_minibatch{i}"]
            _, gradient = loss_and_gradient(w, rows, tokens)
            close(gradient, expected, name, rtol=1e-4, atol=1e-5)
            summed = jnp.zeros_like(w)
            for part in rows_of_microbatches(config, lengths[rows], i):
                value, gradient = loss_and_gradient(w, rows[part], tokens)
                close(value, next(micro_losses), name, rtol=1e-4, atol=1e-5)
                summed += gradient
            close(summed, expected, name, rtol=1e-4, atol=1e-5)
        assert next(micro_losses, None) is None, name


# --- the table of reasons ---


@pytest.fixture
def seen(record_property):
    """Count how many records agree and how many fall under each reason.

    Of the records with settings that exist here, at least half have to agree.
    """
    counts: collections.Counter[str] = collections.Counter()

    def note(why: str | None) -> str | None:
        assert why is None or why in REASONS
        counts[why or "agree"] += 1
        return why

    yield note
    record_property("records", dict(counts))
    here = sum(counts.values()) - sum(counts[why] for why in ("another loss", "guessed", "refused"))
    assert counts["agree"] * 2 >= here > 0
