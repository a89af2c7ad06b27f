"""Speed of a step: tokens per second, and model FLOPs utilisation (MFU) of update and reference.

MFU compares the FLOPs that a computation needs with the peak of the devices. Padding and
recomputation do not count as needed, so the FLOPs of a batch depend on its tokens only, not on how
it is padded, split or sharded. A prompt counts once per group; only behind it are there logits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import jax
from jax.experimental.pallas import tpu as pltpu

from models.config import ModelConfig
from train.learn.packing import GroupLengths

# Dense bfloat16 FLOP/s from NVIDIA's data sheets, by patterns of names, of which the first that
# fits counts. More words after a GeForce's name mean another chip. JAX knows the peaks of TPUs.
_GPUS = {
    "A10": 125e12,
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX A6000": 155e12,
    "RTX 3090$": 71e12,
    "RTX 4090$": 165e12,
    "RTX 5090$": 209e12,
}


def peak_flops() -> float | None:
    """Return the published bfloat16 peak, in FLOP/s, of one of this process's devices.

    None for CPUs and other devices that are not listed.
    """
    device = jax.local_devices()[0]
    if device.platform == "tpu":
        # The figure is for one core; a device may have two.
        info = pltpu.get_tpu_info()
        return float(info.bf16_ops_per_second * info.num_cores)
    for name, peak in _GPUS.items():
        if re.search(rf"\b{name}\b", device.device_kind):
            return peak
    return None


def speeds(
    lengths: Sequence[GroupLengths],
    config: ModelConfig,
    seconds: Mapping[str, float],
    devices: int,
    updates: int = 1,
) -> dict[str, float]:
    """Return `speed/tokens`, per second of the update, and where the peak is known,
    `speed/mfu_update` and `speed/mfu_reference`.

    Args:
        lengths: Lengths of all trajectories of the step.
        config: Sizes of the model.
        seconds: Metrics of the step. RL has the durations `time/reference` and `time/update`, a
            cold start has `time/step`.
        devices: Number of devices that computed it.
        updates: Number of updates from these trajectories.
    """
    of_update = seconds.get("time/update", seconds.get("time/step", math.inf)) / updates
    figures = {"speed/tokens": real_tokens(lengths) / of_update}
    peak = peak_flops()
    if peak is not None:
        flops = score_flops(lengths, config) / (devices * peak)
        # The backward pass costs twice the forward pass. With adapters it costs less, and MFU is
        # overstated.
        figures["speed/mfu_update"] = 3 * flops / of_update
        if "time/reference" in seconds:
            figures["speed/mfu_reference"] = flops / seconds["time/reference"]
    return figures


def real_tokens(groups: Sequence[GroupLengths]) -> int:
    """Return the tokens without padding; those of a shared prompt count once per group."""
    return sum(group.prompt + sum(group.suffixes) for group in groups)


def visible_pairs(prompt: int, suffixes: Sequence[int]) -> float:
    """Return the pairs of a token and one that it attends to, itself included.

    A token of the prompt sees those before it; a token of a rollout sees the whole prompt too.
    """
    of_rollouts = sum(n * prompt + n * (n + 1) / 2 for n in suffixes)
    return prompt * (prompt + 1) / 2 + of_rollouts


def score_flops(groups: Sequence[GroupLengths], config: ModelConfig) -> float:
    """Return the FLOPs of a forward pass that computes the log-probs of a step."""
    pairs = sum(visible_pairs(*group) for group in groups)
    # Those behind the prompts.
    with_logits = sum(sum(group.suffixes) for group in groups)
    return forward_flops(config, real_tokens(groups), with_logits, pairs)


# --- floating-point operations; only matrix products are counted ---


def flops_per_token(config: ModelConfig, context: float) -> float:
    """Return the forward FLOPs of the decoder and its head for one token that attends to `context`
    positions.

    The backward pass takes twice as many.
    """
    c = config.text
    # Weights per layer: q and o, k and v, and the three matrices of the MLP.
    heads = (2 * c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
    router = 0 if c.experts is None else c.experts.num_experts
    layer = c.hidden_size * (heads + 3 * c.mlp_width + router)
    # q k^T and the weighted sum of v. Each takes head_dim products per query head and position.
    attention = 2 * c.num_attention_heads * c.head_dim * context
    # A multiplication and an addition per weight.
    return 2.0 * (c.num_hidden_layers * (layer + attention) + c.vocab_size * c.hidden_size)


def forward_flops(config: ModelConfig, tokens: float, with_logits: float, pairs: float) -> float:
    """Return the forward FLOPs of the decoder for a batch.

    Args:
        config: sizes of the model.
        tokens: tokens that go through the layers.
        with_logits: tokens that go through the head.
        pairs: pairs of a token and one that it attends to, itself included.
    """
    head = 2.0 * config.text.vocab_size * config.text.hidden_size
    layers = flops_per_token(config, 0.0) - head
    pair = flops_per_token(config, 1.0) - flops_per_token(config, 0.0)
    return tokens * layers + with_logits * head + pairs * pair
