"""Stores compiled results in a folder, so that an interrupted plan can be resumed.

Each program has a JSON file whose name includes a hash of everything the result depends on: source
code, compiler versions, settings. Programs that timed out or crashed the compiler are not stored.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
from collections.abc import Callable

from paravt_extras.plan.compile import Case, Measured, libtpu_version
from paravt_jax.data.atomic import write_atomically

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("configs", "models", "paravt_extras", "paravt_jax", "rollout", "train")


def cached(
    folder: pathlib.Path, case: Case, compiled: Callable[[Case], Measured]
) -> tuple[Measured, bool]:
    """Returns a case's result from `folder`, or calls `compiled` and stores what it returns.

    Args:
        folder: an existing folder.
        case: the program to look up.
        compiled: compiles a case.

    Returns:
        The result, and whether it came from `folder`.
    """
    key = _key(case)
    slice_name = case.place[0].replace(":", "-")
    program = case.program.replace(" ", "-")
    file = folder / f"{slice_name}-{program}-{key}.json"
    if file.exists():
        fields = json.loads(file.read_text())
        # JSON has turned these tuples into lists.
        tuples = {name: tuple(fields[name]) for name in ("given", "largest")}
        return Measured(**fields | tuples), True
    measured = compiled(case)
    # Running out of memory is a result (it has a peak); a timeout or a crash is not.
    is_result = measured.peak > 0 or not measured.error
    # The key changes if a source file was edited while the program compiled.
    if is_result and _key(case) == key:
        write_atomically(file, json.dumps(dataclasses.asdict(measured), indent=1))
    return measured, False


def _key(case: Case) -> str:
    text = f"{compiler_fingerprint()} {case.program} {case.place} {case.run!r}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compiler_fingerprint() -> str:
    """Compiler versions, compiler environment variables and a digest of this project's sources."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")]
    variables = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(("JAX_", "LIBTPU_")) and name != "JAX_PLATFORMS"
    ]
    return " ".join([*versions, libtpu_version(), *variables, digest.hexdigest()])
