"""The benchmarks: where each is published, and how its rows become questions.

To add one, write a reader and list its entry (`Benchmark`) in `BENCHMARKS`.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Literal

from paravt_jax.data.lettered import split_options
from paravt_jax.data.sources import MEDIA_PATTERNS
from paravt_jax.method.records import Question, QuestionKind
from rollout.evaluation.benchmarks.files import Row, read_rows
from rollout.evaluation.benchmarks.items import (
    BrokenRow,
    Item,
    choice,
    index_answer,
    letter_answer,
    optional,
    optional_task,
    path_of,
    plain_options,
    span_answer,
    text_of,
    without_unused,
    word_answer,
)

_MMVU_VIDEO = re.compile(r"(?:.*/)?(videos/[^/]+/[^/]+)")
# Slices of one zip. The names of the shorter videos of clues begin with "clue_".
_CGBENCH_VIDEOS = ("video*.zip",)


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
    that matches are read. `*` also matches "/"."""
    read: Callable[[Row], Item]
    """Turns a row into a question. Raises BrokenRow if the row cannot be asked or scored."""
    media: tuple[str, ...] = MEDIA_PATTERNS
    """Patterns of the data set's videos, subtitles and archives of them, for `paravt download`."""
    joined: tuple[str, ...] = ()
    """Patterns of archives that are slices of one archive; see `find_archives`."""
    elsewhere: str = ""
    """Where to get the videos if the data set does not hold them."""
    score: Literal["accuracy", "miou"] = "accuracy"
    """Name of the mean score. `miou` (grounding) also has recalls at several overlaps."""


# --- readers, one per benchmark ---


def _read_videomme(row: Row) -> Item:
    video = text_of(row, "videoID")
    text = text_of(row, "question")
    options = plain_options(row.get("options"))
    question = choice(
        id=optional(row, "question_id") or f"{video}/{text}",
        video=f"data/{video}.mp4",
        text=text,
        options=options,
        answer=letter_answer(row, options),
    )
    return Item(question, duration=optional(row, "duration"), tasks=optional_task(row, "task_type"))


def _read_videomme_with_subtitles(row: Row) -> Item:
    subtitles = path_of(f"subtitle/{text_of(row, 'videoID')}.srt")
    return dataclasses.replace(_read_videomme(row), subtitles=subtitles)


def _read_longvideobench(row: Row) -> Item:
    candidates = row.get("candidates") or [row.get(f"option{number}") for number in range(5)]
    options = plain_options(without_unused(candidates))
    question = choice(
        id=text_of(row, "id"),
        video=f"videos/{text_of(row, 'video_path')}",
        text=text_of(row, "question"),
        options=options,
        answer=index_answer(row, options, "correct_choice"),
    )
    return Item(
        question,
        duration=optional(row, "duration_group"),
        tasks=optional_task(row, "question_category"),
    )


def _read_lvbench(row: Row) -> Item:
    text, options = split_options(text_of(row, "question"))
    if not options and row.get("options"):  # some copies have them in a column of their own
        options = plain_options(row["options"])
    question = choice(
        id=text_of(row, "uid"),
        video=text_of(row, "video_path"),
        text=text,
        options=options,
        answer=letter_answer(row, options),
    )
    types = row.get("question_type")
    if isinstance(types, list):
        return Item(question, tasks=tuple(str(type_) for type_ in types))
    return Item(question, tasks=optional_task(row, "question_type"))


def _read_mlvu(row: Row) -> Item:
    options = plain_options(row.get("candidates"))
    text, _ = split_options(text_of(row, "question"))  # some questions repeat the options
    video = text_of(row, "video_name")
    if text_of(row, "answer") in options:
        answer = word_answer(row, options)
    else:
        answer = letter_answer(row, options)
    question = choice(f"{video}/{text}", video, text, options, answer)
    return Item(question, tasks=optional_task(row, "task_type"))


def _read_mmvu(row: Row) -> Item:
    found = _MMVU_VIDEO.fullmatch(text_of(row, "video"))
    if not found:
        raise BrokenRow(f"video {row.get('video')!r}: not videos/<subject>/<n>.mp4")
    video = found[1]
    id = text_of(row, "id")
    text = text_of(row, "question")
    kind = text_of(row, "question_type")
    # The subject has a column of its own, or is in `metadata`, or is the folder of the video.
    metadata = row.get("metadata")
    if not isinstance(metadata, dict):
        metadata = {}
    subject = optional(row, "subject") or optional(metadata, "subject") or video.split("/")[1]
    tasks = (subject, kind)
    if kind == "open-ended":
        answer = text_of(row, "answer")
        question = Question(id, path_of(video), text, QuestionKind.OPEN_ENDED, answer)
        return Item(question, tasks=tasks)
    if kind == "multiple-choice":
        choices = row.get("choices")
        if not isinstance(choices, dict):
            raise BrokenRow("options are missing")
        # Unused letters have empty texts.
        options = plain_options(without_unused([choices.get(letter) for letter in "ABCDE"]))
        question = choice(id, video, text, options, letter_answer(row, options))
        return Item(question, tasks=tasks)
    raise BrokenRow(f"question_type {kind!r}: neither multiple-choice nor open-ended")


def _read_charades(row: Row) -> Item:
    video = text_of(row, "video")
    caption = text_of(row, "caption")
    span = span_answer(row, "timestamp")
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
    options = plain_options(row.get("choices"))
    question = choice(
        id=text_of(row, "qid"),
        video=f"cg_videos_720p/{text_of(row, 'video_uid')}.mp4",
        text=text_of(row, "question"),
        options=options,
        answer=letter_answer(row, options, "right_answer"),
    )
    return Item(question, tasks=optional_task(row, "sub_category"))


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
        except BrokenRow as reason:
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
