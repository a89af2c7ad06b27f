"""Lets a run of two processes die in many ways, and compares it with an undisturbed one.

    python -m benchmarks.deaths --folder FOLDER
    python -m benchmarks.deaths --folder FOLDER --disk SMALL      # full disks, too
    python -m benchmarks.deaths --folder FOLDER --store           # in a bucket, with outages

Each death is one of these, at a random moment:

- killed, interrupted: a signal to one process or to both, SIGKILL, SIGTERM or SIGINT;
- frozen: one process stops answering, as if its host were cut off;
- full disk: the file system of the run has no room left, until both processes have ended;
- killed in an outage: the store of the run cannot be reached when a process is killed.

After every third death, one bit of one file of the run is flipped. Before every second death in a
bucket, the store cannot be reached for some seconds, which the run has to survive; and after every
third, it goes on on a machine that has none of its files.

After each, the run is started again. Either it goes on, and its results are those of the
undisturbed run bit for bit; or it is refused with a line that names the damaged file, which is then
restored, as from a backup. Anything else is an error of this command.

The command can be stopped at any moment; the same command continues with the next death. The bucket
is in memory: its run then begins anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import IO

import numpy as np
import tyro

from benchmarks.killing import (
    PROGRAM,
    ROOT,
    SHORT,
    SIGNALS,
    check_end,
    check_state,
    checkpoints_of,
    rows_of,
)
from benchmarks.run_homes import Home, InStore, OnDisk
from paravt_jax.data.any_path import require_local
from paravt_jax.data.atomic import write_atomically

PROCESSES = 2
DEVICES = 2
HEARTBEAT = 10
SOON_LOST = ROOT / "tests" / "soon_lost.py"
# Seconds after which a process that has not ended counts as stuck.
DEADLINE = 600.0
# A bit is flipped after every third death.
FLIP_EVERY = 3
# The largest file system that is filled: another program may need the room meanwhile.
MOST_DISK = 8 << 30
ARGUMENTS = (
    *SHORT,
    *("--rl.prompts", "2", "--mesh.fsdp", str(PROCESSES * DEVICES)),
)
# Which processes get a signal.
WHO = ((0,), (1,), (0, 1))
# A stopped process ends with these codes, or by the signal itself before the run handles it.
STOPPED = (130, 143, -signal.SIGINT, -signal.SIGTERM)
# Marks of an end that is not one line.
STACKS = (
    "Traceback (most recent call last)",
    "Fatal Python error",
    "*** Check failure",
    "@     0x",
)


@dataclasses.dataclass(frozen=True)
class Deaths:
    """Let a run of two processes die at random moments, and compare it with an undisturbed one."""

    folder: str
    """Folder for the runs; the same folder continues after an interruption."""
    times: int = 40
    """Number of deaths."""
    seed: int = 0
    """Seed of the random moments and kinds."""
    disk: str = ""
    """A small file system of its own for the run that dies, which is filled; empty: no full disks.
    For example: mount -t tmpfs -o size=1g tmpfs SMALL."""
    store: bool = False
    """Keep the run that dies in a bucket, which this command serves."""

    def __post_init__(self):
        require_local("folder", self.folder)
        require_local("disk", self.disk)
        if self.times < 1:
            raise ValueError(f"times: {self.times}; give at least 1")
        if self.store and self.disk:
            raise ValueError("disk, store: a run is in one place; give one of the two")
        if not self.disk:
            return
        if not os.path.ismount(self.disk):
            raise ValueError(f"disk: {self.disk}; give a folder where a file system is mounted")
        free = shutil.disk_usage(self.disk).free
        if free > MOST_DISK:
            raise ValueError(
                f"disk: {self.disk}, with {free / 2**30:.0f} GiB free; it is filled: mount one of "
                f"at most {MOST_DISK / 2**30:.0f} GiB"
            )


@dataclasses.dataclass
class Progress:
    """What has happened so far; stored after each death."""

    deaths: int = 0
    """Number of deaths."""
    runs: int = 0
    """Number of finished runs, each equal to the undisturbed one."""
    kinds: dict[str, int] = dataclasses.field(default_factory=dict)
    """Number of deaths by kind."""
    ends: dict[str, int] = dataclasses.field(default_factory=dict)
    """Number of processes by exit code, without those that were killed."""
    flips: dict[str, int] = dataclasses.field(default_factory=dict)
    """Number of flipped bits by what became of them, and by kind of file."""
    damaged: str = ""
    """The file of the run whose bit is flipped, while nothing has come of that."""

    def count(self, counts: dict[str, int], what: str) -> None:
        counts[what] = counts.get(what, 0) + 1


class Pair:
    """The two processes of a run, which have just been started.

    Args:
        run: The directory or address of the run.
        folder: For compiled programs and the processes' output.
        variables: Further environment variables.
    """

    def __init__(
        self, run: str, folder: pathlib.Path, variables: Mapping[str, str] = MappingProxyType({})
    ):
        flags = os.environ.get("XLA_FLAGS", "")
        with socket.socket() as found:
            found.bind(("localhost", 0))
            port = found.getsockname()[1]
        environment = dict(
            os.environ,
            **variables,
            JAX_PLATFORMS="cpu",
            JAX_COORDINATOR_ADDRESS=f"localhost:{port}",
            JAX_NUM_PROCESSES=str(PROCESSES),
            XLA_FLAGS=f"{flags} --xla_force_host_platform_device_count={DEVICES}",
            JAX_COMPILATION_CACHE_DIR=str(folder / "compiled"),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            PYTHONPATH=str(ROOT),
        )
        self.logs = [folder / f"process-{index}.log" for index in range(PROCESSES)]
        self.processes = []
        for index, log in enumerate(self.logs):
            command = [sys.executable, str(SOON_LOST), str(HEARTBEAT), str(PROGRAM)]
            command += ["--config=small", "--run-dir", run, *ARGUMENTS]
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command,
                    env=environment | {"JAX_PROCESS_ID": str(index)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            self.processes.append(process)

    def one_ended(self) -> bool:
        """Whether any of them has ended."""
        return any(process.poll() is not None for process in self.processes)

    def wait_for(self, done: Callable[[], bool], what: str) -> None:
        """Wait until `done`, or until one of them ends."""
        end = time.monotonic() + DEADLINE
        while not self.one_ended() and not done():
            assert time.monotonic() < end, f"{what}: not reached after {DEADLINE:.0f} s"
            time.sleep(0.01)

    def finish(self) -> list[int]:
        """Wait until both have ended; returns their exit codes."""
        for index, process in enumerate(self.processes):
            try:
                process.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"process {index} hangs; see {self.logs[index]}") from None
        return [process.returncode for process in self.processes]

    def output(self, index: int) -> str:
        """What a process has printed."""
        return self.logs[index].read_text(errors="replace")

    def close(self) -> None:
        """End both at once."""
        for process in self.processes:
            process.kill()
            process.wait()


def _reserve(file: IO[bytes], left: int) -> None:
    """Gives a file all room of its file system but `left` bytes, while the run writes there."""
    while (size := shutil.disk_usage(file.name).free - left) > 0:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            # The run was faster.
            if error.errno != errno.ENOSPC:
                raise
        else:
            return


class Dying:
    """An undisturbed run, and one that dies again and again.

    Args:
        command: The settings.
    """

    def __init__(self, command: Deaths):
        self._command = command
        self._folder = pathlib.Path(command.folder).absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._undisturbed = self._folder / "undisturbed"
        on_disk = (pathlib.Path(command.disk).absolute() if command.disk else self._folder) / "run"
        self._home: Home = InStore(self._folder) if command.store else OnDisk(on_disk)
        self._progress_file = self._folder / "progress.json"
        # The file with a flipped bit, as it was and as it is.
        self._sound = self._folder / "sound"
        self._flipped = self._folder / "flipped"
        self.progress = Progress()
        if self._progress_file.exists():
            self.progress = Progress(**json.loads(self._progress_file.read_text()))
        if command.store:
            # The bucket of an earlier start is gone, and the flipped bit with it.
            self.progress.damaged = ""

    def go_on(self) -> None:
        """Bring about all deaths that are left, and finish the last run.

        Raises:
            AssertionError: Something was lost, is wrong, or ended in another way than it should.
        """
        if not (self._undisturbed / "result.json").exists():
            with contextlib.closing(Pair(str(self._undisturbed), self._folder)) as pair:
                self._require_finished(pair)
        whole = rows_of(self._undisturbed)
        states = {
            (phase, step): leaves for phase, step, leaves in checkpoints_of(self._undisturbed)
        }
        while self.progress.deaths < self._command.times or self._home.exists():
            # Each death has a generator of its own, so a restart of this command repeats it.
            rng = np.random.default_rng([self._command.seed, self.progress.deaths])
            if not self._start_and_die(rng):
                continue
            self.progress.deaths += 1
            newest = ""
            if not self.progress.damaged:
                run = self._home.files()
                newest = f", newest checkpoints {check_state(run, whole, states)}"
                if self.progress.deaths % FLIP_EVERY == 0:
                    self._flip(run, rng)
                    # Files that a machine has need not be read from the store.
                    self._home.move()
            self._save()
            say(f"{self.progress.deaths}/{self._command.times} deaths{newest}")

    def _start_and_die(self, rng: np.random.Generator) -> bool:
        """Start the run. Returns False if it ended by itself."""
        kinds = [self._signal, self._freeze]
        if self._command.disk:
            kinds.append(self._fill_disk)
        if self._command.store:
            kinds.append(self._kill_in_outage)
        possible = self._home.moments(rng)
        moment = sorted(possible)[rng.integers(len(possible))]
        reached, delay = possible[moment]
        with contextlib.closing(
            Pair(self._home.address, self._folder, self._home.variables)
        ) as pair:
            if self.progress.deaths < self._command.times:
                pair.wait_for(reached, moment)
                if not pair.one_ended():
                    time.sleep(delay)
                # With a damaged file, the run may be refused meanwhile.
                outage = self.progress.deaths % 2 and not self.progress.damaged
                survived = self._outage(pair, rng) if outage else ""
                if not pair.one_ended():
                    kind = kinds[rng.integers(len(kinds))](pair, rng)
                    if kind:
                        self.progress.count(self.progress.kinds, f"{moment}: {survived}{kind}")
                        return True
            if self._is_refused(pair):
                return False
            self._require_finished(pair)
        check_end(self._home.files(), self._undisturbed)
        if self.progress.damaged:
            self.progress.count(self.progress.flips, f"{kind_of(self.progress.damaged)}: went on")
            self.progress.damaged = ""
        self._home.remove()
        self.progress.runs += 1
        self._save()
        return False

    def _save(self) -> None:
        write_atomically(self._progress_file, json.dumps(dataclasses.asdict(self.progress)))

    # --- ways to die: each returns its name, or "" if the run ended before ---

    def _signal(self, pair: Pair, rng: np.random.Generator) -> str:
        sent = SIGNALS[rng.integers(len(SIGNALS))]
        who = WHO[rng.integers(len(WHO))]
        for index in who:
            pair.processes[index].send_signal(sent)
        self._require_one_line(pair, who if sent == signal.SIGKILL else ())
        return f"{sent.name} to {'both' if len(who) > 1 else f'process {who[0]}'}"

    def _freeze(self, pair: Pair, rng: np.random.Generator) -> str:
        who = int(rng.integers(PROCESSES))
        pair.processes[who].send_signal(signal.SIGSTOP)
        try:
            pair.processes[1 - who].wait(DEADLINE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"process {1 - who} hangs; see {pair.logs[1 - who]}") from None
        pair.processes[who].kill()
        self._require_one_line(pair, (who,))
        return f"process {who} frozen"

    def _fill_disk(self, pair: Pair, rng: np.random.Generator) -> str:
        ballast = pathlib.Path(self._home.address).parent / "ballast"
        # Enough for some of the next files, but not for all.
        left = int(rng.integers(0, 4 << 20))
        try:
            with ballast.open("wb") as file:
                _reserve(file, left)
            if pair.finish() == [0] * PROCESSES:
                return ""
        finally:
            ballast.unlink(missing_ok=True)
        self._require_one_line(pair, ())
        return "full disk"

    def _outage(self, pair: Pair, rng: np.random.Generator) -> str:
        """The store cannot be reached for some seconds, and the run goes on."""
        if not isinstance(self._home, InStore):
            return ""
        with self._home.server.outage():
            time.sleep(rng.uniform(1, 12))
        time.sleep(rng.uniform(0, 4))
        assert not any(process.poll() for process in pair.processes), (
            f"a process did not survive an outage of seconds; see {pair.logs}"
        )
        return "outage, then "

    def _kill_in_outage(self, pair: Pair, rng: np.random.Generator) -> str:
        assert isinstance(self._home, InStore)
        who = int(rng.integers(PROCESSES))
        with self._home.server.outage():
            time.sleep(rng.uniform(0, 4))
            pair.processes[who].kill()
            time.sleep(rng.uniform(0, 8))
        self._require_one_line(pair, (who,))
        return f"process {who} killed in an outage"

    # --- flipped bits ---

    def _flip(self, run: pathlib.Path, rng: np.random.Generator) -> None:
        """Flip one bit of a file of the run, chosen by its kind first."""
        by_kind: dict[str, list[pathlib.Path]] = {}
        for file in sorted(run.rglob("*")):
            if file.is_file() and file.stat().st_size:
                by_kind.setdefault(kind_of(file.relative_to(run).as_posix()), []).append(file)
        kinds = sorted(by_kind)
        files = by_kind[kinds[rng.integers(len(kinds))]]
        file = files[rng.integers(len(files))]
        name = file.relative_to(run).as_posix()
        self._sound.write_bytes(file.read_bytes())
        self._home.flip(name, int(rng.integers(8 * file.stat().st_size)))
        self._flipped.write_bytes((self._home.files() / name).read_bytes())
        self.progress.damaged = name

    def _is_refused(self, pair: Pair) -> bool:
        """Whether a start failed with a line that names the damaged file, which is restored then.

        A checkpoint may be named instead of its file.
        """
        damaged = self.progress.damaged
        if not damaged or pair.finish() == [0] * PROCESSES:
            return False
        self._require_one_line(pair, ())
        parts = pathlib.PurePosixPath(damaged).parts
        named = [f"{self._home.address}/{damaged}"]
        if parts[0] == "checkpoints":
            named.append("/".join((self._home.address, *parts[:3])))
        printed = "".join(pair.output(index) for index in range(PROCESSES))
        assert any(name in printed for name in named), (
            f"{damaged} has a flipped bit, but the error does not name it; see {pair.logs}"
        )
        file = self._home.files() / damaged
        if file.exists() and file.read_bytes() == self._flipped.read_bytes():
            self._home.restore(damaged, self._sound.read_bytes())
        self.progress.count(self.progress.flips, f"{kind_of(damaged)}: refused by name")
        self.progress.damaged = ""
        self._save()
        return True

    # --- checks ---

    def _require_finished(self, pair: Pair) -> None:
        codes = pair.finish()
        assert codes == [0] * PROCESSES, f"{codes}; see {pair.logs}"

    def _require_one_line(self, pair: Pair, killed: Collection[int]) -> None:
        """Every process that was not killed ends by itself, without a stack trace."""
        codes = pair.finish()
        for index, code in enumerate(codes):
            if index in killed:
                continue
            self.progress.count(self.progress.ends, str(code))
            printed = pair.output(index)
            found = [mark for mark in STACKS if mark in printed]
            assert not found and (code >= 0 or code in STOPPED), (
                f"process {index} ended with {code} {found}; see {pair.logs[index]}"
            )


def kind_of(name: str) -> str:
    """The kind of a file of a run, by its path: all files of checkpoints are one kind."""
    top = pathlib.PurePosixPath(name).parts[0]
    return "TensorBoard" if top.startswith("events.out") else top


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    command = tyro.cli(Deaths, args=argv, prog="python -m benchmarks.deaths")
    dying = Dying(command)
    dying.go_on()
    progress = dying.progress
    print(f"{progress.deaths} deaths; {progress.runs} runs, each equal to the undisturbed one")
    for name in ("kinds", "ends", "flips"):
        counts = sorted(getattr(progress, name).items())
        print(f"{name}: " + "; ".join(f"{what} {count}" for what, count in counts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
