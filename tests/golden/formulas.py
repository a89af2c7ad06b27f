"""REFERENCE 3 as plain NumPy loops, with and without the release's mistakes.

Arrays are aligned with the next token, as in the reference's tables: index t is about token t + 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Config = dict[str, Any]
Arrays = dict[str, np.ndarray]


def normalise_as_released(
    x: np.ndarray, mask: np.ndarray, config: Config, biased: bool = True
) -> np.ndarray:
    """Normalise x [b, t], in which groups are consecutive rows.

    With `biased`, a configuration that asks for a biased deviation gets one.
    """
    x = x.astype(np.float64)
    size = config["group_size"]
    parts: dict[str | None, list[slice]] = {
        "batch": [slice(0, len(x))],
        "group": [slice(i, i + size) for i in range(0, len(x) - size + 1, size)],
        None: [],
    }
    means = np.zeros(x.shape)
    for part in parts[config["mean_level"]]:
        n = mask[part].sum()
        total = x[part][mask[part]].sum()
        if config["mean_leave1out"]:
            means[part] = (total - x[part]) / (n - 1) if n > 1 else 0.0
        else:
            means[part] = total / max(n, 1)
    if config["std_level"] is None:
        scale = np.ones(x.shape)
    else:
        scale = np.zeros(x.shape)
        for part in parts[config["std_level"]]:
            n = mask[part].sum()
            centred = (x - means)[part][mask[part]]
            freedom = n - (config["std_unbiased"] or not biased)
            scale[part] = np.sqrt((centred**2).sum() / max(freedom, 1))
        scale = scale + config["eps"]
    out = np.zeros(x.shape)
    out[mask] = ((x - means) / scale)[mask]
    return out


def all_equal_in_groups(scaled: np.ndarray, size: int) -> bool:
    return all(np.ptp(scaled[i : i + size]) == 0 for i in range(0, len(scaled), size))


def released(
    config: Config, arrays: Arrays, mistakes: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute REFERENCE 3, steps 1 to 3: scaled rewards, normalised rewards and advantages.

    With `mistakes` the result is the release's, otherwise this project's.
    """
    mask = arrays["in_loss_mask"] > 0
    real = arrays["in_attention_mask"] > 0
    b, t = mask.shape
    scaled, normed = _rewards(config, arrays, mistakes)
    next_mask = np.concatenate([mask[:, 1:], np.zeros((b, 1), bool)], 1)
    kl = _kl(config, arrays, next_mask)
    rewards = np.where(next_mask, -config["kl_ctl"] * kl, 0.0)
    for row in range(b):
        last = max(int(real[row].sum()) - 2, 0)
        if not mistakes and next_mask[row].any():
            last = np.flatnonzero(next_mask[row])[-1]
        fills_the_width = real[row].sum() == t
        if not (mistakes and config["mask_no_eos_with_zero"] and fills_the_width):
            rewards[row, last] += normed[row]
    out = _gae(config, arrays, rewards, next_mask, mistakes)
    if config["adv_norm"]:
        how = config["adv_norm"]
        norm = config["reward_norm"]
        silent = norm and all_equal_in_groups(scaled, norm["group_size"])
        if silent and not mistakes:
            how = how | {"std_level": None}
        out = normalise_as_released(out, next_mask, how, mistakes)
    return scaled, normed, np.where(next_mask, out, 0.0)


def _rewards(config: Config, arrays: Arrays, mistakes: bool) -> tuple[np.ndarray, np.ndarray]:
    """Scaled and normalised rewards [b]."""
    shifted = arrays["in_rewards"] + np.float32(config["reward_bias"])
    scaled = shifted * np.float32(config["reward_scaling"])
    scaled = np.clip(scaled, -config["reward_clip"], config["reward_clip"])
    norm = config["reward_norm"]
    if not norm:
        return scaled, scaled
    everything = np.ones((len(scaled), 1), bool)
    normed = normalise_as_released(scaled[:, None], everything, norm, mistakes)[:, 0]
    leftover = len(scaled) % norm["group_size"]
    if leftover:
        normed[-leftover:] = scaled[-leftover:] / norm["eps"]
    return scaled, normed


def _kl(config: Config, arrays: Arrays, next_mask: np.ndarray) -> np.ndarray:
    """The estimate of the KL to the reference policy [b, t]."""
    if not config["kl_ctl"]:
        return np.zeros(next_mask.shape)
    last = np.zeros((len(next_mask), 1))
    behaviour = np.concatenate([arrays["in_logprobs"][:, 1:], last], 1)
    if not config["use_decoupled_loss"] and config["recompute_logprob"]:
        behaviour = arrays["in_prox_logp"]
    d = np.where(next_mask, behaviour - arrays["in_ref_logp"], 0).astype(np.float64)
    estimates = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}
    return np.clip(estimates[config["kl_estimator"]], -10, 10)


def _gae(
    config: Config, arrays: Arrays, rewards: np.ndarray, next_mask: np.ndarray, mistakes: bool
) -> np.ndarray:
    """Generalised advantage estimation; without mistakes, sums of the rewards to the end."""
    values = arrays.get("in_values") if mistakes else None
    discount, trace = (config["discount"], config["gae_lambda"]) if mistakes else (1.0, 1.0)
    real = arrays["in_attention_mask"] > 0
    out = np.zeros(rewards.shape)
    for row in range(len(rewards)):
        onward = 0.0
        following = 0.0
        if values is not None and real[row].all():
            following = float(values[row, -1])
        for i in np.flatnonzero(next_mask[row])[::-1]:
            value = 0.0 if values is None else float(values[row, i])
            onward = rewards[row, i] + discount * following - value + discount * trace * onward
            following = value
            out[row, i] = onward
    return out


def in_rows(x: np.ndarray, ends: np.ndarray | None) -> np.ndarray:
    """Packed sequences as padded rows."""
    if x.ndim == 2:
        return x
    if ends is None:
        ends = np.array([0, len(x)])
    out = np.zeros((len(ends) - 1, np.diff(ends).max()), x.dtype)
    for row, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        out[row, : end - start] = x[start:end]
    return out


def published_loss(config: Config, arrays: Arrays) -> float:
    """REFERENCE 3, step 4, as a loop over sequences and tokens, with the record's variants."""
    ends = arrays.get("in_cu_seqlens")
    rows = {
        name: in_rows(x, ends)
        for name, x in arrays.items()
        if name.startswith("in_") and name != "in_cu_seqlens"
    }
    mask = rows["in_loss_mask"] > 0
    proximal = rows["in_prox_logp"] if config["use_decoupled_loss"] else rows["in_old_logp"]
    lower = config["eps_clip"]
    upper = lower if config["eps_clip_higher"] is None else config["eps_clip_higher"]
    cap = config["behav_imp_weight_cap"]
    total = 0.0
    for row in range(len(mask)):
        trained = np.flatnonzero(mask[row])
        difference = (rows["in_logprobs"] - proximal)[row, trained].astype(np.float64)
        credit = rows["in_advantages"][row, trained]
        behaviour = (proximal - rows["in_old_logp"])[row, trained]
        if config["importance_sampling_level"] == "sequence" and len(trained):
            difference = np.full(len(trained), difference.mean())
            credit = np.full(len(trained), credit.mean())
        for d, a, old in zip(difference, credit, behaviour, strict=True):
            clipped = min(max(np.exp(d), 1 - lower), 1 + upper)
            loss = max(-a * np.exp(d), -a * clipped)
            if config["c_clip"] is not None:
                loss = min(loss, config["c_clip"] * abs(a))
            weight = np.exp(old)
            total += loss * weight * (cap is None or weight <= cap)
    return total / max(mask.sum(), 1)
