"""Equal to transformers' Qwen3-VL: in full where torch is installed, and by a small recorded case everywhere.

`python tests/models/test_parity.py` (with torch) records the case again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.processor import patchify
from models.qwen3_vl import Qwen3VL, hf, mrope_positions, num_params, packed_layout, qwen3_vl
from models.qwen3_vl.config import to_hf

RECORDED = Path(__file__).with_name("parity.npz")
IMAGE, VIDEO, START, END = 50, 51, 52, 53


def hf_config(**changes) -> dict:
    """A small config.json: text and vision fields are changed by name."""
    text = {
        "model_type": "qwen3_vl_text", "vocab_size": 64, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "attention_bias": False, "max_position_embeddings": 4096, "rope_theta": 10_000.0,
        "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    }  # fmt: skip
    vision = {
        "model_type": "qwen3_vl", "depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "in_channels": 3, "patch_size": 4,
        "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 48, "num_position_embeddings": 9,
        "hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": [0, 2],
    }  # fmt: skip
    tied = changes.pop("tie_word_embeddings", False)
    text |= {k: v for k, v in changes.items() if k in text}
    vision |= {k: v for k, v in changes.items() if k in vision and k not in ("hidden_size", "intermediate_size")}
    vision["out_hidden_size"] = text["hidden_size"]
    top = {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"], "tie_word_embeddings": tied}
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
    return {**top, **ids, "text_config": text, "vision_config": vision}


def rope(*section: int) -> dict:
    return {"rope_type": "default", "mrope_section": list(section), "mrope_interleaved": True}


CASES = {
    "grouped, two levels": (hf_config(), [(4, 4), (2, 6)]),
    "one kv head, tied, one level": (
        hf_config(
            num_attention_heads=6,
            num_key_value_heads=1,
            head_dim=24,
            rope_scaling=rope(6, 3, 3),
            tie_word_embeddings=True,
            deepstack_visual_indexes=[1],
        ),
        [(2, 2), (2, 2), (6, 4)],
    ),
    "as many kv heads, three levels, other theta": (
        hf_config(
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            hidden_size=40,
            rope_scaling=rope(8, 4, 4),
            rope_theta=5e6,
            deepstack_visual_indexes=[0, 1, 2],
            num_position_embeddings=16,
        ),
        [(8, 2), (4, 6)],
    ),
}


def sequence(grids: list[tuple[int, int]], rng: np.random.Generator) -> np.ndarray:
    """Text around images, as the protocol writes timed frames."""
    parts = [rng.integers(0, 50, 5)]
    for h, w in grids:
        parts += [[START], [IMAGE] * (h * w // 4), [END], rng.integers(0, 50, 3)]
    return np.concatenate(parts).astype(np.int32)


def frames(grids: list[tuple[int, int]], patch: int, rng: np.random.Generator) -> list[np.ndarray]:
    return [patchify(rng.integers(0, 256, (1, h * patch, w * patch, 3), np.uint8), patch)[0] for h, w in grids]


def our_logits(model: Qwen3VL, ids: np.ndarray, patches: list[np.ndarray], grids: list[tuple[int, int]]) -> np.ndarray:
    pixels = jnp.asarray(np.concatenate(patches)[None])
    visual = model.vision(pixels, packed_layout([(1, *grid) for grid in grids], pixels.shape[1], model.config.vision))
    image = ids == IMAGE
    index = np.where(image, np.cumsum(image) - 1, -1)[None]
    positions = mrope_positions(ids, grids, model.config)[:, None]
    hidden, _ = model.text(jnp.asarray(ids[None]), jnp.asarray(positions), visual=visual, visual_index=jnp.asarray(index))
    return np.asarray(model.text.logits(hidden))[0]


def their_model(config: dict):
    torch = pytest.importorskip("torch", reason="the oracle; install the extra parity")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = transformers.Qwen3VLConfig.from_dict(config)
    settings._attn_implementation = "eager"
    model = transformers.Qwen3VLForConditionalGeneration(settings).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Large enough that every part shows in the logits; norms scale near 1, as trained ones do.
            parameter.normal_(mean=float("norm" in name and name.endswith("weight")), std=0.15)
    return model


def their_logits(model, ids: np.ndarray, patches: list[np.ndarray], grids: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    import torch  # pyright: ignore[reportMissingImports]  (the extra parity)

    tokens = torch.tensor(ids[None], dtype=torch.long)
    kinds = (tokens == IMAGE).int()
    grid = torch.tensor([[1, h, w] for h, w in grids])
    with torch.no_grad():
        pixels = torch.tensor(np.concatenate(patches))
        out = model(input_ids=tokens, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=kinds, use_cache=False)
    positions = model.model.get_rope_index(tokens, mm_token_type_ids=kinds, image_grid_thw=grid)[0]
    return out.logits[0].numpy(), positions[:, 0].numpy()


@pytest.mark.parity
@pytest.mark.parametrize("case", CASES)
def test_logits_and_positions_equal_transformers(case, tmp_path):
    config, grids = CASES[case]
    theirs = their_model(config)
    theirs.save_pretrained(tmp_path)
    ours = hf.load(tmp_path)
    rng = np.random.default_rng(0)
    ids, patches = sequence(grids, rng), frames(grids, ours.config.vision.patch_size, rng)
    expected, positions = their_logits(theirs, ids, patches, grids)
    np.testing.assert_array_equal(mrope_positions(ids, grids, ours.config), positions)
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(our_logits(ours, ids, patches, grids), expected, atol=2e-4, rtol=0)


@pytest.mark.parity
def test_transformers_reads_what_we_save(tmp_path):
    config, grids = CASES["one kv head, tied, one level"]
    their_model(config).save_pretrained(tmp_path / "theirs")
    ours = hf.load(tmp_path / "theirs")
    hf.save(ours, tmp_path / "ours")
    import transformers

    loaded: Any = transformers.Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "ours", output_loading_info=True)
    theirs, report = loaded
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    rng = np.random.default_rng(0)
    ids, patches = sequence(grids, rng), frames(grids, 4, rng)
    expected, _ = their_logits(theirs.eval().float(), ids, patches, grids)
    np.testing.assert_allclose(our_logits(ours, ids, patches, grids), expected, atol=2e-4, rtol=0)


@pytest.mark.parity
@pytest.mark.parametrize("size", ["2b", "4b", "8b", "32b"])
def test_published_sizes_equal_transformers(size):
    torch = pytest.importorskip("torch", reason="the oracle; install the extra parity")
    import transformers

    with torch.device("meta"):
        theirs = transformers.Qwen3VLForConditionalGeneration(transformers.Qwen3VLConfig.from_dict(to_hf(qwen3_vl(size))))
    assert num_params(qwen3_vl(size)) == sum(p.numel() for p in theirs.parameters())


def test_logits_equal_the_recorded_ones(tmp_path):
    recorded = dict(np.load(RECORDED))
    config = json.loads(str(recorded.pop("config")))
    grids = [(int(h), int(w)) for h, w in recorded.pop("grids")]
    ids, patches, positions, expected = (recorded.pop(name) for name in ("ids", "patches", "positions", "logits"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(value.astype(np.float32)) for name, value in recorded.items()}, tmp_path / "model.safetensors")
    model = hf.load(tmp_path)
    counts = np.cumsum([h * w for h, w in grids])[:-1]
    logits = our_logits(model, ids, np.split(patches.astype(np.float32), counts), grids)
    np.testing.assert_array_equal(mrope_positions(ids, grids, model.config), positions)
    np.testing.assert_allclose(logits, expected, atol=2e-4, rtol=0)


def record() -> None:
    """Weights and patches are stored as float16 and used as stored, so the file is small and the comparison exact."""
    import tempfile

    import torch  # pyright: ignore[reportMissingImports]  (the extra parity)

    config, grids = hf_config(num_hidden_layers=2, depth=2, deepstack_visual_indexes=[0, 1]), [(4, 4), (2, 6)]
    theirs = their_model(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.half().float())
    rng = np.random.default_rng(0)
    ids = sequence(grids, rng)
    patches = [p.astype(np.float16).astype(np.float32) for p in frames(grids, 4, rng)]
    logits, positions = their_logits(theirs, ids, patches, grids)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        weights = {name: value.astype(np.float16) for name, value in load_file(Path(folder) / "model.safetensors").items()}
    case: dict[str, Any] = {"config": json.dumps(config), "grids": np.array(grids), "ids": ids, "positions": positions, "logits": logits}
    np.savez_compressed(RECORDED, patches=np.concatenate(patches).astype(np.float16), allow_pickle=False, **(case | weights))


if __name__ == "__main__":
    record()
