"""The engine with a real model, real videos and the method's prompts.

That every sample is what a plain forward pass gives, under any schedule, is asserted in
`test_schedules` (with a tiny model) and in `test_under_fire` (against the trainer). Here is what
those do not reach:

1. No size changes a sample.
2. How samples end: deadlines, unreadable videos.
3. Interrupts, cancelled `generate` calls and a full cache lose nothing.
4. Compilation, memory on the device, and refused input.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.compilation import Compilations, compile_ahead
from models.features import FrameFeatures, FrameSettings
from models.lora import NOTHING
from paravt_jax.data import video
from paravt_jax.method.records import digest
from rollout.engine.engine import Engine
from rollout.engine.programs import MOST_STOP_IDS, DecodeRows, Pieces, Programs
from rollout.engine.requests import Request, Sample, SampleStop, Sampling
from rollout.engine.sampling import Choices
from rollout.engine.settings import EngineSizes
from tests.compiled_names import CompiledNames
from tests.rollout.engine.reference import assert_nothing_held

SETTINGS = EngineSizes(
    longest=136,
    slots=8,
    rows_per_prefix=4,
    page=8,
    pages=120,
    prefill_tokens=192,
    few_rows=4,
    drafts=2,
    steps=4,
)


@dataclasses.dataclass
class Clock:
    """Seconds that a test sets."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def features(small_world, small_model) -> FrameFeatures:
    """Frames of four tokens, so that pages and pieces end in the middle of one."""
    settings = FrameSettings(min_pixels=4096, batch=128)
    return FrameFeatures(
        small_model.vision, small_model.config, settings, small_world.folder, source=video
    )


@pytest.fixture(scope="module")
def make_engine(small_model, features, clock):
    """make_engine(page=4, ...) is an engine with other sizes."""
    return lambda **changes: Engine(
        small_model, features, dataclasses.replace(SETTINGS, **changes), clock
    )


@pytest.fixture(scope="module")
def weights(small_model):
    return nnx.split(small_model.text)[1]


@pytest.fixture(scope="module")
def warm_engine(make_engine) -> Engine:
    engine = make_engine()
    engine.warm_up()
    return engine


@pytest.fixture
def engine(warm_engine, weights) -> Iterator[Engine]:
    """A warm engine with the model's weights and an empty cache. The test must leave it idle."""
    for ticket in list(warm_engine.unanswered):  # of a test that failed
        warm_engine.cancel(ticket)
    warm_engine.load(weights, version=0)
    yield warm_engine
    assert_nothing_held(warm_engine)


@pytest.fixture(scope="module")
def asked(small_environment, small_questions, features):
    """asked(n, ...) is the first request of question n, with four frames."""
    protocol = small_environment.protocol

    def make(
        number: int = 0,
        seed: int = 1,
        temperature: float = 1.0,
        new: int = 12,
        suffix=None,
        **sampling,
    ) -> Request:
        question = small_questions[number % len(small_questions)]
        frames = features.overview(question.video, 4)
        overview = protocol.overview(frames, features.tokens(question.video))
        suffix = protocol.pinned.ids if suffix is None else np.asarray(suffix, np.int32)
        ids = np.concatenate([overview.ids, protocol.question(question).ids, suffix])
        return Request(ids, frames, Sampling(new, temperature, **sampling), seed)

    return make


@pytest.fixture(scope="module")
def look(small_environment, small_questions, features):
    """look(start) is a sub-agent's request about eight seconds of a video: a shorter prompt."""

    def make(start: int = 0, seed: int = 1) -> Request:
        name = small_questions[0].video
        frames = features.window(name, start, start + 4, 1.0, 2)
        prompt = small_environment.protocol.window(frames, features.tokens(name))
        return Request(prompt.ids, frames, Sampling(4), seed)

    return make


def text(length: int, number: int = 0, new: int = 12, seed: int = 1, **sampling) -> Request:
    """A request without frames. The first token depends on `number`."""
    ids = np.random.default_rng(number).integers(20, 400, length).astype(np.int32)
    ids[:1] = 20 + number
    return Request(ids, (), Sampling(new, **sampling), seed)


def next_turn(request: Request, sample: Sample, more, new: int = 12) -> Request:
    """The prompt, the sample, and more tokens."""
    ids = np.concatenate([request.ids, sample.ids, np.asarray(more, np.int32)])
    sampling = dataclasses.replace(request.sampling, max_new_tokens=new)
    return Request(ids, request.frames, sampling, 2)


def group(request: Request, *seeds: int) -> list[Request]:
    """Requests with one prompt."""
    return [dataclasses.replace(request, seed=seed) for seed in seeds]


def assert_equal(found, expected) -> None:
    """The same tokens and ends, and log-probs up to rounding."""
    for one, other in zip(found, expected, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert (one.stop, one.digest) == (other.stop, other.digest)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def step_until_done(engine: Engine) -> dict[int, Sample]:
    answers = {}
    while not engine.idle:
        answers |= engine.step()
    return answers


# --- sizes ---

CHANGED: dict[str, dict[str, Any]] = {
    "small sizes": {
        "page": 4,
        "slots": 2,
        "rows_per_prefix": 1,
        "few_rows": 1,
        "steps": 1,
        "prefill_tokens": 8,
        "pages": 60,
    },
    "large sizes": {
        "page": 17,
        "slots": 16,
        "rows_per_prefix": 8,
        "few_rows": 8,
        "steps": 16,
        "prefill_tokens": 2006,
        "pages": 400,
    },
    "always drafts": {"few_rows": 8, "drafts": 5},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", CHANGED.values(), ids=CHANGED)
def test_no_size_changes_a_sample(engine, make_engine, asked, look, changes):
    """Groups, sub-agents and plain text, long and short, sampled and greedy; then the next turn."""
    groups = [group(asked(n, new=12 - n), 1, 2, 3) for n in range(3)]
    first = [
        *itertools.chain(*groups),
        *(look(8 * n, seed=n) for n in range(3)),
        text(1),
        text(9, 1),
        text(100, 2, temperature=0.0),
        text(100, 2),
        asked(0, suffix=range(7, 20)),
    ]
    other = make_engine(**changes)
    found = other.generate(first)
    expected = engine.generate(first)
    assert_equal(found, expected)
    second = [
        next_turn(request, sample, range(30, 33 + n % 11))
        for n, (request, sample) in enumerate(zip(first, expected, strict=True))
    ]
    assert_equal(other.generate(second), engine.generate(second))
    assert_nothing_held(other)


def test_what_a_sibling_has_said_takes_fewer_calls(engine, monkeypatch):
    """Greedy: the drafts of the second response are the first one."""
    first, second = group(text(20, temperature=0.0), 1, 2)
    calls = itertools.count()
    decode = engine.runner.decode

    def counted(*given):
        next(calls)
        return decode(*given)

    monkeypatch.setattr(engine.runner, "decode", counted)
    (before,) = engine.generate([first])
    assert next(calls) == 3
    (after,) = engine.generate([second])
    assert_equal([after], [before])
    assert next(calls) < 3 + 1 + 3
    # What is forgotten gives no drafts.
    engine.forget()
    engine.generate([second])
    assert next(calls) >= 3 + 1 + 2 + 1 + 3


# --- how samples end ---


def test_a_deadline_ends_what_runs_and_what_waits(engine, clock):
    """Two of its samples run, with four tokens each, and two wait for a slot."""
    others = [engine.submit(text(20, number)) for number in range(6)]
    late = [engine.submit(one) for one in group(text(20, 6, deadline=3.0), 1, 2, 3, 4)]
    engine.step()
    clock.now += 3
    tickets, samples = zip(*engine.step(), strict=True)
    assert list(tickets) == late
    assert [len(sample.ids) for sample in samples] == [4, 4, 0, 0]
    assert {sample.stop for sample in samples} == {SampleStop.DEADLINE}
    assert set(step_until_done(engine)) == set(others)


def test_a_listener_hears_all_tokens_and_may_end_a_sample(engine):
    told = []

    def hear(ids) -> bool:
        told.append([*ids])
        return len(ids) >= 20

    asked = text(20, new=60)
    [whole] = engine.generate([asked])
    [cut] = engine.generate([dataclasses.replace(asked, progress=hear)])
    assert len(told) > 1 and [*map(len, told)] == sorted({*map(len, told)})
    assert told == [whole.ids[: len(ids)].tolist() for ids in told]
    assert cut.stop is SampleStop.STOP_ID and 20 <= len(cut.ids) < len(whole.ids)
    assert cut.ids.tolist() == told[-1]
    assert_nothing_held(engine)


def test_an_unreadable_video_fails_only_its_own_request(
    engine, asked, features, small_world, small_questions
):
    """Two that cannot be read when their turn comes, and one that was never seen."""
    gone, broken, never_seen = (
        small_world.folder / name for name in ("gone.mp4", "broken.mp4", "never_seen.mp4")
    )
    copies = (gone, broken, never_seen)
    content = (small_world.folder / small_questions[0].video).read_bytes()
    shown = []
    for copy in copies:
        copy.write_bytes(content)
        shown.append(features.overview(copy.name, 4))
    for copy in (gone, broken):
        features.info(copy.name)  # remembered from before the file changes
    gone.unlink()
    broken.write_bytes(content[:2000])
    never_seen.unlink()
    good = [asked(n, seed=n) for n in range(3)]
    bad = [dataclasses.replace(asked(0), frames=frames) for frames in shown]
    expected = engine.generate(good)
    engine.forget()
    answers = engine.generate([good[0], bad[0], bad[1], good[1], bad[2], good[2]])
    assert_equal([answers[n] for n in (0, 3, 5)], expected)
    for n in (1, 2, 4):
        assert answers[n].stop is SampleStop.UNREADABLE
        assert answers[n].ids.size == answers[n].logprobs.size == 0
        assert answers[n].digest == digest(bad[0].ids)
    for copy in copies:
        copy.unlink(missing_ok=True)


# --- interrupts, and a full cache ---


@pytest.mark.parametrize("place", ["copy", "prefill", "_prefill", "decode"])
@pytest.mark.parametrize("taken", [lambda pool: None, lambda pool: pool.delete()])
def test_an_interrupt_within_a_step_frees_all_pages(engine, asked, monkeypatch, place, taken):
    """Later requests are answered as before, also if the interrupted call has taken the pages."""
    requests = [asked(n, seed=n) for n in range(10)]
    expected = engine.generate(requests)
    engine.forget()
    work = getattr(engine.runner, place)
    calls = itertools.count()

    def interrupted(*arguments):
        if next(calls) == 1:
            taken(engine.runner.pool)
            raise KeyboardInterrupt
        return work(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine.runner, place, interrupted)
        engine.generate(requests)
    assert_nothing_held(engine)
    assert_equal(engine.generate(requests), expected)


def test_what_runs_while_the_engine_forgets_is_forgotten_too(engine):
    request = Request(np.arange(3, 5, dtype=np.int32), (), Sampling(12), 1)
    engine.submit(request)
    engine.step()
    engine.forget()
    step_until_done(engine)
    before = engine.reused_tokens
    engine.generate([dataclasses.replace(request, ids=np.arange(3, 20, dtype=np.int32))])
    assert engine.reused_tokens == before


# --- weights ---


def scaled(weights, factor: float):
    return jax.tree.map(lambda x: x * factor, weights)


def test_nan_from_broken_weights_does_not_spread(engine, asked, weights):
    """It stays in the pool, in used and in unused slots, but later weights never read it."""
    request = asked(temperature=0.0)
    (before,) = engine.generate([request])
    engine.load(scaled(weights, jnp.nan), version=1)
    engine.generate([asked(n, seed=n) for n in range(8)])
    engine.load(weights, version=2)
    assert_equal(engine.generate([request]), [before])


def test_weights_of_another_model_are_refused_and_the_old_ones_stay(
    engine, asked, small_model, weights
):
    before = engine.generate([asked(seed=1)])
    with pytest.raises(ValueError, match=r"Engine.load: weights of \d+ arrays"):
        engine.load(nnx.split(small_model)[1], version=3)
    halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)
    with pytest.raises(ValueError, match=r"Engine.load: weights .*bfloat16.*float32"):
        engine.load(halves, version=3)
    assert_equal(engine.generate([asked(seed=1)]), before)


def test_a_sleeping_engine_holds_no_arrays_on_the_device(engine, asked, weights):
    """Awake again it samples the same, compiles nothing, and reuses nothing from before."""
    requests = [asked(n, temperature=0.0) for n in range(8)]
    before = engine.generate(requests)
    ticket = engine.submit(requests[0])
    with pytest.raises(ValueError, match="Engine.sleep: 1 requests"):
        engine.sleep()
    engine.cancel(ticket)
    pool = weakref.ref(engine.runner.pool)
    engine.sleep()
    assert pool() is None
    assert not engine.weights
    with pytest.raises(ValueError, match="Engine.submit: the engine sleeps"):
        engine.submit(requests[0])
    with pytest.raises(ValueError, match="Engine.warm_up: the engine sleeps"):
        engine.warm_up()
    compilations = Compilations()
    reused = engine.reused_tokens
    engine.load(weights, version=1)
    after = engine.generate(requests[:1])
    assert engine.reused_tokens == reused
    after += engine.generate(requests[1:])
    assert compilations.count == 0
    assert_equal(after, before)


# --- compilation and memory ---


def test_after_warming_up_nothing_compiles(engine, asked, look, weights, features):
    features(asked(0).frames)  # compiles the vision tower's own program
    louder = scaled(weights, 1.25)
    compilations = Compilations()
    mains = [
        asked(n, seed=n, stop_ids=tuple(range(n % 5)), suffix=range(1 + n), temperature=n / 3)
        for n in range(11)
    ]
    first = [
        *mains,
        *(look(n) for n in range(3)),
        text(90),
        text(1),
        *group(asked(3), *range(12)),
    ]
    answers = engine.generate(first)
    second = [
        next_turn(request, sample, range(n))
        for n, (request, sample) in enumerate(zip(first, answers, strict=True))
    ]
    engine.generate(second)
    engine.cancel(engine.submit(asked(2)))
    engine.load(louder, version=1)
    engine.generate([look(0), asked(0, temperature=0.0, new=2)])
    assert compilations.count == 0


@pytest.mark.slow
def test_warm_up_uses_programs_that_were_compiled_while_the_engine_slept(make_engine, weights):
    engine = make_engine(page=4, pages=240)
    engine.sleep()
    programs = list(engine.lowerings())
    compile_ahead(programs)
    assert engine.runner.pool is None
    names = CompiledNames()
    engine.load(weights, 0)
    engine.warm_up()
    assert len(programs) == 4
    assert not {"jit(_prefill)", "jit(_decode)", "jit(_copy)"} & set(names)


def assert_in_place(program, donated, *arguments, **static) -> None:
    """Every array of `donated` is aliased with an output, and none is ever copied."""
    compiled = program.lower(*arguments, **static).compile()
    arrays = jax.tree.leaves(donated)
    aliased = compiled.memory_analysis().alias_size_in_bytes
    assert aliased >= sum(array.nbytes for array in arrays)
    for array in arrays:
        shape = re.escape(f"f32[{','.join(map(str, array.shape))}]")
        assert re.search(shape, compiled.as_text()), "the program has no array of this shape"
        assert not re.search(rf"= {shape}\S* copy(-start)?\(", compiled.as_text())


@pytest.mark.slow
def test_the_programs_write_the_cache_in_place(small_model, weights):
    programs = Programs(small_model, 8)
    given = (weights, NOTHING)
    pool = programs.make_pool(120)

    def zeros(*shape: int, dtype: Any = np.int32) -> np.ndarray:
        return np.zeros(shape, dtype)

    rows = DecodeRows(
        tokens=zeros(8),
        positions=zeros(8),
        offsets=zeros(8),
        tables=zeros(8, 10),
        shared=zeros(2, 10),
        shared_tokens=zeros(8),
        drawn=zeros(8),
        left=zeros(8),
        stops=zeros(8, MOST_STOP_IDS),
        choices=Choices(
            seeds=zeros(8, dtype=np.uint32),
            temperatures=zeros(8, dtype=np.float32),
        ),
        history=None,
        lengths=zeros(8),
    )
    bank = zeros(*programs.abstract_bank(24).shape, dtype=np.float32)
    pieces = Pieces(
        ids=zeros(2, 16),
        positions=zeros(3, 2, 16),
        index=zeros(2, 16),
        offsets=zeros(2, 16),
        tables=zeros(2, 11),
    )
    drafting = rows._replace(history=zeros(8, 40))
    assert_in_place(programs.decode, pool, given, pool, rows, steps=4, drafts=0)
    assert_in_place(programs.decode, pool, given, pool, drafting, steps=4, drafts=3)
    assert_in_place(programs.prefill, pool, given, pool, bank, pieces)
    assert_in_place(programs.copy, pool, pool, zeros(8), zeros(8), np.int32(0))


# --- refused requests ---


def test_requests_that_can_never_be_answered_are_refused(engine, asked):
    open_end = asked(0, suffix=())
    last_visual = np.flatnonzero(open_end.ids == engine.config.image_token_id)[-1]
    ends_visual = dataclasses.replace(open_end, ids=open_end.ids[: last_visual + 1])
    one_frame_more = dataclasses.replace(open_end, frames=(*open_end.frames, open_end.frames[0]))

    def with_ids(*ids: int) -> Request:
        return dataclasses.replace(text(2), ids=np.array(ids))

    for request, rule in (
        (text(125), "Request.ids: 125 tokens, and 12 new.* 136"),
        (text(0), "Request.ids: empty"),
        (ends_visual, "Request.ids: .*visual token"),
        (one_frame_more, "Request.ids: 16 placeholders .* 20 visual tokens"),
        (with_ids(5, -1), "Request.ids: from -1 to 5.* 468"),
        (with_ids(3, 469), "Request.ids: from 3 to 469.* 468"),
        (with_ids(2**40), f"Request.ids: from {2**40}"),
        (asked(stop_ids=tuple(range(65))), f"Sampling.stop_ids: 65 .*{MOST_STOP_IDS}"),
    ):
        with pytest.raises(ValueError, match=rule):
            engine.submit(request)
    (longest,) = engine.generate([text(124)])
    assert len(longest.ids) == 12
