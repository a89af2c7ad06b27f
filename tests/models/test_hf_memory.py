"""The cost of loading: host memory beside the shards, and the bytes that each process reads."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from models.config import TextConfig
from models.qwen3_vl.config import Qwen3VLConfig, Qwen3VLVisionConfig
from models.qwen3_vl.sizes import tiny
from models.weights import folder as hf_folder
from models.weights import tensor_file
from models.weights.hf_config import to_hf
from tests.models.checkpoint_shapes import tensor_shapes

pytestmark = pytest.mark.slow

# Over 2 GB. The largest tensors belong to a stack of layers, so a loader that builds stacks on the
# host or holds a whole file exceeds the bound by far.
LARGE = Qwen3VLConfig(
    Qwen3VLVisionConfig(
        hidden_size=512,
        depth=4,
        num_heads=8,
        intermediate_size=2048,
        out_hidden_size=4096,
        num_position_embeddings=16,
        deepstack_visual_indexes=(0, 2),
    ),
    TextConfig(
        vocab_size=16_384,
        hidden_size=4096,
        intermediate_size=24_576,
        num_hidden_layers=3,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        mrope_section=(24, 20, 20),
        rope_theta=10_000.0,
        tie_word_embeddings=False,
    ),
)


def write_noise(folder, config, max_bytes):
    """Writes a bfloat16 checkpoint of random bits; returns the bytes in all and of the largest."""
    tensors = {
        name: (np.dtype(jnp.bfloat16), shape) for name, shape in tensor_shapes(config).items()
    }
    files, companions = hf_folder.new_files(tensors, max_bytes)
    folder.mkdir()
    for name, content in (companions | {"config.json": hf_folder.to_json(to_hf(config))}).items():
        (folder / name).write_bytes(content)
    rng = np.random.default_rng(0)

    def noise(shape):
        bits = rng.integers(0, 2**16, (shape[0], math.prod(shape[1:])), np.uint16)
        # Finite numbers only: NaNs may change on the way.
        bits &= 0xBFFF
        return bits.view(jnp.bfloat16)

    for name, types in files.items():
        tensor_file.write(folder / name, types, (noise(shape) for _, shape in types.values()))
    sizes = [2 * math.prod(shape) for _, shape in tensors.values()]
    return sum(sizes), max(sizes)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    if shutil.disk_usage(folder).free < 12 * 10**9:
        pytest.skip("needs 12 GB of disk")
    yield folder / "model", *write_noise(folder / "model", LARGE, 10**9)
    shutil.rmtree(folder)


LOAD = """
    import json, pathlib, sys
    import jax, jax.numpy as jnp, numpy as np
    from models.weights.hf import load
    from models.sharding import make_mesh
    folder, fsdp, tensor = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    mesh = make_mesh(fsdp=fsdp, tensor=tensor) if fsdp * tensor > 1 else None
    jax.block_until_ready(jnp.zeros(8) + 1)
    def memory(kind):
        # Not from getrusage, whose peak is inherited from the parent process.
        status = pathlib.Path("/proc/self/status").read_text()
        return 1024 * int(status.split(kind + ":")[1].split()[0])
    before = memory("VmRSS")
    model = load(folder, mesh=mesh, param_dtype=jnp.bfloat16)
    used = memory("VmHWM") - before
    shards = [shard for array in jax.tree.leaves(model) for shard in array.addressable_shards]
    print(json.dumps({
        "used": used,
        "shards": sum(shard.data.nbytes for shard in shards),
    }))
"""


def run(code, *argument_lists, devices):
    """Runs one process per argument list, all at once, and reads the last line of each as JSON."""
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    commands = [
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
        for arguments in argument_lists
    ]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        return [
            json.loads(process.communicate(timeout=280)[0].splitlines()[-1])
            for process in processes
        ]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize(("fsdp", "tensor"), [(2, 4)])
def test_the_host_holds_one_tensor_beside_the_shards(large, fsdp, tensor):
    folder, total, largest = large
    assert total > 2 * 10**9
    (found,) = run(LOAD, (folder, fsdp, tensor), devices=fsdp * tensor)
    beside = found["used"] - found["shards"]
    # Norms are on every device.
    assert total <= found["shards"] < 1.01 * total
    # A CPU device has a copy of the tensor, too. Threads and programs take some megabytes.
    assert beside <= 3 * largest + 5e7, (
        f"{beside / 1e6:.0f} MB beside the shards; the largest tensor has {largest / 1e6:.0f} MB"
    )


START = """
    import json, pathlib, sys
    import jax, jax.numpy as jnp
    process, port, source, target = int(sys.argv[1]), *sys.argv[2:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, process)
"""

TWO = """
    from models.weights import hf
    from models.weights import tensor_file
    from models.sharding import make_mesh
    count, whole = 0, tensor_file.Tensor.read
    def read(*arguments):
        global count
        block = whole(*arguments)
        count += block.nbytes
        return block
    tensor_file.Tensor.read = read
    model = hf.load(source, mesh=make_mesh(fsdp=2, tensor=2))
    # Replicas of a block are read once.
    blocks = {}
    for array in jax.tree.leaves(model):
        for shard in array.addressable_shards:
            blocks[id(array), str(shard.index)] = shard.data.nbytes
    hf.save(model, target, max_shard_bytes=1_000_000)
    # float32 here, bfloat16 in the file.
    print(json.dumps({"read": count, "needed": sum(blocks.values()) // 2}))
"""


def run_two(code, source, target):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    return run(START + code, *((number, port, source, target) for number in range(2)), devices=2)


def test_two_processes_read_only_their_slices_and_save_the_same_files(tmp_path):
    source = tmp_path / "source"
    target = tmp_path / "target"
    total, _ = write_noise(source, tiny(64), 500_000)
    found = run_two(TWO, source, target)
    for process in found:
        assert process["read"] == process["needed"] < 0.55 * total
    assert sum(process["read"] for process in found) >= total
    names = sorted(path.name for path in source.glob("*.safetensors"))
    assert len(names) > 3
    for name in names:
        ours, theirs = load_file(target / name), load_file(source / name)
        assert ours.keys() == theirs.keys()
        for tensor, value in theirs.items():
            np.testing.assert_array_equal(ours[tensor], value, err_msg=tensor)


FAILING = """
    from models.weights import hf
    from models.qwen3_vl.sizes import tiny
    from models.sharding import make_mesh
    from models.weights import tensor_file
    target, found = pathlib.Path(target), {}
    model = hf.load(source, mesh=make_mesh(fsdp=2, tensor=2))
    def attempt(name, folder, **options):
        try:
            hf.save(model, folder, max_shard_bytes=500_000, **options)
            found[name] = "written"
        except (OSError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    write = tensor_file.write
    def full(file, tensors, matrices):
        if file.name.startswith("model-00002"):
            next(matrices), next(matrices)
            raise OSError(28, "No space left on device")
        write(file, tensors, matrices)
    tensor_file.write = full
    attempt("disk full", target)
    tensor_file.write = write
    name = "/config.json" if process == 0 else "/none.json"
    attempt("a file is missing", target, files=[source + name])
    attempt("it exists for the second alone", (target, source)[process])
    attempt("it exists for the first alone", (target, target.with_name("none"))[process])
    print(json.dumps(found))
"""


def test_if_one_process_fails_both_raise(tmp_path):
    source = tmp_path / "source"
    target = tmp_path / "target"
    write_noise(source, tiny(64), 500_000)
    first, second = run_two(FAILING, source, target)
    not_written = f"RuntimeError: {target}: not written; process"
    assert first["disk full"] == "OSError: [Errno 28] No space left on device"
    assert second["disk full"].startswith(f"{not_written} 0")
    assert first["a file is missing"].startswith(f"{not_written} 1")
    assert second["a file is missing"].startswith("FileNotFoundError")
    for process in (first, second):
        assert process["it exists for the second alone"] == "written"
        assert process["it exists for the first alone"].startswith("FileExistsError")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]
