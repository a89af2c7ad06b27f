"""rewards.json against our accuracy: the answer found, its words, its score by each kind of question.

First every reading by itself, then what is made of them. Where readings differ there is an excuse with its reason (REFERENCE 4), and
what is true here instead is computed by readers of the tests' own.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

import pytest

from paravt_jax.method.accuracy import (
    accuracy,
    choice_accuracy,
    grounding_accuracy,
    normalise,
    token_f1,
)
from paravt_jax.method.parsing import extract_answer
from paravt_jax.method.records import Question, QuestionKind
from tests.golden.conftest import Excuse, check_examples
from tests.golden.test_golden_readings import first_pair, named, names, standing

BLOCKS = ("think", "tool_call", "tool_code", "tool_response", "answer")
ANY_TAG = "</?(?:" + "|".join(BLOCKS) + ")>"
KNOBS = {"ANSWER_SUFFIX": "0", "ANCHOR_WEIGHT": "0.5", "FORMAT_WEIGHT": "1.0", "REWARD_MODE": "f1"}


def close(value: float) -> Any:
    return pytest.approx(value, abs=1e-9)


def completion(text: str, answer: str = "B", kind: str = "mcq", **expected: Any) -> dict:
    """A record of the table; what its test does not look at is left out."""
    return {
        "id": "example",
        "completion": text,
        "answer": answer,
        "question_type": kind,
        "knobs": KNOBS,
        "expected": expected,
    }


def falls_under(excuses: Mapping[str, Excuse], record: dict) -> bool:
    return any(excuse.applies(record) for excuse in excuses.values())


# The answer ----------------------------------------------------------------------------------------------------------------------


def closed_answers(text: str) -> list[str]:
    return [block.strip() for block in re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)]


def final_answer(text: str) -> str | None:
    """The last answer block with words and without tags in it that stands outside the closed blocks of other kinds."""
    others = [rf"<{name}>(?:(?!<{name}>).)*?</{name}>" for name in BLOCKS if name != "answer"]
    hidden = [found.span() for other in others for found in re.finditer(other, text, re.DOTALL)]
    shown = [
        found[1].strip()
        for found in re.finditer(rf"<answer>((?:(?!{ANY_TAG}).)*)</answer>", text, re.DOTALL)
        if found[1].strip() and not any(a < found.start() < b for a, b in hidden)
    ]
    return shown[-1] if shown else None


def is_final(record: dict, got: str | None) -> bool:
    return got == final_answer(record["completion"])


def first_is_final(record: dict) -> bool:
    return closed_answers(record["completion"])[0] == (final_answer(record["completion"]) or "")


ANSWERED = completion("<answer>B</answer>", extract_answer="B")

ANSWERS = {
    "no block": Excuse(
        "an answer stands in a closed answer block; the release takes what follows the think, or the last line",
        lambda r: not closed_answers(r["completion"]) and r["expected"]["extract_answer"] != "",
        lambda r, got: got is None,
        completion("B", extract_answer="B"),
        ANSWERED,
        "B",
    ),
    "several": Excuse(
        "the final answer with words in it counts; the release takes the first block, even an empty one",
        lambda r: len(closed_answers(r["completion"])) > 1 and not first_is_final(r),
        is_final,
        completion("<answer></answer><answer>blue sky</answer>", extract_answer=""),
        ANSWERED,
        None,
    ),
    "other tags": Excuse(
        "a block with tags in it or inside a think or tool block is no answer; the release takes it as it stands",
        lambda r: len(closed_answers(r["completion"])) == 1 and not first_is_final(r),
        is_final,
        completion("<think>maybe <answer>A</answer></think>", extract_answer="A"),
        ANSWERED,
        "A",
    ),
}


def read_answer(record: dict) -> str | None:
    return extract_answer(record["completion"])


def test_answers(records, hold):
    hold(
        records("rewards"),
        read_answer,
        lambda r, got: (got or "") == r["expected"]["extract_answer"],
        ANSWERS,
    )


def test_excuses_of_answers():
    check_examples(read_answer, ANSWERS)


# Words ---------------------------------------------------------------------------------------------------------------------------


def bare(text: str) -> str:
    return re.sub(r"[^\w\s]", "", text)


def holds_article(word: str) -> bool:
    """Whether punctuation inside a word sets an article off, or hides one: "vitamin-a", "th.e"."""
    core = re.sub(r"^[^\w]+|[^\w]+$", "", word)
    return core != bare(core) and not {"a", "an", "the"}.isdisjoint(
        [bare(core), *re.split(r"\W+", core)]
    )


def same_words(record: dict, got: str) -> bool:
    """All words but articles, or the articles where there are no others; points and signs of numbers may stay."""
    words = bare(unicodedata.normalize("NFKC", record["text"]).lower()).split()
    return bare(got).split() == (
        [word for word in words if word not in ("a", "an", "the")] or words
    )


def text(content: str, normal: str) -> dict:
    return {"id": "example", "text": content, "expected": normal}


NORMALS = {
    "articles": Excuse(
        "where nothing but articles is left they stay: option 'A' is not nothing (REFERENCE 4, 12)",
        lambda r: r["expected"] == "" and bare(r["text"]).strip() != "",
        lambda r, got: same_words(r, got) and got != "",
        text("A", ""),
        text("?!", ""),
        "",
    ),
    "numbers": Excuse(
        "the point in a number and its sign stay: 1.5 is not 15",
        lambda r: bool(re.search(r"(?<![^\W\d])(?<!\.)\.\d|(?<!\w)-\.?\d", r["text"])),
        lambda r, got: same_words(r, got) and bool(re.search(r"\.\d|-", got)),
        text("1.5 m", "15 m"),
        text("15 m.", "15 m"),
        "15 m",
    ),
    "joined articles": Excuse(
        "articles are words by themselves; the release also takes them out of 'vitamin-A'",
        lambda r: any(holds_article(word) for word in r["text"].lower().split()),
        same_words,
        text("vitamin-A", "vitamin"),
        text("a vitamin", "vitamin"),
        "vitamin",
    ),
    "forms": Excuse(
        "letters and digits of another width are the same ones (NFKC)",
        lambda r: unicodedata.normalize("NFKC", r["text"]) != r["text"],
        same_words,
        text("１０", "１０"),
        text("10", "10"),
        "１０",
    ),
}


def texts(table: list[dict]) -> list[dict]:
    """The answers found and the right ones, each with its normal form in the release."""
    both = [
        (r, r["expected"]["extract_answer"], r["expected"]["normalize_extracted"]) for r in table
    ]
    both += [(r, r["answer"], r["expected"]["normalize_answer"]) for r in table]
    return [{"id": r["id"], "text": content, "expected": normal} for r, content, normal in both]


def normal(record: dict) -> str:
    return normalise(record["text"])


def test_normal_forms(records, hold):
    hold(texts(records("rewards")), normal, lambda r, got: got == r["expected"], NORMALS, least=0.4)


def test_excuses_of_normal_forms():
    check_examples(normal, NORMALS)


def test_points_and_signs_belong_to_numbers_only():
    assert [normalise(t) for t in (".5", "-.5", "$-5.50.", "1,000.", "the -.", "...5", "U.S.")] == [
        ".5",
        "-.5",
        "-5.50",
        "1000",
        "the",
        "5",
        "us",
    ]


# The score by kind of question ---------------------------------------------------------------------------------------------------


def said(record: dict) -> str:
    """The release's answer: how it is scored is one question, which it is another."""
    return record["expected"]["extract_answer"]


def scored(
    content: str, answer: str, value: Any, column: str, normals: tuple[str, str] = ("?", "")
) -> dict:
    """A record of how `content` is scored against `answer`."""
    expected = {column: value, "normalize_extracted": normals[0], "normalize_answer": normals[1]}
    return completion("", answer, extract_answer=content, **expected)


def other_forms(record: dict) -> bool:
    """Whether one of the two texts has another normal form here."""
    return any(excuse.applies(part) for part in texts([record]) for excuse in NORMALS.values())


def f1_of_words(record: dict) -> float:
    """Shared kinds of words over each text's length, from our normal forms."""
    p, a = normalise(said(record)).split(), normalise(record["answer"]).split()
    shared = len(set(p) & set(a))
    return 0.0 if not shared else 2 / (len(p) / shared + len(a) / shared)


F1S = {
    "other words": Excuse(
        "numbers and lone articles are words of their own here (see NORMALS)",
        lambda r: other_forms(r) and r["expected"]["compute_f1"] != close(f1_of_words(r)),
        lambda r, got: got == close(f1_of_words(r)),
        scored("1.5", "15", 1.0, "compute_f1", ("15", "15")),
        scored("red dog", "a red cat", 0.5, "compute_f1", ("red dog", "red cat")),
        1.0,
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


def test_excuses_of_f1():
    check_examples(f1, F1S)


def right_letter(record: dict) -> str | None:
    """The letter that the right answer is, if it is one that the release knows."""
    letter = record["answer"].strip().upper()
    return letter if letter in ("A", "B", "C", "D") else None


def lone(text: str) -> str | None:
    """The letter that is all of a text, capital."""
    found = re.fullmatch(r"(?i)\W*(?:the\s+)?([A-Z])\W*", text)
    return found[1].upper() if found else None


def paired(text: str) -> bool:
    """Whether two different letters are all of a text."""
    return bool(re.fullmatch(r"(?i)\W*([A-Z])\W{2,}(?!\1)[A-Z]\W*", text))


def names_only(text: str, letter: str | None) -> bool:
    return (
        letter is not None
        and not paired(text)
        and (lone(text) == letter or names(text) == [letter])
    )


def small_in_front(text: str) -> str | None:
    """The letter, capital, that a small one names in front of an answer: "b", "(b)", "b. a dog"."""
    found = re.match(r"(?:\W*(?:the\s+)?|[(\[]?)([a-z])(?:\W*$|[.):,\]](?!\w))", text)
    return found[1].upper() if found else None


def own_words(record: dict) -> bool:
    return normalise(said(record)) == normalise(record["answer"]) != ""


def paid(record: dict) -> bool:
    return record["expected"]["compute_mcq_acc"] == 1


def multiple_choice(content: str, answer: str, value: float) -> dict:
    return scored(content, answer, value, "compute_mcq_acc")


LETTER_B = multiple_choice("Option B", "B", 1.0)

CHOICES = {
    "no letter": Excuse(
        "answers other than A to D are scored as well: 'E', '(A)', the words themselves; the release's function knows four letters",
        lambda r: (
            right_letter(r) is None
            and (names_only(said(r), lone(r["answer"])) if lone(r["answer"]) else own_words(r))
        ),
        lambda r, got: got == 1,
        multiple_choice("E", "E", 0.0),
        LETTER_B,
        0.0,
    ),
    "either case": Excuse(
        "a small letter in front of an answer is read as a large one",
        lambda r: (
            not paid(r)
            and right_letter(r) is not None
            and small_in_front(said(r)) == right_letter(r)
        ),
        lambda r, got: got == 1,
        multiple_choice("b. a dog", "B", 0.0),
        LETTER_B,
        0.0,
    ),
    "one after another": Excuse(
        "two letters and nothing else name two options; the release pays for each of them",
        lambda r: paid(r) and paired(said(r)),
        lambda r, got: got == 0,
        multiple_choice("A. B.", "A", 1.0),
        LETTER_B,
        1.0,
    ),
    "part of a word": Excuse(
        "a letter with which a word begins is none; the release takes it after 'option' and 'answer is'",
        lambda r: paid(r) and right_letter(r) not in standing(said(r)) | {said(r).strip().upper()},
        lambda r, got: got == 0,
        multiple_choice("Option Banana", "B", 1.0),
        LETTER_B,
        1.0,
    ),
    "several": Excuse(
        "an answer that names two options is wrong, and letters beside the named one do not count (REFERENCE 4, 12)",
        lambda r: len(standing(said(r))) > 1 and paid(r) != (names(said(r)) == [right_letter(r)]),
        lambda r, got: got == (names(said(r)) == [right_letter(r)]),
        multiple_choice("Option B, although the answer is A", "A", 1.0),
        LETTER_B,
        1.0,
    ),
    "in passing": Excuse(
        "a letter in a sentence that does not name it as the option is a guess, and 'A' is a word",
        lambda r: (
            paid(r)
            and right_letter(r) in standing(said(r))
            and not named(said(r), right_letter(r) or "")
        ),
        lambda r, got: got == 0,
        multiple_choice("A dog runs", "A", 1.0),
        LETTER_B,
        1.0,
    ),
    "more forms": Excuse(
        "the release knows fewer words before a letter: not 'it is B', '答案是B' or a box",
        lambda r: (
            not paid(r) and right_letter(r) is not None and names(said(r)) == [right_letter(r)]
        ),
        lambda r, got: got == 1,
        multiple_choice("答案是B", "B", 0.0),
        multiple_choice("B答案", "B", 0.0),
        0.0,
    ),
}


def choice(record: dict) -> float:
    return choice_accuracy(said(record), record["answer"])


def test_choices(records, hold):
    """Records whose answer is a letter from A to D, whatever their question: the column is filled for all of them."""
    table = [r for r in records("rewards") if right_letter(r)]
    hold(table, choice, lambda r, got: got == r["expected"]["compute_mcq_acc"], CHOICES)


def test_choices_of_other_answers(records, hold):
    """The release gives 0 to all of these in this column, so what agrees is what is wrong."""
    table = [r for r in records("rewards") if not right_letter(r)]
    hold(table, choice, lambda r, got: got == r["expected"]["compute_mcq_acc"], CHOICES, least=0)


def test_excuses_of_choices():
    check_examples(choice, CHOICES)


def overlap(record: dict) -> float:
    """The overlap of the first ranges that stand in the two texts, over what they cover together."""
    p, a = (
        first_pair(unicodedata.normalize("NFKC", part)) for part in (said(record), record["answer"])
    )
    if p is None or a is None or p[0] >= p[1] or a[0] >= a[1]:
        return 0.0
    both = max(min(p[1], a[1]) - max(p[0], a[0]), 0.0)
    return both / (p[1] - p[0] + a[1] - a[0] - both)


def grounded(content: str, answer: str, value: Any) -> dict:
    return scored(content, answer, value, "compute_temporal_iou")


OVERLAPS = {
    "own words": Excuse(
        "the answer's own words always score 1, even where they are no range",
        lambda r: own_words(r) and r["expected"]["compute_temporal_iou"] != 1,
        lambda r, got: got == 1,
        grounded("around noon", "around noon", 0.0),
        grounded("12.5, 20.0", "[10.0, 20.0]", 0.75),
        0.0,
    ),
    "raises": Excuse(
        "no text raises: 1.2.3 is no number, and what is a range beside it is read (REFERENCE 4, 12)",
        lambda r: isinstance(r["expected"]["compute_temporal_iou"], Mapping),
        lambda r, got: got == close(overlap(r)),
        grounded("1.2.3, 4", "[2, 4]", {"error": "ValueError"}),
        grounded("2.3, 4", "[2, 4]", 0.85),
        0.5,
    ),
    "ranges": Excuse(
        "'a - b', 'a to b', units, mm:ss and signs are read (REFERENCE 4, 12); the release reads the first 'a, b' only",
        lambda r: r["expected"]["compute_temporal_iou"] != close(overlap(r)),
        lambda r, got: got == close(overlap(r)),
        grounded("12.5 - 20.0", "[10.0, 20.0]", 0.0),
        grounded("12.5, 20.0", "[10.0, 20.0]", 0.75),
        0.0,
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


def test_excuses_of_overlaps():
    check_examples(grounding, OVERLAPS)


def flooded(record: dict) -> bool:
    return record["completion"].count("<|im_start|>") >= 5 and len(record["completion"]) < 300


def by_kind(record: dict) -> float:
    """The score of the answer by its question's kind; a text with the answer's words is right for any."""
    if record["question_type"] == "mcq":
        return choice(record)
    if record["question_type"] == "tvg":
        return grounding(record)
    return 1.0 if own_words(record) else f1(record) * (record["knobs"]["REWARD_MODE"] == "f1")


def equal_in_release(record: dict) -> bool:
    expected = record["expected"]
    return (
        bool(said(record))
        and bool(record["answer"])
        and expected["normalize_extracted"] == expected["normalize_answer"]
    )


def blank(record: dict) -> bool:
    """Two texts of which nothing is left in the release, so that they are equal there, and whose words are not the same."""
    words = [bare(part.lower()).split() for part in (said(record), record["answer"])]
    return (
        equal_in_release(record)
        and record["expected"]["normalize_answer"] == ""
        and (words[0] != words[1] or not words[0])
        and by_kind(record) < 1
    )


def kind_excused(record: dict) -> bool:
    excuses = {"mcq": CHOICES, "tvg": OVERLAPS, "oe": F1S}[record["question_type"]]
    return not equal_in_release(record) and falls_under(excuses, record)


def judged(content: str, answer: str, kind: str, value: float | None, **columns: Any) -> dict:
    """A record of R_acc, with the columns that its excuses look at."""
    normals = {
        "normalize_extracted": bare(content.lower()),
        "normalize_answer": bare(answer.lower()),
    }
    columns = (
        {"compute_mcq_acc": 0.0, "compute_temporal_iou": 0.0, "compute_f1": 0.0, "error": None}
        | normals
        | columns
    )
    return completion(
        f"<answer>{content}</answer>",
        answer,
        kind,
        extract_answer=content,
        acc_reward=value,
        **columns,
    )


RIGHT = judged("B", "B", "mcq", 1.0, compute_mcq_acc=1.0)

ACCURACIES = {
    "flooded": Excuse(
        "an answer is an answer, whatever stands before it; the release zeroes short texts with five `<|im_start|>`",
        lambda r: flooded(r) and r["expected"]["acc_reward"] != close(by_kind(r)),
        lambda r, got: got == close(by_kind(r)),
        judged("B", "B", "mcq", 0.0) | {"completion": "<|im_start|>" * 5 + "<answer>B</answer>"},
        RIGHT,
        0.0,
    ),
    "blank": Excuse(
        "an answer that normalises to nothing is no answer: 'the' or '?' is not 'A' (REFERENCE 4, 12)",
        blank,
        lambda r, got: got == close(by_kind(r)) and (got == 0 or bool(bare(said(r)).strip())),
        judged("the", "A", "mcq", 1.0, normalize_extracted="", normalize_answer=""),
        judged("A", "A", "mcq", 1.0, normalize_extracted="", normalize_answer=""),
        1.0,
    ),
    "dropped": Excuse(
        "what the release drops from both texts counts: 1.5 is not 15, and an option 'A' is no article",
        lambda r: (
            equal_in_release(r)
            and not blank(r)
            and (other_forms(r) or paired(said(r)))
            and by_kind(r) < 1
        ),
        lambda r, got: got == close(by_kind(r)),
        judged("1.5", "15", "oe", 1.0, normalize_extracted="15"),
        judged("1.5", "1.5", "oe", 1.0, normalize_extracted="15", normalize_answer="15"),
        1.0,
    ),
    "kind": Excuse(
        "the score by the question's kind differs (see CHOICES, OVERLAPS, F1S)",
        lambda r: (
            (kind_excused(r) or r["expected"]["error"] is not None)
            and r["expected"]["acc_reward"] != close(by_kind(r))
        ),
        lambda r, got: got == close(by_kind(r)),
        judged("12.5 - 20.0", "[10.0, 20.0]", "tvg", 0.0),
        RIGHT,
        0.0,
    ),
}


def of(record: dict, answer: str | None) -> float:
    question = Question(
        record["id"], "v", "?", QuestionKind(record["question_type"]), record["answer"]
    )
    return accuracy(question, answer, record["knobs"]["REWARD_MODE"])


def score_of_said(record: dict) -> float:
    return of(record, said(record))


def test_accuracy(records, hold):
    hold(
        records("rewards"),
        score_of_said,
        lambda r, got: got == close(r["expected"]["acc_reward"]),
        ACCURACIES,
    )


def test_excuses_of_accuracy():
    check_examples(score_of_said, ACCURACIES)
