"""Writes a checkpoint as a Hugging Face folder, or its adapters as a PEFT folder.

    python -m train.export --run-dir runs/X --phase rl --step 40 --to FOLDER

FOLDER may be an address (gs://..., s3://...): the folder is written to a temporary one, and then
uploaded file by file, with config.json last.

`models.weights.hf.load`, `models.processor.Processor.load` and transformers open the folder. The
export only reads from the run's folder, so the run may still be training. It does not read the
optimizer state.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import Any, Literal

import jax
import tyro
from flax import nnx

from models.config import ModelConfig
from models.family import family_of
from models.features import FrameSettings
from models.lora import LoRASettings, add_adapters, cast, merge_adapters
from models.model import VisionLanguageModel, abstract_model
from models.peft_folder import base_fingerprint, save_adapters
from models.trained import trained_state
from models.weights.hf import load
from models.weights.hf_config import from_hf
from paravt_jax.command_name import command_name
from paravt_jax.data import tokenizer_file
from paravt_jax.data.any_path import any_path, require_folder_or_bucket
from paravt_jax.data.buckets import appearing_at
from paravt_jax.processes.exit_codes import USER_ERRORS, exit_code
from train.durable.checkpoint import Checkpoints
from train.durable.place import small_files
from train.durable.run_directory import read_config
from train.model_folder import write_model


@dataclasses.dataclass(frozen=True)
class Export:
    """Write the model of a checkpoint as a Hugging Face folder."""

    run_dir: str
    """Folder of the run, or its gs:// address; the run may still be training."""
    to: str
    """Folder to create, on a disk or in a bucket (gs://, s3:// and others that fsspec knows)."""
    phase: Literal["align", "sft", "rl"] = "rl"
    """Phase that saved the checkpoint."""
    step: str = "latest"
    """Step of the checkpoint, `latest`, or `best` (of RL, by accuracy)."""
    form: Literal["model", "peft"] = "model"
    """Write the whole model, with adapters merged, or only what was trained, for PEFT."""


def export(command: Export) -> None:
    """Write the model of a checkpoint, or its adapters, to a new folder.

    Raises:
        ConnectionError: If a file cannot be uploaded.
        FileExistsError: If `command.to` exists.
        FileNotFoundError: If `command.run_dir` is not a run, or has no checkpoints of the phase.
        RunDirectoryError: If this version cannot read the run.
        CheckpointError: If the checkpoint is damaged.
        ValueError: If the step is not kept, the run's tokenizer has changed, or the checkpoint has
            no adapters (for `peft`) or only adapters whose base is gone.
        ModuleNotFoundError: If the package for an address is missing.
    """
    require_folder_or_bucket("--run-dir", command.run_dir)
    with appearing_at("--to", command.to) as target:
        with small_files(command.run_dir, _is_needed) as folder:
            _export(command, folder, target)


def _is_needed(name: str) -> bool:
    """Return whether an export reads a file of a run."""
    return name == "config.json" or name.startswith("tokenizer/")


def _export(command: Export, folder: pathlib.Path, target: pathlib.Path) -> None:
    """Write a model to `target`, a local folder to create; see `export`.

    Args:
        command: What to write.
        folder: The files of the run, perhaps without checkpoints.
        target: The folder.
    """
    checkpoints = _checkpoints(command, folder)
    step = _step(checkpoints, command)
    meta = checkpoints.meta(step)
    config = from_hf(meta["model"])
    vocabulary = tokenizer_file.load(folder / "tokenizer", family_of(config).dialect).digest
    if vocabulary != meta["vocabulary"]:
        raise ValueError(
            f"--run-dir {command.run_dir}: the vocabulary of tokenizer/ (digest {vocabulary}) is "
            f"not that of checkpoint {step} of {command.phase} ({meta['vocabulary']}); "
            "restore the run's tokenizer"
        )
    lora = None
    if meta["settings"]["lora"] and command.phase != "align":
        fields = meta["settings"]["lora"]
        lora = LoRASettings(**fields | {"targets": tuple(fields["targets"])})
    if command.form == "peft" and lora is None:
        raise ValueError(
            f"--form peft: the checkpoints of {command.phase} in {command.run_dir} have no "
            "adapters; leave --form out"
        )
    if lora is None:
        model = _load(checkpoints, step, config, meta["param_dtype"])
    else:
        model = _load_adapted(checkpoints, step, meta, lora, command.run_dir)
    if command.form == "peft" and lora is not None:
        base, digest = meta["settings"]["model"]["path"], meta["base_fingerprint"]
        part = meta["settings"]["train_vision"]
        save_adapters(model, lora, target, base=base, base_digest=digest, train_vision=part)
        return
    merge_adapters(model.text)
    # The trained part of the tower was in float32.
    nnx.update(model.vision, cast(nnx.state(model.vision), meta["param_dtype"]))
    write_model(model, folder / "tokenizer", FrameSettings(**meta["settings"]["frames"]), target)


def _checkpoints(command: Export, folder: pathlib.Path) -> Checkpoints:
    phase = command.phase
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"--run-dir {command.run_dir}: not a run's folder, because it has no config.json; "
            "name a folder that train.run made"
        )
    read_config(folder, "--run-dir")
    place = any_path(command.run_dir) / "checkpoints"
    phases = sorted(path.name for path in place.iterdir()) if place.exists() else []
    if phase not in phases:
        raise FileNotFoundError(
            f"--phase {phase}: {command.run_dir} has no checkpoints of this phase; "
            f"it has checkpoints of: {', '.join(phases) or 'no phase'}"
        )
    return Checkpoints(place / phase, read_only=True)


def _step(checkpoints: Checkpoints, command: Export) -> int:
    """Return the number of the step that the command names."""
    steps = checkpoints.steps()
    best = checkpoints.best()
    by_name: dict[str, int | None] = {str(step): step for step in steps}
    by_name["latest"] = max(steps, default=None)
    by_name["best"] = best
    step = by_name.get(command.step)
    if step is None:
        kept = ", ".join(map(str, steps)) or "none"
        if best is not None:
            kept += f" (best: {best})"
        raise ValueError(
            f"--step {command.step}: no such checkpoint of {command.phase} in {command.run_dir}; "
            f"kept steps: {kept}"
        )
    return step


def _load(
    checkpoints: Checkpoints, step: int, config: ModelConfig, dtype: str
) -> VisionLanguageModel:
    """Load the model of a checkpoint into host memory."""
    model = abstract_model(config, param_dtype=dtype)
    wanted = {"vision": nnx.state(model.vision), "text": nnx.state(model.text)}
    _restore(model, checkpoints, step, wanted)
    return model


def _load_adapted(
    checkpoints: Checkpoints, step: int, meta: dict[str, Any], lora: LoRASettings, folder: str
) -> VisionLanguageModel:
    """Load the base and the adapters of a checkpoint into host memory."""
    path, digest = meta["settings"]["model"]["path"], meta["base_fingerprint"]
    if not path:
        raise ValueError(
            f"--run-dir {folder}: its checkpoints hold adapters of random weights, which are not "
            f"on disk; use {folder}/model, which a finished run writes with the adapters merged"
        )
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        model = load(path, from_hf(meta["model"]), param_dtype=meta["param_dtype"])
        found = base_fingerprint(model)
        if found != digest:
            raise ValueError(
                f"--run-dir {folder}: its adapters belong to a base with the fingerprint {digest}, "
                f"but that of {path} is {found}; restore the weights in {path}"
            )
        add_adapters(model.text, lora, seed=0)
    wanted = {"text": nnx.state(model.text, nnx.LoRAParam)}
    vision = trained_state(model.vision, meta["settings"]["train_vision"])
    if vision is not None:
        wanted["vision"] = vision
    _restore(model, checkpoints, step, wanted)
    return model


def _restore(
    model: VisionLanguageModel, checkpoints: Checkpoints, step: int, wanted: dict[str, Any]
) -> None:
    """Set the wanted weights of a model, by tower, to those of a checkpoint."""
    # A checkpoint names the devices it was trained on. They may not exist here, so place every
    # array on the host.
    host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    template = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host), wanted
    )
    restored, _, _ = checkpoints.restore(template, step, part=True)
    for name, weights in restored.items():
        nnx.update(getattr(model, name), weights)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    command = tyro.cli(Export, args=argv, prog=command_name("python -m train.export"))
    try:
        export(command)
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    print(f"written: {command.to}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
