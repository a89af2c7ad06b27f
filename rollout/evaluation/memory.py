"""Plans the memory of an evaluation from its settings, before any weights are loaded.

The plan is an upper bound. It adds what stays (weights, KV cache) to the largest of the parts that
come and go (a call of the vision tower, of prefill, of decoding). The host keeps visual features
and pixels; on a CPU both count together.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import QUERY_CHUNK, platform
from models.config import ModelConfig
from models.device_memory import host_memory, reported_memory
from models.features import FrameSettings, frame_tokens
from models.model import abstract_model
from rollout.engine.memory import decode_bytes, prefill_bytes
from rollout.engine.settings import EngineSizes
from rollout.evaluation.native_video import most_video_tokens
from rollout.evaluation.settings import BenchmarkSettings

GIB = 2**30

# The largest decoded frame that is planned for, 3840 x 2160 in RGB, before it is resized; a decoder
# holds several of them.
_DECODED_FRAME = 3840 * 2160 * 3
_DECODER_FRAMES = 8


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes that an evaluation needs at most, by part."""

    kept: dict[str, float]
    """On each device, all the time."""
    calls: dict[str, float]
    """On each device, during one kind of call. Only one runs at a time."""
    host: dict[str, float]
    """On the host, of all its replicas."""

    @property
    def device(self) -> float:
        """Bytes per device."""
        return sum(self.kept.values()) + max(self.calls.values())

    def describe(self) -> str:
        """The parts in GiB, for people."""
        parts = self.kept | {"calls": max(self.calls.values())}
        return ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())


def plan_memory(
    settings: BenchmarkSettings,
    config: ModelConfig,
    sizes: EngineSizes,
    replicas: int = 1,
    paged: bool | None = None,
) -> MemoryPlan:
    """Bytes that an evaluation with the engine needs at most.

    Args:
        settings: the evaluation.
        config: the model's sizes.
        sizes: the engine's sizes.
        replicas: number of replicas that share the host.
        paged: whether decoding works on the pages of the KV cache; None: as on these devices.
    """
    if paged is None:
        paged = platform() == "tpu"
    item = jnp.dtype(settings.dtype).itemsize
    text = config.text
    shards = settings.tensor
    text_weights, vision_weights = _weights(config, settings.dtype)
    token = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * item / shards
    pool = (sizes.pages + 1) * sizes.page * token
    calls = {
        "prefill": max(
            prefill_bytes(config, sizes, item, token, length, before)
            for length in sizes.prefill_lengths
            for before in (0, *sizes.row_lengths)
        ),
        "decoding": max(
            decode_bytes(config, sizes, token, width, paged) for width in sizes.row_lengths
        ),
        "vision tower": max(
            _tower(config, settings.pixels(), tokens, item)
            for tokens in _frame_sizes(settings, config)
        ),
    }
    return MemoryPlan(
        kept={
            "weights": text_weights / shards + vision_weights,
            "KV cache": pool,
        },
        calls=calls,
        host=_host(settings, config, sizes, replicas),
    )


def require_room(settings: BenchmarkSettings, plan: MemoryPlan, replicas: int = 1) -> None:
    """Check that the evaluation fits on the devices of this process.

    Args:
        settings: the evaluation.
        plan: its memory.
        replicas: number of replicas that share the host.

    Raises:
        ValueError: it does not fit.
    """
    device = jax.local_devices()[0]
    limit = reported_memory(device)
    on_cpu = device.platform == "cpu"
    host = host_memory()
    host_needs = sum(plan.host.values())
    in_host = replicas * settings.tensor * plan.device if on_cpu else 0
    if host_needs + in_host <= host and (limit is None or plan.device <= limit):
        return
    there = f"{host / GIB:.1f} GiB of the host"
    if limit is not None and not on_cpu:
        there = f"{limit / GIB:.1f} GiB per device and {there}"
    raise ValueError(
        f"--episodes {settings.episodes}, --frames {settings.frames}, --max-pixels "
        f"{settings.max_pixels}: the evaluation needs up to {plan.device / GIB:.1f} GiB per "
        f"device ({plan.describe()}) and {host_needs / GIB:.1f} GiB of the host, and there are "
        f"{there}; lower them in this order, use --dtype bfloat16, or --tensor over more devices"
    )


def _weights(config: ModelConfig, dtype: str) -> tuple[float, float]:
    """Bytes of the decoder and of the vision tower."""
    model = abstract_model(config, dtype=dtype, param_dtype=dtype)
    return _bytes(model.text), _bytes(model.vision)


def _bytes(module: nnx.Module) -> float:
    leaves = jax.tree.leaves(nnx.state(module))
    return float(sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves))


def _frame_sizes(settings: BenchmarkSettings, config: ModelConfig) -> Iterator[int]:
    """Largest numbers of visual tokens of a frame, of each kind."""
    pixels = settings.pixels()
    yield frame_tokens(pixels, config.vision)
    yield frame_tokens(pixels, config.vision, crop=True)
    if settings.native_video:
        # The only slice of a video of 2 frames has the most tokens.
        yield most_video_tokens(2, _factor(config))


def _tower(config: ModelConfig, pixels: FrameSettings, tokens: int, item: int) -> float:
    """A call of the vision tower on frames of this many visual tokens."""
    vision = config.vision
    frames = pixels.batch_of(tokens)
    patches = tokens * vision.spatial_merge_size**2
    hidden = (8 + vision.levels + 1) * vision.hidden_size
    hidden += vision.mlp_matrices * vision.intermediate_size
    values = frames * patches * (hidden * item + 2 * vision.patch_dim * 4)
    scores = 2 * frames * min(QUERY_CHUNK, patches) * vision.num_heads * patches * 4
    merged = 3 * vision.hidden_size * vision.spatial_merge_size**2 + 2 * vision.out_hidden_size
    return values + scores + frames * tokens * (1 + vision.levels) * merged * 4


def worker_count(settings: BenchmarkSettings, replicas: int) -> int:
    """Number of processes that read videos for the replicas of a host."""
    calls = settings.protocol(0).max_calls
    return min(replicas * settings.episodes * calls, max(1, (os.cpu_count() or 1) - 1))


def _host(
    settings: BenchmarkSettings, config: ModelConfig, sizes: EngineSizes, replicas: int
) -> dict[str, float]:
    if settings.blind:
        return {"features": 0.0}
    pixels = settings.pixels()
    item = jnp.dtype(settings.dtype).itemsize
    vector = (1 + config.vision.levels) * config.text.hidden_size * item
    overview = settings.frames * frame_tokens(pixels, config.vision)
    if settings.native_video:
        overview = most_video_tokens(settings.frames, _factor(config))
    limits = settings.protocol(0)
    calls = limits.max_calls * (
        limits.max_tool_turns if settings.episode_settings().dispatch != "none" else 0
    )
    crop = limits.crop_frames * frame_tokens(pixels, config.vision, crop=True)
    seen = settings.episodes * (overview + calls * crop) * vector
    # The vectors of a prompt, from its request until it is prefilled: an overview per episode, or
    # the crops of its sub-agents.
    waiting = settings.episodes * max(overview, limits.max_calls * crop) * vector
    pieces = sizes.prefill_tokens * vector
    pixel_bytes = _factor(config) ** 2 * 3  # of a visual token
    shown = pixel_bytes * max(overview, crop)
    # Of every episode: its overview, or the crops of its calls.
    arrived = pixel_bytes * settings.episodes * max(overview, limits.max_calls * crop)
    # Overviews that are read ahead: as many as are played side by side, and one just taken.
    ahead = 0 if settings.native_video else replicas * (settings.episodes + 1)
    workers = worker_count(settings, replicas)
    kept = min(pixels.cache_mib * 2.0**20, seen) + overview * vector
    return {
        "cached features": replicas * kept,
        "features of prompts": replicas * (waiting + 2 * pieces),
        "pixels": replicas * arrived + workers * (shown + _DECODER_FRAMES * _DECODED_FRAME),
        "overviews read ahead": float(ahead * overview * pixel_bytes),
    }


def _factor(config: ModelConfig) -> int:
    return config.vision.patch_size * config.vision.spatial_merge_size
