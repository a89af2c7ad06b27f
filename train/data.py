"""What a run learns from, and the order in which it is seen. The seed alone decides the order."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from paravt_jax.data.frame_reader import FrameReader
from paravt_jax.data.loader import Ahead, stream
from paravt_jax.data.packing import Packing, pack
from paravt_jax.method.conversations import Conversation
from paravt_jax.method.records import Caption, Question
from paravt_jax.method.tokenizer import Vocabulary
from train.durable import hosts


@dataclasses.dataclass(frozen=True)
class Data:
    """What a run learns from. Relative paths of videos lie under `root`."""

    root: pathlib.Path
    vocabulary: Vocabulary
    questions: tuple[Question, ...] = ()
    heldout: tuple[Question, ...] = ()
    conversations: Sequence[Conversation] = ()
    lengths: tuple[int, ...] = ()
    """Of the conversations, in tokens."""
    captions: tuple[Caption, ...] = ()
    videos: int = 0
    """In all, unreadable ones included; of published data, rows."""
    unreadable: dict[str, str] = dataclasses.field(default_factory=dict)
    """Why a video cannot be read, by path."""
    digest: str = ""
    """A fingerprint of published data or of your own questions: a run goes on with the same rows or not at all. Empty for a
    world, which its settings decide."""

    def row(self, numbers: Sequence[int]) -> tuple[Conversation, ...]:
        """The conversations of a packed row."""
        return tuple(self.conversations[n] for n in numbers)


def pack_rows(data: Data, row_tokens: int, seed: int) -> Packing:
    """The conversations, by number, in rows of `row_tokens` tokens; the seed decides their order.

    Conversations longer than a row are left out and named. Raises ValueError where none is left.
    """
    order = np.random.default_rng([seed, 0x9AC4]).permutation(len(data.lengths)).tolist()
    packing = pack([data.lengths[n] for n in order], row_tokens)
    if not packing.rows:
        raise ValueError(
            f"sft.row_tokens: {row_tokens}; none of {len(order)} conversations fits into a row. "
            "Prepare sft rows (data.annotations), or give longer rows"
        )
    long = sorted(order[n] for n in packing.left_out)
    if long and hosts.is_first():
        named = ", ".join(f"{data.conversations[n].id} ({data.lengths[n]})" for n in long[:10])
        print(
            f"{len(long)} conversations are left out; they have more than the {row_tokens} tokens "
            f"of sft.row_tokens: {named}"
        )
    rows = tuple(tuple(order[n] for n in row) for row in packing.rows)
    return dataclasses.replace(packing, rows=rows, left_out=tuple(long))


def row_stream(
    data: Data, packing: Packing, reader: FrameReader | None, seed: int, rows: int, depth: int = 2
) -> grain.DatasetIterator[Any] | Ahead[tuple[tuple[int, ...], ...]]:
    """Endless batches of packed rows (numbers for `data.row`), the same in every process. Meanwhile
    `reader` reads the frames of this process's share of the next `depth` batches."""
    batches = stream(packing.rows, seed, rows)
    if reader is None:
        return batches

    def start(batch: Sequence[Sequence[int]]) -> None:
        for numbers in batch[hosts.share_of(len(batch))]:
            for conversation in data.row(numbers):
                for clip in conversation.clips:
                    reader.ahead(data.root / clip.path, clip.indices)

    return Ahead(batches, depth, start)


def question_stream(
    data: Data,
    reader: FrameReader | None,
    seed: int,
    prompts: int,
    budgets: Callable[[int], Sequence[int]],
    first: int,
    depth: int = 1,
) -> grain.DatasetIterator[tuple[Question, ...]] | Ahead[tuple[Question, ...]]:
    """Endless batches of `prompts` questions, the same in every process. Meanwhile `reader` reads the
    overviews of this process's share of the next `depth` batches: `budgets(step)` says of how many
    frames, of step `first` and those after it."""
    batches = stream(data.questions, seed, prompts)
    if reader is None:
        return batches
    steps = itertools.count(first)

    def start(batch: Sequence[Question]) -> None:
        asked = list(zip(batch, budgets(next(steps)), strict=True))
        for question, count in asked[hosts.share_of(len(asked))]:
            reader.ahead(data.root / question.video, count)

    return Ahead(batches, depth, start)
