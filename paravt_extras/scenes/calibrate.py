"""Computes what can be seen of a question's moments: on how many overview frames, and how large.

These are facts about the pictures. Whether a model can read them is not known from here.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from paravt_extras import markdown
from paravt_extras.scenes import sprites
from paravt_extras.scenes.ask import FAMILIES, SceneQuestion
from paravt_extras.scenes.plan import FPS, Moment, SceneVideo
from paravt_jax.data.frames import overview_indices
from paravt_jax.data.sizes import PixelRules

BUDGETS = (4, 8, 16, 32, 64)
HEIGHTS = {
    "word": sprites.WORD_HEIGHT,
    "number": sprites.NUMBER_HEIGHT,
    "clock": sprites.TIME_HEIGHT,
    "animal": sprites.ANIMAL_HEIGHT,
    "vehicle": sprites.VEHICLE_HEIGHT,
}
"""Height of what is to be seen, as a share of the frame; of texts, that of capitals and digits."""


def frames_showing(video: SceneVideo, moment: Moment, budget: int) -> int:
    """Return the number of frames of an overview that show the whole moment."""
    times = overview_indices(video.frames, budget) / FPS
    return int(((times >= moment.start) & (times < moment.end)).sum())


def seen_height(video: SceneVideo, name: str, rules: PixelRules) -> float:
    """Return the height of an entry of `HEIGHTS` in the picture that a model gets, in pixels."""
    height, _ = rules.size(video.lines, video.width)
    return HEIGHTS[name] * height


def facts(
    video: SceneVideo, asked: SceneQuestion, rules: PixelRules | None = None
) -> dict[str, Any]:
    """Return what is known about a question, as JSON.

    Args:
        video: The video.
        asked: The question.
        rules: How frames are resized; by default to at most 50,176 pixels, as recipes do.
    """
    rules = rules or PixelRules()
    reads = FAMILIES[asked.family].reads
    return {
        "id": asked.question.id,
        "video": asked.question.video,
        "family": asked.family,
        "kind": asked.question.kind.value,
        "options": len(asked.question.options),
        "video_seconds": video.seconds,
        "lines": video.lines,
        "spans": [[moment.start, moment.end] for moment in asked.moments],
        "seconds": [moment.end - moment.start for moment in asked.moments],
        # By K: the number of overview frames that show each moment.
        "frames": {
            str(budget): [frames_showing(video, moment, budget) for moment in asked.moments]
            for budget in BUDGETS
        },
        "pixels": {name: round(seen_height(video, name, rules), 1) for name in reads},
    }


def table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of entries of `facts`, one line per family and one for all."""
    by_family = collections.defaultdict(list)
    for entry in entries:
        by_family[entry["family"]].append(entry)
    titles = ["family", "asked", "chance", "seconds", "pixels", *(f"K = {k}" for k in BUDGETS)]
    rows = [_summary(name, by_family[name]) for name in FAMILIES if name in by_family]
    notes = [
        "chance: accuracy of a guess among the options, in multiple choice only",
        "seconds: median time for which a moment is seen, and the shortest",
        "pixels: least height of what is to be read or counted, in the picture that a model gets",
        "K = n: share of questions of which an overview of n frames shows all moments",
    ]
    return "\n".join([markdown.table(titles, [*rows, _summary("all", entries)]), *notes])


def _summary(name: str, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    seconds = [length for entry in entries for length in entry["seconds"]]
    chances = [1 / entry["options"] for entry in entries if entry["options"]]
    return [
        name,
        str(len(entries)),
        f"{statistics.mean(chances):.2f}" if chances else "-",
        f"{statistics.median(seconds):.1f}/{min(seconds):.1f}",
        f"{min(height for entry in entries for height in entry['pixels'].values()):.1f}",
        *(f"{shown_share(entries, budget):.2f}" for budget in BUDGETS),
    ]


def shown_share(entries: Sequence[Mapping[str, Any]], budget: int) -> float:
    """Return the share of questions of which an overview shows every moment."""
    return statistics.mean(all(entry["frames"][str(budget)]) for entry in entries)
