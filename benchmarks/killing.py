"""A small run killed at random moments, again and again: `python -m benchmarks.killing --times 100`.

Owns the moments, the signals and what is checked: after every death all checkpoints can be read, metrics.jsonl has each step once and
none is lost that was saved; a clean stop has saved its last step; and a run that has come to its end, however often it died on the way,
equals one that nobody disturbed, bit for bit. Programs are compiled once, by that one, and read from a folder by all others.
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
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import tyro

from paravt_jax.data.local_path import require_local
from train.durable.checkpoint import Checkpoints
from train.durable.metrics import PHASES, read_metrics
from train.durable.rollout_file import rollout_file_name

ROOT = pathlib.Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "train" / "small.py"
ROLLOUTS = rollout_file_name()
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
DEADLINE = 900.0  # seconds after which a process that was to die or to end is stuck
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Killing:
    """Kill a small run at random moments and compare what it comes to with an undisturbed one."""

    times: int = 100
    seed: int = 0
    folder: str = ""
    """Where the runs stay; a temporary folder if empty."""

    def __post_init__(self):
        require_local("folder", self.folder)


@dataclasses.dataclass
class Tally:
    """What happened so far."""

    kills: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    ends: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    phases: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    runs: int = 0
    unfinished_saves: int = 0
    read_again: int = 0
    """Steps whose episodes were found on disk."""


# What makes a start and a step short: dying is the point, and a smaller run dies as well.
SHORT = """
--log.no-tensorboard --checkpoints.keep 3 --align.save-every 2
--sft.rows 1 --rl.prompts 1 --rl.grpo.group-size 2
--protocol.turn-tokens 40 --protocol.summary-tokens 8 --engine.slots 4
--evaluation.questions 1 --evaluation.samples 1 --evaluation.dispatch parallel --evaluation.temperatures 0.7
""".split()


def command(folder: pathlib.Path) -> list[str]:
    return [sys.executable, str(PROGRAM), "--config=small", "--run-dir", str(folder), *SHORT]


def environment(compiled: pathlib.Path) -> dict[str, str]:
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(ROOT),
    }
    return {"JAX_PLATFORMS": "cpu"} | dict(os.environ) | cache


def start(folder: pathlib.Path, compiled: pathlib.Path) -> subprocess.Popen[bytes]:
    with folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            command(folder),
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
    """Until the process has ended or it is `done`."""
    end = time.monotonic() + deadline
    while process.poll() is None and not done():
        if time.monotonic() > end:
            process.kill()
            raise AssertionError(f"{what}: nothing for {deadline:.0f} s")
        time.sleep(0.002)


# --- moments ---


def moments(
    folder: pathlib.Path, rng: np.random.Generator
) -> dict[str, tuple[Callable[[], bool], float]]:
    """By name: what is waited for from now on, and the seconds that then pass."""
    files = {name: _stamp(folder / name) for name in ("metrics.jsonl", ROLLOUTS)}
    clock = time.monotonic() + rng.uniform(0, 25)
    return {
        "any time": (lambda: time.monotonic() > clock, 0.0),
        "after a step": (
            lambda: _stamp(folder / "metrics.jsonl") != files["metrics.jsonl"],
            rng.uniform(0, 1.5),
        ),
        "while saving": (
            lambda: any((folder / "checkpoints").glob("*/*.orbax-checkpoint-tmp*")),
            rng.uniform(0, 0.04),
        ),
        "after rollouts": (
            lambda: _stamp(folder / ROLLOUTS) != files[ROLLOUTS],
            rng.uniform(0, 1.5),
        ),
    }


def _stamp(file: pathlib.Path) -> int:
    return file.stat().st_mtime_ns if file.exists() else 0


# --- what has to hold ---


def rows_of(folder: pathlib.Path) -> list[Row]:
    return read_metrics(folder / "metrics.jsonl")


def without_clock(rows: list[Row]) -> list[Row]:
    """Without what a clock says, and what was compiled meanwhile."""
    return [
        {
            k: v
            for k, v in row.items()
            if k not in ("wall", "recompilations") and not k.startswith(("time/", "speed/"))
        }
        for row in rows
    ]


def checkpoints_of(folder: pathlib.Path) -> Iterator[tuple[str, int, dict[str, bytes]]]:
    """Every checkpoint: phase, step and all of its leaves."""
    for phase in PHASES:
        if not (folder / "checkpoints" / phase).exists():
            continue
        checkpoints = Checkpoints(folder / "checkpoints" / phase, read_only=True)
        for step in checkpoints.steps():
            record = json.loads((checkpoints.folder / str(step) / "meta" / "metadata").read_text())
            template = {name: _leaf(text) for name, text in record["leaves"].items()}
            found = checkpoints.restore_part(template, step)
            yield phase, step, {name: np.asarray(leaf).tobytes() for name, leaf in found.items()}
        checkpoints.close()


def _leaf(text: str) -> jax.ShapeDtypeStruct:
    """What "float32[2,3]" describes."""
    found = re.fullmatch(r"(\w+)\[([\d,]*)\]", text)
    assert found, text
    shape = tuple(int(size) for size in found[2].split(",") if size)
    return jax.ShapeDtypeStruct(
        shape, found[1], sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )


def saved_rows(rows: list[Row], newest: dict[str, int]) -> list[Row]:
    """The rows that a checkpoint covers: no later process may write them again, not even the same."""
    return [row for row in rows if row["step"] <= newest.get(row["phase"], 0)]


def check_state(
    folder: pathlib.Path, whole: list[Row], states: dict[tuple[str, int], dict[str, bytes]]
) -> dict[str, int]:
    """After a death. Returns the newest checkpoint of each phase."""
    rows, newest = rows_of(folder), dict[str, int]()
    assert without_clock(rows) == without_clock(whole)[: len(rows)], (
        "metrics.jsonl differs from the beginning of an undisturbed run's"
    )
    for phase, step, leaves in checkpoints_of(folder):
        newest[phase] = max(step, newest.get(phase, 0))
        assert states.setdefault((phase, step), leaves) == leaves, (
            f"{phase} {step} holds another state than it should"
        )
    for phase, step in newest.items():
        assert sum(row["phase"] == phase for row in rows) >= step, (
            f"{phase}: the checkpoint of {step} is ahead of metrics.jsonl"
        )
    return newest


def check_end(folder: pathlib.Path, undisturbed: pathlib.Path) -> None:
    results = [json.loads((place / "result.json").read_text()) for place in (folder, undisturbed)]
    for result in results:
        del result["seconds"], result["recompilations_after_warmup"]
    assert results[0] == results[1], "another result"
    assert without_clock(rows_of(folder)) == without_clock(rows_of(undisturbed)), "other metrics"
    for name in ("model/model.safetensors", "episodes.jsonl"):
        assert (folder / name).read_bytes() == (undisturbed / name).read_bytes(), f"another {name}"
    assert not (folder / ROLLOUTS).exists()


# --- the course ---


def kill_once(
    folder: pathlib.Path, compiled: pathlib.Path, rng: np.random.Generator, tally: Tally
) -> bool:
    """One process from start to death; True where it came to the run's end before."""
    number, before = SIGNALS[rng.integers(len(SIGNALS))], len(rows_of(folder))
    found = moments(folder, rng)
    name = sorted(found)[rng.integers(len(found))]
    process = start(folder, compiled)
    try:
        wait(process, name, found[name][0])
        if process.poll() is None:
            time.sleep(found[name][1])
            process.send_signal(number)
            wait(process, f"{name}, after {number.name}")
    finally:
        process.kill()
    code, rows = process.wait(), rows_of(folder)
    tally.read_again += sum(row.get("time/rollout", 1.0) < 0.05 for row in rows[before:])
    if code == 0:
        return True
    expected = {signal.SIGKILL: (-9,), signal.SIGINT: (130, -2), signal.SIGTERM: (143, -15)}[
        number
    ]  # -2, -15: before it listens
    assert code in expected, (
        f"{name}, {number.name}: it ended with {code}; see {folder.with_suffix('.log')}"
    )
    tally.kills[f"{name}, {number.name}"] += 1
    tally.ends[str(code)] += 1
    tally.phases[rows[-1]["phase"] if rows else "before"] += 1
    tally.unfinished_saves += any((folder / "checkpoints").glob("*/*.orbax-checkpoint-tmp*"))
    if code in (130, 143) and len(rows) > before:
        last = rows[-1]
        assert (folder / "checkpoints" / last["phase"] / str(last["step"])).exists(), (
            "a clean stop has not saved its last step"
        )
    return False


def kill_again_and_again(
    times: int, seed: int, folder: pathlib.Path, compiled: pathlib.Path
) -> Tally:
    """AssertionError where something does not hold; says how it goes on stderr. `compiled` is a folder for programs."""
    undisturbed, rng, tally = folder / "undisturbed", np.random.default_rng(seed), Tally()
    first = start(undisturbed, compiled)
    wait(first, "the undisturbed run", deadline=5 * DEADLINE)  # it compiles
    assert first.wait() == 0, f"the undisturbed run failed: see {undisturbed.with_suffix('.log')}"
    whole = rows_of(undisturbed)
    states = {(phase, step): leaves for phase, step, leaves in checkpoints_of(undisturbed)}
    while tally.kills.total() < times:
        run, kept = folder / f"run-{tally.runs:02d}", list[Row]()
        over = False
        while not over:
            over = (
                kill_once(run, compiled, rng, tally)
                if tally.kills.total() < times
                else _finish(run, compiled)
            )
            newest = check_state(run, whole, states)
            assert rows_of(run)[: len(kept)] == kept, "a step that was saved has been written again"
            kept = saved_rows(rows_of(run), newest)
            print(
                f"{tally.kills.total()}/{times} kills, run {tally.runs}, newest checkpoints {newest}",
                file=sys.stderr,
                flush=True,
            )
        check_end(run, undisturbed)
        tally.runs += 1
        shutil.rmtree(run)
    return tally


def _finish(folder: pathlib.Path, compiled: pathlib.Path) -> bool:
    process = start(folder, compiled)
    wait(process, "the end")
    assert process.wait() == 0, f"it failed; see {folder.with_suffix('.log')}"
    return True


def main() -> None:
    asked = tyro.cli(Killing, prog="python -m benchmarks.killing")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(asked.folder or temporary).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        tally = kill_again_and_again(asked.times, asked.seed, folder, folder / "compiled")
    minutes = (time.monotonic() - begin) / 60
    print(
        f"{tally.kills.total()} kills, {tally.runs} runs, each equal to the undisturbed one; {minutes:.1f} min"
    )
    for name in ("kills", "ends", "phases"):
        print(
            f"{name}: "
            + "; ".join(f"{what} {count}" for what, count in sorted(getattr(tally, name).items()))
        )
    print(
        f"saves cut off: {tally.unfinished_saves}; steps whose episodes were found on disk: {tally.read_again}"
    )


if __name__ == "__main__":
    main()
