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
from paravt_jax.method.judge import JudgeSettings, check_address
from paravt_jax.method.protocol import Prompt, ProtocolSettings
from paravt_jax.method.rewards import RewardSettings
from paravt_jax.processes.cluster import HostSettings
from rollout.agent.episode import Dispatch, EpisodeSettings
from rollout.evaluation.benchmarks import BENCHMARKS

OWN = "own questions"
"""Replaces the benchmark's name in results if a user's own questions are played."""

# Fields that may change between two starts on the same folder. Weights and questions are
# compared by their hashes instead, and so are prompt packs (`rollout.evaluation.run`).
NOT_IDENTITY = (
    "model",
    "questions",
    "data",
    "videos",
    "out",
    "name",
    "limit",
    "episodes",
    "cache_tokens",
    "tensor",
    "endpoint",
    "concurrency",
    "hosts",
    "request_seconds",
    "pack",
    "release",
)


@dataclasses.dataclass(frozen=True)
class BenchmarkSettings:
    """One evaluation: a model on a split, or on your own questions."""

    model: str = ""
    """Folder or hub id of a model; with an endpoint optional, and read without weights."""
    benchmark: str = ""
    """Name of the split to play."""
    data: str = ""
    """The split's published files: a folder, one file or a hub id; if empty, the hub data set."""
    videos: str = ""
    """Folder of the videos; if empty, the folder given as data, or the folder of the questions."""
    out: str = ""
    """Folder for the results; an existing one is continued. Empty: evaluations/NAME/BENCHMARK."""
    name: str = ""
    """Name of the row in tables; if empty, the model's folder, or NAME for runs/NAME/model."""
    questions: str = ""
    """File of your own questions (JSON or CSV, see docs/evaluation.md) instead of a split."""
    pack: Annotated[str, tyro.conf.arg(name="protocol")] = "own"
    """Prompt pack: own, published, or the folder of a pack (docs/evaluation.md)."""
    release: str = ""
    """Your checkout of the ParaVT release, from which --protocol published reads its texts."""
    limit: int | None = None
    """Play only this many questions; the same command without a limit plays the rest."""
    frames: int = 64
    """Overview budget K, in frames."""
    dispatch: Dispatch | None = None
    """How tool calls are executed; by default parallel, or none if no tool is offered."""
    prompt: Prompt = "agentic"
    """System prompt: agentic-minimal for Charades-STA; reasoning and direct offer no tool."""
    tools: tuple[str, ...] = ("crop_video",)
    """Tools of the main agent: crop_video, search_subtitles, or MODULE:CLASS (docs/tools.md)."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    seed: int = 0
    """Seed of sampling above temperature 0."""
    blind: bool = False
    """Show no frames and offer no tool, to see how much the questions give away by themselves."""
    max_tool_turns: int = 3
    """Number of turns in which tools may be called."""
    max_calls: int = 5
    """Upper bound on executed calls per turn."""
    turn_tokens: int = 2048
    """Token limit of a turn."""
    summary_tokens: int = 512
    """Token limit of a sub-agent's report."""
    trajectory_tokens: int = 8192
    """Token limit of everything after the prompt, not counting frames that dispatch frames adds."""
    question_tokens: int = 512
    """Token limit of a question with its options. Longer questions are left out and counted."""
    subtitle_tokens: int = 8192
    """Token limit of subtitles in the prompt. Longer subtitles are thinned evenly."""
    pin_think: bool = True
    """Start every response with <think>, as in training. No effect with the prompt direct."""
    min_pixels: int = 784
    """Smaller frames are enlarged to this area, in pixels."""
    max_pixels: int = 50_176
    """Larger frames are shrunk to this area, in pixels."""
    crop_min_pixels: int = 0
    """Replaces min_pixels for the frames of crops; 0: the same."""
    crop_max_pixels: int = 0
    """Replaces max_pixels for the frames of crops; 0: the same."""
    snap: int = 0
    """28: resize to multiples of 28 first, as clients of Qwen's servers do; 0: not at all."""
    jpeg: int = 0
    """Quality of the JPEG through which resized frames go, from 1 to 100; 0: none."""
    processor_min_pixels: int = 0
    """Resized frames below this area are enlarged, as the model's processor does; 0: no."""
    frame_times: bool = True
    """Write each frame's time before it."""
    native_video: bool = False
    """Show the overview as one video of 2 frames per second; pixel options act on crops only."""
    video_marks: bool = True
    """Vision marks around a native video, as in transformers >= 5.10; not in 4.57 and vLLM."""
    open_ended: Literal["f1", "exact", "judge"] = "f1"
    """How open-ended answers (of MMVU) are scored."""
    judge: str = ""
    """Address of the judge's OpenAI-compatible API; the key is read from OPENAI_API_KEY."""
    judge_model: str = ""
    """Name of the judge's model at that address."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations; bfloat16 for published checkpoints."""
    tensor: int = 1
    """Devices per replica, which share its weights. The devices of all hosts play replicas."""
    episodes: int = 4
    """Episodes that each replica plays side by side."""
    cache_tokens: int = 0
    """Tokens in a replica's KV cache; 0: enough for all concurrent episodes at full length."""
    endpoint: str = ""
    """OpenAI-compatible API to use instead of the engine, such as http://localhost:8000/v1."""
    endpoint_model: str = ""
    """Name of the model at the endpoint."""
    concurrency: int = 16
    """Concurrent requests to the endpoint."""
    request_seconds: float = 600.0
    """Time limit of one request to the endpoint; it is then sent again."""
    hosts: HostSettings = HostSettings()

    def __post_init__(self):
        self._check_numbers()
        self._check_what_is_played()
        self._check_options_and_tools()
        self._check_servers()
        require_local("--out", self.out)
        # Each of these raises if its fields are out of range.
        self.episode_settings()
        self.protocol(0)
        self.pixels()
        self.rewards()

    def _check_numbers(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(
                f"--limit {self.limit}: number of questions to play; "
                "give 1 or more, or leave it out for all"
            )
        for field in ("episodes", "tensor", "concurrency", "question_tokens", "subtitle_tokens"):
            value = getattr(self, field)
            if value < 1:
                raise ValueError(f"--{field.replace('_', '-')} {value}: give 1 or more")
        if not self.frames and not self.blind:
            raise ValueError(
                "--frames 0: a run without frames is a blind one; give --blind instead"
            )
        if self.native_video and self.frames < 4:
            raise ValueError(
                f"--frames {self.frames}: --native-video shows at least 4 frames; give 4 or more"
            )
        if not self.video_marks and (self.endpoint or not self.native_video):
            raise ValueError(
                "--no-video-marks: acts on a native video that the engine reads; a server writes "
                "its own marks; give --native-video without --endpoint, or leave it out"
            )
        if not 0 < self.request_seconds < math.inf:
            raise ValueError(f"--request-seconds {self.request_seconds}: give seconds above 0")

    def _check_what_is_played(self) -> None:
        if self.benchmark and self.questions:
            raise ValueError(
                f"--benchmark {self.benchmark}, --questions {self.questions}: "
                "only one of them can be played; give one"
            )
        if self.benchmark and self.benchmark not in BENCHMARKS:
            raise ValueError(
                f"--benchmark {self.benchmark}: no such split; give one of {', '.join(BENCHMARKS)}"
            )
        if self.data and not self.benchmark:
            raise ValueError(
                f"--data {self.data}: holds the files of a split; "
                "give --benchmark too, or leave it out"
            )

    def _check_options_and_tools(self) -> None:
        calls_tools = self.dispatch not in (None, "none")
        if calls_tools and self.prompt in ("direct", "reasoning"):
            raise ValueError(
                f"--dispatch {self.dispatch}: --prompt {self.prompt} offers no tool; "
                "leave --dispatch out, or use the prompt agentic"
            )
        if calls_tools and self.blind:
            raise ValueError(
                f"--dispatch {self.dispatch}: a blind run offers no tool; leave --dispatch out"
            )

    def _check_servers(self) -> None:
        if not (self.model or self.endpoint):
            raise ValueError(
                "--model is missing: give the folder or hub id of a model, or --endpoint"
            )
        if bool(self.endpoint) != bool(self.endpoint_model):
            raise ValueError(
                "--endpoint, --endpoint-model: an address needs the name of a model there; "
                "give both or neither"
            )
        for field, address in (("--endpoint", self.endpoint), ("--judge", self.judge)):
            if address:
                check_address(field, address, "the environment variable OPENAI_API_KEY")
        of_judge = {self.open_ended == "judge", bool(self.judge), bool(self.judge_model.strip())}
        if len(of_judge) > 1:
            raise ValueError(
                "--open-ended judge, --judge, --judge-model: belong together; "
                "give all three or none"
            )

    def episode_settings(self) -> EpisodeSettings:
        """How the episodes are played; `dispatch` and `frames` follow from prompt and `blind`."""
        frames = 0 if self.blind else self.frames
        with_tools = self.prompt in ("agentic", "agentic-minimal") and not self.blind
        dispatch = self.dispatch or ("parallel" if with_tools else "none")
        return EpisodeSettings(frames, self.temperature, dispatch)

    def protocol(self, crop: int) -> ProtocolSettings:
        """The protocol's limits.

        Args:
            crop: tokens of a crop's frames, which dispatch `frames` adds to a trajectory.
        """
        limits = ProtocolSettings(
            max_tool_turns=self.max_tool_turns,
            max_calls=self.max_calls,
            turn_tokens=self.turn_tokens,
            summary_tokens=self.summary_tokens,
            trajectory_tokens=self.trajectory_tokens,
            pin_think=self.pin_think and self.prompt != "direct",
            frame_times=self.frame_times,
            prompt=self.prompt,
            tools=self.tools,
        )
        if self.episode_settings().dispatch == "frames":
            return limits.showing_frames(crop)
        return limits

    def pixels(self) -> FrameSettings:
        """The sizes of frames."""
        return FrameSettings(
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
            crop_min_pixels=self.crop_min_pixels,
            crop_max_pixels=self.crop_max_pixels,
            snap=self.snap,
            jpeg=self.jpeg,
            processor_min_pixels=self.processor_min_pixels,
        )

    def rewards(self) -> RewardSettings:
        """How answers are scored."""
        judge = None
        if self.open_ended == "judge":
            judge = JudgeSettings(self.judge, model=self.judge_model)
        return RewardSettings(open_ended=self.open_ended, judge=judge)

    def identity(self) -> dict[str, Any]:
        """The fields that affect answers. Runs that differ in any of them need separate folders."""
        fields = dataclasses.asdict(self) | {
            "benchmark": self.benchmark or OWN,
            "dispatch": self.episode_settings().dispatch,
        }
        # A server chooses the type of its weights itself.
        left_out = (*NOT_IDENTITY, "dtype") if self.endpoint else NOT_IDENTITY
        if not self.native_video:
            left_out = (*left_out, "video_marks")
        return {field: value for field, value in fields.items() if field not in left_out}
