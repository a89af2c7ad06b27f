"""One run from its first phase to its last, each of which can be cut off at any moment and gone on with.

Owns the phases (align, cold start, evaluate, reinforce), their checkpoints and their results on disk. Invariant: what a phase
leaves on disk is written atomically and decides everything that follows, so a run killed and started again ends like one that
was not.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from configs.base import Run
from models.features import FrameFeatures
from models.qwen3_vl.config import Qwen3VLConfig, qwen3_vl, tiny
from models.qwen3_vl.hf import save
from models.qwen3_vl.model import Qwen3VL
from models.sharding import make_mesh, param_shardings
from paravt_jax.judge import Judge
from paravt_jax.loader import stream
from paravt_jax.protocol import Protocol
from paravt_jax.records import Question
from paravt_jax.rewards import RewardSettings
from paravt_jax.tokenizer import Vocabulary
from rollout.engine import Engine
from rollout.episode import Scene, Setting
from rollout.evaluate import evaluate
from rollout.transcript import transcript
from train.align import align
from train.checkpoint import Checkpoints
from train.compilations import Compilations
from train.metrics import MetricsWriter, Progress
from train.prepare import Data, note_unreadable
from train.rl import Learner
from train.rollouts import Rollouts
from train.run_directory import write_atomically
from train.sft import sft_batch, start_sft

WARM_UP = 3  # steps after the start of a process in which programs may still be compiled


class Session:
    """The objects that the phases of a run share."""

    def __init__(self, run: Run, folder: pathlib.Path, data: Data, metrics: MetricsWriter, check: Callable[[], None]):
        self.run, self.folder, self.data, self.metrics, self.check = run, folder, data, metrics, check
        self.config = model_config(run, data.vocabulary)
        self.mesh = make_mesh(run.mesh.data, run.mesh.fsdp, run.mesh.tensor)
        self.model = Qwen3VL(self.config, rngs=nnx.Rngs(run.seed), dtype=jnp.dtype(run.model.dtype))
        self.protocol = Protocol(data.vocabulary, run.protocol)
        self.compilations = Compilations()
        self.rewards = run.rl.rewards if run.rl else RewardSettings()
        self.judge = Judge(self.rewards.judge) if self.rewards.judge else None

    def checkpoints(self, phase: str) -> Checkpoints:
        return Checkpoints(self.folder / "checkpoints" / phase)

    # --- phases ---

    def align(self) -> None:
        """Teach the vision tower to see, once; or take it from where it was left."""
        settings, kept = self.run.align, self.checkpoints("align")
        if settings is None:
            return
        weights = nnx.state(self.model)
        if kept.latest() is None:
            self.metrics.truncate("align", -1)
            with Progress("align the vision tower", settings.steps) as progress:

                def tell(step: int, figures: dict[str, float]) -> None:
                    self.metrics.write("align", step, figures)
                    progress.update(step, figures)
                    self.check()

                bad = align(self.model, self.data.captions, self.data.vocabulary, self.data.root, settings, self.run.seed, tell)
            note_unreadable(self.run, self.folder, self.data, bad)
            kept.save(settings.steps, nnx.state(self.model), {})
        else:
            nnx.update(self.model, kept.restore(weights)[0])
        kept.close()

    def open(self) -> None:
        """Freeze the tower and build what reads frames and samples."""
        self.features = FrameFeatures(self.model.vision, self.config, self.run.frames, self.data.root)
        self.scene = Scene(self.protocol, self.features)
        self.graph, weights = nnx.split(self.model.text)
        self.weights = jax.device_put(weights, param_shardings(weights, self.mesh))
        nnx.update(self.model.text, self.weights)
        self.engine = Engine(self.model, self.features, self.run.engine)

    def cold_start(self) -> None:
        """SFT to its last step."""
        settings, data = self.run.sft, self.data
        if settings is None:
            return
        state, update = start_sft(self.graph, self.weights, self.config.image_token_id, settings)
        kept = self.checkpoints("sft")
        main = stream(data.demonstrations, self.run.seed, settings.main.groups)
        windows = stream(data.windows, self.run.seed + 1, settings.windows.groups)
        if kept.latest() is not None:
            state, meta, _ = kept.restore(state)
            main.set_state(meta["main"])
            windows.set_state(meta["windows"])
        first = int(state.step)
        if first < settings.steps:
            self.metrics.truncate("sft", first)
        with Progress("cold start", settings.steps, first) as progress:
            for step in range(first + 1, settings.steps + 1):
                clock = time.perf_counter()
                batches = sft_batch(next(main), [d for (d,) in next(windows)], self.protocol, self.features, settings)
                state, figures = update(state, batches)
                figures = {name: float(value) for name, value in figures.items()} | {"time/step": time.perf_counter() - clock}
                _require_finite("sft", step, figures)
                self.metrics.write("sft", step, figures)
                progress.update(step, {"loss": figures["loss"]})
                self.check()
                if step % settings.save_every == 0 or step == settings.steps:
                    note_unreadable(self.run, self.folder, self.data, self.features.unreadable)
                    kept.save(step, state, {"main": main.get_state(), "windows": windows.get_state()})
        kept.close()
        self.weights = state.weights

    def evaluate(self, name: str) -> list[dict[str, Any]]:
        """Rows of every setting on held-out questions; the settings of one K stand in one file, written when they are done.

        Where a judge was asked, the file also holds what became of its answers (`JudgeCounts`), summed over these settings.
        """
        settings, rows = self.run.evaluation, []
        questions = self.data.heldout[: settings.questions]
        self.engine.load(self.weights, version=self.engine.version + 1)
        with Progress(f"evaluate {name} RL", len(settings.settings()), unit="setting") as progress:
            for k in settings.frames:
                file = self.folder / "evaluation" / f"{name}-{k}.json"
                if not file.exists():
                    self.engine.forget()
                    content: dict[str, Any] = {"rows": [], "episodes": []}
                    if self.judge is not None:
                        content["judge"] = collections.Counter()
                    for setting in [s for s in settings.settings() if s.frames == k]:
                        row, lines = self._play(name, setting, questions)
                        content["rows"].append(row)
                        content["episodes"] += lines
                        if self.judge is not None:
                            content["judge"].update(dataclasses.asdict(self.judge.counts))
                        progress.update(len(rows) + len(content["rows"]))
                        self.check()
                    file.parent.mkdir(exist_ok=True)
                    write_atomically(file, json.dumps(content))
                rows += json.loads(file.read_text())["rows"]
        return rows

    def _play(self, name: str, setting: Setting, questions: Sequence[Question]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        samples = self.run.evaluation.samples if setting.temperature > 0 and setting.dispatch == "parallel" else 1
        row, episodes = evaluate(self.engine, self.scene, questions, setting, self.rewards, self.run.seed, samples, judge=self.judge)
        shown = episodes[: self.run.log.episodes] if setting.dispatch == "parallel" else []
        lines = [{"phase": name, "step": 0, **transcript(episode, reward, setting, self.data.vocabulary)} for episode, reward in shown]
        return dataclasses.asdict(row), lines

    def reinforce(self) -> None:
        """PARA-GRPO to its last step, from the weights of the cold start, which stay as the reference."""
        settings = self.run.rl
        if settings is None:
            return
        learner = Learner(self.graph, self.weights, self.config.image_token_id, settings, self.judge)
        state, kept = learner.start, self.checkpoints("rl")
        questions = stream(self.data.questions, self.run.seed + 2, settings.shape.groups)
        if kept.latest() is not None:
            state, meta, _ = kept.restore(state)
            questions.set_state(meta["questions"])
        first = int(state.step)
        if first < settings.steps:
            self.metrics.truncate("rl", first)
            self.engine.warm_up()
        self.engine.load(state.weights, first)
        with Progress("PARA-GRPO", settings.steps, first) as progress:
            for step in range(first + 1, settings.steps + 1):
                saving = step % settings.save_every == 0 or step == settings.steps
                compiled = self.compilations.count
                look = self._transcriber(step) if saving else None
                state, figures = learner.step(state, self.engine, self.scene, next(questions), self.run.seed, look)
                _require_finite("rl", step, figures)
                figures["recompilations"] = float(self.compilations.count - compiled if step > first + WARM_UP else 0)
                self.metrics.write("rl", step, figures)
                progress.update(step, {name: figures[name] for name in ("accuracy", "format", "calls", "reward/total")})
                self.check()
                if saving:
                    note_unreadable(self.run, self.folder, self.data, self.features.unreadable)
                    kept.save(step, state, {"questions": questions.get_state()})
        kept.close()
        self.weights = state.weights

    def export(self) -> None:
        """The trained model in the Hugging Face layout, for transformers and `models.qwen3_vl.load`, in the folder `model`."""
        folder = self.folder / "model"
        if not folder.exists():
            nnx.update(self.model.text, self.weights)
            save(self.model, folder, files=sorted((self.folder / "tokenizer").iterdir()))

    def _transcriber(self, step: int) -> Callable[[Rollouts, np.ndarray], None]:
        """Writes one episode of each group of a step down for the report."""
        assert self.run.rl is not None
        temperature, rows = self.run.rl.temperature, self.run.rl.shape.rows

        def write(rollouts: Rollouts, advantages: np.ndarray) -> None:
            lines = [
                {"phase": "rl", "step": step}
                | transcript(group[0], rewards[0], Setting(group[0].frames, temperature), self.data.vocabulary, advantages[p * rows])
                for p, (group, rewards) in enumerate(zip(rollouts.groups, rollouts.rewards, strict=True))
            ]
            folder = self.folder / "evaluation"
            folder.mkdir(exist_ok=True)
            write_atomically(folder / f"rl-{step:06d}.json", json.dumps({"rows": [], "episodes": lines}))

        return write


def _require_finite(phase: str, step: int, figures: dict[str, float]) -> None:
    """A loss that is not a number has spoilt the weights: better to end here than to save them."""
    if not math.isfinite(figures["loss"] + figures["grad_norm"]):
        raise ValueError(
            f"{phase}: the loss of step {step} is not finite; lower {phase}.optimizer.learning_rate, the last checkpoint is sound"
        )


def model_config(run: Run, vocabulary: Vocabulary) -> Qwen3VLConfig:
    """The model's sizes, with the ids that this vocabulary gives the special tokens."""
    ids = {f"{name}_token_id": vocabulary[f"<|{token}|>"] for name, token in (("image", "image_pad"), ("video", "video_pad"))}
    ids |= {f"{name}_token_id": vocabulary[f"<|{name}|>"] for name in ("vision_start", "vision_end")}
    sizes = tiny(vocabulary.size) if run.model.size == "tiny" else qwen3_vl(run.model.size)
    return dataclasses.replace(sizes, **ids)
