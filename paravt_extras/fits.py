"""Says which recipes fit the devices of this machine: `python -m paravt_extras.fits [RECIPE ...]`.

Nothing is downloaded, and only memory is looked at. `python -m train.run --config=RECIPE --check`
looks at everything that one recipe needs.
"""

from __future__ import annotations

import argparse
import sys

from configs import RECIPES
from models import gpu
from paravt_extras.fit import GIB, fit, smallest_slices
from paravt_extras.slices import Devices, Topology, found_devices
from train.settings import Run

_RECIPES = ("paravt_8b_lora", "paravt_4b_lora", "paravt_2b_lora", "paravt_tiny")


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 0 if the first recipe fits, 1 if not, 2 for a wrong argument."""
    parser = argparse.ArgumentParser(prog="python -m paravt_extras.fits")
    parser.description = "Says which recipes fit the devices of this machine."
    parser.add_argument(
        "recipes",
        nargs="*",
        default=_RECIPES,
        metavar="RECIPE",
        help="recipes to look at; the exit code says whether the first one fits",
    )
    parser.add_argument(
        "--topology", default="", help="a TPU slice, such as v5e:1x1, instead of the devices here"
    )
    asked = parser.parse_args(argv)
    unknown = [name for name in asked.recipes if name not in RECIPES]
    if unknown:
        parser.error(f"RECIPE: {unknown[0]}; give one of {', '.join(RECIPES)}")
    gpu.reserve_memory()
    try:
        devices = Topology(asked.topology).available if asked.topology else found_devices()
    except ValueError as error:
        parser.error(f"--{error}")
    memory = "memory unknown" if devices.memory is None else f"{devices.memory / GIB:.1f} GiB each"
    print(f"{devices.name}, {memory}")
    lacks = {name: lack(RECIPES[name](), devices) for name in asked.recipes}
    for name, missing in lacks.items():
        print(f"  {name}: {missing or 'fits'}")
    return int(bool(lacks[asked.recipes[0]]))


def lack(run: Run, devices: Devices) -> str:
    """Return why a run cannot train on some devices; empty if it can, by estimates of its
    memory."""
    if devices.platform == "cpu" and run.model.size != "tiny":
        slices = ", ".join(smallest_slices(run))
        return f"needs a TPU or a GPU; the smallest TPU slices that it fits: {slices}"
    try:
        if devices.platform == "gpu":
            gpu.require_type("model.dtype", run.model.dtype)
        fit(run, devices)
    except ValueError as error:
        return str(error).removeprefix(f"devices = {devices.name}: ")
    return ""


if __name__ == "__main__":
    sys.exit(main())
