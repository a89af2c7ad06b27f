"""The release's reading of answers: rules found by running it, and how they differ from ours."""

from __future__ import annotations

import pytest

from paravt_jax.method.accuracy import accuracy
from paravt_jax.method.records import Question, QuestionKind, Turn
from rollout.evaluation.published_readings import (
    other_scores,
    released_letter,
    released_range,
    released_score,
)


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("<think>B or C</think><answer>C. dog</answer>", "C"),
        ("<answer>none</answer> the rest names D", "D"),  # without a letter in the block
        ("I would say C", "I"),  # the first capital that stands alone
        ("A dog runs, so C", "A"),
        ("answer is: b", "a"),  # small letters do not count, so the first character does
        ("Answer is BY", "B"),
        ("K", "K"),
        ("no idea", "n"),
        ("", ""),
    ],
)
def test_the_release_reads_a_letter_from_any_text(response, letter):
    assert released_letter(response) == letter


@pytest.mark.parametrize(
    ("response", "seconds"),
    [
        ("0:05 - 1:10", (5, 70)),
        ("from 0:05 to 1:10", (0, 5)),  # only a dash joins two clocks
        ("12.5 – 20 s", (12.5, 20)),
        ("starts after frame, at 30, and ends at 40", (30, 40)),
        ("finish 9, begin 4", (4, 9)),
        ("30 then 12", (30, 12)),  # reversed, as it stands
        ("1:00:05 - 1:00:10", (5, 60)),  # hours are not understood
        ("at 5 s", None),
    ],
)
def test_the_release_reads_a_range_from_any_two_numbers(response, seconds):
    assert released_range(response) == seconds


def mcq(answer="A") -> Question:
    kind = QuestionKind.MULTIPLE_CHOICE
    return Question("q", "v.mp4", "Which?", kind, answer, ("red", "blue"))


def said(answer: str) -> tuple[Turn, ...]:
    return (Turn("<think>\nlook\n</think>"), Turn(f"<think>\nso\n</think>\n{answer}"))


def test_an_answer_with_two_letters_is_wrong_here_and_right_there():
    turns = said("<answer>A or B</answer>")
    assert accuracy(mcq(), "A or B") == 0.0
    assert other_scores(mcq(), turns) == {"release": 1.0}


def test_a_grounding_answer_is_scored_by_the_range_that_the_release_reads():
    kind = QuestionKind.TEMPORAL_GROUNDING
    question = Question("q", "v.mp4", "When?", kind, "[65, 80]")
    assert released_score(question, said("<answer>1:05 - 1:20</answer>")) == 1.0
    assert released_score(question, said("<answer>from 1:05 to 1:20</answer>")) == 0.0
    assert accuracy(question, "from 1:05 to 1:20") == 1.0


def test_the_release_has_no_rule_for_open_ended_questions():
    question = Question("q", "v.mp4", "What?", QuestionKind.OPEN_ENDED, "a red car")
    assert other_scores(question, said("<answer>a red car</answer>")) == {}
    assert other_scores(mcq("the red one"), said("<answer>A</answer>")) == {}


def test_an_episode_without_turns_scores_nothing():
    assert other_scores(mcq(), ()) == {"release": 0.0}
