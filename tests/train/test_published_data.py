"""Published data in a run: prepared once, opened, packed, and streamed with frames prefetched."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import re
from collections.abc import Iterator

import pytest

from configs.paravt_8b import paravt_8b, sft_8b
from models.features import FrameFeatures, FrameSettings, VideoFiles
from paravt_jax.data import tokenizer_file, video
from paravt_jax.data.frame_reader import FrameReader
from paravt_jax.data.preparation import LEFT_OUT
from paravt_jax.data.stored import lock
from paravt_jax.method.grpo.settings import GRPOSettings
from paravt_jax.method.protocol import Protocol, ProtocolSettings
from paravt_jax.method.records import Question, QuestionKind
from paravt_jax.processes import hosts
from rollout.agent.episode import Environment
from rollout.engine.settings import overview_tokens
from tests.paravt_jax.published_files import answered, called, rl_row, write_rl, write_sft
from train import prepare as prepare_module
from train.data import QuestionStream, hold_out, pack_rows, row_stream
from train.learn.in_flight import Player
from train.learn.rl_settings import RLSettings
from train.learn.rollouts import begin
from train.prepare import LeftOutError, main, prepare
from train.settings import DataSettings, ModelSettings, change


@pytest.fixture(scope="module")
def files(small_world, small_vocabulary, tmp_path_factory):
    """Annotations of the small world's videos, and a tokenizer. One video does not exist."""
    folder = tmp_path_factory.mktemp("published")
    paths = [video.path for video in small_world.videos]
    questions = [rl_row(paths[n % 4], f"<video>Question {'?' * n}?") for n in range(12)]
    write_rl(folder / "annotations", [*questions, rl_row("train/gone.mp4")])
    conversations = []
    for n in range(0, 8, 2):
        conversations.append(called(paths[n % 4], [(0, n + 1)]))
        conversations.append(answered(paths[(n + 1) % 4], f"What {'is it ' * (n + 1)}?"))
    write_sft(folder / "annotations", conversations, "paravt_sft_charades_12k4.parquet")
    tokenizer_file.save(small_vocabulary, folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def run(files, small_world):
    data = DataSettings(
        annotations=str(files / "annotations"),
        media=str(small_world.folder),
        folder=str(files / "set"),
        frames=4,
    )
    model = ModelSettings(path=str(files / "tokenizer"), size="8b")
    evaluation = dataclasses.replace(sft_8b().evaluation, questions=3)
    return dataclasses.replace(
        sft_8b(), data=data, model=model, evaluation=evaluation, max_left_out=0.5
    )


@pytest.fixture(scope="module")
def data(run, tmp_path_factory):
    return prepare(run, tmp_path_factory.mktemp("run"))


def test_a_run_opens_the_prepared_set(data, small_vocabulary):
    assert data.vocabulary.size == small_vocabulary.size
    assert len(data.questions) + len(data.heldout) == 12
    for most in (2048, min(data.lengths)):
        packed = pack_rows(data, most, seed=0)
        short = [n for n, tokens in enumerate(data.lengths) if tokens <= most]
        assert sorted(itertools.chain(*packed)) == short
        for row in packed:
            assert sum(conversation.tokens for conversation in data.row(row)) <= most
    with pytest.raises(ValueError, match=r"sft\.row_tokens: 7; none of 8"):
        pack_rows(data, 7, seed=0)


def test_runs_share_a_prepared_set(data, run, tmp_path, monkeypatch):
    other_rollouts = dataclasses.replace(run.protocol, pin_think=False)
    same = dataclasses.replace(run, protocol=other_rollouts)
    assert prepare(same, tmp_path).questions == data.questions
    monkeypatch.setattr(prepare_module, "fetch", None)  # the sources may be deleted
    assert prepare(run, tmp_path).questions == data.questions


def test_rows_that_are_left_out_are_printed_and_limited(data, run, tmp_path, capsys):
    shortest_four = sorted(data.lengths)[3]
    recipe = change(run, run.name, {"sft.row_tokens": shortest_four})
    prepare(recipe, tmp_path)
    assert capsys.readouterr().out.splitlines() == [
        "paravt_rl_diverse_4k4: 12 of 13 rows are used; left out: 1 missing video",
        "paravt_sft_charades_12k4: 4 of 8 rows are used; left out: 4 longer than sft.row_tokens",
    ]
    strict = change(recipe, run.name, {"max_left_out": 0.2})
    with pytest.raises(LeftOutError) as error:
        prepare(strict, tmp_path / "other")
    assert "0.2; a larger share is left out of paravt_sft_charades_12k4: 4 of" in str(error.value)


def test_a_folder_in_which_another_process_prepares_is_refused(data, run, tmp_path, monkeypatch):
    with lock(pathlib.Path(run.data.folder) / ".lock"):
        prepare(run, tmp_path)  # a finished set is only read
    other = change(run, run.name, {"data.folder": str(tmp_path / "set")})
    (tmp_path / "set").mkdir()
    with lock(tmp_path / "set" / ".lock"):
        with pytest.raises(OSError) as error:
            prepare(other, tmp_path)
    assert re.fullmatch(
        rf"{tmp_path}/set/.lock: in use by another process \(id {os.getpid()}\); wait for it.*",
        str(error.value),
    )


@pytest.fixture
def videos(data, small_model) -> Iterator[VideoFiles]:
    """The videos of the prepared set, read by a process."""
    with FrameReader(workers=1) as reader:
        yield VideoFiles(data.root, reader, FrameSettings(), small_model.config.vision)


def test_row_batches_continue_exactly_and_their_frames_are_prefetched(data, videos, late_reads):
    def fresh():
        return row_stream(data, pack_rows(data, 2048, seed=0), videos, seed=3, rows=1)

    rows = fresh()
    batches = list(itertools.islice(rows, 3))
    state = json.loads(json.dumps(rows.get_state()))
    expected = list(itertools.islice(rows, 4))
    again = fresh()
    again.set_state(state)
    assert list(itertools.islice(again, 4)) == expected
    # Frames of the first batch were prefetched: reading them starts no new work.
    late = late_reads()
    clips = [clip for n in batches[0] for c in data.row(n) for clip in c.clips]
    for clip in clips:
        read = videos.read(clip.path, clip.indices)
        assert set(clip.indices) <= set(videos.wait(read).indices)
    assert late_reads() == late


def test_question_batches_continue_exactly_and_their_overviews_are_prefetched(
    data, videos, late_reads
):
    """Each step but the first of a process finds what the one before it has prefetched."""
    budgets = {0: [2, 3], 1: [4, 1], 2: [2, 2], 3: [1, 3], 4: [3, 3], 5: [1, 1], 6: [2, 1]}

    def late_overviews(batch, step):
        """Number of a batch's overviews that were not prefetched."""
        late = late_reads()
        for question, frames in zip(batch, budgets[step], strict=True):
            assert len(videos.wait(videos.read(question.video, frames)).frames) == frames
        return late_reads() - late

    def fresh():
        return QuestionStream(data, videos, 3, 2, budgets.__getitem__)

    questions = fresh()
    before = [questions.draw(step) for step in range(2)]
    assert late_overviews(before[1], 1) == 0
    state = json.loads(json.dumps(questions.get_state()))
    after = [questions.draw(step) for step in range(2, 5)]
    again = fresh()
    again.set_state(state)
    for step, batch in enumerate(after, 2):
        assert again.draw(step) == batch
        assert step == 2 or late_overviews(batch, step) == 0
    heldout = {question.id for question in data.heldout}
    assert heldout.isdisjoint(question.id for batch in before + after for question in batch)


def test_processes_prefetch_the_overviews_of_rollouts_that_they_play(
    data, small_model, small_world, monkeypatch
):
    """Of 8 prompts x 6 rollouts, 16 hosts play 3 each: half a group."""
    prefetched: set[int] = set()

    class Files(VideoFiles):
        def ahead(self, name, wanted, crop=False):
            assert isinstance(wanted, int)
            prefetched.add(wanted)

    settings = RLSettings(steps=1, prompts=8, grpo=GRPOSettings(group_size=6))
    features = FrameFeatures(
        small_model.vision, small_model.config, FrameSettings(), small_world.folder, source=video
    )
    environment = Environment(Protocol(data.vocabulary, ProtocolSettings()), features)
    files = Files(data.root, video, FrameSettings(), small_model.config.vision)
    # Every prompt has a budget of its own, by which it is found.
    budgets = {0: [*range(10, 18)], 1: [*range(20, 28)]}
    monkeypatch.setattr(hosts, "process_count", lambda: 16)
    for process in range(16):
        monkeypatch.setattr(hosts, "process_index", lambda process=process: process)
        prefetched.clear()
        drawn = QuestionStream(data, files, 3, 6, budgets.__getitem__).draw(0)
        groups = begin(drawn, settings, 0, 0)
        Player(environment, 0.7).deal(groups, now=0)
        played = {
            group.number
            for group in groups
            if any(flight.process == process for flight in group.flights)
        }
        assert played
        assert {prompt for prompt in range(8) if budgets[1][prompt] in prefetched} == played


def test_questions_that_leave_no_room_for_frames_are_left_out_by_name(run, tmp_path, capsys):
    def prepared(text_tokens):
        limits = dataclasses.replace(run.protocol, text_tokens=text_tokens)
        recipe = dataclasses.replace(run, sft=None, rl=paravt_8b().rl, protocol=limits)
        data = prepare(recipe, tmp_path)
        return data.vocabulary, (*data.questions, *data.heldout)

    vocabulary, questions = prepared(1216)
    assert "text_tokens" not in capsys.readouterr().out
    rules = Protocol(vocabulary, run.protocol)
    lengths = {question.id: len(rules.question(question).ids) for question in questions}
    limit = sorted(lengths.values())[len(lengths) // 2]
    too_long = {id for id, length in lengths.items() if length > limit}
    assert 0 < len(too_long) < 12

    system = overview_tokens(rules, 0, 0, 0.0)
    _, remaining = prepared(system + limit)
    assert lengths.keys() - {question.id for question in remaining} == too_long
    printed = capsys.readouterr().out
    assert f"{len(too_long)} longer than protocol.text_tokens, 1 missing video" in printed
    with pytest.raises(LeftOutError, match=r"longer than protocol\.text_tokens, .* raise a limit"):
        prepared(system)


def test_held_out_questions_are_whole_videos_and_stay_the_same():
    questions = tuple(
        Question(f"{video}:{n}", f"{video}.mp4", "a", QuestionKind.OPEN_ENDED, "b")
        for video in range(20)
        for n in range(3)
    )
    training, heldout = hold_out(questions, 7)
    heldout_videos = {question.video for question in heldout}
    assert len(heldout) == 9
    assert heldout_videos.isdisjoint(question.video for question in training)
    assert {*training, *heldout} == {*questions}
    _, of_reversed = hold_out(questions[::-1], 7)
    assert {question.video for question in of_reversed} == heldout_videos
    _, of_fewer = hold_out(tuple(q for q in questions if q.video in heldout_videos), 4)
    assert {question.video for question in of_fewer} < heldout_videos
    assert hold_out(questions, 0) == (questions, ())
    with pytest.raises(ValueError, match=r"evaluation\.questions: 2 of 3"):
        hold_out(questions[:3], 2)  # all three are on one video


def test_the_command_prepares_and_prints_the_summary(data, run, files, capsys):
    arguments = ["--config=sft_8b", "--model.path", run.model.path]
    for field in ("annotations", "media", "folder", "frames"):
        arguments += [f"--data.{field}", str(getattr(run.data, field))]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert str(files / "set" / LEFT_OUT) in printed
    assert "paravt_rl_diverse_4k4: 12 of 13 rows are used; left out: 1 missing video" in printed
    assert main([*arguments, "--max-left-out", "0.05"]) == 1
    assert "of paravt_rl_diverse_4k4: 12 of 13 rows are used" in capsys.readouterr().err
    assert main([*arguments, "--data.frames", "8"]) == 1
    assert "frames: 4 -> 8" in capsys.readouterr().err
    elsewhere = ["--config=sft_8b", "--data.folder", "new", "--data.annotations=./typo"]
    assert main([*elsewhere, "--model.path=owner/none"]) == 1
    assert "./typo: neither a folder" in capsys.readouterr().err
    assert main(["--config=paravt_tiny"]) == 1
    assert "paravt_tiny: " in capsys.readouterr().err


@pytest.mark.parametrize(("field", "value"), [("frames", 0), ("media", ""), ("folder", "")])
def test_settings_that_cannot_work_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"data.{field}: "):
        DataSettings(**{field: value})
