"""A plan in words: tables in markdown for the terminal and for docs/scale.md, and the same as JSON.

Owns how figures are written. Refuses nothing. Invariant: every figure in the tables stands in the JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

GIB = 2.0**30
AIM = 1.3  # an update's work is to be at most so many times what it is worth


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, its columns as wide as they have to be."""
    widths = [max(len(row[n]) for row in [header, *rows]) for n in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return (
            "| "
            + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            + " |"
        )

    return "\n".join(
        [
            line(header),
            "|" + "|".join("-" * (width + 2) for width in widths) + "|",
            *map(line, rows),
        ]
    )


def report(plan: dict[str, Any]) -> str:
    """One topology's plan."""
    parts = [_head(plan), "", _programs(plan), ""]
    if plan["phases"]:
        parts += [_phases(plan), ""]
    parts += [_sums(plan), ""]
    parts += [f"- {line}" for line in plan["advice"]]
    return "\n".join(parts).rstrip()


def scale(plans: Sequence[dict[str, Any]]) -> str:
    """A line a topology: the table of docs/scale.md."""
    header = [
        "topology",
        "mesh",
        "fits",
        "limit",
        *(f"{name} GiB" for name in ("rollouts", "reference", "update", "together")),
    ]
    header += ["reference s", "update s", "step s", "tokens/s", "sent GB"]
    return markdown(header, [_scale_line(plan) for plan in plans])


def _scale_line(plan: dict[str, Any]) -> list[str]:
    programs, phases = plan["programs"], {phase["phase"]: phase for phase in plan["phases"]}
    update = "RL update" if "RL update" in programs else "SFT update"

    def peak(*names: str) -> str:
        found = [programs[name] for name in names if name in programs]
        return _peak(max(found, key=lambda m: m["peak"])) if found else "-"

    def seconds(name: str) -> str:
        return f"{phases[name]['seconds']:.2f}" if name in phases else "-"

    return [
        plan["topology"],
        " x ".join(map(str, plan["mesh"])),
        _fits(plan, ("yes", "yes, in part", "not known", "no")),
        f"{plan['hbm'] / GIB:.2f}",
        peak("prefill", "prefill after", "decode"),
        peak("reference"),
        peak(update),
        f"{max((t['total'] for t in plan['together']), default=0.0) / GIB:.1f}",
        seconds("reference"),
        seconds(update),
        f"{plan['step_seconds']:.1f}" if plan["complete"] else "-",
        f"{plan['tokens'] / plan['step_seconds']:.0f}" if plan["complete"] else "-",
        f"{sum(programs[update]['sent'].values()) / 1e9:.0f}" if update in programs else "-",
    ]


def _head(plan: dict[str, Any]) -> str:
    mesh = " x ".join(map(str, plan["mesh"]))
    part = f"fits, as far as compiled ({', '.join(plan['programs'])})"
    word = _fits(
        plan, ("fits", part, f"not known, not compiled: {', '.join(_broken(plan))}", "does not fit")
    )
    return (
        f"{plan['name']} on {plan['topology']}: **{word}**. {plan['chips']} chips, {plan['devices']} devices of {plan['hbm'] / GIB:.2f} "
        f"GiB, {plan['hosts']} hosts; mesh data x fsdp x tensor = {mesh}; rollouts over the devices of a host; {plan['compiler']}."
    )


def _broken(plan: dict[str, Any]) -> list[str]:
    """Programs that were not compiled, for another reason than memory."""
    return [name for name, m in plan["programs"].items() if m["error"] and not m["peak"]]


def _fits(plan: dict[str, Any], words: tuple[str, str, str, str]) -> str:
    """Of the words for: it fits; what was compiled does; a program was not compiled; it does not fit."""
    if any(together["total"] > plan["hbm"] for together in plan["together"]):
        return words[3]
    return words[2] if _broken(plan) else words[0] if plan["complete"] else words[1]


def _programs(plan: dict[str, Any]) -> str:
    beside = {t["program"]: t for t in plan["together"]}
    rows = []
    for name, m in plan["programs"].items():
        sent = sum(m["sent"].values())
        rows.append(
            [
                name,
                _peak(m),
                *(
                    f"{m[part] / GIB:.2f}" if not m["error"] else "-"
                    for part in ("arguments", "temporary")
                ),
            ]
        )
        rows[-1] += [
            f"{beside[name]['total'] / GIB:.2f}" if name in beside else "-",
            f"{m['flops'] / 1e15:.3f}",
            f"{sent / 1e9:.2f}",
        ]
        rows[-1] += [f"{m['seconds']:.0f}"]
    header = [
        "program, a call",
        "peak GiB",
        "arguments",
        "temporary",
        "with what lies beside",
        "PFLOP, all devices",
        "sent GB a device",
    ]
    return markdown([*header, "compiled in s"], rows)


def _peak(m: dict[str, Any]) -> str:
    if m["error"] and not m["peak"]:
        return f"? ({m['error']})"
    return f"{m['peak'] / GIB:.2f}" + (" does not fit" if m["error"] else "")


def _phases(plan: dict[str, Any]) -> str:
    rows = [
        [
            p["phase"],
            str(p["calls"]),
            *(f"{p[part]:.3f}" for part in ("compute", "memory", "interconnect", "seconds")),
        ]
        for p in plan["phases"]
    ]
    if plan["complete"]:
        rows.append(["step", "", "", "", "", f"{plan['step_seconds']:.2f}"])
    return markdown(
        ["phase", "calls", "arithmetic s", "HBM s", "interconnect s", "at least s"], rows
    )


def _sums(plan: dict[str, Any]) -> str:
    lines = [
        "On every device: " + _listed(plan["residents"]) + " GiB.",
        "On every host: " + _listed(plan["host_memory"]) + " GiB.",
    ]
    if plan["complete"] and plan["step_seconds"]:
        rate = plan["tokens"] / plan["step_seconds"]
        lines.append(
            f"Tokens a step: {plan['tokens']}; at most {rate:.0f} a second. Peaks: {plan['source']}."
        )
    work = plan["work"]
    if work:
        lines.append(
            f"An update is worth {work['model'] / 1e15:.2f} PFLOP (6 N D and attention, prompts once), and {work['full remat'] / 1e15:.2f} "
            f"where the forward pass is made again (8 N D and attention, full remat). The program does {work['done'] / 1e15:.2f}: "
            f"{_ratio(work, 'model')} and {_ratio(work, 'full remat')}. Prompts once for their group save {work['saved'] / 1e15:.2f} PFLOP "
            f"of {work['apart'] / 1e15:.2f}."
        )
    return "\n".join(f"- {line}" for line in lines)


def _ratio(work: dict[str, float], name: str) -> str:
    """How many times as much as that is done, and whether this is within the aim."""
    times = work["done"] / work[name]
    return f"{times:.2f} times the {'first' if name == 'model' else 'second'} ({'within' if times <= AIM else 'not within'} {AIM})"


def _listed(sizes: dict[str, float]) -> str:
    return ", ".join(f"{name} {size / GIB:.2f}" for name, size in sizes.items())
