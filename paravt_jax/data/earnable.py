"""Refuses questions with a wrong answer. Training on them would only cost time.

No answer could earn the reward (`paravt_jax.method.accuracy`) of most of them. A multiple-choice
answer that names none of its options could be earned, but only by its own words.
"""

from __future__ import annotations

import string

from paravt_jax.data.lettered import split_options
from paravt_jax.data.published import Reason, Refused
from paravt_jax.method.accuracy import accuracy, chosen_option, read_range
from paravt_jax.method.records import Question, QuestionKind

# An answer inside the video that earns less than this has missed the span. Published spans may end
# a little after their video, because they were measured on another copy of it.
_LEAST_OVERLAP = 0.5


def require_earnable(question: Question) -> None:
    """Check what needs no video.

    Raises:
        Refused: The answer names none of the options, or is a reversed or empty span, or no word
            at all. Options are lines at the end of the text; others are not checked.
    """
    answer = question.answer
    if question.kind is QuestionKind.MULTIPLE_CHOICE:
        _, options = split_options(question.text)
        if options and chosen_option(answer, options) is None:
            letters = ", ".join(string.ascii_uppercase[: len(options)])
            raise Refused(
                Reason.NO_OPTION, f"the answer {answer[:80]!r} is not one of the options {letters}"
            )
    if question.kind is QuestionKind.TEMPORAL_GROUNDING:
        start, end = _span(question)
        if start >= end:
            raise Refused(
                Reason.IMPOSSIBLE, f"the span {start:g} to {end:g} s is reversed or empty"
            )
    if accuracy(question, answer) == 0:
        raise Refused(Reason.IMPOSSIBLE, f"the answer {answer[:80]!r} earns no reward itself")


def require_in_video(question: Question, duration: float) -> None:
    """Check the span of a grounding question against its video.

    An answer inside the video overlaps the span by at most the share of it that is in the video.

    Args:
        question: The question.
        duration: Duration of the video in seconds; 0 for a picture.

    Raises:
        Refused: Less than half of the span is in the video, or the answer is no span.
    """
    if question.kind is not QuestionKind.TEMPORAL_GROUNDING:
        return
    start, end = _span(question)
    inside = min(end, duration) - max(start, 0.0)
    if inside < _LEAST_OVERLAP * (end - start):
        raise Refused(
            Reason.IMPOSSIBLE,
            f"less than half of the span {start:g} to {end:g} s is in its video ({duration:.1f} s)",
        )


def _span(question: Question) -> tuple[float, float]:
    span = read_range(question.answer)
    if span is None:
        raise Refused(Reason.IMPOSSIBLE, f"the answer {question.answer[:80]!r} is no span")
    return span
