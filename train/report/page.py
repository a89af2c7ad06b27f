"""report.html: a finished (or running) run on one page that needs nothing but itself.

Owns the page and its order: key figures before and after, curves, the table, about twenty episodes. It reads what a run directory
holds (config.json, metrics.jsonl, result.json, episodes.jsonl), each of which may be missing, and changes none of it.
Invariant: no script and no address on the page, so that it opens anywhere, offline, for as long as browsers read HTML.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from paravt_jax.data.atomic import write_atomically
from rollout.report.episode_card import episode_card
from rollout.report.markup import Html, el, number, page
from train.durable.metrics import format_seconds, read_jsonl, read_metrics
from train.report.chart import line_chart, stacked_chart

Row = dict[str, Any]
EPISODES = 21
GAP_BOUND = 1e-3  # mean absolute log-prob gap in fp32: this project's own promise
OPEN_PER_PHASE = 2
STAGES = {
    "before": "Before reinforcement learning",
    "rl": "During reinforcement learning",
    "after": "After reinforcement learning",
}


@dataclasses.dataclass(frozen=True)
class Curve:
    """One chart: its metric, its title, what it means, and values its axis shall reach."""

    key: str
    title: str
    note: str = ""
    low: float | None = None
    high: float | None = None


RL_CURVES = (
    Curve("accuracy", "accuracy", "of training rollouts", 0, 1),
    Curve("format", "format compliance f", "every turn parses, the last answers", 0, 1),
    Curve("calls", "calls per rollout κ", "", 0),
    Curve("reward/total", "reward: total"),
    Curve("reward/accuracy", "reward: accuracy", "", 0),
    Curve("reward/format", "reward: format", "", 0),
    Curve("reward/anchor", "reward: anchor"),
    Curve("reward/tool", "reward: tool", "", 0),
    Curve("length/response", "response length", "tokens", 0),
    Curve("length/turns", "turns per rollout", "", 0),
    Curve("k/mean", "overview budget K", "mean over prompts", 0),
    Curve("groups/silent", "silent groups", "share without any signal", 0, 1),
    Curve("loss", "loss"),
    Curve("kl_reference", "KL to the reference"),
    Curve("logprob_gap", "log-prob gap", "mean; has to stay below 0.001", 0),
    Curve("token_mismatches", "token mismatches", "has to stay 0", 0, 1),
)
SFT_CURVES = (
    Curve("loss", "loss", "nats a token", 0),
    Curve("time/step", "seconds a step", "", 0),
)
ALIGN_CURVES = (
    Curve("loss", "loss", "", 0),
    Curve("accuracy", "accuracy", "words on the frames named right", 0, 1),
)
PHASE_CURVES = (
    ("rl", "Reinforcement learning", RL_CURVES),
    ("sft", "Cold start", SFT_CURVES),
    ("align", "Alignment of the vision tower", ALIGN_CURVES),
)
STACKED = ("time/rollout", "time/reference", "time/update", "time/data")


def write_report(run_dir: str | os.PathLike[str]) -> pathlib.Path:
    """Writes `run_dir`/report.html and returns its path; missing files leave their part of the page out, with a word about it."""
    root = pathlib.Path(run_dir).resolve()
    config, result = _read_json(root / "config.json"), _read_json(root / "result.json")
    metrics, episodes = read_metrics(root / "metrics.jsonl"), read_jsonl(root / "episodes.jsonl")
    name = str(config.get("name") or config.get("recipe") or root.name)
    main = el(
        "main", _curves(metrics), _table(result), _episodes(root, episodes), _configuration(config)
    )
    text = page(f"{name} · ParaVT in JAX", _head(name, result), main)
    write_atomically(root / "report.html", text)
    return root / "report.html"


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


# The head


def _head(name: str, result: dict[str, Any]) -> Html:
    links = [
        el("a", text, href=f"#{text.lower()}")
        for text in ("Curves", "Evaluation", "Episodes", "Configuration")
    ]
    temperature = _sampling_temperature(result)
    held = (
        ""
        if temperature is None
        else f" Figures are of held-out questions, sampled at temperature {number(temperature)}."
    )
    lead = (
        "A main agent sees a few frames of a video and asks for crops; sub-agents with the same weights look at them side by side; "
        "reinforcement learning credits the whole episode." + held
    )
    tiles = [_tile(*figure) for figure in key_figures(result)]
    quiet = el(
        "p",
        "No result.json yet: the run has not finished, and there is nothing to compare.",
        class_="quiet",
    )
    return el(
        "header",
        el("nav", el("span", "ParaVT in JAX"), links),
        el("h1", name),
        el("p", lead, class_="lede"),
        el("div", tiles, class_="tiles") if tiles else quiet,
        _checks(result),
    )


def key_figures(result: dict[str, Any]) -> list[tuple[str, str, float | None, float | None]]:
    """(title, note, before, after) of the four figures that say whether the run worked; none without evaluation.

    All at the sampling temperature (the highest evaluated). Accuracy and f are means over K with parallel dispatch; kappa and the gain by
    tools - accuracy with parallel dispatch less accuracy with none - at the smallest K, where the overview shows least.
    """
    temperature = _sampling_temperature(result)
    if temperature is None:
        return []
    smallest = min(row["k"] for row in _rows(result) if row["temperature"] == temperature)

    def mean(rows: Sequence[Row], key: str, dispatch: str, k: int | None = None) -> float | None:
        found = [
            row[key]
            for row in rows
            if row["temperature"] == temperature
            and row["dispatch"] == dispatch
            and k in (None, row["k"])
            and row.get(key) is not None
        ]
        return sum(found) / len(found) if found else None

    def gain(rows: Sequence[Row]) -> float | None:
        with_tools, without = (
            mean(rows, "accuracy", dispatch, smallest) for dispatch in ("parallel", "none")
        )
        return None if with_tools is None or without is None else with_tools - without

    measures: list[tuple[str, str, Callable[[Sequence[Row]], float | None]]] = [
        ("accuracy", "mean over K", lambda rows: mean(rows, "accuracy", "parallel")),
        ("format compliance f", "mean over K", lambda rows: mean(rows, "format", "parallel")),
        (
            "calls per rollout κ",
            f"at K = {smallest}",
            lambda rows: mean(rows, "calls", "parallel", smallest),
        ),
        ("gain by crops", f"accuracy at K = {smallest}, less that without crops", gain),
    ]
    return [
        (title, note, of(result.get("before", [])), of(result.get("after", [])))
        for title, note, of in measures
    ]


def _tile(title: str, note: str, before: float | None, after: float | None) -> Html:
    def show(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}".replace("-", "−")

    value = el(
        "div",
        el("span", show(before), class_="was"),
        el("span", " → ", class_="arrow"),
        el("strong", show(after)),
        class_="value",
    )
    return el("div", el("h2", title), value, el("p", note), class_="tile")


def _checks(result: dict[str, Any]) -> Html:
    """What has to hold in every run, marked by whether it did; then the run's other plain figures."""
    rules: dict[str, tuple[str, Callable[[float], bool]]] = {
        "token_mismatches": ("token mismatches", lambda value: value == 0),
        "logprob_gap": ("mean log-prob gap", lambda value: value < GAP_BOUND),
        "recompilations_after_warmup": ("compilations after warm-up", lambda value: value == 0),
    }
    marks = []
    if result.get("seconds") is not None:
        marks.append(
            el("span", "total time", el("b", format_seconds(result["seconds"])), class_="fact")
        )
    for key, (title, holds) in rules.items():
        if (value := result.get(key)) is not None:
            good = holds(value)
            marks.append(
                el(
                    "span",
                    title,
                    el("b", number(value), " ✓" if good else " ✗"),
                    class_=f"fact {'good' if good else 'bad'}",
                )
            )
    known = {*rules, "seconds"}
    for key, value in result.items():
        if key not in known and isinstance(value, int | float):
            marks.append(el("span", key.replace("_", " "), el("b", number(value)), class_="fact"))
    return el("div", marks, class_="facts-row") if marks else Html("")


def _rows(result: dict[str, Any]) -> list[Row]:
    return [*result.get("before", []), *result.get("after", [])]


def _sampling_temperature(result: dict[str, Any]) -> float | None:
    return max((row["temperature"] for row in _rows(result)), default=None)


# The curves


def _curves(metrics: list[Row]) -> Html:
    parts = []
    for phase, title, curves in PHASE_CURVES:
        lines = [row for row in metrics if row["phase"] == phase]
        if charts := _charts(lines, curves):
            parts += [el("h3", title), el("div", charts, class_="charts")]
    quiet = el("p", "No metrics yet.", class_="quiet")
    note = el(
        "p",
        "Faint: as measured. Strong: moving average. Point at a chart for its values.",
        class_="quiet",
    )
    return el("section", el("h2", "Curves"), [note, *parts] if parts else quiet, id="curves")


def _charts(lines: list[Row], curves: Sequence[Curve]) -> list[Html]:
    """The known curves that the run has, then seconds by phase, then whatever else it recorded."""
    steps = [row["step"] for row in lines]

    def values(key: str) -> list[float | None]:
        return [row.get(key) for row in lines]

    keys = {
        key
        for row in lines
        for key, value in row.items()
        if isinstance(value, int | float) and key not in ("step", "wall")
    }
    known = [curve for curve in curves if curve.key in keys]
    times = [key for key in STACKED if key in keys]
    named = {curve.key for curve in known} | set(times)
    stacked = (
        times + sorted(key for key in keys - named if key.startswith("time/")) if times else []
    )
    rest = [Curve(key, key.replace("_", " ")) for key in sorted(keys - named - set(stacked))]

    def figure(curve: Curve) -> Html:
        history = values(curve.key)
        return _figure(
            curve.title,
            curve.note,
            history,
            line_chart(list(zip(steps, history, strict=True)), curve.low, curve.high),
        )

    charts = [figure(curve) for curve in known]
    if stacked:
        totals = [sum(row.get(key) or 0.0 for key in stacked) for row in lines]
        chart = stacked_chart(steps, [(key.removeprefix("time/"), values(key)) for key in stacked])
        charts.append(_figure("seconds by phase", "of each step", totals, chart))
    return charts + [figure(curve) for curve in rest]


def _figure(title: str, note: str, values: Sequence[float | None], chart: Html) -> Html:
    known = [value for value in values if value is not None]
    tenth = max(1, len(known) // 10)
    first, last = (sum(part) / len(part) for part in (known[:tenth], known[-tenth:]))
    span = el(
        "span",
        f"{number(first)} → ",
        el("b", number(last)),
        class_="span",
        title="mean of the first and of the last tenth",
    )
    return el(
        "figure", el("figcaption", el("span", title, class_="name"), span, el("small", note)), chart
    )


# The table


def _table(result: dict[str, Any]) -> Html:
    order = {"parallel": 0, "sequential": 1, "none": 2}
    pairs: dict[tuple[float, str, int], dict[str, Row]] = {}
    for side in ("before", "after"):
        for row in result.get(side, []):
            pairs.setdefault((row["temperature"], row["dispatch"], row["k"]), {})[side] = row
    if not pairs:
        return el(
            "section",
            el("h2", "Evaluation"),
            el("p", "No evaluation yet.", class_="quiet"),
            id="evaluation",
        )
    body, group = [], None
    for key in sorted(pairs, key=lambda key: (-key[0], order.get(key[1], 3), key[2])):
        temperature, dispatch, k = key
        if group != (temperature, dispatch):
            group = (temperature, dispatch)
            sampling = "greedy" if temperature == 0 else f"temperature {number(temperature)}"
            words = {
                "none": "no crops",
                "parallel": "crops in parallel",
                "sequential": "one crop a turn",
            }.get(dispatch, dispatch)
            body.append(
                el(
                    "tr",
                    el("th", words, el("span", sampling), colspan=6, scope="rowgroup"),
                    class_="group",
                )
            )
        before, after = pairs[key].get("before", {}), pairs[key].get("after", {})
        cells = [
            el("td", _change(before.get(name), after.get(name)))
            for name in ("format", "calls", "turns")
        ]
        was, now = before.get("accuracy"), after.get("accuracy")
        count = el("td", number(after.get("n", before.get("n"))), class_="n")
        body.append(
            el(
                "tr",
                el("th", str(k), scope="row"),
                el("td", _change(was, now), _dumbbell(was, now)),
                cells,
                count,
            )
        )
    head = el(
        "tr", [el("th", title, scope="col") for title in ("K", "accuracy", "f", "κ", "turns", "n")]
    )
    note = (
        "Held-out questions, before → after reinforcement learning. K: overview frames; f: share of well-formed rollouts; "
        "κ: calls per rollout; turns: of the main agent; n: rollouts."
    )
    return el(
        "section",
        el("h2", "Evaluation"),
        el("p", note, class_="quiet"),
        el("div", el("table", el("thead", head), el("tbody", body)), class_="scroll"),
        id="evaluation",
    )


def _change(before: float | None, after: float | None) -> Html:
    def show(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}"

    return el(
        "span",
        el("span", show(before), class_="was"),
        el("span", " → ", class_="arrow"),
        el("b", show(after)),
        class_="change",
    )


def _dumbbell(before: float | None, after: float | None) -> Html:
    """Both accuracies as dots on a line from 0 to 1."""
    ends = (("was", before), ("now", after))
    dots = [
        el("i", class_=name, style=f"left:{100 * value:.1f}%")
        for name, value in ends
        if value is not None
    ]
    reach = ""
    if before is not None and after is not None:
        reach = el(
            "u",
            style=f"left:{100 * min(before, after):.1f}%;width:{100 * abs(after - before):.1f}%",
        )
    return el("span", reach, dots, class_="dumbbell")


# The episodes


def choose_episodes(episodes: list[Row], count: int = EPISODES) -> dict[str, list[Row]]:
    """At most `count` episodes by stage, each stage's share spread evenly over what was recorded, in order."""
    stages = {stage: [row for row in episodes if row.get("phase") == stage] for stage in STAGES}
    stages = {stage: rows for stage, rows in stages.items() if rows}
    chosen, left = {}, count
    for i, stage in enumerate(
        sorted(stages, key=lambda stage: len(stages[stage]))
    ):  # small stages first: the others take what they leave
        rows = stages[stage]
        share = min(len(rows), left // (len(stages) - i))
        chosen[stage] = [rows[j * len(rows) // share] for j in range(share)]
        left -= share
    return {stage: chosen[stage] for stage in stages}


def _episodes(root: pathlib.Path, episodes: list[Row]) -> Html:
    parts = []
    for stage, rows in choose_episodes(episodes).items():
        cards = [episode_card(root, row, i < OPEN_PER_PHASE) for i, row in enumerate(rows)]
        parts += [el("h3", STAGES[stage]), *cards]
    quiet = el("p", "No episodes recorded yet.", class_="quiet")
    return el(
        "section", el("h2", "Episodes"), [_legend(), *parts] if parts else quiet, id="episodes"
    )


def _legend() -> Html:
    def sample(text: str, class_: str, meaning: str, credit: float | None = None) -> Html:
        return el(
            "span",
            el("code", text, class_=class_, style=None if credit is None else f"--c:{credit}"),
            f" {meaning}",
        )

    return el(
        "div",
        sample("<think>", "by-pinned", "pinned, not trained"),
        sample("plain", "by-model", "written by the model"),
        sample("told", "by-tool", "told by a tool"),
        sample("</think>", "kind k-think", "think"),
        sample("<tool_call>", "kind k-call", "call"),
        sample("<answer>", "kind k-answer", "answer"),
        sample("seven", "kind k-violation", "where a block was broken"),
        sample("credit", "up", "raised", 0.45),
        sample(
            "credit",
            "down",
            "lowered (shade: how much, against the episode's strongest; without the anchor where that is a term of its own)",
            0.45,
        ),
        class_="key",
    )


def _configuration(config: dict[str, Any]) -> Html:
    if not config:
        return Html("")
    text = json.dumps(config, indent=2, ensure_ascii=False, default=str)
    body = el(
        "details", el("summary", "The resolved configuration"), el("pre", text, class_="config")
    )
    return el("section", el("h2", "Configuration"), body, id="configuration")
