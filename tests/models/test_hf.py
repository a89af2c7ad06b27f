"""Weights travel out and back unchanged, whole or by slices; a wrong folder is named in one error; an export is whole or is not."""

from __future__ import annotations

import dataclasses
import filecmp
import json
import signal
import subprocess
import sys
import textwrap

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from models.qwen3_vl import Qwen3VL, hf, tiny
from models.qwen3_vl.config import to_hf
from models.sharding import make_mesh
from models.weights import folder as hf_folder
from models.weights import tensor_file


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


@pytest.fixture
def published(config, tmp_path):
    """A folder as the hub has them: bfloat16 in files of their own order, a tied head repeated, tokenizer and template beside them."""
    config = dataclasses.replace(config, text=dataclasses.replace(config.text, tie_word_embeddings=True))
    folder = tmp_path / "published"
    folder.mkdir()
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in hf.tensor_shapes(config).items():
        bits = rng.integers(0, 2**16, shape, np.uint16) & 0xBFFF  # any number below 2, subnormal ones too
        tensors[name] = bits.view(jnp.bfloat16)
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"]
    names = sorted(tensors)
    parts = {"model-a.safetensors": names[::2], "model-b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt", "from": "elsewhere"})
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(to_hf(config) | {"transformers_version": "4.57.0"}))
    for name in ("tokenizer.json", "chat_template.jinja", "merges.txt", "LICENSE", "README.md", "pytorch_model.bin"):
        (folder / name).write_text(f"content of {name}")
    return folder


@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_what_was_not_trained_comes_out_byte_for_byte(published, tmp_path, param_dtype):
    model = hf.load(published, param_dtype=param_dtype)
    assert {v.dtype for v in leaves(model).values()} == {np.dtype(param_dtype)}
    model.text.norm.set_value(model.text.norm[...] + 1)
    hf.save(model, tmp_path / "ours", like=published)
    names = {path.name for path in published.iterdir()} - {"README.md", "pytorch_model.bin"}
    assert {path.name for path in (tmp_path / "ours").iterdir()} == names
    _, different, _ = filecmp.cmpfiles(published, tmp_path / "ours", names, shallow=False)
    assert len(different) == 1
    theirs, ours = load_file(published / different[0]), load_file(tmp_path / "ours" / different[0])
    assert [n for n in theirs if theirs[n].tobytes() != ours[n].tobytes()] == ["model.language_model.norm.weight"]


def test_like_another_configuration_is_refused(published, model, tmp_path):
    with pytest.raises(ValueError, match="like = .*published: its config.json differs from the model's in text; give the folder"):
        hf.save(model, tmp_path / "ours", like=published)


def test_several_files_of_a_bounded_size(model, tmp_path):
    hf.save(model, tmp_path / "model", max_shard_bytes=400_000)
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 4 and all(file.stat().st_size < 410_000 for file in files)
    assert_equal(hf.load(tmp_path / "model"), model)


def test_a_mesh_lays_out_what_one_device_holds(model, tmp_path):
    hf.save(model, tmp_path / "model")
    loaded = hf.load(tmp_path / "model", mesh=make_mesh())
    assert_equal(loaded, model)
    assert loaded.text.layers.q[...].sharding.spec == jax.sharding.PartitionSpec(None, "fsdp", "tensor", None)


def test_a_slice_is_the_slice_of_the_whole(model, config, tmp_path):
    hf.save(model, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    stored, values = tensor_file.read_header(file).tensors, leaves(model)
    rng = np.random.default_rng(0)
    for path, tensor in hf._tensors(config).items():
        value = values[path][0] if tensor.stacked else values[path]
        whole = {"text/layers/o": 1, "text/layers/q": 2, "text/layers/k": 2, "text/layers/v": 2}.get(path)  # the axis inside a head
        cuts = [(0, n) if axis == whole else sorted(rng.choice(n + 1, 2, replace=False)) for axis, n in enumerate(value.shape)]
        index = tuple(slice(int(start), int(stop)) for start, stop in cuts)
        block = tensor.read((file, stored[tensor.name.format(0)]), value.shape, index)
        np.testing.assert_array_equal(block, value[index], err_msg=path)
        assert block.ctypes.data % 64 == 0, "XLA would copy it"


def test_a_cut_through_heads_is_refused():
    with pytest.raises(ValueError, match="only the first of them may be divided"):
        hf._flat((slice(None), slice(0, 2)), (4, 8))


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


def test_damaged_indexes_and_missing_files_are_named(published):
    (published / "model-b.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="lacks model-b.safetensors, named in model.safetensors.index.json"):
        hf.load(published)
    index = published / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../elsewhere.safetensors"}}))
    with pytest.raises(ValueError, match="names '../elsewhere.safetensors'; weights lie beside"):
        hf.load(published)
    index.write_text("{")
    with pytest.raises(ValueError, match="index.json: has no readable weight_map"):
        hf.load(published)


def test_a_hub_id_is_fetched(published, monkeypatch):
    asked = {}

    def snapshot_download(name, allow_patterns):
        asked[name] = allow_patterns
        return str(published)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert hf_folder.local_folder("Qwen/Qwen3-VL-2B-Instruct") == published
    assert set(asked["Qwen/Qwen3-VL-2B-Instruct"]) == {"*.safetensors", "*.json", "*.jinja", "*.txt", "LICENSE*"}


def test_an_id_that_cannot_be_had_is_named():
    with pytest.raises(FileNotFoundError, match="Qwen/no-such-model: no such folder here, and the hub did not give it .*; check the id"):
        hf.load("Qwen/no-such-model")  # the tests are offline
    with pytest.raises(FileNotFoundError, match="/no/such/folder: no such folder, and no hub id"):
        hf.load("/no/such/folder")


def test_a_failed_save_leaves_nothing_and_an_existing_folder_stays(model, tmp_path, monkeypatch):
    def full(file, *_):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "write", full)
        with pytest.raises(OSError, match="No space"):
            hf.save(model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    hf.save(model, tmp_path / "model")
    with pytest.raises(FileExistsError, match="choose a new folder"):
        hf.save(model, tmp_path / "model")


KILLED = """
    import os, pathlib, signal, sys
    from models.weights.folder import appearing
    with appearing(pathlib.Path(sys.argv[1])) as folder:
        (folder / "model.safetensors").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_export_is_none_and_is_swept_away(tmp_path):
    target, other = tmp_path / "model", tmp_path / "model.v2"
    for folder in (target, other):
        killed = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(folder)], timeout=60)
        assert killed.returncode == -signal.SIGKILL
    assert not target.exists()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == 2 and all(name.startswith(".model.") and name.endswith(".partial") for name in left)
    with hf_folder.appearing(target) as living:
        assert len(list(tmp_path.iterdir())) == 2, "the dead one of this name is gone, that of the other stays"
        with pytest.raises(InterruptedError), hf_folder.appearing(target):
            assert living.exists(), "a living writer keeps its files"
            raise InterruptedError
    assert sorted(path.name for path in tmp_path.iterdir())[1:] == ["model"]


@pytest.mark.parity
def test_a_trained_model_is_a_drop_in(tmp_path, assets):
    torch = pytest.importorskip("torch", reason="the oracle; install the extra parity")
    import transformers

    small = tiny(151_936)  # the vocabulary of the real tokenizer
    text = dataclasses.replace(small.text, num_hidden_layers=2, hidden_size=32, intermediate_size=48, tie_word_embeddings=False)
    config = dataclasses.replace(small, text=text, vision=dataclasses.replace(small.vision, out_hidden_size=32))
    source, target = tmp_path / "source", tmp_path / "target"
    torch.manual_seed(0)
    theirs = transformers.Qwen3VLForConditionalGeneration(transformers.Qwen3VLConfig.from_dict(to_hf(config)))
    theirs.to(torch.bfloat16).save_pretrained(source)
    for path in (assets / "qwen3_vl").iterdir():
        if path.name.startswith(("tokenizer", "chat_template", "preprocessor", "video_preprocessor", "generation")):
            (source / path.name).write_bytes(path.read_bytes())
    model = hf.load(source)
    model.text.layers.q.set_value((model.text.layers.q[...] * 1.5).astype(jnp.bfloat16).astype(jnp.float32))  # some training
    hf.save(model, target, like=source)

    assert transformers.AutoConfig.from_pretrained(target).model_type == "qwen3_vl"
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "When does the red car stop?"}], tokenize=True, return_dict=False)
    exported = transformers.AutoModelForImageTextToText.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = exported(input_ids=torch.tensor([ids])).logits[0].numpy()
    hidden, _ = model.text(jnp.asarray([ids]), jnp.broadcast_to(jnp.arange(len(ids)), (3, 1, len(ids))))
    assert model.text.head is not None
    logits = np.asarray(hidden[0] @ model.text.head[...].T)
    assert np.std(expected) > 0.01
    np.testing.assert_allclose(logits, expected, atol=2e-5)
