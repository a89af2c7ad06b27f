"""Writes the pages of a run anew: `python -m train.report RUN_DIR`."""

from __future__ import annotations

import argparse
import pathlib
import sys

from paravt_jax.command_name import command_name
from paravt_jax.data.stored_json import DamagedFileError
from train.report.page import write_report


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    prog = command_name("python -m train.report")
    parser = argparse.ArgumentParser(prog=prog, description="Writes the pages of a run anew.")
    parser.add_argument("run_dir", type=pathlib.Path, help="directory of a run, such as runs/mine")
    run_dir = parser.parse_args(argv).run_dir
    if not (run_dir / "config.json").exists():
        print(
            f"error: run_dir = {run_dir}: has no config.json; give the directory of a run",
            file=sys.stderr,
        )
        return 1
    try:
        print(f"written: {write_report(run_dir)}")
    except DamagedFileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
