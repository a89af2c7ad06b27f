"""Checkpoints: exact, complete or absent, with clear errors."""

from __future__ import annotations

import os
import pathlib
import resource
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from models.sharding import make_mesh
from paravt_jax.processes.exit_codes import FAILED
from tests.processes import lost_others
from train.durable import checkpoint
from train.durable.checkpoint import CheckpointError, Checkpoints, SaveError, not_finite

ROOT = pathlib.Path(__file__).parents[2]


def state_of(seed: int) -> dict:
    """A state with every kind of leaf and node that occurs in a run."""
    key = jax.random.key(seed)
    params = {
        "a.b": jax.random.normal(key, (4, 3)),
        "c": [jax.random.normal(key, (2,)).astype(jnp.bfloat16), jnp.int32(seed)],
    }
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(seed))
    return {
        "params": params,
        "adam": optax.adamw(1e-3).init(params),
        "model": nnx.state(model),
        "key": key,
        "old_key": jax.random.PRNGKey(seed),
        "host": np.arange(5, dtype=np.uint8),
        "odd": jnp.array([np.nan, -0.0, np.inf, 1e-42], jnp.float32),
        "nothing": None,
    }


def save(folder: pathlib.Path, step: int, state: Any, cursor: Any = None, **fields: Any) -> None:
    """Save a checkpoint, as a process that ends."""
    checkpoints = Checkpoints(folder, **fields)
    checkpoints.save(step, state, cursor or {})
    checkpoints.close()


def bits(tree: object) -> list[tuple[str, bytes]]:
    """Type and bytes of every leaf."""

    def raw(leaf: jax.Array) -> np.ndarray:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return [(str(leaf.dtype), raw(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def test_a_restored_state_is_equal_bit_for_bit(tmp_path: pathlib.Path) -> None:
    state = state_of(1)
    cursor = {"epoch": 2, "index": [3, 4], "phase": "rl", "seed": 2**70, "loss": 0.1}
    save(tmp_path, 7, state, cursor)
    back, back_cursor = Checkpoints(tmp_path).restore(state_of(2), 7)
    assert back_cursor == cursor
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert bits(back) == bits(state)
    assert isinstance(back["host"], np.ndarray)
    assert (jax.random.normal(back["key"], (3,)) == jax.random.normal(state["key"], (3,))).all()


def test_an_update_that_donates_the_state_does_not_change_what_is_being_saved(
    tmp_path: pathlib.Path, monkeypatch
) -> None:
    """The arrays are still being written when the next step reuses their memory."""
    update = jax.jit(lambda w: w * 0 - 1, donate_argnums=0)
    monkeypatch.setattr(checkpoint, "KEEP", 9)
    checkpoints = Checkpoints(tmp_path)
    w = jnp.arange(2_000_000.0)
    jax.block_until_ready(w)
    for step in (1, 2, 3):
        checkpoints.save(step, {"w": w}, {})
        jax.block_until_ready(update(w))
        w = jnp.arange(2_000_000.0) * (step + 1)
    checkpoints.close()
    for step in (1, 2, 3):
        back, _ = Checkpoints(tmp_path).restore({"w": w}, step)
        assert (back["w"] == jnp.arange(2_000_000.0) * step).all()


def test_the_best_is_kept_too_and_the_newest_of_equal_ones(
    tmp_path: pathlib.Path, monkeypatch
) -> None:
    monkeypatch.setattr(checkpoint, "KEEP", 1)

    def save(checkpoints: Checkpoints, step: int, score: float | None) -> list[int]:
        checkpoints.save(step, {"w": jnp.full((2,), step)}, {}, score)
        return checkpoints.steps()

    first = Checkpoints(tmp_path)
    assert first.best() is None
    assert [save(first, 1, 0.5), save(first, 2, 0.7), save(first, 3, None)] == [[1], [2], [2, 3]]
    # A new process reads the scores from disk.
    again = Checkpoints(tmp_path)
    assert [save(again, 4, 0.1), save(again, 5, 0.7), save(again, 6, 0.3)] == [[2, 4], [5], [5, 6]]
    assert again.best() == 5
    assert Checkpoints(tmp_path, read_only=True).best() == 5


def test_another_identity_is_refused_with_the_fields_that_differ(tmp_path: pathlib.Path) -> None:
    mine = {"model": {"size": "2b"}, "seed": 0}
    other = {"model": {"size": "8b"}, "seed": 0}
    save(tmp_path, 1, {"w": jnp.ones(2)}, identity=mine)
    with pytest.raises(CheckpointError, match=r':\n  model\.size: "2b" -> "8b"\nUse'):
        Checkpoints(tmp_path, identity=other).restore({"w": jnp.ones(2)}, 1)
    restored, _ = Checkpoints(tmp_path, identity=mine).restore({"w": jnp.zeros(2)}, 1)
    assert (restored["w"] == 1).all()


def test_a_part_is_read_without_the_rest(tmp_path: pathlib.Path) -> None:
    state = {
        "text": {"w": jnp.arange(6.0).reshape(2, 3)},
        "optimizer": {"mu": jnp.ones((2, 3))},
        "n": np.arange(3),
    }
    save(tmp_path, 4, state)
    for array in (tmp_path / "4" / "state").rglob("*"):
        assert not array.is_symlink()
    reader = Checkpoints(tmp_path, read_only=True)
    part, _ = reader.restore({"text": state["text"]}, 4, part=True)
    assert (part["text"]["w"] == state["text"]["w"]).all()
    cases = [
        ({"text": {"v": jnp.ones(1)}}, r'text\.v: \(absent\) -> "float32\[1\]"'),
        ({"n": jnp.zeros(3)}, r'n: "int64\[3\]" -> "float32'),
    ]
    for part, words in cases:
        with pytest.raises(CheckpointError, match=f"\n  {words}"):
            reader.restore(part, 4, part=True)
    with pytest.raises(CheckpointError, match="3 cannot be read"):
        reader.restore({"w": jnp.ones(1)}, 3)


DEVICES = """
import sys
import jax, numpy as np
from flax import nnx
from models.qwen3_vl.sizes import tiny
from models.model import abstract_model
from models.sharding import make_mesh, param_shardings
from train.durable.checkpoint import Checkpoints
from train.learn.optimizer import OptimizerSettings, make_optimizer
from train.learn.update import init_state

abstract = nnx.state(abstract_model(tiny(96)).text)

def state(seed, *mesh):
    rng = np.random.default_rng(seed)
    weights = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), abstract)
    placed = jax.device_put(weights, param_shardings(abstract, make_mesh(*mesh)))
    return init_state(placed, make_optimizer(OptimizerSettings()))

def parts(leaf):
    return len({str(shard.index) for shard in leaf.addressable_shards})

one, many = (1, 1, 1), (1, 4, 2)
for number, (old, new) in enumerate(((one, many), (many, one), (many, (2, 2, 2)))):
    folder = f"{sys.argv[1]}/{number}"
    saved = state(1, *old)
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, saved, {})
    checkpoints.close()
    back, _ = Checkpoints(folder).restore(state(2, *new), 1)
    leaves = jax.tree.leaves(back)
    for a, b in zip(jax.tree.leaves(saved), leaves, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    data, fsdp, tensor = new
    assert {leaf.sharding.mesh.size for leaf in leaves} == {data * fsdp * tensor}, new
    assert max(map(parts, leaves)) == fsdp * tensor, new
"""


@pytest.mark.slow
def test_a_checkpoint_is_restored_on_other_meshes_and_numbers_of_devices(
    tmp_path: pathlib.Path,
) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", DEVICES, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"w": jnp.zeros(3), "v": jnp.zeros(2)}, r'w: "float32\[2\]" -> "float32\[3\]"'),
        (
            {"w": jnp.zeros(2, jnp.bfloat16), "v": jnp.zeros(2)},
            r'w: "float32\[2\]" -> "bfloat16\[2\]"',
        ),
        ({"w": jnp.zeros(2)}, r'v: "float32\[2\]" -> \(absent\)'),
        (
            {"w": jnp.zeros(2), "v": jnp.zeros(2), "u": jnp.zeros(1)},
            r'u: \(absent\) -> "float32\[1\]"',
        ),
    ],
)
def test_another_state_is_refused_with_the_leaves_that_differ(
    tmp_path: pathlib.Path, template: dict, words: str
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"w": jnp.zeros(2), "v": jnp.zeros(2)}, {})
    with pytest.raises(CheckpointError, match=words):
        checkpoints.restore(template, 1)


# --- damage ---


def two_checkpoints(folder: pathlib.Path) -> None:
    """Checkpoints 1 and 2, whose weights are their number; both have a score."""
    checkpoints = Checkpoints(folder)
    for step in (1, 2):
        checkpoints.save(step, {"w": jnp.full((600,), step)}, {"step": step}, step / 2)
    checkpoints.close()


def flip(file: pathlib.Path, share: float) -> None:
    data = bytearray(file.read_bytes())
    data[int(share * len(data))] ^= 16
    file.write_bytes(data)


def restored(folder: pathlib.Path) -> int:
    """The step that a run goes on from; its weights are as they were saved."""
    checkpoints = Checkpoints(folder)
    step = checkpoints.latest()
    assert step is not None
    state, cursor = checkpoints.restore({"w": jnp.zeros(600, int)}, step)
    assert (state["w"] == step).all() and cursor == {"step": step}
    return step


def test_a_flipped_bit_never_changes_what_is_restored(tmp_path):
    """It is refused with the name of the checkpoint, or it lies where nothing is read."""
    two_checkpoints(tmp_path)
    files = [file for item in ("state", "meta") for file in (tmp_path / "2" / item).rglob("*")]
    files = sorted(file for file in files if file.is_file() and file.stat().st_size)
    refused = 0
    for file in files:
        sound = file.read_bytes()
        for eighth in range(8):
            flip(file, eighth / 8)
            try:
                assert restored(tmp_path) == 2
            except CheckpointError as error:
                assert "2 cannot be read (" in str(error), file
                assert "resume from the one before it" in str(error)
                assert "\n" not in str(error)
                refused += 1
            file.write_bytes(sound)
    assert refused > len(files)
    assert restored(tmp_path) == 2, "all is sound again"


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "bool"])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5, 2)])
def test_checksums_on_the_host_and_on_devices_are_the_same(tmp_path, kind, shape):
    """What was saved from the host may be read onto devices, and the other way."""
    values = jax.random.normal(jax.random.key(0), shape)
    on_device = (values > 0) if kind == "bool" else (100 * values).astype(kind)
    on_host = np.asarray(on_device)
    for step, (one, other) in enumerate(((on_host, on_device), (on_device, on_host)), 1):
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(step, {"w": one}, {})
        checkpoints.wait()
        assert bits(checkpoints.restore({"w": other}, step)[0]) == bits({"w": one})


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "bool", "host", "key"])
def test_a_changed_array_of_any_kind_is_named(tmp_path, monkeypatch, kind):
    """Orbax would restore it without an error."""
    state = {"key": jax.random.key(1), "host": np.arange(5)}
    if kind not in state:
        state[kind] = jnp.zeros((3, 2), kind)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {})
    checkpoints.wait()
    read = checkpoints._read

    def changed(step, item, arguments):
        arrays = read(step, item, arguments)
        if item == "state":
            as_bits = jax.random.key_data(arrays[kind]) if kind == "key" else arrays[kind]
            other = np.array(as_bits)
            other.view(np.uint8).flat[-1] ^= 1
            arrays[kind] = other if kind == "host" else jnp.asarray(other)
            if kind == "key":
                arrays[kind] = jax.random.wrap_key_data(arrays[kind])
        return arrays

    checkpoints.restore(state, 1)
    monkeypatch.setattr(checkpoints, "_read", changed)
    with pytest.raises(CheckpointError, match=f"1 cannot be read .{kind}: its checksum is wrong"):
        checkpoints.restore(state, 1)


@pytest.mark.slow
def test_two_processes_refuse_a_checkpoint_together(together, tmp_path):
    """A file that the second process wrote is damaged."""
    program = str(pathlib.Path(__file__).with_name("hosts_program.py"))
    ended = together([program, "damaged", str(tmp_path)], 2, devices=2)
    refused = [process for process in ended if process.code == FAILED]
    assert refused and all("rl/2 cannot be read (" in process.err for process in refused)
    assert all(lost_others(process) for process in ended if process not in refused)


def test_a_full_disk_keeps_the_last_checkpoint_and_is_a_clear_error(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    small, large = {"w": jnp.ones(8)}, {"w": jax.random.bits(jax.random.key(0), (2**20,))}
    checkpoints.save(1, small, {"step": 1})
    checkpoints.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Writes beyond this size fail in the kernel, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, hard))
    try:
        with pytest.raises(SaveError, match=r"earlier ones are intact.*make room"):
            checkpoints.save(2, large, {"step": 2})
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    checkpoints.close()
    again = Checkpoints(tmp_path)
    assert again.latest() == 1
    assert (again.restore(small, 1)[0]["w"] == 1).all()
    again.save(2, large, {"step": 2})
    again.close()
    assert Checkpoints(tmp_path).latest() == 2


SAVER = """
import sys, jax.numpy as jnp
from train.durable.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1])
step = checkpoints.latest() or 0
while True:
    step += 1
    checkpoints.save(step, {name: jnp.full((50_000,), step) for name in "abcdefgh"}, {"step": step})
"""


@pytest.mark.slow
def test_a_kill_while_saving_leaves_the_newest_complete_checkpoint(tmp_path: pathlib.Path) -> None:
    template = {name: jnp.zeros((50_000,), int) for name in "abcdefgh"}
    unfinished = 0
    last = 0
    # While the folder is made, while arrays are written, towards the end.
    for delay in (0.0, 0.005, 0.02):
        saver = subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path)], cwd=ROOT)
        try:
            deadline = time.monotonic() + 60
            while not (saved_after(tmp_path, last) and list(tmp_path.glob("*tmp*"))):
                assert saver.poll() is None, "the saving process ended"
                assert time.monotonic() < deadline, "the saving process made no checkpoints"
            time.sleep(delay)
        finally:
            saver.kill()
            saver.wait()
        unfinished += len(list(tmp_path.glob("*tmp*")))
        step = Checkpoints(tmp_path).latest()
        assert step is not None and step > last
        state, cursor = Checkpoints(tmp_path).restore(template, step)
        assert cursor == {"step": step}
        assert all((leaf == step).all() for leaf in jax.tree.leaves(state))
        # Orbax removes what is unfinished in the background, before the next save.
        deadline = time.monotonic() + 60
        while list(tmp_path.glob("*tmp*")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        last = step
    assert unfinished, "no kill interrupted a save, so the test showed nothing"


def saved_after(folder: pathlib.Path, last: int) -> bool:
    """Whether a process that continued after `last` has completed at least its second save."""
    return any((folder / str(step)).exists() for step in range(last + 2, last + 9))


# --- numbers that are not finite ---


def finite_state() -> dict:
    sharded = NamedSharding(make_mesh(1, jax.device_count(), 1), PartitionSpec("fsdp"))
    return {
        "text": {"q": jax.device_put(jnp.ones((jax.device_count(), 3)), sharded)},
        "half": jnp.ones(4, jnp.bfloat16),
        "tower": np.ones(4, ml_dtypes.bfloat16),
        "key": jax.random.key(0),
        "step": jnp.int32(2**31 - 1),
        "none": jnp.zeros((0,)),
        "largest": jnp.finfo(jnp.float32).max * jnp.ones(2),
    }


def test_a_sound_state_has_none():
    assert not_finite(finite_state()) == ""


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["text.q", "half", "tower"])
def test_one_number_is_enough(name, bad):
    broken = finite_state()
    if name == "tower":
        broken["tower"][-1] = bad
    elif name == "half":
        broken["half"] = broken["half"].at[-1].set(bad)
    else:
        broken["text"]["q"] = broken["text"]["q"].at[-1, -1].set(bad)
    assert not_finite(broken) == name
