"""Times the rollouts of one training step in this engine and in transformers, on the same cores.

    python -m benchmarks.engine             the tables of docs/speed.md (needs the extra `parity`)
    python -m benchmarks.engine --crops 6   seconds for rollouts with 1 to 6 crops
    ... --json FILE                         writes every measured number

Prompts have many frames, and rollouts have crops and a second turn. Lengths are fixed and nothing
stops early, so both sides do the same work. Each side runs in its own process and loads the same
random weights. The benchmark fails if the greedy tokens of the two sides differ, or if anything is
compiled during the measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Int, UInt8

from benchmarks.model import CASES, Case, alone, machine, make, peak_memory
from models.features import FrameFeatures, FrameSettings
from models.features.cache import Encoded
from models.features.encoder import FrameEncoder
from models.model import VisionLanguageModel, abstract_model
from models.rope import mrope_positions, next_position
from models.vision import patchify
from models.weights import hf
from paravt_jax.data.any_path import require_local
from paravt_jax.data.frames import (
    ReadFrames,
    ReadTask,
    VideoInfo,
    carry_out,
    overview_indices,
    read_now,
    shown,
)
from paravt_jax.data.sizes import PixelRules
from paravt_jax.method.records import Frame
from rollout.engine.engine import Engine
from rollout.engine.requests import Request, Sampling, ask, run
from rollout.engine.settings import EngineSizes
from train.durable.usage import Compilations

GIB = 2**30
# The sampled tokens of a rollout: turns and summaries, in the order of their requests.
Rollout = list[list[int]]


@dataclasses.dataclass(frozen=True)
class Work:
    """The rollouts of one step. Lengths are in tokens.

    A prompt has labelled frames of a video and then a question. A rollout alternates turns and
    rounds of parallel crops, and ends with a turn:

        prompt | turn | responses of the crops | turn
                  crop | summary
                  crop | summary
    """

    case: Case
    """The model."""
    settings: EngineSizes
    """The engine's sizes."""
    prompts: int = 8
    """Groups."""
    samples: int = 8
    """Rollouts per group."""
    frames: int = 64
    """Frames in a prompt."""
    video: int = 256
    """Frames of the video."""
    side: int = 192
    """Width and height of a frame in pixels."""
    time: int = 12
    """Length of a frame's label, which states its time."""
    question: int = 60
    """Length of a question."""
    turn: int = 64
    """Length of a turn of the main agent."""
    rounds: tuple[int, ...] = (2,)
    """Number of crops after each turn except the last."""
    crop_frames: int = 8
    """Frames in a crop."""
    request: int = 30
    """Length of the request to a sub-agent, after its frames."""
    summary: int = 32
    """Length of a sub-agent's answer."""
    response: int = 30
    """Length of a crop's tool response to the main agent."""
    temperature: float = 0.7

    @property
    def grid(self) -> tuple[int, int]:
        patches = self.side // self.case.config.vision.patch_size
        return patches, patches

    @property
    def generated(self) -> int:
        """Tokens sampled in all rollouts."""
        rollout = self.turn * (len(self.rounds) + 1) + self.summary * sum(self.rounds)
        return self.prompts * self.samples * rollout


_SMALL = Work(
    CASES["small"],
    # Rows for the first turn, the second turn, a sub-agent and a whole rollout. Prefill lengths for
    # tool responses after a turn, a sub-agent's prompt and a main agent's prompt.
    EngineSizes(
        row_lengths=(64, 192, 448, 3392),
        prefix_lengths=(3184,),
        prefill_lengths=(64, 432, 3200),
        pages=6400,
        prefill_tokens=512,
        read_tokens=64 * 448,
        steps=32,
    ),
)
_TOY = Work(
    CASES["toy"],
    EngineSizes(
        row_lengths=(32, 112),
        prefix_lengths=(64,),
        prefill_lengths=(8, 80),
        slots=8,
        rows_per_prefix=4,
        page=4,
        pages=256,
        prefill_tokens=80,
        steps=4,
    ),
    prompts=2,
    samples=3,
    frames=4,
    video=16,
    side=64,
    time=4,
    question=9,
    turn=6,
    crop_frames=2,
    request=5,
    summary=4,
    response=3,
)
WORKS = {"small": _SMALL, "toy": _TOY}
# For `--crops`: a single group, with a slot for every sub-agent.
FEW = {
    "small": dataclasses.replace(
        _SMALL,
        settings=dataclasses.replace(
            _SMALL.settings,
            row_lengths=(64, 448, 1280),
            prefix_lengths=(832,),
            prefill_lengths=(64, 192, 432, 848),
            slots=24,
            rows_per_prefix=4,
            pages=2048,
            read_tokens=24 * 448,
        ),
        prompts=1,
        samples=4,
        frames=16,
        turn=32,
    ),
    "toy": dataclasses.replace(_TOY, prompts=1, samples=1),
}


# --- the work, which is the same for both sides ---


class Part(NamedTuple):
    """Token ids, and the numbers of the frames that their placeholders stand for."""

    ids: Int[np.ndarray, " t"]
    frames: Int[np.ndarray, " f"]


def opening(work: Work, number: int) -> Part:
    """The prompt of a group: frames of the whole video, and a question."""
    frames = overview_indices(work.video, work.frames)
    return _part(work, frames, (0, number), work.question)


def crop(work: Work, number: int, sample: int, call: int) -> Part:
    """A sub-agent's prompt: consecutive frames from a random start, and a request."""
    first = np.random.default_rng((1, number, sample, call)).integers(
        work.video - work.crop_frames + 1
    )
    return _part(work, first + np.arange(work.crop_frames), (2, number, sample, call), work.request)


def response(work: Work, number: int, sample: int, call: int) -> Int[np.ndarray, " t"]:
    """The tool response of a crop."""
    return _words(work, np.random.default_rng((3, number, sample, call)), work.response)


def pixels(work: Work, number: int) -> UInt8[np.ndarray, "m y x 3"]:
    """The frames of a video: random noise."""
    shape = (work.video, work.side, work.side, 3)
    return np.random.default_rng((4, number)).integers(0, 256, shape, np.uint8)


def _part(work: Work, frames: np.ndarray, seed: tuple[int, ...], words: int) -> Part:
    """Frames, each after a label of random tokens, and then `words` random tokens."""
    config = work.case.config
    rng = np.random.default_rng(seed)
    tokens = math.prod(work.grid) // config.vision.spatial_merge_size**2
    image = [config.vision_start_token_id] + [config.image_token_id] * tokens
    pieces: list[Any] = []
    for _ in frames:
        pieces += [_words(work, rng, work.time), image]
    pieces.append(_words(work, rng, words))
    return Part(np.concatenate(pieces).astype(np.int32), frames)


def _words(work: Work, rng: np.random.Generator, count: int) -> np.ndarray:
    """Random tokens that are not special."""
    config = work.case.config
    special = min(config.image_token_id, config.vision_start_token_id)
    return rng.integers(0, min(special, config.text.vocab_size), count).astype(np.int32)


def greedy(work: Work) -> Work:
    """A small part of the work, sampled greedily. Both sides must draw the same tokens."""
    turn = min(work.turn, 8)
    summary = min(work.summary, 8)
    return dataclasses.replace(work, prompts=1, turn=turn, summary=summary, temperature=0.0)


# --- this engine ---


class Memory:
    """A `FrameSource` whose frames are in memory, so that no time goes into decoding files."""

    def __init__(self, work: Work):
        self._work = work
        self._pixels = {str(number): pixels(work, number) for number in range(work.prompts)}

    def request(self, task: ReadTask) -> Future[ReadFrames]:
        """Resize the frames at once."""
        return read_now(lambda: carry_out(task, self._probe, self._read))

    def _probe(self, path: str) -> VideoInfo:
        count, side = self._work.video, self._work.side
        return VideoInfo(path, count, float(count), np.arange(count, dtype=np.float64), side, side)

    def _read(self, path: str, indices: Sequence[int], rules: PixelRules | None) -> np.ndarray:
        return np.stack([shown(frame, rules) for frame in self._pixels[path][list(indices)]])


class MemoryFrames(FrameFeatures):
    """Features of the frames in memory."""

    encoder: TimedEncoder

    def __init__(self, work: Work, model: VisionLanguageModel):
        settings = FrameSettings(batch=2)  # a larger batch is no faster on CPU
        super().__init__(model.vision, model.config, settings, Path(), source=Memory(work))
        self.encoder = TimedEncoder(model.vision, settings)


class TimedEncoder(FrameEncoder):
    """An encoder that sums up the seconds of the vision tower."""

    seconds = 0.0

    def encode(self, pixels: np.ndarray, grid: tuple[int, int]) -> Iterator[Encoded]:
        start = time.perf_counter()
        encoded = [*super().encode(pixels, grid)]
        jax.block_until_ready([frame.batch for frame in encoded])
        self.seconds += time.perf_counter() - start
        return iter(encoded)


async def rollout(work: Work, number: int, sample: int) -> Rollout:
    """Play one rollout. Returns its sampled tokens."""
    sampled: Rollout = []

    def request(part: Part, new: int) -> Request:
        frames = tuple(Frame(str(number), int(i), float(i)) for i in part.frames)
        seed = hash((number, sample, len(sampled))) % 2**32
        return Request(part.ids, frames, Sampling(new, work.temperature), (seed,))

    async def collect(requests: Sequence[Request]) -> None:
        answers = await ask(*requests)
        sampled.extend([samples[0].ids.tolist() for samples in answers])

    context = opening(work, number)
    call = 0
    for crops in work.rounds:
        await collect([request(context, work.turn)])
        ids = [context.ids, np.array(sampled[-1], np.int32)]
        calls = range(call, call + crops)
        call += crops
        await collect([request(crop(work, number, sample, n), work.summary) for n in calls])
        ids += [response(work, number, sample, n) for n in calls]
        context = Part(np.concatenate(ids), context.frames)
    await collect([request(context, work.turn)])
    return sampled


def rollouts(work: Work, engine: Engine) -> tuple[list[Rollout], dict[str, float]]:
    """Run all rollouts with an empty cache.

    Returns:
        The rollouts, and their figures: total seconds, seconds in the tower and on the device, the
        fraction of time on the host, the fraction of row steps that gave a token, and counts.
    """
    features = engine.features
    assert isinstance(features, MemoryFrames)
    engine.forget()
    features.cache.drop(lambda key: True)
    before = dataclasses.replace(engine.counts)
    frames_before = features.encoded_frames
    tower_before = features.encoder.seconds
    compilations = Compilations()
    start = time.perf_counter()
    agents: list[Coroutine[Any, Any, Rollout]] = [
        rollout(work, number, sample)
        for number in range(work.prompts)
        for sample in range(work.samples)
    ]
    results = run(engine, agents)
    seconds = time.perf_counter() - start
    tower = features.encoder.seconds - tower_before
    assert compilations.count == 0, (
        f"{compilations.count} programs were compiled while they were timed; warm_up misses a shape"
    )
    after = engine.counts
    device = after.seconds - before.seconds + tower
    sampled_tokens = after.sampled_tokens - before.sampled_tokens
    return results, {
        "seconds": seconds,
        "tower": tower,
        "device": device,
        "host": 1 - device / seconds,
        "occupancy": sampled_tokens / (after.row_steps - before.row_steps),
        "encoded_frames": features.encoded_frames - frames_before,
        "prefilled_tokens": after.prefilled_tokens - before.prefilled_tokens,
        "sampled_tokens": sampled_tokens,
        "steps": after.steps - before.steps,
    }


def warm_engine(model: VisionLanguageModel, work: Work) -> Engine:
    """Make an engine and compile all its programs."""
    engine = Engine(model, MemoryFrames(work, model), work.settings)
    engine.warm_up()
    engine.features((Frame("0", 0, 0.0),))
    # A step adds the time of the warm-up to the counts, so that it is not counted later.
    engine.step()
    return engine


def ours(folder: str, work: Work) -> dict[str, Any]:
    """Measure this engine with all samples, and with half of them."""
    engine = warm_engine(hf.load(folder), work)
    greedy_rollouts, _ = rollouts(greedy(work), engine)
    _, whole = rollouts(work, engine)
    memory = peak_memory()
    _, half = rollouts(dataclasses.replace(work, samples=work.samples // 2), engine)
    return {
        "greedy": greedy_rollouts,
        **whole,
        "memory_gib": memory,
        "half": half,
        "plan_gib": plan(work),
    }


def plan(work: Work) -> dict[str, float]:
    """Memory that the engine needs by its sizes, in GiB.

    It includes arrays that stay on the device, and temporaries of the largest decoding program.
    """
    text = work.case.config.text
    settings = work.settings
    model = abstract_model(work.case.config)
    token = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * 4
    blocks = settings.slots // settings.rows_per_prefix
    row_tokens = max(
        settings.rows(length) * (length + settings.steps) for length in settings.row_lengths
    )
    sizes = {
        "weights": _weight_bytes(model),
        "layers' weights again, to decode": _weight_bytes(model.text.layers),
        "pages": (settings.pages + 1) * settings.page * token,
        "copies of shared prefixes": blocks * sum(settings.prefix_lengths) * token,
        # Twice: as gathered from the pages, and in the layout that decoding needs.
        "rows' own tokens, twice, to decode": 2 * row_tokens * token,
    }
    return {name: value / GIB for name, value in sizes.items()}


def _weight_bytes(module: Any) -> int:
    """Bytes of a module's weights in float32."""
    leaves = jax.tree.leaves(nnx.state(module, nnx.Param))
    return sum(math.prod(leaf.shape) for leaf in leaves) * 4


# --- transformers ---


class Theirs:
    """The same rollouts with transformers, as an experienced user would write them.

    Each prompt is prefilled once, and its cache is repeated for its samples. The rollouts of
    `together` prompts are decoded in one batch, without padding because their lengths are equal.
    Their crops form one batch too. The second turn continues from the caches of the first.
    """

    def __init__(self, folder: str, work: Work, together: int):
        import torch  # pyright: ignore[reportMissingImports]  (the extra parity)
        import transformers

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        torch.set_grad_enabled(False)
        self.torch = torch
        self.transformers = transformers
        self.work = work
        self.together = together
        self.model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.pixels = {number: pixels(work, number) for number in range(work.prompts)}
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def rollouts(self, work: Work) -> list[Rollout]:
        results: list[Rollout] = []
        for first in range(0, work.prompts, self.together):
            results += self._batch(work, first)
        return results

    def _batch(self, work: Work, first: int) -> list[Rollout]:
        """Play the rollouts of `together` prompts, as one row of the batch per rollout."""
        numbers = range(first, min(first + self.together, work.prompts))
        rows = [(number, sample) for number in numbers for sample in range(work.samples)]
        results: list[Rollout] = [[] for _ in rows]
        prompt = opening(work, 0)
        position = self._next_position(prompt, work.frames)
        with self.timed("prompts"):
            logits, cache = self._prompts(work, numbers)
        with self.timed("turns"):
            tokens = self._decode(work, logits, cache, position, work.turn)
        call = 0
        for crops in work.rounds:
            calls = range(call, call + crops)
            call += crops
            with self.timed("crops"):
                summaries = self._crops(work, rows, calls).tolist()
            for n, turn in enumerate(tokens.tolist()):
                results[n] += [turn, *summaries[n * crops : (n + 1) * crops]]
            position += work.turn
            with self.timed("turns"):
                # The last token of the turn has been sampled, but not fed to the model yet.
                answers = self._responses(work, rows, calls)
                new = self.torch.cat([tokens[:, -1:], answers], 1)
                logits = self._forward(new, cache, position - 1)
                position += new.shape[1] - 1
                tokens = self._decode(work, logits, cache, position, work.turn)
        for n, turn in enumerate(tokens.tolist()):
            results[n].append(turn)
        return results

    def _next_position(self, part: Part, frames: int) -> int:
        """The position of the first token after a prompt with `frames` frames."""
        grids = [self.work.grid] * frames
        return next_position(mrope_positions(part.ids, grids, self.work.case.config))

    def _responses(self, work: Work, rows: Sequence[tuple[int, int]], calls: Sequence[int]) -> Any:
        """The concatenated tool responses of each row's crops."""
        answers = [np.concatenate([response(work, *row, n) for n in calls]) for row in rows]
        return self.torch.tensor(np.stack(answers), dtype=self.torch.long)

    def inputs(self, work: Work, parts: Sequence[Part], numbers: Sequence[int]) -> dict[str, Any]:
        """Make a batch of equally long prompts, as a processor would."""
        torch = self.torch
        config = work.case.config
        ids = torch.tensor(np.stack([part.ids for part in parts]), dtype=torch.long)
        frames = np.concatenate(
            [self.pixels[number][part.frames] for part, number in zip(parts, numbers, strict=True)]
        )
        patches = patchify(frames, config.vision)
        return {
            "input_ids": ids,
            "pixel_values": torch.from_numpy(patches.reshape(-1, patches.shape[-1])),
            "image_grid_thw": torch.tensor([[1, *work.grid]] * len(frames)),
            "mm_token_type_ids": (ids == config.image_token_id).int(),
        }

    def _prompts(self, work: Work, numbers: Sequence[int]) -> tuple[Any, Any]:
        """Prefill each prompt once, and repeat its cache for its samples.

        Returns:
            The logits for every row's first token, and a cache with room for whole rollouts.
        """
        torch = self.torch
        logits = []
        layers = []
        for number in numbers:
            out = self.model(
                **self.inputs(work, [opening(work, number)], [number]),
                use_cache=True,
                logits_to_keep=1,
            )
            logits.append(out.logits[:, -1])
            layers.append(out.past_key_values.layers)
        room = sum(work.turn + crops * work.response for crops in work.rounds) + work.turn
        length = layers[0][0].keys.shape[2] + room
        cache = self.transformers.StaticCache(
            config=self.model.config.get_text_config(), max_cache_len=length
        )
        for number, of_prompts in enumerate(zip(*layers, strict=True)):
            keys = torch.cat([layer.keys for layer in of_prompts])
            values = torch.cat([layer.values for layer in of_prompts])
            cache.update(
                keys.repeat_interleave(work.samples, 0),
                values.repeat_interleave(work.samples, 0),
                number,
            )
        return torch.cat(logits).repeat_interleave(work.samples, 0), cache

    def _crops(self, work: Work, rows: Sequence[tuple[int, int]], calls: Sequence[int]) -> Any:
        """The summaries of all sub-agents, one row per sub-agent."""
        parts = [crop(work, *row, n) for row in rows for n in calls]
        numbers = [number for number, _ in rows for _ in calls]
        cache = self.transformers.DynamicCache()
        out = self.model(
            **self.inputs(work, parts, numbers),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        position = self._next_position(parts[0], work.crop_frames)
        return self._decode(work, out.logits[:, -1], cache, position, work.summary)

    def _decode(self, work: Work, logits: Any, cache: Any, position: int, new: int) -> Any:
        tokens = [self._draw(work, logits)]
        for step in range(new - 1):
            tokens.append(self._draw(work, self._forward(tokens[-1], cache, position + step)))
        return self.torch.cat(tokens, 1)

    def _forward(self, tokens: Any, cache: Any, position: int) -> Any:
        rows, count = tokens.shape
        positions = self.torch.arange(position, position + count).expand(3, rows, count)
        out = self.model(
            input_ids=tokens,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]

    def _draw(self, work: Work, logits: Any) -> Any:
        if not work.temperature:
            return logits.argmax(-1, keepdim=True)
        return self.torch.multinomial((logits / work.temperature).softmax(-1), 1)

    def plain(self, work: Work) -> float:
        """Time one prompt's rollouts with `generate` alone, which prefills every context anew."""
        start = time.perf_counter()
        sampling = {
            "do_sample": True,
            "temperature": work.temperature,
            "top_k": 0,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        rows = [(0, sample) for sample in range(work.samples)]
        prompt = opening(work, 0)
        out = self.model.generate(
            **self.inputs(work, [prompt], [0]),
            **sampling,
            num_return_sequences=work.samples,
            max_new_tokens=work.turn,
        )
        call = 0
        for crops in work.rounds:
            calls = range(call, call + crops)
            call += crops
            parts = [crop(work, *row, n) for row in rows for n in calls]
            batch = self.inputs(work, parts, [0] * len(parts))
            self.model.generate(**batch, **sampling, max_new_tokens=work.summary)
            context = self.torch.cat([out, self._responses(work, rows, calls)], 1)
            parts = [Part(ids, prompt.frames) for ids in context.numpy()]
            batch = self.inputs(work, parts, [0] * work.samples)
            out = self.model.generate(**batch, **sampling, max_new_tokens=work.turn)
        return time.perf_counter() - start


def theirs(folder: str, work: Work, together: int, plain: bool) -> dict[str, Any]:
    side = Theirs(folder, work, together)
    greedy_rollouts = side.rollouts(greedy(work))
    side.seconds.clear()
    start = time.perf_counter()
    side.rollouts(work)
    found = {
        "greedy": greedy_rollouts,
        "seconds": time.perf_counter() - start,
        "parts": side.seconds,
        "memory_gib": peak_memory(),
    }
    if plain:
        found["plain_seconds_a_prompt"] = side.plain(work)
    return found


# --- the comparison ---


def compare(work: Work, rounds: int, together: int, plain: bool) -> dict[str, list[dict[str, Any]]]:
    """Measure both sides alternately, `rounds` times.

    Raises:
        AssertionError: The greedy rollouts of the two sides differ.
    """
    found: dict[str, list[dict[str, Any]]] = {"here": [], "transformers": []}
    with tempfile.TemporaryDirectory() as folder:
        alone(make, folder, work.case)
        for _ in range(rounds):
            found["here"].append(alone(ours, folder, work))
            found["transformers"].append(alone(theirs, folder, work, together, plain))
            check(found["here"][-1].pop("greedy"), found["transformers"][-1].pop("greedy"))
    return found


def check(mine: list[Rollout], other: list[Rollout]) -> None:
    """Raise AssertionError if a greedy token differs."""
    assert len(mine) == len(other) > 0
    for number, (here, there) in enumerate(zip(mine, other, strict=True)):
        assert here == there, f"greedy rollout {number}: {here} here, {there} in transformers"


def report(work: Work, found: dict[str, list[dict[str, Any]]]) -> str:
    """Format the tables, with the best round of each side."""
    mine = min(found["here"], key=lambda result: result["seconds"])
    other = min(found["transformers"], key=lambda result: result["seconds"])
    planned = mine["plan_gib"]
    parts = [f"{name} {value:.1f}" for name, value in other["parts"].items()]
    memory = [f"{name} {value:.2f}" for name, value in planned.items()]
    lines = [
        *_rates(work, mine, other),
        "",
        "transformers, seconds: " + ", ".join(parts),
        "",
        *_counts(work, mine),
        "",
        _needed(work),
        "",
        "planned GiB: " + ", ".join(memory),
        f"planned {sum(planned.values()):.1f} GiB, resident at most {mine['memory_gib']:.1f} GiB",
    ]
    return "\n".join(lines)


def _rates(work: Work, mine: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The table with the speed of both sides."""
    lines = [
        "| side | seconds | generated tokens/s | times transformers | resident GiB at most |",
        "|---" * 5 + "|",
    ]
    for name, result in (("here", mine), ("transformers", other)):
        seconds = result["seconds"]
        lines.append(
            f"| {name} | {seconds:.1f} | {work.generated / seconds:.2f} "
            f"| {other['seconds'] / seconds:.2f} | {result['memory_gib']:.1f} |"
        )
    if "plain_seconds_a_prompt" in other:
        seconds = other["plain_seconds_a_prompt"] * work.prompts
        lines.append(
            f"| `generate`, one prompt measured | {seconds:.1f} | {work.generated / seconds:.2f} "
            f"| {other['seconds'] / seconds:.2f} | |"
        )
    return lines


def _counts(work: Work, mine: dict[str, Any]) -> list[str]:
    """The table of the engine's counts, with all samples and with half of them."""
    lines = [
        "| samples per prompt | tokens prefilled | frames encoded | steps "
        "| slots filled | seconds | tower | host |",
        "|---" * 8 + "|",
    ]
    for samples, result in ((work.samples, mine), (work.samples // 2, mine["half"])):
        lines.append(
            f"| {samples} | {result['prefilled_tokens']} | {result['encoded_frames']} "
            f"| {result['steps']} | {result['occupancy']:.0%} | {result['seconds']:.1f} "
            f"| {result['tower']:.1f} | {result['host']:.1%} |"
        )
    return lines


def _needed(work: Work) -> str:
    """The tokens that have to be prefilled if each is computed only once."""
    prompt = len(opening(work, 0).ids) - 1
    crops = sum(work.rounds)
    windows = crops * (len(crop(work, 0, 0, 0).ids) - 1)
    return (
        f"needed: {prompt} tokens per prompt; per rollout, {windows} of crops and "
        f"{crops * work.response} of responses"
    )


# --- cost by the number of crops ---


def by_crops(case: str, most: int) -> dict[str, list[float]]:
    """Time one group's rollouts with 1 to `most` crops: all in one turn, or one per turn."""
    work = FEW[case]
    make_model = nnx.jit(lambda: VisionLanguageModel(work.case.config, rngs=nnx.Rngs(0)))
    engine = warm_engine(make_model(), work)
    seconds: dict[str, list[float]] = {"parallel": [], "sequential": []}
    for crops in range(1, most + 1):
        for name, rounds in (("parallel", (crops,)), ("sequential", (1,) * crops)):
            _, counts = rollouts(dataclasses.replace(work, rounds=rounds), engine)
            seconds[name].append(counts["seconds"])
    return seconds


def crops_table(seconds: dict[str, list[float]]) -> str:
    count = len(seconds["parallel"])
    titles = " | ".join(str(n) for n in range(1, count + 1))
    lines = [f"| crops | {titles} |", "|---" * (count + 1) + "|"]
    for name, values in seconds.items():
        cells = " | ".join(f"{value:.1f}" for value in values)
        lines.append(f"| {name}, s | {cells} |")
    return "\n".join(lines)


def plot(seconds: dict[str, list[float]], file: Path) -> None:
    """Draw both curves with matplotlib."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]  (no dependency)

    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, values in seconds.items():
        axes.plot(range(1, len(values) + 1), values, marker="o", label=name)
    axes.set(xlabel="crops of a rollout", ylabel="seconds", ylim=(0, None))
    axes.legend()
    figure.savefig(file, dpi=150)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Times the same rollouts in transformers and here."
    )
    add = parser.add_argument
    add("--case", choices=WORKS, default="small", help="size of the model and of the work")
    add(
        "--rounds",
        type=int,
        default=1,
        help="number of measurements; each takes about half an hour for the case small",
    )
    add("--prompts", type=int, help="number of prompts, fewer than the case has for a quick look")
    add(
        "--together",
        type=int,
        default=4,
        help="prompts whose rollouts transformers decodes in one batch",
    )
    add("--plain", action="store_true", help="also time one prompt with `generate` alone")
    add(
        "--crops",
        type=int,
        metavar="N",
        help="only time the engine, on rollouts with 1 to N crops",
    )
    add("--plot", type=Path, help="image file for the curves of `--crops`; needs matplotlib")
    add("--json", type=Path, help="file for the machine and every measured number")
    return parser


def main() -> None:
    args = _parser().parse_args()
    require_local("--plot", args.plot)
    require_local("--json", args.json)
    if args.crops:
        found = by_crops(args.case, args.crops)
        print(crops_table(found))
        if args.plot and importlib.util.find_spec("matplotlib"):
            plot(found, args.plot)
    else:
        work = WORKS[args.case]
        if args.prompts:
            work = dataclasses.replace(work, prompts=args.prompts)
        found = compare(work, args.rounds, args.together, args.plain)
        print(report(work, found))
    hardware = machine()
    print()
    print(", ".join(f"{name} {value}" for name, value in hardware.items()))
    if args.json:
        args.json.write_text(json.dumps({"machine": hardware, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
