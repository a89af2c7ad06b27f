"""The batched sampler: requests in, sampled tokens and their log-probs out.

The package docstring has a reading order. `Engine.step` does one round of the schedule:

    expire   finish samples whose deadline has passed
    admit    give waiting sequences a slot and pages, and prefill them
    decode   some tokens for every running sequence, in up to `settings.steps` steps

Main agents and sub-agents run side by side in the same slots. A prefix that sequences have in
common is computed once, and stays on its pages across the turns of an episode.

A sequence gets all the pages it may ever need when it is admitted. So a full cache makes requests
wait, but never fails a sequence that already runs.

What a sample depends on: every row of the programs draws with its request's seed and its own
count of tokens (`sampling`), and attends to its own tokens only. So a sample's tokens depend on the
request and the seed, not on what else is asked. The exception is rounding: which rows share a call,
and how long they are, changes the order of sums. In bfloat16 that can change a token. The same
requests in the same order, from an empty cache and without deadlines, go through the same programs
and repeat bit for bit.

A response can outlive the weights that began it: the caller asks for a part of it, loads other
weights, and asks for the rest with `Request.begun`. Every token reports the version that drew it.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Float

from models.features import FrameFeatures
from models.fingerprint import fingerprint
from models.lora import split
from models.model import VisionLanguageModel
from models.sharding import Lowering, abstract
from paravt_jax.data.frames import VideoError
from paravt_jax.method.records import digest
from rollout.engine.pages import PageTree, page_count
from rollout.engine.programs import MOST_STOP_IDS, difference
from rollout.engine.requests import Completion, Request, Sample, SampleStop
from rollout.engine.runner import Decoded, ModelRunner, Text
from rollout.engine.sequences import EngineSequence, make_prompt, no_vectors
from rollout.engine.settings import EngineSizes, round_up

_Admission = Literal["admitted", "ended", "waits for its prefix", "waits for room"]


class Engine:
    """Samples for every agent of every episode. Implements `rollout.engine.requests.Sampler`.

    Not thread-safe: one thread at a time.

    Args:
        model: its text decoder is compiled and its weights are loaded as version 0. Weights that
            are not trained (`models.lora.split`) stay for all versions.
        features: encodes the frames of requests.
        settings: all sizes.
        clock: gives seconds, for deadlines. They are checked once per step.

    Attributes:
        version: number of the weights.
        prefilled_tokens: prompt tokens that were computed so far.
        reused_tokens: prompt tokens that were found in the cache.
        sampled_tokens: tokens that were sampled so far.
        waiting: sequences without a slot, in the order in which they are admitted.
        running: sequences that are being decoded.
        unanswered: the sample of every open request, by ticket; None while it is unfinished.
        weights: the trained and the frozen weights; None while the engine sleeps.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        features: FrameFeatures,
        settings: EngineSizes,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.settings = settings
        self.features = features
        self.config = model.config
        self.clock = clock
        self.prefilled_tokens = 0
        self.reused_tokens = 0
        self.sampled_tokens = 0
        self.runner = ModelRunner(model, settings)
        self.tree = PageTree(settings.pages, settings.page)
        self.waiting: collections.deque[EngineSequence] = collections.deque()
        self.running: list[EngineSequence] = []
        self.unanswered: dict[int, Sample | None] = {}
        self.weights: tuple[Any, Any] | None = None
        self.version = 0
        # The newest responses; drafts are taken from them.
        self._texts: collections.deque[Text] = collections.deque(maxlen=settings.slots)
        self._tickets = itertools.count()
        _, weights, self._frozen = split(model.text)
        self._weight_shapes = jax.tree.map(abstract, weights)
        self.load(weights, version=0)

    # --- the interface ---

    def submit(self, request: Request) -> int:
        """Accept a request and return its ticket.

        Raises:
            ValueError: the engine could never answer it.
        """
        self._check(request)
        ticket = next(self._tickets)
        deadline = self.clock() + request.sampling.deadline
        try:
            prompt = make_prompt(request, self.features, self.config, deadline)
        except VideoError as error:
            # The agent has chosen frames, so the video was readable then and has changed since.
            self.unanswered[ticket] = self._unreadable(request, error.reason)
            return ticket
        self.unanswered[ticket] = None
        self.waiting.append(EngineSequence(ticket, prompt))
        return ticket

    def step(self) -> list[Completion]:
        """Run one round of the schedule and return the requests that finished."""
        if self.runner.lost and not self.running:
            # What the tree says of the old pages is not on the new ones.
            self.forget()
            self.runner.wake()
        self._expire()
        self._admit()
        self._decode()
        completions = [
            (ticket, sample) for ticket, sample in self.unanswered.items() if sample is not None
        ]
        for ticket, _ in completions:
            del self.unanswered[ticket]
        return completions

    def generate(self, requests: Iterable[Request]) -> list[Sample]:
        """Sample all requests. If one is refused or the caller is interrupted, all are cancelled.

        Returns:
            The samples, in the order of the requests.

        Raises:
            ValueError: a request is refused, or one that was submitted before has no answer yet.
        """
        self._require_idle("generate")
        answers: dict[int, Sample] = {}
        try:
            tickets = [self.submit(request) for request in requests]
            while not self.idle:
                answers |= self.step()
        finally:
            for ticket in list(self.unanswered):
                self.cancel(ticket)
        return [answers[ticket] for ticket in tickets]

    def cancel(self, ticket: int) -> None:
        """Give up a request and free its pages. If it has been answered, nothing happens."""
        self.unanswered.pop(ticket, None)
        self.waiting = collections.deque(
            sequence for sequence in self.waiting if sequence.ticket != ticket
        )
        # A list of its own, because `_leave` changes `running`.
        for sequence in [sequence for sequence in self.running if sequence.ticket == ticket]:
            self._leave(sequence)

    def load(self, weights: Any, version: int) -> None:
        """Switch to other weights, and forget what the old ones computed.

        Args:
            weights: the text decoder's trained weights, on the device. The engine does not copy
                them: the arrays must stay alive until the next `load` or `sleep`.
            version: number of these weights, which the tokens that they draw report.

        Raises:
            ValueError: `weights` do not fit the model, or a request has no answer yet.
        """
        self._require_idle("load")
        mismatch = difference(weights, self._weight_shapes)
        if mismatch:
            raise ValueError(
                f"Engine.load: weights {mismatch}; "
                "give the text decoder's own state, models.lora.split(model.text)[1]"
            )
        # Drop the old cache first: the new weights may have the same version number.
        self.forget()
        self.weights = (weights, self._frozen)
        self.version = version
        self.runner.wake()

    def sleep(self) -> None:
        """Free the pages and let go of the trained weights, until `load` brings new ones.

        Raises:
            ValueError: a request has no answer yet.
        """
        self._require_idle("sleep")
        self.forget()
        self.weights = None
        self.runner.sleep()

    def fingerprint(self) -> int:
        """Return the fingerprint of the weights, frozen ones too."""
        return fingerprint(*self._loaded("fingerprint"))

    def forget(self) -> None:
        """Empty the cache: later requests reuse nothing that was computed before."""
        self.tree.drop(self.version)
        self._texts.clear()
        for sequence in self.running:
            sequence.forgotten = True

    @property
    def idle(self) -> bool:
        """Whether every request is answered."""
        return not self.unanswered

    def warm_up(self) -> None:
        """Compile every program, so that no later step does.

        Raises:
            ValueError: the engine sleeps.
        """
        self.runner.warm_up(self._loaded("warm_up"))

    def lowerings(self) -> Iterator[Lowering]:
        """Return the programs that take long to compile, for `models.compilation`.

        The engine may sleep: no memory of the device is needed.
        """
        return self.runner.lowerings((self._weight_shapes, self._frozen))

    # --- requests ---

    def _loaded(self, method: str) -> tuple[Any, Any]:
        """Return the weights."""
        if self.weights is None:
            raise ValueError(f"Engine.{method}: the engine sleeps without weights; call load first")
        return self.weights

    def _require_idle(self, method: str) -> None:
        if not self.idle:
            raise ValueError(
                f"Engine.{method}: {len(self.unanswered)} requests have no answer yet; "
                "step, or cancel them"
            )

    def _check(self, request: Request) -> None:
        self._loaded("submit")
        sampling = request.sampling
        if not len(request.ids):
            raise ValueError("Request.ids: empty; give at least one token")
        ids = np.asarray(request.ids)
        words = self.config.text.vocab_size
        if ids.min() < 0 or ids.max() >= words:
            raise ValueError(
                f"Request.ids: from {ids.min()} to {ids.max()}; "
                f"give ids of the model's {words} tokens, 0 to {words - 1}"
            )
        longest = self.settings.longest
        if len(ids) + sampling.max_new_tokens > longest:
            raise ValueError(
                f"Request.ids: {len(ids)} tokens, and {sampling.max_new_tokens} new ones; "
                f"EngineSizes.longest is {longest}, "
                "make it longer, or lower the protocol's limits or the frames"
            )
        if len(sampling.stop_ids) > MOST_STOP_IDS:
            raise ValueError(
                f"Sampling.stop_ids: {len(sampling.stop_ids)} ids; give {MOST_STOP_IDS} at most"
            )

    def _unreadable(self, request: Request, reason: str) -> Sample:
        """Return the sample of a request that failed before it could wait."""
        if request.begun is not None:
            return dataclasses.replace(request.begun, stop=SampleStop.UNREADABLE, reason=reason)
        return Sample(
            ids=np.zeros(0, np.int32),
            logprobs=np.zeros(0, np.float32),
            stop=SampleStop.UNREADABLE,
            versions=np.zeros(0, np.int32),
            digest=digest(request.ids),
            reason=reason,
        )

    def _expire(self) -> None:
        """Finish the samples whose deadline has passed, with the tokens they have."""
        now = self.clock()
        unfinished = (*self.running, *self.waiting)
        for sequence in [sequence for sequence in unfinished if now >= sequence.prompt.deadline]:
            self._finish(sequence, SampleStop.DEADLINE)
        self.waiting = collections.deque(
            sequence for sequence in self.waiting if now < sequence.prompt.deadline
        )

    def _finish(self, sequence: EngineSequence, stop: SampleStop, reason: str = "") -> None:
        ids = np.array(sequence.drawn, np.int32)
        logprobs = np.array(sequence.logprobs, np.float32)
        versions = np.full(len(ids), self.version, np.int32)
        begun = sequence.prompt.request.begun
        if begun is not None:
            ids = np.concatenate([begun.ids, ids])
            logprobs = np.concatenate([begun.logprobs, logprobs])
            versions = np.concatenate([begun.versions, versions])
        self.unanswered[sequence.ticket] = Sample(
            ids, logprobs, stop, versions, digest(sequence.ids), reason
        )
        if sequence in self.running:
            self._texts.append(Text.of(sequence, self.settings.page))
            self._leave(sequence)

    # --- pages ---

    def _match(self, sequence: EngineSequence) -> None:
        """Find the cached prefix of a sequence and hold its pages.

        With four tokens per page, and a b c d e f x cached, the prompt a b c d e f g h gets:

            shared_pages  [a b c d]
            copy_source   [e f x .]   two of its tokens match, so it will be copied
            computed      6
        """
        prompt = sequence.prompt
        # Without the prompt's last token: its logits are needed, so it is always computed.
        wanted = prompt.content[: prompt.prefill_length]
        pages, source, matching = self.tree.match(self.version, wanted)
        sequence.shared_pages = pages
        sequence.copy_source = source
        if source is not None:
            # Allocating pages for this sequence must not evict the page to copy from.
            self.tree.hold([source])
        sequence.computed = len(pages) * self.settings.page + matching

    def _take_pages(self, sequence: EngineSequence) -> bool:
        """Allocate all other pages that a sequence may need; False if there are too few now."""
        size = self.settings.page
        longest = len(sequence.prompt.content) + sequence.left
        count = page_count(longest, size) - len(sequence.shared_pages)
        pages = self.tree.allocate(count)
        if pages is None and sequence.copy_source is not None:
            # The page to copy from is held, so it cannot be evicted, and it may be the very page
            # that is missing. A sequence as long as the cache would wait forever. Give up that page
            # and compute its tokens again.
            self.tree.release([sequence.copy_source])
            sequence.copy_source = None
            sequence.computed = len(sequence.shared_pages) * size
            pages = self.tree.allocate(count)
        sequence.own_pages = pages or []
        return pages is not None

    def _return_pages(self, sequence: EngineSequence) -> None:
        path = list(sequence.shared_pages)
        if sequence.copy_source is not None:
            # In one call with the pages before it: `release` makes children evictable first.
            path.append(sequence.copy_source)
        self.tree.release(path)
        self.tree.free(sequence.own_pages)
        sequence.shared_pages = []
        sequence.own_pages = []
        sequence.copy_source = None

    def _publish(self, sequence: EngineSequence) -> None:
        """Move the pages that a sequence has written into the tree, for others to find."""
        first = len(sequence.shared_pages) * self.settings.page
        drawn = np.array(sequence.drawn, np.int64)
        content = np.concatenate([sequence.prompt.content, drawn])
        added, sequence.own_pages = self.tree.insert(
            self.version,
            sequence.shared_pages,
            content[first : sequence.computed],
            sequence.own_pages,
        )
        sequence.shared_pages = sequence.shared_pages + added

    def _leave(self, sequence: EngineSequence) -> None:
        """Take a sequence out of its slot. Its pages stay cached while there is room."""
        self.running.remove(sequence)
        pages = sequence.shared_pages
        if pages and len(pages[-1].tokens) < self.settings.page:
            # This page was published after prefill, when it was partial. Decoding has written more
            # tokens to it since, so it goes back into the tree under its new content.
            sequence.own_pages.insert(0, self.tree.take_out(pages.pop()))
        if not sequence.forgotten:
            self._publish(sequence)
        self._return_pages(sequence)

    # --- prefill ---

    def _admit(self) -> None:
        """Move waiting sequences into free slots and prefill them, several at once."""
        batch = _PrefillBatch(self.settings)
        try:
            while self._fill(batch):
                self._prefill(batch.sequences)
                self.running += batch.sequences
                # No call may come between: an interrupt in it would return the pages of sequences
                # that run.
                batch.sequences = []
                batch = _PrefillBatch(self.settings)
        except BaseException:
            # Most likely Ctrl-C. Put the sequences back into the queue, where `cancel` finds them.
            for sequence in batch.sequences:
                self._return_pages(sequence)
            self.waiting.extendleft(reversed(batch.sequences))
            raise

    def _prefill(self, batch: list[EngineSequence]) -> None:
        copies = [
            (sequence.copy_source.page, sequence.own_pages[0])
            for sequence in batch
            if sequence.copy_source is not None
        ]
        if copies:
            self.runner.copy(copies)
        for sequence in batch:
            self.reused_tokens += sequence.computed
            if sequence.copy_source is not None:
                self.tree.release([sequence.copy_source])
                sequence.copy_source = None
        self.prefilled_tokens += self.runner.prefill(batch, self._loaded("step"))
        # Publish now, not at the end: the samples of a prompt share it while they all run.
        for sequence in batch:
            self._publish(sequence)

    def _fill(self, batch: _PrefillBatch) -> bool:
        """Move waiting sequences into a batch, with their pages; False if none can start now."""
        slots = self.settings.slots
        skipped: list[EngineSequence] = []
        try:
            while self.waiting and len(skipped) < slots:
                if len(self.running) + len(batch.sequences) >= slots:
                    break
                # An interrupt may come at any line. So a sequence stays at the head of the queue
                # until its slot is certain.
                result = self._try_admit(self.waiting[0], batch)
                if result == "ended":
                    self.waiting.popleft()
                elif result == "admitted":
                    batch.sequences.append(self.waiting.popleft())
                else:
                    skipped.append(self.waiting.popleft())
                if result == "waits for room":
                    # Later sequences wait too, even small ones, or large ones could starve.
                    break
        except BaseException:
            if self.waiting:
                self._return_pages(self.waiting[0])
            raise
        finally:
            self.waiting.extendleft(reversed(skipped))
        return bool(batch.sequences)

    def _try_admit(self, sequence: EngineSequence, batch: _PrefillBatch) -> _Admission:
        """Give a sequence everything that it needs to be prefilled in `batch`, or nothing."""
        if not sequence.left:
            self._finish(sequence, SampleStop.LENGTH)
            return "ended"
        self._match(sequence)
        if batch.computes(sequence):
            # Another sequence of this batch computes the same tokens. Once they are on pages, this
            # one finds them there.
            self._return_pages(sequence)
            return "waits for its prefix"
        # Pages come last, because allocating may evict some that others could still use.
        if not batch.has_room(sequence) or not self._take_pages(sequence):
            self._return_pages(sequence)
            return "waits for room"
        try:
            sequence.visual = self._visual(sequence)
        except VideoError as error:
            self._return_pages(sequence)
            self._finish(sequence, SampleStop.UNREADABLE, error.reason)
            return "ended"
        batch.reserve(sequence)
        return "admitted"

    def _visual(self, sequence: EngineSequence) -> Float[np.ndarray, "m c d"]:
        """Return the vectors of the visual tokens that are not computed yet.

        The frames of an agent are in memory. Those of other callers are read and encoded now.

        Raises:
            VideoError: a frame cannot be read.
        """
        prompt = sequence.prompt
        computed = int(prompt.visual[: sequence.computed].sum())
        ends = prompt.frame_ends
        # The frame of the next visual token: the first one that ends after it.
        first = int(np.searchsorted(ends, computed, side="right"))
        if first == len(ends):
            return no_vectors()
        vectors = self.features(prompt.request.frames[first:])
        before = int(ends[first - 1]) if first else 0
        return vectors[computed - before :]

    # --- decoding ---

    def _decode(self) -> None:
        sequences = self.running[:]  # a list of its own, because `_finish` changes `running`
        if not sequences:
            return
        results = self.runner.decode(sequences, self._texts, self._loaded("step"))
        for sequence, decoded in zip(sequences, results, strict=True):
            self._extend(sequence, decoded)

    def _extend(self, sequence: EngineSequence, decoded: Decoded) -> None:
        """Append new tokens, and finish a sample that ended."""
        self.sampled_tokens += len(decoded.ids)
        sequence.drawn += decoded.ids
        sequence.logprobs += decoded.logprobs
        # All but the last token: the last one drawn has not been fed to the model yet.
        sequence.computed = sequence.prompt.prefill_length + len(sequence.drawn)
        progress = sequence.prompt.request.progress
        told = progress is not None and progress(sequence.drawn)
        if told or sequence.drawn[-1] in sequence.sampling.stop_ids:
            self._finish(sequence, SampleStop.STOP_ID)
        elif not sequence.left:
            self._finish(sequence, SampleStop.LENGTH)


class _PrefillBatch:
    """Sequences that are prefilled together.

    They are as many as begin in one call: the last of them may need more calls.
    """

    def __init__(self, settings: EngineSizes):
        self.settings = settings
        self.sequences: list[EngineSequence] = []
        self._beginnings: set[tuple] = set()
        self._tokens = 0

    def computes(self, sequence: EngineSequence) -> bool:
        """Return whether a sequence of the batch computes the next tokens of this one."""
        return self._beginning(sequence) in self._beginnings

    def has_room(self, sequence: EngineSequence) -> bool:
        """Return whether there is room for the next tokens of a sequence, if any are missing."""
        return not sequence.missing or self._tokens < self.settings.prefill_tokens

    def reserve(self, sequence: EngineSequence) -> None:
        """Take the room of a sequence, in whole jobs."""
        if sequence.missing:
            self._beginnings.add(self._beginning(sequence))
            self._tokens += round_up(sequence.missing, self.settings.page)

    def _beginning(self, sequence: EngineSequence) -> tuple:
        """Identify the next tokens: the last cached page before them, and up to one page of
        them."""
        pages = sequence.shared_pages
        end = min(sequence.computed + self.settings.page, sequence.prompt.prefill_length)
        tokens = sequence.prompt.content[sequence.computed : end]
        return pages[-1].serial if pages else None, tokens.tobytes()
