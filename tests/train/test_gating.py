"""The gating command without training: its runs, their order, its table and figure."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from configs.paravt_tiny import paravt_tiny
from paravt_extras.studies import gating, study
from paravt_extras.studies.gating import DRAWN, FIXED, START, Gating, plan, read, table
from paravt_extras.studies.gating_figure import PANELS, draw, figure
from train.durable.interrupts import Interrupts
from train.durable.run_directory import RunDirectory, cold_start_identity
from train.run import resolved
from train.settings import Run

Row = dict[str, Any]
KS = (4, 64)


def row(k: int, score: float, calls: float, **changes: Any) -> Row:
    groups = {
        name: {"score": score, "calls": calls, "n": 4}
        for name in ("mcq", "tvg", "mcq hidden" if k == 4 else "mcq shown")
    }
    setting = {"k": k, "dispatch": "parallel", "temperature": 0.0}
    return setting | {"accuracy": score, "calls": calls, "groups": groups} | changes


class FakeRuns:
    """Replaces `execute`: writes a result whose figures depend on the arm and the seed."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []

    def __call__(self, run: Run, interrupts: Interrupts) -> None:
        folder = pathlib.Path(run.run_dir)
        RunDirectory(folder, resolved(run)).close()
        learned = (0.8 if run.name == "drawn" else 0.4) + run.seed / 100
        result = {
            "before": [*(row(k, 0.1, 0.0) for k in KS), row(4, 0.9, 1.0, temperature=0.7)],
            "curve": [row(k, 0.2, 1.0, step=14) for k in KS],
            "after": [row(k, learned, 2.0) for k in KS],
        }
        (folder / "result.json").write_text(json.dumps(result))
        self.done.append((run.name, run.seed))


@pytest.fixture
def fake(monkeypatch) -> FakeRuns:
    fake = FakeRuns()
    monkeypatch.setattr(study, "execute", fake)
    monkeypatch.setattr(study, "reuse_freed_memory", lambda: None)
    return fake


@pytest.fixture
def folder(tmp_path) -> Iterator[pathlib.Path]:
    """A fresh folder; settings of the process are restored."""
    before = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    yield tmp_path / "gating"
    jax.config.update("jax_compilation_cache_dir", before)


def test_the_arms_of_a_seed_differ_in_k_alone_and_share_a_cold_start():
    runs = plan(Gating("g", seeds=(4, 5)))
    for n, seed in enumerate((4, 5)):
        start, drawn, fixed = (runs[arm][n] for arm in (START, DRAWN, FIXED))
        assert start.world is not None and start.text is not None
        assert start.seed == start.world.seed == start.text.seed == seed
        assert drawn.start == fixed.start == start.run_dir
        for arm in (drawn, fixed):
            assert cold_start_identity(resolved(arm)) == cold_start_identity(resolved(start))
        assert drawn.rl is not None and fixed.rl is not None and start.rl is not None
        assert drawn.rl == dataclasses.replace(start.rl, kinds=("mcq",), control=False)
        assert drawn.rl.rewards.tool_weight == 0
        assert fixed.rl == dataclasses.replace(drawn.rl, frame_budgets=(64,))
        same = {"rl": None, "run_dir": "", "name": ""}
        assert resolved(drawn) | same == resolved(fixed) | same
    assert runs[START][0].rl == paravt_tiny().rl


def test_the_command_carries_out_both_arms_of_a_seed_and_writes_what_it_found(fake, folder, capsys):
    assert gating.main(["--run-dir", str(folder), "--seeds", "7", "8"]) == 0
    names = ("paravt_tiny", "drawn", "fixed")
    assert fake.done == [(name, seed) for seed in (7, 8) for name in names]
    runs = plan(Gating(str(folder), seeds=(7, 8)))
    results = {arm: [read(run) for run in runs[arm]] for arm in (DRAWN, FIXED)}
    assert (folder / "table.md").read_text() == table(results) + "\n"
    assert (folder / "figure.svg").read_text() == figure(results)
    assert json.loads((folder / "results.json").read_text()) == results
    assert table(results) in capsys.readouterr().out
    # The same command again only reads.
    assert gating.main(["--run-dir", str(folder), "--seeds", "7", "8"]) == 0
    assert len(fake.done) == 6


def test_the_table_has_means_and_ranges_before_and_after(fake, folder):
    assert gating.main(["--run-dir", str(folder), "--seeds", "7", "9"]) == 0
    lines = (folder / "table.md").read_text().splitlines()
    assert len(lines) == 2 + 2 * 2 * 2
    assert lines[2].startswith(f"| {DRAWN} | 4 | before | 0.10 [0.10, 0.10] |")
    assert lines[3].startswith(f"| {DRAWN} | 4 | after | 0.88 [0.87, 0.89] |")
    assert lines[-1].startswith(f"| {FIXED} | 64 | after | 0.48 [0.47, 0.49] |")
    # With K = 4 no question shows its answer here, with K = 64 all do.
    assert lines[3].split(" | ")[5:7] == ["2.00 [2.00, 2.00]", "–"]
    assert lines[-1].split(" | ")[5:7] == ["–", "2.00 [2.00, 2.00]"]


def test_the_figure_has_a_column_per_arm_and_a_line_per_k(fake, folder):
    assert gating.main(["--run-dir", str(folder), "--seeds", "7", "9"]) == 0
    drawing: Any = draw(json.loads((folder / "results.json").read_text()))
    assert len(drawing.axes) == 2 * len(PANELS)
    left, right = drawing.axes[:2]
    assert left.get_title() == f"trained with {DRAWN}"
    assert right.get_title() == f"trained with {FIXED}"
    for axes, last in ((left, 0.88), (right, 0.48)):
        assert len(axes.lines) == len(KS)
        assert list(axes.lines[0].get_xdata()) == [0, 14, 56]
        assert axes.lines[0].get_ydata() == pytest.approx([0.1, 0.2, last])


@pytest.mark.parametrize("seeds", [(), (4, 4), (-1,)])
def test_seeds_are_different_numbers(seeds):
    with pytest.raises(ValueError, match="seeds: "):
        Gating(seeds=seeds)
