"""The safetensors format: eight bytes of length, a JSON header, the tensors' bytes. Read by slices, written as a stream.

Owns the bytes of one file; knows nothing of the model. The official library hands over whole tensors and writes whole files from
memory; here a slice costs its own bytes, and a file of any size is written from one tensor at a time. Refuses files that are not whole and
types that weights do not have. Invariant: a file written with another file's header has that file's names, order and metadata.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_BLOCK = 1 << 20  # bytes mapped or converted at once
_ALIGNMENT = 64  # what XLA asks of a host buffer that it may use as it is, without a copy


class Tensor(NamedTuple):
    """Where a tensor lies: `start` is its first byte in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize


class Header(NamedTuple):
    """`content` is all that stands before the tensors, byte for byte; `tensors` come in the order of their bytes."""

    content: bytes
    tensors: dict[str, Tensor]


def read_header(file: Path) -> Header:
    """What a safetensors file holds. FileNotFoundError; ValueError where it is none, is not whole, or holds a tensor of another type."""
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        content = stream.read(8)
        length = int.from_bytes(content, "little")
        if len(content) < 8 or 8 + length > size:
            raise _damaged(file, "its header is cut off")
        content += stream.read(length)
    try:
        header = _parse(file, content)
    except (
        UnicodeDecodeError,
        json.JSONDecodeError,
        AttributeError,
        KeyError,
        TypeError,
        IndexError,
    ) as error:
        raise _damaged(file, f"its header cannot be read: {error!r}") from error
    end = len(content)
    for name, tensor in header.tensors.items():
        if tensor.start != end:
            raise _damaged(file, f"{name} does not begin where the tensor before it ends")
        end = tensor.end
    if size != end:
        raise _damaged(file, f"it has {size} bytes and should have {end}")
    return header


def _damaged(file: Path, problem: str) -> ValueError:
    return ValueError(
        f"{file}: not a whole safetensors file of {', '.join(_DTYPES)} ({problem}); fetch or export it again"
    )


def _parse(file: Path, content: bytes) -> Header:
    entries = json.loads(content[8:])
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        if entry["dtype"] not in _DTYPES:
            raise ValueError(
                f"{file}: {name} is of type {entry['dtype']}; weights are {', '.join(_DTYPES)}: give a checkpoint that is not quantized"
            )
    starts = {name: len(content) + entry["data_offsets"][0] for name, entry in entries.items()}
    tensors = {
        name: Tensor(_DTYPES[entry["dtype"]], tuple(entry["shape"]), starts[name])
        for name, entry in entries.items()
    }
    return Header(content, dict(sorted(tensors.items(), key=lambda item: item[1].start)))


def new_header(tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> Header:
    """The header of a file that will hold tensors of these types and shapes, in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        starts[name], end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": _CODES[dtype],
            "shape": shape,
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the first tensor begins at a multiple of eight
    content = len(text).to_bytes(8, "little") + text
    return Header(
        content,
        {
            name: Tensor(dtype, shape, len(content) + starts[name])
            for name, (dtype, shape) in tensors.items()
        },
    )


def read(
    file: Path, tensor: Tensor, rows: slice, columns: slice, *, transpose: bool
) -> Shaped[np.ndarray, "i j"]:
    """A block of a tensor seen as the matrix [shape[0], the rest], in the file's type; [columns, rows] with `transpose`.

    Only the pages that hold the block are read. The file is mapped a few rows at a time: what is mapped counts as memory.
    """
    bits = f"u{tensor.dtype.itemsize}"  # NumPy moves integers much faster than bfloat16
    width = math.prod(tensor.shape[1:])
    count = rows.stop - rows.start, columns.stop - columns.start
    out = _aligned(count[::-1] if transpose else count, bits)
    by_rows = out.T if transpose else out
    for row, stop in _blocks(rows, width * tensor.dtype.itemsize):
        start = tensor.start + row * width * tensor.dtype.itemsize
        block = np.memmap(file, bits, "r", start, (stop - row, width))
        by_rows[row - rows.start : stop - rows.start] = block[:, columns]
    return out.view(tensor.dtype)


def _aligned(shape: tuple[int, int], bits: str) -> np.ndarray:
    """An empty array that XLA can use in place; it copies others, which would then be in memory twice."""
    size = math.prod(shape) * np.dtype(bits).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(bits).reshape(shape)


def _blocks(rows: slice, width: int) -> Iterator[tuple[int, int]]:
    """(First row, end) of blocks, given bytes a row. 32 rows at least: less than a cache line of a transposed row wastes the rest."""
    step = max(32, _BLOCK // width)
    return ((row, min(row + step, rows.stop)) for row in range(rows.start, rows.stop, step))


def write(file: Path, header: Header, matrices: Iterable[Shaped[np.ndarray, "i j"]]) -> None:
    """Writes a new file: the header, then its tensors, each as the matrix that `read` sees, rounded to the header's type."""
    with open(file, "xb") as stream:
        stream.write(header.content)
        for tensor, matrix in zip(header.tensors.values(), matrices, strict=True):
            bits = f"u{tensor.dtype.itemsize}"
            same = matrix.dtype == tensor.dtype
            for row, stop in _blocks(
                slice(0, len(matrix)), matrix.shape[1] * matrix.dtype.itemsize
            ):
                block = matrix[row:stop]
                block = (
                    block.view(bits) if same else np.ascontiguousarray(block).astype(tensor.dtype)
                )
                stream.write(np.ascontiguousarray(block).view(np.uint8).data)
            del matrix, block  # before the next one is made
