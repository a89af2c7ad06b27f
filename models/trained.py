"""Which weights of a model are trained, and the tree that holds them.

The trained weights are one nnx state: those of the text decoder, with its own names, and, if a part
of the vision tower is trained, that part under `vision`. Optimizer, checkpoints, weight sync,
export and plans follow it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.typing import DTypeLike

from models import lora
from models.lora import NOTHING
from models.model import VisionLanguageModel
from models.text import TextDecoder
from models.trained_vision import TrainedVision, TrainVision, trained_state
from models.vision import encoding_weights

VISION = "vision"


class Skeleton(NamedTuple):
    """What a model has besides its trained weights."""

    graph: nnx.GraphDef
    """The decoder's structure."""
    frozen: Any = NOTHING
    """The decoder's weights that are not trained; empty if all are."""
    vision: TrainedVision | None = None
    """The trained part of the vision tower, without its weights; None: none is trained."""

    def decoder(self, weights: Any, frozen: Any = None) -> TextDecoder:
        """Return the decoder with these trained weights.

        Args:
            weights: The decoder's trained weights, without those of the tower.
            frozen: Stands for `self.frozen` where a program takes it as an argument.
        """
        return nnx.merge(self.graph, weights, self.frozen if frozen is None else frozen)


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
