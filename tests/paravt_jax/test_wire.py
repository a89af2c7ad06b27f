"""Messages between processes: every value comes back equal, and no message runs foreign code."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import pickle
import signal

import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paravt_jax import wire
from paravt_jax.data.frames import ReadTask, VideoError, VideoInfo
from paravt_jax.data.sizes import PixelRules
from paravt_jax.data.video_index import Run
from paravt_jax.method.records import Author, QuestionKind, Segment, Trajectory
from train.durable.interrupts import Stopped

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters())
    | st.binary()
)
HASHABLE = st.recursive(LEAVES, lambda inner: st.tuples(inner, inner), max_leaves=4)
VALUES = st.recursive(
    HASHABLE,
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(HASHABLE, inner),
)


@given(VALUES)
@settings(max_examples=50)
def test_a_nested_value_comes_back_equal_and_of_the_same_types(value):
    assert repr(wire.loads(wire.dumps(value))) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        QuestionKind.MULTIPLE_CHOICE,
        Author.MODEL,
        Run(1, [2, 3], 4),
        ReadTask("a.mp4", (1, 2), PixelRules()),
        pathlib.Path("a/b"),
        slice(1, None, 2),
        "half of a pair: \ud800",
        frozenset({1}),
        {"a", ("b", 1)},
    ],
)
def test_own_classes_come_back_as_they_were(value):
    back = wire.loads(wire.dumps(value))
    assert type(back) is type(value)
    assert back == value


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "bfloat16", "<U3", ">i4"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_arrays_come_back_writable_with_type_and_shape(dtype, shape):
    array = np.ones(shape, jnp.bfloat16 if dtype == "bfloat16" else dtype)
    back = wire.loads(wire.dumps({"array": array.T}))["array"]
    assert back.dtype == array.dtype
    assert back.shape == array.T.shape
    assert (back == array.T).all()
    assert back.flags.writeable


def test_scalars_of_numpy_keep_their_type():
    back = wire.loads(wire.dumps(np.float32(0.1)))
    assert type(back) is np.float32
    assert back == np.float32(0.1)


def test_an_error_of_this_project_keeps_its_arguments():
    back = wire.loads(wire.dumps(VideoError("a.mp4", "no such file")))
    assert isinstance(back, VideoError)
    assert (back.path, back.reason) == ("a.mp4", "no such file")
    stopped = wire.loads(wire.dumps(Stopped(signal.SIGTERM, "kept")))
    assert stopped.code == Stopped(signal.SIGTERM, "kept").code
    missing = wire.loads(wire.dumps(FileNotFoundError(2, "no such file", "a")))
    assert isinstance(missing, FileNotFoundError)
    assert missing.filename == "a"


def test_a_trajectory_comes_back_with_its_segments():
    segment = Segment(np.array([1, 2], np.int32), Author.PROMPT)
    back = wire.loads(wire.dumps(Trajectory((segment,))))
    assert isinstance(back, Trajectory)
    assert back.ids.tolist() == [1, 2]


def test_an_error_of_another_package_comes_back_as_text():
    for error in (pickle.PicklingError("broken"), OSError(object())):
        back = wire.loads(wire.dumps(error))
        assert isinstance(back, RuntimeError)
        assert str(back) == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    "value",
    [
        print,
        object(),
        os,
        np.array([print]),
        np.zeros(2, "i4,f4"),
        np.ma.masked_array([1, 2], [True, False]),
        [{1: object()}],
    ],
)
def test_other_values_are_refused(value):
    with pytest.raises(wire.WireError, match="cannot be sent: a"):
        wire.dumps(value)


def test_a_value_that_contains_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(wire.WireError):
        wire.dumps(value)


def forged(code: int, *content: object) -> bytes:
    """A message whose body is one ext type."""
    body = msgpack.packb(msgpack.ExtType(code, msgpack.packb(content)))
    assert body is not None
    sizes = msgpack.packb([len(body)])
    assert sizes is not None
    return len(sizes).to_bytes(4, "little") + sizes + body


def test_a_forged_message_can_be_read():
    assert wire.loads(forged(9, "builtins", "KeyError", ["a"])).args == ("a",)


@pytest.mark.parametrize(
    "message",
    [
        pickle.dumps({"a": 1}),
        b"",
        wire.dumps([1, 2])[:-1],
        forged(7, "os", "system", {"command": "true"}),
        forged(7, "subprocess", "Popen", {"args": "true"}),
        forged(7, "paravt_jax.data.workers", "os.system", {"command": "true"}),
        forged(7, "paravt_jax.data.workers", "Workers", {"function": "print"}),
        forged(7, "builtins", "eval", {"source": "1"}),
        forged(9, "builtins", "eval", ["1"]),
        forged(9, "builtins", "dict", [[]]),
        forged(9, "builtins", "SystemExit", [1]),
        forged(9, "paravt_jax.data.workers", "subprocess.CalledProcessError", [1, "x"]),
        forged(9, "paravt_jax.data.archives", "tarfile.ReadError", ["x"]),
        forged(8, "paravt_jax.data.workers", "signal.Signals", 9),
        forged(8, "paravt_jax.data.frames", "VideoError", 1),
    ],
)
def test_a_message_cannot_name_anything_else(message):
    with pytest.raises(wire.WireError):
        wire.loads(message)


def test_the_checks_of_a_class_run_when_it_is_built():
    info = VideoInfo("a", 1, 1.0, np.zeros(1), 2, 2)
    assert dataclasses.asdict(wire.loads(wire.dumps(info)))["frames"] == 1
    fields = dataclasses.asdict(info) | {"times": [0.0], "__dict__": {}}
    with pytest.raises(wire.WireError, match="__dict__"):
        wire.loads(forged(7, "paravt_jax.data.frames", "VideoInfo", fields))
    with pytest.raises(wire.WireError, match="frames"):
        wire.loads(forged(7, "paravt_jax.data.frames", "VideoInfo", {"path": "a"}))
