"""Equality with transformers' processor and `get_rope_index`.

Answers are recorded, and computed live if torch is installed.
`python tests/models/test_processor_parity.py` (with torch and PARAVT_TEST_ASSETS) records them
again. The oracle runs in its own process: it needs a stand-in for torchvision, which must exist
before transformers is first imported.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import os
import random
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.model import Inputs
from models.processor import Processor, video_frame_indices
from models.weights.hf_config import from_hf
from paravt_jax.data.sizes import image_size, video_size

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


def video(seed: int, indices: list[int], fps: float, height: int, width: int) -> dict[str, Any]:
    return {
        "type": "video",
        "video": (picture(seed, len(indices), height, width, 3), [i / fps for i in indices]),
    }


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


CALL = {
    "role": "assistant",
    "content": "Look.",
    "tool_calls": [{"function": {"name": "look", "arguments": {"start": 1.5}}}],
}
SAMPLES: dict[str, list[dict[str, Any]]] = {
    "text only": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 12.5 + 3?\n\n<think>"},
    ],
    "image": [user(image(0, 192, 352), text("What is this?"))],
    "two images of different grids": [
        user(text("Compare "), image(1, 320, 224), text(" and "), image(2, 256, 288))
    ],
    "video": [user(video(3, [0, 12, 24, 37, 49, 61, 74, 99], 25.0, 64, 96), text("What happens?"))],
    "two videos, odd counts": [
        user(
            video(4, [0, 7, 14, 21, 29], 29.97, 96, 64),
            video(5, [10, 11, 13], 12.5, 128, 160),
            text("Which?"),
        )
    ],
    "image, video and text": [
        user(
            image(6, 448, 160),
            text("then"),
            video(7, [0, 1, 5, 9], 7.5, 64, 32),
            text("and"),
            image(8, 256, 256),
        )
    ],
    "timed images": [
        user(
            *(
                item
                for t in (0.0, 12.5, 139.96)
                for item in (text(f"<{t:.1f} seconds>"), image(int(t), 224, 320))
            ),
            text("When?"),
        )
    ],
    "several turns, tools": [
        {"role": "system", "content": [text("You look at videos.")]},
        user(image(9, 288, 256), text("Look.")),
        CALL,
        {"role": "tool", "content": [text("seen: "), image(10, 256, 320)]},
        {"role": "tool", "content": "nothing"},
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nA bird."},
        user(video(11, [0, 30], 30.0, 64, 64), text("And here?")),
    ],
    "resized image and video": [
        user(image(12, 301, 200), video(13, [0, 5, 10], 10.0, 70, 101), text("?"))
    ],
    "sides below a patch": [user(image(14, 12, 2200), video(15, [0, 1], 1.0, 9, 40))],
}
RESIZED = {name for name in SAMPLES if name.startswith(("resized", "sides"))}


def tools(name: str) -> list[dict[str, Any]] | None:
    return [TOOL] if "tools" in name else None


def arguments() -> tuple[np.ndarray, np.ndarray]:
    """Sizes [frames, height, width, min and max pixels] and videos [frames, frames per second]."""
    draw = random.Random(0)
    sizes = []
    for _ in range(300):
        height, width = (int(2 ** draw.uniform(2, 12)) for _ in range(2))
        least = int(2 ** draw.uniform(8, 18))
        if max(height, width) <= 100 * min(height, width):
            sizes.append((draw.randint(2, 40), height, width, least, least * draw.randint(2, 500)))
    videos = [(draw.randint(1, 3000), draw.uniform(0.5, 120)) for _ in range(200)]
    return np.array(sizes), np.array(videos)


class Oracle:
    """The official processor and position rule."""

    def __init__(self, folder: Path):
        _stand_in_for_torchvision()
        import torch  # pyright: ignore[reportMissingImports]  (the extra parity)
        import transformers

        self.processor: Any = transformers.AutoProcessor.from_pretrained(folder)
        self.processor.video_processor.cap_pixels_per_frame = False
        with torch.device("meta"):
            small = {"depth": 1, "num_hidden_layers": 1, "deepstack_visual_indexes": [0]}
            self.model: Any = transformers.Qwen3VLModel(
                transformers.Qwen3VLConfig(text_config=dict(small), vision_config=dict(small))
            )

    def __call__(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> dict[str, np.ndarray]:
        items = [item for m in messages if isinstance(m["content"], list) for item in m["content"]]
        images = [item["image"] for item in items if item["type"] == "image"]
        clips = [item["video"] for item in items if item["type"] == "video"]
        # These messages also have the official form; the template ignores pixels.
        prompt = self.processor.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        given: dict[str, Any] = {"text": [prompt], "images": images or None}
        if clips:
            metadata = [
                {"total_num_frames": len(times), "fps": 1.0, "frames_indices": list(times)}
                for _, times in clips
            ]
            given |= {
                "videos": [frames for frames, _ in clips],
                "video_metadata": metadata,
                "do_sample_frames": False,
            }
        out = self.processor(**given, return_tensors="pt")
        grids = {"image": out.get("image_grid_thw"), "video": out.get("video_grid_thw")}
        positions, _ = self.model.get_rope_index(
            out["input_ids"],
            out["mm_token_type_ids"],
            image_grid_thw=grids["image"],
            video_grid_thw=grids["video"],
        )
        parts = {}
        for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            if name in out:
                patches = out[name].split(grids[kind].prod(-1).tolist())
                parts[kind] = iter(zip(grids[kind].numpy(), patches, strict=True))
        seen = [next(parts[item["type"]]) for item in items if item["type"] != "text"]
        return {
            "ids": out["input_ids"][0].numpy(),
            "positions": positions[:, 0].numpy(),
            "grids": np.array([grid for grid, _ in seen], int).reshape(-1, 3),
            "patches": np.concatenate(
                [np.zeros((0, 1536), np.float32), *(part.numpy() for _, part in seen)]
            ),
        }

    def tables(self) -> dict[str, np.ndarray]:
        """The answers of the official rules to `arguments()`."""
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import (
            smart_resize as image_rule,
        )
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import (
            smart_resize as video_rule,
        )
        from transformers.video_utils import VideoMetadata

        sizes, clips = arguments()
        images = [image_rule(h, w, 32, least, most) for _, h, w, least, most in sizes.tolist()]
        videos = [
            video_rule(n, h, w, 2, 32, least, most) for n, h, w, least, most in sizes.tolist()
        ]
        sample = self.processor.video_processor.sample_frames
        indices = [
            sample(VideoMetadata(total_num_frames=int(n), fps=fps)) for n, fps in clips.tolist()
        ]
        return {
            "images": np.array(images),
            "videos": np.array(videos),
            "indices": np.concatenate(indices),
        }


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


def digest(patches: np.ndarray) -> np.ndarray:
    """A digest of the pixels in patches, regardless of the last bits of the floats."""
    pixels = np.rint((patches + 1) * 127.5).astype(np.uint8)
    return np.frombuffer(hashlib.sha256(pixels.tobytes()).digest(), np.uint8)


def record(path: Path, whole: bool) -> None:
    """Writes the oracle's answers: patches whole, or (for a small file) as digests or means."""
    oracle = Oracle(Path(os.environ["PARAVT_TEST_ASSETS"]) / "qwen3_vl")
    answers = {f"table/{key}": value for key, value in oracle.tables().items()}
    for name, messages in SAMPLES.items():
        answer = oracle(messages, tools(name))
        if not whole:
            patches = answer.pop("patches")
            answer |= {"mean": patches.mean(-1)} if name in RESIZED else {"digest": digest(patches)}
        answers |= {
            f"{name}/{key}": value.astype(np.int32) if value.dtype == np.int64 else value
            for key, value in answer.items()
        }
    np.savez_compressed(path, allow_pickle=False, **answers)


def check(name: str, ours: Inputs, theirs: dict[str, np.ndarray]) -> None:
    answer = {
        key.split("/")[1]: value for key, value in theirs.items() if key.startswith(f"{name}/")
    }
    np.testing.assert_array_equal(ours.ids, answer["ids"])
    np.testing.assert_array_equal(ours.positions, answer["positions"])
    assert ours.grids == [tuple(grid) for grid in answer["grids"].tolist()]
    assert ours.visual_index[ours.visual_index >= 0].tolist() == list(range(len(ours.patches) // 4))
    # Pillow and torch round the bicubic mean differently.
    resampled = 2 / 127.5 if name in RESIZED else 0.0
    if "patches" in answer:
        np.testing.assert_allclose(ours.patches, answer["patches"], atol=resampled + 1e-6, rtol=0)
    elif resampled:
        np.testing.assert_allclose(ours.patches.mean(-1), answer["mean"], atol=resampled, rtol=0)
    else:
        np.testing.assert_array_equal(digest(ours.patches), answer["digest"])


def check_tables(theirs: dict[str, np.ndarray]) -> None:
    sizes, clips = arguments()
    images = [image_size(h, w, (least, most)) for _, h, w, least, most in sizes.tolist()]
    videos = [video_size(n, h, w, (least, most)) for n, h, w, least, most in sizes.tolist()]
    np.testing.assert_array_equal(images, theirs["table/images"])
    np.testing.assert_array_equal(videos, theirs["table/videos"])
    ours = np.concatenate([video_frame_indices(int(n), fps) for n, fps in clips.tolist()])
    np.testing.assert_array_equal(ours, theirs["table/indices"])


@pytest.fixture(scope="module")
def processor(assets) -> Processor:
    return Processor.load(assets / "qwen3_vl", from_hf(assets / "qwen3_vl" / "config.json"))


@pytest.fixture(scope="module")
def live(assets, tmp_path_factory) -> dict[str, np.ndarray]:
    pytest.importorskip("torch", reason="the oracle; install the extra parity")
    path = tmp_path_factory.mktemp("oracle") / "answers.npz"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PARAVT_TEST_ASSETS": str(assets)}
    subprocess.run([sys.executable, __file__, str(path)], env=environment, check=True, timeout=240)
    return dict(np.load(path))


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_equal_the_recorded_ones(name, processor):
    check(name, processor(SAMPLES[name], tools(name)), dict(np.load(RECORDED)))


def test_sizes_and_frames_equal_the_recorded_ones():
    check_tables(dict(np.load(RECORDED)))


@pytest.mark.parity
@pytest.mark.parametrize("name", SAMPLES)
def test_samples_equal_transformers(name, processor, live):
    check(name, processor(SAMPLES[name], tools(name)), live)


@pytest.mark.parity
def test_sizes_and_frames_equal_transformers(live):
    check_tables(live)


if __name__ == "__main__":
    record(Path(sys.argv[1]) if sys.argv[1:] else RECORDED, whole=bool(sys.argv[1:]))
