"""A slow sampler to compare the engine with: one sequence at a time, no cache, a whole forward pass for every token.

It shares with the engine the model's forward pass, the positions and `rollout.engine.sampling`, which have tests of their own, and
nothing of its schedule, its cache or its programs. Where rounding decides, it follows the engine: see `Reference.answer`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from models.features import FrameFeatures
from models.qwen3_vl.config import Qwen3VLConfig
from models.qwen3_vl.model import Qwen3VL
from models.qwen3_vl.rope import mrope_positions, next_position
from models.qwen3_vl.text import KV
from paravt_jax.data.frames import VideoError
from paravt_jax.method.records import Frame, digest
from rollout.engine.engine import Engine
from rollout.engine.requests import Request, Sample, SampleStop, Sampling
from rollout.engine.sampling import Choices, sample

ROUNDING = 3e-5  # by how much scores may differ from one way of computing them to another
TRIES = 32


class Pictures(FrameFeatures):
    """Vectors without videos: noise for every frame. `sizes` are the videos' frames in patches; those of `gone` cannot be read."""

    def __init__(
        self, config: Qwen3VLConfig, sizes: dict[str, tuple[int, int]], gone: Many[str] = ()
    ):
        self.config, self.sizes, self.gone, self.version = config, sizes, gone, 0

    def grid(self, name: str) -> tuple[int, int]:
        return self.sizes[name]

    def _content(self, name: str) -> None:
        """No file, no change."""

    def __call__(self, frames: Many[Frame]) -> Float[np.ndarray, "m c d"]:
        return np.concatenate([self._vectors(frame) for frame in frames])

    def _vectors(self, frame: Frame) -> Float[np.ndarray, "m c d"]:
        if frame.video in self.gone:
            raise VideoError(frame.video, "gone")
        noise = np.random.default_rng([*frame.video.encode(), frame.index])
        return noise.normal(
            0,
            1,
            (self.tokens(frame.video), 1 + self.config.vision.levels, self.config.text.hidden_size),
        ).astype(np.float32)


def assert_nothing_held(engine: Engine) -> None:
    """Nothing is asked for, waits or runs, and every page is free or kept for later requests."""
    nodes = list(engine.tree.nodes())
    assert engine.idle and not (engine.unanswered or engine.waiting or engine.running)
    assert not any(node.users for node in nodes)
    pages = [*engine.tree.free_pages, *(node.page for node in nodes)]
    assert sorted(pages) == list(range(engine.tree.count))


class Reference:
    """Samples of a model with any of `weights`, by their version; sequences of at most `longest` tokens."""

    def __init__(
        self,
        model: Qwen3VL,
        features: FrameFeatures,
        weights: dict[int, Any],
        longest: int,
        token_bytes: Many[bytes],
    ):
        self.features, self.weights, self.longest, self.token_bytes = (
            features,
            weights,
            longest,
            token_bytes,
        )
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

    def answer(
        self, request: Request, seed: int, version: int, like: Sample | None = None
    ) -> Sample:
        """The sample for one of a request's seeds. Where rounding could decide either way it goes the way that `like` went."""
        sampling, said, logprobs = request.sampling, [], []
        stop = (
            SampleStop.UNREADABLE
            if any(frame.video in getattr(self.features, "gone", ()) for frame in request.frames)
            else None
        )
        if not sampling.max_new_tokens:
            stop = SampleStop.LENGTH
        while stop is None:
            draws = self._draw(self.scores(request, said, version), sampling, seed, len(said))
            token, logprob = draws[0]
            if like is not None and len(said) < len(like.ids):
                near = [draw for draw in draws if draw[0] == like.ids[len(said)]]
                token, logprob = min(
                    near, key=lambda draw: abs(draw[1] - like.logprobs[len(said)]), default=draws[0]
                )
            said.append(token)
            logprobs.append(logprob)
            stop = self._stop(said, sampling)
        ids = np.array(said, np.int32)
        return Sample(
            ids,
            np.array(logprobs, np.float32),
            stop,
            version,
            digest(np.concatenate([request.ids, ids])),
        )

    def scores(self, request: Request, said: Many[int], version: int) -> Float[np.ndarray, " v"]:
        """The logits of what comes after `said`."""
        key = version, request.ids.tobytes(), request.frames, tuple(said)
        if key not in self._known:
            self._known[key] = np.asarray(self._run(request, said, version)[0])
        return self._known[key]

    def keys_and_values(
        self, request: Request, said: Many[int], version: int
    ) -> tuple[Float[np.ndarray, "l t k h"], Float[np.ndarray, "l t k h"]]:
        """Those of the prompt and of `said`."""
        kv, n = self._run(request, said, version)[1], len(request.ids) + len(said)
        return np.asarray(kv.k)[:, 0, :n], np.asarray(kv.v)[:, 0, :n]

    def _run(
        self, request: Request, said: Many[int], version: int
    ) -> tuple[Float[Array, " v"], KV]:
        config, size, total = self.features.config, self.longest, len(request.ids) + len(said)
        ids, index = np.zeros((1, size), np.int32), np.full((1, size), -1, np.int32)
        positions, segments = np.zeros((3, 1, size), np.int32), np.zeros((1, size), np.int32)
        visual = np.zeros((1, size, 1 + config.vision.levels, config.text.hidden_size), np.float32)
        ids[0, :total] = np.concatenate([request.ids, np.array(said, np.int32)])
        segments[0, :total] = 1
        end = 0
        if request.frames:
            vectors = self.features(request.frames)
            places = np.flatnonzero(request.ids == config.image_token_id)[: len(vectors)]
            index[0, places], visual[0, : len(places)], end = (
                np.arange(len(places)),
                vectors,
                places[-1] + 1,
            )
        # What comes after the frames is text, placeholders that a model wrote too.
        seen = mrope_positions(
            request.ids[:end], [self.features.grid(frame.video) for frame in request.frames], config
        )
        positions[:, 0, :end], positions[:, 0, end:total] = (
            seen,
            next_position(seen) + np.arange(total - end),
        )
        batch = {
            "ids": ids,
            "positions": positions,
            "segment_ids": segments,
            "visual": visual,
            "visual_index": index,
        }
        return self._forward(self.weights[version], batch, np.int32(total - 1))

    def _draw(
        self, scores: Float[np.ndarray, " v"], sampling: Sampling, seed: int, number: int
    ) -> list[tuple[int, float]]:
        """The token and its log-prob, then what they might as well be: the same with scores that differ by what rounding does."""
        noise = np.random.default_rng(0).normal(0, ROUNDING, (TRIES, len(scores)))
        noise[0] = 0

        def each(value: float, kind: type) -> np.ndarray:
            return np.full(TRIES, value, kind)

        choices = Choices(
            seeds=each(seed % 2**32, np.uint32),
            temperatures=each(sampling.temperature, np.float32),
            top_k=each(sampling.top_k, np.int32),
            top_p=each(sampling.top_p, np.float32),
        )
        tokens, logprobs = self._sample(
            (scores + noise).astype(np.float32), choices, each(number, np.int32)
        )
        return list(zip(np.asarray(tokens).tolist(), np.asarray(logprobs).tolist(), strict=True))

    def _stop(self, said: Many[int], sampling: Sampling) -> SampleStop | None:
        """Why it ends with the last token, if it does. It has not ended before."""
        text = b"".join(self.token_bytes[token] for token in said)
        if any(string in text for string in sampling.stop_strings):
            return SampleStop.STOP_STRING
        if said[-1] in sampling.stop_ids:
            return SampleStop.STOP_ID
        return SampleStop.LENGTH if len(said) == sampling.max_new_tokens else None
