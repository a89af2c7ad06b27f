"""Videos of the small world: their events, their files, and frames drawn on demand."""

from __future__ import annotations

import av
import numpy as np
import pytest

from paravt_jax.data import video
from paravt_jax.data.frames import PixelRules, ReadTask
from paravt_jax.world import videos as world


def world_of(train_videos: int, heldout_videos: int, **changes) -> world.WorldSettings:
    return world.WorldSettings(train_videos=train_videos, heldout_videos=heldout_videos, **changes)


def frames_of(scene: world.Scene) -> list[tuple[int, int]]:
    """The frames of a scene: number and second."""
    times = range(scene.start, scene.end, world.STEP)
    return [(time // world.STEP, time) for time in times]


def test_every_video_has_four_scenes_of_different_colours_and_digits():
    for video_ in world.plan(world_of(200, 50)):
        spans = [(scene.start, scene.end) for scene in video_.scenes]
        assert spans == [(0, 32), (32, 64), (64, 96), (96, 128)]
        assert len({scene.colour for scene in video_.scenes}) == 4
        digits = [scene.digit for scene in video_.scenes if scene.digit is not None]
        assert len(digits) >= 2
        assert len(set(digits)) == len(digits)


def test_a_digit_stays_for_two_or_three_frames_of_one_window():
    videos = world.plan(world_of(200, 50))
    scenes = [s for video_ in videos for s in video_.scenes if s.digit is not None]
    assert {scene.digit for scene in scenes} == set(range(10))
    assert {scene.colour for scene in scenes} == set(world.COLOURS)
    assert 0.85 <= len(scenes) / (4 * len(videos)) <= 0.95
    for scene in scenes:
        assert scene.start <= scene.first < scene.last < scene.end
        assert 2 <= scene.last - scene.first <= 4
        assert scene.first // world.WINDOW == scene.last // world.WINDOW


def test_a_video_depends_on_seed_split_and_number_only():
    few, more = world.plan(world_of(2, 2)), world.plan(world_of(5, 2))
    assert world.of_split(few, "train") == world.of_split(more, "train")[:2]
    assert world.of_split(few, "heldout") == world.of_split(more, "heldout")
    other_seed = world.plan(world_of(2, 2, seed=1))
    assert other_seed[0].scenes != few[0].scenes
    assert world.of_split(few, "train")[0].scenes != world.of_split(few, "heldout")[0].scenes


def test_files_show_what_was_planned_without_loss(small_world):
    """x264 may write other bytes for the same frames. A run must not learn from the difference."""
    for video_ in small_world.videos:
        with av.open(str(small_world.folder / video_.path)) as container:
            decoded = list(container.decode(video=0))
        for scene in video_.scenes:
            for number, time in frames_of(scene):
                picture = world.picture(small_world.settings, scene, scene.shows(time))
                frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
                stored = frame.reformat(format="yuv420p", threads=1).to_ndarray()
                np.testing.assert_array_equal(decoded[number].to_ndarray(), stored)
                white_pixels = (picture.min(axis=-1) > 180).sum()
                assert (white_pixels > 30) == scene.shows(time)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"presence": 1.5}, "presence: 1.5"),
        ({"train_videos": 0}, "train_videos"),
        ({"size": 16}, "size is 16"),
        ({"jitter": 20}, "jitter 20"),
    ],
)
def test_impossible_settings_are_named(wrong, named):
    with pytest.raises(ValueError, match=f"world.*{named}"):
        world.WorldSettings(**wrong)


def test_frames_drawn_on_demand_equal_those_of_the_files(small_world):
    path = small_world.videos[0].path
    drawn = world.DrawnVideos(small_world.settings, small_world.videos)
    indices = tuple(range(world.FRAMES))
    read = drawn.request(ReadTask(path, indices, PixelRules(max_pixels=10**6))).result()
    info, of_file = read.info, video.probe(small_world.folder / path)
    assert (info.frames, info.duration) == (of_file.frames, of_file.duration)
    assert (info.width, info.height) == (of_file.width, of_file.height)
    np.testing.assert_array_equal(info.times, of_file.times)
    there = video.read(small_world.folder / path, indices, PixelRules(max_pixels=10**6))
    # Colours are stored at half the resolution.
    difference = read.frames.astype(int) - there.astype(int)
    assert np.abs(difference).mean(axis=(1, 2, 3)).max() < 8
