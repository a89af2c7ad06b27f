"""Runs the compiled programs: fills their arrays from sequences, and returns the sampled tokens.

`engine` decides which sequences run, and on which pages. The runner holds the device's memory: the
pool of pages and the copies of shared prefixes, while the engine is awake. Arrays always have the
shapes of `EngineSizes`; rows without a sequence are idle.

Keys and values are in up to three places while decoding:

    pool       all pages of all sequences, cached prompts included. On TPU, decoding reads and
               writes it directly, through a table of pages per row.
    rows       elsewhere, `decode` gathers the pages of each row into one dense cache, decodes some
               tokens in it, and scatters them back to the pool.
    prefixes   with a shared prefix, the rows of a block attend to one dense copy of it, and their
               own dense cache holds only what follows. This saves memory traffic, not prefill.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from models.attention import platform
from models.model import VisionLanguageModel
from models.sharding import Lowering
from rollout.engine.layout import Layout, Serials, choose_layout
from rollout.engine.pages import Node
from rollout.engine.programs import (
    CHUNK,
    MOST_STOP_IDS,
    Bank,
    DecodeRows,
    Drawn,
    Pieces,
    Pool,
    Prefixes,
    Programs,
    pages_of,
)
from rollout.engine.sampling import Choices
from rollout.engine.sequences import EngineSequence, no_vectors
from rollout.engine.settings import EngineSizes


class Decoded(NamedTuple):
    """New tokens of a sequence."""

    ids: list[int]
    logprobs: list[float]


class ModelRunner:
    """Prefills and decodes sequences.

    Attributes:
        pool: all pages; None while the engine sleeps.
        prefixes: the copies of shared prefixes, by their padded length.
    """

    def __init__(self, model: VisionLanguageModel, settings: EngineSizes):
        self._paged = platform() == "tpu" if settings.paged is None else settings.paged
        # Where decoding reads the pages themselves, nothing is shared.
        shared = () if self._paged else settings.prefix_lengths
        self.settings = dataclasses.replace(settings, prefix_lengths=shared)
        self.pool: Pool | None = None
        self.prefixes: dict[int, Prefixes] = {}
        self._programs = Programs(model, settings.page, self._paged)
        # The prefix in each block of `prefixes`, identified by serials. These are never reused; the
        # page numbers of an evicted prefix may soon hold other content.
        self._loaded: dict[int, list[Serials]] = {}

    def wake(self) -> None:
        """Allocate the pool, if `sleep` freed it."""
        if self.pool is None:
            self.pool = self._programs.make_pool(self.settings.pages)

    def sleep(self) -> None:
        """Free the device's memory."""
        self.pool = None
        self.prefixes.clear()
        self._loaded.clear()

    def warm_up(self, weights: Any) -> None:
        """Compile every program, by running each with idle rows only."""
        settings = self.settings
        for length, before in self._prefill_sizes():
            self._prefill([], length, before, weights)
        self._bank([np.zeros(self._programs.bank_shape(1), self._programs.dtype)])
        # Copy the page that is never allocated onto itself.
        self.copy([(settings.pages, settings.pages)])
        for idle in self._idle_layouts():
            if idle.prefix_length:
                self._load_prefix(idle.prefix_length, 0, [])
            self._run([], idle, weights)

    def lowerings(self, weights: Any) -> Iterator[Lowering]:
        """Return the programs that take long to compile: those for prefill and decoding.

        Args:
            weights: Real or abstract weights.
        """
        settings, programs = self.settings, self._programs
        pool = programs.abstract_pool(settings.pages)
        for length, before in self._prefill_sizes():
            pieces = self._pieces([], length, before)
            bank = None
            if not settings.only_text(length):
                pieces, _ = _index_visual(pieces, [])
                bank = programs.abstract_bank(settings.bank_tokens)
            yield functools.partial(programs.prefill.lower, weights, pool, bank, pieces)
        for idle in self._idle_layouts():
            rows, prefixes = self._idle_rows(idle), None
            if idle.prefix_length:
                prefixes = programs.abstract_prefixes(len(idle.prefixes), idle.prefix_length)
            static = {"steps": settings.steps, "width": idle.row_length}
            yield functools.partial(programs.decode.lower, weights, pool, prefixes, rows, **static)

    def _prefill_sizes(self) -> Iterator[tuple[int, int]]:
        """Return tokens per row of each prefill program, and the cached tokens before them."""
        settings = self.settings
        return itertools.product(settings.prefill_lengths, (0, *settings.row_lengths))

    def _idle_layouts(self) -> Iterator[Layout]:
        """Return a layout of each decoding program, without sequences."""
        settings = self.settings
        for row_length in settings.row_lengths:
            rows = self._rows(row_length)
            blocks = rows // settings.rows_per_prefix
            # Only programs with all slots share prefixes.
            shares = rows == settings.slots
            for prefix_length in (0, *settings.prefix_lengths) if shares else (0,):
                yield Layout((None,) * rows, ((),) * blocks, prefix_length, row_length)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages, from the first of each pair to the second."""
        slots = self.settings.slots
        for first in range(0, len(pairs), slots):
            some = pairs[first : first + slots]
            # Padding copies the page that is never allocated onto itself.
            sources = np.full(slots, self.settings.pages, np.int32)
            targets = sources.copy()
            sources[: len(some)] = [source for source, _ in some]
            targets[: len(some)] = [target for _, target in some]
            self.pool = self._programs.copy(self.pool, sources, targets)

    def prefill(self, sequences: Sequence[EngineSequence], weights: Any) -> int:
        """Compute all prompt tokens that are missing, in several calls where they are long.

        Returns:
            How many tokens were computed.
        """
        total = 0
        while True:
            todo = [sequence for sequence in sequences if sequence.missing]
            if not todo:
                return total
            visual = any(len(sequence.visual) for sequence in todo)
            length = self.settings.piece(max(sequence.missing for sequence in todo), visual)
            before = self.settings.width(max(sequence.computed for sequence in todo))
            batch = todo[: self.settings.prefill_rows(length, before)]
            lengths = self._prefill(batch, length, before, weights)
            for sequence, count in zip(batch, lengths, strict=False):
                _advance(sequence, count)
                total += count

    def decode(self, sequences: Sequence[EngineSequence], weights: Any) -> list[Decoded]:
        """Sample up to `settings.steps` tokens for each of at most `settings.slots` sequences."""
        results = [Decoded([], [])] * len(sequences)
        # Longest first: if one program cannot read all of them, sequences of similar length run
        # together, so that short ones are not padded to the length of long ones.
        order = sorted(range(len(sequences)), key=lambda n: -sequences[n].computed)
        while order:
            layout = self._layout([sequences[n] for n in order])
            count = len(order)
            if self._rows(layout.row_length) < self.settings.slots:
                # Too many tokens to read at once. Run the longest ones, without shared prefixes.
                longest = sequences[order[0]].computed
                count = self._rows(self.settings.width(max(1, longest)))
                layout = self._layout([sequences[n] for n in order[:count]], count)
            batch = [sequences[n] for n in order[:count]]
            self._load_prefixes(batch, layout)
            drawn = self._run(batch, layout, weights)
            for row, n in enumerate(layout.rows):
                if n is not None:
                    new = row, slice(drawn.counts[row])
                    ids, logprobs = drawn.ids[new].tolist(), drawn.logprobs[new].tolist()
                    results[order[n]] = Decoded(ids, logprobs)
            order = order[count:]
        return results

    def _rows(self, width: int) -> int:
        """Return the rows of a program that reads `width` tokens per row.

        Paged decoding makes no copies, so its programs always have all slots.
        """
        return self.settings.slots if self._paged else self.settings.rows(width)

    def _layout(self, sequences: Sequence[EngineSequence], rows: int | None = None) -> Layout:
        """Lay out all slots with shared prefixes, or `rows` rows without them."""
        size = self.settings.page
        paths = [
            tuple(node.serial for node in sequence.shared_pages if len(node.tokens) == size)
            for sequence in sequences
        ]
        lengths = [sequence.computed for sequence in sequences]
        return choose_layout(paths, lengths, self._loaded, self.settings, rows)

    def _prefill(
        self, sequences: Sequence[EngineSequence], length: int, before: int, weights: Any
    ) -> list[int]:
        """Run a prefill program once.

        Returns:
            Tokens that were computed, by row. Rows after the last sequence are idle.
        """
        pieces = self._pieces(sequences, length, before)
        vectors: list[np.ndarray] = []
        with_bank = not self.settings.only_text(length)
        if with_bank:
            pieces, vectors = _index_visual(pieces, sequences)
        with jax.profiler.TraceAnnotation("prefill"):
            bank = self._bank(vectors) if with_bank else None
            self.pool = self._programs.prefill(weights, self.pool, bank, pieces)
        return np.asarray(pieces.lengths).tolist()

    def _pieces(self, sequences: Sequence[EngineSequence], length: int, before: int) -> Pieces:
        """Return the next `length` tokens of each sequence, for the program that reads `before`
        tokens."""
        settings = self.settings
        rows = settings.prefill_rows(length, before)
        columns = before // settings.page + pages_of(length, settings.page)
        pieces = Pieces(
            ids=np.zeros((rows, length), np.int32),
            positions=np.zeros((3, rows, length), np.int32),
            index=None,
            lengths=np.zeros(rows, np.int32),
            before=np.zeros(rows, np.int32),
            tables=np.full((rows, columns), settings.pages, np.int32),
        )
        for row, sequence in enumerate(sequences):
            prompt = sequence.prompt
            end = min(sequence.computed + length, prompt.prefill_length)
            piece = slice(sequence.computed, end)
            count = end - sequence.computed
            pieces.ids[row, :count] = prompt.request.ids[piece]
            pieces.positions[:, row, :count] = prompt.positions[:, piece]
            pieces.lengths[row] = count
            pieces.before[row] = sequence.computed
            _fill(pieces.tables[row], sequence.pages)
        return pieces

    def _bank(self, vectors: Sequence[np.ndarray]) -> Bank:
        """Put visual vectors on the device. Only whole chunks of them travel, never zeros alone."""
        bank = self._programs.make_bank(self.settings.bank_tokens)
        if not vectors:
            return bank
        joined = np.concatenate(vectors).astype(bank.dtype, copy=False)
        for first in range(0, len(joined), CHUNK):
            some = joined[first : first + CHUNK]
            chunk = np.zeros((CHUNK, *some.shape[1:]), some.dtype)
            chunk[: len(some)] = some
            bank = self._programs.fill(bank, chunk, np.int32(first))
        return bank

    def _load_prefixes(self, sequences: Sequence[EngineSequence], layout: Layout) -> None:
        """Gather the layout's prefixes that are not in their block yet."""
        size = self.settings.rows_per_prefix
        nothing: list[Serials] = [()] * len(layout.prefixes)
        for block, prefix in enumerate(layout.prefixes):
            loaded = self._loaded.get(layout.prefix_length, nothing)
            if not prefix or loaded[block] == prefix:
                continue
            members = [n for n in layout.rows[block * size : (block + 1) * size] if n is not None]
            pages = sequences[members[0]].shared_pages[: len(prefix)]
            self._load_prefix(layout.prefix_length, block, pages)

    def _load_prefix(self, length: int, block: int, path: Sequence[Node]) -> None:
        """Gather pages into a block's copy of a prefix, padded to `length` tokens."""
        blocks = self.settings.slots // self.settings.rows_per_prefix
        if length not in self.prefixes:
            self.prefixes[length] = self._programs.make_prefixes(blocks, length)
            self._loaded[length] = [()] * blocks
        table = np.full(length // self.settings.page, self.settings.pages, np.int32)
        _fill(table, [node.page for node in path])
        # Cleared first: an interrupt must not leave the old prefix recorded for new content.
        self._loaded[length][block] = ()
        self.prefixes[length] = self._programs.gather(
            self.pool, self.prefixes[length], table, np.int32(block)
        )
        self._loaded[length][block] = tuple(node.serial for node in path)

    def _run(self, sequences: Sequence[EngineSequence], layout: Layout, weights: Any) -> Drawn:
        """Run a decoding program once. The result has NumPy arrays."""
        settings = self.settings
        rows = self._idle_rows(layout)
        for row, n in enumerate(layout.rows):
            if n is None:
                continue
            prefix: Serials = ()
            if layout.prefix_length:
                prefix = layout.prefixes[row // settings.rows_per_prefix]
            self._fill_row(rows, row, sequences[n], prefix)
        prefixes = self.prefixes[layout.prefix_length] if layout.prefix_length else None
        static = {"steps": settings.steps, "width": layout.row_length}
        with jax.profiler.TraceAnnotation("decode"):
            self.pool, drawn = self._programs.decode(weights, self.pool, prefixes, rows, **static)
            return jax.tree.map(np.asarray, drawn)

    def _idle_rows(self, layout: Layout) -> DecodeRows:
        """Return the arrays of a program whose rows are all idle."""
        settings = self.settings
        count = len(layout.rows)
        columns = layout.row_length // settings.page + pages_of(settings.steps, settings.page)
        return DecodeRows(
            tokens=np.zeros(count, np.int32),
            positions=np.zeros(count, np.int32),
            prefix_tokens=np.zeros(count, np.int32),
            own_tokens=np.zeros(count, np.int32),
            tables=np.full((count, columns), settings.pages, np.int32),
            drawn=np.zeros(count, np.int32),
            left=np.zeros(count, np.int32),
            stops=np.full((count, MOST_STOP_IDS), -1, np.int32),
            choices=Choices(
                seeds=np.zeros(count, np.uint32),
                temperatures=np.ones(count, np.float32),
            ),
        )

    def _fill_row(
        self, rows: DecodeRows, row: int, sequence: EngineSequence, prefix: Serials
    ) -> None:
        """Put a sequence into a row whose block has this prefix."""
        request = sequence.prompt.request
        sampling = sequence.sampling
        # The sequence may be in this block only because a row was free there. Then it does not
        # begin with the prefix, and reads all its tokens on its own pages.
        beginning = tuple(node.serial for node in sequence.shared_pages[: len(prefix)])
        prefix_pages = len(prefix) if prefix and beginning == prefix else 0
        prefix_tokens = prefix_pages * self.settings.page
        drawn = len(sequence.drawn)
        rows.tokens[row] = sequence.drawn[-1] if drawn else request.ids[-1]
        # The three M-RoPE positions of a text token are equal.
        rows.positions[row] = sequence.prompt.positions[0, -1] + drawn
        rows.prefix_tokens[row] = prefix_tokens
        rows.own_tokens[row] = sequence.computed - prefix_tokens
        _fill(rows.tables[row], sequence.pages[prefix_pages:])
        rows.drawn[row] = sequence.begun + drawn
        rows.left[row] = sequence.left
        rows.stops[row, : len(sampling.stop_ids)] = sampling.stop_ids
        rows.choices.seeds[row] = request.seed % 2**32
        rows.choices.temperatures[row] = sampling.temperature


def _index_visual(
    pieces: Pieces, sequences: Sequence[EngineSequence]
) -> tuple[Pieces, list[np.ndarray]]:
    """Number the visual tokens of all rows.

    Returns:
        The pieces with their index, and the vectors [m, c, d] of each row in its order.
    """
    index = np.full(pieces.ids.shape, -1, np.int32)
    vectors = []
    total = 0
    for row, sequence in enumerate(sequences):
        piece = slice(sequence.computed, sequence.computed + int(pieces.lengths[row]))
        tokens = np.flatnonzero(sequence.prompt.visual[piece])
        if tokens.size:
            index[row, tokens] = total + np.arange(tokens.size)
            vectors.append(sequence.visual[: tokens.size])
            total += tokens.size
    return pieces._replace(index=index), vectors


def _advance(sequence: EngineSequence, count: int) -> None:
    """Count tokens as computed and drop the visual vectors among them."""
    computed = slice(sequence.computed, sequence.computed + count)
    seen = int(sequence.prompt.visual[computed].sum())
    sequence.visual = sequence.visual[seen:]
    sequence.computed += count
    if not sequence.missing:
        # A slice, even an empty one, would keep the array of all vectors alive.
        sequence.visual = no_vectors()


def _fill(table: Int[np.ndarray, " m"], pages: Sequence[int]) -> None:
    """Write page numbers to the beginning of a table. Pages beyond its end are not needed yet."""
    count = min(len(table), len(pages))
    table[:count] = pages[:count]
