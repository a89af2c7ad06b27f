"""Checkpoints: bit for bit, whole or not at all, and clear about what is wrong."""

from __future__ import annotations

import os
import pathlib
import resource
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from train.durable.checkpoint import CheckpointError, Checkpoints

ROOT = pathlib.Path(__file__).parents[2]


def state_of(seed: int) -> dict:
    """A state with every kind of leaf and node that a run has."""
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


def bits(tree: object) -> list[tuple[str, bytes]]:
    def raw(leaf: jax.Array) -> np.ndarray:
        return np.asarray(
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        )

    return [(str(leaf.dtype), raw(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def test_what_comes_back_is_equal_bit_for_bit(tmp_path: pathlib.Path) -> None:
    state, meta = (
        state_of(1),
        {"cursor": {"epoch": 2, "index": [3, 4]}, "phase": "rl", "seed": 2**70, "loss": 0.1},
    )
    Checkpoints(tmp_path).save(7, state, meta)
    back, back_meta, step = Checkpoints(tmp_path).restore(state_of(2))
    assert (step, back_meta) == (7, meta)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert bits(back) == bits(state)
    assert isinstance(back["host"], np.ndarray)
    assert (jax.random.normal(back["key"], (3,)) == jax.random.normal(state["key"], (3,))).all()


def test_an_abstract_template_is_enough_and_says_where_the_arrays_go(
    tmp_path: pathlib.Path,
) -> None:
    state = {"w": jnp.arange(8.0), "key": jax.random.key(3)}
    Checkpoints(tmp_path).save(1, state, {})
    placed = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    abstract = jax.eval_shape(lambda: state) | {
        "w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=placed)
    }
    back, _, _ = Checkpoints(tmp_path).restore(abstract)
    assert bits(back) == bits(state)
    assert back["w"].sharding == placed


def test_only_the_newest_stay(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    for step in (1, 5, 9):
        checkpoints.save(step, {"w": jnp.full((3,), step)}, {"step": step})
    assert checkpoints.latest() == 9
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["5", "9"]
    assert checkpoints.meta() == {"step": 9}


def test_saving_in_the_background_keeps_what_was_there_when_save_was_called(
    tmp_path: pathlib.Path,
) -> None:
    checkpoints = Checkpoints(tmp_path, asynchronous=True)
    host = np.arange(1000)
    checkpoints.save(1, {"host": host.copy(), "w": jnp.arange(1000)}, {"n": 1})
    checkpoints.close()
    back, meta, step = Checkpoints(tmp_path).restore({"host": host, "w": jnp.zeros(1000, int)})
    assert (
        (back["host"] == host).all()
        and (back["w"] == jnp.arange(1000)).all()
        and (meta, step) == ({"n": 1}, 1)
    )


def test_an_update_that_takes_the_state_away_does_not_touch_what_is_being_saved(
    tmp_path: pathlib.Path,
) -> None:
    """In the background the arrays are still being written when the next step is given their memory."""
    update = jax.jit(lambda w: w * 0 - 1, donate_argnums=0)
    checkpoints, w = Checkpoints(tmp_path, keep=9, asynchronous=True), jnp.arange(2_000_000.0)
    jax.block_until_ready(w)
    for step in (1, 2, 3):
        checkpoints.save(step, {"w": w}, {})
        jax.block_until_ready(update(w))
        w = jnp.arange(2_000_000.0) * (step + 1)
    checkpoints.close()
    for step in (1, 2, 3):
        assert (
            Checkpoints(tmp_path).restore({"w": w}, step)[0]["w"] == jnp.arange(2_000_000.0) * step
        ).all()


def test_the_best_stays_too_and_of_equal_ones_the_newest(tmp_path: pathlib.Path) -> None:
    def save(checkpoints: Checkpoints, step: int, score: float | None) -> list[int]:
        checkpoints.save(step, {"w": jnp.full((2,), step)}, {}, score)
        return checkpoints.steps()

    first = Checkpoints(tmp_path, keep=1)
    assert first.best() is None
    assert [save(first, 1, 0.5), save(first, 2, 0.7), save(first, 3, None)] == [[1], [2], [2, 3]]
    again = Checkpoints(tmp_path, keep=1)  # which knows the scores of what is there
    assert [save(again, 4, 0.1), save(again, 5, 0.7), save(again, 6, 0.3)] == [[2, 4], [5], [5, 6]]
    assert again.best() == 5 and Checkpoints(tmp_path, read_only=True).best() == 5


def test_another_identity_is_refused_by_the_name_of_what_differs(tmp_path: pathlib.Path) -> None:
    mine, other = {"model": {"size": "2b"}, "seed": 0}, {"model": {"size": "8b"}, "seed": 0}
    Checkpoints(tmp_path, identity=mine).save(1, {"w": jnp.ones(2)}, {})
    with pytest.raises(
        CheckpointError,
        match=r'is another run\'s \(stored -> wanted\):\n  model\.size: "2b" -> "8b"\nUse',
    ):
        Checkpoints(tmp_path, identity=other).restore({"w": jnp.ones(2)})
    assert (Checkpoints(tmp_path, identity=mine).restore({"w": jnp.zeros(2)})[0]["w"] == 1).all()


def test_a_part_is_read_without_the_rest(tmp_path: pathlib.Path) -> None:
    state = {
        "text": {"w": jnp.arange(6.0).reshape(2, 3)},
        "optimizer": {"mu": jnp.ones((2, 3))},
        "n": np.arange(3),
    }
    Checkpoints(tmp_path).save(4, state, {})
    for array in (tmp_path / "4" / "state").rglob("*"):
        assert not array.is_symlink()
    reader = Checkpoints(tmp_path, read_only=True)
    assert (
        reader.restore_part({"text": state["text"]}, 4)["text"]["w"] == state["text"]["w"]
    ).all()
    cases = [
        ({"text": {"v": jnp.ones(1)}}, r'text\.v: \(absent\) -> "float32\[1\]"'),
        ({"n": jnp.zeros(3)}, r'n: "int64\[3\]" -> "float32'),
    ]
    for part, words in cases:
        with pytest.raises(CheckpointError, match=f"has no such part .*\n  {words}"):
            reader.restore_part(part, 4)
    with pytest.raises(CheckpointError, match="holds no checkpoint 3; there is 4"):
        reader.restore({"w": jnp.ones(1)}, 3)


def test_a_reader_leaves_what_is_being_written(tmp_path: pathlib.Path) -> None:
    Checkpoints(tmp_path).save(1, {"w": jnp.ones(2)}, {})
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    assert Checkpoints(tmp_path, read_only=True).steps() == [1]
    assert (tmp_path / "2.orbax-checkpoint-tmp").exists()


DEVICES = """
import sys
import jax, numpy as np
from flax import nnx
from models.qwen3_vl.config import tiny
from models.qwen3_vl.model import abstract_model
from models.sharding import make_mesh, param_shardings
from train.durable.checkpoint import Checkpoints
from train.learn.optimizer import OptimizerSettings, make_optimizer
from train.learn.step import init_state

abstract = nnx.state(abstract_model(tiny(96)).text)

def state(seed, *mesh):
    rng = np.random.default_rng(seed)
    weights = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), abstract)
    return init_state(jax.device_put(weights, param_shardings(abstract, make_mesh(*mesh))), make_optimizer(OptimizerSettings(), 5))

one, many = (1, 1, 1), (1, 4, 2)
for number, (there, here) in enumerate(((one, many), (many, one), (many, (2, 2, 2)))):
    saved, kept = state(1, *there), Checkpoints(f"{sys.argv[1]}/{number}", asynchronous=True)
    kept.save(1, saved, {})
    kept.close()
    back, _, _ = Checkpoints(f"{sys.argv[1]}/{number}").restore(state(2, *here))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), saved, back)
    assert {leaf.sharding.mesh.size for leaf in jax.tree.leaves(back)} == {here[0] * here[1] * here[2]}, here
    spread = max(len({str(shard.index) for shard in leaf.addressable_shards}) for leaf in jax.tree.leaves(back))
    assert spread == here[1] * here[2], (here, spread)
"""


@pytest.mark.slow
def test_another_mesh_and_another_number_of_devices_restore_it(tmp_path: pathlib.Path) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", DEVICES, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]


def test_steps_have_to_grow(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"w": jnp.ones(2)}, {})
    for step in (2, 3):
        with pytest.raises(CheckpointError, match=f"checkpoint {step} does not follow 3"):
            checkpoints.save(step, {"w": jnp.zeros(2)}, {})
    assert (checkpoints.restore({"w": jnp.zeros(2)})[0]["w"] == 1).all()


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (3, "state leaf n.0 is 3, a int"),
        (np.float32(1), "a float32"),
        (jnp.zeros((0, 4)), "without elements"),
    ],
)
def test_a_leaf_that_would_not_come_back_is_refused(
    tmp_path: pathlib.Path, leaf: object, words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        Checkpoints(tmp_path).save(1, {"n": [leaf]}, {})
    assert Checkpoints(tmp_path).latest() is None


@pytest.mark.parametrize(
    ("meta", "words"),
    [({"cursor": b"x"}, "meta has to be"), ({"by_k": {4: 1}}, "meta.by_k has the key 4")],
)
def test_a_meta_that_would_not_come_back_is_refused(
    tmp_path: pathlib.Path, meta: dict, words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        Checkpoints(tmp_path).save(1, {"w": jnp.ones(1)}, meta)


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
def test_another_state_is_refused_by_the_name_of_the_leaf(
    tmp_path: pathlib.Path, template: dict, words: str
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"w": jnp.zeros(2), "v": jnp.zeros(2)}, {})
    with pytest.raises(CheckpointError, match=words):
        checkpoints.restore(template)


def test_restoring_from_nothing_is_said(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        Checkpoints(tmp_path).restore({"w": jnp.zeros(2)})


def test_a_folder_that_cannot_be_is_said(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be used"):
        Checkpoints(tmp_path / "file")
    with pytest.raises(CheckpointError, match="keep is 0"):
        Checkpoints(tmp_path, keep=0)


@pytest.mark.parametrize("damaged", ["state", "meta"])
def test_a_damaged_checkpoint_is_named_with_the_way_out(
    tmp_path: pathlib.Path, damaged: str
) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"w": jnp.full((64,), step)}, {"step": step})
    for file in (tmp_path / "2" / damaged).rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="delete it to go on from checkpoint 1"):
        Checkpoints(tmp_path).restore({"w": jnp.zeros(64, int)})


def test_a_damaged_score_is_said_with_the_way_out(tmp_path: pathlib.Path) -> None:
    Checkpoints(tmp_path).save(1, {"w": jnp.ones(2)}, {}, 0.5)
    (tmp_path / "1" / "metrics" / "metrics").write_bytes(b"")
    with pytest.raises(CheckpointError, match="score of a checkpoint .* delete the checkpoint"):
        Checkpoints(tmp_path)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_leaves_the_last_checkpoint_and_one_clear_error(
    tmp_path: pathlib.Path, asynchronous: bool
) -> None:
    checkpoints = Checkpoints(tmp_path, asynchronous=asynchronous)
    small, large = {"w": jnp.ones(8)}, {"w": jax.random.bits(jax.random.key(0), (2**20,))}
    checkpoints.save(1, small, {"step": 1})
    checkpoints.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (2**17, hard)
    )  # writes beyond this fail in the kernel, as on a full disk
    try:
        with pytest.raises(
            CheckpointError, match=r"failed \(.*\); checkpoint 1 is intact.*make room"
        ):
            checkpoints.save(2, large, {"step": 2})
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [entry.name for entry in tmp_path.iterdir()] == [
        "1"
    ]  # the half-written one no longer takes room
    assert checkpoints.latest() == 1
    assert (checkpoints.restore(small)[0]["w"] == 1).all()
    checkpoints.save(2, large, {"step": 2})
    checkpoints.wait()
    assert Checkpoints(tmp_path).meta() == {"step": 2}


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
def test_killed_while_saving_the_newest_complete_one_counts(tmp_path: pathlib.Path) -> None:
    template = {name: jnp.zeros((50_000,), int) for name in "abcdefgh"}
    unfinished = 0
    last = 0
    for delay in (0.0, 0.005, 0.02):  # into the folder's making, into the arrays, towards the end
        saver = subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path)], cwd=ROOT)
        try:
            deadline = time.monotonic() + 60
            while not (
                any((tmp_path / str(step)).exists() for step in range(last + 2, last + 9))
                and list(tmp_path.glob("*tmp*"))
            ):
                assert saver.poll() is None and time.monotonic() < deadline, (
                    "the saving process made no checkpoints"
                )
            time.sleep(delay)
        finally:
            saver.kill()
            saver.wait()
        unfinished += len(list(tmp_path.glob("*tmp*")))
        state, meta, step = Checkpoints(tmp_path).restore(template)
        assert step > last and meta == {"step": step}
        assert all((leaf == step).all() for leaf in jax.tree.leaves(state))
        assert not list(tmp_path.glob("*tmp*"))
        last = step
    assert unfinished, "no kill fell into a save: this test showed nothing"
