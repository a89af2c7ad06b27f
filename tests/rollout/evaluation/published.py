"""Made-up records in the format of each benchmark's publisher: file names, columns and types."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Record = dict[str, Any]


def write_parquet(file: pathlib.Path, records: Sequence[Record]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(records)), file)


def videomme(id: str, video: str, answer: str = "B", **fields: Any) -> Record:
    return {
        "video_id": id[:3],
        "duration": "short",
        "domain": "Knowledge",
        "sub_category": "Biology",
        "url": f"https://example.org/watch?v={video}",
        "videoID": video,
        "question_id": id,
        "task_type": "Counting Problem",
        "question": "How many apples are there?",
        "options": ["A. One.", "B. Two.", "C. Three.", "D. Four."],
        "answer": answer,
        **fields,
    }


def longvideobench(
    id: str, video: str, correct: int, options: Sequence[str], **fields: Any
) -> Record:
    padded = [*options, *["N/A"] * (5 - len(options))]
    return {
        "video_id": id.split("_")[0],
        "question": "What is written on the sign?",
        "question_category": "T2E",
        "duration_group": 60,
        "id": id,
        "video_path": video,
        "subtitle_path": video.replace(".mp4", "_en.json"),
        "correct_choice": correct,
        **{f"option{i}": option for i, option in enumerate(padded)},
        **fields,
    }


def lvbench(uid: str, video: str, answer: str = "C", **fields: Any) -> Record:
    return {
        "uid": uid,
        "video_path": video,
        "question": "What year is shown at the start?\n(A) 1636\n(B) 1366\n(C) 1363\n(D) 1633",
        "answer": answer,
        "question_type": ["key information retrieval", "reasoning"],
        "time_reference": "00:15-00:19",
        **fields,
    }


def mlvu(video: str, answer: str = "a red car", **fields: Any) -> Record:
    return {
        "video_name": video,
        "duration": 480.0,
        "question": "What does the man buy?",
        "answer": answer,
        "candidates": ["a red car", "a blue car", "a boat", "nothing"],
        "task_type": "plotQA",
        **fields,
    }


def mmvu(id: str, subject: str, number: int, open_ended: bool = False, **fields: Any) -> Record:
    sorts = ("Quick sort", "Merge sort", "Heap sort", "Radix sort", "Shell sort")
    # Open-ended questions have empty choices.
    choices = [""] * 5 if open_ended else sorts
    videos = "https://example.org/datasets/yale-nlp/MMVU/resolve/main/videos"
    return {
        "id": id,
        "video": f"{videos}/{subject}/{number}.mp4",
        "youtube_url": "",
        "question": "Which algorithm is shown?",
        "choices": dict(zip("ABCDE", choices, strict=True)),
        "answer": "merge sort" if open_ended else "B",
        "question_type": "open-ended" if open_ended else "multiple-choice",
        "metadata": {"subject": subject.replace("_", " "), "textbook": "", "rationale": ""},
        **fields,
    }


def charades(video: str, span: Sequence[float] = (24.3, 30.4), **fields: Any) -> Record:
    return {"video": video, "caption": "person turn a light on.", "timestamp": list(span), **fields}


FILES = {
    "videomme": "videomme/test-00000-of-00001.parquet",
    "videomme_wsub": "videomme/test-00000-of-00001.parquet",
    "longvideobench": "validation-00000-of-00001.parquet",
    "lvbench": "data/test-00000-of-00001.parquet",
    "mlvu": "mlvu/test-00000-of-00001.parquet",
    "mmvu": "validation.json",
    "charades": "data/test-00000-of-00001.parquet",
}


def write_split(name: str, folder: pathlib.Path, records: Sequence[Record]) -> pathlib.Path:
    """Write these records as the split's repository would have them; returns the folder."""
    file = folder / FILES[name]
    if file.suffix == ".parquet":
        write_parquet(file, records)
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = "\n".join(map(json.dumps, records))
        text = lines if file.suffix == ".jsonl" else json.dumps(list(records))
        file.write_text(text, encoding="utf-8")
    return folder


_LONG = ["1", "2", "3", "4", "5"]

EXAMPLES: dict[str, list[Record]] = {
    "videomme": [
        videomme("001-1", "fFjv93ACGo8"),
        videomme("001-2", "fFjv93ACGo8", "(D)"),
        videomme("300-1", "x_-y", duration="long"),
    ],
    "videomme_wsub": [videomme("001-1", "fFjv93ACGo8")],
    "longvideobench": [
        longvideobench("86CxyhFV9MI_0", "86CxyhFV9MI.mp4", 1, ["a cat", "a dog"]),
        longvideobench("86CxyhFV9MI_1", "86CxyhFV9MI.mp4", 4, _LONG, duration_group=3600),
    ],
    "lvbench": [
        lvbench("0", "Cm73ma6Ibcs.mp4"),
        lvbench("1", "Cm73ma6Ibcs.mp4", question="What is it about?", question_type=None),
    ],
    "mlvu": [
        mlvu("movie101_66.mp4"),
        mlvu("movie101_66.mp4", "nothing", question="What does the woman buy?"),
    ],
    "mmvu": [
        mmvu("validation_0", "Computer_Science", 18),
        mmvu("validation_1", "Chemistry", 2, open_ended=True),
    ],
    "charades": [charades("3MSZA.mp4"), charades("3MSZA.mp4", (0, 8.25)), charades("WZFRM.mp4")],
}
