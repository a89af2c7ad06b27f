"""What deserves a look: each condition is told when it begins, and a healthy run is silent."""

from __future__ import annotations

import os
import random
import shutil
from types import SimpleNamespace
from typing import Any

from train.durable.watch import (
    Watch,
    calls_vanish,
    compliance_falls,
    disk_fills,
    gap_rises,
    no_signal,
    room_for_checkpoint,
    slow_step,
    warnings,
)

Row = dict[str, Any]


def healthy(count: int) -> list[Row]:
    """Lines of a run that learns: f and accuracy rise, everything varies from step to step."""
    rng = random.Random(0)
    rows = []
    wall = 1000.0
    for step in range(1, count + 1):
        rollout = rng.uniform(40, 70)
        wall += rollout + 50
        rows.append(
            {
                "phase": "rl",
                "step": step,
                "wall": wall,
                "accuracy": min(1.0, 0.4 + step / 100 + rng.gauss(0, 0.08)),
                "compliance": min(1.0, 0.7 + step / 100 + rng.gauss(0, 0.05)),
                "calls": max(0.0, 0.8 + rng.gauss(0, 0.3)),
                "groups/silent": rng.choice((0.25, 0.5, 0.75, 1.0)),
                "logprob_gap": 2e-3 * rng.uniform(0.5, 1.5),
                "recompilations": 0.0,
                "time/rollout": rollout,
                "time/update": 49.0,
            }
        )
    return rows


def changed(rows: list[Row], last: int, **values: float | None) -> list[Row]:
    """The rows with other values in the last ones; `__` stands for a slash."""
    new = {name.replace("__", "/"): value for name, value in values.items()}
    return [*rows[:-last], *(row | new for row in rows[-last:])]


def test_a_healthy_run_is_silent():
    assert warnings(healthy(100)) == []


def test_vanishing_calls_are_told_when_there_were_calls():
    rows = healthy(40)
    text = calls_vanish(changed(rows, 10, calls=0.01))
    assert text is not None and "0.01 per rollout" in text and "rl.grpo.kl-coefficient" in text
    assert calls_vanish(changed(rows, 10, calls=0.1)) is None
    never = changed(rows, 40, calls=0.0)
    assert calls_vanish(never) is None
    assert calls_vanish(rows[:5]) is None


def test_a_falling_f_is_told():
    rows = healthy(40)
    text = compliance_falls(changed(rows, 10, compliance=0.6))
    assert text is not None and text.startswith("compliance falls: 0.60")
    assert compliance_falls(changed(rows, 1, compliance=0.6)) is None, "one step is noise"
    assert compliance_falls(changed(rows, 40, compliance=0.3)) is None, "it has always been so low"


def test_a_rising_log_prob_gap_is_told():
    rows = healthy(40)
    text = gap_rises(changed(rows, 10, logprob_gap=0.02))
    assert text is not None and "2.0e-02" in text
    assert gap_rises(rows) is None
    exact = changed(rows, 40, logprob_gap=5e-7)
    assert gap_rises(changed(exact, 10, logprob_gap=5e-6)) is None, "rounding errors"


def test_steps_without_any_signal_are_told():
    rows = healthy(20)
    assert no_signal(changed(rows, 5, groups__silent=1.0)) is not None
    assert no_signal(changed(changed(rows, 5, groups__silent=1.0), 1, groups__silent=0.9)) is None
    assert no_signal(changed(rows[:4], 4, groups__silent=1.0)) is None


def slowed(rows: list[Row], **values: float) -> list[Row]:
    """The rows with a slow last step, which ends as much later."""
    last = changed(rows, 1, **values)[-1]
    seconds = last["time/rollout"] + last["time/update"]
    return [*rows[:-1], last | {"wall": rows[-2]["wall"] + seconds + 1}]


def test_a_slow_step_is_told_with_the_part_that_was_slow():
    rows = healthy(40)
    text = slow_step(slowed(rows, time__rollout=600.0))
    assert text is not None
    assert text.startswith("step 40 took 10 min 49 s (mostly rollout), usually 1 min")
    assert "the judge" in text
    compiled = slow_step(slowed(rows, time__update=600.0, recompilations=1.0))
    assert compiled is not None and "(mostly update)" in compiled and "compiled" in compiled
    assert slow_step(slowed(rows, time__rollout=150.0)) is None
    # The first step of a process compiles. It follows a pause.
    late = slowed(rows, time__rollout=600.0)
    assert slow_step([*late[:-1], late[-1] | {"wall": late[-1]["wall"] + 3600}]) is None
    short = [row | {"time/rollout": 0.1, "time/update": 0.1} for row in rows]
    assert slow_step(slowed(short, time__rollout=2.0)) is None, "seconds do not matter"


def test_a_slow_step_of_the_cold_start_is_told():
    rows = [
        {"phase": "sft", "step": step, "wall": 30.0 * step, "loss": 1.0, "time/step": 29.0}
        for step in range(1, 21)
    ]
    slow = rows[-1] | {"step": 21, "wall": rows[-1]["wall"] + 301, "time/step": 300.0}
    [(phase, step, text)] = warnings([*rows, slow])
    assert (phase, step) == ("sft", 21)
    assert text.startswith("step 21 took 5 min 00 s, usually 29 s.")


def test_a_condition_is_told_again_only_after_it_has_ended():
    rows = changed(healthy(80), 80, **{"groups/silent": 0.5})
    # Silent in steps 10 to 30, with one exception, and again in steps 50 to 60.
    for step in [*range(10, 20), *range(21, 31), *range(50, 61)]:
        rows[step - 1]["groups/silent"] = 1.0
    told = [(step, text) for _, step, text in warnings(rows)]
    assert [step for step, _ in told] == [14, 54]
    assert all("no group has a signal" in text for _, text in told)


def test_a_resumed_run_repeats_no_warning():
    rows = changed(healthy(40), 20, groups__silent=1.0)
    whole = Watch("rl")
    steps = [row["step"] for row in rows if whole.add(row)]
    assert steps == [25]
    resumed = Watch("rl")
    for row in rows[:30]:
        resumed.add(row)
    assert not [row for row in rows[30:] if resumed.add(row)]


def test_metrics_that_were_not_finite_are_left_out():
    rows = changed(healthy(40), 1, logprob_gap=None, calls=None, format=None)
    assert warnings(rows) == []


def checkpoint(folder, step: str, size: int) -> None:
    (folder / step / "state").mkdir(parents=True)
    (folder / step / "state" / "data").write_bytes(os.urandom(size))


def test_a_full_disk_is_told_before_the_next_checkpoint(tmp_path, monkeypatch):
    assert room_for_checkpoint(tmp_path / "none") is None
    checkpoint(tmp_path, "8", 10)
    checkpoint(tmp_path, "16", 3000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2000))
    assert room_for_checkpoint(tmp_path) == (3000, 2000)

    def vanished(_: object) -> None:
        raise FileNotFoundError("renamed meanwhile")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", vanished)
        assert room_for_checkpoint(tmp_path) is None
    # A checkpoint is measured once: reading its files again would be slow on a network disk.
    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "rglob", vanished)
        assert room_for_checkpoint(tmp_path) == (3000, 2000)
    # While a save runs, the disk holds one checkpoint more than after it.
    checkpoint(tmp_path, "24.orbax-checkpoint-tmp-1", 10)
    assert room_for_checkpoint(tmp_path) is None


def test_a_checkpoint_that_fits_is_silent():
    assert disk_fills(2**30, 2**30) is None
    text = disk_fills(2**34, 2**33)
    assert text is not None and "16.00 GiB" in text and "8.00 GiB" in text
