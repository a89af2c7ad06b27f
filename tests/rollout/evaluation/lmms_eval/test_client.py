"""Prompts and scores that an lmms-eval in another environment gives."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator

import pytest

from paravt_extras.lmms_eval.cache import Cache
from paravt_extras.lmms_eval.client import LmmsEval, LmmsEvalError
from paravt_extras.lmms_eval.tasks import TASKS
from tests.paravt_jax.benchmarks import published
from tests.rollout.evaluation.lmms_eval import standin


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("environment")
    standin.install(folder)
    return folder


@pytest.fixture
def ask(environment, tmp_path) -> Iterator[Callable[..., LmmsEval]]:
    """ask(split) is a client of the stand-in, with a cache in the test's own folder."""
    clients: list[LmmsEval] = []

    def make(split: str) -> LmmsEval:
        python = environment / "bin" / "python"
        clients.append(LmmsEval(str(python), split, Cache(tmp_path / "cache")))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def stop_answering(client: LmmsEval, monkeypatch) -> None:
    """From now on, a question that the cache does not answer fails."""

    def fail(**request):
        raise AssertionError(f"asked again: {request['do']}")

    monkeypatch.setattr(client, "_ask", fail)


@pytest.mark.parametrize("split", sorted(set(TASKS) - {"videomme_wsub"}))
def test_each_split_has_prompts_scores_and_figures(ask, split) -> None:
    rows = published.EXAMPLES[split]
    client = ask(split)
    row = rows[0]
    (prompt,) = client.prompts(rows[:1])
    assert (row.get("caption") or row["question"]) in prompt
    right = str(row.get("answer", row.get("right_answer", row.get("correct_choice", ""))))
    if split == "cgbench":
        right = row["answer"]
    good, bad = client.score(row, f" {right}\n"), client.score(row, "none of them")
    assert (good.score, bad.score) == (1.0, 0.0)
    whole = TASKS[split].whole
    assert client.aggregate([good.result, bad.result, bad.result]) == pytest.approx(
        {TASKS[split].metric: whole / 3}
    )


def test_the_texts_for_qwen3_vl_are_taken_where_there_are_any(ask) -> None:
    (row,) = published.EXAMPLES["videomme"][:1]
    assert ask("videomme").prompts([row]) == [f"For Qwen: {row['question']}!"]
    (row,) = published.EXAMPLES["mlvu"][:1]
    assert ask("mlvu").prompts([row]) == [f"For all: {row['question']}?"]


def test_the_system_turn_and_the_limits_are_read_from_the_package(ask) -> None:
    client = ask("mlvu")
    assert client.system == "Be quick."
    assert client.version == "0.7.3"
    assert client.settings()["generation"] == {"max_new_tokens": 16}


def test_prompts_with_subtitles_read_the_files_of_the_user(ask, tmp_path) -> None:
    (tmp_path / "movie.mkv").write_bytes(b"film")
    (tmp_path / "words.srt").write_text("somebody speaks: ")
    (row,) = published.EXAMPLES["videomme_wsub"]
    name = row["videoID"]
    files = {
        f"data/{name}.mp4": tmp_path / "movie.mkv",
        f"subtitle/{name}.srt": tmp_path / "words.srt",
    }
    client = ask("videomme_wsub")
    assert client.prompts([row], [files]) == [f"somebody speaks: {row['question']}"]

    # A changed file is read again.
    (tmp_path / "words.srt").write_text("nobody does: ")
    assert client.prompts([row], [files]) == [f"nobody does: {row['question']}"]


def test_a_second_start_asks_for_nothing_again(ask, monkeypatch) -> None:
    rows = published.EXAMPLES["mlvu"]
    client = ask("mlvu")
    prompts = client.prompts(rows)
    scores = [client.score(row, "nothing") for row in rows]
    figures = client.aggregate([score.result for score in scores])
    settings = client.settings()

    second = ask("mlvu")
    stop_answering(second, monkeypatch)
    assert second.prompts(rows) == prompts
    assert [second.score(row, "nothing") for row in rows] == scores
    assert second.aggregate([score.result for score in scores]) == figures
    assert second.settings() == settings
    with pytest.raises(AssertionError, match="asked again"):
        second.score(rows[0], "another answer")


def test_threads_may_ask_side_by_side(ask) -> None:
    client = ask("mlvu")
    rows = [published.mlvu("v.mp4", "rain", question=str(number)) for number in range(40)]

    def play(row):
        return client.prompts([row]), client.score(row, row["question"]).result

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = list(threads.map(play, rows))
    for row, (prompt, result) in zip(rows, found, strict=True):
        assert prompt == [f"For all: {row['question']}?"]
        assert result["mlvu_percetion_score"]["pred_answer"] == row["question"]


def test_half_a_line_of_the_cache_is_asked_for_again(ask, tmp_path) -> None:
    rows = published.EXAMPLES["mlvu"]
    prompts = ask("mlvu").prompts(rows)
    (file,) = (tmp_path / "cache").glob("*.jsonl")
    file.write_bytes(file.read_bytes()[:-9])
    client = ask("mlvu")
    assert client.prompts(rows) == prompts
    assert ask("mlvu").prompts(rows) == prompts


def test_other_files_of_the_task_are_another_digest(ask, environment, tmp_path) -> None:
    before = ask("mlvu").digest
    assert ask("mlvu").digest == before
    other = tmp_path / "other"
    standin.install(other)
    (utils,) = other.glob("lib/*/site-packages/lmms_eval/tasks/mlvu/utils.py")
    utils.write_text(utils.read_text() + "\n# changed\n")
    with LmmsEval(str(other / "bin" / "python"), "mlvu", Cache(tmp_path)) as changed:
        assert changed.digest != before
    # Files of other tasks do not count.
    assert ask("lvbench").digest not in (before, changed.digest)


def test_a_guess_for_an_unreadable_answer_is_the_same_each_time(ask, environment, tmp_path) -> None:
    rows = [published.longvideobench(f"v_{n}", "v.mp4", 0, ["1", "2"]) for n in range(12)]
    guesses = [ask("longvideobench").score(row, "unreadable").result for row in rows]
    with LmmsEval(
        str(environment / "bin" / "python"), "longvideobench", Cache(tmp_path / "fresh")
    ) as fresh:
        assert [fresh.score(row, "unreadable").result for row in rows] == guesses
    assert len({guess["lvb_acc"]["parsed_pred"] for guess in guesses}) > 1


def test_open_questions_of_mmvu_get_no_score_because_a_judge_would_give_it(ask) -> None:
    closed, open_ended = published.EXAMPLES["mmvu"]
    client = ask("mmvu")
    assert client.score(open_ended, "merge sort").score is None
    assert "judge" in client.score(open_ended, "merge sort").reason
    assert client.score(closed, "B").score == 1.0


def test_an_answer_for_which_a_task_turns_to_a_server_has_no_score(ask) -> None:
    (row,) = published.EXAMPLES["mlvu"][:1]
    scored = ask("mlvu").score(row, "ask a judge")
    assert scored.score is None
    assert re.search(r"mlvu_dev needs a judge .*127\.0\.0\.1", scored.reason)


def with_letters(row):
    return row | {"question": "What?\n(A) a boat\n(B) a car", "answer": "B"}


@pytest.mark.parametrize(
    ("split", "changes"),
    [
        ("mlvu", {"answer": "a boat"}),
        ("mlvu", {"question": "What?"}),
        ("videomme", {"answer": "(B)"}),
        ("lvbench", {"answer": "B."}),
        ("cgbench", {"right_answer": "Red."}),
        ("mmvu", {"answer": "Merge sort"}),
    ],
)
def test_rows_without_the_letter_that_is_compared_are_misfits(ask, split, changes) -> None:
    row = with_letters(published.EXAMPLES[split][0])
    client = ask(split)
    assert client.misfit(row) == ""
    task = TASKS[split].name
    assert f"lmms-eval's {task} needs the table of stand-in/{task}" in client.misfit(row | changes)


@pytest.mark.parametrize("split", sorted(set(TASKS) - {"mlvu"}))
def test_published_rows_are_no_misfits(ask, split) -> None:
    rows = [row for row in published.EXAMPLES[split] if row.get("answer") != "(D)"]
    assert [ask(split).misfit(row) for row in rows] == [""] * len(rows)


def test_keys_of_servers_do_not_reach_lmms_eval(ask, environment, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("API_TYPE", "openai")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    (utils,) = environment.glob("lib/*/site-packages/lmms_eval/tasks/lvbench/utils.py")
    seen = utils.parent / "seen"
    before = utils.read_text()
    utils.write_text(f"{before}\nopen({str(seen)!r}, 'w').write(' '.join(os.environ))\n")
    try:
        ask("lvbench").settings()
        names = seen.read_text().split()
    finally:
        utils.write_text(before)
    assert not {"OPENAI_API_KEY", "API_TYPE", "HTTPS_PROXY"} & set(names)
    assert "HF_HUB_OFFLINE" in names


def test_a_row_that_its_functions_cannot_ask_is_named(ask) -> None:
    row = {"question_id": "7-1", "videoID": "x"}
    with pytest.raises(LmmsEvalError, match=r"videomme cannot ask row 7-1 \(KeyError: 'question'"):
        ask("videomme").prompts([row])


def test_an_answer_at_which_its_functions_fail_has_no_score(ask) -> None:
    (row,) = published.EXAMPLES["mlvu"][:1]
    scored = ask("mlvu").score(row, "leave")
    assert scored.score is None
    assert scored.reason == "SystemExit: no such file"


def test_a_split_without_a_task_is_refused_by_name(tmp_path) -> None:
    with pytest.raises(LmmsEvalError, match="no task for hourvideo; give one of .*mlvu"):
        LmmsEval(sys.executable, "hourvideo", Cache(tmp_path))


def test_an_interpreter_that_is_not_there_is_one_line(tmp_path) -> None:
    with pytest.raises(LmmsEvalError, match="^--lmms-eval-python /no/python: .*No such file.*docs"):
        LmmsEval("/no/python", "mlvu", Cache(tmp_path))


def test_a_program_that_is_no_python_is_one_line(tmp_path) -> None:
    with pytest.raises(LmmsEvalError, match="^--lmms-eval-python .*status 1") as caught:
        LmmsEval(shutil.which("false") or "false", "mlvu", Cache(tmp_path))
    assert "\n" not in str(caught.value)


def test_an_environment_without_lmms_eval_is_one_line(tmp_path) -> None:
    with pytest.raises(LmmsEvalError, match="lmms_eval is not installed there"):
        LmmsEval(sys.executable, "mlvu", Cache(tmp_path))


def test_another_version_is_one_line(tmp_path) -> None:
    python = standin.install(tmp_path / "environment", "0.6.1")
    with pytest.raises(LmmsEvalError, match="it has lmms-eval 0.6.1; install a version 0.7"):
        LmmsEval(str(python), "mlvu", Cache(tmp_path))


def test_a_version_without_the_task_is_one_line(tmp_path) -> None:
    python = standin.install(tmp_path / "environment")
    (task,) = (tmp_path / "environment").glob("lib/*/site-packages/lmms_eval/tasks/mlvu/*.yaml")
    os.remove(task)
    with pytest.raises(LmmsEvalError, match="0.7.3 has no task mlvu_dev in tasks/mlvu"):
        LmmsEval(str(python), "mlvu", Cache(tmp_path))
