"""Loads what plays the questions: the model with its engine, or the connection to an endpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Sequence

from models import gpu
from models.config import ModelConfig, TextConfig, VisionConfig
from models.features import FrameFeatures, frame_tokens
from models.model import VisionLanguageModel
from models.peft_folder import base_folder
from models.peft_folder import load as load_model
from models.sharding import make_mesh
from models.weights.hf_config import from_hf
from paravt_jax.data.frame_reader import PATIENCE, FrameReader, ReaderSettings
from paravt_jax.method import tokenizer
from paravt_jax.method.judge import ServerSettings
from paravt_jax.method.protocol import Protocol
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.method.wording import Wording
from paravt_jax.remote.judge import RemoteJudge
from rollout.agent.endpoint import EndpointSampler, FrameImages
from rollout.agent.episode import Environment
from rollout.engine.engine import Engine
from rollout.engine.sizing import crop_tokens, overview_tokens, sizes_for_single_episodes
from rollout.evaluation.benchmarks import Item, VideoFolder
from rollout.evaluation.memory import plan_memory, require_room, worker_count
from rollout.evaluation.native_video import read_video_overview, video_tokens
from rollout.evaluation.packs import Pack, PackError
from rollout.evaluation.replicas import Devices, device_groups
from rollout.evaluation.served import Served, served
from rollout.evaluation.settings import BenchmarkSettings
from rollout.evaluation.split import Player

# Timestamp in seconds, as long as any label gets. It bounds the lengths of prompts.
_LATEST_FRAME = 99_999.9


@dataclasses.dataclass(frozen=True)
class Setup:
    """An evaluation once its files have been found."""

    settings: BenchmarkSettings
    pack: Pack
    videos: VideoFolder
    model: pathlib.Path | None
    """Folder of the model; None if it is only served."""


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
        replicas: number of players that share the host's memory and the requests that a judge may
            get at once.

    Raises:
        ValueError: the model does not fit the settings or the devices.
    """
    settings = setup.settings
    judge = None
    rewards = settings.rewards()
    if rewards.judge:
        # Each replica has a judge of its own, and together they send as many requests as one may.
        share = max(1, rewards.judge.concurrency // replicas)
        shared = dataclasses.replace(rewards.judge, concurrency=share)
        judge = stack.enter_context(contextlib.closing(RemoteJudge(shared)))
    files = model_files(settings, setup.model)
    config = files.config
    _check_native_video(settings, config)
    settings = files.scaled(settings)
    wording = setup.pack.wording(settings.benchmark, settings.prompt)
    protocol, prompt, crop = _protocol(
        settings, files.vocabulary, config.vision, subtitled, wording
    )
    root = setup.videos.root
    if settings.endpoint or setup.model is None:
        features = FrameImages(config, settings.pixels(), root, source=reader)
        sampler = stack.enter_context(contextlib.closing(_endpoint(settings, files, features)))
    else:
        _require_tensor(settings.tensor, config.text)
        _require_cache(settings, protocol, prompt, crop)
        sizes = sizes_for_single_episodes(
            protocol, prompt, crop, settings.episodes, settings.cache_tokens
        )
        require_room(settings, plan_memory(settings, config, sizes, replicas), replicas)
        model = _load_model(settings, setup.model, config, devices)
        features = FrameFeatures(model.vision, config, settings.pixels(), root, source=reader)
        sampler = Engine(model, features, sizes)
    overview = read_video_overview if settings.native_video else FrameFeatures.request_overview
    environment = Environment(protocol, features, overview=overview)
    return Player(sampler, environment, settings, setup.videos, judge, setup.pack)


def open_reader(setup: Setup, replicas: int = 1) -> FrameReader:
    """Open the processes that read videos for all replicas of a host; the caller closes them."""
    settings = setup.settings
    vision = model_files(settings, setup.model).config.vision
    pixels = settings.pixels()
    return FrameReader(
        ReaderSettings(
            worker_count(settings, replicas),
            PATIENCE,
            # The coming questions, and one per replica that has just been taken.
            ready=(settings.episodes + 1) * replicas,
            rules=pixels.rules(vision),
            crop_rules=pixels.rules(vision, crop=True),
        )
    )


def model_files(settings: BenchmarkSettings, folder: pathlib.Path | None) -> Served:
    """Read sizes and tokenizer of the model. An endpoint needs neither."""
    base = None if folder is None else base_folder(folder, weights=not settings.endpoint)
    if settings.endpoint or base is None:
        return served(base)
    vocabulary = tokenizer.load(base)
    return Served(from_hf(base / "config.json"), vocabulary, vocabulary.digest)


def check_prompts(
    settings: BenchmarkSettings, files: Served, pack: Pack, items: Sequence[Item]
) -> None:
    """Render a prompt, so that texts that do not work end the run before it has a folder."""
    _check_native_video(settings, files.config)
    offers = settings.episode_settings().dispatch != "none"
    tools = [tool.name for tool in settings.protocol(0).make_tools()] if offers else []
    try:
        pack.check(settings.benchmark, settings.prompt, items, tools)
        wording = pack.wording(settings.benchmark, settings.prompt)
        _protocol(settings, files.vocabulary, files.config.vision, False, wording)
    except ValueError as error:
        raise PackError(f"--protocol {settings.pack}: {error}") from error


def _check_native_video(settings: BenchmarkSettings, config: ModelConfig) -> None:
    """Raise ValueError if a native video is to be shown to a family that has another kind."""
    if settings.native_video and config.vision.position_rate is not None:
        raise ValueError(
            f"--native-video with a model of the family {config.family}, which writes videos in "
            "another way; give --no-native-video, so that frames are shown as images"
        )


def _protocol(
    settings: BenchmarkSettings,
    vocabulary: Vocabulary,
    vision: VisionConfig,
    subtitled: bool,
    wording: Wording,
) -> tuple[Protocol, int, int]:
    """The protocol, and the longest prompts of a main agent and of a sub-agent, in tokens."""
    # With dispatch `frames`, the token limits include crops. The size of a crop does not depend on
    # these limits, so measure it under preliminary ones.
    marks = settings.video_marks
    without_crops = Protocol(vocabulary, settings.protocol(0), wording, marks)
    pixels = settings.pixels()
    crop_frame_tokens = frame_tokens(pixels, vision, crop=True)
    crop = crop_tokens(without_crops, crop_frame_tokens, _LATEST_FRAME)
    if "{question}" in wording.subagent:
        crop += settings.question_tokens
    protocol = Protocol(vocabulary, settings.protocol(crop), wording, marks)
    episode = settings.episode_settings()
    with_tools = episode.dispatch != "none"
    if settings.native_video and episode.frames:
        factor = vision.patch_size * vision.spatial_merge_size
        overview = video_tokens(protocol, episode.frames, factor, _LATEST_FRAME, with_tools)
    else:
        overview = overview_tokens(
            protocol, episode.frames, frame_tokens(pixels, vision), _LATEST_FRAME, with_tools
        )
    overview += settings.question_tokens
    if subtitled:
        overview += settings.subtitle_tokens
    return protocol, overview, crop


def _require_cache(settings: BenchmarkSettings, protocol: Protocol, prompt: int, crop: int) -> None:
    """Raise ValueError if the longest sequence does not fit into `cache_tokens`."""
    longest = sizes_for_single_episodes(protocol, prompt, crop, settings.episodes).row_lengths[-1]
    if settings.cache_tokens and settings.cache_tokens < longest:
        raise ValueError(
            f"--cache-tokens {settings.cache_tokens}: the longest sequence takes {longest}; "
            f"give {longest} or more, or 0 for room for all episodes"
        )


def _require_tensor(tensor: int, text: TextConfig) -> None:
    """Raise ValueError unless the devices of a replica can share the decoder and its KV cache."""
    most = math.gcd(tensor, text.most_tensor)
    if most < tensor:
        raise ValueError(
            f"--tensor {tensor}: does not divide the model's {text.num_attention_heads} heads, "
            f"{text.num_key_value_heads} kv heads, MLP or experts, and vocabulary; give --tensor "
            f"{most}: more devices play as further replicas"
        )


def _endpoint(settings: BenchmarkSettings, files: Served, images: FrameImages) -> EndpointSampler:
    """A sampler that sends requests to the endpoint, with frames as images."""
    server = ServerSettings(
        settings.endpoint, timeout=settings.request_seconds, concurrency=settings.concurrency
    )
    return EndpointSampler(
        server, settings.endpoint_model, files.vocabulary, images, files.ids_per_token
    )


def _load_model(
    settings: BenchmarkSettings, folder: pathlib.Path, config: ModelConfig, devices: Devices
) -> VisionLanguageModel:
    gpu.require_type("dtype", settings.dtype)
    mesh = None
    if settings.tensor > 1:
        mesh = make_mesh(1, 1, settings.tensor, devices or device_groups(settings.tensor)[0])
    return load_model(folder, config, mesh=mesh, dtype=settings.dtype, param_dtype=settings.dtype)
