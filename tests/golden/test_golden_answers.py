"""rewards.json against our accuracy: the answer, its words, its score by each kind of question.

Each reading is tested alone, with a table of excuses that says where it differs from the release's
and what is true instead (REFERENCE 4), and then the accuracy that follows from the readings.
"""

from __future__ import annotations

import re
import unicodedata

import pytest

from paravt_jax.method.accuracy import (
    choice_accuracy,
    grounding_accuracy,
    normalise,
    token_f1,
)
from paravt_jax.method.parsing import extract_answer
from tests.golden.conftest import Excuse, accuracy_of
from tests.golden.texts import (
    bare,
    close,
    final_answer,
    lone,
    named,
    names,
    overlap,
    paired,
    right_letter,
    said,
    standing,
)

# --- the answer ---

ANSWERS = {
    # Only a closed answer block is an answer, the last one with words in it, and neither with tags
    # in it nor inside a think or tool block. The release takes the first block, even an empty one,
    # and without a block the text after the think, or the last line.
    "another block": Excuse(
        applies=lambda r: r["expected"]["extract_answer"] != (final_answer(r["completion"]) or ""),
        holds=lambda r, got: got == final_answer(r["completion"]),
    ),
}


def test_answers(records, hold):
    hold(
        records("rewards"),
        lambda r: extract_answer(r["completion"]),
        lambda r, got: (got or "") == r["expected"]["extract_answer"],
        ANSWERS,
    )


# --- words ---


def words_of(text: str) -> list[str]:
    """The words of a text but articles, or the articles if there are no others."""
    words = bare(unicodedata.normalize("NFKC", text).lower()).split()
    return [word for word in words if word not in ("a", "an", "the")] or words


def same_words(record: dict, got: str) -> bool:
    """Whether the result has all words. Points and signs of numbers may stay."""
    return bare(got).split() == words_of(record["text"])


NORMALS = {
    # Numbers keep their point and their sign: 1.5 is not 15.
    "numbers": Excuse(
        applies=lambda r: bool(re.search(r"(?<![^\W\d])(?<!\.)\.\d|(?<!\w)-\.?\d", r["text"])),
        holds=lambda r, got: same_words(r, got) and bool(re.search(r"\.\d|-", got)),
    ),
    # Articles stay if there are no other words: option 'A' is not empty (REFERENCE 4, 12). Only
    # whole words are articles: the release also removes the one in 'vitamin-A'. Full-width letters
    # and digits equal the normal ones (NFKC).
    "words": Excuse(
        applies=lambda r: r["expected"].split() != words_of(r["text"]),
        holds=same_words,
    ),
}


def texts(table: list[dict]) -> list[dict]:
    """The answers found and the right ones, each with its normal form in the release."""
    both = [
        (r, r["expected"]["extract_answer"], r["expected"]["normalize_extracted"]) for r in table
    ]
    both += [(r, r["answer"], r["expected"]["normalize_answer"]) for r in table]
    return [{"id": r["id"], "text": content, "expected": normal} for r, content, normal in both]


def test_normal_forms(records, hold):
    hold(
        texts(records("rewards")),
        lambda r: normalise(r["text"]),
        lambda r, got: got == r["expected"],
        NORMALS,
        least=0.4,
    )


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


def f1_of_words(record: dict) -> float:
    """F1 of the different words that our normal forms of two texts share."""
    found = normalise(said(record)).split()
    right = normalise(record["answer"]).split()
    shared = len(set(found) & set(right))
    return 2 / (len(found) / shared + len(right) / shared) if shared else 0.0


F1S = {
    # Numbers and lone articles are words of their own here (see NORMALS).
    "other words": Excuse(
        applies=lambda r: r["expected"]["compute_f1"] != close(f1_of_words(r)),
        holds=lambda r, got: got == close(f1_of_words(r)),
    )
}


def f1(record: dict) -> float:
    return token_f1(said(record), record["answer"])


def test_f1(records, hold):
    hold(
        records("rewards"),
        f1,
        lambda r, got: got == close(r["expected"]["compute_f1"]),
        F1S,
        least=0.4,
    )


def names_only(text: str, letter: str | None) -> bool:
    return (
        letter is not None
        and not paired(text)
        and (lone(text) == letter or names(text) == [letter])
    )


def small_in_front(text: str) -> str | None:
    """The letter, capital, that a small one names: "b", "(b)", "b. a dog", "the answer is b"."""
    found = re.match(r"(?:\W*(?:the\s+)?|[(\[]?)([a-z])(?:\W*$|[.):,\]](?!\w))", text)
    found = found or re.search(r"(?:[Aa]nswer|option|choice)(?:\s+is|:)?\s+([a-z])\W*$", text)
    return found[1].upper() if found else None


def own_words(record: dict) -> bool:
    return normalise(said(record)) == normalise(record["answer"]) != ""


def paid(record: dict) -> bool:
    return record["expected"]["compute_mcq_acc"] == 1


CHOICES = {
    # Answers other than A to D are scored too: 'E', '(A)', the option's words. The release's
    # function knows four letters.
    "no letter": Excuse(
        applies=lambda r: (
            right_letter(r) is None
            and (names_only(said(r), lone(r["answer"])) if lone(r["answer"]) else own_words(r))
        ),
        holds=lambda r, got: got == 1,
    ),
    # A lower-case letter in front of an answer counts like an upper-case one.
    "either case": Excuse(
        applies=lambda r: (
            not paid(r)
            and right_letter(r) is not None
            and small_in_front(said(r)) == right_letter(r)
        ),
        holds=lambda r, got: got == 1,
    ),
    # Two letters and nothing else name two options. The release pays for each of them.
    "one after another": Excuse(
        applies=lambda r: paid(r) and paired(said(r)),
        holds=lambda r, got: got == 0,
    ),
    # The first letter of a word is not an option. The release takes it after 'option' and 'answer
    # is'.
    "part of a word": Excuse(
        applies=lambda r: (
            paid(r) and right_letter(r) not in standing(said(r)) | {said(r).strip().upper()}
        ),
        holds=lambda r, got: got == 0,
    ),
    # An answer that names two options is wrong, and letters beside the named one do not count
    # (REFERENCE 4, 12).
    "several": Excuse(
        applies=lambda r: (
            len(standing(said(r))) > 1 and paid(r) != (names(said(r)) == [right_letter(r)])
        ),
        holds=lambda r, got: got == (names(said(r)) == [right_letter(r)]),
    ),
    # A letter that a sentence does not name as an option is a guess, and 'A' is a word.
    "in passing": Excuse(
        applies=lambda r: (
            paid(r)
            and right_letter(r) in standing(said(r))
            and not named(said(r), right_letter(r) or "")
        ),
        holds=lambda r, got: got == 0,
    ),
    # The release knows fewer phrases before a letter: not 'it is B', '答案是B' or a box.
    "more forms": Excuse(
        applies=lambda r: (
            not paid(r) and right_letter(r) is not None and names(said(r)) == [right_letter(r)]
        ),
        holds=lambda r, got: got == 1,
    ),
}


def choice(record: dict) -> float:
    return choice_accuracy(said(record), record["answer"])


def test_choices(records, hold):
    """All records whose answer is a letter from A to D: the column is filled for every kind."""
    table = [r for r in records("rewards") if right_letter(r)]
    hold(table, choice, lambda r, got: got == r["expected"]["compute_mcq_acc"], CHOICES)


def test_choices_of_other_answers(records, hold):
    """The release gives 0 to all of these in this column, so only wrong answers agree."""
    table = [r for r in records("rewards") if not right_letter(r)]
    hold(table, choice, lambda r, got: got == r["expected"]["compute_mcq_acc"], CHOICES, least=0)


OVERLAPS = {
    # A literal copy of the right answer always scores 1, even if it is no range.
    "own words": Excuse(
        applies=lambda r: own_words(r) and r["expected"]["compute_temporal_iou"] != 1,
        holds=lambda r, got: got == 1,
    ),
    # 'a - b', 'a to b', units, mm:ss and signs are read (REFERENCE 4, 12), and no text raises. The
    # release reads only the first 'a, b', and 1.2.3 raises.
    "ranges": Excuse(
        applies=lambda r: r["expected"]["compute_temporal_iou"] != close(overlap(r)),
        holds=lambda r, got: got == close(overlap(r)),
    ),
}


def grounding(record: dict) -> float:
    return grounding_accuracy(said(record), record["answer"])


def test_overlaps(records, hold):
    hold(
        records("rewards"),
        grounding,
        lambda r, got: got == close(r["expected"]["compute_temporal_iou"]),
        OVERLAPS,
    )


def by_kind(record: dict) -> float:
    """The score of the answer by its question's kind. The right words are right for any kind."""
    if record["question_type"] == "mcq":
        return choice(record)
    if record["question_type"] == "tvg":
        return grounding(record)
    return 1.0 if own_words(record) else f1(record) * (record["knobs"]["REWARD_MODE"] == "f1")


ACCURACIES = {
    # A reading differs (NORMALS, F1S, CHOICES, OVERLAPS), an answer that normalises to nothing is
    # none, and one counts whatever precedes it. In the release 'the' is equal to 'A', and a short
    # text with five `<|im_start|>` earns 0.
    "readings": Excuse(
        applies=lambda r: r["expected"]["acc_reward"] != close(by_kind(r)),
        holds=lambda r, got: got == close(by_kind(r)),
    )
}


def test_accuracy(records, hold):
    hold(
        records("rewards"),
        lambda r: accuracy_of(r, said(r)),
        lambda r, got: got == close(r["expected"]["acc_reward"]),
        ACCURACIES,
    )
