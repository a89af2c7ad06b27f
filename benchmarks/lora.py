"""The tiny run with LoRA against training the whole decoder: `python -m benchmarks.lora`

Each seed has a cold start (`sft_tiny`). From exactly its weights, two runs go through RL with the
settings of `paravt_tiny`: one trains all weights of the decoder, the other adapters. They differ in
what is trained and in the learning rate. Both are evaluated greedily, without a curve.

Every run is a process of its own, so that its largest memory can be read, and an ordinary run
directory. The command can be repeated: finished runs are only read, and a run that was interrupted
starts over, because memory and time are those of a whole run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
from typing import Literal

import jax
import tyro

from configs.paravt_tiny import paravt_tiny, sft_tiny
from models.devices import reuse_freed_memory
from models.lora import LoRASettings
from models.sharding import make_mesh
from paravt_extras.fit import total_bytes
from paravt_extras.plan import PlannedModel, rl_step
from paravt_extras.report.discovery import greedy
from paravt_extras.studies.paradox import Command, Figures, write
from paravt_extras.summary import SummaryLine
from paravt_jax.data.stored import write_atomically
from train.data import Data
from train.durable.checkpoint import Checkpoints
from train.durable.run_folder import claim_folder
from train.learn.optimizer import OptimizerSettings
from train.learn.rl import Learner
from train.model import first_model, take_apart
from train.prepare import prepare
from train.result import read_result
from train.run import execute, resolved
from train.settings import Run, change

ROOT = pathlib.Path(__file__).parents[1]
START, FULL, LORA = "start", "full", "lora"
TITLES = {START: "before RL", FULL: "all weights", LORA: "LoRA"}
# Written last into a run's folder: a run without it is not finished.
MEASURED = "measured.json"
MIB = 2.0**20


@dataclasses.dataclass(frozen=True)
class Comparison(Command):
    """Compare LoRA with training the whole decoder, in the tiny run."""

    run_dir: str = "runs/lora"
    """Folder of the runs (start-SEED, full-SEED, lora-SEED), the table and the figures."""
    seeds: tuple[int, ...] = (4, 5, 6)
    """Seeds of world, questions, demonstrations and run."""
    only: Literal["", "start", "full", "lora"] = ""
    """Only for the processes that the command starts itself."""


def runs_of(out: str, seed: int) -> dict[str, Run]:
    """Return the three runs of a seed, in their order."""
    folders = {name: f"{out}/{name}-{seed}" for name in (START, FULL, LORA)}
    same = {"seed": seed, "world.seed": seed, "text.seed": seed}
    same |= {"evaluation.dispatch": ("parallel",), "evaluation.temperatures": (0.0,)}
    start = change(sft_tiny(), START, same | {"run_dir": folders[START]})
    from_start = {"model.path": f"{folders[START]}/model", "align": None, "sft": None}
    arm = same | from_start
    full = change(paravt_tiny(), FULL, arm | {"run_dir": folders[FULL]})
    adapters = {
        "lora": LoRASettings(rank=16),
        "rl.optimizer": OptimizerSettings(learning_rate=5e-4, weight_decay=0.0),
    }
    lora = change(full, LORA, adapters | {"run_dir": folders[LORA]})
    return {START: start, FULL: full, LORA: lora}


# --- one run, in a process of its own ---


def measure(run: Run) -> None:
    """Execute a run, and write what it took in memory to `MEASURED` in its folder."""
    reuse_freed_memory()
    execute(run)
    folder = pathlib.Path(run.run_dir)
    # Linux counts in KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    measured = {"process, largest resident size, MiB": peak / MIB}
    if run.rl is not None:
        measured |= memory(run, prepare(run, folder))
        measured["checkpoint on disk, MiB"] = checkpoint_bytes(folder / "checkpoints" / "rl") / MIB
    write_atomically(folder / MEASURED, json.dumps(measured, indent=1) + "\n")


def memory(run: Run, data: Data) -> dict[str, float]:
    """Return the number of trained parameters, and MiB of what RL holds.

    Arrays are those with which the run's learner starts. An update takes its arguments (trained
    weights, frozen ones, gradients, the batch) and its temporaries: the compiler's own figures, for
    the largest micro-batch.
    """
    assert run.rl is not None
    mesh = make_mesh()
    model, origin = first_model(run, data, mesh)
    parts, weights = take_apart(model, run, mesh, origin)
    learner = Learner(parts.skeleton, weights, model.config, run.rl, run.rl_shape)
    update = next(rl_step(PlannedModel.of(run, mesh, model.config)).lowerings)
    compiled = update().compile().memory_analysis()
    assert compiled is not None
    trained = learner.initial.weights
    optimizer = total_bytes(learner.initial.optimizer)
    arrays = total_bytes((trained, parts.skeleton.frozen, learner.reference)) + optimizer
    held = compiled.argument_size_in_bytes + compiled.temp_size_in_bytes
    # Outputs that take the memory of donated arguments count once.
    held += compiled.output_size_in_bytes - compiled.alias_size_in_bytes
    return {
        "trained parameters, thousands": sum(x.size for x in jax.tree.leaves(trained)) / 1e3,
        "decoder, optimizer and reference, MiB": arrays / MIB,
        "RL update, with the optimizer's state, MiB": (held + optimizer) / MIB,
    }


def checkpoint_bytes(folder: pathlib.Path) -> float:
    """Return the bytes of the newest checkpoint of a phase, on disk."""
    newest = folder / str(max(Checkpoints(folder, read_only=True).steps()))
    return float(sum(file.stat().st_size for file in newest.rglob("*") if file.is_file()))


# --- all runs ---


def start_process(out: str, seed: int, name: str) -> None:
    """Execute and measure a run in a new process.

    Raises:
        RuntimeError: It failed. The message names its log.
    """
    command = [sys.executable, "-m", "benchmarks.lora", "--run-dir", out]
    command += ["--seeds", str(seed), "--only", name]
    log_file = pathlib.Path(out) / f"{name}-{seed}.log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log_file.open("w") as log:
        code = subprocess.run(command, env=environment, stdout=log, stderr=log).returncode
    if code:
        raise RuntimeError(f"{name}, seed {seed}: ended with exit code {code}; see {log_file}")


def figures(run: Run) -> Figures:
    """Return the figures of a finished run after its last phase. Sizes are in MiB."""
    folder = pathlib.Path(run.run_dir)
    result = read_result(folder)
    phase = "before" if run.rl is None else "after"
    measured: Figures = {
        f"accuracy, K = {line['k']}": line["accuracy"] for line in greedy(result[phase])
    }
    lines = (
        SummaryLine("accuracy, mean over K", phase),
        SummaryLine("crops per question, no frame shows the answer", phase, "calls", "hidden"),
        SummaryLine("crops per question, choice, a frame shows it", phase, "calls", "mcq shown"),
        SummaryLine("crops per question, grounding, frame in span", phase, "calls", "tvg shown"),
        SummaryLine("compliance", phase, "compliance"),
    )
    measured |= {line.name: line.value(result) for line in lines}
    return (
        measured | json.loads((folder / MEASURED).read_text()) | {"minutes": result["seconds"] / 60}
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code. Writes table.md and results.json."""
    command = tyro.cli(Comparison, args=argv, prog="python -m benchmarks.lora")
    if command.only:
        measure(runs_of(command.run_dir, command.seeds[0])[command.only])
        return 0
    folder = pathlib.Path(command.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    runs = {seed: runs_of(command.run_dir, seed) for seed in command.seeds}
    for seed, of_seed in runs.items():
        for name, run in of_seed.items():
            # Opening the folder refuses a run with other settings.
            with claim_folder(run.run_dir, resolved(run)):
                finished = (pathlib.Path(run.run_dir) / MEASURED).exists()
            if not finished:
                print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
                shutil.rmtree(run.run_dir)
                start_process(command.run_dir, seed, name)
    arms = {name: [figures(of_seed[name]) for of_seed in runs.values()] for name in TITLES}
    write(folder, {TITLES[name]: figures_of_arm for name, figures_of_arm in arms.items()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
