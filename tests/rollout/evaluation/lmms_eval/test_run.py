"""`rollout.evaluate --protocol lmms-eval`, with a scripted model and a stand-in for lmms-eval."""

from __future__ import annotations

import json
import pathlib

import pytest

from models.weights.hf import save
from paravt_extras.prompt_packs import open_pack
from paravt_jax.method.records import Question, QuestionKind
from paravt_jax.world.vocabulary import save_tokenizer as save_vocabulary
from rollout import evaluate as command
from rollout.engine.requests import SampleStop
from rollout.evaluation import run as evaluation
from rollout.evaluation.folder import read_json
from rollout.evaluation.packs import PackError
from rollout.evaluation.split import Player
from tests.paravt_jax.benchmarks import published
from tests.rollout.conftest import Cut
from tests.rollout.evaluation.lmms_eval import standin
from tests.rollout.evaluation.lmms_eval.test_real import real_python

OPTIONS = "\n(A) a red car\n(B) a blue car\n(C) a boat\n(D) nothing"
ROWS = [
    published.mlvu(f"w{number % 2}.mp4", "C", question=f"{number}?{OPTIONS}") for number in range(4)
]
AGENTIC = "x\n</think>\n<answer>C</answer>"


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> pathlib.Path:
    return standin.install(tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="module")
def model(small_model, small_vocabulary, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_vocabulary(small_vocabulary.tokenizer, folder / "tokenizer")
    save(small_model, folder / "model", files=sorted((folder / "tokenizer").iterdir()))
    return folder / "model"


@pytest.fixture
def evaluate(python, model, player, videos, monkeypatch, capsys, tmp_path):
    """evaluate(said, *flags) plays MLVU; returns the exit code, what was printed, and the player's
    settings and sampler."""

    def play(said, *flags, rows=ROWS):
        published.write_split("mlvu", tmp_path / "split", rows)
        seen = {}

        def scripted(settings, folder, where, reader, subtitled, stack, pack, devices, replicas):
            made = player([said], prompt=settings.prompt)
            environment = made.environment
            wording = pack.wording(settings.benchmark, settings.prompt)
            environment.protocol.wording = wording
            seen["settings"], seen["sampler"] = settings, player.sampler
            return Player(player.sampler, environment, settings, where, pack=pack)

        monkeypatch.setattr(evaluation, "load_player", scripted)
        code = command.main(
            [
                *("--model", str(model), "--benchmark", "mlvu", "--data"),
                *(str(tmp_path / "split"), "--videos", str(videos), "--out", str(tmp_path / "out")),
                *("--frames", "4", "--protocol", "lmms-eval", "--lmms-eval-python", str(python)),
                *flags,
            ]
        )
        return code, capsys.readouterr().err, seen

    return play


def test_the_model_answers_directly_and_is_scored_by_both(evaluate, tmp_path) -> None:
    code, printed, seen = evaluate("C")
    assert code == 0, printed
    settings = seen["settings"]
    assert (settings.prompt, settings.turn_tokens, settings.temperature) == ("direct", 16, 0.0)
    assert settings.episode_settings().dispatch == "none"
    summary = read_json(tmp_path / "out" / "summary.json")
    assert summary["accuracy"] == 1.0
    assert summary["lmms_eval_score"] == 1.0
    assert summary["lmms_eval"]["metrics"] == {"mlvu_percetion_score": 100.0}
    assert "by lmms-eval's own functions: 100.0 (mlvu_dev, 4 answers)" in printed


def test_rows_that_lmms_eval_could_never_score_right_are_left_out(evaluate, tmp_path) -> None:
    """The publisher's own files have the text of an option as the answer."""
    rows = [*ROWS[:1], published.mlvu("w0.mp4", "a boat"), published.mlvu("w1.mp4", "C")]
    code, printed, _ = evaluate("C", rows=rows)
    assert code == 0, printed
    summary = read_json(tmp_path / "out" / "summary.json")
    assert (summary["n"], summary["left_out"]["broken"]["questions"]) == (1, 2)
    assert (summary["accuracy"], summary["lmms_eval_score"]) == (1.0, 1.0)
    assert "lmms-eval's mlvu_dev needs the table of stand-in/mlvu_dev, with letters" in printed


def test_the_report_counts_answers_that_the_two_score_differently(evaluate, tmp_path) -> None:
    """The stand-in takes an answer as it is written; this project finds the letter in it."""
    code, printed, _ = evaluate("(C)")
    assert code == 0, printed
    summary = read_json(tmp_path / "out" / "summary.json")
    assert (summary["accuracy"], summary["lmms_eval_score"]) == (1.0, 0.0)
    assert summary["lmms_eval"]["differ"] == 4
    assert "(mlvu_dev, 4 answers); 4 of 4 questions differ" in printed


def test_an_answer_that_needs_a_judge_does_not_end_the_run(evaluate, tmp_path) -> None:
    code, printed, _ = evaluate("ask a judge")
    assert code == 0, printed
    summary = read_json(tmp_path / "out" / "summary.json")
    assert (summary["n"], summary["lmms_eval"]["without_score"]) == (4, 4)


def test_prompts_are_those_of_lmms_eval(evaluate, small_vocabulary) -> None:
    _, _, seen = evaluate("C")
    prompts = [small_vocabulary.decode(request.ids) for request in seen["sampler"].asked]
    assert all(prompt.startswith("<|im_start|>system\nBe quick.<|im_end|>\n") for prompt in prompts)
    endings = {prompt.rpartition("<|vision_end|>")[2] for prompt in prompts}
    assert endings == {
        f"For all: {n}?{OPTIONS}?<|im_end|>\n<|im_start|>assistant\n" for n in range(4)
    }


def test_an_answer_that_was_cut_off_is_scored_as_it_stands(evaluate, tmp_path) -> None:
    """lmms-eval reads whatever was generated; this project counts no answer that was cut off."""
    evaluate(Cut("C or so", SampleStop.LENGTH))
    (line, *_) = (tmp_path / "out" / "questions.jsonl").read_text().splitlines()
    assert json.loads(line)["read"] is None
    result = json.loads(line)["protocol_score"]["result"]["mlvu_percetion_score"]
    assert result["pred_answer"] == "C or so"


def test_agents_can_be_asked_in_lmms_evals_words(evaluate, small_vocabulary, tmp_path) -> None:
    code, printed, seen = evaluate(AGENTIC, "--prompt", "agentic")
    assert code == 0, printed
    assert seen["settings"].turn_tokens == 2048
    prompt = small_vocabulary.decode(seen["sampler"].asked[0].ids)
    assert "crop_video" in prompt
    assert f"For all: 0?{OPTIONS}?" in prompt
    assert read_json(tmp_path / "out" / "summary.json")["lmms_eval_score"] == 1.0


def test_a_second_start_asks_lmms_eval_for_nothing(evaluate, monkeypatch, tmp_path) -> None:
    evaluate("C", "--limit", "2")
    before = (tmp_path / "out" / "lmms_eval-0.jsonl").read_bytes()
    evaluate("C", "--limit", "2")
    assert (tmp_path / "out" / "lmms_eval-0.jsonl").read_bytes() == before
    _, _, seen = evaluate("C")
    assert len(seen["sampler"].asked) == 2
    assert read_json(tmp_path / "out" / "summary.json")["lmms_eval"]["n"] == 4


def test_another_version_of_the_task_is_another_evaluation(evaluate, python) -> None:
    evaluate("C", "--limit", "2")
    (utils,) = python.parents[1].glob("lib/*/site-packages/lmms_eval/tasks/mlvu/utils.py")
    text = utils.read_text()
    utils.write_text(text + "\n# changed\n")
    try:
        code, printed, _ = evaluate("C")
    finally:
        utils.write_text(text)
    assert code == 2
    assert "protocol_digest" in printed


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--turn-tokens", "99"), "--turn-tokens 99: --protocol lmms-eval plays with 16"),
        (("--shuffle",), "--shuffle True: --protocol lmms-eval plays with False"),
        (("--temperature", "0.7"), "--temperature 0.7: --protocol lmms-eval plays with 0.0"),
        (("--protocol", "own"), ": --protocol own does not use it; leave it out"),
        (("--lmms-eval-python", ""), "--lmms-eval-python is missing: "),
        (("--lmms-eval-python", "/no/python"), "--lmms-eval-python /no/python: "),
    ],
)
def test_what_does_not_belong_together_is_one_line(evaluate, flags, words) -> None:
    code, printed, _ = evaluate("C", *flags)
    assert code == 2
    assert words in printed.strip().splitlines()[-1]


def test_own_questions_have_no_task_of_lmms_eval(python, model, videos, tmp_path) -> None:
    settings = evaluation.BenchmarkSettings(
        str(model), videos=str(videos), pack="lmms-eval", lmms_eval_python=str(python)
    )
    question = Question("1", "w0.mp4", "What follows?", QuestionKind.OPEN_ENDED, "rain")
    with pytest.raises(PackError, match="lmms-eval has no task for own questions"):
        evaluation.evaluate(settings, [question], pack=open_pack(settings, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--prompt", "agentic", "--turn-tokens", "24")])
def test_lmms_eval_itself_asks_and_scores_a_run_of_the_engine(
    flags, model, videos, tmp_path, capsys
) -> None:
    text = "What follows?\n(A) a cat\n(B) a dog\n(C) a hat\n(D) rain"
    rows = [published.mlvu(f"w{n % 2}.mp4", "ABCD"[n], question=f"{n}. {text}") for n in range(4)]
    published.write_split("mlvu", tmp_path / "split", rows)
    arguments = [
        *("--model", str(model), "--benchmark", "mlvu", "--data", str(tmp_path / "split")),
        *("--videos", str(videos), "--out", str(tmp_path / "out"), "--frames", "4"),
        *("--protocol", "lmms-eval", "--lmms-eval-python", real_python(), *flags),
    ]
    code = command.main(arguments)
    printed = capsys.readouterr().err
    assert code == 0, printed
    summary = read_json(tmp_path / "out" / "summary.json")
    assert summary["n"] == 4
    assert summary["lmms_eval"]["n"] == 4
    assert summary["lmms_eval"]["version"].startswith("0.7.")
    assert 0 <= summary["lmms_eval_score"] <= 1
    with capsys.disabled():
        print("\n" + printed[-600:])

    lines = (tmp_path / "out" / "questions.jsonl").read_bytes()
    assert command.main(arguments) == 0
    assert (tmp_path / "out" / "questions.jsonl").read_bytes() == lines
