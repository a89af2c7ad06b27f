"""Compares the figures and weights of small training runs with the record in golden_run.json.

`python -m benchmarks.golden_run` makes the runs and prints the differences. With `--write` it
replaces the record.

There are two runs of three steps per phase, one with the cold start and one with RL. Both start
from the aligned model, so a change to the cold start does not change the figures of RL.

The runs use the same entry points as a user's: a recipe passed to `train.run.execute`, figures from
metrics.jsonl, weights from the folder `model`. Only the sampler is replaced. After three steps, a
model writes nothing that earns a reward, so `ScriptedEngine` answers with prepared texts. The
tokens of the rollouts then do not depend on rounding either.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import math
import pathlib
import platform
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from safetensors.numpy import load_file

import train.run
from configs import RECIPES
from models.fingerprint import fingerprint
from models.sharding import Lowering
from paravt_jax.data import tokenizer_file, video
from paravt_jax.method.conversations import rewrite_calls
from paravt_jax.method.protocol import render_call
from paravt_jax.method.records import CropCall, digest
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.world.text import TextSettings
from paravt_jax.world.videos import WorldSettings
from rollout.engine.engine import Engine
from rollout.engine.requests import Completion, Request, Sample, SampleStop
from train.durable.metrics import MEASURED, read_metrics
from train.settings import EvaluationSettings, Run

RECORD = pathlib.Path(__file__).with_name("golden_run.json")

TOLERANCES = {"align": 1e-6, "sft": 6e-6, "rl": 6e-5, "decoder": 1.5e-4, "tower": 5e-4}
"""Relative tolerances, at least ten times the largest difference between ten runs.

Every run compiled its own programs: on 2 cores, on 1 core, without Eigen's threads, for SSE4.2, for
AVX2, and with XLA's own optimisation and fusions for AVX-512 and for SSE4.2 (AMD EPYC, jax 0.10.2).
Figures differed by at most 8.0e-8 in align, 5.2e-7 in sft and 6.0e-6 in rl. Weights differed by at
most 1.4e-5 of their norm in the decoder and 4.5e-5 in the vision tower, where Adam amplifies the
rounding of small gradients. On 2 cores, runs with the tests' compiler settings and AVX2 or more
were equal bit for bit.
"""

ABSOLUTE = 1e-7
"""Absolute tolerance, for figures near zero."""

PROCESSORS = ("x86_64", "AMD64")
"""Processors on which videos decode to the same pixels.

With SSSE3 or more, every run read the same pixels, by decord and by PyAV. Without ffmpeg's assembly
for encoding and decoding, which imitates other processors, colours differed by up to 3 grey levels.
"""

NOT_COMPARED = (*MEASURED, "packing/", "weights/")
"""Prefixes of figures that depend on the machine's speed and size, on how rows are packed, or on
the last bit of every weight."""

MOST_LINES = 40
"""Upper bound on the printed differences."""

ADVICE = """\
A refactoring, a speed-up or another layout of files and batches must not change these figures: fix
the code. Replace the record (python -m benchmarks.golden_run --write) only in a commit that is
meant to change the method, a default, the model's initialisation, the random draws, the small
world, or what a step of the cold start trains on, and give the reason in its message. A change to
the cold start does not change the figures of align and RL. If you rename a metric or a weight,
rename it in the record by hand; its figures stay."""

Figures = dict[str, float]


# --- the run ---


def recipe(folder: pathlib.Path) -> Run:
    """`paravt_tiny` with three steps per phase on six videos."""
    run = RECIPES["paravt_tiny"]()
    sft, rl, align = run.sft, run.rl, run.align
    assert sft is not None and rl is not None and align is not None
    budgets = (4, 16)
    return dataclasses.replace(
        run,
        name="golden_run",
        run_dir=str(folder),
        world=WorldSettings(train_videos=4, heldout_videos=2),
        text=TextSettings(budgets=budgets, groups=2),
        align=dataclasses.replace(align, steps=3, batch=16),
        sft=dataclasses.replace(sft, steps=3, rows=2, row_tokens=544),
        rl=dataclasses.replace(
            rl,
            steps=3,
            prompts=2,
            grpo=dataclasses.replace(rl.grpo, group_size=4),
            frame_budgets=budgets,
        ),
        evaluation=EvaluationSettings(
            questions=1,
            frames=(4,),
            dispatch=("parallel",),
            temperatures=(0.7,),
        ),
    )


class ScriptedEngine(Engine):
    """An engine with prepared answers and no model.

    The seed of a request selects the text and the log-probabilities.
    """

    two_calls = render_call(CropCall(32, 48)) + "\n" + render_call(CropCall(48, 64))
    plans = (
        "look closer\n</think>" + render_call(CropCall(0, 16)),
        "look closer\n</think>" + two_calls,
        "look closer\n" + render_call(CropCall(64, 80)),
        "look closer\n</think><tool_code>print(crop_video(start_time=0, end_time=16))</tool_code>",
        "look closer\n</think>" + render_call(CropCall(80, 80)),
        "I see one\n</think><answer>A</answer>",
        "I see\n<answer>B</answer>",
        "32 red one, " * 40,
    )
    answers = (
        "the crops show one from 4 to 8\n</think><answer>[4, 40]</answer>",
        "the crops show one from 36 to 40\n</think><answer>C</answer>",
        "the crops show nothing\n<answer>B</answer>",
        "look closer\n</think>" + render_call(CropCall(96, 112)),
    )
    reports = (" nothing", " seven from 4 to 8", " two from 36 to 40, three from 44 to 46")

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.version = 0
        self._weights: Any = None
        self._tickets = itertools.count()
        self._waiting: dict[int, Request] = {}

    def load(self, weights: Any, version: int) -> None:
        self.version = version
        self._weights = weights

    def fingerprint(self) -> int:
        return fingerprint(self._weights)

    def warm_up(self) -> None: ...

    def lowerings(self) -> Iterator[Lowering]:
        return iter(())

    def sleep(self) -> None: ...

    def forget(self) -> None: ...

    def submit(self, request: Request) -> int:
        ticket = next(self._tickets)
        self._waiting[ticket] = request
        return ticket

    def cancel(self, ticket: int) -> None:
        self._waiting.pop(ticket, None)

    def step(self) -> list[Completion]:
        waiting, self._waiting = self._waiting, {}
        return [(ticket, self._sample(request)) for ticket, request in waiting.items()]

    def _sample(self, request: Request) -> Sample:
        before = self.vocabulary.decode(request.ids)
        if "<think>" not in before:
            texts = self.reports
        elif "<tool_response>" in before:
            texts = self.answers
        else:
            texts = self.plans
        rng = np.random.default_rng(request.seed)
        text = rewrite_calls(texts[rng.integers(len(texts))], self.vocabulary.dialect.calls)
        ids = np.append(self.vocabulary.encode(text), self.vocabulary.eos).astype(np.int32)
        stop = SampleStop.STOP_ID
        limit = request.sampling.max_new_tokens
        if len(ids) > limit:
            ids, stop = ids[:limit], SampleStop.LENGTH
        # The mean is that of an untrained model. The spread makes some importance weights exceed
        # their cap.
        logprobs = rng.normal(-math.log(self.vocabulary.size), 1.0, len(ids))
        logprobs = np.minimum(logprobs, 0).astype(np.float32)
        fed = np.concatenate([request.ids, ids])
        versions = np.full(len(ids), self.version, np.int32)
        return Sample(ids, logprobs, stop, versions, digest(fed))


def make_runs(folder: pathlib.Path) -> Figures:
    """Make both runs in an empty folder and return their figures by name."""
    cold_start = folder / "sft"
    rl = folder / "rl"
    execute_scripted(dataclasses.replace(recipe(cold_start), rl=None))
    execute_scripted(dataclasses.replace(recipe(rl), sft=None))
    figures = {**_frames(rl), **_metrics(cold_start), **_metrics(rl)}
    for name, value in _weights(cold_start).items():
        if ".visual." not in name:  # only align trains the tower: it is the same in both runs
            figures[f"sft {name}"] = value
    return figures | _weights(rl)


def execute_scripted(run: Run) -> None:
    """Execute a run whose engine is a `ScriptedEngine`."""

    def engine(*_: Any) -> ScriptedEngine:
        return ScriptedEngine(
            tokenizer_file.load(pathlib.Path(run.run_dir) / "tokenizer", run.model.dialect)
        )

    with mock.patch("train.actor.Engine", engine):
        train.run.execute(run)


def _frames(folder: pathlib.Path) -> Figures:
    """Return a checksum of all decoded frames. If it differs, most other figures differ too."""
    checksum = 0
    for file in sorted((folder / "videos").rglob("*.mp4")):
        frames = video.read(file, range(video.probe(file).frames))
        checksum = zlib.crc32(frames.tobytes(), checksum)
    return {"frames: checksum": checksum}


def _metrics(folder: pathlib.Path) -> Figures:
    """Return all figures of all steps. A figure that was not finite is NaN."""
    figures: Figures = {}
    for line in read_metrics(folder / "metrics.jsonl"):
        phase = line.pop("phase")
        step = line.pop("step")
        for name, value in line.items():
            if not name.startswith(NOT_COMPARED):
                figures[f"{phase} {step}: {name}"] = math.nan if value is None else value
    return figures


def _weights(folder: pathlib.Path) -> Figures:
    """Return the norm of each exported weight, and its inner product with `random_vector`.

    A norm does not change if entries change places or signs, but the product does.
    """
    figures: Figures = {}
    for name, weight in load_file(folder / "model" / "model.safetensors").items():
        values = weight.astype(np.float64)
        products = values * random_vector(name, weight.shape)
        if name.endswith("qkv.bias"):
            # Attention does not depend on the bias of the keys. Its gradient is rounding error, and
            # Adam scales it up.
            values = _without_keys(values)
            products = _without_keys(products)
        figures[f"{name}: norm"] = float(np.linalg.norm(values))
        figures[f"{name}: product"] = float(products.sum())
    return figures


def random_vector(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal numbers that depend on the weight's name and shape alone."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest(), "big")
    return np.random.default_rng(seed).standard_normal(shape)


def _without_keys(bias: np.ndarray) -> np.ndarray:
    queries, _, values = np.split(bias, 3)
    return np.concatenate([queries, values])


# --- the record ---


def read_record() -> Figures:
    return json.loads(RECORD.read_text())["figures"]


def write_record(figures: Figures) -> None:
    """Replace the record.

    Whole numbers are written as int, which marks them for exact comparison.

    Raises:
        ValueError: A figure is not finite.
    """
    not_finite = [name for name, value in figures.items() if not math.isfinite(value)]
    if not_finite:
        raise ValueError(f"{', '.join(not_finite)}: not finite; find out why the run failed")
    about = "Written by golden_run.py --write, which says where the tolerances come from."
    whole = {name: int(value) for name, value in figures.items() if float(value).is_integer()}
    RECORD.write_text(json.dumps({"about": about, "figures": figures | whole}, indent=1) + "\n")


def tolerance(name: str, expected: Figures) -> float:
    """Return the largest allowed difference of a figure; 0 for a whole number."""
    if isinstance(expected[name], int):
        return 0.0
    subject = name.rpartition(": ")[0]
    norm = expected.get(f"{subject}: norm")
    if norm is not None:  # a weight: both of its figures are compared relative to its norm
        part = "tower" if ".visual." in name else "decoder"
        return ABSOLUTE + TOLERANCES[part] * norm
    phase = subject.split()[0]
    return ABSOLUTE + TOLERANCES[phase] * abs(expected[name])


def compare(expected: Figures, found: Figures) -> list[str]:
    """List the names that are missing or new, and then the figures that differ.

    Figures are sorted by how far they exceed their tolerance, the furthest first. After MOST_LINES
    lines, only the number of further ones is given.
    """
    lines = [f"{name}: missing" for name in expected if name not in found]
    lines += [f"{name}: new, {value!r}" for name, value in found.items() if name not in expected]
    differing: list[tuple[float, str]] = []
    for name in expected.keys() & found.keys():
        allowed = tolerance(name, expected)
        difference = abs(found[name] - expected[name])
        if difference <= allowed:
            continue
        # A whole number has no tolerance, and the difference to NaN is NaN.
        comparable = allowed > 0 and not math.isnan(difference)
        excess = difference / allowed if comparable else math.inf
        values = f"expected {expected[name]!r}, found {found[name]!r}"
        line = f"{name}: {values}, difference {difference:.3g}, tolerance {allowed:.3g}"
        differing.append((excess, line))
    lines += [line for _, line in sorted(differing, key=lambda pair: (-pair[0], pair[1]))]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"and {len(lines) - MOST_LINES} more"]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.golden_run", description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the record")
    asked = parser.parse_args()
    if platform.machine() not in PROCESSORS:
        parser.error(
            f"{platform.machine()}: videos decode to other colours there; use {PROCESSORS[0]}"
        )
    import tests.conftest  # noqa: F401  (sets the compiler flags of the tests)

    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        figures = make_runs(pathlib.Path(folder))
    lines = compare(read_record(), figures) if RECORD.exists() else []
    print("\n".join(lines) or "equal to the record")
    if asked.write:
        write_record(figures)
    elif lines:
        print(ADVICE)
    return int(bool(lines) and not asked.write)


if __name__ == "__main__":
    raise SystemExit(main())
