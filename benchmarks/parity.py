"""Measures how far the three families are from transformers and PEFT, on the cases of the tests.

`python -m benchmarks.parity` prints the table of docs/model.md. It needs the extras `test` and
`parity`, takes a few minutes, and fails where the tests of parity demand equality.
"""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.model import machine
from models.family import FAMILIES, family
from models.weights import hf_layout
from models.weights.hf_config import to_hf
from tests.models import test_parity, test_patches, test_peft_parity, test_published_sizes
from tests.models.parity import CASES, GRADIENT, LOGITS, gradient_differences

LIMITS = {
    "logits, largest difference": f"{LOGITS:.0e}",
    "64 greedy tokens per row": "equal",
    "gradients of all parameters, relative": f"{GRADIENT:.0e}",
    "patches of pictures, of 255": f"{test_patches.LEVEL:.0e}",
    "published sizes: names and shapes of tensors": "equal",
    "PEFT: logits, largest difference": f"{LOGITS:.0e}",
    "PEFT: gradients of A and B, relative": f"{GRADIENT:.0e}",
}
"""Rows of the table, and what the tests allow."""


def of_model(name: str) -> dict[str, str]:
    """Return a family's model on all of its cases."""
    cases = [case for case, content in CASES.items() if content.config["model_type"] == name]
    logits, gradients, tokens = [], [], 0
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            pair = test_parity.live(case, Path(folder))
        test_parity.test_positions_are_equal(pair)
        test_parity.test_greedy_tokens_are_equal(pair)
        tokens += pair.ours.tokens.size
        logits.append(test_parity.logit_difference(pair))
        ours, theirs = pair.ours.gradients, pair.theirs.gradients
        gradients += gradient_differences(ours, theirs).values()
    return {
        "logits, largest difference": _largest(logits, "configurations"),
        "64 greedy tokens per row": f"equal ({tokens} tokens)",
        "gradients of all parameters, relative": _largest(gradients, "parameters"),
    }


def of_adapters(name: str) -> dict[str, str]:
    """Return adapters of a family here and in PEFT."""
    logits, gradients = [], []
    for case in test_peft_parity.SETTINGS:
        if CASES[case].config["model_type"] != name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            base = test_peft_parity.make_base(case, Path(folder))
            found = test_peft_parity.compare(base, Path(folder))
        logits.append(found.logits)
        gradients += found.gradients.values()
    return {
        "PEFT: logits, largest difference": _largest(logits, "configurations"),
        "PEFT: gradients of A and B, relative": _largest(gradients, "matrices"),
    }


def of_patches(name: str) -> dict[str, str]:
    """Return the pixels that a family's tower reads."""
    count = len(test_patches.SIZES)
    return {"patches of pictures, of 255": f"{test_patches.difference(name):.1e} ({count} sizes)"}


def of_sizes(name: str) -> dict[str, str]:
    """Return the tensors of a family's published sizes."""
    sizes = [size for family, size in test_published_sizes.SIZES if family == name]
    for size in sizes:
        config = family(name).size(size)
        theirs = test_published_sizes.their_shapes(to_hf(config))
        np.testing.assert_equal(hf_layout.tensor_shapes(config), theirs)
    return {"published sizes: names and shapes of tensors": f"equal ({', '.join(sizes)})"}


def _largest(values: Sequence[float], what: str) -> str:
    return f"{max(values):.1e} ({what}: {len(values)})" if values else "not compared"


def report(columns: Mapping[str, Mapping[str, str]]) -> str:
    """Format the table: a column per family."""
    lines = [["", *(family(name).title for name in columns), "limit of the tests"]]
    lines.append(["---"] * len(lines[0]))
    for row, limit in LIMITS.items():
        lines.append([row, *(column[row] for column in columns.values()), limit])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    columns = {
        name: of_model(name) | of_patches(name) | of_sizes(name) | of_adapters(name)
        for name in FAMILIES
    }
    versions = machine() | {"peft": importlib.metadata.version("peft")}
    print(", ".join(f"{name} {value}" for name, value in versions.items()))
    print(f"\n{report(columns)}")


if __name__ == "__main__":
    main()
