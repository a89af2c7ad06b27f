"""Looks at what a run needs before any work: packages, devices, weights, data, disk, its folder.

`--check` prints everything. A run prints its errors and stops, because each of them would stop it
later, some after hours.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import itertools
import math
import pathlib
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import huggingface_hub
import jax
import jax.numpy as jnp
from flax import nnx
from huggingface_hub import constants
from packaging.requirements import Requirement

from models import gpu
from models.device_memory import host_memory
from models.model import abstract_model
from models.trained import split
from models.weights.folder import CONFIG, local_folder, require_readable
from paravt_extras.fit import GIB, fit, total_bytes
from paravt_extras.slices import Devices, Topology, found_devices
from paravt_jax.data import tokenizer_file
from paravt_jax.data.any_path import is_address
from paravt_jax.data.hub import is_hub_id
from paravt_jax.data.preparation import SET
from paravt_jax.data.question_files import read_questions
from paravt_jax.processes import hosts
from paravt_jax.processes.exit_codes import FAILED, TEMPORARY, USER_ERRORS, UserError
from paravt_jax.progress import size
from train.durable.checkpoint import KEEP
from train.durable.place import Place
from train.durable.run_directory import require_cold_start
from train.learn.optimizer import make_optimizer
from train.model import config_of
from train.settings import Run

# Seconds for one request to the hub.
_PATIENCE = 6.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was found about one item."""

    item: str
    found: str
    remedy: str = ""
    problem: Literal["", "warning", "error"] = ""
    """error: the run would stop. warning: the run gets it by itself, or goes on without it."""


class NotReadyError(UserError):
    """A run cannot start."""

    def __init__(self, errors: Sequence[Finding]):
        first = errors[0]
        found = "; ".join(filter(None, (f"{first.item}: {first.found}", first.remedy)))
        more = f" (and {len(errors) - 1} more above)" if len(errors) > 1 else ""
        super().__init__(f"nothing was started: {found}{more}")
        # Only a disk may get room by itself.
        self.exit_code = TEMPORARY if {x.item for x in errors} == {"disk"} else FAILED


def check(run: Run, settings: dict[str, Any], place: Place, topology: str = "") -> list[Finding]:
    """Look at everything that a run needs. Changes nothing.

    With several processes, all of them have to call this, and get the findings of all.

    Args:
        run: The settings.
        settings: Those that define the run, as its folder stores them.
        place: Where the run lives.
        topology: A TPU slice to check for, by its name; empty: the devices here.
    """
    devices = Topology(topology).available if topology else found_devices()
    items = {"devices": lambda: _devices(run, devices)} | _items(run, settings, place)
    if topology:
        # The hosts of a slice that is only named have other disks.
        del items["disk"]
    if devices.platform != jax.default_backend():
        del items["host memory"]
    return _look_at(items)


def require_ready(run: Run, settings: dict[str, Any], place: Place) -> None:
    """Check a run that is about to start, and print its problems, if there are any.

    Whether it fits the devices shows when it chooses its sizes, right after this.

    Raises:
        NotReadyError: Something is missing; its message is the first error.
    """
    findings = [x for x in _look_at(_items(run, settings, place)) if x.problem]
    if findings and hosts.is_first():
        print(as_text(findings), file=sys.stderr)
    errors = [finding for finding in findings if finding.problem == "error"]
    if errors:
        raise NotReadyError(errors)


def as_text(findings: Sequence[Finding]) -> str:
    """Return one paragraph per finding, with its remedy below it."""
    lines = []
    for finding in findings:
        text = f"{finding.item:<14} {finding.problem or 'ok':<8} {finding.found}"
        lines += textwrap.wrap(text, 100, subsequent_indent=" " * 24, break_on_hyphens=False)
        if finding.remedy:
            lines.append(f"{'':<24}{finding.remedy}")
    return "\n".join(lines)


# --- the items ---


def _items(
    run: Run, settings: dict[str, Any], place: Place
) -> dict[str, Callable[[], list[Finding]]]:
    """Return what to look at besides the devices; see `check`."""
    return {
        "packages": lambda: _packages(run),
        "host memory": lambda: _host_memory(run),
        "weights": lambda: _weights(run),
        "data": lambda: _data(run),
        "disk": lambda: _disk(run, place),
        "run directory": lambda: _run_directory(run, settings, place),
    }


def _look_at(items: Mapping[str, Callable[[], list[Finding]]]) -> list[Finding]:
    """Return the findings of all processes. Hosts that agree are shown once."""
    findings = []
    for item, look in items.items():
        try:
            findings += look()
        except (*USER_ERRORS, RuntimeError) as error:
            findings.append(Finding(item, " ".join(str(error).split()), problem="error"))
    return list(dict.fromkeys(itertools.chain(*hosts.gather(findings))))


def _packages(run: Run) -> list[Finding]:
    """Installed packages against the project's requirements, and those that this run adds."""
    wrong = []
    for line in importlib.metadata.requires("paravt-jax") or ():
        requirement = Requirement(line)
        extra = "tpu" if "tpu" in line and _version("libtpu") else ""
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            version = _version(requirement.name)
            if not requirement.specifier.contains(version or "0", prereleases=True) or not version:
                wanted = f"{requirement.name}{requirement.specifier}"
                wrong.append(f"{wanted} ({version or 'not installed'})")
    if run.wandb and importlib.util.find_spec("wandb") is None:
        wrong.append("wandb (not installed)")
    if wrong:
        names = " ".join(f"'{one.partition(' (')[0]}'" for one in wrong)
        return [Finding("packages", ", ".join(wrong), f"pip install {names}", "error")]
    return [Finding("packages", f"jax {jax.__version__}, libtpu {_version('libtpu') or 'none'}")]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _devices(run: Run, devices: Devices) -> list[Finding]:
    """Return whether the run fits the devices."""
    fitted = fit(run, devices)
    memory = "unknown memory" if devices.memory is None else f"{devices.memory / GIB:.2f} GiB each"
    needs = ", ".join(f"{part} {need / GIB:.1f}" for part, need in fitted.needs.items())
    estimate = f"; estimated GiB per device: {needs}" if needs else ""
    if devices.platform == jax.default_backend():
        gpu.require_type("model.dtype", run.model.dtype)
    return [Finding("devices", f"{devices.name}, {memory}: {fitted.describe()}{estimate}")]


def _host_memory(run: Run) -> list[Finding]:
    """Return whether this host has memory for frames and its share of a checkpoint."""
    needed = run.frames.cache_mib * 2.0**20 + state_bytes(run) / jax.process_count()
    if run.model.size == "tiny" or needed <= host_memory():
        return []
    have = f"{size(host_memory())} of host memory for {size(needed)}"
    remedy = "use more hosts, or a lower --frames.cache-mib"
    return [Finding("host memory", have, remedy, "error")]


def _weights(run: Run) -> list[Finding]:
    """Return whether the initial weights are here, complete and of the recipe's size."""
    path = run.model.path
    if not path:
        return []
    if is_address(path):
        return [Finding("weights", f"{path}: the run fetches it", problem="warning")]
    if not pathlib.Path(path).is_dir() and is_hub_id(path):
        try:
            cached = huggingface_hub.snapshot_download(path, local_files_only=True)
            require_readable(pathlib.Path(cached))
        except FileNotFoundError:  # nothing of it, or a part
            return [_on_the_hub("weights", path, "model", (".safetensors", CONFIG))]
        path = cached
    folder = local_folder(path)
    config_of(str(folder), run.model)
    require_readable(folder)
    if not (folder / tokenizer_file.FILE).is_file():
        remedy = f"copy {tokenizer_file.FILE} of the published model to {folder}"
        return [Finding("weights", f"{path}: no {tokenizer_file.FILE}", remedy, "error")]
    count = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return [Finding("weights", f"{path}: {size(count)}")]


def _data(run: Run) -> list[Finding]:
    """Return whether the data are prepared, or their sources can be read."""
    settings = run.data
    if settings is None:
        return []
    if settings.questions:
        run.require_no_demonstrations()
        questions = read_questions(settings.questions, settings.media)
        media = pathlib.Path(settings.media)
        missing = sum(not (media / question.video).exists() for question in questions)
        found = f"{len(questions)} questions in {settings.questions}, {missing} without their video"
        remedy = f"copy the videos to {settings.media}" if missing else ""
        return [Finding("data", found, remedy, "warning" if missing else "")]
    if (pathlib.Path(settings.folder) / SET).exists():
        return [Finding("data", f"{settings.folder}: prepared")]
    found = [Finding("data", f"{settings.folder}: the run prepares it", problem="warning")]
    for name, suffixes in (("annotations", (".parquet",)), ("media", ())):
        source = getattr(settings, name)
        if is_address(source) or pathlib.Path(source).expanduser().is_dir():
            found.append(Finding(name, source))
        elif is_hub_id(source):
            found.append(_on_the_hub(name, source, "dataset", suffixes))
        else:
            found.append(
                Finding(
                    name,
                    f"{source}: neither a folder nor a hub id (owner/name)",
                    f"give --data.{name}, or draw scenes with python -m paravt_extras.scenes",
                    "error",
                )
            )
    return found


def _on_the_hub(item: str, name: str, kind: str, suffixes: Sequence[str]) -> Finding:
    """Return whether the hub has a repository that this user may read, with files of all
    suffixes."""
    command = f"hf download --repo-type {kind} {name}"
    try:
        info: Any = huggingface_hub.HfApi().repo_info(
            name, repo_type=kind, files_metadata=True, timeout=_PATIENCE
        )
        if info.gated:
            # The list of a gated repository's files is public, but the files are not.
            huggingface_hub.HfApi().auth_check(name, repo_type=kind)
    # The hub's client raises errors of several libraries. Whatever it is, the run needs an answer.
    except Exception as error:
        page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
        why = f"{type(error).__name__} from the hub"
        remedy = f"check {page}, log in (hf auth login), or copy its files here and name the folder"
        return Finding(item, f"{name}: not here, {why}", remedy, "error")
    names = [file.rfilename for file in info.siblings or ()]
    lacking = [suffix for suffix in suffixes if not any(x.endswith(suffix) for x in names)]
    if lacking:
        remedy = "check the id: --model.path, --data.annotations"
        return Finding(item, f"{name}: has no {', '.join(lacking)}", remedy, "error")
    count = sum(file.size or 0 for file in info.siblings or ())
    return Finding(item, f"{name}: {size(count)}, which the run downloads", command, "warning")


def _disk(run: Run, place: Place) -> list[Finding]:
    """Return whether the run's disk has room for its checkpoints and the exported model."""
    if place.shown != str(place.folder) or run.model.size == "tiny":
        return []
    kept = KEEP + 2
    phases = sum(phase is not None for phase in (run.sft, run.rl))
    needed = phases * kept * state_bytes(run) + model_bytes(run)
    there = sum(file.stat().st_size for file in place.folder.rglob("*") if file.is_file())
    existing = next(x for x in (place.folder, *place.folder.parents) if x.exists())
    free = shutil.disk_usage(existing).free
    found = f"{existing}: {size(free)} free; checkpoints and export take {size(needed)}"
    if free + there >= needed:
        return [Finding("disk", found)]
    remedy = "make room, or give --run-dir on another disk"
    return [Finding("disk", found, remedy, "error")]


def _run_directory(run: Run, settings: dict[str, Any], place: Place) -> list[Finding]:
    """Return whether the folder is free, and new or of this run, and so is the run to start
    from."""
    continues = place.require_usable(settings)
    if run.start:
        require_cold_start(run.start, settings)
    return [Finding("run directory", f"{place.shown}: {'continues' if continues else 'new'}")]


# --- sizes, from the shapes of the model ---


def state_bytes(run: Run) -> float:
    """Return the bytes of the largest checkpoint: trained weights, their moments, and the vision
    tower."""
    if run.model.size == "tiny":
        return 16e6
    model = abstract_model(run.model.config(), param_dtype=run.param_dtype, lora=run.lora)
    _, trained, _ = split(model, run.train_vision)
    phases = [phase for phase in (run.sft, run.rl) if phase is not None]
    moments = [
        total_bytes(jax.eval_shape(make_optimizer(phase.optimizer).init, trained))
        for phase in phases
    ]
    tower = total_bytes(nnx.state(model.vision)) if run.lora is None else 0.0
    return total_bytes(trained) + max(moments, default=0.0) + tower


def model_bytes(run: Run) -> float:
    """Return the bytes of the exported model."""
    weights = jax.tree.leaves(nnx.state(abstract_model(run.model.config())))
    return float(sum(math.prod(x.shape) for x in weights) * jnp.dtype(run.param_dtype).itemsize)
