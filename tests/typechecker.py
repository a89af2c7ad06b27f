"""The type checker of the test run: beartype, which accepts an int for a float (PEP 484).

Classes with `@no_type_check` are trees of arrays that JAX builds again with other leaves: specs,
shardings, shapes. Their annotations are checked too, but only where this project builds them.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import typing
from collections.abc import Mapping
from typing import Any

import jax
import jaxtyping
import numpy as np
from beartype import BeartypeConf, beartype
from beartype.door import is_bearable

check = beartype(conf=BeartypeConf(is_pep484_tower=True))

PACKAGES = ("paravt_jax", "models", "rollout", "train")
checked_trees: set[str] = set()
"""Names of the classes whose annotations are checked where they are built."""


def check_where_built(cls: type) -> type:
    """Stand in for `typing.no_type_check`: check a tree of arrays unless JAX builds it."""
    typing_no_check(cls)
    if cls.__module__.partition(".")[0] not in PACKAGES:
        return cls
    build = cls.__init__
    checked_trees.add(cls.__name__)

    @functools.wraps(build)
    def init(self: Any, *values: Any, **fields: Any) -> None:
        build(self, *values, **fields)
        if _built_here():
            require_annotated(self)

    cls.__init__ = init  # pyright: ignore[reportAttributeAccessIssue]
    return cls


def _built_here() -> bool:
    """Whether a class of this project is built by this project, `replace` included."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals["__name__"] in ("dataclasses", "flax.struct"):
        frame = frame.f_back
    return frame is not None and "site-packages" not in frame.f_code.co_filename


@functools.cache
def _hints(cls: type) -> Mapping[str, Any]:
    """Return the annotations of the fields of a class, by name."""
    names = vars(sys.modules[cls.__module__])
    return {field.name: eval(str(field.type), dict(names)) for field in dataclasses.fields(cls)}


def require_annotated(tree: Any) -> None:
    """Raise TypeError for a field whose shape, type or sizes are not those of its annotation."""
    if jaxtyping.config.jaxtyping_disable:
        return
    cls = type(tree)
    with jaxtyping.jaxtyped("context"):
        for name, hint in _hints(cls).items():
            value = getattr(tree, name)
            if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(value)):
                continue
            of_numpy = isinstance(value, np.ndarray | np.generic)
            array = jax.numpy.asarray(value) if of_numpy else value
            if not (is_bearable(value, hint) or is_bearable(array, hint)):
                shape = getattr(value, "shape", type(value))
                raise TypeError(f"{cls.__name__}.{name}: {shape} is no {hint}")


typing_no_check = typing.no_type_check
typing.no_type_check = check_where_built
