"""Runs the compiled programs: fills their arrays from sequences, and returns the sampled tokens.

`engine` decides which sequences run, and on which pages. The runner holds the device's memory: the
pool of pages, while the engine is awake. Arrays always have the shapes of `EngineSizes`; jobs and
rows without a sequence are idle.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int, Int32

from models.model import VisionLanguageModel
from models.sharding import Lowering, zeros
from rollout.engine.drafts import build_history
from rollout.engine.layout import Layout, Serials, choose_layout
from rollout.engine.programs import (
    MOST_STOP_IDS,
    Bank,
    DecodeRows,
    Drawn,
    Pieces,
    Pool,
    Programs,
)
from rollout.engine.sampling import Choices
from rollout.engine.sequences import EngineSequence, no_vectors
from rollout.engine.settings import EngineSizes

# Drafts per row where the time of a step hardly depends on its tokens.
DRAFTS = 5


class Text(NamedTuple):
    """A response that drafts may be taken from."""

    beginning: Serials
    """Its sequence began with these pages."""
    ids: Int32[np.ndarray, " t"]

    @classmethod
    def of(cls, sequence: EngineSequence, page: int) -> Text:
        """Return what a sequence has drawn so far."""
        return cls(sequence.beginning(page), np.array(sequence.drawn, np.int32))


class Decoded(NamedTuple):
    """New tokens of a sequence."""

    ids: list[int]
    logprobs: list[float]


class ModelRunner:
    """Prefills and decodes sequences.

    Attributes:
        pool: all pages; None while the engine sleeps.
        no_vectors: the visual vectors of a call without any; None while the engine sleeps.
    """

    def __init__(self, model: VisionLanguageModel, settings: EngineSizes):
        self.settings = settings
        self.pool: Pool | None = None
        self.no_vectors: Bank | None = None
        self._programs = Programs(model, settings.page)
        self._abstract_bank = self._programs.abstract_bank(settings.prefill_tokens)
        usual = 0 if self._programs.platform == "cpu" else DRAFTS
        self._drafts = usual if settings.drafts is None else settings.drafts
        # Page tables have room for the longest sequence.
        self._columns = -(-settings.longest // settings.page)

    def wake(self) -> None:
        """Allocate the pool, if `sleep` freed it or it was lost."""
        if self.pool is None or self.lost:
            self.pool = self._programs.make_pool(self.settings.pages)
            self.no_vectors = zeros(self._abstract_bank)

    @property
    def lost(self) -> bool:
        """Whether a call took the pool and was interrupted before it gave it back."""
        return self.pool is not None and self.pool.is_deleted()

    def sleep(self) -> None:
        """Free the device's memory."""
        self.pool = None
        self.no_vectors = None

    def warm_up(self, weights: Any) -> None:
        """Compile every program, by running each with idle rows only."""
        self._prefill(_Call(self.settings), weights)
        self.copy([])
        for rows in self._row_counts():
            self._run([], [], rows, weights)

    def lowerings(self, weights: Any) -> Iterator[Lowering]:
        """Return the programs, those that take long to compile first.

        Args:
            weights: Real or abstract weights.
        """
        settings, programs = self.settings, self._programs
        pool = programs.abstract_pool(settings.pages)
        pieces = _Call(settings).pieces
        yield functools.partial(programs.prefill.lower, weights, pool, self._abstract_bank, pieces)
        for count in self._row_counts():
            rows = self._idle_rows(count)
            static = self._static(rows)
            yield functools.partial(programs.decode.lower, weights, pool, rows, **static)
        yield functools.partial(programs.copy.lower, pool, *self._pairs([]))

    def _row_counts(self) -> list[int]:
        """Return the rows of each decoding program, the largest first."""
        return sorted({self.settings.slots, self.settings.few_rows}, reverse=True)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages, from the first of each pair to the second, for at most `slots` pairs."""
        self.pool = self._programs.copy(self.pool, *self._pairs(pairs))

    def _pairs(self, pairs: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.int32]:
        """Return sources and targets as arrays, and their number."""
        sources = np.zeros(self.settings.slots, np.int32)
        targets = np.zeros(self.settings.slots, np.int32)
        sources[: len(pairs)] = [source for source, _ in pairs]
        targets[: len(pairs)] = [target for _, target in pairs]
        return sources, targets, np.int32(len(pairs))

    def prefill(self, sequences: Sequence[EngineSequence], weights: Any) -> int:
        """Compute all prompt tokens that are missing, in as many calls as they need.

        The host prepares a call while the device runs those before it.

        Returns:
            How many tokens were computed.
        """
        total = 0
        while any(sequence.missing for sequence in sequences):
            call = _Call(self.settings)
            for sequence in sequences:
                total += call.add(sequence)
            self._prefill(call, weights)
        return total

    def decode(
        self,
        sequences: Sequence[EngineSequence],
        texts: Sequence[Text],
        weights: Any,
    ) -> list[Decoded]:
        """Sample tokens in up to `settings.steps` steps, for at most `settings.slots` sequences.

        Args:
            sequences: what is decoded.
            texts: ended responses, from which drafts may be taken.
            weights: the text decoder's.
        """
        drawn, layout = self._run(sequences, texts, self._row_count(len(sequences)), weights)
        results = [Decoded([], [])] * len(sequences)
        for row, n in enumerate(layout.rows):
            if n is not None:
                new = row, slice(drawn.counts[row])
                results[n] = Decoded(drawn.ids[new].tolist(), drawn.logprobs[new].tolist())
        return results

    def _row_count(self, sequences: int) -> int:
        """Return the rows of the decoding program for this number of sequences."""
        few = self.settings.few_rows
        return few if sequences <= few else self.settings.slots

    def _prefill(self, call: _Call, weights: Any) -> None:
        """Run the prefill program once."""
        with jax.profiler.TraceAnnotation("prefill"):
            bank = self.no_vectors
            if call.vectors:
                # Most tokens of a call with frames are visual, so hardly any zeros travel.
                filled = np.zeros(self._abstract_bank.shape, self._abstract_bank.dtype)
                joined = np.concatenate(call.vectors)
                filled[: len(joined)] = joined
                bank = jax.device_put(filled, self._abstract_bank.sharding)
            self.pool = self._programs.prefill(weights, self.pool, bank, call.pieces)

    def _run(
        self,
        sequences: Sequence[EngineSequence],
        texts: Sequence[Text],
        count: int,
        weights: Any,
    ) -> tuple[Drawn, Layout]:
        """Run the decoding program of `count` rows once. The result has NumPy arrays."""
        size = self.settings.rows_per_prefix
        beginnings = [sequence.beginning(self.settings.page) for sequence in sequences]
        layout = choose_layout(beginnings, count // size, size)
        rows = self._idle_rows(count)
        for row, n in enumerate(layout.rows):
            if n is None:
                continue
            shared = layout.shared[row // size]
            pages = len(shared) if beginnings[n][: len(shared)] == shared else 0
            # All that have a part in them name the same pages.
            _fill(rows.shared[row // size], sequences[n].pages[:pages])
            self._fill_row(rows, row, sequences[n], pages)
        if rows.history is not None:
            running = [Text.of(sequence, self.settings.page) for sequence in sequences]
            for row, n in enumerate(layout.rows):
                if n is not None:
                    others = [*texts, *running[:n], *running[n + 1 :]]
                    self._fill_history(rows, row, sequences[n], others)
        with jax.profiler.TraceAnnotation("decode"):
            self.pool, drawn = self._programs.decode(weights, self.pool, rows, **self._static(rows))
            return jax.tree.map(np.asarray, drawn), layout

    def _static(self, rows: DecodeRows) -> dict[str, int]:
        """Return the static arguments of the decoding program for these rows."""
        drafts = 0 if rows.history is None else self._drafts
        return {"steps": self.settings.steps, "drafts": drafts}

    def _idle_rows(self, count: int) -> DecodeRows:
        """Return the arrays of the program of `count` rows, all of them idle."""
        settings = self.settings
        history = None
        if self._drafts and count == settings.few_rows:
            # With room for the tokens that a call draws.
            entries = settings.longest + settings.steps * (1 + self._drafts)
            history = np.zeros((count, entries), np.int32)
        return DecodeRows(
            tokens=np.zeros(count, np.int32),
            positions=np.zeros(count, np.int32),
            offsets=np.zeros(count, np.int32),
            tables=np.zeros((count, self._columns), np.int32),
            shared=np.zeros((count // settings.rows_per_prefix, self._columns), np.int32),
            shared_tokens=np.zeros(count, np.int32),
            drawn=np.zeros(count, np.int32),
            left=np.zeros(count, np.int32),
            stops=np.full((count, MOST_STOP_IDS), -1, np.int32),
            choices=Choices(
                seeds=np.zeros(count, np.uint32),
                temperatures=np.ones(count, np.float32),
            ),
            history=history,
            lengths=np.ones(count, np.int32),
        )

    def _fill_row(
        self, rows: DecodeRows, row: int, sequence: EngineSequence, shared_pages: int
    ) -> None:
        """Put a sequence into a row. It reads its first `shared_pages` with its group."""
        request = sequence.prompt.request
        sampling = sequence.sampling
        shared_tokens = shared_pages * self.settings.page
        drawn = len(sequence.drawn)
        rows.tokens[row] = sequence.drawn[-1] if drawn else request.ids[-1]
        # The three M-RoPE positions of a text token are equal.
        rows.positions[row] = sequence.prompt.positions[0, -1] + drawn
        rows.offsets[row] = sequence.computed - shared_tokens
        rows.shared_tokens[row] = shared_tokens
        _fill(rows.tables[row], sequence.pages[shared_pages:])
        rows.drawn[row] = sequence.begun + drawn
        rows.left[row] = sequence.left
        rows.stops[row, : len(sampling.stop_ids)] = sampling.stop_ids
        rows.choices.seeds[row] = request.seed % 2**32
        rows.choices.temperatures[row] = sampling.temperature

    def _fill_history(
        self, rows: DecodeRows, row: int, sequence: EngineSequence, texts: Sequence[Text]
    ) -> None:
        """Give a row what its drafts are taken from, texts that begin like it last."""
        assert rows.history is not None
        own = sequence.beginning(self.settings.page)

        def common(text: Text) -> int:
            return len(os.path.commonprefix([text.beginning, own]))

        others = [text.ids for text in sorted(texts, key=common)]
        history = build_history(sequence.ids, others, self.settings.longest)
        rows.history[row, : len(history)] = history
        rows.lengths[row] = len(history)


class _Call:
    """A call of prefill, filled job by job.

    Attributes:
        pieces: the arrays of the call.
        vectors: the vectors [m, c, d] of its visual tokens, in their order.
    """

    def __init__(self, settings: EngineSizes):
        size = settings.page
        jobs = settings.prefill_tokens // size
        columns = -(-settings.longest // size)
        self.vectors: list[np.ndarray] = []
        self.pieces = Pieces(
            ids=np.zeros((jobs, size), np.int32),
            positions=np.zeros((3, jobs, size), np.int32),
            index=np.full((jobs, size), -1, np.int32),
            offsets=np.full((jobs, size), -1, np.int32),
            tables=np.zeros((jobs, columns), np.int32),
        )
        self._next_job = 0

    def add(self, sequence: EngineSequence) -> int:
        """Add the next tokens of a sequence, as many as there is room for, and return how many."""
        jobs, size = self.pieces.ids.shape
        total = 0
        while sequence.missing and self._next_job < jobs:
            total += self._add_job(sequence, min(size, sequence.missing))
        return total

    def _add_job(self, sequence: EngineSequence, count: int) -> int:
        job = self._next_job
        piece = slice(sequence.computed, sequence.computed + count)
        self.pieces.ids[job, :count] = sequence.prompt.request.ids[piece]
        self.pieces.positions[:, job, :count] = sequence.prompt.positions[:, piece]
        self.pieces.offsets[job, :count] = np.arange(piece.start, piece.stop)
        _fill(self.pieces.tables[job], sequence.pages)
        visual = np.flatnonzero(sequence.prompt.visual[piece])
        if visual.size:
            before = sum(map(len, self.vectors))
            self.pieces.index[job, visual] = before + np.arange(visual.size)
            self.vectors.append(sequence.visual[: visual.size])
            sequence.visual = sequence.visual[visual.size :]
        sequence.computed = piece.stop
        if not sequence.missing:
            # A slice, even an empty one, would keep the array of all vectors alive.
            sequence.visual = no_vectors()
        self._next_job += 1
        return count


def _fill(table: Int[np.ndarray, " m"], pages: Sequence[int]) -> None:
    """Write page numbers to the beginning of a table."""
    table[: len(pages)] = pages
