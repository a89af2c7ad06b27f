"""The model alone: the very tokens that transformers' template and the engine give."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any
from unittest import mock

import numpy as np
import openai
import pytest
import transformers
from PIL import Image

from models.qwen3_vl.dialect import DIALECT
from paravt_jax.data import tokenizer_file
from rollout.engine.requests import Request, Sampling
from rollout.serve import service as service_module
from rollout.serve.chat import Chat
from rollout.serve.chat_request import ChatRequest
from rollout.serve.errors import ApiError
from rollout.serve.files import FileLimits, Files
from rollout.serve.owner import Job
from rollout.serve.service import Service, ServiceSettings
from tests.rollout.serve.conftest import NAME, Held, Running
from tests.rollout.serve.test_episodes import crop
from tests.rollout.serve.test_files import data_url, picture

PLAIN = f"{NAME}/plain"
TOOL = {
    "type": "function",
    "function": {
        "name": "crop_video",
        "description": "Look closer.",
        "parameters": {"type": "object", "properties": {"start_time": {"type": "number"}}},
    },
}


CALL_5 = {"role": "assistant", "content": "", "tool_calls": 5}


def complete(running: Running, content: Any = "seven", **fields: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    create = running.client().chat.completions.create
    return create(**{"model": PLAIN, "messages": messages, "max_tokens": 12, "seed": 3} | fields)


def shown(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def test_greedy_tokens_are_those_of_the_engine(real_server):
    service = real_server.service
    reply = complete(real_server, temperature=0, logprobs=True)
    ids = service.prompt(service.render([{"role": "user", "content": "seven"}], None), [])
    sampling = Sampling(12, 0.0, stop_ids=(service.vocabulary.eos,))
    [sample] = service.engine.generate([Request(ids, (), sampling, 0)])
    [choice] = reply.choices
    assert choice.message.content == service.vocabulary.decode_turn(sample.ids)
    assert (len(sample.ids), choice.finish_reason) == (12, "length")
    found = [token.logprob for token in choice.logprobs.content]
    np.testing.assert_array_equal(np.array(found, np.float32), sample.logprobs[: len(found)])
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(ids), len(sample.ids))


def test_equal_seeds_give_equal_texts_and_n_seeds_n_of_them(real_server):
    [one], [again], [other] = (complete(real_server, seed=seed).choices for seed in (5, 5, 6))
    assert one.message.content == again.message.content != other.message.content
    several = complete(real_server, seed=5, n=3, stream=True)
    texts = {0: "", 1: "", 2: ""}
    for chunk in several:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert len({*texts.values()}) == 3
    assert [texts[0], texts[1]] == [one.message.content, other.message.content]
    complete(real_server, seed=-(2**70))
    usages = [complete(real_server, n=n).usage for n in (1, 2)]
    assert usages[0].prompt_tokens == usages[1].prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_ends_before_a_stop_text_even_across_tokens(real_server, stream):
    [whole] = complete(real_server, max_tokens=24, logprobs=True).choices
    tokens = [token.token for token in whole.logprobs.content]
    text = whole.message.content
    place = next(
        number
        for number in range(6, 23)
        if (tokens[number] + tokens[number + 1]).isascii() and tokens[number] and tokens[number + 1]
    )
    stop = tokens[place][-1] + tokens[place + 1]
    reply = complete(real_server, max_tokens=24, logprobs=True, stop=[stop, "never"], stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in reply if chunk.choices]
        found = "".join(chunk.delta.content or "" for chunk in chunks)
        last = chunks[-1]
    else:
        [last] = reply.choices
        found = last.message.content
    assert found == text[: text.index(stop)] and last.finish_reason == "stop"
    kept = sum(token.logprob for token in last.logprobs.content)
    begun = next(n for n in range(25) if len("".join(tokens[:n])) >= len(found))
    assert kept == sum(token.logprob for token in whole.logprobs.content[:begun])


def test_pictures_are_seen_at_the_size_that_a_request_asks_for(real_server):
    colors = [(250, 0, 0), (0, 0, 250)]
    parts = [[shown(picture(color)), {"type": "text", "text": "?"}] for color in colors]
    seen = [complete(real_server, part, temperature=0, logprobs=True) for part in parts]
    first = [reply.choices[0].logprobs.content[0].logprob for reply in seen]
    assert first[0] != first[1]
    rules = real_server.service.features.picture_rules
    for least, most in ((1, rules.factor**2), (rules.max_pixels // 2, rules.max_pixels)):
        limits = {"min_pixels": least, "max_pixels": most}
        reply = complete(real_server, parts[0], extra_body={"mm_processor_kwargs": limits})
        asked = reply.usage.prompt_tokens - seen[0].usage.prompt_tokens
        tokens = [r.tokens(48, 64) for r in (type(rules)(least, most, rules.factor), rules)]
        assert asked == tokens[0] - tokens[1]


def test_a_reply_that_the_time_limit_cuts_is_a_reply(real_server, monkeypatch):
    service = real_server.service
    monkeypatch.setattr(service, "settings", dataclasses.replace(service.settings, seconds=1e-3))
    assert complete(real_server, max_tokens=200).choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_structured_if_a_request_offers_tools(server, stream, monkeypatch):
    # The small model's own template takes no tools.
    template = "<|im_start|>system\n{{ messages[0].content }}"
    monkeypatch.setattr(server.service._template, "chat_template", template)
    server.service.engine.turns = [f"look\n{crop(2, 4)}"]
    system = {"role": "system", "content": "Be brief."}
    messages = [system, {"role": "user", "content": "seven"}]
    reply = complete(server, tools=[TOOL], stream=stream, messages=messages, max_tokens=60)
    if stream:
        *_, last = (chunk.choices[0] for chunk in reply if chunk.choices)
        message = last.delta
    else:
        [last] = reply.choices
        message = last.message
    [made] = message.tool_calls
    assert (message.content, last.finish_reason) == ("look", "tool_calls")
    assert made.function.name == "crop_video"
    assert json.loads(made.function.arguments)["start_time"] == 2


def test_what_the_context_or_the_model_cannot_take_is_refused(server):
    context = server.service.context
    with pytest.raises(openai.BadRequestError) as caught:
        complete(server, "seven " * 2 * context)
    assert caught.value.code == "context_length_exceeded" and f" {context}" in str(caught.value)
    with pytest.raises(ApiError, match="characters"):  # it is not even tokenized
        server.service.prompt("x" * (context * server.service.vocabulary.longest + 1), [])
    for fields, param in (
        ({"max_tokens": context}, "messages"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_p": 0.5}, "top_p"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"content": [shown(b"no picture")]}, "video"),
        ({"content": [shown(picture(size=(1, 900)))]}, "video"),
        ({"content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}, "image"),
        ({"content": "one <|image_pad|>"}, "messages"),
        ({"extra_body": {"mm_processor_kwargs": {"max_pixels": 10**9}}}, "mm_processor_kwargs"),
        ({"extra_body": {"mm_processor_kwargs": {"min_pixels": 0}}}, "mm_processor_kwargs"),
        ({"extra_body": {"media_io_kwargs": {"video": {"fps": 8}}}}, "media_io_kwargs.video.fps"),
        ({"messages": [CALL_5]}, "messages.0.tool_calls"),
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            complete(server, **fields)
        assert caught.value.status_code in (400, 422) and caught.value.param == param, fields


CONVERSATIONS = {
    "text": [{"role": "user", "content": "Hi, é🎥?"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "pictures": [
        {"role": "user", "content": ["wide", {"type": "text", "text": "and"}, "tall", "small"]},
        {"role": "assistant", "content": "Three."},
        {"role": "user", "content": [{"type": "text", "text": "Again"}, "wide"]},
    ],
    "calls": [
        {"role": "user", "content": "Look"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "crop_video", "arguments": '{"start_time": 2}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a dog"},
    ],
}
SIZES = {"wide": (900, 300), "tall": (70, 500), "small": (20, 20)}
LIMITS = {}, {"max_pixels": 40_000, "min_pixels": 10_000}, {"min_pixels": 262_144}


@pytest.mark.parametrize(
    ("name", "limits"),
    [*((name, {}) for name in CONVERSATIONS), *(("pictures", limits) for limits in LIMITS[1:])],
)
async def test_prompts_are_those_of_transformers(published, name, limits):
    service, chat, tokenizer, processor = published

    def written(size, part: Any) -> Any:
        return size(part) if isinstance(part, str) else part

    def messages(size) -> list[dict[str, Any]]:
        return [
            message | {"content": [written(size, part) for part in message["content"]]}
            if isinstance(message["content"], list)
            else message
            for message in CONVERSATIONS[name]
        ]

    tools = [TOOL] if name == "calls" else None
    pictures = []

    def theirs(size: str) -> dict[str, str]:
        pictures.append(Image.new("RGB", SIZES[size], (9, 9, 9)))
        return {"type": "image"}

    expected = tokenizer.apply_chat_template(
        messages(theirs), tools=tools, add_generation_prompt=True, tokenize=False
    )
    if pictures:
        size = {
            "shortest_edge": limits.get("min_pixels", processor.size["shortest_edge"]),
            "longest_edge": limits.get("max_pixels", 602_112),
        }
        grids = processor(pictures, size=size, return_tensors="np")["image_grid_thw"]
        # As their processor does it.
        for grid in grids:
            many = "<|placeholder|>" * (int(np.prod(grid)) // processor.merge_size**2)
            expected = expected.replace("<|image_pad|>", many, 1)
        expected = expected.replace("<|placeholder|>", "<|image_pad|>")
    body = {
        "model": PLAIN,
        "messages": messages(lambda size: shown(picture(size=SIZES[size]))),
        "tools": tools,
        "max_tokens": 4,
        "mm_processor_kwargs": limits,
    }
    job = Job(mock.Mock(), 0)
    with mock.patch.object(service, "complete", return_value=job) as complete:
        await chat.begin(ChatRequest.model_validate(body), "")
    assert complete.call_args[0][0].tolist() == tokenizer(expected)["input_ids"]


async def test_a_native_video_is_pairs_of_frames_after_their_middle(published, small_world):
    """As vLLM and transformers show it: 8 of its 64 frames, one every two seconds."""
    service, chat, *_ = published
    video = small_world.folder / small_world.videos[0].path
    part = {"type": "video_url", "video_url": {"url": data_url(video.read_bytes(), "video/mp4")}}
    text = {"type": "text", "text": "Where?"}
    body = {
        "model": PLAIN,
        "messages": [{"role": "user", "content": [part, text]}],
        "max_tokens": 4,
        "media_io_kwargs": {"video": {"num_frames": 8}},
    }
    with mock.patch.object(service, "complete", return_value=Job(mock.Mock(), 0)) as complete:
        await chat.begin(ChatRequest.model_validate(body), "")
    ids, paths = complete.call_args[0][:2]
    found = re.findall(
        r"<([\d.]+) seconds><\|vision_start\|>((?:<\|video_pad\|>)+)<\|vision_end\|>",
        service.vocabulary.decode(ids),
    )
    indices = np.linspace(0, 63, 8).astype(int)
    assert [float(time) for time, _ in found] == (2.0 * indices).reshape(-1, 2).mean(1).tolist()
    assert len(paths) == len(found) == 4
    # Two frames lie in a file, one below the other, and are one grid of patches.
    with Image.open(paths[0]) as pair:
        width, height = pair.size
    assert {pads.count("video_pad") for _, pads in found} == {width * height // 2 // 32**2}


pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def published(small_model, assets):
    """A server's inner parts, with the published tokenizer and template."""
    folder = assets / "qwen3_vl"
    vocabulary = tokenizer_file.load(folder, DIALECT)
    with mock.patch.object(
        service_module, "Engine", lambda model, features, sizes: Held(vocabulary, sizes)
    ):
        service = Service(small_model, vocabulary, folder, ServiceSettings(context=8192))
    files = Files(service.reader, FileLimits(10**8, 9, 10**9), None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    yield service, Chat(service, files, NAME), tokenizer, processor
    files.close()
    service.reader.close()
