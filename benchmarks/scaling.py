"""What devices and processes change of an update, and what they cost: `python -m benchmarks.scaling --json FILE`.

SFT and RL updates of the recipes `small` and `paravt_tiny` (over eight videos), from the same weights and data, on 1, 2, 4 and 8 fake
devices of one process, and on 2 and 8 of two. All devices share the machine's cores, and a step is the same arithmetic on all of
them: what its processors work more than for one device is overhead, and nothing here is a speed.
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
from models.sharding import make_mesh
from paravt_jax.data.local_path import require_local
from paravt_jax.world.videos import WorldSettings
from tests.train.conftest import free_port
from tests.train.small import Road, Script, lay_road, small
from train.durable import cluster, hosts
from train.learn.rl import Learner
from train.learn.sft import SFTBatches
from train.learn.step import MeshProgram
from train.plan.collectives import bytes_sent, find_collectives
from train.prepare import prepare
from train.settings import Run

ROOT = pathlib.Path(__file__).parents[1]
STARTS = (
    (1, (1, 2, 4, 8)),
    (2, (2,)),
    (2, (8,)),
)  # processes, and over how many devices in all they are measured
RESULT = "measured"
BOUND = 1e-3  # of a loss relative to one device's; sums are taken in another order


@dataclasses.dataclass(frozen=True)
class Scaling:
    """What is measured, and where its figures go."""

    steps: int = 4
    """Updates of each kind; the first compiles and is not timed."""
    recipes: tuple[str, ...] = ("small", "paravt_tiny")
    json: pathlib.Path | None = None
    devices: tuple[int, ...] = ()
    """Set by the command itself for the processes that it starts."""
    folder: pathlib.Path | None = None
    """Likewise."""
    hosts: cluster.HostSettings = cluster.HostSettings()

    def __post_init__(self):
        require_local("json", self.json)
        require_local("folder", self.folder)


@dataclasses.dataclass(frozen=True)
class Updates:
    """A few updates in one case: losses; seconds, and seconds of processors in all processes together, of all but the first; megabytes
    that a device sends in one; and the last weights."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    work: tuple[float, ...]
    sent: float
    weights: tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class Row:
    """A case beside one device: the largest relative difference of a loss, the largest difference of a weight, and what a step takes:
    seconds, seconds of processors, and how many times those of one device."""

    update: str
    devices: int
    processes: int
    loss: float
    weights: float
    seconds: float
    work: float
    times: float
    sent: float


def compare(update: str, found: dict[tuple[int, int], Updates]) -> list[Row]:
    """Every case of an update beside that of one device and one process, which has to be there."""
    one = found[1, 1]
    usual = statistics.median(one.work)
    rows = []
    for (devices, processes), case in found.items():
        loss = max(abs(a - b) / abs(b) for a, b in zip(case.losses, one.losses, strict=True))
        weights = max(
            float(np.abs(a - b).max()) for a, b in zip(case.weights, one.weights, strict=True)
        )
        seconds, work = statistics.median(case.seconds), statistics.median(case.work)
        rows.append(
            Row(update, devices, processes, loss, weights, seconds, work, work / usual, case.sent)
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    head = (
        "update",
        "devices",
        "processes",
        "loss differs by",
        "a weight by",
        "s a step",
        "CPU s",
        "of one device's",
        "MB sent a device",
    )
    lines = [
        (row.update, row.devices, row.processes, f"{row.loss:.1e}", f"{row.weights:.1e}")
        + (f"{row.seconds:.2f}", f"{row.work:.2f}", f"{row.times:.2f}", f"{row.sent:.1f}")
        for row in rows
    ]
    return "\n".join(
        "| " + " | ".join(map(str, line)) + " |" for line in (head, ("---",) * len(head), *lines)
    )


# --- one case, in a process of its own ---


class Timed:
    """A program that takes notes: seconds and losses of every call, and what it was called with."""

    def __init__(self, program: MeshProgram):
        self._program = program
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.work: list[float] = []

    def __call__(self, *arguments: Any) -> Any:
        self.last = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            jax.block_until_ready(arguments),
        )
        start, worked = time.perf_counter(), time.process_time()
        state, figures = jax.block_until_ready(self._program(*arguments))
        self.seconds.append(time.perf_counter() - start)
        self.work.append(time.process_time() - worked)
        self.losses.append(float(figures["loss"]))
        return state, figures

    def notes(self, state: Any) -> Updates:
        mesh = self._program.mesh
        assert mesh is not None
        whole = jax.jit(lambda x: x, out_shardings=jax.NamedSharding(mesh, jax.P()))(state.weights)
        sent = bytes_sent(
            find_collectives(self._program.lower(*self.last).compile().as_text(), mesh.size)
        )
        weights = tuple(np.asarray(x.addressable_data(0)) for x in jax.tree.leaves(whole))
        work = tuple(sum(each) for each in zip(*hosts.gather(self.work[1:]), strict=True))
        return Updates(
            tuple(self.losses), tuple(self.seconds[1:]), work, sum(sent.values()) / 1e6, weights
        )


def sft_updates(road: Road, devices: int, steps: int) -> Updates:
    settings, data = road.run.sft, road.data
    assert settings is not None
    mesh = make_mesh(1, devices, 1)
    batches = SFTBatches(
        settings, data, None, 0, road.environment.protocol, road.environment.features, mesh
    )
    state, update = batches.start(road.graph, road.fresh(fsdp=devices))
    timed, (batch, _, _) = Timed(update), next(batches)
    for _ in range(steps):
        state, _ = timed(state, batch)
    return timed.notes(state)


def rl_updates(road: Road, devices: int, steps: int) -> Updates:
    assert road.run.rl is not None
    learner = Learner(
        road.graph, road.fresh(fsdp=devices), road.model.config, road.run.rl, road.run.rl_shapes
    )
    timed, state, sampler = Timed(learner.update), learner.start, cast(Any, Script(road))
    learner.update = cast(Any, timed)
    for _ in range(steps):
        state, _ = learner.step(
            state, sampler, road.environment, road.data.questions[: road.run.rl.prompts], seed=0
        )
    return timed.notes(state)


def recipe(name: str) -> Run:
    run = {**RECIPES, "small": small}[name]()
    return dataclasses.replace(run, world=WorldSettings(train_videos=8, heldout_videos=1))


def measure(asked: Scaling, folder: pathlib.Path) -> None:
    """The updates on some devices, as the first process writes them down."""
    cluster.connect(asked.hosts)
    found = []
    for name in asked.recipes:
        with hosts.one_after_another():
            road = lay_road(recipe(name), prepare(recipe(name), folder / name))
        for kind, updates in (("SFT", sft_updates), ("RL", rl_updates)):
            for devices in asked.devices:
                found.append(
                    (
                        f"{name}, {kind}",
                        devices,
                        dataclasses.asdict(updates(road, devices, asked.steps)),
                    )
                )
    if hosts.is_first():
        (folder / RESULT).write_bytes(pickle.dumps(found))


# --- all cases ---


def start(
    asked: Scaling, folder: pathlib.Path, processes: int, devices: tuple[int, ...]
) -> list[tuple[str, int, Updates]]:
    """What processes of their own measure. Raises RuntimeError with the end of what they said where one fails."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.scaling",
        "--folder",
        str(folder),
        "--steps",
        str(asked.steps),
    ]
    command += ["--recipes", *asked.recipes, "--devices", *map(str, devices)]
    if processes > 1:
        command += [
            "--hosts.coordinator",
            f"localhost:{free_port()}",
            "--hosts.count",
            str(processes),
        ]
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={max(devices) // processes}"
    environment = {
        **os.environ,
        **cache,
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
        "XLA_FLAGS": flags,
        "PYTHONPATH": str(ROOT),
    }
    logs = [(folder / f"{n}.log").open("w+") for n in range(processes)]
    started = [
        subprocess.Popen(
            [*command, *([] if processes == 1 else ["--hosts.index", str(n)])],
            env=environment,
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )
        for n, log in enumerate(logs)
    ]
    try:
        for process, log in zip(started, logs, strict=True):
            if code := process.wait():
                log.seek(0)
                raise RuntimeError(
                    f"devices {devices} of {processes} processes: one ended with {code}\n{log.read()[-3000:]}"
                )
    finally:
        for process in started:
            process.kill()
    return [
        (update, n, Updates(**found))
        for update, n, found in pickle.loads((folder / RESULT).read_bytes())
    ]


def main() -> int:
    asked = tyro.cli(Scaling, prog="python -m benchmarks.scaling")
    if asked.folder is not None:
        measure(asked, asked.folder)
        return 0
    found: dict[str, dict[tuple[int, int], Updates]] = {}
    with tempfile.TemporaryDirectory() as name:
        for processes, devices in STARTS:
            for update, n, updates in start(asked, pathlib.Path(name), processes, devices):
                found.setdefault(update, {})[n, processes] = updates
            print(
                f"measured: devices {devices} of {processes} processes", file=sys.stderr, flush=True
            )
    rows = [row for update, cases in found.items() for row in compare(update, cases)]
    print(table(rows))
    if asked.json is not None:
        asked.json.write_text(
            json.dumps(
                {"steps": asked.steps, "rows": [dataclasses.asdict(row) for row in rows]}, indent=1
            )
        )
    far = [row for row in rows if max(row.loss, row.weights) > BOUND]
    for row in far:
        where = f"{row.update} on {row.devices} devices of {row.processes} processes"
        print(
            f"{where}: the loss differs by {row.loss:.1e}, a weight by {row.weights:.1e}",
            file=sys.stderr,
        )
    return 1 if far else 0


if __name__ == "__main__":
    raise SystemExit(main())
