"""FLOPs of packed and padded steps: the aim at the committed lengths, and the padded layout."""

from __future__ import annotations

import pytest

from benchmarks import packing
from benchmarks.lengths import drawn
from configs import RECIPES
from paravt_extras.fit import fit
from paravt_extras.slices import Topology


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("topology", packing.SLICES)
def test_a_packed_step_does_at_most_1_25_times_its_worth_at_the_committed_lengths(topology, remat):
    slice_ = Topology(topology)
    run = fit(RECIPES["paravt_8b"](), slice_.available).run
    counted = packing.count(run, drawn("paravt_8b"), slice_.devices, parts=2, remat=remat)
    assert 1 <= counted.packed / counted.worth < counted.tiles / counted.worth <= 1.25
    # The products that the kernel repeats in its backward pass are beyond the aim.
    assert counted.tiles < counted.kernel <= 1.29 * counted.worth
    assert counted.padded > 8 * counted.kernel


@pytest.mark.parametrize("remat", ["none", "full"])
def test_so_does_the_tiny_run_by_visible_pairs(remat):
    """Tiles of 64 are about as long as its rollouts."""
    run = RECIPES["paravt_tiny"]()
    counted = packing.count(run, drawn("paravt_tiny"), 1, parts=1, remat=remat)
    assert 1 <= counted.packed / counted.worth <= 1.25
    assert counted.packed < counted.tiles < counted.kernel <= 1.51 * counted.worth
    assert counted.padded > 1.5 * counted.kernel


@pytest.mark.parametrize(
    ("groups", "rows", "devices", "padded"),
    [(7, 8, 16, 8), (2, 8, 16, 2), (4, 8, 16, 4), (7, 8, 1, 7), (3, 8, 4, 4), (9, 8, 128, 16)],
)
def test_the_padded_layout_gives_each_device_whole_groups_or_an_equal_part(
    groups, rows, devices, padded
):
    assert packing.groups_per_part(groups, rows, devices) == padded


def test_slices_with_equal_figures_share_a_line():
    lines = [["r", "a", "1"], ["r", "b", "2"], ["r", "c", "1"], ["s", "d", "1"]]
    assert packing.merged(lines) == [["r", "a, c", "1"], ["r", "b", "2"], ["s", "d", "1"]]


def test_the_command_prints_every_slice_and_the_tiny_run(capsys):
    assert packing.main(["--topology=v5e:4x4"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("v5e:4x4") == 4
    assert printed.count("| 1 device |") == 4
    assert packing.main(["--lengths=/nowhere.json"]) == 2
    assert "/nowhere.json" in capsys.readouterr().err
