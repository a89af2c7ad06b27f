"""The padded side of `benchmarks.rl_update --against FOLDER`: an RL step of `paravt_tiny` before
rows were packed.

It runs with the modules of FOLDER, a checkout of commit 210a70d, and needs none of this one. It
reads the lengths of the steps as a line of JSON, compiles, and prints a line. Then it computes a
step for every line with its number, and prints seconds and CPU seconds.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx


def module(name: str) -> Any:
    """A module of FOLDER. It has other names than the module of this checkout."""
    return importlib.import_module(name)


class Padded:
    """The learner of `paravt_tiny` with random weights."""

    def __init__(self):
        run = module("configs.paravt_tiny").paravt_tiny()
        vocabulary = module("train.world_data").world_vocabulary(run.protocol)
        self._config = module("train.phases.model").model_config(run, vocabulary)
        qwen3_vl, sharding = module("models.qwen3_vl.model").Qwen3VL, module("models.sharding")
        model = nnx.jit(lambda: qwen3_vl(self._config, rngs=nnx.Rngs(0)))()
        graph, weights = nnx.split(model.text)
        weights = jax.device_put(weights, sharding.param_shardings(weights, sharding.make_mesh()))
        learner = module("train.learn.rl").Learner
        self._learner = learner(graph, weights, self._config, run.rl, run.rl_shapes)
        self._state = self._learner.start

    def batch(self, groups: Sequence[Any]) -> Any:
        """A step whose groups have these lengths: (prompt, suffixes) of each."""
        abstract = module("paravt_extras.plan.abstract")._rl_batch(
            self._learner._shapes, self._config
        )
        batch = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract)
        mains = batch.sequences[0]
        per_group = len(mains.ids) // len(mains.prompt_ids)
        for number, (prompt, suffixes) in enumerate(groups):
            mains.prompt_segments[number, :prompt] = 1
            for row, length in enumerate(suffixes, number * per_group):
                mains.segments[row, :length] = 1
                batch.grpo.mask[row, 1:length] = True
        batch.grpo.valid[:] = True
        return module("train.learn.placement").place(batch, self._learner.mesh)

    def step(self, batch: Any) -> None:
        """The reference pass and the update, with its optimizer."""
        self._learner._reference_logprobs(batch.sequences)
        self._state, _ = self._learner.update(self._state, batch)
        jax.block_until_ready(self._state)


def main() -> None:
    side = Padded()
    batches = [side.batch(groups) for groups in json.loads(sys.stdin.readline())]
    side.step(batches[0])
    print("ready", flush=True)
    for line in sys.stdin:
        start = (time.perf_counter(), time.process_time())
        side.step(batches[int(line)])
        print(time.perf_counter() - start[0], time.process_time() - start[1], flush=True)


if __name__ == "__main__":
    main()
