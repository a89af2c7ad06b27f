"""Speed of an update: tokens per second, and model FLOPs utilisation (MFU).

MFU compares the FLOPs that an update needs with the peak of the devices. Padding and recomputation
do not count as needed, so the FLOPs of a batch depend on its tokens only, not on how it is padded,
split or sharded. A prompt counts once per group; only behind it are there logits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import jax
from jax.experimental.pallas import tpu as pltpu

from models.config import ModelConfig, forward_flops
from train.learn.packing import GroupLengths

# Dense bfloat16 FLOP/s from NVIDIA's data sheets. JAX knows the peaks of TPUs.
_GPUS = {
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 3090": 71e12,
    "RTX 4090": 165e12,
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
    lengths: Sequence[GroupLengths], config: ModelConfig, seconds: float, devices: int
) -> dict[str, float]:
    """Return the metrics `speed/tokens`, per second, and `speed/mfu` where the peak is known.

    Args:
        lengths: Lengths of all trajectories of one update.
        config: Sizes of the model.
        seconds: Duration of the update.
        devices: Number of devices that computed it.
    """
    figures = {"speed/tokens": real_tokens(lengths) / seconds}
    peak = peak_flops()
    if peak is not None:
        figures["speed/mfu"] = update_flops(lengths, config) / seconds / (devices * peak)
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


def update_flops(groups: Sequence[GroupLengths], config: ModelConfig) -> float:
    """Return the FLOPs of the forward and the backward pass of an update, without recomputation."""
    pairs = sum(visible_pairs(*group) for group in groups)
    # Those behind the prompts.
    with_logits = sum(sum(group.suffixes) for group in groups)
    # The backward pass costs twice the forward pass.
    return 3 * forward_flops(config, real_tokens(groups), with_logits, pairs)
