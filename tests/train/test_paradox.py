"""The paradox command without training: its runs, their order, and its verdict on the claims."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import signal
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from configs.paradox import ARMS
from paravt_extras.studies import paradox, study
from paravt_extras.studies.paradox import (
    COLD_START,
    Paradox,
    Result,
    at_the_end,
    base,
    claims,
    folder_of,
    held_out,
    order,
    plan,
    read,
    report,
    table,
)
from paravt_extras.studies.paradox_figure import figure
from paravt_extras.studies.paradox_tables import (
    gap_table,
    held_out_gap_table,
    show,
    tag_table,
    temperature_table,
)
from paravt_extras.studies.study import carry_out
from paravt_jax.method.rewards import RewardSettings
from paravt_jax.world import text as world_text
from paravt_jax.world import videos
from paravt_jax.world.text import TextSettings
from train.durable.checkpoint import CheckpointError
from train.durable.interrupts import Interrupts
from train.durable.run_directory import RunDirectory, RunDirectoryError
from train.learn.rl_settings import RLSettings
from train.left_out import LeftOutError
from train.run import resolved
from train.settings import Run

GRPO, ANCHORED, GATED, FULL = ARMS
KS = (4, 16, 64)


# Figures


def result(
    accuracy: float,
    compliance: float,
    kappa: float | tuple[float, float, float],
    start: float = 1.0,
) -> Result:
    """A run with the same figures at each K; `kappa` may be given for K = 4, 16 and 64.

    `compliance` is that of the last training rollouts, `start` is kappa before the run.
    """
    calls = kappa if isinstance(kappa, tuple) else (kappa, kappa, kappa)

    def at_each(column: tuple[float, float, float]) -> dict[int, dict[str, Any]]:
        return {
            k: {"accuracy": accuracy, "compliance": 0.0, "calls": at, "tool_gap": 16 / k - 0.25}
            for k, at in zip(KS, column, strict=True)
        }

    steps = [
        {
            "step": float(n),
            "accuracy": accuracy,
            "compliance": compliance if n > 10 else 0.0,
            "calls": calls[0],
        }
        for n in range(1, 16)
    ]
    by_temperature = temperatures(lift=compliance / 2)
    return Result(at_each((start, start, start)), at_each(calls), steps, by_temperature)


def temperatures(lift: float = 0.5) -> list[dict[str, Any]]:
    """Format falls with temperature before training, and is higher by `lift` after it."""
    return [
        {
            "phase": phase,
            "k": k,
            "temperature": temperature,
            "n": 67,
            "compliance": 0.5 - 0.3 * temperature + gain,
            "format_reward": 0.5 + gain,
        }
        for phase, gain in (("before", 0.0), ("after", lift))
        for k in KS
        for temperature in (0.0, 0.3, 0.7, 1.0)
    ]


def as_published(**changes: dict[str, Any]) -> dict[str, list[Result]]:
    """Two seeds per setting, with figures that support all claims; `changes` are to seed 1."""
    figures: dict[str, dict[str, Any]] = {
        COLD_START: {"accuracy": 0.4, "compliance": 0.1, "kappa": 1.0},
        GRPO: {"accuracy": 0.5, "compliance": 0.15, "kappa": (1.6, 0.9, 0.2)},
        ANCHORED: {"accuracy": 0.5, "compliance": 0.9, "kappa": (1.2, 0.6, 0.2)},
        GATED: {"accuracy": 0.6, "compliance": 0.3, "kappa": 1.5},
        FULL: {"accuracy": 0.8, "compliance": 0.95, "kappa": 1.6},
    }
    assert changes.keys() <= figures.keys()
    results = {
        name: [result(**given), result(**given | changes.get(name, {}))]
        for name, given in figures.items()
    }
    return results | {COLD_START: results[COLD_START][1:]}


def failing(results: dict[str, list[Result]]) -> list[int]:
    """The numbers of the claims that do not hold."""
    said = claims(results)
    assert [claim[:3] for claim, _, _ in said] == [f"({i})" for i in range(1, 6)]
    return [i for i, (_, holds, _) in enumerate(said, 1) if not holds]


def test_figures_like_the_papers_support_every_claim():
    assert failing(as_published()) == []


@pytest.mark.parametrize(
    ("setting", "figures", "claim"),
    [
        (GRPO, {"kappa": (0.0, 0.0, 0.25)}, [1]),  # exactly a quarter
        (GRPO, {"kappa": (9.0, 9.0, 0.24)}, []),  # only K = 64 counts
        (GRPO, {"kappa": (9.0, 9.0, 0.24), "start": 0.9}, [1]),  # relative to its own start
        (GRPO, {"compliance": 0.5}, [2]),
        (ANCHORED, {"compliance": 0.49}, [3]),
        (ANCHORED, {"kappa": (1.2, 0.6, 0.3)}, [3]),
        (GATED, {"kappa": 0.49}, [4]),
        (GATED, {"kappa": 0.5}, []),
        (GATED, {"compliance": 0.5}, [4]),
        (FULL, {"accuracy": 0.6}, [5]),
        (GATED, {"accuracy": 0.8}, [5]),
        (FULL, {"compliance": 0.3}, [5]),
        (FULL, {"kappa": 0.4}, [5]),
    ],
)
def test_one_contrary_seed_refutes_a_claim(setting, figures, claim):
    assert failing(as_published(**{setting: figures})) == claim


def test_a_claim_shows_its_figures():
    said = [
        figures
        for _, _, figures in claims(
            as_published(**{GRPO: {"kappa": (1, 1, 0.4), "compliance": 0.25}})
        )
    ]
    assert (
        said[0]
        == said[1]
        == "κ 1.00 [1.00, 1.00] -> 0.30 [0.20, 0.40], compliance 0.20 [0.15, 0.25]"
    )
    expected = {
        GRPO: "0.50 [0.50, 0.50]",
        ANCHORED: "0.50 [0.50, 0.50]",
        GATED: "0.60 [0.60, 0.60]",
        FULL: "0.80 [0.80, 0.80]",
    }
    assert said[4].endswith(
        "accuracy " + ", ".join(f"{name} {figure}" for name, figure in expected.items())
    )


def test_claims_use_the_largest_k():
    small = {
        name: [
            dataclasses.replace(
                r, before={2: r.before[4], 8: r.before[64]}, after={2: r.after[4], 8: r.after[64]}
            )
            for r in column
        ]
        for name, column in as_published().items()
    }
    assert "K = 8" in claims(small)[0][0] and failing(small) == []


def test_a_measure_is_read_at_one_k_or_as_the_mean_over_k():
    results = [result(0.5, 0.5, (3.0, 2.0, 1.0)), result(0.5, 0.5, (0.0, 0.0, 1.5), start=0.2)]
    assert held_out(results, "calls", 4) == [3.0, 0.0]
    assert held_out(results, "calls") == [2.0, 0.5]
    assert held_out(results, "calls", when="before") == pytest.approx([1.0, 0.2])
    assert at_the_end(results, "compliance") == [0.5, 0.5], (
        "the last five steps, not the ten before them"
    )


def test_several_seeds_are_shown_with_their_range_and_one_without():
    assert show([0.25, 0.5, 0.9]) == "0.55 [0.25, 0.90]"
    assert show([0.5]) == "0.50"


def test_the_table():
    start = dataclasses.replace(result(0.4, 0.1, (1.0, 2.0, 3.0)), by_step=[])
    results = {COLD_START: [start], GRPO: [result(0.5, 0.2, 0.0), result(0.7, 0.3, 1.0)]}
    half = " 0.50 [0.00, 1.00] |"
    titles = "accuracy K=4 | accuracy K=16 | accuracy K=64 | κ K=4 | κ K=16 | κ K=64"
    assert table(results).splitlines() == [
        f"| setting | compliance, training | κ, training | {titles} |",
        "|---|---|---|---|---|---|---|---|---|",
        "| cold start | – | – | 0.40 | 0.40 | 0.40 | 1.00 | 2.00 | 3.00 |",
        f"| GRPO | 0.25 [0.20, 0.30] |{half}{' 0.60 [0.50, 0.70] |' * 3}{half * 3}",
    ]


def measured(**figures: float) -> dict[str, float]:
    """A step's metrics; two underscores in a name stand for a slash."""
    return {"step": 1.0} | {name.replace("__", "/"): value for name, value in figures.items()}


def test_the_gap_of_training_is_weighted_over_steps_and_missing_where_none_was_seen():
    gap = {"k4__rollouts": 16.0, "k64__rollouts": 16.0, "k64__rollouts_with_calls": 0.0}
    steps = [
        measured(k4__tool_gap=1.0, k4__rollouts_with_calls=8.0, **gap),
        measured(k4__tool_gap=0.0, k4__rollouts_with_calls=4.0, **gap),
    ]
    results = {
        COLD_START: [Result({}, {}, [])],
        GRPO: [Result({}, {}, steps), Result({}, {}, steps[:1])],
    }
    # Weights 8 * 8 / 16 and 4 * 12 / 16: the mean of the first run is 4 / 7.
    assert gap_table(results).splitlines() == [
        "| setting | K=4 | K=64 |",
        "| --- | --- | --- |",
        "| GRPO | 0.79 [0.57, 1.00] | – |",
    ]


def test_the_gap_of_held_out_questions_is_shown_before_and_after():
    results = {GRPO: [result(0.5, 0.2, 0.0)]}
    results[GRPO][0].after[64]["tool_gap"] = None
    titles, _, line = held_out_gap_table(results).splitlines()
    assert titles.split(" | ")[1:] == [
        *(f"before, K={k}" for k in KS),
        "after, K=4",
        "after, K=16",
        "after, K=64 |",
    ]
    assert line == "| GRPO | 3.75 | 0.75 | 0.00 | 3.75 | 0.75 | – |"


def test_tags_are_shown_at_both_ends_of_training_in_arms_without_an_anchor_too():
    steps = [
        measured(
            tags__probability=n / 20,
            tags__count=10.0,
            tags__think_close__probability=n / 40,
            tags__think_close__count=5.0,
            tags__think_open__count=0.0,
        )
        for n in range(1, 21)
    ]
    lines = tag_table({GRPO: [Result({}, {}, steps)]}).splitlines()
    assert lines[0].startswith("| setting | all tags, first steps | all tags, last steps |")
    assert "`</think>` | `<tool_call>`" in lines[0]
    # Steps 1 to 5, and 16 to 20.
    assert lines[2].startswith("| GRPO | 0.15 | 0.90 | – | 0.45 | – |")


def test_format_is_shown_at_every_temperature_before_and_after():
    lines = temperature_table({GRPO: [result(0.5, 0.2, 0.0), result(0.5, 0.6, 0.0)]}).splitlines()
    assert lines[0].startswith("| setting | RL | compliance, greedy | compliance, 0.3 |")
    assert lines[2] == "| GRPO | before" + " | 0.50 [0.50, 0.50] | 0.41 [0.41, 0.41]" + (
        " | 0.29 [0.29, 0.29] | 0.20 [0.20, 0.20]" + " | 0.50 [0.50, 0.50]" * 4 + " |"
    )
    assert lines[3].startswith("| GRPO | after | 0.70 [0.60, 0.80] | 0.61 [0.51, 0.71] |")


def test_the_report_states_the_number_of_rollouts_at_each_temperature():
    assert "Rollouts per run: 201 (greedy), 201 (0.3), 201 (0.7), 201 (1)." in report(
        as_published()
    )


def test_the_report_says_whether_each_claim_holds():
    results = as_published(**{FULL: {"accuracy": 0.6}})
    lines = report(results).splitlines()
    assert (
        lines[:7] == table(results).splitlines()
        and lines[8] == "Of the paper's claims, with 2 seeds:"
    )
    assert [line.split(":")[0] for line in lines[10:15]] == ["- holds"] * 4 + ["- does not hold"]
    assert "one seed: a look" in report({name: column[:1] for name, column in results.items()})


# The runs


def rl_of(run: Run) -> RLSettings:
    assert run.rl is not None
    return run.rl


def test_every_setting_has_its_seeds_and_all_start_from_one_cold_start():
    runs = plan(Paradox(run_dir="here", seeds=2))
    assert list(runs) == [COLD_START, *ARMS]
    [start] = runs[COLD_START]
    assert start.rl is None and start.start == "" and start.sft is not None
    for arm in ARMS:
        assert [run.seed for run in runs[arm]] == [0, 1]
        assert rl_of(runs[arm][0]) == rl_of(runs[arm][1])
        for run in runs[arm]:
            assert run.start == start.run_dir
            # What `take_over` compares, and what is measured afterwards.
            for field in (
                "world",
                "text",
                "model",
                "frames",
                "align",
                "sft",
                "evaluation",
                "engine",
            ):
                assert getattr(run, field) == getattr(start, field), field
    folders = [run.run_dir for column in runs.values() for run in column]
    assert len(set(folders)) == 9 and all(
        re.fullmatch(r"here/cold-start|here/outcome/[a-z-]+-\d", folder) for folder in folders
    )
    assert len({column[0].name for column in runs.values()}) == 5


@pytest.mark.parametrize(
    ("arm", "gated", "anchored"),
    [(GRPO, False, False), (ANCHORED, False, True), (GATED, True, False), (FULL, True, True)],
)
def test_a_setting_differs_from_the_full_method_in_its_remedies_only(arm, gated, anchored):
    runs = plan(Paradox())
    run, whole = runs[arm][0], runs[FULL][0]
    rl, full = rl_of(run), rl_of(whole)
    assert (
        rl.frame_budgets == (full.frame_budgets if gated else (64,)) and len(full.frame_budgets) > 1
    )
    assert (
        (rl.grpo.anchor == "none") is not anchored
        and run.protocol.pin_think is anchored
        and rl.rewards.answer_suffix is anchored
    )
    mended = dataclasses.replace(
        rl,
        frame_budgets=full.frame_budgets,
        grpo=dataclasses.replace(rl.grpo, anchor=full.grpo.anchor),
        rewards=dataclasses.replace(rl.rewards, answer_suffix=full.rewards.answer_suffix),
    )
    protocol = dataclasses.replace(run.protocol, pin_think=True)
    assert (
        dataclasses.replace(
            run, rl=mended, protocol=protocol, name=whole.name, run_dir=whole.run_dir
        )
        == whole
    )


def test_a_weak_prior_has_a_cold_start_of_its_own_and_two_settings():
    strong, weak = plan(Paradox(run_dir="here")), plan(Paradox(run_dir="here", prior="weak"))
    assert list(weak) == [COLD_START, GRPO, FULL]
    assert weak[COLD_START][0].run_dir == "here/cold-start-weak"
    for arm in (GRPO, FULL):
        assert [run.run_dir for run in weak[arm]] == [
            run.run_dir.replace("/outcome/", "/outcome-weak/") for run in strong[arm]
        ]
        assert {run.start for run in weak[arm]} == {"here/cold-start-weak"}
        # Only the demonstrations differ.
        text = strong[arm][0].text
        assert [rl_of(run) for run in weak[arm]] == [rl_of(run) for run in strong[arm]]
        assert weak[arm][0].text != text and weak[arm][0].protocol == strong[arm][0].protocol
    assert order(weak)[0] == weak[COLD_START][0] and len(order(weak)) == 7


@pytest.mark.parametrize(("prior", "least", "most"), [("strong", 0.6, 1.0), ("weak", 0.02, 0.1)])
def test_the_prior_is_the_share_of_demonstrations_that_call(prior, least, most):
    run = base(Paradox(prior=prior))
    assert run.world is not None and run.text is not None
    train_videos = videos.of_split(videos.plan(run.world), "train")[:150]
    said = [
        "".join(str(part) for turn in demonstration.turns for part in turn.content)
        for demonstration in world_text.main_conversations(train_videos, run.text)
    ]
    calls = [text for text in said if "crop_video(" in text or '"crop_video"' in text]
    assert len(said) > 500
    assert least < len(calls) / len(said) <= most
    assert any("<tool_code>" in text for text in calls) == (prior == "strong")


def test_without_all_settings_the_claims_are_left_out():
    runs = [result(0.5, 0.2, 0.0)]
    both = {COLD_START: [dataclasses.replace(runs[0], by_step=[])], GRPO: runs, FULL: runs}
    assert "Of the paper's claims" not in report(both)
    assert f"| {FULL} |" in report(both)


def test_quick_is_one_seed_and_a_third_of_the_steps():
    whole, quick = plan(Paradox()), plan(Paradox(quick=True))
    for arm in ARMS:
        [run] = quick[arm]
        first = whole[arm][0]
        assert run == dataclasses.replace(
            first,
            run_dir=run.run_dir,
            rl=dataclasses.replace(rl_of(run), steps=rl_of(first).steps // 3),
        )
    assert quick[COLD_START] == whole[COLD_START]


def test_rewards_are_a_choice():
    outcome, published = (
        rl_of(plan(Paradox(rewards=paid))[FULL][0]).rewards for paid in ("outcome", "published")
    )
    assert outcome.format_weight == outcome.tool_weight == 0
    assert (
        published == RewardSettings(format_cap=False)
        and published.format_weight > 0
        and published.tool_weight > 0
    )


class FakeRuns:
    """Replaces `execute`: writes the files of a run, with figures that depend on its place."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []

    def __call__(self, run: Run, interrupts: Interrupts) -> None:
        interrupts.check("stopped")
        folder = pathlib.Path(run.run_dir)
        RunDirectory(folder, resolved(run)).close()
        value = len(self.done) / 100
        rows = [
            {
                "k": k,
                "accuracy": value,
                "compliance": 0.5,
                "calls": k / 64,
                "turns": 2.0,
                "tool_gap": 0.25,
            }
            for k in KS
        ]
        more = [row | {"dispatch": "parallel"} for row in temperatures()]
        figures = {"before": rows, "after": rows, "by_temperature": more}
        (folder / "result.json").write_text(json.dumps(figures))
        steps = [
            {
                "phase": "rl",
                "step": s,
                "wall": 0.0,
                "accuracy": value,
                "compliance": 0.5,
                "calls": 1.0,
                "loss": 0.0,
                "tags/count": 0.0,
            }
            for s in (1, 2)
        ]
        lines = [{"phase": "sft", "step": 1, "wall": 0.0, "loss": 1.0}, *(steps if run.rl else [])]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.done.append((run.name, run.seed))


@pytest.fixture
def fake(monkeypatch) -> FakeRuns:
    fake = FakeRuns()
    monkeypatch.setattr(study, "execute", fake)
    return fake


@pytest.fixture
def command(monkeypatch, tmp_path) -> Iterator[list[str]]:
    """The command's arguments for a fresh folder; settings of the process are restored."""
    before = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(study, "reuse_freed_memory", lambda: None)
    yield ["--run-dir", str(tmp_path / "paradox")]
    jax.config.update("jax_compilation_cache_dir", before)


ORDER = ["cold_start", *["grpo", "exploration-anchoring", "nframes-gating", "para-grpo"] * 2]


def test_the_cold_start_is_first_then_settings_seed_by_seed(fake, tmp_path):
    carry_out(order(plan(Paradox(run_dir=str(tmp_path), seeds=2))), Interrupts())
    assert fake.done == list(zip(ORDER, [0] * 5 + [1] * 4, strict=True))


def test_finished_runs_are_not_repeated(fake, tmp_path, capsys):
    runs = plan(Paradox(run_dir=str(tmp_path), seeds=2))
    for done in (runs[COLD_START][0], runs[GRPO][0], runs[FULL][1]):
        fake(done, Interrupts())
    fake.done.clear()
    carry_out(order(runs), Interrupts())
    assert fake.done == [("exploration-anchoring", 0), ("nframes-gating", 0), ("para-grpo", 0)] + [
        (name, 1) for name in ORDER[1:4]
    ]
    assert "run 3 of 9: exploration-anchoring, seed 0" in capsys.readouterr().err
    carry_out(order(runs), Interrupts())
    assert len(fake.done) == 6


def test_finished_runs_of_other_settings_are_not_reused(fake, tmp_path):
    carry_out(order(plan(Paradox(str(tmp_path), seeds=1))), Interrupts())
    for other in (
        Paradox(str(tmp_path), quick=True),
        Paradox(str(tmp_path), seeds=1, rewards="published"),
    ):
        carry_out(
            order(plan(other)), Interrupts()
        )  # in folders of their own, from the same cold start
    assert len(fake.done) == 5 + 4 + 4
    runs = plan(Paradox(str(tmp_path), seeds=1))
    spoilt = {
        name: [dataclasses.replace(run, text=TextSettings()) for run in column]
        for name, column in runs.items()
    }
    with pytest.raises(RunDirectoryError, match="another configuration"):
        carry_out(order(spoilt), Interrupts())


def test_at_least_one_seed_is_needed():
    with pytest.raises(ValueError, match="seeds: 0"):
        Paradox(seeds=0)


def test_only_the_measures_of_rl_steps_are_read(fake, tmp_path):
    runs = plan(Paradox(run_dir=str(tmp_path), seeds=1))
    carry_out(order(runs), Interrupts())
    got = read(runs[GRPO][0])
    assert (
        got.before
        == got.after
        == {k: {"accuracy": 0.01, "compliance": 0.5, "calls": k / 64, "tool_gap": 0.25} for k in KS}
    )
    assert got.by_step == [
        {"step": step, "accuracy": 0.01, "compliance": 0.5, "calls": 1.0, "tags/count": 0.0}
        for step in (1, 2)
    ]
    assert got.by_temperature == temperatures()
    assert read(runs[COLD_START][0]).by_step == []


@pytest.mark.parametrize("missing", ["by_temperature", "tool_gap", "tags/count"])
def test_a_run_of_an_older_version_is_named_in_one_line(fake, command, capsys, missing):
    assert paradox.main([*command, "--seeds", "1"]) == 0
    folder = folder_of(Paradox(command[1])) / "grpo-0"
    for name in ("result.json", "metrics.jsonl"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace(f'"{missing}"', '"other"'))
    capsys.readouterr()
    assert paradox.main([*command, "--seeds", "1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {folder}: no tool gap") and line.endswith("--run-dir")


# The command


def test_the_command_writes_results_table_and_figure(fake, command, capsys):
    assert paradox.main([*command, "--seeds", "2"]) == 0
    folder = folder_of(Paradox(command[1]))
    results = {
        name: [read(run) for run in column]
        for name, column in plan(Paradox(command[1], seeds=2)).items()
    }
    assert (folder / "table.md").read_text() == report(results)
    assert (folder / "figure.svg").read_text() == figure(
        {arm: results[arm] for arm in ARMS}, results[COLD_START][0]
    )
    kept = json.loads((folder / "results.json").read_text())
    assert kept[GATED][1]["after"]["64"]["accuracy"] == 0.07 and list(kept) == [COLD_START, *ARMS]
    assert report(results) in capsys.readouterr().out


def test_a_signal_stops_the_command_with_advice(fake, command, monkeypatch, capsys):
    def interrupted(run: Run, interrupts: Interrupts) -> None:
        if len(fake.done) == 2:
            signal.raise_signal(signal.SIGTERM)
        fake(run, interrupts)

    monkeypatch.setattr(study, "execute", interrupted)
    assert paradox.main(command) == 143
    assert len(fake.done) == 2 and "same command" in capsys.readouterr().err
    assert not (folder_of(Paradox(command[1])) / "table.md").exists()


def test_a_foreign_folder_is_an_error(command, capsys):
    stranger = pathlib.Path(command[1]) / "cold-start" / "thesis.tex"
    stranger.parent.mkdir(parents=True)
    stranger.write_text("")
    assert paradox.main(command) == 1
    assert "error: " in (said := capsys.readouterr().err) and "thesis.tex" in said
    assert [file.name for file in stranger.parent.iterdir() if file.name != ".lock"] == [
        "thesis.tex"
    ]


@pytest.mark.parametrize(
    "error", [RunDirectoryError, CheckpointError, LeftOutError, ValueError, OSError]
)
def test_errors_of_a_run_are_errors_of_the_command(error, command, monkeypatch, capsys):
    def refused(run: Run, interrupts: Interrupts) -> None:
        raise error("no room")

    monkeypatch.setattr(study, "execute", refused)
    assert paradox.main(command) == 1
    assert "error: no room" in capsys.readouterr().err
