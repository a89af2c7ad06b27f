"""Where our readings of answers differ from the release's, and what is true instead (REFERENCE 4).

One table of excuses per reading of rewards.json, each with the function under test that makes the
reading here.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping

from paravt_jax.method.accuracy import (
    accuracy,
    choice_accuracy,
    grounding_accuracy,
    normalise,
    token_f1,
)
from paravt_jax.method.parsing import extract_answer
from paravt_jax.method.records import Question, QuestionKind
from tests.golden.excuses import Excuse, falls_under
from tests.golden.texts import (
    bare,
    close,
    closed_answers,
    final_answer,
    lone,
    named,
    names,
    overlap,
    right_letter,
    said,
    standing,
)


def is_final(record: dict, got: str | None) -> bool:
    return got == final_answer(record["completion"])


def first_is_final(record: dict) -> bool:
    return closed_answers(record["completion"])[0] == (final_answer(record["completion"]) or "")


ANSWERS = {
    # Only a closed answer block is an answer. The release takes the text after the think, or the
    # last line.
    "no block": Excuse(
        applies=lambda r: (
            not closed_answers(r["completion"]) and r["expected"]["extract_answer"] != ""
        ),
        holds=lambda r, got: got is None,
    ),
    # The last block with words in it counts. The release takes the first block, even an empty
    # one.
    "several": Excuse(
        applies=lambda r: len(closed_answers(r["completion"])) > 1 and not first_is_final(r),
        holds=is_final,
    ),
    # A block with tags in it, or inside a think or tool block, is no answer. The release takes
    # it.
    "other tags": Excuse(
        applies=lambda r: len(closed_answers(r["completion"])) == 1 and not first_is_final(r),
        holds=is_final,
    ),
}


def read_answer(record: dict) -> str | None:
    return extract_answer(record["completion"])


def holds_article(word: str) -> bool:
    """Whether punctuation inside a word sets an article off, or hides one: "vitamin-a", "th.e"."""
    core = re.sub(r"^[^\w]+|[^\w]+$", "", word)
    if core == bare(core):
        return False
    return not {"a", "an", "the"}.isdisjoint([bare(core), *re.split(r"\W+", core)])


def same_words(record: dict, got: str) -> bool:
    """Whether the result has all words but articles, or the articles if there are no others.

    Points and signs of numbers may stay.
    """
    words = bare(unicodedata.normalize("NFKC", record["text"]).lower()).split()
    others = [word for word in words if word not in ("a", "an", "the")]
    return bare(got).split() == (others or words)


def text(content: str, normal: str) -> dict:
    return {"id": "example", "text": content, "expected": normal}


NORMALS = {
    # Articles stay if there are no other words: option 'A' is not empty (REFERENCE 4, 12).
    "articles": Excuse(
        applies=lambda r: r["expected"] == "" and bare(r["text"]).strip() != "",
        holds=lambda r, got: same_words(r, got) and got != "",
    ),
    # Numbers keep their point and their sign: 1.5 is not 15.
    "numbers": Excuse(
        applies=lambda r: bool(re.search(r"(?<![^\W\d])(?<!\.)\.\d|(?<!\w)-\.?\d", r["text"])),
        holds=lambda r, got: same_words(r, got) and bool(re.search(r"\.\d|-", got)),
    ),
    # Only whole words are articles. The release also removes the one in 'vitamin-A'.
    "joined articles": Excuse(
        applies=lambda r: any(holds_article(word) for word in r["text"].lower().split()),
        holds=same_words,
    ),
    # Full-width letters and digits equal the normal ones (NFKC).
    "forms": Excuse(
        applies=lambda r: unicodedata.normalize("NFKC", r["text"]) != r["text"],
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


def normal(record: dict) -> str:
    return normalise(record["text"])


def other_forms(record: dict) -> bool:
    """Whether one of the two texts has another normal form here."""
    return any(excuse.applies(part) for part in texts([record]) for excuse in NORMALS.values())


def f1_of_words(record: dict) -> float:
    """F1 of the different words that our normal forms of two texts share."""
    found = normalise(said(record)).split()
    right = normalise(record["answer"]).split()
    shared = len(set(found) & set(right))
    return 2 / (len(found) / shared + len(right) / shared) if shared else 0.0


F1S = {
    # Numbers and lone articles are words of their own here (see NORMALS).
    "other words": Excuse(
        applies=lambda r: other_forms(r) and r["expected"]["compute_f1"] != close(f1_of_words(r)),
        holds=lambda r, got: got == close(f1_of_words(r)),
    )
}


def f1(record: dict) -> float:
    return token_f1(said(record), record["answer"])


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


OVERLAPS = {
    # A literal copy of the right answer always scores 1, even if it is no range.
    "own words": Excuse(
        applies=lambda r: own_words(r) and r["expected"]["compute_temporal_iou"] != 1,
        holds=lambda r, got: got == 1,
    ),
    # No text raises: 1.2.3 is no number, and a range beside it is read (REFERENCE 4, 12).
    "raises": Excuse(
        applies=lambda r: isinstance(r["expected"]["compute_temporal_iou"], Mapping),
        holds=lambda r, got: got == close(overlap(r)),
    ),
    # 'a - b', 'a to b', units, mm:ss and signs are read (REFERENCE 4, 12). The release reads only
    # the first 'a, b'.
    "ranges": Excuse(
        applies=lambda r: r["expected"]["compute_temporal_iou"] != close(overlap(r)),
        holds=lambda r, got: got == close(overlap(r)),
    ),
}


def grounding(record: dict) -> float:
    return grounding_accuracy(said(record), record["answer"])


def flooded(record: dict) -> bool:
    return record["completion"].count("<|im_start|>") >= 5 and len(record["completion"]) < 300


def by_kind(record: dict) -> float:
    """The score of the answer by its question's kind. The right words are right for any kind."""
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
    """Whether the release removes all words of two different texts, which makes them equal."""
    if not equal_in_release(record) or record["expected"]["normalize_answer"] != "":
        return False
    found, right = (bare(part.lower()).split() for part in (said(record), record["answer"]))
    return (found != right or not found) and by_kind(record) < 1


def kind_excused(record: dict) -> bool:
    excuses = {"mcq": CHOICES, "tvg": OVERLAPS, "oe": F1S}[record["question_type"]]
    return not equal_in_release(record) and falls_under(excuses, record)


ACCURACIES = {
    # An answer counts whatever precedes it. The release gives 0 to short texts with five
    # `<|im_start|>`.
    "flooded": Excuse(
        applies=lambda r: flooded(r) and r["expected"]["acc_reward"] != close(by_kind(r)),
        holds=lambda r, got: got == close(by_kind(r)),
    ),
    # An answer that normalises to nothing is no answer: 'the' or '?' is not 'A' (REFERENCE 4,
    # 12).
    "blank": Excuse(
        applies=blank,
        holds=lambda r, got: got == close(by_kind(r)) and (got == 0 or bool(bare(said(r)).strip())),
    ),
    # Characters that the release drops from both texts count here: 1.5 is not 15, and an option
    # 'A' is no article.
    "dropped": Excuse(
        applies=lambda r: (
            equal_in_release(r)
            and not blank(r)
            and (other_forms(r) or paired(said(r)))
            and by_kind(r) < 1
        ),
        holds=lambda r, got: got == close(by_kind(r)),
    ),
    # The score by the question's kind differs (see CHOICES, OVERLAPS, F1S).
    "kind": Excuse(
        applies=lambda r: (
            (kind_excused(r) or r["expected"]["error"] is not None)
            and r["expected"]["acc_reward"] != close(by_kind(r))
        ),
        holds=lambda r, got: got == close(by_kind(r)),
    ),
}


def of(record: dict, answer: str | None) -> float:
    question = Question(
        record["id"], "v", "?", QuestionKind(record["question_type"]), record["answer"]
    )
    return accuracy(question, answer, record["knobs"]["REWARD_MODE"])


def score_of_said(record: dict) -> float:
    return of(record, said(record))
