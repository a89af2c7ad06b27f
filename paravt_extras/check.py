"""Looks at what a run needs before any work: devices, memory, weights, data, disk, its folder.

`--check` prints everything. A run prints its errors and stops, because each of them would stop it
later, some after hours.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import huggingface_hub
import jax
from tqdm import tqdm

from models.devices import host_memory
from models.weights.folder import local_folder, require_readable
from paravt_extras.fit import GIB, abstract_weights, fit, total_bytes
from paravt_extras.slices import Devices, Topology, found_devices
from paravt_jax.data import tokenizer_file
from paravt_jax.data.any_path import is_address
from paravt_jax.data.frames import on_disk
from paravt_jax.data.preparation import SET
from paravt_jax.data.question_files import read_questions
from paravt_jax.data.sources import is_hub_id, list_files
from paravt_jax.processes import hosts
from paravt_jax.processes.exit_codes import (
    FAILED,
    TEMPORARY,
    USER_ERRORS,
    UserError,
    exit_code,
)
from train.data import hold_out
from train.durable.checkpoint import KEEP
from train.durable.run_folder import RunFolder
from train.learn.optimizer import make_optimizer
from train.model import config_of
from train.settings import Run


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is known about one item."""

    item: str
    text: str
    code: int = 0
    """The code with which the run would end because of it; 0 if it would not."""


class NotReadyError(UserError):
    """A run cannot start."""

    def __init__(self, errors: Sequence[Finding]):
        first = errors[0]
        more = f" (and {len(errors) - 1} more above)" if len(errors) > 1 else ""
        super().__init__(f"nothing was started: {first.item}: {first.text}{more}")
        # What is temporary does not pass as long as something else is wrong.
        self.exit_code = TEMPORARY if {x.code for x in errors} == {TEMPORARY} else FAILED


class _NoRoomError(OSError):
    exit_code = TEMPORARY


Look = Callable[[], str]


def check(
    run: Run, settings: dict[str, Any], run_folder: RunFolder, topology: str = ""
) -> list[Finding]:
    """Look at everything that a run needs. Changes nothing.

    With several processes, all of them have to call this, and get the findings of all.

    Args:
        run: The settings.
        settings: Those that define the run, as its folder stores them.
        run_folder: Where the run lives.
        topology: A TPU slice to check for, by its name; empty: the devices here.
    """
    items = _items(run, settings, run_folder)
    if topology:
        # The hosts of a slice that is only named have other disks and other memory.
        del items["disk"], items["host memory"]
    devices = Topology(topology).available if topology else found_devices()
    return _look_at({"devices": lambda: _devices(run, devices)} | items)


def require_ready(run: Run, settings: dict[str, Any], run_folder: RunFolder) -> None:
    """Check a run that is about to start, and print all errors if there are several.

    Whether it fits the devices shows when it chooses its sizes, right after this.

    Raises:
        NotReadyError: Something is missing; its message is the first error.
    """
    errors = [finding for finding in _look_at(_items(run, settings, run_folder)) if finding.code]
    if errors:
        if len(errors) > 1 and hosts.is_first():
            print(as_text(errors), file=sys.stderr)
        raise NotReadyError(errors)


def as_text(findings: Sequence[Finding]) -> str:
    """Return one paragraph per finding."""
    lines = []
    for finding in findings:
        text = f"{finding.item:<18} {'error' if finding.code else 'ok':<6} {finding.text}"
        lines += textwrap.wrap(text, 100, subsequent_indent=" " * 26, break_on_hyphens=False)
    return "\n".join(lines)


# --- the items ---


def _items(run: Run, settings: dict[str, Any], run_folder: RunFolder) -> dict[str, Look]:
    """Return what to look at besides the devices, by name. A look raises if the run would stop."""
    items = {
        "host memory": lambda: _host_memory(run),
        "disk": lambda: _disk(run, run_folder),
        "run directory": lambda: _run_directory(settings, run_folder),
    }
    if run.model.path:
        items["--model.path"] = lambda: _weights(run)
    if run.data is not None and run.data.questions:
        items["--data.questions"] = lambda: _questions(run)
    elif run.data is not None and not (pathlib.Path(run.data.folder) / SET).exists():
        items["--data.annotations"] = functools.partial(_source, run.data.annotations)
        items["--data.media"] = functools.partial(_source, run.data.media)
    return items


def _look_at(items: Mapping[str, Look]) -> list[Finding]:
    """Return the findings of all processes. Hosts that agree are shown once."""
    findings = []
    for item, look in items.items():
        try:
            findings.append(Finding(item, look()))
        except (*USER_ERRORS, RuntimeError) as error:
            findings.append(Finding(item, " ".join(str(error).split()), exit_code(error)))
    return list(dict.fromkeys(itertools.chain(*hosts.gather(findings))))


def _devices(run: Run, devices: Devices) -> str:
    """Return the devices, and the sizes with which the run fits them."""
    fitted = fit(run, devices)
    memory = "unknown memory" if devices.memory is None else f"{devices.memory / GIB:.2f} GiB each"
    needs = ", ".join(f"{phase} {need / GIB:.1f}" for phase, need in fitted.needs.items())
    estimate = f"; estimated GiB per device: {needs}" if needs else ""
    return f"{devices.name}, {memory}: {fitted.describe()}{estimate}"


def _host_memory(run: Run) -> str:
    """Require memory for the cached frames and this host's share of a checkpoint."""
    needed = run.frames.cache_mib * 2.0**20 + state_bytes(run) / jax.process_count()
    memory = f"{_size(host_memory())}; frames and a checkpoint take {_size(needed)}"
    if needed > host_memory() and run.model.size != "tiny":
        raise ValueError(f"{memory}; use more hosts, or a lower --frames.cache-mib")
    return memory


def _weights(run: Run) -> str:
    """Require initial weights that are here, complete and of the recipe's size, or on the hub."""
    path = run.model.path
    if is_address(path):
        return f"{path}: the run fetches it"
    folder = pathlib.Path(path)
    if not folder.is_dir() and is_hub_id(path):
        try:
            folder = pathlib.Path(huggingface_hub.snapshot_download(path, local_files_only=True))
            require_readable(folder)
        except FileNotFoundError:  # nothing of it, or only some of its files
            return _source(path, "model")
    folder = local_folder(str(folder))
    config_of(str(folder), run.model)
    require_readable(folder)
    if not (folder / tokenizer_file.FILE).is_file():
        raise FileNotFoundError(
            f"{path}: no {tokenizer_file.FILE}; copy that of the published model to {folder}"
        )
    return f"{path}: {_size(sum(file.stat().st_size for file in folder.glob('*.safetensors')))}"


def _questions(run: Run) -> str:
    """Require readable questions of your own, with their videos."""
    assert run.data is not None
    run.require_no_demonstrations()
    questions = read_questions(run.data.questions, run.data.media)
    media = pathlib.Path(run.data.media)
    there = tuple(question for question in questions if on_disk(media, question.video).exists())
    text = f"{len(there)} of {len(questions)} questions in {run.data.questions} have their video"
    if not there or len(questions) - len(there) > run.max_left_out * len(questions):
        raise FileNotFoundError(f"{text} in {media}; give the folder of all: --data.media FOLDER")
    hold_out(there, run.evaluation.questions)
    return text


def _source(source: str, kind: str = "dataset") -> str:
    """Require a source that can be read."""
    if is_address(source) or pathlib.Path(source).is_dir():
        return source
    return f"{source}: {_size(sum(list_files(source, kind).values()))}, which the run downloads"


def _disk(run: Run, run_folder: RunFolder) -> str:
    """Require room for the run's checkpoints and the exported model."""
    if run_folder.shown != str(run_folder.folder):
        return "a bucket"
    phases = sum(phase is not None for phase in (run.align, run.sft, run.rl))
    exported = total_bytes(abstract_weights(run.model, run.lora, run.train_vision))
    needed = phases * (KEEP + 2) * state_bytes(run) + exported
    there = sum(file.stat().st_size for file in run_folder.folder.rglob("*") if file.is_file())
    existing = next(x for x in (run_folder.folder, *run_folder.folder.parents) if x.exists())
    free = shutil.disk_usage(existing).free
    room = f"{existing}: {_size(free)} free; checkpoints and export take {_size(needed)}"
    if free + there < needed:
        raise _NoRoomError(f"{room}; make room, or give a --run-dir on another disk")
    return room


def _run_directory(settings: dict[str, Any], run_folder: RunFolder) -> str:
    """Require a folder that is new or of this run."""
    continues = run_folder.require_usable(settings)
    return f"{run_folder.shown}: {'continues' if continues else 'new'}"


def _size(count: float) -> str:
    return tqdm.format_sizeof(count, "B")


def state_bytes(run: Run) -> float:
    """Return the bytes of the largest checkpoint: trained weights, their moments, and the vision
    tower."""
    trained, _, tower = abstract_weights(run.model, run.lora, run.train_vision)
    optimizers = []
    if run.sft is not None:
        optimizers.append(make_optimizer(run.sft.optimizer))
    if run.rl is not None:
        optimizers.append(make_optimizer(run.rl.optimizer, run.model.dtype))
    moments = [jax.eval_shape(optimizer.init, trained) for optimizer in optimizers]
    saved = (trained, tower if run.lora is None else ())
    return total_bytes(saved) + max(map(total_bytes, moments), default=0.0)
