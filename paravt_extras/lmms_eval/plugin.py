"""How lmms-eval finds the model `paravt_jax`: the entry point of the group `lmms_eval.models`.

Runs in lmms-eval's environment and imports nothing of this project's.
"""

from __future__ import annotations

from typing import Any


def manifest() -> Any:
    """The `ModelManifest` of `paravt_jax`."""
    from lmms_eval.models.registry_v2 import (  # pyright: ignore[reportMissingImports]
        ModelManifest,
    )

    return ModelManifest(
        model_id="paravt_jax", chat_class_path="paravt_extras.lmms_eval.model.ParaVT"
    )
