"""Which of lmms-eval's tasks belongs to which split, and how its results are read.

The names of folders, tasks and metrics are those of lmms-eval 0.7.3.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from rollout.evaluation.benchmarks.tables import Row


def _field(name: str) -> Callable[[Any], float]:
    """The score is a field of the result."""
    return lambda result: float(result[name])


def _same_fields(first: str, second: str) -> Callable[[Any], float]:
    """The answer is right if two fields of the result are equal."""
    return lambda result: float(result[first] == result[second])


def _never(row: Row) -> bool:
    return False


def _is_open_ended(row: Row) -> bool:
    return row.get("question_type") != "multiple-choice"


def _unchanged(row: Row) -> Row:
    return row


def _with_candidates(row: Row) -> Row:
    """The publisher's own file has the options as a list, the hub's table has five columns."""
    candidates = row.get("candidates")
    if not candidates:
        return row
    padded = [*candidates, *["N/A"] * (5 - len(candidates))]
    return row | {f"option{number}": option for number, option in enumerate(padded)}


def _with_video_path(row: Row) -> Row:
    """The publisher's own file has an address, lmms-eval's copy has the path at its end."""
    if "video_path" in row:
        return row
    return row | {"video_path": "/".join(str(row.get("video", "")).split("/")[-3:])}


# The second of the options that a question repeats.
_OPTION_B = re.compile(r"\(B\)|^\s*B[.):]", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Task:
    """One of lmms-eval's tasks."""

    folder: str
    """Folder below lmms_eval/tasks."""
    name: str
    """The name that `lmms-eval --tasks` takes."""
    metric: str
    """The metric that corresponds to this project's score."""
    whole: float
    """The metric's value if every answer is right."""
    score: Callable[[Any], float] | None
    """The score of one question, in [0, 1], from its entry for the metric. None: the aggregation of
    this entry alone is the score."""
    row: Callable[[Row], Row] = _unchanged
    """Adds the columns of lmms-eval's copy of the data set to a row of the publisher's."""
    judged: Callable[[Row], bool] = _never
    """Whether a row's answers are scored by a judge, a model behind a server."""
    subtitles: bool = False
    """Whether prompts contain the subtitles of the video."""
    letter: str = ""
    """Column with the right option's letter, which the task compares with the answer's letter."""
    options_in_question: bool = False
    """Whether prompts have no other options than those that the question itself repeats."""

    def can_be_right(self, row: Row) -> bool:
        """Whether any answer to a row can be right: it has what the task asks and compares."""
        if self.judged(row):
            return True
        if self.letter and not re.fullmatch("[A-Z]", str(row.get(self.letter, "")).strip()):
            return False
        return not self.options_in_question or bool(_OPTION_B.search(str(row.get("question", ""))))


TASKS: Mapping[str, Task] = {
    "videomme": Task(
        "videomme",
        "videomme",
        "videomme_perception_score",
        100,
        _field("score"),
        letter="answer",
    ),
    "videomme_wsub": Task(
        "videomme",
        "videomme_w_subtitle",
        "videomme_perception_score",
        100,
        _field("score"),
        subtitles=True,
        letter="answer",
    ),
    "longvideobench": Task(
        "longvideobench",
        "longvideobench_val_v",
        "lvb_acc",
        1,
        _same_fields("parsed_pred", "answer"),
        row=_with_candidates,
    ),
    "lvbench": Task("lvbench", "lvbench", "lvbench_score", 1, float, letter="answer"),
    "mlvu": Task(
        "mlvu",
        "mlvu_dev",
        "mlvu_percetion_score",
        100,
        _same_fields("pred_answer", "answer"),
        letter="answer",
        options_in_question=True,
    ),
    "mmvu": Task(
        "mmvu",
        "mmvu_val",
        "accuracy",
        100,
        _field("correct"),
        row=_with_video_path,
        judged=_is_open_ended,
        letter="answer",
    ),
    "charades": Task("charades_sta", "temporal_grounding_charades", "charades_sta_mIOU", 100, None),
    "cgbench": Task(
        "cgbench", "cgbench", "cgbench_accuracy", 100, _field("score"), letter="right_answer"
    ),
}
"""Tasks by this project's name of the split."""
