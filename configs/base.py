"""`Run`: the settings of every room, composed. A recipe is a function that returns one."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from models.features import FrameSettings
from paravt_jax.local_path import require_local
from paravt_jax.protocol import ProtocolSettings
from paravt_jax.world import WorldSettings
from paravt_jax.world_text import TextSettings
from rollout.evaluate import EvaluationSettings
from rollout.settings import EngineSettings
from train.align import AlignSettings
from train.checkpoint import CheckpointSettings
from train.hosts import HostSettings
from train.optimizer import require_counts
from train.packed_sft import PackedSFTSettings
from train.published_data import DataSettings
from train.rl_settings import RLSettings
from train.sft import SFTSettings


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """Which Qwen3-VL, and the type of its activations. `path`: the hub id or folder of its weights and tokenizer, such as RUN/model;
    empty: noise."""

    path: str = ""
    size: Literal["tiny", "2b", "4b", "8b", "32b"] = "tiny"
    dtype: Literal["float32", "bfloat16"] = "float32"


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """Devices along each axis of the mesh. Rows of a batch lie over data and fsdp."""

    data: int = 1
    """Devices that each hold the weights that one device would hold."""
    fsdp: int = 1
    """Devices that weights and moments are cut over; a layer's weights are gathered for as long as they are used."""
    tensor: int = 1
    """Devices that heads, MLP and vocabulary are cut over."""

    def __post_init__(self):
        require_counts("mesh", data=self.data, fsdp=self.fsdp, tensor=self.tensor)


@dataclasses.dataclass(frozen=True)
class LogSettings:
    """Where figures go beside metrics.jsonl, and how many episodes of each phase are written down for the report."""

    tensorboard: bool = True
    wandb: bool = False
    wandb_project: str = "paravt-jax"
    episodes: int = 8

    def __post_init__(self):
        if self.episodes < 0:
            raise ValueError(f"log.episodes: {self.episodes}; give the number of episodes to write down, 0 or more")


@dataclasses.dataclass(frozen=True)
class Run:
    """One run: what is learned from, with what, how. A phase whose settings are None is left out."""

    name: str
    engine: EngineSettings
    run_dir: str = ""
    """Where everything goes; runs/NAME if empty."""
    start: str = ""
    """Directory of a run whose data and cold start are taken over, instead of making them anew."""
    seed: int = 0
    unreadable_share: float = 0.05
    """Share of videos that may be unreadable before the run refuses to start."""
    model: ModelSettings = ModelSettings()
    protocol: ProtocolSettings = ProtocolSettings()
    frames: FrameSettings = FrameSettings()
    mesh: MeshSettings = MeshSettings()
    data: DataSettings | None = None
    """The published training data, instead of a world."""
    world: WorldSettings | None = None
    text: TextSettings = TextSettings()
    align: AlignSettings | None = None
    sft: SFTSettings | PackedSFTSettings | None = None
    rl: RLSettings | None = None
    evaluation: EvaluationSettings = EvaluationSettings()
    log: LogSettings = LogSettings()
    checkpoints: CheckpointSettings = CheckpointSettings()
    hosts: HostSettings = HostSettings()

    @property
    def samples(self) -> bool:
        """Whether it plays episodes, in RL or to evaluate; else there is no engine, and its memory is the update's."""
        return self.rl is not None or self.data is None or self.data.heldout > 0

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
        if self.sft is not None and isinstance(self.sft, PackedSFTSettings) != (self.data is not None):
            raise ValueError(
                f"sft: {type(self.sft).__name__} with data = {self.data}; published data is trained on in packed rows "
                "(PackedSFTSettings), a world's in groups (SFTSettings)"
            )
        if isinstance(self.sft, PackedSFTSettings) and self.data is not None and self.sft.shape.tokens < self.data.row_tokens:
            raise ValueError(
                f"sft.shape.tokens: {self.sft.shape.tokens}; rows are packed to data.row_tokens = {self.data.row_tokens}, give at least "
                "so many, or pack shorter rows"
            )
        if not 0 <= self.unreadable_share < 1:
            raise ValueError(f"unreadable_share: {self.unreadable_share}; it is a share of videos, give one from 0 to below 1")
        if (self.model.size != "tiny" or self.model.path) and self.align is not None:
            raise ValueError(f"align: set for model.size {self.model.size}, model.path {self.model.path!r}; their towers can see, use None")
        limits, sft = self.protocol, self.sft
        for name, shape in (("rl.shape", self.rl and self.rl.shape), ("sft.main", sft.main if isinstance(sft, SFTSettings) else None)):
            if shape is not None and shape.prompt + limits.trajectory_tokens > self.engine.own[-1]:
                raise ValueError(
                    f"engine.own: {self.engine.own}; a rollout may have {name}.prompt + protocol.trajectory_tokens = "
                    f"{shape.prompt} + {limits.trajectory_tokens} tokens, let it end there"
                )
        if self.rl is not None:
            _check_room(self.rl, limits)


def _check_room(rl: RLSettings, limits: ProtocolSettings) -> None:
    """What rollouts and sub-agents may grow to has room in the batch: `train.batch.build` would refuse it hours later, in mid-run."""
    shape, windows = rl.shape, rl.subagents
    if shape.suffix < limits.trajectory_tokens:
        raise ValueError(f"rl.shape.suffix: {shape.suffix}; a rollout may have protocol.trajectory_tokens = {limits.trajectory_tokens}")
    if max(rl.frame_budgets) > shape.visual:
        raise ValueError(
            f"rl.frame_budgets: {rl.frame_budgets}; a frame has at least one visual token, and a prompt has room for rl.shape.visual = "
            f"{shape.visual}: raise that, or lower the largest budget"
        )
    if windows is None:
        return
    if limits.crop_frames > windows.visual:
        raise ValueError(
            f"rl.subagents.visual: {windows.visual}; a sub-agent may see protocol.crop_frames = {limits.crop_frames} frames, each of "
            "at least one visual token: raise the first, or lower the second"
        )
    if windows.prompt <= windows.visual:
        raise ValueError(
            f"rl.subagents.prompt: {windows.prompt}; its visual tokens, up to rl.subagents.visual = {windows.visual}, stand in it between "
            "times and words: raise the first, or lower the second"
        )
    if windows.suffix < limits.summary_tokens + 1:
        raise ValueError(
            f"rl.subagents.suffix: {windows.suffix}; a row holds its prompt's last token and up to protocol.summary_tokens = "
            f"{limits.summary_tokens} more: give at least {limits.summary_tokens + 1}"
        )


def change(run: Run, name: str, protocol: dict[str, Any] | None = None, **rl: Any) -> Run:
    """`run` under another name with other fields of its protocol and of its RL settings: how an ablation is said."""
    assert run.rl is not None, f"{run.name} has no RL to change"
    limits = dataclasses.replace(run.protocol, **(protocol or {}))
    return dataclasses.replace(run, name=name, protocol=limits, rl=dataclasses.replace(run.rl, **rl))
