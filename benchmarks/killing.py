"""Kills small runs at random moments; nothing may be lost: `python -m benchmarks.killing`.

The first run is undisturbed. All further runs are killed and restarted until they finish. The
checks are:

1. After each kill, all checkpoints can be read, and each equals that of the undisturbed run.
2. metrics.jsonl has each step once. Steps covered by a checkpoint are neither lost nor rewritten.
3. After a clean stop (SIGINT, SIGTERM), the last step is saved.
4. The finished run equals the undisturbed one bit for bit: results, metrics, weights, episodes.

The undisturbed run compiles all programs, and the others read them from a folder.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import tyro

from train.durable.checkpoint import Checkpoints
from train.durable.metrics import MEASURED, PHASES, read_metrics

ROOT = pathlib.Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "train" / "small.py"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
# A process that has not ended after this many seconds counts as stuck.
DEADLINE = 900.0
Line = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Killing:
    """Kill a small run at random moments and compare it with an undisturbed one."""

    times: int = 100
    """Number of kills."""
    seed: int = 0
    """Seed of the random moments and signals."""
    max_staleness: int = 0
    """Updates that a rollout may outlive. Above 0, all kills are in RL, with episodes in flight."""


@dataclasses.dataclass
class Tally:
    """Counts of all kills so far."""

    kills: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """By moment and signal."""
    runs: int = 0
    """Finished runs."""
    unfinished_saves: int = 0
    """Kills that interrupted a save."""


# Settings that make starts and steps short.
SHORT = """
--sft.rows 1 --rl.grpo.group-size 2
--protocol.turn-tokens 40 --protocol.summary-tokens 8 --engine.slots 4
--evaluation.questions 2 --evaluation.dispatch parallel
--evaluation.temperatures 0.7 0
""".split()


ONE_PROMPT = ["--rl.prompts", "1"]


def in_flight(cold_start: pathlib.Path, max_staleness: int) -> list[str]:
    """Return settings of runs that begin with RL, and keep episodes in flight."""
    longer = ["--rl.prompts", "2", "--rl.steps", "10"]
    begin = ["--sft.steps", "0", "--model.path", str(cold_start / "model")]
    return [*longer, *begin, "--rl.max-staleness", str(max_staleness)]


def command(folder: pathlib.Path, arguments: Sequence[str]) -> list[str]:
    small = [sys.executable, str(PROGRAM), "--config=small", "--run-dir", str(folder)]
    return [*small, *SHORT, *arguments]


def environment(compiled: pathlib.Path) -> dict[str, str]:
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(ROOT),
    }
    return {"JAX_PLATFORMS": "cpu"} | dict(os.environ) | cache


def start_process(
    folder: pathlib.Path, compiled: pathlib.Path, arguments: Sequence[str]
) -> subprocess.Popen[bytes]:
    with folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            command(folder, arguments),
            env=environment(compiled),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def wait(
    process: subprocess.Popen[bytes],
    what: str,
    done: Callable[[], bool] = lambda: False,
    deadline: float = DEADLINE,
) -> None:
    """Wait until the process ends or `done` returns True."""
    end = time.monotonic() + deadline
    while process.poll() is None and not done():
        if time.monotonic() > end:
            process.kill()
            raise AssertionError(f"{what}: not reached after {deadline:.0f} s")
        time.sleep(0.002)


# --- moments ---


def moments(
    folder: pathlib.Path, rng: np.random.Generator
) -> dict[str, tuple[Callable[[], bool], float]]:
    """Possible moments of a kill, by name.

    Each consists of a condition to wait for, and the seconds to wait after it.
    """
    recorded = _stamp(folder / "metrics.jsonl")
    evaluated = _files(folder / "evaluation")
    clock = time.monotonic() + rng.uniform(0, 25)
    return {
        "any time": (lambda: time.monotonic() > clock, 0.0),
        "after a step": (
            lambda: _stamp(folder / "metrics.jsonl") != recorded,
            rng.uniform(0, 1.5),
        ),
        "while saving": (
            lambda: any((folder / "checkpoints").glob("*/*.orbax-checkpoint-tmp*")),
            rng.uniform(0, 0.04),
        ),
        "while evaluating": (
            lambda: _files(folder / "evaluation") != evaluated,
            rng.uniform(0, 1.5),
        ),
    }


def _files(folder: pathlib.Path) -> set[str]:
    return {file.name for file in folder.glob("*.json")}


def _stamp(file: pathlib.Path) -> int:
    return file.stat().st_mtime_ns if file.exists() else 0


# --- checks ---


def lines_of(folder: pathlib.Path) -> list[Line]:
    return read_metrics(folder / "metrics.jsonl")


def without_clock(lines: list[Line]) -> list[Line]:
    """Remove times, and numbers of compilations, which depend on restarts."""
    measured = (*MEASURED, "recompilations")
    return [{name: line[name] for name in line if not name.startswith(measured)} for line in lines]


def checkpoints_of(folder: pathlib.Path) -> Iterator[tuple[str, int, dict[str, bytes]]]:
    """Read every checkpoint as (phase, step, bytes of each leaf by name)."""
    for phase in PHASES:
        if not (folder / "checkpoints" / phase).exists():
            continue
        checkpoints = Checkpoints(folder / "checkpoints" / phase, read_only=True)
        for step in checkpoints.steps():
            record = json.loads((checkpoints.folder / str(step) / "meta" / "metadata").read_text())
            template = {name: _leaf(text) for name, text in record["leaves"].items()}
            match, _ = checkpoints.restore(template, step, part=True)
            yield phase, step, {name: np.asarray(leaf).tobytes() for name, leaf in match.items()}
        checkpoints.close()


def _leaf(text: str) -> jax.ShapeDtypeStruct:
    """Return the abstract array that "float32[2,3]" describes."""
    match = re.fullmatch(r"(\w+)\[([\d,]*)\]", text)
    assert match, text
    shape = tuple(int(size) for size in match[2].split(",") if size)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(shape, match[1], sharding=sharding)


def saved_lines(lines: list[Line], newest: dict[str, int]) -> list[Line]:
    """Return the lines that the newest checkpoints cover. No later process may write them again."""
    return [line for line in lines if line["step"] <= newest.get(line["phase"], 0)]


def check_state(
    folder: pathlib.Path, whole: list[Line], states: dict[tuple[str, int], dict[str, bytes]]
) -> dict[str, int]:
    """Check a run's files after its process was killed.

    Args:
        folder: Folder of the run.
        whole: Metrics of the undisturbed run.
        states: Leaves of all known checkpoints, by (phase, step): those of the undisturbed run and
            of runs that were checked before. New steps are added.

    Returns:
        The step of the newest checkpoint of each phase.
    """
    lines = lines_of(folder)
    newest: dict[str, int] = {}
    assert without_clock(lines) == without_clock(whole)[: len(lines)], (
        "metrics.jsonl differs from that of the undisturbed run"
    )
    for phase, step, leaves in checkpoints_of(folder):
        newest[phase] = max(step, newest.get(phase, 0))
        expected = states.setdefault((phase, step), leaves)
        assert expected == leaves, f"checkpoint {step} of {phase} differs"
    for phase, step in newest.items():
        recorded = sum(line["phase"] == phase for line in lines)
        assert recorded >= step, f"{phase}: checkpoint {step} is ahead of metrics.jsonl"
    return newest


def check_end(folder: pathlib.Path, undisturbed: pathlib.Path) -> None:
    """Check that a finished run equals the undisturbed one."""
    results = [json.loads((run / "result.json").read_text()) for run in (folder, undisturbed)]
    for result in results:
        del result["seconds"], result["recompilations_after_warmup"]
    assert results[0] == results[1], "result.json differs"
    assert without_clock(lines_of(folder)) == without_clock(lines_of(undisturbed)), (
        "metrics.jsonl differs"
    )
    for name in ("model/model.safetensors", "episodes.jsonl"):
        same = (folder / name).read_bytes() == (undisturbed / name).read_bytes()
        assert same, f"{name} differs"


# --- killing ---

# Exit codes by signal. The negative codes of SIGINT and SIGTERM occur before the run handles them.
EXIT_CODES = {signal.SIGKILL: (-9,), signal.SIGINT: (130, -2), signal.SIGTERM: (143, -15)}


def kill_once(
    folder: pathlib.Path,
    compiled: pathlib.Path,
    rng: np.random.Generator,
    tally: Tally,
    arguments: Sequence[str],
) -> bool:
    """Start a process of the run and kill it. Returns True if the run ended before the kill."""
    sent = SIGNALS[rng.integers(len(SIGNALS))]
    steps_before = len(lines_of(folder))
    possible = moments(folder, rng)
    name = sorted(possible)[rng.integers(len(possible))]
    reached, delay = possible[name]
    process = start_process(folder, compiled, arguments)
    try:
        wait(process, name, reached)
        if process.poll() is None:
            time.sleep(delay)
            process.send_signal(sent)
            wait(process, f"{name}, after {sent.name}")
    finally:
        process.kill()
    code = process.wait()
    lines = lines_of(folder)
    if code == 0:
        return True
    assert code in EXIT_CODES[sent], (
        f"{name}, {sent.name}: exit code {code}; see {folder.with_suffix('.log')}"
    )
    tally.kills[f"{name}, {sent.name}"] += 1
    tally.unfinished_saves += any((folder / "checkpoints").glob("*/*.orbax-checkpoint-tmp*"))
    stopped_cleanly = code in (130, 143)
    if stopped_cleanly and len(lines) > steps_before:
        last = lines[-1]
        saved = folder / "checkpoints" / last["phase"] / str(last["step"])
        assert saved.exists(), "the last step was not saved at a clean stop"
    return False


def kill_again_and_again(
    times: int,
    seed: int,
    folder: pathlib.Path,
    compiled: pathlib.Path,
    max_staleness: int = 0,
) -> Tally:
    """Kill runs `times` times, and let the last one finish. Prints its progress on stderr.

    Args:
        times: Number of kills.
        seed: Seed of the random moments and signals.
        folder: Folder for the runs.
        compiled: Folder for compiled programs.
        max_staleness: Updates that a rollout may outlive.

    Raises:
        AssertionError: A check failed.
    """
    undisturbed = folder / "undisturbed"
    rng = np.random.default_rng(seed)
    tally = Tally()
    arguments = ONE_PROMPT
    # The first run compiles all programs, so it takes longer.
    if max_staleness:
        finish(folder / "start", compiled, [*ONE_PROMPT, "--rl.steps", "1"], 5 * DEADLINE)
        arguments = in_flight(folder / "start", max_staleness)
    finish(undisturbed, compiled, arguments, 5 * DEADLINE)
    whole = lines_of(undisturbed)
    states = {(phase, step): leaves for phase, step, leaves in checkpoints_of(undisturbed)}
    while tally.kills.total() < times:
        run = folder / f"run-{tally.runs:02d}"
        saved: list[Line] = []
        ended = False
        while not ended:
            if tally.kills.total() < times:
                ended = kill_once(run, compiled, rng, tally, arguments)
            else:
                finish(run, compiled, arguments)
                ended = True
            newest = check_state(run, whole, states)
            # Compare the times too: a step that ran again would have different ones.
            assert lines_of(run)[: len(saved)] == saved, "a saved step was written again"
            saved = saved_lines(lines_of(run), newest)
            print(
                f"{tally.kills.total()}/{times} kills, run {tally.runs}, "
                f"newest checkpoints {newest}",
                file=sys.stderr,
                flush=True,
            )
        check_end(run, undisturbed)
        tally.runs += 1
        shutil.rmtree(run)
    return tally


def finish(
    folder: pathlib.Path,
    compiled: pathlib.Path,
    arguments: Sequence[str],
    deadline: float = DEADLINE,
) -> None:
    """Run to the end without a kill."""
    process = start_process(folder, compiled, arguments)
    wait(process, "the end", deadline=deadline)
    assert process.wait() == 0, f"it failed; see {folder.with_suffix('.log')}"


def main() -> None:
    asked = tyro.cli(Killing, prog="python -m benchmarks.killing")
    begin = time.monotonic()
    folder = pathlib.Path(tempfile.mkdtemp())
    print(f"{folder}: the runs, which stay if a check fails", flush=True)
    tally = kill_again_and_again(
        asked.times, asked.seed, folder, folder / "compiled", asked.max_staleness
    )
    shutil.rmtree(folder)
    minutes = (time.monotonic() - begin) / 60
    print(
        f"{tally.kills.total()} kills, {tally.runs} runs, each equal to the undisturbed one; "
        f"{minutes:.1f} min"
    )
    print("; ".join(f"{what} {count}" for what, count in sorted(tally.kills.items())))
    print(f"interrupted saves: {tally.unfinished_saves}")


if __name__ == "__main__":
    main()
