"""How fast a step was: tokens a second, and the share of the devices' peak that an update reached (MFU).

Owns what an update has to compute at the least - real tokens, no padding, nothing twice - and the peaks that this is held against.
Invariant: the FLOPs of a batch depend on its tokens alone, not on how they are padded, cut or laid over devices.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.experimental.pallas import tpu as pltpu

from models.qwen3_vl.config import Qwen3VLConfig
from models.qwen3_vl.flops import flops_per_token
from train.learn.batch import Sequences

# Dense bfloat16 FLOP/s as NVIDIA's data sheets give them; jax knows those of TPUs.
_GPUS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
_SIZE, _ROUNDS = 1024, 5  # of the product that stands for an unknown device's peak


@functools.cache
def peak_flops() -> float:
    """FLOP/s of one of this process's devices: published bfloat16 peaks of TPUs and GPUs; else what a float32 product reaches here."""
    device = jax.local_devices()[0]
    if device.platform == "tpu":
        info = pltpu.get_tpu_info()  # of one core; a device may be two
        return float(info.bf16_ops_per_second * info.num_cores)
    known = [peak for name, peak in _GPUS.items() if name in device.device_kind]
    return known[0] if known else _measured_flops()


def _measured_flops() -> float:
    """The best of some products of two float32 matrices, over the devices that share this processor."""
    x, square = jnp.ones((_SIZE, _SIZE), jnp.float32), jax.jit(lambda x: x @ x)
    square(x).block_until_ready()
    spans = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        square(x).block_until_ready()
        spans.append(time.perf_counter() - start)
    return 2 * _SIZE**3 / min(spans) / jax.local_device_count()


Batches = Sequence[Any]
"""`Sequences`, or packed rows, whose `segments` count a row's conversations from 1."""


def real_tokens(batches: Batches) -> int:
    """Tokens of prompts (once a group) and rows, or of packed conversations, without padding."""
    return int(sum(lengths.sum() for batch in batches for lengths in _prompts_and_rows(batch)))


def update_flops(batches: Batches, config: Qwen3VLConfig) -> float:
    """FLOPs of forward and backward pass: each token attends to those before it, and to its group's prompt, which is computed once."""
    base, slope = (
        flops_per_token(config, 0.0),
        flops_per_token(config, 1.0) - flops_per_token(config, 0.0),
    )
    head = 2.0 * config.text.vocab_size * config.text.hidden_size
    total = 0.0
    for batch in batches:
        prompts, rows = _prompts_and_rows(batch)
        before = prompts.repeat(len(rows) // len(prompts)) if len(prompts) else np.zeros(len(rows))
        total += (prompts * (base - head) + slope * prompts * (prompts + 1) / 2).sum()
        total += (rows * base + slope * rows * (before + (rows + 1) / 2)).sum()
    return 3 * float(total)


def _prompts_and_rows(batch: Any) -> tuple[np.ndarray, np.ndarray]:
    """Lengths in tokens, of all processes' where the batch is on a mesh. A packed conversation is a row without a prompt."""
    if isinstance(batch, Sequences):
        return _whole((batch.prompt_segments > 0).sum(1)), _whole((batch.segments > 0).sum(1))
    segments = _whole(batch.segments)
    lengths = [np.unique(row[row > 0], return_counts=True)[1] for row in segments]
    return np.zeros(0), np.concatenate(lengths).astype(np.float64)


def _whole(x: Any) -> np.ndarray:
    return np.asarray(
        multihost_utils.process_allgather(x, tiled=True) if isinstance(x, jax.Array) else x,
        np.float64,
    )


def speeds(
    batches: Batches, config: Qwen3VLConfig, seconds: float, devices: int
) -> dict[str, float]:
    """`speed/tokens` a second and `speed/mfu` of an update that took `seconds` on `devices` devices."""
    return {
        "speed/tokens": real_tokens(batches) / seconds,
        "speed/mfu": update_flops(batches, config) / seconds / (devices * peak_flops()),
    }
