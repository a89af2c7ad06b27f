"""The safetensors format, compared with the official library; errors for damaged files."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.weights import tensor_file

TENSORS = {
    "b": np.arange(77 * 5, dtype=np.float32).reshape(77, 5).astype(jnp.bfloat16),
    "a": np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 4),
    "c": np.arange(9, dtype=np.float16),
}


@pytest.fixture
def file(tmp_path):
    save_file(TENSORS, tmp_path / "x.safetensors", metadata={"format": "pt"})
    return tmp_path / "x.safetensors"


def test_blocks_of_a_file_of_the_library(file):
    tensors = tensor_file.read_header(file)
    assert {name: (x.dtype, x.shape) for name, x in tensors.items()} == {
        name: (x.dtype, x.shape) for name, x in TENSORS.items()
    }
    np.testing.assert_array_equal(
        tensors["b"].read((slice(3, 77), slice(1, 4))), TENSORS["b"][3:77, 1:4]
    )
    np.testing.assert_array_equal(tensors["a"].read((slice(0, 1),)), TENSORS["a"][:1])


def test_a_new_file_is_read_by_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "_ROWS", 32)
    types = {name: (x.dtype, x.shape) for name, x in TENSORS.items()}
    # Rounded to the type of the file, and transposed in memory.
    matrices = (x.reshape(len(x), -1).T.astype(np.float32).T for x in TENSORS.values())
    tensor_file.write(tmp_path / "x", types, matrices)
    stored = load_file(tmp_path / "x")
    assert stored.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert stored[name].dtype == value.dtype
        np.testing.assert_array_equal(stored[name], value)


def content(**changes):
    """A file with one tensor, with these changes to its header."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes
    text = json.dumps({"a": entry}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        content()[:-1],
        content() + b"1",
        content(data_offsets=[4, 12]),
        content(data_offsets=[0, 2**62]),
        content(dtype=[]),
        content(shape=[-2]),
        content(shape=[2**62, 2**62]),
        (3).to_bytes(8, "little") + b"[1]",
        (10**5).to_bytes(8, "little") + b"[" * 10**5,
        (10**12).to_bytes(8, "little") + b"{}",
    ],
)
def test_damage_is_one_short_line(tmp_path, damaged):
    file = tmp_path / "x.safetensors"
    file.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"x.safetensors: not a whole .*; fetch or exp") as error:
        tensor_file.read_header(file)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < len(str(file)) + 400


def test_a_foreign_type_is_named_with_its_tensor(tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_bytes(content(dtype="F8_E4M3", shape=[8]))
    with pytest.raises(ValueError, match="x.safetensors: a .*F8_E4M3.* F32, F16, BF16"):
        tensor_file.read_header(file)
