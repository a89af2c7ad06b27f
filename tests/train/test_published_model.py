"""The folder of weights that a run starts from: its sizes, vocabulary and weights are checked."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from models.features import FrameSettings
from models.qwen3_vl.sizes import qwen3_vl
from models.sharding import make_mesh, param_shardings
from paravt_jax.data import tokenizer_file
from train.model import check_vocabulary, config_of, first_model, weights_hash_of
from train.model_folder import copy_tokenizer, write_model
from train.settings import ModelSettings


@pytest.fixture(scope="module")
def base(road, tmp_path_factory):
    """A checkpoint like a published one: the embedding has more rows than the tokenizer tokens."""
    folder = tmp_path_factory.mktemp("base")
    write_model(road.model, road.data.root.parent / "tokenizer", road.run.frames, folder / "model")
    return folder / "model"


def test_a_folder_of_another_size_is_refused_with_every_difference(base):
    assert config_of(str(base), ModelSettings()).text.num_hidden_layers == 3
    with pytest.raises(ValueError, match=r"model\.size 4b") as error:
        config_of(str(base), ModelSettings(size="4b"))
    for part in ("text.hidden_size: 128 -> 2560\n", "vision.depth: 2 -> 24\n"):
        assert part in str(error.value)


@pytest.mark.parametrize("size", ["2b", "4b", "8b"])
def test_the_published_configurations_are_those_of_their_sizes(assets, tmp_path, size):
    """The published files have whole numbers where these settings have floats."""
    for name in ("2b", "4b", "8b"):
        shutil.copy(assets / "qwen3_vl" / f"config_{name}.json", tmp_path / "config.json")
        if name == size:
            assert config_of(str(tmp_path), ModelSettings(size=size)).text == qwen3_vl(size).text
        else:
            with pytest.raises(ValueError, match=f"model.size {size}"):
                config_of(str(tmp_path), ModelSettings(size=size))


def test_a_folder_of_adapters_is_refused_with_what_to_give_instead(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    with pytest.raises(ValueError, match=r"model\.path: .* holds adapters only.*folder model"):
        config_of(str(tmp_path), ModelSettings())


def test_a_tokenizer_of_another_model_is_refused(base, road):
    vocabulary = road.data.vocabulary
    config = road.model.config
    size = vocabulary.size
    check_vocabulary(config, vocabulary, "x")
    text = dataclasses.replace(config.text, vocab_size=size - 1)
    with pytest.raises(ValueError, match=rf"model\.path: x .*{size} .*{size - 1}"):
        check_vocabulary(dataclasses.replace(config, text=text), vocabulary, "x")
    with pytest.raises(ValueError, match=r"model\.path: x, config\.image_token_id = 7"):
        check_vocabulary(dataclasses.replace(config, image_token_id=7), vocabulary, "x")


def test_a_fingerprint_depends_on_the_contents_only(base, tmp_path):
    copy = tmp_path / "elsewhere"
    shutil.copytree(base, copy)
    assert weights_hash_of(str(copy)) == weights_hash_of(str(base))
    file = copy / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert weights_hash_of(str(copy)) != weights_hash_of(str(base))


def test_a_tokenizer_is_copied_once_and_without_the_model(base, tmp_path):
    copy_tokenizer(str(base), tmp_path)
    assert (tmp_path / tokenizer_file.FILE).read_bytes() == (
        base / tokenizer_file.FILE
    ).read_bytes()
    assert not {"config.json", "model.safetensors"} & {file.name for file in tmp_path.iterdir()}
    (tmp_path / "tokenizer_config.json").write_text("mine")
    copy_tokenizer(str(base), tmp_path)
    assert (tmp_path / "tokenizer_config.json").read_text() == "mine"


def test_a_written_model_has_its_stop_ids(small_model, small_vocabulary, tmp_path):
    """A run's folder `model` and train.export both use `write_model`."""
    tokenizer_file.save(small_vocabulary, tmp_path / "tokenizer")
    write_model(small_model, tmp_path / "tokenizer", FrameSettings(), tmp_path / "model")
    written = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert written["eos_token_id"] == [small_vocabulary.eos, small_vocabulary.pad]
    assert written["pad_token_id"] == small_vocabulary.pad
    (tmp_path / "tokenizer" / "generation_config.json").write_text('{"eos_token_id": 7}')
    write_model(small_model, tmp_path / "tokenizer", FrameSettings(), tmp_path / "other")
    assert (tmp_path / "other" / "generation_config.json").read_text() == '{"eos_token_id": 7}'


@pytest.mark.parametrize("name", ["chat_template.json", "tokenizer_config.json"])
def test_a_trained_model_keeps_its_checkpoints_chat_template(
    small_model, small_vocabulary, tmp_path, name
):
    tokenizer_file.save(small_vocabulary, tmp_path / "tokenizer")
    file = tmp_path / "tokenizer" / name
    settings = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(settings | {"chat_template": "theirs"}))
    write_model(small_model, tmp_path / "tokenizer", FrameSettings(), tmp_path / "model")
    assert not (tmp_path / "model" / "chat_template.jinja").exists(), "it would come first"
    assert "theirs" in (tmp_path / "model" / name).read_text()


def test_a_run_starts_from_the_weights_of_a_folder_sharded_over_its_mesh(base, road):
    run = dataclasses.replace(road.run, model=ModelSettings(path=str(base)), align=None)
    model, origin = first_model(run, road.data, make_mesh())
    assert model.config == road.model.config
    assert origin["weights"] == weights_hash_of(str(base))
    weights = nnx.state(model, nnx.Param)
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {np.dtype(np.float32)}
    jax.tree.map(np.testing.assert_array_equal, weights, nnx.state(road.model, nnx.Param))
    text = nnx.state(model.text)
    shardings = [leaf.sharding for leaf in jax.tree.leaves(text)]
    assert shardings == jax.tree.leaves(param_shardings(text, make_mesh()))
