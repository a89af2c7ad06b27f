"""`--protocol lmms-eval`, with a stand-in for lmms-eval."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

import pytest

from paravt_extras.lmms_eval.pack import LmmsEvalPack
from paravt_jax.method.records import Turn
from rollout.evaluation.benchmarks import Item, VideoFolder, load
from rollout.evaluation.benchmarks.items import BrokenRow
from tests.paravt_jax.benchmarks import published
from tests.rollout.evaluation.lmms_eval import standin


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> pathlib.Path:
    return standin.install(tmp_path_factory.mktemp("environment"))


@pytest.fixture
def pack(python, tmp_path) -> Iterator[Callable[[str], LmmsEvalPack]]:
    made: list[LmmsEvalPack] = []

    def make(benchmark: str) -> LmmsEvalPack:
        made.append(LmmsEvalPack(str(python), benchmark, tmp_path / "cache"))
        return made[-1]

    yield make
    for one in made:
        one.close()


def items_of(benchmark: str, folder: pathlib.Path, rows=None) -> tuple[Item, ...]:
    published.write_split(benchmark, folder, rows or published.EXAMPLES[benchmark])
    return load(benchmark, str(folder)).items


def test_the_direct_prompt_is_lmms_evals_own(pack, tmp_path) -> None:
    made = pack("mlvu")
    assert made.wording("mlvu", "direct").system_alone["direct"] == "Be quick."
    assert made.style("mlvu", "direct") == {
        "shuffle": False,
        "temperature": 0.0,
        "turn_tokens": 16,
        "trajectory_tokens": 16,
    }
    question = "What is it?\n(A) a boat\n(B) a car"
    (item,) = items_of("mlvu", tmp_path, [published.mlvu("v.mp4", "B", question=question)])
    text = made.question("mlvu", "direct", item, (), VideoFolder(tmp_path))
    assert text == f"For all: {item.row['question']}?"
    assert made.differences("mlvu") == ["frames of this project instead of lmms-eval's video"]


def test_agents_keep_this_projects_system_turn_and_limits(pack) -> None:
    made = pack("mlvu")
    assert "crop" not in made.wording("mlvu", "agentic").system_alone["direct"]
    assert "{tools}" in made.wording("mlvu", "agentic").system["agentic"]
    assert "turn_tokens" not in made.style("mlvu", "agentic")


def test_subtitles_are_found_where_the_user_has_them(pack, tmp_path) -> None:
    (item,) = items_of("videomme_wsub", tmp_path)
    root = tmp_path / "unpacked"
    (root / "subtitle").mkdir(parents=True)
    name = pathlib.PurePosixPath(item.question.video).stem
    (root / f"{name}.mp4").write_bytes(b"film")
    (root / "subtitle" / f"{name}.srt").write_text("somebody speaks: ")
    text = pack("videomme_wsub").question("videomme_wsub", "direct", item, (), VideoFolder(root))
    assert text == f"somebody speaks: {item.row['question']}"


def test_a_row_that_cannot_be_asked_is_a_broken_row(pack, tmp_path) -> None:
    item = items_of("mlvu", tmp_path)[0]
    row = {name: value for name, value in item.row.items() if name != "question"}
    broken = Item(item.question, row=row)
    with pytest.raises(BrokenRow, match="mlvu_dev cannot ask row .*KeyError"):
        pack("mlvu").question("mlvu", "direct", broken, (), VideoFolder(tmp_path))


def test_scores_and_figures_are_lmms_evals(pack, tmp_path) -> None:
    closed, open_ended = items_of("mmvu", tmp_path)
    made = pack("mmvu")
    right = made.score("mmvu", closed, [Turn("B")])
    wrong = made.score("mmvu", closed, [])
    judged = made.score("mmvu", open_ended, [Turn("merge sort")])
    assert (right["score"], wrong["score"], judged["score"]) == (1.0, 0.0, None)
    ours = [right | {"ours": 1.0}, wrong | {"ours": 0.0}, wrong | {"ours": 1.0}]
    figures = made.figures([*ours, judged | {"ours": 0.4}])
    assert figures["lmms_eval_score"] == pytest.approx(1 / 3)
    assert figures["lmms_eval"] == {
        "version": "0.7.3",
        "task": "mmvu_val",
        "n": 3,
        "without_score": 1,
        "differ": 1,
        "metrics": {"accuracy": pytest.approx(100 / 3)},
    }
    assert made.figures([judged | {"ours": 0.4}])["lmms_eval"] == {
        "version": "0.7.3",
        "task": "mmvu_val",
        "n": 0,
        "without_score": 1,
        "differ": 0,
    }


def test_the_digest_follows_the_files_of_the_task(pack, python) -> None:
    before = pack("mlvu").digest
    (utils,) = python.parents[1].glob("lib/*/site-packages/lmms_eval/tasks/mlvu/utils.py")
    text = utils.read_text()
    utils.write_text(text + "\n# changed\n")
    try:
        assert pack("mlvu").digest != before
    finally:
        utils.write_text(text)
    assert pack("mlvu").digest == before
