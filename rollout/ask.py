"""A question about a video, from a notebook or a terminal: one episode, played as in training and evaluation, on an engine of its own size.

Owns the sizes of that engine: prompts have the length that so many frames need, so that a short look is not paid as a long one; and what
`python -m rollout.ask` shows of the episode. Refuses a video that cannot be read and a question without words.
Invariant: the same question, settings, seed and weights give the same episode, unless its time is up before.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import jax.numpy as jnp
import tyro
from jax.sharding import Mesh
from jax.typing import DTypeLike

from models.features import FrameFeatures, FrameSettings
from models.qwen3_vl.hf import load
from models.qwen3_vl.model import Qwen3VL
from models.weights.folder import local_folder
from paravt_jax.data import video
from paravt_jax.data.frames import VideoError
from paravt_jax.data.local_path import require_local
from paravt_jax.data.video import probe
from paravt_jax.method import tokenizer
from paravt_jax.method.protocol import Protocol, ProtocolSettings
from paravt_jax.method.records import (
    CallOutcome,
    Episode,
    Question,
    QuestionKind,
    StopReason,
    ToolCall,
)
from paravt_jax.method.rewards import RewardSettings, score
from paravt_jax.method.subtitles import Subtitle, read_srt
from paravt_jax.method.tokenizer import Vocabulary
from rollout.agent.episode import Dispatch, Environment, EpisodeSettings, play
from rollout.agent.transcript import transcript
from rollout.engine.engine import Engine
from rollout.engine.requests import run
from rollout.engine.settings import EngineSizes
from rollout.engine.sizing import crop_tokens, overview_tokens, sizes_for_single_episodes
from rollout.report.episode_card import episode_page

_QUESTION_TOKENS = 512  # room for the question and its options
_ENGINES = 2  # kept at once: each holds the keys and values of its prompts on the device


class Assistant:
    """A model that answers questions about video files. Encoded frames and the programs of the last sizes are kept for later questions.

    `vocabulary` is the model's own (`paravt_jax.method.tokenizer.load`); `protocol` bounds
    turns, calls and tokens, `frames` the frames' size.
    """

    def __init__(
        self,
        model: Qwen3VL,
        vocabulary: Vocabulary,
        protocol: ProtocolSettings | None = None,
        frames: FrameSettings | None = None,
    ):
        self._model = model
        features = FrameFeatures(
            model.vision, model.config, frames or FrameSettings(), Path(), source=video
        )
        self._environment = Environment(
            Protocol(vocabulary, protocol or ProtocolSettings()), features
        )
        self._engines: collections.OrderedDict[EngineSizes, Engine] = collections.OrderedDict()

    @classmethod
    def load(
        cls,
        source: str | os.PathLike,
        protocol: ProtocolSettings | None = None,
        frames: FrameSettings | None = None,
        *,
        mesh: Mesh | None = None,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
    ) -> Assistant:
        """From a folder or a hub id with weights and tokenizer; the last three, and what it raises, as `models.qwen3_vl.hf.load`."""
        folder = local_folder(source)
        return cls(
            load(folder, mesh=mesh, dtype=dtype, param_dtype=param_dtype),
            tokenizer.load(folder),
            protocol,
            frames,
        )

    def ask(
        self,
        video: str | os.PathLike,
        question: str,
        *,
        options: tuple[str, ...] = (),
        subtitles: Sequence[Subtitle] = (),
        frames: int = 64,
        dispatch: Dispatch = "parallel",
        temperature: float = 0.0,
        seed: int = 0,
        seconds: float = math.inf,
    ) -> Episode:
        """The episode on `question`: `episode.answer` is its answer, None without one (`stop` says why), `turns` what was written and seen.

        `subtitles`: what is said (`paravt_jax.method.subtitles.read_srt`), for a protocol whose tools search in it.
        `frames` is the overview budget K; `dispatch="none"` offers no tool. A temperature of 0 is greedy, and `seed` then means nothing.
        `seconds` is the time it has, compilation included where these sizes are new.
        Raises VideoError for a file that cannot be read, ValueError for an empty question and one of more tokens than there is room for.
        """
        setting = EpisodeSettings(frames, temperature, dispatch, seconds)
        kind = QuestionKind.MULTIPLE_CHOICE if options else QuestionKind.OPEN_ENDED
        _check_words(question)
        asked = Question("asked", str(video), question, kind, "", tuple(options), tuple(subtitles))
        length = len(self._environment.protocol.question(asked).ids)
        if length > _QUESTION_TOKENS:
            raise ValueError(
                f"question: {length} tokens with its options, there is room for {_QUESTION_TOKENS}; ask in fewer words"
            )
        sampler = self._engine(
            asked.video, min(frames, self._environment.features.info(asked.video).frames)
        )
        (episode,) = run(sampler, [play(self._environment, asked, setting, seed)])
        if episode.stop is StopReason.UNREADABLE:
            raise VideoError(
                asked.video,
                self._environment.features.unreadable.get(
                    asked.video, "it cannot be read any more"
                ),
            )
        return episode

    def page(self, episode: Episode, setting: EpisodeSettings) -> str:
        """The episode as a page that needs nothing but itself: frames, every token that was written, crops and what was said of them."""
        line = transcript(
            episode,
            score(episode.question, episode.turns, RewardSettings()),
            setting,
            self._environment.protocol.vocabulary,
        )
        del line["rewards"]  # nobody knows the right answer
        return episode_page(Path(), line)

    def _engine(self, video: str, frames: int) -> Engine:
        protocol, features = self._environment.protocol, self._environment.features
        last, tokens = (
            features.info(video).duration,
            features.tokens(video),
        )  # no frame has a longer time
        overview = overview_tokens(protocol, frames, tokens, last) + _QUESTION_TOKENS
        settings = sizes_for_single_episodes(
            protocol, overview, crop_tokens(protocol, tokens, last)
        )
        if settings not in self._engines:
            self._engines[settings] = Engine(self._model, features, settings)
            if len(self._engines) > _ENGINES:
                self._engines.popitem(last=False)
        self._engines.move_to_end(settings)
        return self._engines[settings]


def _check_words(question: str) -> None:
    if not question.strip():
        raise ValueError("question: it is empty; ask in words what the video should tell")


# The command ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AskSettings:
    """What `python -m rollout.ask` is told."""

    model: str
    """Folder or hub id of a Qwen3-VL with its tokenizer."""
    video: str
    """The video file."""
    question: Annotated[str, tyro.conf.Positional]
    """What is asked about it."""
    option: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """An answer to choose from; give one after the other, each with a --option of its own."""
    subtitles: str = ""
    """A SubRip file (.srt) of what is said, which the model may search (docs/tools.md)."""
    frames: int = 64
    """The overview budget K."""
    dispatch: Dispatch = "parallel"
    """How calls are carried out."""
    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 0
    """Decides what is sampled above temperature 0."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations."""
    html: str = ""
    """A file for the episode as a page."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code. A mistake of the user's is one line and code 2."""
    asked = tyro.cli(AskSettings, args=argv, prog="python -m rollout.ask", description=__doc__)
    try:
        setting = EpisodeSettings(asked.frames, asked.temperature, asked.dispatch)
        require_local("--html", asked.html)
        if asked.html and not os.path.isdir(Path(asked.html).absolute().parent):
            raise FileNotFoundError(
                f"--html {asked.html}: its folder is not there; make it, or name another file"
            )
        if not os.path.isfile(asked.video):  # unlike Path.is_file, it takes names that are too long
            raise FileNotFoundError(
                f"--video {asked.video}: no such file; give the path of a video"
            )
        subtitles = _read_subtitles(asked.subtitles, asked.dispatch) if asked.subtitles else ()
        _check_words(asked.question)
        probe(asked.video)  # before weights are read, which takes minutes
        tools = ("crop_video", "search_subtitles") if subtitles else ("crop_video",)
        assistant = Assistant.load(
            asked.model, ProtocolSettings(tools=tools), dtype=asked.dtype, param_dtype=asked.dtype
        )
        episode = assistant.ask(
            Path(asked.video).absolute(),
            asked.question,
            options=asked.option,
            subtitles=subtitles,
            frames=setting.frames,
            dispatch=setting.dispatch,
            temperature=setting.temperature,
            seed=asked.seed,
        )
    except (FileNotFoundError, ValueError, VideoError) as error:
        print(f"python -m rollout.ask: {error}", file=sys.stderr)
        return 2
    print("\n".join(told(episode)))
    if asked.html:
        Path(asked.html).write_text(assistant.page(episode, setting), encoding="utf-8")
        print(f"page: {asked.html}")
    return 0


def _read_subtitles(file: str, dispatch: Dispatch) -> tuple[Subtitle, ...]:
    """The entries of `file`. FileNotFoundError or ValueError where there is nothing to search."""
    if not os.path.isfile(file):
        raise FileNotFoundError(
            f"--subtitles {file}: no such file; give the path of a .srt file, or leave it out"
        )
    if dispatch == "none":
        raise ValueError(
            f"--subtitles {file}: no tool searches them with --dispatch none; leave out either"
        )
    entries = tuple(read_srt(Path(file).read_bytes()))
    if not entries:
        raise ValueError(
            f"--subtitles {file}: it has no entries; give a .srt file, or leave it out"
        )
    return entries


def told(episode: Episode) -> Iterator[str]:
    """The episode in words: what was written in each turn, each crop and what its sub-agent said, the answer."""
    for number, turn in enumerate(episode.turns, 1):
        yield f"--- turn {number}"
        yield turn.text.strip()
        for count, outcome in enumerate(turn.calls, 1):
            status = outcome.status.replace("_", " ")
            yield f"    {_asked(count, outcome)} ({status}): {outcome.response.strip()}"
    yield f"--- answer: {'none' if episode.answer is None else episode.answer}" + (
        ""
        if episode.stop is StopReason.ANSWERED
        else f" (the episode ended: {episode.stop.replace('_', ' ')})"
    )


def _asked(count: int, outcome: CallOutcome) -> str:
    call = outcome.call
    if call is None:
        return f"crop {count}, no window that could be read"
    if isinstance(call, ToolCall):
        return f"{call.tool} {count}, {', '.join(map(str, call.arguments.values()))}"
    return f"crop {count}, {call.start:g} to {call.end:g} s"


if __name__ == "__main__":
    raise SystemExit(main())
