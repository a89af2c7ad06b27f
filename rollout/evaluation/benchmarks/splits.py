"""The seven splits of the paper's table: where each is published, how a row becomes a question, and the paper's own numbers.

Owns the fields of every source (REFERENCE 5). A row that cannot be asked is left out and said, by its id, with the reason; what remains of
the split is played.
Invariant: ids are unique in a split (an id that comes again gets its number: "17#2"), and questions stand in the order of the files.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Mapping

from paravt_jax.method.records import Question, QuestionKind
from rollout.evaluation.benchmarks.items import (
    BrokenRow,
    Item,
    choice,
    index_answer,
    letter_answer,
    optional,
    path_of,
    plain_options,
    span_answer,
    split_options,
    text_of,
    word_answer,
)
from rollout.evaluation.benchmarks.tables import Row, read_rows

_MMVU_VIDEO = re.compile(r"(?:.*/)?(videos/[^/]+/[^/]+)")


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One split. `patterns` are its files in their order of preference, `fields` the columns that are read.

    `paper` has the published numbers in per cent (REFERENCE 2): of ParaVT-8B, Qwen3-VL-8B and LongVT-RFT-7B.
    """

    title: str
    source: str
    patterns: tuple[str, ...]
    fields: tuple[str, ...]
    read: Callable[[Row], Item]
    paper: tuple[float, float, float]
    rows: Callable[[list[Row]], list[Row]] = lambda rows: rows
    grounding: bool = False


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What a split's files hold: questions, and the rows that are none, by id, with the reason."""

    items: tuple[Item, ...]
    broken: Mapping[str, str]


def load(name: str, source: str = "") -> Loaded:
    """A split from `source` (a file, a folder, a hub id; where it is published, if empty).

    FileNotFoundError where there are no files, ValueError for damaged ones and where not one row can be asked.
    """
    benchmark = BENCHMARKS[name]
    source = source or benchmark.source
    items: list[Item] = []
    seen: collections.Counter[str] = collections.Counter()
    broken: dict[str, str] = {}
    rows = benchmark.rows(read_rows(source, benchmark.patterns, benchmark.fields))
    for number, row in enumerate(rows):
        try:
            item = benchmark.read(row)
        except BrokenRow as reason:
            broken[f"row {number}"] = str(reason)
            continue
        seen[item.question.id] += 1
        if (count := seen[item.question.id]) > 1:
            item = dataclasses.replace(
                item, question=dataclasses.replace(item.question, id=f"{item.question.id}#{count}")
            )
        items.append(item)
    if not items:
        first = next(iter(broken.values()), "there are none")
        raise ValueError(
            f"--data {source}: none of {len(rows)} rows is a question of {name} ({first}); check that it is {benchmark.source}"
        )
    return Loaded(tuple(items), broken)


def _videomme(row: Row) -> Item:
    video = text_of(row, "videoID")
    options = plain_options(row.get("options"))
    id = optional(row, "question_id") or f"{video}/{text_of(row, 'question')}"
    question = choice(
        id, f"data/{video}.mp4", text_of(row, "question"), options, letter_answer(row, options)
    )
    tasks = tuple(filter(None, (optional(row, "task_type"),)))
    return Item(question, optional(row, "duration"), tasks)


def _videomme_with_subtitles(row: Row) -> Item:
    return dataclasses.replace(
        _videomme(row), subtitles=path_of(f"subtitle/{text_of(row, 'videoID')}.srt")
    )


def _longvideobench(row: Row) -> Item:
    words = row.get("candidates") or [row.get(f"option{i}") for i in range(5)]
    words = [word for word in words if word is not None and word != "N/A"]  # the unused come last
    options = plain_options(words)
    question = choice(
        text_of(row, "id"), f"videos/{text_of(row, 'video_path')}", text_of(row, "question"), options,
        index_answer(row, options, "correct_choice"),
    )  # fmt: skip
    return Item(
        question,
        optional(row, "duration_group"),
        tuple(filter(None, (optional(row, "question_category"),))),
    )


def _lvbench_rows(rows: list[Row]) -> list[Row]:
    """One row a question: the set's own file has one row a video, with its questions inside."""
    return [
        {**question, "video_path": f"{row['key']}.mp4"} if isinstance(question, dict) else row
        for row in rows
        for question in (
            row["qa"] if isinstance(row.get("qa"), list) and row.get("key") else [None]
        )
    ]


def _lvbench(row: Row) -> Item:
    text, options = split_options(text_of(row, "question"))
    question = choice(
        text_of(row, "uid"), text_of(row, "video_path"), text, options, letter_answer(row, options)
    )
    kinds = row.get("question_type")
    return Item(
        question,
        "",
        tuple(str(kind) for kind in kinds)
        if isinstance(kinds, list)
        else tuple(filter(None, (kinds,))),
    )


def _mlvu_rows(rows: list[Row]) -> list[Row]:
    """The columns of the collected table: the set's own files, one a task, name two of them otherwise."""
    own = {"video": "video_name", "question_type": "task_type"}
    return [{own.get(name, name): value for name, value in row.items()} for row in rows]


def _mlvu(row: Row) -> Item:
    options, text = plain_options(row.get("candidates")), text_of(row, "question")
    text, _ = split_options(text)  # some copies repeat the options in the question
    video = text_of(row, "video_name")
    answer = (
        word_answer(row, options)
        if text_of(row, "answer") in options
        else letter_answer(row, options)
    )
    return Item(
        choice(f"{video}/{text}", video, text, options, answer),
        "",
        tuple(filter(None, (optional(row, "task_type"),))),
    )


def _mmvu(row: Row) -> Item:
    found = _MMVU_VIDEO.fullmatch(text_of(row, "video"))
    if not found:
        raise BrokenRow(f"video {row.get('video')!r} is no address of videos/<subject>/<n>.mp4")
    id, text, kind = text_of(row, "id"), text_of(row, "question"), text_of(row, "question_type")
    details = row.get("metadata")
    subject = (
        optional(row, "subject")
        or optional(details if isinstance(details, dict) else {}, "subject")
        or found[1].split("/")[1]
    )
    if kind == "open-ended":
        return Item(
            Question(id, path_of(found[1]), text, QuestionKind.OPEN_ENDED, text_of(row, "answer")),
            "",
            (subject, kind),
        )
    if kind != "multiple-choice":
        raise BrokenRow(f"question_type {kind!r} is neither multiple-choice nor open-ended")
    choices = row.get("choices")
    words = (
        [choices[letter] for letter in "ABCDE" if choices.get(letter)]
        if isinstance(choices, dict)
        else None
    )
    options = plain_options(words)
    return Item(
        choice(id, found[1], text, options, letter_answer(row, options)), "", (subject, kind)
    )


def _charades(row: Row) -> Item:
    video, caption, span = (
        text_of(row, "video"),
        text_of(row, "caption"),
        span_answer(row, "timestamp"),
    )
    text = f"When does this happen in the video: {caption.rstrip('.')}?"
    path = path_of(f"Charades_v1_480/{video}")
    return Item(
        Question(f"{video}/{span}/{caption}", path, text, QuestionKind.TEMPORAL_GROUNDING, span)
    )


_VIDEOMME = (
    "videoID",
    "question_id",
    "question",
    "options",
    "answer",
    "duration",
    "task_type",
    "domain",
)
_OPTIONS = tuple(f"option{i}" for i in range(5))

BENCHMARKS: dict[str, Benchmark] = {
    "videomme": Benchmark(
        "VideoMME w/o", "lmms-lab/Video-MME", ("videomme/test-*.parquet", "*test-*.parquet"), _VIDEOMME, _videomme, (62.1, 59.9, 59.5)
    ),
    "videomme_wsub": Benchmark(
        "VideoMME w/ sub", "lmms-lab/Video-MME", ("videomme/test-*.parquet", "*test-*.parquet"), _VIDEOMME, _videomme_with_subtitles,
        (69.4, 68.4, 66.0),
    ),
    "longvideobench": Benchmark(
        "LongVideoBench", "longvideobench/LongVideoBench", ("*validation-*.parquet", "lvb_val.json"),
        ("id", "video_path", "question", *_OPTIONS, "candidates", "correct_choice", "duration_group", "question_category"), _longvideobench,
        (60.4, 52.2, 54.7),
    ),
    "lvbench": Benchmark(
        "LVBench", "lmms-lab/LVBench", ("*test-*.parquet", "*train-*.parquet", "*video_info.meta.jsonl"),
        ("uid", "video_path", "question", "answer", "question_type", "key", "qa"), _lvbench, (39.8, 33.1, 37.9), _lvbench_rows,
    ),
    "mlvu": Benchmark(
        "MLVU", "sy1998/MLVU_dev", ("*test-*.parquet", "json/[1-7]_*.json", "*/json/[1-7]_*.json"),
        ("video_name", "video", "question", "candidates", "answer", "task_type", "question_type"), _mlvu,
        (65.0, 58.3, 59.4), _mlvu_rows,
    ),
    "mmvu": Benchmark(
        "MMVU", "yale-nlp/MMVU", ("validation.json", "*validation-*.parquet"),
        ("id", "video", "question", "choices", "answer", "question_type", "subject", "metadata"), _mmvu, (68.6, 68.0, 63.4),
    ),
    "charades": Benchmark(
        "Charades-STA mIoU", "lmms-lab/charades_sta", ("*test-*.parquet",), ("video", "caption", "timestamp"), _charades,
        (50.1, 49.3, 23.4), grounding=True,
    ),
}  # fmt: skip
"""Name on the command line -> split, in the order of the paper's table."""

PAPER_ROWS = ("ParaVT-8B", "Qwen3-VL-8B", "LongVT-RFT-7B")
