"""Multiple choice, temporal grounding and open-ended answers, with the mends of REFERENCE 4, point 12."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paravt_jax.accuracy import accuracy, choice_accuracy, chosen_letter, exact_match, grounding_accuracy, normalise, read_range, token_f1
from paravt_jax.records import Question, QuestionKind

OPTIONS = ("A. a red dog", "B. two cats", "C. seven", "D. the sea")


@pytest.mark.parametrize(
    "text, letter",
    [
        ("B", "B"),
        (" b. ", "B"),
        ("(B)", "B"),
        ("**E**", "E"),
        ("B. two cats", "B"),
        ("B) two cats", "B"),
        ("Option C", "C"),
        ("The answer is D.", "D"),
        ("answer: (B) kitchen", "B"),
        ("答案是 B", "B"),
        ("A dog runs", None),
        ("I pick it", None),
        ("AB", None),
        ("A and B", None),
        ("(A) or (B)", None),
        ("Option B, although the answer is A", None),
        ("...", None),
        ("the", None),
        ("", None),
    ],
)
def test_chosen_letter(text, letter):
    assert chosen_letter(text) == letter


@pytest.mark.parametrize("blank", ["the", "?", "...", "an", "", "!!!"])
def test_nothing_is_not_the_answer_a(blank):
    """In the release "A" normalises to nothing, and so does every blank (REFERENCE 4, 12)."""
    assert choice_accuracy(blank, "A") == 0 and not exact_match(blank, "A")
    assert choice_accuracy("A", "A") == 1 == choice_accuracy("a", "A")


def test_nothing_never_matches_nothing():
    assert not exact_match("!!!", "???") and token_f1("!!!", "???") == 0


@pytest.mark.parametrize("answer", ["Option B, although the answer is A", "A or B", "(A) (B)", "A. B."])
def test_two_letters_earn_nothing(answer):
    """In the release several patterns accept two letters at once (REFERENCE 4, 12)."""
    assert choice_accuracy(answer, "A") == 0 == choice_accuracy(answer, "B")


@pytest.mark.parametrize("wanted", ["C", "seven", "(C)", "C. seven"])
@pytest.mark.parametrize(
    "said, score", [("seven", 1), ("C", 1), ("C. Seven", 1), ("two cats", 0), ("B", 0), ("B. seven", 0), ("C. two cats", 0)]
)
def test_options_answer_by_letter_or_words(wanted, said, score):
    assert choice_accuracy(said, wanted, OPTIONS) == score
    assert choice_accuracy(said, wanted, tuple(option[3:] for option in OPTIONS)) == score


@pytest.mark.parametrize(
    "text, range_",
    [
        ("[10, 20]", (10, 20)),
        ("10 - 20", (10, 20)),
        ("10-20 s", (10, 20)),
        ("10 to 20", (10, 20)),
        ("from 12.5 to 20.0 seconds", (12.5, 20)),
        ("12.5s, 20.0s", (12.5, 20)),
        ("[00:10, 01:20]", (10, 80)),
        ("1:00:05 - 1:00:10", (3605, 3610)),
        ("[-5, 20]", (-5, 20)),
        ("It happens at 10., 20.", (10, 20)),
        ("１０, ２０", (10, 20)),
        ("see [8, 16] then [10, 20]", (8, 16)),
        ("10.0.1, 20", None),
        ("., .", None),
        ("start at 3, maybe 7", None),
        ("around noon", None),
        ("10, 20.5.1", None),
        ("", None),
    ],
)
def test_read_range(text, range_):
    assert read_range(text) == range_


@pytest.mark.parametrize(
    "said, score",
    [("[10, 20]", 1), ("15 to 20", 0.5), ("[5, 25]", 0.5), ("20, 10", 0), ("[30, 40]", 0), ("[12, 12]", 0), ("1.2.3, 4", 0), ("x", 0)],
)
def test_grounding(said, score):
    assert grounding_accuracy(said, "[10, 20]") == score


def test_grounding_of_an_unreadable_answer():
    assert grounding_accuracy("around noon", "Around noon.") == 1 and grounding_accuracy("10, 20", "around noon") == 0


def test_normalise_keeps_numbers_apart():
    assert normalise("The 1.5 m, and 1,000!") == "1.5 m and 1000"
    assert not exact_match("1.5", "15") and not exact_match("-5", "5") and exact_match("1,000", "1000")


def test_open_ended_f1_and_exact():
    question = Question("q", "v", "?", QuestionKind.OPEN_ENDED, "the man runs in the park")
    assert accuracy(question, "a man is running in a park") == pytest.approx(2 / 3)
    assert accuracy(question, "a man is running in a park", "exact") == 0
    assert accuracy(question, "Man runs in park.", "exact") == 1
    assert accuracy(question, None) == 0


def test_a_letter_of_another_width_is_that_letter():
    assert choice_accuracy("\uff22", "B") == choice_accuracy("(\uff22)", "B", ("a dog", "a cat")) == 1.0
    assert choice_accuracy("\uff21", "B") == 0.0


@given(st.text(), st.text(), st.sampled_from(QuestionKind), st.lists(st.text(max_size=6), max_size=4))
@example("", "\u00ba", QuestionKind.MULTIPLE_CHOICE, [])
@example("", "A B", QuestionKind.MULTIPLE_CHOICE, [])
def test_accuracy_is_a_share_for_any_text(said, answer, kind, options):
    question = Question("q", "v", "?", kind, answer, tuple(options))
    assert 0 <= accuracy(question, said) <= 1
    if normalise(answer):
        assert accuracy(question, answer) == 1


@given(st.lists(st.floats(0, 500), min_size=4, max_size=4))
def test_iou_is_symmetric(values):
    a, b = (f"[{x:.3f}, {y:.3f}]" for x, y in (sorted(values[:2]), sorted(values[2:])))
    assert grounding_accuracy(a, b) == pytest.approx(grounding_accuracy(b, a))
