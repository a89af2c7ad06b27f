"""Runs two steps of SFT, and two of PARA-GRPO after them, on files in the published format.

The command is `train.run` with two more recipes, `published_sft` and `published_rl`, and the real
tokenizer. Tests write the files that the recipes read (`write_files`).

    python -m benchmarks.published_run --config=published_sft --model.path FOLDER ...
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from flax import nnx

import train.run
from configs import RECIPES
from models.features import FrameSettings
from models.model import VisionLanguageModel
from models.qwen3_vl.sizes import tiny
from models.weights.hf import save
from paravt_jax.method.grpo.settings import GRPOSettings
from paravt_jax.method.protocol import ProtocolSettings
from paravt_jax.method.rewards import RewardSettings
from rollout.engine.settings import EngineSettings
from tests.paravt_jax.published_files import (
    CLIPS,
    answered,
    called,
    lay_out_media,
    rl_row,
    write_rl,
    write_sft,
)
from tests.rollout.evaluation import published
from train.learn.optimizer import OptimizerSettings
from train.learn.rl_settings import RLSettings
from train.learn.sft import SFTSettings
from train.settings import DataSettings, EvaluationSettings, ModelSettings, Run

ADAM = OptimizerSettings(learning_rate=1e-3)


def published_sft() -> Run:
    """Three steps of SFT on packed rows, with one token per frame.

    Command: python -m benchmarks.published_run --config=published_sft
    """
    return Run(
        name="published_sft",
        model=ModelSettings(path="base", size="tiny"),
        data=DataSettings("annotations", "media", "set", frames=4),
        evaluation=EvaluationSettings(questions=0),
        frames=FrameSettings(min_pixels=1024, max_pixels=1024, batch=8, admission="counted"),
        protocol=ProtocolSettings(
            max_tool_turns=2,
            turn_tokens=48,
            summary_tokens=16,
            trajectory_tokens=144,
            text_tokens=396,
        ),
        engine=EngineSettings(slots=4, cache_tokens=4096),
        sft=SFTSettings(steps=3, rows=1, optimizer=ADAM, row_tokens=512),
    )


def published_rl() -> Run:
    """The same cold start, then two steps of PARA-GRPO with an evaluation before and after.

    Command: python -m benchmarks.published_run --config=published_rl
    """
    run = published_sft()
    rl = RLSettings(
        steps=2,
        prompts=2,
        optimizer=ADAM,
        grpo=GRPOSettings(group_size=2, anchor="credit", reward_clip=None),
        rewards=RewardSettings(format_cap=False),
        frame_budgets=(2, 4),
        save_every=1,
    )
    evaluation = EvaluationSettings(
        questions=2, frames=(4,), dispatch=("parallel",), temperatures=(0.7,)
    )
    return dataclasses.replace(run, name="published_rl", rl=rl, evaluation=evaluation)


def write_files(folder: pathlib.Path, assets: pathlib.Path) -> None:
    """Write the files that the recipes read.

    Args:
        folder: Where to write `annotations` and `media` in the published layout, `base` (a small
            Qwen3-VL with the real tokenizer), and `videos` (a sample of Video-MME).
        assets: Folder of shared clips and of the tokenizer.
    """
    clips = {f"longvt_source/selftrace_0/{n}.mp4": clip for n, clip in enumerate(CLIPS[1:])}
    paths = list(clips)
    lay_out_media(folder / "media", assets, clips)
    _write_annotations(folder / "annotations", paths)
    names = ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json")
    files = [assets / "qwen3_vl" / name for name in names]
    model = nnx.jit(lambda: VisionLanguageModel(tiny(151_936), rngs=nnx.Rngs(0)))()
    save(model, folder / "base", files=files)
    lay_out_media(folder / "videos" / "data", assets, {"w0.mp4": CLIPS[1], "w1.mp4": CLIPS[2]})
    rows = [published.videomme("1-1", "w0", "A"), published.videomme("2-1", "w1", "C")]
    published.write_split("videomme", folder / "videos", rows)


def _write_annotations(folder: pathlib.Path, videos: Sequence[str]) -> None:
    """Write nine questions for RL and nine conversations for SFT, every second one with a call."""
    questions: list[Any] = []
    conversations: list[Any] = []
    for n in range(9):
        video = videos[n % 3]
        text = f"<video>What turns in part {n}?\nA. a car\nB. a boat"
        questions.append(rl_row(video, text, "AB"[n % 2]))
        if n % 2:
            conversations.append(called(video, [(0, n + 1)]))
        else:
            conversations.append(answered(video, f"Part {n}?"))
    write_rl(folder, questions)
    write_sft(folder, conversations, "paravt_sft_selftrace_15k3.parquet")


RECIPES.setdefault("published_sft", published_sft)
RECIPES.setdefault("published_rl", published_rl)

if __name__ == "__main__":
    raise SystemExit(train.run.main())
