"""Writes the pages of a run anew: `python -m paravt_extras.report RUN_DIR`."""

from __future__ import annotations

import argparse
import sys

from paravt_extras.report.page import write_report
from paravt_jax.command_name import command_name
from paravt_jax.data.any_path import is_bucket, require_folder_or_bucket
from paravt_jax.processes.exit_codes import USER_ERRORS, exit_code
from train.durable.bucket import named_errors, open_store
from train.durable.run_folder import small_files


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    prog = command_name("python -m paravt_extras.report")
    parser = argparse.ArgumentParser(prog=prog, description="Writes the pages of a run anew.")
    parser.add_argument(
        "run_dir", help="directory of a run, such as runs/mine, or gs://bucket/runs/mine"
    )
    run_dir = parser.parse_args(argv).run_dir
    try:
        print(f"written: {_write(run_dir)}")
    # DamagedFileError is a ValueError.
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    return 0


def _write(run_dir: str) -> str:
    """Write report.html; returns where it is.

    Raises:
        ValueError: `run_dir` is no run, or a file of it is damaged.
        OSError: The bucket cannot be read or written to.
        ModuleNotFoundError: The package for buckets is missing.
    """
    require_folder_or_bucket("run_dir", run_dir)
    with small_files(run_dir) as folder:
        if not (folder / "config.json").exists():
            raise ValueError(
                f"run_dir = {run_dir}: has no config.json; give the directory of a run"
            )
        page = write_report(folder)
        if not is_bucket(run_dir):
            return str(page)
        with named_errors(run_dir):
            store, top = open_store(run_dir)
            store.put_file(str(page), f"{top}/{page.name}")
        return f"{run_dir.rstrip('/')}/{page.name}"


if __name__ == "__main__":
    raise SystemExit(main())
