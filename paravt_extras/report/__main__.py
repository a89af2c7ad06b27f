"""Writes the page of a run anew: `python -m paravt_extras.report RUN_DIR`."""

from __future__ import annotations

import argparse
import pathlib
import sys

from paravt_extras.report.page import write_report
from paravt_jax.data.any_path import require_local
from paravt_jax.processes.exit_codes import USER_ERRORS, exit_code


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    prog = "python -m paravt_extras.report"
    parser = argparse.ArgumentParser(prog=prog, description="Writes the page of a run anew.")
    parser.add_argument("run_dir", help="local directory of a run, such as runs/mine")
    run_dir = parser.parse_args(argv).run_dir
    try:
        require_local("run_dir", run_dir)
        if not (pathlib.Path(run_dir) / "config.json").exists():
            raise ValueError(
                f"run_dir = {run_dir}: has no config.json; give the directory of a run"
            )
        print(f"written: {write_report(run_dir)}")
    # DamagedFileError is a ValueError.
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
