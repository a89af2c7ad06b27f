"""What `python -m rollout.evaluate` is told: the model, the split, how episodes are played, and how fast.

Owns which of it decides an answer (`identity`) and which does not. Refuses combinations that mean nothing, before anything is loaded.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

from models.features import FrameSettings
from paravt_jax.data.local_path import require_local
from paravt_jax.method.judge import JudgeSettings
from paravt_jax.method.protocol import Prompt, ProtocolSettings
from paravt_jax.method.rewards import RewardSettings
from paravt_jax.method.server import check_address
from rollout.agent.episode import Dispatch, EpisodeSettings
from rollout.evaluation.benchmarks import BENCHMARKS

OWN = "own questions"  # where the name of a benchmark stands for others

_NOT_IDENTITY = (
    "model",
    "questions",
    "data",
    "videos",
    "out",
    "name",
    "limit",
    "shard",
    "episodes",
    "cache_tokens",
    "tensor",
    "endpoint",
    "concurrency",
)


@dataclasses.dataclass(frozen=True)
class BenchmarkSettings:
    """One run: a model on a split."""

    model: str
    """Folder or hub id of a Qwen3-VL: its weights, and the tokenizer (with `endpoint`, only the tokenizer and config.json)."""
    benchmark: str = ""
    """The split, by the name of its entry in `rollout.evaluation.benchmarks`."""
    data: str = ""
    """The split's published files: a folder, one file or a hub id; where it is published, if empty."""
    videos: str = ""
    """The folder of the videos; `data`, or the folder that `questions` lies in, if empty."""
    out: str = ""
    """Where lines and summary go, and what the same command goes on from; evaluations/NAME/BENCHMARK, if empty."""
    name: str = ""
    """The row in tables; the name of the model's folder, or of the run that `model` lies in, if empty."""
    questions: str = ""
    """A file of your own questions (.jsonl or .csv, docs/evaluation.md) instead of a split."""
    limit: int | None = None
    """Only the first so many questions of the split; without it, the same command goes on with the others."""
    shard: str = "0/1"
    """Which part of the questions this process plays: "0/4" to "3/4" on four hosts that share `out`."""
    frames: int = 64
    """The overview budget K."""
    dispatch: Dispatch | None = None
    """How calls are carried out; parallel, or none with a prompt that knows no tool."""
    prompt: Prompt = "agentic"
    """The system turn, in this project's own words: agentic-minimal for Charades-STA, else agentic."""
    max_num_frames: int = 0
    """Most frames that a call of crop_video may ask for (num_frames); 0 offers no such argument."""
    tools: tuple[str, ...] = ("crop_video",)
    """Tools of the main agent: crop_video, search_subtitles, or MODULE:CLASS (docs/tools.md)."""
    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 0
    """Decides what is sampled above temperature 0, and the order of options with `shuffle`."""
    blind: bool = False
    """No frames and no tool: what the questions give away by themselves."""
    shuffle: bool = False
    """Options in an order drawn for each question: whether the place of an answer mattered."""
    max_tool_turns: int = 3
    """Turns in which tools may be called."""
    max_calls: int = 5
    """Calls of a turn that are carried out."""
    turn_tokens: int = 2048
    """Tokens of one turn."""
    summary_tokens: int = 512
    """Of a sub-agent's report."""
    trajectory_tokens: int = 8192
    """Everything after the prompt, frames that are shown later (dispatch frames) not counted."""
    question_tokens: int = 512
    """Room for a question and its options; longer ones are left out and said."""
    subtitle_tokens: int = 8192
    """Room for subtitles in the prompt; of longer ones, lines evenly spread over the video."""
    pin_think: bool = True
    """Every response is started with <think>, as in training; never with the prompt direct."""
    min_pixels: int = 784
    """Smaller frames are enlarged to this area."""
    max_pixels: int = 50_176
    """Larger frames are shrunk to this area."""
    open_ended: Literal["f1", "exact", "judge"] = "f1"
    """How open-ended answers (of MMVU) are scored."""
    judge: str = ""
    """Address of an OpenAI-compatible API for open_ended judge; its key is read from OPENAI_API_KEY."""
    judge_model: str = ""
    """The judge's name at that address."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations: bfloat16 for published checkpoints."""
    tensor: int = 1
    """Devices that each weight lies over."""
    episodes: int = 4
    """Played side by side."""
    cache_tokens: int = 0
    """Keys and values kept on the device, in tokens; 0: all that so many episodes can need."""
    endpoint: str = ""
    """Address of an OpenAI-compatible API (http://localhost:8000/v1) that samples instead of this process."""
    endpoint_model: str = ""
    """The model's name at the endpoint."""
    concurrency: int = 16
    """Requests to the endpoint at once."""

    def __post_init__(self):
        if self.limit is not None and self.limit < 1:
            raise ValueError(
                f"--limit {self.limit}: rows to play; give 1 or more, or leave it out for all"
            )
        for field in ("episodes", "tensor", "concurrency", "question_tokens", "subtitle_tokens"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"--{field.replace('_', '-')} {getattr(self, field)}: give 1 or more"
                )
        if self.prompt in ("direct", "reasoning") and self.dispatch not in (None, "none"):
            raise ValueError(
                f"--dispatch {self.dispatch}: --prompt {self.prompt} knows no tool; leave --dispatch out, or take agentic"
            )
        if self.blind and self.dispatch not in (None, "none"):
            raise ValueError(
                f"--dispatch {self.dispatch}: a blind run sees no crops either; leave --dispatch out"
            )
        if self.benchmark and self.questions:
            raise ValueError(
                f"--benchmark {self.benchmark}, --questions {self.questions}: only one of them is played; give one"
            )
        if self.benchmark and self.benchmark not in BENCHMARKS:
            raise ValueError(
                f"--benchmark {self.benchmark}: no such split; give one of {', '.join(BENCHMARKS)}"
            )
        if self.data and not self.benchmark:
            raise ValueError(
                f"--data {self.data}: holds the files of a split; give --benchmark too, or leave it out"
            )
        if self.shuffle and self.benchmark and BENCHMARKS[self.benchmark].score == "miou":
            raise ValueError(f"--shuffle: {self.benchmark} has no options; leave it out")
        if bool(self.endpoint) != bool(self.endpoint_model):
            raise ValueError(
                "--endpoint, --endpoint-model: an address and the model's name there belong together; give both or neither"
            )
        for field, address in (("--endpoint", self.endpoint), ("--judge", self.judge)):
            if address:
                check_address(field, address, "the environment variable OPENAI_API_KEY")
        if (self.open_ended == "judge") != bool(self.judge and self.judge_model.strip()):
            raise ValueError(
                "--open-ended judge, --judge, --judge-model: belong together; give all three or none"
            )
        require_local("--out", self.out)
        self.part()
        self.episode_settings()  # these refuse what they cannot be played with
        self.protocol(0)
        self.rewards()

    def part(self) -> tuple[int, int]:
        """(index, count) of the shard."""
        found = re.fullmatch(r"(\d+)/(\d+)", self.shard)
        if not found or not int(found[1]) < int(found[2]):
            raise ValueError(
                f"--shard {self.shard}: a part and their number, from 0/N to N-1/N; give one of these"
            )
        return int(found[1]), int(found[2])

    def episode_settings(self) -> EpisodeSettings:
        tools = self.prompt in ("agentic", "agentic-minimal") and not self.blind
        return EpisodeSettings(
            0 if self.blind else self.frames,
            self.temperature,
            self.dispatch or ("parallel" if tools else "none"),
        )

    def protocol(self, crop: int) -> ProtocolSettings:
        """The protocol's limits; `crop` is the number of tokens of a window's frames, which dispatch frames adds to a trajectory."""
        limits = ProtocolSettings(
            max_tool_turns=self.max_tool_turns,
            max_calls=self.max_calls,
            turn_tokens=self.turn_tokens,
            summary_tokens=self.summary_tokens,
            trajectory_tokens=self.trajectory_tokens,
            pin_think=self.pin_think and self.prompt != "direct",
            prompt=self.prompt,
            max_num_frames=self.max_num_frames,
            tools=self.tools,
        )
        return (
            limits.showing_frames(crop) if self.episode_settings().dispatch == "frames" else limits
        )

    def pixels(self) -> FrameSettings:
        return FrameSettings(min_pixels=self.min_pixels, max_pixels=self.max_pixels)

    def rewards(self) -> RewardSettings:
        judge = (
            JudgeSettings(self.judge, model=self.judge_model)
            if self.open_ended == "judge"
            else None
        )
        return RewardSettings(open_ended=self.open_ended, judge=judge)

    def identity(self) -> dict[str, Any]:
        """The fields that decide an answer."""
        fields = dataclasses.asdict(self) | {
            "benchmark": self.benchmark or OWN,
            "dispatch": self.episode_settings().dispatch,
        }
        return {field: value for field, value in fields.items() if field not in _NOT_IDENTITY}
