"""A rehearsal: every phase of a run on published data, in minutes.

    python -m train.run --config=paravt_8b --rehearse

Recipe, tokenizer, protocol, phases, mesh, processes and files are those of the run. Widths, depths,
lengths and steps are cut, and weights are random. It learns nothing, but what would stop the run
later stops the rehearsal now.

Its data are the first rows of the prepared set, if there is one; else the sources as they are, if
they are small; else a stand-in that is made from a seed (`paravt_extras.stand_in`).
"""

from __future__ import annotations

import json
import pathlib
from typing import Any, TypedDict

import pyarrow
import pyarrow.parquet
from flax import nnx

from models.family import family
from models.model import VisionLanguageModel
from models.weights.folder import CONFIG, local_folder
from models.weights.hf import save
from models.weights.hf_config import from_hf
from paravt_extras.fit import rows_of
from paravt_extras.stand_in import write_stand_in
from paravt_jax.data import sources
from paravt_jax.data.atomic import appearing, write_atomically
from paravt_jax.data.hub import data_set_size, is_hub_id
from paravt_jax.data.local_path import require_local
from paravt_jax.data.preparation import PLAN, find_tables, open_prepared
from paravt_jax.data.stored_json import read_json
from paravt_jax.data.stored_settings import require_same
from paravt_jax.processes import cluster, hosts
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
    "frames.cache_mib": 64,
    "frames.min_pixels": 1024,
    "frames.max_pixels": 4096,
    "frames.crop_min_pixels": 1024,
    "frames.crop_max_pixels": 4096,
    "frames.processor_min_pixels": 2048,
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
    "engine.read_tokens": 8192,
    "evaluation.questions": 4,
    "evaluation.samples": 1,
    "evaluation.format_rollouts": 4,
}
_SMALL = 64 * 2**20  # bytes of a source that is used as it is
_ROWS = 32  # rows of each file of a prepared set
_CHOICE = "sources.json"  # what was asked for, and what was chosen
_WEIGHTS = "weights"
_TEXT = """\
This model comes from {name}, a rehearsal: its weights are random and its sizes are cut.
It shows that a run gets from its first phase to its export, and nothing else.
"""


def rehearsal(run: Run) -> Run:
    """Make the weights and the data of a rehearsal, and return its settings.

    They are made once, in a folder beside that of the run.

    Args:
        run: A recipe with published data.

    Raises:
        ValueError: The recipe has no published data, or the folder was made for other settings.
        FileNotFoundError: The tokenizer cannot be fetched, or a source of data does not exist.
    """
    small = cut(run)
    folder = pathlib.Path(f"{small.run_dir}-sources").absolute()
    chosen = hosts.from_first(lambda: _choose_once(run, folder))
    cluster.require_shared(folder)
    if chosen["model"] == str(folder / _WEIGHTS):
        _make_weights(run, folder)
    if hosts.is_first():
        print(f"rehearsal in {small.run_dir}, with {chosen['described']} in {folder}")
    fields = {
        "model.path": chosen["model"],
        "data.annotations": chosen["annotations"],
        "data.media": chosen["media"],
        "data.folder": str(folder / "set"),
    }
    return change(small, small.name, fields)


def cut(run: Run) -> Run:
    """The settings of a rehearsal before its weights and data are known. Makes nothing.

    Raises:
        ValueError: The recipe has no published data.
    """
    if run.data is None:
        raise ValueError(
            f"rehearse: True with {run.name}, which has no published data and needs no rehearsal; "
            "leave --rehearse out"
        )
    require_local("rehearse: True with run_dir", run.run_dir)
    name = run.name + _SUFFIX
    fields: dict[str, Any] = {
        "run_dir": run.run_dir or f"runs/{name}",
        "model.size": "rehearsal",
        # The mesh is that of the run, whose batches have more rows.
        "mesh.rows": run.mesh.rows or rows_of(run),
        # Rows that are too long for the cut lengths say nothing about the run.
        "data.max_left_out": 1.0,
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


class _Chosen(TypedDict):
    model: str
    annotations: str
    media: str
    described: str


class _Sources(TypedDict):
    asked: dict[str, Any]
    chosen: _Chosen


def _choose_once(run: Run, folder: pathlib.Path) -> dict[str, str]:
    """What a rehearsal reads, with a description. A resumed one reads the same."""
    assert run.data is not None
    asked = {
        "model.path": run.model.path,
        "data.annotations": run.data.annotations,
        "data.media": run.data.media,
        "data.folder": run.data.folder,
        "data.questions": run.data.questions,
        "seed": run.seed,
    }
    file = folder / _CHOICE
    if not file.exists():
        model, weights = _choose_weights(run, folder)
        annotations, media, rows = _choose_data(run.data, folder)
        chosen = {
            "model": model,
            "annotations": annotations,
            "media": media,
            "described": f"{weights}, and {rows},",
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps({"asked": asked, "chosen": chosen}))
    stored = read_json(file, _Sources, f"delete {folder} and rehearse anew")
    require_same(
        f"rehearse: {folder} was made for other settings",
        stored["asked"],
        asked,
        "Delete it and the folder of the rehearsal, or use its settings.",
    )
    return stored["chosen"]


def _choose_weights(run: Run, folder: pathlib.Path) -> tuple[str, str]:
    """Weights that have the sizes of a rehearsal already, or new ones; and what they are."""
    companions = local_folder(run.model.path, weights=False)
    if from_hf(companions / CONFIG) == family(run.model.family).size("rehearsal"):
        return run.model.path, f"the small weights of {run.model.path}"
    return str(folder / _WEIGHTS), "random weights"


def _make_weights(run: Run, folder: pathlib.Path) -> None:
    """Save random weights with the tokenizer of the run. All processes take part."""
    if hosts.from_first((folder / _WEIGHTS).exists):
        return
    tokenizer = folder / "tokenizer"
    hosts.from_first(lambda: copy_tokenizer(run.model.path, tokenizer))
    config = family(run.model.family).size("rehearsal")
    model = nnx.jit(lambda: VisionLanguageModel(config, rngs=nnx.Rngs(run.seed)))()
    save(model, folder / _WEIGHTS, files=sorted(tokenizer.iterdir()))


def _choose_data(data: DataSettings, folder: pathlib.Path) -> tuple[str, str, str]:
    """Return annotations, media and a description of both."""
    if data.questions:
        return data.annotations, data.media, f"the questions of {data.questions}"
    prepared = pathlib.Path(data.folder)
    reason = ""
    if (prepared / PLAN).exists():
        try:
            source = sources.fetch(data.annotations, prepared / "annotations", ["*.parquet"])
        except FileNotFoundError as error:
            # The run itself goes on: it needs the prepared set only.
            reason = str(error)
        else:
            _first_rows(source, folder / "annotations")
            root = open_prepared(prepared).root
            rows = f"the first {_ROWS} rows of each file of {prepared}"
            return str(folder / "annotations"), str(root), rows
    reason = reason or _why_not_all(data.annotations) or _why_not_all(data.media)
    if not reason:
        return data.annotations, data.media, f"all of {data.annotations} and {data.media}"
    stand_in = write_stand_in(folder / "stand-in", seed=0)
    rows = f"a stand-in of the data ({reason})"
    return str(stand_in / "annotations"), str(stand_in / "media"), rows


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


def _why_not_all(source: str) -> str:
    """Why a rehearsal does not use all of a source of data; empty if it does.

    Raises:
        FileNotFoundError: There is no such source, so the run itself would stop.
    """
    local = pathlib.Path(source).expanduser()
    if local.is_dir():
        size = sum(file.stat().st_size for file in local.rglob("*") if file.is_file())
    elif "://" in source:
        return f"{source} is a bucket"
    elif not is_hub_id(source):
        raise FileNotFoundError(
            f"{source}: neither a folder nor a hub id (owner/name); give one of these"
        )
    else:
        try:
            size = data_set_size(source)
        except ConnectionError as error:
            return str(error)
    return "" if size <= _SMALL else f"{source} has {size / 1e9:.1f} GB"
