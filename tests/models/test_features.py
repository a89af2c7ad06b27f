"""A frame's features do not depend on the request, on other frames, or on the cache."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from concurrent.futures import Future

import av
import jax
import numpy as np
import pytest

from models.features import FrameFeatures, FrameSettings
from models.features.reader import frame_tokens
from models.qwen3_vl.sizes import tiny
from models.vision import patchify
from paravt_jax.data import video
from paravt_jax.data.frames import ReadTask, VideoError
from paravt_jax.method.records import Frame
from paravt_jax.world.videos import FRAMES, STEP
from rollout.engine.requests import Scheduler
from tests.models.program import run
from tests.rollout.conftest import Scripted


@pytest.fixture
def make(small_world, small_model):
    """make(batch=..., ...) makes features of the small world with an empty cache."""

    def build(root: pathlib.Path = small_world.folder, **settings) -> FrameFeatures:
        return FrameFeatures(
            small_model.vision, small_model.config, FrameSettings(**settings), root, source=video
        )

    return build


@pytest.fixture(scope="module")
def names(small_world) -> list[str]:
    return [v.path for v in small_world.videos]


@pytest.fixture(scope="module")
def wide(tmp_path_factory, names, small_world) -> pathlib.Path:
    """A folder with a small video, a wide one of 12 frames, and one of a foreign codec."""
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
    whole = (folder / "wide.mp4").read_bytes()
    (folder / "foreign.mp4").write_bytes(whole.replace(b"avc1", b"zzzz"))
    return folder


def test_features_equal_those_of_the_tower(make, names, small_model, small_world):
    features = make(batch=8)
    frames = features.overview(names[0], 5)
    vectors = features(frames)
    patches = patchify(
        video.read(small_world.folder / names[0], [f.index for f in frames]), features.config.vision
    )
    grid = features.grid(names[0])
    assert grid == (2, 2) and features.tokens(names[0]) == 1
    expected = np.asarray(jax.jit(small_model.vision)(patches, np.tile(grid, (5, 1))))
    assert vectors.shape == (5, 2, 32) and vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected.reshape(5, 2, 32), atol=1e-5)
    assert np.abs(vectors[0] - vectors[-1]).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("batch", [16, FRAMES])
def test_the_bits_of_a_frame_do_not_depend_on_other_frames(make, names, batch):
    features = make(batch=batch)
    forgetful = make(batch=batch, cache_mib=0)
    crop = features.window(names[0], 16, 32, 1.0, 16)
    mixed = (*features.overview(names[1], 20), *crop[3:7], *features.overview(names[0], 20))
    alone = np.concatenate([forgetful([frame]) for frame in mixed])
    for asked in (features, forgetful):
        assert np.array_equal(asked(mixed), alone)
        assert np.array_equal(asked(mixed[::-1]), alone[::-1])
    assert np.array_equal(forgetful(crop)[3:7], alone[20:24])


def test_overview_and_crops_share_the_cache(make, names):
    features = make(batch=8)
    seen = features(features.overview(names[0], FRAMES))
    assert features.encoded_frames == FRAMES
    crop = features.window(names[0], 40, 56, 1.0, 16)
    assert [f.time for f in crop] == list(range(40, 56, STEP))
    assert [f.index for f in crop] == list(range(40 // STEP, 56 // STEP))
    assert np.array_equal(features(crop), seen[40 // STEP : 56 // STEP])
    assert features.encoded_frames == FRAMES


def test_frames_of_several_videos_and_sizes_come_back_in_order(make, wide):
    features = make(wide, batch=4, min_pixels=1024)
    forgetful = make(wide, batch=4, min_pixels=1024, cache_mib=0)
    small = features.overview("small.mp4", 3)
    large = features.overview("wide.mp4", 3)
    assert features.grid("wide.mp4") == (4, 6) and features.tokens("wide.mp4") == 6
    mixed = [small[0], large[0], large[1], small[1], large[2], small[2]]
    rows = features(mixed)
    assert rows.shape == (3 * 1 + 3 * 6, 2, 32)
    sizes = [1, 6, 6, 1, 6, 1]
    for frame, row in zip(mixed, np.split(rows, np.cumsum(sizes)[:-1]), strict=True):
        assert np.array_equal(row, forgetful([frame]))


def test_crops_may_have_limits_of_their_own(make, wide):
    features = make(wide, batch=4, max_pixels=96 * 64, crop_max_pixels=64 * 64)
    (frame,) = features.overview("wide.mp4", 1)
    crop = dataclasses.replace(frame, crop=True)
    assert (features.tokens(frame), features.tokens(crop)) == (6, 2)
    assert features.keys([frame]) != features.keys([crop])
    vectors = features([crop, frame, crop])
    assert len(vectors) == 2 + 6 + 2 and features.encoded_frames == 2
    assert np.array_equal(vectors[:2], vectors[-2:])
    window = features.window("wide.mp4", 0, 4, 1.0, 16)
    assert {features.tokens(frame) for frame in window} == {2}
    alone = make(wide, batch=4, max_pixels=64 * 64)
    assert np.array_equal(vectors[:2], alone([frame]))


@pytest.mark.parametrize(
    ("settings", "videos", "sizes"),
    [
        ({}, (), (13, 25, 49)),
        ({}, [(32, 32)], (1, 49)),
        ({}, [(720, 720), (360, 640)], (49,)),
        ({}, [(64, 96), (96, 64), (96, 96)], (6, 9, 49)),
        ({}, [(96, 96), (64, 96), (64, 64)], (13, 25, 49)),
        ({}, [(8, 4000)], (13, 25, 49)),
        ({"crop_max_pixels": 4 * 50_176}, (), (25, 49, 196)),
        ({"max_pixels": 1024}, (), (1,)),
    ],
)
def test_frames_are_padded_to_at_most_three_sizes(settings, videos, sizes):
    """Exact ones if few numbers of tokens are expected; a thin video is refused later."""
    assert FrameSettings(**settings).padded_sizes(tiny(96).vision, videos) == sizes


def test_the_cache_keeps_its_bound_and_drops_the_least_recently_used(make, names):
    """A frame of 36 tokens takes 9 KiB here, so 1 MiB holds 113 of them."""
    features = make(batch=16, min_pixels=192 * 192, max_pixels=192 * 192, cache_mib=1)
    tokens = features.tokens(names[0])
    per_frame = tokens * 2 * 32 * 4
    fits = 2**20 // per_frame
    first = features.overview(names[0], 40)
    expected = features(first)
    for name in names[1:3]:
        features(features.overview(name, 30))
        # Still in use, so these stay.
        features(first[:10])
    assert len(features.cache) == 100 and fits == 113
    assert features.cache.bytes == 100 * per_frame <= 2**20
    encoded = features.encoded_frames
    features(features.overview(names[3], 30))
    assert len(features.cache) == fits and features.cache.bytes == fits * per_frame
    assert np.array_equal(features(first[:10]), expected[: 10 * tokens])
    assert features.encoded_frames == encoded + 30
    assert np.array_equal(features(first), expected) and features.encoded_frames > encoded + 30


def test_frames_with_more_tokens_than_the_bound_are_refused(make, names, monkeypatch):
    """A very wide frame is at least one patch high, so it may exceed the tokens of its area."""
    features = make(max_pixels=50_176)
    info = features.info(names[0])
    monkeypatch.setattr(
        features, "info", lambda name: dataclasses.replace(info, height=16, width=1584)
    )
    assert frame_tokens(features.settings, features.config.vision) == 49
    with pytest.raises(VideoError, match="1584 x 16 pixels .* 69 visual tokens, .* 49"):
        features.tokens(names[0])


UNREADABLE = (
    "missing.mp4",
    "foreign.mp4",
    "a\0.mp4",
)


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_unreadable_video_raises_and_spoils_no_other(make, wide, name):
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
    assert len(features(fine)) == 2


def test_a_new_file_under_an_old_name_is_another_video(make, names, small_world, tmp_path):
    """The change is noticed without a call."""
    features = make(tmp_path, batch=4)
    file = tmp_path / "clip.mp4"
    shutil.copy(small_world.folder / names[0], file)
    frames = features.overview("clip.mp4", 4)
    before = features(frames)
    key = features.keys(frames[:1])
    shutil.copy(small_world.folder / names[1], file)
    assert features.keys(frames[:1]) != key
    others = [Frame(names[1], f.index, f.time) for f in frames]
    assert np.array_equal(features(frames), make(batch=4)(others))
    assert np.abs(features(frames) - before).max() > 1e-3
    file.unlink()
    with pytest.raises(VideoError, match="no such file"):
        features(frames)


class Held:
    """A source that reads nothing."""

    def __init__(self):
        self.futures: list[Future] = []

    def request(self, task: ReadTask) -> Future:
        self.futures.append(Future())
        return self.futures[-1]

    def ahead(self, task: ReadTask) -> None:
        pass


def test_frames_that_nobody_waits_for_any_more_are_not_read(make, names, small_vocabulary):
    features = make()
    features.source = held = Held()
    scheduler = Scheduler(Scripted(small_vocabulary, []))

    async def agent(frames: int) -> None:
        await features.request_overview(names[0], frames)

    for number, frames in enumerate((4, 4, 8)):
        scheduler.add(number, agent(frames))
    assert len(held.futures) == 2
    cancelled = []
    for number in range(3):
        scheduler.drop(number)
        cancelled.append([future.cancelled() for future in held.futures])
    assert cancelled == [[False, False], [True, False], [True, True]]
    scheduler.add(3, agent(4))
    assert not held.futures[-1].cancelled(), "it is read again"


def test_no_read_is_waited_for_once_a_known_video_is_deleted(make, names, small_world, tmp_path):
    shutil.copy(small_world.folder / names[0], tmp_path / "clip.mp4")
    features = make(tmp_path)
    frames = features.overview("clip.mp4", 4)
    features.source = Held()
    (tmp_path / "clip.mp4").unlink()
    with pytest.raises(VideoError, match="no such file"):
        features.keys(frames)


def test_started_frames_are_read_and_encoded_once(make, names, monkeypatch):
    reads = []
    real = video.read
    monkeypatch.setattr(
        video, "read", lambda *args, **named: reads.append(args[0]) or real(*args, **named)
    )
    features = make(batch=4, cache_mib=0)
    first, second = features.overview(names[0], 6), features.overview(names[1], 5)
    gone = Frame("gone.mp4", 0, 0.0)
    features.start([*first, gone, *second])
    assert len(reads) == 2 and not features.unreadable and not len(features.cache)
    assert np.array_equal(features(second), make(batch=4)(second))
    assert np.array_equal(features(first), make(batch=4)(first))
    assert features.encoded_frames == 11
    with pytest.raises(VideoError, match="no such file"):
        features([gone])


@pytest.mark.slow
def test_eight_devices_share_the_frames():
    """Each of them encodes two of sixteen frames, with the same result as one device."""
    run(
        """
        import jax
        import numpy as np
        from flax import nnx
        from models.features import FrameFeatures, FrameSettings
        from models.features.encoder import tower_mesh
        from models.model import VisionLanguageModel
        from models.qwen3_vl.sizes import tiny
        from paravt_jax.data.frames import VideoInfo
        from paravt_jax.data.frames import carry_out, read_now
        from paravt_jax.method.records import Frame

        class Source:
            def request(self, task):
                return read_now(lambda: carry_out(task, self.probe, self.read))

            def ahead(self, task):
                pass

            def probe(self, path):
                return VideoInfo(20, 20.0, np.arange(20.0), 64, 64)

            def read(self, path, indices, rules):
                rng = np.random.default_rng(0)
                return rng.integers(0, 256, (20, 64, 64, 3), np.uint8)[np.asarray(indices)]

        def features(devices, batch):
            model = VisionLanguageModel(tiny(96), rngs=nnx.Rngs(0))
            everywhere = jax.NamedSharding(tower_mesh(devices), jax.P())
            nnx.update(model.vision, jax.device_put(nnx.state(model.vision), everywhere))
            settings = FrameSettings(batch=batch)
            return FrameFeatures(model.vision, model.config, settings, ".", source=Source())

        shards = []

        def seen(encode):
            def call(*arguments):
                found = encode(*arguments)
                shards.append({s.device.id: s.data.shape[0] for s in found.addressable_shards})
                return found
            return call

        frames = [Frame("a", n, float(n)) for n in range(20)]
        expected = features(jax.devices()[:1], 16)(frames)
        for batch in (9, 16):
            several = features(jax.devices(), batch)
            several.encoder._encode = seen(several.encoder._encode)
            np.testing.assert_allclose(several(frames), expected, atol=1e-5)
        assert shards == [{n: 2 for n in range(8)}] * 4, shards
        print("done")
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )
