"""Cases for parity with transformers: small models and samples, and the results to compare.

`CASES` run live in this model (`parity_ours`) and in transformers (`parity_theirs`). Two of them
are also recorded in `parity_*.npz`. Weights and patches are float16 numbers, which keeps the files
small and exact. This file must not import torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from safetensors.numpy import save_file

IMAGE, VIDEO, START, END = 50, 51, 52, 53
NEW_TOKENS = 64

# Limits: the largest difference of a logit, and of a gradient relative to its norm.
LOGITS = 5e-5
GRADIENT = 1e-3

# A number of text tokens, an image's (h, w), or a video's (t, h, w), in patches.
Part = int | tuple[int, int] | tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Case:
    """A `config.json` and the rows of a batch; shorter rows are padded on one side.

    The `seed` of the weights is chosen such that generated tokens vary, and that the two likeliest
    tokens never differ by less than 1e-3, which rounding could swap.
    """

    config: dict[str, Any]
    rows: tuple[tuple[Part, ...], ...]
    pad: Literal["left", "right"] = "left"
    seed: int = 0


class Sample(NamedTuple):
    """A batch."""

    ids: np.ndarray
    valid: np.ndarray
    # (row, token id, t, h, w) of each image and video, in order
    items: np.ndarray
    # those of all images, then those of all videos
    patches: np.ndarray

    def grids(self, token: int, row: int | None = None) -> list[tuple[int, int, int]]:
        """(t, h, w) of the images (token IMAGE) or videos (VIDEO) of all rows, or of one."""
        return [
            (int(t), int(h), int(w))
            for item_row, kind, t, h, w in self.items
            if kind == token and row in (None, item_row)
        ]


class Results(NamedTuple):
    """The results of a model on a sample, in transformers' names and layouts."""

    positions: np.ndarray
    logits: np.ndarray
    tokens: np.ndarray
    gradients: dict[str, np.ndarray]


def hf_config(
    text: Mapping[str, Any], vision: Mapping[str, Any], *, tied: bool = False
) -> dict[str, Any]:
    """A small `config.json` of transformers 4.57 with these changes.

    With `rope_parameters` it is one of 5.x.
    """
    text = {
        "model_type": "qwen3_vl_text", "vocab_size": 64, "hidden_size": 32,
        "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "attention_bias": False, "max_position_embeddings": 4096, "rope_theta": 10_000.0,
        "rope_scaling": rope(4, 2, 2), **text,
    }  # fmt: skip
    vision = {
        "model_type": "qwen3_vl", "depth": 2, "hidden_size": 16, "intermediate_size": 20,
        "num_heads": 2, "in_channels": 3, "patch_size": 2, "temporal_patch_size": 2,
        "spatial_merge_size": 2, "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 9, "hidden_act": "gelu_pytorch_tanh",
        "deepstack_visual_indexes": [0, 1], **vision,
    }  # fmt: skip
    if "rope_parameters" in text:
        del text["rope_theta"], text["rope_scaling"]
    top = {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "tie_word_embeddings": tied,
    }
    ids = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
    }
    return {**top, **ids, "text_config": text, "vision_config": vision}


def rope(*section: int, **more: float) -> dict[str, Any]:
    return {
        "rope_type": "default",
        "mrope_section": list(section),
        "mrope_interleaved": True,
        **more,
    }


def heads(query: int, kv: int, size: int, *section: int) -> dict[str, Any]:
    return {
        "num_attention_heads": query,
        "num_key_value_heads": kv,
        "head_dim": size,
        "rope_scaling": rope(*section),
    }


def windowed(text: dict[str, Any], vision: dict[str, Any], tied: bool = False) -> dict[str, Any]:
    """A small `config.json` of Qwen2.5-VL in the layout of transformers 5, with these changes."""
    text = {
        "model_type": "qwen2_5_vl_text", "vocab_size": 64, "hidden_size": 32,
        "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
        **text,
    }  # fmt: skip
    vision = {
        "model_type": "qwen2_5_vl", "depth": 3, "hidden_size": 16, "intermediate_size": 20,
        "num_heads": 2, "in_channels": 3, "patch_size": 2, "temporal_patch_size": 2,
        "spatial_merge_size": 2, "out_hidden_size": text["hidden_size"], "hidden_act": "silu",
        "window_size": 8, "fullatt_block_indexes": [1], "tokens_per_second": 3, **vision,
    }  # fmt: skip
    return {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "tie_word_embeddings": tied,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "text_config": text,
        "vision_config": vision,
    }


def with_experts(text: dict[str, Any], tied: bool = False) -> dict[str, Any]:
    """A small `config.json` of a Qwen3-VL with six experts per layer, with these changes."""
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    config = hf_config({"model_type": "qwen3_vl_moe_text", **experts, **text}, {}, tied=tied)
    config["model_type"] = config["vision_config"]["model_type"] = "qwen3_vl_moe"
    return config | {"architectures": ["Qwen3VLMoeForConditionalGeneration"]}


CASES = {
    "experts, images and a video": Case(
        with_experts({"num_hidden_layers": 3}),
        ((5, (4, 4), 3, (2, 6), 4), (2, (2, 4, 2), 1)),
        seed=1,
    ),
    "experts, three per token, padded right, tied": Case(
        with_experts({"num_experts_per_tok": 3}, tied=True), ((6, (2, 2), 3), (13,)), "right"
    ),
    "windows, images of many sizes": Case(
        windowed({}, {}), ((5, (12, 10), 3, (2, 6), 4), (2, (6, 18), 1)), seed=1
    ),
    "windows of another size, padded right, tied": Case(
        windowed(
            {"num_hidden_layers": 3, "num_key_value_heads": 1},
            {"fullatt_block_indexes": [0, 2], "window_size": 4},
            tied=True,
        ),
        ((3, (6, 8), 2, (2, 2), 5), (4, (10, 4), 9)),
        "right",
        seed=2,
    ),
    "images, two rows, two levels": Case(
        hf_config(
            {"intermediate_size": 24, **heads(4, 2, 8, 1, 2, 1)}, {"hidden_size": 8, "num_heads": 1}
        ),
        ((5, (4, 4), 3, (2, 6), 4), (2, (6, 2), 1)),
        seed=1,
    ),
    "video, tied, one level of the last layer": Case(
        hf_config(
            {"intermediate_size": 24, **heads(6, 1, 8, 2, 1, 1)},
            {"hidden_size": 8, "deepstack_visual_indexes": [1], "num_position_embeddings": 16},
            tied=True,
        ),
        ((3, (3, 4, 2), 2, (2, 2, 6), 5),),
        seed=1,
    ),
    "images and videos, padded right, three levels, as many kv heads": Case(
        hf_config(
            {
                "hidden_size": 40,
                "num_hidden_layers": 4,
                "rope_theta": 5e6,
                "rms_norm_eps": 1e-5,
                **heads(2, 2, 32, 8, 4, 4),
            },
            {"depth": 4, "deepstack_visual_indexes": [0, 2, 3]},
        ),
        (((2, 4), 3, (2, 4, 2), (2, 2), 2), (4, (2, 2, 6), 1, (6, 4), 2, (3, 2, 2), 9)),
        "right",
    ),
    "images and videos without DeepStack, a config.json of 5.x": Case(
        hf_config(
            {"num_hidden_layers": 1, "rope_parameters": rope(4, 2, 2, rope_theta=500.0)},
            {
                "deepstack_visual_indexes": [],
                "depth": 1,
                "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
            },
        ),
        ((1, (2, 2, 4), (4, 2), 7), (9, (2, 2), 2), (12,)),
    ),
    "text alone, padded right": Case(
        hf_config({"num_hidden_layers": 3, **heads(8, 4, 8, 1, 2, 1)}, {}), ((6,), (13,)), "right"
    ),
    "merge 3, one frame a patch, one channel": Case(
        hf_config(
            {"num_hidden_layers": 2, "rms_norm_eps": 1e-4, **heads(3, 3, 12, 1, 2, 3)},
            {
                "spatial_merge_size": 3,
                "temporal_patch_size": 1,
                "in_channels": 1,
                "patch_size": 3,
                "num_position_embeddings": 25,
            },
        ),
        ((2, (3, 6), 4, (2, 6, 3), 3), (1, (9, 3), 2)),
    ),
}

# Both are padded on the left, so that one batch serves for logits and for sampling.
RECORDED = {
    "images, two rows, two levels": Path(__file__).with_name("parity_image.npz"),
    "video, tied, one level of the last layer": Path(__file__).with_name("parity_video.npz"),
}


def make_sample(case: Case) -> Sample:
    """Random words and patches.

    An image is between its start and end mark. So is each slice of a video, after two words in
    place of its time.
    """
    rng = np.random.default_rng(0)
    vision = case.config["vision_config"]
    rows, items, patches = [], [], {IMAGE: [], VIDEO: []}
    for number, parts in enumerate(case.rows):
        row: list[int] = []
        for part in parts:
            if isinstance(part, int):
                row += rng.integers(0, IMAGE, part).tolist()
                continue
            is_image = len(part) == 2
            token = IMAGE if is_image else VIDEO
            t, h, w = (1, *part) if is_image else part
            items.append((number, token, t, h, w))
            pixels = vision["temporal_patch_size"] * vision["patch_size"] ** 2
            channels = vision["in_channels"] * pixels
            patches[token].append(rng.normal(size=(t * h * w, channels)))
            tokens = h * w // vision["spatial_merge_size"] ** 2
            for _ in range(t):
                time = rng.integers(0, IMAGE, 2).tolist() if token == VIDEO else []
                row += [*time, START, *[token] * tokens, END]
        rows.append(row)
    length = max(map(len, rows))
    ids = np.zeros((len(rows), length), np.int32)
    valid = np.zeros((len(rows), length), bool)
    for number, row in enumerate(rows):
        first = length - len(row) if case.pad == "left" else 0
        ids[number, first : first + len(row)] = row
        valid[number, first : first + len(row)] = True
    seen = np.concatenate([*patches[IMAGE], *patches[VIDEO]]) if items else np.zeros((0, 0))
    in_float16 = seen.astype(np.float16).astype(np.float32)
    return Sample(ids, valid, np.array(items, int).reshape(-1, 5), in_float16)


def gradient_differences(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """By parameter that has a gradient in `theirs`: relative norm of the difference."""
    return {
        name: float(np.linalg.norm(ours[name] - gradient) / np.linalg.norm(gradient))
        for name, gradient in theirs.items()
    }


def write_model(folder: Path, config: dict[str, Any], weights: Mapping[str, np.ndarray]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: np.ascontiguousarray(value, np.float32) for name, value in weights.items()},
        folder / "model.safetensors",
    )
