"""Episodes as chat completions, through OpenAI's own client."""

from __future__ import annotations

import contextlib
import json
from typing import Any
from unittest import mock

import pytest

from rollout.agent.episode import EpisodeSettings
from rollout.ask import Answer
from rollout.serve.chat_reply import KeptEpisodes
from rollout.serve.errors import ApiError
from tests.rollout.serve.conftest import NAME, eventually
from tests.rollout.serve.test_files import data_url, picture, sent


def crop(start: int, end: int) -> str:
    arguments = {"video_path": "video.mp4", "start_time": start, "end_time": end}
    call = {"name": "crop_video", "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


TURNS = [
    f"\nfirst look\n</think>\n\n{crop(0, 8)}\n{crop(8, 16)}",
    f"</think>\n{crop(16, 24)}",
    "so it is é\n</think>\n\n<answer>B</answer>",
]
WRONG_PART = "messages.0.content.0.type"
OPTIONS = ["five", "seven", "nine"]


def asking(video: str, **fields: Any) -> dict[str, Any]:
    content = [
        {"type": "video_url", "video_url": {"url": video}},
        {"type": "text", "text": "Which digit appears last?"},
    ]
    about = {"frames": 4, "options": OPTIONS} | fields.pop("paravt", {})
    messages = [{"role": "user", "content": content}]
    return {"model": NAME, "messages": messages, "extra_body": {"paravt": about}} | fields


def test_an_episode_is_a_chat_completion(server, small_world):
    engine = server.service.engine
    engine.turns, engine.spoken = TURNS, 0
    before = len(engine.asked)
    video = small_world.videos[0].path
    reply = server.client().chat.completions.create(**asking(video, seed=0, temperature=0))
    message = reply.choices[0].message
    assert (message.content, reply.choices[0].finish_reason) == ("B", "stop")
    assert message.reasoning_content == "first look\n\nso it is é"
    about = reply.paravt
    assert (about["answer"], about["option"], about["stop"]) == ("B", "seven", "answered")
    report = {"start": 0.0, "end": 8.0, "report": "seven from 8 to 10"}
    assert about["evidence"][0] == report and len(about["evidence"]) == 3
    # Each token counts once: a prompt that an agent reads again is not counted again.
    main = [
        pair for pair in engine.main if any(pair[0] is asked for asked in engine.asked[before:])
    ]
    subs = engine.sub[-3:]
    written = sum(len(sample.ids) for _, sample in main + subs)
    read = len(main[-1][0].ids) - sum(len(sample.ids) for _, sample in main[:-1])
    read += sum(len(request.ids) for request, _ in subs)
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (read, written)
    assert usage.paravt == {"turns": 3, "calls": 3}
    with server.http() as http, server.http("bob") as other:
        page = http.get(f"/v1/episodes/{about['episode']}.html")
        foreign = other.get(f"/v1/episodes/{about['episode']}.html")
    assert about["trace"]["turns"] and "/" not in about["trace"]["video"]
    assert "data:image" in page.text and foreign.status_code == 404


def test_a_stream_tells_what_happens_and_joins_to_the_reply(server, small_world):
    engine = server.service.engine
    engine.turns, engine.spoken = TURNS, 0
    video = small_world.videos[0].path
    chunks = [
        *server.client().chat.completions.create(
            **asking(video, stream=True, stream_options={"include_usage": True})
        )
    ]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thought == "first look\n\nso it is é"
    assert "".join(delta.content or "" for delta in deltas) == "B"
    events = [chunk.paravt for chunk in chunks if getattr(chunk, "paravt", None)]
    names = [event["event"] for event in events if event["event"] != "report.delta"]
    assert names[:5] == ["queued", "overview", "turn", "call", "call"]
    assert names[5:] == ["report", "report", "turn", "call", "report", "turn", "answer"]
    assert len(events[1]["times"]) == 4 and events[1]["duration"] == 128
    grown = [e["text"] for e in events if e["event"] == "report.delta" and e["call"] == 2]
    told = [event for event in events if event["event"] == "report" and event["call"] == 2]
    assert "".join(grown).strip() == told[0]["text"] == "seven from 8 to 10"
    assert (told[0]["start"], told[0]["end"], told[0]["status"]) == (8, 16, "executed")
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.total_tokens > 0 and not chunks[-1].choices
    assert events[-1]["option"] == "seven"
    with server.http() as http:
        body = asking(video, stream=True)
        body |= body.pop("extra_body")
        lines = http.post("/v1/chat/completions", json=body).text.strip().splitlines()
    assert lines[-1] == "data: [DONE]"


def test_pictures_are_a_video_of_one_frame_per_second(server):
    pictures = [picture((40 * number, 0, 0)) for number in range(1, 6)]
    parts = [{"type": "image_url", "image_url": {"url": data_url(data)}} for data in pictures]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is red?"}]}]
    reply = server.client().chat.completions.create(model=NAME, messages=messages)
    assert reply.choices[0].message.content == "seven"
    assert [round(time) for time in reply.paravt["trace"]["overview"]] == [0, 1, 2, 3, 4]


def test_the_newest_episodes_of_every_client_are_kept(monkeypatch):
    monkeypatch.setattr("rollout.serve.chat_reply._MOST_EPISODES", 2)
    kept = KeptEpisodes()
    episode = mock.Mock(spec=EpisodeSettings), mock.Mock(spec=Answer)
    [other, first, *newest] = [kept.keep(who, *episode) for who in "baaa"]
    assert kept.find(other, "b") and all(kept.find(id, "a") for id in newest)
    for id, who in ((first, "a"), (other, "a"), (newest[0], "b")):
        with pytest.raises(ApiError):
            kept.find(id, who)
    monkeypatch.setattr("rollout.serve.chat_reply.KEPT", -1.0)
    with pytest.raises(ApiError):
        kept.find(other, "b")


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_go_end_their_episodes(server, small_world, stream):
    owner, engine = server.service.owner, server.service.engine
    engine.held = lambda request: True
    body = asking(small_world.videos[0].path, stream=stream)
    body |= body.pop("extra_body")
    with contextlib.ExitStack() as connections:
        for _ in range(3):
            connections.enter_context(sent(server.url, "POST /v1/chat/completions", body=body))
        eventually(lambda: len(owner.playing) == len(engine.waiting) == 2 and owner.waiting)
    eventually(lambda: not (owner.playing or owner.waiting or engine.waiting))


@pytest.mark.parametrize(
    ("change", "status", "named"),
    [
        ({"model": "other"}, 404, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "which?"}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, 400, WRONG_PART),
        ({"temperature": -1}, 400, "temperature"),
        ({"n": 2}, 400, "n"),
        ({"stop": ["x"]}, 400, "stop"),
        ({"logprobs": True}, 400, "logprobs"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"paravt": {"frames": 65}}, 400, "paravt.frames"),
        ({"paravt": {"frames": -1}}, 400, "paravt.frames"),
        ({"paravt": {"seconds": -1}}, 400, "paravt.seconds"),
        ({"paravt": {"options": ["one"]}}, 400, "paravt.options"),
        ({"paravt": {"color": 1, "options": None}}, 400, "paravt.color"),
        ({"video": "https://example.org/a.mp4"}, 400, "video"),
        ({"video": "//["}, 404, "video"),
        ({"video": "data:video/mp4;base64,é"}, 400, "video"),
        ({"video": "file-unknown"}, 404, "video"),
        ({"mm_processor_kwargs": {"max_pixels": 40_000}}, 400, "mm_processor_kwargs"),
        ({"media_io_kwargs": {"video": {"num_frames": 8}}}, 400, "media_io_kwargs"),
    ],
)
def test_refused_fields_are_named(server, small_world, change, status, named):
    change = dict(change)
    body = asking(change.pop("video", small_world.videos[0].path)) | change
    extra = body.pop("extra_body")
    with server.http() as http:
        reply = http.post("/v1/chat/completions", json=extra | body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, named), error
