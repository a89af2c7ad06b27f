"""The benchmarks: where each is published, and how its rows become questions.

To add one, write a reader and list its entry (`Benchmark`) in `BENCHMARKS`. Publishers write
options and answers in different ways. The readers convert them to one form: options have no
letters, and the answer to a multiple-choice question is a letter. They raise `BrokenRow` with the
reason if a row cannot be asked or scored.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from paravt_jax.data.question_files import split_options, without_letters
from paravt_jax.data.sources import MEDIA_PATTERNS
from paravt_jax.method.records import Question, QuestionKind
from rollout.evaluation.files import Row, read_rows

_MMVU_VIDEO = re.compile(r"(?:.*/)?(videos/([^/]+)/[^/]+)")
# Slices of one zip. The names of the shorter videos of clues begin with "clue_".
_CGBENCH_VIDEOS = ("video*.zip",)


class BrokenRow(ValueError):
    """A row of a table that cannot be asked or scored; the message is the reason."""


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
    read: Callable[[Row], Item]
    """Turns a row into a question. Raises BrokenRow if the row cannot be asked or scored."""
    media: tuple[str, ...] = MEDIA_PATTERNS
    """Patterns of the data set's videos, subtitles and archives of them, for `paravt download`."""
    joined: tuple[str, ...] = ()
    """Patterns of files that are slices of one archive, in the order of their names."""
    elsewhere: str = ""
    """Where to get the videos if the data set does not hold them."""
    score: Literal["accuracy", "miou"] = "accuracy"
    """Name of the mean score. `miou` (grounding) also has recalls at several overlaps."""


# --- fields of rows ---


def text_of(row: Mapping[str, Any], field: str) -> str:
    """Read a field that must not be empty. Numbers become text."""
    text = optional(row, field)
    if not text:
        raise BrokenRow(f"{field} is missing")
    return text


def optional(row: Mapping[str, Any], field: str) -> str:
    """Read a field that may be missing. Lists count as missing."""
    value = row.get(field)
    return str(value).strip() if isinstance(value, str | int | float) else ""


def tasks_of(row: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """Read a field with a question's task, or with a list of them; it may be missing."""
    if isinstance(row.get(field), list):
        return tuple(map(str, row[field]))
    task = optional(row, field)
    return (task,) if task else ()


def path_of(text: str) -> str:
    """Check that a path stays below the root of the videos."""
    path = pathlib.PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise BrokenRow(f"video {text!r}: not a path below the root of the videos")
    return str(path)


def options_of(options: Any) -> tuple[str, ...]:
    """Read a list of options, without unused ones at its end (None, "" and "N/A") and letters.

    Raises:
        BrokenRow: there are fewer than two options, or an option follows an unused one, so letters
            and indices would name other options.
    """
    if not isinstance(options, list | tuple):
        raise BrokenRow("options are missing")
    texts = ["" if option in (None, "N/A") else str(option).strip() for option in options]
    used = [text for text in texts if text]
    if texts[: len(used)] != used:
        raise BrokenRow("an option is missing before the last one")
    if len(used) < 2:
        raise BrokenRow("options are missing")
    return tuple(without_letters(used))


def choice(id: str, video: str, text: str, options: Sequence[str], answer: Any) -> Question:
    """Make a multiple-choice question.

    Args:
        id: the question's id.
        video: path of its video.
        text: the question.
        options: its options; () if they are part of the text.
        answer: the letter of an option ("B", "(B)", "b.") or its index, from 0.
    """
    found = re.fullmatch(r"\W*([A-Za-z])\W*", str(answer))
    index = ord(found[1].upper()) - ord("A") if found else answer
    if type(index) is not int or not 0 <= index < (len(options) or 26):
        raise BrokenRow(f"answer {answer!r}: not the letter or the index of an option")
    letter = chr(ord("A") + index)
    return Question(id, path_of(video), text, QuestionKind.MULTIPLE_CHOICE, letter, tuple(options))


# --- readers, one per benchmark ---


def _read_videomme(row: Row) -> Item:
    video = text_of(row, "videoID")
    text = text_of(row, "question")
    question = choice(
        id=optional(row, "question_id") or f"{video}/{text}",
        video=f"data/{video}.mp4",
        text=text,
        options=options_of(row.get("options")),
        answer=row.get("answer"),
    )
    return Item(question, optional(row, "duration"), tasks_of(row, "task_type"))


def _read_videomme_with_subtitles(row: Row) -> Item:
    subtitles = path_of(f"subtitle/{text_of(row, 'videoID')}.srt")
    return dataclasses.replace(_read_videomme(row), subtitles=subtitles)


def _read_longvideobench(row: Row) -> Item:
    candidates = row.get("candidates") or [row.get(f"option{number}") for number in range(5)]
    question = choice(
        id=text_of(row, "id"),
        video=f"videos/{text_of(row, 'video_path')}",
        text=text_of(row, "question"),
        options=options_of(candidates),
        answer=row.get("correct_choice"),
    )
    return Item(question, optional(row, "duration_group"), tasks_of(row, "question_category"))


def _read_lvbench(row: Row) -> Item:
    text, options = split_options(text_of(row, "question"))
    if not options and row.get("options"):  # some copies have them in a column of their own
        options = options_of(row["options"])
    question = choice(
        id=text_of(row, "uid"),
        video=text_of(row, "video_path"),
        text=text,
        options=options,
        answer=row.get("answer"),
    )
    return Item(question, tasks=tasks_of(row, "question_type"))


def _read_mlvu(row: Row) -> Item:
    options = options_of(row.get("candidates"))
    text, _ = split_options(text_of(row, "question"))  # some questions repeat the options
    video = text_of(row, "video_name")
    answer = text_of(row, "answer")
    if options.count(answer) > 1:
        raise BrokenRow(f"answer {answer!r}: equal to several options")
    index = options.index(answer) if answer in options else answer
    return Item(
        choice(f"{video}/{text}", video, text, options, index), tasks=tasks_of(row, "task_type")
    )


def _read_mmvu(row: Row) -> Item:
    found = _MMVU_VIDEO.fullmatch(text_of(row, "video"))
    if not found:
        raise BrokenRow(f"video {row.get('video')!r}: not videos/<subject>/<n>.mp4")
    video, folder = found.groups()
    id = text_of(row, "id")
    text = text_of(row, "question")
    kind = text_of(row, "question_type")
    # The subject has a column of its own, or is in `metadata`, or is the folder of the video.
    metadata = row.get("metadata") or {}
    tasks = (optional(row, "subject") or optional(metadata, "subject") or folder, kind)
    if kind == "open-ended":
        answer = text_of(row, "answer")
        question = Question(id, path_of(video), text, QuestionKind.OPEN_ENDED, answer)
    elif kind == "multiple-choice":
        options = options_of([(row.get("choices") or {}).get(letter) for letter in "ABCDE"])
        question = choice(id, video, text, options, row.get("answer"))
    else:
        raise BrokenRow(f"question_type {kind!r}: neither multiple-choice nor open-ended")
    return Item(question, tasks=tasks)


def _read_charades(row: Row) -> Item:
    video = text_of(row, "video")
    caption = text_of(row, "caption")
    try:
        start, end = map(float, row["timestamp"])
    except (KeyError, TypeError, ValueError):
        start = end = math.nan
    if not 0 <= start < end < math.inf:
        raise BrokenRow(f"timestamp {row.get('timestamp')!r}: not a span of seconds")
    span = f"[{start:g}, {end:g}]"  # as a model writes it
    question = Question(
        id=f"{video}/{span}/{caption}",
        video=path_of(f"Charades_v1_480/{video}"),
        text=f"When does this happen in the video: {caption.rstrip('.')}?",
        kind=QuestionKind.TEMPORAL_GROUNDING,
        answer=span,
    )
    return Item(question)


def _read_cgbench(row: Row) -> Item:
    """Read a question of its task `long_acc`: multiple choice on the whole video.

    The layout follows the benchmark's own code (github.com/CG-Bench/CG-Bench), which unpacks the
    videos into `cg_videos_720p`.
    """
    question = choice(
        id=text_of(row, "qid"),
        video=f"cg_videos_720p/{text_of(row, 'video_uid')}.mp4",
        text=text_of(row, "question"),
        options=options_of(row.get("choices")),
        answer=row.get("right_answer"),
    )
    return Item(question, tasks=tasks_of(row, "sub_category"))


# --- the benchmarks ---

_VIDEOMME = Benchmark(
    name="videomme",
    title="VideoMME w/o",
    source="lmms-lab/Video-MME",
    patterns=("videomme/test-*.parquet", "*test-*.parquet"),
    media=("videos_chunked_*.zip", "subtitle.zip"),
    read=_read_videomme,
)

_ALL = (
    _VIDEOMME,
    dataclasses.replace(
        _VIDEOMME,
        name="videomme_wsub",
        title="VideoMME w/ sub",
        read=_read_videomme_with_subtitles,
    ),
    Benchmark(
        name="longvideobench",
        title="LongVideoBench",
        source="longvideobench/LongVideoBench",
        patterns=("*validation-*.parquet", "lvb_val.json"),
        media=("videos.tar*",),
        joined=("videos.tar*",),
        read=_read_longvideobench,
    ),
    Benchmark(
        name="lvbench",
        title="LVBench",
        source="lmms-lab/LVBench",
        patterns=("*test-*.parquet", "*train-*.parquet"),
        read=_read_lvbench,
    ),
    Benchmark(
        name="mlvu",
        title="MLVU",
        source="sy1998/MLVU_dev",
        patterns=("*test-*.parquet",),
        read=_read_mlvu,
    ),
    Benchmark(
        name="mmvu",
        title="MMVU",
        source="yale-nlp/MMVU",
        patterns=("validation.json", "*validation-*.parquet"),
        read=_read_mmvu,
    ),
    Benchmark(
        name="charades",
        title="Charades-STA mIoU",
        source="lmms-lab/charades_sta",
        patterns=("*test-*.parquet",),
        media=(),
        elsewhere="Charades_v1_480.zip of https://prior.allenai.org/projects/charades",
        read=_read_charades,
        score="miou",
    ),
    # `cgbench_mini.json` has the 3,000 questions of the leaderboard, `cgbench.json` all 12,129.
    Benchmark(
        name="cgbench",
        title="CG-Bench",
        source="CG-Bench/CG-Bench",
        patterns=("cgbench_mini.json", "cgbench.json"),
        media=_CGBENCH_VIDEOS,
        joined=_CGBENCH_VIDEOS,
        read=_read_cgbench,
    ),
)

BENCHMARKS: dict[str, Benchmark] = {benchmark.name: benchmark for benchmark in _ALL}
"""Benchmarks by name. The paper's come first, in the order of its table."""


def title_of(name: str) -> str:
    """Return a benchmark's name in reports; the name itself for a user's own questions."""
    return BENCHMARKS[name].title if name in BENCHMARKS else name


# --- the questions of a split ---


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The content of a split's files."""

    items: tuple[Item, ...]
    broken: Mapping[str, str]
    """Rows that cannot be asked or scored: "row NUMBER" and the reason."""


def load(name: str, source: str = "") -> Loaded:
    """Load the questions of a split.

    Args:
        name: the benchmark.
        source: a file, a folder or a hub id; by default the hub id where it is published.

    Raises:
        FileNotFoundError: the files of the split are missing.
        ValueError: a file is damaged, or no row can be asked.
    """
    benchmark = BENCHMARKS[name]
    source = source or benchmark.source
    items: list[Item] = []
    seen: collections.Counter[str] = collections.Counter()
    broken: dict[str, str] = {}
    rows = read_rows(source, benchmark.patterns)
    for number, row in enumerate(rows):
        try:
            item = benchmark.read(row)
        # AttributeError, TypeError: a field has another type than the published ones.
        except (BrokenRow, AttributeError, TypeError) as reason:
            broken[f"row {number}"] = str(reason)
            continue
        id = item.question.id
        seen[id] += 1
        if seen[id] > 1:  # lines and transcripts are found by id
            question = dataclasses.replace(item.question, id=f"{id}#{seen[id]}")
            item = dataclasses.replace(item, question=question)
        items.append(item)
    if not items:
        reason = next(iter(broken.values()), "there are none")
        raise ValueError(
            f"--data {source}: none of {len(rows)} rows is a question of {name} ({reason}); "
            f"check that it is {benchmark.source}"
        )
    return Loaded(tuple(items), broken)


def questions_hash(items: Iterable[Item]) -> str:
    """Hash questions with their options, answers, subtitles and the names of their videos."""
    total = hashlib.blake2b(digest_size=16)
    for item in items:
        q = item.question
        fields = [q.id, q.video, q.text, str(q.kind), q.answer, q.options, item.subtitles]
        if q.subtitles:
            fields.append([dataclasses.astuple(entry) for entry in q.subtitles])
        total.update(json.dumps(fields).encode())
    return total.hexdigest()
