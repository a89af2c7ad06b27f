"""Messages to inputs: sizes, patches, text, and errors.

test_processor_parity compares with transformers, tests/golden with recorded sizes.
"""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from PIL import Image

from models.processor import Processor
from models.qwen3_vl.dialect import DIALECT
from models.qwen3_vl.sizes import qwen3_vl
from models.vision import patchify
from models.weights.hf_config import from_hf
from paravt_jax.data import tokenizer_file
from paravt_jax.data.frames import resize
from paravt_jax.method import protocol
from paravt_jax.method.records import Frame, Question, QuestionKind
from paravt_jax.method.tools.crop_video import CropVideo

LIMITS = (4096, 65_536)


def test_resize_keeps_a_frame_that_fits_and_a_flat_colour():
    frame = np.full((20, 30, 3), 77, np.uint8)
    assert resize(frame, (20, 30)) is frame
    resized = resize(frame, (32, 64))
    assert resized.shape == (32, 64, 3) and (resized == 77).all()


def test_a_frame_off_the_grid_is_refused():
    with pytest.raises(ValueError, match="30 x 32: .*multiples of 32"):
        patchify(np.zeros((1, 30, 32, 3), np.uint8), qwen3_vl("8b").vision)


@pytest.fixture(scope="module")
def processor(assets) -> Processor:
    folder = assets / "qwen3_vl"
    return dataclasses.replace(
        Processor.load(folder, from_hf(folder / "config.json")), limits=LIMITS
    )


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)


def ask(*items: dict) -> list[dict]:
    return [{"role": "user", "content": [*items, {"type": "text", "text": "?"}]}]


def shown(processor: Processor, image) -> np.ndarray:
    return processor(ask({"type": "image", "image": image})).patches


def test_the_folders_limits_are_defaults(assets, processor):
    folder = assets / "qwen3_vl"
    published = Processor.load(folder, processor.config)
    assert published.limits == (65_536, 16_777_216)
    image = {"type": "image", "image": pixels(64, 64)}
    assert published(ask(image)).grids == [(16, 16)]
    assert processor(ask(image)).grids == [(4, 4)]


def test_text_alone_has_no_patches(processor):
    inputs = processor([{"role": "user", "content": "Hello."}], add_generation_prompt=False)
    assert inputs.patches.shape == (0, 1536) and inputs.grids == []
    assert (inputs.visual_index == -1).all()
    assert processor.tokenizer.decode(inputs.ids) == "<|im_start|>user\nHello.<|im_end|>\n"


def test_an_image_may_be_an_array_an_object_or_a_file(processor, tmp_path):
    array = pixels(64, 96)
    # A quarter turn to the left, which the EXIF orientation 6 reverses.
    turned = Image.fromarray(np.rot90(array))
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(array).save(tmp_path / "plain.png")
    turned.save(tmp_path / "turned.png", exif=exif)
    expected = shown(processor, array)
    for image in (Image.fromarray(array), tmp_path / "plain.png", str(tmp_path / "turned.png")):
        np.testing.assert_array_equal(shown(processor, image), expected)


def test_transparent_pixels_become_white(processor):
    clear = np.zeros((64, 64, 4), np.uint8)
    assert (shown(processor, Image.fromarray(clear)) == 1).all()


def test_the_protocol_writes_timed_images_as_the_processor_does(assets, processor):
    frames = [Frame("a.mp4", i, time) for i, time in enumerate((0.0, 12.5, 139.96))]
    question = Question(
        "q", "a.mp4", "Which colour?", QuestionKind.MULTIPLE_CHOICE, "A", ("red", "blue")
    )
    ours = protocol.Protocol(
        tokenizer_file.load(assets / "qwen3_vl", DIALECT), protocol.ProtocolSettings()
    )
    ids = np.concatenate([ours.overview(frames, 6).ids, ours.question(question).ids])
    system = (
        protocol.system_text(DIALECT, (CropVideo(),))
        .removeprefix("<|im_start|>system\n")
        .removesuffix("<|im_end|>\n")
    )
    content = []
    for frame in frames:
        content.append({"type": "text", "text": f"<{frame.time:.1f} seconds>"})
        content.append({"type": "image", "image": pixels(64, 96)})
    content.append({"type": "text", "text": protocol.question_text(question)})
    messages = [{"role": "system", "content": system}, {"role": "user", "content": content}]
    inputs = processor(messages)
    np.testing.assert_array_equal(inputs.ids, ids)


IMAGE = {"type": "image", "image": np.zeros((64, 64, 3), np.uint8)}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (ask({"type": "image", "image": np.zeros((64, 64, 3), np.float32)}), "image: float32 .*64"),
        (ask({"type": "image", "image": np.zeros((64, 64), np.uint8)}), r"image: uint8 \[64, 64\]"),
        (ask({"type": "image", "image": np.zeros((0, 5, 3), np.uint8)}), "frame size = 0 x 5"),
        (ask({"type": "video", "video": "a.mp4"}), "of type .video.; .*frames of a video as"),
        (ask({"type": "image_url", "image_url": "a.png"}), "of type 'image_url'"),
        (ask({"type": "image", "url": "a.png"}), "of type 'image'"),
        (ask(IMAGE, {"type": "text", "text": "<|image_pad|>"}), "2 placeholders for 1 images"),
        ([{"role": "assistant", "content": [IMAGE]}], "0 placeholders for 1 images"),
    ],
)
def test_wrong_items_are_refused(messages, message, processor):
    with pytest.raises(ValueError, match=message):
        processor(messages)


def test_transformers_5_has_both_settings_in_one_file(assets, processor, tmp_path):
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / file).symlink_to(assets / "qwen3_vl" / file)
    with pytest.raises(FileNotFoundError, match="preprocessor_config.json: not in"):
        Processor.load(tmp_path, processor.config)
    settings = json.loads((assets / "qwen3_vl" / "preprocessor_config.json").read_text())
    kinds = {"image_processor": settings | {"size": {"shortest_edge": 1, "longest_edge": 2}}}
    (tmp_path / "processor_config.json").write_text(json.dumps(kinds))
    assert Processor.load(tmp_path, processor.config).limits == (1, 2)


def test_older_names_override_the_size(assets, processor, tmp_path):
    folder = assets / "qwen3_vl"
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / file).symlink_to(folder / file)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings |= {"min_pixels": 4096, "max_pixels": None}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    loaded = Processor.load(tmp_path, processor.config)
    assert loaded.limits == (4096, 16_777_216)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("patch_size", 14, "patch_size = 14: .*16"),
        ("image_std", [0.2] * 3, "image_std"),
        ("size", {"height": 2}, "size = .*shortest_edge"),
    ],
)
def test_unsupported_settings_are_refused(field, value, message, assets, processor, tmp_path):
    settings = json.loads((assets / "qwen3_vl" / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | {field: value}))
    with pytest.raises(ValueError, match=message):
        Processor.load(tmp_path, processor.config)


def test_a_model_with_other_token_ids_is_refused(processor):
    config = dataclasses.replace(processor.config, image_token_id=7)
    with pytest.raises(ValueError, match="config.image_token_id = 7"):
        dataclasses.replace(processor, config=config)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_folder_without_its_tokenizer_is_refused(processor, assets, tmp_path, name):
    for file in (assets / "qwen3_vl").iterdir():
        if file.name != name:
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(FileNotFoundError, match=f"{name}: not in .*{tmp_path.name}"):
        Processor.load(tmp_path, processor.config)
