"""Trees of arrays are checked where this project builds them, and not where JAX does."""

from __future__ import annotations

import dataclasses
import importlib

import jax
import numpy as np
import pytest

from models.attention import RowLayout
from tests.typechecker import checked_trees


def test_the_annotations_of_six_trees_are_checked_where_they_are_built():
    for module in ("rl_batch", "sft", "update"):
        importlib.import_module(f"train.learn.{module}")
    names = {"GRPOBatch", "Microbatch", "RLBatch", "RowLayout", "TrainState"}
    assert checked_trees == names
    segments = np.ones((2, 3), np.int32)
    layout = RowLayout(segments, starts=segments)
    with pytest.raises(TypeError, match=r"RowLayout.starts: \(2, 4\)"):
        dataclasses.replace(layout, starts=np.ones((2, 4), np.int32))
    with pytest.raises(TypeError, match="RowLayout.segments"):
        RowLayout(segments.astype(np.float32))
    assert jax.tree.map(np.shape, layout).segments == (2, 3)
