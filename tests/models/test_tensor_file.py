"""The safetensors format, compared with the official library; errors for damaged files."""

from __future__ import annotations

import json
import re

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


def test_a_file_of_the_library_is_read_and_rewritten_byte_for_byte(file, tmp_path):
    header = tensor_file.read_header(file)
    whole = {}
    for name, tensor in header.tensors.items():
        rows = slice(0, tensor.shape[0])
        columns = slice(0, int(np.prod(tensor.shape[1:])))
        whole[name] = tensor_file.read(file, tensor, rows, columns, transpose=False)
    for name, value in TENSORS.items():
        np.testing.assert_array_equal(whole[name].reshape(value.shape), value)
    matrices = (whole[name].astype(np.float32) for name in header.tensors)
    tensor_file.write(tmp_path / "again", header, matrices)
    assert (tmp_path / "again").read_bytes() == file.read_bytes()


def test_a_new_file_is_read_by_the_library_and_has_its_header(tmp_path):
    header = tensor_file.new_header(
        {name: (value.dtype, value.shape) for name, value in TENSORS.items()}
    )
    matrices = (value.reshape(len(value), -1) for value in TENSORS.values())
    tensor_file.write(tmp_path / "x", header, matrices)
    assert tensor_file.read_header(tmp_path / "x") == header
    assert list(header.tensors) == list(TENSORS)
    found = load_file(tmp_path / "x")
    assert found.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        np.testing.assert_array_equal(found[name], value)


def test_a_tensor_is_joined_from_several_blocks(file, tmp_path, monkeypatch):
    # Blocks of 32 rows, the minimum: three blocks.
    monkeypatch.setattr(tensor_file, "_BLOCK", 1)
    tensor = tensor_file.read_header(file).tensors["b"]
    block = tensor_file.read(file, tensor, slice(3, 77), slice(1, 4), transpose=True)
    np.testing.assert_array_equal(block, TENSORS["b"][3:77, 1:4].T)
    header = tensor_file.new_header({"b": (tensor.dtype, (77, 5))})
    tensor_file.write(tmp_path / "again", header, [np.ascontiguousarray(TENSORS["b"].T).T])
    np.testing.assert_array_equal(load_file(tmp_path / "again")["b"], TENSORS["b"])


def content(**changes):
    """A file with one tensor, with these changes to its header."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes
    text = json.dumps({"a": entry}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


@pytest.mark.parametrize(
    ("damaged", "problem"),
    [
        (b"", "its header is cut off"),
        (content()[:-1], "bytes and should have"),
        (content(data_offsets=[4, 12]), "a does not begin where"),
        (content(dtype=[]), "describes a in another form"),
        (content(shape=[-2]), "describes a in another form"),
        ((3).to_bytes(8, "little") + b"[1]", "its header is no JSON object"),
        ((10**5).to_bytes(8, "little") + b"[" * 10**5, "its header is not JSON"),
    ],
)
def test_damage_is_named(tmp_path, damaged, problem):
    file = tmp_path / "x.safetensors"
    file.write_bytes(damaged)
    with pytest.raises(
        ValueError,
        match=rf"x.safetensors: not a whole .*\(.*{re.escape(problem)}",
    ):
        tensor_file.read_header(file)


def test_a_foreign_type_is_named_with_its_tensor(tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_bytes(content(dtype="F8_E4M3", shape=[8]))
    with pytest.raises(ValueError, match="x.safetensors: a .*F8_E4M3.* F32, F16, BF16"):
        tensor_file.read_header(file)
