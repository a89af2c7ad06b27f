"""A slow sampler to compare the engine with.

It samples one sequence at a time, without a cache, with a whole forward pass per token. It shares
the model's forward pass, the positions and `rollout.engine.sampling` with the engine; they have
tests of their own. It shares nothing of the schedule, the cache and the programs.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from models.attention import RowLayout
from models.config import ModelConfig
from models.features import FrameFeatures, FrameSettings
from models.model import VisionLanguageModel
from models.rope import mrope_positions, next_position
from models.text import KV, VisualBank
from paravt_jax.data import video
from paravt_jax.data.frames import VideoError
from paravt_jax.method.records import Frame, digest
from rollout.engine.engine import Engine
from rollout.engine.requests import Request, Sample, SampleStop, Sampling
from rollout.engine.sampling import Choices, sample

ROUNDING = 3e-5  # how far logits may differ between two orders of summation
TRIES = 32


class Pictures(FrameFeatures):
    """Frame features without videos: noise for every frame.

    `sizes` are the frames of each video in patches. Videos in `gone` cannot be read.
    """

    def __init__(
        self, config: ModelConfig, sizes: dict[str, tuple[int, int]], gone: Many[str] = ()
    ):
        super().__init__(None, config, FrameSettings(), "", source=video)
        self.sizes = sizes
        self.gone = gone

    def grid(self, frame: Frame | str) -> tuple[int, int]:
        return self.sizes[frame if isinstance(frame, str) else frame.video]

    def stamp(self, name: str) -> None:
        """Return nothing: there is no file that could change."""

    def __call__(self, frames: Many[Frame]) -> Float[np.ndarray, "m c d"]:
        return np.concatenate([self._vectors(frame) for frame in frames])

    def _vectors(self, frame: Frame) -> Float[np.ndarray, "m c d"]:
        if frame.video in self.gone:
            raise VideoError(frame.video, "gone")
        rng = np.random.default_rng([*frame.video.encode(), frame.index])
        vectors = (1 + self.config.vision.levels, self.config.text.hidden_size)
        return rng.normal(0, 1, (self.tokens(frame.video), *vectors)).astype(np.float32)


def assert_nothing_held(engine: Engine) -> None:
    """No request is open, and every page is free or cached without a holder."""
    nodes = list(engine.tree.nodes())
    assert engine.idle and not (engine.unanswered or engine.waiting or engine.running)
    assert not any(node.users for node in nodes)
    pages = [*engine.tree.free_pages, *(node.page for node in nodes)]
    assert sorted(pages) == list(range(engine.tree.count))


class Reference:
    """Samples of a model with any of `weights`, by version, up to `longest` tokens."""

    def __init__(
        self,
        model: VisionLanguageModel,
        features: FrameFeatures,
        weights: dict[int, Any],
        longest: int,
    ):
        self.features = features
        self.weights = weights
        self.longest = longest
        graph = nnx.split(model.text)[0]

        def forward(
            weights: Any, batch: dict[str, Any], last: Array
        ) -> tuple[Float[Array, " v"], KV]:
            text = nnx.merge(graph, weights)
            hidden, kv = text(**batch)
            return text.logits(hidden[0, last][None])[0], kv

        self._forward = jax.jit(forward)
        self._sample = jax.jit(sample)
        self._known: dict[tuple, np.ndarray] = {}

    def answer(self, request: Request, version: int, like: Sample | None = None) -> Sample:
        """The sample of a request, each token under its version in `like`.

        Tokens that `like` does not have are sampled under `version`.

        Where rounding could decide between two tokens, it takes the one that `like` has.
        """
        sampling = request.sampling
        said: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        gone = getattr(self.features, "gone", ())
        stop = None
        if any(frame.video in gone for frame in request.frames):
            stop = SampleStop.UNREADABLE
        if not sampling.max_new_tokens:
            stop = SampleStop.LENGTH
        while stop is None:
            number = len(said)
            known = like is not None and number < len(like.ids)
            under = int(like.versions[number]) if known and like is not None else version
            versions.append(under)
            draws = self._draw(self.scores(request, said, under), request, number)
            token, logprob = draws[0]
            if known and like is not None:
                same = [draw for draw in draws if draw[0] == like.ids[number]]
                wanted = like.logprobs[number]
                nearest = min(same, key=lambda draw: abs(draw[1] - wanted), default=draws[0])
                token, logprob = nearest
            said.append(token)
            logprobs.append(logprob)
            stop = self._stop(said, sampling)
        ids = np.array(said, np.int32)
        return Sample(
            ids,
            np.array(logprobs, np.float32),
            stop,
            np.array(versions, np.int32),
            digest(np.concatenate([request.ids, ids])),
        )

    def scores(self, request: Request, said: Many[int], version: int) -> Float[np.ndarray, " v"]:
        """Logits of the token after `said`."""
        key = version, request.ids.tobytes(), request.frames, tuple(said)
        if key not in self._known:
            self._known[key] = np.asarray(self._run(request, said, version)[0])
        return self._known[key]

    def keys_and_values(
        self, request: Request, said: Many[int], version: int
    ) -> tuple[Float[np.ndarray, "l t k h"], Float[np.ndarray, "l t k h"]]:
        """Keys and values of the prompt and of `said`."""
        _, kv = self._run(request, said, version)
        n = len(request.ids) + len(said)
        return np.asarray(kv.k)[:, 0, :n], np.asarray(kv.v)[:, 0, :n]

    def _run(
        self, request: Request, said: Many[int], version: int
    ) -> tuple[Float[Array, " v"], KV]:
        config = self.features.config
        size = self.longest
        total = len(request.ids) + len(said)
        ids = np.zeros((1, size), np.int32)
        index = np.full((1, size), -1, np.int32)
        positions = np.zeros((3, 1, size), np.int32)
        segments = np.zeros((1, size), np.int32)
        visual = np.zeros((1, size, 1 + config.vision.levels, config.text.hidden_size), np.float32)
        ids[0, :total] = np.concatenate([request.ids, np.array(said, np.int32)])
        segments[0, :total] = 1
        end = 0
        if request.frames:
            vectors = self.features(request.frames)
            places = np.flatnonzero(request.ids == config.image_token_id)[: len(vectors)]
            index[0, places] = np.arange(len(places))
            visual[0, : len(places)] = vectors
            end = places[-1] + 1
        # After the frames there is text only, even where a model wrote a placeholder.
        grids = [self.features.grid(frame.video) for frame in request.frames]
        with_frames = mrope_positions(request.ids[:end], grids, config)
        positions[:, 0, :end] = with_frames
        positions[:, 0, end:total] = next_position(with_frames) + np.arange(total - end)
        batch = {
            "ids": ids,
            "positions": positions,
            "layout": RowLayout(segments),
            "visual": VisualBank(visual, index),
        }
        return self._forward(self.weights[version], batch, np.int32(total - 1))

    def _draw(
        self, scores: Float[np.ndarray, " v"], request: Request, number: int
    ) -> list[tuple[int, float]]:
        """The token and its log-prob, then what they could be if logits differed by rounding."""
        noise = np.random.default_rng(0).normal(0, ROUNDING, (TRIES, len(scores)))
        noise[0] = 0

        def each(value: float, kind: type) -> np.ndarray:
            return np.full(TRIES, value, kind)

        choices = Choices(
            seeds=each(request.seed % 2**32, np.uint32),
            temperatures=each(request.sampling.temperature, np.float32),
        )
        tokens, logprobs = self._sample(
            (scores + noise).astype(np.float32), choices, each(number, np.int32)
        )
        return list(zip(np.asarray(tokens).tolist(), np.asarray(logprobs).tolist(), strict=True))

    def _stop(self, said: Many[int], sampling: Sampling) -> SampleStop | None:
        """Why the sample ends with its last token, if it does."""
        if said[-1] in sampling.stop_ids:
            return SampleStop.STOP_ID
        return SampleStop.LENGTH if len(said) == sampling.max_new_tokens else None
