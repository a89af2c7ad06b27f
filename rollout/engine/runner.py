"""Sequences into the arrays that the programs take, and what comes out of them back to the caller.

Owns the memory on the device: the pool of pages and the lines of shared starts, there while it is awake. Refuses to decide anything:
which sequences, with which pages, is `engine`'s. Invariant: arrays have the shapes of `EngineSizes`, however few sequences there are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from models.attention import platform
from models.qwen3_vl.model import Qwen3VL
from rollout.engine.layout import Layout, Serials, choose_layout
from rollout.engine.pages import Node
from rollout.engine.programs import MOST_STOP_IDS, Lines, Pieces, Pool, Programs, Rows, pages_of
from rollout.engine.sampling import Choices
from rollout.engine.sequences import EngineSequence
from rollout.engine.settings import EngineSizes


class ModelRunner:
    """Prefills and decodes sequences. `seconds` is how long the device was waited for, `steps` how many tokens deep was decoded.

    `row_steps` counts the rows of every step.
    """

    def __init__(self, model: Qwen3VL, settings: EngineSizes):
        self.settings, self.config = settings, model.config
        self.seconds, self.steps, self.row_steps = 0.0, 0, 0
        self._paged = platform() == "tpu" if settings.paged is None else settings.paged
        self._programs = Programs(model, settings.page, self._paged)
        self._pool: Pool | None = None
        self._lines: dict[int, Lines] = {}  # by their length
        self._in_lines: dict[int, list[Serials]] = {}  # the start that each of them holds

    def wake(self) -> None:
        """Takes the memory that `sleep` gave back, empty."""
        if self._pool is None:
            self._pool = self._programs.make_pool(self.settings.pages)

    def sleep(self) -> None:
        """Gives the device's memory back."""
        self._pool = None
        self._lines.clear()
        self._in_lines.clear()

    def warm_up(self, weights: Any) -> None:
        """Compiles every program, on rows that stand for nobody."""
        settings = self.settings
        for length in settings.prefill_lengths:
            for before in (0, *settings.row_lengths):
                self._pool = self._programs.prefill(
                    weights, self._pool, self._pieces([], length, before)
                )
        self.copy([(settings.pages, settings.pages)])
        for row_length in settings.row_lengths:
            rows = self._rows(row_length)
            for prefix_length in (
                (0, *settings.prefix_lengths)
                if rows == settings.slots and not self._paged
                else (0,)
            ):
                if prefix_length:
                    self._read_line(prefix_length, 0, [])
                self._run(
                    [],
                    Layout(
                        (None,) * rows,
                        ((),) * (rows // settings.rows_per_prefix),
                        prefix_length,
                        row_length,
                    ),
                    weights,
                )

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages, from the first of each pair to the second."""
        for first in range(0, len(pairs), self.settings.slots):
            both = np.full((2, self.settings.slots), self.settings.pages, np.int32)
            part = np.array(pairs[first : first + self.settings.slots], np.int32).reshape(-1, 2)
            both[:, : len(part)] = part.T
            self._pool = self._programs.copy(self._pool, *both)

    def prefill(self, batch: Sequence[EngineSequence], weights: Any) -> int:
        """Computes what is known of the sequences and not computed yet; returns how many tokens that were."""
        total = 0
        while todo := [sequence for sequence in batch if sequence.missing]:
            length = self.settings.piece(max(sequence.missing for sequence in todo))
            before = self.settings.width(max(sequence.computed for sequence in todo))
            pieces = self._pieces(
                todo[: self.settings.prefill_rows(length, before)], length, before
            )
            start = time.perf_counter()
            self._pool = jax.block_until_ready(self._programs.prefill(weights, self._pool, pieces))
            self.seconds += time.perf_counter() - start
            for sequence, count in zip(todo, pieces.lengths.tolist(), strict=False):
                seen = sequence.prompt.visual[sequence.computed : sequence.computed + count]
                sequence.visual = sequence.visual[int(seen.sum()) :]
                sequence.computed += count
                total += count
                if not sequence.missing:
                    sequence.visual = np.zeros(
                        (0, 0, 0), np.float32
                    )  # a view, even an empty one, would keep them all
        return total

    def decode(
        self, sequences: Sequence[EngineSequence], weights: Any
    ) -> list[tuple[list[int], list[float]]]:
        """Ids and log-probs of up to `settings.steps` tokens for each sequence, at most `settings.slots` of them."""
        found: list[tuple[list[int], list[float]]] = [([], [])] * len(sequences)
        rest = sorted(range(len(sequences)), key=lambda n: -sequences[n].computed)
        while rest:
            layout = self._layout([sequences[n] for n in rest])
            together = len(rest)
            if (
                self._rows(layout.row_length) < self.settings.slots
            ):  # too much to read: the longest by themselves
                together = self._rows(self.settings.width(max(1, sequences[rest[0]].computed)))
                layout = self._layout([sequences[n] for n in rest[:together]], together)
            part = [sequences[n] for n in rest[:together]]
            for line, start in enumerate(layout.starts):
                if (
                    start
                    and self._in_lines.get(layout.prefix_length, [()] * len(layout.starts))[line]
                    != start
                ):
                    first = line * self.settings.rows_per_prefix
                    leader = next(
                        part[n]
                        for n in layout.rows[first : first + self.settings.rows_per_prefix]
                        if n is not None
                    )
                    self._read_line(layout.prefix_length, line, leader.path[: len(start)])
            ids, logprobs, counts = self._run(part, layout, weights)
            for row, n in enumerate(layout.rows):
                if n is not None:
                    found[rest[n]] = (
                        ids[row, : counts[row]].tolist(),
                        logprobs[row, : counts[row]].tolist(),
                    )
            rest = rest[together:]
        return found

    def _rows(self, width: int) -> int:
        """Rows of a program that reads so much of each sequence; on their pages it costs no memory."""
        return self.settings.slots if self._paged else self.settings.rows(width)

    def _layout(self, sequences: Sequence[EngineSequence], rows: int | None = None) -> Layout:
        """For all slots; or for fewer rows, in which nothing is shared."""
        settings, size = self.settings, self.settings.page
        return choose_layout(
            [
                tuple(node.serial for node in sequence.path if len(node.tokens) == size)
                for sequence in sequences
            ],
            [sequence.computed for sequence in sequences],
            self._in_lines,
            slots=rows or settings.slots,
            rows_per_prefix=settings.rows_per_prefix,
            page=size,
            prefix_lengths=() if rows or self._paged else settings.prefix_lengths,
            row_lengths=settings.row_lengths,
        )

    def _pieces(self, todo: Sequence[EngineSequence], length: int, before: int) -> Pieces:
        """The next `length` tokens of each sequence, after at most `before`."""
        rows, size, text = (
            self.settings.prefill_rows(length, before),
            self.settings.page,
            self.config.text,
        )
        pieces = Pieces(
            ids=np.zeros((rows, length), np.int32),
            positions=np.zeros((3, rows, length), np.int32),
            visual=np.zeros(
                (rows, length, 1 + self.config.vision.levels, text.hidden_size), np.float32
            ),
            index=np.full((rows, length), -1, np.int32),
            lengths=np.zeros(rows, np.int32),
            before=np.zeros(rows, np.int32),
            tables=np.full(
                (rows, before // size + pages_of(length, size)), self.settings.pages, np.int32
            ),
        )
        for row, sequence in enumerate(todo):
            prompt = sequence.prompt
            part = slice(sequence.computed, min(sequence.computed + length, prompt.known))
            count = part.stop - part.start
            pieces.ids[row, :count], pieces.positions[:, row, :count] = (
                prompt.request.ids[part],
                prompt.positions[:, part],
            )
            places = np.flatnonzero(prompt.visual[part])
            if places.size:
                pieces.visual[row, places], pieces.index[row, places] = (
                    sequence.visual[: places.size],
                    places,
                )
            pieces.lengths[row], pieces.before[row] = count, sequence.computed
            _fill(pieces.tables[row], sequence.pages)
        return pieces

    def _read_line(self, length: int, line: int, path: Sequence[Node]) -> None:
        """Reads the pages of a start into a line."""
        count = self.settings.slots // self.settings.rows_per_prefix
        if length not in self._lines:
            self._lines[length] = self._programs.make_lines(count, length)
            self._in_lines[length] = [()] * count
        table = np.full(length // self.settings.page, self.settings.pages, np.int32)
        _fill(table, [node.page for node in path])
        self._in_lines[length][line] = ()  # until it is there
        self._lines[length] = self._programs.gather(
            self._pool, self._lines[length], table, np.int32(line)
        )
        self._in_lines[length][line] = tuple(node.serial for node in path)

    def _run(
        self, sequences: Sequence[EngineSequence], layout: Layout, weights: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids and log-probs of every row's new tokens, and how many of them there are."""
        settings, size, slots = self.settings, self.settings.page, len(layout.rows)
        integers = {
            name: np.zeros(slots, np.int32)
            for name in ("tokens", "positions", "prefix_tokens", "own_tokens", "drawn", "left")
        }
        choices = Choices(
            np.zeros(slots, np.uint32),
            np.ones(slots, np.float32),
            np.zeros(slots, np.int32),
            np.ones(slots, np.float32),
        )
        tables = np.full(
            (slots, layout.row_length // size + pages_of(settings.steps, size)),
            settings.pages,
            np.int32,
        )
        rows = Rows(
            **integers,
            tables=tables,
            stops=np.full((slots, MOST_STOP_IDS), -1, np.int32),
            choices=choices,
        )
        for row, n in enumerate(layout.rows):
            if n is None:
                continue
            sequence, start = (
                sequences[n],
                layout.starts[row // settings.rows_per_prefix] if layout.prefix_length else (),
            )
            in_line = (
                bool(start) and tuple(node.serial for node in sequence.path[: len(start)]) == start
            )
            pages = len(start) if in_line else 0
            ids, sampling = sequence.prompt.request.ids, sequence.sampling
            rows.tokens[row] = sequence.drawn[-1] if sequence.drawn else ids[-1]
            rows.positions[row] = sequence.prompt.positions[0, -1] + len(sequence.drawn)
            rows.prefix_tokens[row], rows.own_tokens[row] = (
                pages * size,
                sequence.computed - pages * size,
            )
            _fill(rows.tables[row], sequence.pages[pages:])
            rows.drawn[row], rows.left[row] = (
                len(sequence.drawn),
                sampling.max_new_tokens - len(sequence.drawn),
            )
            rows.stops[row, : len(sampling.stop_ids)] = sampling.stop_ids
            choices.seeds[row] = sequence.prompt.request.seeds[sequence.number] % 2**32
            choices.temperatures[row], choices.top_k[row], choices.top_p[row] = (
                sampling.temperature,
                sampling.top_k,
                sampling.top_p,
            )
        lines, before = (
            self._lines[layout.prefix_length] if layout.prefix_length else None,
            time.perf_counter(),
        )
        self._pool, drawn = self._programs.decode(
            weights, self._pool, lines, rows, steps=settings.steps, width=layout.row_length
        )
        ids, logprobs, counts, steps = (np.asarray(x) for x in drawn)
        self.seconds += time.perf_counter() - before
        self.steps, self.row_steps = self.steps + int(steps), self.row_steps + int(steps) * slots
        return ids, logprobs, counts


def _fill(table: np.ndarray, pages: Sequence[int]) -> None:
    count = min(len(table), len(pages))
    table[:count] = pages[:count]
