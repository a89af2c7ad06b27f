"""Configurations: both generations of config.json, and errors for models that cannot be built."""

from __future__ import annotations

import dataclasses
import json

import pytest

from models.family import family
from models.qwen3_vl.sizes import qwen3_vl, tiny
from models.weights.hf_config import from_hf, to_hf
from train.learn.speed import flops_per_token


@pytest.mark.parametrize("config", [tiny(300), *map(qwen3_vl, ("2b", "32b"))])
def test_a_written_configuration_is_read_back_from_the_fields_of_either_generation(config):
    written = json.dumps(to_hf(config))
    assert from_hf(json.loads(written)) == config
    # Fields that transformers 4.57 reads.
    old = json.loads(written)
    del old["text_config"]["rope_parameters"], old["vision_config"]["rope_parameters"]
    # Fields that transformers 5 reads.
    new = json.loads(written)
    del new["text_config"]["rope_scaling"], new["text_config"]["rope_theta"]
    assert from_hf(old) == from_hf(new) == config
    # transformers may write the kind of every layer.
    new["text_config"]["layer_types"] = ["full_attention"] * config.text.num_hidden_layers
    assert from_hf(new) == config


def test_the_length_of_the_context_is_kept():
    config = tiny(300)
    assert to_hf(config)["text_config"]["max_position_embeddings"] == 262_144
    text = dataclasses.replace(config.text, max_position_embeddings=1_000_000)
    long = dataclasses.replace(config, text=text)
    assert from_hf(to_hf(long)) == long


def test_another_size_is_refused():
    with pytest.raises(ValueError, match="model.size: '7b' .*tiny, 2b, 4b, 8b, 32b"):
        family("qwen3_vl").size("7b")


@pytest.mark.parametrize(
    ("tower", "field", "value", "message"),
    [
        (
            "text_config",
            "rope_parameters",
            {"rope_type": "yarn", "rope_theta": 1e4},
            "text_config.rope_parameters.rope_type = 'yarn'",
        ),
        (
            "text_config",
            "layer_types",
            ["linear_attention", "full_attention", "full_attention"],
            "text.layer_types: full_attention, linear_attention: unknown, .*all full_attention",
        ),
        # Beside rope_parameters, which say default.
        (
            "text_config",
            "rope_scaling",
            {"type": "yarn", "factor": 4.0},
            "text_config.rope_scaling.type = 'yarn': .*remove the scaling",
        ),
        ("text_config", "attention_bias", True, "text_config.attention_bias = True: .*False"),
        ("text_config", "hidden_size", "64", "text_config.hidden_size = '64': its type is int"),
        ("text_config", "num_hidden_layers", 10**9, "num_hidden_layers = 1000000000: at most"),
        (None, "vision_config", "none", "vision_config = 'none': not a JSON object"),
        (None, "model_type", ["qwen3_vl"], r"model_type = \['qwen3_vl'\]: supported are"),
    ],
)
def test_unsupported_values_are_refused(tower, field, value, message):
    content = to_hf(tiny(300))
    part = content if tower is None else content[tower]
    part[field] = value
    with pytest.raises(ValueError, match=message):
        from_hf(content)


@pytest.mark.parametrize(
    ("part", "theta"), [("", 7e4), ("rope_scaling", 7e4), ("rope_parameters", 1e4)]
)
def test_of_contradicting_rope_settings_those_count_that_transformers_reads(part, theta):
    content = to_hf(tiny(300))
    text = content["text_config"]
    (text[part] if part else text)["rope_theta"] = 7e4
    assert from_hf(content).text.rope_theta == theta


@pytest.mark.parametrize("tower", ["text_config", "vision_config"])
def test_missing_fields_are_all_named(tower):
    content = to_hf(tiny(300))
    del content[tower]["hidden_size"], content[tower]["intermediate_size"]
    with pytest.raises(ValueError, match=f"{tower}: .*hidden_size, intermediate_size;"):
        from_hf(content)
    del content[tower]
    with pytest.raises(ValueError, match=f"{tower}: .*hidden_size"):
        from_hf(content)


@pytest.mark.parity
def test_a_published_file_rewritten_by_transformers_5_reads_the_same(assets, tmp_path):
    pytest.importorskip("torch", reason="the extra parity brings the transformers that writes it")
    import transformers

    file = assets / "qwen3_vl" / "config_8b.json"
    # The published file is of 4.57.
    assert "rope_scaling" in json.loads(file.read_text())["text_config"]
    transformers.Qwen3VLConfig.from_pretrained(file).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_scaling" not in written["text_config"]
    assert from_hf(tmp_path / "config.json") == from_hf(file) == qwen3_vl("8b")


@pytest.mark.parametrize(
    ("tower", "changes", "message"),
    [
        ("text", {"mrope_section": (6, 5, 4)}, "text.mrope_section = .*head_dim / 2 = 16"),
        (
            "text",
            {"num_attention_heads": 3},
            "text.num_attention_heads = 3: .*num_key_value_heads = 2",
        ),
        ("text", {"hidden_size": 96}, "vision.out_hidden_size = 128: .*use 96"),
        (
            "vision",
            {"num_position_embeddings": 5},
            "vision.num_position_embeddings = 5: .*square; use 4 or 9",
        ),
        (
            "vision",
            {"deepstack_visual_indexes": (2,)},
            "vision.deepstack_visual_indexes = .*depth 2",
        ),
    ],
)
def test_sizes_that_cannot_be_built_are_refused(tower, changes, message):
    config = tiny(300)
    with pytest.raises(ValueError, match=message):
        changed = dataclasses.replace(getattr(config, tower), **changes)
        dataclasses.replace(config, **{tower: changed})


def test_flops_are_twice_the_matmul_weights_and_attention():
    config = qwen3_vl("8b")
    weights = 36 * (4096 * 128 * (32 + 8 + 8 + 32) + 3 * 4096 * 12288) + 151_936 * 4096
    assert flops_per_token(config, 0.0) == 2 * weights
    assert flops_per_token(config, 1000.0) - flops_per_token(config, 0.0) == 36 * 4 * 4096 * 1000
