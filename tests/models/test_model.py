"""Results do not depend on how frames are packed, on remat or on chunks of log-probs."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import print_saved_residuals

from models.model import VisionLanguageModel, abstract_model
from models.qwen3_vl.sizes import tiny
from models.text import VisualBank

CONFIG = tiny(97)
# bfloat16 rounds by up to 2^-9 = 0.2 %. About ten roundings in each of five layers add up to
# sqrt(50) * 0.2 % = 1.4 %. Measured are 1.9 % for logits and 0.11 % for the loss; the bounds are
# about twice that.
BF16_LOGITS = 0.04  # mean error / mean size
BF16_LOSS = 0.003  # error / loss


@pytest.fixture(scope="module")
def model() -> VisionLanguageModel:
    """A model in which norms, biases and tables are noise too, so that a forgotten one shows."""
    graph, state = nnx.split(abstract_model(CONFIG))
    # Drawn with NumPy: the model's own initialisation takes seconds to compile.
    rng = np.random.default_rng(0)

    def noise(path, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        is_scale = "norm" in str(path) and "bias" not in str(path)
        return jnp.asarray(rng.normal(is_scale, 0.13, leaf.shape), leaf.dtype)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(noise, state))


@pytest.fixture(scope="module")
def visual_batch() -> dict:
    """Two rows of 24 tokens, three visual vectors each, positions that differ between axes."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 97, (2, 24))
    index = np.full((2, 24), -1)
    index[0, [3, 7, 8]] = [0, 1, 2]
    index[1, [0, 5, 20]] = [2, 0, 1]
    positions = np.arange(24) + np.array([0, 3, 1])[:, None, None] + np.zeros((1, 2, 1), int)
    return {
        "ids": ids,
        "positions": positions,
        "visual": VisualBank(rng.normal(size=(2, 3, 2, 128)).astype(np.float32), index),
    }


@nnx.jit
def run(text, batch: dict):
    """The decoder, compiled once per shape."""
    return text(**batch)


def close(a, b, atol=2e-5):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=atol, rtol=0)


def test_every_visual_level_and_position_axis_counts(model, visual_batch):
    hidden = np.asarray(run(model.text, visual_batch)[0])
    for level in range(2):
        visual = visual_batch["visual"].vectors.copy()
        visual[:, :, level] += 1
        bank = visual_batch["visual"]._replace(vectors=visual)
        other, _ = run(model.text, visual_batch | {"visual": bank})
        changed = np.abs(np.asarray(other) - hidden).max(-1)
        # The first visual token of row 0 is token 3.
        assert (changed[0, :3] == 0).all() and (changed[0, 3:] > 0).all()
    for axis in range(3):
        positions = visual_batch["positions"].copy()
        positions[axis, :, 12:] += 5
        other, _ = run(model.text, visual_batch | {"positions": positions})
        assert np.abs(np.asarray(other) - hidden)[:, 12:].max() > 1e-3


POLICIES = ("none", "full", "attention", "dots", "offload")


def loss_of(text, batch, remat):
    return (text(**batch, remat=remat)[0] ** 3).sum()


def test_remat_changes_nothing(model, visual_batch):
    def everything(policy):
        return nnx.jit(nnx.value_and_grad(lambda text: loss_of(text, visual_batch, policy)))(
            model.text
        )

    value, gradients = everything("none")
    # tests/train/test_step_meshes.py has the other policies.
    for policy in ("full", "attention"):
        found, others = everything(policy)
        np.testing.assert_allclose(value, found, rtol=1e-5, err_msg=policy)
        for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(others), strict=True):
            close(a, b, 1e-4 * max(1.0, float(np.abs(b).max())))


def test_a_policy_decides_what_is_saved(model, visual_batch, capsys):
    """Besides weights: layers' inputs; also the output of attention; also products; everything."""
    graph, state = nnx.split(model.text)
    layers = model.config.text.num_hidden_layers
    tokens = visual_batch["ids"].size

    def saved(policy: str) -> tuple[int, float]:
        """Number of arrays with a layer axis, and their size relative to the layers' inputs."""
        print_saved_residuals(
            lambda state: loss_of(nnx.merge(graph, state), visual_batch, policy), state
        )
        lines = [line for line in capsys.readouterr().out.splitlines() if "argument" not in line]
        found = re.findall(r"^\S*?\[(\d[\d,]*)\]", "\n".join(lines), re.MULTILINE)
        shapes = [[int(n) for n in shape.split(",")] for shape in found]
        sizes = [math.prod(shape) for shape in shapes if len(shape) > 1 and shape[0] == layers]
        return len(sizes), sum(sizes) / (layers * tokens * model.config.text.hidden_size)

    found = {policy: saved(policy) for policy in POLICIES}
    assert found["full"] == found["offload"] == (1, 1)
    # The input, and the output and log-sum-exp of attention.
    assert found["attention"][0] == 3
    assert 1 < found["attention"][1] < found["dots"][1] < found["none"][1]


@pytest.mark.parametrize("chunk", [None, 5, 24])
def test_token_logprobs(model, visual_batch, chunk):
    hidden, _ = run(model.text, visual_batch)
    targets = visual_batch["ids"]
    full = np.asarray(jax.nn.log_softmax(model.text.logits(hidden) / 0.7))
    expected = np.take_along_axis(full, targets[..., None], -1)[..., 0]
    close(model.text.token_logprobs(hidden, targets, 0.7, chunk), expected)


def test_chunked_logprobs_never_hold_the_whole_vocabulary_axis(model):
    def program(chunk):
        def loss(hidden):
            return model.text.token_logprobs(hidden, np.zeros((2, 64), int), 1.0, chunk).sum()

        return str(jax.make_jaxpr(jax.grad(loss))(jnp.zeros((2, 64, 128))))

    assert "[2,64,97]" in program(None)
    chunked = program(8)
    assert "[2,8,97]" in chunked
    assert "[2,64,97]" not in chunked and "[8,2,8,97]" not in chunked


@pytest.mark.slow
def test_bfloat16_stays_near_float32(model, visual_batch):
    """From patches to logits and loss, with weights of either type."""
    rng = np.random.default_rng(4)
    patches = rng.normal(size=(2, 12, 1536)).astype(np.float32)
    grids = np.tile((2, 6), (2, 1))

    @nnx.jit
    def logits_and_loss(model):
        bank = visual_batch["visual"]._replace(vectors=model.vision(patches, grids))
        hidden, _ = model.text(**visual_batch | {"visual": bank})
        targets = visual_batch["ids"][:, 1:]
        logprobs = model.text.token_logprobs(hidden[:, :-1], targets, 1.0)
        return model.text.logits(hidden), -logprobs.mean()

    exact, loss = logits_and_loss(model)
    for param_dtype in (jnp.float32, jnp.bfloat16):
        graph, _ = nnx.split(abstract_model(CONFIG, dtype=jnp.bfloat16, param_dtype=param_dtype))
        state = jax.tree.map(lambda p, t=param_dtype: p.astype(t), nnx.state(model))
        low, low_loss = logits_and_loss(nnx.merge(graph, state))
        assert low.dtype == low_loss.dtype == jnp.float32
        assert 0 < jnp.mean(jnp.abs(low - exact)) <= BF16_LOGITS * jnp.mean(jnp.abs(exact))
        assert 0 < jnp.abs(low_loss - loss) <= BF16_LOSS * loss
