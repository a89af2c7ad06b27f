"""R_acc of multiple choice, temporal grounding and open-ended answers (REFERENCE 3 and 4, 12)."""

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paravt_jax.method import accuracy as module
from paravt_jax.method.accuracy import (
    accuracy,
    choice_accuracy,
    chosen_option,
    exact_match,
    grounding_accuracy,
    is_read,
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


@pytest.mark.parametrize("table", ["REWRITTEN", "NAMED", "MENTIONED", "WEAK", "TIMES"])
def test_every_line_of_a_table_is_needed_for_its_example(table, monkeypatch):
    def read(text: str) -> str | tuple[float, float] | None:
        return read_range(text) if table == "TIMES" else chosen_option(text, FRUIT)

    lines = getattr(module, table)
    for number, line in enumerate(lines):
        assert read(line.example) == line.read, line
        monkeypatch.setattr(module, table, lines[:number] + lines[number + 1 :])
        assert read(line.example) != line.read, line
        monkeypatch.setattr(module, table, lines)


@pytest.mark.parametrize(
    "text",
    [
        "It's B",
        "B because it fits",
        "B is correct",
        "I choose B",
        r"\boxed{B}",
        r"$\boxed{\text{B}}$",
        "Therefore, the final answer is: $B$",
        'The answer is "B".',
        "B Bananas and pears",
        "(B)Bananas and pears",
        "**B.** Bananas and pears",
        "Bananas and pears",
        "The answer is Bananas and pears",
        "B\n\nThe label on the box says so.",
        "The label on the box says so.\n\nB",
    ],
)
def test_ways_to_name_an_option(text):
    question = Question("q", "v", "?", QuestionKind.MULTIPLE_CHOICE, "B", FRUIT)
    assert chosen_option(text, FRUIT) == "B"
    assert accuracy(question, text) == 1
    assert choice_accuracy(text, "Bananas and pears", FRUIT) == 1
    assert choice_accuracy(text, "C", FRUIT) == 0
    assert is_read(question, text)


@pytest.mark.parametrize(
    "text",
    [
        "A. Bananas and pears",
        "The answer is A. Bananas and pears",
        "B and C",
        "Option B, although it is C.",
        "B\nC",
        "E",
        "A man walks",
        "The answer is A man",
        "It is vitamin C rich",
        "The answer is D.C.",
    ],
)
def test_an_answer_that_names_no_option_or_several_earns_nothing_and_is_not_read(text):
    question = Question("q", "v", "?", QuestionKind.MULTIPLE_CHOICE, "B", FRUIT)
    assert chosen_option(text, FRUIT) is None
    assert not is_read(question, text)
    assert {choice_accuracy(text, letter, FRUIT) for letter in "ABCD"} == {0}


@pytest.mark.parametrize(
    "text",
    [
        "A.B",
        "A. Or B",
        "The answer is (A)(B)",
        "It is B, or maybe C",
        "It is B (or C)",
        "The answer is B and/or C",
        "(B), or possibly (C)",
    ],
)
def test_two_letters_are_two_options_with_any_words_between_them(text):
    question = Question("q", "v", "?", QuestionKind.MULTIPLE_CHOICE, "B", FRUIT)
    assert chosen_option(text) is None
    assert chosen_option(text, FRUIT) is None
    assert accuracy(question, text) == 0
    assert not is_read(question, text)


@pytest.mark.parametrize(
    "text",
    [
        "Do not choose B.",
        "I wouldn't go with B.",
        "I don’t think it is B",
        "The answer is not B",
        "neither option A nor option B",
        "I can rule out option B.",
        "The wrong answer is B.",
        "Wrong answer: B",
        "Option B has been ruled out.",
    ],
)
def test_a_denied_option_is_not_chosen(text):
    question = Question("q", "v", "?", QuestionKind.MULTIPLE_CHOICE, "B", FRUIT)
    assert chosen_option(text) is None
    assert chosen_option(text, FRUIT) is None
    assert choice_accuracy(text, "Bananas and pears", FRUIT) == 0
    assert accuracy(question, text) == 0
    assert not is_read(question, text)


@pytest.mark.parametrize(
    "text",
    [
        "It is not (A), it is B.",
        "Option A is wrong, so B.",
        "I don't think it is A; the answer is B.",
        "I am not sure, but the answer is B.",
        "There is no dog. So B.",
        "No, (B)",
        "The dog that is not barking is option B.",
        "After ruling out the others I choose B.",
        "不是A，选B",
    ],
)
def test_a_denial_of_something_else_does_not_count(text):
    assert chosen_option(text) == chosen_option(text, FRUIT) == "B"
    assert choice_accuracy(text, "B", FRUIT) == 1
    assert choice_accuracy(text, "A", FRUIT) == 0


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


@pytest.mark.parametrize(
    "text, range_",
    [
        ("[10, 20]", (10, 20)),
        ("from 12.5 to 20.0 seconds", (12.5, 20)),
        ("[00:10, 01:20]", (10, 80)),
        ("1:00:05 - 1:00:10", (3605, 3610)),
        ("[-5, 20]", (-5, 20)),
        ("It happens at 10., 20.", (10, 20)),
        ("１０, ２０", (10, 20)),
        ("see [8, 16] then [10, 20]", (8, 16)),
        ("10.0.1, 20", None),
        ("start at 3, maybe 7", None),
        ("around noon", None),
        ("10, 20.5.1", None),
    ],
)
def test_read_range(text, range_):
    assert read_range(text) == range_


@pytest.mark.parametrize(
    "text",
    [
        "It happens from <73.0 seconds> to <130.0 seconds>.",
        "starts at 73 seconds and ends at 130 seconds",
        "start: 73, end: 130",
        '{"start_time": "1:13", "end_time": "2:10"}',
        "[[73, 130]]",
        "from 73 s, until 130 s",
        "73 -> 130",
        "73 秒至 130 秒",
        "1 minute and 13 seconds to 2 minutes and 10 seconds",
        "第73秒到第130秒",
    ],
)
def test_ways_to_name_a_range(text):
    assert read_range(text) == (73, 130)
    assert grounding_accuracy(text, "[73, 130]") == 1


def test_a_unit_after_the_second_time_belongs_to_both():
    assert read_range("1 to 2 minutes") == (60, 120)
    assert read_range("1.5-2 min") == (90, 120)
    assert read_range("1 to 2 hours") == (3600, 7200)


@pytest.mark.parametrize(
    ("text", "range_"),
    [
        ("from 900 s to 1,200 s", (900, 1200)),
        ("1,000.5 - 1,200.5", (1000.5, 1200.5)),
        ("[1,000, 1,200]", (1000, 1200)),
        ("starts at 1,200 s and ends at 1,500 s", (1200, 1500)),
        ("[[100,200],[300,400]]", (100, 200)),
        ("10,200 s", (10, 200)),
        ("00:01:13,500 --> 00:02:10,000", (73.5, 130)),
        ("1:13,2:10", (73, 130)),
        ("1 hour, 2 minutes and 5 seconds to 1 hour, 3 minutes", (3725, 3780)),
        ("1h2m3s - 1h3m4s", (3723, 3784)),
        ("starts at 1 hour 2 minutes and ends at 1.5 hours", (3720, 5400)),
        ("1小时2分3秒到1小时3分钟", (3723, 3780)),
    ],
)
def test_all_parts_of_a_time_are_read(text, range_):
    assert read_range(text) == range_


@pytest.mark.parametrize(
    "text",
    [
        "1 hour 2 to 3 minutes",
        "10 to 20 %",
        "1'13 to 2'10",
        "73,5 to 130,2",
        "5 to 10 frames",
    ],
)
def test_a_time_that_is_readable_only_in_part_does_not_count(text):
    question = Question("q", "v", "?", QuestionKind.TEMPORAL_GROUNDING, "[73, 130]")
    assert read_range(text) is None
    assert not is_read(question, text)


@pytest.mark.parametrize(
    "text",
    [
        "73",
        "5 9",
        "10% to 20%",
        "restart: 5, bend: 9",
        "start: soon, end: 9",
    ],
)
def test_numbers_that_are_not_a_range(text):
    question = Question("q", "v", "?", QuestionKind.TEMPORAL_GROUNDING, "[73, 130]")
    assert read_range(text) is None
    assert accuracy(question, text) == 0
    assert not is_read(question, text)


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
