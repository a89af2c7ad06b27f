"""Writes the page of a run: `python -m paravt_extras.report RUN_DIR`.

The run may be finished or going on, in a folder or in a bucket. The page is `RUN_DIR/report.html`.
"""

from __future__ import annotations

import argparse

from paravt_extras.report.page import write_report
from paravt_jax.data.any_path import any_path, is_bucket, require_folder_or_bucket
from paravt_jax.processes.cluster import run_command
from train.durable.bucket import named_errors
from train.export import small_files


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m paravt_extras.report", description="Writes the page of a run."
    )
    parser.add_argument("run_dir", help="directory of a run, such as runs/mine or gs://bucket/run")
    run_dir = parser.parse_args(argv).run_dir
    return run_command(lambda: write_page(run_dir))


def write_page(run_dir: str) -> None:
    """Write report.html into the directory of a run, which may be in a bucket."""
    require_folder_or_bucket("run_dir", run_dir)
    with small_files(run_dir) as folder:
        is_evaluation = (folder / "summary.json").exists()
        if is_evaluation or not (folder / "config.json").exists():
            raise ValueError(f"run_dir = {run_dir}: holds no run; give the directory of a run")
        page = write_report(folder)
        if is_bucket(run_dir):
            with named_errors(run_dir):
                (any_path(run_dir) / page.name).write_bytes(page.read_bytes())
    print(f"written: {run_dir.rstrip('/')}/{page.name}")


if __name__ == "__main__":
    raise SystemExit(main())
