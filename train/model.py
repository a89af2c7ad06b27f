"""The model that a run begins with, and its split into trained and frozen parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.config import ModelConfig
from models.features.encoder import tower_mesh
from models.fingerprint import fingerprint
from models.lora import add_adapters, cast
from models.model import VisionLanguageModel
from models.peft_folder import ADAPTER_CONFIG, base_fingerprint
from models.sharding import param_shardings
from models.trained import Skeleton, TrainedVision, merge_vision, split, split_vision
from models.vision import encoding_weights
from models.weights.folder import CONFIG, local_folder, require_readable, weights_hash
from models.weights.hf import load
from models.weights.hf_config import from_hf, to_hf
from paravt_jax.data.stored import require_same
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.processes import hosts
from train.data import Data
from train.learn.update import TrainState
from train.settings import ModelSettings, Run


@dataclasses.dataclass(frozen=True)
class Parts:
    """A model without its trained weights, which are passed from phase to phase.

    It is the form in which a checkpoint stores the state of SFT or RL: trained weights and the
    optimizer. If the whole decoder is trained, the whole tower is stored beside it: together they
    are the model. Adapters belong to a base that is elsewhere, and whose fingerprint is part of the
    run's origin. Beside them are the weights of the tower that are trained, if any.
    """

    model: VisionLanguageModel
    """The vision tower is on this process's devices. The decoder has shapes only."""
    origin: dict[str, Any]
    """What the run starts from, as JSON."""
    skeleton: Skeleton
    """The decoder's structure, its frozen weights on the mesh, and what is trained of the tower."""
    tower: Any
    """The vision tower as it was before SFT and RL, in the host's memory.

    Its type is that of checkpoints."""

    def tower_with(self, vision: Any) -> nnx.State:
        """Return the tower with some weights of its trained part, rounded to the type of the
        others."""
        if vision is None:
            return self.tower
        dtype = jax.tree.leaves(self.tower)[0].dtype
        return nnx.merge_state(self.tower, cast(vision, dtype))

    def as_saved(self, state: TrainState) -> dict[str, Any]:
        """Return the arrays that a checkpoint stores."""
        text, vision = split_vision(state.weights)
        saved = {"text": text, "optimizer": state.optimizer, "step": state.step}
        if not jax.tree.leaves(self.skeleton.frozen):
            return {"vision": self.tower_with(vision), **saved}
        return saved if vision is None else {"vision": vision, **saved}

    def as_trained(self, saved: dict[str, Any]) -> TrainState:
        """Return the state of which a checkpoint stores the arrays `saved`."""
        vision = None
        if self.skeleton.vision is not None:
            # Beside a trained decoder, the whole tower is stored.
            tower, trains = saved["vision"].raw_mapping, self.skeleton.vision.trains
            vision = nnx.State({name: x for name, x in tower.items() if trains(name)})
        weights = merge_vision(saved["text"], vision)
        return TrainState(weights, saved["optimizer"], saved["step"])


def first_model(run: Run, data: Data, mesh: Mesh) -> tuple[VisionLanguageModel, dict[str, Any]]:
    """Load or initialise the model that a run begins with.

    Returns:
        The model, and what the run starts from, as JSON: vocabulary, sizes of the model, type of
        the trained weights (the sampler's may differ), and digests of published data and weights.
    """
    dtype = jnp.dtype(run.model.dtype)
    path = run.model.path
    origin: dict[str, Any] = {
        "vocabulary": {"size": data.vocabulary.size, "digest": data.vocabulary.digest}
    }
    if data.digest:
        origin["data"] = data.digest
    if path:
        config = config_of(path, run.model)
        check_vocabulary(config, data.vocabulary, path)
        model = load(path, config, mesh=mesh, dtype=dtype, param_dtype=run.param_dtype)
        origin["weights"] = weights_hash_of(path)
        if run.lora is not None:
            origin["base_fingerprint"] = base_fingerprint(model)
    else:
        config = model_config(run, data.vocabulary)
        model = VisionLanguageModel(config, rngs=nnx.Rngs(run.seed), dtype=dtype)
    origin["model"] = to_hf(config)
    return model, origin | {"param_dtype": model.text.embedding[...].dtype.name}


def require_model(run: Run) -> None:
    """Check the model and its files, before any work on the data.

    Raises:
        FileNotFoundError: If there are no weights.
        ValueError: If the files are damaged or those of another model.
    """
    if run.model.path:
        config_of(run.model.path, run.model)
        require_readable(local_folder(run.model.path))


def config_of(path: str, model: ModelSettings) -> ModelConfig:
    """Read the configuration of a model.

    Args:
        path: Folder or Hugging Face id.
        model: The recipe's `model`.

    Raises:
        ValueError: If the folder holds adapters, or if the configuration is not that of `model`;
            lists the fields that differ.
    """
    folder = local_folder(path, weights=False)
    if (folder / ADAPTER_CONFIG).exists() and not (folder / CONFIG).exists():
        raise ValueError(
            f"model.path: {path} holds adapters only, and a run begins with whole weights; give "
            "the folder model of their run, where they are merged (elsewhere, merge_and_unload of "
            "PEFT merges them), or their base"
        )
    config = from_hf(folder / CONFIG)
    if config.family != model.family:
        raise ValueError(
            f"model.path: {path} is of the family {config.family}, and model.family is "
            f"{model.family}; change model.family, and model.size with it"
        )
    require_same(
        f"model.path: {path} is not of model.size {model.size}",
        _sizes(config),
        # A tiny model has the vocabulary of its world.
        _sizes(model.config(config.text.vocab_size)),
        "Change model.size or model.path so that they match.",
    )
    return config


def _sizes(config: ModelConfig) -> dict[str, Any]:
    return {"text": dataclasses.asdict(config.text), "vision": dataclasses.asdict(config.vision)}


def check_vocabulary(config: ModelConfig, vocabulary: Vocabulary, path: str) -> None:
    """Check that a tokenizer belongs to a model.

    Args:
        config: The model's configuration.
        vocabulary: The tokenizer's vocabulary.
        path: The run's `model.path`, for the error message.

    Raises:
        ValueError: If the vocabulary is larger than the model's embedding, or if the two have
            different ids for the special tokens of frames.
    """
    if vocabulary.size > config.text.vocab_size:
        raise ValueError(
            f"model.path: {path} has a tokenizer with {vocabulary.size} tokens, but its model has "
            f"only {config.text.vocab_size}; "
            "tokenizer.json belongs to another model: download it again"
        )
    for field, known in vocabulary.visual_ids.items():
        own = getattr(config, field)
        if known != own:
            raise ValueError(
                f"model.path: {path}, config.{field} = {own}: {known} in the tokenizer; "
                "use one folder"
            )


def weights_hash_of(path: str) -> str:
    """Hash the contents of the weights, so that another checkpoint at the same path is noticed.

    Raises:
        ValueError: If the processes of a run have different copies.
    """
    folder = local_folder(path)
    # Every process may have its own copy. Hashing a large model takes minutes, so only the first
    # process does it; the other copies are compared by file sizes and configuration.
    hosts.require_same(
        f"model.path: {path}, its files",
        {file.name: file.stat().st_size for file in sorted(folder.glob("*.safetensors"))},
    )
    hosts.require_same(f"model.path: {path}, its {CONFIG}", (folder / CONFIG).read_text())
    return hosts.from_first(lambda: weights_hash(folder))


def model_config(run: Run, vocabulary: Vocabulary) -> ModelConfig:
    """Return the sizes of a model with random weights, and the special tokens' ids in this
    vocabulary."""
    return dataclasses.replace(run.model.config(vocabulary.size), **vocabulary.visual_ids)


def take_apart(
    model: VisionLanguageModel, run: Run, mesh: Mesh, origin: dict[str, Any]
) -> tuple[Parts, Any]:
    """Split `model` into frozen parts and trained weights, which are sharded over `mesh`.

    Args:
        model: Loses the decoder's weights and keeps their shapes.
        run: Says what is trained: adapters (drawn by its seed), and a part of the vision tower.
        mesh: The mesh of training.
        origin: What the run starts from.
    """
    if run.lora is not None:
        add_adapters(model.text, run.lora, run.seed)
    graph, weights, rest = split(model, run.train_vision)
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
    vision = TrainedVision.of(model.vision, run.train_vision, run.largest_frame)
    origin = origin | _base(rest, tower, vision)
    return Parts(model, origin, Skeleton(graph, rest, vision), tower), weights


def _base(frozen: Any, tower: nnx.State, vision: TrainedVision | None) -> dict[str, str]:
    """Return the fingerprint of the frozen weights; empty if the whole decoder is trained.

    Adapters make sense with their own base only, and mergers with the blocks below them.
    """
    if not jax.tree.leaves(frozen):
        return {}
    states = [frozen]
    if vision is not None:
        blocks = {name: x for name, x in tower.raw_mapping.items() if not vision.trains(name)}
        states.append(nnx.State(blocks))
    return {"base": f"{fingerprint(*states):08x}"}


def drop_weights(model: VisionLanguageModel) -> None:
    """Leave only shapes in the decoder of `model`, so that its weights exist only once."""
    nnx.update(model.text, jax.eval_shape(lambda: nnx.state(model.text)))


def on_host(weights: Any) -> Any:
    """Copy a tree of arrays from the mesh to NumPy arrays, in every process."""

    def copy(array: jax.Array) -> np.ndarray:
        if array.is_fully_replicated:
            return np.asarray(array)
        # A process only sees its own shards; gathering one array at a time bounds the memory.
        return multihost_utils.process_allgather(array, tiled=True)

    return jax.tree.map(copy, weights)
