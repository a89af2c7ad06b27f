"""Training the mergers or the whole tower: gradients, caches, and what sampler and files get."""

from __future__ import annotations

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import peft_folder
from models.features import FrameFeatures
from models.fingerprint import fingerprint
from models.lora import LoRASettings
from models.sharding import make_mesh
from models.trained import merge_vision, split_vision
from models.weights.hf import load
from paravt_jax.method.accuracy import Rules
from paravt_jax.processes.exit_codes import Stopped
from tests.train.steps import actor_of, road_learner, skeleton_of, take_step
from train.durable.metrics import read_metrics
from train.export import Export, export
from train.learn.rl import rl_loss
from train.learn.rollouts import Actor, begin, roll_out
from train.learn.sft import SFTBatches, make_sft_updater, sft_loss
from train.learn.weight_sync import WeightSync
from train.run import execute

LORA = LoRASettings(rank=4, alpha=8.0)
PARTS = {"merger": LORA, "tower": None}


@pytest.fixture(scope="module", params=PARTS)
def thawed(request, road, small):
    """The road with adapters and mergers, or with everything trained."""
    found = small.thawed(road, request.param, PARTS[request.param])
    if found.run.lora is not None:
        # With B = 0, A would have no gradient.
        for adapter in found.weights["layers"]["adapters"].values():
            drawn = 0.1 * jax.random.normal(jax.random.key(1), adapter["b"].shape)
            adapter["b"].set_value(drawn)
    return found


@pytest.fixture(scope="module")
def learner(thawed):
    return road_learner(thawed)


@pytest.fixture
def start(learner):
    """A state that an update may donate."""
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x), x.sharding), learner.initial)


def equal(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all((np.asarray(x) == np.asarray(y)).all() for x, y in pairs)


def tower_of(road, vision):
    """The tower with some weights of its trained part."""
    graph, state = nnx.split(road.model.vision)
    return nnx.merge(graph, nnx.merge_state(state, vision))


def fresh_features(road, trained) -> FrameFeatures:
    """Features of the road's videos, with programs and a cache of their own."""
    known = road.environment.features
    return FrameFeatures(
        road.model.vision,
        road.model.config,
        known.settings,
        known.root,
        source=known.source,
        trained=trained,
    )


def patches_of(road, frames) -> np.ndarray:
    """Patches of frames of one size, read anew."""
    config = road.model.config.vision
    trained = dataclasses.replace(road.environment.features.trained, whole=True)
    return fresh_features(road, trained).cached(frames).reshape(len(frames), -1, config.patch_dim)


def require_close(ours, theirs) -> None:
    """Norms of differences of at most 1e-4 of each tensor's own norm."""
    pairs = zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True)
    for (path, a), b in pairs:
        a, b = np.asarray(a), np.asarray(b)
        size = np.linalg.norm(b)
        assert size > 0, jax.tree_util.keystr(path)
        assert np.linalg.norm(a - b) <= 1e-4 * size, jax.tree_util.keystr(path)


@pytest.mark.slow
def test_the_gradient_of_a_step_is_that_of_one_function_of_all_trained_weights(
    thawed, small, learner
):
    """Here the tower runs in the same function as decoder and loss, frame by frame."""
    rl, features = thawed.run.rl, thawed.environment.features
    questions = thawed.data.questions[:2]
    actor = Actor(small.Script(thawed), thawed.environment, Rules())
    played = roll_out(actor, begin(questions, rl, 0, 0), rl)
    scored = learner.score(learner.lay_out(played, thawed.environment, 0))
    parts, batch = scored.step.microbatches, scored.rollouts
    weights = thawed.fresh()
    ours, _ = learner.updater.gradients(weights, scored.step.bank, parts, batch)

    frames = [
        frame
        for group in played.groups
        for segment in group.episodes[0].trajectory.segments[:1]
        for frame in segment.frames
    ]
    patches = patches_of(thawed, frames)
    grids = [features.grid(frame) for frame in frames]
    loss = rl_loss(rl)
    room = thawed.run.rl_shape.room(1, 1).slots

    def whole(weights):
        text, vision = split_vision(weights)
        vectors = tower_of(thawed, vision)(patches, np.array(grids))
        vectors = vectors.reshape(1, -1, *vectors.shape[2:])
        visual = jnp.pad(vectors, ((0, 0), (0, room - vectors.shape[1]), (0, 0), (0, 0)))
        decoder = nnx.merge(thawed.graph, text, thawed.frozen)
        return sum(loss(decoder, visual, part, batch)[0] for part in parts)

    theirs = jax.jit(jax.grad(whole))(thawed.weights)
    require_close(ours, theirs)


@pytest.mark.slow
def test_what_the_sampler_sees_is_what_the_update_scores(thawed, learner, start):
    """Also after the first step, under weights that have changed."""
    engine, environment = thawed.engine, thawed.environment
    questions = thawed.data.questions[:2]
    actor_of(learner, engine, environment).load(start.weights, 0)
    state, first = take_step(learner, start, engine, environment, questions)
    assert first["kl_reference"] == pytest.approx(0, abs=1e-7)
    before = split_vision(learner.initial.weights)[1]
    after = split_vision(state.weights)[1]
    for (path, x), y in zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True):
        assert (np.asarray(x) != np.asarray(y)).any(), jax.tree_util.keystr(path)
    _, second = take_step(learner, state, engine, environment, questions)
    for metrics in (first, second):
        assert metrics["token_mismatches"] == 0
        assert 0 < metrics["logprob_gap"] < 1e-5
    assert second["kl_reference"] > 1e-6


@pytest.mark.slow
def test_a_number_of_the_tower_that_changes_on_its_way_is_noticed_in_that_step(
    thawed, small, learner, start, monkeypatch
):
    features = thawed.environment.features
    load = features.load

    def faulty(weights):
        leaf = weights["merger"]["fc1"]["kernel"]
        value = np.array(leaf[...])
        value[0, 0] = np.nextafter(value[0, 0], np.float32(9))
        changed = leaf.replace(jax.device_put(value, leaf[...].sharding))
        load(nnx.merge_state(weights, {"merger": {"fc1": {"kernel": changed}}}))

    monkeypatch.setattr(features, "load", faulty)
    script, questions = small.Script(thawed), thawed.data.questions[:2]
    with pytest.raises(ValueError, match="after step 1, the sampler of process 0 has weights"):
        take_step(learner, start, script, thawed.environment, questions)


def test_what_is_cached_outlives_the_weights_and_visual_vectors_do_not(thawed):
    features = thawed.environment.features
    sync = WeightSync(thawed.fresh(), np.float32, thawed.base())

    class Silent:
        def load(self, weights, version):
            self.weights = weights

        def fingerprint(self):
            return fingerprint(self.weights, thawed.frozen)

    frames = features.overview(thawed.data.questions[0].video, 4)
    sync.load(Silent(), thawed.fresh(), 0, features)
    cached, vectors = features.cached(frames), features(frames)
    read = features.encoded_frames
    text, vision = split_vision(thawed.fresh())
    doubled = jax.tree.map(lambda x: 2 * x, vision)
    sync.load(Silent(), merge_vision(text, doubled), 1, features)
    np.testing.assert_array_equal(features.cached(frames), cached)
    assert np.abs(features(frames) - vectors).max() > 1e-3
    patches = patches_of(thawed, frames)
    grids = np.array([features.grid(frame) for frame in frames])
    wanted = jax.jit(tower_of(thawed, doubled))(patches, grids)
    np.testing.assert_allclose(features(frames).reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5)
    assert features.encoded_frames == read, "no frame is read again"


@pytest.mark.slow
def test_the_cold_start_has_the_gradient_of_one_function_of_all_trained_weights(thawed):
    """The vectors of the batch come from the tower as a whole, at what is cached of each token."""
    features = thawed.environment.features
    settings = dataclasses.replace(thawed.run.sft, rows=1)
    batches = SFTBatches(settings, thawed.data, None, 0, thawed.environment, make_mesh(1, 1, 1))
    step = next(batches)
    (part,) = step.microbatches
    loss = sft_loss(settings)
    updater = make_sft_updater(skeleton_of(thawed), thawed.fresh(), settings, batches.shape)
    weights = updater.initial.weights
    ours, _ = updater.gradients(weights, step.bank, step.microbatches, step.mask)

    cached = np.asarray(step.bank.cached)[0]
    count = int((np.asarray(part.ids) == thawed.image).sum())
    config = thawed.model.config.vision
    frame = thawed.run.largest_frame
    grid = features.grid(thawed.data.questions[0].video)
    assert count % frame == 0, "frames of the small world have one size"

    def theirs(weights):
        text, vision = split_vision(weights)
        tower = tower_of(thawed, vision)
        if features.trained.whole:
            patches = cached[:count].reshape(count // frame, -1, config.patch_dim)
            vectors = tower(patches, np.tile(grid, (len(patches), 1)))
        else:
            vectors = tower.mergers.of_tokens(jnp.asarray(cached[None, :count]))
        vectors = vectors.reshape(1, -1, *vectors.shape[2:])
        decoder = nnx.merge(thawed.graph, text, thawed.frozen)
        return loss(decoder, vectors, part, step.mask)[0]

    require_close(ours, jax.jit(jax.grad(theirs))(thawed.weights))


# --- runs ---


def small_run(small, part: str, folder, **fields):
    run = small.small_merger() if part == "merger" else small.small_tower()
    return small.shortened(run, folder, **fields)


@pytest.fixture(scope="module")
def finished(small, tmp_path_factory):
    """The folder of a finished run that trains the whole tower."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    execute(small_run(small, "tower", folder))
    return folder


@pytest.mark.slow
def test_a_stopped_run_ends_bit_for_bit_like_an_uninterrupted_one(small, finished):
    """It stops after the first step of the cold start, and then after the first step of RL."""
    folder = finished.parent / "interrupted"
    run = small_run(small, "tower", folder)
    for phase, title in (("sft", "cold start"), ("rl", "PARA-GRPO")):
        with pytest.raises(Stopped, match=f"after {title} 1/2"):
            execute(run, small.StopAfter(run, phase))
    execute(run)
    names = ("loss", "grad_norm", "weights/fingerprint", "token_mismatches")
    ours, theirs = (
        [[row.get(name) for name in names] for row in read_metrics(each / "metrics.jsonl")]
        for each in (folder, finished)
    )
    assert ours == theirs
    written = [(each / "model" / "model.safetensors").read_bytes() for each in (folder, finished)]
    assert written[0] == written[1]


@pytest.mark.slow
def test_a_part_of_the_tower_is_exported_with_the_adapters(small, finished, tmp_path):
    """At the end of the run, and from its checkpoint, byte for byte."""
    path = tmp_path / "base"
    shutil.copytree(finished / "model", path)
    model = dataclasses.replace(small.small().model, path=str(path))
    folder = tmp_path / "run"
    fields = {"model": model, "align": None, "lora": LORA}
    execute(small_run(small, "merger", folder, **fields))
    export(Export(str(folder), str(tmp_path / "model")))
    written = sorted(file.name for file in (folder / "model").iterdir())
    assert written == sorted(file.name for file in (tmp_path / "model").iterdir())
    for file in written:
        assert (folder / "model" / file).read_bytes() == (tmp_path / "model" / file).read_bytes()
    opened = peft_folder.load(folder / "adapter")
    merged = load(folder / "model")
    assert equal(nnx.state(opened.vision), nnx.state(merged.vision))
    before = load(path)
    for name, module in (("merger", "fc1"), ("deepstack", "fc2")):
        one, other = (nnx.state(each.vision)[name][module]["kernel"] for each in (before, opened))
        assert (np.asarray(one[...]) != np.asarray(other[...])).any()
    blocks = [nnx.state(each.vision.blocks) for each in (before, opened)]
    assert equal(*blocks)
