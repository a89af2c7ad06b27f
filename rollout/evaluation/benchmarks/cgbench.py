"""CG-Bench: questions on 1,219 long videos whose answers rest on short clues.

Published as `CG-Bench/CG-Bench`; the layout is that of its own code (github.com/CG-Bench/CG-Bench:
run/save_as_jsons.py, unzip_hf_zip.py). `cgbench_mini.json` has the 3,000 questions of its
leaderboard, `cgbench.json` all 12,129; videos are unpacked into `cg_videos_720p`. This is the
set's task `long_acc`, multiple choice on the whole video.
"""

from __future__ import annotations

from rollout.evaluation.benchmarks.benchmark import Benchmark
from rollout.evaluation.benchmarks.items import (
    Item,
    choice,
    letter_answer,
    optional,
    plain_options,
    text_of,
)
from rollout.evaluation.benchmarks.tables import Row


def _read(row: Row) -> Item:
    options = plain_options(row.get("choices"))
    question = choice(
        text_of(row, "qid"),
        f"cg_videos_720p/{text_of(row, 'video_uid')}.mp4",
        text_of(row, "question"),
        options,
        letter_answer(row, options, "right_answer"),
    )
    return Item(question, tasks=tuple(filter(None, (optional(row, "sub_category"),))))


CGBENCH = Benchmark(
    name="cgbench",
    title="CG-Bench",
    source="CG-Bench/CG-Bench",
    patterns=("cgbench_mini.json", "cgbench.json"),
    fields=("qid", "video_uid", "question", "choices", "right_answer", "sub_category"),
    read=_read,
)
