"""An engine on several devices samples the same as on one, with its cache split by heads."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.config import TextConfig
from models.model import VisionLanguageModel, abstract_model
from models.qwen3_vl.config import Qwen3VLConfig, Qwen3VLVisionConfig
from models.sharding import make_mesh, param_shardings
from paravt_jax.method.records import Frame
from rollout.engine.engine import Engine
from rollout.engine.requests import Request, Sample, Sampling
from rollout.engine.settings import EngineSizes
from tests.processes import on_eight_devices
from tests.rollout.engine.reference import Pictures


@pytest.mark.slow
def test_many_devices_equal_one():
    """Runs this file as a program with eight fake devices."""
    on_eight_devices(__file__)


# Sizes of data, fsdp and tensor.
MESHES = (
    (1, 1, 2),
    (1, 1, 4),
    (1, 2, 2),
)
VISION = Qwen3VLVisionConfig(
    hidden_size=16,
    depth=1,
    num_heads=4,
    intermediate_size=32,
    out_hidden_size=64,
    num_position_embeddings=4,
    deepstack_visual_indexes=(0,),
)
TEXT = TextConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    mrope_section=(2, 1, 1),
    rope_theta=10_000.0,
    tie_word_embeddings=False,
)
CONFIG = Qwen3VLConfig(
    VISION,
    TEXT,
    image_token_id=95,
    video_token_id=94,
    vision_start_token_id=93,
    vision_end_token_id=92,
)
# With less room than is requested at once.
SETTINGS = EngineSizes(
    longest=64,
    slots=4,
    rows_per_prefix=2,
    page=4,
    pages=48,
    prefill_tokens=64,
    few_rows=2,
    drafts=2,
    steps=3,
)


def requests() -> list[Request]:
    """Two groups whose frames begin alike, text alone, and every kind of sampling."""
    rng = np.random.default_rng(0)
    frames = tuple(Frame("a", index, float(index)) for index in range(3))
    opening = np.concatenate([rng.integers(0, 90, 5), [95] * 4, [1], [95] * 4, [2, 3]])
    two_frames = np.concatenate([opening, rng.integers(0, 90, 7)])
    three_frames = np.concatenate([opening, [95] * 4, rng.integers(0, 90, 2)])
    groups = [
        *(Request(two_frames, frames[:2], Sampling(10), seed) for seed in (1, 2, 3)),
        *(Request(three_frames, frames, Sampling(7, 0.6), seed) for seed in (4, 5)),
    ]
    lengths = (3, 20, 41)
    return groups + [
        Request(rng.integers(0, 90, n), (), Sampling(12, n % 2 * 1.0, stop_ids=(n,)), n)
        for n in lengths
    ]


def play(engine: Engine) -> list[Sample]:
    """The requests, and the next turn of every sample."""
    first = requests()
    answers = engine.generate(first)
    turns = [
        dataclasses.replace(
            request, ids=np.concatenate([request.ids, sample.ids, np.arange(10, 15)]), seed=9
        )
        for request, sample in zip(first, answers, strict=True)
        if len(request.ids) + len(sample.ids) + 5 + request.sampling.max_new_tokens
        <= SETTINGS.longest
    ]
    assert len(turns) >= 6
    return answers + engine.generate(turns)


def noise() -> Any:
    """Weights that give varied tokens."""
    graph, state = nnx.split(abstract_model(CONFIG), nnx.Param)
    rng = np.random.default_rng(0)

    def draw(path, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(rng.normal(float("norm" in str(path)), 0.2, leaf.shape), leaf.dtype)

    return graph, jax.tree_util.tree_map_with_path(draw, state)


def make(graph: nnx.GraphDef[VisionLanguageModel], state: nnx.State) -> Engine:
    pictures = Pictures(CONFIG, {"a": (4, 4)})
    return Engine(nnx.merge(graph, state), pictures, SETTINGS)


def main() -> None:
    graph, state = noise()
    one = make(graph, state)
    expected = play(one)
    assert len({tuple(sample.ids) for sample in expected}) > 10 and one.reused_tokens > 100
    for shape in MESHES:
        mesh = make_mesh(*shape)
        engine = make(graph, jax.device_put(state, param_shardings(state, mesh)))
        for sample, other in zip(play(engine), expected, strict=True):
            np.testing.assert_array_equal(sample.ids, other.ids, err_msg=str(shape))
            np.testing.assert_allclose(
                sample.logprobs, other.logprobs, atol=1e-5, err_msg=str(shape)
            )
        assert engine.prefilled_tokens == one.prefilled_tokens
        assert engine.runner.pool is not None
        assert_split(engine.runner.pool, 3, mesh, shape[2])


def assert_split(array: jax.Array, axis: int, mesh: jax.sharding.Mesh, parts: int) -> None:
    """Only this axis of an array is split, over `parts` devices."""
    assert len(array.sharding.device_set) == mesh.size
    expected = list(array.shape)
    expected[axis] //= parts
    assert list(array.addressable_shards[0].data.shape) == expected


if __name__ == "__main__":
    main()
