from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import av
import numpy as np
import pytest

from paravt_jax.data import video
from paravt_jax.world import videos as world


def test_events_obey_the_rules_of_the_world():
    videos = world.plan(world.WorldSettings(train_videos=200, heldout_videos=50))
    present = [scene for v in videos for scene in v.scenes if scene.digit is not None]
    assert {scene.digit for scene in present} == set(range(10)) and {
        scene.colour for scene in present
    } == set(world.COLOURS)
    assert 0.85 <= len(present) / (4 * len(videos)) <= 0.95
    for v in videos:
        assert [(s.start, s.end) for s in v.scenes] == [(0, 32), (32, 64), (64, 96), (96, 128)]
        assert len({s.colour for s in v.scenes}) == 4
        digits = [s.digit for s in v.scenes if s.digit is not None]
        assert len(digits) >= 2 and len(set(digits)) == len(digits)
    for scene in present:
        assert scene.start <= scene.first and scene.last < scene.end
        assert 2 <= scene.last - scene.first <= 4
        assert scene.first // world.WINDOW == scene.last // world.WINDOW


def test_a_video_depends_on_seed_split_and_number_only():
    few, more = (world.plan(world.WorldSettings(train_videos=n, heldout_videos=2)) for n in (2, 5))
    assert world.of_split(few, "train") == world.of_split(more, "train")[:2]
    assert world.of_split(few, "heldout") == world.of_split(more, "heldout")
    assert (
        world.plan(world.WorldSettings(seed=1, train_videos=2, heldout_videos=2))[0].scenes
        != few[0].scenes
    )
    assert world.of_split(few, "train")[0].scenes != world.of_split(few, "heldout")[0].scenes


def test_files_show_what_was_planned(small_world):
    for v in small_world.videos:
        frames = video.read(small_world.folder / v.path, range(world.FRAMES)).astype(int)
        for scene in v.scenes:
            for time in range(scene.start, scene.end, world.STEP):
                planned = world.picture(small_world.settings, scene, scene.shows(time))
                assert (
                    np.abs(frames[time // world.STEP] - planned).mean() < 8
                )  # what coding changes
                bright = (frames[time // world.STEP].min(axis=-1) > 180).sum()
                assert (bright > 30) == scene.shows(time)


def test_coding_loses_nothing(small_world):
    """x264 was seen to write other bytes for the same frames, once in a thousand times: what a run learns from may not depend on it."""
    v = small_world.videos[0]
    with av.open(str(small_world.folder / v.path)) as container:
        read = [frame.to_ndarray() for frame in container.decode(video=0)]
    for scene in v.scenes:
        for time in range(scene.start, scene.end, world.STEP):
            drawn = av.VideoFrame.from_ndarray(
                world.picture(small_world.settings, scene, scene.shows(time)), format="rgb24"
            )
            np.testing.assert_array_equal(
                read[time // world.STEP], drawn.reformat(format="yuv420p", threads=1).to_ndarray()
            )


def test_colours_stay_apart_after_coding(small_world):
    seen = {}
    for v in small_world.videos:
        frames = video.read(small_world.folder / v.path, [s.start // world.STEP for s in v.scenes])
        for scene, frame in zip(v.scenes, frames, strict=True):
            seen[scene.colour] = frame[0, 0].astype(int)
    for name, pixel in seen.items():
        nearest = min(
            world.COLOURS, key=lambda other: np.abs(np.array(world.COLOURS[other]) - pixel).sum()
        )
        assert nearest == name


def test_rendering_goes_on_where_it_was_interrupted(tmp_path):
    settings = world.WorldSettings(train_videos=2, heldout_videos=1)

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        world.render(settings, tmp_path, interrupt)
    first = tmp_path / "train/0000.mp4"
    written, pictures = first.stat().st_mtime_ns, video.read(first, range(world.FRAMES)).astype(int)
    assert not (tmp_path / world.MANIFEST).exists()
    progress = []
    videos = world.render(settings, tmp_path, lambda done, total: progress.append((done, total)))
    assert first.stat().st_mtime_ns == written and progress == [(1, 3), (2, 3), (3, 3)]
    assert not list(tmp_path.rglob("*.tmp"))
    assert videos == world.plan(settings)
    listed = json.loads((tmp_path / world.MANIFEST).read_text())["videos"]
    assert [video["path"] for video in listed] == [video.path for video in videos]
    first.unlink()
    (tmp_path / world.MANIFEST).unlink()
    world.render(settings, tmp_path)
    again = video.read(first, range(world.FRAMES)).astype(int)
    assert (again == pictures).all()


def test_a_world_of_other_settings_is_refused(tmp_path):
    settings = world.WorldSettings(train_videos=1, heldout_videos=1)
    world.render(settings, tmp_path)
    with pytest.raises(ValueError, match="\n  jitter: 4 -> 3\n"):
        world.render(dataclasses.replace(settings, jitter=3), tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"presence": 1.5}, {"train_videos": 0}, {"size": 16}, {"jitter": 20}]
)
def test_impossible_settings_are_named(wrong):
    with pytest.raises(ValueError, match="world\\."):
        world.WorldSettings(**wrong)


def test_videos_drawn_on_demand_are_those_of_the_files(small_world):
    v = small_world.videos[0]
    drawn, stored = world.DrawnVideos(small_world.settings, small_world.videos), video
    info, of_file = drawn.probe(Path(v.path)), stored.probe(small_world.folder / v.path)
    assert (info.frames, info.duration, info.width, info.height) == (
        of_file.frames,
        of_file.duration,
        of_file.width,
        of_file.height,
    )
    np.testing.assert_array_equal(info.times, of_file.times)
    indices = list(range(world.FRAMES))
    here = drawn.read(Path(v.path), indices).astype(int)
    there = stored.read(small_world.folder / v.path, indices).astype(int)
    assert np.abs(here - there).mean(axis=(1, 2, 3)).max() < 8  # what halved colour planes change
