"""Set-up of all tests: CPU, no network, checked annotations, and a small world and model.

The environment is set here because this file is imported before any test module, hence before JAX.
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# No program is kept in the cache folder of the user who runs the tests.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", "")
# The fixture `compiled` keeps all but the smallest ones, also those of commands that tests start.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
# Tests compile much and compute little. Without LLVM's optimisations, and with older, simpler code
# for fusions, they take less than half the time, and their numbers stay the same. jaxlib 0.11 has
# no flag for the older code, and an unknown flag ends the process.
_XLA_FLAGS = "--xla_backend_optimization_level=0"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    _XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", _XLA_FLAGS)

# Indexes of test videos do not go into the user's cache folder. Worker processes inherit this.
_INDEXES = tempfile.TemporaryDirectory(prefix="paravt-indexes-")
os.environ["PARAVT_VIDEO_INDEXES"] = _INDEXES.name

# A rank that is promoted silently is an error: the code says where an axis is added.
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")

import jaxtyping

import tests.typechecker  # noqa: F401 (the hook finds it by name)

# Annotations are checked in every call of the test run. The hook has to be there before the first
# import of a checked package.
jaxtyping.install_import_hook(
    [
        "paravt_jax",
        "paravt_extras",
        "models",
        "rollout",
        "train",
        "configs",
        "benchmarks",
        "examples",
    ],
    "tests.typechecker.check",
)

import collections
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import jax
import pytest
import tokenizers

from models.config import (
    TextConfig,
)
from models.model import VisionLanguageModel
from models.qwen3_vl.config import Qwen3VLConfig, Qwen3VLVisionConfig
from models.qwen3_vl.dialect import DIALECT
from paravt_jax.data.frame_reader import FrameReader
from paravt_jax.data.workers import Workers
from paravt_jax.method.protocol import ProtocolSettings
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.world import videos as world
from paravt_jax.world.vocabulary import world_vocabulary
from tests import processes
from tests.browser import browser  # noqa: F401 (a fixture)
from tests.noisy_model import noisy_model

# The first example of a property compiles, so its time says nothing about the property.
hypothesis.settings.register_profile("paravt", deadline=None, print_blob=True)
# For benchmarks.mutants, which asks whether an example fails and not for the smallest one.
hypothesis.settings.register_profile(
    "unshrunk",
    hypothesis.settings.get_profile("paravt"),
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate),
)
hypothesis.settings.load_profile("paravt")


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Annotations are not checked, for arguments that the code itself must refuse."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def late_reads(monkeypatch) -> Callable[[], int]:
    """Counts the requests of frame readers, so far, for frames that were not read ahead."""
    counts: collections.Counter[str] = collections.Counter()

    def counted(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            counts[name] += 1
            return method(*arguments, **named)

        monkeypatch.setattr(owner, name, call)

    counted(Workers, "submit")
    counted(FrameReader, "ahead")
    return lambda: counts["submit"] - counts["ahead"]


@pytest.fixture(scope="session")
def assets() -> pathlib.Path:
    """The folder of shared tokenizers, configs and videos; the test is skipped where it is not."""
    return named_folder("PARAVT_TEST_ASSETS")


def named_folder(variable: str) -> pathlib.Path:
    """The folder that an environment variable names; the test is skipped where it is not set."""
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set: it names the folder this test reads")
    folder = pathlib.Path(value)
    if not folder.is_dir():
        pytest.fail(f"{variable}={value} is not a folder")
    return folder


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> Iterator[pathlib.Path]:
    """A cache of compiled programs, shared by workers and with the commands that tests start."""
    base = tmp_path_factory.getbasetemp()
    # The folder of a worker of pytest-xdist is inside of the one of the whole run.
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    folder.mkdir(exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    yield folder
    jax.config.update("jax_compilation_cache_dir", "")


@pytest.fixture(scope="session")
def together(compiled) -> Callable[..., list[processes.Ended]]:
    """Starts a program as several processes of one run."""
    return functools.partial(processes.together, compiled)


@dataclasses.dataclass(frozen=True)
class SmallWorld:
    settings: world.WorldSettings
    folder: pathlib.Path
    videos: tuple[world.WorldVideo, ...]


@pytest.fixture(scope="session")
def small_world(tmp_path_factory) -> SmallWorld:
    """Four rendered videos. Tests add files of their own names only."""
    settings = world.WorldSettings(train_videos=3, heldout_videos=1)
    folder = tmp_path_factory.mktemp("world")
    videos = world.plan(settings)
    for video in videos:
        world.render(settings, video, folder)
    return SmallWorld(settings, folder, videos)


@pytest.fixture(scope="session")
def small_vocabulary() -> Vocabulary:
    """The vocabulary that the small world's texts are made of."""
    return world_vocabulary(ProtocolSettings(), DIALECT)


@pytest.fixture(scope="session")
def cut_vocabulary(assets) -> Vocabulary:
    """The published tokenizer as older families have it: `<think>` and others are ordinary text."""
    cut = ("<tool_response>", "</tool_response>", "<think>", "</think>")
    content = json.loads((assets / "qwen3_vl" / "tokenizer.json").read_text())
    content["added_tokens"] = [x for x in content["added_tokens"] if x["content"] not in cut]
    return Vocabulary(tokenizers.Tokenizer.from_str(json.dumps(content)), DIALECT)


@pytest.fixture(scope="session")
def small_model(small_vocabulary) -> VisionLanguageModel:
    """A small model with every part of a large one.

    Its weights are noise, large enough that the frames decide what it says.
    """
    vision = Qwen3VLVisionConfig(
        hidden_size=16,
        depth=1,
        num_heads=2,
        intermediate_size=32,
        out_hidden_size=32,
        num_position_embeddings=4,
        deepstack_visual_indexes=(0,),
    )
    text = TextConfig(
        vocab_size=small_vocabulary.size
        + 2,  # published models have more rows than their tokenizers have words
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        mrope_section=(3, 3, 2),
        rope_theta=10_000.0,
        tie_word_embeddings=True,
    )
    return noisy_model(Qwen3VLConfig(vision, text, **small_vocabulary.visual_ids))
