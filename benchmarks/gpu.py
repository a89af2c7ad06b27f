"""Times `paravt_2b_lora` on one GPU, on a bare machine: `python -m benchmarks.gpu`

It downloads nothing: weights are random, of the published size, and scenes are drawn. It takes nine
minutes at most. Each part is a process of its own, which prints and stores each figure at once, so
a run that is cut off keeps what it has measured. The same command continues it: parts that have
ended are not repeated. At the end it prints a table. A share is that of the card's own ceiling,
which the first part measures: bytes copied per second, or FLOPs of a matrix product in bfloat16 per
second. An update counts as three forward passes, with adapters too, as in MFU.

    ceilings      copies and matrix products
    compile       all programs, without a cache; if it is continued, those that it had not compiled
    load          the same in another process, from the cache as far as `compile` came
    decode        the engine, with as many sequences as a step has rollouts
    learn         reference and update of a step whose text is made up, and attention alone
    sft           steps of the cold start, after the first one
    rl            steps of PARA-GRPO, with responses as long as they may be, then of drawn lengths
    transformers  `generate` of transformers for the samples of `decode`; needs torch with CUDA

`--size tiny` does the same with a tiny model, for a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.model import machine
from configs.lora import paravt_2b_lora
from models.attention import RowLayout, attend
from models.compilation import compile_ahead
from models.devices import reported_memory, reserve_memory, reuse_freed_memory
from models.model import VisionLanguageModel
from models.sharding import make_mesh
from models.weights.hf_config import to_hf
from paravt_extras.fit import GIB, fit, total_bytes
from paravt_extras.rehearsal import cut, scene_vocabulary
from paravt_extras.scenes import ANNOTATIONS, MEDIA, SceneSettings, write_scenes
from paravt_extras.slices import found_devices
from paravt_jax.data import tokenizer_file
from paravt_jax.data.frame_reader import FrameReader
from paravt_jax.data.stored import write_atomically
from paravt_jax.method.accuracy import Rules
from paravt_jax.method.records import digest
from rollout.engine.engine import Engine
from rollout.engine.requests import Completion, Request, Sample, SampleStop, Sampling
from train.actor import EngineActor, open_actor, open_environment
from train.data import QuestionStream
from train.learn.packing import GroupLengths
from train.learn.rl import Learner
from train.learn.rollouts import Actor, begin, draw_budgets, roll_out
from train.learn.sft import SFTBatches, make_sft_updater, sft_step
from train.learn.speed import (
    forward_flops,
    peak_flops,
    real_tokens,
    score_flops,
    speeds,
    visible_pairs,
)
from train.model import take_apart
from train.prepare import prepare
from train.rl import rl_step
from train.settings import change

STEPS = 3
"""Timed steps of each kind."""

_COPY, _MATMUL = "copy", "matrix product"
# Drawn lengths are lognormal, in shares of the limit. Of 32 rollouts with a limit of 1,024 tokens,
# about three have more than 450, and the mean is 245.
_MEDIAN, _SPREAD = 0.2, 0.6


class Figure(NamedTuple):
    """A measured number."""

    name: str
    value: float
    unit: str = "s"
    share: float | None = None
    """Share of what the card can do."""


def write_sources(size: str, folder: pathlib.Path) -> None:
    """Draw scenes, and write a tokenizer with their words, unless they are there."""
    videos, lines = (4, 320) if size == "tiny" else (32, 360)
    write_scenes(SceneSettings(videos=videos, heldout=1, lines=lines), folder / "scenes")
    run = paravt_2b_lora()
    vocabulary = scene_vocabulary(folder / "scenes", run.protocol.make_tools(), run.model.dialect)
    tokenizer_file.save(vocabulary, folder / "model")


class Bench:
    """What parts share. Arrays and programs are made when they are first asked for.

    Args:
        size: "2b" or "tiny".
        folder: The files of `write_sources`, and what is made of them.
        rates: What the card can do, by the names of figures.
        reader: Reads the scenes.
    """

    def __init__(
        self, size: str, folder: pathlib.Path, rates: Mapping[str, float], reader: FrameReader
    ):
        self.tiny = size == "tiny"
        self.steps = 1 if self.tiny else STEPS
        self.folder = folder
        self.bytes_per_second = rates.get(_COPY, math.nan) * 1e12
        self.flops = rates.get(_MATMUL, math.nan) * 1e12
        self.reader = reader
        run = cut(paravt_2b_lora()) if self.tiny else paravt_2b_lora()
        fields: dict[str, Any] = {
            "model.path": str(folder / "model"),
            "data.annotations": str(folder / "scenes" / ANNOTATIONS),
            "data.media": str(folder / "scenes" / MEDIA),
            "data.folder": str(folder / "set"),
            "evaluation.questions": 0,
        }
        if self.tiny:
            fields |= {"rl.grpo.group_size": 2, "rl.frame_budgets": (4,)}
            fields |= {"engine.slots": 4, "protocol.turn_tokens": 8}
        self.run = fit(change(run, run.name, fields), found_devices()).run
        assert self.run.rl is not None and self.run.sft is not None
        self.rl, self.sft = self.run.rl, self.run.sft
        self.data = prepare(self.run, folder / "run")
        vocabulary, config = self.data.vocabulary, self.run.model.config()
        text = config.text
        if self.tiny:
            # The logits of the published vocabulary would take most of the time.
            text = dataclasses.replace(text, vocab_size=vocabulary.size)
        self.config = dataclasses.replace(config, text=text, **vocabulary.visual_ids)

    @functools.cached_property
    def parts(self) -> Any:
        """The model with random weights: what is frozen, and the trained weights."""
        dtype = jnp.dtype(self.run.model.dtype)
        make = functools.partial(VisionLanguageModel, self.config, dtype=dtype, param_dtype=dtype)
        model = nnx.jit(lambda: make(rngs=nnx.Rngs(0)))()
        return take_apart(model, self.run, make_mesh(), {})

    @functools.cached_property
    def environment(self) -> Any:
        return open_environment(self.run, self.data, self.parts[0], self.reader)

    @functools.cached_property
    def actor(self) -> EngineActor:
        parts, weights = self.parts
        return open_actor(self.run, parts, self.environment, weights)

    @functools.cached_property
    def learner(self) -> Learner:
        parts, weights = self.parts
        return Learner(parts.skeleton, weights, self.config, self.rl, self.run.rl_shape)

    @functools.cached_property
    def batches(self) -> SFTBatches:
        features = self.environment.features
        return SFTBatches(self.sft, self.data, features, 0, self.environment, make_mesh())

    @property
    def updater(self) -> Any:
        parts, weights = self.parts
        return make_sft_updater(parts.skeleton, weights, self.sft, self.batches.shape)

    @functools.cached_property
    def questions(self) -> QuestionStream:
        budgets = functools.partial(draw_budgets, self.rl, 0, prompts=self.rl.prompts)
        features, group_size = self.environment.features, self.rl.grpo.group_size
        return QuestionStream(self.data, features, 0, group_size, budgets)

    def prompts(self) -> np.ndarray:
        """Return prompts of random text, as long as those of a step may be."""
        shape = self.run.rl_shape
        # Bytes, among which there is no special token.
        return np.random.default_rng(0).integers(0, 256, (shape.groups, shape.limits.prompt))

    def step(
        self, name: str, lengths: Sequence[GroupLengths], seconds: Mapping[str, float]
    ) -> Iterator[Figure]:
        """Yield the figures of a step, or of some of its parts, whose names begin with `time/`."""
        forward = score_flops(lengths, self.config)
        flops = {"reference": forward, "update": 3 * forward, "step": 3 * forward}
        for key, value in seconds.items():
            part = key.removeprefix("time/")
            share = flops[part] / value / self.flops if part in flops else None
            yield Figure(f"{name}: {part}", value, share=share)
        yield Figure(f"{name}: tokens", real_tokens(lengths), "")
        for key, value in speeds(lengths, self.config, seconds, 1).items():
            if "mfu" in key:
                yield Figure(f"{name}: {key}", 100 * value, "%")


def median_seconds(call: Callable[[], Any], repeats: int = 10) -> float:
    """Return the median time of a call, after one that is not timed."""
    seconds = []
    for _ in range(1 + repeats):
        begun = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])


# --- samplers ---


class MadeUp:
    """A sampler that answers with random bytes, as many tokens as it may."""

    def __init__(self) -> None:
        self._tickets = itertools.count()
        self._waiting: dict[int, Request] = {}

    def submit(self, request: Request) -> int:
        ticket = next(self._tickets)
        self._waiting[ticket] = request
        return ticket

    def step(self) -> list[Completion]:
        waiting, self._waiting = self._waiting, {}
        return [(ticket, self._sample(request)) for ticket, request in waiting.items()]

    def cancel(self, ticket: int) -> None:
        self._waiting.pop(ticket, None)

    def _sample(self, request: Request) -> Sample:
        count = request.sampling.max_new_tokens
        ids = np.random.default_rng(request.seed).integers(0, 256, count).astype(np.int32)
        fed = digest(np.concatenate([request.ids, ids]))
        versions = np.zeros(count, np.int32)
        return Sample(ids, np.zeros(count, np.float32), SampleStop.LENGTH, versions, fed)


class Shortened:
    """A sampler whose responses end after a number of tokens that their seed draws."""

    def __init__(self, sampler: Any):
        self._sampler = sampler

    def submit(self, request: Request) -> int:
        most = request.sampling.max_new_tokens
        share = _MEDIAN * np.random.default_rng(request.seed).lognormal(sigma=_SPREAD)
        count = min(most, math.ceil(share * most))
        sampling = dataclasses.replace(request.sampling, max_new_tokens=count)
        return self._sampler.submit(dataclasses.replace(request, sampling=sampling))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


# --- parts ---


def ceilings(bench: Bench) -> Iterator[Figure]:
    device = jax.local_devices()[0]
    memory = (reported_memory(device) or math.nan) / GIB
    yield Figure(f"memory of {device.device_kind}", memory, "GiB")
    numbers, width = (2**22, 512) if bench.tiny else (2**30, 8192)
    x = jnp.ones(numbers, jnp.bfloat16)
    add = jax.jit(lambda x: x + 1)
    # It reads and writes.
    yield Figure(_COPY, 2 * x.nbytes / median_seconds(lambda: add(x)) / 1e12, "TB/s")
    a = jax.random.normal(jax.random.key(0), (width, width), jnp.bfloat16)
    rate = 2 * width**3 / median_seconds(lambda: jnp.matmul(a, a))
    peak = peak_flops()
    yield Figure(_MATMUL, rate / 1e12, "TFLOP/s", None if peak is None else rate / peak)


def compile_programs(bench: Bench) -> Iterator[Figure]:
    learner, actor, updater = bench.learner, bench.actor, bench.updater
    features = bench.environment.features
    of_rl = itertools.chain(
        learner.lowerings(learner.initial, features),
        actor.sampler.lowerings(),
        features.lowerings(),
    )
    cold_start = bench.batches.lowerings(updater, updater.initial)
    for phase, lowerings in (("cold start", cold_start), ("PARA-GRPO", of_rl)):
        begun = time.perf_counter()
        compiled = compile_ahead(lowerings)
        seconds = time.perf_counter() - begun
        yield Figure(f"{phase}: {len(compiled)} programs", seconds)
        yield from (Figure(f"{phase}: {name}", seconds) for name, seconds in compiled)


def decode(bench: Bench) -> Iterator[Figure]:
    engine = bench.actor.sampler
    assert isinstance(engine, Engine)
    bench.actor.compile()
    bench.actor.load(bench.parts[1], 0)
    engine.warm_up()
    prompts, group_size = bench.prompts(), bench.rl.grpo.group_size
    rows, new = len(prompts) * group_size, bench.run.protocol.turn_tokens

    def play(new: int) -> float:
        sampling = Sampling(new, bench.rl.temperature)
        begun = time.perf_counter()
        engine.generate(
            [Request(ids, (), sampling, seed) for ids in prompts for seed in range(group_size)]
        )
        return time.perf_counter() - begun

    prefill = play(1)
    pairs = prompts.shape[1] ** 2 / 2 * len(prompts)
    flops = forward_flops(bench.config, prompts.size, len(prompts), pairs)
    yield Figure("prefill", prompts.size / prefill, "tokens/s", flops / prefill / bench.flops)
    # The prompts are cached now. Each is read once per token of its group.
    seconds = play(new)
    sizes = engine.settings
    token = total_bytes(engine.runner.pool) / (sizes.pages * sizes.page)
    read = new * (total_bytes(engine.weights) + token * (prompts.size + rows * new / 2))
    share = read / seconds / bench.bytes_per_second
    yield Figure("decode", rows * new / seconds, "tokens/s", share)
    yield Figure("prefill and decode", rows * new / (prefill + seconds), "tokens/s")


def learn(bench: Bench) -> Iterator[Figure]:
    learner, environment, rl = bench.learner, bench.environment, bench.rl
    features, state = environment.features, learner.initial
    compile_ahead(itertools.chain(learner.lowerings(state, features), features.lowerings()))
    actor = Actor(MadeUp(), environment, Rules())
    groups = begin(bench.questions.draw(0), rl, 0, 0)
    laid_out = learner.lay_out(roll_out(actor, groups, rl), environment, 0)
    lengths = laid_out.laid_out.lengths
    batch = learner.score(laid_out)

    def score() -> Any:
        return learner.score(laid_out).rollouts.advantages

    def update() -> Any:
        nonlocal state
        state, _ = learner.update(state, batch)
        return state.step

    seconds = {"time/reference": median_seconds(score, bench.steps)}
    seconds |= {"time/update": median_seconds(update, bench.steps)}
    yield from bench.step("alone", lengths, seconds)
    pairs = sum(visible_pairs(*group) for group in lengths)
    packed = [(each.ids.shape, each.layout) for each in laid_out.microbatches]
    causal = [((1, 2 * round(math.sqrt(pairs / 2))), None)]
    yield from attention(bench, "packed rows", packed, pairs)
    yield from attention(bench, "a causal row of as many pairs", causal, pairs)


def attention(
    bench: Bench, name: str, rows: Sequence[tuple[Any, RowLayout | None]], pairs: float
) -> Iterator[Figure]:
    """Time the attention of a layer, given the shapes of rows and their layouts."""
    text = bench.config.text
    flops = 4 * text.num_attention_heads * text.head_dim * pairs
    heads = (text.num_attention_heads, text.num_key_value_heads, text.num_key_value_heads)
    dtype = jnp.dtype(bench.run.model.dtype)
    key = jax.random.key(0)
    arrays = [
        [jax.random.normal(key, (*shape, count, text.head_dim), dtype) for count in heads]
        for shape, _ in rows
    ]

    def forward(arrays: Any) -> Any:
        out = [attend(*qkv, layout=layout) for qkv, (_, layout) in zip(arrays, rows, strict=True)]
        return sum(x.astype(jnp.float32).sum() for x in out)

    for what, function, factor in (("forward", forward, 1), ("gradients", jax.grad(forward), 3)):
        program = jax.jit(function)
        seconds = median_seconds(lambda program=program: program(arrays))
        yield Figure(
            f"attention, {name}: {what}", seconds, share=factor * flops / seconds / bench.flops
        )


def cold_start(bench: Bench) -> Iterator[Figure]:
    updater = bench.updater
    state = updater.initial
    compile_ahead(bench.batches.lowerings(updater, state))
    for step in range(1 + bench.steps):
        begun = time.perf_counter()
        state, lengths, _ = sft_step(updater, state, bench.batches, bench.steps - step)
        seconds = {"time/step": time.perf_counter() - begun}
        if step:
            yield from bench.step(f"{step}", lengths, seconds)


def reinforce(bench: Bench) -> Iterator[Figure]:
    learner, actor = bench.learner, bench.actor
    state = learner.initial
    actor.begin(learner, state, 0)
    shortened = dataclasses.replace(actor, sampler=Shortened(actor.sampler))
    for kind, player in (("longest", actor), ("drawn", shortened)):
        for step in range(bench.steps):
            state, trained, metrics = rl_step(state, learner, player, bench.questions, 0)
            seconds = {key: value for key, value in metrics.items() if key.startswith("time/")}
            yield Figure(f"{kind} {step}", sum(seconds.values()))
            yield from bench.step(f"{kind} {step}", trained.lengths, seconds)


def transformers(bench: Bench) -> Iterator[Figure]:
    try:
        import torch  # pyright: ignore[reportMissingImports]  (the extra parity)
        import transformers as library
    except ImportError:
        torch = None
    if torch is None or not torch.cuda.is_available():
        yield Figure("there is no torch with CUDA here", math.nan, "")
        return
    config = library.AutoConfig.for_model(**to_hf(bench.config))
    with torch.device("cuda"):
        model: Any = library.AutoModelForImageTextToText.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    ids = torch.tensor(bench.prompts(), device="cuda")
    new, group_size = bench.run.protocol.turn_tokens, bench.rl.grpo.group_size
    begun = time.perf_counter()
    found = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=bench.rl.temperature,
        num_return_sequences=group_size,
        min_new_tokens=new,
        max_new_tokens=new,
    )
    found.cpu()  # waits for the device
    rate = len(found) * new / (time.perf_counter() - begun)
    yield Figure("prefill and decode", rate, "tokens/s")


PARTS: dict[str, tuple[Callable[[Bench], Iterator[Figure]], float]] = {
    "ceilings": (ceilings, 90),
    "compile": (compile_programs, 200),
    "load": (compile_programs, 90),
    "decode": (decode, 90),
    "learn": (learn, 120),
    "sft": (cold_start, 90),
    "rl": (reinforce, 150),
    "transformers": (transformers, 90),
}
"""What is measured, and the seconds after which it is stopped."""


def measure(name: str, size: str, folder: pathlib.Path, file: pathlib.Path) -> None:
    """Measure a part in this process, and store its figures as they come."""
    reuse_freed_memory()
    reserve_memory()
    stored = json.loads(file.read_text())
    rates = {
        figure[0]: figure[1] for figure in stored["parts"].get("ceilings", {}).get("figures", ())
    }
    part = stored["parts"][name] = {"figures": [], "ended": False}
    with FrameReader() as reader:
        for figure in PARTS[name][0](Bench(size, folder, rates, reader)):
            print(f"{name}: {as_row(figure)}", flush=True)
            part["figures"].append(figure)
            write_atomically(file, json.dumps(stored, indent=1))
    part["ended"] = True
    write_atomically(file, json.dumps(stored, indent=1))


def run_part(name: str, size: str, folder: pathlib.Path, file: pathlib.Path, most: float) -> None:
    """Measure a part in another process, which is stopped after `most` seconds."""
    arguments = ["--part", name, "--size", size, "--json", str(file)]
    variables = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        # In this part the card's memory is torch's.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false" if name == "transformers" else "true",
    }
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    try:
        subprocess.run(command, env={**os.environ, **variables}, timeout=most)
    except subprocess.TimeoutExpired:
        print(f"{name}: stopped after {most:.0f} s", flush=True)


def as_row(figure: Sequence[Any]) -> str:
    """Return a figure as cells of a table."""
    name, value, unit, share = figure
    number = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{name} | {number} {unit} | " + ("" if share is None else f"{share:.1%}")


def table(stored: Mapping[str, Any]) -> str:
    """Return all figures as a table in Markdown."""
    lines = ["| part | figure | measured | share of the ceiling |", "|---|---|---|---|"]
    for name in PARTS:
        part = stored["parts"].get(name, {"figures": [], "ended": False})
        lines += [f"| {name} | {as_row(figure)} |" for figure in part["figures"]]
        if not part["ended"]:
            lines.append(f"| {name} | not to its end | | |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0 if every part has ended."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--size", choices=("2b", "tiny"), default="2b", help="size of the model")
    parser.add_argument("--json", type=pathlib.Path, default="gpu.json", help="file of the figures")
    parser.add_argument("--seconds", type=float, default=540, help="after which nothing runs")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    begun = time.monotonic()
    file = asked.json.absolute()
    folder = pathlib.Path(tempfile.gettempdir()) / f"paravt-gpu-{asked.size}"
    if asked.part is not None:
        measure(asked.part, asked.size, folder, file)
        return 0
    header = {"machine": machine(), "size": asked.size}
    if not file.exists():
        shutil.rmtree(folder / "compiled", ignore_errors=True)
        write_atomically(file, json.dumps({**header, "parts": {}}))
    if not header.items() <= json.loads(file.read_text()).items():
        parser.error(f"{file} is of another machine, version or size; name another with --json")
    write_sources(asked.size, folder)
    for name, (_, most) in PARTS.items():
        parts = json.loads(file.read_text())["parts"]
        left = asked.seconds - (time.monotonic() - begun)
        if not parts.get(name, {}).get("ended") and left > 0:
            run_part(name, asked.size, folder, file, min(most, left))
    stored = json.loads(file.read_text())
    print(", ".join(f"{name} {value}" for name, value in stored["machine"].items()))
    print(table(stored))
    return 0 if all(stored["parts"].get(name, {}).get("ended") for name in PARTS) else 1


if __name__ == "__main__":
    sys.exit(main())
