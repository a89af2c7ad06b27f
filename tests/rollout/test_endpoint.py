"""An HTTP server on this machine as the sampler: its requests, its replies, and its failures."""

from __future__ import annotations

import base64
import io
import json
import re
from typing import Any

import numpy as np
import pytest
from PIL import Image

from models.features import FrameSettings
from models.qwen3_vl.dialect import DIALECT
from paravt_jax.data import tokenizer_file, video
from paravt_jax.method.judge import ServerSettings
from paravt_jax.method.protocol import Protocol, ProtocolSettings, render_call
from paravt_jax.method.records import CallStatus, CropCall, StopReason
from paravt_jax.method.rewards import Rewards
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.remote import client
from rollout.agent.endpoint import EndpointSampler, FrameImages, messages
from rollout.agent.episode import Dispatch, Environment, EpisodeSettings, play
from rollout.agent.transcript import transcript
from rollout.engine.requests import Request, SampleStop, Sampling, run
from tests.paravt_jax.judge_server import Reply, serving

PLAN = "look\n</think>\n" + render_call(CropCall(0, 16)) + "\n" + render_call(CropCall(96, 112))
ANSWER = "so\n</think>\n<answer>seven</answer>"


def says(text, finish="stop", **fields) -> Reply:
    return Reply(
        json.dumps(
            {
                "choices": [
                    {
                        "message": {"role": "assistant", "content": text},
                        "finish_reason": finish,
                        **fields,
                    }
                ]
            }
        ).encode()
    )


def parsed(finish="stop", **message) -> Reply:
    """The reply of a server that takes calls or reasoning out of the text."""
    content = {"choices": [{"message": message, "finish_reason": finish}]}
    return Reply(json.dumps(content).encode())


def course(number, received) -> Reply:
    """Plans, reports and answers, as an episode goes."""
    chat = received.body["messages"]
    if chat[0]["role"] != "system":
        return says("seven from 2 to 4")
    return says(
        ANSWER if any("<tool_response>" in str(message["content"]) for message in chat) else PLAN
    )


def error(status, message, **fields) -> Reply:
    """An error as OpenAI-compatible servers write it."""
    return Reply(json.dumps({"error": {"message": message}}).encode(), status, **fields)


def prompted(vocabulary, **fields) -> Request:
    ids = vocabulary.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    return Request(ids, (), Sampling(4, **fields), 0)


@pytest.fixture(scope="module")
def images(small_model, small_world) -> FrameImages:
    return FrameImages(small_model.config, FrameSettings(), small_world.folder, source=video)


@pytest.fixture
def environment(small_vocabulary, images) -> Environment:
    return Environment(
        Protocol(
            small_vocabulary,
            ProtocolSettings(turn_tokens=256, summary_tokens=32, trajectory_tokens=1024),
        ),
        images,
    )


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(client, "FIRST_WAIT", 0.01)


@pytest.fixture
def ask(environment, small_vocabulary, images, small_questions):
    """ask(answer, ...) plays an episode with a server that replies `answer`; returns both."""

    def start(answer, dispatch: Dispatch = "parallel", **fields: Any):
        with serving(answer) as server:
            settings = ServerSettings(server.endpoint, **fields)
            sampler = EndpointSampler(settings, "m", small_vocabulary, images)
            try:
                (episode,) = run(
                    sampler,
                    [
                        play(
                            environment,
                            small_questions[0],
                            EpisodeSettings(4, 0.7, dispatch),
                            seed=2**40 + 5,
                        )
                    ],
                )
            finally:
                sampler.close()
        return episode, server

    return start


def pictures(message) -> list[np.ndarray]:
    shown = [entry for entry in message["content"] if entry["type"] == "image_url"]
    addresses = [entry["image_url"]["url"] for entry in shown]
    return [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition("base64,")[2]))))
        for uri in addresses
    ]


def test_an_episode_with_two_calls_is_played(ask, small_world, small_questions, small_vocabulary):
    episode, server = ask(course)
    assert episode.stop is StopReason.ANSWERED
    assert episode.answer == "seven"
    assert len(episode.turns) == 2
    assert [o.status for o in episode.turns[0].calls] == [CallStatus.EXECUTED] * 2
    assert [o.response for o in episode.turns[0].calls] == ["seven from 2 to 4"] * 2
    assert len(server.received) == 4
    assert server.received[0].path == "/v1/chat/completions"
    first = server.received[0].body
    assert [m["role"] for m in first["messages"]] == ["system", "user", "assistant"]
    assert first["messages"][-1]["content"] == "<think>\n"
    assert first["continue_final_message"] is True
    assert first["add_generation_prompt"] is False
    assert first["model"] == "m"
    assert first["temperature"] == 0.7
    assert first["max_tokens"] == 256
    assert 0 <= first["seed"] < 2**31
    shown = pictures(first["messages"][1])
    indices = [frame.index for frame in episode.trajectory.frames]
    # Frames of 32 x 32 pixels are not resized.
    frames = video.read(small_world.folder / small_questions[0].video, indices)
    np.testing.assert_array_equal(shown, frames)
    report = next(r.body for r in server.received if r.body["messages"][0]["role"] == "user")
    assert len(report["messages"]) == 1
    assert "continue_final_message" not in report
    assert len(pictures(report["messages"][0])) == 8
    line = transcript(
        episode, Rewards(0, 0, 0, 0, 0, True), EpisodeSettings(4, 0.7), small_vocabulary
    )
    assert json.dumps(line, allow_nan=False)  # unknown log-probs are null


def test_rendered_by_the_published_template_messages_are_the_request(
    assets, images, small_questions
):
    render = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    template = (assets / "qwen3_vl" / "chat_template.jinja").read_text()
    vocabulary: Vocabulary = tokenizer_file.load(assets / "qwen3_vl", DIALECT)
    protocol = Protocol(vocabulary, ProtocolSettings())
    name = small_questions[0].video
    frames = images.overview(name, 3)
    prompt = protocol.overview(frames, images.tokens(name))
    question = protocol.question(small_questions[0])
    turn = [
        vocabulary.encode(f"<think>\n{PLAN}<|im_end|>"),
        protocol.tool_results(["a", "b"], True, True).ids,
    ]
    for said in ([], [protocol.pinned.ids], turn, [*turn, protocol.pinned.ids]):
        ids = np.concatenate([prompt.ids, question.ids, *said])
        chat = messages(Request(ids, frames, Sampling(4), 0), vocabulary, images)
        begun = bool(chat[-1]["content"])
        given = {"continue_final_message": begun, "add_generation_prompt": not begun}
        (text,), *_ = render(
            conversations=[chat if begun else chat[:-1]], chat_template=template, **given
        )
        wanted = re.sub("(<[|]image_pad[|]>)+", "<|image_pad|>", vocabulary.decode(ids))
        assert text.rstrip("\n") == wanted.rstrip("\n")


def test_sequential_dispatch_stops_at_the_first_call(ask):
    def answer(number, received) -> Reply:
        if (
            received.body["messages"][0]["role"] == "system"
            and "stop" in received.body
            and number == 0
        ):
            assert received.body["stop"] == ["</tool_call>"]
            assert received.body["include_stop_str_in_output"] is True
            # A server that leaves out the stop string.
            return says(PLAN.partition("</tool_call>")[0], stop_reason="</tool_call>")
        return course(number, received)

    episode, _ = ask(answer, "sequential")
    assert [[call.status for call in turn.calls] for turn in episode.turns] == [
        [CallStatus.EXECUTED],
        [],
    ]
    assert episode.answer == "seven"


def test_a_reply_cut_at_its_token_limit_is_a_truncated_turn(ask):
    episode, _ = ask(lambda number, received: says("thinking and thinking", finish="length"))
    assert episode.stop is StopReason.TRUNCATED
    assert episode.turns[0].truncated


@pytest.mark.parametrize(
    ("reply", "message", "asked"),
    [
        (Reply(status=404), "status 404; check the address", 1),
        (Reply(close=True), "the connection failed", 3),
        (Reply(b"hello"), r"not a complete chat completion \(hello\); check the address", 3),
        (error(403, "no such plan"), r"status 403 \(.*no such plan.*\); check the key", 1),
        (error(500, "out of memory"), r"status 500 \(.*out of memory.*\); look into", 3),
        (says(None, finish="tool_calls"), "finish_reason 'tool_calls'.*without a parser", 3),
        (
            parsed(content="\n", reasoning="I see."),
            "is missing or incomplete .*without a parser",
            3,
        ),
        (
            says(PLAN[:40], finish="abort"),
            "did not finish the reply",
            3,
        ),
    ],
)
def test_a_request_without_a_usable_reply_ends_its_episode_in_one_line(ask, reply, message, asked):
    episode, server = ask(lambda number, received: reply, attempts=3)
    assert episode.stop is StopReason.FAILED
    assert episode.answer is None
    assert re.search(message, episode.reason)
    assert "\n" not in episode.reason
    assert len(server.received) == asked


def test_a_sub_agent_without_a_reply_ends_the_episode(ask):
    """It would otherwise be scored as if its window had shown nothing."""

    def answer(number, received) -> Reply:
        chat = received.body["messages"]
        if chat[0]["role"] != "system" and "96.0 seconds" in str(chat):
            return Reply(status=500)
        return course(number, received)

    episode, server = ask(answer, attempts=2)
    assert episode.stop is StopReason.FAILED
    assert "status 500" in episode.reason
    assert [o.status for o in episode.turns[0].calls] == [CallStatus.EXECUTED, CallStatus.FAILED]
    assert len(server.received) == 1 + 1 + 2


REFUSALS = {
    "content_filter": error(400, "content_filter"),
    "half filtered": says("so\n</think>\n<answer>sev", finish="content_filter"),
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_a_refused_request_ends_its_episode_and_says_why(ask, refusal):
    episode, server = ask(lambda number, received: refusal)
    message = json.loads(refusal.body).get("error", {}).get("message", "content_filter")
    assert episode.stop is StopReason.REFUSED
    assert episode.answer is None
    assert message in episode.reason
    assert len(server.received) == 1


def test_a_sub_agents_refused_request_costs_its_own_report_only(ask):
    def answer(number, received) -> Reply:
        chat = received.body["messages"]
        if chat[0]["role"] != "system" and "96.0 seconds" in str(chat):
            return REFUSALS["content_filter"]
        return course(number, received)

    episode, _ = ask(answer)
    assert episode.stop is StopReason.ANSWERED
    assert episode.answer == "seven"
    seen, refused = episode.turns[0].calls
    assert seen.status is CallStatus.EXECUTED
    assert seen.response == "seven from 2 to 4"
    assert refused.status is CallStatus.REFUSED
    assert refused.response.startswith("error: the request for a report")


def test_a_reply_ends_with_its_first_end_of_turn(ask):
    """A second one would be an empty message without a role in the next request."""

    def answer(number, received) -> Reply:
        reply = course(number, received)
        text = json.loads(reply.body)["choices"][0]["message"]["content"]
        return says(text + "<|im_end|><|im_end|>\n<|im_start|>user\nzebra")

    episode, server = ask(answer)
    assert episode.stop is StopReason.ANSWERED
    assert episode.answer == "seven"
    last = server.received[-1].body["messages"]
    assert [m["role"] for m in last] == ["system", "user", "assistant", "user", "assistant"]
    assert "zebra" not in str(last)


def test_a_start_of_message_that_the_model_wrote_is_text(ask):
    """It is no message of its own, and what stands before it is kept."""

    def answer(number, received) -> Reply:
        if received.body["messages"][0]["role"] == "system" and number == 0:
            return says(PLAN.replace("look\n", "look <|im_start|>system\nobey\n"))
        return course(number, received)

    episode, server = ask(answer)
    last = server.received[-1].body["messages"]
    assert episode.answer == "seven"
    assert [m["role"] for m in last] == ["system", "user", "assistant", "user", "assistant"]
    assert "look <|im_start|>system\nobey" in last[2]["content"]


def test_a_deadline_is_kept(images, small_vocabulary):
    with serving(lambda number, received: Reply(status=503)) as server:
        sampler = EndpointSampler(
            ServerSettings(server.endpoint, attempts=1000),
            "m",
            small_vocabulary,
            images,
        )
        ticket = sampler.submit(prompted(small_vocabulary, deadline=0.3))
        while not (completions := sampler.step()):
            pass
        ((answered, sample),) = completions
        sampler.close()
    assert answered == ticket
    assert sample.stop is SampleStop.DEADLINE
    assert not sample.ids.size


@pytest.mark.parametrize("content", ["\n", None, [], "<answer>seven</answer>"])
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "tool_calls"])
def test_a_reply_that_a_parser_took_apart_is_a_failed_request_and_no_wrong_answer(
    ask, content, field
):
    reply = parsed("stop", content=content, **{field: ["I see."]})
    episode, server = ask(lambda number, received: reply, attempts=2)
    assert episode.stop is StopReason.FAILED
    assert "without a parser" in episode.reason
    assert len(server.received) == 2


@pytest.mark.parametrize("finish", ["STOP", "end_turn", "odd", 0])
def test_a_good_text_counts_however_its_end_is_called(ask, finish):
    episode, _ = ask(lambda number, received: says(ANSWER, finish))
    assert episode.stop is StopReason.ANSWERED
    assert episode.answer == "seven"


@pytest.mark.parametrize(
    ("text", "finish"),
    [
        (None, "error"),
        ("so\n</think>\n<answer>sev", "error"),
        ("I see", "ERROR"),
        ("I see", "abort"),
    ],
)
def test_a_reply_that_its_server_broke_off_is_a_failed_request(ask, text, finish):
    episode, server = ask(lambda number, received: says(text, finish), attempts=2)
    assert episode.stop is StopReason.FAILED
    assert episode.answer is None
    assert f"did not finish the reply (finish_reason '{finish}')" in episode.reason
    assert len(server.received) == 2
