"""A step's rollouts in transformers and here, on the same cores: prompts of many frames, crops, a second turn.

`python -m benchmarks.engine`, with the extra parity, prints the tables of docs/speed.md; `--crops` what a rollout costs by the
number of its crops; `--json FILE` keeps every number. Owns the work: lengths are fixed and nothing stops early, so that both
sides do the same. Each side runs in a process of its own and loads the same random weights. Refuses to report where their
greedy tokens differ, or where something was compiled while the clock ran.
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
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from flax import nnx
from jaxtyping import Int, UInt8

from benchmarks.model import CASES, Case, alone, machine, make, peak_memory
from models.features import FrameFeatures, FrameSettings
from models.patches import patchify
from models.qwen3_vl import hf
from models.qwen3_vl.model import Qwen3VL, abstract_model
from models.qwen3_vl.rope import mrope_positions, next_position
from paravt_jax.data import video
from paravt_jax.data.frames import VideoInfo, overview_indices
from paravt_jax.data.local_path import require_local
from paravt_jax.method.records import Frame
from rollout.engine.engine import Engine
from rollout.engine.requests import Request, Sampling, ask, run
from rollout.engine.settings import EngineSizes
from train.durable.compilations import Compilations

GIB = 2**30
Rollout = list[
    list[int]
]  # what was sampled: turns and summaries, in the order in which they were asked for


@dataclasses.dataclass(frozen=True)
class Work:
    """`prompts` groups of `samples` rollouts. Lengths in tokens; frames are squares of `side` pixels.

    A prompt is `frames` frames of a video that has `video` of them, each after its time, and a question. A rollout is a turn, crops of
    `crop_frames` frames side by side, whose sub-agents answer with a summary each, and so on by `rounds`; then a last turn.
    """

    case: Case
    settings: EngineSizes
    prompts: int = 8
    samples: int = 8
    frames: int = 64
    video: int = 256
    side: int = 192
    time: int = 12
    question: int = 60
    turn: int = 64
    rounds: tuple[int, ...] = (2,)
    crop_frames: int = 8
    request: int = 30
    summary: int = 32
    response: int = 30
    temperature: float = 0.7

    @property
    def grid(self) -> tuple[int, int]:
        patches = self.side // self.case.config.vision.patch_size
        return patches, patches

    @property
    def generated(self) -> int:
        """Tokens sampled in all rollouts."""
        return (
            self.prompts
            * self.samples
            * (self.turn * (len(self.rounds) + 1) + self.summary * sum(self.rounds))
        )


_SMALL = Work(
    CASES["small"],
    # Rows: the first turn, the second, a sub-agent, a whole rollout. Prefill: what follows a turn,
    # a sub-agent's prompt, a prompt.
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
# For `--crops`: one group, of whose rollouts every sub-agent has a slot.
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


# --- the work, the same for both sides ---


class Part(NamedTuple):
    """Ids, and the numbers of the frames that the placeholders in them stand for."""

    ids: Int[np.ndarray, " t"]
    frames: Int[np.ndarray, " f"]


def opening(work: Work, number: int) -> Part:
    """The prompt of a group: frames of the whole video, and a question."""
    return _part(work, overview_indices(work.video, work.frames), (0, number), work.question)


def crop(work: Work, number: int, sample: int, call: int) -> Part:
    """A sub-agent's prompt: neighbouring frames from somewhere in the video, and a request."""
    first = np.random.default_rng((1, number, sample, call)).integers(
        work.video - work.crop_frames + 1
    )
    return _part(work, first + np.arange(work.crop_frames), (2, number, sample, call), work.request)


def response(work: Work, number: int, sample: int, call: int) -> Int[np.ndarray, " t"]:
    """What a crop's tool answers."""
    return _words(work, np.random.default_rng((3, number, sample, call)), work.response)


def pixels(work: Work, number: int) -> UInt8[np.ndarray, "m y x 3"]:
    """A video's frames."""
    return np.random.default_rng((4, number)).integers(
        0, 256, (work.video, work.side, work.side, 3), np.uint8
    )


def _part(work: Work, frames: np.ndarray, seed: tuple[int, ...], words: int) -> Part:
    config, rng = work.case.config, np.random.default_rng(seed)
    tokens = math.prod(work.grid) // config.vision.spatial_merge_size**2
    image = [config.vision_start_token_id] + [config.image_token_id] * tokens
    pieces = [piece for _ in frames for piece in (_words(work, rng, work.time), image)]
    return Part(np.concatenate([*pieces, _words(work, rng, words)]).astype(np.int32), frames)


def _words(work: Work, rng: np.random.Generator, count: int) -> np.ndarray:
    config = work.case.config
    return rng.integers(
        0, min(config.image_token_id, config.vision_start_token_id, config.text.vocab_size), count
    ).astype(np.int32)


def greedy(work: Work) -> Work:
    """Little of the work, with one answer: what both sides must agree on."""
    return dataclasses.replace(
        work, prompts=1, turn=min(work.turn, 8), summary=min(work.summary, 8), temperature=0.0
    )


# --- here ---


class MemoryFrames(FrameFeatures):
    """Frames of videos that are in memory: decoding files is not what is timed. `seconds` is how long the tower was waited for."""

    def __init__(self, work: Work, model: Qwen3VL):
        super().__init__(
            model.vision, model.config, FrameSettings(batch=2), Path(), source=video
        )  # a larger batch is no faster on CPU
        self._work, self._pixels = (
            work,
            {str(number): pixels(work, number) for number in range(work.prompts)},
        )
        self._tower, self._encode, self.seconds = self._encode, self._timed, 0.0

    def info(self, name: str) -> VideoInfo:
        count, side = self._work.video, self._work.side
        return VideoInfo(name, count, float(count), np.arange(count, dtype=np.float64), side, side)

    def drop(self) -> None:
        """Forgets every frame's vectors."""
        for key in [*self._store]:
            self._drop(key)

    def _encode_video(self, name: str, wanted: list[int]):
        with mock.patch.object(
            video, "read", lambda path, indices: self._pixels[path.name][indices]
        ):
            return super()._encode_video(name, wanted)

    def _timed(self, *arguments: Any) -> jax.Array:
        start = time.perf_counter()
        vectors = self._tower(*arguments).block_until_ready()
        self.seconds += time.perf_counter() - start
        return vectors


async def rollout(work: Work, number: int, sample: int) -> Rollout:
    """An agent of an episode."""
    said: Rollout = []

    def request(part: Part, new: int) -> Request:
        frames = tuple(Frame(str(number), int(i), float(i)) for i in part.frames)
        return Request(
            part.ids,
            frames,
            Sampling(new, work.temperature),
            (hash((number, sample, len(said))) % 2**32,),
        )

    async def answers(requests: Sequence[Request]) -> None:
        said.extend([samples[0].ids.tolist() for samples in await ask(*requests)])

    context, call = opening(work, number), 0
    for crops in work.rounds:
        await answers([request(context, work.turn)])
        ids = [context.ids, np.array(said[-1], np.int32)]
        calls = range(call, call + crops)
        await answers([request(crop(work, number, sample, n), work.summary) for n in calls])
        ids += [response(work, number, sample, n) for n in calls]
        context, call = Part(np.concatenate(ids), context.frames), call + crops
    await answers([request(context, work.turn)])
    return said


def rollouts(work: Work, engine: Engine) -> tuple[list[Rollout], dict[str, float]]:
    """All rollouts, by an engine that remembers nothing of others, and what that took."""
    features, before, compilations = (
        engine.features,
        dataclasses.replace(engine.counts),
        Compilations(),
    )
    assert isinstance(features, MemoryFrames)
    engine.forget()
    features.drop()
    frames, tower, start = features.encoded_frames, features.seconds, time.perf_counter()
    agents: list[Coroutine[Any, Any, Rollout]] = [
        rollout(work, number, sample)
        for number in range(work.prompts)
        for sample in range(work.samples)
    ]
    said = run(engine, agents)
    seconds, tower = time.perf_counter() - start, features.seconds - tower
    assert compilations.count == 0, (
        f"{compilations.count} programs were compiled while the clock ran; warm_up forgets a shape"
    )
    counts = {
        name: getattr(engine.counts, name) - getattr(before, name)
        for name in ("prefilled_tokens", "sampled_tokens", "steps", "row_steps")
    }
    device = engine.counts.seconds - before.seconds + tower
    occupancy = counts["sampled_tokens"] / counts.pop("row_steps")
    parts = {"tower": tower, "device": device, "host": 1 - device / seconds, "occupancy": occupancy}
    return said, {
        "seconds": seconds,
        **parts,
        "encoded_frames": features.encoded_frames - frames,
        **counts,
    }


def warm_engine(model: Qwen3VL, work: Work) -> Engine:
    """An engine that has met every shape."""
    engine = Engine(model, MemoryFrames(work, model), work.settings)
    engine.warm_up()
    engine.features((Frame("0", 0, 0.0),))
    engine.step()  # counts the seconds until here
    return engine


def ours(folder: str, work: Work) -> dict[str, Any]:
    engine = warm_engine(hf.load(folder), work)
    agreed, _ = rollouts(greedy(work), engine)
    _, whole = rollouts(work, engine)
    memory = peak_memory()
    _, half = rollouts(dataclasses.replace(work, samples=work.samples // 2), engine)
    return {"greedy": agreed, **whole, "memory_gib": memory, "half": half, "plan_gib": plan(work)}


def plan(work: Work) -> dict[str, float]:
    """The memory that the sizes ask for, in GiB: what stays, and what the largest program of decoding works on while it runs."""
    text, settings, model = work.case.config.text, work.settings, abstract_model(work.case.config)
    token = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * 4
    lines = settings.slots // settings.rows_per_prefix * sum(settings.prefix_lengths)

    def size(weights: Any) -> float:
        return (
            sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(weights, nnx.Param)))
            * 4
        )

    sizes = {
        "weights": size(model),
        "layers' weights again, to decode": size(model.text.layers),
        "pages": (settings.pages + 1) * settings.page * token,
        "lines of shared starts": lines * token,
        # As they come from their pages, and as decoding wants them.
        "rows' own tokens, twice, to decode": 2
        * max(settings.rows(own) * (own + settings.steps) for own in settings.row_lengths)
        * token,
    }
    return {name: value / GIB for name, value in sizes.items()}


# --- transformers ---


class Theirs:
    """The same rollouts as a user of transformers would write them who knows it well.

    A prompt's first pass is that of one row, whose cache is then repeated for its samples; all rollouts of `together` prompts are decoded
    in one batch, without padding, since their lengths are equal; their crops are one batch, too; the second turn goes on from the caches.
    """

    def __init__(self, folder: str, work: Work, together: int):
        import torch  # pyright: ignore[reportMissingImports]  (the extra parity)
        import transformers

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        torch.set_grad_enabled(False)
        self.torch, self.transformers, self.work, self.together = (
            torch,
            transformers,
            work,
            together,
        )
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
        return [
            said
            for first in range(0, work.prompts, self.together)
            for said in self._batch(work, first)
        ]

    def _batch(self, work: Work, first: int) -> list[Rollout]:
        torch = self.torch
        numbers = range(first, min(first + self.together, work.prompts))
        rows = [(number, sample) for number in numbers for sample in range(work.samples)]
        said: list[Rollout] = [[] for _ in rows]
        start = opening(work, 0)
        position = next_position(
            mrope_positions(start.ids, [work.grid] * work.frames, work.case.config)
        )
        with self.timed("prompts"):
            logits, cache = self._prompts(work, numbers)
        with self.timed("turns"):
            tokens = self._decode(work, logits, cache, position, work.turn)
        call = 0
        for crops in work.rounds:
            parts = [crop(work, *row, n) for row in rows for n in range(call, call + crops)]
            with self.timed("crops"):
                summaries = self._crops(
                    work, parts, [number for number, _ in rows for _ in range(crops)]
                )
            for n, row in enumerate(tokens.tolist()):
                said[n] += [row, *summaries[n * crops : (n + 1) * crops].tolist()]
            answers = [
                np.concatenate([response(work, *row, n) for n in range(call, call + crops)])
                for row in rows
            ]
            position += work.turn
            with self.timed("turns"):
                more = torch.cat(
                    [tokens[:, -1:], torch.tensor(np.stack(answers), dtype=torch.long)], 1
                )
                logits = self._forward(more, cache, position - 1)
                position, call = position + more.shape[1] - 1, call + crops
                tokens = self._decode(work, logits, cache, position, work.turn)
        for n, row in enumerate(tokens.tolist()):
            said[n].append(row)
        return said

    def inputs(self, work: Work, parts: Sequence[Part], numbers: Sequence[int]) -> dict[str, Any]:
        """A batch of equally long prompts about videos, as a processor would give it."""
        torch, config = self.torch, work.case.config
        ids = torch.tensor(np.stack([part.ids for part in parts]), dtype=torch.long)
        frames = np.concatenate(
            [self.pixels[number][part.frames] for part, number in zip(parts, numbers, strict=True)]
        )
        patches = patchify(frames, config.vision.patch_size, config.vision.spatial_merge_size)
        return {
            "input_ids": ids,
            "pixel_values": torch.from_numpy(patches.reshape(-1, patches.shape[-1])),
            "image_grid_thw": torch.tensor([[1, *work.grid]] * len(frames)),
            "mm_token_type_ids": (ids == config.image_token_id).int(),
        }

    def _prompts(self, work: Work, numbers: Sequence[int]) -> tuple[Any, Any]:
        """Each prompt once; then every layer's cache as often as there are samples, with room for the whole rollout."""
        torch, logits, layers = self.torch, [], []
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
        for number, same in enumerate(zip(*layers, strict=True)):
            k, v = (
                torch.cat([getattr(layer, name) for layer in same]) for name in ("keys", "values")
            )
            cache.update(
                k.repeat_interleave(work.samples, 0), v.repeat_interleave(work.samples, 0), number
            )
        return torch.cat(logits).repeat_interleave(work.samples, 0), cache

    def _crops(self, work: Work, parts: Sequence[Part], numbers: Sequence[int]) -> Any:
        cache = self.transformers.DynamicCache()
        out = self.model(
            **self.inputs(work, parts, numbers),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        position = next_position(
            mrope_positions(parts[0].ids, [work.grid] * work.crop_frames, work.case.config)
        )
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
        """Seconds for the rollouts of one prompt with `generate` alone."""
        torch, start = self.torch, time.perf_counter()
        sampling = {
            "do_sample": True,
            "temperature": work.temperature,
            "top_k": 0,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        part, call = opening(work, 0), 0
        batch = self.inputs(work, [part], [0])
        out = self.model.generate(
            **batch, **sampling, num_return_sequences=work.samples, max_new_tokens=work.turn
        )
        for crops in work.rounds:
            calls = [
                (sample, n) for sample in range(work.samples) for n in range(call, call + crops)
            ]
            batch = self.inputs(work, [crop(work, 0, *each) for each in calls], [0] * len(calls))
            self.model.generate(**batch, **sampling, max_new_tokens=work.summary)
            answers = [
                np.concatenate([response(work, 0, sample, call + n) for n in range(crops)])
                for sample in range(work.samples)
            ]
            whole = torch.cat([out, torch.tensor(np.stack(answers), dtype=torch.long)], 1)
            batch = self.inputs(
                work, [Part(row, part.frames) for row in whole.numpy()], [0] * work.samples
            )
            out = self.model.generate(**batch, **sampling, max_new_tokens=work.turn)
            call += crops
        return time.perf_counter() - start


def theirs(folder: str, work: Work, together: int, plain: bool) -> dict[str, Any]:
    side = Theirs(folder, work, together)
    agreed = side.rollouts(greedy(work))
    side.seconds.clear()
    start = time.perf_counter()
    side.rollouts(work)
    seconds, memory = time.perf_counter() - start, peak_memory()
    one = {"plain_seconds_a_prompt": side.plain(work)} if plain else {}
    return {
        "greedy": agreed,
        "seconds": seconds,
        "parts": side.seconds,
        "memory_gib": memory,
        **one,
    }


# --- the comparison ---


def compare(work: Work, rounds: int, together: int, plain: bool) -> dict[str, list[dict[str, Any]]]:
    """What either side said of every round. AssertionError where their greedy rollouts differ."""
    found: dict[str, list[dict[str, Any]]] = {"here": [], "transformers": []}
    with tempfile.TemporaryDirectory() as folder:
        alone(make, folder, work.case)
        for _ in range(rounds):
            found["here"].append(alone(ours, folder, work))
            found["transformers"].append(alone(theirs, folder, work, together, plain))
            check(found["here"][-1].pop("greedy"), found["transformers"][-1].pop("greedy"))
    return found


def check(mine: list[Rollout], other: list[Rollout]) -> None:
    """Both sides computed the same: AssertionError where a greedy token differs."""
    assert len(mine) == len(other) > 0
    for number, (here, there) in enumerate(zip(mine, other, strict=True)):
        assert here == there, f"greedy rollout {number}: {here} here, {there} in transformers"


def report(work: Work, found: dict[str, list[dict[str, Any]]]) -> str:
    """Rates of the best round, and what the engine counted in it."""
    mine, other = (
        min(found[side], key=lambda result: result["seconds"]) for side in ("here", "transformers")
    )
    rate = {
        name: work.generated / result["seconds"]
        for name, result in (("here", mine), ("transformers", other))
    }
    lines = [
        "| side | seconds | generated tokens/s | times transformers | resident GiB at most |",
        "|---" * 5 + "|",
    ]
    for name, result in (("here", mine), ("transformers", other)):
        ahead = rate[name] / rate["transformers"]
        lines.append(
            f"| {name} | {result['seconds']:.1f} | {rate[name]:.2f} | {ahead:.2f} | {result['memory_gib']:.1f} |"
        )
    if "plain_seconds_a_prompt" in other:
        seconds = other["plain_seconds_a_prompt"] * work.prompts
        ahead = other["seconds"] / seconds
        lines.append(
            f"| `generate`, one prompt measured | {seconds:.1f} | {work.generated / seconds:.2f} | {ahead:.2f} | |"
        )
    lines += [
        "",
        "transformers, seconds: "
        + ", ".join(f"{name} {value:.1f}" for name, value in other["parts"].items()),
    ]
    titles = "samples a prompt | tokens prefilled | frames encoded | steps | slots filled | seconds | tower | host"
    lines += ["", f"| {titles} |", "|---" * 8 + "|"]
    for samples, result in ((work.samples, mine), (work.samples // 2, mine["half"])):
        counted = " | ".join(
            str(result[name]) for name in ("prefilled_tokens", "encoded_frames", "steps")
        )
        times = f"{result['occupancy']:.0%} | {result['seconds']:.1f} | {result['tower']:.1f} | {result['host']:.1%}"
        lines.append(f"| {samples} | {counted} | {times} |")
    prompt = len(opening(work, 0).ids) - 1
    after = sum(work.rounds) * work.response
    windows = sum(work.rounds) * (len(crop(work, 0, 0, 0).ids) - 1)
    lines += [
        "",
        f"needed: {prompt} tokens a prompt, {windows} of crops and {after} of responses a rollout",
    ]
    planned = mine["plan_gib"]
    lines += [
        "",
        "planned GiB: " + ", ".join(f"{name} {value:.2f}" for name, value in planned.items()),
    ]
    lines += [
        f"planned {sum(planned.values()):.1f} GiB, resident at most {mine['memory_gib']:.1f} GiB"
    ]
    return "\n".join(lines)


# --- cost by the number of crops ---


def by_crops(case: str, most: int) -> dict[str, list[float]]:
    """Seconds of one group's rollouts with 1 to `most` crops: all in one turn, and one a turn."""
    work = FEW[case]
    engine = warm_engine(nnx.jit(lambda: Qwen3VL(work.case.config, rngs=nnx.Rngs(0)))(), work)
    seconds: dict[str, list[float]] = {"parallel": [], "sequential": []}
    for crops in range(1, most + 1):
        for name, rounds in (("parallel", (crops,)), ("sequential", (1,) * crops)):
            seconds[name].append(
                rollouts(dataclasses.replace(work, rounds=rounds), engine)[1]["seconds"]
            )
    return seconds


def crops_table(seconds: dict[str, list[float]]) -> str:
    count = len(seconds["parallel"])
    lines = [
        f"| crops | {' | '.join(str(n) for n in range(1, count + 1))} |",
        "|---" * (count + 1) + "|",
    ]
    lines += [
        f"| {name}, s | {' | '.join(f'{value:.1f}' for value in values)} |"
        for name, values in seconds.items()
    ]
    return "\n".join(lines)


def plot(seconds: dict[str, list[float]], file: Path) -> None:
    """Draws both lines, with matplotlib."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]  (no dependency)

    axes = (figure := Figure(figsize=(5, 3.2), layout="constrained")).subplots()
    for name, values in seconds.items():
        axes.plot(range(1, len(values) + 1), values, marker="o", label=name)
    axes.set(xlabel="crops of a rollout", ylabel="seconds", ylim=(0, None))
    axes.legend()
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Times the same rollouts in transformers and here."
    )
    parser.add_argument("--case", choices=WORKS, default="small")
    parser.add_argument(
        "--rounds", type=int, default=1, help="about half an hour each at the small size"
    )
    parser.add_argument("--prompts", type=int, help="fewer than all, for a look")
    parser.add_argument(
        "--together",
        type=int,
        default=4,
        help="prompts whose rollouts transformers decodes in one batch",
    )
    parser.add_argument(
        "--plain", action="store_true", help="time one prompt with `generate` alone, too"
    )
    parser.add_argument(
        "--crops",
        type=int,
        metavar="N",
        help="instead: the engine's seconds by the number of crops, up to N",
    )
    parser.add_argument(
        "--plot", type=Path, help="file to draw `--crops` into, where matplotlib is installed"
    )
    parser.add_argument(
        "--json", type=Path, help="file to write the machine and every measured number to"
    )
    args = parser.parse_args()
    require_local("--plot", args.plot)
    require_local("--json", args.json)
    if args.crops:
        found = by_crops(args.case, args.crops)
        print(crops_table(found))
        if args.plot and importlib.util.find_spec("matplotlib"):
            plot(found, args.plot)
    else:
        work = dataclasses.replace(
            WORKS[args.case], prompts=args.prompts or WORKS[args.case].prompts
        )
        found = compare(work, args.rounds, args.together, args.plain)
        print(report(work, found))
    hardware = machine()
    print("", ", ".join(f"{name} {value}" for name, value in hardware.items()), sep="\n")
    if args.json:
        args.json.write_text(json.dumps({"machine": hardware, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
