"""Training on your own questions: from Python and from a file, as docs/data.md says."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest
from flax import nnx

from models.model import VisionLanguageModel
from models.qwen3_vl.dialect import DIALECT
from models.weights.hf import save
from paravt_jax.data import preparation, tokenizer_file
from paravt_jax.data.preparation import LEFT_OUT, OWN
from paravt_jax.method.protocol import ProtocolSettings
from paravt_jax.method.records import Question, QuestionKind
from paravt_jax.world import text as world_text
from paravt_jax.world.vocabulary import world_vocabulary
from train.model import model_config
from train.prepare import LeftOutError, prepare
from train.settings import DataSettings, EvaluationSettings, ModelSettings, Run


@pytest.fixture(scope="module")
def base(small, tmp_path_factory) -> pathlib.Path:
    """A small Qwen3-VL with its tokenizer, as a folder that `model.path` takes."""
    folder = tmp_path_factory.mktemp("base")
    vocabulary = world_vocabulary(ProtocolSettings(), DIALECT)
    tokenizer_file.save(vocabulary, folder / "tokenizer")
    config = model_config(small.small(), vocabulary)
    files = sorted((folder / "tokenizer").iterdir())
    save(
        nnx.jit(lambda: VisionLanguageModel(config, rngs=nnx.Rngs(0)))(),
        folder / "model",
        files=files,
    )
    return folder / "model"


@pytest.fixture(scope="module")
def recipe(small, base) -> Run:
    """RL from the base model in seconds, without data yet."""
    run = small.small()
    assert run.rl is not None
    return dataclasses.replace(
        run,
        name="own",
        model=ModelSettings(path=str(base), size="tiny"),
        data=DataSettings(),
        world=None,
        text=None,
        align=None,
        sft=None,
        rl=dataclasses.replace(run.rl, steps=2, frame_budgets=(4,)),
        evaluation=EvaluationSettings(
            questions=1, frames=(4,), dispatch=("parallel",), temperatures=(0.7,)
        ),
    )


@pytest.fixture(scope="module")
def questions(small_world) -> list[Question]:
    """The small world's questions as a file can hold them: letters as answers of choice, and no
    evidence."""

    def as_in_a_file(question: Question) -> Question:
        question = dataclasses.replace(question, evidence=None)
        if not question.options:
            return question
        letter = "ABCDEFGH"[question.options.index(question.answer)]
        return dataclasses.replace(question, answer=letter)

    found = world_text.questions(small_world.videos, world_text.TextSettings())
    return [as_in_a_file(question) for question in found]


def as_row(question: Question) -> dict[str, Any]:
    """A line of a file of questions."""
    row: dict[str, Any] = {
        "id": question.id,
        "video": question.video,
        "question": question.text,
        "kind": str(question.kind),
        "answer": question.answer,
    }
    if question.options:
        row["options"] = list(question.options)
    return row


@pytest.fixture
def at_home(small_world, tmp_path, monkeypatch) -> pathlib.Path:
    """A working directory with the folder `videos`."""
    (tmp_path / "videos").symlink_to(small_world.folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def data_of(run: Run, questions: str = "", heldout: int = 64) -> Run:
    data = DataSettings(media="videos", questions=questions)
    evaluation = dataclasses.replace(run.evaluation, questions=heldout)
    return dataclasses.replace(run, data=data, evaluation=evaluation)


def test_questions_of_a_file_are_split_by_video(recipe, questions, small_world, at_home):
    lines = [json.dumps(as_row(question)) + "\n" for question in questions]
    (at_home / "my.jsonl").write_text("".join(lines))
    run = data_of(recipe, questions="my.jsonl", heldout=2)
    data = prepare(run, at_home / "run")
    assert {*data.questions, *data.heldout} == {*questions}
    assert data.sizes == ((32, 32),)
    assert len(data.heldout) >= 2
    assert {q.video for q in data.questions}.isdisjoint(q.video for q in data.heldout)
    # A video has one name, however a question spells it.
    places = ["./", f"{small_world.folder.resolve()}/", *[""] * len(questions)]
    spelled = [dataclasses.replace(q, video=places.pop(0) + q.video) for q in questions]
    given = prepare(data_of(recipe, heldout=2), at_home / "other", questions=spelled)
    assert (given.questions, given.heldout) == (data.questions, data.heldout)


def test_questions_that_cannot_be_used_are_left_out_and_counted(recipe, questions, at_home, capsys):
    kind = QuestionKind.TEMPORAL_GROUNDING
    reversed_span = Question("reversed", questions[0].video, "When?", kind, "[20, 10]")
    lost = dataclasses.replace(questions[0], id="lost", video="gone.mp4")
    asked = [*questions, reversed_span, lost]
    run = dataclasses.replace(data_of(recipe, heldout=0), max_left_out=0.9)
    data = prepare(run, at_home / "run", questions=asked)
    assert set(data.questions) == set(questions)
    assert "1 impossible answer, 1 missing video" in capsys.readouterr().out
    lines = (at_home / "run" / OWN / LEFT_OUT).read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["reversed", "lost"]
    with pytest.raises(LeftOutError, match="max_left_out: 0.01; .* questions: .*missing video"):
        prepare(dataclasses.replace(run, max_left_out=0.01), at_home / "run", questions=asked)
    # Not that a held-out question would leave none.
    with pytest.raises(LeftOutError, match="1 missing video"):
        prepare(data_of(recipe, heldout=1), at_home / "few", questions=[questions[0], lost])


def test_a_run_continues_only_with_the_same_questions(recipe, questions, at_home, monkeypatch):
    run = data_of(recipe, heldout=0)
    first = prepare(run, at_home / "run", questions=questions)
    monkeypatch.delattr(preparation, "Workers")  # a second start does not check the videos again
    again = prepare(run, at_home / "run", questions=questions)
    assert (again.questions, again.digest) == (first.questions, first.digest)
    edited = [dataclasses.replace(questions[0], text="What else?"), *questions[1:]]
    with pytest.raises(ValueError, match="run/questions holds a set"):
        prepare(run, at_home / "run", questions=edited)


def test_questions_that_cannot_be_trained_on_are_refused(recipe, questions, at_home, small):
    twice = [Question("twice", "a.mp4", "What?", QuestionKind.OPEN_ENDED, "that")] * 2
    cases = [
        (data_of(recipe), twice, "id 'twice'"),
        (data_of(recipe), questions, "evaluation.questions: 64"),
        (small.small(), questions, "data is not set"),
    ]
    for run, asked, message in cases:
        with pytest.raises(ValueError, match=message):
            prepare(run, at_home / "run", questions=asked)
