"""CG-Bench (`CG-Bench/CG-Bench`): questions on 1,219 long videos, each about a short clue.

This is its task `long_acc`, multiple choice on the whole video. `cgbench_mini.json` has the 3,000
questions of the leaderboard, `cgbench.json` all 12,129. The layout follows the benchmark's own code
(github.com/CG-Bench/CG-Bench: run/save_as_jsons.py, unzip_hf_zip.py), which unpacks the videos into
`cg_videos_720p`.
"""

from __future__ import annotations

from rollout.evaluation.benchmarks.benchmark import Benchmark
from rollout.evaluation.benchmarks.items import (
    Item,
    choice,
    letter_answer,
    optional_task,
    plain_options,
    text_of,
)
from rollout.evaluation.benchmarks.tables import Row

# Slices of one zip. The names of the shorter videos of clues begin with "clue_".
_VIDEOS = ("video*.zip",)


def _read(row: Row) -> Item:
    options = plain_options(row.get("choices"))
    question = choice(
        id=text_of(row, "qid"),
        video=f"cg_videos_720p/{text_of(row, 'video_uid')}.mp4",
        text=text_of(row, "question"),
        options=options,
        answer=letter_answer(row, options, "right_answer"),
    )
    return Item(question, tasks=optional_task(row, "sub_category"))


CGBENCH = Benchmark(
    name="cgbench",
    title="CG-Bench",
    source="CG-Bench/CG-Bench",
    patterns=("cgbench_mini.json", "cgbench.json"),
    media=_VIDEOS,
    joined=_VIDEOS,
    fields=(
        "qid",
        "video_uid",
        "question",
        "choices",
        "right_answer",
        "duration",
        "domain",
        "sub_category",
    ),
    read=_read,
)
