"""The recipes of the published data: prepared by one command, opened by a run, packed and read ahead."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import cast

import jax
import numpy as np
import pytest

from configs.paravt_8b import paravt_8b
from configs.sft import sft_8b
from models.features import FrameFeatures, FrameSettings
from models.sharding import make_mesh
from paravt_jax.data import sources
from paravt_jax.data.frame_reader import FrameReader, ReaderSettings
from paravt_jax.data.frames import overview_indices
from paravt_jax.data.preparation import LEFT_OUT
from paravt_jax.method.protocol import Protocol, ProtocolSettings
from paravt_jax.method.records import Question, QuestionKind
from paravt_jax.world.vocabulary import save_tokenizer
from rollout.engine.sizing import overview_tokens
from tests.paravt_jax.published_files import answered, called, rl_row, write_rl, write_sft
from train.data import pack_rows, question_stream, row_stream
from train.durable import hosts
from train.learn.optimizer import OptimizerSettings
from train.learn.sft import SFTBatches, SFTSettings
from train.prepare import main, prepare
from train.published_data import DataSettings, hold_out
from train.run import resolved
from train.unreadable import UnreadableVideosError


@pytest.fixture(scope="module")
def files(small_world, small_vocabulary, tmp_path_factory):
    """Annotations of the small world's videos, one of which is not there, and a tokenizer's folder."""
    folder = tmp_path_factory.mktemp("published")
    paths = [v.path for v in small_world.videos]
    write_rl(
        folder / "annotations",
        [rl_row(paths[n % 4], f"<video>Question {'?' * n}?") for n in range(12)]
        + [rl_row("train/gone.mp4")],
    )
    rows = [
        answered(paths[n % 4], f"What {'is it ' * n}?")
        if n % 2
        else called(paths[n % 4], [(0, n + 1)])
        for n in range(8)
    ]
    write_sft(folder / "annotations", rows, "paravt_sft_charades_12k4.parquet")
    save_tokenizer(small_vocabulary.tokenizer, folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def run(files, small_world):
    folders = str(files / "annotations"), str(small_world.folder), str(files / "set")
    data, recipe = DataSettings(*folders, frames=4, heldout=3, workers=1), sft_8b()
    model = dataclasses.replace(recipe.model, path=str(files / "tokenizer"))
    return dataclasses.replace(recipe, data=data, model=model, unreadable_share=0.2)


@pytest.fixture(scope="module")
def data(run, tmp_path_factory):
    return prepare(run, tmp_path_factory.mktemp("run"))


def test_a_run_opens_what_was_prepared(data, run, small_vocabulary, tmp_path, monkeypatch):
    assert data.vocabulary.size == small_vocabulary.size
    assert len(data.questions) + len(data.heldout) == 12 and len(data.heldout) >= 3
    assert not {q.video for q in data.questions} & {q.video for q in data.heldout}
    packing = pack_rows(data, 2048, seed=0)
    assert sorted(n for row in packing.rows for n in row) == list(range(8)) and not packing.left_out
    for row in packing.rows:
        assert sum(c.tokens for c in data.row(row)) <= 2048
    same = dataclasses.replace(run, protocol=dataclasses.replace(run.protocol, pin_think=False))
    assert (
        prepare(same, tmp_path).questions == data.questions
    )  # a recipe that differs in rollouts alone shares the set
    monkeypatch.setattr(sources, "fetch", None)
    assert prepare(run, tmp_path).questions == data.questions  # its sources may be gone
    with pytest.raises(ValueError, match="prepared otherwise.*\n  frames: 4 -> 5\n"):
        prepare(dataclasses.replace(run, data=dataclasses.replace(run.data, frames=5)), tmp_path)
    with pytest.raises(
        UnreadableVideosError,
        match=r"1 of 21 rows have files .*1 missing video.*left_out.jsonl.*--unreadable-share 0.01",
    ):
        prepare(dataclasses.replace(run, unreadable_share=0.01), tmp_path)


def test_rows_come_in_order_with_their_frames_ahead_and_go_on_exactly(data, small_world):
    def fresh(reader):
        return row_stream(data, pack_rows(data, 2048, seed=0), reader, seed=3, rows=1)

    with FrameReader(ReaderSettings(workers=1)) as reader:
        rows = fresh(reader)
        batches = list(itertools.islice(rows, 3))
        state = json.loads(json.dumps(rows.get_state()))
        expected = list(itertools.islice(rows, 4))
        again = fresh(reader)
        again.set_state(state)
        assert list(itertools.islice(again, 4)) == expected
        late = reader.late
        for (numbers,) in batches[:1]:
            for conversation in data.row(numbers):
                for clip in conversation.clips:
                    assert reader.read(small_world.folder / clip.path, clip.indices).shape[
                        0
                    ] == len(clip.indices)
        assert reader.late == late


def test_questions_come_in_order_with_their_overviews_ahead_and_go_on_exactly(data, small_world):
    """K of a step is the step's, also where a run goes on in the middle."""
    ks = {0: [2, 3], 1: [4, 1], 2: [2, 2], 3: [1, 3], 4: [3, 3], 5: [1, 1], 6: [2, 1]}

    def look(reader, batch, step):
        late = reader.late
        for question, k in zip(batch, ks[step], strict=True):
            path = small_world.folder / question.video
            info = reader.probe(path)
            assert len(reader.read(path, overview_indices(info.frames, k))) == k
        return reader.late - late

    def fresh(reader, first):
        return question_stream(data, reader, 3, 2, ks.__getitem__, first)

    with FrameReader(ReaderSettings(workers=1)) as reader:
        questions = fresh(reader, 0)
        before = [next(questions) for _ in range(2)]
        assert [look(reader, batch, step) for step, batch in enumerate(before)] == [0, 0], (
            "each was asked for ahead"
        )
        state = json.loads(json.dumps(questions.get_state()))
        after = [next(questions) for _ in range(3)]
    with FrameReader(ReaderSettings(workers=1)) as reader:
        again = fresh(reader, 2)
        again.set_state(state)
        found = []
        for step in (2, 3, 4):
            found.append(next(again))
            assert look(reader, found[-1], step) == 0
        assert found == after
    assert {q.id for q in data.heldout}.isdisjoint(q.id for batch in before + after for q in batch)


def test_a_process_reads_ahead_what_is_its_own(data, monkeypatch):
    asked: list[str] = []

    class Reader:
        def ahead(self, path, wanted):
            asked.append(path.name)

    monkeypatch.setattr(hosts, "share_of", lambda count: slice(count // 2, count))
    batch = next(
        question_stream(
            data, cast(FrameReader, Reader()), 3, 4, lambda step: [1, 2, 3, 4], 0, depth=0
        )
    )
    assert asked == [q.video.rpartition("/")[2] for q in batch[2:]]
    asked.clear()
    packing, reader = pack_rows(data, 2048, seed=0), cast(FrameReader, Reader())
    rows = next(row_stream(data, packing, reader, seed=3, rows=2, depth=0))
    assert asked == [
        clip.path.rpartition("/")[2]
        for numbers in rows[1:]
        for c in data.row(numbers)
        for clip in c.clips
    ]


def test_questions_that_leave_no_room_for_frames_are_left_out_by_name(run, tmp_path, capsys):

    def prepared(text_tokens):
        limits = dataclasses.replace(run.protocol, text_tokens=text_tokens)
        return prepare(
            dataclasses.replace(run, sft=None, rl=paravt_8b().rl, protocol=limits), tmp_path
        )

    whole = prepared(1216)
    assert "left out" not in capsys.readouterr().out
    rules = Protocol(whole.vocabulary, run.protocol)
    lengths = {q.id: len(rules.question(q).ids) for q in (*whole.questions, *whole.heldout)}
    limit = sorted(lengths.values())[len(lengths) // 2]
    system = overview_tokens(rules, 0, 0, 0.0)
    cut = prepared(system + limit)
    long = {id for id, length in lengths.items() if length > limit}
    assert 0 < len(long) < 12
    assert {q.id for q in (*whole.questions, *whole.heldout)} - {
        q.id for q in (*cut.questions, *cut.heldout)
    } == long
    said = capsys.readouterr().out
    assert (
        f"{len(long)} questions are left out; they have more than the {limit} tokens of protocol.text_tokens"
        in said
    )
    with pytest.raises(
        ValueError,
        match=rf"protocol\.text_tokens: {system}; .* no training question fits .* give at least {system + min(lengths.values())}",
    ):
        prepared(system)


def test_steps_of_the_cold_start_are_packed_rows_that_go_on_exactly(
    data, small_model, small_world, tmp_path
):
    """Files that are gone leave padding, and are named once, as they stand in the rows."""
    settings = SFTSettings(9, 1, OptimizerSettings(), row_tokens=2048)
    rules, frames = (
        Protocol(data.vocabulary, ProtocolSettings()),
        FrameSettings(min_pixels=1024, max_pixels=1024, batch=8),
    )

    def batches(reader, root):
        features = FrameFeatures(
            small_model.vision, small_model.config, frames, root, source=reader
        )
        there = dataclasses.replace(data, root=root)
        return SFTBatches(settings, there, reader, 3, rules, features, make_mesh()), features

    with FrameReader(ReaderSettings(workers=1, min_pixels=1024, max_pixels=1024)) as reader:
        one, _ = batches(reader, small_world.folder)
        next(one)
        state = json.loads(json.dumps(one.get_state()))
        batch, (packed,), figures = next(one)
        assert figures == {"missing": 0} and reader.late == 0
        assert (
            float(batch.tokens) == np.asarray(packed.sampled).sum() > 0
            and np.asarray(packed.visual).any()
        )
        again, _ = batches(reader, small_world.folder)
        again.set_state(state)
        for found, wanted in zip(
            jax.tree.leaves(next(again)[0]), jax.tree.leaves(batch), strict=True
        ):
            assert (np.asarray(found) == np.asarray(wanted)).all()
        gone, features = batches(reader, tmp_path)
        gone.set_state(state)
        with pytest.raises(
            ValueError,
            match=f"no conversation whose files can be read; check the data root {tmp_path}",
        ):
            next(gone)
        assert features.unreadable.keys() <= {v.path for v in small_world.videos} and set(
            features.unreadable.values()
        ) == {"no such file"}


def test_conversations_longer_than_a_row_are_left_out_by_name(data, capsys):
    shortest = min(data.lengths)
    packing = pack_rows(data, shortest, seed=0)
    long = [n for n, tokens in enumerate(data.lengths) if tokens > shortest]
    assert list(packing.left_out) == long and 0 < len(long) < 8
    said = capsys.readouterr().out
    assert (
        f"{len(long)} conversations are left out; they have more than the {shortest} tokens" in said
    )
    assert f"{data.conversations[long[0]].id} ({data.lengths[long[0]]})" in said
    with pytest.raises(ValueError, match=r"sft\.row_tokens: 7; none of 8 conversations fits"):
        pack_rows(data, 7, seed=0)


def test_what_reads_the_files_is_no_part_of_a_runs_settings(run):
    other = dataclasses.replace(run, data=dataclasses.replace(run.data, workers=7, deadline=9.0))
    assert resolved(other) == resolved(run)
    assert resolved(
        dataclasses.replace(run, data=dataclasses.replace(run.data, fps=2.0))
    ) != resolved(run)


def test_held_out_questions_are_whole_videos_and_stay_the_same():
    questions = tuple(
        Question(f"{v}:{n}", f"{v}.mp4", "a", QuestionKind.OPEN_ENDED, "b")
        for v in range(20)
        for n in range(3)
    )
    kept, heldout = hold_out(questions, 7)
    assert len(heldout) == 9 and not {q.video for q in kept} & {q.video for q in heldout}
    assert hold_out(questions[::-1], 7)[1] != () and {
        q.video for q in hold_out(questions[::-1], 7)[1]
    } == {q.video for q in heldout}
    assert hold_out(questions, 0) == (questions, ())
    with pytest.raises(
        ValueError,
        match=r"data\.heldout: 2 of 3 questions, which leaves none to train on; hold fewer out",
    ):
        hold_out(questions[:3], 2)  # all on one video
    assert sorted(q.id for q in (*kept, *heldout)) == sorted(q.id for q in questions)


def test_the_command_prepares_and_prints_the_summary(data, run, files, capsys):
    arguments = ["--config=sft_8b", "--model.path", run.model.path, "--data.workers", "1"]
    for field in ("annotations", "media", "folder", "frames"):
        arguments += [f"--data.{field.replace('_', '-')}", str(getattr(run.data, field))]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert f"20 of 21 rows kept; what is left out, and why: {files / 'set' / LEFT_OUT}" in out
    assert main([*arguments, "--data.frames", "8"]) == 1
    assert "prepared otherwise" in capsys.readouterr().err
    assert main(["--config=paravt_tiny"]) == 1
    assert "paravt_tiny: renders its own world" in capsys.readouterr().err


def test_the_large_recipes_start_from_the_published_data():
    for recipe in (sft_8b(), paravt_8b()):
        assert (
            recipe.data == DataSettings(heldout=0 if recipe.rl is None else 64)
            and recipe.model.path == "Qwen/Qwen3-VL-8B-Instruct"
        )
    with pytest.raises(ValueError, match="give model.path"):
        dataclasses.replace(sft_8b(), model=dataclasses.replace(sft_8b().model, path=""))


IMPOSSIBLE = [
    ("frames", 0),
    ("heldout", -1),
    ("workers", -1),
    ("fps", 0),
    ("deadline", np.nan),
    ("media", ""),
]


@pytest.mark.parametrize(("field", "value"), IMPOSSIBLE)
def test_settings_that_cannot_work_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"data.{field}: "):
        DataSettings(**{field: value})
