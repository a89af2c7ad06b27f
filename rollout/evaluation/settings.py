"""Settings of `python -m rollout.evaluate`: the model, the questions, the episodes, the hardware.

`BenchmarkSettings.identity` selects those that affect answers. Meaningless combinations raise an
error before anything is loaded.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Literal

import tyro

from models.features import FrameSettings
from paravt_jax.data.any_path import require_local
from paravt_jax.method.judge import JudgeSettings
from paravt_jax.method.protocol import ProtocolSettings
from paravt_jax.method.rewards import RewardSettings
from rollout.agent.episode import Dispatch, EpisodeSettings
from rollout.evaluation.benchmarks import BENCHMARKS

OWN = "own questions"
"""Replaces the benchmark's name in results if a user's own questions are played."""

SUBTITLE_TOKENS = 8192
"""Token limit of subtitles in the prompt. Longer subtitles are thinned evenly."""

# Fields that may change between two starts on the same folder. Weights and questions are compared
# by their hashes instead (`rollout.evaluation.run`).
_NOT_IDENTITY = ("model", "data", "out", "limit", "episodes", "tensor")


@dataclasses.dataclass(frozen=True)
class BenchmarkSettings:
    """One evaluation: a model on a split, or on your own questions."""

    model: str
    """Folder or hub id of a model."""
    benchmark: str = ""
    """Name of the split to play; empty: your own questions."""
    data: str = ""
    """Folder of the split, or file of questions (docs/evaluation.md), with the videos below it."""
    out: str = ""
    """Folder for the results; an existing one is continued. Empty: evaluations/MODEL/BENCHMARK."""
    limit: int | None = None
    """Play only this many questions; the same command without a limit plays the rest."""
    k: Annotated[int, tyro.conf.arg(name="frames")] = 64
    """Overview budget K, in frames; 0 is a blind run, without frames and tools."""
    pixels: tuple[int, int] = (FrameSettings.max_pixels, FrameSettings.max_pixels)
    """Larger frames are shrunk to these areas, in pixels: overviews, crops."""
    dispatch: Dispatch | None = None
    """How tool calls are executed; by default parallel, or none if no tool is offered."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    seed: int = 0
    """Seed of sampling above temperature 0."""
    judge: tuple[str, str] | None = None
    """Address and model of a server that scores open-ended answers; by default, token F1 does."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations; bfloat16 for published checkpoints."""
    tensor: int = 1
    """Devices per replica, which share its weights. The devices of all hosts play replicas."""
    episodes: int = 4
    """Episodes that each replica plays side by side."""
    protocol: ProtocolSettings = ProtocolSettings()

    def __post_init__(self):
        minimum = {"limit": 1, "episodes": 1, "tensor": 1, "k": 0, "temperature": 0, "seed": 0}
        for field, least in minimum.items():
            value = getattr(self, field)
            if value is not None and not least <= value < math.inf:
                flag = "frames" if field == "k" else field
                raise ValueError(f"--{flag} {value}: give a finite number, {least} or more")
        require_local("--out", self.out)
        require_local("--data", self.data)
        if self.benchmark not in ("", *BENCHMARKS):
            raise ValueError(
                f"--benchmark {self.benchmark}: no such split; give one of {', '.join(BENCHMARKS)}"
            )
        if self.dispatch not in (None, "none") and not self._offers_tools:
            raise ValueError(
                f"--dispatch {self.dispatch}: no tool is offered with --frames 0, or with "
                "--protocol.prompt direct or reasoning; leave --dispatch out"
            )
        least = FrameSettings.min_pixels
        if min(self.pixels) < least:
            raise ValueError(
                f"--pixels {self.pixels[0]} {self.pixels[1]}: at least {least}, to which smaller "
                "frames are enlarged; raise them"
            )
        # Each raises if a field is out of range.
        self.episode_settings()
        self.rewards()

    @property
    def _offers_tools(self) -> bool:
        return self.k > 0 and self.protocol.prompt in ("agentic", "agentic-minimal")

    def episode_settings(self) -> EpisodeSettings:
        """Return how the episodes are played."""
        dispatch = self.dispatch or ("parallel" if self._offers_tools else "none")
        return EpisodeSettings(self.k, self.temperature, dispatch)

    def frames(self) -> FrameSettings:
        """Return the sizes of frames."""
        overview, crop = self.pixels
        # Questions about a video follow each other. 64 large frames of one take 1.2 GiB (8B, bf16).
        return FrameSettings(max_pixels=overview, crop_max_pixels=crop, cache_mib=2048)

    def rewards(self) -> RewardSettings:
        """Return how answers are scored."""
        if not self.judge:
            return RewardSettings()
        address, model = self.judge
        return RewardSettings(judge=JudgeSettings(address, model=model))

    def identity(self) -> dict[str, Any]:
        """Return the settings that affect answers, those of the protocol as "protocol.prompt".

        Runs that differ in one of them need separate folders.
        """
        fields: dict[str, Any] = dataclasses.asdict(self)
        fields["benchmark"] = self.benchmark or OWN
        fields["dispatch"] = self.episode_settings().dispatch
        protocol = fields.pop("protocol")
        fields |= {f"protocol.{name}": value for name, value in protocol.items()}
        # The name of the model: a server may move.
        fields["judge"] = self.judge and self.judge[1]
        return {name: value for name, value in fields.items() if name not in _NOT_IDENTITY}
