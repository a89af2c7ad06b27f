"""`python -m rollout.evaluate`: a model on a split or on your own questions.

Also two finished runs compared, and a table of many.

Every mistake of the user's is one line and exit code 2, before anything heavy is loaded where that
is possible.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

import tyro

from paravt_jax.data.frames import VideoError
from rollout.agent.endpoint import EndpointError
from rollout.evaluation.benchmarks import BENCHMARKS
from rollout.evaluation.compare import compare, comparison_text, table
from rollout.evaluation.folder import FolderError
from rollout.evaluation.run import evaluate
from rollout.evaluation.settings import BenchmarkSettings

_PROG = "python -m rollout.evaluate"
_MODES = (
    f"Splits: {', '.join(BENCHMARKS)}.\n"
    f"Of finished runs: {_PROG} --compare A B [--json], question by question; "
    f"{_PROG} --table RUN ..., beside the paper's rows."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if {"--compare", "--table"} & set(argv):
            return _look(argv)
        settings = tyro.cli(
            BenchmarkSettings, args=argv, prog=_PROG, description=f"{__doc__}\n{_MODES}"
        )
        return 0 if evaluate(settings)["n"] else 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on with the next question", file=sys.stderr)
        return 130
    except (FileNotFoundError, FolderError, EndpointError, ValueError, VideoError) as error:
        print(f"{_PROG}: {error}", file=sys.stderr)
        return 2


def _look(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=_PROG)
    parser.add_argument(
        "--compare",
        nargs=2,
        type=pathlib.Path,
        metavar=("A", "B"),
        help="two runs of one split, question by question",
    )
    parser.add_argument(
        "--table", nargs="+", type=pathlib.Path, metavar="RUN", help="runs beside the paper's rows"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="with --compare: as JSON, with the ids of all questions that differ",
    )
    asked = parser.parse_args(argv)
    if asked.compare:
        first, second = asked.compare
        found = compare(first, second)
        print(json.dumps(found, indent=1) if asked.json else comparison_text(first, second, found))
    if asked.table:
        finished = [run for run in asked.table if (run / "summary.json").exists()]
        for run in asked.table:
            if run not in finished:
                why = "it is not finished; the command that began it goes on"
                if not (run / "config.json").exists():
                    why = (
                        "no evaluation lies there; give folders such as evaluations/NAME/BENCHMARK"
                    )
                print(f"{run}: left out, {why}", file=sys.stderr)
        print(table(finished))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
