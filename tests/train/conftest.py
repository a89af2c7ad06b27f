"""Fixtures for tests of training: the small road (`small.py`)."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from flax import nnx

from models.model import VisionLanguageModel
from models.qwen3_vl.sizes import tiny
from models.weights.hf import save
from paravt_jax.data import tokenizer_file

if TYPE_CHECKING:
    from benchmarks.bucket_server import BucketServer

FILE = pathlib.Path(__file__).with_name("small.py")


@pytest.fixture(scope="session", autouse=True)
def always_compiled(compiled) -> None:
    """All tests of training share compiled programs."""


@pytest.fixture(scope="session")
def small() -> ModuleType:
    """The module `small.py`. Importing it adds its recipe to RECIPES."""
    spec = importlib.util.spec_from_file_location("small_road", FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["small_road"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def road(small, tmp_path_factory):
    """A `small.Road` in a folder of its own."""
    return small.build_road(tmp_path_factory.mktemp("road"))


@pytest.fixture(scope="session")
def tiny_model(small_vocabulary, tmp_path_factory) -> pathlib.Path:
    """A folder of tiny weights with their tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer_file.save(small_vocabulary, folder / "tokenizer")
    model = nnx.jit(lambda: VisionLanguageModel(tiny(small_vocabulary.size), rngs=nnx.Rngs(0)))()
    files = sorted((folder / "tokenizer").iterdir())
    save(model, folder / "model", files=files, max_shard_bytes=10**6)
    return folder / "model"


@pytest.fixture(scope="session")
def store() -> Iterator[BucketServer]:
    """A server of gs://bucket, to which Google's clients in this process and its children talk.

    Tests use folders of their own.
    """
    # Tests that need no bucket run without its packages.
    from benchmarks.bucket_server import BucketServer

    server = BucketServer()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.variables.items():
            patch.setenv(name, value)
        yield server
    server.close()


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Callable[[str], None]:
    """Moves the runs that follow to another machine, without the local files of runs."""

    def move(name: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))

    move("first")
    return move
