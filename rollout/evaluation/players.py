"""Loads what plays the questions: the model with its engine."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib

from models.config import ModelConfig
from models.devices import require_type
from models.family import family_of
from models.features import FrameFeatures
from models.features.reader import frame_tokens
from models.peft_folder import base_folder
from models.peft_folder import load as load_model
from models.sharding import make_mesh
from models.weights.folder import local_folder
from models.weights.hf_config import from_hf
from paravt_jax.data import tokenizer_file
from paravt_jax.data.frame_reader import FrameReader
from paravt_jax.method.judge import Judge
from paravt_jax.method.protocol import Protocol
from rollout.agent.episode import Environment
from rollout.engine.engine import Engine
from rollout.engine.settings import (
    LATEST,
    EngineSizes,
    crop_tokens,
    overview_tokens,
    sizes_for_single_episodes,
)
from rollout.evaluation.benchmarks import Loaded
from rollout.evaluation.files import VideoFolder
from rollout.evaluation.replicas import Devices
from rollout.evaluation.settings import SUBTITLE_TOKENS, BenchmarkSettings
from rollout.evaluation.split import SplitPlayer


@dataclasses.dataclass(frozen=True)
class Setup:
    """An evaluation once its files have been found."""

    settings: BenchmarkSettings
    loaded: Loaded
    videos: VideoFolder
    folder: pathlib.Path
    """Folder of the model."""
    config: ModelConfig
    protocol: Protocol
    sizes: EngineSizes


def make_setup(settings: BenchmarkSettings, loaded: Loaded, videos: VideoFolder) -> Setup:
    """Read sizes and tokenizer, and derive the sizes of an engine for the questions.

    Raises:
        FileNotFoundError: the model's files are missing.
        ValueError: the model does not fit the settings, or a prompt cannot be read or rendered.
    """
    folder = local_folder(settings.model)
    base = base_folder(folder)
    config = from_hf(base / "config.json")
    most = math.gcd(settings.tensor, config.text.most_tensor)
    if most < settings.tensor:
        raise ValueError(
            f"--tensor {settings.tensor}: does not divide the model's heads, kv heads, MLP or "
            f"experts, and vocabulary; give --tensor {most}: more devices play as further replicas"
        )
    vocabulary = tokenizer_file.load(base, family_of(config).dialect)
    protocol = Protocol(vocabulary, settings.protocol)
    crop_frame = frame_tokens(settings.frames(), config.vision, crop=True)
    crop = crop_tokens(protocol, crop_frame, LATEST)
    size = frame_tokens(settings.frames(), config.vision)
    with_tools = settings.episode_settings().dispatch != "none"
    main = overview_tokens(protocol, settings.k, size, LATEST, with_tools)
    main += settings.protocol.text_tokens
    if any(item.subtitles or item.question.subtitles for item in loaded.items):
        main += SUBTITLE_TOKENS
    sizes = sizes_for_single_episodes(protocol, main, crop, settings.episodes)
    return Setup(settings, loaded, videos, folder, config, protocol, sizes)


def load_player(
    setup: Setup, reader: FrameReader, judge: Judge | None, devices: Devices = ()
) -> SplitPlayer:
    """Load the model, and place it on its devices.

    Args:
        setup: the evaluation.
        reader: reads the videos.
        judge: scores open-ended answers; None: rules score them.
        devices: the devices of the model.
    """
    settings, config = setup.settings, setup.config
    dtype = settings.dtype
    require_type("dtype", dtype)
    mesh = make_mesh(1, 1, settings.tensor, devices) if settings.tensor > 1 else None
    model = load_model(setup.folder, config, mesh=mesh, dtype=dtype, param_dtype=dtype)
    features = FrameFeatures(
        model.vision, config, settings.frames(), setup.videos.root, source=reader
    )
    engine = Engine(model, features, setup.sizes)
    environment = Environment(setup.protocol, features)
    return SplitPlayer(engine, environment, settings, setup.videos, judge)


def open_reader(setup: Setup, replicas: int) -> FrameReader:
    """Open the processes that read videos for all replicas of a host; the caller closes them."""
    settings = setup.settings
    crops = replicas * settings.episodes * settings.protocol.max_calls
    return FrameReader(
        min(crops, max(1, (os.cpu_count() or 1) - 1)),
        # The coming questions, and one per replica that has just been taken.
        ready=(settings.episodes + 1) * replicas,
    )
