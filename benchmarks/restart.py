"""Times how long a killed run takes to go on: `python -m benchmarks.restart`.

A small run is killed after a step of RL and started again, with the programs that it had compiled,
and without them. What is timed is a start of the process until its first new step is recorded:
imports, data, the checkpoint, compiling, and the step itself.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import tempfile
import time

import tyro

from benchmarks.killing import ONE_PROMPT, rows_of, start, wait


@dataclasses.dataclass(frozen=True)
class Restart:
    """Time how long a killed run takes to go on."""

    rounds: int = 3
    """Number of restarts with compiled programs, and as many without."""

    def __post_init__(self):
        if self.rounds < 1:
            raise ValueError(f"rounds: {self.rounds}; give at least 1")


def seconds_to_next_step(folder: pathlib.Path, compiled: pathlib.Path) -> float:
    """Start a run, and kill it at its next step of RL."""

    def steps() -> int:
        return sum(row["phase"] == "rl" for row in rows_of(folder))

    before = steps()
    begin = time.monotonic()
    process = start(folder, compiled, [*ONE_PROMPT, "--rl.steps", "1000", "--rl.save-every", "1"])
    try:
        wait(process, "the next step", lambda: steps() > before)
        seconds = time.monotonic() - begin
        assert process.poll() is None, f"the run ended; see {folder.with_suffix('.log')}"
        # The checkpoint of the step: otherwise the next start would repeat it.
        saved = folder / "checkpoints" / "rl" / str(before + 1)
        wait(process, "the checkpoint", saved.exists)
    finally:
        process.kill()
        process.wait()
    return seconds


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    command = tyro.cli(Restart, args=argv, prog="python -m benchmarks.restart")
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / "run"
        compiled = pathlib.Path(temporary) / "compiled"
        first = seconds_to_next_step(folder, compiled)
        print(f"first start, with the cold start: {first:.1f} s", flush=True)
        for number in range(command.rounds):
            kept = seconds_to_next_step(folder, compiled)
            shutil.rmtree(compiled)
            anew = seconds_to_next_step(folder, compiled)
            print(
                f"restart {number + 1}: {kept:.1f} s with compiled programs, {anew:.1f} s without",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
