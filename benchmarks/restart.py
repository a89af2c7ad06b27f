"""Seconds from the start of a process to its first step of RL, with and without kept programs.

python -m benchmarks.restart FOLDER
python -m benchmarks.restart FOLDER --against CHECKOUT

A run of `paravt_tiny`, with few steps before RL, is stopped after two steps of RL. Copies of it are
then continued, each in a process of its own, until the next step is done: with an empty cache of
compiled programs, then with the cache that this left, and with `--against` in another checkout,
such as `git worktree add CHECKOUT 65ba0d3`, the last commit that compiled everything at each start.

FOLDER keeps the run, so that the command can be repeated. CPU seconds count all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time

from paravt_extras.markdown import table

ROOT = pathlib.Path(__file__).parents[1]
# The programs do not depend on these: they only shorten what comes before RL.
SHORT = """
    --config=paravt_tiny --world.train-videos 40 --world.heldout-videos 4 --align.steps 3
    --sft.steps 3 --rl.steps 40 --rl.save-every 1 --rl.no-control --evaluation.questions 4
    --evaluation.frames 4 --evaluation.no-curve --evaluation.format-temperatures
"""


def weights(folder: pathlib.Path) -> list[float]:
    """The fingerprint of the weights after each step of RL that a run has finished."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    steps = [json.loads(line) for line in lines]
    return [step["weights/fingerprint"] for step in steps if step["phase"] == "rl"]


def continue_until(
    folder: pathlib.Path, wanted: int, cache: pathlib.Path, root: pathlib.Path
) -> tuple[float, float]:
    """Start or continue a run until it has `wanted` steps of RL, and stop it.

    Returns:
        Seconds from the start of the process, and its CPU seconds with those of stopping.
    """
    environment = {**os.environ, "PYTHONPATH": str(root), "XDG_CACHE_HOME": str(cache)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-m", "train.run", *SHORT.split(), "--run-dir", str(folder)]
    start = time.monotonic()
    cpu = _cpu_seconds()
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        process = subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=log)
    while len(weights(folder)) < wanted:
        if process.poll() is not None:
            raise SystemExit(f"the run ended with {process.returncode}: see {log.name}")
        time.sleep(0.05)
    seconds = time.monotonic() - start
    process.send_signal(signal.SIGTERM)
    process.wait()
    return seconds, _cpu_seconds() - cpu


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="folder for runs and caches")
    parser.add_argument("--against", type=pathlib.Path, help="checkout of another commit")
    asked = parser.parse_args()
    folder = asked.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    first = folder / "first"
    if len(weights(first)) < 2:
        continue_until(first, 2, folder / "cache", ROOT)
    shutil.rmtree(folder / "cache", ignore_errors=True)
    cases = [("empty cache", ROOT), ("kept programs", ROOT)]
    if asked.against:
        cases.insert(0, ("before", asked.against.absolute()))
    rows, found_weights = [], set()
    done = len(weights(first))
    for name, root in cases:
        copy = folder / name.replace(" ", "-")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(first, copy)
        found = continue_until(copy, done + 1, folder / "cache", root)
        rows.append([name, *(f"{seconds:.0f}" for seconds in found)])
        print(rows[-1], file=sys.stderr)
        found_weights.add(weights(copy)[done])
    if len(found_weights) > 1:
        raise SystemExit(f"the weights after the step differ: {found_weights}")
    print(table(["", "s", "CPU s"], rows))


if __name__ == "__main__":
    main()
