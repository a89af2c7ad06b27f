"""What clients can ask of a served model: an episode about a video, or one completion.

Both are agents that an `Owner` plays in one engine.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import math
import os
import pathlib
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import transformers
from jaxtyping import Int32

from models.compilation import compile_ahead
from models.family import family_of
from models.features import FrameFeatures, FrameSettings, ShownFrames
from models.features.cache import Grid
from models.model import VisionLanguageModel
from paravt_jax.checks import require_above, require_at_least
from paravt_jax.data.frame_reader import FrameReader
from paravt_jax.data.frames import PixelRules
from paravt_jax.data.video import is_picture
from paravt_jax.method.protocol import Protocol, ProtocolSettings
from paravt_jax.method.records import CropCall, Episode, Frame, Question
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.method.tools.crop_video import CROP_FPS
from rollout.agent.episode import Environment, EpisodeSettings, play
from rollout.ask import QUESTION_TOKENS, Answer, record
from rollout.engine.engine import Engine
from rollout.engine.requests import Request, Sample, SampleStop, Sampling, ask, together
from rollout.engine.settings import (
    LATEST,
    EngineSizes,
    crop_tokens,
    overview_tokens,
    round_up,
    sizes_for_single_episodes,
)
from rollout.serve.errors import ApiError
from rollout.serve.files import ANSWERED, PAIR, Picture
from rollout.serve.owner import Job, Owner

# Tokens between two looks at the queue: clients read along, and short reports end soon.
_STEPS = 16
_PICTURE_PROCESSOR = "preprocessor_config.json"
_VIDEO_PROCESSOR = "video_preprocessor_config.json"
_MOST_PICTURE = 786_432  # pixels: 768 visual tokens, as many as Qwen's own tools give a frame


@dataclasses.dataclass(frozen=True)
class ServiceSettings:
    """Sizes and limits of a served model."""

    frames: int = 64
    """Upper bound on overview frames (K)."""
    episodes: int = 16
    """Questions that are answered side by side; more wait in the queue."""
    queue: int = 64
    """Questions that may wait; more are refused."""
    seconds: float = 600.0
    """Time limit of an answer, and of waiting in the queue."""
    context: int = 0
    """Tokens of a prompt and its reply for the model alone; 0: as many as an episode needs."""
    picture_pixels: int = 0
    """Larger pictures are shrunk to this area for the model alone; 0: as its processor does, but at
    most 786,432 pixels."""

    def __post_init__(self):
        require_at_least("serve", self, 1, "frames", "episodes")
        require_at_least("serve", self, 0, "queue", "context", "picture_pixels")
        require_above("serve", self, 0, "seconds")
        # A request waits that long, and is played for twice as long. Its pictures are kept.
        if self.seconds > ANSWERED / 3:
            raise ValueError(f"serve.seconds: {self.seconds}; give {ANSWERED / 3:g} or less")


class ServedFeatures(FrameFeatures):
    """Features of videos and of pictures, which are resized when they arrive.

    Attributes:
        picture_rules: How the model alone sees pictures.
    """

    picture_rules: PixelRules

    def show_pictures(self, rules: PixelRules) -> None:
        """Set how pictures are resized, before anything is read."""
        self.picture_rules = rules
        most = self.settings.rules(self.config.vision).most_tokens
        sizes = {most, math.ceil(rules.most_tokens / 4), rules.most_tokens}
        self.encoder.sizes = tuple(sorted(sizes))

    def rules_of(self, name: str, crop: bool) -> PixelRules:
        """Return how the frames of a video, or a picture, are resized."""
        if is_picture(name):  # it is as small as its request wants it, but not larger than others
            most = self.picture_rules.max_pixels * (2 if name.endswith(PAIR) else 1)
            return dataclasses.replace(self.picture_rules, min_pixels=1, max_pixels=most)
        return super().rules_of(name, crop)

    def grid(self, frame: Frame | str) -> Grid:
        """Return the height and width of a frame in patches. Of two frames in a file, it is that of
        one."""
        height, width = super().grid(frame)
        name = frame if isinstance(frame, str) else frame.video
        return (height // 2 if name.endswith(PAIR) else height), width


class Visual(NamedTuple):
    """A picture, or the frames of a native video in pairs."""

    frames: tuple[Picture, ...]
    video: bool = False


class Reply(NamedTuple):
    """A reply of the model alone."""

    text: str
    """Its text, before the text that stopped it."""
    ids: tuple[int, ...]
    """The tokens that begin in `text`."""
    logprobs: tuple[float, ...]
    """Their log-probs at the request's temperature; at temperature 0, at 1."""
    stop: SampleStop
    sampled: int
    """All tokens that were sampled."""


class Service:
    """A model that many clients ask at once.

    Args:
        model: The model.
        vocabulary: Its tokenizer.
        folder: Its folder, for the chat template and the processor's settings.
        settings: Sizes and limits.
        protocol: Prompts, tools and limits of episodes.

    Attributes:
        ready: Set when every program is compiled.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        vocabulary: Vocabulary,
        folder: pathlib.Path,
        settings: ServiceSettings,
        protocol: ProtocolSettings | None = None,
    ):
        self.settings = settings
        self.vocabulary = vocabulary
        self.reader = FrameReader()
        self._folder = folder
        self._timed_videos = family_of(model.config).timed_videos
        size = _processor_size(folder, _PICTURE_PROCESSOR)
        # Models that were trained with small frames have processors that say so.
        most = min(FrameSettings.max_pixels, size.get("longest_edge", FrameSettings.max_pixels))
        frames = FrameSettings(max_pixels=most)
        features = ServedFeatures(model.vision, model.config, frames, os.sep, source=self.reader)
        rules = frames.rules(model.config.vision)
        least = size.get("shortest_edge", rules.min_pixels)
        most = settings.picture_pixels or min(size.get("longest_edge", most), _MOST_PICTURE)
        features.show_pictures(PixelRules(min(least, most), most, rules.factor))
        self.features = features
        self.environment = Environment(
            Protocol(vocabulary, protocol or ProtocolSettings()), features
        )
        self.engine = Engine(model, features, self._sizes())
        self.owner = Owner(self.engine, settings.episodes, settings.queue, settings.seconds)
        self.ready = threading.Event()
        self._template = transformers.AutoTokenizer.from_pretrained(folder)

    def start(self) -> None:
        """Compile every program in the engine's thread, and then begin to answer."""

        def prepare() -> None:
            compile_ahead([*self.engine.lowerings(), *self.features.lowerings()])
            self.engine.warm_up()
            self.ready.set()

        self.owner.start(prepare)

    def close(self) -> None:
        """Cancel what is asked, and end the thread and the readers. A program that is being
        compiled is not waited for."""
        self.owner.close()
        self.reader.close()

    @property
    def is_ready(self) -> bool:
        """Whether every program is compiled, and questions are answered."""
        return self.ready.is_set() and self.owner.ended is None

    @property
    def context(self) -> int:
        """Tokens of a prompt and its reply at most."""
        return self.engine.settings.longest

    # --- an episode ---

    def ask(
        self,
        question: Question,
        settings: EpisodeSettings,
        seed: int,
        turn_tokens: int,
        listen: bool = True,
    ) -> Job:
        """Enqueue an episode. Its events are those of `Environment`, and with `listen` texts as
        they grow: thought (turn, text), report.delta (turn, call, text). Its value is an `Episode`.
        """

        async def agent(job: Job) -> Episode:
            protocol = self.environment.protocol
            if turn_tokens < protocol.settings.turn_tokens:
                limits = dataclasses.replace(protocol.settings, turn_tokens=turn_tokens)
                protocol = Protocol(self.vocabulary, limits)
            environment = dataclasses.replace(
                self.environment,
                protocol=protocol,
                tell=job.tell,
                hear=_Listener(self.vocabulary, job).hear if listen else None,
            )
            return await play(environment, question, settings, seed)

        return self.owner.submit(agent)

    def record(self, episode: Answer, settings: EpisodeSettings) -> dict[str, Any]:
        """Return an episode as JSON values, see `rollout.ask.record`. The video has no folder."""
        made = record(episode, settings, self.vocabulary)
        return made | {"video": os.path.basename(episode.question.video)}

    def look(self, video: pathlib.Path, window: CropCall) -> Job:
        """Enqueue a sub-agent's look at a window of a video. The value are its frames and its
        report.

        Raises:
            ApiError: The queue is full.
        """

        async def agent(job: Job) -> tuple[tuple[Frame, ...], str]:
            protocol, features = self.environment.protocol, self.features
            await features.request_overview(str(video), 1)  # its length may be unknown
            frames = features.window(
                str(video), window.start, window.end, CROP_FPS, protocol.settings.crop_frames
            )
            shown = await features.request(frames)
            prompt = protocol.window(shown.frames, features.tokens(shown.frames[0]))
            sampling = Sampling(
                protocol.settings.summary_tokens,
                temperature=0.0,
                stop_ids=(self.vocabulary.eos,),
                deadline=self.settings.seconds,
            )
            (sample,) = await ask(Request(prompt.ids, shown.frames, sampling, seed=0))
            return shown.frames, self.vocabulary.decode_turn(sample.ids).strip()

        return self.owner.submit(agent)

    # --- the model alone ---

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None) -> str:
        """Return the text of a conversation, as transformers' template writes it.

        Raises:
            ApiError: The template refuses the messages.
        """
        try:
            return self._template.apply_chat_template(
                [*messages], tools=tools or None, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # templates raise errors of Jinja and of Python
            raise ApiError(400, f"messages: the chat template refuses them ({error})") from error

    def prompt(self, text: str, visuals: Sequence[Visual]) -> Int32[np.ndarray, " t"]:
        """Return the ids of a conversation.

        Args:
            text: The conversation, with one placeholder per picture or video.
            visuals: These, in order.

        Raises:
            ApiError: Placeholders are in the text of a message, or it is far too long.
        """
        if len(text) > self.context * self.vocabulary.longest:  # counting takes long
            message = f"messages: {len(text)} characters; the context has {self.context} tokens"
            raise ApiError(400, f"{message}: shorten them", "context_length_exceeded")
        dialect = self.vocabulary.dialect
        marked = f"{dialect.vision_start}{dialect.video}{dialect.vision_end}"
        before, *after = text.split(marked)
        videos = [visual.frames for visual in visuals if visual.video]
        if len(after) == len(videos):
            # The frames of a native video have marks of their own, after their time.
            for frames, rest in zip(videos, after, strict=True):
                before += "".join(f"<{frame.time:.1f} seconds>{marked}" for frame in frames) + rest
            text = before
        ids = self.vocabulary.encode(text)
        pads = [self.vocabulary[pad] for pad in (dialect.image, dialect.video)]
        places = np.flatnonzero(np.isin(ids, pads))
        tokens = [frame.tokens for visual in visuals for frame in visual.frames]
        if len(places) != len(tokens):
            message = f"messages: a text contains {dialect.image} or {dialect.video}; remove it"
            raise ApiError(400, message)
        counts = np.ones(len(ids), int)
        counts[places] = tokens
        return np.repeat(ids, counts)

    def video_rules(self, count: int) -> PixelRules:
        """Return how the frames of a native video are resized, if `count` of them are shown.

        Raises:
            ApiError: The model's family reads native videos in another way.
        """
        if not self._timed_videos:
            raise ApiError(400, "video_url: this model reads no native videos here; send image_url")
        rules = self.features.picture_rules
        size = _processor_size(self._folder, _VIDEO_PROCESSOR)
        most = min(rules.max_pixels, size.get("longest_edge", rules.max_pixels * count) // count)
        least = min(size.get("shortest_edge", count) // count, most)
        return PixelRules(max(1, least), most, rules.factor)

    def complete(
        self,
        ids: Int32[np.ndarray, " t"],
        pictures: Sequence[pathlib.Path],
        sampling: Sampling,
        seeds: Sequence[int],
        stop: Sequence[str] = (),
    ) -> Job:
        """Enqueue completions of one prompt, a sample per seed.

        Events are delta (index, text). The value is a list of `Reply`. A reply ends before the
        first of the texts in `stop`.
        """

        async def agent(job: Job) -> list[Reply]:
            shown = await together(*[self._see(path) for path in pictures])
            frames = tuple(frame for each in shown for frame in each.frames)
            writers = [_Writer(self.vocabulary, stop, job, index) for index in range(len(seeds))]
            requests = [
                Request(ids, frames, sampling, seed, progress=writer.hear)
                for writer, seed in zip(writers, seeds, strict=True)
            ]
            samples = await ask(*requests)
            return [writer.finish(sample) for writer, sample in zip(writers, samples, strict=True)]

        return self.owner.submit(agent)

    async def _see(self, path: pathlib.Path) -> ShownFrames:
        return await self.features.request_overview(str(path), 1)

    def _sizes(self) -> EngineSizes:
        """Return the sizes of an engine for all episodes and completions."""
        settings = self.settings
        protocol = self.environment.protocol
        tokens = self.features.settings.rules(self.features.config.vision).most_tokens
        overview = overview_tokens(protocol, settings.frames, tokens, LATEST) + QUESTION_TOKENS
        crop = crop_tokens(protocol, tokens, LATEST)
        sizes = sizes_for_single_episodes(protocol, overview, crop, settings.episodes)
        longest = round_up(max(sizes.longest, settings.context), sizes.page)
        pages = max(sizes.pages, longest // sizes.page)
        # Most of the time, a quarter of the agents that there may be are being sampled.
        few = round_up(math.ceil(sizes.slots / 4), sizes.rows_per_prefix)
        return dataclasses.replace(sizes, longest=longest, pages=pages, few_rows=few, steps=_STEPS)


class _Text:
    """A text that grows token by token. Bytes of a character that is not whole are held back."""

    def __init__(self, vocabulary: Vocabulary):
        self.text = ""
        self._vocabulary = vocabulary
        self._known = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def grow(self, ids: Sequence[int]) -> None:
        """Take all ids so far."""
        table, end = self._vocabulary.token_bytes, self._vocabulary.eos
        new, self._known = ids[self._known :], len(ids)
        self.text += self._decoder.decode(b"".join(table(id) for id in new if id != end))


class _Listener:
    """Tells a client what the agents of an episode write: thoughts, and reports."""

    def __init__(self, vocabulary: Vocabulary, job: Job):
        self._vocabulary = vocabulary
        self._job = job
        self._texts: dict[tuple[int, int], _Text] = {}

    def hear(self, turn: int, call: int, ids: Sequence[int]) -> None:
        """Take all tokens that an agent has written so far; see `Environment.hear`."""
        whole = self._texts.setdefault((turn, call), _Text(self._vocabulary))
        before = len(whole.text if call else thought_of(whole.text))
        whole.grow(ids)
        text = (whole.text if call else thought_of(whole.text))[before:]
        if text:
            event = {"event": "report.delta", "call": call} if call else {"event": "thought"}
            self._job.tell(event | {"turn": turn, "text": text})


class _Writer:
    """Tells a client the text of a reply while it grows, and ends it at the texts in `stop`."""

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str], job: Job, index: int):
        self._vocabulary = vocabulary
        self._whole = _Text(vocabulary)
        self._stop = stop
        # The end of the text may be the beginning of a text that stops it.
        self._held = max((len(text) - 1 for text in stop), default=0)
        self._job = job
        self._index = index
        self._told = 0

    def hear(self, ids: Sequence[int]) -> bool:
        """Take all tokens so far; return whether the reply has ended."""
        self._whole.grow(ids)
        text = self._whole.text
        end = self._end(text)
        self._tell(text[: max(0, len(text) - self._held) if end is None else end])
        return end is not None

    def finish(self, sample: Sample) -> Reply:
        """Return the whole reply."""
        text = self._vocabulary.decode_turn(sample.ids)
        text = text[: self._end(text)]
        self._tell(text)
        ids: list[int] = []
        growing = _Text(self._vocabulary)
        for id in sample.ids.tolist():
            if len(growing.text) >= len(text):
                break
            ids.append(id)
            growing.grow(ids)
        logprobs = sample.logprobs[: len(ids)].tolist()
        return Reply(text, tuple(ids), tuple(logprobs), sample.stop, len(sample.ids))

    def _end(self, text: str) -> int | None:
        ends = [text.find(end) for end in self._stop]
        return min((end for end in ends if end >= 0), default=None)

    def _tell(self, text: str) -> None:
        if len(text) > self._told:
            event = {"event": "delta", "index": self._index, "text": text[self._told :]}
            self._told = len(text)
            self._job.tell(event)


def thought_of(text: str) -> str:
    """Return the thought in a turn, up to where it is closed."""
    return text.partition("</think>")[0].removeprefix("<think>").strip()


def _processor_size(folder: pathlib.Path, name: str) -> dict[str, int]:
    """Return the sizes for which a processor was made: shortest_edge and longest_edge, in pixels of
    an area; those of a video count all its frames. Empty if the processor is unknown."""
    file = folder / name
    return json.loads(file.read_text("utf-8"))["size"] if file.exists() else {}
