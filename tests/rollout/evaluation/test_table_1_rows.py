"""Open rows of table 1, each by its one command, on stand-ins.

Weights are small random models of each row's family, and the release's texts are made up. What the
server says was written for these tests: no published model wrote it.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from models.family import family
from models.weights.hf import save
from paravt_extras.release import read_release
from paravt_jax.method.protocol import render_call
from paravt_jax.method.records import CropCall
from paravt_jax.method.wording import Prompt
from paravt_jax.world.vocabulary import save_tokenizer
from rollout import evaluate as command
from rollout.evaluation.folder import read_json
from rollout.evaluation.pack_folder import write_pack
from rollout.evaluation.table_1 import TABLE_1
from tests.cut_tokenizer import cut_tokenizer
from tests.noisy_model import noisy_model
from tests.paravt_jax.benchmarks import published
from tests.paravt_jax.judge_server import Received, Reply, serving
from tests.rollout.evaluation.release_stand_in import write_release

ROOT = pathlib.Path(__file__).parents[3]
THINK = "<think>It may be on the table.</think>"


@dataclasses.dataclass(frozen=True)
class Baseline:
    """What evaluates an open row of table 1 here."""

    weights: str
    """Hub id, as the release's evaluator names it."""
    family: str
    """The `model_type` of its config.json."""
    prompt: Prompt | None = None
    """What `--prompt` has to be; None: what the protocol chooses for each split."""
    pack: str = ""
    """Name of a pack with the wording of the model, if the release leaves it to its users."""

    def arguments(self, release: str, packs: str) -> list[str]:
        """The arguments of `rollout.evaluate` in which the row differs from others.

        Args:
            release: the checkout of the release.
            packs: the folder of packs with the models' own wordings.
        """
        if self.pack:
            return ["--model", self.weights, "--protocol", f"{packs}/{self.pack}"]
        prompt = ["--prompt", self.prompt] if self.prompt else []
        return ["--model", self.weights, "--protocol", "published", "--release", release, *prompt]


BASELINES = {
    "Qwen2.5-VL-7B": Baseline("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2_5_vl", "direct"),
    "Video-R1-7B": Baseline("Video-R1/Video-R1-7B", "qwen2_5_vl", "reasoning"),
    "VideoChat-R1-7B": Baseline("OpenGVLab/VideoChat-R1_7B", "qwen2_5_vl", "reasoning"),
    "VideoRFT-7B": Baseline("QiWang98/VideoRFT", "qwen2_5_vl", "reasoning"),
    "Time-R1-7B": Baseline("Boshenxx/Time-R1-7B", "qwen2_5_vl", "reasoning"),
    "ReWatch-R1-7B": Baseline("zcccccz/ReWatch-R1", "qwen2_5_vl", "reasoning"),
    "Video-Thinker-7B": Baseline("ShijianW01/Video-Thinker-7B", "qwen2_5_vl", "reasoning"),
    "Qwen3-VL-8B": Baseline("Qwen/Qwen3-VL-8B-Instruct", "qwen3_vl", "agentic"),
    "Conan-7B": Baseline("RUBBISHLIKE/Conan-7B", "qwen2_5_vl", "agentic"),
    "LongVT-RFT-7B": Baseline("longvideotool/LongVT-RFT", "qwen2_5_vl", pack="longvt"),
    "ParaVT-8B": Baseline("ParaVT/ParaVT-8B", "qwen3_vl"),
}
"""The open rows of table 1 by name. Families follow from the models' base models."""

# Two windows are called.
CALLS = f"{THINK}{render_call(CropCall(2, 10))}{render_call(CropCall(20, 24))}"
ANSWER = f"{THINK}<answer>A</answer>"


@pytest.fixture(scope="module")
def older(small_vocabulary, tmp_path_factory) -> pathlib.Path:
    """A small Qwen2.5-VL with its tokenizer, in which `<think>` is ordinary text."""
    folder = tmp_path_factory.mktemp("older")
    save_tokenizer(small_vocabulary.tokenizer, folder / "tokenizer")
    cut = cut_tokenizer(folder / "tokenizer")
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(cut))
    config = family("qwen2_5_vl").size("tiny", small_vocabulary.size)
    names = {"image": "image_pad", "video": "video_pad"}
    names |= {name: name for name in ("vision_start", "vision_end")}
    ids = {f"{field}_token_id": small_vocabulary[f"<|{name}|>"] for field, name in names.items()}
    model = noisy_model(dataclasses.replace(config, **ids))
    save(model, folder / "model", files=sorted((folder / "tokenizer").iterdir()))
    return folder / "model"


@pytest.fixture
def workspace(checkpoint, older, tmp_path, monkeypatch) -> pathlib.Path:
    """A working directory in which the rows' commands find weights, release and packs."""
    folders = {"qwen3_vl": checkpoint, "qwen2_5_vl": older}
    for row in BASELINES.values():
        place = tmp_path / row.weights
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(folders[row.family])
    write_release(tmp_path / "release")
    (tmp_path / "packs").mkdir()
    write_pack(read_release(tmp_path / "release"), tmp_path / "packs/longvt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def play(workspace, split, videos, tmp_path):
    """play(arguments) plays the first question; returns its line of results."""

    def run(*arguments: str, data=split) -> dict:
        argv = ["--benchmark", "videomme"] if "--benchmark" not in arguments else []
        argv += ["--data", str(data), "--videos", str(videos), "--limit", "1", "--out", "out"]
        assert command.main([*argv, *arguments]) == 0
        return json.loads((tmp_path / "out" / "questions.jsonl").read_text())

    return run


@pytest.fixture
def serve(play):
    """serve(said, arguments) plays against a server that says one response after the other; returns
    the line of results and the server's requests."""

    def run(said: list[str], *arguments: str, **fields) -> tuple[dict, list[Received]]:
        def reply(number: int, received: Received) -> Reply:
            choice = {"message": {"content": said[number]}, "finish_reason": "stop"}
            return Reply(json.dumps({"choices": [choice]}).encode())

        with serving(reply) as server:
            asked = ("--endpoint", server.endpoint, "--endpoint-model", "m", *arguments)
            line = play(*asked, **fields)
        return line, server.received

    return run


def shown(message) -> tuple[str, int]:
    """The text and the number of pictures of a message."""
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    text = "".join(part.get("text", "") for part in parts)
    return text, sum(part["type"] == "image_url" for part in parts)


def brought_back(received: list[Received], said: list[str]) -> list[tuple[str, int]]:
    """The messages that answered the model's calls. The model sees its own words unchanged."""
    _, _, *chat = received[-1].body["messages"]  # after the system turn and the question
    assert [message["content"] for message in chat if message["role"] == "assistant"] == said[:-1]
    return [shown(message) for message in chat if message["role"] == "user"]


# --- the rows ---


def test_the_rows_are_the_open_ones_of_table_1():
    rows = {model.name for model in TABLE_1 if model.group != "proprietary"}
    assert rows - set(BASELINES) == {"SAGE-7B", "VideoZoomer-7B"}
    assert len(rows) == 13


def test_the_page_has_the_weights_and_flags_of_every_row():
    page = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8")
    _, _, table = page.partition("| row | `--model` | protocol |")
    table, _, _ = table.partition("\n\n")
    rows = [[cell.strip(" `") for cell in line.split("|")] for line in table.splitlines()[2:]]
    written = {name: [weights, flags] for _, name, weights, flags, *_ in rows}
    for name, row in BASELINES.items():
        flags = row.arguments("ParaVT", "packs")[2:]
        assert written[name] == [row.weights, " ".join(flags)]
    assert written.keys() == BASELINES.keys()


# The first of those that differ in more than the weights.
DIFFERENT = {(row.family, row.prompt, row.pack): name for name, row in [*BASELINES.items()][::-1]}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(DIFFERENT.values()))
def test_a_row_is_played_by_its_command_on_a_server(serve, name):
    row = BASELINES[name]
    calls = row.prompt in ("agentic", None)
    said = [CALLS, ANSWER] if calls else [ANSWER]
    line, received = serve(said, *row.arguments("release", "packs"))
    assert line["score"] == 1.0
    assert line["calls"] == (2 if calls else 0)
    assert shown(received[0].body["messages"][1])[1] == 64
    assert len(brought_back(received, said)) == 2 * (len(said) - 1)


@pytest.mark.slow
def test_a_row_of_an_older_family_is_played_by_the_engine(play, workspace):
    """With few and small frames; `test_pack_runs` plays published ones with the newer family."""
    file = workspace / "packs/longvt/pack.toml"
    about = file.read_text()
    for line, small in (
        ("frames = 64", "frames = 4"),
        ("min_pixels = 100352", "min_pixels = 784"),
        ("max_pixels = 602112", "max_pixels = 50176"),
    ):
        assert f"\n{line}\n" in about
        about = about.replace(f"\n{line}\n", f"\n{small}\n")
    file.write_text(about)
    row = BASELINES["LongVT-RFT-7B"].arguments("release", "packs")
    line = play(*row, "--episodes", "1")
    assert len(line["turns"]) >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "prompt"), [("Qwen3-VL-8B", "You cut videos."), ("ParaVT-8B", "# Cut")]
)
def test_grounding_has_the_prompt_of_its_row(serve, name, prompt, tmp_path):
    data = published.write_split("charades", tmp_path / "rows", [published.charades("w0.mp4")])
    row = BASELINES[name].arguments("release", "packs")
    said = [CALLS, "The event happens in the 24.3 - 30.4 seconds."]
    line, received = serve(said, "--benchmark", "charades", *row, data=data)
    system, asked, *_ = received[0].body["messages"]
    assert system["content"].startswith(prompt)
    assert [part["type"] for part in asked["content"]] == ["video_url", "text"]
    assert (line["score"], line["calls"]) == (1.0, 2)


@pytest.mark.slow
def test_grounding_with_an_older_family_shows_images(serve, tmp_path):
    data = published.write_split("charades", tmp_path / "rows", [published.charades("w0.mp4")])
    row = BASELINES["Time-R1-7B"].arguments("release", "packs")
    asked = ("--benchmark", "charades", "--no-native-video", *row)
    line, received = serve([f"{THINK}<answer>24.3 to 30.4</answer>"], *asked, data=data)
    assert line["score"] == 1.0
    assert shown(received[0].body["messages"][1])[1] == 64
    config = read_json(tmp_path / "out" / "config.json")
    assert config["identity"]["native_video"] is False


def test_a_native_video_for_an_older_family_is_refused_before_there_is_a_folder(
    workspace, split, videos, tmp_path, capfd
):
    data = published.write_split("charades", tmp_path / "rows", [published.charades("w0.mp4")])
    row = BASELINES["Time-R1-7B"].arguments("release", "packs")
    argv = ["--benchmark", "charades", "--data", str(data), "--videos", str(videos), *row]
    assert command.main([*argv, "--out", "out"]) == 2
    assert "give --no-native-video, so that frames are shown as images" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
