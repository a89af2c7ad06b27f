"""A frame's vectors are the same whoever asks for them, with whatever else, and however little is remembered."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil

import av
import jax
import numpy as np
import pytest
from PIL import Image

from models.features import FrameFeatures, FrameSettings, frame_tokens
from models.patches import patchify
from models.qwen3_vl.vision import frame_layout
from paravt_jax.data import video
from paravt_jax.data.frames import VideoError
from paravt_jax.method.records import Frame
from paravt_jax.world.videos import FRAMES, STEP
from train.durable.compilations import Compilations


@pytest.fixture
def make(small_world, small_model):
    """make(batch=..., ...) gives features of the small world that remember nothing yet."""

    def build(
        root: pathlib.Path = small_world.folder, version: int = 0, **settings
    ) -> FrameFeatures:
        return FrameFeatures(
            small_model.vision,
            small_model.config,
            FrameSettings(**settings),
            root,
            source=video,
            version=version,
        )

    return build


@pytest.fixture(scope="module")
def names(small_world) -> list[str]:
    return [v.path for v in small_world.videos]


@pytest.fixture(scope="module")
def wide(tmp_path_factory, names, small_world) -> pathlib.Path:
    """A folder with a small video, a wide one of 12 frames, and files that are none."""
    folder = tmp_path_factory.mktemp("wide")
    shutil.copy(small_world.folder / names[0], folder / "small.mp4")
    rng = np.random.default_rng(0)
    with av.open(str(folder / "wide.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=1, options={"crf": "10"})
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for _ in range(12):
            picture = np.repeat(np.repeat(rng.integers(0, 256, (8, 12, 3), np.uint8), 8, 0), 8, 1)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "noise.mp4").write_bytes(bytes(range(256)) * 40)
    whole = (folder / "wide.mp4").read_bytes()
    (folder / "foreign.mp4").write_bytes(whole.replace(b"avc1", b"zzzz"))
    Image.new("RGB", (900, 3)).save(folder / "thin.png")
    return folder


def test_vectors_are_the_towers_own(make, names, small_model, small_world):
    features = make(batch=8)
    frames = features.overview(names[0], 5)
    vectors = features(frames)
    patches = patchify(video.read(small_world.folder / names[0], [f.index for f in frames]))
    grid = features.grid(names[0])
    assert grid == (2, 2) and features.tokens(names[0]) == 1
    layout = frame_layout(grid, small_model.config.vision)
    expected = np.asarray(jax.jit(small_model.vision)(patches, layout))
    assert vectors.shape == (5, 2, 32) and vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected.reshape(5, 2, 32), atol=1e-5)
    assert np.abs(vectors[0] - vectors[-1]).max() > 1e-3


@pytest.mark.parametrize("whole", [0, FRAMES])
def test_the_bits_of_a_frame_do_not_depend_on_what_else_is_asked(make, names, whole):
    features, forgetful = (
        make(batch=16, whole_frames=whole),
        make(batch=16, whole_frames=whole, cache_mib=0),
    )
    crop = features.window(names[0], 16, 32, 1.0, 16)
    mixed = (*features.overview(names[1], 20), *crop[3:7], *features.overview(names[0], 20))
    alone = np.concatenate([forgetful([frame]) for frame in mixed])
    for asked in (features, forgetful):
        assert np.array_equal(asked(mixed), alone) and np.array_equal(
            asked(mixed[::-1]), alone[::-1]
        )
    assert np.array_equal(forgetful(crop)[3:7], alone[20:24])


def test_overview_and_crops_share_what_is_remembered(make, names):
    features = make(batch=8)
    seen = features(features.overview(names[0], FRAMES))
    assert features.encoded_frames == FRAMES
    crop = features.window(names[0], 40, 56, 1.0, 16)
    assert [f.time for f in crop] == list(range(40, 56, STEP)) and [f.index for f in crop] == list(
        range(40 // STEP, 56 // STEP)
    )
    assert (
        np.array_equal(features(crop), seen[40 // STEP : 56 // STEP])
        and features.encoded_frames == FRAMES
    )


def test_a_frame_asked_for_twice_is_encoded_once(make, names):
    features = make(batch=8)
    (frame,) = features.overview(names[0], 1)
    vectors = features(
        [frame, frame, dataclasses.replace(frame, time=99.0)]
    )  # a time is a label, not a key
    assert (
        features.encoded_frames == 1
        and len(vectors) == 3
        and np.array_equal(vectors[0], vectors[2])
    )


def test_a_short_video_is_read_whole_when_it_is_first_met(make, names, monkeypatch):
    reads = []
    real = video.read
    monkeypatch.setattr(
        video, "read", lambda path, indices: reads.append(len(indices)) or real(path, indices)
    )
    features, sparing = make(batch=8, whole_frames=FRAMES), make(batch=8, whole_frames=FRAMES - 1)
    for f in (features, sparing):
        f(f.overview(names[0], 1))
        f(f.window(names[0], 44, 52, 1.0, 4))
    assert reads == [FRAMES, 1, 8 // STEP]


def test_frames_of_several_videos_and_sizes_come_back_in_order(make, wide):
    features, forgetful = (
        make(wide, batch=4, min_pixels=1024),
        make(wide, batch=4, min_pixels=1024, cache_mib=0),
    )
    small, large = features.overview("small.mp4", 3), features.overview("wide.mp4", 3)
    assert features.grid("wide.mp4") == (4, 6) and features.tokens("wide.mp4") == 6
    mixed = [small[0], large[0], large[1], small[1], large[2], small[2]]
    rows = features(mixed)
    assert rows.shape == (3 * 1 + 3 * 6, 2, 32)
    sizes = [1, 6, 6, 1, 6, 1]
    for frame, row in zip(mixed, np.split(rows, np.cumsum(sizes)[:-1]), strict=True):
        assert np.array_equal(row, forgetful([frame]))


def test_frames_are_shown_at_the_size_the_settings_ask_for(make, names):
    features = make(batch=8, min_pixels=96 * 96, max_pixels=96 * 96)
    assert features.grid(names[0]) == (6, 6) and features.tokens(names[0]) == 9
    assert features(features.overview(names[0], 2)).shape == (18, 2, 32)


def test_memory_keeps_within_its_bound_and_forgets_the_oldest(make, names):
    """A frame of 36 tokens takes 9 KiB here, so that 1 MiB holds 113 of them."""
    features = make(batch=64, min_pixels=192 * 192, max_pixels=192 * 192, cache_mib=1)
    tokens = features.tokens(names[0])
    per_frame = tokens * 2 * 32 * 4
    fits = 2**20 // per_frame
    first = features.overview(names[0], 40)
    expected = features(first)
    for name in names[1:3]:
        features(features.overview(name, 30))
        features(first[:10])  # still in use, so it stays
    held = sum(row.nbytes for row in features._store.values())
    assert held == features._bytes == 100 * per_frame <= 2**20 and fits == 113
    encoded = features.encoded_frames
    features(features.overview(names[3], 30))
    assert (
        sum(row.nbytes for row in features._store.values()) == features._bytes == fits * per_frame
    )
    assert (
        np.array_equal(features(first[:10]), expected[: 10 * tokens])
        and features.encoded_frames == encoded + 30
    )
    assert np.array_equal(features(first), expected) and features.encoded_frames > encoded + 30


def test_the_times_of_so_many_videos_are_kept_and_those_of_others_read_again(
    make, names, monkeypatch
):
    monkeypatch.setattr("models.features._INFOS", 2)
    features, probed = make(), []
    monkeypatch.setattr(
        video, "probe", lambda path, probe=video.probe: probed.append(path.name) or probe(path)
    )
    first = features.info(names[0])
    for name in (
        names[1],
        names[0],
        names[2],
        names[0],
        names[1],
    ):  # the third takes the second's place
        features.info(name)
    assert probed == [pathlib.Path(names[n]).name for n in (0, 1, 2, 1)]
    assert features.info(names[0]) is first and features.tokens(names[2]) == 1


def test_frames_that_are_kept_serve_though_the_file_is_gone_and_many_others_were_met(
    make, names, small_world, tmp_path, monkeypatch
):
    monkeypatch.setattr("models.features._INFOS", 1)
    for name in names[:3]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(small_world.folder / name, tmp_path / name)
    features = make(tmp_path)
    frames = features.overview(names[0], 2)
    vectors = features(frames)
    (tmp_path / names[0]).unlink()
    for name in names[1:3]:
        features.info(name)
    np.testing.assert_array_equal(features(frames), vectors)
    probed = []
    monkeypatch.setattr(
        video, "probe", lambda path, probe=video.probe: probed.append(path.name) or probe(path)
    )
    for name in (
        names[1],
        names[2],
        names[2],
        names[2],
    ):  # where all that is kept has frames, the newest stays all the same
        features.info(name)
    assert len(probed) <= 2 and features.info(names[2]).frames


def test_more_frames_than_fit_are_still_answered(make, names):
    features = make(batch=64, cache_mib=0)
    frames = features.overview(names[0], 64)
    assert (
        np.array_equal(features(frames), make(batch=64)(frames))
        and not features._store
        and features._bytes == 0
    )


def test_nothing_compiles_for_another_number_of_frames(make, names):
    features = make(batch=8)
    features(features.overview(names[0], 3))
    compilations = Compilations()
    features(features.overview(names[0], 50))
    features(features.overview(names[1], 9))
    assert compilations.count == 0


def test_frames_are_never_of_more_tokens_than_is_planned_for(make, names, monkeypatch):
    """A very wide frame keeps at least one patch of height, so it may need more than its area says."""
    features = make(max_pixels=50_176)
    info = features.info(names[0])
    monkeypatch.setattr(
        features, "info", lambda name: dataclasses.replace(info, height=16, width=1584)
    )
    assert frame_tokens(features.settings, features.config.vision) == 49
    with pytest.raises(
        VideoError, match=r"1584 x 16 pixels are too long and thin: 69 visual tokens, .* allows 49"
    ):
        features.tokens(names[0])


@pytest.mark.parametrize(("pixels", "tokens"), [(1000, 1), (1024, 1), (4096, 4), (50_176, 49)])
def test_every_frame_has_a_token(make, pixels, tokens):
    assert frame_tokens(FrameSettings(max_pixels=pixels), make().config.vision) == tokens


UNREADABLE = ("missing.mp4", "empty.mp4", "noise.mp4", "foreign.mp4", "a" * 300 + ".mp4", "a\0.mp4")


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_video_that_cannot_be_read_is_the_callers_to_handle(make, wide, name):
    features = make(wide, batch=4)
    for use in (
        features.info,
        features.grid,
        lambda name: features.overview(name, 4),
        lambda name: features([Frame(name, 0, 0.0)]),
    ):
        with pytest.raises(VideoError, match=name):
            use(name)
    fine = features.overview("small.mp4", 2)
    with pytest.raises(VideoError, match=name):
        features([fine[0], Frame(name, 0, 0.0)])
    assert len(features(fine)) == 2  # one bad file takes nothing else down


def test_a_shape_that_cannot_be_shown_is_a_bad_video(make, wide):
    features = make(wide)
    for use in (features.grid, features.tokens, lambda name: features(features.overview(name, 1))):
        with pytest.raises(VideoError, match="thin.png: frame size = 3 x 900"):
            use("thin.png")


def test_a_video_that_appears_later_is_found(make, wide, tmp_path):
    features = make(tmp_path, batch=4)
    with pytest.raises(VideoError):
        features.info("later.mp4")
    shutil.copy(wide / "small.mp4", tmp_path / "later.mp4")
    assert features.info("later.mp4").frames == FRAMES


def test_another_file_under_a_name_is_another_video(make, names, small_world, tmp_path):
    """Nobody has to say that it changed; a file that is gone is served from memory as long as it is there."""
    features, file = make(tmp_path, batch=4), tmp_path / "clip.mp4"
    shutil.copy(small_world.folder / names[0], file)
    frames = features.overview("clip.mp4", 4)
    before, key = features(frames), features.key(frames[0])
    shutil.copy(small_world.folder / names[1], file)
    assert features.key(frames[0]) != key
    assert np.array_equal(
        features(frames), make(batch=4)([Frame(names[1], f.index, f.time) for f in frames])
    )
    assert np.abs(features(frames) - before).max() > 1e-3
    encoded = features.encoded_frames
    last = features(frames)
    file.unlink()
    assert np.array_equal(features(frames), last) and features.encoded_frames == encoded
