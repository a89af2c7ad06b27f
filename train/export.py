"""Any kept checkpoint as a Hugging Face folder: `python -m train.export --run-dir runs/X --phase rl --step 40 --to FOLDER`.

Owns what stands beside the weights, so that `models.qwen3_vl.hf.load`, `models.processor.Processor.load` and transformers open the folder.
Refuses, in one line, what is no run, a step that is not kept, another vocabulary and a folder that exists. Reads the run only, which may
go on meanwhile; the optimiser is not read.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import tempfile
from typing import Literal

import jax
import tyro
from flax import nnx

from models.features import FrameSettings
from models.qwen3_vl.config import Qwen3VLConfig, VisionConfig
from models.qwen3_vl.hf import save
from models.qwen3_vl.hf_config import from_hf
from models.qwen3_vl.model import Qwen3VL, abstract_model
from paravt_jax.data.local_path import require_local
from paravt_jax.method import tokenizer
from train.durable.checkpoint import CheckpointError, Checkpoints
from train.durable.run_directory import READABLE, RunDirectoryError, read_config

_FRAMES = 768  # of a video, as many as `models.processor.video_frame_indices` takes at most
_TEMPLATE = """\
{%- if tools %}{{ raise_exception('this template writes no tools: paravt_jax.method.protocol does, for rollout.ask') }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
{%- if message.role == 'tool' %}{{ '<tool_response>\\n' }}{% endif %}
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for item in message.content %}
{%- if item.type in ('image', 'video') %}{{ '<|vision_start|><|' + item.type + '_pad|><|vision_end|>' }}{% else %}{{ item.text }}{% endif %}
{%- endfor %}
{%- endif %}
{%- if message.role == 'tool' %}{{ '\\n</tool_response>' }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


@dataclasses.dataclass(frozen=True)
class Export:
    """Write the model of a checkpoint as a Hugging Face folder."""

    run_dir: str
    """The run's folder; the run may be going on."""
    to: str
    """The new folder."""
    phase: Literal["align", "sft", "rl"] = "rl"
    """The phase that saved the checkpoint."""
    step: str = "latest"
    """A step whose checkpoint is kept, `latest`, or `best` (of RL: see --checkpoints.best of train.run)."""


def export(command: Export) -> None:
    """Raises CheckpointError, RunDirectoryError, ValueError, FileNotFoundError or FileExistsError, each
    of which says what to do."""
    require_local("--run-dir", command.run_dir)
    require_local("--to", command.to)
    folder, target = pathlib.Path(command.run_dir), pathlib.Path(command.to)
    if target.exists():
        raise FileExistsError(f"--to {target}: exists; name a new folder, or remove this one first")
    checkpoints = _checkpoints(folder, command.phase)
    step = _step(checkpoints, command)
    meta = checkpoints.meta(step)
    vocabulary = tokenizer.load(folder / "tokenizer").digest
    if vocabulary != meta["vocabulary"]:
        raise ValueError(
            f"--run-dir {folder}: tokenizer/ has another vocabulary (digest {vocabulary}) than checkpoint {step} of {command.phase} "
            f"({meta['vocabulary']}); put the run's own tokenizer back"
        )
    model = _load(checkpoints, step, from_hf(meta["model"]), meta["param_dtype"])
    write_model(model, folder / "tokenizer", FrameSettings(**meta["settings"]["frames"]), target)


def write_model(
    model: Qwen3VL, tokenizer_folder: pathlib.Path, frames: FrameSettings, folder: pathlib.Path
) -> None:
    """`model` in the new `folder`, with its tokenizer and the chat template and processor settings that go with it.

    Pictures are shown in the sizes of `frames`. What `tokenizer_folder` holds of these files goes before what is written here.
    """
    own = {file.name: file for file in tokenizer_folder.iterdir()}
    with tempfile.TemporaryDirectory() as made:
        for name, text in _processor_files(model.config, frames).items():
            if name not in own:
                own[name] = pathlib.Path(made) / name
                own[name].write_text(text, encoding="utf-8")
        save(model, folder, files=[own[name] for name in sorted(own)])


def _processor_files(config: Qwen3VLConfig, frames: FrameSettings) -> dict[str, str]:
    def settings(kind: dict[str, str], least: int, most: int) -> str:
        size = {"shortest_edge": least, "longest_edge": most}
        return (
            json.dumps(
                {
                    **kind,
                    "processor_class": "Qwen3VLProcessor",
                    "size": size,
                    **_patches(config.vision),
                },
                indent=2,
            )
            + "\n"
        )

    return {
        "chat_template.jinja": _TEMPLATE,
        "preprocessor_config.json": settings(
            {"image_processor_type": "Qwen2VLImageProcessor"}, frames.min_pixels, frames.max_pixels
        ),
        "video_preprocessor_config.json": settings(
            {"video_processor_type": "Qwen3VLVideoProcessor"},
            frames.min_pixels,
            _FRAMES * frames.max_pixels,
        ),
    }


def _patches(vision: VisionConfig) -> dict[str, int | list[float]]:
    sizes = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }
    return {**sizes, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def _checkpoints(folder: pathlib.Path, phase: str) -> Checkpoints:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"--run-dir {folder}: no run's folder, it has no config.json; name one that train.run made"
        )
    read_config(folder, "--run-dir", READABLE)
    found = sorted(path.name for path in (folder / "checkpoints").glob("*"))
    if phase not in found:
        raise FileNotFoundError(
            f"--phase {phase}: {folder} has no checkpoints of it; it has those of {', '.join(found) or 'no phase'}"
        )
    return Checkpoints(folder / "checkpoints" / phase, read_only=True)


def _step(checkpoints: Checkpoints, command: Export) -> int:
    steps, asked = checkpoints.steps(), command.step
    named = {"latest": max(steps, default=None), "best": checkpoints.best()} | {
        str(step): step for step in steps
    }
    step = named.get(asked)
    if step is None:
        kept = ", ".join(map(str, steps)) or "none"
        best = f" (best: {named['best']})" if named["best"] is not None else ""
        raise ValueError(
            f"--step {asked}: no such checkpoint of {command.phase} in {command.run_dir}; kept are {kept}{best}"
        )
    return step


def _load(checkpoints: Checkpoints, step: int, config: Qwen3VLConfig, dtype: str) -> Qwen3VL:
    """The model of a checkpoint, in host memory, wherever it was trained."""
    model = abstract_model(config, param_dtype=dtype)
    host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    template = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host),
        {"vision": nnx.state(model.vision), "text": nnx.state(model.text)},
    )
    found = checkpoints.restore_part(template, step)
    nnx.update(model.vision, found["vision"])
    nnx.update(model.text, found["text"])
    return model


def main(argv: list[str] | None = None) -> int:
    """The command's exit code."""
    command = tyro.cli(Export, args=argv, prog="python -m train.export")
    try:
        export(command)
    except (CheckpointError, RunDirectoryError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"written: {command.to}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
