"""Small sizes of every family: transformers opens what is saved, with equal logits, and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.family import FAMILIES, family
from models.model import VisionLanguageModel
from models.weights import hf


@pytest.mark.parity
@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_opens_a_saved_model_and_gives_its_logits(name, tmp_path):
    torch = pytest.importorskip("torch", reason="the oracle; install the extra parity")
    import transformers

    config = family(name).size("tiny", vocab_size=151_936)
    model = nnx.jit(lambda: VisionLanguageModel(config, rngs=nnx.Rngs(0)))()
    hf.save(model, tmp_path / "model")
    assert hf.load(tmp_path / "model").config == config
    ids = np.random.default_rng(0).integers(0, 1000, (1, 12))
    positions = np.broadcast_to(np.arange(12), (3, 1, 12))
    hidden, _ = model.text(ids, positions)
    ours = model.text.logits(hidden)
    kind = transformers.AutoModelForImageTextToText
    theirs = kind.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert theirs.config.model_type == name
    with torch.no_grad():
        logits = theirs(torch.tensor(ids)).logits.numpy()
    assert jnp.std(ours) > 0.01
    np.testing.assert_allclose(ours, logits, atol=2e-4, rtol=0)
    theirs.save_pretrained(tmp_path / "again")
    weights = (nnx.state(x, nnx.Param) for x in (model, hf.load(tmp_path / "again")))
    jax.tree.map(np.testing.assert_array_equal, *weights)
