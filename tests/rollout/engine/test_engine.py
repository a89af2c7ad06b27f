"""The sampler against the plain forward pass; rows against their neighbours; what is kept, what is given back, what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import re
import weakref
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.features import FrameFeatures, FrameSettings
from models.qwen3_vl.model import abstract_model
from models.qwen3_vl.rope import mrope_positions, next_position
from paravt_jax.data import video
from paravt_jax.method.records import Author, Segment, Trajectory, digest
from rollout.engine.engine import Engine
from rollout.engine.programs import MOST_STOP_IDS, Pieces, Programs, Rows, pages_of
from rollout.engine.requests import Request, Sample, SampleStop, Sampling
from rollout.engine.sampling import Choices
from rollout.engine.settings import EngineSizes
from tests.rollout.engine.reference import assert_nothing_held
from tests.rollout.engine.test_sampling import by_sorting
from train.durable.compilations import Compilations
from train.learn.batch import BatchShape, build, mismatches
from train.learn.step import make_logprobs

SETTINGS = EngineSizes(
    row_lengths=(64, 136),
    prefix_lengths=(48, 96),
    prefill_lengths=(8, 96),
    slots=8,
    rows_per_prefix=4,
    page=8,
    pages=120,
    prefill_tokens=192,
    steps=4,
)
NEVER = ()  # no stop ids: rows run to their limit


@dataclasses.dataclass
class Clock:
    """Seconds, as a test says."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def table(small_model) -> list[bytes]:
    """The bytes of every token: its number in brackets."""
    return [b"<%d>" % token for token in range(small_model.config.text.vocab_size)]


@pytest.fixture(scope="module")
def features(small_world, small_model) -> FrameFeatures:
    """Frames of four tokens, so that pages and pieces end in the middle of one."""
    settings = FrameSettings(min_pixels=4096, batch=64, whole_frames=128)
    return FrameFeatures(
        small_model.vision, small_model.config, settings, small_world.folder, source=video
    )


@pytest.fixture(scope="module")
def make_engine(small_model, features, table, clock):
    """make_engine(page=4, ...) is an engine with other settings."""
    return lambda **changes: Engine(
        small_model, features, dataclasses.replace(SETTINGS, **changes), table, clock
    )


@pytest.fixture(scope="module")
def engine(make_engine):
    """An engine that is warm: whatever it samples from here on compiles nothing."""
    engine = make_engine()
    engine.warm_up()
    return engine


@pytest.fixture(autouse=True)
def clean(request):
    """Every test starts with the model's own weights and nothing kept, and gives all pages back."""
    if "engine" not in request.fixturenames:
        yield
        return
    engine, model = request.getfixturevalue("engine"), request.getfixturevalue("small_model")
    for ticket in list(engine.unanswered):  # of a test that failed
        engine.cancel(ticket)
    engine.load(nnx.split(model.text)[1], version=0)
    yield
    assert_nothing_held(engine)


@pytest.fixture(scope="module")
def asked(small_environment, small_questions, features):
    """asked(n, ...) is the opening request of question n, K = 4."""
    protocol = small_environment.protocol

    def make(
        number: int = 0,
        seed: int = 1,
        temperature: float = 1.0,
        new: int = 12,
        stops=NEVER,
        suffix=None,
        frames: int = 4,
        **more,
    ) -> Request:
        question = small_questions[number % len(small_questions)]
        shown = features.overview(question.video, frames)
        prompt = np.concatenate(
            [
                protocol.overview(shown, features.tokens(question.video)).ids,
                protocol.question(question).ids,
            ]
        )
        suffix = protocol.pinned.ids if suffix is None else np.asarray(suffix, np.int32)
        sampling = Sampling(new, temperature, stop_ids=tuple(stops), **more)
        return Request(np.concatenate([prompt, suffix]), shown, sampling, (seed,))

    return make


@pytest.fixture(scope="module")
def look(small_environment, small_questions, features):
    """look(start) is a sub-agent's request for eight seconds of a video: a shorter shape."""

    def make(start: int = 0, seed: int = 1) -> Request:
        video = small_questions[0].video
        frames = features.window(video, start, start + 4, 1.0, 2)
        return Request(
            small_environment.protocol.window(frames, features.tokens(video)).ids,
            frames,
            Sampling(4),
            (seed,),
        )

    return make


@pytest.fixture(scope="module")
def plain(small_model, features):
    """plain(request, ids) is what a forward pass over the whole sequence says of `ids`: log-probs of every word, [t, v]."""
    run = nnx.jit(lambda text, batch: jax.nn.log_softmax(text.logits(text(**batch)[0])))

    def score(request: Request, ids: np.ndarray, text=small_model.text) -> np.ndarray:
        whole = np.concatenate([request.ids, ids])
        n, size = len(whole), 144
        row = np.zeros((1, size), np.int32)
        segments, positions, index = (
            row.copy(),
            np.zeros((3, 1, size), np.int32),
            np.full((1, size), -1),
        )
        row[0, :n], segments[0, :n] = whole, 1
        images = np.flatnonzero(whole == features.config.image_token_id)[
            : sum(features.tokens(frame.video) for frame in request.frames)
        ]
        index[0, images] = np.arange(len(images))
        end = images[-1] + 1 if len(images) else 0  # a placeholder that was drawn is a word
        start = mrope_positions(
            whole[:end], [features.grid(frame.video) for frame in request.frames], features.config
        )
        positions[:, 0, :n] = np.concatenate(
            [start, np.tile(next_position(start) + np.arange(n - end), (3, 1))], axis=1
        )
        visual = np.zeros((1, 16, 2, 32), np.float32)
        if request.frames:
            visual[0, : len(images)] = features(request.frames)
        batch = {
            "ids": row,
            "positions": positions,
            "segment_ids": segments,
            "visual": visual,
            "visual_index": index,
        }
        out = np.asarray(run(text, batch)[0])
        return out[n - len(ids) - 1 : n - 1]

    return score


def text(length: int, number: int = 0, new: int = 12, seed: int = 1, **sampling) -> Request:
    """A request of words alone; `number` says which, beginning with the first."""
    ids = np.random.default_rng(number).integers(20, 400, length).astype(np.int32)
    ids[:1] = 20 + number
    return Request(ids, (), Sampling(new, **sampling), (seed,))


def go_on(request: Request, sample: Sample, more, seed: int = 2, new: int = 12) -> Request:
    """The next turn: all there was, and more."""
    ids = np.concatenate([request.ids, sample.ids, np.asarray(more, np.int32)])
    return Request(
        ids, request.frames, dataclasses.replace(request.sampling, max_new_tokens=new), (seed,)
    )


def changed(request: Request, **sampling) -> Request:
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, **sampling))


def sampled(engine: Engine, requests) -> list[Sample]:
    """One sample a request."""
    return [sample for (sample,) in engine.generate(requests)]


def prefills(engine: Engine, requests) -> int:
    """How many tokens are prefilled for these requests."""
    before = engine.counts.prefilled_tokens
    engine.generate(requests)
    return engine.counts.prefilled_tokens - before


def assert_equal(found, expected) -> None:
    """The same tokens, and log-probs within 1e-5."""
    for one, other in zip(found, expected, strict=True):
        assert (
            one.ids.tolist() == other.ids.tolist()
            and one.stop is other.stop
            and one.digest == other.digest
        )
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def step_until_done(engine: Engine) -> dict[int, tuple[Sample, ...]]:
    answers = {}
    while not engine.idle:
        answers |= engine.step()
    return answers


def own(scores: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return np.take_along_axis(scores, ids[:, None].astype(int), 1)[:, 0]


def tempered(scores: np.ndarray, temperature: float) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(jnp.asarray(scores) / temperature))


# --- what is sampled ---


def test_greedy_takes_the_likeliest_token_of_the_plain_forward_pass(engine, asked, look, plain):
    requests = [asked(n, temperature=0.0) for n in range(4)] + [
        changed(look(8 * n), temperature=0.0) for n in range(3)
    ]
    for request, sample in zip(requests, sampled(engine, requests), strict=True):
        scores = plain(request, sample.ids)
        assert (
            sample.ids.tolist() == scores.argmax(-1).tolist()
            and len(sample.ids) == request.sampling.max_new_tokens
        )
        np.testing.assert_allclose(sample.logprobs, own(scores, sample.ids), atol=1e-4)
    assert (
        len({tuple(sample.ids) for sample in sampled(engine, requests)}) > 3
    )  # the frames and the question matter


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
def test_sampled_log_probs_are_those_of_the_plain_forward_pass(engine, asked, plain, temperature):
    requests = [
        asked(n, seed=n, temperature=temperature, suffix=range(5, 5 + 5 * n) if n else None)
        for n in range(4)
    ]
    for request, sample in zip(requests, sampled(engine, requests), strict=True):
        expected = own(tempered(plain(request, sample.ids), temperature), sample.ids)
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)
        assert sample.logprobs.dtype == np.float32 and sample.ids.dtype == np.int32


def test_the_trainer_computes_the_sampled_log_probs_again(engine, asked, small_model, features):
    """One group, several turns long: what the update computes of every sampled token is what the engine said."""
    group = []
    for seed in range(3):
        request = asked(0, suffix=())
        trajectory = Trajectory(
            (
                Segment(request.ids, Author.PROMPT, frames=request.frames),
                Segment(np.arange(7, 9), Author.PINNED),
            )
        )
        for turn in range(2):
            (sample,) = sampled(
                engine,
                [
                    Request(
                        trajectory.ids, request.frames, Sampling(8 - seed, 0.7), (10 * seed + turn,)
                    )
                ],
            )
            trajectory.append(
                Segment(sample.ids, Author.MODEL, sample.logprobs, digest=sample.digest)
            )
            trajectory.append(Segment(np.arange(20, 24), Author.TOOL))
        group.append(trajectory)
    batch = build([group], features, BatchShape(groups=1, rows=3, prompt=96, visual=16, suffix=32))
    graph, weights = nnx.split(small_model.text)
    again = np.asarray(make_logprobs(graph, features.config.image_token_id, 0.7)(weights, batch))
    assert batch.sampled.sum() == 2 * (8 + 7 + 6) and mismatches(batch, [group]) == 0
    np.testing.assert_allclose(again[batch.sampled], batch.logprobs[batch.sampled], atol=1e-4)


def test_the_trainer_computes_a_sub_agents_first_token_too(engine, look, small_model, features):
    """A sub-agent's response follows its prompt at once: its first token is predicted by the prompt's last."""
    groups = []
    for request in (look(0, seed=1), look(40, seed=2), look(80, seed=3)):
        (sample,) = sampled(engine, [request])
        said = Segment(sample.ids, Author.MODEL, sample.logprobs, digest=sample.digest)
        groups.append(
            [Trajectory((Segment(request.ids, Author.PROMPT, frames=request.frames), said))]
        )
    batch = build(groups, features, BatchShape(groups=3, rows=1, prompt=56, visual=8, suffix=8))
    graph, weights = nnx.split(small_model.text)
    again = np.asarray(make_logprobs(graph, features.config.image_token_id, 1.0)(weights, batch))
    assert batch.sampled.sum(1).tolist() == [4, 4, 4] and mismatches(batch, groups) == 0
    np.testing.assert_allclose(again[batch.sampled], batch.logprobs[batch.sampled], atol=1e-4)


def test_samples_follow_their_distribution(engine, asked, plain):
    """First tokens of many seeds against their probabilities: no word turns up much more often than it should."""
    count = 400
    firsts = [
        int(s.ids[0])
        for s in sampled(engine, [asked(0, seed=n, temperature=0.5, new=1) for n in range(count)])
    ]
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
        alone += sampled(engine, [request])
    order = np.random.default_rng(0).permutation(len(requests))
    shuffled = dict(zip(order.tolist(), sampled(engine, [requests[i] for i in order]), strict=True))
    for number, (together, sample) in enumerate(zip(sampled(engine, requests), alone, strict=True)):
        assert together.ids.tolist() == sample.ids.tolist() == shuffled[number].ids.tolist()
        np.testing.assert_allclose(together.logprobs, sample.logprobs, atol=1e-5)
        assert together.digest == sample.digest == shuffled[number].digest


def test_a_seed_gives_the_same_tokens_and_another_seed_others(engine, asked):
    first, again, other = sampled(engine, [asked(seed=3), asked(seed=3), asked(seed=4)])
    assert first.ids.tolist() == again.ids.tolist() != other.ids.tolist()
    (large,) = sampled(engine, [asked(seed=2**32 + 3)])
    assert large.ids.tolist() == first.ids.tolist()  # seeds are 32 bits wide


def test_each_row_stops_at_its_own_limit_and_its_own_stop_ids(engine, asked):
    (free,) = sampled(engine, [asked(temperature=0.0)])
    third = int(free.ids[2])
    first = free.ids.tolist().index(third) + 1
    requests = [asked(temperature=0.0, new=n) for n in (1, 5, 12)]
    requests += [
        asked(temperature=0.0, stops=(461, third)),
        asked(temperature=0.0, new=first, stops=(third,)),
        asked(temperature=0.0, new=0),
    ]
    samples = sampled(engine, requests)
    assert (
        [len(s.ids) for s in samples]
        == [1, 5, 12, first, first, 0]
        == [len(s.logprobs) for s in samples]
    )
    assert [s.stop for s in samples] == [SampleStop.LENGTH] * 3 + [SampleStop.STOP_ID] * 2 + [
        SampleStop.LENGTH
    ]
    assert all(free.ids.tolist()[: len(s.ids)] == s.ids.tolist() for s in samples)


def test_finished_rows_end_the_loop(engine, asked):
    before = engine.counts.steps
    sampled(engine, [asked(n, new=3) for n in range(4)])
    assert engine.counts.steps - before == 3


def test_a_placeholder_that_a_model_wrote_is_a_word(engine, asked, plain, features):
    """In the next turn of a request with frames and of one without; it may be the last of what was asked, too."""
    wrote = features.config.image_token_id
    for request in (asked(0), text(20)):
        (sample,) = sampled(engine, [request])
        for more in ([40, wrote, 41, wrote], [wrote]):
            turn = go_on(request, sample, more)
            (later,) = sampled(engine, [turn])
            np.testing.assert_allclose(
                later.logprobs, own(plain(turn, later.ids), later.ids), atol=1e-4
            )


def test_several_seeds_are_several_requests(engine, asked):
    """One request with three seeds, and three with one each: the same samples, in the order of the seeds."""
    request = asked(0, stops=tuple(range(100, 104)), temperature=2.5)
    seeds = (5, 3, 2**32 + 8)
    (together,) = engine.generate([dataclasses.replace(request, seeds=seeds)])
    engine.forget()
    assert_equal(
        together, sampled(engine, [dataclasses.replace(request, seeds=(seed,)) for seed in seeds])
    )
    assert len({tuple(sample.ids) for sample in together}) == 3


def test_top_k_and_top_p_cut_what_is_sampled_from(engine, asked, plain):
    """In one batch with rows that are not cut; the log-probs are those of the words that are left."""
    cuts = [(0, 1.0), (3, 1.0), (0, 0.5), (20, 0.9), (1, 1.0)]
    requests = [
        asked(n, seed=n, temperature=0.8, top_k=k, top_p=p) for n, (k, p) in enumerate(cuts)
    ]
    for request, sample, (k, p) in zip(requests, sampled(engine, requests), cuts, strict=True):
        expected = [
            by_sorting(scores, 0.8, k, p)[token]
            for scores, token in zip(plain(request, sample.ids), sample.ids, strict=True)
        ]
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)
    alone = [sampled(engine, [request])[0] for request in requests]
    assert_equal(sampled(engine, requests[::-1]), alone[::-1])


TOGETHER = {
    "little of everything": {
        "page": 4,
        "slots": 2,
        "rows_per_prefix": 1,
        "steps": 1,
        "prefill_lengths": (8,),
        "prefill_tokens": 8,
        "prefix_lengths": (),
        "pages": 60,
    },
    "much of everything": {
        **{"row_lengths": (136,), "prefix_lengths": (102,), "prefill_lengths": (102,), "page": 17},
        **{"slots": 16, "rows_per_prefix": 8, "steps": 16, "pages": 400, "prefill_tokens": 2000},
    },
    "decoding on the pages": {"paged": True},
}
ALONE = {
    "page": {"page": 2},
    "odd page": {
        "page": 17,
        "row_lengths": (68, 136),
        "prefix_lengths": (51, 102),
        "prefill_lengths": (17, 51, 102),
    },
    "slots": {"slots": 3, "rows_per_prefix": 3},
    "rows_per_prefix": {"rows_per_prefix": 1},
    "many rows per prefix": {"rows_per_prefix": 8},
    "steps": {"steps": 1},
    "many steps": {"steps": 16},
    "few pages": {"pages": 17},
    "many pages": {"pages": 1000},
    "one small piece": {"prefill_lengths": (8,)},
    "one large piece": {"prefill_lengths": (136,)},
    "prefill_tokens": {"prefill_tokens": 1},
    "many prefill_tokens": {"prefill_tokens": 5000},
    "read_tokens": {"read_tokens": 1, "prefix_lengths": ()},
    "some read_tokens": {"read_tokens": 600},
    "nothing shared": {"prefix_lengths": ()},
    "little shared": {"prefix_lengths": (16,)},
    "short rows": {"row_lengths": (16, 32, 136)},
    "decoding on odd pages": {
        "paged": True,
        "page": 17,
        "row_lengths": (68, 136),
        "prefix_lengths": (51,),
        "prefill_lengths": (17, 102),
        "steps": 5,
    },
}
VARIED = [pytest.param(changes, id=name) for name, changes in TOGETHER.items()]
VARIED += [
    pytest.param(changes, id=name, marks=pytest.mark.slow) for name, changes in ALONE.items()
]


@pytest.mark.parametrize("changes", VARIED)
def test_no_size_changes_a_sample(engine, make_engine, asked, look, changes):
    """Groups, sub-agents, text alone, long and short, cut and greedy ones; then the next turn of all."""
    first = [dataclasses.replace(asked(n, new=12 - n), seeds=(1, 2, 3)) for n in range(3)] + [
        look(8 * n, seed=n) for n in range(3)
    ]
    first += [
        text(1),
        text(9, 1, top_k=5),
        text(100, 2, temperature=0.0),
        text(100, 2, top_p=0.7),
        asked(0, suffix=range(7, 20)),
    ]
    other = make_engine(**changes)
    found, expected = other.generate(first), engine.generate(first)
    assert_equal([s for group in found for s in group], [s for group in expected for s in group])
    second = [
        go_on(r, sample, range(30, 33 + n))
        for n, (r, group) in enumerate(zip(first, expected, strict=True))
        for sample in group
    ]
    assert_equal(sampled(other, second), sampled(engine, second))
    assert_nothing_held(other)


# --- what is kept ---


def test_a_groups_prompt_is_prefilled_once(engine, asked):
    before = dataclasses.replace(engine.counts)
    groups = [dataclasses.replace(asked(n), seeds=tuple(range(8))) for n in (0, 1)]
    both = len(asked(0).ids) - 1, len(asked(1).ids) - 1
    same = int(
        np.flatnonzero(asked(0).ids[: min(both)] != asked(1).ids[: min(both)])[0]
    )  # one video, other questions
    assert prefills(engine, groups) == sum(both) - same and same > 40
    assert engine.counts.reused_tokens - before.reused_tokens == 7 * sum(both) + same
    assert engine.counts.sampled_tokens - before.sampled_tokens == 16 * 12
    assert prefills(engine, [*groups, asked(0, seed=99)]) == 0


@pytest.mark.parametrize("more", [1, 5, 8, 30])
def test_the_next_turn_prefills_only_what_is_new(engine, asked, plain, more):
    """Tool results after every sample of a group, which end anywhere on a page; then a third turn."""
    groups = [dataclasses.replace(asked(n, new=9 + n), seeds=(1, 2, 3)) for n in (0, 2)]
    answers = engine.generate(groups)
    turns = [
        go_on(r, s, [30 + n] + [31] * (more - 1))
        for r, group in zip(groups, answers, strict=True)
        for n, s in enumerate(group)
    ]
    reused = engine.counts.reused_tokens
    assert prefills(engine, turns) == 6 * more
    assert engine.counts.reused_tokens - reused == sum(len(turn.ids) - 1 - more for turn in turns)
    third = [
        go_on(turn, sample, [41, 42], new=3)
        for turn, sample in zip(turns, sampled(engine, turns), strict=True)
    ]
    assert prefills(engine, third) == 6 * 2
    for turn, sample in zip(third, sampled(engine, third), strict=True):
        np.testing.assert_allclose(
            sample.logprobs, own(plain(turn, sample.ids), sample.ids), atol=1e-4
        )


@pytest.mark.parametrize("same", [3, 8, 13, 16, 31, 39])
def test_what_two_prompts_have_in_common_is_computed_once(engine, same):
    """Whole pages are shared; of the page in whose middle they part, the sibling gets a copy, and the first one's stays as it was."""
    first = text(40, temperature=0.0)
    sibling = dataclasses.replace(first, ids=np.concatenate([first.ids[:same], text(25, 9).ids]))
    fresh = []
    for request in (first, sibling):
        engine.forget()
        fresh += sampled(engine, [request])
    engine.forget()
    assert prefills(engine, [first]) == 39
    assert prefills(engine, [sibling]) == len(sibling.ids) - 1 - same
    assert prefills(engine, [first, sibling]) == 0
    assert_equal(sampled(engine, [first, sibling]), fresh)
    engine.forget()  # now side by side, the second while the first goes on writing
    tickets = [engine.submit(first)]
    engine.step()
    tickets.append(engine.submit(sibling))
    answers = step_until_done(engine)
    assert_equal([answers[ticket][0] for ticket in tickets], fresh)


def test_a_prompt_longer_than_the_largest_piece_goes_in_several(make_engine, engine, asked, plain):
    other = make_engine(
        prefill_lengths=(8, 24), prefill_tokens=48, row_lengths=(136,), prefix_lengths=()
    )
    requests = [asked(n, seed=n, suffix=range(5, 5 + 7 * n) if n else None) for n in range(4)] + [
        text(120, 1),
        text(3),
    ]
    assert prefills(other, requests) == prefills(engine, requests)
    other.forget()
    found = sampled(other, requests)
    assert_equal(found, sampled(engine, requests))
    for request, sample in zip(requests, found, strict=True):
        np.testing.assert_allclose(
            sample.logprobs, own(plain(request, sample.ids), sample.ids), atol=1e-4
        )


def test_kv_belongs_to_its_frames(engine, asked, plain, features, small_questions):
    """Requests with the same ids and other pictures share what stands before the first of them, and no more."""
    request = asked(temperature=0.0)
    other = next(q.video for q in small_questions if q.video != request.frames[0].video)
    moved = dataclasses.replace(request, frames=features.overview(other, 4))
    later = dataclasses.replace(
        request,
        frames=tuple(
            dataclasses.replace(f, index=f.index - 1 if f.index else 3) for f in request.frames
        ),
    )
    last = dataclasses.replace(request, frames=(*request.frames[:3], moved.frames[3]))
    requests = (request, moved, later, last)
    images = np.flatnonzero(request.ids == features.config.image_token_id)
    whole = len(request.ids) - 1
    assert (
        prefills(engine, requests)
        == whole + 2 * (whole - images[0]) + whole - images[-features.tokens(other)]
    )
    for one, sample in zip(requests, sampled(engine, requests), strict=True):
        np.testing.assert_allclose(
            sample.logprobs, own(plain(one, sample.ids), sample.ids), atol=1e-4
        )


def test_pages_that_give_way_are_computed_again(engine, look):
    """More prompts than there is room for: results stay what they were."""
    requests = [look(start, seed=start) for start in range(0, 60)]
    first = sampled(engine, requests)
    before = engine.counts.prefilled_tokens
    again = sampled(engine, requests[::-1])[::-1]
    assert engine.counts.prefilled_tokens - before > 20 * 5
    assert_equal(again, first)


# --- weights ---


@pytest.fixture(scope="module")
def louder(small_model):
    """Other weights: the model's own times 1.25."""
    return jax.tree.map(lambda w: w * 1.25, nnx.split(small_model.text)[1])


def test_new_weights_mean_new_kv(engine, asked, plain, small_model, louder):
    request = asked(temperature=0.0)
    (old,) = sampled(engine, [request])
    graph, weights = nnx.split(small_model.text)
    engine.load(louder, version=3)
    assert prefills(engine, [request]) == len(request.ids) - 1
    (new,) = sampled(engine, [request])
    assert (old.version, new.version) == (0, 3)
    scores = plain(request, new.ids, nnx.merge(graph, louder))
    np.testing.assert_allclose(new.logprobs, own(scores, new.ids), atol=1e-4)
    assert np.abs(own(plain(request, new.ids), new.ids) - new.logprobs).max() > 1e-2
    engine.load(weights, version=4)
    assert sampled(engine, [request])[0].ids.tolist() == old.ids.tolist()


@pytest.fixture(scope="module")
def in_flight(engine, asked, small_model, louder):
    """What a request gives under the old weights and under the new ones."""
    request = dataclasses.replace(asked(0, new=11), seeds=(1, 2))
    (old,) = engine.generate([request])
    engine.load(louder, version=1)
    (new,) = engine.generate([request])
    assert old[0].ids.tolist() != new[0].ids.tolist()
    return request, old, new


def test_what_runs_finishes_under_its_weights(engine, louder, in_flight):
    """And what is asked while it runs is sampled from the new ones, side by side with it."""
    request, old, new = in_flight
    first = engine.submit(request)
    engine.step()
    before = engine.counts.prefilled_tokens
    engine.load(louder, version=1)
    second = engine.submit(request)
    engine.step()
    assert (
        len(engine.running) == 4
        and engine.counts.prefilled_tokens - before == len(request.ids) - 1
    )
    third = engine.submit(request)
    answers = step_until_done(engine)
    for ticket, samples, version in ((first, old, 0), (second, new, 1), (third, new, 1)):
        assert_equal(answers[ticket], samples)
        assert {sample.version for sample in answers[ticket]} == {version}
    assert set(engine.weights) == {1}  # nobody keeps the old ones alive
    assert prefills(engine, [request]) == 0


def test_what_waits_starts_under_the_new_weights(engine, louder, in_flight):
    request, old, new = in_flight
    tickets = [engine.submit(request) for _ in range(6)]  # 12 samples for 8 slots
    engine.step()
    engine.load(louder, version=1)
    answers = step_until_done(engine)
    for number, ticket in enumerate(tickets):
        assert_equal(answers[ticket], old if number < 4 else new)
        assert {sample.version for sample in answers[ticket]} == {int(number >= 4)}


def test_what_runs_restarts_under_the_new_weights(engine, louder, in_flight):
    request, _, new = in_flight
    tickets = [engine.submit(request) for _ in range(6)]
    engine.step()
    engine.load(louder, version=1, in_flight="restart")
    assert set(engine.weights) == {1} and not engine.running
    waiting = [sequence.ticket for sequence in engine.waiting]
    assert waiting == sorted(2 * tickets), "those that ran are first again, in their order"
    answers = step_until_done(engine)
    for ticket in tickets:
        assert_equal(answers[ticket], new)
        assert {sample.version for sample in answers[ticket]} == {1}
    assert list(answers) == tickets  # in turn, as they were asked


def test_a_version_that_is_sampled_from_is_not_given_other_weights(engine, louder, in_flight):
    engine.submit(in_flight[0])
    engine.step()
    with pytest.raises(
        ValueError,
        match="version 0 is still being sampled from; give new weights a new number, or restart",
    ):
        engine.load(louder, version=0)
    with pytest.raises(ValueError, match="in_flight = 'drop'; one of finish, restart"):
        engine.load(louder, version=1, in_flight="drop")
    engine.load(louder, version=0, in_flight="restart")
    (samples,) = step_until_done(engine).values()
    assert_equal(samples, in_flight[2])


# --- how samples end ---


@pytest.fixture
def spoken(engine, asked, table) -> Iterator[tuple[Request, Sample]]:
    """A request and its 12 tokens, no two of them equal; `table` is as it was after the test."""
    kept = list(table)
    for request in (asked(0, temperature=2.5, seed=seed) for seed in range(20)):
        (sample,) = sampled(engine, [request])
        if len(set(sample.ids.tolist())) == 12:
            break
    else:
        raise AssertionError("no seed gives twelve different tokens")
    yield request, sample
    table[:] = kept


def stop_at(engine: Engine, spoken: tuple[Request, Sample], *strings: bytes, **sampling) -> Sample:
    """What is sampled with these stop strings: the start of what was spoken."""
    request, free = spoken
    (sample,) = sampled(engine, [changed(request, stop_strings=strings, **sampling)])
    assert sample.ids.tolist() == free.ids[: len(sample.ids)].tolist()
    np.testing.assert_allclose(sample.logprobs, free.logprobs[: len(sample.ids)], atol=1e-5)
    assert sample.digest == digest(np.concatenate([request.ids, sample.ids]))
    return sample


@pytest.mark.parametrize("number", range(12))
def test_a_stop_string_ends_with_the_token_that_completes_it(engine, spoken, number):
    """A token by itself, wherever in a step it stands; later tokens of the step are dropped."""
    sample = stop_at(engine, spoken, b"<%d>" % spoken[1].ids[number])
    assert (
        len(sample.ids) == len(sample.logprobs) == number + 1
        and sample.stop is SampleStop.STOP_STRING
    )


def test_a_stop_string_may_span_tokens_and_steps(engine, spoken):
    ids = spoken[1].ids.tolist()
    for first, last in ((0, 1), (2, 4), (3, 8), (0, 11)):
        text = b"".join(b"<%d>" % token for token in ids[first : last + 1])
        assert len(stop_at(engine, spoken, text[1:-1]).ids) == last + 1
        assert (
            len(stop_at(engine, spoken, text[2:] if len(text) < 9 else text[3:-2]).ids) == last + 1
        )


def test_a_stop_string_may_end_inside_a_token_and_a_character(engine, spoken, table):
    """By bytes: a euro sign of which two tokens hold a part each, with other text around it."""
    ids = spoken[1].ids.tolist()
    table[ids[4]], table[ids[5]], table[ids[6]] = b"costs \xe2\x82", b"\xac", b" at most\n"
    assert len(stop_at(engine, spoken, "€".encode()).ids) == 6
    assert len(stop_at(engine, spoken, "s €".encode()).ids) == 6
    assert len(stop_at(engine, spoken, "€ at".encode()).ids) == 7
    assert len(stop_at(engine, spoken, b"\x82\xac at most\n").ids) == 7
    assert stop_at(engine, spoken, "£".encode()).stop is SampleStop.LENGTH


def test_the_first_of_several_stop_strings_ends_a_sample(engine, spoken):
    ids = spoken[1].ids.tolist()
    strings = [b"<%d>" % ids[9], b"<%d>" % ids[5], b"never", b"%d><%d" % (ids[5], ids[6])]
    for order in (strings, strings[::-1]):
        assert len(stop_at(engine, spoken, *order).ids) == 6


def test_only_what_is_sampled_is_searched_for_stop_strings(engine, spoken):
    """Not the prompt's text, nor where it meets the first token."""
    request, free = spoken
    for string in (
        b"<%d>" % request.ids[-2],
        b"<%d><%d>" % (request.ids[-1], free.ids[0]),
        b">" + b"<%d" % free.ids[0],
    ):
        assert stop_at(engine, spoken, string).stop is SampleStop.LENGTH


def test_stop_strings_and_stop_ids_and_the_limit_come_as_they_come(engine, spoken):
    ids = spoken[1].ids.tolist()
    sixth = b"<%d>" % ids[5]
    for expected, sampling in (
        ((5, SampleStop.STOP_ID), {"stop_ids": (ids[4],)}),
        ((6, SampleStop.STOP_STRING), {"stop_ids": (ids[6],)}),
        ((6, SampleStop.STOP_STRING), {"stop_ids": (ids[5],)}),  # both at once
        ((6, SampleStop.STOP_STRING), {"max_new_tokens": 6}),
        ((5, SampleStop.LENGTH), {"max_new_tokens": 5}),
    ):
        sample = stop_at(engine, spoken, sixth, **sampling)
        assert (len(sample.ids), sample.stop) == expected


def test_tokens_after_a_stop_string_are_not_found_later(engine, spoken, plain):
    """The next turn goes on from where the sample ended, though more was computed: even one that goes on with the same tokens."""
    request, free = spoken
    for more in (free.ids[6:8].tolist() + [33], [40, 41]):
        engine.forget()
        sample = stop_at(engine, spoken, b"<%d>" % free.ids[5])  # the second of a step of four
        turn = changed(go_on(request, sample, more), temperature=1.0)
        assert prefills(engine, [turn]) == len(more)
        (next_,) = sampled(engine, [turn])
        np.testing.assert_allclose(
            next_.logprobs, own(plain(turn, next_.ids), next_.ids), atol=1e-4
        )


def test_tokens_that_no_word_stands_for_are_no_text(engine, spoken, table):
    """A model has more rows than its tokenizer has words, so the table of bytes may end before a token."""
    ids = spoken[1].ids.tolist()
    at = next(n for n in range(1, 11) if ids[n - 1] < ids[n] > ids[n + 1])
    del table[ids[at] :]
    assert len(stop_at(engine, spoken, b"<%d><%d>" % (ids[at - 1], ids[at + 1])).ids) == at + 2


def test_a_deadline_ends_what_runs(engine, clock, asked):
    """With the tokens it has; nobody else notices."""
    free = sampled(engine, [asked(n, seed=n, new=20) for n in range(3)])
    tickets = [
        engine.submit(asked(n, seed=n, new=20, deadline=deadline))
        for n, deadline in enumerate((100.0, 5.0, 1.0))
    ]
    finished, answers = [], {}
    for seconds in (0, 1.0, 3.9, 0.125, 0):
        clock.now += seconds
        answers |= (done := dict(engine.step()))
        finished.append(list(done))
    assert finished == [[], [tickets[2]], [], [tickets[1]], [tickets[0]]]
    for number, count, stop in (
        (0, 20, SampleStop.LENGTH),
        (1, 12, SampleStop.DEADLINE),
        (2, 4, SampleStop.DEADLINE),
    ):
        (sample,) = answers[tickets[number]]
        assert (
            sample.stop is stop
            and sample.ids.tolist() == free[number].ids[:count].tolist()
            and len(sample.logprobs) == count
        )
        assert sample.digest == digest(np.concatenate([asked(number).ids, sample.ids]))


def test_a_deadline_ends_what_waits(engine, clock):
    """All samples of a request, those that run and those that still wait for a slot."""
    before = engine.counts.stops[SampleStop.DEADLINE]
    others = [engine.submit(text(20, number)) for number in range(6)]
    late = engine.submit(dataclasses.replace(text(20, 6, deadline=3.0), seeds=(1, 2, 3, 4)))
    engine.step()
    clock.now += 3
    ((ticket, samples),) = engine.step()
    assert ticket == late and [len(sample.ids) for sample in samples] == [4, 4, 0, 0]
    assert {sample.stop for sample in samples} == {SampleStop.DEADLINE} and engine.counts.stops[
        SampleStop.DEADLINE
    ] - before == 4
    assert set(step_until_done(engine)) == set(others)


def test_an_unreadable_video_fails_only_its_own_request(
    engine, asked, features, small_world, small_questions
):
    """One that cannot be read when its turn comes, and one of which nothing is known any more when it is asked about."""
    copies = [small_world.folder / name for name in ("gone.mp4", "broken.mp4", "forgotten.mp4")]
    shown = []
    for copy in copies:
        copy.write_bytes((small_world.folder / small_questions[0].video).read_bytes())
        shown.append(features.overview(copy.name, 4))
    features.forget(copies[2].name)
    for copy in copies[:2]:
        features.info(copy.name)  # known before they went
    copies[0].unlink()
    copies[1].write_bytes(copies[1].read_bytes()[:2000])
    copies[2].unlink()
    good = [asked(n, seed=n) for n in range(3)]
    bad = [dataclasses.replace(asked(0), frames=frames, seeds=(1, 2)) for frames in shown]
    expected = sampled(engine, good)
    engine.forget()
    answers = engine.generate([good[0], bad[0], bad[1], good[1], bad[2], good[2]])
    assert_equal([answers[n][0] for n in (0, 3, 5)], expected)
    for n in (1, 2, 4):
        assert [(sample.stop, sample.ids.size, sample.logprobs.size) for sample in answers[n]] == [
            (SampleStop.UNREADABLE, 0, 0)
        ] * 2
        assert answers[n][0].digest == digest(bad[0].ids)
    assert_nothing_held(engine)
    for copy in copies:
        features.forget(copy.name)
        copy.unlink(missing_ok=True)


# --- room ---


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_cancelling_gives_all_pages_back(engine, asked, steps):
    """Before anything runs, and in the middle; the others' samples stay what they were."""
    good = [dataclasses.replace(asked(n), seeds=(1, 2)) for n in range(2)]
    expected = engine.generate(good)
    engine.forget()
    tickets = [
        engine.submit(r)
        for r in (
            good[0],
            dataclasses.replace(asked(0), seeds=(3, 4, 5)),
            good[1],
            asked(3),
            asked(4),
            asked(5),
        )
    ]
    for _ in range(steps):
        engine.step()
    for ticket in (
        tickets[1],
        tickets[3],
        tickets[5],
        tickets[1],
        10**6,
    ):  # twice and unknown: nothing happens
        engine.cancel(ticket)
    assert len(engine.running) == {0: 0, 1: 4, 2: 4}[steps]
    answers = step_until_done(engine)
    assert set(answers) == {tickets[0], tickets[2], tickets[4]}
    for ticket, samples in zip((tickets[0], tickets[2]), expected, strict=True):
        assert_equal(answers[ticket], samples)
        engine.cancel(ticket)  # answered: nothing happens
    assert_nothing_held(engine)
    for ticket in [engine.submit(r) for r in good]:
        engine.step()
        engine.cancel(ticket)
    assert_nothing_held(engine)


def test_generate_keeps_the_answers_to_others(engine, asked, monkeypatch):
    """A request that was submitted before is answered by the next step, whatever became of `generate` meanwhile.

    Where one of several requests is refused, the others are cancelled.
    """
    (expected,) = sampled(engine, [asked(0, new=3)])
    ticket = engine.submit(asked(0, new=3))
    engine.generate([asked(1)])
    with pytest.raises(ValueError, match="EngineSizes.row_lengths ends at"):
        engine.generate([asked(2), asked(new=100)])
    assert list(engine.unanswered) == [] and not engine.waiting and not engine.idle
    ((answered, samples),) = engine.step()
    assert answered == ticket and engine.idle
    assert_equal(samples, [expected])
    ticket = engine.submit(asked(0, new=3))
    step, calls = engine.step, itertools.count()

    def interrupted():
        if next(calls) == 1:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine, "step", interrupted)
        engine.generate([asked(1)])
    assert [answered for answered, _ in engine.step()] == [ticket]


@pytest.mark.parametrize("place", ["copy", "prefill", "decode"])
def test_an_interrupt_gives_all_pages_back(engine, asked, monkeypatch, place):
    """In the middle of a step; what is asked later is answered as ever."""
    requests = [asked(n, seed=n) for n in range(10)]
    expected = sampled(engine, requests)
    engine.forget()
    work, calls = getattr(engine.runner, place), itertools.count()

    def interrupted(*arguments):
        if next(calls) == 1:
            raise KeyboardInterrupt
        return work(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine.runner, place, interrupted)
        engine.generate(requests)
    assert_nothing_held(engine)
    assert_equal(sampled(engine, requests), expected)


@pytest.fixture(scope="module")
def small(make_engine):
    """An engine with room for the longest sequence, and no more."""
    return make_engine(pages=17)


def test_a_full_cache_makes_requests_wait(engine, small, look):
    """Room for two of these at a time, and slots for eight: all are answered, and none is changed."""
    requests = [look(8 * n, seed=n) for n in range(3)] + [text(45, n, seed=n) for n in range(6)]
    requests = [changed(request, max_new_tokens=64 - len(request.ids)) for request in requests]
    small.forget()
    expected = sampled(engine, requests)
    tickets = [small.submit(request) for request in requests]
    running, answers = [], {}
    while not small.idle:
        answers |= small.step()
        running.append(len(small._running))
    assert max(running) == 2 and set(answers) == set(tickets)
    assert_equal([answers[ticket][0] for ticket in tickets], expected)
    assert_nothing_held(small)


@pytest.mark.parametrize("same", [8, 13, 16, 119, 123])
def test_a_sequence_as_large_as_the_cache_has_room_beside_what_it_copies(small, same):
    """One that needs every page, and begins in the middle of a page like one that was there before."""
    small.forget()
    first = text(124, 0)
    second = dataclasses.replace(
        first, ids=np.concatenate([first.ids[:same], text(124 - same, 1).ids])
    )
    expected = sampled(small, [second])
    small.forget()
    small.generate([first])
    small.submit(second)
    answers = [answer for _ in range(10) for answer in small.step()]
    assert_equal(answers[0][1], expected)


@pytest.mark.slow
def test_slots_are_filled_as_rows_finish(make_engine):
    """Over 85 % of the rows of all steps are somebody's token, on a long queue of lengths from 16 to 512."""
    rng = np.random.default_rng(0)
    other = make_engine(
        row_lengths=(192, 384, 576), prefix_lengths=(), prefill_lengths=(48,), pages=8 * 72, steps=8
    )
    lengths = rng.integers(16, 513, 60).tolist()
    samples = sampled(
        other, [text(int(rng.integers(4, 40)), n, new=length) for n, length in enumerate(lengths)]
    )
    counts = other.counts
    assert [len(sample.ids) for sample in samples] == lengths and counts.sampled_tokens == sum(
        lengths
    )
    assert counts.sampled_tokens / (counts.steps * other.settings.slots) > 0.85


# --- what it says of itself, and what it refuses ---


def test_after_warming_up_nothing_compiles(engine, asked, look, louder, features):
    features(asked(0).frames)  # the tower's program is its own
    compilations = Compilations()
    first = [
        asked(n, seed=n, stops=range(n % 5), suffix=range(1 + n), temperature=n / 3)
        for n in range(11)
    ]
    first += [look(n) for n in range(3)] + [
        text(90, top_k=3),
        text(1, top_p=0.5),
        dataclasses.replace(asked(3), seeds=tuple(range(12))),
    ]
    answers = engine.generate(first)
    engine.generate(
        [
            go_on(request, samples[0], range(n))
            for n, (request, samples) in enumerate(zip(first, answers, strict=True))
        ]
    )
    engine.cancel(engine.submit(asked(2)))
    engine.load(louder, version=1)
    engine.generate([look(0), asked(0, temperature=0.0, new=2)])
    assert compilations.count == 0


def test_nothing_compiles_either_where_too_much_would_be_read_at_once(make_engine):
    """Programs with fewer rows than slots, for the long and the short: four rows of 64 tokens, two of 136."""
    other = make_engine(prefill_lengths=(96,), prefix_lengths=(), read_tokens=300)
    other.warm_up()
    compilations = Compilations()
    for lengths in ((1,) * 8, (100, 60, 1, 40, 90, 80, 3, 1), (120, 5)):
        first = [text(length, n) for n, length in enumerate(lengths)]
        answers = other.generate(first)
        other.generate(
            [
                go_on(request, sample, range(3), new=1)
                for request, (sample,) in zip(first, answers, strict=True)
            ]
        )
    assert compilations.count == 0


def test_requests_that_never_fit_are_refused_by_name(engine, asked):
    with pytest.raises(
        ValueError,
        match=r"Request.ids: 125 tokens, and 12 new ones; EngineSizes.row_lengths ends at 136",
    ):
        engine.submit(text(125))
    with pytest.raises(
        ValueError,
        match="Request.ids: there are none; the last token predicts the first new one, give one at least",
    ):
        engine.submit(text(0))
    open_end = asked(0, suffix=())
    cut = int(np.flatnonzero(open_end.ids == engine.config.image_token_id)[-1]) + 1
    with pytest.raises(
        ValueError,
        match=rf"Request.ids: 16 placeholders <.image_pad.> .id \d+., the last before token {cut} of {cut}, for 16 visual tokens",
    ):
        engine.submit(dataclasses.replace(open_end, ids=open_end.ids[:cut]))
    with pytest.raises(
        ValueError,
        match=r"Request.ids: 16 placeholders .*, for 20 visual tokens of Request.frames; give as many as that",
    ):
        engine.submit(dataclasses.replace(open_end, frames=(*open_end.frames, open_end.frames[0])))
    for ids, said in (
        ([5, -1], "from -1 to 5"),
        ([3, 469], "from 3 to 469"),
        ([2**40], f"from {2**40} to {2**40}"),
    ):
        with pytest.raises(
            ValueError,
            match=f"Request.ids: {said}; the model has 469 words, give ids from 0 to 468",
        ):
            engine.submit(dataclasses.replace(text(2), ids=np.array(ids)))
    with pytest.raises(
        ValueError, match=f"Sampling.stop_ids: 5 ids; a row has at most {MOST_STOP_IDS}, give fewer"
    ):
        engine.submit(asked(stops=range(5)))
    assert len(sampled(engine, [text(124)])[0].ids) == 12  # as long as can be


def test_stop_strings_without_a_table_of_bytes_are_refused(small_model, features):
    engine = Engine(small_model, features, SETTINGS)
    with pytest.raises(
        ValueError,
        match="Sampling.stop_strings: the engine was made without token_bytes; give it those of the vocabulary",
    ):
        engine.submit(text(9, stop_strings=(b"x",)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"row_lengths": (64, 130)},
            r"EngineSizes.row_lengths: \(64, 130\); lengths rise and are multiples of page = 8",
        ),
        ({"row_lengths": (136, 64)}, r"EngineSizes.row_lengths: \(136, 64\); lengths rise"),
        ({"row_lengths": (64, 64)}, r"EngineSizes.row_lengths: \(64, 64\); lengths rise"),
        ({"prefill_lengths": (0, 8)}, r"EngineSizes.prefill_lengths: \(0, 8\); lengths rise"),
        (
            {"prefix_lengths": (12,)},
            r"EngineSizes.prefix_lengths: \(12,\); lengths rise and are multiples of page = 8",
        ),
        (
            {"row_lengths": ()},
            r"EngineSizes.row_lengths, prefill_lengths: \(\), \(.*\); give at least one length each",
        ),
        (
            {"prefill_lengths": ()},
            r"EngineSizes.row_lengths, prefill_lengths: .*; give at least one length each",
        ),
        ({"slots": 0}, "EngineSizes.slots: 0; give 1 or more"),
        ({"rows_per_prefix": 0}, "EngineSizes.rows_per_prefix: 0; give 1 or more"),
        ({"pages": -1}, "EngineSizes.pages: -1; give 1 or more"),
        ({"prefill_tokens": 0}, "EngineSizes.prefill_tokens: 0; give 1 or more"),
        ({"steps": 0}, "EngineSizes.steps: 0; give 1 or more"),
        ({"page": 0}, "EngineSizes.page: 0; give 1 or more"),
        (
            {"slots": 6},
            "EngineSizes.slots: 6; make it a multiple of rows_per_prefix = 4",
        ),
        (
            {"pages": 16},
            "EngineSizes.pages: 16 of 8 tokens; one sequence may have 136, give at least 17",
        ),
    ],
)
def test_sizes_that_make_no_engine_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SETTINGS, **changes)


# --- the compiled programs ---


def assert_in_place(program, kept, *arguments, **static) -> None:
    """`kept` is written where it lies: every array of it is aliased, and none is ever copied."""
    compiled = program.lower(*arguments, **static).compile()
    arrays = jax.tree.leaves(kept)
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(array.nbytes for array in arrays)
    for array in arrays:
        shape = re.escape(f"f32[{','.join(map(str, array.shape))}]")
        assert re.search(shape, compiled.as_text()), "the array is there under this name"
        assert not re.search(rf"= {shape}\S* copy(-start)?\(", compiled.as_text())


def test_the_programs_work_on_the_cache_where_it_lies(small_model):
    weights, config = nnx.split(small_model.text)[1], small_model.config
    programs, paged = (Programs(small_model, 8, paged) for paged in (False, True))
    pool, lines = programs.make_pool(120), programs.make_prefixes(2, 96)
    zeros = {
        n: np.zeros(8, np.int32)
        for n in ("tokens", "positions", "prefix_tokens", "own_tokens", "drawn", "left")
    }
    choices = Choices(
        np.zeros(8, np.uint32),
        np.ones(8, np.float32),
        np.zeros(8, np.int32),
        np.ones(8, np.float32),
    )
    rows = Rows(
        **zeros,
        tables=np.zeros((8, 10), np.int32),
        stops=np.zeros((8, MOST_STOP_IDS), np.int32),
        choices=choices,
    )
    pieces = Pieces(
        ids=np.zeros((2, 16), np.int32),
        positions=np.zeros((3, 2, 16), np.int32),
        visual=np.zeros((2, 16, 1 + config.vision.levels, config.text.hidden_size), np.float32),
        index=np.zeros((2, 16), np.int32),
        lengths=np.zeros(2, np.int32),
        before=np.zeros(2, np.int32),
        tables=np.zeros((2, 11), np.int32),
    )
    assert_in_place(programs.decode, pool, weights, pool, lines, rows, steps=4, width=64)
    assert_in_place(programs.decode, pool, weights, pool, None, rows, steps=4, width=64)
    assert_in_place(paged.decode, pool, weights, pool, None, rows, steps=4, width=64)
    assert_in_place(programs.prefill, pool, weights, pool, pieces)
    assert_in_place(programs.copy, pool, pool, np.zeros(8, np.int32), np.zeros(8, np.int32))
    assert_in_place(programs.gather, lines, pool, lines, np.zeros(12, np.int32), np.int32(0))


def test_a_sleeping_engine_holds_nothing_of_the_device(engine, asked, small_model):
    """Neither weights nor pages nor lines; awake again it samples the same, compiles nothing, and finds nothing of before."""
    requests, weights = (
        [asked(n, temperature=0.0) for n in range(8)],
        nnx.split(small_model.text)[1],
    )
    before = sampled(engine, requests)
    ticket = engine.submit(requests[0])
    with pytest.raises(
        ValueError,
        match=r"Engine.sleep: 1 requests have no answer yet; step, or cancel them, first",
    ):
        engine.sleep()
    engine.cancel(ticket)
    pool, lines = engine.runner.pool, jax.tree.leaves(engine.runner.prefixes)
    held = [weakref.ref(x) for x in (pool, *lines)]
    del pool, lines
    engine.sleep()
    assert len(held) > 1 and not any(ref() is not None for ref in held) and not engine.weights
    with pytest.raises(
        ValueError, match=r"Engine.submit: the engine sleeps, without weights; call load first"
    ):
        engine.submit(requests[0])
    with pytest.raises(ValueError, match="Engine.warm_up: the engine sleeps"):
        engine.warm_up()
    compilations, reused = Compilations(), engine.counts.reused_tokens
    engine.load(weights, version=1)
    after = sampled(engine, requests[:1])
    assert engine.counts.reused_tokens == reused
    after += sampled(engine, requests[1:])
    assert compilations.count == 0
    for one, other in zip(before, after, strict=True):
        assert one.ids.tolist() == other.ids.tolist()


def test_a_prefill_reads_a_layer_of_what_is_there_at_a_time(small_model):
    """Behind much that is there already, one layer's keys and values of it are in memory, not those of all."""
    config = small_model.config
    text = dataclasses.replace(config.text, num_hidden_layers=24)
    model = abstract_model(dataclasses.replace(config, text=text))
    rows, page, before, length = 8, 8, 1024, 16
    vectors = 1 + config.vision.levels, text.hidden_size
    shapes = (
        (rows, length),
        (3, rows, length),
        (rows, length, *vectors),
        (rows, length),
        (rows,),
        (rows,),
    )
    types = (np.int32, np.int32, np.float32, np.int32, np.int32, np.int32, np.int32)
    tables = (rows, before // page + pages_of(length, page))
    pieces = Pieces(
        *(
            jax.ShapeDtypeStruct(size, kind)
            for size, kind in zip((*shapes, tables), types, strict=True)
        )
    )
    programs = Programs(model, page, False)
    pool = jax.ShapeDtypeStruct(
        (24, 130, page, 2 * text.num_key_value_heads, text.head_dim), np.float32
    )
    compiled = programs.prefill.lower(nnx.state(model.text), pool, pieces).compile()
    layer = rows * before * 2 * text.num_key_value_heads * text.head_dim * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 12 * layer


def test_what_broken_weights_left_does_not_spread(engine, asked, small_model):
    """NaN on pages and in their padding is gone with the weights that made it."""
    request, weights = asked(temperature=0.0), nnx.split(small_model.text)[1]
    (before,) = sampled(engine, [request])
    engine.load(jax.tree.map(lambda w: w * jnp.nan, weights), version=1)
    sampled(engine, [asked(n, seed=n) for n in range(8)])
    engine.load(weights, version=2)
    (after,) = sampled(engine, [request])
    assert after.ids.tolist() == before.ids.tolist()
    np.testing.assert_allclose(after.logprobs, before.logprobs, atol=1e-5)


def test_one_that_waits_for_its_leader_costs_nobody_a_page(small_model, small_features, asked):
    """Two samples of one prompt: the second needs few pages once the first is there, and only those are taken."""
    settings = dataclasses.replace(SETTINGS, pages=24, slots=4, rows_per_prefix=2)
    engine = Engine(small_model, small_features, settings)
    kept = Request(np.arange(1, 25, dtype=np.int32), (), Sampling(1), (0,))
    sampled(engine, [kept])
    two = dataclasses.replace(asked(new=4), seeds=(1, 2))
    assert len(two.ids) + 4 > 6 * settings.page, "twice the whole does not fit beside what is kept"
    engine.generate([two])
    before = engine.counts.prefilled_tokens
    sampled(engine, [kept])
    assert engine.counts.prefilled_tokens == before


def test_sharing_without_room_for_all_rows_is_refused():
    with pytest.raises(ValueError, match=r"EngineSizes.read_tokens: 100; .* make it 512 or more"):
        dataclasses.replace(SETTINGS, read_tokens=100)


def test_a_frame_that_a_video_does_not_have_costs_only_its_own_request(engine, asked):
    good = asked(seed=1)
    frames = (dataclasses.replace(good.frames[0], index=10**6), *good.frames[1:])
    bad, fine = sampled(engine, [dataclasses.replace(good, frames=frames), good])
    assert (bad.stop, fine.stop) == (SampleStop.UNREADABLE, SampleStop.LENGTH) and engine.idle
    assert "it has 64 frames" in engine.features.unreadable.pop(good.frames[0].video)


def test_weights_of_another_model_are_refused_and_the_old_ones_stay(engine, asked, small_model):
    weights = nnx.split(small_model.text)[1]
    (before,) = sampled(engine, [asked(seed=1)])
    with pytest.raises(
        ValueError, match=r"Engine.load: weights of \d+ arrays, where the decoder has"
    ):
        engine.load(nnx.split(small_model)[1], version=3)
    with pytest.raises(
        ValueError, match=r"Engine.load: weights .*bfloat16.*, where the decoder has float32"
    ):
        engine.load(jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights), version=3)
    assert sampled(engine, [asked(seed=1)])[0].ids.tolist() == before.ids.tolist()


def test_what_runs_while_all_is_forgotten_is_forgotten_too(engine, asked):
    request = Request(np.arange(3, 5, dtype=np.int32), (), Sampling(12), (1,))
    engine.submit(request)
    engine.step()
    engine.forget()
    while not engine.idle:
        engine.step()
    before = engine.counts.reused_tokens
    sampled(engine, [dataclasses.replace(request, ids=np.arange(3, 20, dtype=np.int32))])
    assert engine.counts.reused_tokens == before
