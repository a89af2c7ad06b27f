"""The recipes as released, against the table of docs/method.md."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Any

import pytest

from configs.paravt_8b import paravt_8b
from configs.released import paravt_8b_released, sft_8b_released
from paravt_extras.fit import fit
from paravt_extras.slices import Topology
from train.settings import change

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "method.md"
GENERATIONS = ("v4", "v5e", "v6e", "v5p")
NOTES = PAGE.read_text(encoding="utf-8").partition("### As released")[2].partition("\n## ")[0]


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """All fields of a recipe by dotted path."""
    found = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        path = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            found |= flat(value, f"{path}.")
        else:
            found[path] = value
    return found


def test_the_table_has_every_field_that_differs_and_no_other():
    paper, released = flat(paravt_8b()), flat(paravt_8b_released())
    assert paper.keys() == released.keys()
    differing = {
        field: (str(value), str(released[field]))
        for field, value in paper.items()
        if value != released[field] and field != "name"
    }
    rows = re.findall(r"^\| `([a-z_.]+)` \| (\S+) \| (\S+) \| (.+) \|$", NOTES, re.M)
    table = {field: (ours, theirs) for field, ours, theirs, _ in rows}
    assert len(table) == len(rows)
    assert table == differing
    assert all(len(reason.split()) > 5 for *_, reason in rows)


def test_the_context_of_the_release_holds_the_longest_rollout():
    longest = paravt_8b_released().lengths(64)
    assert longest.prompt + longest.response <= 32_768


def test_the_cold_start_stops_a_third_into_its_cosine():
    settings = sft_8b_released().sft
    assert settings is not None and (settings.rows, settings.steps) == (32, 500)
    assert settings.horizon == 3 * settings.steps
    assert sft_8b_released().rl is None


@pytest.mark.parametrize(
    ("recipe", "row"),
    [(paravt_8b, 0), (paravt_8b_released, 1), (sft_8b_released, 2)],
)
def test_the_named_slices_are_the_smallest_that_fit(recipe, row):
    tables = re.findall(r"^\| (`.*`) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$", NOTES, re.M)
    sides = [line for line in tables if "8b" in line[0]][row][1:]
    expected = {f"{name}:{size}" for name, size in zip(GENERATIONS, sides, strict=True)}
    with pytest.raises(ValueError, match="smallest slices for") as error:
        fit(recipe(), Topology("v5e:2x4").available)
    smallest = str(error.value).rpartition("smallest slices for")[2].partition(": ")[2]
    assert set(smallest.split(", ")) == expected


def test_more_steps_are_an_option():
    longer = change(paravt_8b_released(), "longer", {"rl.steps": 700}).rl
    assert longer is not None and longer.steps == 700
