"""`Run`: the settings of every room, composed. A recipe is a function that returns one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from models.features import FrameSettings, frame_tokens
from models.qwen3_vl.config import VisionConfig, qwen3_vl, tiny
from paravt_jax.data.local_path import require_local
from paravt_jax.data.sizes import smart_resize
from paravt_jax.method.protocol import ProtocolSettings
from paravt_jax.method.tools.crop_video import CropVideo
from paravt_jax.world.text import TextSettings
from paravt_jax.world.videos import WorldSettings
from rollout.agent.episode import Dispatch
from rollout.engine.settings import EngineSettings, EngineSizes, Lengths
from rollout.engine.sizing import engine_sizes, lengths
from rollout.evaluation.play import EvaluationSettings
from train.durable.checkpoint import CheckpointSettings
from train.durable.cluster import HostSettings
from train.learn.align import AlignSettings
from train.learn.batch import BatchShape
from train.learn.optimizer import require_counts
from train.learn.rl_settings import RLSettings
from train.learn.sft import SFTSettings
from train.published_data import DataSettings


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """Which Qwen3-VL is trained."""

    path: str = ""
    """Hub id or folder of weights and tokenizer to start from, such as RUN/model; random weights if empty."""
    size: Literal["tiny", "2b", "4b", "8b", "32b"] = "tiny"
    """Size of the model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations."""


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """Devices along each axis of the mesh. Rows of a batch lie over data and fsdp."""

    data: int = 1
    """Number of data-parallel replicas."""
    fsdp: int = 1
    """Devices over which weights and optimizer moments are sharded (FSDP)."""
    tensor: int = 1
    """Devices over which heads, MLP and vocabulary are split (tensor parallelism)."""

    def __post_init__(self):
        require_counts("mesh", data=self.data, fsdp=self.fsdp, tensor=self.tensor)


@dataclasses.dataclass(frozen=True)
class LogSettings:
    """Where figures go beside metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: bool = False
    """Log to Weights & Biases (needs the extra `wandb`)."""
    wandb_project: str = "paravt-jax"
    """Project at Weights & Biases."""
    episodes: int = 8
    """Episodes of each evaluation setting that are kept for the report."""

    def __post_init__(self):
        if self.episodes < 0:
            raise ValueError(
                f"log.episodes: {self.episodes}; give the number of episodes to write down, 0 or more"
            )


@dataclasses.dataclass(frozen=True)
class Run:
    """Settings of one run: data, model and training phases. A phase whose settings are None is left out."""

    name: str
    """Name of the run, shown in its report."""
    run_dir: str = ""
    """Where everything goes; runs/NAME if empty."""
    start: str = ""
    """Directory of a run whose data and cold start are taken over, instead of making them anew."""
    seed: int = 0
    """Decides weights, order of data, and samples. A world has seeds of its own."""
    unreadable_share: float = 0.05
    """Share of videos that may be unreadable before the run refuses to start."""
    engine: EngineSettings = EngineSettings()
    model: ModelSettings = ModelSettings()
    protocol: ProtocolSettings = ProtocolSettings()
    frames: FrameSettings = FrameSettings()
    mesh: MeshSettings = MeshSettings()
    data: DataSettings | None = None
    """The published training data, instead of a world."""
    world: WorldSettings | None = None
    text: TextSettings | None = None
    """What is asked and shown in a world."""
    align: AlignSettings | None = None
    sft: SFTSettings | None = None
    rl: RLSettings | None = None
    evaluation: EvaluationSettings = EvaluationSettings()
    log: LogSettings = LogSettings()
    checkpoints: CheckpointSettings = CheckpointSettings()
    hosts: HostSettings = HostSettings()

    @property
    def plays_episodes(self) -> bool:
        """Whether it plays episodes, in RL or to evaluate; else there is no engine, and its memory is the update's."""
        return self.rl is not None or self.data is None or self.data.heldout > 0

    @property
    def vision(self) -> VisionConfig:
        """Sizes of the vision tower."""
        return tiny(1).vision if self.model.size == "tiny" else qwen3_vl(self.model.size).vision

    @property
    def frame_tokens(self) -> int:
        """Visual tokens of one frame, at most."""
        if self.world is None:
            return frame_tokens(self.frames, self.vision)
        factor, side = self.vision.patch_size * self.vision.spatial_merge_size, self.world.size
        height, width = smart_resize(
            side, side, self.frames.min_pixels, self.frames.max_pixels, factor
        )
        return height * width // factor**2

    def limits(self, dispatch: Dispatch = "parallel") -> ProtocolSettings:
        """Limits of an episode; where crops are shown in the trajectory itself, with room for them."""
        if dispatch != "frames":
            return self.protocol
        return self.protocol.showing_frames(
            lengths(self.protocol, self.frame_tokens, 0).crop_prompt
        )

    def lengths(self, frames: int, dispatch: Dispatch = "parallel") -> Lengths:
        """Lengths of sequences whose prompts show up to `frames` frames."""
        return lengths(self.limits(dispatch), self.frame_tokens, frames)

    @property
    def rl_shapes(self) -> tuple[BatchShape, ...]:
        """Shapes of an RL step's batch; see `RLSettings.shapes`."""
        assert self.rl is not None, f"{self.name} has no RL"
        return self.rl.shapes(self.lengths(max(self.rl.frame_budgets)))

    @property
    def engine_sizes(self) -> EngineSizes:
        """The engine's sizes: the widest prompts are those of RL or of the evaluation."""
        budgets, rows_per_prefix = self.evaluation.frames, self.evaluation.samples
        if self.rl is not None:
            budgets, rows_per_prefix = budgets + self.rl.frame_budgets, self.rl.grpo.group_size
        dispatch = "frames" if "frames" in self.evaluation.dispatch else "parallel"
        return engine_sizes(self.lengths(max(budgets), dispatch), self.engine, rows_per_prefix)

    def __post_init__(self):
        for name in ("run_dir", "start"):
            require_local(name, getattr(self, name))
        if self.seed < 0:
            raise ValueError(f"seed: {self.seed}; give 0 or more")
        if self.data is not None and (self.world is not None or not self.model.path):
            raise ValueError(
                f"data: set beside world = {self.world} and model.path = {self.model.path!r}; published data takes the tokenizer of "
                "published weights and no world: use world None, and give model.path (Qwen/Qwen3-VL-8B-Instruct)"
            )
        if self.data is not None and self.start:
            raise ValueError(
                f"start: {self.start} with published data; the weights that another run has trained are a folder like the published "
                f"ones: leave start empty, and give --model.path {self.start}/model"
            )
        if (self.text is None) != (self.world is None):
            raise ValueError(
                f"text: {self.text} with world = {self.world}; they describe one small world: give both or neither"
            )
        if self.sft is not None and CropVideo.name not in self.protocol.tools:
            raise ValueError(
                f"protocol.tools: {self.protocol.tools}; the demonstrations of sft call crop_video: "
                "name it too, or set sft to None in a recipe of your own"
            )
        if not 0 <= self.unreadable_share < 1:
            raise ValueError(
                f"unreadable_share: {self.unreadable_share}; it is a share of videos, give one from 0 to below 1"
            )
        if (self.model.size != "tiny" or self.model.path) and self.align is not None:
            raise ValueError(
                f"align: set for model.size {self.model.size}, model.path {self.model.path!r}; their towers can see: take a recipe without "
                "alignment, such as paravt_8b, or set align to None in one of your own"
            )


def change(run: Run, name: str, fields: Mapping[str, Any]) -> Run:
    """`run` under another name, with other values of dotted fields such as `rl.grpo.anchor`."""
    for path, value in fields.items():
        run = _replaced(run, path.split("."), value)
    return dataclasses.replace(run, name=name)


def _replaced(settings: Any, path: Sequence[str], value: Any) -> Any:
    field, *rest = path
    if rest:
        value = _replaced(getattr(settings, field), rest, value)
    return dataclasses.replace(settings, **{field: value})
