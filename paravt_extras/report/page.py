"""Writes report.html: one page about a finished or running run.

It shows key figures before and after RL, what deserves a look, what was learned, whether calls pay
and the format holds, curves, the evaluation table and about twenty episodes. The page of a run
without result.json says how far the run is, and shows what there is.
The sources are config.json, metrics.jsonl, result.json, evaluation/ and episodes.jsonl
of the run; any of them may be missing. The page has no scripts and loads nothing, so it opens
offline in any browser.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from models.family import REHEARSAL
from paravt_extras.report.chart import Point, line_chart, lines_chart
from paravt_extras.report.claim import claim_charts, is_shown
from paravt_extras.report.discovery import group_table, learning_curves
from paravt_jax.data.stored import read_checked_json, write_atomically
from rollout.report.episode_card import episode_card
from rollout.report.templates import environment, number
from train.durable.metrics import PHASE_TITLES, read_jsonl, read_metrics
from train.durable.run_folder import RESUMED
from train.result import read_result, result_so_far

Record = dict[str, Any]
EPISODES = 21
# Bound on the mean absolute difference between sampled and recomputed log-probs, in float32.
GAP_BOUND = 1e-3
# Episodes per stage that are unfolded when the page opens.
OPEN_PER_STAGE = 2
STAGES = {
    "before": "Before reinforcement learning",
    "rl": "During reinforcement learning",
    "after": "After reinforcement learning",
}


@dataclasses.dataclass(frozen=True)
class Curve:
    """One chart of a metric."""

    key: str
    """Name of the metric."""
    title: str
    note: str = ""
    """Short explanation of the metric."""
    low: float | None = None
    """Value that the y-axis must include."""
    high: float | None = None
    """Value that the y-axis must include."""


CURVES = (
    Curve("accuracy", "accuracy", "of the training data", 0, 1),
    Curve("compliance", "compliance", "every turn parses, the last one answers", 0, 1),
    Curve("calls", "calls per rollout κ", "", 0),
    Curve("reward/total", "reward: total"),
    Curve("format_reward", "format reward as published", "its mean is the paper's f", 0, 1),
    Curve("length/response", "response length", "tokens", 0),
    Curve("k/mean", "overview budget K", "mean over prompts", 0),
    Curve("groups/silent", "silent groups", "share of groups without a learning signal", 0, 1),
    Curve("loss", "loss"),
    Curve("kl_reference", "KL to the reference"),
    Curve("logprob_gap", "log-prob gap", "mean; in float32 below 0.001", 0),
    Curve("token_mismatches", "token mismatches", "must stay 0", 0, 1),
    Curve("time/step", "seconds per step", "", 0),
)
PHASES = {
    "rl": "Reinforcement learning",
    "sft": "Cold start",
    "align": "Alignment of the vision tower",
}
SECONDS = "time/"
"""Prefix of the metrics that share a chart."""


def write_report(run_dir: str | os.PathLike[str]) -> pathlib.Path:
    """Write `run_dir`/report.html and return its path.

    If a source file is missing, a note takes the place of its part of the page.

    Args:
        run_dir: the run's folder.
    """
    root = pathlib.Path(run_dir).resolve()
    config = read_shown_config(root)
    metrics = read_metrics(root / "metrics.jsonl")
    episodes = read_jsonl(root / "episodes.jsonl")
    finished = (root / "result.json").exists()
    result = read_result(root) if finished else result_so_far(root)
    rl_lines = [line for line in metrics if line["phase"] == "rl"]
    learning = learning_curves(result, max((line["step"] for line in rl_lines), default=0))
    template = environment(pathlib.Path(__file__).parent).get_template("report.html.jinja")
    text = template.render(
        name=config.get("name", root.name),
        rehearsal=config.get("model", {}).get("size") == REHEARSAL,
        progress="" if finished else progress(metrics),
        resumed=config.get(RESUMED, []),
        temperature=_sampling_temperature(result),
        figures=key_figures(result),
        learning=learning,
        groups=group_table(result),
        facts=_facts(result, config.get("model", {}).get("dtype")),
        claims=claim_charts(rl_lines),
        phases=_phases(metrics),
        table=_table(result),
        stages=_stages(root, episodes),
        config=json.dumps(config, indent=2, ensure_ascii=False, default=str) if config else "",
    )
    write_atomically(root / "report.html", text)
    return root / "report.html"


def read_shown_config(root: pathlib.Path) -> Record:
    """Return the configuration of a run; {} if there is none yet.

    Raises:
        DamagedFileError: The file holds something else.
    """
    file = root / "config.json"
    remedy = "delete it and start the run's command, which restores it"
    return read_checked_json(file, Record, remedy) if file.exists() else {}


# --- the head ---


def progress(metrics: list[Record]) -> str:
    """Return how far an unfinished run is: phase, step, and when that was."""
    if not metrics:
        return "The run has not finished. It has recorded no step yet."
    line = metrics[-1]
    step = f"{PHASE_TITLES[line['phase']]} {line['step']}"
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(line["wall"]))
    return f"The run has not finished. Its last step is {step} ({when})."


def key_figures(result: Record) -> list[tuple[str, str, float | None, float | None]]:
    """Return the four figures that tell whether RL worked, at the sampling temperature.

    Accuracy and compliance are means over K with parallel dispatch. Calls and the gain by crops
    (accuracy with parallel dispatch minus accuracy without tools) are taken at the smallest K,
    where the overview shows least.

    Returns:
        (title, note, before, after) of each; nothing if the run has no evaluation.
    """
    temperature = _sampling_temperature(result)
    if temperature is None:
        return []
    smallest = min(line["k"] for line in _evaluated(result) if line["temperature"] == temperature)
    titles = (
        ("accuracy", "mean over K"),
        ("compliance", "mean over K"),
        ("calls per rollout κ", f"at K = {smallest}"),
        ("gain by crops", f"accuracy at K = {smallest}, minus that without crops"),
    )
    before, after = (
        _key_values(result.get(side, []), temperature, smallest) for side in ("before", "after")
    )
    return [(*title, old, new) for title, old, new in zip(titles, before, after, strict=True)]


def _key_values(lines: Sequence[Record], temperature: float, smallest: int) -> list[float | None]:
    sampled = [line for line in lines if line["temperature"] == temperature]
    parallel = [line for line in sampled if line["dispatch"] == "parallel"]
    with_crops = [line for line in parallel if line["k"] == smallest]
    without = [line for line in sampled if line["dispatch"] == "none" and line["k"] == smallest]
    gain = None
    if with_crops and without:
        gain = with_crops[0]["accuracy"] - without[0]["accuracy"]
    return [
        _mean(parallel, "accuracy"),
        _mean(parallel, "compliance"),
        _mean(with_crops, "calls"),
        gain,
    ]


def _mean(lines: Sequence[Record], key: str) -> float | None:
    known = [line[key] for line in lines if line.get(key) is not None]
    return sum(known) / len(known) if known else None


def _facts(result: Record, dtype: str | None) -> list[tuple[str, str, bool | None]]:
    """Return (title, value, verdict) of single figures.

    The verdict says whether a check that every run must pass is passed; None for other figures.
    """
    # In bfloat16, sampler and trainer round differently, by more than this bound.
    gap_bound = None if dtype == "bfloat16" else GAP_BOUND
    rules = (
        ("token_mismatches", "token mismatches", 0),
        ("logprob_gap", "mean log-prob gap", gap_bound),
        ("recompilations_after_warmup", "compilations after warm-up", 0),
    )
    facts: list[tuple[str, str, bool | None]] = []
    if "seconds" in result:
        facts.append(("first step to last", tqdm.format_interval(result["seconds"]), None))
    for key, title, most in rules:
        if key in result:
            verdict = None if most is None else result[key] <= most
            facts.append((title, number(result[key]), verdict))
    return facts


def _evaluated(result: Record) -> list[Record]:
    return [*result.get("before", []), *result.get("after", [])]


def _sampling_temperature(result: Record) -> float | None:
    """Return the first temperature of the evaluation; 0 is greedy."""
    return next((line["temperature"] for line in _evaluated(result)), None)


# --- the curves ---


def _phases(metrics: list[Record]) -> list[tuple[str, list[Record]]]:
    """Return (title, charts) of each phase that recorded anything."""
    phases = [
        (title, _charts([line for line in metrics if line["phase"] == phase]))
        for phase, title in PHASES.items()
    ]
    return [(title, charts) for title, charts in phases if charts]


def _charts(lines: list[Record]) -> list[Record]:
    """Return the charts of the recorded metrics: known curves, seconds by phase, the rest."""
    keys = {key for line in lines for key, value in line.items() if isinstance(value, int | float)}
    keys = {key for key in keys - {"step", "wall"} if not is_shown(key)}
    charts = [_curve(lines, curve) for curve in CURVES if curve.key in keys]
    rest = sorted(keys - {curve.key for curve in CURVES})
    shared = [key for key in rest if key.startswith(SECONDS)]
    if shared:
        series = [(key.removeprefix(SECONDS), _points(lines, key)) for key in shared]
        chart = lines_chart(series, 0.0, 0.0)
        charts.append({"title": "seconds by phase", "note": "of each step", "chart": chart})
        rest = [key for key in rest if key not in shared]
    unnamed = [Curve(key, key.replace("_", " ").replace("/", ": ")) for key in rest]
    return charts + [_curve(lines, curve) for curve in unnamed]


def _curve(lines: list[Record], curve: Curve) -> Record:
    """Return the chart of a recorded metric, and the means of its first and last tenth."""
    points = _points(lines, curve.key)
    known = [value for _, value in points if value is not None]
    tenth = max(1, len(known) // 10)
    return {
        "title": curve.title,
        "note": curve.note,
        "first": sum(known[:tenth]) / tenth,
        "last": sum(known[-tenth:]) / tenth,
        "chart": line_chart(points, curve.low, curve.high),
    }


def _points(lines: list[Record], key: str) -> list[Point]:
    return [(line["step"], line.get(key)) for line in lines]


# --- the table ---


def _table(result: Record) -> list[tuple[str, float, list[Record]]]:
    """Return (dispatch, temperature, lines) of each group of the table; a line has k, before and
    after."""
    order = {"parallel": 0, "sequential": 1, "none": 2}
    pairs: dict[tuple[float, str, int], Record] = {}
    for side in ("before", "after"):
        for line in result.get(side, []):
            key = (line["temperature"], line["dispatch"], line["k"])
            pairs.setdefault(key, {"k": line["k"], "before": {}, "after": {}})[side] = line
    keys = sorted(pairs, key=lambda key: (-key[0], order.get(key[1], 3), key[2]))
    return [
        (dispatch, temperature, [pairs[key] for key in group])
        for (temperature, dispatch), group in itertools.groupby(keys, lambda key: key[:2])
    ]


# --- the episodes ---


def _stages(root: pathlib.Path, episodes: list[Record]) -> list[tuple[str, list[Record]]]:
    """Return (title, cards) of each stage: equally many episodes of each, spread evenly.

    The first cards of a stage are unfolded.
    """
    known = {stage: [e for e in episodes if e.get("phase") == stage] for stage in STAGES}
    known = {stage: members for stage, members in known.items() if members}
    stages = []
    for stage, members in known.items():
        count = min(len(members), EPISODES // len(known))
        chosen = [members[n * len(members) // count] for n in range(count)]
        cards = [
            episode_card(root / e["video"], e, n < OPEN_PER_STAGE) for n, e in enumerate(chosen)
        ]
        stages.append((STAGES[stage], cards))
    return stages
