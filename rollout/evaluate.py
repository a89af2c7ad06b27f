"""`python -m rollout.evaluate`: evaluates a model on a split or on your own questions."""

from __future__ import annotations

from collections.abc import Sequence

import tyro

from models.devices import reserve_memory
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
    return cluster.run_command(lambda: _evaluate(argv), _LESS_MEMORY)


def _evaluate(argv: Sequence[str] | None) -> int:
    description = f"{__doc__}\nSplits for --benchmark: {', '.join(BENCHMARKS)}."
    settings = tyro.cli(BenchmarkSettings, args=argv, prog=_PROG, description=description)
    # Before JAX sees a device: afterwards it cannot add other hosts.
    cluster.connect()
    return 1 if has_failed(evaluate(settings)) else 0


if __name__ == "__main__":
    raise SystemExit(main())
