"""The folder of a trained model: weights, tokenizer, chat template and processor settings.

`models.weights.hf.load` and transformers open it.
"""

from __future__ import annotations

import json
import pathlib
import tempfile
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from models.config import ModelConfig
from models.family import family_of
from models.features import FrameSettings
from models.model import VisionLanguageModel
from models.peft_folder import merge_adapters, save_adapters
from models.sharding import require_mesh
from models.trained import split_vision
from models.weights.folder import CONFIG, local_folder, read_companions
from models.weights.hf import save
from paravt_jax.data import tokenizer_file
from paravt_jax.data.stored import SUMS, write_atomically
from paravt_jax.processes import hosts
from train.model import Parts
from train.settings import Run

_TEMPLATE = "chat_template.jinja"
# Where checkpoints may have theirs, too.
_WITH_TEMPLATE = ("chat_template.json", "tokenizer_config.json")


def export_run(run: Run, folder: pathlib.Path, parts: Parts, weights: Any) -> None:
    """Write the trained model of a run to `model`, and its adapters to `adapter`, unless it exists.

    Adapters of random weights are not written: they have no base to name.

    Args:
        run: The settings.
        folder: The run's folder.
        parts: The model without its trained weights.
        weights: The trained weights.
    """
    if hosts.from_first((folder / "model").exists):
        return
    # All processes take part, because the weights are sharded over all of them.
    model = parts.model
    text, vision = split_vision(weights)
    whole = NamedSharding(require_mesh(weights), PartitionSpec())
    nnx.update(model.text, text, parts.skeleton.frozen)
    if vision is not None:
        nnx.update(model.vision, vision)
    digest = parts.origin.get("base_fingerprint")
    adapter = folder / "adapter"
    if run.lora is not None and digest is not None and not hosts.from_first(adapter.exists):
        base, trained = run.model.path, run.train_vision
        save_adapters(model, run.lora, adapter, base=base, base_digest=digest, train_vision=trained)
    merge_adapters(model.text)
    nnx.update(model.vision, jax.device_put(parts.tower_with(vision), whole))
    write_model(model, folder / "tokenizer", run.frames, folder / "model")


def write_model(
    model: VisionLanguageModel,
    tokenizer_folder: pathlib.Path,
    frames: FrameSettings,
    folder: pathlib.Path,
) -> None:
    """Write a model with its tokenizer, chat template and processor settings.

    Args:
        model: The weights and their configuration.
        tokenizer_folder: Files to copy. They take precedence over files of the same name that this
            function would generate, and a chat template in any of them over the family's.
        frames: Sizes at which the processor shows pictures.
        folder: Folder to create.
    """
    files = {file.name: file for file in tokenizer_folder.iterdir()}
    texts = [files[name].read_text("utf-8") for name in _WITH_TEMPLATE if name in files]
    own_template = any('"chat_template"' in text for text in texts)
    with tempfile.TemporaryDirectory() as generated:
        for name, text in _processor_files(model.config, frames).items():
            if name not in files and not (own_template and name == _TEMPLATE):
                files[name] = pathlib.Path(generated) / name
                files[name].write_text(text, encoding="utf-8")
        save(model, folder, files=[files[name] for name in sorted(files)])


def copy_tokenizer(source: str, target: pathlib.Path) -> None:
    """Copy the tokenizer's and processor's files of a checkpoint, unless they are already there.

    Args:
        source: Folder or Hugging Face id of the checkpoint.
        target: Folder to copy to.
    """
    target.mkdir(parents=True, exist_ok=True)
    if (target / tokenizer_file.FILE).exists():
        return
    companions = read_companions(local_folder(source, weights=False))
    # Also without the checksums of weights, which stay behind.
    left = (CONFIG, SUMS)
    names = [name for name in companions if name not in left and not name.endswith(".index.json")]
    # tokenizer.json goes last: it marks the folder as complete.
    for name in sorted(names, key=lambda name: name == tokenizer_file.FILE):
        write_atomically(target / name, companions[name].decode())


def _processor_files(config: ModelConfig, frames: FrameSettings) -> dict[str, str]:
    """Return the contents of the chat template and the processors' settings, by file name."""
    family = family_of(config)
    vision = config.vision
    longest = max(frames.max_pixels, frames.crop_max_pixels)
    files = {_TEMPLATE: family.dialect.chat_template}
    for kind, name, most_pixels in (
        ("image", "preprocessor_config.json", longest),
        ("video", "video_preprocessor_config.json", family.limited_frames * longest),
    ):
        content = {
            f"{kind}_processor_type": family.processor[f"{kind}_processor"],
            "processor_class": family.processor["processor"],
            "size": {"shortest_edge": frames.min_pixels, "longest_edge": most_pixels},
            "patch_size": vision.patch_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "merge_size": vision.spatial_merge_size,
            "image_mean": list(vision.pixel_mean),
            "image_std": list(vision.pixel_std),
        }
        files[name] = json.dumps(content, indent=2) + "\n"
    return files
