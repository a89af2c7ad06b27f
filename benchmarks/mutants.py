"""Deliberate faults, and whether the tests notice: `python -m benchmarks.mutants --out mutants.json`.

Each mutant of `benchmarks.mutant_table` replaces one text in one source file of a temporary copy of
this checkout, and the tests that should notice run there until one fails. A mutant is `killed` by a
failing test or by running into its time limit, and `survived` otherwise. The tests run on the
unchanged copy first, because a test that always fails kills nothing.

Results are added to the file given by `--out` one by one, each with a hash of the tests, the
source and the fault. A later call with the same file runs what is missing there or has another
hash. The exit status is 0 if every mutant that has no `equivalent` reason is killed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.mutant_table import MUTANTS, Mutant

ROOT = pathlib.Path(__file__).parents[1]
TIME_LIMIT = 240.0
"""Seconds for the tests of one mutant; a loop that a fault made endless counts as noticed."""
CLEAN = "unchanged: "
PYTEST = (
    *("-m", "pytest", "-x", "-q", "--no-header", "--durations=0", "--durations-min=1e9"),
    *("--hypothesis-seed=0", "--hypothesis-profile=unshrunk", "-p", "no:cacheprovider"),
)

Result = dict[str, Any]
Task = Mutant | tuple[str, ...]
"""A mutant, or tests to run on the unchanged code."""


class NotApplicable(ValueError):
    """A mutant's old text is not in its file exactly once."""


def mutate(text: str, mutant: Mutant) -> str:
    """The text with the fault in it. Raises NotApplicable unless the old text is there exactly once."""
    count = text.count(mutant.old)
    if count != 1:
        raise NotApplicable(
            f"mutant {mutant.name}: its old text is {count} times in {mutant.file}, not once; "
            "adapt it in benchmarks/mutant_table.py"
        )
    return text.replace(mutant.old, mutant.new)


def name_of(task: Task) -> str:
    return task.name if isinstance(task, Mutant) else CLEAN + " ".join(task)


def hash_of(task: Task) -> str:
    """A hash of what decides a task's result: the texts of its tests, source files and fault."""
    if isinstance(task, Mutant):
        files, fault = [*task.tests, task.file], [task.old, task.new]
    else:
        mutated = {mutant.file for mutant in MUTANTS if mutant.tests == task}
        files, fault = [*task, *sorted(mutated)], []
    texts = [(ROOT / file).read_text(encoding="utf-8") for file in files]
    return hashlib.blake2b(json.dumps(texts + fault).encode(), digest_size=8).hexdigest()


def copy_checkout(folder: pathlib.Path) -> None:
    """Copies the files that git knows, or would add, to `folder`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def run_tests(folder: pathlib.Path, tests: Sequence[str], cache: pathlib.Path) -> Result:
    """Runs the tests in a copy until one fails; returns the outcome, the seconds, and what failed."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        # A mutant can have the size and the second of what was there before, as stale bytecode does.
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    start = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *PYTEST, *tests],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, _ = process.communicate(timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return {"outcome": "killed", "seconds": TIME_LIMIT, "by": "its time limit"}
    seconds = round(time.monotonic() - start, 1)
    if process.returncode == 0:
        return {"outcome": "survived", "seconds": seconds}
    failed = [line for line in out.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if process.returncode in (1, 2) and failed:  # a failing test, or a module that does not import
        return {"outcome": "killed", "seconds": seconds, "by": failed[0][:200]}
    raise RuntimeError(f"pytest ended with {process.returncode} on {tests}:\n{out[-2000:]}")


def run_mutant(mutant: Mutant, folder: pathlib.Path, cache: pathlib.Path) -> Result:
    """What becomes of one mutant in a copy, which is afterwards as before."""
    file = folder / mutant.file
    before = file.read_text(encoding="utf-8")
    file.write_text(mutate(before, mutant), encoding="utf-8")
    try:
        return run_tests(folder, mutant.tests, cache)
    finally:
        file.write_text(before, encoding="utf-8")


def run_all(mutants: Sequence[Mutant], out: pathlib.Path, jobs: int) -> dict[str, Result]:
    """Runs what is missing in `out`, or has another hash there, in `jobs` copies side by side.

    Returns the results by name. Raises RuntimeError if tests fail on the unchanged code.
    """
    results: dict[str, Result] = json.loads(out.read_text()) if out.exists() else {}
    lock = threading.Lock()

    def record(task: Task, result: Result) -> None:
        name = name_of(task)
        with lock:
            results[name] = result | {"hash": hashes[name]}
            out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{result['outcome']:>8}  {result['seconds']:6.1f} s  {name}", flush=True)

    def is_missing(task: Task) -> bool:
        return results.get(name_of(task), {}).get("hash") != hashes[name_of(task)]

    tasks = (*mutants, *dict.fromkeys(mutant.tests for mutant in mutants))
    hashes = {name_of(task): hash_of(task) for task in tasks}  # before sources can be edited
    missing = [mutant for mutant in mutants if is_missing(mutant)]
    clean = [tests for tests in dict.fromkeys(m.tests for m in missing) if is_missing(tests)]
    with tempfile.TemporaryDirectory() as name:
        copies: queue.Queue[pathlib.Path] = queue.Queue()
        cache = pathlib.Path(name) / "compiled"
        for number in range(jobs):
            folder = pathlib.Path(name) / str(number)
            copy_checkout(folder)
            copies.put(folder)

        def in_a_copy(task: Task) -> None:
            folder = copies.get()
            try:
                if isinstance(task, Mutant):
                    record(task, run_mutant(task, folder, cache))
                    return
                result = run_tests(folder, task, cache)
                if result["outcome"] != "survived":
                    raise RuntimeError(f"tests fail on the unchanged code: {result['by']}")
                record(task, result | {"outcome": "passed"})
            finally:
                copies.put(folder)

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for ready in (clean, missing):
                list(pool.map(in_a_copy, ready))
    return results


def report(mutants: Sequence[Mutant], results: dict[str, Result]) -> tuple[str, list[Mutant]]:
    """Counts by source file, then the survivors; and the survivors without an explanation."""
    lines = ["| file | mutants | killed |", "|---|---|---|"]
    for file in dict.fromkeys(mutant.file for mutant in mutants):
        of_file = [mutant for mutant in mutants if mutant.file == file]
        killed = sum(results[mutant.name]["outcome"] == "killed" for mutant in of_file)
        lines.append(f"| {file} | {len(of_file)} | {killed} |")
    survivors = [mutant for mutant in mutants if results[mutant.name]["outcome"] == "survived"]
    for mutant in survivors:
        lines.append(f"survived: {mutant.name} ({mutant.file}) {mutant.equivalent}".rstrip())
    seconds = sum(results[mutant.name]["seconds"] for mutant in mutants)
    killed = len(mutants) - len(survivors)
    lines.append(f"{killed} of {len(mutants)} killed; {seconds / 60:.0f} minutes of tests")
    return "\n".join(lines), [mutant for mutant in survivors if not mutant.equivalent]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON file of the results")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these mutants only")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tested side by side")
    asked = parser.parse_args(arguments)
    names = {mutant.name for mutant in MUTANTS}
    if unknown := sorted(set(asked.only or ()) - names):
        parser.error(f"--only: {', '.join(unknown)} unknown; known are {', '.join(sorted(names))}")
    if asked.jobs < 1:
        parser.error(f"--jobs: {asked.jobs}; give 1 or more")
    mutants = [mutant for mutant in MUTANTS if not asked.only or mutant.name in asked.only]
    for mutant in mutants:  # before any test runs
        mutate((ROOT / mutant.file).read_text(encoding="utf-8"), mutant)
    text, unexplained = report(mutants, run_all(mutants, asked.out, asked.jobs))
    print(text)
    return 1 if unexplained else 0


if __name__ == "__main__":
    raise SystemExit(main())
