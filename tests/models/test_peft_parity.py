"""Adapters against PEFT, without dropout: logits, gradients of A and B, and folders both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from models import peft_folder
from models.lora import LoRASettings, add_adapters
from models.model import VisionLanguageModel
from models.weights import hf
from tests.models import parity_ours
from tests.models.parity import (
    CASES,
    GRADIENT,
    LOGITS,
    Sample,
    gradient_differences,
    write_model,
)

pytestmark = pytest.mark.parity

# Name of the case -> settings of its adapters.
SETTINGS = {
    "images, two rows, two levels": LoRASettings(rank=3, alpha=6.0),
    "video, tied, one level of the last layer": LoRASettings(
        rank=4, alpha=2.5, targets=("k", "o", "up", "down")
    ),
    "text alone, padded right": LoRASettings(rank=8, targets=("q", "v")),
    "windows, images of many sizes": LoRASettings(rank=3, alpha=6.0),
    "experts, images and a video": LoRASettings(rank=3, alpha=6.0),
}


class Base(NamedTuple):
    """A base with random weights, as a folder and in transformers."""

    folder: Any
    model: Any
    sample: Sample
    settings: LoRASettings


def make_base(name: str, folder: Path) -> Base:
    from tests.models import parity_theirs

    case = CASES[name]
    model = parity_theirs.make_model(case)
    (folder / "base").mkdir()
    write_model(folder / "base", case.config, parity_theirs.weights(model))
    return Base(folder / "base", model, parity_theirs.samples(case)[0], SETTINGS[name])


@pytest.fixture(params=SETTINGS)
def base(request, tmp_path) -> Base:
    pytest.importorskip("peft", reason="the oracle; install the extra parity")
    return make_base(request.param, tmp_path)


def save(model: VisionLanguageModel, base: Base, folder) -> Any:
    digest = peft_folder.base_fingerprint(hf.load(base.folder))
    where = str(base.folder)
    peft_folder.save_adapters(model, base.settings, folder, base=where, base_digest=digest)
    return folder


def theirs(model: Any, sample: Sample) -> tuple[Any, dict[str, np.ndarray]]:
    """Logits of a model of PEFT, and its gradients with the names of its file."""
    import torch  # pyright: ignore[reportMissingImports]  (the extra parity)

    from tests.models import parity_theirs

    positions = parity_theirs.positions_of(model.get_base_model(), sample)
    inputs = parity_theirs.inputs_of(sample)
    output = model(**inputs, position_ids=torch.tensor(positions))
    both = torch.tensor(sample.valid[:, 1:] & sample.valid[:, :-1])
    targets = inputs["input_ids"][:, 1:][both]
    torch.nn.functional.cross_entropy(output.logits[:, :-1][both], targets).backward()
    gradients = {
        name.replace(".default", ""): parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return output.logits.detach().numpy(), gradients


@nnx.jit
def logits_and_gradients(
    model: VisionLanguageModel, batch: dict[str, Any]
) -> tuple[Any, nnx.State]:
    adapters = nnx.DiffState(0, nnx.LoRAParam)
    gradient = nnx.value_and_grad(parity_ours.loss, argnums=adapters, has_aux=True)
    (_, (logits, _)), gradients = gradient(model, batch)
    return logits, gradients


class Differences(NamedTuple):
    """Of adapters here from the same adapters in PEFT."""

    logits: float
    """The largest difference."""
    gradients: dict[str, float]
    """By matrix: relative norm of the difference."""


def compare(base: Base, folder: Path) -> Differences:
    """Random adapters here and in PEFT, which opens the folder that is written here."""
    from peft import PeftModel  # pyright: ignore[reportMissingImports]  (the extra parity)

    model = hf.load(base.folder)
    add_adapters(model.text, base.settings, seed=1)
    rng = np.random.default_rng(2)
    for adapter in model.text.layers.adapters.values():
        adapter.b.set_value(jnp.asarray(rng.normal(0, 0.2, adapter.b.shape), jnp.float32))
    adapter = save(model, base, folder / "adapter")
    batch = parity_ours.batch_of(base.sample, model.config)
    logits, gradients = logits_and_gradients(model, batch)
    opened = PeftModel.from_pretrained(base.model, adapter, is_trainable=True)
    wanted, their_gradients = theirs(opened, base.sample)

    valid = base.sample.valid
    nnx.update(model, gradients)
    ours = load_file(save(model, base, folder / "gradients") / "adapter_model.safetensors")
    assert ours.keys() == their_gradients.keys()
    return Differences(
        float(np.abs(np.asarray(logits)[valid] - wanted[valid]).max()),
        gradient_differences(ours, their_gradients),
    )


def test_logits_and_gradients_of_our_adapters_are_those_of_peft(base, tmp_path):
    found = compare(base, tmp_path)
    assert found.logits <= LOGITS
    # A gradient that is 0 in PEFT would be nan here.
    assert {name: d for name, d in found.gradients.items() if not d <= GRADIENT} == {}


def test_adapters_that_peft_saved_are_loaded(base, tmp_path):
    import torch  # pyright: ignore[reportMissingImports]  (the extra parity)
    from peft import (  # pyright: ignore[reportMissingImports]  (the extra parity)
        LoraConfig,
        get_peft_model,
    )

    config = LoraConfig(
        r=5,
        lora_alpha=7,
        use_rslora=True,
        target_modules=["q_proj", "o_proj", "gate_proj"],
        # Some towers have a gate_proj, too.
        exclude_modules=r"model\.visual\..*",
        init_lora_weights=False,
        base_model_name_or_path=str(base.folder),
    )
    torch.manual_seed(0)
    model = get_peft_model(base.model, config)
    wanted, _ = theirs(model, base.sample)
    model.peft_config["default"].base_model_name_or_path = str(base.folder)
    model.save_pretrained(tmp_path / "adapter")
    ours = peft_folder.load(tmp_path / "adapter")
    logits, _ = logits_and_gradients(ours, parity_ours.batch_of(base.sample, ours.config))
    valid = base.sample.valid
    np.testing.assert_allclose(np.asarray(logits)[valid], wanted[valid], atol=LOGITS, rtol=0)
