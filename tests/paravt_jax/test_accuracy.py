"""R_acc of multiple choice, temporal grounding and open-ended answers (REFERENCE 3 and 4, 12)."""

import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paravt_jax.method import accuracy as module
from paravt_jax.method.accuracy import (
    NAMED,
    accuracy,
    choice_accuracy,
    chosen_option,
    exact_match,
    grounding_accuracy,
    normalise,
    read_range,
    token_f1,
)
from paravt_jax.method.records import Question, QuestionKind

OPTIONS = ("A. a red dog", "B. two cats", "C. seven", "D. the sea")


@pytest.mark.parametrize(
    "text, letter",
    [
        (" b. ", "B"),
        ("(B)", "B"),
        ("**E**", "E"),
        ("B. two cats", "B"),
        ("Option C", "C"),
        ("answer: (B) kitchen", "B"),
        ("答案是 B", "B"),
        ("A dog runs", None),
        ("AB", None),
        ("A and B", None),
        ("Option B, although the answer is A", None),
        ("the", None),
    ],
)
def test_chosen_option(text, letter):
    assert chosen_option(text) == letter


FRUIT = ("Apples", "Bananas and pears", "Cherries", "A red dog")


def test_every_way_of_naming_options_is_needed_for_its_example(monkeypatch):
    for line in NAMED:
        assert chosen_option(line.example, FRUIT) == "B", line
        never = line._replace(pattern=re.compile("(?!)"))
        lines = [never if other is line else other for other in NAMED]
        monkeypatch.setattr(module, "NAMED", lines)
        assert chosen_option(line.example, FRUIT) is None, line
        monkeypatch.setattr(module, "NAMED", NAMED)


def test_a_letter_before_words_is_not_an_article():
    assert choice_accuracy("A. Bananas and pears", "Bananas and pears") == 0
    assert choice_accuracy("A. Bananas and pears", "A. Bananas and pears") == 1
    assert choice_accuracy("a red dog", "A red dog") == choice_accuracy("Red dog", "a red dog") == 1
    assert choice_accuracy("A red dog", "D", FRUIT) == choice_accuracy("red dog", "D", FRUIT) == 1


def test_the_words_of_an_option_name_it():
    names = ("B. Smith", "C major", "A. Jones", "option A")
    assert [chosen_option(words, names) for words in names] == ["A", "B", "C", "D"]


@pytest.mark.parametrize(
    "blank",
    [
        "the",
        "?",
        "",
    ],
)
def test_an_empty_answer_is_not_the_answer_a(blank):
    """In the release "A" normalises to nothing, and so does every blank (REFERENCE 4, 12)."""
    assert choice_accuracy(blank, "A") == 0
    assert not exact_match(blank, "A")
    assert choice_accuracy("A", "A") == 1 == choice_accuracy("a", "A")


def test_two_empty_texts_do_not_match():
    assert not exact_match("!!!", "???")
    assert token_f1("!!!", "???") == 0


@pytest.mark.parametrize(
    "answer",
    [
        "Option B, although the answer is A",
        "A. B.",
    ],
)
def test_two_letters_earn_nothing(answer):
    """In the release several patterns accept two letters at once (REFERENCE 4, 12)."""
    assert choice_accuracy(answer, "A") == 0 == choice_accuracy(answer, "B")


@pytest.mark.parametrize("wanted", ["C", "seven", "(C)", "C. seven"])
@pytest.mark.parametrize(
    "said, score",
    [
        ("seven", 1),
        ("C. Seven", 1),
        ("two cats", 0),
        ("B. seven", 0),
        ("C. two cats", 0),
    ],
)
def test_options_answer_by_letter_or_words(wanted, said, score):
    assert choice_accuracy(said, wanted, OPTIONS) == score
    assert choice_accuracy(said, wanted, tuple(option[3:] for option in OPTIONS)) == score


LONG = [
    "1" * 40_000,
    "1 and " * 10_000,
    "1 min 1 " * 5_000,
    "answer is " * 5_000,
    "A,A" * 20_000 + " x",
    "answer B or " * 4_000,
    "(B) is" + " " * 40_000,
    "1,000 to " * 5_000,
]


@pytest.mark.parametrize("text", LONG, ids=[f"{text[:8]!r}" for text in LONG])
def test_a_long_text_is_read_in_time(text):
    """Quadratic work on these takes minutes; they take about a second."""
    start = time.thread_time()
    read_range(text)
    choice_accuracy(text, "B", FRUIT)
    assert time.thread_time() - start < 5


@pytest.mark.parametrize(
    "said, score",
    [
        ("[10, 20]", 1),
        ("15 to 20", 0.5),
        ("[5, 25]", 0.5),
        ("20, 10", 0),
        ("[30, 40]", 0),
        ("[12, 12]", 0),
    ],
)
def test_grounding(said, score):
    assert grounding_accuracy(said, "[10, 20]") == score


@pytest.mark.parametrize(
    "text, read",
    [
        ("1,000 to 1,200 seconds", (1000, 1200)),
        ("[990, 12,345.5]", (990, 12345.5)),
        ("starts at 1,000 s and ends at 1,200 s", (1000, 1200)),
        ("[10,200]", (10, 200)),
        ("0,100", (0, 100)),
    ],
)
def test_a_comma_groups_thousands_if_something_else_joins_the_times(text, read):
    assert read_range(text) == read


def test_grounding_of_an_unreadable_answer():
    assert grounding_accuracy("around noon", "Around noon.") == 1
    assert grounding_accuracy("10, 20", "around noon") == 0


def test_normalise_keeps_numbers_apart():
    assert normalise("The 1.5 m, and 1,000!") == "1.5 m and 1000"
    assert not exact_match("1.5", "15")
    assert not exact_match("-5", "5")
    assert exact_match("1,000", "1000")


def test_open_ended_answers_score_the_f1_of_their_words():
    question = Question("q", "v", "?", QuestionKind.OPEN_ENDED, "the man runs in the park")
    assert accuracy(question, "a man is running in a park") == pytest.approx(2 / 3)
    assert accuracy(question, "Man runs in park.") == 1
    assert accuracy(question, None) == 0


def test_a_full_width_letter_is_the_same_letter():
    assert (
        choice_accuracy("\uff22", "B")
        == choice_accuracy("(\uff22)", "B", ("a dog", "a cat"))
        == 1.0
    )
    assert choice_accuracy("\uff21", "B") == 0.0


@given(
    st.text(), st.text(), st.sampled_from(QuestionKind), st.lists(st.text(max_size=6), max_size=4)
)
@example("", "\u00ba", QuestionKind.MULTIPLE_CHOICE, [])
@example("", "A B", QuestionKind.MULTIPLE_CHOICE, [])
def test_accuracy_is_between_0_and_1_for_any_text(said, answer, kind, options):
    question = Question("q", "v", "?", kind, answer, tuple(options))
    assert 0 <= accuracy(question, said) <= 1
    if normalise(answer):
        assert accuracy(question, answer) == 1


@given(st.lists(st.floats(0, 500), min_size=4, max_size=4))
def test_iou_is_symmetric(values):
    a, b = (f"[{x:.3f}, {y:.3f}]" for x, y in (sorted(values[:2]), sorted(values[2:])))
    assert grounding_accuracy(a, b) == pytest.approx(grounding_accuracy(b, a))
