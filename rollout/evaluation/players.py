"""Loads what plays the questions: the model with its engine, or the connection to an endpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib

import jax
import jax.numpy as jnp
from flax import nnx

from models import gpu
from models.attention import platform
from models.config import ModelConfig, TextConfig
from models.device_memory import reported_memory
from models.family import family_of
from models.features import FrameFeatures, frame_tokens
from models.model import VisionLanguageModel, abstract_model
from models.peft_folder import base_folder
from models.peft_folder import load as load_model
from models.sharding import make_mesh
from models.weights.hf_config import from_hf
from paravt_jax.data.frame_reader import PATIENCE, FrameReader, ReaderSettings
from paravt_jax.method import tokenizer
from paravt_jax.method.protocol import Protocol
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.method.wording import OUR_WORDING, Wording
from paravt_jax.remote.judge import RemoteJudge
from rollout.agent.endpoint import EndpointSampler, FrameImages
from rollout.agent.episode import Environment
from rollout.engine.engine import Engine
from rollout.engine.requests import Sampler
from rollout.engine.settings import EngineSizes
from rollout.engine.sizing import crop_tokens, overview_tokens, sizes_for_single_episodes
from rollout.evaluation.benchmarks import VideoFolder
from rollout.evaluation.replicas import Devices, device_groups
from rollout.evaluation.settings import BenchmarkSettings
from rollout.evaluation.split import Player
from rollout.evaluation.wording_folder import read_wording

# Timestamp in seconds, as long as any label gets. It bounds the lengths of prompts.
_LATEST_FRAME = 99_999.9
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Setup:
    """An evaluation once its files have been found."""

    settings: BenchmarkSettings
    wording: Wording
    videos: VideoFolder
    folder: pathlib.Path
    """Folder of the model."""
    config: ModelConfig
    vocabulary: Vocabulary


@dataclasses.dataclass(frozen=True)
class _Prompts:
    """The protocol, and the longest prompts of a main agent and of a sub-agent, in tokens."""

    protocol: Protocol
    main: int
    crop: int


def make_setup(settings: BenchmarkSettings, videos: VideoFolder, folder: pathlib.Path) -> Setup:
    """Read wording, sizes and tokenizer of the model, and render its longest prompts.

    Raises:
        ValueError: the model does not fit the settings, or a prompt cannot be read or rendered.
    """
    base = base_folder(folder, weights=not settings.endpoint)
    config = from_hf(base / "config.json")
    dialect = family_of(config).dialect
    wording = OUR_WORDING
    if settings.wording:
        wording = read_wording(pathlib.Path(settings.wording), dialect)
    setup = Setup(settings, wording, videos, folder, config, tokenizer.load(base, dialect))
    _longest_prompts(setup, subtitled=False)
    return setup


def load_player(
    setup: Setup,
    reader: FrameReader,
    subtitled: bool,
    stack: contextlib.ExitStack,
    devices: Devices = (),
    replicas: int = 1,
) -> Player:
    """Load the model, or connect to the endpoint.

    Args:
        setup: the evaluation.
        reader: reads the videos.
        subtitled: whether some prompts show subtitles.
        stack: closes the connections.
        devices: the devices of the model; empty: the first ones.
        replicas: number of players that share the requests that a judge may get at once.

    Raises:
        ValueError: the model does not fit the settings or the devices.
    """
    settings = setup.settings
    judge = None
    rewards = settings.rewards()
    if rewards.judge:
        share = max(1, rewards.judge.concurrency // replicas)
        shared = dataclasses.replace(rewards.judge, concurrency=share)
        judge = stack.enter_context(contextlib.closing(RemoteJudge(shared)))
    prompts = _longest_prompts(setup, subtitled)
    root = setup.videos.root
    sampler: Sampler
    if settings.endpoint:
        features = FrameImages(setup.config, settings.frames, root, source=reader)
        sampler = stack.enter_context(
            contextlib.closing(
                EndpointSampler(
                    settings.server(), settings.endpoint_model, setup.vocabulary, features
                )
            )
        )
    else:
        sizes = _engine_sizes(settings, prompts)
        _require_tensor(settings.tensor, setup.config.text)
        _require_room(settings, setup.config, sizes)
        model = _load_model(setup, devices)
        features = FrameFeatures(model.vision, setup.config, settings.frames, root, source=reader)
        sampler = Engine(model, features, sizes)
    environment = Environment(prompts.protocol, features)
    return Player(sampler, environment, settings, setup.videos, judge)


def open_reader(setup: Setup, replicas: int = 1) -> FrameReader:
    """Open the processes that read videos for all replicas of a host; the caller closes them."""
    settings = setup.settings
    vision = setup.config.vision
    crops = replicas * settings.episodes * settings.protocol.max_calls
    return FrameReader(
        ReaderSettings(
            min(crops, max(1, (os.cpu_count() or 1) - 1)),
            PATIENCE,
            # The coming questions, and one per replica that has just been taken.
            ready=(settings.episodes + 1) * replicas,
            rules=settings.frames.rules(vision),
            crop_rules=settings.frames.rules(vision, crop=True),
        )
    )


def _longest_prompts(setup: Setup, subtitled: bool) -> _Prompts:
    settings, vision = setup.settings, setup.config.vision
    # With dispatch `frames`, the token limits include crops. The size of a crop does not depend on
    # these limits, so measure it under preliminary ones.
    without_crops = Protocol(setup.vocabulary, settings.limits(0), setup.wording)
    crop = crop_tokens(
        without_crops, frame_tokens(settings.frames, vision, crop=True), _LATEST_FRAME
    )
    if "{question}" in setup.wording.subagent:
        crop += settings.protocol.text_tokens
    protocol = Protocol(setup.vocabulary, settings.limits(crop), setup.wording)
    episode = settings.episode_settings()
    with_tools = episode.dispatch != "none"
    size = frame_tokens(settings.frames, vision)
    main = overview_tokens(protocol, episode.frames, size, _LATEST_FRAME, with_tools)
    main += settings.protocol.text_tokens
    if subtitled:
        main += settings.subtitle_tokens
    return _Prompts(protocol, main, crop)


def _engine_sizes(settings: BenchmarkSettings, prompts: _Prompts) -> EngineSizes:
    """The sizes of the engine. Raises ValueError if a sequence does not fit into its cache."""
    sizes = sizes_for_single_episodes(
        prompts.protocol, prompts.main, prompts.crop, settings.episodes, settings.cache_tokens
    )
    longest = sizes.row_lengths[-1]
    if settings.cache_tokens and settings.cache_tokens < longest:
        raise ValueError(
            f"--cache-tokens {settings.cache_tokens}: the longest sequence takes {longest}; "
            f"give {longest} or more, or 0 for room for all episodes"
        )
    return sizes


def _require_tensor(tensor: int, text: TextConfig) -> None:
    """Raise ValueError unless the devices of a replica can share the decoder and its KV cache."""
    most = math.gcd(tensor, text.most_tensor)
    if most < tensor:
        raise ValueError(
            f"--tensor {tensor}: does not divide the model's {text.num_attention_heads} heads, "
            f"{text.num_key_value_heads} kv heads, MLP or experts, and vocabulary; give --tensor "
            f"{most}: more devices play as further replicas"
        )


def _require_room(settings: BenchmarkSettings, config: ModelConfig, sizes: EngineSizes) -> None:
    """Raise ValueError if weights and KV cache alone do not fit into the memory of a device."""
    model = abstract_model(config, dtype=settings.dtype, param_dtype=settings.dtype)
    # Decoding copies the layers' weights, except on TPU.
    copies = 0 if platform() == "tpu" else _bytes(model.text.layers)
    weights = (_bytes(model.text) + copies) / settings.tensor + _bytes(model.vision)
    text = config.text
    item = jnp.dtype(settings.dtype).itemsize
    token = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * item
    cache = sizes.pages * sizes.page * token / settings.tensor
    limit = reported_memory(jax.local_devices()[0])
    if limit is not None and weights + cache > limit:
        raise ValueError(
            f"--episodes {settings.episodes}, --frames {settings.k}: weights take "
            f"{weights / _GIB:.1f} GiB per device and the KV cache {cache / _GIB:.1f} GiB, and "
            f"there are {limit / _GIB:.1f} GiB; lower them in this order, give --cache-tokens, use "
            "--dtype bfloat16, or --tensor over more devices"
        )


def _bytes(module: nnx.Module) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(module)))


def _load_model(setup: Setup, devices: Devices) -> VisionLanguageModel:
    settings = setup.settings
    gpu.require_type("dtype", settings.dtype)
    mesh = None
    if settings.tensor > 1:
        mesh = make_mesh(1, 1, settings.tensor, devices or device_groups(settings.tensor)[0])
    return load_model(
        setup.folder,
        setup.config,
        mesh=mesh,
        dtype=settings.dtype,
        param_dtype=settings.dtype,
    )
