"""Times `paravt_2b_lora` on the device here: a few steps of a run, and the engine's sampling.

    python -m paravt_extras.scenes --out data/scenes
    python -m benchmarks.gpu --json FILE
    python -m benchmarks.gpu --json FILE --parts here transformers      # without the steps

The steps are those of `train.run` on the drawn scenes: seconds per step, and MFU of the update. The
first step of a phase compiles and is left out. Then this engine and transformers' `generate`, each
in a process of its own and in bfloat16, sample the same number of tokens: random prompts of text,
some samples for each, nothing stops early. transformers needs the extra `parity`, with a torch for
the device. Most of the time goes into compiling.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from benchmarks.model import alone
from models.devices import require_type, reserve_memory
from models.features import FrameFeatures, FrameSettings
from models.weights import hf
from models.weights.folder import local_folder
from paravt_jax.data import video
from paravt_jax.data.any_path import require_local
from rollout.engine.engine import Engine
from rollout.engine.requests import Request, Sampling, ask, run
from rollout.engine.settings import EngineSizes, round_up
from train.durable.metrics import PHASE_TITLES, read_metrics, step_seconds

_PAGE = 64
PARTS = ("steps", "here", "transformers")


@dataclasses.dataclass(frozen=True)
class Work:
    """What is sampled. Lengths are in tokens."""

    prompts: int = 4
    samples: int = 8
    prompt: int = 1024
    new: int = 256

    @property
    def tokens(self) -> int:
        return self.prompts * self.samples * self.new

    @property
    def sizes(self) -> EngineSizes:
        """An engine in which all samples run at once."""
        own = round_up(self.new + 1, _PAGE) + _PAGE
        slots = self.prompts * self.samples
        return EngineSizes(
            longest=self.prompt + own,
            slots=slots,
            rows_per_prefix=self.samples,
            page=_PAGE,
            pages=(self.prompts * self.prompt + slots * own) // _PAGE,
            prefill_tokens=self.prompt,
            few_rows=self.samples,
            steps=32,
        )

    def ids(self, vocabulary: int) -> Int[np.ndarray, "p t"]:
        """Return prompts of random tokens among the first ones, which are text."""
        rng = np.random.default_rng(0)
        return rng.integers(0, min(vocabulary, 100_000), (self.prompts, self.prompt))


def here(folder: str, work: Work) -> dict[str, Any]:
    """Return the tokens per second of this engine."""
    reserve_memory()
    require_type("dtype", "bfloat16")
    model = hf.load(folder, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    features = FrameFeatures(
        model.vision, model.config, FrameSettings(), pathlib.Path(), source=video
    )
    engine = Engine(model, features, work.sizes)
    engine.warm_up()
    sampling = Sampling(max_new_tokens=work.new, temperature=0.7)
    ids = work.ids(model.config.text.vocab_size)

    async def sample(prompt: int, first: int) -> int:
        seeds = range(first, first + work.samples)
        samples = await ask(*[Request(ids[prompt], (), sampling, seed) for seed in seeds])
        return sum(len(sample.ids) for sample in samples)

    def play(first: int) -> float:
        begin = time.perf_counter()
        counts = run(engine, [sample(prompt, first) for prompt in range(work.prompts)])
        assert sum(counts) == work.tokens
        return time.perf_counter() - begin

    play(0)
    engine.forget()
    seconds = play(work.samples)
    device = jax.local_devices()[0].device_kind
    return {"device": device, "tokens_per_second": work.tokens / seconds}


def transformers(folder: str, work: Work) -> dict[str, Any]:
    """Return the tokens per second of transformers' `generate`."""
    import torch  # pyright: ignore[reportMissingImports]  (the extra parity)
    import transformers as library

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = library.Qwen3VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model.to(device)
    ids = torch.tensor(work.ids(model.config.text_config.vocab_size), device=device)

    def play() -> float:
        begin = time.perf_counter()
        found = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=0.7,
            num_return_sequences=work.samples,
            min_new_tokens=work.new,
            max_new_tokens=work.new,
        )
        assert found.shape == (work.prompts * work.samples, work.prompt + work.new)
        found.cpu()  # waits for the device
        return time.perf_counter() - begin

    play()
    return {"device": device, "tokens_per_second": work.tokens / play()}


def steps(model: str, arguments: Sequence[str]) -> dict[str, dict[str, float]]:
    """Train a few steps, and return the figures of each phase."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--config=paravt_2b_lora", "--model.path", model, "--run-dir", f"{folder}/run"]
        words += ["--data.folder", f"{folder}/set", "--sft.steps", "4", "--rl.steps", "4"]
        words += ["--evaluation.questions", "1", "--evaluation.frames", "4", *arguments]
        subprocess.run([sys.executable, "-m", "train.run", *words], check=True)
        return figures(read_metrics(f"{folder}/run/metrics.jsonl"))


def figures(lines: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return medians of each phase's steps without the first, which compiles: seconds, and MFU."""
    by_phase = {}
    for phase in PHASE_TITLES:
        later = [line for line in lines if line["phase"] == phase][1:]
        if later:
            by_phase[phase] = {
                "seconds_per_step": statistics.median(map(step_seconds, later)),
                "mfu": statistics.median(line.get("speed/mfu", math.nan) for line in later),
            }
    return by_phase


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Times paravt_2b_lora on the device here.")
    parser.add_argument("--model", default="Qwen/Qwen3-VL-2B-Instruct", help="folder or hub id")
    parser.add_argument("--json", type=pathlib.Path, help="file for all figures")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is timed")
    parser.add_argument("arguments", nargs="*", help="more arguments of train.run, after --")
    asked = parser.parse_args(argv)
    if asked.json is not None:
        require_local("--json", str(asked.json))
    folder = str(local_folder(asked.model))
    work = Work()
    found: dict[str, Any] = {}
    if "steps" in asked.parts:
        found["steps"] = steps(asked.model, asked.arguments)
    if "here" in asked.parts:
        found["here"] = alone(here, folder, work)
    if "transformers" in asked.parts:
        found["transformers"] = alone(transformers, folder, work)
    for phase, row in found.get("steps", {}).items():
        seconds, mfu = row["seconds_per_step"], 100 * row["mfu"]
        print(f"{PHASE_TITLES[phase]}: {seconds:.2f} s per step, MFU {mfu:.1f} %")
    for side in ("here", "transformers"):
        if side in found:
            rate = found[side]["tokens_per_second"]
            print(f"{side}: {rate:,.0f} tokens per second on {found[side]['device']}")
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
