"""The model that a run begins with, and what of it is trained."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from models.qwen3_vl.config import Qwen3VLConfig, qwen3_vl, tiny
from models.qwen3_vl.hf import load
from models.qwen3_vl.hf_config import to_hf
from models.qwen3_vl.model import Qwen3VL
from models.qwen3_vl.vision import frozen
from models.sharding import param_shardings
from paravt_jax.method.tokenizer import Vocabulary
from train.data import Data
from train.published_model import check_vocabulary, config_of, fingerprint, on_host
from train.settings import Run


@dataclasses.dataclass(frozen=True)
class Parts:
    """A model without what is trained: the text decoder's weights go from phase to phase."""

    model: Qwen3VL
    """Its vision tower is frozen and on this process's devices; its decoder's weights are
    abstract."""
    graph: nnx.GraphDef
    """The text decoder without its weights."""
    tower: Any
    """The vision tower's state in the host's memory, in the type it is stored in."""


def first_model(run: Run, data: Data, mesh: Mesh) -> tuple[Qwen3VL, dict[str, Any]]:
    """The model that a run begins with, and what tells its beginning from another's by content:
    the vocabulary, the model's sizes, the published rows and weights."""
    dtype, path = jnp.dtype(run.model.dtype), run.model.path
    vocabulary = {"size": data.vocabulary.size, "digest": data.vocabulary.digest}
    if path:
        config = config_of(path, run.model.size)
        check_vocabulary(config, data.vocabulary, path)
    else:
        config = model_config(run, data.vocabulary)
    origin = {"vocabulary": vocabulary, "model": to_hf(config)}
    if data.digest:
        origin["data"] = data.digest
    if not path:
        return Qwen3VL(config, rngs=nnx.Rngs(run.seed), dtype=dtype), origin
    model = load(path, config, mesh=mesh, dtype=dtype)
    return model, origin | {"weights": fingerprint(path)}


def model_config(run: Run, vocabulary: Vocabulary) -> Qwen3VLConfig:
    """The model's sizes, with the ids that this vocabulary gives the special tokens."""
    ids = {
        f"{name}_token_id": vocabulary[f"<|{token}|>"]
        for name, token in (("image", "image_pad"), ("video", "video_pad"))
    }
    ids |= {
        f"{name}_token_id": vocabulary[f"<|{name}|>"] for name in ("vision_start", "vision_end")
    }
    sizes = tiny(vocabulary.size) if run.model.size == "tiny" else qwen3_vl(run.model.size)
    return dataclasses.replace(sizes, **ids)


def take_apart(model: Qwen3VL, mesh: Mesh) -> tuple[Parts, Any]:
    """The frozen parts of `model`, and the weights that are trained, laid over `mesh`."""
    graph, weights = nnx.split(model.text)
    weights = jax.device_put(weights, param_shardings(weights, mesh))
    tower = on_host(nnx.state(model.vision))
    on_devices = jax.tree.map(jnp.asarray, frozen(tower, model.vision.dtype))
    nnx.update(model.vision, on_devices)
    drop_weights(model)
    return Parts(model, graph, tower), weights


def drop_weights(model: Qwen3VL) -> None:
    """Leaves only shapes of the decoder's weights in `model`, so that they are held once."""
    nnx.update(model.text, jax.eval_shape(lambda: nnx.state(model.text)))
