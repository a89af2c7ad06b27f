"""Is the answer right: multiple choice, temporal grounding, open-ended.

Owns R_acc. Refuses to be lenient where leniency pays for guessing: an answer that names two options, or no readable range,
earns nothing. Invariant: every score lies in [0, 1], and the answer's own words always score 1 (REFERENCE 3; the mends of
REFERENCE 4, point 12, are here).
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Literal

from paravt_jax.method.records import Question, QuestionKind

# Commas that group thousands go; the point of a decimal and the sign of a number stay: "1.5" is not "15", ".5" not "5", "-5" not "5".
_PUNCTUATION = re.compile(
    r"(?<=\d),(?=\d{3}(?!\d))|(?!(?<![^\W\d])(?<!\.)\.(?=\d))(?!(?<!\w)-(?=\.?\d))[^\w\s]"
)
_ARTICLES = frozenset(("a", "an", "the"))

_LABELS = string.ascii_uppercase
# An option's letter. "A" and "I" are words where another word follows: "A man", "I see".
_WORD_AFTER = r"\s+(?!(?:and|or|because|since|as|but|is|are)\b)\w"
_LETTER = rf"(?:[B-HJ-Z]|[AI](?!{_WORD_AFTER}))(?![\w+#]|['’.-]\w)"
_OPENING = r"[(\[\"'“‘]?"
_PERHAPS = (
    r"\b(?i:(?:but\s+)?"
    r"(?:or|maybe|perhaps|possibly|probably|it\s+(?:could|might|may)\s+(?:also\s+)?be))\b"
)
_JOIN = rf"(?::(?=[A-Z])|(?:\s*(?:[,/&]|[.?!]?\s*\(?(?:\b(?:and|nor)\b|{_PERHAPS})))++\s*)"
_MORE = rf"(?:{_JOIN}{_OPENING}{_LETTER}[)\]]?)"  # "B, C and D", "B, or maybe C", "B:C"
_LIST = rf"{_LETTER}[)\]]?{_MORE}*"
_SINGLE = re.compile(rf"(?<!\w){_LETTER}")
_BARE_LETTER = re.compile(r"\W*(?:(?i:the)\s+)?([A-Za-z])\W*")
# A letter in front of an option's words: "(B) two cats", "b. two cats", "B - two cats".
_MARK = re.compile(r"\s*(?:\(([A-Za-z])\)|\[([A-Za-z])\]|([A-Za-z])[.):,]|([A-Z])\s+[-–—])")
_LOOSE_MARK = re.compile(r"\s*([B-Zb-z])\s+")  # "B two cats"; "A" is an article there
_ANSWER = r"(?:\b(?i:answer|option|choice)(?:(?i:\s+is)\b)?|答案[是为]?)\s*:?\s*"
_IT_IS = r"\b(?i:it|that|this)(?i:\s+is\b|['’]s\b)[:,]?\s*"
_CHOICE = (
    r"\b(?i:(?:must|should|would)\s+be|choose|pick|select|go\s+with|therefore|thus|hence|so)\b"
)
_SAID = re.compile(rf"\b(?i:answer|option|choice)(?:(?i:\s+is)\b|\s*:)[\s:]*|{_IT_IS}")
_NAMED = (
    re.compile(rf"{_ANSWER}{_OPENING}({_LIST})"),
    # After words that often stand before others, a letter has to end its clause.
    re.compile(
        rf"(?:{_IT_IS}|{_CHOICE}[:,]?\s*|选\s*){_OPENING}({_LIST})"
        rf"(?!(?:\W{{0,3}}{_PERHAPS})++\W{{0,3}}{_LETTER})"  # another letter, in a longer clause
        r"(?=\W*$|\s*[.,;:!?\])\"'”’]|\s+(?:because|since|as|but)\b)"
    ),
    re.compile(rf"\(([A-Z]\){_MORE}*)"),
)
_FURTHER = re.compile(_MORE)
_LEADING = re.compile(
    rf"{_OPENING}(?:({_LETTER}{_MORE}+)|({_LETTER})"
    r"\s+(?:because|since|due\s+to|is\s+(?:the\s+)?(?:answer|best|correct|right))\b)"
)
_NO = (
    r"(?:not|never|neither|nor|no|cannot|unlikely|except|unlike"
    r"|(?:instead|rather|other)\s(?:of|than)"
    r"|(?:ca|wo|do|does|did|is|was|would|should|could|must)n['’]?t"
    r"|(?:wrong|incorrect)\s(?:answers?|options?|choices?|to)"
    r"|(?:rul(?:e|es|ed|ing)\sout|(?:exclud|eliminat)(?:e|es|ed|ing)|reject(?:s|ed|ing)?))"
)
# Between a negation and its letter only these words stand: "he does not speak (B)" chooses B.
_CHOOSING = (
    r"(?:a|an|any|the|that|this|it|is|be|to|for|with|if|whether|my|both|either|only"
    r"|would|should|must|think|believe|say|go|going|take|choose|choosing|pick|picking"
    r"|select|selecting|answers?|options?|choices?|correct|right|best|final|likely|reason|way)"
)
_DENIAL = re.compile(
    rf"(?:\b{_NO}\b(?: {_CHOOSING}\b){{0,8}}|[不别非](?:应该?|能|会|要|是|选择?)*)"
    rf"[ :]*{_OPENING}$",
    re.IGNORECASE,
)
_DENIAL_LENGTH = 100  # characters; what stands further in front of a letter is about something else
_DENIED = re.compile(
    r"[)\]\"'”’]*\s*\b(?:cannot|can['’]?t|"
    r"(?:is|are|was|were|has|does|do|did|can|could|would|should|must|seems|looks)"
    r"(?:n['’]?t|\s(?:\w+ly\s)?(?:be(?:en)?\s)?"
    r"(?:not|never|wrong|incorrect|false|impossible|unlikely|ruled\sout|excluded|eliminated)))\b"
)
_FONT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\s*\{([^{}]*)\}")
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_DRESS = re.compile(r"[*`$]|\\(?=[()\[\]])")  # of Markdown and LaTeX, around a letter or a word

# Digits are taken whole ("++"): text that a model wrote may hold thousands of them.
_NUMBER = r"(?<![\d.:])(?:\d++(?:\.\d*+)?|\.\d++)"
_TIME = rf"(?:(?<![\d.:])(?:\d++:)?\d++:[0-5]?\d(?:\.\d++)?|{_NUMBER})(?![\d:]|\.\d)"
_SECOND = r"(?:(?:s|secs?|seconds?)(?![A-Za-z])\.?|秒)"
_SECONDS = rf"(?:\s*{_SECOND})?"
_HEDGE = r"(?:(?:about|around|approximately|roughly|second|at|the)\s+|~\s*|第)?"
_TO = r"(?:[-=]{1,2}>|[\-–—~→到至]|,?\s*\b(?:to|until|till|through)\b)"
_JOINT = rf"(?:{_TO}|[,;]|,?\s*\band\b)"
_SIGN = r"(?<![\w.:)\]-])-"  # a minus with nothing before it; elsewhere it is a dash between times
# What would make a time the rest of another one: "1 h 2 to", "1'13 to".
_WHOLE = r"(?<!\d s )(?<!\d['’′])"
_OTHER_UNIT = r"\s*(?:%|(?:ms|milliseconds?|frames?|percent|days?)\b)|['’′]\d"
_RANGE = re.compile(
    rf"{_WHOLE}(?P<start>(?:{_SIGN})?{_TIME}){_SECONDS}\s*{_JOINT}\s*{_HEDGE}"
    rf"(?P<end>-?{_TIME})(?!{_OTHER_UNIT})",
    re.IGNORECASE,
)
# Commas group thousands where a number is joined to another time; "[100,200]" is a range.
_GROUPED = r"(?<![\d.:,])[1-9]\d{0,2}(?:,\d{3})++(?:\.\d++)?(?![\d:]|[.,]\d)"
_THOUSANDS = re.compile(
    rf"(?P<between>\bbetween\s+)?(?P<start>{_GROUPED}|{_TIME})"
    rf"(?P<joint>{_SECONDS}\s*(?:{_TO}|,\s|(?(between)\band\b|(?!)))\s*{_HEDGE})"
    rf"(?P<end>{_GROUPED}|{_TIME})",
    re.IGNORECASE,
)
# "73,5 to 130,2" is neither a range from 73 to 5 nor one from 5 to 130.
_UNCLEAR = re.compile(
    rf"(?<![\d.:])\d++,\d++{_SECONDS}\s*{_TO}\s*{_HEDGE}[\d.:,]++",
    re.IGNORECASE,
)
_MILLISECONDS = re.compile(r"(?<=:[0-5]\d),(?=\d{3}(?![\d:.]))")  # "00:01:13,500", of subtitles
_QUOTED = re.compile(r"(?<!\d)[\"'“‘]([\d:.,]+(?: ?s(?:ec(?:ond)?s?)?)?)[\"'”’](?!\d)")
# "starts at 73 s", "end_time": "02:10": words and signs that stand between a label and its time.
_BETWEEN = (
    r"(?:[\s:=\"'_~≈]|"
    r"(?:is|was|at|in|on|time|timestamp|around|about|the|seconds?)(?![A-Za-z])){0,12}"
)
_LABELLED = tuple(
    re.compile(
        rf"(?<![A-Za-z])(?:{label}){_BETWEEN}(?P<time>{_GROUPED}|-?{_TIME})(?!{_OTHER_UNIT})",
        re.IGNORECASE,
    )
    for label in (
        r"start(?:s|ed|ing)?|begin(?:s|ning)?|began",
        r"end(?:s|ed|ing)?|finish(?:es|ed|ing)?|stop(?:s|ped|ping)?",
    )
)
# "<73.0 seconds>" is how frames are labelled, and "**73**" is Markdown; "->" joins two times.
_AROUND = re.compile(r"[<*`]|(?<![-=])>")
_HOUR = r"(?:(?:hours?|hrs?|h)(?![A-Za-z])\.?|小时)"
_MINUTE = r"(?:(?:minutes?|mins?)(?![A-Za-z])\.?|分钟?)"
# "1 to 2 minutes": the unit is that of both. In "1 min 13 to 2 min 10" it is not.
_UNITS = ("h", "hr", "hrs", "hour", "hours", "m", "min", "mins", "minute", "minutes")
_NO_UNIT_BEFORE = "".join(f"(?<!{unit} )" for unit in _UNITS)
_BOTH = tuple(
    (
        re.compile(
            rf"{_NO_UNIT_BEFORE}(?<![A-Za-z分钟时])"
            rf"({_NUMBER})(\s*{_JOINT}\s*)({_NUMBER})\s*{unit}",
            re.IGNORECASE,
        ),
        rf"\1 {name}\2\3 {name}",
    )
    for unit, name in ((_HOUR, "hour"), (_MINUTE, "min"))
)
_AND = r"\s*,?\s*(?:and\s+)?"
_HOURS = re.compile(
    rf"({_NUMBER})\s*{_HOUR}(?:{_AND}({_NUMBER})\s*(?:{_MINUTE}|m(?![A-Za-z])))?"
    rf"(?:{_AND}({_NUMBER})\s*{_SECOND})?",
    re.IGNORECASE,
)
_MINUTES = re.compile(
    rf"()({_NUMBER})\s*(?:{_MINUTE}|m(?=\s?\d))"
    rf"(?:\s*(?:,\s*(?=[0-5]?\d(?:\.\d+)?\s*{_SECOND}))?(?:and\s+)?"
    rf"({_NUMBER})(?!\.?\d){_SECONDS}(?!\s*(?:{_HOUR}|{_MINUTE})))?",
    re.IGNORECASE,
)


def normalise(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces. Articles stay where nothing else would be left: option "A" is a word."""
    words = _PUNCTUATION.sub("", unicodedata.normalize("NFKC", text).lower()).split()
    return " ".join([word for word in words if word not in _ARTICLES] or words)


def exact_match(prediction: str, answer: str) -> bool:
    """Equal after `normalise`, and not both nothing."""
    return normalise(prediction) == normalise(answer) != ""


def token_f1(prediction: str, answer: str) -> float:
    """F1 of the words of two texts: the shared kinds of words over each text's length (REFERENCE 3)."""
    p, a = normalise(prediction).split(), normalise(answer).split()
    shared = len(set(p) & set(a))
    return 2 * shared / (len(p) + len(a)) if shared else 0.0


def _plain(text: str) -> str:
    """Lines with single spaces, without Markdown and LaTeX; a boxed value is the answer."""
    text = _FONT.sub(r"\1", unicodedata.normalize("NFKC", text))
    text = _DRESS.sub("", _BOXED.sub(r" answer: \1 ", text))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return "\n".join(line for line in lines if line)


def _split_mark(text: str, mark: re.Pattern[str] = _MARK) -> tuple[str, str]:
    """The letter in front of an option's words ("" for none), upper case, and the words."""
    found = mark.match(text)
    if not found:
        return "", text
    return next(group for group in found.groups() if group).upper(), text[found.end() :]


def _same(text: str, words: str) -> bool:
    """Whether two texts have the same words, and the same letter or none in front of them.

    Without the letters "A. Bananas" would be "bananas": its letter is an article to `normalise`.
    """
    return exact_match(text, words) and _split_mark(text)[0] == _split_mark(words)[0]


def _denied(text: str, start: int, end: int) -> bool:
    """Whether a negation stands before `start` or after `end`: "not B", "B is wrong"."""
    before = _DENIAL.search(text, max(0, start - _DENIAL_LENGTH), start)
    return bool(before or _DENIED.match(text, end))


def _letters(text: str) -> set[str]:
    """The letters that a text names as options, without those that it denies."""
    if alone := _BARE_LETTER.fullmatch(text):
        return {alone[1].upper()}
    letter, rest = _split_mark(text)
    if letter and (another := _BARE_LETTER.fullmatch(rest)):  # "A. B.", "A.B"
        return {letter, another[1].upper()}
    named: set[str] = set()
    denied: set[str] = set()
    if letter and not rest[:1].isalnum():
        (denied if _DENIED.match(rest) else named).add(letter)
        if further := _FURTHER.match(rest):
            named.update(_SINGLE.findall(further[0]))
    found = [match for form in _NAMED for match in form.finditer(text)]
    if leading := _LEADING.match(text):
        found.append(leading)
    for match in found:
        start, end = match.span(match.lastindex or 0)
        letters = _SINGLE.findall(text[start:end])
        (denied if _denied(text, start, end) else named).update(letters)
    return named - denied


def _by_words(text: str, options: Mapping[str, str]) -> set[str]:
    """The letters of the options whose words a text is, with the letter in front of them if any."""
    letters: set[str] = set()
    for letter, rest in (("", text), _split_mark(text), _split_mark(text, _LOOSE_MARK)):
        found = {label for label, words in options.items() if _same(rest, words)}
        letters |= found | ({letter} if found and letter else set())
    return letters


def _statements(text: str) -> list[str]:
    """The whole text, and what follows the last "the answer is" in it that is not denied."""
    said = [match.end() for match in _SAID.finditer(text)]
    held = [end for end in said if not _denied(text, end, end)]
    return [text, *(text[end:] for end in held[-1:])]


def chosen_option(text: str, options: Sequence[str] = ()) -> str | None:
    """The letter, upper case, of the one option that an answer names; None for none or several.

    Read: a letter alone, "(B)", "B. a dog", "Option B", "the answer is B", "It is B", "B because",
    "\\boxed{B}"; and an option's words, alone, after its letter or after "the answer is". A letter
    that none of `options` has is none. An article ("A dog runs") is no letter.
    """
    lone = [_SINGLE.findall(line) for line in text.splitlines() if _BARE_LETTER.fullmatch(line)]
    text = _plain(text)
    words: dict[str, str] = {}  # of each option, without its own letter
    for label, option in zip(_LABELS, map(_plain, options), strict=False):
        letter, rest = _split_mark(option)
        words[label] = rest if letter == label else option
    exactly = [label for label in words if words[label].casefold() == text.casefold()]
    if len(exactly) == 1:
        return exactly[0]
    letters = _letters(text).union(*lone)
    if options:
        letters &= words.keys()
        letters = letters.union(*(_by_words(part, words) for part in _statements(text)))
    return letters.pop() if len(letters) == 1 else None


def choice_accuracy(prediction: str, answer: str, options: Sequence[str] = ()) -> float:
    """1 where a multiple-choice answer names the right option, by letter or by its words, and no other; else 0."""
    if prediction == answer and normalise(answer):
        return 1.0
    right = _plain(answer)
    letter = _BARE_LETTER.fullmatch(right)  # read as a letter: "the A" is no article alone
    if not letter and any(_same(part, right) for part in _statements(_plain(prediction))):
        return 1.0
    wanted = chosen_option(answer, options)
    return float(wanted is not None and chosen_option(prediction, options) == wanted)


def _seconds(text: str) -> float:
    sign, text = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    total = 0.0
    for part in text.replace(",", "").split(":"):
        total = total * 60 + float(part)
    return sign * total


def read_range(text: str) -> tuple[float, float] | None:
    """The range of seconds that a text names; None where there is none.

    The first two times that something joins: "[10, 20]", "10 - 20", "from 10 to 20 s", "[00:10,
    00:20]", "<10.0 seconds> - <20.0 seconds>", "从10秒到20秒", "1 min to 2 min", "1,000 to 1,200".
    Else a start and an end that are called so: "starts at 10 s and ends at 20 s", {"start": 10,
    "end": 20}. A time that can only be read in part is not read.
    """
    text = " ".join(_AROUND.sub(" ", unicodedata.normalize("NFKC", text)).split())
    text = _MILLISECONDS.sub(".", _QUOTED.sub(r" \1 ", text))
    text = _UNCLEAR.sub("?", _THOUSANDS.sub(_without_commas, text))
    for both, with_units in _BOTH:
        text = both.sub(with_units, text)
    text = _MINUTES.sub(_in_seconds, _HOURS.sub(_in_seconds, text))
    start, end = (label.search(text) for label in _LABELLED)
    labelled = (_seconds(start["time"]), _seconds(end["time"])) if start and end else None
    if start and end and "," in start["time"] + end["time"]:  # else "starts at 1,200 s" is a range
        return labelled
    if found := _RANGE.search(text):
        return _seconds(found["start"]), _seconds(found["end"])
    return labelled


def _without_commas(times: re.Match[str]) -> str:
    start, end = (times[name].replace(",", "") for name in ("start", "end"))
    return f"{times['between'] or ''}{start}{times['joint']}{end}"


def _in_seconds(time: re.Match[str]) -> str:
    hours, minutes, seconds = (float(part or 0) for part in time.groups())
    return f"{3600 * hours + 60 * minutes + seconds:.3f} s"


def grounding_accuracy(prediction: str, answer: str) -> float:
    """Intersection over union of two ranges of seconds; 0 where one is unreadable, reversed or empty, 1 for the answer's own words."""
    if exact_match(prediction, answer):
        return 1.0
    p, a = read_range(prediction), read_range(answer)
    if p is None or a is None or p[0] >= p[1] or a[0] >= a[1]:
        return 0.0
    inter = min(p[1], a[1]) - max(p[0], a[0])
    return max(inter, 0.0) / (max(p[1], a[1]) - min(p[0], a[0])) if inter > 0 else 0.0


def accuracy(
    question: Question, prediction: str | None, open_ended: Literal["f1", "exact"] = "f1"
) -> float:
    """R_acc in [0, 1] of an answer's text; no answer scores 0."""
    if prediction is None:
        return 0.0
    if question.kind is QuestionKind.MULTIPLE_CHOICE:
        return choice_accuracy(prediction, question.answer, question.options)
    if question.kind is QuestionKind.TEMPORAL_GROUNDING:
        return grounding_accuracy(prediction, question.answer)
    if exact_match(prediction, question.answer):
        return 1.0
    return token_f1(prediction, question.answer) if open_ended == "f1" else 0.0


def is_read(question: Question, prediction: str) -> bool:
    """Whether an answer names one option, or a range of seconds; any words do where it is open-ended."""
    if question.kind is QuestionKind.TEMPORAL_GROUNDING:
        return read_range(prediction) is not None or exact_match(prediction, question.answer)
    if question.kind is QuestionKind.MULTIPLE_CHOICE:
        named = chosen_option(prediction, question.options) is not None
        return named or choice_accuracy(prediction, question.answer, question.options) > 0
    return True
