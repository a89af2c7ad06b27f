"""A question about a video, from a notebook: one episode, played as in training and evaluation, on an engine of its own size.

Owns the sizes of that engine: prompts have the length that so many frames need, so that a short look is not paid as a long one.
Refuses a video that cannot be read. Invariant: the same question, settings, seed and weights give the same episode, unless its time
is up before.
"""

from __future__ import annotations

import collections
import math
import os
from pathlib import Path

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from models.features import FrameFeatures, FrameSettings
from models.qwen3_vl.hf import load
from models.qwen3_vl.model import Qwen3VL
from models.weights.folder import local_folder
from paravt_jax import tokenizer
from paravt_jax.protocol import Protocol, ProtocolSettings
from paravt_jax.records import Episode, Frame, Question, QuestionKind, StopReason
from paravt_jax.tokenizer import Vocabulary
from paravt_jax.video import VideoError
from rollout.engine import Engine
from rollout.episode import Dispatch, Scene, Setting, play
from rollout.requests import run
from rollout.settings import EngineSettings

_QUESTION_TOKENS = 512  # room for the question and its options
_LATER = (512, 2048)  # tokens after a prompt: a first turn's, and later what was written and reported, too
_BUCKET = 256  # lengths are multiples of this, so that videos of one size share their compiled programs
_ENGINES = 2  # kept at once: each holds the keys and values of its prompts on the device


class Assistant:
    """A model that answers questions about video files. Encoded frames and the programs of the last sizes are kept for later questions.

    `vocabulary` is the model's own (`paravt_jax.tokenizer.load`); `protocol` bounds turns, calls and tokens, `frames` the frames' size.
    """

    def __init__(
        self,
        model: Qwen3VL,
        vocabulary: Vocabulary,
        protocol: ProtocolSettings | None = None,
        frames: FrameSettings | None = None,
    ):
        self._model = model
        features = FrameFeatures(model.vision, model.config, frames or FrameSettings(), Path())
        self._scene = Scene(Protocol(vocabulary, protocol or ProtocolSettings()), features)
        self._engines: collections.OrderedDict[EngineSettings, Engine] = collections.OrderedDict()

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
        """From a folder or a hub id with weights and tokenizer; the last three, and what it raises, as `models.qwen3_vl.load`."""
        folder = local_folder(source)
        return cls(load(folder, mesh=mesh, dtype=dtype, param_dtype=param_dtype), tokenizer.load(folder), protocol, frames)

    def ask(
        self,
        video: str | os.PathLike,
        question: str,
        *,
        options: tuple[str, ...] = (),
        frames: int = 64,
        dispatch: Dispatch = "parallel",
        temperature: float = 0.0,
        seed: int = 0,
        seconds: float = math.inf,
    ) -> Episode:
        """The episode on `question`: `episode.answer` is its answer, None without one (`stop` says why), `turns` what was written and seen.

        `frames` is the overview budget K; `dispatch="none"` offers no tool. A temperature of 0 is greedy, and `seed` then means nothing.
        `seconds` is the time it has, compilation included where these sizes are new.
        Raises VideoError for a file that cannot be read, ValueError for a question of more tokens than there is room for.
        """
        setting = Setting(frames, temperature, dispatch, seconds)
        kind = QuestionKind.MULTIPLE_CHOICE if options else QuestionKind.OPEN_ENDED
        asked = Question("asked", str(video), question, kind, "", tuple(options))
        length = len(self._scene.protocol.question(asked).ids)
        if length > _QUESTION_TOKENS:
            raise ValueError(f"question: {length} tokens with its options, there is room for {_QUESTION_TOKENS}; ask in fewer words")
        sampler = self._engine(asked.video, min(frames, self._scene.features.info(asked.video).frames))
        (episode,) = run(sampler, [play(self._scene, asked, setting, seed)])
        if episode.stop is StopReason.UNREADABLE:
            raise VideoError(asked.video, self._scene.features.unreadable.get(asked.video, "it cannot be read any more"))
        return episode

    def _engine(self, video: str, frames: int) -> Engine:
        protocol, features = self._scene.protocol, self._scene.features
        limits, tokens = protocol.settings, features.tokens(video)
        last = Frame(video, 0, features.info(video).duration)  # no other has a longer time
        overview = _round_up(len(protocol.overview([last] * frames, tokens).ids) + _QUESTION_TOKENS)
        crop = _round_up(len(protocol.window([last] * limits.crop_frames, tokens).ids))
        report, longest = _round_up(crop + limits.summary_tokens), _round_up(overview + limits.trajectory_tokens)
        settings = EngineSettings(
            own=tuple(sorted({report, longest, *(min(_round_up(overview + later), longest) for later in _LATER)})),
            prefill=tuple(sorted({_BUCKET, crop, overview})),
            slots=limits.max_calls,
            fan=limits.max_calls,
            pages=(longest + limits.max_calls * report) // EngineSettings.page,
            prefill_tokens=overview,
        )
        if settings not in self._engines:
            self._engines[settings] = Engine(self._model, features, settings)
            if len(self._engines) > _ENGINES:
                self._engines.popitem(last=False)
        self._engines.move_to_end(settings)
        return self._engines[settings]


def _round_up(tokens: int) -> int:
    return -(-tokens // _BUCKET) * _BUCKET
