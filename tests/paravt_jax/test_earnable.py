"""Questions with a wrong answer are refused, and only those."""

from __future__ import annotations

import pytest

from paravt_jax.data.published import Reason, Refused, require_earnable
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
        ("soon", QuestionKind.TEMPORAL_GROUNDING),
        ("[9.5, 3]", QuestionKind.TEMPORAL_GROUNDING),
        ("[3, 3.0]", QuestionKind.TEMPORAL_GROUNDING),
        ("?!", QuestionKind.OPEN_ENDED),
    ],
)
def test_wrong_answers_are_refused(answer, kind):
    with pytest.raises(Refused) as caught:
        require_earnable(question(answer, kind))
    assert caught.value.reason is Reason.IMPOSSIBLE
