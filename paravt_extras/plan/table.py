"""Formats a plan as Markdown, for the terminal and docs/scale.md.

A plan is the dict of `command.plan`. It is also written as JSON, with every figure of these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paravt_extras.plan.units import GIB, counted, duration, memory, si


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with aligned columns."""
    lines = [header, *rows]
    widths = [max(len(line[n]) for line in lines) for n in range(len(header))]

    def formatted(cells: Sequence[str]) -> str:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([formatted(header), f"|{rule}|", *map(formatted, rows)])


def report(plan: dict[str, Any]) -> str:
    """The plan for one slice."""
    parts = [_head(plan), "", _programs(plan), ""]
    if plan["phases"]:
        parts += [_phases(plan), ""]
    parts += [_sums(plan), ""]
    parts += [f"- {line}" for line in plan["advice"]]
    return "\n".join(parts).rstrip()


def scale(plans: Sequence[dict[str, Any]]) -> str:
    """The table of docs/scale.md, with one line per slice."""
    header = (
        "topology",
        "mesh",
        "fits",
        "limit",
        "rollouts GiB",
        "reference GiB",
        "update GiB",
        "together GiB",
        "reference s",
        "update s",
        "step s",
        "expected s",
        "tokens/s",
        "sent GB",
    )
    return markdown(header, [_scale_line(plan) for plan in plans])


def _scale_line(plan: dict[str, Any]) -> list[str]:
    programs = plan["programs"]
    phases = {phase["phase"]: phase for phase in plan["phases"]}
    rl = any(name.startswith("RL update") for name in programs)
    update = "RL update" if rl else "SFT update"

    def peak(*families: str) -> str:
        found = [program for name, program in programs.items() if name.startswith(families)]
        return _peak(max(found, key=lambda program: program["peak"]), _gib) if found else "-"

    def seconds(family: str) -> str:
        found = [phase["seconds"] for name, phase in phases.items() if name.startswith(family)]
        return f"{sum(found):.2f}" if found else "-"

    step_seconds = expected = tokens_per_second = sent = "-"
    if plan["complete"]:
        step_seconds = f"{plan['step_seconds']:.1f}"
        expected = f"{plan['expected_seconds']:.1f}"
        tokens_per_second = f"{plan['tokens'] / plan['step_seconds']:.0f}"
    calls = {name: phase["calls"] for name, phase in phases.items() if name.startswith(update)}
    if calls:
        sent_bytes = [n * sum(programs[name]["sent"].values()) for name, n in calls.items()]
        sent = f"{sum(sent_bytes) / 1e9:.0f}"
    together = max((held["total"] for held in plan["together"]), default=0.0)
    return [
        plan["topology"],
        " x ".join(map(str, plan["mesh"])),
        _fits(plan, ("yes", "yes, in part", "not known", "no")),
        f"{plan['hbm'] / GIB:.2f}",
        peak("prefill", "decode"),
        peak("reference"),
        peak(update),
        f"{together / GIB:.1f}",
        seconds("reference"),
        seconds(update),
        step_seconds,
        expected,
        tokens_per_second,
        sent,
    ]


def _head(plan: dict[str, Any]) -> str:
    mesh = " x ".join(map(str, plan["mesh"]))
    in_part = f"fits, as far as compiled ({', '.join(plan['programs'])})"
    not_known = f"not known, not compiled: {', '.join(_failed(plan))}"
    word = _fits(plan, ("fits", in_part, not_known, "does not fit"))
    return (
        f"{plan['name']} on {plan['topology']}: **{word}**. {counted(plan['chips'], 'chip')}, "
        f"{counted(plan['devices'], 'device')} of {memory(plan['hbm'])}, "
        f"{counted(plan['hosts'], 'host')}; "
        f"mesh data x fsdp x tensor = {mesh}; rollouts over the devices of a host; "
        f"{plan['compiler']}."
    )


def _failed(plan: dict[str, Any]) -> list[str]:
    """Programs that failed to compile for another reason than memory."""
    programs = plan["programs"].items()
    return [name for name, program in programs if program["error"] and not program["peak"]]


def _fits(plan: dict[str, Any], words: tuple[str, str, str, str]) -> str:
    """Chooses the word for: fits; fits as far as compiled; not known; does not fit."""
    fits, in_part, not_known, does_not_fit = words
    if any(held["total"] > plan["hbm"] for held in plan["together"]):
        return does_not_fit
    if _failed(plan):
        return not_known
    return fits if plan["complete"] else in_part


def _programs(plan: dict[str, Any]) -> str:
    together = {held["program"]: held["total"] for held in plan["together"]}
    rows = []
    for name, program in plan["programs"].items():
        arguments = temporary = "-"
        if not program["error"]:
            arguments = memory(program["arguments"])
            temporary = memory(program["temporary"])
        row = [
            name,
            _peak(program, memory),
            arguments,
            temporary,
            memory(together[name]) if name in together else "-",
            si(program["flops"], "FLOP"),
            si(sum(program["sent"].values()), "B"),
            f"{program['seconds']:.0f} s",
        ]
        rows.append(row)
    header = (
        "program, per call",
        "peak memory",
        "arguments",
        "temporary",
        "with residents",
        "on all devices",
        "sent per device",
        "compiled in",
    )
    return markdown(header, rows)


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def _peak(program: dict[str, Any], formatted: Callable[[float], str]) -> str:
    if program["error"] and not program["peak"]:
        return f"? ({program['error']})"
    return formatted(program["peak"]) + (" does not fit" if program["error"] else "")


def _phases(plan: dict[str, Any]) -> str:
    rows = []
    names = {"tail": "of decode, the tail", "tools": "tools (the engine waits)"}
    for phase in plan["phases"]:
        name = names.get(phase["phase"], phase["phase"])
        parts = [duration(phase[column]) for column in ("compute", "memory", "interconnect")]
        if phase["phase"] == "tools":
            # The devices do nothing meanwhile.
            parts = ["-", "-", "-"]
        times = [duration(phase[column]) for column in ("seconds", "expected")]
        rows.append([name, f"{phase['calls']:.0f}", *parts, *times])
    if plan["complete"]:
        seconds = [duration(plan[name]) for name in ("step_seconds", "expected_seconds")]
        rows.append(["step", "", "", "", "", *seconds])
    header = (
        "phase",
        "calls",
        "arithmetic",
        "HBM",
        "interconnect",
        "at least",
        "expected",
    )
    return markdown(header, rows)


def _sums(plan: dict[str, Any]) -> str:
    lines = []
    if plan["chosen"]:
        chosen = ", ".join(f"{name} {value}" for name, value in plan["chosen"].items())
        lines.append(f"Chosen for the devices: {chosen}.")
        lines.append(f"Memory estimated before compiling, per device: {_sizes(plan['estimate'])}.")
    lines += [
        f"On every device: {_sizes(plan['residents'])}.",
        f"On every host: {_sizes(plan['host_memory'])}.",
    ]
    between = plan["between_slices"]
    if between:
        parts = ", ".join(f"{name} {si(size, 'B')}" for name, size in between.items())
        lines.append(
            f"Sent to other slices per step, by each device: {si(sum(between.values()), 'B')} "
            f"({parts})."
        )
    if plan["phases"]:
        rates = plan["expected_rates"]
        lines.append(
            "Arithmetic, HBM, interconnect and at least: at 100 % of the peak rates. Expected: at "
            f"{rates['HFU']:.0%} of the peak FLOP/s (HFU) and {rates['HBM']:.0%} of the HBM "
            "bandwidth; an estimate."
        )
    if plan["lengths"]:
        lines.append(f"Lengths: {plan['lengths']}.")
    if plan["complete"] and plan["step_seconds"]:
        rate = plan["tokens"] / plan["step_seconds"]
        lines.append(
            f"Tokens per step: {plan['tokens']}; at most {rate:.0f} per second. "
            f"Peak rates: {plan['source']}."
        )
    work = plan["work"]
    if work:
        lines.append(
            f"FLOPs of update and reference with rl.remat {plan['remat']}: worth "
            f"{si(work['worth'], 'FLOP')} ({plan['products']} N D and attention over "
            "visible pairs). Packed, all devices do as much as the heaviest: "
            f"{_times_worth(work, 'done')}; in whole tiles, with the products that the kernel "
            f"repeats: {_times_worth(work, 'done, tiles')}."
        )
    if "compiled" in work:
        lines.append(f"Their programs compute {_times_worth(work, 'compiled')}.")
    return "\n".join(f"- {line}" for line in lines)


def _times_worth(work: dict[str, float], name: str) -> str:
    return f"{si(work[name], 'FLOP')}, {work[name] / work['worth']:.2f} times that worth"


def _sizes(sizes: dict[str, float]) -> str:
    return ", ".join(f"{name} {memory(size)}" for name, size in sizes.items())
