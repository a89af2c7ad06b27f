"""Writes a checkpoint as a Hugging Face folder.

    python -m train.export --run-dir runs/X --phase rl --step 40 --to FOLDER

FOLDER may be an address (gs://..., s3://...): the folder is written to a temporary one, and then
uploaded file by file, with config.json last.

`models.weights.hf.load` and transformers open the folder. Adapters are merged. The export only
reads from the run's folder, so the run may still be training. It does not read the optimizer state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any, Literal

import jax
import tyro
from flax import nnx

from models.family import family_of
from models.features import FrameSettings
from models.lora import LoRASettings, add_adapters, cast
from models.model import VisionLanguageModel, abstract_model
from models.peft_folder import base_fingerprint, merge_adapters
from models.trained import trained_state
from models.weights.hf import load
from models.weights.hf_config import from_hf
from paravt_jax.data import tokenizer_file
from paravt_jax.data.any_path import any_path, is_bucket, require_folder_or_bucket
from paravt_jax.data.buckets import appearing_at
from paravt_jax.data.stored import naming_full_disk
from paravt_jax.processes.cluster import run_command
from train.durable.bucket import BucketFiles
from train.durable.checkpoint import Checkpoints
from train.durable.run_folder import is_shared, read_config
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


@contextlib.contextmanager
def small_files(run_dir: str) -> Iterator[pathlib.Path]:
    """Yield a local folder with the small files of a run that may be going on elsewhere, to read.

    Args:
        run_dir: The run, in a folder or in a bucket.
    """
    if not is_bucket(run_dir):
        yield pathlib.Path(run_dir)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / run_dir.rstrip("/").rpartition("/")[2]
        BucketFiles(run_dir, folder).pull(is_shared)
        yield folder


def export(command: Export) -> None:
    """Write the model of a checkpoint to a new folder, with adapters merged.

    Raises:
        ConnectionError: If a file cannot be uploaded.
        FileExistsError: If `command.to` exists.
        FileNotFoundError: If `command.run_dir` is not a run, or has no checkpoints of the phase.
        RunFolderError: If this version cannot read the run.
        CheckpointError: If the checkpoint is damaged.
        ValueError: If the step is not kept, the run's tokenizer has changed, or the checkpoint has
            only adapters, whose base is gone.
        ModuleNotFoundError: If the package for an address is missing.
    """
    require_folder_or_bucket("--run-dir", command.run_dir)
    with naming_full_disk(command.to), appearing_at("--to", command.to) as target:
        with small_files(command.run_dir) as folder:
            checkpoints = _checkpoints(command, folder)
            step = _step(checkpoints, command)
            origin = checkpoints.identity(step)
            _require_vocabulary(command, folder, origin)
            model = _load(command, checkpoints, step, origin)
            frames = FrameSettings(**origin["settings"]["frames"])
            write_model(model, folder / "tokenizer", frames, target)


def _checkpoints(command: Export, folder: pathlib.Path) -> Checkpoints:
    # A checkpoint holds the settings, too.
    if (folder / "config.json").exists():
        read_config(folder, "--run-dir")
    saved = any_path(command.run_dir) / "checkpoints"
    phases = sorted(path.name for path in saved.iterdir()) if saved.exists() else []
    if command.phase not in phases:
        raise FileNotFoundError(
            f"--phase {command.phase}: {command.run_dir} has no checkpoints of this phase; "
            f"it has checkpoints of: {', '.join(phases) or 'no phase'}"
        )
    return Checkpoints(saved / command.phase, read_only=True)


def _step(checkpoints: Checkpoints, command: Export) -> int:
    """Return the number of the step that the command names."""
    kept = {str(step): step for step in checkpoints.steps()}
    latest, best = max(kept.values(), default=None), checkpoints.best()
    step = {**kept, "latest": latest, "best": best}.get(command.step)
    if step is None:
        named = " (none was evaluated, so none is best)" if best is None else f" (best: {best})"
        raise ValueError(
            f"--step {command.step}: no such checkpoint of {command.phase} in {command.run_dir}; "
            f"kept steps: {', '.join(kept) or 'none'}{named}"
        )
    return step


def _require_vocabulary(command: Export, folder: pathlib.Path, origin: dict[str, Any]) -> None:
    """Raise ValueError unless the run's tokenizer is that of the checkpoint."""
    dialect = family_of(from_hf(origin["model"])).dialect
    digest = tokenizer_file.load(folder / "tokenizer", dialect).digest
    wanted = origin["vocabulary"]["digest"]
    if digest != wanted:
        raise ValueError(
            f"--run-dir {command.run_dir}: the vocabulary of tokenizer/ (digest {digest}) is not "
            f"that of the checkpoint ({wanted}); restore the run's tokenizer"
        )


def _load(
    command: Export, checkpoints: Checkpoints, step: int, origin: dict[str, Any]
) -> VisionLanguageModel:
    """Load the model of a checkpoint into host memory, and merge adapters."""
    cpu = jax.local_devices(backend="cpu")[0]
    if origin["settings"]["lora"] and command.phase != "align":
        with jax.default_device(cpu):
            model, wanted = _adapted_base(command, origin)
    else:
        model = abstract_model(from_hf(origin["model"]), param_dtype=origin["param_dtype"])
        wanted = {"text": nnx.state(model.text), "vision": nnx.state(model.vision)}
    # A checkpoint names the devices it was trained on. They may not exist here, so put every array
    # on the host.
    host = jax.sharding.SingleDeviceSharding(cpu)
    template = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host), wanted
    )
    restored, _ = checkpoints.restore(template, step, part=True)
    for name, weights in restored.items():
        nnx.update(getattr(model, name), weights)
    merge_adapters(model.text)
    # The trained part of the tower was in float32.
    nnx.update(model.vision, cast(nnx.state(model.vision), origin["param_dtype"]))
    return model


def _adapted_base(
    command: Export, origin: dict[str, Any]
) -> tuple[VisionLanguageModel, dict[str, Any]]:
    """Load the base of a checkpoint. Returns it with fresh adapters, and what the checkpoint has,
    by tower."""
    settings, digest = origin["settings"], origin.get("base_fingerprint")
    path = settings["model"]["path"]
    if not path:
        raise ValueError(
            f"--run-dir {command.run_dir}: its checkpoints hold adapters of random weights, which "
            f"are not on disk; use {command.run_dir}/model, which a finished run writes with the "
            "adapters merged"
        )
    model = load(path, from_hf(origin["model"]), param_dtype=origin["param_dtype"])
    loaded = base_fingerprint(model)
    if loaded != digest:
        raise ValueError(
            f"--run-dir {command.run_dir}: its adapters belong to a base with the fingerprint "
            f"{digest}, but that of {path} is {loaded}; restore the weights in {path}"
        )
    targets = tuple(settings["lora"]["targets"])
    add_adapters(model.text, LoRASettings(**settings["lora"] | {"targets": targets}), seed=0)
    wanted = {"text": nnx.state(model.text, nnx.LoRAParam)}
    vision = trained_state(model.vision, settings["train_vision"])
    return model, wanted if vision is None else wanted | {"vision": vision}


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax says that it only reads
    command = tyro.cli(Export, args=argv, prog="python -m train.export")
    code = run_command(lambda: export(command))
    if code == 0:
        print(f"written: {command.to}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
