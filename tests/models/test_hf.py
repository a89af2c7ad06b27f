"""Loading and saving weights in the Hugging Face layout.

What these tests guard:
1. saved weights are loaded bit for bit, whole or by slices;
2. a wrong folder gives one error that names everything wrong;
3. a folder is complete or does not exist, even if a writer is killed;
4. transformers reads and runs what is saved (marked parity).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import textwrap

import huggingface_hub
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from models.qwen3_vl.dialect import DIALECT
from models.qwen3_vl.sizes import tiny
from models.rope import mrope_positions, visual_index
from models.text import VisualBank
from models.weights import folder as hf_folder
from models.weights import hf, hf_layout, tensor_file
from models.weights.hf_config import to_hf
from paravt_jax.data import tokenizer_file
from paravt_jax.data.foreign import ForeignFileError
from paravt_jax.data.stored import SUMS, appearing
from tests.models.checkpoint_shapes import tensor_shapes
from tests.noisy_model import noisy_model


@pytest.fixture(scope="module")
def config():
    config = tiny(64)
    return dataclasses.replace(
        config,
        text=dataclasses.replace(config.text, num_hidden_layers=2, tie_word_embeddings=False),
    )


@pytest.fixture(scope="module")
def model(config):
    return noisy_model(config)


def leaves(model):
    return {
        "/".join(map(str, path)): np.asarray(v[...])
        for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


def assert_equal(a, b):
    a, b = leaves(a), leaves(b)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_a_saved_model_is_loaded_bit_for_bit(model, config, tmp_path):
    hf.save(model, tmp_path / "model")
    again = hf.load(tmp_path / "model")
    assert again.config == config
    assert_equal(again, model)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    ids = jnp.arange(6)[None]
    positions = jnp.broadcast_to(jnp.arange(6), (3, 1, 6))
    np.testing.assert_array_equal(again.text(ids, positions)[0], model.text(ids, positions)[0])


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("model.safetensors", hf.load),
        (SUMS, hf.load),
        ("tokenizer.json", lambda folder: tokenizer_file.load(folder, DIALECT)),
        ("tokenizer.json", hf_folder.read_companions),
    ],
)
def test_a_flipped_bit_of_an_export_is_found(model, small_vocabulary, tmp_path, name, load):
    folder = tmp_path / "model"
    hf.save(model, folder, files=[tokenizer_file.save(small_vocabulary, tmp_path)])
    data = bytearray((folder / name).read_bytes())
    data[data.rfind(b"1")] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{name}: .*checksum is wrong; .* delete .*{SUMS}"):
        load(folder)
    # As the message says, for those who changed the file.
    (folder / SUMS).unlink()
    load(folder)


@pytest.fixture
def published(request, config, tmp_path):
    """A folder like those on the hub: a tied head repeated, and tensors in another order.

    The weights are bfloat16, or the type that a test asks for.
    """
    dtype = np.dtype(getattr(request, "param", jnp.bfloat16))
    unsigned = np.dtype(f"u{dtype.itemsize}")
    config = dataclasses.replace(
        config, text=dataclasses.replace(config.text, tie_word_embeddings=True)
    )
    folder = tmp_path / "published"
    folder.mkdir()
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        # Any number below 2, including subnormal ones: one bit of the exponent is cleared.
        bits = rng.integers(0, 256**dtype.itemsize, shape, unsigned)
        bits &= ~unsigned.type(64 * 256 ** (dtype.itemsize - 1))
        tensors[name] = bits.view(dtype)
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"]
    names = sorted(tensors)
    parts = {"model-a.safetensors": names[::2], "model-b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file(
            {name: tensors[name] for name in part},
            folder / file,
            metadata={"format": "pt", "from": "elsewhere"},
        )
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    content = to_hf(config) | {"transformers_version": "4.57.0"}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("published", "param_dtype"),
    [(jnp.bfloat16, jnp.float32), (jnp.bfloat16, jnp.bfloat16), (jnp.float16, jnp.float32)],
    indirect=["published"],
)
def test_published_weights_are_saved_number_by_number(published, tmp_path, param_dtype):
    model = hf.load(published, param_dtype=param_dtype)
    hf.save(model, tmp_path / "ours")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert {x.dtype for x in ours.values()} == {np.dtype(param_dtype)}
    for file in published.glob("*.safetensors"):
        for name, x in load_file(file).items():
            if name != "lm_head.weight":
                np.testing.assert_array_equal(ours[name], x.astype(param_dtype), err_msg=name)


def test_several_files_of_a_bounded_size(model, tmp_path):
    hf.save(model, tmp_path / "model", max_shard_bytes=400_000)
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    count = len(files)
    names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    assert [file.name for file in files] == names
    assert count > 4 and all(file.stat().st_size < 410_000 for file in files)
    assert_equal(hf.load(tmp_path / "model"), model)


def test_a_slice_read_equals_the_slice_of_the_whole(model, config, tmp_path):
    hf.save(model, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    stored = tensor_file.read_header(file)
    values = leaves(model)
    rng = np.random.default_rng(0)
    # The axis inside a head, which is never cut.
    head_dim = {"text/layers/o": 1, "text/layers/q": 2, "text/layers/k": 2, "text/layers/v": 2}
    for path, tensor in hf_layout.tensor_layouts(config).items():
        value = values[path][0] if tensor.stacked else values[path]
        cuts = [
            (0, n) if axis == head_dim.get(path) else sorted(rng.choice(n + 1, 2, replace=False))
            for axis, n in enumerate(value.shape)
        ]
        index = tuple(slice(int(start), int(stop)) for start, stop in cuts)
        block = tensor.read(stored[tensor.name.format(0)], value.shape, index)
        np.testing.assert_array_equal(block, value[index], err_msg=path)


def test_wrong_configurations_are_refused(model, tmp_path):
    hf.save(model, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    for content, message in (("{bad", "JSON"), ("[]", "list"), (pointer, "pointer of git-lfs")):
        config.write_text(content)
        with pytest.raises(ValueError, match=f"config.json: .*{message}"):
            hf.load(tmp_path / "model")
    config.unlink()
    with pytest.raises(FileNotFoundError, match="config.json: does not exist"):
        hf.load(tmp_path / "model")


def test_one_error_names_every_wrong_tensor(model, tmp_path):
    hf.save(model, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.language_model.layers.7.extra"] = np.zeros(2, np.float32)
    tensors["lm_head.weight"] = np.zeros((3, 2), np.float32)
    tensors = {name: value for name, value in tensors.items() if ".visual.blocks." not in name}
    save_file(tensors, file)
    with pytest.raises(ValueError) as error:
        hf.load(tmp_path / "model")
    missing = sorted(name for name in tensor_shapes(model.config) if ".visual.blocks." in name)
    assert f"24 missing: {', '.join(missing)}; 1 unknown" in str(error.value)
    assert "1 unknown: model.language_model.layers.7.extra;" in str(error.value)
    assert "1 misshaped: lm_head.weight (3, 2), not (64, 128);" in str(error.value)


def test_a_trained_head_of_a_tied_model_is_not_dropped(published):
    """Tools that train the head of a tied model may leave `tie_word_embeddings` as it was."""
    head = "lm_head.weight"
    file = next(
        file for file in published.glob("*.safetensors") if head in tensor_file.read_header(file)
    )
    tensors = load_file(file)
    # The last row differs.
    tensors[head] = tensors[head].copy()
    tensors[head][-1, -1] += 1
    save_file(tensors, file)
    with pytest.raises(ValueError, match="lm_head.weight differs from .*; set it to false there"):
        hf.load(published)
    config = json.loads((published / "config.json").read_text())
    config["tie_word_embeddings"] = False
    (published / "config.json").write_text(json.dumps(config))
    loaded = hf.load(published, param_dtype=jnp.bfloat16)
    assert loaded.text.head is not None
    np.testing.assert_array_equal(np.asarray(loaded.text.head[...]), tensors[head])


def test_a_folder_without_weights_is_refused(tmp_path, config):
    with pytest.raises(FileNotFoundError, match="neither model.safetensors .*.bin can run code"):
        hf.load(tmp_path, config)


def test_damaged_indexes_and_missing_files_are_named(published):
    (published / "model-b.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-b.safetensors, .*index.json"):
        hf.load(published)
    index = published / "model.safetensors.index.json"
    index.write_text("{")
    with pytest.raises(ValueError, match="index.json: not JSON"):
        hf.load(published)
    for weight_map in ([], {"x": 1}, {"x": "../elsewhere.safetensors"}):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match="index.json: .*weight_map"):
            hf.load(published)


def test_a_link_out_of_a_model_folder_is_not_copied(published, model, tmp_path):
    private = tmp_path / "private.txt"
    private.write_text("secret")
    (published / "notes.txt").symlink_to(private)
    with pytest.raises(ForeignFileError, match=f"notes.txt: a link to {private}"):
        hf_folder.read_companions(published)
    # The hub's cache has such links, from a snapshot to the blobs of the same model.
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "revision"
    blob = tmp_path / "models--owner--name" / "blobs" / "1"
    snapshot.mkdir(parents=True)
    blob.parent.mkdir()
    blob.write_text("{}")
    (snapshot / "config.json").symlink_to(blob)
    assert hf_folder.read_companions(snapshot) == {"config.json": b"{}"}


def test_a_hub_id_is_fetched(published, monkeypatch):
    asked = {}

    def snapshot_download(name, repo_type, allow_patterns, **_):
        assert repo_type == "model"
        asked[name] = allow_patterns
        return str(published)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert hf_folder.local_folder("Qwen/Qwen3-VL-2B-Instruct") == published
    patterns = {"*.safetensors", "*.json", "*.jinja", "*.txt", "LICENSE*"}
    assert set(asked["Qwen/Qwen3-VL-2B-Instruct"]) == patterns


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
    with pytest.raises(FileExistsError, match="model: exists"):
        hf.save(model, tmp_path / "model")


KILLED = """
    import os, pathlib, signal, sys
    from paravt_jax.data.stored import appearing
    with appearing(pathlib.Path(sys.argv[1])) as folder:
        (folder / "model.safetensors").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_export_makes_no_folder_and_is_deleted_later(tmp_path):
    target = tmp_path / "model"
    for folder in (target, tmp_path / "model.v2"):
        killed = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(KILLED), str(folder)], timeout=60
        )
        assert killed.returncode == -signal.SIGKILL
    left = [".model.partial", ".model.v2.partial"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    with appearing(target) as living:
        assert not list(living.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.v2.partial", "model"]


COMPANIONS = {
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "generation_config.json",
}


def test_stop_ids_come_from_the_copied_tokenizer(model, small_vocabulary, tmp_path):
    file = tokenizer_file.save(small_vocabulary, tmp_path)
    hf.save(model, tmp_path / "with", files=[file])
    stop, pad = (small_vocabulary[token] for token in ("<|im_end|>", "<|endoftext|>"))
    generation = json.loads((tmp_path / "with" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": pad, "pad_token_id": pad, "eos_token_id": [stop, pad]}
    text = json.loads((tmp_path / "with" / "config.json").read_text())["text_config"]
    assert (text["bos_token_id"], text["eos_token_id"]) == (pad, stop)
    assert "pad_token_id" not in text
    assert hf.load(tmp_path / "with").config == model.config
    own = tmp_path / "generation_config.json"
    own.write_text("{}")
    hf.save(model, tmp_path / "own", files=[file, own])
    assert (tmp_path / "own" / "generation_config.json").read_text() == "{}"
    hf.save(model, tmp_path / "without")
    assert not (tmp_path / "without" / "generation_config.json").exists()


def test_the_published_tokenizer_gives_the_published_ids(model, assets, tmp_path):
    published = assets / "qwen3_vl"
    hf.save(model, tmp_path / "model", files=[published / "tokenizer.json"])
    for name in ("generation_config.json", "config.json"):
        files = tmp_path / "model" / name, published / name
        ours, theirs = (json.loads(file.read_text()) for file in files)
        ours, theirs = ours.get("text_config", ours), theirs.get("text_config", theirs)
        ids = {field for field in theirs if field.endswith("token_id")}
        assert len(ids) >= 2
        assert {field: theirs[field] for field in ids} == {field: ours.get(field) for field in ids}


@pytest.mark.parity
def test_a_trained_model_is_a_drop_in(tmp_path, assets):
    torch = pytest.importorskip("torch", reason="the oracle; install the extra parity")
    import transformers

    # The vocabulary of the real tokenizer.
    small = tiny(151_936)
    text = dataclasses.replace(
        small.text,
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        tie_word_embeddings=False,
    )
    vision = dataclasses.replace(small.vision, out_hidden_size=32)
    config = dataclasses.replace(small, text=text, vision=vision)
    source = tmp_path / "source"
    target = tmp_path / "target"
    torch.manual_seed(0)
    theirs = transformers.Qwen3VLForConditionalGeneration(
        transformers.Qwen3VLConfig.from_dict(to_hf(config))
    )
    theirs.to(torch.bfloat16).save_pretrained(source)
    for name in COMPANIONS - {"config.json"}:
        (source / name).write_bytes((assets / "qwen3_vl" / name).read_bytes())
    model = hf.load(source)
    # In place of training.
    trained = (model.text.layers.q[...] * 1.5).astype(jnp.bfloat16)
    model.text.layers.q.set_value(trained.astype(jnp.float32))
    hf.save(model, target, files=[source / name for name in COMPANIONS - {"config.json"}])

    assert transformers.AutoConfig.from_pretrained(target).model_type == "qwen3_vl"
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    picture = np.random.default_rng(0).integers(0, 256, (256, 320, 3), np.uint8)
    seen = transformers.AutoImageProcessor.from_pretrained(target)(picture, return_tensors="np")
    (grid,) = seen["image_grid_thw"][:, 1:].tolist()
    content = [{"type": "image"}, {"type": "text", "text": "When does the red car stop?"}]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    mark = "<|image_pad|>"
    prompt = prompt.replace(mark, mark * (math.prod(grid) // 4))
    ids = np.array(tokenizer(prompt)["input_ids"])
    exported = transformers.AutoModelForImageTextToText.from_pretrained(
        target, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        tokens = torch.tensor(ids[None])
        given = {"input_ids": tokens, "mm_token_type_ids": (tokens == config.image_token_id).int()}
        pixels = {name: torch.tensor(x) for name, x in seen.items()}
        expected = exported(**given, **pixels).logits[0].numpy()
        blind = exported(**given).logits[0].numpy()
    vectors = model.vision(seen["pixel_values"][None], np.array([grid]))
    bank = VisualBank(vectors, visual_index(ids, config.image_token_id)[None])
    positions = mrope_positions(ids, [tuple(grid)], config)[:, None]
    hidden, _ = model.text(ids[None], positions, visual=bank)
    assert np.abs(expected - blind).max() > 0.01, "the image counts"
    np.testing.assert_allclose(model.text.logits(hidden)[0], expected, atol=2e-5)


def test_the_error_for_a_folder_above_models_names_the_newest(tmp_path):
    """Above it is a run of transformers, the root of the hub's cache, or a run."""
    for number, name in enumerate(("checkpoint-500", "snapshots/0123", "model", "checkpoint-90")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "model.safetensors").touch()
        os.utime(tmp_path / name, (0, number))
        with pytest.raises(FileNotFoundError, match=f"no weights itself; give {tmp_path / name}, "):
            hf_folder.local_folder(tmp_path)
    assert hf_folder.local_folder(tmp_path, weights=False) == tmp_path
