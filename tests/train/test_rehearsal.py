"""Rehearsals: cut settings, sources that are chosen once, and the whole road under signals."""

from __future__ import annotations

import json
import pathlib
import signal

import pyarrow.parquet
import pytest
from flax import nnx

import paravt_extras.plan.command
import train.run
from benchmarks.killing import environment
from benchmarks.rehearsal import MOMENTS, RUN, Setting, finish, interrupt, serve
from configs import RECIPES
from configs.paravt_8b import paravt_8b
from configs.paravt_tiny import paravt_tiny
from models.model import VisionLanguageModel
from models.qwen3_vl.sizes import SIZES
from models.weights.hf import save
from models.weights.hf_config import from_hf
from paravt_extras.rehearsal import MARK, mark
from paravt_extras.report.page import write_report
from paravt_extras.stand_in import write_stand_in
from paravt_jax.data.preparation import find_tables
from paravt_jax.world.vocabulary import save_tokenizer
from train.durable.metrics import read_metrics
from train.durable.run_directory import RunDirectory, RunDirectoryError
from train.prepare import main as prepare
from train.run import begin, resolved
from train.settings import Run, change


@pytest.fixture(scope="module")
def weights(small_vocabulary, tmp_path_factory) -> pathlib.Path:
    """Weights that have the sizes of a rehearsal."""
    folder = tmp_path_factory.mktemp("weights")
    save_tokenizer(small_vocabulary.tokenizer, folder / "tokenizer")
    model = nnx.jit(lambda: VisionLanguageModel(SIZES["rehearsal"](), rngs=nnx.Rngs(0)))()
    save(model, folder / "model", files=sorted((folder / "tokenizer").iterdir()))
    return folder / "model"


@pytest.fixture(scope="module")
def small_set(tmp_path_factory) -> pathlib.Path:
    """Annotations and media that are small enough to be used as they are."""
    return write_stand_in(tmp_path_factory.mktemp("set"), seed=3)


def rehearsed(run: Run, weights: pathlib.Path, folder: pathlib.Path, **sources: str) -> Run:
    """A recipe, as a user asks for its rehearsal in a folder without anything."""
    data = {f"data.{name}": value for name, value in sources.items()}
    given = {"model.path": str(weights), "run_dir": str(folder / "run"), "rehearse": True}
    return change(run, run.name, {"data.folder": str(folder / "prepared")} | given | data)


@pytest.mark.parametrize("name", [name for name in RECIPES if name.endswith("_8b")])
def test_sizes_are_cut_and_the_recipe_stays(name, weights, tmp_path):
    real = RECIPES[name]()
    run = begin(rehearsed(real, weights, tmp_path))
    assert run.name == f"{real.name}-rehearsal" and run.model.size == "rehearsal"
    assert (run.sft is None, run.rl is None) == (real.sft is None, real.rl is None)
    assert run.hosts == real.hosts
    assert run.frames.max_pixels < real.frames.max_pixels
    if real.sft is not None and run.sft is not None:
        assert run.sft.steps < real.sft.steps
        assert run.sft.optimizer == real.sft.optimizer
    if real.rl is not None and run.rl is not None:
        assert run.rl.steps < real.rl.steps
        assert (run.rl.grpo, run.rl.rewards) == (real.rl.grpo, real.rl.rewards)
        longest = run.rl_shape.trajectory
        assert 0 < longest <= run.engine_sizes.row_lengths[-1]


def test_smaller_settings_are_kept(weights, tmp_path):
    asked = change(paravt_8b(), "paravt_8b", {"rl.steps": 1, "evaluation.questions": 2})
    run = begin(rehearsed(asked, weights, tmp_path))
    assert run.rl is not None and run.rl.steps == 1
    assert run.evaluation.questions == 2


def test_a_recipe_of_the_small_world_has_no_rehearsal():
    with pytest.raises(ValueError, match="rehearse: True with paravt_tiny"):
        begin(change(paravt_tiny(), "paravt_tiny", {"rehearse": True}))


@pytest.mark.parametrize(
    "command",
    [train.run.main, prepare, paravt_extras.plan.command.main],
    ids=["check", "prepare", "plan"],
)
def test_only_a_run_rehearses(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    check = ["--check"] if command is train.run.main else []
    assert command(["--config=paravt_8b", "--rehearse", *check]) != 0
    assert "rehearse" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_weights_of_another_size_are_replaced_by_random_ones(assets, tmp_path):
    run = begin(rehearsed(paravt_8b(), assets / "qwen3_vl", tmp_path))
    made = pathlib.Path(run.model.path)
    assert made.is_relative_to(tmp_path)
    assert from_hf(made / "config.json") == SIZES["rehearsal"]()
    tokenizer = (assets / "qwen3_vl" / "tokenizer.json").read_bytes()
    assert (made / "tokenizer.json").read_bytes() == tokenizer


def test_a_small_source_is_used_as_it_is(weights, small_set, tmp_path):
    sources = {name: str(small_set / name) for name in ("annotations", "media")}
    run = begin(rehearsed(paravt_8b(), weights, tmp_path, **sources))
    assert run.data is not None
    assert {"annotations": run.data.annotations, "media": run.data.media} == sources


def prepare_small_set(
    small_set: pathlib.Path, weights: pathlib.Path, folder: pathlib.Path
) -> dict[str, str]:
    """Prepare the small set for `rehearsed` in a folder, and return its sources."""
    sources = {name: str(small_set / name) for name in ("annotations", "media")}
    options = ["--data.annotations", sources["annotations"], "--data.media", sources["media"]]
    options += ["--data.folder", str(folder / "prepared"), "--model.path", str(weights)]
    assert prepare(["--config=paravt_8b", "--model.size", "rehearsal", *options]) == 0
    return sources


def test_the_first_rows_of_a_prepared_set_are_used(weights, small_set, tmp_path):
    sources = prepare_small_set(small_set, weights, tmp_path)
    run = begin(rehearsed(paravt_8b(), weights, tmp_path, **sources))
    assert run.data is not None and run.data.annotations != sources["annotations"]
    for table in find_tables(pathlib.Path(run.data.annotations)):
        cut = pyarrow.parquet.read_table(table.path)
        whole = pyarrow.parquet.read_table(small_set / "annotations" / table.path.name)
        assert cut.equals(whole.slice(0, 32))
    assert run.data.folder != str(tmp_path / "prepared")


def test_without_data_there_is_a_stand_in_and_the_choice_is_kept(weights, tmp_path, capsys):
    asked = rehearsed(paravt_8b(), weights, tmp_path)
    run = begin(asked)
    assert run.data is not None
    assert pathlib.Path(run.data.annotations).is_relative_to(tmp_path / "run-sources")
    # Tests are offline.
    assert "a stand-in of the data (ParaVT/ParaVT-Parquet: " in capsys.readouterr().out
    assert begin(asked) == run


def test_other_sources_for_a_rehearsal_that_has_begun_are_refused(weights, tmp_path):
    begin(rehearsed(paravt_8b(), weights, tmp_path))
    with pytest.raises(ValueError, match="(?s)run-sources was made for other.*model.path"):
        begin(rehearsed(paravt_8b(), tmp_path / "others", tmp_path))


def test_a_source_that_does_not_exist_is_refused(weights, tmp_path):
    with pytest.raises(FileNotFoundError, match="/nowhere: neither a folder"):
        begin(rehearsed(paravt_8b(), weights, tmp_path, annotations="/nowhere"))


def test_a_prepared_set_without_its_annotations_gives_a_stand_in(
    weights, small_set, tmp_path, capsys
):
    prepare_small_set(small_set, weights, tmp_path)
    gone = {"annotations": "/gone", "media": str(small_set / "media")}
    run = begin(rehearsed(paravt_8b(), weights, tmp_path, **gone))
    assert run.data is not None
    assert pathlib.Path(run.data.media).is_relative_to(tmp_path / "run-sources")
    assert "a stand-in of the data (/gone: " in capsys.readouterr().out


def test_a_rehearsal_cannot_be_continued_as_a_real_run(weights, tmp_path):
    run = begin(rehearsed(paravt_8b(), weights, tmp_path))
    RunDirectory(run.run_dir, resolved(run)).close()
    pathlib.Path(run.run_dir, "metrics.jsonl").touch()
    real = change(paravt_8b(), "paravt_8b", {"run_dir": run.run_dir})
    with pytest.raises(RunDirectoryError, match="rehears"):
        RunDirectory(run.run_dir, resolved(real))


def test_the_report_and_the_export_say_that_it_is_a_rehearsal(weights, tmp_path):
    run = begin(rehearsed(paravt_8b(), weights, tmp_path))
    folder = tmp_path / "run"
    (folder / "tokenizer").mkdir(parents=True)
    mark(run, folder)
    assert run.name in (folder / "tokenizer" / MARK).read_text()
    for rehearse in (True, False):
        config = resolved(run) | {"rehearse": rehearse}
        (folder / "config.json").write_text(json.dumps(config))
        assert ("A rehearsal:" in write_report(folder).read_text()) == rehearse


@pytest.fixture
def optimised(monkeypatch):
    """Without the flags of tests/conftest.py: a rehearsal computes more than it compiles."""
    monkeypatch.delenv("XLA_FLAGS")


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_a_killed_rehearsal_goes_on(assets, tmp_path):
    """The literal command, against a stand-in of the hub; benchmarks.rehearsal kills all phases."""
    tokenizer = assets / "qwen3_vl"
    (learning,) = [moment for moment in MOMENTS if moment.phase == "PARA-GRPO"]
    place = tmp_path / "place"
    place.mkdir()
    with serve(tmp_path / "served", tokenizer) as hub:
        variables = environment(tmp_path / "compiled") | hub.variables(tmp_path / "hub")
        one = Setting(str(tokenizer), devices=1)
        interrupt(one, place, variables, learning, signal.SIGKILL)
        finish(one, place, variables)
    steps = [(line["phase"], line["step"]) for line in read_metrics(place / RUN / "metrics.jsonl")]
    assert steps == [(phase, step) for phase in ("sft", "rl") for step in (1, 2, 3, 4)]
    assert (place / RUN / "model" / MARK).exists()
    assert "A rehearsal:" in (place / RUN / "report.html").read_text()
