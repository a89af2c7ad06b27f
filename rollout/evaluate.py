"""`python -m rollout.evaluate`: evaluates a model on a split or on your own questions.

Other uses compare two finished runs, or show a table of several.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import traceback
from collections.abc import Sequence

import tyro

from models.devices import reserve_memory
from paravt_extras.compare import compare, comparison_text
from paravt_extras.table_1 import table_1
from paravt_jax.processes import cluster
from paravt_jax.processes.exit_codes import FAILED, LOST, USAGE, USER_ERRORS, exit_code
from rollout.evaluation.benchmarks import BENCHMARKS
from rollout.evaluation.run import evaluate
from rollout.evaluation.settings import BenchmarkSettings

_PROG = "python -m rollout.evaluate"
# Blank lines: the help would join single lines.
_MODES = "\n\n".join(
    [
        f"Splits for --benchmark: {', '.join(BENCHMARKS)}.",
        f"{_PROG} --compare A B [--json]: compare two finished runs question by question.",
        f"{_PROG} --table RUN ...: show finished runs below table 1 of the paper.",
    ]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. A user's mistake prints one line and returns 2."""
    reserve_memory()
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if {"--compare", "--table"} & {word.split("=")[0] for word in argv}:
            return _other_uses(argv)
        description = f"{__doc__}\n{_MODES}"
        return _evaluate(
            tyro.cli(BenchmarkSettings, args=argv, prog=_PROG, description=description)
        )
    except KeyboardInterrupt:
        print("stopped; the same command continues with the next question", file=sys.stderr)
        return 130
    except USER_ERRORS as error:
        code = exit_code(error)
        return cluster.leave(USAGE if code == FAILED else code, f"{_PROG}: {error}")
    except Exception as error:
        traceback.print_exc()
        message = f"{_PROG}: unforeseen, {type(error).__name__} (above); the same command continues"
        if "RESOURCE_EXHAUSTED" in str(error):
            message += (
                "; with too little memory, lower --episodes, use --dtype bfloat16, or --tensor "
                "over more devices"
            )
        return cluster.leave(LOST, message)


def _evaluate(settings: BenchmarkSettings) -> int:
    # With a server, hosts join only where that is asked for: joining takes hold of the devices,
    # which the server may be using.
    if cluster.is_named() or not settings.endpoint:
        # Before JAX sees a device: afterwards it cannot add other hosts.
        cluster.connect()
    with cluster.ending_with_the_others():
        summary = evaluate(settings)
    return 0 if summary["n"] else 1  # 1: no question could be played


def _other_uses(argv: Sequence[str]) -> int:
    """Print what `--compare` or `--table` says of finished runs."""
    parser = argparse.ArgumentParser(prog=_PROG)
    use = parser.add_mutually_exclusive_group(required=True)
    use.add_argument(
        "--compare",
        nargs=2,
        type=pathlib.Path,
        metavar=("A", "B"),
        help="compare two runs of one split, question by question",
    )
    use.add_argument(
        "--table",
        nargs="+",
        type=pathlib.Path,
        metavar="RUN",
        help="show runs below the paper's table 1",
    )
    parser.add_argument(
        "--json", action="store_true", help="with --compare: print JSON, with all ids that differ"
    )
    asked = parser.parse_args(argv)
    if asked.json and asked.table:
        parser.error("--json: belongs to --compare; each run of --table has a summary.json")
    if asked.table:
        print(table_1(asked.table))
        return 0
    first, second = asked.compare
    comparison = compare(first, second)
    shown = comparison_text(first, second, comparison)
    print(json.dumps(comparison, indent=1) if asked.json else shown)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
