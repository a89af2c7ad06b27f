"""Times the same model here and in transformers: prefill with frames, decoding, a training step.

`python -m benchmarks.model` prints the table of docs/speed.md, and `--json FILE` also writes every
number. It needs the extra `parity`.

Each round runs one process per job and side, one after the other on the same cores. A process loads
the random weights and runs its job once to warm up and then several times for the measurement. Its
largest resident memory is that of the job. If the two sides compute different results, the
benchmark fails.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import resource
import shlex
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
from jaxtyping import Float, Int

from models.attention import PagedCache
from models.config import ModelConfig, VisionConfig
from models.devices import reuse_freed_memory
from models.family import family
from models.qwen3_vl.config import Qwen3VLConfig
from models.qwen3_vl.sizes import qwen3_vl, tiny
from models.rope import mrope_positions, visual_index
from models.text import VisualBank
from models.weights import hf
from models.weights.hf_config import to_hf
from paravt_jax.data.any_path import require_local
from train.learn.speed import flops_per_token

JOBS = {"prefill": 3, "decode": 3, "train": 2}
"""Timed calls of each job per round."""

PAGE = 64
"""Tokens per page of the KV cache."""

LEARNING_RATE = 1e-5
WEIGHT_DECAY = 0.01


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and the work that is timed with it."""

    config: ModelConfig
    tokens: int
    """Length of the prompt to prefill, including its frames, and of the text to train on."""
    frames: int
    """Frames in the prompt."""
    grid: tuple[int, int]
    """Rows and columns of patches in a frame."""
    rows: int = 8
    """Sequences to decode together."""
    prompt: int = 256
    """Tokens of each sequence before decoding."""
    new: int = 32
    """Tokens to decode in each sequence."""

    @property
    def patches(self) -> int:
        """Patches in a frame."""
        return self.grid[0] * self.grid[1]


def _small() -> ModelConfig:
    """Return the 2B model at half the width, with 8 layers, 8 vision blocks and an untied head."""
    large = qwen3_vl("2b")
    vision = dataclasses.replace(
        large.vision,
        hidden_size=512,
        depth=8,
        num_heads=8,
        intermediate_size=2048,
        out_hidden_size=1024,
        deepstack_visual_indexes=(1, 3, 5),
    )
    text = dataclasses.replace(
        large.text,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=8,
        tie_word_embeddings=False,
    )
    return Qwen3VLConfig(vision, text)


def _windowed() -> ModelConfig:
    """Return a Qwen2.5-VL of about the same sizes; two of its eight vision blocks see whole
    frames."""
    large = family("qwen2_5_vl").size("7b")
    vision = dataclasses.replace(
        large.vision,
        hidden_size=512,
        depth=8,
        num_heads=8,
        intermediate_size=1368,
        out_hidden_size=1024,
        fullatt_block_indexes=(3, 7),
    )
    text = dataclasses.replace(
        large.text,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    return dataclasses.replace(large, vision=vision, text=text)


CASES = {
    "small": Case(_small(), tokens=2000, frames=16, grid=(20, 20)),
    "windowed": Case(_windowed(), tokens=2000, frames=16, grid=(20, 20)),
    "toy": Case(
        dataclasses.replace(tiny(512), image_token_id=500, vision_start_token_id=501),
        tokens=64,
        frames=2,
        grid=(4, 4),
        rows=2,
        prompt=8,
        new=4,
    ),
}


# --- the work, the same for both sides ---


def frames_prompt(case: Case) -> tuple[Int[np.ndarray, " t"], Float[np.ndarray, "frames p c"]]:
    """Return a prompt that alternates text and frames: its ids and its patches."""
    rng = np.random.default_rng(0)
    config = case.config
    tokens_per_frame = case.patches // config.vision.spatial_merge_size**2
    text = _text(rng, case, case.tokens - case.frames * (tokens_per_frame + 1))
    image = [config.vision_start_token_id] + [config.image_token_id] * tokens_per_frame
    parts = []
    for piece in np.array_split(text[1:], case.frames):
        parts += [piece, image]
    # The prompt ends with text, because the logits of its last token are compared.
    parts.append(text[:1])
    ids = np.concatenate(parts).astype(np.int32)
    patches = rng.normal(size=(case.frames, case.patches, config.vision.patch_dim))
    return ids, patches.astype(np.float32)


def prompts(case: Case) -> Int[np.ndarray, "b t"]:
    """Return the sequences to decode from."""
    return _text(np.random.default_rng(1), case, case.rows * case.prompt).reshape(case.rows, -1)


def training_ids(case: Case) -> Int[np.ndarray, "1 t"]:
    """Return the text to train on, with one more token to predict."""
    return _text(np.random.default_rng(2), case, case.tokens + 1)[None]


def _text(rng: np.random.Generator, case: Case, length: int) -> Int[np.ndarray, " t"]:
    """Random ids below the special tokens."""
    special = min(case.config.image_token_id, case.config.vision_start_token_id)
    return rng.integers(0, min(special, case.config.text.vocab_size), length).astype(np.int32)


def vision_flops(config: VisionConfig, patches: int) -> float:
    """Forward FLOPs of the vision tower for one frame of `patches` patches.

    Attention within windows is computed, and counted, like that within whole frames.
    """
    c = config
    d = c.hidden_size
    joined = c.spatial_merge_size**2
    # Products per patch. A patch attends to all patches of its frame: q k^T and the weighted sum of
    # v take d products per pair.
    block = 4 * d**2 + c.mlp_matrices * d * c.intermediate_size + 2 * patches * d
    # A merger joins several patches into one vector. These are the products per patch.
    merger = d * (joined * d + c.out_hidden_size)
    return 2.0 * patches * (c.patch_dim * d + c.depth * block + (1 + c.levels) * merger)


def flops(case: Case) -> dict[str, float]:
    """Return the floating-point operations of each job.

    Causal attention counts as half of full attention, and a backward pass as two forward passes.
    """
    config = case.config
    head = 2.0 * config.text.vocab_size * config.text.hidden_size
    per_token = flops_per_token(config, (case.tokens + 1) / 2)  # with the average context
    per_frame = vision_flops(config.vision, case.patches)
    # Prefill computes the logits of the last token only.
    prefill = case.tokens * (per_token - head) + head + case.frames * per_frame
    decoded = flops_per_token(config, case.prompt + (case.new + 1) / 2)
    return {
        "prefill": prefill,
        "decode": case.rows * case.new * decoded,
        "train": 3 * case.tokens * per_token,
    }


def timed(run: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Call `run` once to warm up, and then `repeats` times for the measurement.

    Returns:
        outputs: The results of all calls, the warm-up first.
        seconds: The times of all calls except the warm-up.
        memory: Largest resident memory of this process so far, in GiB.
    """
    outputs = [np.asarray(run())]
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        output = run()
        seconds.append(time.perf_counter() - begin)
        outputs.append(np.asarray(output))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
    return {"outputs": outputs, "seconds": seconds, "memory": memory}


# --- here ---


def ours(folder: str, case: Case, job: str) -> dict[str, Any]:
    """Run a job with this project, which keeps freed memory as a training run does.

    Returns the result of `timed`.
    """
    reuse_freed_memory()
    make = {"prefill": _our_prefill, "decode": _our_decode, "train": _our_train}
    return timed(make[job](hf.load(folder), case), JOBS[job])


def _our_prefill(model: Any, case: Case) -> Callable[[], Any]:
    ids, patches = frames_prompt(case)
    positions = mrope_positions(ids, [case.grid] * case.frames, case.config)[:, None]
    index = visual_index(ids, case.config.image_token_id)[None]
    grids = np.tile(case.grid, (case.frames, 1))
    graph, weights = nnx.split(model)

    @jax.jit
    def prefill(weights, patches, ids, positions, index):
        model = nnx.merge(graph, weights)
        visual = model.vision(patches, grids)
        visual = visual.reshape(1, -1, *visual.shape[2:])  # the frames of the only row
        hidden, kv = model.text(ids, positions, visual=VisualBank(visual, index))
        return model.text.logits(hidden[:, -1]), kv

    def run():
        logits, _ = jax.block_until_ready(prefill(weights, patches, ids[None], positions, index))
        return logits[0]

    return run


def _our_decode(model: Any, case: Case) -> Callable[[], Any]:
    ids = prompts(case)
    rows = case.rows
    prompt = case.prompt
    text = case.config.text
    columns = -(-(prompt + case.new) // PAGE)
    heads, head_dim = text.num_key_value_heads, text.head_dim
    shape = (text.num_hidden_layers, rows * columns, 2, heads, PAGE, head_dim)
    pages = jnp.zeros(shape, model.text.dtype)
    tables = jnp.arange(rows * columns).reshape(rows, columns)
    graph, weights = nnx.split(model.text)

    def extend(text, ids, offsets, pages, layers):
        # Text has the same position on all three axes (time, height, width).
        positions = jnp.broadcast_to(offsets.reshape(-1), (3, ids.size))
        cache = PagedCache(pages, tables, offsets)
        hidden, cache = text.extend(ids.reshape(-1), positions, cache, layers=layers)
        last = hidden.reshape(rows, -1, hidden.shape[-1])[:, -1]
        return jnp.argmax(text.logits(last), -1), cache.pages

    @jax.jit
    def prefill(weights, ids, pages):
        text = nnx.merge(graph, weights)
        offsets = jnp.broadcast_to(jnp.arange(prompt), (rows, prompt))
        return extend(text, ids, offsets, pages, None)

    @jax.jit
    def decode(weights, token, pages):
        text = nnx.merge(graph, weights)
        layers = text.separate_layers()

        def step(carry, offset):
            token, pages = carry
            offsets = jnp.broadcast_to(offset, (rows, 1))
            token, pages = extend(text, token, offsets, pages, layers)
            return (token, pages), token

        _, tokens = jax.lax.scan(step, (token, pages), prompt + jnp.arange(case.new))
        return tokens

    # Only decoding is timed. The pages are not donated, so every call starts from the same ones.
    token, pages = jax.block_until_ready(prefill(weights, ids, pages))
    return lambda: decode(weights, token, pages).block_until_ready()


def _our_train(model: Any, case: Case) -> Callable[[], Any]:
    ids = training_ids(case)
    positions = np.broadcast_to(np.arange(case.tokens), (3, 1, case.tokens))
    optimizer = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    graph, weights = nnx.split(model.text)
    moments = optimizer.init(weights)

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
        nonlocal weights, moments
        weights, moments, value = jax.block_until_ready(step(weights, moments, ids))
        return value

    return run


# --- transformers ---


def make(folder: str, case: Case) -> None:
    """Write the checkpoint that both sides load, with random weights."""
    import torch  # pyright: ignore[reportMissingImports]  (the extra parity)
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**to_hf(case.config))
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(folder)


def theirs(folder: str, case: Case, job: str) -> dict[str, Any]:
    """Run a job with transformers. Returns the same as `ours`."""
    import torch  # pyright: ignore[reportMissingImports]  (the extra parity)
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    make = {"prefill": _their_prefill, "decode": _their_decode, "train": _their_train}
    return timed(make[job](model, case), JOBS[job])


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
        token = first
        tokens = []
        for position in range(case.prompt, case.prompt + case.new):
            positions = torch.full((3, case.rows, 1), position)
            out = model(
                input_ids=token[:, None],
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            token = out.logits[:, -1].argmax(-1)
            tokens.append(token)
        cache.crop(-case.new)  # so that the next call starts from the same cache
        return torch.stack(tokens)

    return run


def _their_train(model: Any, case: Case) -> Callable[[], Any]:
    import torch  # pyright: ignore[reportMissingImports]  (the extra parity)

    ids = torch.tensor(training_ids(case), dtype=torch.long)
    model.model.visual.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

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
    """Call a function in a new process."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def check(job: str, mine: list[Any], other: list[Any]) -> None:
    """Check that the outputs of both sides agree.

    Raises:
        AssertionError: A logit differs by more than 1e-3, a token differs, or a loss differs by
            more than 1e-4 of its value.
    """
    if job == "prefill":
        np.testing.assert_allclose(mine[0], other[0], atol=1e-3, rtol=0)
    elif job == "decode":
        np.testing.assert_array_equal(mine[0], other[0])
    else:
        # Compare all calls: every loss after the first also checks the updates before it.
        np.testing.assert_allclose(mine, other, rtol=1e-4)


def compare(case: Case, rounds: int, jobs: tuple[str, ...] = tuple(JOBS)) -> dict[str, Any]:
    """Run both sides alternately, `rounds` times.

    Returns:
        By job and side, the seconds of every timed call, and the largest memory in GiB.
    """
    figures = {
        job: {side: {"seconds": [], "memory": 0.0} for side in ("here", "transformers")}
        for job in jobs
    }
    with tempfile.TemporaryDirectory() as folder:
        alone(make, folder, case)
        for _ in range(rounds):
            for job, sides in figures.items():
                mine = alone(ours, folder, case, job)
                other = alone(theirs, folder, case, job)
                check(job, mine["outputs"], other["outputs"])
                for side, result in zip(sides.values(), (mine, other), strict=True):
                    side["seconds"] += result["seconds"]
                    side["memory"] = max(side["memory"], result["memory"])
    return figures


def report(case: Case, figures: dict[str, Any]) -> str:
    """Format the table. Rates come from the best times."""
    counts = flops(case)
    lines = [
        "| job | side | best s | median s | GFLOP | GFLOP/s | GiB | times transformers |",
        "|---" * 8 + "|",
    ]
    for job, sides in figures.items():
        for side, measured in sides.items():
            best = min(measured["seconds"])
            speedup = min(sides["transformers"]["seconds"]) / best
            cells = [
                job,
                side,
                f"{best:.3f}",
                f"{statistics.median(measured['seconds']):.3f}",
                f"{counts[job] / 1e9:.0f}",
                f"{counts[job] / best / 1e9:.0f}",
                f"{measured['memory']:.1f}",
                f"{speedup:.2f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Return the processor, the commit and the versions of installed libraries. Linux only."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":")[1].strip() for line in info if line.startswith("model name")]
    folder = shlex.quote(str(Path(__file__).parent))
    versions = {
        name: importlib.metadata.version(name)
        for name in ("jax", "jaxlib", "flax", "torch", "transformers")
        if importlib.util.find_spec(name)
    }
    return {
        # An ARM processor has no such line.
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        # Without git, or in a copy without history, this is the error.
        "commit": subprocess.getoutput(f"git -C {folder} describe --always --dirty"),
        **versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the same model in transformers and here.")
    parser.add_argument(
        "--case", choices=CASES, default="small", help="size of the model and of the work"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=2,
        help="number of rounds; each takes about five minutes for the case small",
    )
    parser.add_argument(
        "--jobs", nargs="+", choices=JOBS, default=tuple(JOBS), help="jobs to time; all by default"
    )
    parser.add_argument("--json", type=Path, help="file for the machine and all figures")
    args = parser.parse_args()
    if args.json:
        require_local("--json", args.json)
    case = CASES[args.case]
    hardware = machine()
    figures = compare(case, args.rounds, tuple(args.jobs))
    print(", ".join(f"{name} {value}" for name, value in hardware.items()))
    print(f"\n{report(case, figures)}")
    if args.json:
        record = {"machine": hardware, "figures": figures, "flops": flops(case)}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
