"""Table 2 of the paper as data: settings of training.

`python -m paravt_extras.summary --table-2` prints results of this project beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Setting:
    """A row of table 2: Qwen3-VL-8B under one setting of training."""

    block: Literal["A", "B", "C"]
    """A: stages and the two parts of PARA-GRPO. B: terms of the reward. C: dispatch of calls."""
    title: str
    f: float | None
    """Mean format reward of training rollouts at temperature 0.7."""
    kappa: float | None
    """Mean number of tool calls per training rollout."""
    scores: Mapping[str, float]
    """In per cent, by split."""

    def text(self) -> str:
        """Return the row as a line of text."""
        videomme, subtitled, lvbench, mlvu = self.scores.values()
        text = (
            f"VideoMME {videomme:.1f}, with subtitles {subtitled:.1f}, LVBench {lvbench:.1f}, "
            f"MLVU {mlvu:.1f}"
        )
        if self.f is None or self.kappa is None:
            return text
        return f"{text}; f {self.f:.2f}, kappa {self.kappa:.2f}"


TABLE_2_SPLITS = ("videomme", "videomme_wsub", "lvbench", "mlvu")
"""The splits of table 2, in its order."""


def _setting(
    block: Literal["A", "B", "C"],
    title: str,
    f: float | None,
    kappa: float | None,
    *scores: float,
) -> Setting:
    return Setting(block, title, f, kappa, dict(zip(TABLE_2_SPLITS, scores, strict=True)))


TABLE_2 = {
    "base": _setting("A", "Qwen3-VL-8B", 0.03, 0.45, 59.9, 68.4, 33.1, 58.3),
    "sft": _setting("A", "+ SFT", 0.13, 2.50, 60.7, 69.0, 39.1, 63.7),
    "vanilla_grpo": _setting("A", "+ SFT + GRPO", 0.13, 0.02, 62.0, 68.6, 39.3, 64.5),
    "exploration_anchoring": _setting(
        "A", "... + exploration anchoring", 0.35, 0.19, 61.7, 68.7, 39.3, 64.1
    ),
    "nframes_gating": _setting("A", "... + nFrames gating", 0.10, 1.36, 61.3, 68.7, 39.1, 63.6),
    "paravt": _setting("A", "full PARA-GRPO", 0.41, 0.21, 62.1, 69.4, 39.8, 65.0),
    "no_tool_reward": _setting(
        "B", "full, without the tool reward", 0.33, 0.04, 61.9, 68.5, 38.7, 64.3
    ),
    "no_penalty": _setting(
        "B", "full, without the penalty gamma", 0.36, 0.27, 61.6, 69.0, 38.8, 64.5
    ),
    "sequential": _setting("C", "full, sequential dispatch", None, None, 61.4, 68.8, 37.5, 64.1),
}
"""The rows by key. Where an ablation of `configs.ablations` trains the setting, it has that key."""
