"""Table 1 of the paper as data: scores of models.

It stands on the paper's project page. Its authors played all models again with 64 frames, the same
channel for images, and each model's own prompts. `python -m rollout.evaluate --table` prints
results of this project beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

COLUMNS = {
    "videomme": "VideoMME",
    "videomme_wsub": "+ subtitles",
    "longvideobench": "LongVideoB.",
    "lvbench": "LVBench",
    "mlvu": "MLVU",
    "mmvu": "MMVU",
    "charades": "Charades",
}
"""The splits of table 1 in its order, each with a short heading."""

Cell = float | Literal["-", "*", "+"]
"""A score in per cent, or why there is none; see `MARKS`."""

MARKS = {
    "-": "not published",
    "*": "withheld, because the model trained on data of this benchmark",
    "+": "the model's own tool schema cannot express grounding",
}
"""What a cell without a score means."""

Group = Literal["proprietary", "direct", "reasoning", "agentic"]


@dataclasses.dataclass(frozen=True)
class Model:
    """A line of table 1."""

    group: Group
    name: str
    scores: Mapping[str, Cell]
    """By split."""


def mean_of_complete(cells: Sequence[Cell | None]) -> float | None:
    """Return the mean of scores; None if one is missing, because the others would flatter or
    harm."""
    numbers = [cell for cell in cells if isinstance(cell, float)]
    if not cells or len(numbers) < len(cells):
        return None
    return sum(numbers) / len(numbers)


def _model(group: Group, name: str, *cells: Cell) -> Model:
    return Model(group, name, dict(zip(COLUMNS, cells, strict=True)))


# fmt: off
TABLE_1 = (
    _model("proprietary", "GPT-4o", 71.9, 77.2, 66.7, 34.7, 64.6, 66.7, "-"),
    _model("proprietary", "Gemini 1.5 Pro", 75.0, 81.3, 64.4, 33.1, 74.3, 65.8, "-"),
    _model("direct", "Qwen2.5-VL-7B", 55.7, 64.5, 46.4, 32.2, 47.8, 65.4, 31.6),
    _model("reasoning", "Video-R1-7B", 57.6, 66.0, 57.4, 36.9, 61.6, 61.3, 25.4),
    _model("reasoning", "VideoChat-R1-7B", 50.4, 58.2, 49.2, 23.8, 58.7, 65.0, 31.5),
    _model("reasoning", "VideoRFT-7B", 58.5, 65.6, 55.1, 38.0, 44.9, 42.7, 18.7),
    _model("reasoning", "Time-R1-7B", 58.9, 66.2, 56.0, 38.2, 60.5, 63.4, 34.7),
    _model("reasoning", "ReWatch-R1-7B", 58.8, 65.0, 53.6, 38.5, 60.1, 59.8, 20.2),
    _model("reasoning", "Video-Thinker-7B", 61.9, 65.3, 56.0, "*", 65.2, 64.5, 29.0),
    _model("agentic", "Qwen3-VL-8B", 59.9, 68.4, 52.2, 33.1, 58.3, 68.0, 49.3),
    _model("agentic", "Conan-7B", 55.5, 62.8, 54.5, 38.2, 59.2, 64.0, 25.4),
    _model("agentic", "LongVT-RFT-7B", 59.5, 66.0, 54.7, 37.9, 59.4, 63.4, 23.4),
    _model("agentic", "SAGE-7B", 44.1, 52.4, 37.4, 31.8, 49.7, 55.7, 28.9),
    _model("agentic", "VideoZoomer-7B", 45.3, 48.3, 39.6, 22.9, 46.2, 61.6, "+"),
    _model("agentic", "ParaVT-8B", 62.1, 69.4, 60.4, 39.8, 65.0, 68.6, 50.1),
)
# fmt: on
"""The two proprietary and thirteen open models, in per cent; Charades-STA is mIoU."""
