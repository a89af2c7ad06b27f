"""Adapters as PEFT folders: names, layouts, their base, and what is refused."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from models import peft_folder
from models.lora import LoRASettings, add_adapters
from models.model import VisionLanguageModel
from models.peft_folder import merge_adapters
from models.weights import hf
from models.weights.hf_config import from_hf
from models.weights.hf_layout import tensor_layouts
from tests.models.checkpoint_shapes import tensor_shapes
from tests.models.parity import CASES, Case, write_model

SETTINGS = LoRASettings(rank=3, alpha=6.0)
# One of each family.
NAMES = ("images, two rows, two levels", "windows, images of many sizes")


def randomise(model: VisionLanguageModel) -> None:
    """Gives the adapters a B that is not zero."""
    rng = np.random.default_rng(2)
    for adapter in model.text.layers.adapters.values():
        adapter.b.set_value(jnp.asarray(rng.normal(0, 0.2, adapter.b.shape), jnp.float32))


@pytest.fixture(scope="module", params=NAMES)
def case(request) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def base(case, tmp_path_factory):
    """The folder of a small base."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "weights").mkdir()
    shapes = tensor_shapes(from_hf(case.config))
    rng = np.random.default_rng(0)
    weights = {
        name: rng.normal(float("norm" in name and name.endswith("weight")), 0.2, shape)
        for name, shape in shapes.items()
    }
    write_model(folder / "weights", case.config, weights)
    return folder / "weights"


def adapted(base, settings: LoRASettings = SETTINGS) -> VisionLanguageModel:
    model = hf.load(base)
    add_adapters(model.text, settings, seed=0)
    randomise(model)
    return model


def save(model, base, folder, settings: LoRASettings = SETTINGS):
    digest = peft_folder.base_fingerprint(hf.load(base))
    peft_folder.save_adapters(model, settings, folder, base=str(base), base_digest=digest)
    return folder


@pytest.fixture(scope="module")
def saved(base, tmp_path_factory):
    return save(adapted(base), base, tmp_path_factory.mktemp("adapters") / "adapter")


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of the saved adapters, to change, without their sums."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in [*saved.glob("*_*"), saved / "base.json"]:
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, *(nnx.state(m, nnx.Param) for m in (a, b)))


def change(folder, **fields):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_tensors_have_the_names_and_shapes_of_peft(case, saved):
    shapes = {name: x.shape for name, x in load_file(saved / "adapter_model.safetensors").items()}
    layer = "base_model.model.model.language_model.layers"
    width = case.config["text_config"]["intermediate_size"]
    assert len(shapes) == 2 * 7 * 2
    assert shapes[f"{layer}.0.self_attn.q_proj.lora_A.weight"] == (3, 32)
    assert shapes[f"{layer}.1.self_attn.k_proj.lora_B.weight"] == (16, 3)
    assert shapes[f"{layer}.0.self_attn.o_proj.lora_A.weight"] == (3, 32)
    assert shapes[f"{layer}.1.mlp.gate_proj.lora_B.weight"] == (width, 3)
    assert shapes[f"{layer}.1.mlp.down_proj.lora_A.weight"] == (3, width)


def test_the_products_of_the_stored_tensors_are_what_merging_adds(base, saved):
    stored = load_file(saved / "adapter_model.safetensors")
    model = adapted(base)
    before = np.asarray(model.text.layers.o[...])
    merge_adapters(model.text)
    added = np.asarray(model.text.layers.o[...]) - before
    stem = "base_model.model.model.language_model.layers.1.self_attn.o_proj"
    product = stored[f"{stem}.lora_B.weight"] @ stored[f"{stem}.lora_A.weight"]
    wanted = 6 / 3 * product.T
    np.testing.assert_allclose(added[1].reshape(wanted.shape), wanted, atol=1e-5)


def test_loaded_adapters_and_their_base_are_equal_bit_for_bit(base, saved):
    again = peft_folder.load(saved)
    assert_equal(again, adapted(base))
    assert again.text.layers.adapters["q"].scale == SETTINGS.scale


def test_a_part_of_the_matrices_and_another_type(base, tmp_path):
    """The fingerprint of the base does not depend on the type, nor does EVA change the base."""
    settings = LoRASettings(rank=2, alpha=0.5, targets=("v", "down"))
    folder = save(adapted(base, settings), base, tmp_path / "adapter", settings)
    change(folder, use_rslora=True, init_lora_weights="eva", eva_config={"rho": 2.0})
    model = peft_folder.load(folder, param_dtype=jnp.bfloat16)
    assert sorted(model.text.layers.adapters) == ["down", "v"]
    adapter = model.text.layers.adapters["v"]
    assert adapter.scale == pytest.approx(0.5 / 2**0.5)
    assert adapter.a[...].dtype == adapter.b[...].dtype == jnp.bfloat16


def test_a_base_with_another_number_is_refused(case, base, folder, tmp_path):
    weights = load_file(base / "model.safetensors")
    weights[tensor_layouts(from_hf(case.config))["vision/patch/kernel"].name].flat[0] += 1
    (tmp_path / "other").mkdir()
    write_model(tmp_path / "other", case.config, weights)
    change(folder, base_model_name_or_path=str(tmp_path / "other"))
    with pytest.raises(ValueError, match="belongs to a base with the fingerprint .*; name the rig"):
        peft_folder.load(folder)
    (folder / "base.json").unlink()  # as in a folder that PEFT saved
    assert peft_folder.load(folder).text.layers.adapters


def test_a_base_of_another_size_is_refused_before_its_weights_are_read(case, folder, tmp_path):
    config = json.loads(json.dumps(case.config))
    config["text_config"]["intermediate_size"] += 8
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    change(folder, base_model_name_or_path=str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"6 misshaped: .*name the base of these adapters"):
        peft_folder.load(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only LORA is known"),
        ({"use_dora": True}, "use_dora is true; only plain LoRA is known"),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights is "pissa"'),
        (
            {"revision": "v1.1", "base_model_name_or_path": "owner/name"},
            'revision is "v1.1", but the base is read from its main branch',
        ),
        ({"r": 4}, "28 misshaped: .* r in adapter_config.json is not their rank"),
        ({"base_model_name_or_path": "/none"}, "base_model_name_or_path: /none: neither"),
    ],
)
def test_adapters_of_another_form_or_base_are_refused(folder, fields, message):
    change(folder, **fields)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        peft_folder.load(folder)


def test_a_whole_model_beside_adapters_is_not_dropped(base, folder):
    for name in ("model.safetensors", "config.json"):
        (folder / name).write_bytes((base / name).read_bytes())
    with pytest.raises(ValueError, match="holds the weights of a whole model, and adapters"):
        peft_folder.load(folder)
    # As after merging, which may leave the settings behind.
    (folder / "adapter_model.safetensors").unlink()
    assert_equal(peft_folder.load(folder), hf.load(base))


def test_adapters_that_can_run_code_are_not_read(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match="has no adapter_model.safetensors, .*.bin can run"):
        peft_folder.load(folder)


@pytest.mark.parametrize(
    ("decoder", "tower", "layer"),
    [
        ("model.", "", ""),  # transformers before 4.52
        ("model.language_model.", "model.", ""),  # and since
        ("language_model.model.", "", ""),
        ("_orig_mod.module.model.", "_orig_mod.module.", "_checkpoint_wrapped_module."),
        ("base_model.model.model.", "base_model.model.", "_fsdp_wrapped_module."),
    ],
)
def test_names_of_any_tool_are_read(case, base, saved, folder, tmp_path, decoder, tower, layer):
    def spelled(name):
        tail = re.sub(r"^.*?(?=(visual|layers|embed_tokens|norm|lm_head)\.)", "", name)
        tail = re.sub(r"((?:layers|blocks)\.\d+\.)", rf"\g<1>{layer}", tail)
        tail = re.sub("lora_.", r"\g<0>.default", tail)
        return (tower if tail.startswith("visual") else decoder) + tail

    file = folder / "adapter_model.safetensors"
    save_file({spelled(name): x for name, x in load_file(file).items()}, file)
    weights = load_file(base / "model.safetensors")
    write_model(tmp_path, case.config, {spelled(name): x for name, x in weights.items()})
    change(folder, base_model_name_or_path=str(tmp_path), init_lora_weights="orthogonal")
    assert_equal(peft_folder.load(folder), peft_folder.load(saved))


QKV = "base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight"
HEAD = "base_model.model.lm_head.weight"
UP = "base_model.model.model.language_model.layers.0.mlp.up_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("dropped", "added", "shape", "message"),
    [
        ("none", QKV, (3, 8), f"1 unknown: {QKV}; only layers of the decoder may have .*: merge"),
        ("lora", QKV, (3, 8), "adapts no matrix of the decoder, but visual.*, merge them"),
        ("layers.0", UP, (3, 32), "13 missing: .*; only adapters of all layers are known: merge"),
        ("none", HEAD, (64, 32), f"1 unknown: {HEAD}; of whole modules, only all mergers .*: mer"),
        ("none", f"module.{UP}", (3, 32), f"1 twice: {UP}; save or fetch them again, into"),
        ("none", UP, (0,), f"1 empty: {UP}; ZeRO-3 kept them apart: save with stage3_gather"),
    ],
)
def test_tensors_that_do_not_fit_have_their_reason(folder, dropped, added, shape, message):
    file = folder / "adapter_model.safetensors"
    tensors = {name: x for name, x in load_file(file).items() if dropped not in name}
    save_file(tensors | {added: np.zeros(shape, np.float32)}, file)
    with pytest.raises(ValueError, match=message):
        peft_folder.load(folder)
