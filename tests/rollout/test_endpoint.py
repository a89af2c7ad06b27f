"""A real HTTP server on this machine as the sampler: what it is asked, what becomes of its replies, and how it can fail."""

from __future__ import annotations

import base64
import io
import json
import re
import threading
from typing import Any

import numpy as np
import pytest
from PIL import Image

from models.features import FrameSettings
from paravt_jax import tokenizer, video
from paravt_jax.protocol import Protocol, ProtocolSettings, render_call
from paravt_jax.records import CallStatus, CropCall, StopReason
from paravt_jax.rewards import Rewards
from paravt_jax.tokenizer import Vocabulary
from rollout.endpoint import EndpointError, EndpointSampler, EndpointSettings, FrameImages, messages
from rollout.episode import Dispatch, Scene, Setting, play
from rollout.requests import Request, SampleStop, Sampling, run
from rollout.transcript import transcript
from tests.paravt_jax.judge_server import Reply, serving

PLAN = "look\n</think>\n" + render_call(CropCall(0, 16)) + "\n" + render_call(CropCall(96, 112))
ANSWER = "so\n</think>\n<answer>seven</answer>"


def says(text, finish="stop", **fields) -> Reply:
    return Reply(json.dumps({"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish, **fields}]}).encode())


def course(number, received) -> Reply:
    """Plans, reports and answers, as an episode goes."""
    chat = received.body["messages"]
    if chat[0]["role"] != "system":
        return says("seven from 2 to 4")
    return says(ANSWER if any("<tool_response>" in str(message["content"]) for message in chat) else PLAN)


@pytest.fixture(scope="module")
def images(small_model, small_world) -> FrameImages:
    return FrameImages(small_model.config, FrameSettings(), small_world.folder)


@pytest.fixture
def scene(small_vocabulary, images) -> Scene:
    return Scene(Protocol(small_vocabulary, ProtocolSettings(turn_tokens=256, summary_tokens=32, trajectory_tokens=1024)), images)


@pytest.fixture
def ask(scene, small_vocabulary, images, small_questions):
    """ask(answer, ...) plays an episode against a server that replies with `answer`; it gives the episode and the server."""

    def start(answer, dispatch: Dispatch = "parallel", **fields: Any):
        chosen: dict[str, Any] = {"wait": 0.01} | fields
        with serving(answer) as server:
            sampler = EndpointSampler(EndpointSettings(server.endpoint, "m", **chosen), small_vocabulary, images)
            try:
                (episode,) = run(sampler, [play(scene, small_questions[0], Setting(4, 0.7, dispatch), seed=2**40 + 5)])
            finally:
                sampler.close()
        return episode, server

    return start


def pictures(message) -> list[np.ndarray]:
    found = [part["image_url"]["url"] for part in message["content"] if part["type"] == "image_url"]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition("base64,")[2])))) for uri in found]


def test_an_episode_goes_its_way(ask, small_world, small_questions, small_vocabulary):
    episode, server = ask(course)
    assert (episode.stop, episode.answer) == (StopReason.ANSWERED, "seven") and len(episode.turns) == 2
    assert [o.status for o in episode.turns[0].calls] == [CallStatus.EXECUTED] * 2
    assert [o.response for o in episode.turns[0].calls] == ["seven from 2 to 4"] * 2
    assert len(server.received) == 4 and server.received[0].path == "/v1/chat/completions"
    first = server.received[0].body
    assert [m["role"] for m in first["messages"]] == ["system", "user", "assistant"] and first["messages"][-1]["content"] == "<think>\n"
    assert first["continue_final_message"] is True and first["add_generation_prompt"] is False
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("m", 0.7, 256) and 0 <= first["seed"] < 2**31
    shown = pictures(first["messages"][1])
    indices = [frame.index for frame in episode.trajectory.frames]
    np.testing.assert_array_equal(shown, video.read(small_world.folder / small_questions[0].video, indices))  # 32 x 32: not resized
    report = next(r.body for r in server.received if r.body["messages"][0]["role"] == "user")
    assert len(report["messages"]) == 1 and "continue_final_message" not in report and len(pictures(report["messages"][0])) == 8
    line = transcript(episode, Rewards(0, 0, 0, 0, 0, True), Setting(4, 0.7), small_vocabulary)
    assert json.dumps(line, allow_nan=False)  # log-probs that nobody knows are null


def test_rendered_by_the_published_template_messages_are_the_request(assets, images, small_questions):
    render = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    template = (assets / "qwen3_vl" / "chat_template.jinja").read_text()
    vocabulary: Vocabulary = tokenizer.load(assets / "qwen3_vl")
    protocol = Protocol(vocabulary, ProtocolSettings())
    name = small_questions[0].video
    frames = images.overview(name, 3)
    prompt, question = protocol.overview(frames, images.tokens(name)), protocol.question(small_questions[0])
    turn = [vocabulary.encode(f"<think>\n{PLAN}<|im_end|>"), protocol.tool_results(["a", "b"], True, True).ids]
    for said in ([], [protocol.pinned.ids], turn, [*turn, protocol.pinned.ids]):
        ids = np.concatenate([prompt.ids, question.ids, *said])
        chat = messages(Request(ids, frames, Sampling(4), (0,)), vocabulary, images)
        begun = bool(chat[-1]["content"])
        given = {"continue_final_message": begun, "add_generation_prompt": not begun}
        (text,), *_ = render(conversations=[chat if begun else chat[:-1]], chat_template=template, **given)
        wanted = re.sub("(<[|]image_pad[|]>)+", "<|image_pad|>", vocabulary.decode(ids))
        assert text.rstrip("\n") == wanted.rstrip("\n")


def test_sequential_dispatch_stops_at_the_first_call(ask):
    def answer(number, received) -> Reply:
        if received.body["messages"][0]["role"] == "system" and "stop" in received.body and number == 0:
            assert received.body["stop"] == ["</tool_call>"] and received.body["include_stop_str_in_output"] is True
            return says(PLAN.partition("</tool_call>")[0], stop_reason="</tool_call>")  # a server that leaves the string out
        return course(number, received)

    episode, _ = ask(answer, "sequential")
    assert [[call.status for call in turn.calls] for turn in episode.turns] == [[CallStatus.EXECUTED], []] and episode.answer == "seven"


def test_a_reply_that_was_cut_off(ask):
    episode, _ = ask(lambda number, received: says("thinking and thinking", finish="length"))
    assert episode.stop is StopReason.TRUNCATED and episode.turns[0].truncated


def test_a_server_that_fails_for_a_while_is_asked_again(ask):
    def answer(number, received) -> Reply:
        return Reply(status=503) if number == 0 else Reply(close=True) if number == 1 else course(number, received)

    episode, server = ask(answer)
    assert episode.answer == "seven" and len(server.received) == 6


@pytest.mark.parametrize(
    ("reply", "message", "asked"),
    [
        (Reply(status=401), "status 401; check the key in OPENAI_API_KEY", 1),
        (Reply(status=404), "status 404; check --endpoint", 1),
        (Reply(status=400), "status 400; .*max-model-len", 1),
        (Reply(status=500), "status 500; look into the log", 3),
        (Reply(close=True), "the connection failed", 3),
        (Reply(b"hello"), "the reply has no text", 1),
        (says(None, finish="tool_calls"), "finish_reason 'tool_calls'.*without a parser", 1),
    ],
)
def test_a_server_that_cannot_be_used_ends_the_run_in_one_line(ask, reply, message, asked):
    requests = []

    def answer(number, received) -> Reply:
        requests.append(number)
        return reply

    with pytest.raises(EndpointError, match=message) as error:
        ask(answer, attempts=3)
    assert len(requests) == asked and "\n" not in str(error.value)


def test_a_deadline_is_kept(images, small_vocabulary):
    with serving(lambda number, received: Reply(status=503)) as server:
        sampler = EndpointSampler(EndpointSettings(server.endpoint, "m", wait=0.05, attempts=1000), small_vocabulary, images)
        ids = small_vocabulary.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
        ticket = sampler.submit(Request(ids, (), Sampling(4, deadline=0.3), (0,)))
        ((answered, (sample,)),) = sampler.step()
        sampler.close()
    assert answered == ticket and sample.stop is SampleStop.DEADLINE and not sample.ids.size


def test_requests_go_side_by_side_up_to_the_limit(images, small_vocabulary):
    three = threading.Barrier(3)

    def answer(number, received) -> Reply:
        if number < 3:
            three.wait(60)  # none is answered before three are asked; a fourth would come before they are
        return Reply(**{**says("x").__dict__, "delay": 0.2})

    with serving(answer) as server:
        sampler = EndpointSampler(EndpointSettings(server.endpoint, "m", concurrency=3), small_vocabulary, images)
        ids = small_vocabulary.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
        tickets = [sampler.submit(Request(ids, (), Sampling(4), (0,))) for _ in range(5)]
        sampler.cancel(tickets.pop())
        answered = []
        while len(answered) < 4:
            answered += [ticket for ticket, _ in sampler.step()]
        sampler.close()
    assert sorted(answered) == tickets and server.most == 3


def test_the_key_goes_with_the_request(ask, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-1")
    _, server = ask(course)
    assert {r.headers["Authorization"] for r in server.received} == {"Bearer secret-1"}


@pytest.mark.parametrize("address", ["localhost:8000", "http://localhost:8000/v1/chat/completions"])
def test_addresses_that_are_none(address):
    with pytest.raises(ValueError, match="--endpoint: .* an address such as"):
        EndpointSettings(address, "m")


@pytest.mark.parametrize("address", ["http://user:sk-17@host/v1", "http://host/v1?api_key=sk-17"])
def test_an_address_with_a_secret_is_no_endpoint(address):
    with pytest.raises(ValueError, match="--endpoint: .*OPENAI_API_KEY") as error:
        EndpointSettings(address, "m")
    assert "sk-17" not in str(error.value)
