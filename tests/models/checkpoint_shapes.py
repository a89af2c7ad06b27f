"""Names and shapes of a checkpoint's tensors."""

from __future__ import annotations

from flax import nnx

from models.config import ModelConfig
from models.model import abstract_model
from models.weights.hf_layout import flat_parameters, tensor_layouts, tensor_places


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return them as in transformers."""
    parameters = flat_parameters(nnx.state(abstract_model(config), nnx.Param))
    places = tensor_places(tensor_layouts(config), parameters)
    return {name: place.shape for name, place in places.items()}
