"""The same model in transformers and here, on the same cores, in turn: prefill with frames, decoding, one training step.

`python -m benchmarks.model`, with the extra parity, prints the table of docs/speed.md; `--json FILE` keeps every number. Each
round starts one process a side, which loads the same random weights, measures its library's own matmul rate, and runs every
job once to warm up and then for the clock. Refuses to report where the two sides compute different things.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib.metadata
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from models.attention import DenseCache
from models.qwen3_vl import hf
from models.qwen3_vl.config import Qwen3VLConfig, qwen3_vl, tiny
from models.qwen3_vl.flops import flops_per_token, vision_flops
from models.qwen3_vl.hf_config import to_hf
from models.qwen3_vl.rope import mrope_positions, visual_index
from models.qwen3_vl.vision import frame_layout
from paravt_jax.data.local_path import require_local
from train.durable.allocator import reuse_freed_memory

JOBS = {"prefill": 3, "decode": 3, "train": 2}  # calls for the clock
LEARNING_RATE, DECAY = 1e-5, 0.01


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and the work: `tokens` with `frames` of `grid` patches to prefill, text `tokens` to train on, `rows` to decode."""

    config: Qwen3VLConfig
    tokens: int
    frames: int
    grid: tuple[int, int]
    rows: int = 8
    prompt: int = 256
    new: int = 32


def _small() -> Qwen3VLConfig:
    """The 2B with a decoder of half the width, 8 layers and a head of its own, and a tower of half the width and 8 blocks."""
    large = qwen3_vl("2b")
    vision = {
        "hidden_size": 512,
        "depth": 8,
        "num_heads": 8,
        "intermediate_size": 2048,
        "out_hidden_size": 1024,
    }
    text = {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "tie_word_embeddings": False,
    }
    return Qwen3VLConfig(
        dataclasses.replace(large.vision, deepstack_visual_indexes=(1, 3, 5), **vision),
        dataclasses.replace(large.text, **text),
    )


CASES = {
    "small": Case(_small(), tokens=2000, frames=16, grid=(20, 20)),
    "toy": Case(
        dataclasses.replace(tiny(512), image_token_id=500, vision_start_token_id=501),
        64,
        2,
        (4, 4),
        2,
        8,
        4,
    ),
}


# --- the work, the same for both sides ---


def frames_prompt(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Ids [t] of text and frames in equal turns, and the patches [frames, p, c] of the frames."""
    rng, c = np.random.default_rng(0), case.config
    each = case.grid[0] * case.grid[1] // c.vision.spatial_merge_size**2
    text = _words(rng, case, case.tokens - case.frames * (each + 1))
    image = [c.vision_start_token_id] + [c.image_token_id] * each
    ids = np.concatenate(
        [np.concatenate([words, image]) for words in np.array_split(text[1:], case.frames)]
        + [text[:1]]
    )
    return ids.astype(np.int32), rng.normal(
        size=(case.frames, case.grid[0] * case.grid[1], c.vision.patch_dim)
    ).astype(np.float32)


def prompts(case: Case) -> np.ndarray:
    return _words(np.random.default_rng(1), case, case.rows * case.prompt).reshape(case.rows, -1)


def training_ids(case: Case) -> np.ndarray:
    return _words(np.random.default_rng(2), case, case.tokens + 1)[None]


def _words(rng: np.random.Generator, case: Case, n: int) -> np.ndarray:
    special = min(case.config.image_token_id, case.config.vision_start_token_id)
    return rng.integers(0, min(special, case.config.text.vocab_size), n).astype(np.int32)


def flops(case: Case) -> dict[str, float]:
    """What the mathematics takes: causal attention counts half a square, a backward pass twice the forward one."""
    c = case.config
    head = 2.0 * c.text.vocab_size * c.text.hidden_size
    token = flops_per_token(c, (case.tokens + 1) / 2)
    return {
        "prefill": case.tokens * (token - head)
        + head
        + case.frames * vision_flops(c.vision, case.grid[0] * case.grid[1]),
        "decode": case.rows * case.new * flops_per_token(c, case.prompt + (case.new + 1) / 2),
        "train": 3 * case.tokens * token,
    }


def timed(run: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """What a warm-up and `repeats` more calls gave, and the seconds of the latter."""
    outputs, seconds = [np.asarray(run())], []
    for _ in range(repeats):
        start = time.perf_counter()
        output = run()
        seconds.append(time.perf_counter() - start)
        outputs.append(np.asarray(output))
    return {"outputs": outputs, "seconds": seconds}


def peak_memory() -> float:
    """The most memory this process held, in GiB (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def matmul_shape(case: Case) -> tuple[int, int, int]:
    """Of the model's own products, the MLP's."""
    return case.tokens, case.config.text.hidden_size, case.config.text.intermediate_size


# --- here ---


def ours(folder: str, case: Case, jobs: tuple[str, ...]) -> dict[str, Any]:
    m, k, n = matmul_shape(case)
    a, b, product = jnp.ones((m, k)), jnp.ones((k, n)), jax.jit(jnp.matmul)
    model = hf.load(folder)
    make = {"prefill": _our_prefill, "decode": _our_decode, "train": _our_train}
    results = {job: timed(make[job](model, case), JOBS[job]) for job in jobs}
    return {
        **results,
        "matmul": timed(lambda: product(a, b).block_until_ready()[0, 0], 10),
        "memory": peak_memory(),
    }


def _our_prefill(model: Any, case: Case) -> Callable[[], Any]:
    ids, patches = frames_prompt(case)
    positions = mrope_positions(ids, [case.grid] * case.frames, case.config)[:, None]
    index = visual_index(ids, case.config.image_token_id)[None]
    layout = frame_layout(case.grid, case.config.vision)
    graph, weights = nnx.split(model)

    @jax.jit
    def prefill(weights, patches, ids, positions, index):
        model = nnx.merge(graph, weights)
        visual = model.vision(patches, layout)
        hidden, kv = model.text(
            ids, positions, visual=visual.reshape(1, -1, *visual.shape[2:]), visual_index=index
        )
        return model.text.logits(hidden[:, -1]), kv

    return lambda: jax.block_until_ready(prefill(weights, patches, ids[None], positions, index))[0][
        0
    ]


def _our_decode(model: Any, case: Case) -> Callable[[], Any]:
    ids, rows, start = prompts(case), case.rows, case.prompt
    graph, weights = nnx.split(model.text)

    @jax.jit
    def prefill(weights, ids):
        text = nnx.merge(graph, weights)
        hidden, kv = text(ids, jnp.broadcast_to(jnp.arange(start), (3, rows, start)))
        return jnp.argmax(text.logits(hidden[:, -1]), -1), DenseCache.prefilled(
            kv, jnp.ones((rows, start), bool), case.new
        )

    @jax.jit
    def decode(weights, token, cache):
        text = nnx.merge(graph, weights)
        layers = text.decode_layers()

        def step(carry, at):
            token, cache = carry
            hidden, cache = text.decode(token, jnp.broadcast_to(at, (3, rows)), cache, layers)
            token = jnp.argmax(text.logits(hidden), -1)
            return (token, cache.advance(jnp.ones(rows, bool))), token

        return jax.lax.scan(step, (token, cache), start + jnp.arange(case.new))[1]

    token, cache = jax.block_until_ready(prefill(weights, ids))
    return lambda: decode(weights, token, cache).block_until_ready()


def _our_train(model: Any, case: Case) -> Callable[[], Any]:
    ids = training_ids(case)
    positions = np.broadcast_to(np.arange(case.tokens), (3, 1, case.tokens))
    optimizer = optax.adamw(LEARNING_RATE, weight_decay=DECAY)
    graph, weights = nnx.split(model.text)
    state = [weights, optimizer.init(weights)]

    def loss(weights, ids):
        text = nnx.merge(graph, weights)
        hidden, _ = text(ids[:, :-1], positions)
        return -text.token_logprobs(hidden, ids[:, 1:], 1.0).mean()

    def update(weights, moments, ids):
        value, grads = jax.value_and_grad(loss)(weights, ids)
        changes, moments = optimizer.update(grads, moments, weights)
        return optax.apply_updates(weights, changes), moments, value

    step = jax.jit(update, donate_argnums=(0, 1))

    def run():
        *state[:], value = jax.block_until_ready(step(*state, ids))
        return value

    return run


# --- transformers ---


def make(folder: str, case: Case) -> None:
    """Writes the weights that both sides load."""
    import torch  # pyright: ignore[reportMissingImports]  (the extra parity)
    import transformers

    torch.manual_seed(0)
    transformers.Qwen3VLForConditionalGeneration(
        transformers.Qwen3VLConfig.from_dict(to_hf(case.config))
    ).save_pretrained(folder)


def theirs(folder: str, case: Case, jobs: tuple[str, ...]) -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]  (the extra parity)
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    m, k, n = matmul_shape(case)
    a, b = torch.ones(m, k), torch.ones(k, n)
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    make = {"prefill": _their_prefill, "decode": _their_decode, "train": _their_train}
    results = {job: timed(make[job](model, case), JOBS[job]) for job in jobs}
    return {**results, "matmul": timed(lambda: (a @ b)[0, 0], 10), "memory": peak_memory()}


def _their_prefill(model: Any, case: Case) -> Callable[[], Any]:
    import torch  # pyright: ignore[reportMissingImports]  (the extra parity)

    ids, patches = frames_prompt(case)
    tokens = torch.tensor(ids[None], dtype=torch.long)
    batch = {
        "input_ids": tokens,
        "pixel_values": torch.tensor(patches.reshape(-1, patches.shape[-1])),
        "image_grid_thw": torch.tensor([[1, *case.grid]] * case.frames),
        "mm_token_type_ids": (tokens == case.config.image_token_id).int(),
    }

    @torch.no_grad()
    def run():
        return model(**batch, use_cache=True, logits_to_keep=1).logits[0, -1]

    return run


def _their_decode(model: Any, case: Case) -> Callable[[], Any]:
    import torch  # pyright: ignore[reportMissingImports]  (the extra parity)
    import transformers

    ids = torch.tensor(prompts(case), dtype=torch.long)

    @torch.no_grad()
    def prefill():
        cache = transformers.DynamicCache()
        logits = model(
            input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        return logits[:, -1].argmax(-1), cache

    first, cache = prefill()

    @torch.no_grad()
    def run():
        token, tokens = first, []
        for at in range(case.prompt, case.prompt + case.new):
            positions = torch.full((3, case.rows, 1), at)
            out = model(
                input_ids=token[:, None],
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            token = out.logits[:, -1].argmax(-1)
            tokens.append(token)
        cache.crop(-case.new)
        return torch.stack(tokens)

    return run


def _their_train(model: Any, case: Case) -> Callable[[], Any]:
    import torch  # pyright: ignore[reportMissingImports]  (the extra parity)

    ids = torch.tensor(training_ids(case), dtype=torch.long)
    model.model.visual.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=DECAY, fused=True)

    def run():
        optimizer.zero_grad()
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[0], ids[0, 1:])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run


# --- the comparison ---


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """Calls the function in a process of its own, which ends with it. Both sides keep freed memory, as a run does."""
    with concurrent.futures.ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), reuse_freed_memory
    ) as pool:
        return pool.submit(function, *args).result()


def check(mine: dict[str, Any], other: dict[str, Any], jobs: tuple[str, ...]) -> None:
    """Both sides computed the same. AssertionError where logits differ by 1e-3, a token differs, or a loss by 1e-4 of itself."""
    if "prefill" in jobs:
        np.testing.assert_allclose(
            mine["prefill"]["outputs"][0], other["prefill"]["outputs"][0], atol=1e-3, rtol=0
        )
    if "decode" in jobs:
        np.testing.assert_array_equal(mine["decode"]["outputs"][0], other["decode"]["outputs"][0])
    if "train" in jobs:  # each loss but the first is one after updates
        np.testing.assert_allclose(mine["train"]["outputs"], other["train"]["outputs"], rtol=1e-4)


def compare(
    case: Case, rounds: int, jobs: tuple[str, ...] = tuple(JOBS)
) -> tuple[dict[str, Any], dict[str, float]]:
    """Seconds of every timed call, job -> side -> list, "matmul" among the jobs; and the most memory each side held, in GiB."""
    memory = {"here": 0.0, "transformers": 0.0}
    seconds = {job: {"here": [], "transformers": []} for job in (*jobs, "matmul")}
    with tempfile.TemporaryDirectory() as folder:
        alone(make, folder, case)
        for _ in range(rounds):
            results = {
                "here": alone(ours, folder, case, jobs),
                "transformers": alone(theirs, folder, case, jobs),
            }
            check(results["here"], results["transformers"], jobs)
            for side, result in results.items():
                memory[side] = max(memory[side], result["memory"])
                for job, sides in seconds.items():
                    sides[side] += result[job]["seconds"]
    return seconds, memory


def report(case: Case, seconds: dict[str, Any]) -> str:
    """The table: best and median seconds, rates from the best, the share of the same library's best matmul rate."""
    m, k, n = matmul_shape(case)
    counts = {"matmul": 2.0 * m * k * n, **flops(case)}
    lines = [
        "| job | side | best s | median s | GFLOP | GFLOP/s | share of matmul | times transformers |",
        "|---" * 8 + "|",
    ]
    peaks = {side: counts["matmul"] / min(values) for side, values in seconds["matmul"].items()}
    for job, sides in seconds.items():
        for side, values in sides.items():
            best = min(values)
            rate, ahead = counts[job] / best, min(sides["transformers"]) / best
            cells = [
                job,
                side,
                f"{best:.3f}",
                f"{statistics.median(values):.3f}",
                f"{counts[job] / 1e9:.0f}",
            ]
            cells += [f"{rate / 1e9:.0f}", f"{rate / peaks[side]:.0%}", f"{ahead:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What the numbers were measured on (Linux)."""
    cpu = next(
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").open()
        if line.startswith("model name")
    )
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=True,
    )
    versions = {
        name: importlib.metadata.version(name)
        for name in ("jax", "jaxlib", "flax", "torch", "transformers")
    }
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "commit": git.stdout.strip(),
        **versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the same model in transformers and here.")
    parser.add_argument("--case", choices=CASES, default="small")
    parser.add_argument(
        "--rounds", type=int, default=2, help="about five minutes each at the small size"
    )
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=tuple(JOBS))
    parser.add_argument(
        "--json", type=Path, help="file to write the machine and every measured time to"
    )
    args = parser.parse_args()
    require_local("--json", args.json)
    case, hardware = CASES[args.case], machine()
    seconds, memory = compare(case, args.rounds, tuple(args.jobs))
    print(
        ", ".join(f"{name} {value}" for name, value in hardware.items()),
        "",
        report(case, seconds),
        "",
        sep="\n",
    )
    print(
        "resident memory at most:",
        ", ".join(f"{side} {size:.1f} GiB" for side, size in memory.items()),
    )
    if args.json:
        record = {
            "machine": hardware,
            "seconds": seconds,
            "memory_gib": memory,
            "flops": flops(case),
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
