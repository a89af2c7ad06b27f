"""The file format, checked against the official library; damage is named."""

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


def test_what_the_library_writes_is_read_and_written_again_byte_for_byte(file, tmp_path):
    header = tensor_file.read_header(file)
    whole = {
        name: tensor_file.read(
            file,
            tensor,
            slice(0, tensor.shape[0]),
            slice(0, int(np.prod(tensor.shape[1:]))),
            transpose=False,
        )
        for name, tensor in header.tensors.items()
    }
    for name, value in TENSORS.items():
        np.testing.assert_array_equal(whole[name].reshape(value.shape), value)
    tensor_file.write(
        tmp_path / "again", header, (whole[name].astype(np.float32) for name in header.tensors)
    )
    assert (tmp_path / "again").read_bytes() == file.read_bytes()


def test_what_we_write_the_library_reads(tmp_path):
    header = tensor_file.new_header(
        {name: (value.dtype, value.shape) for name, value in TENSORS.items()}
    )
    tensor_file.write(
        tmp_path / "x", header, (value.reshape(len(value), -1) for value in TENSORS.values())
    )
    found = load_file(tmp_path / "x")
    assert found.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        np.testing.assert_array_equal(found[name], value)


def test_blocks_of_few_rows_are_put_together(file, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "_BLOCK", 1)  # 32 rows at once, the least: three blocks
    tensor = tensor_file.read_header(file).tensors["b"]
    block = tensor_file.read(file, tensor, slice(3, 77), slice(1, 4), transpose=True)
    np.testing.assert_array_equal(block, TENSORS["b"][3:77, 1:4].T)
    header = tensor_file.new_header({"b": (tensor.dtype, (77, 5))})
    tensor_file.write(tmp_path / "again", header, [np.ascontiguousarray(TENSORS["b"].T).T])
    np.testing.assert_array_equal(load_file(tmp_path / "again")["b"], TENSORS["b"])


def content(**changes):
    text = json.dumps(
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}
    ).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


@pytest.mark.parametrize(
    ("damaged", "problem"),
    [
        (b"", "its header is cut off"),
        (b"version https://git-lfs.github.com/spec/v1", "its header is cut off"),
        (content()[:20], "its header is cut off"),
        (content()[:-1], "bytes and should have"),
        (content() + b"x", "bytes and should have"),
        (content(shape=[3]), "bytes and should have"),
        (content(data_offsets=[4, 12]), "a does not begin where"),
        (content(dtype=[]), "cannot be read"),
        ((3).to_bytes(8, "little") + b"[1]", "cannot be read"),
        ((3).to_bytes(8, "little") + b"{,}", "cannot be read"),
    ],
)
def test_damage_is_named(tmp_path, damaged, problem):
    file = tmp_path / "x.safetensors"
    file.write_bytes(damaged)
    with pytest.raises(
        ValueError,
        match=rf"x.safetensors: not a whole .* file of F32, F16, BF16 \(.*{re.escape(problem)}.*; fetch or",
    ):
        tensor_file.read_header(file)


def test_a_foreign_type_is_named_with_its_tensor(tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_bytes(content(dtype="F8_E4M3", shape=[8]))
    with pytest.raises(
        ValueError,
        match="x.safetensors: a is of type F8_E4M3; weights are F32, F16, BF16: give a checkpoint that is not",
    ):
        tensor_file.read_header(file)


def test_a_new_header_says_what_is_read_back(tmp_path):
    header = tensor_file.new_header(
        {name: (value.dtype, value.shape) for name, value in TENSORS.items()}
    )
    tensor_file.write(
        tmp_path / "x", header, (value.reshape(len(value), -1) for value in TENSORS.values())
    )
    assert tensor_file.read_header(tmp_path / "x") == header
    assert list(header.tensors) == list(TENSORS)
