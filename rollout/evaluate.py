"""`python -m rollout.evaluate`: evaluates a model on a split or on your own questions.

With --compare A B [--json], it compares two finished runs question by question.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

import tyro

from models.devices import reserve_memory
from paravt_extras.compare import compare, comparison_text
from paravt_jax.processes import cluster
from rollout.evaluation.benchmarks import BENCHMARKS
from rollout.evaluation.run import evaluate
from rollout.evaluation.settings import BenchmarkSettings
from rollout.evaluation.summary import has_failed

_PROG = "python -m rollout.evaluate"
_LESS_MEMORY = "lower --episodes, use --dtype bfloat16, or --tensor over more devices"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. A user's mistake prints one line."""
    reserve_memory()
    argv = list(sys.argv[1:] if argv is None else argv)
    is_comparison = "--compare" in [word.split("=")[0] for word in argv]
    work = _compare if is_comparison else _evaluate
    return cluster.run_command(lambda: work(argv), _LESS_MEMORY)


def _evaluate(argv: Sequence[str]) -> int:
    description = f"{__doc__}\nSplits for --benchmark: {', '.join(BENCHMARKS)}."
    settings = tyro.cli(BenchmarkSettings, args=argv, prog=_PROG, description=description)
    # Before JAX sees a device: afterwards it cannot add other hosts.
    cluster.connect()
    return 1 if has_failed(evaluate(settings)) else 0


def _compare(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=_PROG, description=__doc__)
    parser.add_argument("--compare", nargs=2, type=pathlib.Path, metavar=("A", "B"), required=True)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(argv)
    first, second = asked.compare
    comparison = compare(first, second)
    shown = comparison_text(first, second, comparison)
    print(json.dumps(comparison, indent=1) if asked.json else shown)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
