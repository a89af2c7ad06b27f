"""Writes an episode in version 1.7 of ATIF, the Agent Trajectory Interchange Format of Harbor.

Sub-agents are embedded. Steps have the token ids and log-probs that were sampled, where the record
of the episode has them.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any

from paravt_jax.method.parsing import first_think
from paravt_jax.method.protocol import question_text
from paravt_jax.method.records import CropCall, Question, QuestionKind
from paravt_jax.method.wording import SUBAGENT

Record = dict[str, Any]

_OUTCOME = ("answer", "stop", "rewards", "compliant")
_SETTING = ("phase", "step", "k", "dispatch", "temperature", "video")


def trajectory(record: Record, key: str) -> Record:
    """Return an episode as an ATIF document.

    Args:
        record: A line of episodes.jsonl, or of an evaluation's questions.jsonl.
        key: Identifies the episode. It begins the ids of its sub-agents' trajectories.
    """
    asked = record["question"]
    kind, options = QuestionKind(asked["kind"]), tuple(asked["options"])
    question = Question(asked["id"], record["video"], asked["text"], kind, "", options)
    frames = {"frame_times": record["overview"]}
    steps = [{"source": "user", "message": question_text(question).strip(), "extra": frames}]
    reports = []
    for number, turn in enumerate(record["turns"], 1):
        calls = {f"{key}/{number}.{n}": call for n, call in enumerate(turn["calls"], 1)}
        steps.append(_step(turn, calls))
        reports += [_report(id, call) for id, call in calls.items() if call["times"]]
    known = {name: record[name] for name in (*_SETTING, *_OUTCOME) if name in record}
    extra = {"question": asked, **known}
    return _document(key, "main", steps) | _present(
        {"session_id": key, "extra": extra, "subagent_trajectories": reports}
    )


def _step(turn: Record, calls: dict[str, Record]) -> Record:
    """Return a turn of the main agent, with its calls by id."""
    text = turn.get("text") or "".join(token["text"] for token in turn["tokens"])
    thought, rest = first_think(text)
    results = [
        {
            "source_call_id": id,
            "content": call["response"],
            "subagent_trajectory_ref": [{"trajectory_id": id}] if call["times"] else [],
            "extra": {"status": call["status"]},
        }
        for id, call in calls.items()
    ]
    sampled = [token for token in turn["tokens"] if token["author"] == "model"]
    fields = {
        "reasoning_content": thought if "<think>" in text else None,
        "tool_calls": [_tool_call(id, call) for id, call in calls.items()],
        "observation": {"results": results} if results else None,
    }
    return _agent_step(
        ((rest or "") if "<think>" in text else text).strip(),
        [token.get("id") for token in sampled],
        [token["logprob"] for token in sampled],
    ) | _present(fields)


def _tool_call(id: str, call: Record) -> Record:
    """Return a call. One that could not be read has no name and no arguments."""
    name, arguments = call.get("tool", "unreadable"), call.get("arguments", {})
    if call["start"] is not None:
        name = CropCall.tool
        arguments = {"start_time": call["start"], "end_time": call["end"]}
    return {"tool_call_id": id, "function_name": name, "arguments": arguments}


def _report(id: str, call: Record) -> Record:
    """Return the trajectory of a call's sub-agent."""
    report = call.get("report") or {"ids": [None], "logprobs": [None]}
    frames = {"frame_times": call["times"]}
    task = {"source": "user", "message": SUBAGENT.strip(), "extra": frames}
    step = _agent_step(call["response"], report["ids"], report["logprobs"])
    return _document(id, "sub-agent", [task, step])


def _agent_step(text: str, ids: Sequence[int | None], logprobs: Sequence[float | None]) -> Record:
    metrics: Record = {}
    if None not in ids:
        metrics = {"completion_tokens": len(ids), "completion_token_ids": ids}
    if None not in logprobs:
        metrics["logprobs"] = logprobs
    return {"source": "agent", "message": text, "llm_call_count": 1, "metrics": metrics}


def _document(id: str, agent: str, steps: list[Record]) -> Record:
    version = importlib.metadata.version("paravt-jax")
    return {
        "schema_version": "ATIF-v1.7",
        "trajectory_id": id,
        "agent": {"name": f"paravt-jax {agent}", "version": version},
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
    }


def _present(fields: Record) -> Record:
    """Leave out fields without content."""
    return {name: value for name, value in fields.items() if value}
