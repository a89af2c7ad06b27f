"""The prediction of a step's time: fitted speeds, and what a step is made of."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
from flax import nnx

from benchmarks.calibration import (
    Probe,
    Speed,
    Timed,
    Work,
    engine_costs,
    fit,
    layout_of,
    other_sizes,
    update_work,
)
from benchmarks.prediction import CONFIGURATIONS, Machine, base, main, predict, report, requests_of
from configs import RECIPES
from models.features import FrameFeatures
from models.model import VisionLanguageModel
from paravt_extras.plan.programs import microbatch_sizes, planned_config
from paravt_extras.plan.rollouts import Row
from paravt_extras.plan.workload import Group, Rollout
from paravt_jax.data import video
from rollout.engine.engine import Engine
from train.learn.packing import GroupLengths, pack
from train.settings import change

TINY = RECIPES["paravt_tiny"]()
SIZES = TINY.engine_sizes
NOTHING = Speed(0.0, (0.0, 0.0, 0.0))
# Takes no time for anything.
FREE = Speed(0.0, (0.0,))
MACHINE = Machine(NOTHING, NOTHING, NOTHING, NOTHING, FREE, FREE, FREE)


def test_a_fit_finds_the_speed_that_calls_were_made_with():
    speed = Speed(1e-3, (2e-11, 5e-11, 1e-11))
    works = [Work(1e8, 0, 0), Work(1e9, 1e8, 0), Work(1e9, 5e9, 1e8), Work(3e9, 1e9, 7e9)]
    found = fit([Timed(work, speed.seconds(work)) for work in works])
    assert found.fixed == pytest.approx(speed.fixed, rel=1e-3)
    assert found.rates == pytest.approx(speed.rates, rel=1e-3)


def test_a_fit_gives_no_negative_rate():
    found = fit([Timed((1.0,), 2.0), Timed((2.0,), 1.0)])
    assert found.fixed > 0
    assert found.rates == (0.0,)


def test_calibration_uses_none_of_the_decoding_programs_of_any_configuration():
    configured = [
        change(base(), "x", dict(fields)).engine_sizes for fields in CONFIGURATIONS.values()
    ]
    for sizes in other_sizes(SIZES):
        programs = {(sizes.slots, width) for width in sizes.row_lengths}
        assert not any(
            programs & {(run.slots, width) for width in run.row_lengths} for run in configured
        )


@pytest.mark.slow
def test_an_engine_of_other_sizes_is_timed():
    config = planned_config(TINY)
    features = FrameFeatures(None, config, TINY.frames, pathlib.Path(), source=video)
    model = nnx.jit(lambda: VisionLanguageModel(config, rngs=nnx.Rngs(0)))()
    sizes = dataclasses.replace(
        SIZES,
        slots=8,
        row_lengths=(32, 96),
        prefill_lengths=(16, 48),
        prefix_lengths=(48,),
        steps=4,
    )
    probe = Probe(Engine(model, features, sizes))
    prefilled = probe.prefill(48, 0)
    behind = probe.prefill(16, 48)
    assert prefilled.seconds > 0 and behind.seconds > 0
    assert behind.work[1] > prefilled.work[1] / 48 * 16
    alone = probe.decode(32, 0)
    together = probe.decode(32, 48)
    assert alone.seconds > 0 and together.seconds > 0
    assert together.work == alone.work[:2] + together.work[2:] and together.work[2] > 0
    (rate,) = probe.pool().rates
    assert rate > 0


def test_rows_of_a_group_read_their_prompt_from_one_copy():
    group = [Row(SIZES.prefix_lengths[-1] + 20, SIZES.prefix_lengths[-1], 7)] * 8
    assert layout_of(group, SIZES) == (SIZES.row_lengths[0], SIZES.prefix_lengths[-1])


def test_rows_without_a_common_prompt_read_their_own_tokens():
    long_row = Row(SIZES.row_lengths[0] + 1, 0, 0)
    assert layout_of([long_row], SIZES) == (SIZES.row_lengths[-1], 0)


def test_a_rollout_with_crops_makes_a_request_per_crop_and_one_more_turn():
    group = Group(40, 0, 16, (Rollout(30), Rollout(60, (4, 5))))
    crop = TINY.protocol.crop_frames
    assert requests_of([group], TINY) == [16, 16, 16, crop, crop]


def test_rematerialisation_adds_a_forward_pass_to_an_update():
    config = planned_config(TINY)
    groups = [GroupLengths(300, (50,) * 8)]
    (part,) = pack(groups, microbatch_sizes(TINY))
    without, full = (update_work(config, part, groups, remat) for remat in ("none", "full"))
    assert full.products / without.products == pytest.approx(4 / 3)


def test_a_step_takes_the_sum_of_its_work():
    machine = MACHINE._replace(host=Speed(0.5, (0.0,)), optimizer=Speed(0.0, (2.0,)))
    groups = [Group(40, 0, 16, (Rollout(30),) * 8)]
    found = predict(TINY, groups, 3, machine)
    # Eight requests, and three weights.
    assert found == {"rollout": 4.0, "reference": 0.0, "update": 6.0}


def test_slower_decoding_makes_rollouts_longer():
    slow = MACHINE._replace(decode=Speed(SIZES.steps * 1.0, NOTHING.rates))
    assert engine_costs(TINY, slow).token([Row(10, 0, 0)]).seconds == pytest.approx(1.0)


@pytest.mark.parametrize(("factor", "code"), [(1.2, 0), (1.3, 1)])
def test_the_command_fails_if_the_median_error_is_above_a_quarter(factor, code, capsys):
    measured = {"rollout": 1.0, "reference": 0.2, "update": 0.8}
    predicted = {phase: factor * span for phase, span in measured.items()}
    results = dict.fromkeys("abc", {"predicted": predicted, "measured": measured})
    assert report(results) == code
    assert f"{factor - 1:.0%}" in capsys.readouterr().out


def test_configurations_differ():
    runs = [change(base(), "x", dict(fields)) for fields in CONFIGURATIONS.values()]
    assert len({str(dataclasses.asdict(run)) for run in runs}) == len(runs) >= 10


@pytest.mark.parametrize("wrong", ["--model", "--keep"])
def test_paths_that_cannot_work_are_one_line_and_code_2(wrong, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    paths = {"--model": tmp_path, "--keep": tmp_path / "kept"}
    paths[wrong] = tmp_path / "config.json"
    assert main([f"{name}={path}" for name, path in paths.items()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {wrong} {paths[wrong]}: ") and error.count("\n") == 1
