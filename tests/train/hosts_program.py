"""The tasks of the two processes in tests/paravt_jax/test_hosts.py and test_processes.py.

`python tests/train/hosts_program.py TASK FOLDER`
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from models.model import VisionLanguageModel
from models.qwen3_vl.sizes import tiny
from models.sharding import make_mesh, param_shardings
from paravt_jax.processes import cluster, hosts
from paravt_jax.processes.exit_codes import Stopped
from paravt_jax.processes.interrupts import Interrupts
from tests.collectives import bytes_sent, find_collectives
from train.learn.weight_sync import WeightSync


def talk(folder: pathlib.Path, index: int) -> dict:
    made = hosts.from_first(lambda: f"by {index}")
    try:
        hosts.require_same("seed", index)
        different = ""
    except ValueError as error:
        different = str(error)
    with Interrupts() as interrupts:
        if index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        agreed = [interrupts.agree(), interrupts.asked()]
    cluster.require_shared(folder)
    # Folders of different names, as if each process had its own disk.
    alone = folder / str(index)
    alone.mkdir()
    try:
        cluster.require_shared(alone)
        apart = ""
    except ValueError as error:
        apart = str(error)
    try:
        hosts.from_first(stop_all)
        stopped = ""
    except Stopped as stop:
        stopped = f"{stop.code} {stop}"
    return {
        "first": hosts.is_first(),
        "made": made,
        "apart": apart,
        "stopped": stopped,
        "left": sorted(file.name for file in folder.rglob(".*")),
        "gathered": hosts.gather({"index": index, "long": "x" * (10 + 1000 * index)}),
        "agreed": agreed,
        "different": different,
        "share": [[hosts.share_of(n).start, hosts.share_of(n).stop] for n in (6, 7, 1)],
    }


def stop_all() -> None:
    raise Stopped(signal.SIGTERM, "kept")


def hand_over(folder: pathlib.Path, index: int) -> dict:
    """Syncs weights from meshes over all devices to this process's sampler, and counts traffic."""
    config = tiny(464)
    graph, weights = nnx.split(VisionLanguageModel(config, rngs=nnx.Rngs(0)).text)
    ours = {device.id for device in jax.local_devices()}
    for sizes in ((1, 8, 1), (2, 2, 2)):
        shardings = param_shardings(weights, make_mesh(*sizes))
        placed = jax.device_put(jax.tree.map(np.asarray, weights), shardings)
        sync = WeightSync(placed, np.float32)
        taken = sync(placed)
        assert sync.program is not None
        text = sync.program.lower(placed).compile().as_text()
        assert text is not None
        sent = bytes_sent(find_collectives(text, 8))
        # A device has an eighth of the weights and needs half of them. Left alone, XLA gathers
        # seven eighths (see `train.learn.weight_sync`).
        assert sent < 0.6 * sum(x.nbytes for x in jax.tree.leaves(weights)), sent
        for mine, given in zip(jax.tree.leaves(taken), jax.tree.leaves(weights), strict=True):
            devices = {device.id for device in mine.sharding.device_set}
            assert devices <= ours
            assert len(devices) == 2
            assert (np.asarray(mine) == np.asarray(given)).all()
        shard = taken["layers"]["q"].get_value().addressable_shards[0].data
        assert shard.shape[2] == config.text.num_attention_heads // 2
    return {"devices": len(ours)}


def in_turn(build: Callable[[], Any]) -> Any:
    """Build on the first process, then on the others, which find its files."""
    first = hosts.on_all(lambda: build() if hosts.is_first() else None)
    return first or build()


def learn(folder: pathlib.Path, index: int) -> dict:
    # Imports all of a run; without it the other tasks start sooner.
    import small

    road = in_turn(lambda: small.build_road(folder))
    return {"figures": small.learn(road, fsdp=8)}


def adapt(folder: pathlib.Path, index: int) -> dict:
    """Two steps of RL that train adapters over all devices of both processes."""
    import small

    road = small.adapted(in_turn(lambda: small.build_road(folder)))
    return {"figures": small.learn(road, fsdp=8)}


def damaged(folder: pathlib.Path, index: int) -> dict:
    """Saves two checkpoints on both processes, damages the newer one, and reads it."""
    from train.durable.checkpoint import Checkpoints

    sharding = jax.sharding.NamedSharding(
        make_mesh(1, jax.device_count(), 1), jax.sharding.PartitionSpec("fsdp")
    )

    def state(seed: int) -> dict:
        whole = np.random.default_rng(seed).random(4096 * jax.device_count(), np.float32)
        return {
            "w": jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
        }

    checkpoints = Checkpoints(folder / "rl")
    for step in (1, 2):
        checkpoints.save(step, state(step), {"step": step})
    checkpoints.close()

    def damage() -> None:
        # The largest file that the second process wrote.
        theirs = (folder / "rl" / "2" / "state" / "ocdbt.process_1").rglob("*")
        file = max(filter(pathlib.Path.is_file, theirs), key=lambda path: path.stat().st_size)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)

    hosts.from_first(damage)
    again = Checkpoints(folder / "rl")

    def read() -> None:
        again.restore(state(0), 2)

    cluster.run_command(read)
    return {}


def interrupt(folder: pathlib.Path, index: int) -> dict:
    """The first process gets a Ctrl-C while the second one waits for it."""

    def work() -> None:
        if hosts.is_first():
            raise KeyboardInterrupt
        hosts.gather(0)

    cluster.run_command(work)
    return {}


def fail(folder: pathlib.Path, index: int) -> dict:
    def full() -> None:
        raise OSError("disk full")

    hosts.from_first(full)
    return {}


if __name__ == "__main__":
    task, folder = sys.argv[1:]
    cluster.connect()
    tasks = {
        "talk": talk,
        "hand-over": hand_over,
        "fail": fail,
        "interrupt": interrupt,
        "damaged": damaged,
        "learn": learn,
        "adapt": adapt,
    }
    print(json.dumps(tasks[task](pathlib.Path(folder), hosts.process_index())))
