"""The safetensors format: reads parts of a tensor, and writes a file as a stream.

A file is eight bytes with the header's length (little-endian), a JSON header, and the tensors'
bytes:

    | length | {"name": {"dtype", "shape", "data_offsets"}, ...} | tensor | tensor | ... |

The official library reads whole tensors, and writes whole files from memory. Here, reading a slice
costs only its own bytes, and a file of any size is written one tensor at a time.
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

from paravt_jax.data import foreign

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
# Bytes mapped or converted at once.
_BLOCK = 1 << 20
# The official library has the same limit.
_MOST_HEADER = 100_000_000
# XLA uses a host buffer in place only if it is aligned to this many bytes. It copies all others.
_ALIGNMENT = 64


class Tensor(NamedTuple):
    """Type, shape and place of a tensor. `start` is the offset of its first byte in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize


class Header(NamedTuple):
    """Everything before the tensors.

    `content` is the bytes, including the length. `tensors` are in the order of their bytes. A file
    written with the header of another one has that file's names, order and metadata.
    """

    content: bytes
    tensors: dict[str, Tensor]


def read_header(file: Path) -> Header:
    """Read the header of a safetensors file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or incomplete, or has a tensor of an unsupported type.
    """
    with foreign.open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        content = stream.read(8)
        foreign.require_content(file, content + stream.peek(64))
        length = int.from_bytes(content, "little")
        if len(content) < 8 or 8 + length > size or length > _MOST_HEADER:
            raise _damaged(file, "its header is cut off")
        content += stream.read(length)
    header = _parse(file, content)
    end = len(content)
    for name, tensor in header.tensors.items():
        if tensor.start != end:
            raise _damaged(
                file, f"{foreign.shortened(name)} does not begin where the tensor before it ends"
            )
        end = tensor.end
    if size != end:
        raise _damaged(file, f"it has {size} bytes and should have {end}")
    return header


def _damaged(file: Path, problem: str) -> ValueError:
    return ValueError(
        f"{file}: not a whole safetensors file of {', '.join(_DTYPES)} ({problem}); fetch or "
        "export it again"
    )


def _parse(file: Path, content: bytes) -> Header:
    try:
        entries = json.loads(content[8:])
    # ValueError: not UTF-8 or not JSON. RecursionError: nested too deeply.
    except (ValueError, RecursionError) as error:
        reason = f"its header is not JSON: {foreign.shortened(error)}"
        raise _damaged(file, reason) from error
    if not isinstance(entries, dict):
        raise _damaged(file, "its header is no JSON object")
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        if not _is_entry(entry):
            raise _damaged(file, f"its header describes {foreign.shortened(name)} in another form")
        if entry["dtype"] not in _DTYPES:
            raise ValueError(
                f"{file}: {foreign.shortened(name)} is of type "
                f"{foreign.shortened(entry['dtype'])}; weights are {', '.join(_DTYPES)}: give a "
                "checkpoint that is not quantized"
            )
    starts = {name: len(content) + entry["data_offsets"][0] for name, entry in entries.items()}
    tensors = {
        name: Tensor(_DTYPES[entry["dtype"]], tuple(entry["shape"]), starts[name])
        for name, entry in entries.items()
    }
    return Header(content, dict(sorted(tensors.items(), key=lambda item: item[1].start)))


def _is_entry(entry: Any) -> bool:
    """Return whether a header's entry has a type, a shape and two offsets."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return False
    return all(type(number) is int and number >= 0 for number in (*shape, *offsets))


def new_header(tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> Header:
    """Return the header of a new file with tensors of these types and shapes, in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        offsets[name] = end
        end += math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": _CODES[dtype],
            "shape": shape,
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Padded with spaces, so that the first tensor starts at a multiple of eight.
    text += b" " * (-len(text) % 8)
    content = len(text).to_bytes(8, "little") + text
    placed = {
        name: Tensor(dtype, shape, len(content) + offsets[name])
        for name, (dtype, shape) in tensors.items()
    }
    return Header(content, placed)


def read(
    file: Path, tensor: Tensor, rows: slice, columns: slice, *, transpose: bool
) -> Shaped[np.ndarray, "i j"]:
    """Read a block of a tensor, seen as the matrix [shape[0], product of the other sizes].

    Only the pages of the file that hold the block are read.

    Args:
        file: a safetensors file.
        tensor: its entry in the file's header.
        rows: rows of the matrix, with start and stop.
        columns: columns of the matrix, with start and stop.
        transpose: whether to return [columns, rows].

    Returns:
        The block in the file's type, in memory that XLA can use in place.
    """
    # Copied as integers, because NumPy copies them much faster than bfloat16.
    bits = f"u{tensor.dtype.itemsize}"
    width = math.prod(tensor.shape[1:])
    row_bytes = width * tensor.dtype.itemsize
    shape = (rows.stop - rows.start, columns.stop - columns.start)
    out = _aligned(shape[::-1] if transpose else shape, bits)
    by_rows = out.T if transpose else out
    # A few rows at a time, because mapped pages count as memory of the process.
    for row, stop in _blocks(rows, row_bytes):
        start = tensor.start + row * row_bytes
        block = np.memmap(file, bits, "r", start, (stop - row, width))
        by_rows[row - rows.start : stop - rows.start] = block[:, columns]
    return out.view(tensor.dtype)


def same_numbers(first: tuple[Path, Tensor], second: tuple[Path, Tensor]) -> bool:
    """Return whether two tensors of one shape, each with its file, hold the same numbers.

    Their types may differ. A few rows at a time are in memory.
    """
    _, tensor = first
    columns = slice(0, math.prod(tensor.shape[1:]))
    for start, stop in _blocks(slice(0, tensor.shape[0]), columns.stop * tensor.dtype.itemsize):
        rows = slice(start, stop)
        ours = read(*first, rows, columns, transpose=False).astype(np.float32)
        theirs = read(*second, rows, columns, transpose=False).astype(np.float32)
        if not np.array_equal(ours, theirs, equal_nan=True):
            return False
    return True


def _aligned(shape: tuple[int, int], bits: str) -> np.ndarray:
    """Return an empty array that XLA can use in place. A copy would need the memory twice."""
    size = math.prod(shape) * np.dtype(bits).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(bits).reshape(shape)


def _blocks(rows: slice, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Return (first row, end) of blocks of about `_BLOCK` bytes."""
    # At least 32 rows: in a transposed copy, fewer would fill only part of each cache line.
    step = max(32, _BLOCK // row_bytes)
    return ((row, min(row + step, rows.stop)) for row in range(rows.start, rows.stop, step))


def write(file: Path, header: Header, matrices: Iterable[Shaped[np.ndarray, "i j"]]) -> None:
    """Write a new file: the header, then its tensors.

    Args:
        file: path of the new file.
        header: the header.
        matrices: one matrix per tensor of the header, in its order and as `read` sees it. They are
            rounded to the header's types, and taken one at a time.
    """
    with open(file, "xb") as stream:
        stream.write(header.content)
        for tensor, matrix in zip(header.tensors.values(), matrices, strict=True):
            bits = f"u{tensor.dtype.itemsize}"
            same = matrix.dtype == tensor.dtype
            row_bytes = matrix.shape[1] * matrix.dtype.itemsize
            for row, stop in _blocks(slice(0, len(matrix)), row_bytes):
                block = matrix[row:stop]
                if same:
                    block = block.view(bits)
                else:
                    block = np.ascontiguousarray(block).astype(tensor.dtype)
                stream.write(np.ascontiguousarray(block).view(np.uint8).data)
            # Freed before the generator makes the next matrix.
            del matrix, block
