"""The model that a run begins with, and its split into trained and frozen parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.config import ModelConfig
from models.features import tower_mesh
from models.fingerprint import fingerprint
from models.lora import LoRASettings, add_adapters, cast
from models.model import VisionLanguageModel, abstract_model
from models.peft_folder import base_fingerprint
from models.sharding import param_shardings
from models.trained import Skeleton, TrainedVision, TrainVision, split
from models.vision import encoding_weights
from models.weights.hf import load
from models.weights.hf_config import to_hf
from paravt_jax.method.tokenizer import Vocabulary
from train import published_model
from train.data import Data
from train.published_model import check_vocabulary, config_of, on_host
from train.settings import Run


@dataclasses.dataclass(frozen=True)
class Parts:
    """A model without its trained weights, which are passed from phase to phase."""

    model: VisionLanguageModel
    """The vision tower is on this process's devices. The decoder has shapes only."""
    skeleton: Skeleton
    """The decoder's structure, its frozen weights on the mesh, and what is trained of the tower."""
    tower: Any
    """The vision tower as it was before SFT and RL, in the host's memory.

    Its type is that of checkpoints."""

    @property
    def frozen(self) -> Any:
        """The decoder's weights that are not trained, on the mesh; empty if all are."""
        return self.skeleton.frozen

    @property
    def vision(self) -> TrainedVision | None:
        """The part of the tower that is trained; None: none is."""
        return self.skeleton.vision

    @property
    def base(self) -> dict[str, str]:
        """The fingerprint of the frozen weights; empty if the whole decoder is trained.

        It is part of a run's starting point: adapters make sense with their own base only, and
        mergers with the blocks below them.
        """
        if not jax.tree.leaves(self.frozen):
            return {}
        states = [self.frozen]
        if self.vision is not None:
            trains = self.vision.trains
            blocks = {name: x for name, x in self.tower.raw_mapping.items() if not trains(name)}
            states.append(nnx.State(blocks))
        return {"base": f"{fingerprint(*states):08x}"}

    def tower_with(self, vision: Any) -> nnx.State:
        """The tower with some weights of its trained part, rounded to the type of the others."""
        if vision is None:
            return self.tower
        dtype = jax.tree.leaves(self.tower)[0].dtype
        return nnx.merge_state(self.tower, cast(vision, dtype))

    def trained_of(self, tower: Any) -> nnx.State | None:
        """The trained part of a state of the tower, the inverse of `tower_with`."""
        if self.vision is None:
            return None
        trains = self.vision.trains
        return nnx.State({name: x for name, x in tower.raw_mapping.items() if trains(name)})


def first_model(run: Run, data: Data, mesh: Mesh) -> tuple[VisionLanguageModel, dict[str, Any]]:
    """Load or initialise the model that a run begins with.

    Returns:
        The model, and the run's starting point by content: vocabulary, sizes of the model, and
        digests of published data and weights. Checkpoints from another starting point are refused.
    """
    dtype = jnp.dtype(run.model.dtype)
    path = run.model.path
    vocabulary = {"size": data.vocabulary.size, "digest": data.vocabulary.digest}
    if path:
        config = config_of(path, run.model)
        check_vocabulary(config, data.vocabulary, path)
    else:
        config = model_config(run, data.vocabulary)
    origin = {"vocabulary": vocabulary, "model": to_hf(config)}
    if data.digest:
        origin["data"] = data.digest
    if not path:
        return VisionLanguageModel(config, rngs=nnx.Rngs(run.seed), dtype=dtype), origin
    model = load(path, config, mesh=mesh, dtype=dtype, param_dtype=run.param_dtype)
    origin["weights"] = published_model.fingerprint(path)
    if run.lora is not None:
        origin["base_fingerprint"] = base_fingerprint(model)
    return model, origin


def require_targets(run: Run) -> None:
    """Raise ValueError unless the model has the matrices that `run.lora` adapts."""
    if run.lora is not None and run.lora.targets:
        abstract_model(run.model.config(), lora=run.lora)


def model_config(run: Run, vocabulary: Vocabulary) -> ModelConfig:
    """Sizes of a model with random weights, and the special tokens' ids in this vocabulary."""
    return dataclasses.replace(
        run.model.config(vocabulary.size),
        image_token_id=vocabulary["<|image_pad|>"],
        video_token_id=vocabulary["<|video_pad|>"],
        vision_start_token_id=vocabulary["<|vision_start|>"],
        vision_end_token_id=vocabulary["<|vision_end|>"],
    )


def take_apart(
    model: VisionLanguageModel,
    mesh: Mesh,
    lora: LoRASettings | None = None,
    seed: int = 0,
    train_vision: TrainVision = "none",
    frame_tokens: int = 0,
) -> tuple[Parts, Any]:
    """Split `model` into frozen parts and trained weights, which are sharded over `mesh`.

    Args:
        model: Loses the decoder's weights and keeps their shapes.
        mesh: The mesh of training.
        lora: Adapters to add and to train; None: the whole decoder is trained.
        seed: Draws the adapters.
        train_vision: The part of the vision tower that is trained.
        frame_tokens: Visual tokens of the largest frame.
    """
    if lora is not None:
        add_adapters(model.text, lora, seed)
    graph, weights, rest = split(model, train_vision)
    weights = jax.device_put(weights, param_shardings(weights, mesh))
    # In the type of the activations, to which they would be rounded in every product.
    rest = cast(rest, model.text.dtype)
    rest = jax.device_put(rest, param_shardings(rest, mesh))
    # Checkpoints store the tower as it was loaded, so keep it on the host. Each device of this
    # process gets a copy in the type of the activations: they share the frames.
    tower = on_host(nnx.state(model.vision))
    everywhere = NamedSharding(tower_mesh(mesh.local_devices), PartitionSpec())
    on_devices = jax.device_put(encoding_weights(tower, model.vision.dtype), everywhere)
    nnx.update(model.vision, on_devices)
    drop_weights(model)
    vision = TrainedVision.of(model.vision, train_vision, frame_tokens)
    return Parts(model, Skeleton(graph, rest, vision), tower), weights


def drop_weights(model: VisionLanguageModel) -> None:
    """Leave only shapes in the decoder of `model`, so that its weights exist only once."""
    nnx.update(model.text, jax.eval_shape(lambda: nnx.state(model.text)))
