"""The golden tables: inputs and what they should give. Every test reads them from two folders, one after the other.

`records` beside this file is committed. PARAVT_TEST_GOLDEN, where it is set, names a folder with tables of the same shape: inputs and
outputs of the reference functions. Nothing here or in the tests knows ids or counts. Every record goes through one judge,
`hold`: it agrees with the reference, or a table of `Excuse`s says why not and what is true here instead; else it fails by its id.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import named_folder


@dataclasses.dataclass(frozen=True)
class Excuse:
    """Why some records differ here. `applies` tells them from the record alone, `holds` says of our result what is true instead.

    `example` is a record that it covers and `innocent` one that it does not; `wrong` is a result for the example that must not hold.
    """

    why: str
    applies: Callable[[dict], bool]
    holds: Callable[[dict, Any], bool]
    example: dict
    innocent: dict
    wrong: Any


def judge(
    record: dict, got: Any, agrees: Callable[[dict, Any], bool], excuses: Mapping[str, Excuse]
) -> tuple[str | None, bool]:
    """The first excuse that applies (None: the record has to agree), and whether our result is as it should be."""
    for name, excuse in excuses.items():
        if excuse.applies(record):
            return name, bool(excuse.holds(record, got))
    return None, bool(agrees(record, got))


def check_examples(ours: Callable[[dict], Any], excuses: Mapping[str, Excuse]) -> None:
    """Every excuse can be false, and what it demands can fail: a guard against excuses for everything."""
    for name, excuse in excuses.items():
        assert excuse.applies(excuse.example) and not excuse.applies(excuse.innocent), name
        assert excuse.holds(excuse.example, ours(excuse.example)), name
        assert not excuse.holds(excuse.example, excuse.wrong), name


@pytest.fixture(params=["records", "PARAVT_TEST_GOLDEN"])
def golden(request) -> Path:
    """The folder of golden tables: the committed one, then the one that the environment names."""
    if request.param == "records":
        return Path(__file__).with_name("records")
    return named_folder(request.param)


@pytest.fixture
def hold(record_property):
    """hold(records, ours, agrees, excuses, least): judges every record, reports how many fall where, and asks that a share agrees."""

    def judge_all(
        records: Sequence[dict],
        ours: Callable[[dict], Any],
        agrees: Callable[[dict, Any], bool],
        excuses: Mapping[str, Excuse],
        least: float = 0.5,
    ) -> None:
        counts, wrong = collections.Counter(agree=0), []
        for record in records:
            got = ours(record)
            name, fine = judge(record, got, agrees, excuses)
            counts[name or "agree"] += 1
            if not fine:
                wrong.append(f"{record['id']}: {name or 'has to agree'}, got {got!r}")
        for name, count in counts.items():
            record_property(name, count)
        print(dict(counts))
        assert not wrong, f"{len(wrong)} of {len(records)} records:\n" + "\n".join(wrong)
        assert records and counts["agree"] >= least * len(records), (
            f"too few agree for a test: {dict(counts)}"
        )

    return judge_all


@pytest.fixture
def records(golden: Path):
    """records("rewards") gives the records of a JSON table, records("eval_parsing", "temporal_iou") those of one of its lists."""
    return lambda name, part="records": json.loads(
        (golden / f"{name}.json").read_text(encoding="utf-8")
    )[part]


@pytest.fixture
def cases(golden: Path):
    """cases("ppo_loss") gives {case: (configuration, arrays)} of an NPZ table."""

    def load(name: str) -> dict[str, tuple[dict, dict[str, np.ndarray]]]:
        with np.load(golden / f"{name}.npz", allow_pickle=False) as table:
            out: dict[str, tuple[dict, dict[str, np.ndarray]]] = {}
            for key in table.files:
                case, field = key.split("__", 1)
                config, arrays = out.setdefault(case, ({}, {}))
                if field == "config_json":
                    config.update(json.loads(str(table[key])))
                else:
                    arrays[field] = table[key]
        return out

    return load
