"""Equality with transformers: two recorded cases of Qwen3-VL, and all cases live with torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.models import parity_ours
from tests.models.parity import (
    CASES,
    GRADIENT,
    LOGITS,
    RECORDED,
    Results,
    Sample,
    gradient_differences,
    write_model,
)


class Pair(NamedTuple):
    ours: Results
    theirs: Results
    sample: Sample


def live(name: str, folder: Path) -> Pair:
    pytest.importorskip("torch", reason="the oracle; install the extra parity")
    from tests.models import parity_theirs

    case = CASES[name]
    model = parity_theirs.make_model(case)
    sample, prompts = parity_theirs.samples(case)
    write_model(folder, case.config, parity_theirs.weights(model))
    theirs = parity_theirs.results(model, sample, prompts)
    return Pair(parity_ours.results(folder, sample, prompts), theirs, sample)


def recorded(name: str, folder: Path) -> Pair:
    groups: dict[str, dict[str, np.ndarray]] = {}
    for key, value in np.load(RECORDED[name]).items():
        group, _, rest = key.partition(" ")
        if value.dtype == np.float16:
            value = value.astype(np.float32)
        groups.setdefault(group, {})[rest] = value
    write_model(folder, json.loads(str(groups["config"][""])), groups["weight"])
    # A gradient is recorded as its norm and its direction.
    directions = groups["gradient"].items()
    norms = groups["norms"][""]
    gradients = {name: norm * x for (name, x), norm in zip(directions, norms, strict=True)}
    sample = Sample(**groups["sample"])
    theirs = Results(gradients=gradients, **groups["result"])
    return Pair(parity_ours.results(folder, sample, sample), theirs, sample)


def logit_difference(pair: Pair) -> float:
    """The largest difference of a real token's logit."""
    valid = pair.sample.valid
    return float(np.abs(pair.ours.logits[valid] - pair.theirs.logits[valid]).max())


SOURCES = [pytest.param((recorded, name), id=f"recorded: {name}") for name in RECORDED]
SOURCES += [
    pytest.param((live, name), id=f"live: {name}", marks=pytest.mark.parity) for name in CASES
]


@pytest.fixture(scope="module", params=SOURCES)
def pair(request, tmp_path_factory) -> Pair:
    make, name = request.param
    return make(name, tmp_path_factory.mktemp("model"))


def test_positions_are_equal(pair):
    valid = pair.sample.valid
    np.testing.assert_array_equal(pair.ours.positions[:, valid], pair.theirs.positions[:, valid])


def test_logits_are_equal(pair):
    assert np.std(pair.theirs.logits[pair.sample.valid]) > 0.1
    assert logit_difference(pair) <= LOGITS


def test_greedy_tokens_are_equal(pair):
    assert len(np.unique(pair.theirs.tokens)) > 8, "tokens vary"
    np.testing.assert_array_equal(pair.ours.tokens, pair.theirs.tokens)


def test_gradients_of_all_parameters_are_equal(pair):
    reached = {name for name, gradient in pair.ours.gradients.items() if np.any(gradient)}
    assert reached == pair.theirs.gradients.keys() <= pair.ours.gradients.keys()
    differences = gradient_differences(pair.ours.gradients, pair.theirs.gradients)
    assert {name: d for name, d in differences.items() if not d <= GRADIENT} == {}
