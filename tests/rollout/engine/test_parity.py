"""The engine's greedy tokens are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import pytest

from models.config import TextConfig
from models.features import FrameFeatures, FrameSettings
from models.model import VisionLanguageModel
from models.qwen3_vl.config import Qwen3VLConfig, Qwen3VLVisionConfig
from models.vision import patchify
from models.weights import hf
from models.weights.hf_config import to_hf
from paravt_jax.data import video
from paravt_jax.data.frames import join
from paravt_jax.method.records import Frame
from rollout.engine.engine import Engine
from rollout.engine.requests import Request, Sampling
from rollout.engine.settings import EngineSizes
from tests.models.parity import END, IMAGE, START, VIDEO, Case, write_model

pytestmark = pytest.mark.parity

NEW, LATER = 72, 24  # tokens of a first turn and of a second
CONFIG = Qwen3VLConfig(
    Qwen3VLVisionConfig(
        hidden_size=16,
        depth=3,
        num_heads=2,
        intermediate_size=20,
        out_hidden_size=32,
        num_position_embeddings=9,
        deepstack_visual_indexes=(0, 2),
    ),
    TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        mrope_section=(4, 2, 2),
        rope_theta=10_000.0,
        tie_word_embeddings=False,
    ),
    image_token_id=IMAGE,
    video_token_id=VIDEO,
    vision_start_token_id=START,
    vision_end_token_id=END,
)
SETTINGS = EngineSizes(
    longest=320,
    slots=4,
    rows_per_prefix=2,
    page=16,
    pages=70,
    prefill_tokens=128,
    few_rows=2,
    steps=7,
)
# Height and width in pixels: 15 and 12 visual tokens per frame.
SIZES = {"wide.mp4": (96, 160), "tall.mp4": (128, 96)}
OPENING = (5, ("wide.mp4", 0), 2, ("wide.mp4", 4))
PROMPTS = (  # numbers of words, and frames
    (*OPENING, 6),
    (*OPENING, 9),  # another question about the same frames
    (*OPENING, ("wide.mp4", 5), 3),  # one frame more
    (5, ("wide.mp4", 0), 2, ("tall.mp4", 4), 3),  # one that is another's
    (3, ("tall.mp4", 1), ("tall.mp4", 0), 1, ("tall.mp4", 7), 4),
    (45,),
    (1,),
    (("tall.mp4", 3), 1),
)


class Sides(NamedTuple):
    model: VisionLanguageModel
    theirs: Any
    features: FrameFeatures


@pytest.fixture(scope="module")
def sides(tmp_path_factory) -> Sides:
    """The same weights on both sides, and videos of noise.

    Placeholders get logits of 0, so that they are not sampled: transformers would take them for
    frames in the next turn.
    """
    pytest.importorskip("torch", reason="the oracle; install the extra parity")
    from tests.models import parity_theirs

    folder = tmp_path_factory.mktemp("parity")
    theirs = parity_theirs.make_model(Case(to_hf(CONFIG), (), seed=33))
    theirs.lm_head.weight.data[[IMAGE, VIDEO]] = 0.0
    write_model(folder, to_hf(CONFIG), parity_theirs.weights(theirs))
    for name, size in SIZES.items():
        write_noise(folder / name, size)
    model = hf.load(folder)
    return Sides(
        model,
        theirs,
        FrameFeatures(model.vision, model.config, FrameSettings(batch=2), folder, source=video),
    )


def write_noise(path: Path, size: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=2)
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        for _ in range(8):
            image = rng.integers(0, 256, (*size, 3), np.uint8)
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def prompts(features: FrameFeatures) -> list[tuple[np.ndarray, tuple[Frame, ...]]]:
    """Ids and frames. Prompts that begin with the same parts begin with the same tokens."""
    found = []
    for parts in PROMPTS:
        ids: list[int] = []
        frames: list[Frame] = []
        for number, part in enumerate(parts):
            if isinstance(part, int):
                ids += np.random.default_rng([number, part]).integers(0, IMAGE, part).tolist()
            else:
                frames.append(Frame(*part, time=0.0))
                ids += [START, *[IMAGE] * features.tokens(part[0]), END]
        found.append((np.array(ids, np.int32), tuple(frames)))
    return found


def pixels(
    features: FrameFeatures, frames: tuple[Frame, ...]
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Patches and grids of frames. The videos already have the model's frame size."""
    patches = [
        patchify(video.read(join(features.root, frame.video), [frame.index]), CONFIG.vision)[0]
        for frame in frames
    ]
    empty = np.zeros((0, CONFIG.vision.patch_dim), np.float32)
    return np.concatenate([empty, *patches]), [features.grid(frame.video) for frame in frames]


def by_transformers(
    sides: Sides, asked: list[tuple[np.ndarray, tuple[Frame, ...]]], new: int
) -> list[list[int]]:
    """In one batch, padded on the left. Checks that rounding cannot decide between two tokens."""
    import torch  # pyright: ignore[reportMissingImports]  (the extra parity)

    longest = max(len(ids) for ids, _ in asked)
    ids = torch.tensor(
        np.stack([np.pad(ids, (longest - len(ids), 0)) for ids, _ in asked]), dtype=torch.long
    )
    valid = torch.tensor(
        np.stack([np.arange(longest) >= longest - len(ids) for ids, _ in asked])
    ).long()
    seen = [pixels(sides.features, frames) for _, frames in asked]
    with torch.no_grad():
        output = sides.theirs.generate(
            input_ids=ids,
            attention_mask=valid,
            mm_token_type_ids=((ids == IMAGE) & (valid == 1)).int(),
            pixel_values=torch.tensor(np.concatenate([patches for patches, _ in seen])),
            image_grid_thw=torch.tensor([(1, *grid) for _, grids in seen for grid in grids]),
            do_sample=False,
            max_new_tokens=new,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.stack(output.logits).topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > 1e-4
    return output.sequences[:, longest:].tolist()


@pytest.fixture(scope="module")
def turns(sides):
    """Prompts, the engine's tokens, the prompts of the next turn, and its tokens."""
    engine = Engine(sides.model, sides.features, SETTINGS)

    def run(asked, new: int) -> list[list[int]]:
        requests = [
            Request(ids, frames, Sampling(new, 0.0), n) for n, (ids, frames) in enumerate(asked)
        ]
        return [sample.ids.tolist() for sample in engine.generate(requests)]

    first = prompts(sides.features)
    said = run(first, NEW)
    rng = np.random.default_rng(1)
    second = [
        (np.concatenate([ids, new, rng.integers(0, IMAGE, 6)]).astype(np.int32), frames)
        for (ids, frames), new in zip(first, said, strict=True)
    ]
    later = run(second, LATER)
    assert engine.reused_tokens > sum(len(ids) for ids, _ in first)
    return first, said, second, later


def test_greedy_tokens_are_those_of_transformers(sides, turns):
    first, said, second, later = turns
    assert len(np.unique(said)) > 20, "too few different tokens"
    assert len({tuple(ids) for ids in said}) == len(said)
    assert said == by_transformers(sides, first, NEW)
    assert later == by_transformers(sides, second, LATER)
