"""`python -m rollout.evaluate`: evaluates a model on a split or on your own questions.

Other uses compare two finished runs, show a table of several, or write our wording to change it.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import traceback
from collections.abc import Sequence

import tyro

from models import gpu
from paravt_extras.compare import compare, comparison_text
from paravt_extras.table_1 import contents, text
from paravt_jax.command_name import command_name
from paravt_jax.processes import cluster
from paravt_jax.processes.exit_codes import FAILED, LOST, USAGE, USER_ERRORS, exit_code
from rollout.evaluation.benchmarks import BENCHMARKS
from rollout.evaluation.run import evaluate
from rollout.evaluation.settings import BenchmarkSettings
from rollout.evaluation.wording_folder import write_wording

_PROG = command_name("python -m rollout.evaluate")
# Blank lines: the help would join single lines.
_MODES = "\n\n".join(
    [
        f"Splits for --benchmark: {', '.join(BENCHMARKS)}.",
        f"{_PROG} --compare A B [--json]: compare two finished runs question by question.",
        f"{_PROG} --table RUN ... [--json]: show finished runs beside table 1 of the paper.",
        f"{_PROG} --write-wording FOLDER: write our texts, to change them and give --wording.",
    ]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. A user's mistake prints one line and returns 2."""
    gpu.reserve_memory()
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if {"--compare", "--table", "--write-wording"} & {word.split("=")[0] for word in argv}:
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
                "; with too little memory, lower --episodes, give --cache-tokens, use --dtype "
                "bfloat16, or --tensor over more devices"
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
    """`--compare` and `--table` print results of finished runs; `--write-wording` writes texts."""
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
        help="show runs beside the paper's rows",
    )
    use.add_argument(
        "--write-wording", type=pathlib.Path, metavar="FOLDER", help="the folder to write"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with all ids that differ")
    asked = parser.parse_args(argv)
    if asked.write_wording:
        write_wording(asked.write_wording)
        return 0
    runs = asked.compare or asked.table
    unfinished = [run for run in runs if not (run / "summary.json").exists()]
    for run in unfinished:
        print(f"warning: {run}: {_why_unfinished(run)}", file=sys.stderr)
    if asked.compare:
        found = compare(runs[0], runs[1])
        shown = comparison_text(runs[0], runs[1], found)
    else:
        found = contents([run for run in runs if run not in unfinished])
        shown = text(found)
    print(json.dumps(found, indent=1) if asked.json else shown)
    return 0


def _why_unfinished(run: pathlib.Path) -> str:
    if (run / "config.json").exists():
        return "it is not finished; repeat the command that started it to continue"
    return "it has no evaluation; give folders such as evaluations/NAME/BENCHMARK"


if __name__ == "__main__":
    raise SystemExit(main())
