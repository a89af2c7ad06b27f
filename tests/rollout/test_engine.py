"""The sampler against the plain forward pass, and rows against their neighbours."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.qwen3_vl.rope import mrope_positions, next_position
from paravt_jax.records import Author, Segment, Trajectory, digest
from rollout.engine import Engine, EngineSettings, Shape
from rollout.episode import split_prompt
from rollout.requests import Request, SampleStop
from train.batch import BatchShape, build, mismatches
from train.compilations import Compilations
from train.step import make_logprobs

SHAPES = (Shape(prompt=56, visual=8, suffix=4, new=4), Shape(prompt=96, visual=16, suffix=24, new=12))
NEVER = ()  # no stop ids: rows run to their limit


@pytest.fixture(scope="module")
def engine(small_model, small_features):
    """An engine that is warm: whatever it samples from here on compiles nothing."""
    engine = Engine(small_model, small_features, EngineSettings(SHAPES, rows=8, prefill_rows=2, kept_prompts=10))
    engine.warm_up()
    return engine


@pytest.fixture(autouse=True)
def clean(request):
    """Every test starts with the model's own weights and no prompts."""
    if "engine" in request.fixturenames:
        engine, model = request.getfixturevalue("engine"), request.getfixturevalue("small_model")
        engine.load(nnx.split(model.text)[1], version=0)


@pytest.fixture(scope="module")
def asked(small_scene, small_questions):
    """asked(n, ...) is the opening request of question n, K = 4."""
    protocol, features = small_scene.protocol, small_scene.features

    def make(number: int = 0, seed: int = 1, temperature: float = 1.0, new: int = 12, stops=NEVER, suffix=None, frames: int = 4) -> Request:
        question = small_questions[number % len(small_questions)]
        shown = features.overview(question.video, frames)
        prompt = np.concatenate([protocol.overview(shown, 1).ids, protocol.question(question).ids])
        suffix = protocol.pinned.ids if suffix is None else np.asarray(suffix, np.int32)
        return Request(prompt, shown, suffix, temperature, new, seed, stops)

    return make


@pytest.fixture(scope="module")
def look(small_scene, small_questions):
    """look(start) is a sub-agent's request for eight seconds of a video: a shorter shape."""

    def make(start: int = 0, seed: int = 1) -> Request:
        frames = small_scene.features.window(small_questions[0].video, start, start + 4, 1.0, 4)
        prompt, suffix = split_prompt(Trajectory((small_scene.protocol.window(frames, 1),)))
        return Request(prompt, frames, suffix, 1.0, 4, seed, NEVER)

    return make


@pytest.fixture(scope="module")
def plain(small_model, small_features):
    """plain(request, ids) is what a forward pass over the whole sequence says of `ids`: log-probs of every word, [t, v]."""
    run = nnx.jit(lambda text, batch: jax.nn.log_softmax(text.logits(text(**batch)[0])))

    def score(request: Request, ids: np.ndarray, text=small_model.text) -> np.ndarray:
        whole = np.concatenate([request.prompt, request.suffix, ids])
        n, size = len(whole), 144
        row = np.zeros((1, size), np.int32)
        segments, positions, index = row.copy(), np.zeros((3, 1, size), np.int32), np.full((1, size), -1)
        row[0, :n], segments[0, :n] = whole, 1
        grids = [small_features.grid(frame.video) for frame in request.frames]
        start = mrope_positions(request.prompt, grids, small_features.config)
        positions[:, 0, : len(request.prompt)] = start
        positions[:, 0, len(request.prompt) : n] = next_position(start) + np.arange(n - len(request.prompt))
        images = np.flatnonzero(request.prompt == small_features.config.image_token_id)
        index[0, images] = np.arange(len(images))
        visual = np.zeros((1, 16, 2, 32), np.float32)
        visual[0, : len(images)] = small_features(request.frames)
        batch = {"ids": row, "positions": positions, "segment_ids": segments, "visual": visual, "visual_index": index}
        out = np.asarray(run(text, batch)[0])
        return out[n - len(ids) - 1 : n - 1]

    return score


def own(scores: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return np.take_along_axis(scores, ids[:, None].astype(int), 1)[:, 0]


def tempered(scores: np.ndarray, temperature: float) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(jnp.asarray(scores) / temperature))


# --- what is sampled ---


def test_greedy_takes_the_likeliest_token_of_the_plain_forward_pass(engine, asked, look, plain):
    requests = [asked(n, temperature=0.0) for n in range(4)] + [dataclasses.replace(look(8 * n), temperature=0.0) for n in range(3)]
    for request, sample in zip(requests, engine.generate(requests), strict=True):
        scores = plain(request, sample.ids)
        assert sample.ids.tolist() == scores.argmax(-1).tolist() and len(sample.ids) == request.max_new_tokens
        np.testing.assert_allclose(sample.logprobs, own(scores, sample.ids), atol=1e-4)
    assert len({tuple(sample.ids) for sample in engine.generate(requests)}) > 3  # the frames and the question matter


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
def test_sampled_log_probs_are_those_of_the_plain_forward_pass(engine, asked, plain, temperature):
    requests = [asked(n, seed=n, temperature=temperature, suffix=range(5, 5 + 5 * n) if n else None) for n in range(4)]
    for request, sample in zip(requests, engine.generate(requests), strict=True):
        expected = own(tempered(plain(request, sample.ids), temperature), sample.ids)
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)
        assert sample.logprobs.dtype == np.float32 and sample.ids.dtype == np.int32


def test_the_trainer_computes_the_sampled_log_probs_again(engine, asked, small_model, small_features):
    """One group, several turns long: what the update computes of every sampled token is what the engine said."""
    group = []
    for seed in range(3):
        request = asked(0, seed=seed, temperature=0.7)
        trajectory = Trajectory((Segment(request.prompt, Author.PROMPT, frames=request.frames), Segment(request.suffix, Author.PINNED)))
        for turn in range(2):
            suffix = trajectory.ids[len(request.prompt) :]
            (sample,) = engine.generate([dataclasses.replace(request, suffix=suffix, max_new_tokens=8 - seed, seed=10 * seed + turn)])
            trajectory.append(Segment(sample.ids, Author.MODEL, sample.logprobs, digest=sample.digest))
            trajectory.append(Segment(np.arange(20, 24), Author.TOOL))
        group.append(trajectory)
    batch = build([group], small_features, BatchShape(groups=1, rows=3, prompt=96, visual=16, suffix=32))
    graph, weights = nnx.split(small_model.text)
    again = np.asarray(make_logprobs(graph, small_features.config.image_token_id, 0.7)(weights, batch))
    assert batch.sampled.sum() == 2 * (8 + 7 + 6) and mismatches(batch, [group]) == 0
    np.testing.assert_allclose(again[batch.sampled], batch.logprobs[batch.sampled], atol=1e-4)


def test_the_trainer_computes_a_sub_agents_first_token_too(engine, look, small_model, small_features):
    """A sub-agent's response follows its prompt at once: its first token is predicted by the prompt's last."""
    groups = []
    for request in (look(0, seed=1), look(40, seed=2), look(80, seed=3)):
        (sample,) = engine.generate([request])
        whole = np.concatenate([request.prompt, request.suffix])
        said = Segment(sample.ids, Author.MODEL, sample.logprobs, digest=sample.digest)
        groups.append([Trajectory((Segment(whole, Author.PROMPT, frames=request.frames), said))])
    batch = build(groups, small_features, BatchShape(groups=3, rows=1, prompt=56, visual=8, suffix=8))
    graph, weights = nnx.split(small_model.text)
    again = np.asarray(make_logprobs(graph, small_features.config.image_token_id, 1.0)(weights, batch))
    assert batch.sampled.sum(1).tolist() == [4, 4, 4] and mismatches(batch, groups) == 0
    np.testing.assert_allclose(again[batch.sampled], batch.logprobs[batch.sampled], atol=1e-4)


def test_temperature_sets_how_far_samples_spread(engine, asked, plain):
    requests = [asked(0, seed=n, temperature=0.05 if n < 20 else 1.0, new=1) for n in range(40)]
    firsts = [int(sample.ids[0]) for sample in engine.generate(requests)]
    likeliest = int(plain(requests[0], np.zeros(1, np.int32))[0].argmax())
    assert firsts[:20].count(likeliest) > 10 > firsts[20:].count(likeliest) and len(set(firsts[20:])) > 5


def test_samples_follow_their_distribution(engine, asked, plain):
    """First tokens of many seeds against their probabilities: no word turns up much more often than it should."""
    count = 400
    firsts = [int(s.ids[0]) for s in engine.generate([asked(0, seed=n, temperature=0.5, new=1) for n in range(count)])]
    chances = np.exp(tempered(plain(asked(0), np.zeros(1, np.int32)), 0.5)[0])
    seen = np.bincount(firsts, minlength=len(chances)) / count
    error = np.abs(seen - chances) / np.sqrt(np.maximum(chances, 1 / count) / count)
    assert error.max() < 4.5 and chances.max() > 0.05


# --- rows ---


def test_a_rows_tokens_do_not_depend_on_its_neighbours(engine, asked, look):
    requests = (
        [asked(n, seed=n, new=12 - n % 3) for n in range(8)]
        + [look(4 * n, seed=n) for n in range(6)]
        + [asked(0, seed=n) for n in range(7)]
    )
    alone = []
    for request in requests:
        engine.forget()
        alone += engine.generate([request])
    order = np.random.default_rng(0).permutation(len(requests))
    shuffled = dict(zip(order.tolist(), engine.generate([requests[i] for i in order]), strict=True))
    for number, (together, sample) in enumerate(zip(engine.generate(requests), alone, strict=True)):
        assert together.ids.tolist() == sample.ids.tolist() == shuffled[number].ids.tolist()
        np.testing.assert_allclose(together.logprobs, sample.logprobs, atol=1e-5)
        assert together.digest == sample.digest == shuffled[number].digest


def test_a_seed_gives_the_same_tokens_and_another_seed_others(engine, asked):
    first, again, other = engine.generate([asked(seed=3), asked(seed=3), asked(seed=4)])
    assert first.ids.tolist() == again.ids.tolist() != other.ids.tolist()
    (large,) = engine.generate([asked(seed=2**32 + 3)])
    assert large.ids.tolist() == first.ids.tolist()  # seeds are 32 bits wide


def test_each_row_stops_at_its_own_limit_and_its_own_stop_ids(engine, asked):
    (free,) = engine.generate([asked(temperature=0.0)])
    third = int(free.ids[2])
    first = free.ids.tolist().index(third) + 1
    requests = [asked(temperature=0.0, new=n) for n in (1, 5, 12)]
    requests += [
        asked(temperature=0.0, stops=(461, third)),
        asked(temperature=0.0, new=first, stops=(third,)),
        asked(temperature=0.0, new=0),
    ]
    samples = engine.generate(requests)
    assert [len(s.ids) for s in samples] == [1, 5, 12, first, first, 0] == [len(s.logprobs) for s in samples]
    assert [s.stop for s in samples] == [SampleStop.LENGTH] * 3 + [SampleStop.STOP_ID] * 2 + [SampleStop.LENGTH]
    assert all(free.ids.tolist()[: len(s.ids)] == s.ids.tolist() for s in samples)


def test_finished_rows_end_the_loop(engine, asked):
    before = engine.counts.decode_steps
    engine.generate([asked(n, new=3) for n in range(4)])
    assert engine.counts.decode_steps - before == 3


# --- prompts ---


def test_a_groups_prompt_is_prefilled_once(engine, asked):
    before = dataclasses.replace(engine.counts)
    engine.generate([asked(n, seed=s) for s in range(8) for n in (0, 1)])
    counts = engine.counts
    assert counts.prompts - before.prompts == 2
    assert counts.prefilled_tokens - before.prefilled_tokens == len(asked(0).prompt) + len(asked(1).prompt)
    assert counts.sampled_tokens - before.sampled_tokens == 16 * 12
    engine.generate([asked(0, suffix=range(9)), asked(2)])  # a later turn of the same agent, and another question
    assert counts.prompts - before.prompts == 3 and counts.prompts_reused > before.prompts_reused


def test_new_weights_mean_new_kv(engine, asked, plain, small_model):
    request = asked(temperature=0.0)
    (old,) = engine.generate([request])
    graph, weights = nnx.split(small_model.text)
    changed = jax.tree.map(lambda w: w * 1.25, weights)
    prompts = engine.counts.prompts
    engine.load(changed, version=3)
    (new,) = engine.generate([request])
    assert (old.version, new.version) == (0, 3) and engine.counts.prompts == prompts + 1
    scores = plain(request, new.ids, nnx.merge(graph, changed))
    np.testing.assert_allclose(new.logprobs, own(scores, new.ids), atol=1e-4)
    assert np.abs(own(plain(request, new.ids), new.ids) - new.logprobs).max() > 1e-2
    engine.load(weights, version=4)
    assert engine.generate([request])[0].ids.tolist() == old.ids.tolist()


def test_a_prompts_kv_belongs_to_its_frames(engine, asked, plain, small_features, small_questions):
    """Two requests with the same ids and other pictures are two prompts."""
    request, before = asked(temperature=0.0), engine.counts.prompts
    other = next(q.video for q in small_questions if q.video != request.frames[0].video)
    moved = dataclasses.replace(request, frames=small_features.overview(other, 4))
    later = dataclasses.replace(request, frames=tuple(dataclasses.replace(f, index=f.index - 1 if f.index else 3) for f in request.frames))
    for one, sample in zip((request, moved, later), engine.generate([request, moved, later]), strict=True):
        np.testing.assert_allclose(sample.logprobs, own(plain(one, sample.ids), sample.ids), atol=1e-4)
    assert engine.counts.prompts - before == 3


def test_prompts_that_give_way_are_computed_again(engine, look):
    """More prompts than are kept: results stay what they were."""
    requests = [look(start, seed=start) for start in range(0, 120, 5)]
    first = engine.generate(requests)
    prompts = engine.counts.prompts
    again = engine.generate(requests[::-1])[::-1]
    assert engine.counts.prompts - prompts >= len(requests) - 10
    assert [s.ids.tolist() for s in again] == [s.ids.tolist() for s in first]


# --- what it says of itself ---


def test_the_digest_is_of_everything_the_model_was_fed(engine, asked, look):
    requests = [asked(0), asked(1, suffix=range(3, 20)), look(0)]
    for request, sample in zip(requests, engine.generate(requests), strict=True):
        assert sample.digest == digest(np.concatenate([request.prompt, request.suffix, sample.ids]))


def test_after_warming_up_nothing_compiles(engine, asked, look):
    compilations = Compilations()
    for stops in (NEVER, (1,), (1, 2, 3)):  # no other test asks for three
        engine.generate([asked(n, seed=n, stops=stops, suffix=range(1 + n)) for n in range(11)] + [look(n) for n in range(3)])
    engine.generate([look(0)])
    engine.generate([asked(0, temperature=0.0, new=2)])
    assert compilations.count == 0


def test_a_request_that_fits_no_shape_is_refused_by_name(engine, asked):
    too_long = asked(suffix=range(25))
    with pytest.raises(ValueError, match=r"engine.shapes: no shape holds a request of prompt \d+, visual 4, suffix 25, new 12 tokens"):
        engine.generate([asked(), too_long])
    with pytest.raises(ValueError, match="visual 17"):
        engine.generate([asked(frames=17)])
    with pytest.raises(ValueError, match="new 13"):
        engine.generate([asked(new=13)])


def test_a_request_without_a_suffix_is_refused(engine, asked):
    """Its first token would be predicted by padding."""
    with pytest.raises(ValueError, match="Request.suffix: empty"):
        engine.generate([asked(suffix=())])


def test_more_stop_ids_than_a_row_has_are_refused(engine, asked):
    with pytest.raises(ValueError, match="Request.stop_ids: 5 ids; a row has at most 4"):
        engine.generate([asked(stops=range(5))])


def test_too_few_kept_prompts_are_refused():
    with pytest.raises(ValueError, match=r"engine.kept_prompts: 9; .* = 10"):
        EngineSettings(SHAPES, rows=8, prefill_rows=2, kept_prompts=9)
