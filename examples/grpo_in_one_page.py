"""PARA-GRPO in one page: a video model learns to look at several moments of a video at once.

    python -m examples.grpo_in_one_page        # five minutes on two CPU cores

A main agent sees a few overview frames of a video and a question. In one turn it may call
`crop_video` several times. Each call goes to a sub-agent: the same weights, a fresh context, the
frames of one window. The reports come back together, and the main agent answers. A group of
episodes is played on each question. Each earns a reward for a right answer, its format and its
calls. Its advantage is that reward compared with its group's: it makes the tokens more or less
likely. An extra term anchors the format at its tags, such as `<think>`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from models.config import ModelConfig
from models.family import family
from models.features import FrameFeatures, FrameSettings
from models.model import VisionLanguageModel
from models.sharding import make_mesh, param_shardings
from models.trained import Skeleton
from paravt_jax.data.loader import stream
from paravt_jax.method.accuracy import Rules
from paravt_jax.method.conversations import render
from paravt_jax.method.grpo.advantages import compute_advantages
from paravt_jax.method.grpo.loss import batch_totals, paravt_loss
from paravt_jax.method.grpo.settings import GRPOSettings
from paravt_jax.method.protocol import Protocol, ProtocolSettings
from paravt_jax.method.records import Episode
from paravt_jax.method.rewards import RewardSettings, score_all
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.world import text, videos
from paravt_jax.world.vocabulary import world_vocabulary
from rollout.agent.episode import Environment, EpisodeSettings, play, seed_of
from rollout.engine.engine import Engine
from rollout.engine.requests import run
from rollout.engine.settings import EngineSettings, engine_sizes, lengths
from train.data import Data
from train.learn.optimizer import OptimizerSettings, make_optimizer
from train.learn.packing import StepRoom, StepShape
from train.learn.placement import Bank, put_vectors
from train.learn.rl_batch import RLBatch, lay_out
from train.learn.rollouts import Rollouts, ScoredGroup, describe
from train.learn.sft import SFTBatches, SFTSettings, make_sft_updater, sft_step
from train.learn.update import Updater, init_state, make_logprobs, score_rollouts

# Videos of 128 seconds, in four coloured scenes. A digit appears in a scene for 2 to 4 seconds.
WORLD = videos.WorldSettings(train_videos=600, digit_width=20, digit_height=28, jitter=0)
ROOT, READER = Path(), None  # frames are drawn on request, so there are no files
FRAMES = FrameSettings(batch=64)  # a video of 64 frames is encoded whole
FRAME_TOKENS = 1  # visual tokens per frame, at the size of these videos
BUDGETS = (4, 8)  # numbers of overview frames, in demonstrations and in episodes
TEXT = text.TextSettings(
    multiple_choice=1.0,
    budgets=BUDGETS,
    groups=len(BUDGETS),  # every video is demonstrated with each budget
    look=0.5,  # without a digit in the overview, half of the demonstrations ask for crops
    look_when_shown=0.3,
    both=1.0,  # always crops of both halves of the scene
    unclosed=0.2,  # one turn in five never closes its <think>
    leak=0.0,
    untagged=0.0,
)
LIMITS = ProtocolSettings(
    turn_tokens=64,
    summary_tokens=16,  # of a sub-agent's report
    trajectory_tokens=128,
    text_tokens=48,
    crop_frames=8,
    max_tool_turns=1,
)
MUON = OptimizerSettings("muon", learning_rate=3e-3, weight_decay=0.0)
PROMPTS, GROUP, TEMPERATURE = 8, 8, 0.7  # questions per step, episodes per question
GRPO = GRPOSettings(group_size=GROUP, anchor="likelihood", reward_clip=None)
REWARDS = RewardSettings(format_cap=False)
ADAM = OptimizerSettings(learning_rate=4e-4, weight_decay=0.0)  # for GRPO


def small_config(vocabulary: Vocabulary) -> ModelConfig:
    """Return three narrow layers, one visual token per frame, and this vocabulary."""
    sizes = family().tiny(vocabulary.size)
    vision = dataclasses.replace(sizes.vision, out_hidden_size=64)
    decoder = dataclasses.replace(sizes.text, hidden_size=64, intermediate_size=128)
    return type(sizes)(vision, decoder, **vocabulary.visual_ids)


def cold_start(model, environment: Environment, data: Data, steps: int, seed: int):
    """Train on the demonstrations. Returns the decoder's structure and weights."""
    settings = SFTSettings(steps, 1, MUON, row_tokens=2048)
    batches = SFTBatches(settings, data, READER, seed, environment, make_mesh())
    graph, weights = nnx.split(model.text)
    weights = jax.device_put(weights, param_shardings(weights, make_mesh()))
    updater = make_sft_updater(skeleton := Skeleton(graph), weights, settings, batches.shape)
    state = updater.initial
    for step in range(steps):
        state, _, metrics = sft_step(updater, state, batches, left=steps - 1 - step)
        if (step + 1) % 50 == 0:
            print(f"cold start, {step + 1} steps: loss {metrics['loss']:.2f}", flush=True)
    return skeleton, state.weights


def roll_out(engine: Engine, environment: Environment, questions: tuple, step: int, seed: int):
    """Play a group of episodes on each question, and score them."""
    budgets = np.random.default_rng([seed, step]).choice(BUDGETS, PROMPTS).tolist()
    # Agents are coroutines that await the engine, which decodes them side by side.
    agents = []
    for n, (question, budget) in enumerate(zip(questions, budgets, strict=True)):
        for g in range(GROUP):
            setting = EpisodeSettings(budget, TEMPERATURE)
            agents.append(play(environment, question, setting, seed_of(seed, step, n * GROUP + g)))
    episodes = run(engine, agents)
    # Rewards: for the answer, for the format, for the calls.
    played = [(episode.question, episode.turns) for episode in episodes]
    rewards = score_all(played, REWARDS, Rules(), GRPO.sequence_anchor)
    spans = [slice(first, first + GROUP) for first in range(0, len(episodes), GROUP)]
    groups = [ScoredGroup(tuple(episodes[span]), tuple(rewards[span])) for span in spans]
    return Rollouts(tuple(groups))


def show(episode: Episode) -> None:
    """Print an episode as it was played."""
    print(f"\n{episode.question.text} {episode.question.options}, {episode.frames} frames")
    for turn in episode.turns:
        print(turn.text, *(f"(sub-agent){call.response}" for call in turn.calls), sep="\n")
    print(f"(right answer) {episode.question.answer}\n")


def main(cold_start_steps: int = 450, steps: int = 24, seed: int = 0) -> list[dict[str, float]]:
    """Run the cold start and GRPO. Returns the metrics of each GRPO step."""
    # The model. Its vision tower stays random: the few pictures of this world differ enough.
    vocabulary, mesh = world_vocabulary(LIMITS, family().dialect), make_mesh()
    model = VisionLanguageModel(small_config(vocabulary), rngs=nnx.Rngs(seed))
    # The world: videos, and questions about them.
    train_videos = videos.of_split(videos.plan(WORLD), "train")
    question_batches = stream(tuple(text.questions(train_videos, TEXT)), seed, PROMPTS)
    source = videos.DrawnVideos(WORLD, train_videos)
    features = FrameFeatures(model.vision, model.config, FRAMES, ROOT, source=source)
    features.expect([(WORLD.size, WORLD.size)])
    environment = Environment(Protocol(vocabulary, LIMITS), features)
    # Demonstrations of sub-agents and main agents (no "When ...?"), and their lengths in tokens.
    demonstrations = list(text.window_conversations(train_videos, TEXT, LIMITS))
    main_agents = text.main_conversations(train_videos, TEXT)
    demonstrations += [d for d in main_agents if "Which digit" in str(d.turns[0].content[-1])]
    rendered = [render(d, environment.protocol, lambda clip: FRAME_TOKENS) for d in demonstrations]
    token_counts = tuple(len(trajectory.ids) for trajectory in rendered)
    data = Data(ROOT, vocabulary, conversations=demonstrations, lengths=token_counts)
    skeleton, weights = cold_start(model, environment, data, cold_start_steps, seed)

    # GRPO needs an engine, reference weights, an updater, and jitted `logprobs` and `advantages`.
    def loss(decoder, visual, microbatch, batch):
        # A micro-batch has some of the rollouts; the others have -1 in its index.
        logprobs = score_rollouts(decoder, visual, microbatch, TEMPERATURE)
        here = dataclasses.replace(batch.grpo, mask=batch.grpo.mask & (microbatch.index >= 0))
        return paravt_loss(logprobs, batch.advantages, here, GRPO, batch.totals, REWARDS.gamma)

    nnx.update(model.text, weights)
    longest = lengths(LIMITS, FRAME_TOKENS, max(BUDGETS), label_tokens=text.LABEL_TOKENS)
    sizes = engine_sizes(longest, EngineSettings(cache_tokens=16_384), rows_per_prefix=GROUP)
    engine = Engine(model, features, sizes)
    reference = jax.tree.map(jnp.copy, weights)  # a copy: updates donate the weights
    optimizer = make_optimizer(ADAM)
    updater = Updater(skeleton, init_state(weights, optimizer), optimizer, loss)
    state = updater.initial
    logprobs = make_logprobs(skeleton, TEMPERATURE, mesh)
    advantages = jax.jit(lambda batch: compute_advantages(batch, GRPO, REWARDS.gamma))
    shape = StepShape(PROMPTS, GROUP, longest)
    room = StepRoom(shape, shape.microbatches(most=2048, devices=1, pieces=1))
    history = []
    for step in range(steps):
        rollouts = roll_out(engine, environment, next(question_batches), step, seed)
        # Packed rows of the sampled tokens, and their log-probs under the reference weights.
        laid_out = lay_out(rollouts, environment, room)
        bank = put_vectors([laid_out.visual], shape.room(1, 1).slots, mesh)
        # A token is in one micro-batch, and 0 in all others.
        by_reference = sum(logprobs(reference, bank, each) for each in laid_out.microbatches)
        batch = dataclasses.replace(laid_out.grpo, reference=by_reference)
        # Advantages of every token, one update, and the new weights into the engine.
        rl_batch = RLBatch(batch, advantages(batch)[0], batch_totals(batch))
        gradients, _ = updater.gradients(state.weights, Bank(bank), laid_out.microbatches, rl_batch)
        state, grad_norm = updater.apply(state, gradients)
        engine.load(state.weights, version=step + 1)  # `apply` donated the old ones
        history.append(describe(rollouts) | {"grad_norm": float(grad_norm)})
        names = ("accuracy", "compliance", "calls", "reward/total", "grad_norm")
        print(f"step {step:2}", *(f"{name} {history[-1][name]:.2f}" for name in names), sep="  ")
        if step in (0, steps - 1):
            show(rollouts.episodes[0])
    return history


if __name__ == "__main__":
    tyro.cli(main, prog="python -m examples.grpo_in_one_page")
