"""Weights travel out and back unchanged, and a wrong folder is named in one error."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from models.qwen3_vl import Qwen3VL, hf, tiny


@pytest.fixture(scope="module")
def config():
    config = tiny(64)
    return dataclasses.replace(config, text=dataclasses.replace(config.text, num_hidden_layers=2, tie_word_embeddings=False))


@pytest.fixture(scope="module")
def model(config):
    return Qwen3VL(config, rngs=nnx.Rngs(3))


def leaves(model):
    return {"/".join(map(str, path)): np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def assert_equal(a, b):
    a, b = leaves(a), leaves(b)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_there_and_back_is_bit_for_bit(model, config, tmp_path):
    hf.save(model, tmp_path / "model")
    again = hf.load(tmp_path / "model")
    assert again.config == config
    assert_equal(again, model)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    ids = jnp.arange(6)[None]
    positions = jnp.broadcast_to(jnp.arange(6), (3, 1, 6))
    np.testing.assert_array_equal(again.text(ids, positions)[0], model.text(ids, positions)[0])


def test_bfloat16_and_several_files(config, tmp_path):
    model = Qwen3VL(config, rngs=nnx.Rngs(3), param_dtype=jnp.bfloat16)
    hf.save(model, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, tmp_path / "model" / file)
    (tmp_path / "model" / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_equal(hf.load(tmp_path / "model", param_dtype=jnp.bfloat16), model)


def test_every_wrong_tensor_is_in_one_error(model, tmp_path):
    hf.save(model, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.visual.blocks.1.norm1.bias"]
    tensors["model.language_model.layers.7.extra"] = np.zeros(2, np.float32)
    tensors["lm_head.weight"] = np.zeros((3, 2), np.float32)
    save_file(tensors, file)
    with pytest.raises(ValueError) as error:
        hf.load(tmp_path / "model")
    assert "1 missing: model.visual.blocks.1.norm1.bias" in str(error.value)
    assert "1 unknown: model.language_model.layers.7.extra" in str(error.value)
    assert "1 misshaped: lm_head.weight (3, 2), not (64, 128)" in str(error.value)


def test_a_folder_without_weights(tmp_path, config):
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        hf.load(tmp_path, config)


def test_a_failed_save_leaves_nothing_and_an_existing_folder_stays(model, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(hf, "save_file", full)
        with pytest.raises(OSError, match="No space"):
            hf.save(model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    hf.save(model, tmp_path / "model")
    with pytest.raises(FileExistsError, match="choose a new folder"):
        hf.save(model, tmp_path / "model")
