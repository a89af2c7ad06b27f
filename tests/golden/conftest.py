"""The golden tables: inputs and outputs of the reference functions (golden/README.md beside them)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def golden() -> Path:
    folder = os.environ.get("PARAVT_TEST_GOLDEN")
    if not folder:
        pytest.skip("PARAVT_TEST_GOLDEN is not set: the golden tables are needed")
    return Path(folder)


@pytest.fixture
def records(golden: Path):
    """records("rewards") gives the records of a JSON table."""
    return lambda name: json.loads((golden / f"{name}.json").read_text(encoding="utf-8"))["records"]


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
