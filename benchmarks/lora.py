"""The tiny run with LoRA against training the whole decoder: `python -m benchmarks.lora`

Each seed has a cold start (`sft_tiny`). From exactly its weights, two runs go through RL with the
settings of `paravt_tiny`: one trains all weights of the decoder, the other adapters. They differ in
what is trained and in the learning rate. Both are evaluated greedily, without control or curve.

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
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import tyro

from configs.paravt_tiny import paravt_tiny
from configs.sft import sft_tiny
from models.lora import LoRASettings
from models.sharding import make_mesh
from paravt_extras.fit import total_bytes
from paravt_extras.markdown import table as markdown
from paravt_extras.plan import PlannedModel, rl_step
from paravt_extras.report.discovery import greedy
from paravt_extras.studies.study import over_seeds, require_seeds
from paravt_extras.summary import Line
from paravt_jax.data.any_path import require_local
from paravt_jax.data.atomic import write_atomically
from train.data import Data
from train.durable.allocator import reuse_freed_memory
from train.durable.checkpoint import Checkpoints
from train.durable.run_directory import RunDirectory, RunDirectoryError
from train.learn.optimizer import OptimizerSettings
from train.learn.rl import Learner
from train.model import first_model, take_apart
from train.prepare import prepare
from train.run import execute, resolved
from train.settings import Run, change

ROOT = pathlib.Path(__file__).parents[1]
START, FULL, LORA = "start", "full", "lora"
# Written last into a run's folder: a run without it is not finished.
MEASURED = "measured.json"
MIB = 2.0**20
Figures = dict[str, float | None]
"""Figures of a run, by the name of their line; None: the run has no such questions."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Compare LoRA with training the whole decoder, in the tiny run."""

    out: str = "runs/lora"
    """Folder of the runs (start-SEED, full-SEED, lora-SEED), the table and the figures."""
    seeds: tuple[int, ...] = (4, 5, 6)
    """Seeds of world, questions, demonstrations and run."""
    only: Literal["", "start", "full", "lora"] = ""
    """Only for the processes that the command starts itself."""

    def __post_init__(self):
        require_seeds(self.seeds)
        require_local("out", self.out)


def plan(out: str, seed: int) -> dict[str, Run]:
    """The three runs of a seed, in their order."""
    folders = {name: f"{out}/{name}-{seed}" for name in (START, FULL, LORA)}
    evaluation = dataclasses.replace(
        paravt_tiny().evaluation,
        dispatch=("parallel",),
        temperatures=(0.0,),
        format_temperatures=(),
        curve=False,
    )
    same = {"seed": seed, "world.seed": seed, "text.seed": seed, "evaluation": evaluation}
    start = change(sft_tiny(), START, same | {"run_dir": folders[START]})
    from_start = {"model.path": f"{folders[START]}/model", "align": None, "sft": None}
    arm = same | from_start | {"rl.control": False}
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
    found = {"process, largest resident size": peak}
    if run.rl is not None:
        found |= memory(run, prepare(run, folder))
        found["checkpoint on disk"] = checkpoint_bytes(folder / "checkpoints" / "rl")
    write_atomically(folder / MEASURED, json.dumps(found, indent=1) + "\n")


def memory(run: Run, data: Data) -> dict[str, float]:
    """The number of trained parameters, and bytes of what RL holds.

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
    trained = learner.start.weights
    arrays = {
        "decoder": total_bytes((trained, parts.frozen)),
        "optimizer": total_bytes(learner.start.optimizer),
        "reference": total_bytes(learner.reference),
    }
    held = compiled.argument_size_in_bytes + compiled.temp_size_in_bytes
    # Outputs that take the memory of donated arguments count once.
    held += compiled.output_size_in_bytes - compiled.alias_size_in_bytes
    return arrays | {
        "trained parameters": float(sum(x.size for x in jax.tree.leaves(trained))),
        "decoder, optimizer and reference": sum(arrays.values()),
        "RL update, temporaries": float(compiled.temp_size_in_bytes),
        "RL update, arguments and temporaries": float(held),
        "RL update, with the optimizer's state": held + arrays["optimizer"],
    }


def checkpoint_bytes(folder: pathlib.Path) -> float:
    """Bytes of the newest checkpoint of a phase, on disk."""
    newest = folder / str(max(Checkpoints(folder, read_only=True).steps()))
    return float(sum(file.stat().st_size for file in newest.rglob("*") if file.is_file()))


# --- all runs ---


def finished(run: Run) -> bool:
    """Whether a run is finished and measured.

    Raises:
        RunDirectoryError: The folder belongs to a run with other settings, or is in use.
    """
    with RunDirectory(run.run_dir, resolved(run)):
        return (pathlib.Path(run.run_dir) / MEASURED).exists()


def start_process(out: str, seed: int, name: str) -> None:
    """Execute and measure a run in a new process.

    Raises:
        RuntimeError: It failed. The message names its log.
    """
    command = [sys.executable, "-m", "benchmarks.lora", "--out", out]
    command += ["--seeds", str(seed), "--only", name]
    log_file = pathlib.Path(out) / f"{name}-{seed}.log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log_file.open("w") as log:
        code = subprocess.run(command, env=environment, stdout=log, stderr=log).returncode
    if code:
        raise RuntimeError(f"{name}, seed {seed}: ended with exit code {code}; see {log_file}")


def carry_out(out: str, seeds: Sequence[int]) -> None:
    """Carry out the runs that are not finished, one at a time."""
    for seed in seeds:
        for name, run in plan(out, seed).items():
            if finished(run):
                continue
            print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
            shutil.rmtree(run.run_dir)
            start_process(out, seed, name)


# --- figures ---

# By line of the table: digits after the point, and the unit.
SIZES = {
    "decoder": 2,
    "optimizer": 2,
    "reference": 2,
    "decoder, optimizer and reference": 2,
    "RL update, temporaries": 1,
    "RL update, arguments and temporaries": 1,
    "RL update, with the optimizer's state": 1,
    "checkpoint on disk": 2,
    "process, largest resident size": 0,
}


def figures(run: Run) -> Figures:
    """Figures of a finished run after its last phase. Sizes are in MiB."""
    folder = pathlib.Path(run.run_dir)
    result = json.loads((folder / "result.json").read_text())
    measured = json.loads((folder / MEASURED).read_text())
    phase = "before" if run.rl is None else "after"
    found: Figures = {f"accuracy, K = {row['k']}": row["accuracy"] for row in greedy(result[phase])}
    lines = (
        Line("accuracy, mean over K", phase),
        Line("crops per question, no frame shows the answer", phase, "calls", "hidden"),
        Line("crops per question, choice, a frame shows it", phase, "calls", "mcq shown"),
        Line("crops per question, grounding, a frame in the span", phase, "calls", "tvg shown"),
        Line("compliance", phase, "compliance"),
    )
    found |= {line.name: line.value(result) for line in lines}
    if "trained parameters" in measured:
        found["trained parameters, thousands"] = measured["trained parameters"] / 1e3
    found |= {f"{name}, MiB": measured[name] / MIB for name in SIZES if name in measured}
    return found | {"minutes": result["seconds"] / 60}


def table(found: Mapping[str, Sequence[Figures]]) -> str:
    """A Markdown table with a line per figure: mean and standard deviation over the seeds.

    Args:
        found: The figures of each seed, by the name of the run.
    """
    rows = []
    for name in found[FULL][0]:
        columns = [[run.get(name) for run in found[arm]] for arm in (START, FULL, LORA)]
        pairs = zip(columns[1], columns[2], strict=True)
        columns.append([None if a is None or b is None else b - a for a, b in pairs])
        digits = SIZES.get(name.removesuffix(", MiB"), 1 if name == "minutes" else 2)
        rows.append(
            [name, *(over_seeds(values, f"z,.{digits}f", f",.{digits}f") for values in columns)]
        )
    return markdown(["", "before RL", "all weights", "LoRA", "LoRA - all weights"], rows)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code. Writes table.md and results.json."""
    command = tyro.cli(Comparison, args=argv, prog="python -m benchmarks.lora")
    if command.only:
        measure(plan(command.out, command.seeds[0])[command.only])
        return 0
    folder = pathlib.Path(command.out)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        carry_out(command.out, command.seeds)
    except (RunDirectoryError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    runs = [plan(command.out, seed) for seed in command.seeds]
    found = {name: [figures(of_seed[name]) for of_seed in runs] for name in (START, FULL, LORA)}
    content = {"seeds": command.seeds, "figures": found}
    write_atomically(folder / "results.json", json.dumps(content, indent=1) + "\n")
    write_atomically(folder / "table.md", table(found) + "\n")
    print(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
