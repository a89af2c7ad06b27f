"""Answers a question about a video, from Python or with `python -m rollout.ask`.

The answer comes from one episode, played as in training and evaluation. The engine is just large
enough for the video and the number of frames. The same question, settings, seed and weights give
the same episode, unless it runs out of time.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import jax.numpy as jnp
import tyro
from jax.sharding import Mesh
from jax.typing import DTypeLike

from models.compilation import use_cache
from models.devices import require_type, reserve_memory
from models.family import family_of
from models.features import FrameFeatures, FrameSettings
from models.model import VisionLanguageModel
from models.peft_folder import base_folder, load
from models.weights.folder import local_folder
from paravt_jax.data import tokenizer_file
from paravt_jax.data.any_path import require_local
from paravt_jax.data.foreign import read_srt
from paravt_jax.data.frame_reader import FrameReader
from paravt_jax.data.frames import VideoError
from paravt_jax.method.protocol import Protocol, ProtocolSettings
from paravt_jax.method.records import (
    CropCall,
    Episode,
    Frame,
    Question,
    QuestionKind,
    StopReason,
    Subtitle,
    ToolCall,
)
from paravt_jax.method.rewards import RewardSettings, combine
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.processes.cluster import run_command
from rollout.agent.episode import Dispatch, Environment, EpisodeSettings, play
from rollout.agent.transcript import transcript
from rollout.engine.engine import Engine
from rollout.engine.requests import run
from rollout.engine.sizing import crop_tokens, overview_tokens, sizes_for_single_episodes
from rollout.report.episode_card import episode_page

_QUESTION_TOKENS = 512  # room for the question and its options
_MAX_ENGINES = 2  # engines kept at once
_GREEDY = EpisodeSettings(frames=64, temperature=0.0)
_FRAMES = FrameSettings(admission="counted")  # the same question has the same answer


class Assistant:
    """A model that answers questions about video files.

    Encoded frames and the last engines, with their compiled programs, are kept for later questions.
    Processes that read videos end when the assistant is deleted (`del assistant`) or Python ends.

    >>> assistant = Assistant.load("runs/paravt_tiny/model")
    >>> settings = EpisodeSettings(frames=16, temperature=0.0)
    >>> assistant.ask("clip.mp4", "Which digit appears at 8 s?", settings).answer

    Args:
        model: The model.
        vocabulary: The model's tokenizer (`paravt_jax.method.tokenizer.load`).
        protocol: Prompts, tools and limits of the episode.
        frames: Sizes of frames and of their cache.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        vocabulary: Vocabulary,
        protocol: ProtocolSettings | None = None,
        frames: FrameSettings | None = None,
    ):
        reader = FrameReader()
        # In a notebook, models come and go in a process that lives for days.
        weakref.finalize(self, reader.close)
        features = FrameFeatures(
            model.vision, model.config, frames or _FRAMES, Path("/"), source=reader
        )
        self.environment = Environment(
            Protocol(vocabulary, protocol or ProtocolSettings()), features
        )
        # Each engine has a KV cache on the device.
        self._engine_of = functools.lru_cache(_MAX_ENGINES)(
            lambda sizes: Engine(model, features, sizes)
        )

    @classmethod
    def load(
        cls,
        source: str | os.PathLike,
        protocol: ProtocolSettings | None = None,
        frames: FrameSettings | None = None,
        *,
        mesh: Mesh | None = None,
        dtype: DTypeLike = jnp.float32,
    ) -> Assistant:
        """Load weights and tokenizer.

        Args:
            source: A folder or a hub id, of a model or of adapters in the format of PEFT.
            protocol: See `Assistant`.
            frames: See `Assistant`.
            mesh: See `models.peft_folder.load`, also for the errors.
            dtype: Type of weights and activations.
        """
        require_type("dtype", dtype)
        folder = local_folder(source)
        model = load(folder, mesh=mesh, dtype=dtype, param_dtype=dtype)
        vocabulary = tokenizer_file.load(base_folder(folder), family_of(model.config).dialect)
        return cls(model, vocabulary, protocol, frames)

    def ask(
        self,
        video: str | os.PathLike,
        question: str,
        settings: EpisodeSettings = _GREEDY,
        *,
        options: tuple[str, ...] = (),
        subtitles: Sequence[Subtitle] = (),
        seed: int = 0,
    ) -> Episode:
        """Answer a question about a video.

        Args:
            video: The video file.
            question: The question.
            settings: Overview frames (K), temperature, dispatch and time limits. A time limit
                includes compilation if these sizes are new.
            options: Answers to choose from.
            subtitles: Subtitles to search (`paravt_jax.data.foreign.read_srt`), for a protocol
                with the tool search_subtitles.
            seed: Seed of the sampling; it has no effect at temperature 0.

        Returns:
            The episode. `answer` is None if there is no answer, and `stop` then says why; `turns`
            has everything that was written and seen.

        Raises:
            VideoError: The video cannot be read.
            ValueError: The question is empty or too long, or these are no options to choose from.
        """
        _require_words(question)
        if isinstance(options, str) or (options and len(set(options)) < max(2, len(options))):
            raise ValueError(f"options: {options!r}; give at least two different texts, or none")
        kind = QuestionKind.MULTIPLE_CHOICE if options else QuestionKind.OPEN_ENDED
        # The user may name any file, unlike a data set. Videos are named by their path below "/".
        require_local("video", video)
        name = os.path.abspath(video)
        asked = Question("asked", name, question, kind, "", tuple(options), tuple(subtitles))
        length = len(self.environment.protocol.question(asked).ids)
        if length > _QUESTION_TOKENS:
            raise ValueError(
                f"question: {length} tokens with its options; at most {_QUESTION_TOKENS} fit, "
                "ask in fewer words"
            )
        features = self.environment.features
        shown = min(settings.frames, features.info(asked.video).frames)
        engine = self._engine(asked.video, shown)
        (episode,) = run(engine, [play(self.environment, asked, settings, seed)])
        if episode.stop is StopReason.UNREADABLE:
            raise VideoError(asked.video, episode.reason or "it can no longer be read")
        return episode

    def page(self, episode: Episode, settings: EpisodeSettings) -> str:
        """Return the episode as an HTML page without external files: frames, tokens, crops and
        reports."""
        rewards = combine(episode.turns, 0.0, RewardSettings())
        line = transcript(episode, rewards, settings, self.environment.protocol.vocabulary)
        del line["rewards"]  # meaningless, because the right answer is unknown
        return episode_page(Path(), line)

    def _engine(self, video: str, frames: int) -> Engine:
        """Return an engine with room for episodes on this video."""
        protocol = self.environment.protocol
        features = self.environment.features
        # Timestamps take tokens, and no frame has a later time than the end of the video.
        end = features.info(video).duration
        frame_tokens = features.tokens(video)
        prompt = overview_tokens(protocol, frames, frame_tokens, end) + _QUESTION_TOKENS
        crop = crop_tokens(protocol, features.tokens(Frame(video, 0, 0.0, crop=True)), end)
        return self._engine_of(sizes_for_single_episodes(protocol, prompt, crop))


def _require_words(question: str) -> None:
    if not question.strip():
        raise ValueError("question: it is empty; ask something about the video")


# --- the command ---


@dataclasses.dataclass(frozen=True)
class AskSettings:
    """Options of `python -m rollout.ask`."""

    model: str
    """Folder or hub id of a model with its tokenizer."""
    video: str
    """The video file."""
    question: Annotated[str, tyro.conf.Positional]
    """The question about the video."""
    option: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """An answer to choose from; repeat the option for each answer."""
    subtitles: str = ""
    """A SubRip file (.srt) that the model may search (docs/tools.md)."""
    frames: int = 64
    """Number of overview frames (K)."""
    dispatch: Dispatch = "parallel"
    """How tool calls are carried out."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    seed: int = 0
    """Seed of the sampling; it has no effect at temperature 0."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations."""
    html: str = ""
    """File to write the episode to, as an HTML page."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. A user's mistake prints one line."""
    reserve_memory()
    prog = "python -m rollout.ask"
    asked = tyro.cli(AskSettings, args=argv, prog=prog, description=__doc__)
    return run_command(lambda: _answer(asked))


def _answer(asked: AskSettings) -> None:
    """Ask the question, print the episode, and write the page."""
    settings = EpisodeSettings(asked.frames, asked.temperature, asked.dispatch)
    # All checks come before the weights are read, which takes minutes.
    _require_words(asked.question)
    require_local("--video", asked.video)
    if asked.html:
        require_local("--html", asked.html)
    if not os.path.isfile(asked.video):
        raise FileNotFoundError(f"--video {asked.video}: no such file; give a video")
    if asked.html:
        open(asked.html, "a").close()  # raises OSError if it cannot be written
    subtitles = _read_subtitles(asked.subtitles, asked.dispatch) if asked.subtitles else ()
    tools = ("crop_video", "search_subtitles") if subtitles else ("crop_video",)
    use_cache()
    assistant = Assistant.load(asked.model, ProtocolSettings(tools=tools), dtype=asked.dtype)
    # Nothing else is printed until the episode has ended.
    print("answering; the first answer compiles programs, which can take minutes", file=sys.stderr)
    episode = assistant.ask(
        asked.video,
        asked.question,
        settings,
        options=asked.option,
        subtitles=subtitles,
        seed=asked.seed,
    )
    print("\n".join(describe(episode)), flush=True)
    if asked.html:
        Path(asked.html).write_text(assistant.page(episode, settings), encoding="utf-8")
        print(f"page: {asked.html}")


def _read_subtitles(file: str, dispatch: Dispatch) -> Sequence[Subtitle]:
    """Return the entries of a file. Raises OSError or ValueError if they cannot be searched."""
    entries = read_srt(file)
    if not entries or dispatch == "none":
        raise ValueError(
            f"--subtitles {file}: it has no entries, or --dispatch none offers no tool to search "
            "them; leave it out"
        )
    return entries


def describe(episode: Episode) -> Iterator[str]:
    """Return the episode as lines of text: the turns with calls and responses, then the answer."""
    for number, turn in enumerate(episode.turns, 1):
        yield f"--- turn {number}"
        yield turn.text.strip()
        for count, outcome in enumerate(turn.calls, 1):
            status = outcome.status.replace("_", " ")
            call = _describe_call(count, outcome.call)
            yield f"    {call} ({status}): {outcome.response.strip()}"
    answer = "none" if episode.answer is None else episode.answer
    yield f"--- answer: {answer} (the episode ended: {episode.stop.replace('_', ' ')})"


def _describe_call(count: int, call: CropCall | ToolCall | None) -> str:
    if call is None:
        return f"crop {count}, no readable window"
    if isinstance(call, ToolCall):
        arguments = ", ".join(str(value) for value in call.arguments.values())
        return f"{call.tool} {count}, {arguments}"
    return f"crop {count}, {call.start:g} to {call.end:g} s"


if __name__ == "__main__":
    raise SystemExit(main())
