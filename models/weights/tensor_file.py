"""Files of tensors in the safetensors format: reads blocks of a tensor, and writes as a stream.

The library checks and reads files. It writes them from memory only, as a whole; `write` takes one
tensor at a time. A file is eight bytes with the header's length (little-endian), a JSON header, and
the tensors' bytes:

    | length | {"name": {"dtype", "shape", "data_offsets"}, ...} | tensor | tensor | ... |
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open

from paravt_jax.data import foreign

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
# Rows of a tensor in memory at a time, where a whole one is not needed.
_ROWS = 1024

Shape = tuple[int, ...]
TensorType = tuple[np.dtype, Shape]
"""Type and shape of a tensor."""


def swapped(name: str, axes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the shape or block of experts that transformers 5 saved; others stay as they are."""
    return (axes[0], axes[2], axes[1]) if ".mlp.experts." in name else axes


class Tensor(NamedTuple):
    """A tensor of a file."""

    file: Path
    name: str
    dtype: np.dtype
    shape: Shape

    def read(self, block: tuple[slice, ...]) -> Shaped[np.ndarray, "..."]:
        """Return a block of the tensor. Only the pages of the file that hold it are read."""
        # Mapped pages count as memory of the process until the file is closed.
        with safe_open(self.file, framework="numpy") as opened:
            return opened.get_slice(self.name)[block]


def read_header(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, by name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or incomplete, or has a tensor of an unsupported type.
    """
    foreign.open_regular(file).close()  # refuses a pointer of git-lfs
    try:
        with safe_open(file, framework="numpy") as opened:
            stored = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            types = {name: (x.get_dtype(), tuple(x.get_shape())) for name, x in stored.items()}
    except SafetensorError as error:
        raise ValueError(
            f"{file}: not a whole safetensors file ({foreign.shortened(error)}); fetch or export "
            "it again"
        ) from error
    for name, (code, _) in types.items():
        if code not in _DTYPES:
            raise ValueError(
                f"{file}: {foreign.shortened(name)} is of type {code}; weights are "
                f"{', '.join(_DTYPES)}: give a checkpoint that is not quantized"
            )
    return {name: Tensor(file, name, _DTYPES[code], shape) for name, (code, shape) in types.items()}


def write(
    file: Path, tensors: Mapping[str, TensorType], matrices: Iterable[Shaped[np.ndarray, "i j"]]
) -> None:
    """Write a new file.

    Args:
        file: path of the new file.
        tensors: type and shape of each tensor, by name, in the order to write them.
        matrices: each tensor as a matrix [shape[0], product of the other sizes]. They are rounded
            to these types, and taken one at a time.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        first, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [first, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    # Padded with spaces, so that the first tensor starts at a multiple of eight.
    header += b" " * (-len(header) % 8)
    with open(file, "xb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for (dtype, _), matrix in zip(tensors.values(), matrices, strict=True):
            for row in range(0, len(matrix), _ROWS):
                # As integers, because NumPy copies them much faster than bfloat16.
                block = matrix[row : row + _ROWS].view(f"u{matrix.dtype.itemsize}")
                block = np.ascontiguousarray(block).view(matrix.dtype).astype(dtype, copy=False)
                stream.write(block.view(np.uint8).data)
            # Freed before the generator makes the next matrix.
            del matrix, block
