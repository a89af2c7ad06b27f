"""Addresses of buckets are refused where a local path is needed."""

from __future__ import annotations

import pathlib

import pytest

from paravt_jax.data.any_path import require_local

ADDRESSES = ("gs://bucket/run", "s3://b", "file:///tmp/a", pathlib.Path("gs://bucket/a.json"))
PATHS = ("", None, "runs/a", "/mnt/gs/run", "a:b/c", "C:/runs", "runs/gs://x", pathlib.Path("a"))


@pytest.mark.parametrize("path", ADDRESSES)
def test_an_address_is_refused_with_field_value_and_remedy(path):
    with pytest.raises(ValueError, match=rf"run_dir: {path} .*a mounted one"):
        require_local("run_dir", path)


@pytest.mark.parametrize("path", PATHS)
def test_a_local_path_is_accepted(path):
    require_local("run_dir", path)
