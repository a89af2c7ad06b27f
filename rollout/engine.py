"""The batched sampler: requests in, sampled tokens and their log-probs out.

Owns the prompts' KV and the decode loop. A prompt is prefilled once and its KV kept on the device, keyed by its ids, its
frames and the version of the weights; all rows that start from it read that copy. Every call has one of a few static shapes
(`Shape`), so after each has been met nothing compiles again. Refuses requests that fit no shape, naming what is too long.
Invariant: a row's tokens depend on its own ids, frames, seed and temperature, not on its neighbours.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from models.attention import heads_first
from models.features import FrameFeatures
from models.qwen3_vl.model import Qwen3VL
from models.qwen3_vl.rope import mrope_positions, next_position, visual_index
from models.qwen3_vl.text import KV, TextDecoder
from paravt_jax.records import digest
from rollout.requests import Request, Sample, SampleStop

MOST_STOP_IDS = 4  # of one row: part of every call's static shape


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static lengths of one kind of call, in tokens: prompt, visual tokens in it, what followed it, and new tokens.

    Where groups of rows share a prompt, `fan` > 1 lets that many read one copy of its KV: decoding is bound by what it reads.
    """

    prompt: int
    visual: int
    suffix: int
    new: int
    fan: int = 1

    def fits(self, request: Request, visual: int) -> bool:
        lengths = (len(request.prompt), visual, len(request.suffix), request.max_new_tokens)
        return all(length <= limit for length, limit in zip(lengths, (self.prompt, self.visual, self.suffix, self.new), strict=True))


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """Rows decoded together, prompts prefilled together, prompts kept on the device for each prompt length; shapes, cheapest first."""

    shapes: tuple[Shape, ...]
    rows: int = 64
    prefill_rows: int = 8
    kept_prompts: int = 128

    def __post_init__(self):
        if self.kept_prompts < self.rows + self.prefill_rows:
            raise ValueError(
                f"engine.kept_prompts: {self.kept_prompts}; a full batch needs rows + prefill_rows = {self.rows + self.prefill_rows}"
            )
        if not self.shapes or any(self.rows % shape.fan for shape in self.shapes):
            raise ValueError(f"engine.rows: {self.rows}; it is shared out in lines of each shape's fan, make it a multiple of them all")


@dataclasses.dataclass
class EngineCounts:
    """What the engine did so far."""

    prefilled_tokens: int = 0
    prompts: int = 0
    prompts_reused: int = 0
    decode_steps: int = 0
    sampled_tokens: int = 0


class _Pool:
    """The KV of prompts of one static length: a device array with a row a prompt, least recently used first out."""

    def __init__(self, kv: KV, size: int):
        self.kv = kv
        self.rows: collections.OrderedDict[str, int] = collections.OrderedDict()
        self.lengths = np.zeros(size, np.int32)
        self.positions = np.zeros(size, np.int32)  # the position that follows the prompt
        self.size = size

    def take(self, key: str) -> int:
        """A row for a new prompt; the one that was not used for longest gives way (a batch's own are newer: `kept_prompts` sees to it)."""
        row = len(self.rows) if len(self.rows) < self.size else self.rows.popitem(last=False)[1]
        self.rows[key] = row
        return row


class Engine:
    """Samples for every agent of every episode. Implements `rollout.requests.Sampler`."""

    def __init__(self, model: Qwen3VL, features: FrameFeatures, settings: EngineSettings):
        self.settings, self.features, self.config = settings, features, model.config
        self._graph, weights = nnx.split(model.text)
        self._dtype = model.text.dtype
        self.counts = EngineCounts()
        place = jax.tree.leaves(weights)[0].sharding
        # KV lies whole on every device of the weights' mesh from the start, so that the first prefill is compiled as the second.
        self._whole = NamedSharding(place.mesh, PartitionSpec()) if isinstance(place, NamedSharding) else place
        self._prefill = jax.jit(self._prefill_rows, donate_argnums=1, out_shardings=self._whole)
        self._decode = jax.jit(self._decode_rows, static_argnames="new")
        self._pools: dict[int, _Pool] = {}
        self.load(weights, version=0)

    def load(self, weights: Any, version: int) -> None:
        """Sample from `weights` (the text decoder's state) from now on; KV of other weights is dropped."""
        self._weights, self.version = weights, version
        self.forget()

    def forget(self) -> None:
        """Drop the KV of all prompts: what is sampled next depends on nothing that was sampled before."""
        for pool in self._pools.values():
            pool.rows.clear()

    def warm_up(self) -> None:
        """Compile every shape, on a request that nobody made."""
        for shape in self.settings.shapes:
            request = Request(np.zeros(1, np.int32), (), np.zeros(1, np.int32), 1.0, 1, 0, (0,))
            for fan in {1, shape.fan}:
                self._batch(shape, fan, [(0, request)])
            self.forget()  # another shape with the same prompt length has to prefill, too

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """Sample every request; the results stand in the order of the requests."""
        by_shape: dict[Shape, list[int]] = {}
        for index, request in enumerate(requests):
            by_shape.setdefault(self._shape(request), []).append(index)
        samples: list[Sample | None] = [None] * len(requests)
        for shape, indices in by_shape.items():
            fan, batches = self._layout(shape, [self._key(requests[i]) for i in indices])
            for batch in batches:
                chosen = [indices[n] for n, _ in batch]
                placed = [(row, requests[i]) for i, (_, row) in zip(chosen, batch, strict=True)]
                for index, sample in zip(chosen, self._batch(shape, fan, placed), strict=True):
                    samples[index] = sample
        return [sample for sample in samples if sample is not None]

    def _layout(self, shape: Shape, keys: list[str]) -> tuple[int, list[list[tuple[int, int]]]]:
        """How many rows share a prompt's copy, and which request (by number) takes which row in each batch.

        Rows of one prompt fill lines of `fan` rows, unless that takes more batches than giving every row a copy of its own.
        """
        rows, by_key = self.settings.rows, collections.defaultdict(list)
        for number, key in sorted(enumerate(keys), key=lambda item: item[1]):
            by_key[key].append(number)
        lines = [numbers[first : first + shape.fan] for numbers in by_key.values() for first in range(0, len(numbers), shape.fan)]
        each = rows // shape.fan
        if shape.fan > 1 and -(-len(lines) // each) <= -(-len(keys) // rows):
            parts = [lines[first : first + each] for first in range(0, len(lines), each)]
            return shape.fan, [[(n, row * shape.fan + g) for row, line in enumerate(part) for g, n in enumerate(line)] for part in parts]
        flat = [number for numbers in by_key.values() for number in numbers]
        return 1, [[(n, row) for row, n in enumerate(flat[first : first + rows])] for first in range(0, len(flat), rows)]

    def _shape(self, request: Request) -> Shape:
        if not len(request.suffix):
            raise ValueError("Request.suffix: empty; its last token predicts the first new one, so leave at least one out of the prompt")
        if len(request.stop_ids) > MOST_STOP_IDS:
            raise ValueError(f"Request.stop_ids: {len(request.stop_ids)} ids; a row has at most {MOST_STOP_IDS}, give fewer")
        visual = sum(self.features.tokens(frame.video) for frame in request.frames)
        for shape in self.settings.shapes:
            if shape.fits(request, visual):
                return shape
        lengths = f"prompt {len(request.prompt)}, visual {visual}, suffix {len(request.suffix)}, new {request.max_new_tokens}"
        raise ValueError(
            f"engine.shapes: no shape holds a request of {lengths} tokens; add one, or lower the protocol's limits or the frames"
        )

    def _key(self, request: Request) -> str:
        frames = request.frames  # of one video, in the order of their placeholders
        return f"{digest(request.prompt)} {frames[0].video if frames else ''} {digest(np.array([f.index for f in frames]))} {self.version}"

    def _batch(self, shape: Shape, fan: int, requests: list[tuple[int, Request]]) -> list[Sample]:
        """Decode requests in the given rows; row r reads the prompt of line r // fan."""
        pool, rows = self._pool(shape.prompt), self.settings.rows
        slots = np.zeros(rows // fan, np.int32)
        for (row, _), slot in zip(requests, self._prompt_rows(shape, pool, [request for _, request in requests]), strict=True):
            slots[row // fan] = slot
        suffix = np.zeros((rows, shape.suffix), np.int32)  # padding is masked: any id will do
        lengths, limits = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        seeds, temperatures = np.zeros(rows, np.uint32), np.ones(rows, np.float32)
        stops = np.full((rows, MOST_STOP_IDS), -1, np.int32)
        for row, request in requests:
            lengths[row] = len(request.suffix)
            suffix[row, shape.suffix - lengths[row] :] = request.suffix
            limits[row], seeds[row], temperatures[row] = request.max_new_tokens, request.seed % 2**32, request.temperature
            stops[row, : len(request.stop_ids)] = request.stop_ids
        ids, logprobs, written, steps = self._decode(
            self._weights,
            pool.kv,
            slots,
            pool.lengths[slots],
            pool.positions[slots],
            suffix,
            lengths,
            seeds,
            temperatures,
            limits,
            stops,
            new=shape.new,
        )
        ids, logprobs, written = np.asarray(ids), np.asarray(logprobs), np.asarray(written)
        self.counts.decode_steps += int(steps)
        self.counts.sampled_tokens += int(written.sum())
        samples = []
        for row, request in requests:
            own = ids[row, : written[row]]
            stop = SampleStop.STOP_ID if own.size and own[-1] in request.stop_ids else SampleStop.LENGTH
            fed = np.concatenate([request.prompt, suffix[row, shape.suffix - lengths[row] :], own])
            samples.append(Sample(own, logprobs[row, : written[row]], stop, self.version, digest(fed)))
        return samples

    # --- prompts ---

    def _pool(self, length: int) -> _Pool:
        if length not in self._pools:
            text, size = self.config.text, self.settings.kept_prompts
            shape = (text.num_hidden_layers, size, length, text.num_key_value_heads, text.head_dim)
            self._pools[length] = _Pool(KV(*(jax.device_put(jnp.zeros(shape, self._dtype), self._whole) for _ in "kv")), size)
        return self._pools[length]

    def _prompt_rows(self, shape: Shape, pool: _Pool, requests: list[Request]) -> np.ndarray:
        """The pool row of each request's prompt; those that are not there yet are prefilled."""
        keys = [self._key(request) for request in requests]
        missing = {key: request for key, request in zip(keys, requests, strict=True) if key not in pool.rows}
        self.counts.prompts_reused += len(set(keys)) - len(missing)
        for key in keys:
            if key in pool.rows:
                pool.rows.move_to_end(key)
        items = list(missing.items())
        for first in range(0, len(items), self.settings.prefill_rows):
            self._prefill_prompts(shape, pool, items[first : first + self.settings.prefill_rows])
        return np.array([pool.rows[key] for key in keys], np.int32)

    def _prefill_prompts(self, shape: Shape, pool: _Pool, items: list[tuple[str, Request]]) -> None:
        lines, text = self.settings.prefill_rows, self.config.text
        ids = np.zeros((lines, shape.prompt), np.int32)
        positions, segments = np.zeros((3, lines, shape.prompt), np.int32), np.zeros((lines, shape.prompt), np.int32)
        levels = 1 + self.config.vision.levels
        visual = np.zeros((lines, shape.visual, levels, text.hidden_size), np.float32)
        slots = np.full(lines, pool.size, np.int32)  # out of range: dropped
        for line, (_, request) in enumerate(items):
            length = len(request.prompt)
            grids = [self.features.grid(frame.video) for frame in request.frames]
            ids[line, :length], segments[line, :length] = request.prompt, 1
            positions[:, line, :length] = mrope_positions(request.prompt, grids, self.config)
            if request.frames:
                vectors = self.features(request.frames)
                visual[line, : len(vectors)] = vectors
        for line, (key, request) in enumerate(items):  # only now: what could fail has not
            length = len(request.prompt)
            slots[line] = row = pool.take(key)
            pool.lengths[row], pool.positions[row] = length, next_position(positions[:, line, :length])
            self.counts.prefilled_tokens += length
            self.counts.prompts += 1
        pool.kv = self._prefill(self._weights, pool.kv, ids, positions, segments, visual, slots)

    def _prefill_rows(
        self,
        weights: Any,
        kept: KV,
        ids: Int[Array, "b t"],
        positions: Int[Array, "3 b t"],
        segments: Int[Array, "b t"],
        visual: Float[Array, "b m c d"],
        slots: Int[Array, "b"],
    ) -> KV:
        text: TextDecoder = nnx.merge(self._graph, weights)
        index = visual_index(ids, self.config.image_token_id)
        _, kv = text(ids, positions, segment_ids=segments, visual=visual, visual_index=index)
        return jax.tree.map(lambda pool, fresh: pool.at[:, slots].set(fresh.astype(pool.dtype), mode="drop"), kept, kv)

    # --- decoding ---

    def _decode_rows(
        self,
        weights: Any,
        kept: KV,
        slots: Int[Array, "p"],
        prompt_lengths: Int[Array, "p"],
        next_positions: Int[Array, "p"],
        suffix: Int[Array, "b t"],
        suffix_lengths: Int[Array, "b"],
        seeds: Int[Array, "b"],
        temperatures: Float[Array, "b"],
        limits: Int[Array, "b"],
        stops: Int[Array, "b n"],
        *,
        new: int,
    ) -> tuple[Int[Array, "b new"], Float[Array, "b new"], Int[Array, "b"], Int[Array, ""]]:
        """Run the suffixes (padded on the left, so that all rows write the same column) and decode up to `new` tokens.

        Returns ids, log-probs, tokens written by each row, and the number of decode steps.
        """
        text: TextDecoder = nnx.merge(self._graph, weights)
        rows, width = suffix.shape
        prefix = jax.tree.map(lambda pool: pool[:, slots], kept)
        prefix_mask = jnp.arange(prefix.k.shape[2]) < prompt_lengths[:, None]
        next_positions = jnp.repeat(next_positions, rows // len(slots))
        own = jnp.arange(width) >= (width - suffix_lengths[:, None])
        starts = next_positions[:, None] + jnp.arange(width) - (width - suffix_lengths[:, None])
        hidden, kv = text(
            suffix, jnp.broadcast_to(starts, (3, rows, width)), segment_ids=own.astype(jnp.int32), prefix=prefix, prefix_mask=prefix_mask
        )
        cache = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, new), (0, 0), (0, 0))), kv)
        mask = jnp.pad(own, ((0, 0), (0, new)))
        prefix, layers = heads_first(prefix), text.decode_layers()
        keys = jax.vmap(jax.random.key)(seeds)
        ends = next_positions + suffix_lengths

        def cond(state):
            step, done = state[0], state[1]
            return (step < new) & ~done.all()

        def body(state):
            step, done, written, logits, cache, mask, ids, logprobs = state
            token, logprob = sample_token(logits, jax.vmap(jax.random.fold_in, (0, None))(keys, step), temperatures)
            ids, logprobs = ids.at[:, step].set(token), logprobs.at[:, step].set(logprob)
            written = written + ~done
            done = done | (token[:, None] == stops).any(1) | (written >= limits)
            column = width + step
            mask = mask.at[:, column].set(True)
            hidden, cache = text.decode(token, jnp.broadcast_to(ends + step, (3, rows)), cache, mask, column, prefix, prefix_mask, layers)
            return step + 1, done, written, text.logits(hidden), cache, mask, ids, logprobs

        empty = jnp.zeros((rows, new))
        step, written, logits = jnp.int32(0), jnp.zeros(rows, jnp.int32), text.logits(hidden[:, -1])
        state = (step, limits == 0, written, logits, cache, mask, empty.astype(jnp.int32), empty)
        step, _, written, _, _, _, ids, logprobs = jax.lax.while_loop(cond, body, state)
        return ids, logprobs, written, step


def sample_token(
    logits: Float[Array, "b v"], keys: jax.Array, temperatures: Float[Array, "b"]
) -> tuple[Int[Array, "b"], Float[Array, "b"]]:
    """One token a row and its log-prob at the row's temperature; 0 takes the likeliest, with its log-prob at temperature 1."""
    greedy = temperatures == 0
    scaled = jax.nn.log_softmax(logits / jnp.where(greedy, 1, temperatures)[:, None])
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    token = jnp.argmax(scaled + jnp.where(greedy[:, None], 0, noise), axis=-1)
    return token, jnp.take_along_axis(scaled, token[:, None], 1)[:, 0]
