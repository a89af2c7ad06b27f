"""The golden tables: inputs with the outputs that they should give.

Every test runs on the tables of two folders: `records` beside this file, which is committed, and
the one that PARAVT_TEST_GOLDEN names, if it is set. That one holds tables of the same shape, with
outputs of the reference's functions.

The tests depend on no record's id and on no number of records. Every record goes through `hold`: it
agrees with the reference, or an `Excuse` says why not and what is true here instead, or the test
fails and names its id.
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

from paravt_jax.method.accuracy import accuracy, exact_match, open_answer
from paravt_jax.method.records import QuestionKind
from tests.conftest import named_folder
from tests.golden.texts import question_of


@dataclasses.dataclass(frozen=True)
class Excuse:
    """A reason why some records differ, with the property that holds for them instead."""

    applies: Callable[[dict], bool]
    """Whether a record is excused; it sees the record alone, not our result."""
    holds: Callable[[dict, Any], bool]
    """Whether our result for an excused record is as it should be."""


@pytest.fixture(params=["records", "PARAVT_TEST_GOLDEN"])
def golden(request) -> Path:
    """The folder of golden tables: the committed one, then the one that the environment names."""
    if request.param == "records":
        return Path(__file__).with_name("records")
    return named_folder(request.param)


@pytest.fixture
def hold(record_property):
    """hold(records, ours, agrees, excuses) judges every record and counts those of each excuse.

    At least a share `least` of the records has to agree with the reference.
    """

    def judge_all(
        records: Sequence[dict],
        ours: Callable[[dict], Any],
        agrees: Callable[[dict, Any], bool],
        excuses: Mapping[str, Excuse],
        least: float = 0.5,
    ) -> None:
        counts = collections.Counter(agree=0)
        wrong = []
        for record in records:
            result = ours(record)
            name = next((n for n, excuse in excuses.items() if excuse.applies(record)), "agree")
            counts[name] += 1
            passes = excuses[name].holds if name in excuses else agrees
            if not passes(record, result):
                wrong.append(f"{record['id']}: {name}, got {result!r}")
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
    """records("rewards") reads a JSON table; records("eval_parsing", "parse_srt") reads a part."""
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


def accuracy_of(record: dict, answer: str | None) -> float:
    """R_acc of an answer. Under the knob "exact", which only the release has, no F1."""
    question = question_of(record)
    if question.kind is QuestionKind.OPEN_ENDED and record["knobs"]["REWARD_MODE"] == "exact":
        readings = (answer or "", open_answer(answer or ""))
        return float(any(exact_match(reading, question.answer) for reading in readings))
    return accuracy(question, answer)
