"""One run from its first phase to its last, each of which can be cut off at any moment and gone on with.

Owns the phases (align, cold start, evaluate, reinforce), their checkpoints and their results on disk. Invariant: what a phase
leaves on disk is written atomically and decides everything that follows, so a run killed and started again ends like one that
was not.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.features import FrameFeatures
from models.qwen3_vl.config import Qwen3VLConfig, qwen3_vl, tiny, to_hf
from models.qwen3_vl.hf import load
from models.qwen3_vl.model import Qwen3VL
from models.qwen3_vl.vision import frozen
from models.sharding import make_mesh, param_shardings
from paravt_jax.data import video
from paravt_jax.data.atomic import write_atomically
from paravt_jax.data.frames import FrameReader
from paravt_jax.data.loader import Ahead
from paravt_jax.method.protocol import Protocol
from paravt_jax.method.records import Question
from paravt_jax.method.rewards import RewardSettings
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.remote.judge import Judge
from rollout.agent.episode import Scene, Setting
from rollout.agent.transcript import transcript
from rollout.engine.engine import Engine
from rollout.evaluate import play_and_score, summarise
from train.data import Data, question_stream
from train.durable import hosts
from train.durable.checkpoint import Checkpoints
from train.durable.compilations import Compilations
from train.durable.interrupts import Interrupts
from train.durable.metrics import MetricsWriter, Progress
from train.durable.phase import Phase
from train.durable.rollout_file import RolloutFile, forget_others, rollout_file_name
from train.durable.run_directory import cold_start_identity, identity
from train.export import write_model
from train.learn.align import align
from train.learn.rl import Learner
from train.learn.rl_settings import RLSettings
from train.learn.rollouts import Rollouts, draw_budgets
from train.learn.sft import Course
from train.learn.speed import speeds
from train.learn.step import TrainState
from train.learn.weight_sync import WeightSync
from train.prepare import note_unreadable
from train.published_data import open_reader
from train.published_model import check_vocabulary, config_of, fingerprint, on_host
from train.settings import Run

WARM_UP = 3  # steps after the start of a process in which programs may still be compiled


class Session:
    """The objects that the phases of a run share. `settings` is the run as JSON; `tick` is called after each step."""

    def __init__(
        self,
        run: Run,
        settings: dict[str, Any],
        folder: pathlib.Path,
        data: Data,
        metrics: MetricsWriter,
        interrupts: Interrupts,
        tick: Callable[[], None],
    ):
        self.run, self.settings, self.folder, self.data, self.metrics = (
            run,
            settings,
            folder,
            data,
            metrics,
        )
        self.interrupts, self.tick = interrupts, tick
        self.mesh = make_mesh(run.mesh.data, run.mesh.fsdp, run.mesh.tensor)
        self.config, self.model, self.origin = first_model(run, data, self.mesh)
        self.param_dtype = self.model.text.embedding[
            ...
        ].dtype  # what is trained; the sampler's may be another
        self.reader: FrameReader | None = None
        if (
            run.align is not None
        ):  # small enough to lie whole on every device of every process, and to be aligned there
            nnx.update(
                self.model,
                jax.device_put(nnx.state(self.model), NamedSharding(self.mesh, PartitionSpec())),
            )
        self.protocol = Protocol(data.vocabulary, run.protocol)
        self.compilations = Compilations()
        self.rewards = run.rl.rewards if run.rl else RewardSettings()
        self.judge = Judge(self.rewards.judge) if self.rewards.judge else None

    def phase(self, name: str, steps: int, save_every: int, unreadable: dict[str, str]) -> Phase:
        """A phase with its checkpoints; those of a cold start may be another run's with the same settings for it (`Run.start`)."""
        kept, rl = self.run.checkpoints, name == "rl"
        model, vocabulary = (
            to_hf(self.config),
            {"size": self.data.vocabulary.size, "digest": self.data.vocabulary.digest},
        )
        settings = identity(self.settings) if rl else cold_start_identity(self.settings)
        meta = {
            "settings": self.settings,
            "model": model,
            "vocabulary": self.data.vocabulary.digest,
        }
        checkpoints = Checkpoints(
            self.folder / "checkpoints" / name,
            keep=kept.keep,
            asynchronous=True,
            identity={"settings": settings, "vocabulary": vocabulary, "model": model} | self.origin,
        )
        return Phase(
            name,
            steps,
            save_every,
            checkpoints,
            self.metrics,
            self.interrupts,
            meta=meta | {"param_dtype": self.param_dtype.name},
            tick=self.tick,
            before_save=lambda: note_unreadable(
                self.run, self.folder, self.data, _all_of(hosts.gather(unreadable))
            ),
            best=kept.best if rl and kept.best != "none" else None,
        )

    def as_saved(self, state: TrainState) -> dict[str, Any]:
        """What a checkpoint of SFT or RL holds: the whole model, its frozen tower included, and the optimiser."""
        return {
            "vision": self.tower,
            "text": state.weights,
            "optimizer": state.optimizer,
            "step": state.step,
        }

    def resume(self, phase: Phase, start: TrainState) -> tuple[TrainState, Any]:
        """The state that `phase` was left with, and its data cursor; `start` and None where it begins."""
        saved, cursor = phase.resume(self.as_saved(start))
        return TrainState(saved["text"], saved["optimizer"], saved["step"]), cursor

    # --- phases ---

    def align(self) -> None:
        """Teach the vision tower to see, once; or take it from where it was left."""
        settings, data, unreadable = self.run.align, self.data, dict[str, str]()
        if settings is None:
            return
        with self.phase("align", settings.steps, settings.save_every, unreadable) as phase:
            align(
                self.model,
                data.captions,
                data.vocabulary,
                data.root,
                settings,
                self.run.seed,
                phase,
                unreadable,
            )

    def open(self) -> None:
        """Freeze the tower and build what reads frames and samples."""
        self.graph, weights = nnx.split(self.model.text)
        self.weights = jax.device_put(weights, param_shardings(weights, self.mesh))
        self.tower = on_host(nnx.state(self.model.vision))
        nnx.update(
            self.model.vision,
            jax.tree.map(jnp.asarray, frozen(self.tower, self.model.vision.dtype)),
        )  # this process's own
        if self.run.data is not None:
            self.reader = open_reader(self.run.data, self.run.frames, self.config.vision)
        source = self.reader or video
        self.features = FrameFeatures(
            self.model.vision, self.config, self.run.frames, self.data.root, source=source
        )
        self.scene = Scene(self.protocol, self.features)
        if self.run.plays_episodes:
            self.sync = WeightSync(self.weights, self.model.text.dtype)
            nnx.update(self.model.text, self.sync(self.weights))
            self.engine = Engine(self.model, self.features, self.run.engine_sizes)
            self.engine.sleep()
        nnx.update(
            self.model.text, jax.eval_shape(lambda: nnx.state(self.model.text))
        )  # its weights are `self.weights` now

    def close(self) -> None:
        """Ends the processes that read frames, at once."""
        if self.reader is not None:
            self.reader.close()

    def cold_start(self) -> None:
        """SFT to its last step."""
        settings = self.run.sft
        if settings is None:
            return
        course = Course(
            settings,
            self.data,
            self.reader,
            self.run.seed,
            self.protocol,
            self.features,
            self.mesh,
        )
        state, update = course.start(self.graph, self.weights)
        with self.phase(
            "sft", settings.steps, settings.save_every, self.features.unreadable
        ) as phase:
            state, cursor = self.resume(phase, state)
            self.weights = (
                state.weights
            )  # where a run goes on, the first ones are not kept beside those restored
            if cursor is not None:
                course.set_state(cursor)
            for step in phase.left:
                clock = time.perf_counter()
                batch, arrays, counts = next(course)
                state, figures = update(state, batch)
                figures = {name: float(value) for name, value in figures.items()} | counts
                seconds = time.perf_counter() - clock
                figures |= {"time/step": seconds} | speeds(
                    arrays, self.config, seconds, self.mesh.size
                )
                phase.done(step, figures, self.as_saved(state), course.get_state(), ("loss",))
        self.weights = state.weights

    def _wake(self, version: int) -> None:
        """The weights as they are now into the engine. What it has goes first: new weights beside old ones may be too much."""
        self.engine.sleep()
        self.engine.load(jax.block_until_ready(self.sync(self.weights)), version)

    def evaluate(self, name: str) -> list[dict[str, Any]]:
        """Rows of every setting on held-out questions; the settings of one K stand in one file, written when they are done.

        Where a judge was asked, the file also holds what became of its answers (`JudgeCounts`), summed over these settings.
        """
        settings, rows = self.run.evaluation, []
        questions = self.data.heldout[: settings.questions]
        if not questions:  # none held out: `rollout.evaluate` plays the paper's splits
            return []
        files = [self.folder / "evaluation" / f"{name}-{k}.json" for k in settings.frames]
        if not hosts.from_first(lambda: all(file.exists() for file in files)):
            self._wake(self.engine.version + 1)
        with Progress(f"evaluate {name} RL", len(settings.settings()), unit="setting") as progress:
            for k, file in zip(settings.frames, files, strict=True):
                if not hosts.from_first(file.exists):
                    self.engine.forget()
                    content: dict[str, Any] = {"rows": [], "episodes": []}
                    if self.judge is not None:
                        content["judge"] = collections.Counter()
                    for setting in [s for s in settings.settings() if s.frames == k]:
                        self.interrupts.check(
                            f"stopped while evaluating {name} RL; K = {k} begins again, those before it are kept"
                        )
                        row, lines = self._play(name, setting, questions)
                        content["rows"].append(row)
                        content["episodes"] += lines
                        if self.judge is not None:
                            for counts in hosts.gather(dataclasses.asdict(self.judge.counts)):
                                content["judge"].update(counts)
                        progress.update(len(rows) + len(content["rows"]))
                        self.tick()
                    with hosts.one_after_another():
                        if hosts.is_first():
                            file.parent.mkdir(exist_ok=True)
                            write_atomically(file, json.dumps(content))
                rows += json.loads(file.read_text())["rows"]
        self.engine.sleep()  # what comes next trains or writes
        return rows

    def _play(
        self, name: str, setting: Setting, questions: Sequence[Question]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        samples = (
            self.run.evaluation.samples
            if setting.temperature > 0 and setting.dispatch == "parallel"
            else 1
        )
        mine, seed = questions[hosts.share_of(len(questions))], self.run.seed
        anchor = self.run.rl.grpo.sequence_anchor if self.run.rl else 0.0
        scene = dataclasses.replace(
            self.scene, protocol=Protocol(self.data.vocabulary, self.run.limits(setting.dispatch))
        )
        played = play_and_score(
            self.engine,
            scene,
            mine,
            setting,
            self.rewards,
            seed,
            samples,
            judge=self.judge,
            anchor_weight=anchor,
        )
        scored = [episode for part in hosts.gather(played) for episode in part]
        shown = scored[: self.run.log.episodes] if setting.dispatch == "parallel" else []
        lines = [
            {"phase": name, "step": 0, **transcript(episode, reward, setting, self.data.vocabulary)}
            for episode, reward in shown
        ]
        return dataclasses.asdict(summarise(setting, scored)), lines

    def reinforce(self) -> None:
        """PARA-GRPO to its last step, from the weights of the cold start, which stay as the reference."""
        settings = self.run.rl
        if settings is None:
            return
        learner = Learner(
            self.graph,
            self.weights,
            self.config,
            settings,
            self.run.rl_shapes,
            self.judge,
            self.sync,
        )
        with self.phase(
            "rl", settings.steps, settings.save_every, self.features.unreadable
        ) as phase:
            questions = self._questions(settings, phase.first)
            state, cursor = self.resume(phase, learner.start)
            learner.start, self.weights = (
                state,
                state.weights,
            )  # where a run goes on, those it began with are not kept beside them
            if cursor is not None:
                questions.set_state(cursor["questions"])
            if phase.left:
                self._wake(phase.first)
                self.engine.warm_up()
            if hosts.is_first():
                forget_others(self.folder, jax.process_count())
            rollouts = RolloutFile(
                self.folder / rollout_file_name(jax.process_index(), jax.process_count()),
                phase.first,
            )
            for step in phase.left:
                compiled = self.compilations.count
                look = self._transcriber(step) if phase.saves(step) else None
                asked = next(questions)
                state, figures = learner.step(
                    state, self.engine, self.scene, asked, self.run.seed, look, rollouts.roll_out
                )
                figures["recompilations"] = float(
                    self.compilations.count - compiled if step > phase.first + WARM_UP else 0
                )
                cursor = {"questions": questions.get_state()}
                phase.done(
                    step,
                    figures,
                    self.as_saved(state),
                    cursor,
                    ("accuracy", "format", "calls", "reward/total"),
                )
        rollouts.remove()
        self.engine.sleep()
        self.weights = state.weights

    def _questions(
        self, settings: RLSettings, first: int
    ) -> grain.DatasetIterator[tuple[Question, ...]] | Ahead[tuple[Question, ...]]:
        """What is asked in each step; of published videos, the overviews of the next one are read meanwhile."""
        seed, prompts = self.run.seed, settings.prompts
        budgets = functools.partial(draw_budgets, settings, seed, prompts=prompts)
        return question_stream(self.data, self.reader, seed + 2, prompts, budgets, first)

    def export(self) -> None:
        """The trained model in the Hugging Face layout, for transformers and `models.qwen3_vl.load`, in the folder `model`."""
        folder = self.folder / "model"
        if not hosts.from_first(
            folder.exists
        ):  # all processes save: what is cut over them is gathered
            nnx.update(self.model.text, self.weights)
            nnx.update(
                self.model.vision,
                jax.device_put(self.tower, NamedSharding(self.mesh, PartitionSpec())),
            )
            write_model(self.model, self.folder / "tokenizer", self.run.frames, folder)

    def _transcriber(self, step: int) -> Callable[[Rollouts, np.ndarray], None]:
        """Writes one episode of each group of a step, of the first process's, down for the report."""
        assert self.run.rl is not None
        temperature, rows = self.run.rl.temperature, self.run.rl.grpo.group_size

        def write(rollouts: Rollouts, advantages: np.ndarray) -> None:
            if not hosts.is_first():
                return
            lines = [
                {"phase": "rl", "step": step}
                | transcript(
                    group[0],
                    rewards[0],
                    Setting(group[0].frames, temperature),
                    self.data.vocabulary,
                    advantages[p * rows],
                )
                for p, (group, rewards) in enumerate(
                    zip(rollouts.groups, rollouts.rewards, strict=True)
                )
            ]
            folder = self.folder / "evaluation"
            folder.mkdir(exist_ok=True)
            write_atomically(
                folder / f"rl-{step:06d}.json", json.dumps({"rows": [], "episodes": lines})
            )

        return write


def _all_of(parts: Sequence[dict[str, str]]) -> dict[str, str]:
    return {name: reason for part in parts for name, reason in part.items()}


def first_model(run: Run, data: Data, mesh: Mesh) -> tuple[Qwen3VLConfig, Qwen3VL, dict[str, Any]]:
    """The model that a run begins with, and what tells its beginning from another's by content: the weights, the published rows."""
    dtype, path = jnp.dtype(run.model.dtype), run.model.path
    origin = {"data": data.digest} if data.digest else {}
    if not path:
        config = model_config(run, data.vocabulary)
        return config, Qwen3VL(config, rngs=nnx.Rngs(run.seed), dtype=dtype), origin
    config = config_of(path, run.model.size)
    check_vocabulary(config, data.vocabulary, path)
    return (
        config,
        load(path, config, mesh=mesh, dtype=dtype),
        origin | {"weights": fingerprint(path)},
    )


def model_config(run: Run, vocabulary: Vocabulary) -> Qwen3VLConfig:
    """The model's sizes, with the ids that this vocabulary gives the special tokens."""
    ids = {
        f"{name}_token_id": vocabulary[f"<|{token}|>"]
        for name, token in (("image", "image_pad"), ("video", "video_pad"))
    }
    ids |= {
        f"{name}_token_id": vocabulary[f"<|{name}|>"] for name in ("vision_start", "vision_end")
    }
    sizes = tiny(vocabulary.size) if run.model.size == "tiny" else qwen3_vl(run.model.size)
    return dataclasses.replace(sizes, **ids)
