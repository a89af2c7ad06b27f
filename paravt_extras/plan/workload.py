"""Lengths of the sequences of some RL steps: drawn from a distribution, or from a run's metrics.

A plan without lengths takes every sequence at its limit. Real rollouts are much shorter, so the
expected time of a step needs their lengths:

    Workload     some steps, and the seconds that a tool needs to read a window
      Step         the groups of one step
        Group        one prompt
          Rollout      what follows it; the reports of its sub-agents are among its tokens

`read` takes a JSON file with drawn lengths (benchmarks/lengths_8b.json) or a run's metrics.jsonl.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paravt_jax.data.stored_json import read_checked_json
from train.learn.packing import GroupLengths
from train.settings import Run

# Tokens of a tool result besides its report: turn marks, tags and the next pinned <think>.
RESULT_TOKENS = 12
# Assumed where metrics do not say: spread of log-normal lengths, tokens of a report, and seconds
# that a tool needs to read a window.
SPREAD = 0.5
REPORT_TOKENS = 128
TOOL_SECONDS = 1.2
# A rendered frame of the small world is ready in milliseconds.
WORLD_TOOL_SECONDS = 0.01
# Steps of a metrics file that a plan looks at: the last ones.
RECENT = 8
# Settings that two recipes share if the lengths of one say something about the other.
_SETTINGS_OF_LENGTHS = (
    "model.size",
    "frames",
    "protocol",
    "rl.frame_budgets",
    "rl.grpo.group_size",
)
_GIVE = "give a file like benchmarks/lengths_8b.json or a run's metrics.jsonl"


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Lengths of one main agent, in tokens."""

    response: int
    """Everything after the prompt, tool results included."""
    reports: tuple[int, ...] = ()
    """Reports of its sub-agents, one per executed call."""

    @property
    def results(self) -> int:
        """Tokens of tool results, which are read and not sampled."""
        return sum(report + RESULT_TOKENS for report in self.reports)

    @property
    def sampled(self) -> int:
        """Tokens that the main agent samples; at least one."""
        return max(1, self.response - self.results)


@dataclasses.dataclass(frozen=True)
class Group:
    """A prompt and its rollouts. Lengths in tokens."""

    prompt: int
    visual: int
    """Visual tokens of the prompt."""
    frames: int
    rollouts: tuple[Rollout, ...]


Step = tuple[Group, ...]


def lengths_of(step: Step) -> list[GroupLengths]:
    """The lengths by which a step's rollouts are packed."""
    return [
        GroupLengths(group.prompt, tuple(rollout.response for rollout in group.rollouts))
        for group in step
    ]


@dataclasses.dataclass(frozen=True)
class Workload:
    """Lengths of some steps of RL."""

    source: str
    """Where the lengths come from, for the report."""
    steps: tuple[Step, ...]
    crop_prompt: int = 0
    """A sub-agent's prompt, in tokens."""
    crop_frames: int = 0
    tool_seconds: float = 0.0
    """Seconds in which a tool reads one window of a video."""
    file: str = dataclasses.field(default="", compare=False)
    """The file that was read, if any."""

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for step in self.steps for group in step for rollout in group.rollouts]

    @property
    def tokens(self) -> int:
        """Tokens of a step, each prompt counted once; a mean over the steps."""
        prompts = sum(group.prompt for step in self.steps for group in step)
        responses = sum(rollout.response for rollout in self.rollouts)
        return round((prompts + responses) / len(self.steps))

    def describe(self) -> str:
        """The means of the lengths, on one line."""
        groups = [group for step in self.steps for group in step]
        rollouts = self.rollouts
        mean = sum(rollout.response for rollout in rollouts) / len(rollouts)
        kappa = sum(len(rollout.reports) for rollout in rollouts) / len(rollouts)
        longest = sum(_longest(step) for step in self.steps) / len(self.steps)
        source = f"{self.source} ({self.file})" if self.file else self.source
        return (
            f"{source}: prompts of {sum(group.prompt for group in groups) / len(groups):.0f} "
            f"tokens, responses of {mean:.0f} (the longest of a step {longest:.0f}), "
            f"{kappa:.2f} calls per rollout (kappa), {self.tool_seconds:g} s per read"
        )


@dataclasses.dataclass(frozen=True)
class Distribution:
    """How lengths are drawn. Lengths in tokens."""

    prompts: int
    group_size: int
    frame_budgets: tuple[int, ...]
    """Numbers of overview frames K, drawn evenly per prompt."""
    frame_tokens: int
    """Visual tokens per frame."""
    label_tokens: int
    """Tokens per frame for its timestamp and vision marks."""
    text_tokens: tuple[int, int]
    """System turn and question together: drawn evenly between these bounds."""
    response_mean: float
    """Mean of the log-normal lengths of responses, tool results included."""
    response_limit: int
    kappa: float
    """Executed calls per rollout: Poisson, fewer where their results would exceed half of the
    response."""
    report_mean: float
    report_limit: int
    crop_frames: int
    """Frames that a sub-agent sees."""
    crop_text: int
    """Tokens of a sub-agent's prompt without its frames."""
    tool_seconds: float = TOOL_SECONDS
    spread: float = SPREAD
    """Standard deviation of the logarithm of a length."""


def at_limits(run: Run) -> Workload:
    """One step in which every prompt and every response is as long as it may be.

    Raises:
        ValueError: the recipe has no RL.
    """
    rl = _rl(run)
    frames = max(rl.frame_budgets)
    longest = run.lengths(frames)
    rollouts = (Rollout(longest.response),) * rl.grpo.group_size
    group = Group(longest.prompt, longest.visual, frames, rollouts)
    return Workload("every sequence at its limit", ((group,) * rl.prompts,))


def draw(distribution: Distribution, steps: int, seed: int, source: str) -> Workload:
    """Draws the lengths of some steps; the same for the same seed."""
    rng = np.random.default_rng(seed)
    labelled = distribution.frame_tokens + distribution.label_tokens
    drawn = tuple(
        tuple(_draw_group(distribution, rng) for _ in range(distribution.prompts))
        for _ in range(steps)
    )
    return Workload(
        source,
        drawn,
        distribution.crop_frames * labelled + distribution.crop_text,
        distribution.crop_frames,
        distribution.tool_seconds,
    )


def _draw_group(distribution: Distribution, rng: np.random.Generator) -> Group:
    frames = int(rng.choice(distribution.frame_budgets))
    visual = frames * distribution.frame_tokens
    least, most = distribution.text_tokens
    text = int(rng.integers(least, most + 1))
    rollouts = tuple(_draw_rollout(distribution, rng) for _ in range(distribution.group_size))
    prompt = visual + frames * distribution.label_tokens + text
    return Group(prompt, visual, frames, rollouts)


def _draw_rollout(distribution: Distribution, rng: np.random.Generator) -> Rollout:
    spread = distribution.spread
    response = _log_normal(rng, distribution.response_mean, spread, distribution.response_limit)
    reports: list[int] = []
    room = response // 2
    for _ in range(rng.poisson(distribution.kappa)):
        report = _log_normal(rng, distribution.report_mean, spread, distribution.report_limit)
        room -= report + RESULT_TOKENS
        if room < 0:
            break
        reports.append(report)
    return Rollout(response, tuple(reports))


def _log_normal(rng: np.random.Generator, mean: float, spread: float, limit: int) -> int:
    """A length from 1 to `limit` whose mean, before it is cut, is `mean`."""
    length = rng.lognormal(math.log(mean) - spread**2 / 2, spread)
    return int(np.clip(round(length), 1, limit))


def write(file: pathlib.Path, distribution: Distribution, seed: int, workload: Workload) -> None:
    """Stores a distribution and what was drawn from it.

    The drawn lengths are stored as well, so that everybody counts the same.
    """
    fields = json.dumps(dataclasses.asdict(distribution), indent=1)
    # One line per group: [prompt, visual, frames, [[response, reports], ...]].
    steps = []
    for step in workload.steps:
        groups = [
            json.dumps([group.prompt, group.visual, group.frames, _as_lists(group.rollouts)])
            for group in step
        ]
        steps.append("[\n" + ",\n".join(groups) + "\n]")
    source = json.dumps(workload.source)
    file.write_text(
        f'{{\n"source": {source},\n"seed": {seed},\n"distribution": {fields},\n'
        f'"steps": [{", ".join(steps)}]\n}}\n'
    )


def _as_lists(rollouts: Sequence[Rollout]) -> list[list[Any]]:
    return [[rollout.response, list(rollout.reports)] for rollout in rollouts]


def read(file: pathlib.Path, run: Run) -> Workload:
    """Reads the lengths of some steps, in tokens.

    Args:
        file: a JSON file by `write`, or a run's metrics.jsonl.
        run: the recipe, whose limits bound the lengths. Metrics hold means only: `from_metrics`
            says what is derived from the recipe.

    Raises:
        ValueError: the file cannot be read, a length exceeds the recipe's limits, or the lengths
            are those of a recipe with other settings.
    """
    try:
        workload = _parse(file, run)
        _check(workload, run)
    except OSError as error:
        raise ValueError(f"--lengths {file}: {error.strerror}; name an existing file") from error
    except KeyError as error:
        raise ValueError(f"--lengths {file}: no entry {error.args[0]!r}; {_GIVE}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--lengths {file}: not JSON; {_GIVE}") from error
    except ValueError as error:
        raise ValueError(f"--lengths {file}: {error}") from error
    return dataclasses.replace(workload, file=str(file))


def _parse(file: pathlib.Path, run: Run) -> Workload:
    """Raises ValueError or KeyError for a file without lengths of this recipe."""
    text = file.read_text()
    if file.suffix == ".jsonl":
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        _check_recipe(file.with_name("config.json"), run)
        return from_metrics(rows, run)
    fields = json.loads(text)
    try:
        workload = _from_fields(fields)
    except (TypeError, IndexError, ValueError) as error:
        raise ValueError(f"not in the form of a file of lengths; {_GIVE}") from error
    budgets = tuple(fields["distribution"]["frame_budgets"])
    expected = _rl(run).frame_budgets
    if set(budgets) != set(expected):
        raise ValueError(
            f"drawn for K = {_listed(budgets)}, while {run.name} has K = {_listed(expected)} "
            "(rl.frame_budgets); give the lengths of this recipe"
        )
    return workload


def _listed(budgets: Sequence[int]) -> str:
    return ", ".join(map(str, budgets))


def _check_recipe(config: pathlib.Path, run: Run) -> None:
    """Raises ValueError if the settings beside some metrics are those of a different recipe."""
    if not config.exists():
        return
    theirs = read_checked_json(config, dict[str, Any], "restore it from a backup")
    # As JSON has no tuples.
    ours = json.loads(json.dumps(dataclasses.asdict(run)))
    others = [
        name for name in _SETTINGS_OF_LENGTHS if _setting(theirs, name) != _setting(ours, name)
    ]
    if others:
        raise ValueError(
            f"metrics of {theirs.get('name')}, whose {', '.join(others)} differ from those of "
            f"{run.name}; give the metrics of a run of {run.name}"
        )


def _setting(settings: Any, name: str) -> Any:
    """A setting by its dotted name; None if there is none."""
    for part in name.split("."):
        settings = settings.get(part) if isinstance(settings, dict) else None
    return settings


def _from_fields(fields: Mapping[str, Any]) -> Workload:
    values = dict(fields["distribution"])
    for name in ("frame_budgets", "text_tokens"):
        values[name] = tuple(values[name])
    distribution = Distribution(**values)
    steps = tuple(
        tuple(
            Group(prompt, visual, frames, tuple(Rollout(n, tuple(r)) for n, r in rollouts))
            for prompt, visual, frames, rollouts in step
        )
        for step in fields["steps"]
    )
    labelled = distribution.frame_tokens + distribution.label_tokens
    crop_prompt = distribution.crop_frames * labelled + distribution.crop_text
    return Workload(
        fields["source"], steps, crop_prompt, distribution.crop_frames, distribution.tool_seconds
    )


def from_metrics(rows: Sequence[Mapping[str, Any]], run: Run) -> Workload:
    """The lengths of the last steps of a run, from its metrics.

    Taken from the metrics: prompts per number of frames K (`k4/rollouts`), sampled tokens per
    rollout (`length/response`) and calls per rollout at each K (`k4/calls`, else `calls`). Derived:
    prompts have their largest size at their K, responses are log-normal around their mean, and
    reports have `REPORT_TOKENS` tokens, or the recipe's limit if that is less.

    Raises:
        ValueError: there is no step of RL.
    """
    steps = [row for row in rows if row.get("phase", "rl") == "rl" and "length/response" in row]
    if not steps:
        raise ValueError("no step of RL; give the metrics of a run with RL")
    found = tuple(_step_of(row, run) for row in steps[-RECENT:])
    limits = limits_of(run)
    crop = limits.crop_frames * (limits.frame_tokens + limits.label_tokens) + limits.crop_text
    source = f"the last {len(found)} steps of a run's metrics"
    return Workload(source, found, crop, limits.crop_frames, limits.tool_seconds)


def _step_of(row: Mapping[str, Any], run: Run) -> Step:
    """One step from its metrics; see `from_metrics`."""
    limits = limits_of(run)
    report = min(REPORT_TOKENS, run.protocol.summary_tokens)
    groups: list[Group] = []
    for k in limits.frame_budgets:
        distribution = dataclasses.replace(
            limits,
            prompts=round(row.get(f"k{k}/rollouts", 0) / limits.group_size),
            frame_budgets=(k,),
            response_mean=row["length/response"],
        )
        seed = int(row.get("step", 0)) * 1000 + k
        kappa = row.get(f"k{k}/calls", row["calls"])
        rng = np.random.default_rng([seed, 1])
        for group in draw(distribution, 1, seed, "").steps[0]:
            rollouts = []
            for rollout in group.rollouts:
                # Drawn lengths are those of sampled tokens; tool results come on top.
                room = (limits.response_limit - rollout.response) // (report + RESULT_TOKENS)
                reports = (report,) * min(int(rng.poisson(kappa)), room)
                results = len(reports) * (report + RESULT_TOKENS)
                rollouts.append(Rollout(rollout.response + results, reports))
            groups.append(dataclasses.replace(group, rollouts=tuple(rollouts)))
    return tuple(groups)


def limits_of(run: Run) -> Distribution:
    """A distribution in which all lengths that do not vary have the recipe's limits."""
    rl = _rl(run)
    limits = run.protocol
    longest = run.lengths(max(rl.frame_budgets))
    crop_labelled = run.crop_frame_tokens + limits.label_tokens
    return Distribution(
        prompts=rl.prompts,
        group_size=rl.grpo.group_size,
        frame_budgets=rl.frame_budgets,
        frame_tokens=run.frame_tokens,
        label_tokens=limits.label_tokens,
        text_tokens=(limits.text_tokens, limits.text_tokens),
        response_mean=longest.response,
        response_limit=longest.response,
        kappa=0.0,
        report_mean=limits.summary_tokens,
        report_limit=limits.summary_tokens,
        crop_frames=limits.crop_frames,
        crop_text=max(0, longest.crop_prompt - limits.most_crop_frames * crop_labelled),
        tool_seconds=TOOL_SECONDS if run.world is None else WORLD_TOOL_SECONDS,
    )


def _check(workload: Workload, run: Run) -> None:
    """Raises ValueError for lengths that the recipe does not allow."""
    rl = _rl(run)
    longest = run.lengths(max(rl.frame_budgets))
    for step in workload.steps:
        if not step or any(len(group.rollouts) != rl.grpo.group_size for group in step):
            raise ValueError(
                f"a step without groups of {rl.grpo.group_size} rollouts "
                f"(rl.grpo.group_size); give the lengths of {run.name}"
            )
        prompt = max(group.prompt for group in step)
        if prompt > longest.prompt or _longest(step) > longest.response:
            raise ValueError(
                f"a prompt above {longest.prompt} tokens or a response above "
                f"{longest.response}, the limits of {run.name}; give its own lengths"
            )


def _longest(step: Step) -> int:
    return max(rollout.response for group in step for rollout in group.rollouts)


def _rl(run: Run) -> Any:
    if run.rl is None:
        raise ValueError(f"{run.name}.rl: None; lengths are those of RL: give a recipe with it")
    return run.rl
