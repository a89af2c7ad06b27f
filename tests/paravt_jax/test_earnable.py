"""Questions with a wrong answer are refused, and only those."""

from __future__ import annotations

import pytest

from paravt_jax.data.published import Reason, Refused, require_earnable, require_in_video
from paravt_jax.method.accuracy import accuracy
from paravt_jax.method.records import Question, QuestionKind

TWO = "What turns?\nA. a car\nB. a boat"


def question(answer: str, kind: QuestionKind, text: str = TWO) -> Question:
    return Question("q", "a.mp4", text, kind, answer)


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        ("A", QuestionKind.MULTIPLE_CHOICE, TWO),
        ("(b)", QuestionKind.MULTIPLE_CHOICE, TWO),
        ("B. a boat", QuestionKind.MULTIPLE_CHOICE, TWO),
        ("a boat", QuestionKind.MULTIPLE_CHOICE, TWO),
        ("C", QuestionKind.MULTIPLE_CHOICE, "Which? A. a car B. a boat"),
        ("C", QuestionKind.MULTIPLE_CHOICE, "A. a car\nB. a boat\nC - a bus"),
        ("a car", QuestionKind.MULTIPLE_CHOICE, "A. a car\nB. a car\nC. a bus"),
        ("a train", QuestionKind.MULTIPLE_CHOICE, "What turns?"),
        ("[3, 9.5]", QuestionKind.TEMPORAL_GROUNDING, "When?"),
        ("a rabbit", QuestionKind.OPEN_ENDED, "Who?"),
    ],
)
def test_answers_that_earn_a_reward_are_accepted(answer, kind, text):
    asked = question(answer, kind, text)
    require_earnable(asked)
    assert accuracy(asked, answer) == 1


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("C", QuestionKind.MULTIPLE_CHOICE),
        ("a train", QuestionKind.MULTIPLE_CHOICE),
        ("A and B", QuestionKind.MULTIPLE_CHOICE),
        ("[9.5, 3]", QuestionKind.TEMPORAL_GROUNDING),
        ("[3, 3.0]", QuestionKind.TEMPORAL_GROUNDING),
        ("?!", QuestionKind.OPEN_ENDED),
    ],
)
def test_wrong_answers_are_refused(answer, kind):
    with pytest.raises(Refused) as caught:
        require_earnable(question(answer, kind))
    choice = kind is QuestionKind.MULTIPLE_CHOICE
    assert caught.value.reason is (Reason.NO_OPTION if choice else Reason.IMPOSSIBLE)


@pytest.mark.parametrize("answer", ["[0, 30]", "[20, 30]", "[20, 40]", "[-5, 10]", "[29.9, 30.1]"])
def test_a_span_may_leave_its_video_by_half(answer):
    require_in_video(question(answer, QuestionKind.TEMPORAL_GROUNDING), 30.0)
    require_in_video(question(answer, QuestionKind.OPEN_ENDED), 0.0)


@pytest.mark.parametrize("answer", ["[30, 31]", "[20, 41]", "[300, 310]", "[-9, -3]"])
def test_a_span_outside_its_video_is_refused(answer):
    asked = question(answer, QuestionKind.TEMPORAL_GROUNDING)
    with pytest.raises(Refused, match=r"less than half of the span .* \(30\.0 s\)"):
        require_in_video(asked, 30.0)
    with pytest.raises(Refused):
        require_in_video(question("[0, 1]", QuestionKind.TEMPORAL_GROUNDING), 0.0)
