"""Mutation testing: checks that the tests notice deliberate faults.

    python -m benchmarks.mutants --out mutants.json

Each mutant of `benchmarks.mutant_table` replaces one text in one source file of a temporary copy of
this checkout. The tests that should notice then run there until one fails. A mutant is killed if a
test fails or the tests exceed the time limit; otherwise it survives. The tests first run on an
unchanged copy, because a test that always fails proves nothing.

Every result is added at once to the file given by `--out`, with a hash of the tests, the source and
the fault. A later call with the same file only runs mutants whose result is missing or has another
hash. The exit status is 0 if all mutants are killed, except those with an `equivalent` reason.
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
TIME_LIMIT = 600.0
"""Seconds for the tests of one mutant. A fault that causes an endless loop counts as killed."""

CLEAN = "unchanged: "
"""Prefix of the results of tests on the unchanged code."""

PYTEST = (
    "-m",
    "pytest",
    "-x",
    "-q",
    "-m",
    "not parity and not long",  # slow tests count, too
    "--no-header",
    "--durations=0",
    "--durations-min=1e9",
    "--hypothesis-seed=0",
    "--hypothesis-profile=unshrunk",
    "-p",
    "no:cacheprovider",
    "-n",
    "0",  # mutants run side by side; each needs one process
)

Result = dict[str, Any]
Task = Mutant | tuple[str, ...]
"""A mutant, or the tests to run on the unchanged code."""


class NotApplicable(ValueError):
    """A mutant's old text does not occur exactly once in its file."""


def mutate(text: str, mutant: Mutant) -> str:
    """Put a fault into a text. Raises NotApplicable unless the old text occurs exactly once."""
    count = text.count(mutant.old)
    if count != 1:
        raise NotApplicable(
            f"mutant {mutant.name}: its old text occurs {count} times in {mutant.file}, not once; "
            "adapt it in benchmarks/mutant_table.py"
        )
    return text.replace(mutant.old, mutant.new)


def name_of(task: Task) -> str:
    """Return the name of a task's result in the file given by `--out`."""
    return task.name if isinstance(task, Mutant) else CLEAN + " ".join(task)


def hash_of(task: Task) -> str:
    """Hash all texts that determine a task's result: its tests, source files and fault."""
    if isinstance(task, Mutant):
        files = [*task.tests, task.file]
        fault = [task.old, task.new]
    else:
        mutated = {mutant.file for mutant in MUTANTS if mutant.tests == task}
        files = [*task, *sorted(mutated)]
        fault = []
    texts = [(ROOT / file).read_text(encoding="utf-8") for file in files]
    return hashlib.blake2b(json.dumps(texts + fault).encode(), digest_size=8).hexdigest()


def copy_checkout(folder: pathlib.Path) -> None:
    """Copy all tracked files, and untracked ones that git does not ignore, to a folder."""
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
    """Run tests in a copy of the checkout until one fails.

    Args:
        folder: The copy.
        tests: Test files.
        cache: Folder of the compilation cache, which all copies share.

    Returns:
        outcome ("killed" or "survived"), seconds, and for a killed mutant `by`, the failed test.

    Raises:
        RuntimeError: Pytest itself failed.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        # Python recognises stale bytecode by the size and time of the source. A mutant can have the
        # same size as the original, and be written in the same second.
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
            os.killpg(process.pid, 9)  # also the processes that the tests have started
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
    """Run the tests of one mutant in a copy, and restore the copy."""
    file = folder / mutant.file
    before = file.read_text(encoding="utf-8")
    file.write_text(mutate(before, mutant), encoding="utf-8")
    try:
        return run_tests(folder, mutant.tests, cache)
    finally:
        file.write_text(before, encoding="utf-8")


def run_all(mutants: Sequence[Mutant], out: pathlib.Path, jobs: int) -> dict[str, Result]:
    """Run the mutants whose results are missing in `out` or have another hash.

    Args:
        mutants: The mutants to run.
        out: JSON file of the results. It is written after every result.
        jobs: Number of copies in which tests run in parallel.

    Returns:
        The results by name.

    Raises:
        RuntimeError: Tests fail on the unchanged code.
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

    tasks = (*mutants, *_tests_of(mutants))
    # Hash before the copies are made: if a source is edited meanwhile, a later call runs it again.
    hashes = {name_of(task): hash_of(task) for task in tasks}
    missing = [mutant for mutant in mutants if is_missing(mutant)]
    clean = [tests for tests in _tests_of(missing) if is_missing(tests)]
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
            for batch in (clean, missing):
                # The list waits for all tasks, and raises the first exception of a task.
                list(pool.map(in_a_copy, batch))
    return results


def _tests_of(mutants: Sequence[Mutant]) -> list[tuple[str, ...]]:
    """Return the different sets of tests that the mutants name."""
    return list(dict.fromkeys(mutant.tests for mutant in mutants))


def report(mutants: Sequence[Mutant], results: dict[str, Result]) -> tuple[str, list[Mutant]]:
    """Format the counts by source file, and the survivors.

    Returns:
        The text, and the survivors without an `equivalent` reason.
    """
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
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON file of the results")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these mutants only")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tested in parallel")
    asked = parser.parse_args(arguments)
    names = {mutant.name for mutant in MUTANTS}
    unknown = sorted(set(asked.only or ()) - names)
    if unknown:
        parser.error(
            f"--only {' '.join(unknown)}: unknown; give some of {', '.join(sorted(names))}"
        )
    if asked.jobs < 1:
        parser.error(f"--jobs {asked.jobs}: give 1 or more")
    mutants = [mutant for mutant in MUTANTS if not asked.only or mutant.name in asked.only]
    # Report a mutant that cannot be applied before any test runs.
    for mutant in mutants:
        mutate((ROOT / mutant.file).read_text(encoding="utf-8"), mutant)
    text, unexplained = report(mutants, run_all(mutants, asked.out, asked.jobs))
    print(text)
    return 1 if unexplained else 0


if __name__ == "__main__":
    raise SystemExit(main())
