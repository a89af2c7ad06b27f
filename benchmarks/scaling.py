"""Measures the overhead of more devices and processes: `python -m benchmarks.scaling --json FILE`

Runs SFT and RL updates of the recipes `small` and `paravt_tiny` (on eight videos) with the same
weights and data, on 1, 2, 4 and 8 fake devices of one process and on 2 and 8 of two processes.
Compares losses and weights with those of one device.

The figures are overhead, not speed. All fake devices share the machine's cores, so ideally the CPU
time of a step does not depend on their number.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
import tyro

from configs import RECIPES
from models.sharding import MeshProgram, make_mesh
from paravt_extras.plan.collectives import bytes_sent, find_collectives
from paravt_jax.data.local_path import require_local
from paravt_jax.method.scoring import Rules
from paravt_jax.processes import cluster, hosts
from paravt_jax.world.videos import WorldSettings
from tests.processes import free_port
from tests.train.small import Road, Script, lay_road, small
from train.learn.rl import Learner
from train.learn.sft import SFTBatches
from train.prepare import prepare
from train.settings import Run

ROOT = pathlib.Path(__file__).parents[1]
# (number of processes, total numbers of devices to measure with them)
STARTS = (
    (1, (1, 2, 4, 8)),
    (2, (2,)),
    (2, (8,)),
)
# Name of the result file, which the first process writes to the shared folder.
RESULT = "measured"
# Upper bound on relative differences of losses, and on differences of weights. They are not 0,
# because sums are taken in another order.
BOUND = 1e-3


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Measure the overhead of several devices and processes in an update."""

    steps: int = 4
    """Number of updates of each kind; the first one compiles and is not timed."""
    recipes: tuple[str, ...] = ("small", "paravt_tiny")
    """Names of the recipes."""
    json: pathlib.Path | None = None
    """File for the figures."""
    devices: tuple[int, ...] = ()
    """Only for the processes that the command starts itself."""
    folder: pathlib.Path | None = None
    """Only for the processes that the command starts itself."""
    hosts: cluster.HostSettings = cluster.HostSettings()

    def __post_init__(self):
        require_local("json", self.json)
        require_local("folder", self.folder)


@dataclasses.dataclass(frozen=True)
class Updates:
    """A few updates on some devices."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    """Wall time of each update except the first."""
    cpu_seconds: tuple[float, ...]
    """CPU time of each update except the first, summed over processes."""
    sent: float
    """Megabytes that a device sends in an update."""
    weights: tuple[np.ndarray, ...]
    """Weights after the last update."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: a case, compared with one device."""

    update: str
    devices: int
    processes: int
    loss: float
    """Largest relative difference of a loss."""
    weights: float
    """Largest difference of a weight."""
    seconds: float
    """Median wall time of an update."""
    cpu_seconds: float
    """Median CPU time of an update."""
    cpu_ratio: float
    """CPU time relative to one device."""
    sent: float
    """Megabytes that a device sends in an update."""


def compare(update: str, found: dict[tuple[int, int], Updates]) -> list[Row]:
    """Compare every case of an update with one device of one process.

    Args:
        update: Name of the update.
        found: Results by (devices, processes). They must include (1, 1).
    """
    one = found[1, 1]
    one_cpu_seconds = statistics.median(one.cpu_seconds)
    rows = []
    for (devices, processes), case in found.items():
        losses = zip(case.losses, one.losses, strict=True)
        weights = zip(case.weights, one.weights, strict=True)
        cpu_seconds = statistics.median(case.cpu_seconds)
        row = Row(
            update=update,
            devices=devices,
            processes=processes,
            loss=max(abs(a - b) / abs(b) for a, b in losses),
            weights=max(float(np.abs(a - b).max()) for a, b in weights),
            seconds=statistics.median(case.seconds),
            cpu_seconds=cpu_seconds,
            cpu_ratio=cpu_seconds / one_cpu_seconds,
            sent=case.sent,
        )
        rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> str:
    """Format the rows as a Markdown table."""
    header = (
        "update",
        "devices",
        "processes",
        "loss differs by",
        "a weight by",
        "s per step",
        "CPU s",
        "of one device's",
        "MB sent per device",
    )
    lines = [header, ("---",) * len(header)]
    for row in rows:
        line = (
            row.update,
            str(row.devices),
            str(row.processes),
            f"{row.loss:.1e}",
            f"{row.weights:.1e}",
            f"{row.seconds:.2f}",
            f"{row.cpu_seconds:.2f}",
            f"{row.cpu_ratio:.2f}",
            f"{row.sent:.1f}",
        )
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --- one case, in a process of its own ---


class Timed:
    """Wraps a program, and records loss, times and argument shapes of its calls, step by step."""

    def __init__(self, program: MeshProgram):
        self._program = program
        self._steps: list[np.ndarray] = []
        self.begin_step()

    def begin_step(self) -> None:
        """The next calls belong to a new step: those of its micro-batches add up."""
        # Loss, seconds and CPU seconds.
        self._step = np.zeros(3)
        self._steps.append(self._step)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        jax.block_until_ready(arguments)
        # Keep shapes only: the program donates its arguments.
        self.shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arguments
        )
        start = time.perf_counter()
        cpu_start = time.process_time()
        result, figures = jax.block_until_ready(self._program(*arguments, **options))
        seconds = time.perf_counter() - start
        cpu_seconds = time.process_time() - cpu_start
        self._step += (float(figures["loss"]), seconds, cpu_seconds)
        return result, figures

    def updates(self, state: Any) -> Updates:
        """Return the records and the weights of `state`. All processes have to call it together."""
        mesh = self._program.mesh
        assert mesh is not None
        compiled = self._program.lower(*self.shapes).compile()
        sent = bytes_sent(find_collectives(compiled.as_text(), mesh.size))
        # An array over several processes cannot be read, so replicate the weights to each.
        replicated = jax.NamedSharding(mesh, jax.P())
        weights = jax.jit(lambda x: x, out_shardings=replicated)(state.weights)
        losses, seconds, cpu_seconds = np.transpose(self._steps).tolist()
        per_process = hosts.gather(cpu_seconds[1:])
        return Updates(
            losses=tuple(losses),
            seconds=tuple(seconds[1:]),
            cpu_seconds=tuple(sum(each) for each in zip(*per_process, strict=True)),
            sent=sum(sent.values()) / 1e6,
            weights=tuple(np.asarray(x.addressable_data(0)) for x in jax.tree.leaves(weights)),
        )


def sft_updates(road: Road, devices: int, steps: int) -> Updates:
    settings = road.run.sft
    assert settings is not None
    environment = road.environment
    mesh = make_mesh(1, devices, 1)
    batches = SFTBatches(
        settings, road.data, None, 0, environment.protocol, environment.features, mesh
    )
    state, update = batches.start(road.graph, road.fresh(fsdp=devices))
    timed = Timed(update)
    batch, _, _ = next(batches)
    for step in range(steps):
        if step:
            timed.begin_step()
        state, _ = timed(state, batch)
    return timed.updates(state)


def rl_updates(road: Road, devices: int, steps: int) -> Updates:
    settings = road.run.rl
    assert settings is not None
    learner = Learner(
        road.graph,
        road.fresh(fsdp=devices),
        road.model.config,
        settings,
        road.run.rl_shape,
        Rules(),
    )
    timed = Timed(learner.update.add)
    learner.update = learner.update._replace(add=cast(Any, timed))
    sampler = cast(Any, Script(road))
    state = learner.start
    questions = road.data.questions[: settings.prompts]
    for step in range(steps):
        if step:
            timed.begin_step()
        state, _ = learner.step(state, sampler, road.environment, questions, seed=0)
    return timed.updates(state)


def recipe(name: str) -> Run:
    run = {**RECIPES, "small": small}[name]()
    return dataclasses.replace(run, world=WorldSettings(train_videos=8, heldout_videos=1))


def measure(asked: Scaling, folder: pathlib.Path) -> None:
    """Measure the updates in this process. The first process writes the results."""
    cluster.connect(asked.hosts)
    found = []
    for name in asked.recipes:
        with hosts.one_after_another():
            road = lay_road(recipe(name), prepare(recipe(name), folder / name))
        for kind, updates in (("SFT", sft_updates), ("RL", rl_updates)):
            for devices in asked.devices:
                result = updates(road, devices, asked.steps)
                found.append((f"{name}, {kind}", devices, dataclasses.asdict(result)))
    if hosts.is_first():
        (folder / RESULT).write_bytes(pickle.dumps(found))


# --- all cases ---


def start(
    asked: Scaling, folder: pathlib.Path, processes: int, devices: tuple[int, ...]
) -> list[tuple[str, int, Updates]]:
    """Measure in new processes, which share `folder`.

    Args:
        asked: The command's settings.
        folder: Folder for data, compiled programs and logs.
        processes: Number of processes.
        devices: Total numbers of devices to measure.

    Returns:
        (update, devices, result) of each case.

    Raises:
        RuntimeError: A process failed. The message contains the end of its log.
    """
    command = [sys.executable, "-m", "benchmarks.scaling"]
    command += ["--folder", str(folder), "--steps", str(asked.steps)]
    command += ["--recipes", *asked.recipes, "--devices", *map(str, devices)]
    if processes > 1:
        coordinator = f"localhost:{free_port()}"
        command += ["--hosts.coordinator", coordinator, "--hosts.count", str(processes)]
    fake_devices = f"--xla_force_host_platform_device_count={max(devices) // processes}"
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {fake_devices}",
        "PYTHONPATH": str(ROOT),
    }
    logs = [(folder / f"{n}.log").open("w+") for n in range(processes)]
    started = []
    try:
        for n, log in enumerate(logs):
            index = ["--hosts.index", str(n)] if processes > 1 else []
            process = subprocess.Popen(
                [*command, *index], env=environment, cwd=ROOT, stdout=log, stderr=log
            )
            started.append(process)
        for process, log in zip(started, logs, strict=True):
            code = process.wait()
            if code:
                log.seek(0)
                raise RuntimeError(
                    f"devices {devices} of {processes} processes: one ended with exit code {code}\n"
                    f"{log.read()[-3000:]}"
                )
    finally:
        for process in started:
            process.kill()
    found = pickle.loads((folder / RESULT).read_bytes())
    return [(update, count, Updates(**fields)) for update, count, fields in found]


def main() -> int:
    """Print the table. Returns 1 if a loss or weight differs by more than `BOUND`."""
    asked = tyro.cli(Scaling, prog="python -m benchmarks.scaling")
    if asked.folder is not None:
        measure(asked, asked.folder)
        return 0
    # By update, then by (devices, processes).
    found: dict[str, dict[tuple[int, int], Updates]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for processes, devices in STARTS:
            for update, count, result in start(asked, pathlib.Path(folder), processes, devices):
                found.setdefault(update, {})[count, processes] = result
            print(
                f"measured: devices {devices} of {processes} processes", file=sys.stderr, flush=True
            )
    rows = [row for update, cases in found.items() for row in compare(update, cases)]
    print(table(rows))
    if asked.json is not None:
        figures = {"steps": asked.steps, "rows": [dataclasses.asdict(row) for row in rows]}
        asked.json.write_text(json.dumps(figures, indent=1))
    far = [row for row in rows if max(row.loss, row.weights) > BOUND]
    for row in far:
        print(
            f"{row.update} on {row.devices} devices of {row.processes} processes: the loss differs "
            f"by {row.loss:.1e}, a weight by {row.weights:.1e}",
            file=sys.stderr,
        )
    return 1 if far else 0


if __name__ == "__main__":
    raise SystemExit(main())
