"""`Run` composes the settings of all packages. A recipe is a function that returns a `Run`.

The docstrings below the fields are the text of `python -m train.run --config=NAME --help`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, Literal

from models.config import ModelConfig
from models.family import FAMILIES, family
from models.features.reader import FrameSettings, frame_tokens
from models.lora import LoRASettings
from models.trained import TrainVision
from paravt_jax.checks import require_at_least
from paravt_jax.data.any_path import require_folder_or_bucket, require_local
from paravt_jax.data.video import Decoder, require_decoder
from paravt_jax.method.protocol import Lengths, ProtocolSettings
from paravt_jax.method.tokenizer import Dialect
from paravt_jax.method.tools.crop_video import CropVideo
from paravt_jax.world import text as small_world
from paravt_jax.world.text import TextSettings
from paravt_jax.world.videos import WorldSettings
from rollout.agent.episode import Dispatch, EpisodeSettings
from rollout.engine.settings import LABEL_TOKENS, EngineSettings, EngineSizes, engine_sizes, lengths
from train.learn.align import AlignSettings
from train.learn.packing import StepShape
from train.learn.rl_settings import RLSettings
from train.learn.sft import SFTSettings


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """The model to train."""

    path: str = ""
    """Hugging Face id, folder or address of initial weights, such as RUN/model; empty: random."""
    family: str = next(iter(FAMILIES))
    """Family of the model, by the model_type of its config.json."""
    size: str = "tiny"
    """Size of the model (tiny, or a published one such as 8b); must match the weights at `path`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of activations."""

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ValueError(
                f"model.family: {self.family!r} is not supported; give one of {', '.join(FAMILIES)}"
            )
        self.config()

    def config(self, vocab_size: int = 1) -> ModelConfig:
        """Return the sizes of the model; `vocab_size` is that of a tiny one."""
        return family(self.family).size(self.size, vocab_size)

    @property
    def dialect(self) -> Dialect:
        """How the model's family writes a conversation."""
        return family(self.family).dialect


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Published training data, from local folders, Hugging Face ids or bucket paths (gs://...)."""

    annotations: str = "ParaVT/ParaVT-Parquet"
    """Source of the annotations, Parquet tables."""
    media: str = "ParaVT/ParaVT-Source"
    """Source of videos and pictures; archives are unpacked into FOLDER/media."""
    folder: str = "data/paravt"
    """Local folder of the prepared data set."""
    frames: int = 64
    """Largest number of frames per video in a demonstration; up to that, one per second."""
    decoder: Decoder = "pyav"
    """Library that decodes frames; docs/data.md compares them. decord needs local files."""
    questions: str = ""
    """File of your own questions (CSV, JSONL or JSON); they replace `annotations`."""

    def __post_init__(self):
        require_at_least("data", self, 1, "frames")
        for name in ("annotations", "media", "folder"):
            if not getattr(self, name):
                raise ValueError(f"data.{name}: empty; name a folder")
        require_local("data.folder", self.folder)
        require_decoder("data.decoder", self.decoder)


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """Number of devices along each mesh axis. A batch is split over data and fsdp."""

    data: int = 1
    """Number of replicas of the weights; 1 on several TPU slices, with an open axis: one each."""
    fsdp: int = 1
    """Devices over which weights and moments are sharded (FSDP); 0: chosen for the devices."""
    tensor: int = 1
    """Devices over which heads, MLP and vocabulary are split; 0: chosen for the devices."""

    def __post_init__(self):
        require_at_least("mesh", self, 1, "data")
        require_at_least("mesh", self, 0, "fsdp", "tensor")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sizes of (data, fsdp, tensor)."""
        return self.data, self.fsdp, self.tensor


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """The evaluation before and after RL, on held-out questions.

    Every combination of overview budget, dispatch and temperature is played.
    """

    # A video is held out with all its questions.
    questions: int = 64
    """Number of questions that are not trained on, but played before and after RL; 0: none."""
    frames: tuple[int, ...] = (4, 16, 64)
    """Overview budgets K, in frames."""
    dispatch: tuple[Dispatch, ...] = ("parallel", "sequential", "none")
    """How tool calls are executed."""
    temperatures: tuple[float, ...] = (0.7, 0.0)
    """Sampling temperatures; 0 is greedy, and also played at the checkpoints of RL."""

    def __post_init__(self):
        require_at_least("evaluation", self, 0, "questions")
        for name in ("frames", "dispatch", "temperatures"):
            if not getattr(self, name):
                raise ValueError(f"evaluation.{name}: (); give at least one")
        self.episode_settings()  # raises if one is out of range

    def episode_settings(self) -> tuple[EpisodeSettings, ...]:
        """Return every combination of overview budget, dispatch and temperature."""
        combinations = itertools.product(self.frames, self.dispatch, self.temperatures)
        return tuple(
            EpisodeSettings(frames, temperature, dispatch)
            for frames, dispatch, temperature in combinations
        )

    def greedy_settings(self) -> tuple[EpisodeSettings, ...]:
        """Return the settings with greedy decoding and parallel dispatch, if they are played.

        They are also played during RL, for the curves of the report.
        """
        if 0 not in self.temperatures or "parallel" not in self.dispatch:
            return ()
        return tuple(EpisodeSettings(frames, 0.0, "parallel") for frames in self.frames)


@dataclasses.dataclass(frozen=True)
class Run:
    """Settings of one run: data, model and training phases. Phases that are None are skipped."""

    name: str
    """Name of the run, shown in its report."""
    run_dir: str = ""
    """Output folder, on a disk or as gs://BUCKET/FOLDER. Empty: runs/NAME."""
    profile: int = 0
    """Step of each training phase to trace into RUN/profile (docs/speed.md); 0: none."""
    seed: int = 0
    """Seed of initial weights, data order and sampling. The small world has its own seeds."""
    max_left_out: float = 0.1
    """Largest share of videos, or of a source's rows, that may be left out; else the run ends."""
    engine: EngineSettings = EngineSettings()
    model: ModelSettings = ModelSettings()
    lora: LoRASettings | None = None
    """Train low-rank adapters and keep the model frozen; None: train the whole decoder."""
    train_vision: TrainVision = "none"
    """What else is trained: merger: the vision tower's mergers; tower: the whole vision tower."""
    protocol: ProtocolSettings = ProtocolSettings()
    frames: FrameSettings = FrameSettings()
    mesh: MeshSettings = MeshSettings()
    data: DataSettings | None = None
    """Published training data or your own questions, instead of the small world."""
    world: WorldSettings | None = None
    """The generated videos of the small world."""
    text: TextSettings | None = None
    """Questions and demonstrations of the small world."""
    align: AlignSettings | None = None
    sft: SFTSettings | None = None
    rl: RLSettings | None = None
    evaluation: EvaluationSettings = EvaluationSettings()

    def __post_init__(self):
        if self.sft is not None and self.sft.steps == 0:
            if self.rl is None or not self.model.path:
                raise ValueError(
                    f"sft.steps: 0 for {self.name}, with model.path {self.model.path!r}; RL alone "
                    "needs a recipe with rl, and weights that had the cold start: give --model.path"
                )
            object.__setattr__(self, "sft", None)
            object.__setattr__(self, "align", None)
        require_folder_or_bucket("run_dir", self.run_dir)
        if self.seed < 0:
            raise ValueError(f"seed: {self.seed}; must be 0 or more")
        if not 0 <= self.max_left_out <= 1:
            raise ValueError(f"max_left_out: {self.max_left_out}; must be a share, from 0 to 1")
        if self.data is not None and (self.world is not None or not self.model.path):
            raise ValueError(
                f"data: set with world = {self.world} and model.path = {self.model.path!r}; "
                "published data needs pretrained weights with their tokenizer, and no world: set "
                "world to None and give model.path, a folder or a hub id"
            )
        if (self.text is None) != (self.world is None):
            raise ValueError(
                f"text: {self.text} with world = {self.world}; "
                "both describe the small world: give both or neither"
            )
        self._check_phases()

    def _check_phases(self) -> None:
        phases = {"align": self.align, "sft": self.sft, "rl": self.rl}
        steps = {name: phase.steps for name, phase in phases.items() if phase is not None}
        if not 0 <= self.profile <= max(steps.values(), default=0):
            raise ValueError(f"profile: {self.profile}; give a step of a phase ({steps}), or 0")
        if self.sft is not None and CropVideo.name not in self.protocol.tools:
            raise ValueError(
                f"protocol.tools: {self.protocol.tools}; the demonstrations of sft call "
                "crop_video: add it, or set sft to None in a recipe of your own"
            )
        for name, phase in (("sft", self.sft), ("rl", self.rl)):
            if self.lora and phase is not None and phase.optimizer.name == "muon":
                raise ValueError(
                    f"{name}.optimizer.name: 'muon' with lora; Muon is for whole matrices: choose "
                    "adamw, or set lora to None in a recipe of your own"
                )
        if self.align is not None and (self.model.size != "tiny" or self.model.path):
            raise ValueError(
                f"align: set for model.size {self.model.size}, model.path {self.model.path!r}; "
                "alignment trains the vision tower of a new tiny model: choose a recipe without "
                "it, such as paravt_8b, or set align to None in a recipe of your own"
            )

    @property
    def plays_episodes(self) -> bool:
        """Whether the run plays episodes, in RL or evaluation. Otherwise it has no engine, and
        training gets the memory that the engine would take."""
        return self.rl is not None or self.evaluation.questions > 0

    def require_no_demonstrations(self) -> None:
        """Check a run on your own questions.

        Raises:
            ValueError: The run has a cold start.
        """
        if self.sft is not None:
            raise ValueError(
                f"sft.steps: {self.sft.steps}; your own questions come without demonstrations: "
                "give weights that had the cold start: --sft.steps 0 --model.path FOLDER"
            )

    @property
    def param_dtype(self) -> str:
        """Type of the model's weights. Those that are not trained need no more digits than the
        activations."""
        return "float32" if self.lora is None else self.model.dtype

    @property
    def largest_frame(self) -> int:
        """Largest number of visual tokens per frame."""
        return max(self.frame_tokens(), self.frame_tokens(crop=True))

    def frame_tokens(self, crop: bool = False) -> int:
        """Return the largest number of visual tokens per frame of an overview, or of a crop."""
        vision = self.model.config().vision
        if self.world is None:
            return frame_tokens(self.frames, vision, crop)
        # Every frame of the small world has the same size, so the number is exact.
        side = self.world.size
        return self.frames.rules(vision, crop).tokens(side, side)

    def lengths(self, frames: int) -> Lengths:
        """Sequence lengths, in tokens, for prompts that show up to `frames` frames."""
        overview, crop = self.frame_tokens(), self.frame_tokens(crop=True)
        return lengths(self.protocol, overview, frames, crop, self.label_tokens)

    @property
    def label_tokens(self) -> int:
        """Upper bound on the tokens of a frame's time and vision marks."""
        return LABEL_TOKENS if self.world is None else small_world.LABEL_TOKENS

    @property
    def rl_shape(self) -> StepShape:
        """Upper bounds on the rollouts of an RL step."""
        assert self.rl is not None, f"{self.name} has no RL"
        longest = self.lengths(max(self.rl.frame_budgets))
        return StepShape(self.rl.prompts, self.rl.grpo.group_size, longest)

    @property
    def engine_sizes(self) -> EngineSizes:
        """Sizes of the engine. It serves RL and evaluation, so it fits the longer prompts."""
        budgets = self.evaluation.frames
        rows_per_prefix = 1
        if self.rl is not None:
            budgets = budgets + self.rl.frame_budgets
            rows_per_prefix = self.rl.grpo.group_size
        return engine_sizes(self.lengths(max(budgets)), self.engine, rows_per_prefix)


def change(run: Run, name: str, fields: Mapping[str, Any]) -> Run:
    """Return a copy of `run` with another name and other values of some fields.

    Args:
        run: The settings to start from.
        name: Name of the new run.
        fields: New values by dotted path, such as `{"rl.grpo.anchor": "none"}`.
    """
    return _changed(run, {"name": name, **fields})


def _changed(settings: Any, fields: Mapping[str, Any]) -> Any:
    """Return a copy of some settings. It is checked once, with all new values in place."""
    values = {path: value for path, value in fields.items() if "." not in path}
    inner: dict[str, dict[str, Any]] = {}
    for path, value in fields.items():
        field, dot, rest = path.partition(".")
        if dot:
            inner.setdefault(field, {})[rest] = value
    for field, changes in inner.items():
        values[field] = _changed(values.get(field, getattr(settings, field)), changes)
    return dataclasses.replace(settings, **values)
