"""A rehearsal: every phase of a run on published data, in minutes.

    python -m paravt_extras.rehearsal --config=paravt_8b

Recipe, tokenizer, protocol, phases, mesh, processes and files are those of the run. Widths, depths,
lengths and steps are cut, weights are random, and the data are a few drawn scenes. It learns
nothing, but what would stop the run later stops the rehearsal now.
"""

from __future__ import annotations

import functools
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

from flax import nnx

from configs import RECIPES
from models.family import REHEARSAL, family
from models.model import VisionLanguageModel
from models.weights.hf import save
from paravt_extras.fit import choose_mesh
from paravt_extras.scenes import ANNOTATIONS, MEDIA, SceneSettings, write_scenes
from paravt_extras.slices import found_devices
from paravt_jax.data.any_path import require_local
from paravt_jax.data.published import open_table, read_table
from paravt_jax.method.tokenizer import Dialect, Vocabulary
from paravt_jax.method.tools.tool import Tool
from paravt_jax.processes import cluster, hosts
from paravt_jax.world.vocabulary import build_vocabulary, recurring_texts
from train.cli import parse
from train.model_folder import copy_tokenizer
from train.run import command, train
from train.settings import Run, change

# Upper bounds on settings, by dotted name. On a CPU, the softmax over the vocabulary takes most of
# the time and of the memory, so there are few tokens and small chunks of them. The demonstrations
# of scenes fit into a row.
_MOST = {
    "frames.cache_mib": 64,
    "frames.min_pixels": 1024,
    "frames.max_pixels": 4096,
    "frames.crop_max_pixels": 4096,
    "protocol.turn_tokens": 48,
    "protocol.summary_tokens": 16,
    "protocol.trajectory_tokens": 144,
    "protocol.text_tokens": 512,
    "data.frames": 4,
    "sft.steps": 4,
    "sft.rows": 2,
    "sft.row_tokens": 1024,
    "rl.steps": 4,
    "rl.save_every": 2,
    "rl.prompts": 2,
    "evaluation.questions": 4,
}
_SCENES = SceneSettings(videos=4, heldout=1, lines=320)


def rehearsal(run: Run) -> Run:
    """Make the weights and the data of a rehearsal, and return its settings.

    They are made once, in a folder beside that of the run.

    Args:
        run: A recipe with published data.

    Raises:
        ValueError: The recipe has no published data.
        FileNotFoundError: The tokenizer cannot be fetched.
    """
    small = cut(run)
    folder = pathlib.Path(f"{small.run_dir}-sources").absolute()
    hosts.from_first(lambda: folder.mkdir(parents=True, exist_ok=True))
    cluster.require_shared(folder)
    weights = _make_weights(run, folder)
    scenes = folder / "scenes"
    hosts.from_first(lambda: write_scenes(_SCENES, scenes))
    # The mesh is that of the run, whose batches have more rows.
    most_tensor = small.model.config().text.most_tensor
    mesh = choose_mesh(run, found_devices(), most_tensor)
    fields: dict[str, Any] = {
        "mesh": mesh,
        "model.path": str(weights),
        "data.annotations": str(scenes / ANNOTATIONS),
        "data.folder": str(folder / "set"),
    }
    if run.data is not None and not run.data.questions:
        fields["data.media"] = str(scenes / MEDIA)
    return change(small, small.name, fields)


def cut(run: Run) -> Run:
    """Return the settings of a rehearsal before its weights and data are known. Makes nothing.

    Raises:
        ValueError: The recipe has no published data.
    """
    if run.data is None:
        raise ValueError(
            f"--config={run.name}: it has no published data, and so needs no rehearsal; give a "
            "recipe that has, such as paravt_8b"
        )
    require_local("run_dir of a rehearsal", run.run_dir)
    name = f"{run.name}-rehearsal"
    fields: dict[str, Any] = {
        "run_dir": run.run_dir or f"runs/{name}",
        "model.size": REHEARSAL,
        # Rows that are too long for the cut lengths say nothing about the run.
        "max_left_out": 1.0,
    }
    for path, most in _MOST.items():
        section, _, field = path.partition(".")
        settings = getattr(run, section)
        if settings is not None:
            fields[path] = min(getattr(settings, field), most)
    return change(run, name, fields)


def _make_weights(run: Run, folder: pathlib.Path) -> pathlib.Path:
    """Save random weights with the tokenizer of the run. All processes take part."""
    weights = folder / "weights"
    if hosts.from_first(weights.exists):
        return weights
    tokenizer = folder / "tokenizer"
    hosts.from_first(lambda: copy_tokenizer(run.model.path, tokenizer))
    config = family(run.model.family).size(REHEARSAL)
    model = nnx.jit(lambda: VisionLanguageModel(config, rngs=nnx.Rngs(run.seed)))()
    save(model, weights, files=sorted(tokenizer.iterdir()))
    return weights


def scene_vocabulary(scenes: pathlib.Path, tools: Sequence[Tool], dialect: Dialect) -> Vocabulary:
    """Return a vocabulary with the words of drawn scenes, for where no tokenizer can be fetched."""
    tables = sorted((scenes / ANNOTATIONS).glob("*.parquet"))
    rows = [str(row) for table in tables for row in read_table(open_table(table))]
    words = sorted({word for row in rows for word in re.findall(r" ?[^\W\d_]+", row)})
    return build_vocabulary([*recurring_texts(tools, dialect), *words], dialect)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    program = "python -m paravt_extras.rehearsal"
    run = parse(sys.argv[1:] if argv is None else argv, RECIPES, prog=program)
    return command(run, functools.partial(train, prepared=rehearsal))


if __name__ == "__main__":
    raise SystemExit(main())
