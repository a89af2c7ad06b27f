"""Answers a question about a video, from Python or with `python -m rollout.ask`.

The answer comes from one episode, played as in training and evaluation. The engine is just large
enough for the video and the number of frames. The same question, settings, seed and weights give
the same episode, unless it runs out of time.
"""

from __future__ import annotations

import signal

from paravt_jax.processes.exit_codes import stop_at_once

if __name__ == "__main__":
    # Importing the modules below takes seconds.
    signal.signal(signal.SIGINT, stop_at_once)

import dataclasses
import functools
import json
import math
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

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
from models.weights.folder import CONFIG, local_folder
from models.weights.hf_config import from_hf
from paravt_jax.data import tokenizer_file
from paravt_jax.data.any_path import require_local
from paravt_jax.data.foreign import read_srt
from paravt_jax.data.frame_reader import FrameReader
from paravt_jax.data.frames import ReadTask, VideoError
from paravt_jax.data.stored import naming_full_disk, write_atomically
from paravt_jax.method.accuracy import chosen_option
from paravt_jax.method.protocol import Protocol, ProtocolSettings
from paravt_jax.method.records import (
    Episode,
    Frame,
    Question,
    QuestionKind,
    StopReason,
    Subtitle,
)
from paravt_jax.method.rewards import RewardSettings, combine
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.processes.cluster import run_command
from paravt_jax.processes.interrupts import Interrupts
from rollout.agent.episode import Dispatch, Environment, EpisodeSettings, play
from rollout.agent.transcript import transcript
from rollout.engine.engine import Engine
from rollout.engine.requests import run
from rollout.engine.settings import crop_tokens, overview_tokens, sizes_for_single_episodes
from rollout.report.episode_card import episode_page
from rollout.report.templates import seconds

QUESTION_TOKENS = 512  # room for the question and its options
_MAX_ENGINES = 2  # engines kept at once
_GREEDY = EpisodeSettings(frames=64, temperature=0.0)
_FRAMES = FrameSettings(admission="counted")  # the same question has the same answer


class Answer(Episode):
    """The episode of a question to an `Assistant`."""

    @property
    def option(self) -> str | None:
        """The one option that `answer` names; None if it names none or several."""
        options = self.question.options
        letter = chosen_option(self.answer or "", options) if options else None
        return options[ord(letter) - ord("A")] if letter else None


class Assistant:
    """A model that answers questions about video files.

    Encoded frames and the last engines, with their compiled programs, are kept for later questions.
    Processes that read videos end when the assistant is deleted (`del assistant`) or Python ends.
    Threads may share an assistant: it answers one question at a time.

    >>> assistant = Assistant.load("runs/paravt_tiny/model")
    >>> settings = EpisodeSettings(frames=16, temperature=0.0)
    >>> assistant.ask("clip.mp4", "Which digit appears at 8 s?", settings).answer

    Args:
        model: The model.
        vocabulary: The model's tokenizer (`paravt_jax.method.tokenizer.load`).
        protocol: Prompts, tools and limits of the episode.
        frames: Sizes of frames and of their cache.

    Attributes:
        environment: What its episodes share. Give it another `tell` to hear of every turn and crop.
        stopped: Called while an answer is written. Once it returns something true, the episode ends
            as if its time were up, with the turns and reports that there are.
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
        self.stopped: Callable[[], Any] = lambda: None
        # Engines and features serve one thread at a time.
        self._lock = threading.Lock()
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
        vocabulary = load_vocabulary(source)
        model = load(source, mesh=mesh, dtype=dtype, param_dtype=dtype)
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
    ) -> Answer:
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
            The episode. `answer` is None if there is no answer, and `stop` then says why; `option`
            is the option that the answer names; `turns` has everything that was written and seen.

        Raises:
            VideoError: The video cannot be read.
            ValueError: The question is empty or too long, or these are no options to choose from.
        """
        asked = question_about(self.environment.protocol, video, question, options, subtitles)
        return self._play(asked, settings, seed)

    def _play(self, asked: Question, settings: EpisodeSettings, seed: int) -> Answer:
        with self._lock:
            shown = min(settings.frames, self.environment.features.info(asked.video).frames)
            engine = self._engine(asked.video, shown)
            stopped = self.stopped
            # All requests end when their time is up.
            engine.clock = lambda: math.inf if stopped() else time.monotonic()
            (episode,) = run(engine, [play(self.environment, asked, settings, seed)])
        if episode.stop is StopReason.UNREADABLE:
            raise VideoError(asked.video, episode.reason or "it can no longer be read")
        if episode.stop is StopReason.TIME_LIMIT and stopped():
            episode = dataclasses.replace(episode, stop=StopReason.STOPPED)
        return Answer(**vars(episode))

    def page(self, episode: Answer, settings: EpisodeSettings) -> str:
        """Return the episode as an HTML page without external files: the answer and the moments
        that support it, then frames, tokens, crops and reports."""
        return episode_page(Path(), self.record(episode, settings))

    def record(self, episode: Answer, settings: EpisodeSettings) -> dict[str, Any]:
        """Return the episode as JSON values, see the function `record`."""
        return record(episode, settings, self.environment.protocol.vocabulary)

    def _engine(self, video: str, frames: int) -> Engine:
        """Return an engine with room for episodes on this video."""
        protocol = self.environment.protocol
        features = self.environment.features
        # Timestamps take tokens, and no frame has a later time than the end of the video.
        end = features.info(video).duration
        frame_tokens = features.tokens(video)
        prompt = overview_tokens(protocol, frames, frame_tokens, end) + QUESTION_TOKENS
        crop = crop_tokens(protocol, features.tokens(Frame(video, 0, 0.0, crop=True)), end)
        return self._engine_of(sizes_for_single_episodes(protocol, prompt, crop))


def record(episode: Answer, settings: EpisodeSettings, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return an episode as JSON values: its transcript and the chosen option."""
    rewards = combine(episode.turns, 0.0, RewardSettings())
    values = transcript(episode, rewards, settings, vocabulary)
    del values["rewards"]  # meaningless, because the right answer is unknown
    return values | {"option": episode.option}


def load_vocabulary(source: str | os.PathLike) -> Vocabulary:
    """Load the tokenizer of a model or of adapters, without weights."""
    base = base_folder(local_folder(source, weights=False), weights=False)
    return tokenizer_file.load(base, family_of(from_hf(base / CONFIG)).dialect)


def question_about(
    protocol: Protocol,
    video: str | os.PathLike,
    question: str,
    options: tuple[str, ...] = (),
    subtitles: Sequence[Subtitle] = (),
) -> Question:
    """Return a question about a video file. Arguments and errors are those of `Assistant.ask`."""
    if not question.strip():
        raise ValueError("question: it is empty; ask something about the video")
    # Fails if they come from a command line in a locale other than UTF-8.
    "".join((question, *options)).encode()
    different = {" ".join(option.casefold().split()) for option in options} - {""}
    if isinstance(options, str) or (options and len(different) < max(2, len(options))):
        raise ValueError(f"options: {options!r}; give at least two different texts, or none")
    kind = QuestionKind.MULTIPLE_CHOICE if options else QuestionKind.OPEN_ENDED
    # The user may name any file, unlike a data set. Videos are named by their path below "/".
    require_local("video", video)
    name = os.path.abspath(video)
    asked = Question("asked", name, question, kind, "", tuple(options), tuple(subtitles))
    least = sum(map(len, (question, *options))) // protocol.vocabulary.longest
    if least > QUESTION_TOKENS or len(protocol.question(asked).ids) > QUESTION_TOKENS:
        raise ValueError(
            f"question: more than {QUESTION_TOKENS} tokens with its options; ask in fewer words"
        )
    return asked


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
    seconds: float = math.inf
    """Time limit of the answer; reading the weights does not count."""
    turn_tokens: int = ProtocolSettings.turn_tokens
    """Length limit of one turn, in tokens."""
    html: str = ""
    """File to write the episode to, as an HTML page."""
    json: bool = False
    """Print the episode as one JSON object, and nothing else to stdout."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. A user's mistake prints one line."""
    reserve_memory()
    prog = "python -m rollout.ask"
    asked = tyro.cli(AskSettings, args=argv, prog=prog, description=__doc__)
    # A KeyboardInterrupt would be lost in a callback of JAX.
    signal.signal(signal.SIGINT, stop_at_once)
    return run_command(lambda: _answer(asked), in_words=_in_words)


def _answer(asked: AskSettings) -> int:
    """Ask the question, print the episode, and write the page. Return the exit code."""
    # All checks come before the weights are read, which takes minutes.
    settings = EpisodeSettings(asked.frames, asked.temperature, asked.dispatch, asked.seconds)
    for flag, file in (("--video", asked.video), ("--subtitles", asked.subtitles)):
        require_local(flag, file)
        if file and not os.path.isfile(file):
            raise FileNotFoundError(f"{flag} {file}: no such file; give one that exists")
    subtitles = read_srt(asked.subtitles) if asked.subtitles else ()
    if asked.subtitles and (not subtitles or asked.dispatch == "none"):
        raise ValueError(
            f"--subtitles {asked.subtitles}: it has no entries, or --dispatch none offers no tool "
            "to search them; leave it out"
        )
    page = Path(asked.html).absolute()
    require_local("--html", asked.html)
    if asked.html and (page.is_dir() or not os.access(page.parent, os.W_OK)):
        raise ValueError(f"--html {page}: cannot be written; name a file in a folder of yours")
    with FrameReader(workers=1) as reader:
        reader.request(ReadTask(os.path.abspath(asked.video), (), None)).result()
    tools = ("crop_video", "search_subtitles") if subtitles else ("crop_video",)
    limits = ProtocolSettings(tools=tools, turn_tokens=asked.turn_tokens)
    protocol = Protocol(load_vocabulary(asked.model), limits)
    question = question_about(protocol, asked.video, asked.question, asked.option, subtitles)

    use_cache()
    assistant = Assistant.load(asked.model, limits, dtype=asked.dtype)
    begun = time.monotonic()
    interrupts = Interrupts()

    def tell(line: str) -> None:
        if line and not interrupts.asked():
            print(f"{time.monotonic() - begun:7.1f} s  {line}", file=sys.stderr)

    assistant.environment = dataclasses.replace(
        assistant.environment, tell=lambda event: tell(_line(event))
    )
    assistant.stopped = interrupts.asked
    with interrupts:
        tell("answering; the first answer compiles programs, which can take minutes")
        episode = assistant._play(question, settings, asked.seed)
    record = assistant.record(episode, settings)
    text = "\n".join(describe(record))
    if asked.json:
        record["seconds"] = time.monotonic() - begun
        record["tokens"] = sum(len(turn.pop("tokens")) for turn in record["turns"])
        for call in (call for turn in record["turns"] for call in turn["calls"]):
            call.pop("report", None)
        text = json.dumps(record)
    print(text, flush=True)
    if asked.html:
        with naming_full_disk(page):
            write_atomically(page, assistant.page(episode, settings))
        print(f"page: {page}", file=sys.stderr)
    return 128 + (interrupts.asked() or 0) if episode.stop is StopReason.STOPPED else 0


def _in_words(error: Exception) -> str:
    """Return the message of an error. A field that it begins with is named as its flag."""
    if isinstance(error, VideoError):
        return f"--video {error}"
    if isinstance(error, UnicodeEncodeError):
        return f"{error}; give the command in a locale of UTF-8, such as LC_ALL=C.UTF-8"
    flags = {"episode.": "--", "protocol.turn_tokens": "--turn-tokens", "options": "--option"}
    return re.sub(f"^({'|'.join(flags)})", lambda field: flags[field[0]], str(error))


def _line(event: dict[str, Any]) -> str:
    """Return an event of an episode as a line for people; empty if they need not hear of it."""
    name = f"call {event.get('call')}"
    if event.get("end") is not None:
        name += f", {event['start']:g} to {event['end']:g} s"
    match event["event"]:
        case "turn":
            return f"turn {event['turn']}: the model writes at most {event['tokens']} tokens"
        case "call":
            return f"{name}: looking closer"
        case "report":
            return f"{name}: {event['text']}"
    return ""


def describe(record: dict[str, Any]) -> Iterator[str]:
    """Return the record of an episode as lines of text: the turns with calls and responses, then
    the answer."""
    for number, turn in enumerate(record["turns"], 1):
        yield f"--- turn {number}"
        yield turn["text"].strip()
        for count, call in enumerate(turn["calls"], 1):
            window = f"{seconds(call['start'])} to {seconds(call['end'])} s"
            asked = ", ".join(map(str, call.get("arguments", {"window": window}).values()))
            status = call["status"].replace("_", " ")
            name = call.get("tool", "crop")
            yield f"    {name} {count}, {asked} ({status}): {call['response'].strip()}"
    answer = "none" if record["answer"] is None else record["answer"]
    yield f"--- answer: {answer} (the episode ended: {record['stop'].replace('_', ' ')})"


if __name__ == "__main__":
    raise SystemExit(main())
