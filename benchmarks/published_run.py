"""Two steps of SFT and two of PARA-GRPO on files in the published schema, with the real tokenizer.

As a program it is `train.run` with two more recipes, `published_sft` and `published_rl`, and with `prepare` before them `train.prepare`:
`python -m benchmarks.published_run [prepare] --config=published_sft --model.path FOLDER ...`; `write` makes what they read.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import Any

from flax import nnx

import train.prepare
import train.run
from configs import RECIPES
from models.features import FrameSettings
from models.qwen3_vl.config import tiny
from models.qwen3_vl.hf import save
from models.qwen3_vl.model import Qwen3VL
from paravt_jax.method.grpo import GRPOSettings
from paravt_jax.method.protocol import ProtocolSettings
from paravt_jax.method.rewards import RewardSettings
from rollout.engine.settings import EngineSettings
from rollout.evaluation.play import EvaluationSettings
from tests.paravt_jax.benchmarks import published
from tests.paravt_jax.published_files import (
    CLIPS,
    answered,
    called,
    lay_out_media,
    rl_row,
    write_rl,
    write_sft,
)
from train.learn.optimizer import OptimizerSettings
from train.learn.rl_settings import RLSettings
from train.learn.sft import SFTSettings
from train.published_data import DataSettings
from train.settings import LogSettings, ModelSettings, Run

ADAM = OptimizerSettings(learning_rate=1e-3)


def published_sft() -> Run:
    """Two steps on packed rows, one token a frame.

    Command: python -m benchmarks.published_run --config=published_sft
    """
    return Run(
        name="published_sft",
        model=ModelSettings(path="base", size="tiny"),
        data=DataSettings("annotations", "media", "set", frames=4, heldout=0, workers=1),
        frames=FrameSettings(min_pixels=1024, max_pixels=1024, batch=8),
        protocol=ProtocolSettings(
            max_tool_turns=2,
            turn_tokens=48,
            summary_tokens=16,
            trajectory_tokens=144,
            text_tokens=396,
        ),
        engine=EngineSettings(slots=4, cache_tokens=4096),
        sft=SFTSettings(
            steps=2, rows=1, optimizer=ADAM, row_tokens=512, save_every=1, logprob_chunk=256
        ),
        log=LogSettings(tensorboard=False, episodes=2),
    )


def published_rl() -> Run:
    """Two steps of PARA-GRPO, and an evaluation before and after.

    Command: python -m benchmarks.published_run --config=published_rl
    """
    run = published_sft()
    assert run.data is not None
    rl = RLSettings(
        steps=2,
        prompts=2,
        optimizer=ADAM,
        grpo=GRPOSettings(group_size=2, anchor="credit", reward_clip=None),
        rewards=RewardSettings(format_cap=False),
        frame_budgets=(2, 4),
        save_every=1,
        logprob_chunk=64,
    )
    evaluation = EvaluationSettings(
        questions=2, samples=1, frames=(4,), dispatch=("parallel",), temperatures=(0.7,)
    )
    data = dataclasses.replace(run.data, heldout=1)
    return dataclasses.replace(
        run, name="published_rl", data=data, sft=None, rl=rl, evaluation=evaluation
    )


def write_files(folder: pathlib.Path, assets: pathlib.Path) -> None:
    """In `folder`: `annotations` and `media` as they are published, with clips of the assets; `base`, a small Qwen3-VL with the real
    tokenizer; `split` and `videos`, a sample of Video-MME."""
    names = {f"longvt_source/selftrace_0/{n}.mp4": clip for n, clip in enumerate(CLIPS[1:])}
    paths = list(names)
    lay_out_media(folder / "media", assets, names)
    asked = [f"<video>What turns in part {n}?\nA. a car\nB. a boat" for n in range(9)]
    write_rl(
        folder / "annotations",
        [rl_row(paths[n % 3], text, "AB"[n % 2]) for n, text in enumerate(asked)],
    )
    rows: list[Any] = [
        called(paths[n % 3], [(0, n + 1)]) if n % 2 else answered(paths[n % 3], f"Part {n}?")
        for n in range(9)
    ]
    write_sft(folder / "annotations", rows, "paravt_sft_selftrace_15k3.parquet")
    files = [
        assets / "qwen3_vl" / name
        for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json")
    ]
    save(nnx.jit(lambda: Qwen3VL(tiny(151_936), rngs=nnx.Rngs(0)))(), folder / "base", files=files)
    lay_out_media(folder / "videos" / "data", assets, {"w0.mp4": CLIPS[1], "w1.mp4": CLIPS[2]})
    published.write_split(
        "videomme",
        folder / "split",
        [published.videomme("1-1", "w0", "A"), published.videomme("2-1", "w1", "C")],
    )


RECIPES.setdefault("published_sft", published_sft)
RECIPES.setdefault("published_rl", published_rl)

if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write_files(pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]))
    elif sys.argv[1:2] == ["prepare"]:
        raise SystemExit(train.prepare.main(sys.argv[2:]))
    else:
        raise SystemExit(train.run.main())
