"""The batched sampler: requests in, sampled tokens and their log-probs out.

Owns the schedule. A `step` admits what waits while there are slots and pages, prefills what of it is not on pages yet, and decodes
a few tokens for every sequence that runs; main agents and sub-agents stand side by side. What sequences have in common at
their start is computed once and kept (`pages`), across the turns of an episode, too. A sequence is given all the pages it may need when
it is admitted, so a full cache makes requests wait and never fails one that runs. Refuses requests that could never fit, naming
what is too long. Invariants: a sample's tokens depend on its request and its seed, not on what else is asked for, up to the rounding of
programs of other shapes (which in bfloat16 can be another token); nothing that old weights computed is read with new ones.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float

from models.features import FrameFeatures
from models.qwen3_vl.model import Qwen3VL
from paravt_jax.data.frames import VideoError
from paravt_jax.method.records import digest
from rollout.engine.pages import PageTree
from rollout.engine.programs import MOST_STOP_IDS, difference
from rollout.engine.requests import Completion, Request, Sample, SampleStop
from rollout.engine.runner import ModelRunner
from rollout.engine.sequences import EngineSequence, make_prompt
from rollout.engine.settings import EngineSizes

InFlight = Literal["finish", "restart"]


@dataclasses.dataclass
class EngineCounts:
    """What the engine did so far: tokens prefilled, and those that were there already; tokens drawn; how samples ended.

    `steps` tokens were decoded one after the other, in `row_steps` rows taken together; `seconds` went by from handing programs to the
    device until they were done, transfers included.
    """

    prefilled_tokens: int = 0
    reused_tokens: int = 0
    sampled_tokens: int = 0
    steps: int = 0
    row_steps: int = 0
    seconds: float = 0.0
    stops: collections.Counter[SampleStop] = dataclasses.field(default_factory=collections.Counter)


class Engine:
    """Samples for every agent of every episode. Implements `rollout.engine.requests.Sampler`.

    `token_bytes`: the bytes of every token, for requests with `stop_strings`:
    `[vocabulary.token_bytes(id) for id in range(vocabulary.size)]`. `clock` gives seconds, for deadlines, which are looked at every
    `settings.steps` tokens. For one thread at a time.
    """

    def __init__(
        self,
        model: Qwen3VL,
        features: FrameFeatures,
        settings: EngineSizes,
        token_bytes: Sequence[bytes] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.settings, self.features, self.config = settings, features, model.config
        self.counts = EngineCounts()
        self._token_bytes, self._clock = token_bytes, clock
        self._runner = ModelRunner(model, settings)
        self._tree = PageTree(settings.pages, settings.page)
        self._tickets = itertools.count()
        self._open: dict[int, list[Sample | None]] = {}  # by ticket
        self._kept: list[Completion] = []  # finished while somebody else was waited for
        self._waiting: collections.deque[EngineSequence] = collections.deque()
        self._running: list[EngineSequence] = []
        self._weights: dict[int, Any] = {}
        weights = nnx.split(model.text)[1]
        self._known = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)
        self.version = 0
        self.load(weights, version=0)

    # --- what callers say ---

    def submit(self, request: Request) -> int:
        """Takes a request in and returns its ticket. ValueError for one that this engine could never answer."""
        self._check(request)
        ticket = next(self._tickets)
        try:
            prompt = make_prompt(
                request, self.features, self.config, self._clock() + request.sampling.deadline
            )
        except VideoError as error:  # its video was there when the frames were chosen, or never
            self.features.unreadable[error.path] = error.reason
            nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
            self._open[ticket] = [
                Sample(*nothing, SampleStop.UNREADABLE, self.version, digest(request.ids))
            ] * len(request.seeds)
            self.counts.stops[SampleStop.UNREADABLE] += len(request.seeds)
            return ticket
        self._open[ticket] = [None] * len(request.seeds)
        self._waiting += [
            EngineSequence(ticket, number, prompt) for number in range(len(request.seeds))
        ]
        return ticket

    def step(self) -> list[Completion]:
        """Admits, prefills, and decodes up to `settings.steps` tokens for all that run. Returns the requests that this finished."""
        self._expire()
        self._admit()
        for version in sorted({sequence.version for sequence in self._running}):
            self._decode(version)
        runner, counts = self._runner, self.counts
        counts.steps, counts.row_steps, counts.seconds = (
            runner.steps,
            runner.row_steps,
            runner.seconds,
        )
        finished = [ticket for ticket, samples in self._open.items() if None not in samples]
        kept, self._kept = self._kept, []
        return kept + [
            (ticket, tuple(sample for sample in self._open.pop(ticket) if sample is not None))
            for ticket in finished
        ]

    def generate(self, requests: Iterable[Request]) -> list[tuple[Sample, ...]]:
        """Samples every request; a tuple a request, in their order, with a sample for every seed.

        Where one is refused, or the caller is interrupted, all are cancelled.
        """
        tickets: list[int] = []
        answers: dict[int, tuple[Sample, ...]] = {}
        try:
            for request in requests:
                tickets.append(self.submit(request))
            while any(ticket not in answers for ticket in tickets):
                answers |= self.step()
        finally:
            self._kept += [
                (ticket, samples) for ticket, samples in answers.items() if ticket not in tickets
            ]
            for ticket in tickets:
                self.cancel(ticket)
        return [answers[ticket] for ticket in tickets]

    def cancel(self, ticket: int) -> None:
        """Gives a request up and frees what it holds; one that is answered already is left alone."""
        self._open.pop(ticket, None)
        self._waiting = collections.deque(
            sequence for sequence in self._waiting if sequence.ticket != ticket
        )
        for sequence in [sequence for sequence in self._running if sequence.ticket == ticket]:
            self._leave(sequence)

    def load(self, weights: Any, version: int, in_flight: InFlight = "finish") -> None:
        """Samples from `weights` (the text decoder's state, on the device; not copied) from now on; what others computed is dropped.

        What runs already finishes under its own weights, whose arrays must stay alive until then, or restarts under the new ones; a
        sample's `version` says which. ValueError for a version that is being sampled from.
        """
        differing = difference(weights, self._known)
        if differing:
            raise ValueError(
                f"Engine.load: weights {differing}; give the text decoder's own state, nnx.split(model.text)[1]"
            )
        if in_flight not in get_args(InFlight):
            raise ValueError(
                f"Engine.load: in_flight = {in_flight!r}; one of {', '.join(get_args(InFlight))}, choose one of them"
            )
        if in_flight == "restart":
            for sequence in reversed(self._running[:]):
                self._leave(sequence)
                self._waiting.appendleft(
                    EngineSequence(sequence.ticket, sequence.number, sequence.prompt)
                )
        if version in {sequence.version for sequence in self._running}:
            raise ValueError(
                f"Engine.load: version {version} is still being sampled from; give new weights a new number, or restart"
            )
        self.forget()
        self._weights[version], self.version = weights, version
        self._drop_weights()
        self._runner.wake()

    def sleep(self) -> None:
        """Frees what lies on the device, weights and pages, until `load` brings new weights. ValueError where a request has no answer."""
        if not self.idle:
            raise ValueError(
                f"Engine.sleep: {len(self._open) + len(self._kept)} requests have no answer yet; step, or cancel them, first"
            )
        self.forget()
        self._weights.clear()
        self._runner.sleep()

    def forget(self) -> None:
        """Drops all that is kept for later requests: what is asked next depends on nothing that was asked before."""
        for version in self._weights:
            self._tree.drop(version)
        for sequence in self._running:
            sequence.forgotten = True

    @property
    def idle(self) -> bool:
        """Whether all that was asked for is answered."""
        return not self._open and not self._kept

    def warm_up(self) -> None:
        """Compiles every program. ValueError where the engine sleeps."""
        self._awake("warm_up")
        self._runner.warm_up(self._weights[self.version])

    # --- requests ---

    def _awake(self, asked: str) -> None:
        if not self._weights:
            raise ValueError(f"Engine.{asked}: the engine sleeps, without weights; call load first")

    def _check(self, request: Request) -> None:
        self._awake("submit")
        sampling, longest = request.sampling, self.settings.row_lengths[-1]
        if not len(request.ids):
            raise ValueError(
                "Request.ids: there are none; the last token predicts the first new one, give one at least"
            )
        ids, words = np.asarray(request.ids), self.config.text.vocab_size
        if ids.min() < 0 or ids.max() >= words:
            raise ValueError(
                f"Request.ids: from {ids.min()} to {ids.max()}; the model has {words} words, give ids from 0 to {words - 1}"
            )
        if len(request.ids) + sampling.max_new_tokens > longest:
            raise ValueError(
                f"Request.ids: {len(request.ids)} tokens, and {sampling.max_new_tokens} new ones; "
                f"EngineSizes.row_lengths ends at {longest}, "
                "make it longer, or lower the protocol's limits or the frames"
            )
        if len(sampling.stop_ids) > MOST_STOP_IDS:
            raise ValueError(
                f"Sampling.stop_ids: {len(sampling.stop_ids)} ids; a row has at most {MOST_STOP_IDS}, give fewer"
            )
        if sampling.stop_strings and self._token_bytes is None:
            raise ValueError(
                "Sampling.stop_strings: the engine was made without token_bytes; give it those of the vocabulary"
            )

    def _expire(self) -> None:
        now = self._clock()
        for sequence in [
            sequence
            for sequence in (*self._running, *self._waiting)
            if now >= sequence.prompt.until
        ]:
            self._finish(sequence, SampleStop.DEADLINE)
        self._waiting = collections.deque(
            sequence for sequence in self._waiting if now < sequence.prompt.until
        )

    def _finish(self, sequence: EngineSequence, stop: SampleStop) -> None:
        samples = self._open[sequence.ticket]
        ids, logprobs = np.array(sequence.drawn, np.int32), np.array(sequence.logprobs, np.float32)
        running = sequence in self._running
        version = sequence.version if running else self.version
        samples[sequence.number] = Sample(ids, logprobs, stop, version, digest(sequence.ids))
        self.counts.stops[stop] += 1
        if running:
            self._leave(sequence)

    # --- pages ---

    def _match(self, sequence: EngineSequence) -> None:
        """Holds the pages that are there already."""
        prompt = sequence.prompt
        sequence.version = self.version
        sequence.path, sequence.source, common = self._tree.match(
            self.version, prompt.content[: prompt.known]
        )
        if sequence.source is not None:
            self._tree.hold([sequence.source])
        sequence.computed = len(sequence.path) * self.settings.page + common

    def _take_pages(self, sequence: EngineSequence) -> bool:
        """All the other pages that the sequence can need; False where there are not enough now."""
        prompt, size = sequence.prompt, self.settings.page
        whole = -(-(len(prompt.content) + sequence.sampling.max_new_tokens) // size)
        lent = self._tree.allocate(whole - len(sequence.path))
        if (
            lent is None and sequence.source is not None
        ):  # the page to copy from may be the one that is missing: rather compute again
            self._tree.release([sequence.source])
            sequence.source, sequence.computed = None, len(sequence.path) * size
            lent = self._tree.allocate(whole - len(sequence.path))
        sequence.lent = lent or []
        return lent is not None

    def _return_pages(self, sequence: EngineSequence) -> None:
        self._tree.release([*sequence.path, *([sequence.source] if sequence.source else [])])
        self._tree.give_back(sequence.lent)
        sequence.path, sequence.lent, sequence.source = [], [], None

    def _publish(self, sequence: EngineSequence) -> None:
        """Lets others find what the sequence has computed."""
        prompt, at = sequence.prompt, len(sequence.path) * self.settings.page
        content = np.concatenate([prompt.content, np.array(sequence.drawn, np.int64)])[
            at : sequence.computed
        ]
        added, sequence.lent = self._tree.insert(
            sequence.version, sequence.path, content, sequence.lent
        )
        sequence.path = sequence.path + added

    def _leave(self, sequence: EngineSequence) -> None:
        """Out of its slot; what it computed stays for others as long as there is room, unless it was to be forgotten."""
        self._running.remove(sequence)
        if sequence.path and len(sequence.path[-1].tokens) < self.settings.page:
            sequence.lent.insert(
                0, self._tree.take_out(sequence.path.pop())
            )  # there is more on it now
        if not sequence.forgotten:
            self._publish(sequence)
        self._return_pages(sequence)
        self._drop_weights()

    def _drop_weights(self) -> None:
        """Forgets weights that nobody samples from any more, and what they computed."""
        for version in (
            set(self._weights) - {self.version} - {sequence.version for sequence in self._running}
        ):
            del self._weights[version]
            self._tree.drop(version)

    # --- prefill ---

    def _admit(self) -> None:
        """Moves what waits into free slots, in turn, and prefills it, several sequences at once."""
        batch: list[EngineSequence] = []
        try:
            while self._next_batch(batch):
                self._prefill(batch)
                self._running += batch
                batch.clear()
        except (
            BaseException
        ):  # an interrupt, most likely: who was on the way waits again, and can be cancelled
            for sequence in batch:
                self._return_pages(sequence)
            self._waiting.extendleft(reversed(batch))
            raise

    def _prefill(self, batch: list[EngineSequence]) -> None:
        if pairs := [(s.source.page, s.lent[0]) for s in batch if s.source is not None]:
            self._runner.copy(pairs)
        for sequence in batch:
            self.counts.reused_tokens += sequence.computed
            if sequence.source is not None:
                self._tree.release([sequence.source])
                sequence.source = None
        self.counts.prefilled_tokens += self._runner.prefill(batch, self._weights[self.version])
        for sequence in batch:
            self._publish(sequence)

    def _next_batch(self, batch: list[EngineSequence]) -> bool:
        """Finds the next sequences to prefill together, with their pages. One that begins like another waits until that is computed."""
        passed: list[EngineSequence] = []
        starts: set[tuple] = set()
        length = before = 0
        try:
            while (
                self._waiting
                and len(self._running) + len(batch) < self.settings.slots
                and len(passed) < self.settings.slots
            ):
                sequence = self._waiting[
                    0
                ]  # it leaves when it is known where to: an interrupt may come at any point
                if not sequence.sampling.max_new_tokens:
                    self._finish(sequence, SampleStop.LENGTH)
                    self._waiting.popleft()
                    continue
                self._match(sequence)
                missing = sequence.prompt.content[sequence.computed : sequence.prompt.known]
                start = (
                    sequence.path[-1].serial if sequence.path else None,
                    missing[: self.settings.page].tobytes(),
                )
                longest, most = (
                    max(length, self.settings.piece(len(missing))),
                    max(before, sequence.computed),
                )
                full = len(missing) > 0 and len(starts) >= self.settings.prefill_rows(longest, most)
                # Pages are taken last: others may have to give way for them.
                if start in starts or full or not self._take_pages(sequence):
                    self._return_pages(sequence)
                    passed.append(self._waiting.popleft())
                    if start in starts:
                        continue
                    break
                try:
                    sequence.visual = self._visual(sequence)
                except VideoError:
                    self._return_pages(sequence)
                    self._finish(sequence, SampleStop.UNREADABLE)
                    self._waiting.popleft()
                    continue
                batch.append(self._waiting.popleft())
                if len(missing):
                    starts.add(start)
                    length, before = longest, most
        except BaseException:
            if self._waiting:
                self._return_pages(self._waiting[0])
            raise
        finally:
            self._waiting.extendleft(reversed(passed))
        return bool(batch)

    def _visual(self, sequence: EngineSequence) -> Float[np.ndarray, "m c d"]:
        """The visual vectors of the tokens that are not computed yet. Raises VideoError."""
        request = sequence.prompt.request
        before = int(sequence.prompt.visual[: sequence.computed].sum())
        ends = np.cumsum([self.features.tokens(frame.video) for frame in request.frames])
        first = int(np.searchsorted(ends, before, side="right"))
        if first == len(request.frames):
            return np.zeros((0, 0, 0), np.float32)
        vectors = self.features(request.frames[first:])
        return vectors[before - (int(ends[first - 1]) if first else 0) :]

    # --- decoding ---

    def _decode(self, version: int) -> None:
        sequences = [sequence for sequence in self._running if sequence.version == version]
        for sequence, drawn in zip(
            sequences, self._runner.decode(sequences, self._weights[version]), strict=True
        ):
            self._take(sequence, *drawn)

    def _take(self, sequence: EngineSequence, ids: list[int], logprobs: list[float]) -> None:
        """Adds what was drawn, up to the end of a stop string, and finishes the sample where it has ended."""
        before = len(sequence.drawn)
        sequence.drawn += ids
        sequence.logprobs += logprobs
        self.counts.sampled_tokens += len(ids)
        end = self._stop_string(sequence, before)
        if end is not None:
            del sequence.drawn[end:], sequence.logprobs[end:]
        sequence.computed = sequence.prompt.known + len(sequence.drawn)
        if end is not None:
            self._finish(sequence, SampleStop.STOP_STRING)
        elif sequence.drawn[-1] in sequence.sampling.stop_ids:
            self._finish(sequence, SampleStop.STOP_ID)
        elif len(sequence.drawn) == sequence.sampling.max_new_tokens:
            self._finish(sequence, SampleStop.LENGTH)

    def _stop_string(self, sequence: EngineSequence, before: int) -> int | None:
        """How many tokens there are up to the one that completes the first stop string; None where there is none."""
        strings, table = sequence.sampling.stop_strings, self._token_bytes
        if not strings or table is None:
            return None
        parts = [
            table[token] if token < len(table) else b"" for token in sequence.drawn
        ]  # a model may have more rows than words
        text = b"".join(parts[:before])
        for number in range(before, len(sequence.drawn)):
            new = len(text)
            text += parts[number]
            if any(text.find(string, max(0, new - len(string) + 1)) >= 0 for string in strings):
                return number + 1
        return None
