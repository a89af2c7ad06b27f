"""Configurations read both generations of config.json and refuse what cannot be built."""

from __future__ import annotations

import dataclasses
import json

import pytest

from models.qwen3_vl import flops_per_token, from_hf, num_params, qwen3_vl, tiny
from models.qwen3_vl.config import to_hf


@pytest.mark.parametrize("size", ["2b", "4b", "8b"])
def test_presets_are_the_published_configs(assets, size):
    assert from_hf(assets / "qwen3_vl" / f"config_{size}.json") == qwen3_vl(size)


@pytest.mark.parametrize("config", [tiny(300), *map(qwen3_vl, ("2b", "32b"))])
def test_what_is_written_is_read_back_by_both_readers(config):
    written = json.loads(json.dumps(to_hf(config)))
    assert from_hf(written) == config
    old, new = json.loads(json.dumps(written)), written
    del old["text_config"]["rope_parameters"], old["vision_config"]["rope_parameters"]  # 4.57
    del new["text_config"]["rope_scaling"], new["text_config"]["rope_theta"]  # 5.x
    assert from_hf(old) == from_hf(new) == config


def test_the_tiny_model_is_tiny_and_whole():
    config = tiny(300)
    assert num_params(config) < 1_100_000
    assert config.vision.levels == 1 and config.text.tie_word_embeddings and sum(config.text.mrope_section) == 32


def test_another_model_or_scaling_is_refused():
    with pytest.raises(ValueError, match="model_type = 'qwen2_vl'"):
        from_hf({"model_type": "qwen2_vl"})
    scaled = to_hf(tiny(300))
    scaled["text_config"]["rope_parameters"]["rope_type"] = "yarn"
    with pytest.raises(ValueError, match="rope_type = 'yarn'.*remove the scaling"):
        from_hf(scaled)
    with pytest.raises(ValueError, match="size = '7b': one of 2b, 4b, 8b, 32b"):
        qwen3_vl("7b")


@pytest.mark.parametrize(
    ("tower", "changes", "message"),
    [
        ("text", {"mrope_section": (6, 5, 4)}, "text.mrope_section = .*head_dim / 2 = 32"),
        ("text", {"num_attention_heads": 3}, "text.num_attention_heads = 3: .*num_key_value_heads = 2"),
        ("text", {"hidden_size": 96}, "vision.out_hidden_size = 128: .*use 96"),
        ("vision", {"num_position_embeddings": 5}, "vision.num_position_embeddings = 5: .*square; use 4 or 9"),
        ("vision", {"hidden_size": 66}, "vision.hidden_size = 66"),
        ("vision", {"deepstack_visual_indexes": (2,)}, "vision.deepstack_visual_indexes = .*depth 2"),
        ("vision", {"deepstack_visual_indexes": (1, 0)}, "vision.deepstack_visual_indexes = .*rising"),
    ],
)
def test_a_shape_that_cannot_be_built_is_named(tower, changes, message):
    config = tiny(300)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **{tower: dataclasses.replace(getattr(config, tower), **changes)})


def test_flops_are_twice_the_matmul_weights_and_attention():
    config = qwen3_vl("8b")
    weights = 36 * (4096 * 128 * (32 + 8 + 8 + 32) + 3 * 4096 * 12288) + 151_936 * 4096
    assert flops_per_token(config, 0.0) == 2 * weights
    assert flops_per_token(config, 1000.0) - flops_per_token(config, 0.0) == 36 * 4 * 4096 * 1000
