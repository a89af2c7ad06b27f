"""Gradients of the trained part of the vision tower, as updates compute them, in transformers.

Losses go through the decoder; images and frames of videos have several sizes and contents.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from models.attention import RowLayout
from models.lora import LoRASettings, add_adapters
from models.peft_folder import base_fingerprint, save_adapters
from models.peft_folder import load as load_adapted
from models.text import VisualBank
from models.trained import TrainedVision, TrainVision, part_of, trained_state
from models.weights import hf
from tests.models import parity_ours
from tests.models.parity import CASES, IMAGE, VIDEO, Sample, write_model

pytestmark = pytest.mark.parity

# Norm of the difference / norm of a gradient.
GRADIENT = 1e-3
# Largest difference of a logit.
LOGITS = 2e-4
NAMES = (
    "images, two rows, two levels",
    "video, tied, one level of the last layer",
    "windows, images of many sizes",
)
PARTS: tuple[TrainVision, ...] = ("merger", "tower")


@pytest.fixture(params=NAMES)
def pair(request, tmp_path) -> tuple[Any, Any, Sample]:
    """A folder of random weights, the model in transformers, and a sample."""
    pytest.importorskip("torch", reason="the oracle; install the extra parity")
    from tests.models import parity_theirs

    case = CASES[request.param]
    model = parity_theirs.make_model(case)
    (tmp_path / "base").mkdir()
    write_model(tmp_path / "base", case.config, parity_theirs.weights(model))
    return tmp_path / "base", model, parity_theirs.samples(case)[0]


def their_logits(model: Any, base: Any, sample: Sample) -> tuple[Any, Any]:
    """Logits, and the loss of tokens that follow a token."""
    import torch  # pyright: ignore[reportMissingImports]  (the extra parity)

    from tests.models import parity_theirs

    positions = parity_theirs.positions_of(base, sample)
    inputs = parity_theirs.inputs_of(sample)
    output = model(**inputs, position_ids=torch.tensor(positions))
    both = torch.tensor(sample.valid[:, 1:] & sample.valid[:, :-1])
    targets = inputs["input_ids"][:, 1:][both]
    return output.logits, torch.nn.functional.cross_entropy(output.logits[:, :-1][both], targets)


def cached_of(model: Any, vision: TrainedVision, sample: Sample) -> tuple[Any, Any, int]:
    """What is cached of a sample's frames, their sizes if they are needed, and their tokens."""
    config = model.config.vision
    items = sample.grids(IMAGE) + sample.grids(VIDEO)
    frames = [(h, w) for t, h, w in items for _ in range(t)]
    assert len(frames) > 1
    tokens = len(sample.patches) // config.spatial_merge_size**2
    if vision.whole:
        patches = sample.patches.astype(np.float32).reshape(tokens, *vision.vector)
        rows = vision.padded(patches, frames)[None]
        return jnp.asarray(rows), jnp.array([frames], jnp.int32), tokens
    ends = np.cumsum([h * w for h, w in frames])
    parts = np.split(sample.patches.astype(np.float32), ends)[:-1]
    states = [
        model.vision.before_mergers(part[None], np.array([grid]))[0]
        for part, grid in zip(parts, frames, strict=True)
    ]
    return jnp.concatenate(states)[None], None, tokens


@pytest.mark.parametrize("part", PARTS)
def test_gradients_of_the_trained_part_are_those_of_transformers(pair, part, tmp_path):
    from tests.models import parity_theirs

    folder, theirs, sample = pair
    _, loss = their_logits(theirs, theirs, sample)
    loss.backward()
    model = hf.load(folder)
    vision = TrainedVision.of(model.vision, part, frame_tokens=40)
    assert vision is not None
    cached, grids, tokens = cached_of(model, vision, sample)
    batch = parity_ours.batch_of(sample, model.config)
    segments = batch["segment_ids"]
    both = (segments[:, 1:] * segments[:, :-1]).astype(np.float32)

    def value(weights: Any) -> jax.Array:
        vectors = vision.encode(weights, cached, grids, 1, tokens)
        hidden, _ = model.text(
            batch["ids"],
            batch["positions"],
            layout=RowLayout(segments),
            visual=VisualBank(
                jnp.broadcast_to(vectors, (len(segments), *vectors.shape[1:])),
                batch["visual_index"],
            ),
        )
        logprobs = model.text.token_logprobs(hidden[:, :-1], batch["ids"][:, 1:], 1.0)
        return -(logprobs * both).sum() / both.sum()

    found, gradients = jax.jit(jax.value_and_grad(value))(trained_state(model.vision, part))
    assert float(found) == pytest.approx(float(loss), abs=1e-5)
    nnx.update(model.vision, gradients)
    hf.save(model, tmp_path / "gradients")
    ours = load_file(tmp_path / "gradients" / "model.safetensors")
    merger = "" if part == "tower" else r"(merger|deepstack_merger_list)\."
    pattern = r"(model\.)?visual\." + merger
    wanted = {
        name: parameter.grad.numpy()
        for name, parameter in parity_theirs.parameters_of(theirs).items()
        if re.match(pattern, name)
    }
    assert len(wanted) >= 5
    for name, gradient in wanted.items():
        size = np.linalg.norm(gradient)
        assert size > 0, name
        assert np.linalg.norm(ours[name] - gradient) <= GRADIENT * size, name


@pytest.mark.parametrize("part", PARTS)
def test_a_folder_with_a_part_of_the_tower_is_opened_by_peft(pair, part, tmp_path):
    """PEFT and our own loader compute the same logits, which are not those of the base.

    A folder that PEFT saves of what it opened holds the same weights.
    """
    pytest.importorskip("peft", reason="the oracle; install the extra parity")
    from peft import PeftModel  # pyright: ignore[reportMissingImports]  (the extra parity)

    folder, base, sample = pair
    settings = LoRASettings(rank=3, alpha=6.0)
    model = hf.load(folder)
    digest = base_fingerprint(model)
    add_adapters(model.text, settings, seed=1)
    moved = jax.tree.map(lambda x: x * 1.1, nnx.state(part_of(model.vision, part)))
    nnx.update(model.vision, moved)
    save_adapters(
        model,
        settings,
        tmp_path / "adapter",
        base=str(folder),
        base_digest=digest,
        train_vision=part,
    )
    opened = PeftModel.from_pretrained(base, tmp_path / "adapter")
    logits, _ = their_logits(opened, opened.get_base_model(), sample)
    opened.save_pretrained(tmp_path / "again")
    ours, again = (load_adapted(tmp_path / name) for name in ("adapter", "again"))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(ours), nnx.state(again))
    batch = parity_ours.batch_of(sample, ours.config)
    _, (found, _) = nnx.jit(parity_ours.loss)(ours, batch)
    valid = sample.valid
    np.testing.assert_allclose(
        np.asarray(found)[valid], logits.detach().numpy()[valid], atol=LOGITS, rtol=0
    )
    plain = hf.load(folder)
    _, (unmoved, _) = nnx.jit(parity_ours.loss)(plain, batch)
    assert np.abs(np.asarray(found)[valid] - np.asarray(unmoved)[valid]).max() > 0.01
