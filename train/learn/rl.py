"""PARA-GRPO, one step at a time: play episodes, lay out a batch, update, load the new weights.

The formulas are in `paravt_jax.method.grpo` and the episodes in `rollout.agent.episode`. A step
depends on its number, the seed, the weights and the questions, and on nothing else. The update
scores exactly the tokens that were sampled: the metric `token_mismatches` counts exceptions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from models.config import ModelConfig
from models.features import FrameFeatures
from models.lora import NOTHING
from models.sharding import Lowering, MeshProgram, mesh_of, row_devices
from models.text import TextDecoder
from models.trained import apart, in_activations, together
from models.trained_vision import TrainedVision
from paravt_jax.method import grpo
from paravt_jax.method.grpo import GRPOBatch, Metrics, Totals
from paravt_jax.method.judge import Judge
from paravt_jax.method.records import Question
from rollout.agent.episode import Environment
from rollout.engine.requests import Sampler
from train.learn.batch import Microbatch
from train.learn.optimizer import make_optimizer
from train.learn.packing import GroupLengths, StepShape
from train.learn.placement import (
    Bank,
    bank_sharding,
    make_bank_share,
    place,
    place_bank,
    place_frames,
    place_whole,
    replicas,
    row_pieces,
    sums_of,
)
from train.learn.rl_batch import LaidOut, RLBatch, lay_out, lay_out_padding
from train.learn.rl_settings import RLSettings
from train.learn.rollout_pool import RolloutPool
from train.learn.rollouts import (
    Rollouts,
    describe,
    play_step,
    require_fresh,
    roll_out,
)
from train.learn.step import (
    TrainState,
    VisionPrograms,
    init_state,
    make_accumulation,
    make_logprobs,
    make_vision_programs,
    score_rollouts,
)
from train.learn.weight_sync import WeightSync

RLLoss = Callable[
    [TextDecoder, Float[Array, "*m c d"], Microbatch, RLBatch], tuple[Float[Array, ""], Metrics]
]


# Log-probs of the first update of a step, which later updates compare theirs with. They come with
# the metrics, because the gradient computes them anyway.
_LOGPROBS = "logprobs"


@runtime_checkable
class TrainedSampler(Sampler, Protocol):
    """A sampler that gets new weights after each step: the engine, or a script in a test."""

    def sleep(self) -> None:
        """Free weights and KV cache until the next `load`."""
        ...

    def load(self, weights: Any, version: int) -> None:
        """Sample under `weights`, those after `version` steps, from now on."""
        ...

    def fingerprint(self) -> int:
        """The fingerprint of the weights that are sampled from (`models.fingerprint`)."""
        ...


def rl_loss(settings: RLSettings) -> RLLoss:
    """The loss of PARA-GRPO on a micro-batch: `f(decoder, visual, Microbatch, RLBatch)`."""

    def loss(
        text: TextDecoder, visual: Float[Array, "*m c d"], part: Microbatch, batch: RLBatch
    ) -> tuple[Float[Array, ""], Metrics]:
        logprobs, routes = score_rollouts(
            text, visual, part, settings.temperature, settings.remat, settings.logprob_chunk
        )
        here = dataclasses.replace(batch.grpo, mask=batch.grpo.mask & (part.index >= 0))
        value, metrics = grpo.paravt_loss(
            logprobs,
            batch.advantages,
            here,
            settings.grpo,
            batch.totals,
            settings.rewards.gamma,
            batch.proximal,
        )
        if settings.updates_per_batch > 1 and batch.proximal is None:
            metrics[_LOGPROBS] = jax.lax.stop_gradient(logprobs)
        # Later updates have other weights than the sampler.
        if batch.proximal is None and routes is not None:
            metrics["routing_gap"] = _routing_gap(routes, here, batch.totals)
        return value, metrics

    return loss


def _routing_gap(
    routes: UInt8[Array, "b t l"], here: GRPOBatch, totals: Totals
) -> Float[Array, ""]:
    """Share of layers, per trained token, in which sampler and trainer chose different experts.

    Summed over the tokens that the weights of the update drew, and divided by all trained tokens.
    """
    assert here.routes is not None, "a model with experts and a sampler without marks of its routes"
    compared = here.trained if here.current is None else here.trained & here.current
    differing = (routes != here.routes).astype(jnp.float32).mean(-1)
    return grpo.masked_mean(differing, compared, totals.tokens)


class Learner:
    """Runs the steps of RL on the mesh of the weights.

    Args:
        graph: The decoder without its weights.
        weights: The trained weights to start from, on a mesh. The first update donates them. A
            copy in the type of the activations stays as the reference of the KL term.
        config: Sizes and token ids of the model.
        settings: Settings of RL.
        shape: Upper bounds on the rollouts of a step, from `RLSettings.shape`.
        judge: Scores answers, by rules or by a model.
        sync: Brings weights to the engine's devices; None: made here.
        frozen: The decoder's weights that are not trained (`models.lora.split`). They are also
            those of the reference.
        vision: The trained part of the vision tower, whose weights are among `weights`; None: none.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        weights: Any,
        config: ModelConfig,
        settings: RLSettings,
        shape: StepShape,
        judge: Judge,
        sync: WeightSync | None = None,
        frozen: Any = NOTHING,
        vision: TrainedVision | None = None,
    ):
        mesh = mesh_of(weights)
        assert mesh is not None, (
            "weights without a mesh; shard them with models.sharding.param_shardings"
        )
        self.mesh = mesh
        self.settings = settings
        self.judge = judge
        dtype = nnx.merge(graph, apart(weights)[0], frozen).dtype
        self.sync = sync or WeightSync(weights, dtype, frozen)
        self._weight_shardings = jax.tree.map(lambda x: x.sharding, weights)
        self.reference = self._to_host(weights, dtype)
        optimizer = make_optimizer(settings.optimizer, settings.updates)
        self.start = init_state(weights, optimizer)
        self._shape = shape
        self._devices = row_devices(mesh)
        pieces = row_pieces(config.text, mesh.shape["fsdp"], mesh.shape["tensor"])
        self.sizes = shape.microbatches(settings.microbatch_tokens, self._devices, pieces)
        self.logprobs = make_logprobs(
            graph, settings.temperature, mesh, settings.logprob_chunk, frozen
        )
        self._share = make_bank_share(mesh)
        # Short arrays, which every device has as a whole.
        self._whole = NamedSharding(mesh, PartitionSpec())

        def advantages(batch: GRPOBatch) -> tuple[Float[Array, "b t"], Totals, Metrics]:
            return _advantages(batch, settings)

        self._advantages = MeshProgram(jax.jit(advantages, out_shardings=self._whole), mesh)
        self.update = make_accumulation(graph, optimizer, rl_loss(settings), self.start, frozen)
        processes = jax.process_count()
        self._slots = shape.slots(processes, self._devices)
        self._vision = vision
        self._vision_programs: VisionPrograms | None = None
        if vision is not None:
            room = self._slots * self._devices // processes
            self._vision_programs = make_vision_programs(vision, mesh, processes, room)

    def warm_up(self, weights: Any, features: FrameFeatures) -> None:
        """Compile the programs for every size of micro-batch, by computing an empty one of each.

        Args:
            weights: The current weights, which do not change.
            features: Gives the size and type of visual vectors.
        """
        bank, microbatches, rollouts = self._padding(features)
        self._reference_logprobs(bank, microbatches)
        draw = (0, 0, 0)
        _, metrics = self._gradients(weights, bank, microbatches, rollouts, draw)
        if self.settings.updates_per_batch > 1:
            later = self._after_the_first(rollouts, metrics)
            self._gradients(weights, bank, microbatches, later, draw)

    def lowerings(self, state: TrainState, features: FrameFeatures) -> Iterator[Lowering]:
        """The programs that take long to compile, those of the largest micro-batches first.

        Args:
            state: The current state.
            features: Gives the size and type of visual vectors.
        """
        bank, microbatches, first = self._padding(features)
        text, vision = apart(state.weights)
        reference, reference_vision = apart(_like(self.reference, self._weight_shardings))
        total = sums_of(text, self.mesh)
        sums, visual = total, bank.cached
        if self._vision_programs is not None:
            encode, gradients = self._vision_programs
            visual = _like(encode.lower(vision, bank).out_info, bank_sharding(self.mesh))
            of_visual = sums_of(visual, self.mesh)
            sums, total = (total, of_visual), together(total, _like(vision, self._whole))
            yield functools.partial(gradients.lower, vision, bank, of_visual)
            yield functools.partial(encode.lower, vision, bank)
            if _types(reference_vision) != _types(vision):
                yield functools.partial(encode.lower, reference_vision, bank)
        batches = [first]
        if self.settings.updates_per_batch > 1:
            proximal = _like(first.advantages, self._whole)
            batches.append(dataclasses.replace(first, proximal=proximal))
        numbers = np.zeros(4, np.uint32)
        for part in microbatches:
            for batch in batches:
                arguments = (text, sums, visual, part, batch)
                yield functools.partial(self.update.add.lower, *arguments, draw=numbers)
            yield functools.partial(self.logprobs.lower, reference, visual, part)
        yield functools.partial(self.update.apply.lower, state, total)

    def step(
        self,
        state: TrainState,
        engine: TrainedSampler,
        environment: Environment,
        questions: Sequence[Question],
        seed: int,
        on_rollouts: Callable[..., None] | None = None,
        measure: Callable[[Sequence[GroupLengths], float], dict[str, float]] | None = None,
        further: Callable[[Sequence[int]], Sequence[Question]] | None = None,
        pool: RolloutPool | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """Run one step of PARA-GRPO, and load the new weights into the engine.

        The engine sleeps after the rollouts until it gets the new weights: the update needs its
        memory.

        Args:
            state: The state before the step; donated. `state.step` counts updates, of which each
                step makes `updates_per_batch`.
            engine: Samples under the weights of `state`.
            environment: The protocol, and the frames' features.
            questions: Questions of the whole step, the same on every process.
            seed: Seed of the run.
            on_rollouts: Called with the rollouts and the advantages of all rows, float32[b, t].
            measure: Called with the lengths of all trajectories and the duration of one update in
                seconds; returns further metrics.
            further: Draws a question for each of some places of the step, for dynamic sampling; the
                same on every process.
            pool: Holds the episodes that outlive a step, if and only if `max_staleness` is above 0.

        Returns:
            The new state, and the step's metrics. Times are in seconds.

        Raises:
            ValueError: No question has a readable video, or a token was sampled under weights that
                `max_staleness` does not allow.
        """
        number = int(state.step) // self.settings.updates_per_batch
        spans = Spans()

        assert (pool is None) == (self.settings.max_staleness == 0), "see `pool`"
        fixed = (self.settings, seed, number, self.judge)
        with spans("rollout"):
            if pool is not None:
                sampled = pool.play_step(engine, environment, questions, *fixed, further)
            else:

                def play_some(questions: Sequence[Question], **places: Any) -> Rollouts:
                    return roll_out(engine, environment, questions, *fixed, **places)

                sampled = play_step(play_some, questions, further, self.settings)
            engine.sleep()
        rollouts = sampled.batch
        if not rollouts.groups:
            raise _no_question(number)
        require_fresh(rollouts, number, self.settings.max_staleness)

        with spans("data"):
            laid_out = lay_out(
                rollouts,
                environment.features,
                environment.protocol.vocabulary,
                self._shape,
                self.sizes,
                # 0x5A sets the draw of sub-agents apart from others with the same seed and step.
                (seed, number, 0x5A),
                self._devices,
                number if self.settings.max_staleness else None,
            )
            rollouts = laid_out.rollouts
            if not rollouts.groups:
                raise _no_question(number)
            bank, microbatches, played = self._place(laid_out)

        with spans("reference"):
            reference = self._reference_logprobs(bank, microbatches)

        with spans("update"):
            played = dataclasses.replace(played, reference=reference)
            advantages, totals, advantage_metrics = self._advantages(played)
            if on_rollouts:
                on_rollouts(rollouts, np.asarray(advantages))
            batch = RLBatch(played, advantages, totals)
            state, updates = self._update(state, bank, microbatches, batch, (seed % 2**32, number))
            # `_known` waits for the updates, so the span includes them.
            metrics = _over_updates([_known(found) for found in updates])
            metrics |= _known({name: [x] for name, x in advantage_metrics.items()})
            features = environment.features
            loaded = self.sync.load(engine, state.weights, number + 1, features)
            metrics["weights/fingerprint"] = float(loaded)

        metrics["groups/silent"] = metrics.pop("silent_groups")
        for sums, name in (("behaviour_gap", "logprob_gap"), ("routing_gap", "routing_gap")):
            gap = metrics.pop(sums, None)
            if gap is not None and laid_out.current:
                # The loss divides by the number of all tokens.
                metrics[name] = gap / laid_out.current
        metrics |= describe(sampled.drawn) | sampled.metrics
        metrics |= laid_out.metrics
        metrics |= {f"time/{name}": seconds for name, seconds in spans.seconds.items()}
        if measure is not None:
            one_update = spans.seconds["update"] / self.settings.updates_per_batch
            metrics |= measure(laid_out.lengths, one_update)
        return state, metrics

    def _padding(self, features: FrameFeatures) -> tuple[Bank, list[Microbatch], RLBatch]:
        """The arguments of the programs for an empty micro-batch of every size."""
        stale = self.settings.max_staleness > 0
        empty = lay_out_padding(self._shape, features, self.sizes, self._devices, stale)
        bank, microbatches, batch = self._place(empty)
        advantages, totals, _ = self._advantages(batch)
        return bank, microbatches, RLBatch(batch, advantages, totals)

    def _place(self, laid_out: LaidOut) -> tuple[Bank, list[Microbatch], GRPOBatch]:
        """What is cached of frames, the micro-batches and the rollouts, on the mesh."""
        processes = jax.process_count()
        count = self._devices // processes
        if self._vision is None or not self._vision.whole:
            bank = place_bank(laid_out.visual, self._slots, count, self.mesh)
            if self._vision is None and replicas(self.mesh) > 1:
                # Once per step: micro-batches read all of them.
                bank = Bank(self._share(bank.cached))
        else:
            frames = self._shape.frames(processes, self._devices)
            found = laid_out.visual, laid_out.grids
            bank = place_frames(*found, self._vision, frames, count, self.mesh)
        microbatches = [place_whole(part, self.mesh) for part in laid_out.microbatches]
        return bank, microbatches, place(laid_out.grpo, self.mesh)

    def _visual(self, weights: Any, bank: Bank) -> Float[Array, "*m c d"]:
        """The visual vectors of a step under some weights of the tower's trained part."""
        return (
            bank.cached
            if self._vision_programs is None
            else self._vision_programs.encode(weights, bank)
        )

    def _update(
        self,
        state: TrainState,
        bank: Bank,
        microbatches: Sequence[Microbatch],
        batch: RLBatch,
        draw: tuple[int, ...],
    ) -> tuple[TrainState, list[dict[str, list[Array]]]]:
        """All updates of a step: the state after them, and the metrics of each, by micro-batch."""
        found = []
        for number in range(self.settings.updates_per_batch):
            gradients, metrics = self._gradients(
                state.weights, bank, microbatches, batch, (*draw, number)
            )
            state, norm = self.update.apply(state, gradients)
            batch = self._after_the_first(batch, metrics)
            found.append(metrics | {"grad_norm": [norm]})
        return state, found

    def _after_the_first(self, batch: RLBatch, metrics: dict[str, list[Array]]) -> RLBatch:
        """The batch of later updates. Takes the log-probs of the first one out of its metrics."""
        if _LOGPROBS not in metrics:
            return batch
        # A token is in one micro-batch, and 0 in all others.
        proximal = functools.reduce(jnp.add, metrics.pop(_LOGPROBS))
        return dataclasses.replace(batch, proximal=jax.device_put(proximal, self._whole))

    def _gradients(
        self,
        weights: Any,
        bank: Bank,
        microbatches: Sequence[Microbatch],
        batch: RLBatch,
        draw: tuple[int, ...],
    ) -> tuple[Any, dict[str, list[Array]]]:
        """Gradients of the whole batch, and the metrics of every micro-batch.

        The tower runs once before all micro-batches, and back once after them, with the sum of the
        gradients of its vectors (as in GradCache, arXiv 2101.06983). `draw`, with the number of a
        micro-batch, decides what adapters drop.
        """
        text, vision = apart(weights)
        visual = self._visual(vision, bank)
        total = self.update.start(text if self._vision_programs is None else (text, visual))
        metrics: dict[str, list[Array]] = {}
        for number, part in enumerate(microbatches):
            numbers = np.array((*draw, number), np.uint32)
            total, found = self.update.add(text, total, visual, part, batch, draw=numbers)
            for name, value in found.items():
                metrics.setdefault(name, []).append(value)
        if self._vision_programs is None:
            return total, metrics
        of_text, of_visual = total
        return together(of_text, self._vision_programs.gradients(vision, bank, of_visual)), metrics

    def _to_host(self, weights: Any, dtype: Any) -> Any:
        """A copy of the weights in `dtype`, in the host's memory."""
        # The decoder multiplies in the type of the activations; more digits would be rounded away.
        shardings = jax.tree.map(
            lambda sharding: sharding.with_memory_kind("pinned_host"), self._weight_shardings
        )

        def reference_to_host(weights: Any) -> Any:
            return in_activations(weights, dtype)

        return jax.jit(reference_to_host, out_shardings=shardings)(weights)

    def _reference_logprobs(
        self, bank: Bank, microbatches: Sequence[Microbatch]
    ) -> Float[Array, "r u"]:
        """Log-probs under the reference weights, which are on the devices only in this call."""
        text, vision = apart(jax.device_put(self.reference, self._weight_shardings))
        visual = self._visual(vision, bank)
        # A token is in one micro-batch, and 0 in all others.
        logprobs = [self.logprobs(text, visual, part) for part in microbatches]
        # The weights are freed on return, before the update needs their memory.
        return jax.block_until_ready(functools.reduce(jnp.add, logprobs))


def _no_question(step: int) -> ValueError:
    return ValueError(f"rl: step {step} has no question with a readable video; check the data root")


def _like(arrays: Any, shardings: Any, dtype: DTypeLike | None = None) -> Any:
    """Abstract arrays with these shardings: a tree of them, or one for all."""
    if isinstance(shardings, Sharding):
        shardings = jax.tree.map(lambda _: shardings, arrays)
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=place),
        arrays,
        shardings,
    )


def _types(arrays: Any) -> list[Any]:
    return [x.dtype for x in jax.tree.leaves(arrays)]


def _advantages(
    batch: GRPOBatch, settings: RLSettings
) -> tuple[Float[Array, "b t"], Totals, Metrics]:
    advantages, metrics = grpo.advantages(batch, settings.grpo, settings.rewards.gamma)
    return advantages, grpo.batch_totals(batch), metrics


def _known(metrics: Mapping[str, Sequence[Array]]) -> dict[str, float]:
    """The sums over micro-batches, or the maximum for `*_max`.

    Leaves out means of tags that do not occur.
    """
    numbers = {
        name: (max if name.endswith("_max") else sum)(map(float, parts))
        for name, parts in metrics.items()
    }

    def empty(name: str) -> bool:
        group, _, figure = name.rpartition("/")
        return figure in ("probability", "logprob") and numbers[f"{group}/count"] == 0

    return {name: number for name, number in numbers.items() if not empty(name)}


def _over_updates(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the updates that have it; of `*_max` the largest."""
    names = dict.fromkeys(itertools.chain(*updates))
    values = {name: [found[name] for found in updates if name in found] for name in names}
    return {
        name: max(found) if name.endswith("_max") else sum(found) / len(found)
        for name, found in values.items()
    }


class Spans:
    """The parts of a step, in its metrics and in a trace (`train.durable.profile`).

    Attributes:
        seconds: How long each part took, by name.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the block, which is an event of this name in a trace."""
        start = time.perf_counter()
        with jax.profiler.TraceAnnotation(name):
            yield
        self.seconds[name] = time.perf_counter() - start
