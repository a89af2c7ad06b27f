"""The parts of a run after a phase, and how long they are expected to take."""

from __future__ import annotations

import pathlib

from train.durable.metrics import read_metrics
from train.durable.time_left import Part, usual_step
from train.report.result import evaluation_seconds
from train.settings import Run


def parts_after(name: str, run: Run, folder: pathlib.Path, evaluates: bool) -> list[Part]:
    """The phases and evaluations that follow phase `name`, in order.

    A step of the control takes as long as one of the cold start. The evaluation after RL takes as
    long as the one before it, and that of the control as long as the greedy part of it. What
    nothing tells yet has no time.

    Args:
        name: `align`, `sft`, `control` or `rl`.
        run: The settings.
        folder: The run's folder.
        evaluates: Whether the run has held-out questions to evaluate.
    """
    evaluates = evaluates and run.plays_episodes
    rows = read_metrics(folder / "metrics.jsonl")
    sft_step = usual_step([row for row in rows if row["phase"] == "sft"])
    parts = []
    if run.align is not None:
        parts.append(Part("align", None))
    if run.sft is not None:
        parts.append(Part("sft", None))
    if evaluates:
        parts.append(Part("before", None))
    if evaluates and run.sft is not None and run.rl is not None and run.rl.control:
        parts.append(Part("control", None if sft_step is None else run.rl.steps * sft_step))
        greedy = evaluation_seconds(folder, "before", greedy=True)
        parts.append(Part("evaluation of the control", greedy))
    if run.rl is not None:
        parts.append(Part("rl", None))
    if evaluates:
        parts.append(Part("after", _seconds_after(run, folder)))
    return parts[[part.name for part in parts].index(name) + 1 :]


def _seconds_after(run: Run, folder: pathlib.Path) -> float | None:
    """The expected duration of the evaluation after RL: that of the one before RL."""
    names = ["before"]
    if run.evaluation.format_temperatures:
        names.append("format_before")
    seconds = [evaluation_seconds(folder, name) for name in names]
    known = [span for span in seconds if span is not None]
    return sum(known) if len(known) == len(names) else None
