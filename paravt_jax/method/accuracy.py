"""R_acc: scores answers to multiple-choice, temporal-grounding and open-ended questions.

English answers are read in their usual forms ("(B)", "the answer is B", "from 0:10 to 0:20"). An
answer that names two options, or no readable range, earns 0; any other score would reward guessing.
Scores are in [0, 1], and the right answer's own words always score 1. The rules are the published
ones without their mistakes (docs/reference.md, 3; 4, point 12).

`chosen_option` reads letters of options with the table `NAMED`, and `read_range` reads seconds. To
read another form of naming a letter, add a line to the table.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paravt_jax.method.records import Question, QuestionKind

# --- words ---

# Commas that group thousands are removed. Decimal points and minus signs stay: "1.5" is not "15",
# ".5" is not "5", and "-5" is not "5".
_PUNCTUATION = re.compile(
    r"(?<=\d),(?=\d{3}(?!\d))|(?!(?<![^\W\d])(?<!\.)\.(?=\d))(?!(?<!\w)-(?=\.?\d))[^\w\s]"
)
_ARTICLES = frozenset(("a", "an", "the"))
_FONT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\s*\{([^{}]*)\}")
_BOXED = re.compile(r"\\f?box(?:ed)?\s*\{([^{}]*)\}")
_DRESS = re.compile(r"[*`$]|__|\\(?=[()\[\]])")  # marks of Markdown and LaTeX
# The words of an open-ended answer: {"answer": "two"}, "The answer is two."
_LABELLED_ANSWER = re.compile(
    r"\W*(?i:(?:(?:the|my)\s+)?(?:final\s+|correct\s+)?answer)[\"']?\s*(?::|\bis\b)\s*:?\s*(\S.*)"
)

# --- letters of options ---

_LABELS = string.ascii_uppercase
# An option's letter. "A" and "I" before another word are not letters: "A man", "I see".
_WORD_AFTER = r"[^\S\n]+(?!(?:and|or|because|since|as|but|is)\b)\w"
_LETTER = rf"(?:[B-HJ-Z]|[AI](?!{_WORD_AFTER}))(?!(?!选项)[\w+#]|['’.-]\w)"
_OPENING = r"[(\[\"'“‘]?"
_JOIN = (
    r"[)\]]?(?:\s*(?:[,/&]|[.?!,]?\s*\(?\b(?i:(?:and|nor|or|maybe|possibly|perhaps"
    r"|it\s+(?:could|might|may)\s+(?:also\s+)?be)\b)))++"
    rf"\s*{_OPENING}"
)
_LIST = rf"{_LETTER}(?:{_JOIN}{_LETTER})*"  # "B, C and D", "B, or maybe C"
_BARE_LETTER = re.compile(r"\W*(?:(?i:the)\s+)?([A-Za-z])\W*")
# A letter before an option's words: "(B) two cats", "b. two cats", "B - two cats".
_MARK = re.compile(r"\s*[(\[]?([A-Za-z])(?:[)\].:,]|(?<=[A-Z])\s+[-–—])")
_LOOSE_MARK = re.compile(r"\s*([B-Zb-z])\s+")  # "B two cats"; "A two" would be an article
_IS = (
    r"(?i:(?:\s+(?:is|(?:must|should|would)\s+be|(?:seems|appears)\s+to\s+be)\b|['’]s\b)"
    r"(?:\s+(?:also|clearly|most\s+likely|probably)\b)?)"
)
# Of other languages, only 答案 ("answer") and 选 ("choose") are read, as in the release.
_STATED = (
    rf"(?:\b(?i:answer(?:\s+to\s+th(?:e|is)\s+question)?){_IS}?"
    rf"|\b(?i:option|choice)(?:{_IS}|(?=[\"']?\s*[:=]))|答案[是为]?)"
)
_COLON = r"\s*[\"']?\s*(?:[:=]+>?|→|[-–—]+>?\s)?\s*(?i:option\s+|letter\s+)?"
_IT_IS = rf"\b(?i:it|this|that){_IS}"
_CHOICE = (
    r"\b(?i:choose|pick|select|go\s+with|so|therefore|thus|hence|say|guess|probably|likely|maybe"
    r"|perhaps|but)\b"
)
_CLAUSE_END = r"(?=[)\]]?\W*$|\s*[.,;:!?)\]\"'”’]|\s+(?:because|since|as|but)\b)"


class Reading(NamedTuple):
    """A way of naming options. The group of the pattern has their letters."""

    pattern: re.Pattern[str]
    example: str
    """An answer that names B to this pattern only."""


NAMED = (
    Reading(re.compile(rf"{_STATED}{_COLON}{_OPENING}({_LIST})"), "The answer is B"),
    Reading(re.compile(rf"\b(?i:option|choice)\s+{_OPENING}({_LIST})"), "I see option B"),
    # These words often precede other things than options, so the letter has to end its clause.
    Reading(
        re.compile(rf"(?:{_IT_IS}|{_CHOICE}|选)[:,]?\s*{_OPENING}({_LIST}){_CLAUSE_END}"),
        "I choose B",
    ),
    Reading(re.compile(rf"\(({_LIST})\)"), "The man does not speak (B)"),
    Reading(
        re.compile(
            rf"({_LETTER})\s+(?i:(?:is|seems)\s+(?:the\s+)?(?:most\s+)?"
            r"(?:answer|best|correct|right|likely))\b"
        ),
        "I think B is right",
    ),
)
_LINE_MARK = re.compile(rf"^(?:(?i:option|choice)\s+)?{_MARK.pattern}(?!\w)", re.MULTILINE)
_LEADING = re.compile(
    rf"(?!N/A){_OPENING}"
    rf"({_LETTER}(?:{_JOIN}{_LETTER})+|{_LETTER}(?=\s+(?:because|since|as|or)\b|选项))"
)
_ALTERNATIVE = re.compile(rf"\b(?i:or)\s+{_OPENING}({_LETTER})(?=[).:,\]]|\W*$)")
# "the answer is b" at the end of a text
_SMALL_LETTER = re.compile(
    rf"{_STATED}{_COLON}{_OPENING}[a-z](?=\W*$)|\b(?:option|choice)\s+[a-z](?=\W*$)"
)
_SAID = re.compile(rf"(?:\b(?i:answer|option|choice)[\"']?(?:{_IS}|\s*[:=])|{_IT_IS})[\s:]*")
_OR = re.compile(r"\s*(?:,\s*)?\bor\b\s+", re.IGNORECASE)
_RETRACTION = re.compile(
    r"\b(?:no,?\s+wait|wait,?\s+no|i\s+mean)\b[,:.]?|\bactually,", re.IGNORECASE
)
# Only these words may come between a negation and its letter: "he does not speak (B)" chooses B.
_DENIAL = re.compile(
    r"\b(?:not|never|neither|nor|no|cannot|\w+n['’]t|(?:instead|rather|other)\s(?:of|than)"
    r"|except|(?:any|every)thing\sbut|wrong|incorrect|rul(?:e|ed|ing)\sout"
    r"|(?:exclud|eliminat|reject)(?:e|ed|ing)?)"
    r"(?:\s(?:the|that|this|it|is|be|to|with|if|either|option|choice|answer|think|believe"
    r"|choose|pick|select|say|go|correct|right|best)\b){0,8}"
    rf"[ :]*{_OPENING}$",
    re.IGNORECASE,
)
_DENIAL_LENGTH = 100  # in characters; a negation further before a letter concerns something else
_DENIED = re.compile(
    r"[)\]\"'”’]*\s+(?:cannot\b|can['’]t\b|(?:is|are|was|were|has|does)"
    r"(?:n['’]t\b|\s(?:\w+ly\s|been\s)?(?:not|wrong|incorrect|false|impossible|ruled\sout)\b))"
)

# --- ranges of seconds ---

# Digits are matched possessively ("++"): with thousands of digits, backtracking would take forever.
# The commas of "1,000 to 1,200" group thousands. That of "[10,200]" parts two times.
_NUMBER = r"(?<![\d.:])(?:(?:[1-9]\d?,\d{3}(?!\d)|\d++)(?:\.\d*+)?|\.\d++)"
_TIME = rf"(?:(?<![\d.:])(?:\d++:)?\d++:[0-5]?\d(?:\.\d++)?|{_NUMBER})(?![\d:]|\.\d)"
_SECONDS = r"(?:\s*(?:s|secs?|seconds?)(?![A-Za-z])\.?)?"
_HEDGE = r"(?:(?:about|around|approximately|roughly|second|at|the)\s+|t\s?=\s?|~\s*)*"
_JOINT = r"(?:[-=]{1,2}>|[\-–—~→,;]|,?\s*\b(?:to|until|till|through|and)\b)"
_SIGN = r"(?<![\w.:)\]-])-"  # a minus sign; after a time it would be a dash between two times
_OTHER_UNIT = r"\s*(?:%|(?:ms|milliseconds?|frames?|percent|days?)\b)|['’′]\d"
_RANGE = re.compile(
    rf"(?P<start>(?:{_SIGN})?{_TIME}){_SECONDS}\s*{_JOINT}\s*{_HEDGE}"
    rf"(?P<end>-?{_TIME})(?!{_OTHER_UNIT})",
    re.IGNORECASE,
)
# What may come between a label and its time: "starts at 73 s", "end_time": "02:10".
_BETWEEN = (
    r"(?:[\s:=_~≈]|"
    r"(?:is|was|at|in|on|time|timestamp|around|about|the|seconds?)(?![A-Za-z])){0,12}"
)
_START, _END = (
    re.compile(
        rf"(?<![A-Za-z])(?:{label}){_BETWEEN}(?P<time>-?{_TIME})(?!{_OTHER_UNIT})", re.IGNORECASE
    )
    for label in (
        r"start(?:s|ed|ing)?|begin(?:s|ning)?|began",
        r"end(?:s|ed|ing)?|finish(?:es|ed|ing)?|stop(?:s|ped|ping)?"
        r"|until|till|continu(?:es|ed|ing)\s+(?:on\s+)?to",
    )
)
# "<73.0 seconds>" is a frame's timestamp, "**73**" is Markdown, "73" a string; "->" joins times.
_AROUND = re.compile(r"[<*`()\"“”]|(?<![-=])>|(?<!\d)['‘’]|['’](?!\d)")
_HOUR = r"(?:hours?|hrs?|h)(?![A-Za-z])"
_MINUTE = r"(?:minutes?|mins?|m)(?![A-Za-z])"
# In "1 to 2 minutes" the unit belongs to both times.
_SHARED_UNIT = re.compile(
    rf"({_NUMBER})(?=\s*{_JOINT}\s*{_NUMBER}\s*({_HOUR}|{_MINUTE}))", re.IGNORECASE
)
_AND = r"\s*,?\s*(?:and\s+)?"
_DURATION = re.compile(
    rf"(?<![\d.:])(?=[\d.]++\s*(?:{_HOUR}|{_MINUTE}))(?:({_NUMBER})\s*{_HOUR})?"
    rf"(?:(?:{_AND})({_NUMBER})\s*{_MINUTE})?"
    rf"(?:{_AND}({_NUMBER})(?!\.?\d|\s*[hm]){_SECONDS})?",
    re.IGNORECASE,
)


def normalise(text: str) -> str:
    """Reduce a text to lower case, without punctuation, articles and repeated spaces.

    Articles stay if nothing else is left, so that the answer "A" keeps its word.
    """
    words = _PUNCTUATION.sub("", unicodedata.normalize("NFKC", text).lower()).split()
    without_articles = [word for word in words if word not in _ARTICLES]
    return " ".join(without_articles or words)


def exact_match(prediction: str, answer: str) -> bool:
    """Return whether two texts are equal after `normalise`, and not empty."""
    return normalise(prediction) == normalise(answer) != ""


def token_f1(prediction: str, answer: str) -> float:
    """Return F1 over the words of two texts.

    A shared word counts once, however often it occurs; the lengths count all words.
    """
    predicted = normalise(prediction).split()
    right = normalise(answer).split()
    shared = len(set(predicted) & set(right))
    return 2 * shared / (len(predicted) + len(right)) if shared else 0.0


def _plain(text: str) -> str:
    """Return the text without Markdown, LaTeX and repeated spaces.

    "\\boxed{B}" becomes "answer: B".
    """
    text = _FONT.sub(r"\1", unicodedata.normalize("NFKC", text))
    text = _DRESS.sub("", _BOXED.sub(r" answer: \1 ", text))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return "\n".join(line for line in lines if line)


def _split_mark(text: str, mark: re.Pattern[str] = _MARK) -> tuple[str, str]:
    """Split "B. two cats" into its letter, in upper case ("" if there is none), and its words."""
    match = mark.match(text)
    return (match[1].upper(), text[match.end() :]) if match else ("", text)


def _same(text: str, words: str) -> bool:
    """Return whether two texts have the same words and the same letter, or none, before them.

    The letters are compared because `normalise` takes the letter of "A. Bananas" for an article.
    """
    return exact_match(text, words) and _split_mark(text)[0] == _split_mark(words)[0]


def _denied(text: str, start: int, end: int) -> bool:
    """Return whether a negation comes before `start` or after `end`: "not B", "B is wrong"."""
    before = _DENIAL.search(text, max(0, start - _DENIAL_LENGTH), start)
    return bool(before or _DENIED.match(text, end))


def _letters(text: str) -> set[str]:
    """Return the letters that a text names as options, minus the letters that it denies."""
    alone = _BARE_LETTER.fullmatch(text)
    if alone:
        return {alone[1].upper()}
    letter, rest = _split_mark(text)
    second = _BARE_LETTER.fullmatch(rest) if letter else None  # "A. B.", "A.B"
    if second:
        return {letter, second[1].upper()}

    conclusion, *others = (form.pattern for form in NAMED)
    matches = list(conclusion.finditer(text))
    concluded = max((m.start(1) for m in matches if not _denied(text, *m.span(1))), default=0)
    # Options that are only mentioned on the way to a conclusion do not count.
    matches += [match for pattern in others for match in pattern.finditer(text, concluded)]
    marks = list(_LINE_MARK.finditer(text))
    if len(marks) == 1 or not concluded:
        matches += marks
    if leading := _LEADING.match(text):
        matches.append(leading)
    named: set[str] = set()
    denied: set[str] = set()
    for match in matches:
        letters = re.findall(r"\b[A-Z]\b", match[1].upper())
        (denied if _denied(text, *match.span(1)) else named).update(letters)
    chosen = named - denied
    # "A. a dog or B. a cat"
    return chosen and chosen.union(_ALTERNATIVE.findall(text))


def _by_words(text: str, options: Mapping[str, str]) -> set[str]:
    """Return the letters of the options whose words equal a text, and any letter before these
    words.

    If "two cats" is option C, "B. two cats" names both B and C.
    """
    letters: set[str] = set()
    for letter, rest in (("", text), _split_mark(text), _split_mark(text, _LOOSE_MARK)):
        matching = {label for label, words in options.items() if _same(rest, words)}
        letters |= matching
        if matching and letter:
            letters.add(letter)
    return letters


def _statements(text: str) -> list[str]:
    """Return the whole text, and the part after its last "the answer is" that is not denied."""
    ends = [match.end() for match in _SAID.finditer(text)]
    affirmed = [end for end in ends if not _denied(text, end, end)]
    return [text, *(text[end:] for end in affirmed[-1:])]


def chosen_option(text: str, options: Sequence[str] = ()) -> str | None:
    """Return the letter of the one option that an answer names.

    These name an option: a letter alone, "(B)", "B. a dog", "Option B", "the answer is B",
    "It is B", "B because", "\\boxed{B}"; and an option's words, alone, after its letter or after
    "the answer is". An article ("A dog runs") is not a letter.

    Args:
        text: The answer.
        options: The options, with or without letters of their own. If given, other letters do not
            count.

    Returns:
        The letter in upper case; None if the answer names no option, or several.
    """
    words: dict[str, str] = {}  # the options by letter, without a letter of their own
    for label, option in zip(_LABELS, map(_plain, options), strict=False):
        letter, rest = _split_mark(option)
        words[label] = rest if letter == label else option
    # After "no wait" and the like, only the rest of the text counts, if it names an option.
    retractions = list(_RETRACTION.finditer(text))
    letters = _named_options(text[retractions[-1].end() :], words) if retractions else set()
    letters = letters or _named_options(text, words)
    return letters.pop() if len(letters) == 1 else None


def _named_options(text: str, words: Mapping[str, str]) -> set[str]:
    """Return the letters of all options that a text names.

    Args:
        text: The text.
        words: The options by letter; if empty, every letter counts.
    """
    # A letter alone on its line names an option, whatever the other lines say.
    alone = [_BARE_LETTER.fullmatch(line) for line in text.splitlines()]
    lone = {match[1].upper() for match in alone if match}
    text = _plain(text)
    # The words of an option may contain letters ("the letter B"), so compare the whole text first.
    equal = [label for label in words if words[label].casefold() == text.casefold()]
    if len(equal) == 1:
        return set(equal)
    text = _SMALL_LETTER.sub(lambda named: named[0][:-1] + named[0][-1].upper(), text)
    letters = _letters(text) | lone
    if words:
        letters &= words.keys()
        statements = [*_statements(text), *(_OR.split(text) if letters else ())]
        letters = letters.union(*(_by_words(statement, words) for statement in statements))
    return letters


def choice_accuracy(prediction: str, answer: str, options: Sequence[str] = ()) -> float:
    """Return 1 if an answer names the right option, by letter or words, and no other option; else
    0."""
    if prediction == answer and normalise(answer):
        return 1.0
    right = _plain(answer)
    # A right answer like "the A" is a letter. Compared as words, it would be an article.
    is_letter = _BARE_LETTER.fullmatch(right)
    if not is_letter and any(_same(words, right) for words in _statements(_plain(prediction))):
        return 1.0
    wanted = chosen_option(answer, options)
    return float(wanted is not None and chosen_option(prediction, options) == wanted)


def _seconds(text: str) -> float:
    """Return the seconds of "73.5", "1,073.5", "1:13.5" or "-1:00:13"."""
    total = 0.0
    for digits in text.removeprefix("-").replace(",", "").split(":"):
        total = total * 60 + float(digits)
    return -total if text.startswith("-") else total


def read_range(text: str) -> tuple[float, float] | None:
    """Read the range that a text names, in seconds; None if there is none.

    The range is the first pair of joined times: "[10, 20]", "10 - 20", "from 10 to 20 s", "[00:10,
    00:20]", "<10.0 seconds> - <20.0 seconds>", "1 min to 2 min". If there is none, it is a labelled
    start and end: "starts at 10 s and ends at 20 s", {"start": 10, "end": 20}.
    """
    text = unicodedata.normalize("NFKC", text)
    text = _DRESS.sub("", _BOXED.sub(r" \1 ", _FONT.sub(r"\1", text)))
    text = " ".join(_AROUND.sub(" ", text).split())
    text = _DURATION.sub(_in_seconds, _SHARED_UNIT.sub(r"\1 \2", text))
    joined, start, end = (form.search(text) for form in (_RANGE, _START, _END))
    # The comma of "starts at 1,200 s" parts no times.
    if start and end and (not joined or "," in start["time"] + end["time"]):
        return _seconds(start["time"]), _seconds(end["time"])
    return (_seconds(joined["start"]), _seconds(joined["end"])) if joined else None


def _in_seconds(time: re.Match[str]) -> str:
    hours, minutes, seconds = (_seconds(digits or "0") for digits in time.groups())
    return f"{3600 * hours + 60 * minutes + seconds:.3f} s "


def overlap(first: tuple[float, float], second: tuple[float, float]) -> float:
    """Return the intersection over union of two ranges; 0 if one is reversed or empty."""
    if first[0] >= first[1] or second[0] >= second[1]:
        return 0.0
    intersection = min(first[1], second[1]) - max(first[0], second[0])
    union = max(first[1], second[1]) - min(first[0], second[0])
    return intersection / union if intersection > 0 else 0.0


def grounding_accuracy(prediction: str, answer: str) -> float:
    """Return the intersection over union of two ranges of seconds.

    1 for the answer's own words; 0 if a range is unreadable, reversed or empty.
    """
    if exact_match(prediction, answer):
        return 1.0
    predicted = read_range(prediction)
    right = read_range(answer)
    if predicted is None or right is None:
        return 0.0
    return overlap(predicted, right)


def open_answer(text: str) -> str:
    """Return an open-ended answer without the dress around it: Markdown, LaTeX, JSON, "The answer
    is"."""
    plain = " ".join(_plain(text).split())
    labelled = _LABELLED_ANSWER.fullmatch(plain)
    return labelled[1] if labelled else plain


def accuracy(question: Question, prediction: str | None) -> float:
    """Return R_acc of an answer, in [0, 1].

    Args:
        question: The question with the right answer.
        prediction: The answer's text; None, for no answer, scores 0.
    """
    if prediction is None:
        return 0.0
    if question.kind is QuestionKind.MULTIPLE_CHOICE:
        return choice_accuracy(prediction, question.answer, question.options)
    if question.kind is QuestionKind.TEMPORAL_GROUNDING:
        return grounding_accuracy(prediction, question.answer)
    answer = open_answer(prediction)
    if exact_match(prediction, question.answer) or exact_match(answer, question.answer):
        return 1.0
    return token_f1(answer, question.answer)


class Rules:
    """Scores answers by the rules of this module; a `Judge` without a model."""

    def scores(self, items: Sequence[tuple[Question, str | None]]) -> list[float]:
        """Return R_acc of each answer, in [0, 1]; 0 for None."""
        return [accuracy(question, answer) for question, answer in items]

    def metrics(self) -> dict[str, float]:
        """Return nothing: rules count nothing."""
        return {}


def is_read(question: Question, prediction: str) -> bool:
    """Return whether an answer names one option or a range; any open-ended answer is readable."""
    if question.kind is QuestionKind.TEMPORAL_GROUNDING:
        return read_range(prediction) is not None or exact_match(prediction, question.answer)
    if question.kind is QuestionKind.MULTIPLE_CHOICE:
        named = chosen_option(prediction, question.options) is not None
        return named or choice_accuracy(prediction, question.answer, question.options) > 0
    return True
