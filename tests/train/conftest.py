"""The small road (`small.py`), made once for all tests of training."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from collections.abc import Iterator
from types import ModuleType

import jax
import pytest

FILE = pathlib.Path(__file__).with_name("small.py")


@pytest.fixture(scope="session", autouse=True)
def compiled(tmp_path_factory) -> Iterator[pathlib.Path]:
    """A folder of compiled programs, shared by this session's tests and the commands they start: a program is compiled once."""
    folder = tmp_path_factory.mktemp("compiled")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    yield folder
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="session")
def small() -> ModuleType:
    """The module `small.py`; its recipe is among RECIPES from then on."""
    spec = importlib.util.spec_from_file_location("small_road", FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["small_road"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def road(small, tmp_path_factory):
    """A `small.Road` in a folder of its own."""
    return small.build_road(tmp_path_factory.mktemp("road"))
