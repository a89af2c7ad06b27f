"""The benchmarks: where each is published, and how its records become questions.

To add one, write a reader below an entry (`_benchmark`). Publishers write options and answers in
different ways. The readers convert them to one form: options have no letters, and the answer to a
multiple-choice question is a letter. They raise `BrokenRecord` with the reason if a record cannot
be asked or scored.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from paravt_jax.data.question_files import below, without_letters
from paravt_jax.method.records import Question, QuestionKind
from rollout.evaluation.files import Record, read_records

_MMVU_VIDEO = re.compile(r"(?:.*/)?(videos/([^/]+)/[^/]+)")


class BrokenRecord(ValueError):
    """A record that cannot be asked or scored; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Item:
    """A question with its benchmark's metadata."""

    question: Question
    duration: str = ""
    """Name of the duration group, if the benchmark has such groups."""
    tasks: tuple[str, ...] = ()
    """Tasks that the question belongs to, if the benchmark names any."""
    subtitles: str = ""
    """Path of an .srt file, relative like `Question.video`; "" for none."""
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Columns of your own in a file of questions, by name."""

    @functools.cached_property
    def content(self) -> str:
        """Hash of what is asked: the question without its id, and the name of its subtitles.

        An answer counts as long as this does not change. By default, an id is a line's number.
        """
        fields = [dataclasses.asdict(self.question) | {"id": ""}, self.subtitles]
        return hashlib.blake2b(json.dumps(fields).encode(), digest_size=16).hexdigest()


Reader = Callable[[Record], Item]


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A split of a published benchmark."""

    name: str
    """Name on the command line and in files."""
    title: str
    """Name in reports and tables."""
    source: str
    """Hub id of the data set."""
    patterns: tuple[str, ...]
    """Patterns of the data set's files, in order of preference. Only the files of the first pattern
    that matches are read, in any folder."""
    read: Reader
    """Turns a record into a question. Raises BrokenRecord if it cannot be asked or scored."""
    score: Literal["accuracy", "miou"] = "accuracy"
    """Name of the mean score. `miou` (grounding) also has recalls at several overlaps."""


BENCHMARKS: dict[str, Benchmark] = {}
"""Benchmarks by name. The paper's come first, in the order of its table."""


def _benchmark(
    name: str, title: str, source: str, patterns: tuple[str, ...], **more: Any
) -> Callable[[Reader], Reader]:
    """Enter the reader below into `BENCHMARKS`. The arguments are fields of `Benchmark`."""

    def enter(read: Reader) -> Reader:
        BENCHMARKS[name] = Benchmark(name, title, source, patterns, read, **more)
        return read

    return enter


def title_of(name: str) -> str:
    """Return a benchmark's name in reports; the name itself for a user's own questions."""
    return BENCHMARKS[name].title if name in BENCHMARKS else name


# --- fields of records ---


def text_of(record: Mapping[str, Any], field: str) -> str:
    """Read a field that must not be empty. Numbers become text."""
    text = optional(record, field)
    if not text:
        raise BrokenRecord(f"{field} is missing")
    return text


def optional(record: Mapping[str, Any], field: str) -> str:
    """Read a field that may be missing. Lists count as missing."""
    value = record.get(field)
    return str(value).strip() if isinstance(value, str | int | float) else ""


def tasks_of(record: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """Read a field with a question's task, or with a list of them; it may be missing."""
    if isinstance(record.get(field), list):
        return tuple(map(str, record[field]))
    task = optional(record, field)
    return (task,) if task else ()


def options_of(options: Any) -> tuple[str, ...]:
    """Read a list of options, without unused ones at its end (None, "" and "N/A") and letters.

    Raises:
        BrokenRecord: there are fewer than two options, or an option follows an unused one, so
            letters and indices would name other options.
    """
    if not isinstance(options, list | tuple):
        raise BrokenRecord("options are missing")
    texts = ["" if option in (None, "N/A") else str(option).strip() for option in options]
    used = [text for text in texts if text]
    if texts[: len(used)] != used:
        raise BrokenRecord("an option is missing before the last one")
    if len(used) < 2:
        raise BrokenRecord("options are missing")
    return tuple(without_letters(used))


def split_options(text: str) -> tuple[str, tuple[str, ...]]:
    """Split a text into the question and the options in its last lines.

    Every option is a line that starts with its letter, from A on. If the text does not end with
    such lines, all of it is the question.
    """
    lines = text.strip().split("\n")
    # The first line belongs to the question. Take the first line at which the options can start.
    for first in range(1, len(lines) - 1):
        options = without_letters(lines[first:])
        if options != lines[first:]:
            return "\n".join(lines[:first]).strip(), tuple(options)
    return text.strip(), ()


def choice(id: str, video: str, text: str, options: Sequence[str], answer: Any) -> Question:
    """Make a multiple-choice question.

    Args:
        id: the question's id.
        video: path of its video.
        text: the question.
        options: its options; () if the text has them.
        answer: the letter of an option ("B", "(B)", "b.") or its index, from 0.
    """
    lettered = re.fullmatch(r"\W*([A-Za-z])\W*", str(answer))
    index = ord(lettered[1].upper()) - ord("A") if lettered else answer
    if type(index) is not int or not 0 <= index < (len(options) or 26):
        raise BrokenRecord(f"answer {answer!r}: not the letter or the index of an option")
    letter = chr(ord("A") + index)
    return Question(id, below(video), text, QuestionKind.MULTIPLE_CHOICE, letter, tuple(options))


# --- the benchmarks, each with its reader ---


@_benchmark(
    "videomme",
    "VideoMME w/o",
    "lmms-lab/Video-MME",
    ("videomme/test-*.parquet", "*test-*.parquet"),
)
def _read_videomme(record: Record) -> Item:
    question = choice(
        id=text_of(record, "question_id"),
        video=f"data/{text_of(record, 'videoID')}.mp4",
        text=text_of(record, "question"),
        options=options_of(record.get("options")),
        answer=record.get("answer"),
    )
    return Item(question, optional(record, "duration"), tasks_of(record, "task_type"))


@_benchmark(
    "videomme_wsub",
    "VideoMME w/ sub",
    BENCHMARKS["videomme"].source,
    BENCHMARKS["videomme"].patterns,
)
def _read_videomme_with_subtitles(record: Record) -> Item:
    subtitles = below(f"subtitle/{text_of(record, 'videoID')}.srt")
    return dataclasses.replace(_read_videomme(record), subtitles=subtitles)


@_benchmark(
    "longvideobench",
    "LongVideoBench",
    "longvideobench/LongVideoBench",
    ("*validation-*.parquet", "lvb_val.json"),
)
def _read_longvideobench(record: Record) -> Item:
    candidates = record.get("candidates") or [record.get(f"option{number}") for number in range(5)]
    question = choice(
        id=text_of(record, "id"),
        video=f"videos/{text_of(record, 'video_path')}",
        text=text_of(record, "question"),
        options=options_of(candidates),
        answer=record.get("correct_choice"),
    )
    return Item(question, optional(record, "duration_group"), tasks_of(record, "question_category"))


@_benchmark("lvbench", "LVBench", "lmms-lab/LVBench", ("*test-*.parquet", "*train-*.parquet"))
def _read_lvbench(record: Record) -> Item:
    text, options = split_options(text_of(record, "question"))
    question = choice(
        id=text_of(record, "uid"),
        video=text_of(record, "video_path"),
        text=text,
        options=options,
        answer=record.get("answer"),
    )
    return Item(question, tasks=tasks_of(record, "question_type"))


@_benchmark("mlvu", "MLVU", "sy1998/MLVU_dev", ("*test-*.parquet",))
def _read_mlvu(record: Record) -> Item:
    options = options_of(record.get("candidates"))
    text, _ = split_options(text_of(record, "question"))  # some questions repeat the options
    video = text_of(record, "video_name")
    answer = text_of(record, "answer")
    if options.count(answer) > 1:
        raise BrokenRecord(f"answer {answer!r}: equal to several options")
    index = options.index(answer) if answer in options else answer
    question = choice(f"{video}/{text}", video, text, options, index)
    return Item(question, tasks=tasks_of(record, "task_type"))


@_benchmark("mmvu", "MMVU", "yale-nlp/MMVU", ("validation.json", "*validation-*.parquet"))
def _read_mmvu(record: Record) -> Item:
    path = _MMVU_VIDEO.fullmatch(text_of(record, "video"))
    if not path:
        raise BrokenRecord(f"video {record.get('video')!r}: not videos/<subject>/<n>.mp4")
    video, folder = path.groups()
    id = text_of(record, "id")
    text = text_of(record, "question")
    kind = text_of(record, "question_type")
    if kind == "open-ended":
        answer = text_of(record, "answer")
        question = Question(id, below(video), text, QuestionKind.OPEN_ENDED, answer)
    elif kind == "multiple-choice":
        options = options_of([(record.get("choices") or {}).get(letter) for letter in "ABCDE"])
        question = choice(id, video, text, options, record.get("answer"))
    else:
        raise BrokenRecord(f"question_type {kind!r}: neither multiple-choice nor open-ended")
    return Item(question, tasks=(folder.replace("_", " "), kind))


@_benchmark(
    "charades",
    "Charades-STA mIoU",
    "lmms-lab/charades_sta",
    ("*test-*.parquet",),
    score="miou",
)
def _read_charades(record: Record) -> Item:
    video = text_of(record, "video")
    caption = text_of(record, "caption")
    try:
        first, last = map(float, record["timestamp"])
    except (KeyError, TypeError, ValueError):
        first = last = math.nan
    if not 0 <= first < last < math.inf:
        raise BrokenRecord(f"timestamp {record.get('timestamp')!r}: not a span of seconds")
    span = f"[{first:g}, {last:g}]"  # as a model writes it
    question = Question(
        id=f"{video}/{span}/{caption}",
        video=below(f"Charades_v1_480/{video}"),
        text=f"When does this happen in the video: {caption.rstrip('.')}?",
        kind=QuestionKind.TEMPORAL_GROUNDING,
        answer=span,
    )
    return Item(question)


# --- the questions of a split ---


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The content of a split's files."""

    items: tuple[Item, ...]
    broken: Mapping[str, str]
    """The reason of every record that cannot be asked or scored, by its number."""


def load(name: str, source: str) -> Loaded:
    """Load the questions of a split.

    Args:
        name: the benchmark.
        source: a folder that holds the published files, or one file.

    Raises:
        FileNotFoundError: the files of the split are missing.
        ValueError: a file is damaged, or no record can be asked.
    """
    benchmark = BENCHMARKS[name]
    items: list[Item] = []
    seen: collections.Counter[str] = collections.Counter()
    broken: dict[str, str] = {}
    records = read_records(source, benchmark.patterns)
    for number, record in enumerate(records):
        try:
            item = benchmark.read(record)
        # ValueError: a broken record, or a path outside of the videos. AttributeError, TypeError: a
        # field has another type than the published ones.
        except (ValueError, AttributeError, TypeError) as reason:
            broken[str(number)] = str(reason)
            continue
        id = item.question.id
        seen[id] += 1
        if seen[id] > 1:  # lines and transcripts are looked up by id
            question = dataclasses.replace(item.question, id=f"{id}#{seen[id]}")
            item = dataclasses.replace(item, question=question)
        items.append(item)
    if not items:
        reason = next(iter(broken.values()), "there are none")
        raise ValueError(
            f"--data {source}: none of {len(records)} records is a question of {name} ({reason}); "
            f"check that it is {benchmark.source}"
        )
    return Loaded(tuple(items), broken)
