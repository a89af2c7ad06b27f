"""R_acc: scores answers to multiple-choice, temporal-grounding and open-ended questions.

Many forms of answers are read ("(B)", "the answer is B", "from 0:10 to 0:20"). An answer that names
two options, or no readable range, earns 0; any other score would reward guessing. Scores are in
[0, 1], and the right answer's own words always score 1. The rules are the published ones without
their mistakes (docs/reference.md, 3; 4, point 12).

Answers are read by tables of `Reading`: a pattern, what it means, and an example that is read only
with this line. `chosen_option` reads letters of options with `REWRITTEN`, `NAMED`, `MENTIONED` and
`WEAK`; `read_range` reads seconds with `TIMES`. To read another form, add a line.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paravt_jax.method.records import Question, QuestionKind


class Reading(NamedTuple):
    """A line of a table: one way of writing an answer."""

    pattern: re.Pattern[str]
    example: str
    """An answer that would be read in another way without this line."""
    meaning: str = "the last group names options"
    """The text that replaces what matches, if it is to be rewritten."""
    read: str | tuple[float, float] | None = "B"
    """What is read in the example."""


# --- words ---

# Commas that group thousands are removed. Decimal points and minus signs stay: "1.5" is not "15",
# ".5" is not "5", and "-5" is not "5".
_PUNCTUATION = re.compile(
    r"(?<=\d),(?=\d{3}(?!\d))|(?!(?<![^\W\d])(?<!\.)\.(?=\d))(?!(?<!\w)-(?=\.?\d))[^\w\s]"
)
_ARTICLES = frozenset(("a", "an", "the"))

# --- letters of options ---

_LABELS = string.ascii_uppercase
# An option's letter. "A" and "I" before another word are not letters: "A man", "I see".
_WORD_AFTER = r"[^\S\n]+(?!(?:and|or|because|since|as|but|is|are|seems|appears)\b)\w"
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
# A letter before an option's words: "(B) two cats", "b. two cats", "B - two cats".
_MARK = re.compile(r"\s*(?:\(([A-Za-z])\)|\[([A-Za-z])\]|([A-Za-z])[.):,]|([A-Z])\s+[-–—])")
_LOOSE_MARK = re.compile(r"\s*([B-Zb-z])\s+")  # "B two cats"; "A two" would be an article
# Phrases that name an option, and the phrase that stands for all of them below.
_ADVERB = r"(?:also|clearly|definitely|indeed|letter|likely|most|probably|therefore|thus)"
_STATED = r"\b(answer|option|choice)"
# The example of a line, what its pattern is rewritten to, and the pattern.
_PHRASES = (
    ("answer => B", r"\1: ", rf"{_STATED}[\"']?\s*(?:[:=→]+>?|[-–—]+>?\s)\s*(?=[\"'(\[]?\w)"),
    ("My guess is B.", "answer:", r"\b(?:ans|final|guess|output|result)(?:\s*:|\s+is\b)"),
    ("The correct letter is B", "answer is", r"\bletter\s+is\b"),
    (
        "The answer to the question is B.",
        r"\1 is",
        rf"{_STATED}\s+(?:here|to\s+th(?:e|is)\s+question)\s+is\b",
    ),
    (
        "The answer seems to be clearly B.",
        r"\1 is",
        r"\b(answer|option|choice|it|this|that)\s+(?:is|(?:seems|appears)\s+to\s+be)"
        rf"((?:\s+{_ADVERB})*)\b",
    ),
    ("B选项", r"option \1: ", r"(?<![a-z])([a-z])\s*(?:选项|、)"),
    ("答案：B", "answer: ", r"(?:最终|正确)?(?:答案|选项)\s*(?:选项|[是为])*\s*:?"),
    ("选项B是正确的。", r"\1;", r"(?<![a-z])([a-z])(?=[\u4e00-\u9fff])"),
)
REWRITTEN = (
    Reading(re.compile(r"\bn/a\b", re.IGNORECASE), "N/A", "none", read=None),
    *(
        Reading(re.compile(pattern, re.IGNORECASE), example, plain)
        for example, plain, pattern in _PHRASES
    ),
)
# "the answer is b" at the end of a text
_SMALL_LETTER = re.compile(
    r"\b(?:answer|option|choice)(?:\s+is|:)?\s+\(?[a-z]\)?(?=[.;]?\s*$)", re.IGNORECASE
)
_ANSWER = r"\b(?i:answer)(?:(?i:\s+is)\b)?\s*:?\s*|\b(?i:option|choice)(?i:\s+is\b|\s*:)\s*"
_IT_IS = r"\b(?i:it|that|this)(?i:\s+is\b|['’]s\b)[:,]?\s*"
_CHOICE = (
    r"\b(?i:(?:must|should|would)\s+be|choose|pick|select|go\s+with|therefore|thus|hence|so|say"
    r"|guess|points?\s+to|i\.e\.|likely|probably|maybe|perhaps|but)\b"
)
_SAID = re.compile(rf"\b(?i:answer|option|choice)(?:(?i:\s+is)\b|\s*:)[\s:]*|{_IT_IS}")
_CONCLUSION = re.compile(rf"(?:{_ANSWER}){_OPENING}({_LIST})")
NAMED = (
    Reading(_CONCLUSION, "The answer is B"),
    # These words often precede other things than options, so the letter has to end its clause.
    Reading(
        re.compile(
            rf"(?:{_IT_IS}|{_CHOICE}[:,]?\s*|(?:选择?|是)\s*){_OPENING}({_LIST})"
            rf"(?!(?:\W{{0,3}}{_PERHAPS})++\W{{0,3}}{_LETTER})"  # no "it is B, or maybe C"
            r"(?=\W*$|\s*[.,;:!?\])\"'”’]|\s+(?:because|since|as|but)\b)"
        ),
        "I choose B",
    ),
    Reading(
        re.compile(rf"\A(?i:option|choice)\s+{_OPENING}({_LIST})(?=[.,;])"),
        "Option B, although the answer is A",
        read=None,
    ),
)
_ALTERNATIVE = re.compile(rf"\b(?i:or)\s+{_OPENING}({_LETTER})(?=[).:,\]]|\W*$)")
_OR = re.compile(r"\s*(?:,\s*)?\bor\b\s+", re.IGNORECASE)
# These name an option, too, unless a conclusion follows: "Option A shows a dog. The answer is B."
MENTIONED = (
    Reading(re.compile(rf"\b(?i:option|choice)\s+{_OPENING}({_LIST})"), "I see option B"),
    Reading(re.compile(rf"\(([A-Z]\){_MORE}*)"), "The man does not speak (B)"),
)
# These count only if nothing else names an option.
WEAK = (
    Reading(
        re.compile(
            rf"({_LETTER})\s+(?i:(?:is|seems|looks|appears)(?:\s+to\s+be)?(?:\s+the)?(?:\s+most)?)"
            r"\s+(?i:answer|best|correct|right|likely|plausible)\b"
        ),
        "B seems right.",
    ),
    Reading(
        re.compile(rf"(?:[.!?:,]\s+|\n){_OPENING}({_LETTER})\W*$"),
        "He meets a friend. B",
    ),
)
_STANDING = re.compile(rf"(?<![A-Za-z0-9]){_LETTER}")
# "Actually" retracts only where a clause begins: not in "C. There is not actually a dog."
_RETRACTION = re.compile(
    r"\b(?:no,?\s+wait|wait,?\s+no|scratch\s+that|correction|i\s+mean"
    r"|(?:\A|(?<=[.!?,;:–—-]\s)|(?<=[.!?…\n])|(?<=but\s)|(?<=it\sis\s)|(?<=it['’]s\s))actually)\b[,:.]?",
    re.IGNORECASE,
)
_FURTHER = re.compile(_MORE)
_LEADING = re.compile(
    rf"{_OPENING}(?:({_LETTER}{_MORE}+)|({_LETTER})"
    r"\s+(?:because|since|as|or|due\s+to|is\s+(?:the\s+)?(?:answer|best|correct|right))\b)"
)
_NO = (
    r"(?:not|never|neither|nor|no|cannot|unlikely|except|unlike"
    r"|(?:instead|rather|other)\s(?:of|than)|(?:any|every)thing\sbut|all\sbut"
    r"|(?:ca|wo|do|does|did|is|was|would|should|could|must)n['’]?t"
    r"|(?:wrong|incorrect)\s(?:answers?|options?|choices?|to)"
    r"|(?:rul(?:e|es|ed|ing)\sout|(?:exclud|eliminat)(?:e|es|ed|ing)|reject(?:s|ed|ing)?))"
)
# Only these words may come between a negation and its letter: "he does not speak (B)" chooses B.
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
_DENIAL_LENGTH = 100  # in characters; a negation further before a letter concerns something else
_DENIED = re.compile(
    r"[)\]\"'”’]*\s*\b(?:cannot|can['’]?t|"
    r"(?:is|are|was|were|has|does|do|did|can|could|would|should|must|seems|looks)"
    r"(?:n['’]?t|\s(?:\w+ly\s)?(?:be(?:en)?\s)?"
    r"(?:not|never|wrong|incorrect|false|impossible|unlikely|ruled\sout|excluded|eliminated)))\b"
)
_FONT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\s*\{([^{}]*)\}")
_BOXED = re.compile(r"\\f?box(?:ed)?\s*\{([^{}]*)\}")
_DRESS = re.compile(r"[*`$]|__|\\(?=[()\[\]])")  # marks of Markdown and LaTeX

# The words of an open-ended answer: {"answer": "two"}, "The answer is two."
_LABELLED_ANSWER = re.compile(
    r"\W*(?i:(?:(?:the|my)\s+)?(?:final\s+|correct\s+)?answer|答案)[\"']?\s*(?:[:是为]|\bis\b)\s*:?"
    r"\s*(\S.*)"
)
# Words of an option after these are denied; in a sentence with these, they may mean anything.
_NOT = r"(?:not|no|nor|neither|without|except|unlike|rather than|instead of|other than)"
_UNSURE = re.compile(
    rf"\b(?:{_NOT}|never|cannot|\w+nt|or|either|both|maybe|perhaps|option|choice|wrong|incorrect)\b"
)
_SENTENCE = 16  # upper bound on the other words of a sentence that names an option by its words

# --- ranges of seconds ---

# Digits are matched possessively ("++"): with thousands of digits, backtracking would take forever.
_NUMBER = r"(?<![\d.:])(?:\d++(?:\.\d*+)?|\.\d++)"
_TIME = rf"(?:(?<![\d.:])(?:\d++:)?\d++:[0-5]?\d(?:\.\d++)?|{_NUMBER})(?![\d:]|\.\d)"
_SECOND = r"(?:(?:s|secs?|seconds?)(?![A-Za-z])\.?|秒)"
_SECONDS = rf"(?:\s*{_SECOND})?"
_HEDGE = r"(?:(?:about|around|approximately|roughly|second|at|the)\s+|t\s?=\s?|~\s*|第)*"
_TO = r"(?:[-=]{1,2}>|[\-–—~→到至]|,?\s*\b(?:to|until|till|through)\b)"
_JOINT = rf"(?:{_TO}|[,;和]|,?\s*\band\b)"
_SIGN = r"(?<![\w.:)\]-])-"  # a minus sign; after a time it would be a dash between two times
# A time that is not the end of a longer one, as in "1 h 2 to" and "1'13 to".
_WHOLE = r"(?<!\d s )(?<!\d['’′])"
_OTHER_UNIT = r"\s*(?:%|(?:ms|milliseconds?|frames?|percent|days?)\b)|['’′]\d"
_RANGE = re.compile(
    rf"{_WHOLE}(?P<start>(?:{_SIGN})?{_TIME}){_SECONDS}\s*{_JOINT}\s*{_HEDGE}"
    rf"(?P<end>-?{_TIME})(?!{_OTHER_UNIT})",
    re.IGNORECASE,
)
# Commas group thousands in "1,000 to 1,200", but "[100,200]" is a range.
_GROUPED = r"(?<![\d.:,])[1-9]\d{0,2}(?:,\d{3})++(?:\.\d++)?(?![\d:]|[.,]\d)"
_THOUSANDS = re.compile(
    rf"(?P<between>\bbetween\s+)?(?P<start>{_GROUPED}|{_TIME})"
    rf"(?P<joint>{_SECONDS}\s*(?:{_TO}|,\s|(?(between)\band\b|(?!)))\s*{_HEDGE})"
    rf"(?P<end>{_GROUPED}|{_TIME})",
    re.IGNORECASE,
)
# "73,5 to 130,2" is unclear: neither a range from 73 to 5 nor one from 5 to 130.
_UNCLEAR = re.compile(
    rf"(?<![\d.:])\d++,\d++{_SECONDS}\s*{_TO}\s*{_HEDGE}[\d.:,]++",
    re.IGNORECASE,
)
_MILLISECONDS = re.compile(r"(?<=:[0-5]\d),(?=\d{3}(?![\d:.]))")  # "00:01:13,500" of subtitles
_QUOTED = re.compile(r"(?<!\d)[\"'“‘]([\d:.,]+(?: ?s(?:ec(?:ond)?s?)?)?)[\"'”’](?!\d)")
# What may come between a label and its time: "starts at 73 s", "end_time": "02:10".
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
        r"start(?:s|ed|ing)?|begin(?:s|ning)?|began|开始(?:时间)?",
        r"end(?:s|ed|ing)?|finish(?:es|ed|ing)?|stop(?:s|ped|ping)?|结束(?:时间)?"
        r"|until|till|continu(?:es|ed|ing)\s+(?:on\s+)?to",
        r"last(?:s|ed|ing)?(?:\s+for)?|duration",
    )
)
# Other ways of writing a time or a pair of times.
TIMES = (
    Reading(
        re.compile(rf"\(\s*({_TIME}{_SECONDS})\s*\)", re.IGNORECASE),
        "(73) to (130)",
        r" \1 ",
        (73, 130),
    ),
    Reading(re.compile(r"(?<=[^\d\s]):(?=\d)"), "开始：73秒，结束：130秒", ": ", (73, 130)),
    Reading(
        re.compile(
            rf"\bfrom\s+the\s+(?:start|beginning)(?:\s+of\s+the\s+\w+)?(?=\s*{_TO})",
            re.IGNORECASE,
        ),
        "From the start of the video until 12.5 s",
        "from 0 s",
        (0, 12.5),
    ),
)
# "<73.0 seconds>" is a frame's timestamp and "**73**" is Markdown, but "->" joins two times.
_AROUND = re.compile(r"[<*`]|(?<![-=])>")
_HOUR = r"(?:(?:hours?|hrs?|h)(?![A-Za-z])\.?|小时)"
_MINUTE = r"(?:(?:minutes?|mins?)(?![A-Za-z])\.?|分钟?)"
# In "1 to 2 minutes" the unit belongs to both times; in "1 min 13 to 2 min 10" it does not.
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
    if not match:
        return "", text
    return next(group for group in match.groups() if group).upper(), text[match.end() :]


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

    named: set[str] = set()
    denied: set[str] = set()
    lines = {_split_mark(line)[0] for line in text.splitlines()} - {""}
    if len(lines) > 1:  # the text goes through several options, perhaps towards a conclusion
        if not _concluded(text):
            named |= lines
    elif letter and not rest[:1].isalnum():
        if _DENIED.match(rest):
            denied.add(letter)
        else:
            named.add(letter)
        further = _FURTHER.match(rest)
        if further:
            named.update(_SINGLE.findall(further[0]))

    for match in _namings(text):
        start, end = match.span(match.lastindex or 0)
        letters = _SINGLE.findall(text[start:end])
        if _denied(text, start, end):
            denied.update(letters)
        else:
            named.update(letters)
    chosen = named - denied
    # "A. a dog or B. a cat"
    return chosen and chosen.union(_ALTERNATIVE.findall(text))


def _namings(text: str) -> list[re.Match[str]]:
    """Return the places where a text names options. The last group of a match has the letters."""
    matches = [match for form in NAMED for match in form.pattern.finditer(text)]
    matches += [m for form in MENTIONED for m in form.pattern.finditer(text, _concluded(text))]
    leading = _LEADING.match(text)
    if leading:
        matches.append(leading)
    return matches


def _concluded(text: str) -> int:
    """Return where the last "the answer is B" that is not denied has its letter; 0 if there is
    none."""
    spans = [match.span(1) for match in _CONCLUSION.finditer(text)]
    return max((start for start, end in spans if not _denied(text, start, end)), default=0)


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
    for form in REWRITTEN:
        text = form.pattern.sub(form.meaning, text)
    text = _SMALL_LETTER.sub(lambda named: named[0].upper(), text)
    letters = _letters(text) | lone
    if words:
        letters &= words.keys()
        statements = [*_statements(text), *(_OR.split(text) if letters else ())]
        letters = letters.union(*(_by_words(statement, words) for statement in statements))
    return letters or _weakly_named(text, words)


def _weakly_named(text: str, words: Mapping[str, str]) -> set[str]:
    """Return the letters of options in a text that has none of the clear forms.

    Empty if another letter stands in the text, because then it is open what the letter does.
    """
    matches = [match for form in WEAK for match in form.pattern.finditer(text)]
    letters = {match[1] for match in matches if not _denied(text, *match.span(1))}
    named = (letters & words.keys() if words else letters) | _in_sentence(text, words)
    standing = set(_STANDING.findall(text))
    return set() if (standing & words.keys() if words else standing) - named else named


def _in_sentence(text: str, words: Mapping[str, str]) -> set[str]:
    """Return the letters of the options whose words stand in a short sentence: "He feels joy."

    None if a word says that the sentence may mean the opposite. Words that are denied ("not joy")
    are passed over.
    """
    rest = f" {normalise(text)} "
    letters: set[str] = set()
    # Longest first, so that "a black cat" is not also "a cat".
    plain = {label: normalise(option) for label, option in words.items()}
    for label in sorted(plain, key=lambda label: -len(plain[label])):
        affirmed = re.compile(
            rf"(?<=\s)({_NOT}\s)?(?:{re.escape(plain[label])})"
            rf"(?:\s{_NOT}(?:\s\w+){{1,3}}\s?$|(?=\s))"  # "joy, not mere contentment"
        )
        if not plain[label]:
            continue
        if any(not match[1] for match in affirmed.finditer(rest)):
            letters.add(label)
        rest = affirmed.sub("", rest)
    if _UNSURE.search(rest) or len(rest.split()) > _SENTENCE:
        return set()
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
    """Return the seconds of "73.5", "1:13.5" or "-1:00:13"."""
    total = 0.0
    for digits in text.removeprefix("-").replace(",", "").split(":"):
        total = total * 60 + float(digits)
    return -total if text.startswith("-") else total


def read_range(text: str) -> tuple[float, float] | None:
    """Read the range that a text names, in seconds; None if there is none.

    The range is the first pair of joined times: "[10, 20]", "10 - 20", "from 10 to 20 s", "[00:10,
    00:20]", "<10.0 seconds> - <20.0 seconds>", "从10秒到20秒", "1 min to 2 min", "1,000 to 1,200".
    If there is none, it is a labelled start and end: "starts at 10 s and ends at 20 s",
    {"start": 10, "end": 20}. A time that is only partly readable does not count.
    """
    text = unicodedata.normalize("NFKC", text)
    text = _DRESS.sub("", _BOXED.sub(r" \1 ", _FONT.sub(r"\1", text)))
    text = " ".join(_AROUND.sub(" ", text).split())
    for form in TIMES:
        text = form.pattern.sub(form.meaning, text)
    text = _MILLISECONDS.sub(".", _QUOTED.sub(r" \1 ", text))
    text = _UNCLEAR.sub("?", _THOUSANDS.sub(_without_commas, text))
    for both, with_units in _BOTH:
        text = both.sub(with_units, text)
    text = _MINUTES.sub(_in_seconds, _HOURS.sub(_in_seconds, text))
    start, end, length = (label.search(text) for label in _LABELLED)
    labelled: tuple[float, float] | None = None
    if start and length:
        labelled = (_seconds(start["time"]), _seconds(start["time"]) + _seconds(length["time"]))
    if start and end:
        labelled = (_seconds(start["time"]), _seconds(end["time"]))
        # Otherwise the comma of "starts at 1,200 s" would join two times.
        if "," in start["time"] + end["time"]:
            return labelled
    joined = _RANGE.search(text)
    if joined:
        return _seconds(joined["start"]), _seconds(joined["end"])
    return labelled


def _without_commas(times: re.Match[str]) -> str:
    start = times["start"].replace(",", "")
    end = times["end"].replace(",", "")
    return f"{times['between'] or ''}{start}{times['joint']}{end}"


def _in_seconds(time: re.Match[str]) -> str:
    hours, minutes, seconds = (float(digits or 0) for digits in time.groups())
    return f"{3600 * hours + 60 * minutes + seconds:.3f} s"


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
