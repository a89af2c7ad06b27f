"""Tables of `paradox`: tool gap, likelihood of tags, and format by temperature.

docs/method.md explains the three measures. Cells are means over seeds, with the lowest and the
highest in brackets if there are several, and a dash where nothing was measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from paravt_extras.report.claim import (
    KINDS,
    Weighted,
    budgets,
    format_table,
    gaps,
    tag_probabilities,
    weighted_mean,
)
from paravt_extras.studies.paradox_figure import Result

# The steps at each end of training over which tags are averaged.
END_STEPS = 5
Phase = Literal["before", "after"]


def show(values: Iterable[float | None]) -> str:
    """The mean over seeds, with the lowest and the highest value if there are several."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    mean = f"{statistics.mean(known):.2f}"
    return mean if len(known) == 1 else f"{mean} [{min(known):.2f}, {max(known):.2f}]"


def claim_tables(results: dict[str, list[Result]]) -> str:
    """All tables in Markdown, each below a line that says what it shows."""
    return "\n\n".join(
        [
            "Tool gap of training rollouts, over all steps: the mean reward of rollouts with calls"
            " minus that of rollouts without, by K.",
            gap_table(results),
            "Tool gap of held-out questions at temperature 0.7: the same for accuracy.",
            held_out_gap_table(results),
            "Likelihood of tags: the mean probability of the tags that training rollouts sampled,"
            f" in the first and the last {END_STEPS} steps; by tag in the last.",
            tag_table(results),
            "Format by sampling temperature on held-out questions, over all K. "
            f"{_rollouts(results)} Compliance, then the published format reward.",
            temperature_table(results),
        ]
    )


def gap_table(results: dict[str, list[Result]]) -> str:
    """The tool gap of training rollouts: a row per setting, a column per K."""
    trained = _trained(results)
    ks = sorted({k for runs in trained.values() for run in runs for k in budgets(run.by_step)})

    def gap(run: Result, k: int) -> float | None:
        return weighted_mean([value for step in run.by_step for value in gaps(step, k)])

    rows = [
        [name, *(show(gap(run, k) for run in runs) for k in ks)] for name, runs in trained.items()
    ]
    return _table(["setting", *(f"K={k}" for k in ks)], rows)


def held_out_gap_table(results: dict[str, list[Result]]) -> str:
    """The tool gap of held-out questions: a row per setting, columns before and after by K."""
    ks = sorted(next(iter(results.values()))[0].after)
    columns: list[tuple[Phase, int]] = [(when, k) for when in ("before", "after") for k in ks]

    def gap(run: Result, when: Phase, k: int) -> float | None:
        return (run.before if when == "before" else run.after)[k]["tool_gap"]

    rows = [
        [name, *(show(gap(run, when, k) for run in runs) for when, k in columns)]
        for name, runs in _trained(results).items()
    ]
    return _table(["setting", *(f"{when}, K={k}" for when, k in columns)], rows)


def tag_table(results: dict[str, list[Result]]) -> str:
    """The likelihood of sampled tags: a row per setting; all tags first and last, then by kind."""
    columns: dict[str, Callable[[Result], float | None]] = {
        "all tags, first steps": lambda run: _tags(run.by_step[:END_STEPS]),
        "all tags, last steps": lambda run: _tags(run.by_step[-END_STEPS:]),
    }
    for kind, tag in KINDS.items():
        columns[f"`{tag}`"] = lambda run, kind=kind: _tags(run.by_step[-END_STEPS:], kind)
    rows = [
        [name, *(show(map(value, runs)) for value in columns.values())]
        for name, runs in _trained(results).items()
    ]
    return _table(["setting", *columns], rows)


def _tags(steps: Sequence[dict[str, float]], kind: str = "") -> float | None:
    values: list[Weighted] = [value for step in steps for value in tag_probabilities(step, kind)]
    return weighted_mean(values)


def temperature_table(results: dict[str, list[Result]]) -> str:
    """Format by temperature: rows before and after RL for each setting."""
    temperatures = sorted({row["temperature"] for row in _first(results).by_temperature})
    columns = [(name, t) for name in ("compliance", "format_reward") for t in temperatures]
    rows = []
    for name, runs in _trained(results).items():
        for when in ("before", "after"):
            by_run = [_by_temperature(run, when) for run in runs]
            cells = [show(found[t].get(measure) for found in by_run) for measure, t in columns]
            rows.append([name, when, *cells])
    titles = [f"{measure.replace('_', ' ')}, {_title(t)}" for measure, t in columns]
    return _table(["setting", "RL", *titles], rows)


def _by_temperature(run: Result, when: str) -> dict[float, dict[str, float]]:
    return {line["temperature"]: line[when] for line in format_table(run.by_temperature)}


def _rollouts(results: dict[str, list[Result]]) -> str:
    """The number of rollouts of one run at each temperature, in words."""
    found = _by_temperature(_first(results), "after")
    counts = [f"{sides['n']:.0f} ({_title(t)})" for t, sides in found.items()]
    return f"Rollouts per run: {', '.join(counts)}."


def _title(temperature: float) -> str:
    return f"{temperature:g}" if temperature else "greedy"


def _first(results: dict[str, list[Result]]) -> Result:
    return next(iter(_trained(results).values()))[0]


def _trained(results: dict[str, list[Result]]) -> dict[str, list[Result]]:
    """The settings that were trained: all but the cold start."""
    return {name: runs for name, runs in results.items() if runs[0].by_step}


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
