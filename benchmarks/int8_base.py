"""Measures how far a base in int8 moves log-probs: `python -m benchmarks.int8_base --model FOLDER`.

The model is that of a finished tiny run. It scores the trained tokens of demonstrations of the
small world, with videos that it has not seen, once as it is and once with its matrices in int8.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile

import jax
import numpy as np
import tyro
from flax import nnx

from configs.paravt_tiny import paravt_tiny
from models.features import FrameFeatures
from models.lora import LoRASettings, add_adapters
from models.model import VisionLanguageModel
from models.sharding import make_mesh
from models.weights.hf import load
from paravt_jax.data import video
from paravt_jax.method.protocol import Protocol
from rollout.agent.episode import Environment
from train.learn.sft import SFTBatches, SFTStep
from train.learn.update import score_rollouts
from train.prepare import prepare
from train.settings import change

# Seeds of worlds and texts that no recipe uses.
SEED = 1009


@dataclasses.dataclass(frozen=True)
class Int8Base:
    """Measure how far a base in int8 moves log-probs."""

    model: str
    """Folder of a tiny model, such as runs/paravt_tiny/model."""
    rows: int = 4
    """Packed rows of demonstrations to score."""


def demonstrations(model: VisionLanguageModel, rows: int, folder: pathlib.Path) -> SFTStep:
    """Packed demonstrations about new videos."""
    fields = {"world.train_videos": 64, "world.seed": SEED, "text.seed": SEED, "sft.rows": rows}
    run = change(paravt_tiny(), "int8_base", fields)
    data = prepare(run, folder)
    if data.vocabulary.size != model.config.text.vocab_size:
        raise ValueError(
            f"--model: a vocabulary of {model.config.text.vocab_size} tokens, and this version "
            f"writes demonstrations with {data.vocabulary.size}; train paravt_tiny again"
        )
    assert run.sft is not None
    features = FrameFeatures(model.vision, model.config, run.frames, data.root, source=video)
    environment = Environment(Protocol(data.vocabulary, run.protocol), features)
    return next(SFTBatches(run.sft, data, None, SEED, environment, make_mesh()))


def gaps(model: VisionLanguageModel, step: SFTStep) -> np.ndarray:
    """Absolute differences of the log-probs of all trained tokens."""
    # A token is in one micro-batch, and 0 in all others.
    score = nnx.jit(
        lambda text: sum(
            score_rollouts(text, step.bank.cached, part, 1.0).logprobs for part in step.microbatches
        )
    )
    before = np.asarray(score(model.text))
    add_adapters(model.text, LoRASettings(int8_base=True), seed=0)
    after = np.asarray(score(model.text))
    return np.abs(after - before)[np.asarray(step.mask)]


def main() -> None:
    """Print the mean and the largest differences."""
    asked = tyro.cli(Int8Base)
    model = load(asked.model)
    with tempfile.TemporaryDirectory() as folder:
        step = demonstrations(model, asked.rows, pathlib.Path(folder))
        measured = gaps(model, step)
    print(
        f"{len(measured):,} tokens: mean gap {measured.mean():.5f}, "
        f"99th percentile {np.quantile(measured, 0.99):.5f}, largest {measured.max():.5f} "
        f"({jax.devices()[0].device_kind}, fp32)"
    )


if __name__ == "__main__":
    main()
