"""One process of a run to which something happens: `train.run` with steps that do almost nothing.

`python tests/train/faults_program.py FAULT WHO FOLDER`

The command, its signals and its ends are those of `train.run`. Only what it executes is replaced:
a phase of steps that exchange a value and are saved. In step 3, FAULT happens to process WHO.
"""

from __future__ import annotations

import os
import pathlib
import resource
import select
import signal
import socket
import sys
import threading
import time

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import train.run
from models.sharding import make_mesh
from paravt_jax.processes import hosts
from paravt_jax.processes.interrupts import Interrupts
from tests.train.homes import open_home, open_phase

STEPS = 1000
BAD_STEP = 3
# Larger than the limit on files below, which is larger than what goes to stderr.
SIZE = 1 << 18
# On a full disk, most writes fail after the first one has ended the save.
ARRAYS = 32


class Wire:
    """Forwards connections to `port` on this machine until it is cut: then it is silent."""

    def __init__(self, port: int):
        self.cut = False
        self._target = port
        self._listener = socket.create_server(("localhost", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            threading.Thread(target=self._forward, args=(near,), daemon=True).start()

    def _forward(self, near: socket.socket) -> None:
        far = self._reach()
        pairs = {near: far, far: near}
        while not self.cut:
            for readable in select.select(list(pairs), [], [], 0.1)[0]:
                data = readable.recv(1 << 16)
                if not data:
                    return
                pairs[readable].sendall(data)
        # Both connections stay open, as if the packets were lost.
        threading.Event().wait()

    def _reach(self) -> socket.socket:
        while True:
            try:
                return socket.create_connection(("localhost", self._target))
            except ConnectionRefusedError:
                time.sleep(0.1)


def happen(fault: str, wire: Wire | None) -> None:
    """Lets the fault happen to this process."""
    me = os.getpid()
    if fault == "kill":
        os.kill(me, signal.SIGKILL)
    elif fault == "freeze":
        os.kill(me, signal.SIGSTOP)
    elif fault == "partition":
        assert wire is not None
        wire.cut = True
    elif fault == "terminate":
        os.kill(me, signal.SIGTERM)
    elif fault == "error":
        raise ValueError("field: 3; give 4")
    elif fault == "bug":
        raise KeyError("unforeseen")
    elif fault == "full disk in a save":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, resource.RLIM_INFINITY))
    elif fault == "hang":
        threading.Event().wait()


def destroyed(array: jax.Array) -> jax.Array:
    """An array whose shards of this process are not finite."""
    shards = [shard.data * np.nan for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def steps(
    fault: str, who: int, folder: pathlib.Path, wire: Wire | None, interrupts: Interrupts | None
) -> pathlib.Path:
    """Takes the place of the phases of a run."""
    sharding = NamedSharding(make_mesh(1, jax.device_count(), 1), PartitionSpec("fsdp"))
    shape = (SIZE * jax.device_count(),)

    def state(value: int) -> dict[str, jax.Array]:
        values = np.random.default_rng(value).random((ARRAYS, *shape), np.float32)
        return {f"w{index}": jax.device_put(row, sharding) for index, row in enumerate(values)}

    home = open_home(folder, interrupts=interrupts)
    with open_phase("rl", home, STEPS, save_every=2) as saver:
        saver.restore(state(0))
        for step in saver.steps():
            if step == BAD_STEP and hosts.process_index() == who:
                happen(fault, wire)
            hosts.gather(step)
            after = state(step)
            if fault == "destroyed" and step > BAD_STEP and hosts.process_index() == who:
                after["w1"] = destroyed(after["w1"])
            saver.done(step, after, {"loss": 1.0, "accuracy": 0.5}, step)
            time.sleep(0.05)
    return folder


def main() -> int:
    fault, who, name = sys.argv[1:]
    folder = pathlib.Path(name)
    wire = None
    if fault == "partition" and os.environ["JAX_PROCESS_ID"] == "1":
        wire = Wire(int(os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")[2]))
        os.environ["JAX_COORDINATOR_ADDRESS"] = f"localhost:{wire.port}"
    train.run.require_ready = lambda *_: None
    train.run.execute = lambda run, interrupts: steps(fault, int(who), folder, wire, interrupts)
    return train.run.main(["--config=sft_tiny", "--run-dir", name])


if __name__ == "__main__":
    raise SystemExit(main())
