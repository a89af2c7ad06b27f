"""Speeds of the tiny model on the machine at hand, from programs of other sizes than a run's own.

The time of a program is taken to be linear in its work:

    seconds = fixed + FLOPs of products * rate + FLOPs of attention * rate + ...

Each family of programs has its own rates, because the same FLOPs take longer in small matrices than
in large ones. They are fitted to calls of programs with other numbers of rows and tokens. The
programs of the run are not called, and no frame is encoded.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Int
from scipy.optimize import nnls

from benchmarks.rl_update import Case, make_learner
from models.config import ModelConfig
from models.features import FrameFeatures
from models.flops import forward_flops
from models.model import VisionLanguageModel
from models.remat import Remat
from paravt_extras.plan.programs import planned_config
from paravt_extras.plan.rates import Cost
from paravt_extras.plan.rollouts import EngineCosts, Row
from paravt_extras.plan.tiles import xla_attention
from paravt_jax.method.records import Question, digest
from paravt_jax.method.scoring import rules_of
from rollout.agent.episode import Environment
from rollout.engine.engine import Engine
from rollout.engine.layout import choose_layout
from rollout.engine.requests import Completion, Request, Sample, SampleStop, Sampling
from rollout.engine.sequences import make_prompt
from rollout.engine.settings import EngineSizes
from train.learn.optimizer import make_optimizer
from train.learn.packing import GroupLengths, PackedMicrobatch, StepShape
from train.learn.rollouts import roll_out
from train.learn.work import passes
from train.settings import Run, change

# Calls of a program, of which the fastest counts: other work can only make a call slower.
ROUNDS = 4


class Work(NamedTuple):
    """FLOPs of one call of a program."""

    products: float
    """Of matrix products with weights."""
    attention: float
    """Of rows with their own tokens."""
    shared: float = 0.0
    """Of rows with a prefix that several of them read from one copy."""


class Speed(NamedTuple):
    """The fitted time of a family of programs."""

    fixed: float
    """Seconds of a call without work."""
    rates: tuple[float, ...]
    """Seconds per unit of each part of the work."""

    def seconds(self, work: tuple[float, ...]) -> float:
        """The predicted time of a call."""
        return self.fixed + sum(n * rate for n, rate in zip(work, self.rates, strict=True))


class Timed(NamedTuple):
    """The work of a call, and its time in seconds."""

    work: tuple[float, ...]
    seconds: float


class Machine(NamedTuple):
    """The speeds of a model on the machine at hand."""

    decode: Speed
    """Of a call, which decodes `EngineSizes.steps` tokens per row. Its work is a `Work`, as that of
    the next three."""
    prefill: Speed
    reference: Speed
    """Of a micro-batch."""
    update: Speed
    """Of a micro-batch."""
    host: Speed
    """Of a request with a number of frames: its agent, its prompt, its score."""
    pool: Speed
    """Of allocating a number of bytes for the engine's pages, after every update."""
    optimizer: Speed
    """Of a number of weights."""


def calibrate(
    run: Run, model: VisionLanguageModel, environment: Environment, questions: Sequence[Question]
) -> Machine:
    """Measures the speeds of a model.

    Args:
        run: the tiny recipe.
        model: the model on one device.
        environment: the protocol, and the source of visual vectors.
        questions: the host's work is measured with them.
    """
    small, large = (
        Probe(Engine(model, environment.features, sizes)) for sizes in other_sizes(run.engine_sizes)
    )
    decode = [small.decode(width, 0) for width in small.sizes.row_lengths]
    decode.append(large.decode(large.sizes.row_lengths[0], 0))
    prefill = []
    for probe in (small, large):
        shortest = probe.sizes.row_lengths[0]
        decode += [probe.decode(shortest, prefix) for prefix in probe.sizes.prefix_lengths]
        prefill.append(probe.prefill(probe.sizes.prefill_lengths[-1], 0))
    results, crop, *_ = small.sizes.prefill_lengths
    prefill.append(small.prefill(crop, 0))
    prefill.append(small.prefill(results, small.sizes.row_lengths[-1] // 2))
    reference, update = _trained(run)
    return Machine(
        fit(decode),
        fit(prefill),
        fit(reference),
        fit(update),
        fit(_hosted(run, model.config, environment, questions)),
        large.pool(),
        _optimized(run, nnx.state(model.text)),
    )


def fit(calls: Sequence[Timed]) -> Speed:
    """The speed with the least squares of relative errors. No rate is negative."""
    rows = np.array([[1.0, *call.work] for call in calls])
    seconds = np.array([call.seconds for call in calls])
    # Columns differ by ten orders of magnitude. One may be 0: a kind of work that does not occur.
    scale = np.maximum(rows.max(axis=0), 1.0)
    found, _ = nnls(rows / scale / seconds[:, None], np.ones(len(calls)))
    fixed, *rates = (found / scale).tolist()
    return Speed(fixed, tuple(rates))


def _fastest(call: Callable[[], Any]) -> float:
    """Seconds of the fastest of several calls, after one that compiles."""
    call()
    spans = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        spans.append(time.perf_counter() - start)
    return min(spans)


# --- work ---


def work_of(config: ModelConfig, tokens: float, with_logits: float, pairs: float) -> Work:
    """Work of a forward pass; see `models.flops.forward_flops`."""
    products = forward_flops(config, tokens, with_logits, 0.0)
    return Work(products, forward_flops(config, 0, 0, pairs))


def decode_work(config: ModelConfig, sizes: EngineSizes, width: int, prefix: int) -> Work:
    """Work of a call of decoding whose rows read `width` tokens of their own and a prefix."""
    tokens = sizes.slots * sizes.steps
    own = work_of(config, tokens, tokens, tokens * width)
    return own._replace(shared=work_of(config, 0, 0, tokens * prefix).attention)


def prefill_work(config: ModelConfig, rows: int, length: int, before: int) -> Work:
    """Work of a call of prefill of rows of `length` tokens behind `before` cached ones."""
    tokens = rows * length
    return work_of(config, tokens, 0, tokens * (before + (length + 1) / 2))


def reference_work(
    config: ModelConfig, microbatch: PackedMicrobatch, groups: Sequence[GroupLengths]
) -> Work:
    """Work of the log-probs of a micro-batch, which has one row."""
    places = microbatch.shape.places
    return work_of(config, places, places, xla_attention(config).pairs(microbatch, groups))


def update_work(
    config: ModelConfig,
    microbatch: PackedMicrobatch,
    groups: Sequence[GroupLengths],
    remat: Remat,
) -> Work:
    """Work of the gradients of a micro-batch: forward, backward, and what is computed again."""
    forward = reference_work(config, microbatch, groups)
    # `passes` counts the reference's pass as well, and a backward pass as two.
    products, attention = (times - 1 for times in passes(remat))
    attention += xla_attention(config).backward - 2
    return Work(forward.products * products, forward.attention * attention)


# --- the engine ---


def other_sizes(sizes: EngineSizes) -> list[EngineSizes]:
    """Sizes of two engines that have none of the decoding programs of the given one."""
    found = []
    for slots, factor in ((3 / 8, 0.75), (5 / 4, 1.25)):

        def lengths(values: Sequence[int], factor: float = factor) -> tuple[int, ...]:
            pages = {max(1, round(factor * value / sizes.page)) for value in values}
            return tuple(count * sizes.page for count in sorted(pages))

        rows = max(1, round(slots * sizes.slots / sizes.rows_per_prefix)) * sizes.rows_per_prefix
        longest = lengths(sizes.row_lengths)[-1]
        found.append(
            dataclasses.replace(
                sizes,
                slots=rows,
                row_lengths=lengths(sizes.row_lengths),
                prefill_lengths=lengths(sizes.prefill_lengths),
                prefix_lengths=lengths(sizes.prefix_lengths),
                pages=max(sizes.pages, rows * (longest // sizes.page + 2)),
                read_tokens=rows * longest,
            )
        )
    return found


class Probe:
    """Asks an engine for texts of given lengths, and times it."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.sizes = engine.settings
        self._rng = np.random.default_rng(0)

    def prefill(self, length: int, before: int) -> Timed:
        """A call of prefill: by how much texts take longer if they are not cached."""
        width = self.sizes.width(before)
        rows = self.sizes.prefill_rows(length, width)
        fresh = []
        cached = []
        for _ in range(ROUNDS + 1):
            # The last token of a prompt is decoded, not prefilled.
            prompts = self._prompts(rows, before + 1)
            if before:
                self._seconds(prompts, 1)
            prompts = [np.concatenate([ids, self._prompts(1, length)[0]]) for ids in prompts]
            fresh.append(self._seconds(prompts, 1))
            cached.append(self._seconds(prompts, 1))
        # The first round compiles.
        span = min(fresh[1:]) - min(cached[1:])
        return Timed(prefill_work(self.engine.config, rows, length, width), max(1e-4, span))

    def decode(self, width: int, prefix: int) -> Timed:
        """A call of decoding in which all rows are busy."""
        calls = 2
        new = calls * self.sizes.steps
        # Without a prefix, the rows end at `width` tokens. With one, it is a whole prompt.
        samples = self.sizes.rows_per_prefix if prefix else 1
        length = prefix + self.sizes.page // 2 if prefix else width - new
        prompts = self._prompts(self.sizes.slots // samples, length)
        # The first call prefills the prompts, so the others find them in the cache.
        span = _fastest(lambda: self._seconds(prompts, new, samples))
        return Timed(decode_work(self.engine.config, self.sizes, width, prefix), span / calls)

    def pool(self) -> Speed:
        """Allocating the engine's pages, per byte."""
        assert self.engine.weights is not None
        weights, _ = self.engine.weights

        def wake() -> None:
            self.engine.sleep()
            self.engine.load(weights, 0)
            jax.block_until_ready(self.engine.runner.pool)

        span = _fastest(wake)
        size = sum(x.nbytes for x in jax.tree.leaves(self.engine.runner.pool))
        return Speed(0.0, (span / size,))

    def _prompts(self, count: int, length: int) -> list[Int[np.ndarray, " t"]]:
        """Random texts, which are not cached."""
        words = self.engine.config.text.vocab_size
        return [self._rng.integers(0, words, length).astype(np.int32) for _ in range(count)]

    def _seconds(self, prompts: Sequence[np.ndarray], new: int, samples: int = 1) -> float:
        """The time in which `samples` responses of `new` tokens to each prompt are sampled."""
        requests = [Request(ids, (), Sampling(new), tuple(range(samples))) for ids in prompts]
        start = time.perf_counter()
        self.engine.generate(requests)
        return time.perf_counter() - start


def engine_costs(run: Run, machine: Machine) -> EngineCosts:
    """Costs of the programs of a run's engine. Frames are taken to be in the cache."""
    sizes = run.engine_sizes
    config = planned_config(run)

    def token(rows: Sequence[Row]) -> Cost:
        work = decode_work(config, sizes, *layout_of(rows, sizes))
        return Cost(compute=machine.decode.seconds(work) / sizes.steps)

    def prefill(rows: int, length: int, before: int) -> Cost:
        return Cost(compute=machine.prefill.seconds(prefill_work(config, rows, length, before)))

    return EngineCosts(token, prefill, lambda _: Cost())


def layout_of(rows: Sequence[Row], sizes: EngineSizes) -> tuple[int, int]:
    """Tokens that a decoding program reads per row, and per shared prefix."""
    # Pages are numbered apart for each group.
    paths = [
        tuple((row.group << 16) + page for page in range(row.shared // sizes.page)) for row in rows
    ]
    layout = choose_layout(
        paths,
        [row.context for row in rows],
        {},
        slots=sizes.slots,
        rows_per_prefix=sizes.rows_per_prefix,
        page=sizes.page,
        prefix_lengths=sizes.prefix_lengths,
        row_lengths=sizes.row_lengths,
    )
    return layout.row_length, layout.prefix_length


# --- the host ---


class Instant:
    """A sampler that gives every request the same answer at once, without a model."""

    def __init__(self, answer: Int[np.ndarray, " t"], features: FrameFeatures, config: ModelConfig):
        self._answer = answer
        self._features = features
        self._config = config
        self._open: list[Request] = []

    def submit(self, request: Request) -> int:
        make_prompt(request, self._features, self._config, math.inf)
        self._open.append(request)
        return len(self._open) - 1

    def step(self) -> list[Completion]:
        found = [(ticket, (self._sample(request),)) for ticket, request in enumerate(self._open)]
        self._open = []
        return found

    def cancel(self, ticket: int) -> None:
        """Nothing is ever open: `step` answers everything."""

    def _sample(self, request: Request) -> Sample:
        logprobs = np.zeros(len(self._answer), np.float32)
        seen = digest(np.concatenate([request.ids, self._answer]))
        versions = np.zeros(len(self._answer), np.int32)
        return Sample(self._answer, logprobs, SampleStop.STOP_ID, versions, seen)


def _hosted(
    run: Run, config: ModelConfig, environment: Environment, questions: Sequence[Question]
) -> list[Timed]:
    """Rollouts without a model, with the least and with half of the most frames."""
    assert run.rl is not None
    text = "The clip shows it.</think><answer>A</answer>"
    answer = np.array(environment.protocol.vocabulary.encode(text), np.int32)
    judge = rules_of(run.rl.rewards)
    found = []
    for frames in (min(run.rl.frame_budgets), max(run.rl.frame_budgets) // 2):
        settings = dataclasses.replace(run.rl, frame_budgets=(frames,), prompts=len(questions))
        sampler = Instant(answer, environment.features, config)

        def play(settings: Any = settings, sampler: Instant = sampler) -> None:
            roll_out(sampler, environment, questions, settings, 0, 0, judge)

        requests = len(questions) * settings.grpo.group_size
        found.append(Timed((float(frames),), _fastest(play) / requests))
    return found


# --- training ---


def _trained(run: Run) -> tuple[list[Timed], list[Timed]]:
    """Calls of the reference pass and of gradients, with micro-batches of other sizes."""
    assert run.rl is not None
    tokens = round(0.75 * run.rl.microbatch_tokens)
    other = change(run, "calibration", {"rl.microbatch_tokens": tokens})
    learner, batch = make_learner(other)
    config = planned_config(run)
    own = run.rl_shape.microbatches(run.rl.microbatch_tokens, 1, 1)
    sizes = [size for size in learner.sizes if size not in own]
    reference = []
    update = []
    for size in (sizes[0], sizes[-1]):
        for members in (1, run.rl_shape.rollouts):
            groups = filling(size.tokens, run.rl_shape, members)
            case = Case(learner, groups)
            (microbatch,) = case.packed
            work = reference_work(config, microbatch, groups)
            reference.append(Timed(work, _fastest(case.reference)))
            work = update_work(config, microbatch, groups, run.rl.remat)
            update.append(Timed(work, _fastest(lambda case=case: case.update(batch))))
    return reference, update


def filling(tokens: int, shape: StepShape, members: int) -> list[GroupLengths]:
    """Groups of some rollouts each that fill a row."""
    count = min(shape.groups, max(1, 2 * tokens // shape.trajectory))
    each = tokens // count
    # Two thirds of the tokens are rollouts.
    suffix = min(shape.suffix, 2 * each // 3 // members)
    return [GroupLengths(each - members * suffix, (suffix,) * members)] * count


def _optimized(run: Run, weights: Any) -> Speed:
    """The optimizer's time per weight, on a matrix of half the size."""
    assert run.rl is not None
    count = sum(x.size for x in jax.tree.leaves(weights)) // 2
    half = {"matrix": jnp.ones((count // 128, 128))}
    optimizer = make_optimizer(run.rl.optimizer, run.rl.steps)
    state = optimizer.init(half)

    @jax.jit
    def apply(weights: Any, state: Any) -> Any:
        changes, state = optimizer.update(weights, state, weights)
        return optax.apply_updates(weights, changes), state

    return Speed(0.0, (_fastest(lambda: jax.block_until_ready(apply(half, state))) / count,))
