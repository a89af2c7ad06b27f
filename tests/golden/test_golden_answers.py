"""rewards.json against our accuracy: the answer, its words, its score by each kind of question.

Each reading is tested alone, and then the accuracy that follows from them. `answer_excuses` says
where they differ from the release's.
"""

from __future__ import annotations

import pytest

from paravt_jax.method.accuracy import normalise
from tests.golden.answer_excuses import (
    ACCURACIES,
    ANSWERS,
    CHOICES,
    F1S,
    NORMALS,
    OVERLAPS,
    choice,
    f1,
    grounding,
    normal,
    read_answer,
    score_of_said,
    texts,
)
from tests.golden.texts import close, right_letter

# --- the answer ---


def test_answers(records, hold):
    hold(
        records("rewards"),
        read_answer,
        lambda r, got: (got or "") == r["expected"]["extract_answer"],
        ANSWERS,
    )


# --- words ---


def test_normal_forms(records, hold):
    hold(texts(records("rewards")), normal, lambda r, got: got == r["expected"], NORMALS, least=0.4)


@pytest.mark.parametrize(
    ("text", "normal_form"),
    [
        (".5", ".5"),
        ("-.5", "-.5"),
        ("$-5.50.", "-5.50"),
        ("1,000.", "1000"),
        ("U.S.", "us"),
    ],
)
def test_points_and_signs_stay_in_numbers_only(text, normal_form):
    assert normalise(text) == normal_form


# --- the score by kind of question ---


def test_f1(records, hold):
    hold(
        records("rewards"),
        f1,
        lambda r, got: got == close(r["expected"]["compute_f1"]),
        F1S,
        least=0.4,
    )


def test_choices(records, hold):
    """All records whose answer is a letter from A to D: the column is filled for every kind."""
    table = [r for r in records("rewards") if right_letter(r)]
    hold(table, choice, lambda r, got: got == r["expected"]["compute_mcq_acc"], CHOICES)


def test_choices_of_other_answers(records, hold):
    """The release gives 0 to all of these in this column, so only wrong answers agree."""
    table = [r for r in records("rewards") if not right_letter(r)]
    hold(table, choice, lambda r, got: got == r["expected"]["compute_mcq_acc"], CHOICES, least=0)


def test_overlaps(records, hold):
    hold(
        records("rewards"),
        grounding,
        lambda r, got: got == close(r["expected"]["compute_temporal_iou"]),
        OVERLAPS,
    )


def test_accuracy(records, hold):
    hold(
        records("rewards"),
        score_of_said,
        lambda r, got: got == close(r["expected"]["acc_reward"]),
        ACCURACIES,
    )
