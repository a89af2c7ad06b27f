"""Folders of finished evaluations, made from given lines."""

from __future__ import annotations

import json

from rollout.evaluation.settings import BenchmarkSettings


def line(id, score, video="v", **fields):
    asked = {"text": "Which?", "options": ["a", "b"], "answer": "B"}
    made = {
        "id": id,
        "columns": {},
        "video": video,
        "score": score,
        "read": "B",
        "unread": False,
        "calls": 1,
        "tool_turns": 1,
        "parallel_turns": 0,
        "turn_count": 2,
        "stop": "answered",
        "compliant": True,
        "spent": 2.0,
        "kind": "mcq",
        "duration": "short",
        "tasks": ["t"],
        "subtitles": None,
        "k": 64,
        "dispatch": "parallel",
        "temperature": 0.0,
        "answer": "B",
        "rewards": {"accuracy": score},
        **fields,
    }
    made["question"] = {"id": id, "kind": made["kind"], **asked, **fields.get("question", {})}
    # In place of a hash.
    return made | {"content": json.dumps([made["video"], made["question"]])}


def left_out(id, video, cause="missing"):
    reason = {"left_out": cause, "reason": "no file"}
    return {"id": id, "content": id, "columns": {}, "video": video, **reason}


def config(benchmark="videomme", **fields):
    settings = json.loads(json.dumps(BenchmarkSettings("m").identity()))
    identity = settings | {"weights": "w0", "questions": "h0", "benchmark": benchmark}
    return {"identity": identity | fields, "commits": ["c0"]}


def folder(path, lines, **fields):
    """The folder of an evaluation."""
    path.mkdir(parents=True)
    contents = [one["content"] for one in lines]
    (path / "config.json").write_text(json.dumps(config(**fields) | {"questions": contents}))
    (path / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path
