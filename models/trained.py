"""Which weights of a model are trained, and the tree that holds them.

The trained weights are one nnx state: those of the text decoder, with its own names, and, if a part
of the vision tower is trained, that part under `vision`. Optimizer, checkpoints, weight sync,
export and plans follow it.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from models import lora
from models.model import VisionLanguageModel
from models.trained_vision import TrainVision, trained_state
from models.vision import encoding_weights

VISION = "vision"


def split(model: VisionLanguageModel, train_vision: TrainVision = "none") -> tuple[Any, Any, Any]:
    """Split a model into the decoder's structure, the trained weights and the decoder's other ones.

    This is the only place that decides what is trained: of the decoder, adapters if there are any
    and otherwise all weights (`models.lora.split`); and what `train_vision` names.
    """
    graph, text, rest = lora.split(model.text)
    return graph, together(text, trained_state(model.vision, train_vision)), rest


def apart(weights: Any) -> tuple[Any, Any]:
    """The trained weights of the decoder, and those of the tower; None if it has none."""
    if VISION not in weights:
        return weights, None
    text = {name: part for name, part in weights.raw_mapping.items() if name != VISION}
    return nnx.State(text), weights[VISION]


def together(text: Any, vision: Any) -> Any:
    """The opposite of `apart`."""
    return text if vision is None else nnx.merge_state(text, {VISION: vision})


def in_activations(weights: Any, dtype: DTypeLike) -> Any:
    """Trained weights as a model that computes in `dtype` needs them to sample."""
    text, vision = apart(weights)
    text = jax.tree.map(lambda x: x.astype(dtype), text)
    return together(text, None if vision is None else encoding_weights(vision, dtype))
