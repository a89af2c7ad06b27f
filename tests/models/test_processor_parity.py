"""Equality with transformers' processors and `get_rope_index`, for every family.

Answers are recorded, and computed live if torch is installed.
`python -m tests.models.test_processor_parity` (with torch and PARAVT_TEST_ASSETS) records them
again. The oracles run in their own process: they need a stand-in for torchvision, which must exist
before transformers is first imported.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.config import VisionConfig
from models.model import Inputs
from models.processor import Processor
from models.qwen2_5_vl.sizes import qwen2_5_vl
from models.weights.hf_config import from_hf
from tests.cut_tokenizer import cut_settings, cut_tokenizer

RECORDED = Path(__file__).with_name("golden_processor.npz")
ROOT = Path(__file__).parents[2]

TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look closer.", "parameters": {"type": "object"}},
}


def picture(seed: int, *shape: int) -> np.ndarray:
    """Pixels that look like noise and are the same with every version of NumPy."""
    numbers = np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(seed << 32)
    return (numbers * np.uint64(2654435761) >> np.uint64(13)).astype(np.uint8).reshape(shape)


def image(seed: int, height: int, width: int) -> dict[str, Any]:
    return {"type": "image", "image": picture(seed, height, width, 3)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


CALL = {
    "role": "assistant",
    "content": "Look.",
    "tool_calls": [{"function": {"name": "look", "arguments": {"start": 1.5}}}],
}


def samples(unit: int) -> dict[str, list[dict[str, Any]]]:
    """Conversations. Most sizes are multiples of `unit`, the side of a visual token in pixels."""
    return {
        "text only": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is 12.5 + 3?\n\n<think>"},
        ],
        "image": [user(image(0, 6 * unit, 11 * unit), text("What is this?"))],
        "two images of different grids": [
            user(
                text("Compare "),
                image(1, 10 * unit, 7 * unit),
                text(" and "),
                image(2, 8 * unit, 9 * unit),
            )
        ],
        "timed images": [
            user(
                *(
                    item
                    for t in (0.0, 12.5, 139.96)
                    for item in (
                        text(f"<{t:.1f} seconds>"),
                        image(int(t), 7 * unit, 10 * unit),
                    )
                ),
                text("When?"),
            )
        ],
        "several turns, tools": [
            {"role": "system", "content": [text("You look at videos.")]},
            user(image(9, 9 * unit, 8 * unit), text("Look.")),
            CALL,
            {"role": "tool", "content": [text("seen: "), image(10, 8 * unit, 10 * unit)]},
            {"role": "tool", "content": "nothing"},
            {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nA bird."},
            user(image(11, 8 * unit, 8 * unit), text("And here?")),
        ],
        # Both sides shrink. If the width grew, Pillow would resample the axes in the other order
        # than torch, and noise would differ by up to 5 of 255 levels.
        "resized image": [user(image(12, 301, 200), text("?"))],
        "sides below a patch": [user(image(14, 12, 2200))],
    }


SAMPLES = {"qwen3_vl": samples(32), "qwen2_5_vl": samples(28)}
CASES = [(family, name) for family, cases in SAMPLES.items() for name in cases]


def is_resized(name: str) -> bool:
    return name.startswith(("resized", "sides"))


def qwen2_5_vl_folder(qwen3_vl: Path, target: Path) -> Path:
    """Writes the processor of Qwen2.5-VL: its published settings, and the cut tokenizer."""
    vision = qwen2_5_vl("7b").vision
    settings = {
        "min_pixels": 3136,
        "max_pixels": 12_845_056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": list(vision.pixel_mean),
        "image_std": list(vision.pixel_std),
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
    }
    contents = {
        "preprocessor_config.json": settings,
        "tokenizer.json": cut_tokenizer(qwen3_vl),
        "tokenizer_config.json": cut_settings(qwen3_vl),
    }
    for name, content in contents.items():
        (target / name).write_text(json.dumps(content))
    (target / "chat_template.jinja").symlink_to(qwen3_vl / "chat_template.jinja")
    return target


def tools(name: str) -> list[dict[str, Any]] | None:
    return [TOOL] if "tools" in name else None


class Oracle:
    """The processor and position rule that transformers has for a family."""

    def __init__(self, family: str, folder: Path):
        import torch  # pyright: ignore[reportMissingImports]  (the extra parity)
        import transformers

        self.processor: Any = transformers.AutoProcessor.from_pretrained(folder)
        small = {"depth": 1, "num_hidden_layers": 1, "deepstack_visual_indexes": [0]}
        config = transformers.AutoConfig.for_model(
            family, text_config=dict(small), vision_config=dict(small)
        )
        with torch.device("meta"):
            self.model: Any = transformers.AutoModel.from_config(config)

    def __call__(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> dict[str, np.ndarray]:
        items = [item for m in messages if isinstance(m["content"], list) for item in m["content"]]
        images = [item["image"] for item in items if item["type"] == "image"]
        # These messages also have the official form; the template ignores pixels.
        prompt = self.processor.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        out = self.processor(text=[prompt], images=images or None, return_tensors="pt")
        grids = out.get("image_grid_thw")
        positions, _ = self.model.get_rope_index(
            out["input_ids"], out["mm_token_type_ids"], image_grid_thw=grids
        )
        return {
            "ids": out["input_ids"][0].numpy(),
            "positions": positions[:, 0].numpy(),
            "grids": np.zeros((0, 2), int) if grids is None else grids[:, 1:].numpy(),
            "patches": out["pixel_values"].numpy() if images else self._none,
        }

    @property
    def _none(self) -> np.ndarray:
        image = self.processor.image_processor
        return np.zeros((0, 3 * image.temporal_patch_size * image.patch_size**2), np.float32)

    def digest(self, patches: np.ndarray) -> np.ndarray:
        image = self.processor.image_processor
        return digest(patches, image.image_mean, image.image_std)


def _stand_in_for_torchvision() -> None:
    """Replaces the parts of torchvision that transformers uses: resizing and normalisation."""
    import enum

    import torch  # pyright: ignore[reportMissingImports]  (the extra parity)

    modules: dict[str, Any] = {}
    for name in (
        "",
        ".io",
        ".transforms",
        ".transforms.functional",
        ".transforms.v2",
        ".transforms.v2.functional",
    ):
        module = types.ModuleType(f"torchvision{name}")
        modules[name] = module
        sys.modules[module.__name__] = module
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
        package, _, child = name.rpartition(".")
        if name:
            setattr(modules[package], child, module)
    modes = ("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")
    mode: Any = enum.Enum("InterpolationMode", {name: name.lower() for name in modes})

    def resize(pixels, size, interpolation, antialias):
        assert interpolation is mode.BICUBIC and antialias and pixels.dtype == torch.uint8
        flat = pixels.reshape(-1, *pixels.shape[-3:])
        out = torch.nn.functional.interpolate(flat, size, mode="bicubic", antialias=True)
        return out.reshape(*pixels.shape[:-2], *size)

    def normalize(pixels, mean, std, inplace):
        return (pixels - torch.as_tensor(mean)[:, None, None]) / torch.as_tensor(std)[:, None, None]

    modules[""].__version__ = "0.28"
    modules[".transforms"].InterpolationMode = mode
    modules[".transforms.functional"].pil_to_tensor = None
    functional = modules[".transforms.v2.functional"]
    functional.InterpolationMode = mode
    functional.resize = resize
    functional.normalize = normalize
    functional.grayscale_to_rgb = lambda pixels: pixels


def pixels_of(patches: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Patches as pixels from 0 to 255, before they are rounded."""
    # [p, c] -> [p, channel, the rest]
    channels = patches.reshape(len(patches), 3, patches.shape[1] // 3)
    return 255 * (channels * np.asarray(std)[:, None] + np.asarray(mean)[:, None])


def digest(patches: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """A digest of the pixels in patches, regardless of the last bits of the floats."""
    pixels = np.rint(pixels_of(patches, mean, std)).astype(np.uint8)
    return np.frombuffer(hashlib.sha256(pixels.tobytes()).digest(), np.uint8)


def record(path: Path, whole: bool) -> None:
    """Writes the oracles' answers: patches whole, or (for a small file) as digests or means."""
    _stand_in_for_torchvision()
    qwen3_vl = Path(os.environ["PARAVT_TEST_ASSETS"]) / "qwen3_vl"
    with tempfile.TemporaryDirectory() as target:
        oracles = {
            "qwen3_vl": Oracle("qwen3_vl", qwen3_vl),
            "qwen2_5_vl": Oracle("qwen2_5_vl", qwen2_5_vl_folder(qwen3_vl, Path(target))),
        }
    answers: dict[str, np.ndarray] = {}
    for family, name in CASES:
        oracle = oracles[family]
        answer = oracle(SAMPLES[family][name], tools(name))
        if not whole:
            patches = answer.pop("patches")
            answer |= (
                {"mean": patches.mean(-1)}
                if is_resized(name)
                else {"digest": oracle.digest(patches)}
            )
        answers |= {
            f"{family}/{name}/{key}": value.astype(np.int32) if value.dtype == np.int64 else value
            for key, value in answer.items()
        }
    np.savez_compressed(path, allow_pickle=False, **answers)


def patch_difference(ours: np.ndarray, theirs: np.ndarray, vision: VisionConfig) -> float:
    """The largest difference of a value, in levels of 255 of the channel that varies least."""
    return float(np.abs(ours - theirs).max(initial=0)) * 255 * min(vision.pixel_std)


def check(family: str, name: str, processor: Processor, theirs: dict[str, np.ndarray]) -> None:
    ours: Inputs = processor(SAMPLES[family][name], tools(name))
    prefix = f"{family}/{name}/"
    answer = {
        key.removeprefix(prefix): value for key, value in theirs.items() if key.startswith(prefix)
    }
    np.testing.assert_array_equal(ours.ids, answer["ids"])
    np.testing.assert_array_equal(ours.positions, answer["positions"])
    assert ours.grids == [tuple(grid) for grid in answer["grids"].tolist()]
    assert ours.visual_index[ours.visual_index >= 0].tolist() == list(range(len(ours.patches) // 4))
    vision = processor.config.vision
    # Pillow and torch round the bicubic mean differently: by up to 2 of 255 levels.
    levels = 2.0 if is_resized(name) else 0.0
    if "patches" in answer:
        assert patch_difference(ours.patches, answer["patches"], vision) <= levels + 1e-4
    elif levels:
        assert patch_difference(ours.patches.mean(-1), answer["mean"], vision) <= levels
    else:
        ours_digest = digest(ours.patches, vision.pixel_mean, vision.pixel_std)
        np.testing.assert_array_equal(ours_digest, answer["digest"])


def make_processors(assets: Path, folder: Path) -> dict[str, Processor]:
    """The processor of each family; that of Qwen2.5-VL is written to `folder`."""
    qwen3_vl = assets / "qwen3_vl"
    older = qwen2_5_vl_folder(qwen3_vl, folder)
    return {
        "qwen3_vl": Processor.load(qwen3_vl, from_hf(qwen3_vl / "config.json")),
        "qwen2_5_vl": Processor.load(older, qwen2_5_vl("7b")),
    }


@pytest.fixture(scope="module")
def processors(assets, tmp_path_factory) -> dict[str, Processor]:
    return make_processors(assets, tmp_path_factory.mktemp("qwen2_5_vl"))


def ask_transformers(assets: Path, folder: Path) -> dict[str, np.ndarray]:
    """What transformers makes of all samples, computed in a process of its own."""
    path = folder / "answers.npz"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PARAVT_TEST_ASSETS": str(assets)}
    subprocess.run([sys.executable, __file__, str(path)], env=environment, check=True, timeout=240)
    return dict(np.load(path))


@pytest.fixture(scope="module")
def live(assets, tmp_path_factory) -> dict[str, np.ndarray]:
    pytest.importorskip("torch", reason="the oracle; install the extra parity")
    return ask_transformers(assets, tmp_path_factory.mktemp("oracle"))


@pytest.mark.parametrize(("family", "name"), CASES)
def test_samples_equal_the_recorded_ones(family, name, processors):
    check(family, name, processors[family], dict(np.load(RECORDED)))


@pytest.mark.parity
@pytest.mark.parametrize(("family", "name"), CASES)
def test_samples_equal_transformers(family, name, processors, live):
    check(family, name, processors[family], live)


if __name__ == "__main__":
    record(Path(sys.argv[1]) if sys.argv[1:] else RECORDED, whole=bool(sys.argv[1:]))
