"""Times a sampler whose episode asks for four crops that take a second each to read.

`tests/rollout/test_reading.py` runs it. The engine has a tiny model with random weights. One
episode's first turn is scripted: it calls for four crops. Other agents sample all the time.
Measured are the seconds until all four sub-agents have their frames, and the longest time between
two steps of the sampler.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from models.family import family
from models.features import FrameFeatures, FrameSettings
from models.features.cache import Encoded
from models.features.encoder import FrameEncoder
from models.model import VisionLanguageModel
from paravt_jax.data.frames import FrameSource, ReadFrames, ReadTask
from paravt_jax.method.protocol import Protocol, ProtocolSettings, render_call
from paravt_jax.method.records import CropCall, Episode, Question, QuestionKind, digest
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.world.videos import DrawnVideos, WorldSettings, plan
from paravt_jax.world.vocabulary import world_vocabulary
from rollout.agent.episode import Environment, EpisodeSettings, play
from rollout.engine.engine import Engine
from rollout.engine.requests import Completion, Request, Sample, SampleStop, Sampling, ask, run
from rollout.engine.settings import EngineSizes

LIMITS = ProtocolSettings(
    max_calls=4, turn_tokens=40, summary_tokens=8, trajectory_tokens=256, crop_frames=8
)
CALLS = tuple(CropCall(32 * n, 32 * n + 16) for n in range(4))
SIZES = EngineSizes(longest=640, slots=8, rows_per_prefix=1, pages=400, prefill_tokens=384, steps=4)
BUSY = 3  # agents that sample all the time


class Delayed:
    """A `FrameSource` that takes `seconds(task)` for each task, on threads of its own."""

    def __init__(self, source: FrameSource, seconds: Callable[[ReadTask], float]):
        self._source = source
        self._seconds = seconds
        self._pool = ThreadPoolExecutor(8)

    def request(self, task: ReadTask) -> Future[ReadFrames]:
        return self._pool.submit(self._read, task)

    def ahead(self, task: ReadTask) -> None:
        """Do nothing: each task takes its time when it is asked for."""

    def _read(self, task: ReadTask) -> ReadFrames:
        time.sleep(self._seconds(task))
        return self._source.request(task).result()


def second_per_crop(task: ReadTask) -> float:
    """A crop takes a second. Overviews are there at once."""
    return 0.0 if isinstance(task.wanted, int) else 1.0


class TimedEncoder(FrameEncoder):
    """An encoder that sums up the seconds of the vision tower."""

    seconds = 0.0

    def encode(self, pixels: np.ndarray, grid: tuple[int, int]) -> Iterator[Encoded]:
        begin = time.perf_counter()
        encoded = [*super().encode(pixels, grid)]
        jax.block_until_ready([frame.batch for frame in encoded])
        self.seconds += time.perf_counter() - begin
        return iter(encoded)


class Planned:
    """The engine, except that the first turn of every main agent is `text`.

    Attributes:
        pauses: Seconds between two steps, without those of the vision tower.
        asked: When a first turn was last answered.
        started: When a sub-agent last asked for its report.
    """

    def __init__(self, engine: Engine, encoder: TimedEncoder, text: str, vocabulary: Vocabulary):
        self.engine = engine
        self.encoder = encoder
        self.vocabulary = vocabulary
        self.pauses: list[float] = []
        self.asked = self.started = 0.0
        self._ids = np.append(vocabulary.encode(text), vocabulary.eos).astype(np.int32)
        self._tickets = itertools.count(-1, -1)  # those of the engine are 0 or more
        self._planned: list[Completion] = []
        self._last: float | None = None

    def submit(self, request: Request) -> int:
        text = self.vocabulary.decode(request.ids)
        if not text.startswith(self.vocabulary.dialect.open("system")):
            if request.frames:
                self.started = time.perf_counter()
            return self.engine.submit(request)
        if "<tool_response>" in text:
            return self.engine.submit(request)
        ticket = next(self._tickets)
        logprobs = np.zeros(len(self._ids), np.float32)
        versions = np.zeros(len(self._ids), np.int32)
        fed = digest(np.concatenate([request.ids, self._ids]))
        sample = Sample(self._ids, logprobs, SampleStop.STOP_ID, versions, fed)
        self._planned.append((ticket, sample))
        return ticket

    def step(self) -> list[Completion]:
        if self._last is not None:
            self.pauses.append(time.perf_counter() - self._last - self.encoder.seconds)
        if self._planned:
            self.asked = time.perf_counter()
        completions = self._planned + self.engine.step()
        self._planned = []
        self.encoder.seconds = 0.0
        self._last = time.perf_counter()
        return completions

    def cancel(self, ticket: int) -> None:
        self.engine.cancel(ticket)


@dataclasses.dataclass(frozen=True)
class Stall:
    """What was measured, in seconds."""

    windows: float
    """From the turn with the calls until all sub-agents have their frames."""
    pause: float
    """Longest time between two steps of the sampler, without the vision tower's program."""


class Setting:
    """A model, its engine, and questions about different videos. Programs are compiled once."""

    def __init__(self) -> None:
        self.vocabulary = world_vocabulary(LIMITS, family().dialect)
        config = dataclasses.replace(
            family().tiny(self.vocabulary.size), **self.vocabulary.visual_ids
        )
        self.model = VisionLanguageModel(config, rngs=nnx.Rngs(0))
        world = WorldSettings(train_videos=3, heldout_videos=1)
        self.videos = plan(world)
        self.encoder = TimedEncoder(self.model.vision, FrameSettings(batch=8))
        self.source = DrawnVideos(world, self.videos)
        self.questions = [
            Question(video.path, video.path, "Why?", QuestionKind.OPEN_ENDED, "x")
            for video in self.videos
        ]
        features = self.features()
        features(features.overview(self.videos[0].path, 4))  # compiles the vision tower
        self.engine = Engine(self.model, features, SIZES)
        self.engine.warm_up()

    def features(
        self, seconds: Callable[[ReadTask], float] | None = None, **settings: Any
    ) -> FrameFeatures:
        """Return features with an empty cache, whose files take some seconds to read."""
        source = Delayed(self.source, seconds) if seconds else self.source
        made = FrameFeatures(
            self.model.vision, self.model.config, FrameSettings(batch=8, **settings), Path(), source
        )
        made.encoder = self.encoder
        return made

    def play(
        self,
        features: FrameFeatures,
        questions: Sequence[Question],
        temperature: float = 0.0,
        busy: int = 0,
    ) -> tuple[list[Episode], Planned]:
        """Play an episode with four crops per question, beside agents that sample all the time."""
        self.engine.features = features
        self.engine.forget()
        environment = Environment(Protocol(self.vocabulary, LIMITS), features)
        text = "look\n</think>" + "".join(map(render_call, CALLS))
        sampler = Planned(self.engine, self.encoder, text, self.vocabulary)
        episodes: list[Episode] = []

        async def playing(number: int, question: Question) -> Episode:
            setting = EpisodeSettings(4, temperature)
            episode = await play(environment, question, setting, 10_000 * number)
            episodes.append(episode)
            return episode

        async def sampling(number: int) -> None:
            ids = np.full(32, 20 + number, np.int32)
            while len(episodes) < len(questions):
                await ask(Request(ids, (), Sampling(200, 1.0), number))

        agents = [playing(number, question) for number, question in enumerate(questions)]
        found = run(sampler, [*agents, *map(sampling, range(busy))])
        return [episode for episode in found if episode is not None], sampler

    def stall(self) -> Stall:
        """Measure one episode with crops of a second each, beside other agents."""
        features = self.features(second_per_crop)
        (episode,), sampler = self.play(features, self.questions[:1], busy=BUSY)
        assert len(episode.turns[0].calls) == len(CALLS)
        assert all(outcome.status.executed for outcome in episode.turns[0].calls)
        return Stall(sampler.started - sampler.asked, max(sampler.pauses))
