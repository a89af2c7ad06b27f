"""A run that takes seconds, its parts for tests, and a sampler that follows a script.

As a program it is `train.run` with one more recipe, `small`, so that a test can kill it:
`python tests/train/small.py --config=small ...`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import signal
from typing import Any, cast

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from configs import RECIPES
from models.features import FrameFeatures, FrameSettings
from models.fingerprint import fingerprint
from models.lora import LoRASettings, add_adapters
from models.model import VisionLanguageModel
from models.sharding import make_mesh, param_shardings
from models.trained import TrainedVision, TrainVision, split
from paravt_jax.data import video
from paravt_jax.method.grpo.settings import GRPOSettings
from paravt_jax.method.protocol import Protocol, ProtocolSettings, render_call
from paravt_jax.method.records import CropCall, digest
from paravt_jax.method.rewards import RewardSettings
from paravt_jax.processes.interrupts import Interrupts
from paravt_jax.world.text import TextSettings
from paravt_jax.world.videos import WorldSettings
from rollout.agent.episode import Environment
from rollout.engine.engine import Engine
from rollout.engine.requests import Completion, Request, Sample, SampleStop
from rollout.engine.settings import EngineSettings
from tests.train.steps import road_learner, take_step
from train.data import Data
from train.durable.metrics import read_metrics
from train.learn.align import AlignSettings
from train.learn.optimizer import OptimizerSettings
from train.learn.rl_settings import RLSettings
from train.learn.sft import SFTSettings
from train.model import model_config
from train.prepare import prepare
from train.run import main
from train.settings import EvaluationSettings, Run, change

SUFFIX = 144


def small() -> Run:
    """A few steps of every phase on a handful of videos; it learns nothing.

    Command: python tests/train/small.py --config=small
    """
    adam = OptimizerSettings(learning_rate=1e-3)
    return Run(
        name="small",
        world=WorldSettings(train_videos=6, heldout_videos=2),
        text=TextSettings(budgets=(4, 16), groups=2),
        frames=FrameSettings(batch=128, admission="counted"),
        protocol=ProtocolSettings(
            max_tool_turns=2,
            turn_tokens=64,
            summary_tokens=16,
            trajectory_tokens=SUFFIX,
            text_tokens=48,
        ),
        engine=EngineSettings(slots=8, cache_tokens=4096),
        align=AlignSettings(steps=3, batch=16),
        sft=SFTSettings(
            steps=4,
            rows=2,
            row_tokens=320,
            optimizer=adam,
        ),
        rl=RLSettings(
            steps=6,
            prompts=2,
            optimizer=adam,
            grpo=GRPOSettings(group_size=4, anchor="credit", reward_clip=None),
            rewards=RewardSettings(format_cap=False),
            frame_budgets=(4, 16),
            save_every=2,
        ),
        evaluation=EvaluationSettings(
            questions=2,
            frames=(4, 16),
            dispatch=("parallel", "none"),
            temperatures=(0.7, 0.0),
        ),
    )


@dataclasses.dataclass(frozen=True)
class Road:
    """The parts that the phases of a run share, with the small recipe and untrained weights."""

    run: Run
    data: Data
    model: VisionLanguageModel
    environment: Environment
    graph: nnx.GraphDef
    weights: Any
    """The trained weights."""
    frozen: Any
    """The decoder's other weights."""

    @functools.cached_property
    def engine(self) -> Engine:
        return Engine(self.model, self.environment.features, self.run.engine_sizes)

    @property
    def image(self) -> int:
        return self.model.config.image_token_id

    def fresh(self, data: int = 1, fsdp: int = 1, tensor: int = 1) -> Any:
        """A copy of the weights on a mesh. Updates donate their weights."""
        return _placed(self.weights, make_mesh(data, fsdp, tensor))

    def base(self, data: int = 1, fsdp: int = 1, tensor: int = 1) -> Any:
        """The frozen weights on a mesh."""
        return _placed(self.frozen, make_mesh(data, fsdp, tensor))


def _placed(weights: Any, mesh: Mesh) -> Any:
    copy = jax.tree.map(np.asarray, weights)
    return jax.device_put(copy, param_shardings(weights, mesh))


def build_road(folder: pathlib.Path) -> Road:
    run = small()
    return lay_road(run, prepare(run, folder))


def lay_road(run: Run, data: Data) -> Road:
    config = model_config(run, data.vocabulary)
    # A multiple of 8, so that a mesh can split it. Published models have spare rows too.
    config = dataclasses.replace(
        config,
        text=dataclasses.replace(config.text, vocab_size=-(-config.text.vocab_size // 8) * 8),
    )
    model = nnx.jit(lambda: VisionLanguageModel(config, rngs=nnx.Rngs(0)))()
    vision = TrainedVision.of(model.vision, run.train_vision, run.largest_frame)
    environment = Environment(
        Protocol(data.vocabulary, run.protocol),
        FrameFeatures(
            model.vision, model.config, run.frames, data.root, source=video, trained=vision
        ),
    )
    if run.lora is not None:
        add_adapters(model.text, run.lora, run.seed)
    return Road(run, data, model, environment, *split(model, run.train_vision))


class StopAfter(Interrupts):
    """Stops a run once a step of a phase is done."""

    def __init__(self, run: Run, phase: str, step: int = 1):
        super().__init__()
        self._metrics = pathlib.Path(run.run_dir) / "metrics.jsonl"
        self._step = (phase, step)

    def agree(self) -> int | None:
        done = ((row["phase"], row["step"]) for row in read_metrics(self._metrics))
        return signal.SIGTERM if self._step in done else None


class Script:
    """Replaces the engine: writes texts of a script, chosen by the request's seed.

    Log-probs are those of a uniform distribution, close to those of fresh weights.
    """

    plans = (
        "look closer\n" + render_call(CropCall(0, 16)),
        "look closer\n</think>" + render_call(CropCall(0, 16)) + render_call(CropCall(40, 30)),
        "guess\n</think><answer>B</answer>",
        "guess\n</think><answer>A</answer>",
    )
    answers = ("the crops show\n</think><answer>[1, 2]</answer>", "</think><answer>A</answer>")

    def __init__(self, road: Road):
        self.vocabulary = road.data.vocabulary
        self.loaded = []
        self.weights: Any = None
        self.frozen = road.frozen
        self.version = 0
        self.tickets = itertools.count()
        self.waiting: dict[int, Request] = {}
        self.awake = True

    def load(self, weights: Any, version: int) -> None:
        self.loaded.append(version)
        self.weights = weights
        self.version = version
        self.awake = True

    def fingerprint(self) -> int:
        return fingerprint(self.weights, self.frozen)

    def sleep(self) -> None:
        assert not self.waiting
        self.awake = False

    def submit(self, request: Request) -> int:
        assert self.awake
        ticket = next(self.tickets)
        self.waiting[ticket] = request
        return ticket

    def step(self) -> list[Completion]:
        waiting, self.waiting = self.waiting, {}
        return [(ticket, self._sample(request)) for ticket, request in waiting.items()]

    def cancel(self, ticket: int) -> None:
        self.waiting.pop(ticket, None)

    def _sample(self, request: Request) -> Sample:
        before = self.vocabulary.decode(request.ids)
        if "<think>" not in before:
            # Only a sub-agent's turn has no pinned opening.
            texts = (" nothing",)
        elif "<tool_response>" in before:
            texts = self.answers
        else:
            texts = self.plans
        written = self.vocabulary.encode(texts[request.seed % len(texts)])
        ids = np.append(written, self.vocabulary.eos).astype(np.int32)
        logprobs = np.full(len(ids), -np.log(self.vocabulary.size), np.float32)
        return Sample(
            ids,
            logprobs,
            SampleStop.STOP_ID,
            np.full(len(ids), self.version, np.int32),
            digest(np.concatenate([request.ids, ids])),
        )


class Uneven(Script):
    """Answers the first question at once; every rollout of the others calls two sub-agents."""

    def __init__(self, road: Road):
        super().__init__(road)
        self.quiet = road.data.questions[0].text

    def _sample(self, request: Request) -> Sample:
        calls = render_call(CropCall(0, 16)) + render_call(CropCall(20, 36))
        self.plans = (f"look\n</think>{calls}",)
        if self.quiet in self.vocabulary.decode(request.ids):
            self.plans = Script.plans[2:]
        return super()._sample(request)


def learn(road: Road, fsdp: int = 1) -> list[dict[str, float]]:
    """The metrics of two steps of RL in which one of two questions calls all sub-agents."""
    assert road.run.rl is not None
    learner = road_learner(road, road.run.rl, road.run.rl_shape, fsdp=fsdp)
    state, sampler, steps = learner.initial, Uneven(road), []
    for _ in range(2):
        state, figures = take_step(
            learner, state, cast(Any, sampler), road.environment, road.data.questions[:2], seed=0
        )
        timed = ("time/", "speed/", "packing/", "weights/")
        steps.append({name: x for name, x in figures.items() if not name.startswith(timed)})
    return steps


def small_lora() -> Run:
    """The same with adapters; `small.py --config=small_lora`."""
    return dataclasses.replace(small(), name="small_lora", lora=LoRASettings(rank=4, alpha=8.0))


def small_merger() -> Run:
    """Adapters and the mergers; `small.py --config=small_merger`."""
    return dataclasses.replace(small_lora(), name="small_merger", train_vision="merger")


def small_tower() -> Run:
    """Everything; `small.py --config=small_tower`."""
    return dataclasses.replace(small(), name="small_tower", train_vision="tower")


def thawed(road: Road, part: TrainVision, lora: LoRASettings | None = None) -> Road:
    """The road with a trained part of the tower."""
    return lay_road(dataclasses.replace(road.run, train_vision=part, lora=lora), road.data)


def adapted(road: Road) -> Road:
    """The road with adapters."""
    return lay_road(dataclasses.replace(road.run, lora=small_lora().lora), road.data)


def shortened(run: Run, folder: pathlib.Path, **fields: Any) -> Run:
    """Two steps of the cold start and two of RL; one question is evaluated, greedily."""
    changes: dict[str, Any] = {
        "run_dir": str(folder),
        "sft.steps": 2,
        "rl.steps": 2,
        "evaluation.frames": (4,),
        "evaluation.temperatures": (0.0,),
        "evaluation.dispatch": ("parallel",),
        "evaluation.questions": 1,
    }
    return change(run, run.name, changes | fields)


RECIPES.setdefault("small", small)
RECIPES.setdefault("small_lora", small_lora)
RECIPES.setdefault("small_merger", small_merger)
RECIPES.setdefault("small_tower", small_tower)

if __name__ == "__main__":
    raise SystemExit(main())
