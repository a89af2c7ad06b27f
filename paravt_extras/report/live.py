"""A small page about a run that is going on: how far it is, its main curves, and one episode.

`report.html` shows everything, but is only written when a run saves. This page is made from
metrics.jsonl, so it changes with every step. `paravt_extras.follow` shows it.
"""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from paravt_extras.report.page import (
    ALIGN_CURVES,
    RL_CURVES,
    SFT_CURVES,
    STAGES,
    charts_of,
    deserves_a_look,
    progress,
    read_shown_config,
)
from rollout.report.episode_card import episode_card
from rollout.report.templates import environment
from train.durable.metrics import read_jsonl, read_metrics

Row = dict[str, Any]

# Accuracy, compliance, calls and reward of RL.
_CURVES = (
    ("rl", "Reinforcement learning", RL_CURVES[:4]),
    ("sft", "Cold start", SFT_CURVES),
    ("align", "Alignment of the vision tower", ALIGN_CURVES),
)
_FRAME_SECONDS = 3.0  # for reading frames of the episode


def live_page(run_dir: str | os.PathLike[str], log: Sequence[str] = ()) -> str:
    """The page of a run as it is now, as HTML without external files.

    Args:
        run_dir: The run's folder; it may not exist yet.
        log: Lines to show below the head, such as the last ones of the run's output.
    """
    root = pathlib.Path(run_dir).absolute()
    metrics = read_metrics(root / "metrics.jsonl")
    settings = read_shown_config(root)
    finished = (root / "result.json").exists()
    episode = newest_episode(read_jsonl(root / "episodes.jsonl"))
    phases = [
        (title, charts_of([row for row in metrics if row["phase"] == phase], curves))
        for phase, title, curves in _CURVES
    ]
    template = environment(pathlib.Path(__file__).parent).get_template("live.html.jinja")
    return template.render(
        name=settings.get("name", root.name),
        progress="The run has finished." if finished else progress(root, settings, metrics),
        log=log,
        warnings=deserves_a_look(root, metrics, finished),
        phases=[(title, charts) for title, charts in phases if charts],
        stage=STAGES[episode["phase"]] if episode else "",
        card=episode and episode_card(root, episode, True, time.monotonic() + _FRAME_SECONDS),
    )


def newest_episode(episodes: Sequence[Row]) -> Row | None:
    """Of the episodes of the latest step, one with the most calls; None without episodes.

    Args:
        episodes: The lines of episodes.jsonl.
    """
    order = list(STAGES)

    def when(episode: Row) -> tuple[int, int]:
        return order.index(episode["phase"]), episode.get("step") or 0

    latest = max(map(when, episodes), default=None)
    return max(
        (episode for episode in episodes if when(episode) == latest),
        key=lambda episode: sum(len(turn["calls"]) for turn in episode["turns"]),
        default=None,
    )
