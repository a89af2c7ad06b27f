"""Visual vectors on a device, and meshes over several processes."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from models.sharding import make_mesh
from paravt_jax.processes.cluster import require_even
from tests.models.test_sharding import FakeDevice
from train.learn.placement import put_vectors


def test_vectors_lie_at_the_beginning_of_their_rows():
    """Rows without vectors, with some, and full ones."""
    rng = np.random.default_rng(0)
    room = 7
    counts = (0, 1, 7)
    rows = [rng.normal(size=(count, 2, 3)).astype(np.float32) for count in counts]
    found = put_vectors(rows, room, make_mesh(1, 1, 1))
    wanted = np.zeros((3, room, 2, 3), np.float32)
    for row, vectors in enumerate(rows):
        wanted[row, : len(vectors)] = vectors
    np.testing.assert_array_equal(found, wanted)


def test_a_mesh_without_devices_of_a_process_is_refused(monkeypatch):
    mesh = make_mesh(1, 1, 1)
    require_even(mesh)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    message = (
        "--mesh.data 1 --mesh.fsdp 1 --mesh.tensor 1: takes 1 [+] 0 devices of the 2 processes; "
        ".* make --mesh.data times --mesh.fsdp a multiple of 2"
    )
    with pytest.raises(ValueError, match=message):
        require_even(mesh)


def test_processes_that_are_not_numbered_slice_by_slice_are_refused():
    # Processes 0 and 2 are in the first slice, 1 and 3 in the second.
    devices = [FakeDevice(n, n // 4, n // 4 % 2, "tpu") for n in range(16)]
    with pytest.raises(ValueError, match="JAX_PROCESS_ID: .* JAX_PROCESS_ID, slice by slice"):
        require_even(make_mesh(data=2, fsdp=8, devices=devices))
