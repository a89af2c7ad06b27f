"""The data of a run, and the streams of batches that training reads. The seed fixes the order."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from models.features import VideoFiles
from paravt_jax.data.loader import Ahead, stream
from paravt_jax.method.conversations import Conversation
from paravt_jax.method.records import Caption, Question
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.processes import hosts
from train.learn.packing import first_fit

_Batch = tuple[tuple[int, ...], ...]
"""Packed rows of conversation numbers."""

# Batches of packed rows whose frames are read in advance.
_DEPTH = 2


@dataclasses.dataclass(frozen=True)
class Data:
    """Questions, conversations and captions of a run. Paths of videos are relative to `root`."""

    root: pathlib.Path
    vocabulary: Vocabulary
    questions: tuple[Question, ...] = ()
    """Questions to train on."""
    heldout: tuple[Question, ...] = ()
    """Questions to evaluate with."""
    conversations: Sequence[Conversation] = ()
    """Demonstrations for SFT."""
    lengths: tuple[int, ...] = ()
    """Length of each conversation, in tokens."""
    captions: tuple[Caption, ...] = ()
    """Captioned frames for alignment."""
    videos: int = 0
    """Number of videos, including unreadable ones. For published data: number of rows."""
    sizes: tuple[tuple[int, int], ...] = ()
    """The different (height, width) of videos and pictures in pixels, the most frequent first."""
    unreadable: dict[str, str] = dataclasses.field(default_factory=dict)
    """Why each unreadable video cannot be read, by path."""
    digest: str = ""
    """Fingerprint of published data or of your own questions. A run can only be resumed with the
    same one. Empty for the small world, which is determined by the settings."""

    def row(self, numbers: Sequence[int]) -> tuple[Conversation, ...]:
        """Return the conversations of a packed row, by their numbers."""
        return tuple(self.conversations[n] for n in numbers)


def hold_out(
    questions: tuple[Question, ...], count: int
) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """Split questions into those to train on and at least `count` to evaluate with.

    All questions about a video go to the same split.

    Returns:
        The training questions, in their order, and the held-out questions.

    Raises:
        ValueError: If no question is left to train on.
    """
    by_video = collections.defaultdict(list)
    for question in questions:
        by_video[question.video].append(question)
    heldout: list[Question] = []
    # The hash of a path does not depend on the rest of the set, so the choice stays stable when
    # videos are added.
    for video in sorted(by_video, key=lambda path: hashlib.sha256(path.encode()).digest()):
        if len(heldout) < count:
            heldout += by_video[video]
    heldout_videos = {question.video for question in heldout}
    training = tuple(question for question in questions if question.video not in heldout_videos)
    if questions and not training:
        raise ValueError(
            f"evaluation.questions: {count} of {len(questions)} questions on videos that can be "
            "read, which leaves none to train on; hold out fewer (--evaluation.questions 0: none), "
            "or mend the others"
        )
    return training, tuple(heldout)


def pack_rows(data: Data, row_tokens: int, seed: int) -> _Batch:
    """Pack conversations into rows. Conversations longer than a row are left out (`prepare`).

    Args:
        data: Its `lengths` decide which conversations share a row.
        row_tokens: Length of a row, in tokens.
        seed: Decides the order in which conversations are packed.

    Returns:
        Rows of conversation numbers, for `Data.row`.

    Raises:
        ValueError: If no conversation fits into a row.
    """
    # The constant makes this order independent of the other random streams of the same seed.
    order = np.random.default_rng([seed, 0x9AC4]).permutation(len(data.lengths)).tolist()
    rows = first_fit([data.lengths[n] for n in order], row_tokens)
    if not rows:
        raise ValueError(
            f"sft.row_tokens: {row_tokens}; none of {len(order)} conversations fits into a row: "
            "choose longer rows, or prepare data with sft rows (data.annotations)"
        )
    # `first_fit` numbers conversations by their position in `order`: translate them.
    return tuple(tuple(order[n] for n in row) for row in rows)


def row_stream(
    data: Data, packed: _Batch, files: VideoFiles | None, seed: int, rows: int
) -> grain.DatasetIterator[Any] | Ahead[_Batch, _Batch]:
    """Stream batches of packed rows without end.

    Args:
        data: The conversations.
        packed: The rows, from `pack_rows`.
        files: Reads this process's share of the frames in advance; None: nothing is prefetched.
        seed: Decides the order of rows.
        rows: Rows per batch.

    Returns:
        An iterator over batches, each a tuple of `rows` rows of conversation numbers. All processes
        get the same batches.
    """
    batches = stream(packed, seed, rows)
    if files is None:
        return batches

    def prefetch(batch: _Batch) -> _Batch:
        for numbers in batch[hosts.share_of(len(batch))]:
            for conversation in data.row(numbers):
                for clip in conversation.clips:
                    files.ahead(clip.path, clip.indices, clip.crop)
        return batch

    return Ahead(batches, _DEPTH, prefetch)


class QuestionStream:
    """The questions of training, without end. The seed fixes their order.

    Overviews of published videos are read in advance: while a step plays, those of the next one.

    Args:
        data: The questions.
        files: Reads the overviews of the groups of which this process plays rollouts; None: nothing
            is read in advance.
        seed: Decides the order of questions.
        group_size: Rollouts per question.
        budgets: `budgets(step)` is the number of overview frames for each prompt of a step.
    """

    def __init__(
        self,
        data: Data,
        files: VideoFiles | None,
        seed: int,
        group_size: int,
        budgets: Callable[[int], Sequence[int]],
    ):
        self._files = files
        self._group_size = group_size
        self._budgets = budgets
        self._questions: Ahead[Any, tuple[Question, ...]] = Ahead(stream(data.questions, seed, 1))

    def draw(self, step: int) -> tuple[Question, ...]:
        """Draw a question for each prompt of a step, from 0: the same on every process."""
        drawn = tuple(question for _ in self._budgets(step) for question in next(self._questions))
        if self._files is not None:
            budgets = self._budgets(step + 1)
            upcoming = self._questions.peek(len(budgets))
            rollouts = range(len(budgets) * self._group_size)
            # As `deal` deals them, unless some outlive an update or processes differ by one. Then
            # some overviews are read when they are needed.
            own = rollouts[hosts.share_of(len(rollouts))]
            for group in sorted({n // self._group_size for n in own}):
                (question,) = upcoming[group]
                self._files.ahead(question.video, budgets[group])
        return drawn

    def get_state(self) -> dict[str, Any]:
        """Return the state from which `set_state` resumes with the question that comes next."""
        return self._questions.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Resume at `state`."""
        self._questions.set_state(state)
