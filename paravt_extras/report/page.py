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
import math
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NotRequired

from typing_extensions import TypedDict

from models.family import REHEARSAL
from paravt_extras.report.chart import Chart, line_chart, stacked_chart
from paravt_extras.report.claim import claim_charts, format_table, is_shown
from paravt_extras.report.discovery import greedy, group_table, learning_curves, pair_cards
from paravt_extras.report.result import read_result, result_so_far
from paravt_jax.data.atomic import write_atomically
from paravt_jax.data.stored_json import read_checked_json
from rollout.report.episode_card import episode_card
from rollout.report.templates import environment, number
from train.durable.metrics import PHASE_TITLES, format_seconds, read_jsonl, read_metrics

Row = dict[str, Any]
EPISODES = 21
# Bound on the mean absolute difference between sampled and recomputed log-probs, in float32.
GAP_BOUND = 1e-3
# Episodes per stage that are unfolded when the page opens.
OPEN_PER_PHASE = 2
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


RL_CURVES = (
    Curve("accuracy", "accuracy", "of training rollouts", 0, 1),
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
)
SFT_CURVES = (
    Curve("loss", "loss", "nats per token", 0),
    Curve("time/step", "seconds per step", "", 0),
)
ALIGN_CURVES = (
    Curve("loss", "loss", "", 0),
    Curve("accuracy", "accuracy", "share of words in frames that are read correctly", 0, 1),
    Curve("time/step", "seconds per step", "", 0),
)
PHASE_CURVES = (
    ("rl", "Reinforcement learning", RL_CURVES),
    ("sft", "Cold start", SFT_CURVES),
    ("control", "Control: further SFT from the cold start", SFT_CURVES),
    ("align", "Alignment of the vision tower", ALIGN_CURVES),
)
STACKED = ("time/rollout", "time/reference", "time/update", "time/data")
IDLE = ("idle/tail", "idle/hosts", "idle/files", "idle/compile")


def write_report(run_dir: str | os.PathLike[str], frame_seconds: float = math.inf) -> pathlib.Path:
    """Write `run_dir`/report.html and return its path.

    If a source file is missing, a note takes the place of its part of the page.

    Args:
        run_dir: the run's folder.
        frame_seconds: seconds after which no more frames of videos are read. Frames that this
            process has read before take almost no time.
    """
    until = time.monotonic() + frame_seconds
    root = pathlib.Path(run_dir).resolve()
    config = read_shown_config(root)
    metrics = read_metrics(root / "metrics.jsonl")
    episodes = read_jsonl(root / "episodes.jsonl")
    finished = (root / "result.json").exists()
    result = read_result(root) if finished else result_so_far(root)
    learned = result if finished else _up_to_now(result)
    template = environment(pathlib.Path(__file__).parent).get_template("report.html.jinja")
    text = template.render(
        name=str(config.get("name") or config.get("recipe") or root.name),
        rehearsal=config.get("model", {}).get("size") == REHEARSAL,
        progress="" if finished else progress(root, config, metrics),
        temperature=_sampling_temperature(result),
        figures=key_figures(result),
        learning=learning_curves(learned, _last_step(learned, metrics, finished)),
        control=bool(learned.get("control")),
        groups=group_table(result),
        pairs=pair_cards(root, episodes, until),
        facts=_facts(result, config.get("model", {}).get("dtype")),
        claims=claim_charts([row for row in metrics if row["phase"] == "rl"]),
        formats=format_table(result.get("by_temperature", [])),
        phases=_phases(metrics),
        table=_table(result),
        stages=_stages(root, episodes, until),
        config=json.dumps(config, indent=2, ensure_ascii=False, default=str) if config else "",
    )
    write_atomically(root / "report.html", text)
    return root / "report.html"


def _last_step(learned: Row, metrics: list[Row], finished: bool) -> int:
    """Return the RL step of the last evaluation so far; 0 without one."""
    if not finished:
        return max((row["step"] for row in learned["curve"]), default=0)
    return max((row["step"] for row in metrics if row["phase"] == "rl"), default=0)


def _up_to_now(result: Row) -> Row:
    """Return the part of an unfinished run's result that the curves over RL steps can show.

    The control and the evaluation after RL belong to the last step. An evaluation that is going on
    has no rows yet for some K.
    """
    known = len(greedy(result["before"]))
    by_step = itertools.groupby(result["curve"], lambda row: row["step"])
    complete = [rows for _, group in by_step if len(rows := list(group)) == known]
    return {"before": result["before"], "curve": [row for rows in complete for row in rows]}


class _Phase(TypedDict):
    steps: NotRequired[int]


class _Model(TypedDict):
    dtype: NotRequired[str]


class _Config(TypedDict):
    """What a page reads of config.json."""

    model: NotRequired[_Model]
    align: NotRequired[_Phase | None]
    sft: NotRequired[_Phase | None]
    rl: NotRequired[_Phase | None]


def read_shown_config(root: pathlib.Path) -> dict[str, Any]:
    """Return the configuration of a run; {} if there is none yet.

    Raises:
        DamagedFileError: The file holds something else.
    """
    file = root / "config.json"
    remedy = "restore it from a backup"
    return read_checked_json(file, _Config, remedy) if file.exists() else {}


# --- the head ---


def progress(root: pathlib.Path, config: Row, metrics: list[Row]) -> str:
    """Return how far an unfinished run is: phase, step, and when that was."""
    if not metrics:
        return "The run has not finished. It has recorded no step yet."
    row = metrics[-1]
    phase = row["phase"]
    # The control takes as many steps as RL.
    steps = (config.get("rl" if phase == "control" else phase) or {}).get("steps")
    step = f"{PHASE_TITLES[phase]} {row['step']}" + (f" of {steps}" if steps else "")
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(row["wall"]))
    return f"The run has not finished. Its last step is {step} ({when})."


def key_figures(result: dict[str, Any]) -> list[tuple[str, str, float | None, float | None]]:
    """Return the four figures that tell whether RL worked, at the sampling temperature.

    Accuracy and f are means over K with parallel dispatch. Calls and the gain by crops (accuracy
    with parallel dispatch minus accuracy without tools) are taken at the smallest K, where the
    overview shows least.

    Returns:
        (title, note, before, after) of each; nothing if the run has no evaluation.
    """
    temperature = _sampling_temperature(result)
    if temperature is None:
        return []
    smallest = min(row["k"] for row in _rows(result) if row["temperature"] == temperature)

    def mean(rows: Sequence[Row], key: str, dispatch: str, k: int | None = None) -> float | None:
        values = [
            row.get(key)
            for row in rows
            if row["temperature"] == temperature
            and row["dispatch"] == dispatch
            and k in (None, row["k"])
        ]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    def figures(rows: Sequence[Row]) -> list[float | None]:
        with_crops = mean(rows, "accuracy", "parallel", smallest)
        without = mean(rows, "accuracy", "none", smallest)
        gain = None
        if with_crops is not None and without is not None:
            gain = with_crops - without
        return [
            mean(rows, "accuracy", "parallel"),
            mean(rows, "compliance", "parallel"),
            mean(rows, "calls", "parallel", smallest),
            gain,
        ]

    labels = (
        ("accuracy", "mean over K"),
        ("compliance", "mean over K"),
        ("calls per rollout κ", f"at K = {smallest}"),
        ("gain by crops", f"accuracy at K = {smallest}, minus that without crops"),
    )
    before = figures(result.get("before", []))
    after = figures(result.get("after", []))
    return [
        (title, note, old, new)
        for (title, note), old, new in zip(labels, before, after, strict=True)
    ]


def _facts(result: dict[str, Any], dtype: str | None) -> list[tuple[str, str, bool | None]]:
    """Return (title, value, verdict) of single figures.

    The verdict says whether a check that every run must pass is passed; None for other figures.
    """

    def small_gap(gap: float) -> bool | None:
        # In bfloat16, sampler and trainer round differently, by more than this bound.
        return None if dtype == "bfloat16" else gap < GAP_BOUND

    rules: dict[str, tuple[str, Callable[[float], bool | None]]] = {
        "token_mismatches": ("token mismatches", lambda value: value == 0),
        "logprob_gap": ("mean log-prob gap", small_gap),
        "recompilations_after_warmup": ("compilations after warm-up", lambda value: value == 0),
    }
    facts: list[tuple[str, str, bool | None]] = []
    if result.get("seconds") is not None:
        facts.append(("total time", format_seconds(result["seconds"]), None))
    if result.get("goodput") is not None:
        facts.append(("goodput", f"{result['goodput']:.0%}", None))
    for key, (title, holds) in rules.items():
        value = result.get(key)
        if value is not None:
            facts.append((title, number(value), holds(value)))
    for key, value in result.items():
        if key not in {*rules, "seconds", "goodput"} and isinstance(value, int | float):
            facts.append((key.replace("_", " "), number(value), None))
    return facts


def _rows(result: dict[str, Any]) -> list[Row]:
    return [*result.get("before", []), *result.get("after", [])]


def _sampling_temperature(result: dict[str, Any]) -> float | None:
    """Return the highest temperature of the evaluation; 0 is greedy."""
    return max((row["temperature"] for row in _rows(result)), default=None)


# --- the curves ---


def _phases(metrics: list[Row]) -> list[tuple[str, list[Row]]]:
    """Return (title, charts) of each phase that recorded anything."""
    phases = []
    for phase, title, curves in PHASE_CURVES:
        charts = _charts([row for row in metrics if row["phase"] == phase], curves)
        if charts:
            phases.append((title, charts))
    return phases


def _charts(lines: list[Row], curves: Sequence[Curve]) -> list[Row]:
    """Return the charts of the recorded metrics: known curves, seconds by phase, idle seconds, the
    rest."""
    keys = {key for key in _recorded(lines) if not is_shown(key)}
    times = [key for key in STACKED if key in keys]
    idle = [key for key in IDLE if key in keys]
    rest = keys - {curve.key for curve in curves} - {*times, *idle}
    charts = charts_of(lines, curves)
    if times:
        # Other times are stacked on top of the known ones.
        more = sorted(key for key in rest if key.startswith("time/"))
        times += more
        rest -= set(more)
        charts.append(_stacked(lines, times, "seconds by phase", "of each step"))
    if idle:
        about = "of each step, mean over hosts; tail: rows without a rollout"
        charts.append(_stacked(lines, idle, "idle seconds", about))
    return charts + charts_of(lines, [_unnamed(key) for key in sorted(rest)])


def _unnamed(key: str) -> Curve:
    """Return the curve of a metric without a title of its own."""
    return Curve(key, key.replace("_", " ").replace("/", ": "))


def _stacked(lines: list[Row], keys: Sequence[str], title: str, about: str) -> Row:
    """Return a chart of seconds whose sum is of interest."""
    totals = [sum(row.get(key) or 0.0 for key in keys) for row in lines]
    steps = [row["step"] for row in lines]
    layers = [(key.partition("/")[2], [row.get(key) for row in lines]) for key in keys]
    return _figure(title, about, totals, stacked_chart(steps, layers))


def charts_of(lines: list[Row], curves: Sequence[Curve]) -> list[Row]:
    """Return the charts of those curves of which something is recorded.

    Args:
        lines: The lines of metrics.jsonl of one phase.
        curves: What to draw, in this order.
    """
    keys = _recorded(lines)
    charts = []
    for curve in curves:
        if curve.key in keys:
            history = [row.get(curve.key) for row in lines]
            points = [(row["step"], value) for row, value in zip(lines, history, strict=True)]
            chart = line_chart(points, curve.low, curve.high)
            charts.append(_figure(curve.title, curve.note, history, chart))
    return charts


def _recorded(lines: list[Row]) -> set[str]:
    """Return the names of metrics that have a value in some line."""
    return {
        key
        for row in lines
        for key, value in row.items()
        if isinstance(value, int | float) and key not in ("step", "wall")
    }


def _figure(title: str, note: str, values: Sequence[float | None], chart: Chart) -> Row:
    """Return a chart with its caption, which shows the means of the first and the last tenth of
    values."""
    known = [value for value in values if value is not None]
    tenth = max(1, len(known) // 10)
    return {
        "title": title,
        "note": note,
        "first": sum(known[:tenth]) / tenth,
        "last": sum(known[-tenth:]) / tenth,
        "chart": chart,
    }


# --- the table ---


def _table(result: dict[str, Any]) -> list[tuple[str, float, list[Row]]]:
    """Return (dispatch, temperature, rows) of each group of the table; a row has k, before and
    after."""
    order = {"parallel": 0, "sequential": 1, "none": 2}
    pairs: dict[tuple[float, str, int], Row] = {}
    for side in ("before", "after"):
        for row in result.get(side, []):
            key = (row["temperature"], row["dispatch"], row["k"])
            pairs.setdefault(key, {"k": row["k"], "before": {}, "after": {}})[side] = row
    keys = sorted(pairs, key=lambda key: (-key[0], order.get(key[1], 3), key[2]))
    return [
        (dispatch, temperature, [pairs[key] for key in group])
        for (temperature, dispatch), group in itertools.groupby(keys, lambda key: key[:2])
    ]


# --- the episodes ---


def choose_episodes(episodes: list[Row]) -> dict[str, list[Row]]:
    """Choose episodes by stage: equally many of each, spread evenly over those recorded."""
    stages = {stage: [row for row in episodes if row.get("phase") == stage] for stage in STAGES}
    stages = {stage: rows for stage, rows in stages.items() if rows}
    chosen = {}
    for stage, rows in stages.items():
        count = min(len(rows), EPISODES // len(stages))
        chosen[stage] = [rows[n * len(rows) // count] for n in range(count)]
    return chosen


def _stages(root: pathlib.Path, episodes: list[Row], until: float) -> list[tuple[str, list[Row]]]:
    """Return (title, cards) of each stage; its first cards are unfolded."""
    return [
        (
            STAGES[stage],
            [episode_card(root, row, i < OPEN_PER_PHASE, until) for i, row in enumerate(rows)],
        )
        for stage, rows in choose_episodes(episodes).items()
    ]
