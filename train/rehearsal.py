"""A rehearsal: the whole road of a run on published data, in minutes.

    python -m train.run --config=paravt_8b --rehearse

Recipe, tokenizer, protocol, phases, mesh, processes and files are those of the run. Widths, depths,
lengths and steps are cut, and weights are random. It learns nothing, but what would stop the run
later stops the rehearsal now.

Its data are the first rows of the prepared set, if there is one; else the sources as they are, if
they are small; else a stand-in that is made from a seed (`paravt_jax.world.stand_in`).
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import httpx2
import huggingface_hub
import pyarrow
import pyarrow.parquet
from flax import nnx
from huggingface_hub import errors

from models.qwen3_vl.config import qwen3_vl
from models.qwen3_vl.hf import save
from models.qwen3_vl.hf_config import from_hf
from models.qwen3_vl.model import Qwen3VL
from models.weights.folder import CONFIG, local_folder
from paravt_jax.data import sources
from paravt_jax.data.atomic import appearing, write_atomically
from paravt_jax.data.hub import is_hub_id
from paravt_jax.data.preparation import PLAN, find_tables, open_prepared
from paravt_jax.world.stand_in import write_stand_in
from train.durable import hosts
from train.published_data import DataSettings
from train.published_model import copy_tokenizer
from train.settings import Run, change

MARK = "REHEARSAL.txt"
"""File beside the tokenizer of a rehearsal and in its exported model."""

_SUFFIX = "-rehearsal"
# Upper bounds on settings, by dotted name. On a CPU, the softmax over the vocabulary takes most of
# the time and of the memory, so there are few tokens and small chunks of them. The demonstrations
# of the stand-in fit into a row.
_MOST = {
    "frames.min_pixels": 1024,
    "frames.max_pixels": 4096,
    "protocol.turn_tokens": 48,
    "protocol.summary_tokens": 16,
    "protocol.trajectory_tokens": 144,
    "protocol.text_tokens": 512,
    "data.frames": 4,
    "data.heldout": 4,
    "sft.steps": 4,
    "sft.save_every": 2,
    "sft.rows": 2,
    "sft.row_tokens": 768,
    "sft.logprob_chunk": 64,
    "rl.steps": 4,
    "rl.save_every": 2,
    "rl.prompts": 2,
    "rl.logprob_chunk": 64,
    "evaluation.questions": 4,
    "evaluation.samples": 1,
}
_SMALL = 64 * 2**20  # bytes of a source that is used as it is
_ROWS = 32  # rows of each file of a prepared set
_CHOICE = "sources.json"  # what a rehearsal reads; a resumed one reads the same
_TEXT = """\
This model comes from {name}, a rehearsal: its weights are random and its sizes are cut.
It shows that a run gets from its first phase to its export, and nothing else.
"""


def rehearsal(run: Run) -> Run:
    """Make the weights and the data of a rehearsal, and return its settings.

    They are made once, in a folder beside that of the run.

    Args:
        run: A recipe with published data. Settings of a rehearsal are returned as they are.

    Raises:
        ValueError: The recipe has no published data.
        FileNotFoundError: The tokenizer cannot be fetched.
    """
    if run.model.size == "rehearsal":
        return run
    if run.data is None:
        raise ValueError(
            f"rehearse: True with {run.name}, which is small anyway; run it without --rehearse, or "
            "choose a recipe with published data, such as paravt_8b"
        )
    name = run.name + _SUFFIX
    run_dir = run.run_dir or f"runs/{name}"
    folder = pathlib.Path(f"{run_dir}-sources").absolute()
    with hosts.one_after_another():
        if not (folder / _CHOICE).exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / _CHOICE, json.dumps(_make_sources(run, run.data, folder)))
    chosen = json.loads((folder / _CHOICE).read_text())
    if hosts.is_first():
        print(f"rehearsal in {run_dir}, with {chosen['described']} in {folder}")
    fields: dict[str, Any] = {
        "run_dir": run_dir,
        "model.size": "rehearsal",
        "model.path": chosen["model"],
        "data.annotations": chosen["annotations"],
        "data.media": chosen["media"],
        "data.folder": str(folder / "set"),
    }
    for path, most in _MOST.items():
        section, _, field = path.partition(".")
        settings = getattr(run, section)
        if settings is not None:
            fields[path] = min(getattr(settings, field), most)
    return change(run, name, fields)


def mark(run: Run, folder: pathlib.Path) -> None:
    """Put a text beside a run's tokenizer, from where it gets into exported models."""
    write_atomically(folder / "tokenizer" / MARK, _TEXT.format(name=run.name))


def _make_sources(run: Run, data: DataSettings, folder: pathlib.Path) -> dict[str, str]:
    """Make what a rehearsal needs and return where it is, with a description."""
    model, weights = _choose_weights(run, folder)
    annotations, media, rows = _choose_data(data, folder)
    return {
        "model": model,
        "annotations": annotations,
        "media": media,
        "described": f"{weights}, {rows}",
    }


def _choose_weights(run: Run, folder: pathlib.Path) -> tuple[str, str]:
    """Weights that have the sizes of a rehearsal already, or new ones."""
    companions = local_folder(run.model.path, weights=False)
    wanted = qwen3_vl("rehearsal")
    if from_hf(companions / CONFIG) == wanted:
        return run.model.path, f"the small weights of {run.model.path}"
    weights = folder / "weights"
    if not weights.exists():
        model = nnx.jit(lambda: Qwen3VL(wanted, rngs=nnx.Rngs(run.seed)))()
        copy_tokenizer(run.model.path, folder / "tokenizer")
        save(model, weights, files=sorted((folder / "tokenizer").iterdir()))
    return str(weights), "random weights"


def _choose_data(data: DataSettings, folder: pathlib.Path) -> tuple[str, str, str]:
    """Annotations, media, and what they are."""
    prepared = pathlib.Path(data.folder)
    if data.questions:
        return data.annotations, data.media, f"the questions of {data.questions}"
    if (prepared / PLAN).exists():
        annotations = folder / "annotations"
        _first_rows(
            sources.fetch(data.annotations, prepared / "annotations", ["*.parquet"]), annotations
        )
        root = open_prepared(prepared).root
        return str(annotations), str(root), f"the first {_ROWS} rows per file of {prepared}"
    if _bytes(data.annotations) + _bytes(data.media) <= _SMALL:
        return data.annotations, data.media, f"all of {data.annotations} and {data.media}"
    stand_in = write_stand_in(folder / "stand-in", seed=0)
    return str(stand_in / "annotations"), str(stand_in / "media"), "a stand-in of the data"


def _first_rows(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copy the first rows of every table of a prepared set."""
    if target.exists():
        return
    with appearing(target) as unfinished:
        for table in find_tables(source):
            file = pyarrow.parquet.ParquetFile(table.path)
            first = next(file.iter_batches(_ROWS), None)
            batches = [] if first is None else [first]
            rows = pyarrow.Table.from_batches(batches, file.schema_arrow)
            pyarrow.parquet.write_table(rows, unfinished / table.path.name)


def _bytes(source: str) -> float:
    """Size of a folder or of a data set of the hub; infinity if it is not known."""
    local = pathlib.Path(source).expanduser()
    if local.is_dir():
        return sum(file.stat().st_size for file in local.rglob("*") if file.is_file())
    if not is_hub_id(source):
        return float("inf")
    try:
        info = huggingface_hub.HfApi().dataset_info(source, files_metadata=True, timeout=10)
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, httpx2.HTTPError, OSError):
        return float("inf")
    return sum(file.size or 0 for file in info.siblings or ())
