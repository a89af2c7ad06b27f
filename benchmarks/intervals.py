"""How often the intervals of an evaluation contain the true value: a simulation.

python -m benchmarks.intervals                       # 1,000 repetitions, about 2 minutes on a core
python -m benchmarks.intervals --repetitions 100

Each repetition draws new videos from a population, and several questions on each. Two runs answer
them. The four outcomes of a question (both right, only A, only B, neither) have probabilities of
their own on each video, drawn from a Dirichlet distribution; its concentration sets the correlation
between questions on one video. Graded scores are uniform in [0.5, 1] for a right answer, and in
[0, 0.25] for a wrong one. The true values are those of the population.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Float64, Int64

from paravt_extras.markdown import table
from rollout.evaluation.statistics import interval, interval_of_difference

LEAST = 0.93
"""Rows below are marked. Nominal is 0.95; with 1,000 repetitions the standard error is 0.007."""

RIGHT, WRONG = 0.75, 0.125
"""Mean graded scores of right and wrong answers."""

CORRELATIONS = (0.0, 0.1, 0.3)
"""Correlation between the outcomes of two questions on one video."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sizes of a split."""

    name: str
    questions: int
    videos: int
    uneven: bool = False
    """Deal questions to videos at random instead of evenly."""
    graded: bool = False
    """Scores are graded, as in grounding, instead of 0 or 1."""

    @property
    def correlations(self) -> tuple[float, ...]:
        """With one question per video, correlation within videos means nothing."""
        return CORRELATIONS if self.questions > self.videos else (0.0,)

    def sizes(self, rng: np.random.Generator) -> Int64[np.ndarray, "videos"]:
        """The number of questions on each video, at least 1."""
        if self.uneven:
            shares = rng.dirichlet(np.full(self.videos, 2.0))
            return 1 + rng.multinomial(self.questions - self.videos, shares)
        each, more = divmod(self.questions, self.videos)
        return each + (np.arange(self.videos) < more).astype(np.int64)


LAYOUTS = (
    Layout("VideoMME", 2700, 900),
    Layout("LongVideoBench", 1337, 753, uneven=True),
    Layout("LVBench", 1549, 103, uneven=True),
    Layout("MMVU", 1000, 1000),
    Layout("Charades-STA", 3720, 1334, uneven=True, graded=True),
    Layout("--limit 300", 300, 100),
    Layout("--limit 60", 60, 20),
)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two runs: the share that A answers correctly, and the shares that only one of them does."""

    right: float
    only_a: float
    only_b: float

    @property
    def outcomes(self) -> Float64[np.ndarray, "4"]:
        """Probabilities of: both right, only A, only B, neither."""
        both = self.right - self.only_a
        return np.array([both, self.only_a, self.only_b, 1 - self.right - self.only_b])


SCORES = (0.6, 0.95)
PAIRS = (
    Pair(0.6, 0.0, 0.005),
    Pair(0.6, 0.005, 0.005),
    Pair(0.6, 0.05, 0.05),
    Pair(0.6, 0.05, 0.08),
    Pair(0.6, 0.1, 0.2),
)


@dataclasses.dataclass(frozen=True)
class Coverage:
    """What a simulation found."""

    share: float
    """Share of the intervals that contain the true value."""
    half_width: float
    """Mean half width, in points."""


Drawn = tuple[Float64[np.ndarray, "n"], Float64[np.ndarray, "n"], list[str]]


def draw(layout: Layout, pair: Pair, correlation: float, rng: np.random.Generator) -> Drawn:
    """Draw an evaluation of two runs: the scores of A and of B, and the video of each question."""
    shares = np.broadcast_to(pair.outcomes, (layout.videos, 4))
    if correlation:
        shares = rng.gamma(shares * (1 - correlation) / correlation)
        shares /= shares.sum(axis=1, keepdims=True)
    video = np.repeat(np.arange(layout.videos), layout.sizes(rng))
    limits = np.cumsum(shares, axis=1)[video, :3]
    outcomes = (rng.random((len(video), 1)) >= limits).sum(axis=1)
    right_a, right_b = np.isin(outcomes, (0, 1)), np.isin(outcomes, (0, 2))
    score = _graded if layout.graded else _binary
    return score(right_a, rng), score(right_b, rng), video.astype(str).tolist()


def _binary(right: Bool[np.ndarray, "n"], rng: np.random.Generator) -> Float64[np.ndarray, "n"]:
    return right.astype(np.float64)


def _graded(right: Bool[np.ndarray, "n"], rng: np.random.Generator) -> Float64[np.ndarray, "n"]:
    uniform = rng.random(len(right))
    return np.where(right, 0.5 + 0.5 * uniform, 0.25 * uniform)


def simulate_score(layout: Layout, right: float, correlation: float, repetitions: int) -> Coverage:
    """The coverage of the interval of a single run."""
    truth = RIGHT * right + WRONG * (1 - right) if layout.graded else right

    def found(drawn: Drawn) -> tuple[float, float]:
        return interval(drawn[0].tolist(), drawn[2])

    return _simulate(layout, Pair(right, 0.0, 0.0), correlation, repetitions, found, truth)


def simulate_difference(
    layout: Layout, pair: Pair, correlation: float, repetitions: int
) -> Coverage:
    """The coverage of the interval of the difference of two runs."""
    worth = RIGHT - WRONG if layout.graded else 1.0

    def found(drawn: Drawn) -> tuple[float, float]:
        return interval_of_difference((drawn[1] - drawn[0]).tolist(), drawn[2])

    truth = worth * (pair.only_b - pair.only_a)
    return _simulate(layout, pair, correlation, repetitions, found, truth)


def _simulate(
    layout: Layout,
    pair: Pair,
    correlation: float,
    repetitions: int,
    found: Callable[[Drawn], tuple[float, float]],
    truth: float,
) -> Coverage:
    rng = np.random.default_rng(0)
    hits, width = 0, 0.0
    for _ in range(repetitions):
        low, high = found(draw(layout, pair, correlation, rng))
        hits += low <= truth <= high
        width += high - low
    print(".", end="", flush=True, file=sys.stderr)
    return Coverage(hits / repetitions, 50 * width / repetitions)


# --- the tables ---


def scores(layouts: Sequence[Layout], repetitions: int) -> str:
    """The table of single runs."""
    rows = []
    for layout in layouts:
        for right in SCORES:
            found = [simulate_score(layout, right, c, repetitions) for c in layout.correlations]
            rows.append([_name(layout), f"{100 * right:g}", *_cells(found)])
    return table(["questions on videos", "right, %", *_headings()], rows)


def differences(layouts: Sequence[Layout], repetitions: int) -> str:
    """The table of differences of two runs."""
    rows = []
    for layout in layouts:
        for pair in PAIRS:
            found = [simulate_difference(layout, pair, c, repetitions) for c in layout.correlations]
            only = f"{100 * pair.only_a:g}, {100 * pair.only_b:g}"
            rows.append([_name(layout), only, *_cells(found)])
    return table(["questions on videos", "only A, only B, %", *_headings()], rows)


def _headings() -> list[str]:
    names = [f"correlation {c:g}" for c in CORRELATIONS]
    return [*names, *(f"± at {c:g}" for c in CORRELATIONS)]


def _name(layout: Layout) -> str:
    return f"{layout.name}: {layout.questions:,} on {layout.videos:,}"


def _cells(found: Sequence[Coverage]) -> list[str]:
    empty = [""] * (len(CORRELATIONS) - len(found))
    shares = [f"{100 * c.share:.1f}" + (" !" if c.share < LEAST else "") for c in found]
    return [*shares, *empty, *(f"{c.half_width:.2f}" for c in found), *empty]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.intervals", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=1000)
    repetitions = parser.parse_args(argv).repetitions
    print(f"A score: coverage in % of {repetitions:,} repetitions, and mean half width in points\n")
    print(scores(LAYOUTS, repetitions))
    print("\nThe difference of two runs on the same questions\n")
    print(differences(LAYOUTS, repetitions))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
