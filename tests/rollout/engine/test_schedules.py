"""The engine under any schedule, against a slow reference.

A state machine submits, steps, cancels, waits, loads weights and forgets, in any order. After every
rule it checks:

1. Every page is free, in the tree, or allocated to one sequence.
2. What runs has all its pages, and what waits has none.
3. Every open request runs or waits.
4. Only weights that are being sampled from are kept.

At the end it checks every sample against the reference, and the keys and values on the pages
against a forward pass. The properties after it count what is prefilled.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence as Many

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import rollout.engine.runner
from models.config import TextConfig
from models.model import VisionLanguageModel, abstract_model
from models.qwen3_vl.config import Qwen3VLConfig, Qwen3VLVisionConfig
from paravt_jax.method.records import Frame
from rollout.engine.engine import Engine
from rollout.engine.pages import PageTree
from rollout.engine.programs import Pool, Programs
from rollout.engine.requests import Completion, Request, Sample, SampleStop, Sampling
from rollout.engine.sequences import make_prompt
from rollout.engine.settings import EngineSizes
from tests.rollout.engine.reference import Pictures, Reference

SETTINGS = EngineSizes(
    longest=32,
    slots=4,
    rows_per_prefix=2,
    page=4,
    pages=64,
    prefill_tokens=16,
    few_rows=2,
    drafts=2,
    steps=2,
)
# Larger pages, prompts in many calls, and rows that always have drafts.
OTHERS = EngineSizes(
    longest=40,
    slots=6,
    rows_per_prefix=3,
    page=8,
    pages=48,
    prefill_tokens=8,
    few_rows=6,
    drafts=3,
    steps=2,
)
WORDS = 20  # ids below are ordinary tokens
IMAGE, VIDEO, OPEN, CLOSE = 20, 21, 22, 23
WEIGHTS = 3  # different ones; versions take them in turn
MOST_VERSIONS = 100
# Frames of four tokens and of one, in patches. The last video cannot be read.
SIZES = {"square": (4, 4), "small": (2, 2), "gone": (2, 2)}


class Dirty(Programs):
    """Programs whose memory begins as 7, not 0, so that reading unwritten slots changes samples."""

    def make_pool(self, pages: int) -> Pool:
        shape = self.abstract_pool(pages)
        return jnp.full(shape.shape, 7.0, shape.dtype)


class Bench:
    """New engines of one model and size, whose programs are compiled once, and their reference."""

    def __init__(self, settings: EngineSizes):
        self.settings = settings
        vision = Qwen3VLVisionConfig(
            hidden_size=16,
            depth=1,
            num_heads=2,
            intermediate_size=32,
            out_hidden_size=16,
            num_position_embeddings=4,
            deepstack_visual_indexes=(0,),
        )
        text = TextConfig(
            vocab_size=24,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            mrope_section=(3, 3, 2),
            rope_theta=10_000.0,
            tie_word_embeddings=True,
        )
        self.config = Qwen3VLConfig(
            vision,
            text,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=OPEN,
            vision_end_token_id=CLOSE,
        )
        graph, state = nnx.split(abstract_model(self.config))
        rng = np.random.default_rng(0)

        def noise(path, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            middle = 1.0 if "norm" in str(path) or "scale" in str(path) else 0.0
            return jnp.asarray(rng.normal(middle, 0.3, leaf.shape), leaf.dtype)

        self.model: VisionLanguageModel = nnx.merge(
            graph, jax.tree_util.tree_map_with_path(noise, state)
        )
        first = nnx.split(self.model.text)[1]
        others = [jax.tree_util.tree_map_with_path(noise, first) for _ in range(WEIGHTS - 1)]
        different = [first, *others]
        self.weights = {version: different[version % WEIGHTS] for version in range(MOST_VERSIONS)}
        self.features = Pictures(self.config, SIZES, gone=("gone",))
        self.reference = Reference(self.model, self.features, self.weights, settings.longest)
        self._programs = functools.cache(lambda *sizes: Dirty(self.model, *sizes))

    def engine(self, clock=lambda: 0.0, pages: int | None = None) -> Engine:
        """An engine with an empty cache. `pages`: with fewer pages than it was made for."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                rollout.engine.runner, "Programs", lambda model, *sizes: self._programs(*sizes)
            )
            engine = Engine(self.model, self.features, self.settings, clock)
        if pages is not None:
            engine.tree = PageTree(pages, self.settings.page)
        return engine


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(SETTINGS)


# --- requests ---

_TEXT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9)
_A = Frame("square", 0, 0.0)
_B = Frame("square", 1, 1.0)
_SMALL = Frame("small", 5, 0.5)
_GONE = Frame("gone", 0, 0.0)
# How requests begin: empty, with text, with frames across pages, with the same frames swapped.
OPENINGS: tuple[tuple[int | Frame, ...], ...] = (
    (),
    _TEXT,
    (*_TEXT[:6], _A, _SMALL, 6),
    (*_TEXT[:6], _A, _B, 6),
    (*_TEXT[:6], _B, _A, 6),
    (8, _SMALL, _GONE),
)


def written(parts: tuple[int | Frame, ...]) -> tuple[np.ndarray, tuple[Frame, ...]]:
    """Token ids, with placeholders for frames, and the frames."""
    ids: list[int] = []
    for part in parts:
        if isinstance(part, Frame):
            height, width = SIZES[part.video]
            ids += [OPEN, *[IMAGE] * (height * width // 4), CLOSE]
        else:
            ids.append(part)
    return np.array(ids, np.int32), tuple(part for part in parts if isinstance(part, Frame))


SAMPLINGS = st.builds(
    Sampling,
    max_new_tokens=st.sampled_from([0, 1, 3, 7, 12, 13, 14]),
    temperature=st.sampled_from([0.0, 0.6, 1.0, 3.0]),
    stop_ids=st.lists(st.integers(0, WORDS - 1), max_size=2).map(tuple),
    deadline=st.sampled_from([math.inf, math.inf, 1.0, 3.0]),
)
SEEDS = st.lists(st.sampled_from([0, 1, 2, 2**32 + 1, -1]), min_size=1, max_size=3).map(tuple)
TAILS = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@st.composite
def groups(draw) -> list[Request]:
    """Requests with one prompt: all of an opening or its first part, and a few words.

    So prompts differ from anywhere on.
    """
    opening = draw(st.sampled_from(OPENINGS))
    end = draw(st.just(len(opening)) | st.integers(0, len(opening)))
    ids, frames = written((*opening[:end], *draw(TAILS)))
    sampling = draw(SAMPLINGS)
    return [Request(ids, frames, sampling, seed) for seed in draw(SEEDS)]


# --- the schedules ---


@dataclasses.dataclass
class Asked:
    """A submitted request."""

    request: Request
    until: float
    done: bool = False


def cut_short(sample: Sample) -> bool:
    return sample.stop in (SampleStop.LENGTH, SampleStop.DEADLINE)


class Schedule(RuleBasedStateMachine):
    """Everything a caller may do, in any order."""

    def __init__(self, bench: Bench):
        super().__init__()
        self.bench = bench
        self.size = bench.settings.page
        self.now = 0.0
        self.clock = lambda: self.now
        self.asked: dict[int, Asked] = {}
        self.samples: list[tuple[Request, Sample]] = []

    @initialize(spare=st.sampled_from([1000, 12, 5, 1, 0]))
    def start(self, spare: int):
        """`spare`: pages beyond those of the longest sequence."""
        longest = self.bench.settings.longest // self.size
        self.pages = min(longest + spare, self.bench.settings.pages)
        self.engine = self.bench.engine(self.clock, self.pages)

    # --- what a caller does ---

    @rule(wanted=st.lists(groups(), min_size=1, max_size=3), at_once=st.booleans())
    def submit(self, wanted: list[list[Request]], at_once: bool):
        for request in itertools.chain(*wanted):
            self.ask(request)
        if at_once:
            self.step()

    def ask(self, request: Request) -> None:
        if len(request.ids) + request.sampling.max_new_tokens > self.bench.settings.longest:
            with pytest.raises(ValueError, match="EngineSizes.longest"):
                self.engine.submit(request)
            return
        ticket = self.engine.submit(request)
        assert ticket not in self.asked
        self.asked[ticket] = Asked(request, self.now + request.sampling.deadline)

    @precondition(lambda self: self.samples)
    @rule(
        which=st.integers(0, 9), keep=st.integers(0, 9), tail=TAILS, sampling=SAMPLINGS, seeds=SEEDS
    )
    def next_turn(
        self, which: int, keep: int, tail: list[int], sampling: Sampling, seeds: tuple[int, ...]
    ):
        """A next turn, after all of a sample or a part of it."""
        request, sample = self.samples[-1 - which % len(self.samples)]
        ids = np.concatenate([request.ids, sample.ids[:keep], tail]).astype(np.int32)
        for seed in seeds:
            self.ask(Request(ids, request.frames, sampling, seed))

    @precondition(lambda self: not self.engine.idle)
    @rule()
    def step(self):
        self.take(self.engine.step())

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 9))
    def cancel(self, which: int):
        """A request that is open, answered, or cancelled already."""
        ticket = list(self.asked)[-1 - which % len(self.asked)]
        self.engine.cancel(ticket)
        self.asked[ticket].done = True

    @precondition(lambda self: not self.engine.idle)
    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def wait(self, seconds: float):
        self.now += seconds

    @precondition(lambda self: any(cut_short(sample) for _, sample in self.samples))
    @rule(which=st.integers(0, 9), more=st.integers(1, 6))
    def go_on(self, which: int, more: int):
        """The rest of a response that was cut short, maybe under other weights."""
        cut = [(request, sample) for request, sample in self.samples if cut_short(sample)]
        request, sample = cut[-1 - which % len(cut)]
        most = len(sample.ids) + more
        sampling = dataclasses.replace(request.sampling, max_new_tokens=most, deadline=math.inf)
        self.ask(dataclasses.replace(request, sampling=sampling, begun=sample))

    @precondition(lambda self: self.asked and self.engine.version + 1 < MOST_VERSIONS)
    @rule()
    def load(self):
        """Other weights, which the engine takes when no request is open."""
        version = self.engine.version + 1
        if not self.engine.idle:
            with pytest.raises(ValueError, match=r"Engine.load: \d+ requests"):
                self.engine.load(self.bench.weights[version], version)
        for ticket, asked in self.asked.items():
            self.engine.cancel(ticket)
            asked.done = True
        self.engine.load(self.bench.weights[version], version)

    @precondition(lambda self: self.asked)
    @rule()
    def forget(self):
        self.engine.forget()
        assert self.engine.tree.match(self.engine.version, np.array(_TEXT, np.int64)) == (
            [],
            None,
            0,
        )

    def take(self, answers: list[Completion]) -> None:
        """Check the answers of a step: each request once, and no deadline missed."""
        for ticket, sample in answers:
            asked = self.asked[ticket]
            assert not asked.done
            asked.done = True
            begun = asked.request.begun
            earlier = [] if begun is None else begun.versions.tolist()
            drawn = len(sample.ids) - len(earlier)
            assert sample.versions.dtype == np.int32
            assert sample.versions.tolist() == earlier + [self.engine.version] * drawn
            assert sample.stop is not SampleStop.DEADLINE or asked.until <= self.now
            self.samples.append((asked.request, sample))
        assert all(asked.done or asked.until > self.now for asked in self.asked.values())

    # --- what holds after each rule ---

    @invariant()
    def a_page_is_free_or_in_the_tree_or_lent(self):
        """Pages of dropped versions are in no tree. Running sequences may still hold them."""
        tree, running = self.engine.tree, self.engine.running
        nodes = {*tree.nodes(), *(node for sequence in running for node in sequence.shared_pages)}
        pages = [
            *tree.free_pages,
            *(node.page for node in nodes),
            *(page for sequence in running for page in sequence.own_pages),
        ]
        assert sorted(pages) == list(range(self.pages))
        users = [node.serial for sequence in running for node in sequence.shared_pages]
        assert all(node.users == users.count(node.serial) for node in nodes)
        assert set(tree.evictable) == {node for node in nodes if not node.users}

    @invariant()
    def what_runs_has_room_and_what_waits_has_nothing(self):
        engine = self.engine
        assert len(engine.running) <= self.bench.settings.slots
        for sequence in engine.running:
            most = sequence.sampling.max_new_tokens - sequence.begun
            needed = len(sequence.prompt.request.ids) + most
            room = len(sequence.pages) * self.size
            assert room >= needed > room - self.size
            assert sequence.copy_source is None
            assert sequence.computed == sequence.prompt.prefill_length + len(sequence.drawn)
            assert sum(len(node.tokens) for node in sequence.shared_pages) <= sequence.computed
        for sequence in engine.waiting:
            assert not sequence.shared_pages
            assert not sequence.own_pages
            assert sequence.copy_source is None
        assert engine.idle == all(asked.done for asked in self.asked.values())

    @invariant()
    def every_open_request_runs_or_waits(self):
        engine = self.engine
        there = sorted(sequence.ticket for sequence in (*engine.running, *engine.waiting))
        missing = [ticket for ticket, sample in engine.unanswered.items() if sample is None]
        assert there == sorted(missing)
        assert set(engine.unanswered) == {
            ticket for ticket, asked in self.asked.items() if not asked.done
        }

    @invariant()
    def only_what_the_current_weights_computed_is_cached(self):
        assert set(self.engine.tree.roots) <= {self.engine.version}

    # --- what holds at the end ---

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(500):
            if self.engine.idle:
                break
            self.take(self.engine.step())
        assert self.engine.idle
        assert all(asked.done for asked in self.asked.values())
        self.a_page_is_free_or_in_the_tree_or_lent()
        assert all(not node.users for node in self.engine.tree.nodes())
        for request, sample in self.samples:
            self.compare(request, sample)
        for request, sample in self.samples:
            self.compare_pages(request, sample)
        self.engine.load(self.bench.weights[0], self.engine.version + 1)
        assert len(self.engine.tree.free_pages) == self.pages

    def compare(self, request: Request, sample: Sample) -> None:
        # A deadline may have cut it short before it drew under the newest weights.
        expected = self.bench.reference.answer(request, 0, like=sample)
        n = len(sample.ids)
        assert sample.ids.tolist() == expected.ids[:n].tolist()
        assert sample.ids.dtype == np.int32
        np.testing.assert_allclose(sample.logprobs, expected.logprobs[:n], atol=1e-4)
        assert sample.logprobs.dtype == np.float32
        # A sample that a deadline ended may be shorter than the reference's.
        if sample.stop is not SampleStop.DEADLINE:
            assert n == len(expected.ids)
            assert (sample.stop, sample.digest) == (expected.stop, expected.digest)

    def compare_pages(self, request: Request, sample: Sample) -> None:
        """What is cached of a sequence is what a forward pass gives: no page was overwritten."""
        engine = self.engine
        gone = any(frame.video in self.bench.features.gone for frame in request.frames)
        if gone or set(sample.versions.tolist()) != {engine.version}:
            return
        # The sample has what the request began with.
        whole = dataclasses.replace(request, begun=None)
        prompt = make_prompt(whole, engine.features, engine.config, math.inf)
        content = np.concatenate([prompt.content, sample.ids])[:-1]
        path, source, matching = engine.tree.match(engine.version, content)
        engine.tree.release(path)
        count = len(path) * self.size + matching
        nodes = path if source is None else [*path, source]
        found = np.asarray(engine.runner.pool)[:, [node.page for node in nodes]]
        # [l, pages, 2, k, u, h] -> [2, l, pages * u, k, h]
        found = found.transpose(2, 0, 1, 4, 3, 5)
        found = found.reshape(*found.shape[:2], -1, *found.shape[4:])[:, :, :count]
        keys, values = self.bench.reference.keys_and_values(
            request, sample.ids.tolist(), engine.version
        )
        np.testing.assert_allclose(found[0], keys[:, :count], atol=1e-4)
        np.testing.assert_allclose(found[1], values[:, :count], atol=1e-4)


def run_schedules(bench: Bench, examples: int, steps: int) -> None:
    class Here(Schedule):
        def __init__(self):
            super().__init__(bench)

    sizes = settings(max_examples=examples, stateful_step_count=steps, report_multiple_bugs=False)
    run_state_machine_as_test(Here, settings=sizes)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [SETTINGS, OTHERS], ids=["small", "large pages"])
def test_many_schedules(sizes):
    run_schedules(Bench(sizes), examples=20, steps=30)


# --- what is prefilled ---


class Known:
    """A cache without limits: every prefix of everything that was computed."""

    def __init__(self):
        self.starts: set[tuple] = {()}

    def missing(self, request: Request, said: Many[int] = ()) -> int:
        """Tokens to prefill. Afterwards the prompt and `said` are in the cache."""
        pieces = iter(
            (frame, n)
            for frame in request.frames
            for n in range(math.prod(SIZES[frame.video]) // 4)
        )
        content = [next(pieces, IMAGE) if token == IMAGE else int(token) for token in request.ids]
        length = len(content) - 1
        cached = next(n for n in range(length, -1, -1) if tuple(content[:n]) in self.starts)
        content += [int(token) for token in said]
        self.starts |= {tuple(content[:n]) for n in range(len(content))}
        return length - cached


def plainly(request: Request, new: int) -> Request:
    """The same prompt, with exactly `new` tokens to sample."""
    return dataclasses.replace(request, sampling=Sampling(new))


READABLE = groups().filter(lambda group: _GONE not in group[0].frames)


@pytest.mark.slow
@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            READABLE, st.integers(1, 6), st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9))
        ),
        max_size=6,
    )
)
def test_cached_tokens_are_not_prefilled_again(bench, asked):
    """One group after the other. Some continue an earlier sample or its first tokens."""
    engine, known, answered = bench.engine(), Known(), []
    for group, new, after in asked:
        request = group[0]
        if after is not None and answered:
            before, sample = answered[after[0] % len(answered)]
            ids = np.concatenate([before.ids, sample.ids[: after[1]], request.ids[:2]])
            request = dataclasses.replace(request, ids=ids.astype(np.int32), frames=before.frames)
        request = plainly(request, new)
        if len(request.ids) + new > SETTINGS.longest:
            continue
        prefilled, reused = engine.prefilled_tokens, engine.reused_tokens
        samples = engine.generate([dataclasses.replace(request, seed=one.seed) for one in group])
        # The first sample's prompt is what the others find.
        needed = [known.missing(request, sample.ids) for sample in samples]
        assert not any(needed[1:])
        total = len(samples) * (len(request.ids) - 1)
        assert engine.prefilled_tokens - prefilled == needed[0]
        assert engine.reused_tokens - reused == total - needed[0]
        answered += [(request, sample) for sample in samples]
        # The next request might evict pages.
        if len(engine.tree.free_pages) < 6 * 3 + 8:
            engine.forget()
            known = Known()


@settings(max_examples=30)
@given(st.lists(st.tuples(READABLE, st.integers(1, 3)), max_size=5))
def test_a_prefix_that_requests_share_is_prefilled_once(bench, asked):
    """All at once. Prompts that differ within a page may be prefilled side by side.

    Each of them then computes less than a page twice.
    """
    engine, known = bench.engine(), Known()
    wanted = [plainly(request, new) for group, new in asked for request in group]
    engine.generate(wanted)
    needed = sum(known.missing(request) for request in wanted)
    assert engine.prefilled_tokens <= needed + (SETTINGS.page - 1) * max(0, len(wanted) - 1)
    total = sum(len(request.ids) - 1 for request in wanted)
    assert engine.prefilled_tokens + engine.reused_tokens == total


def test_cached_frames_are_not_encoded_again(bench, monkeypatch):
    """The cached prefix ends with a frame: in a next turn, and before another second frame."""
    engine = bench.engine()
    ids, frames = written(OPENINGS[2])
    engine.generate([Request(ids, frames, Sampling(4), 1)])
    encoded: list[Frame] = []
    encode = Pictures.__call__

    def watched(self, frames):
        encoded.extend(frames)
        return encode(self, frames)

    monkeypatch.setattr(Pictures, "__call__", watched)
    engine.generate([Request(np.append(ids, [1, 2]).astype(np.int32), frames, Sampling(4), 2)])
    assert encoded == []
    engine.generate([Request(*written(OPENINGS[3]), Sampling(4), 3)])
    assert encoded == [_B]


def test_a_used_engine_repeats_a_fresh_one_bit_for_bit(bench):
    """A run that goes on after a death has a fresh one. All calls have the same rows."""
    wanted = [
        Request(*written((*opening, *tail)), Sampling(new, 0.6), seed)
        for opening in OPENINGS[:5]
        for tail, new in (((1,), 9), ((2, 1, 1), 7))
        for seed in (1, 2, 3)
    ]

    def play(engine: Engine) -> tuple[list[Sample], list[tuple]]:
        calls = []
        run = engine.runner._run

        def watched(*given):
            drawn, layout = run(*given)
            calls.append((layout.rows, list(map(len, layout.shared)), drawn.counts.tolist()))
            return drawn, layout

        engine.runner._run = watched  # pyright: ignore[reportAttributeAccessIssue]
        return engine.generate(wanted), calls

    fresh, used = bench.engine(), bench.engine()
    used.generate([dataclasses.replace(request, seed=7) for request in wanted[::-2]])
    used.load(bench.weights[WEIGHTS], WEIGHTS)
    (expected, calls), (found, more) = play(fresh), play(used)
    assert calls == more
    for one, other in zip(expected, found, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


# --- by example, what schedules seldom meet ---


@pytest.mark.parametrize("tail", [[1, IMAGE, 2, IMAGE, 3], [IMAGE]])
@pytest.mark.parametrize("opening", [OPENINGS[1], OPENINGS[2]], ids=["text", "frames"])
def test_a_placeholder_that_a_model_wrote_is_a_word(bench, opening, tail):
    """In a later turn, and as the last token of the prompt too."""
    ids, frames = written(opening)
    request = Request(np.append(ids, tail).astype(np.int32), frames, Sampling(4), 1)
    (sample,) = bench.engine().generate([request])
    expected = bench.reference.answer(request, version=0, like=sample)
    assert sample.ids.tolist() == expected.ids.tolist()
    np.testing.assert_allclose(sample.logprobs, expected.logprobs, atol=1e-4)


def test_what_cannot_go_on_is_refused(bench):
    whole = Request(np.array(_TEXT, np.int32), (), Sampling(4), 5)
    (begun,) = bench.engine().generate([whole])
    with pytest.raises(ValueError, match=r"Request.begun: 4 tokens, and .* is 3"):
        dataclasses.replace(whole, sampling=Sampling(3), begun=begun)
