"""All episodes of a run or an evaluation: found on disk, shown, compared and exported."""

from __future__ import annotations

import json
import socket

import pytest

pytest.importorskip("starlette", reason="needs the extra serve")

from starlette.testclient import TestClient

from paravt_jax.data.stored import write_checked_json
from paravt_jax.method.protocol import render_call
from paravt_jax.method.records import Author, CropCall
from paravt_jax.method.rewards import RewardSettings, frugal_reward
from rollout.agent.episode import EpisodeSettings, play
from rollout.agent.transcript import transcript
from rollout.engine.requests import run
from rollout.evaluation.folder import FolderError, read_heads
from rollout.evaluation.statistics import interval_of_difference
from rollout.view.__main__ import Settings, Viewer, main, open_folders
from rollout.view.atif import trajectory
from rollout.view.change import changes
from rollout.view.index import Folder
from tests.browser import opened, served
from tests.rollout.evaluation import finished
from tests.turns import score

HOSTILE = 'a"], "answer": "<script>alert(1)</script>", "turns": [ü'
CALLS = "".join(map(render_call, (CropCall(0, 16), CropCall(500, 516))))
TURNS = [f"look closer\n</think>\n{CALLS}", "it is seven\n</think>\n<answer>seven</answer>"]
ALONE = [f"seen\n</think>\n<answer>{HOSTILE}</answer>"]


@pytest.fixture(scope="module")
def episodes(scripted, small_environment, small_questions):
    """Two questions at K = 4 and 16, one with crops and one without, with their transcripts."""
    vocabulary, played = small_environment.protocol.vocabulary, []
    for question, turns in zip(small_questions, (TURNS, ALONE), strict=False):
        for k in (4, 16):
            setting = EpisodeSettings(k, 0.7)
            (episode,) = run(scripted(turns), [play(small_environment, question, setting, 0)])
            rewards = score(question, episode.turns, RewardSettings())
            record = transcript(episode, rewards, setting, vocabulary)
            played.append((episode, json.loads(json.dumps(record))))
    return played


def write_lines(file, records, **fields):
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record | fields, ensure_ascii=False) + "\n" for record in records]
    file.write_text("".join(lines) + '{"half')
    return lines


@pytest.fixture(scope="module")
def run_dir(episodes, small_world, tmp_path_factory):
    """A finished run: each episode before, at a step of, and after RL."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    records = [record for _, record in episodes]
    phases = [{"phase": "before", "step": 0}, {"phase": "rl", "step": 8}, {"phase": "after"}]
    write_lines(folder / "episodes.jsonl", [r | phase for phase in phases for r in records])
    (folder / "videos").symlink_to(small_world.folder)
    return folder


@pytest.fixture(scope="module")
def client(run_dir):
    return TestClient(Viewer([Folder(run_dir, "mine")]).app(), base_url="http://127.0.0.1")


def test_each_line_is_found_by_its_key_and_read_without_its_turns(run_dir):
    lines = [json.loads(line) for line in (run_dir / "episodes.jsonl").read_text().split("\n")[:-1]]
    folder = Folder(run_dir, "mine")
    assert [folder.record(row.key) for row in folder.rows()] == lines
    heads = [head for _, head, turns in read_heads(run_dir / "episodes.jsonl", "question") if turns]
    left_out = ("turns", "overview")
    assert heads == [{n: x for n, x in line.items() if n not in left_out} for line in lines]
    for row, line in zip(folder.rows(), lines, strict=True):
        assert (row.k, row.split, row.stop) == (line["k"], line["phase"], line["stop"])
        assert (row.calls, row.turns) == ((1, 2) if len(line["turns"]) == 2 else (0, 1))
        assert row.reward == line["rewards"]["total"]


def test_a_run_that_goes_on_shows_its_evaluations_and_what_it_writes_since(episodes, tmp_path):
    def write(step):
        (tmp_path / "evaluation").mkdir(exist_ok=True)
        shown = [record | {"phase": "rl", "step": step} for _, record in episodes]
        content = {"phase": "rl", "step": step, "rows": [], "episodes": shown}
        write_checked_json(tmp_path / f"evaluation/rl-{step:06d}.json", content)

    write(8)
    folder = Folder(tmp_path, "a")
    assert [(row.step, row.calls) for row in folder.rows()] == [(8, 1), (8, 1), (8, 0), (8, 0)]
    write(16)
    assert folder.record(folder.rows()[-1].key)["step"] == 16


def test_the_last_answer_to_each_question_of_each_benchmark_counts(episodes, tmp_path):
    record = episodes[0][1] | {"calls": 1, "turn_count": 2, "content": "c"}
    again = record | {"rewards": {"total": 9.0}}
    for benchmark in ("mvbench", "mlvu"):
        write_lines(tmp_path / benchmark / "questions.jsonl", [{"content": "c", "left_out": "x"}])
        write_lines(tmp_path / benchmark / "questions-1.jsonl", [record, again])
        config = {"identity": {"benchmark": benchmark}}
        (tmp_path / benchmark / "config.json").write_text(json.dumps(config))
    folder = Folder(tmp_path, "a")
    assert [(row.split, row.reward) for row in folder.rows()] == [("mlvu", 9.0), ("mvbench", 9.0)]
    assert folder.record(folder.rows()[1].key) == again


def test_a_mistake_ends_the_command_with_one_line(run_dir, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        for mistake in (
            [str(tmp_path)],
            [str(run_dir), "--port", port],
            [str(run_dir), "--port", "70000"],
            [str(run_dir), "--atif", str(tmp_path / "missing" / "all.jsonl")],
        ):
            assert main(mistake) == 1
            assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(FolderError, match="no episodes"):
        open_folders(Settings(str(tmp_path)))


def evaluation(path, scores, **fields):
    """An evaluation with a question for each score, three about each video."""
    lines = [
        finished.line(n, score, **{"video": f"{n // 3}.mp4", **fields})
        for n, score in enumerate(scores)
    ]
    return Folder(finished.folder(path, lines, k=lines[0]["k"]), path.name)


def test_scores_are_compared_on_the_questions_that_two_folders_have(tmp_path):
    first = evaluation(tmp_path / "a", [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    second = evaluation(tmp_path / "b", [1.0, 1.0, 0.0, 1.0, 0.0, 0.0], k=16)
    ends = interval_of_difference([0.0, 1.0, 0.0, 1.0, 0.0, 0.0], [*"aaabbb"])
    low, high = (f"{100 * end:+.1f}" for end in ends)
    setting = "videomme, mcq, K = 16, parallel, temperature 0.0"
    change = f"{setting}: +33.3 [{low}, {high}] on 6 questions"
    assert [*changes(first, second)] == ["videomme: k 64 → 16", change]


@pytest.mark.parametrize("other", [{"video": "w.mp4"}, {"question": {"text": "Who?"}}])
def test_other_questions_under_one_id_are_not_compared(other, tmp_path):
    first, second = evaluation(tmp_path / "a", [1.0]), evaluation(tmp_path / "b", [0.0], **other)
    assert not [*changes(first, second)]


def test_the_last_evaluation_of_a_run_is_compared_for_each_k(episodes, tmp_path, capsys):
    """Evaluations before it and rollouts of training are not."""
    for name, accuracy in (("a", 0.5), ("b", 1.0)):
        wrong = [("before", 0, 0.0), ("rl", 9, 0.0)]
        lines = [
            record | {"phase": phase, "step": step, "rewards": {"accuracy": score}}
            for phase, step, score in [("after", 8, accuracy), *wrong]
            for _, record in episodes
        ]
        write_lines(tmp_path / name / "episodes.jsonl", lines)
    output = ["--atif", str(tmp_path / "all.jsonl")]
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), *output]) == 0
    shown = capsys.readouterr().err.splitlines()
    settings = [f"evaluation, mcq, K = {k}, parallel, temperature 0.7" for k in (16, 4)]
    assert [line.partition(" [")[0] for line in shown] == [f"{s}: +50.0" for s in settings]


def test_an_episode_is_drawn_and_its_texts_are_escaped(client, run_dir):
    rows = Folder(run_dir, "mine").rows()
    page = client.get("/data/episode", params={"key": rows[2].key}).text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "<script" not in page
    assert client.get("/data/rows").json()["rows"] == [list(row) for row in rows]


@pytest.mark.parametrize("path", ["/data/episode?key=mine/../../x:0", "/..%2fatif.py", "/atif.py"])
def test_nothing_else_is_sent(client, path):
    assert client.get(path).status_code == 404
    assert client.get("/", headers={"host": "site.example"}).status_code == 403


def test_videos_are_read_in_the_named_folders_only(run_dir, small_world):
    """The link in the run's folder leads out of it."""
    key = Folder(run_dir, "mine").rows()[0].key
    for videos, pictures in (((), 0), ((str(small_world.folder),), 4 + 8)):
        page = Viewer([Folder(run_dir, "mine")], videos).static_page([key])
        assert page.count("<img") == pictures
        assert ("none of the named folders" in page) == (not pictures)


def test_a_selection_is_one_page_or_lines_of_atif(client, run_dir):
    keys = [row.key for row in Folder(run_dir, "mine").rows()]
    chosen = {"keys": "\r\n".join(keys[1:3])}
    page = client.post("/data/selection.html", data=chosen).text
    assert page.count('<details class="episode"') == 2
    assert "<script" not in page and "default-src 'none'" in page
    lines = client.post("/data/selection.atif.jsonl", data=chosen).text.splitlines()
    assert [json.loads(line)["trajectory_id"] for line in lines] == keys[1:3]


def test_atif_has_the_sampled_tokens_of_all_agents(episodes):
    episode, record = episodes[0]
    main_agent = trajectory(record, "e")
    agents = {each["trajectory_id"]: each for each in main_agent["subagent_trajectories"]}
    first, second = main_agent["steps"][1:]
    (call, refused), results = first["tool_calls"], first["observation"]["results"]
    assert call["arguments"] == {"start_time": 0.0, "end_time": 16.0}
    assert refused["tool_call_id"] not in agents, "outside the video"
    (reference,) = results[0]["subagent_trajectory_ref"]
    (subagent,) = agents.values()
    assert reference == {"trajectory_id": subagent["trajectory_id"]}
    assert (first["reasoning_content"], second["message"]) == (
        "look closer",
        "<answer>seven</answer>",
    )
    outcome = episode.turns[0].calls[0]
    wanted = [s for s in episode.trajectory.segments if s.author is Author.MODEL]
    wanted.append(outcome.subagent.segments[1])
    for step, segment in zip([first, second, subagent["steps"][1]], wanted, strict=True):
        assert step["metrics"]["completion_token_ids"] == segment.ids.tolist()
        assert step["metrics"]["logprobs"] == segment.logprobs.tolist()


def test_harbors_own_models_accept_it(episodes):
    models = pytest.importorskip("harbor.models.trajectories", reason="Python 3.12 and harbor")
    old = json.loads(json.dumps(episodes[0][1]))
    for part in (*old["turns"], *(token for turn in old["turns"] for token in turn["tokens"])):
        part.pop("id", part.pop("text", None)) if "tokens" in part else part.pop("id")
    for record in [record for _, record in episodes] + [old]:
        written = json.loads(json.dumps(trajectory(record, "e")))
        read = models.Trajectory.model_validate(written)
        assert read.schema_version == "ATIF-v1.7"
        assert json.loads(read.model_dump_json(exclude_unset=True)) == written


def test_rewards_that_do_not_count_are_not_shown(episodes, small_environment):
    episode, record = episodes[0]
    assert "tool" in record["rewards"]
    rewards = score(episode.question, episode.turns, frugal_reward(), anchor_weight=0.0)
    setting, vocabulary = EpisodeSettings(4, 0.7), small_environment.protocol.vocabulary
    shown = transcript(episode, rewards, setting, vocabulary)["rewards"]
    assert set(shown) == {"accuracy", "format", "total"}


@pytest.mark.slow  # starts a browser
def test_the_page_in_a_browser(browser, episodes, run_dir, tmp_path):
    """Filters, keys, links, the same question side by side, and two runs."""
    other = [record | {"phase": "after"} for _, record in episodes]
    other[0] = other[0] | {"rewards": {"total": 9.0, "accuracy": 1.0}}
    write_lines(tmp_path / "other/episodes.jsonl", other)
    app = Viewer([Folder(run_dir, "mine"), Folder(tmp_path / "other", "other")]).app()
    phone = {"width": 390, "height": 844}
    with served(app) as address, opened(browser, address, viewport=phone) as page:
        page.wait_for_selector("#rows tr")
        assert page.locator("#rows tr").count() == 16
        assert page.locator("#list li").count() == 2  # changes of the score, for each K
        page.keyboard.press("/")
        page.keyboard.type("script")
        assert page.locator("#rows tr").count() == 8
        page.goto(f"{address}?k=4&folder=mine&sort=-reward")
        page.wait_for_selector("#rows tr")
        rewards = page.locator("#rows .reward").all_inner_texts()
        assert len(rewards) == 6 and rewards == sorted(rewards, reverse=True)
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_selector(".episode .tokens")
        assert page.locator("#place").inner_text() == "2 of 6"
        page.locator("#same td a").last.click()
        page.wait_for_selector("#cards > :nth-child(2) .tokens")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        link = page.url
        page.keyboard.press("Escape")
        assert page.locator("#rows tr").count() == 6
        page.goto(link)
        page.wait_for_selector("#cards > :nth-child(2) .tokens")
        page.goto(f"{address}?change=better")
        page.wait_for_selector("#rows tr")
        assert page.locator("#rows tr").count() == 2
        with page.expect_download() as saved:
            page.get_by_text("Save as ATIF").click()
        assert len(saved.value.path().read_text().splitlines()) == 2
