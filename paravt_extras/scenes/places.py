"""Draws the backgrounds of the scenes: six kinds of places, each with its light and its details."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paravt_extras.scenes.canvas import Canvas, Colour, Point, darker, lighter, mixed

WIDTH = 16 / 9
"""Width of what is drawn, in units of the frame's height. Frames may be slightly wider."""
HORIZON = 0.50
GROUND = 0.84
"""Where the strip in front begins, on which animals stand."""

# Top and bottom of the sky, and the light on everything else.
_SKIES: tuple[tuple[Colour, Colour], ...] = (
    ((92, 150, 212), (206, 226, 240)),  # noon
    ((124, 164, 206), (240, 222, 196)),  # morning
    ((84, 104, 160), (244, 186, 140)),  # evening
    ((136, 148, 160), (208, 212, 214)),  # overcast
)
_WALLS: tuple[Colour, ...] = (
    *((196, 164, 128), (178, 120, 98), (208, 196, 170), (150, 160, 168)),
    *((188, 152, 158), (164, 172, 140)),
)
_WINDOW: Colour = (74, 88, 104)
_STONE: Colour = (172, 168, 160)

Ground = Callable[[Canvas, np.random.Generator], None]


def draw_place(name: str, canvas: Canvas, rng: np.random.Generator) -> None:
    """Draw the background of a place onto a canvas of the size of a frame."""
    top, bottom = _SKIES[int(rng.integers(len(_SKIES)))]
    # Below the horizon it shines through between houses and hills.
    canvas.shade(0, HORIZON + 0.02, top, bottom)
    canvas.shade(HORIZON + 0.02, 1, bottom, bottom)
    _GROUNDS[name](canvas, rng)


def _street(canvas: Canvas, rng: np.random.Generator) -> None:
    left = -0.05
    while left < WIDTH + 0.1:
        width = float(rng.uniform(0.22, 0.38))
        _house(canvas, left, width, rng)
        left += width + 0.012
    canvas.shade(0.60, 0.66, _STONE, lighter(_STONE, 0.15))
    canvas.shade(0.66, GROUND, (84, 86, 92), (102, 104, 108))
    for n in range(9):
        canvas.box(0.02 + 0.24 * n, 0.742, 0.14 + 0.24 * n, 0.754, (220, 220, 210))
    canvas.shade(GROUND, 1, lighter(_STONE, 0.25), _STONE)
    for n in range(13):
        canvas.line([(0.15 * n, 1), (0.15 * n + 0.03, GROUND)], darker(_STONE, 0.12), 0.004)


def _house(canvas: Canvas, left: float, width: float, rng: np.random.Generator) -> None:
    wall = _WALLS[int(rng.integers(len(_WALLS)))]
    top = float(rng.uniform(0.30, 0.38))
    canvas.box(left, top, left + width, 0.62, wall)
    canvas.box(left - 0.008, top - 0.016, left + width + 0.008, top, darker(wall, 0.35))
    columns = max(2, round(width / 0.09))
    for column in range(columns):
        x = left + width * (column + 0.5) / columns
        for y in (top + 0.05, top + 0.14):
            canvas.box(x - 0.021, y - 0.005, x + 0.021, y + 0.055, lighter(wall, 0.4))
            canvas.box(x - 0.016, y, x + 0.016, y + 0.05, _WINDOW)


def _harbour(canvas: Canvas, rng: np.random.Generator) -> None:
    hills(canvas, rng, 0.045, (134, 150, 156), base=HORIZON)
    canvas.shade(HORIZON, GROUND, (78, 128, 156), (36, 86, 122))
    for _ in range(40):
        x, y = float(rng.uniform(0, WIDTH)), float(rng.uniform(HORIZON + 0.02, GROUND))
        length = 0.02 + 0.08 * (y - HORIZON)
        canvas.line([(x, y), (x + length, y)], (112, 158, 184), 0.003)
    _lighthouse(canvas, float(rng.choice([0.12, WIDTH - 0.12])))
    canvas.shade(GROUND, 1, (158, 152, 142), (138, 132, 124))
    canvas.box(0, GROUND - 0.012, 2, GROUND + 0.012, (186, 180, 168))
    for n in range(7):
        canvas.box(0.1 + 0.28 * n, GROUND - 0.045, 0.13 + 0.28 * n, GROUND, (82, 70, 60), 0.008)


def _lighthouse(canvas: Canvas, x: float) -> None:
    canvas.oval(x - 0.12, HORIZON - 0.03, x + 0.12, HORIZON + 0.04, (122, 116, 108))
    for n in range(5):
        colour = ((206, 66, 56), (240, 238, 230))[n % 2]
        top = 0.31 + 0.036 * n
        half = 0.019 + 0.003 * n
        canvas.box(x - half, top, x + half, top + 0.037, colour)
    canvas.box(x - 0.014, 0.285, x + 0.014, 0.31, (252, 232, 150))


def _station(canvas: Canvas, rng: np.random.Generator) -> None:
    wall = _WALLS[int(rng.integers(len(_WALLS)))]
    canvas.box(-0.1, 0.34, 2, 0.64, wall)
    canvas.shape([(-0.1, 0.35), (0.06, 0.29), (1.75, 0.29), (2.0, 0.35)], (110, 66, 54))
    for n in range(8):
        x = 0.06 + 0.225 * n
        canvas.box(x, 0.42, x + 0.11, 0.60, lighter(wall, 0.45), 0.05)
        canvas.box(x + 0.012, 0.434, x + 0.098, 0.60, _WINDOW, 0.04)
    canvas.shade(0.63, GROUND, (120, 112, 104), (98, 92, 86))
    for n in range(40):
        canvas.box(0.05 * n, 0.775, 0.05 * n + 0.022, 0.812, (86, 68, 54))
    for y in (0.776, 0.802):
        canvas.line([(0, y), (2, y)], (176, 178, 182), 0.008)
    canvas.shade(GROUND, 1, (196, 192, 184), (176, 172, 166))
    canvas.box(0, GROUND + 0.012, 2, GROUND + 0.026, (236, 206, 84))


def _farm(canvas: Canvas, rng: np.random.Generator) -> None:
    hills(canvas, rng, 0.10, (118, 148, 104), base=HORIZON + 0.02)
    canvas.shade(HORIZON + 0.02, 0.70, (150, 172, 92), (170, 176, 88))
    canvas.shade(0.70, GROUND, (158, 132, 92), (138, 110, 76))
    for n in range(4):
        y = 0.725 + 0.033 * n
        canvas.line([(0, y), (2, y)], (124, 98, 68), 0.004)
    x = float(rng.uniform(0.05, 0.25))
    canvas.box(x, 0.41, x + 0.26, 0.55, (160, 64, 50))
    canvas.shape([(x - 0.02, 0.415), (x + 0.13, 0.33), (x + 0.28, 0.415)], (92, 62, 54))
    canvas.box(x + 0.10, 0.47, x + 0.16, 0.55, (236, 228, 214))
    _trees(canvas, rng, 0.54, 5, first=0.6)
    canvas.shade(GROUND, 1, (112, 158, 74), (92, 138, 60))
    for n in range(20):
        canvas.box(0.1 * n, GROUND - 0.035, 0.1 * n + 0.012, GROUND + 0.01, (126, 98, 70))
    canvas.line([(0, GROUND - 0.02), (2, GROUND - 0.02)], (140, 110, 80), 0.008)


def _lake(canvas: Canvas, rng: np.random.Generator) -> None:
    hills(canvas, rng, 0.12, (106, 134, 128), base=HORIZON + 0.10)
    canvas.shade(HORIZON + 0.10, 0.74, (108, 152, 90), (134, 172, 98))
    _trees(canvas, rng, 0.64, 9, first=0.05)
    canvas.shade(0.74, 1, (112, 164, 184), (58, 112, 146))
    for _ in range(24):
        x, y = float(rng.uniform(0, WIDTH)), float(rng.uniform(0.76, 0.98))
        canvas.line([(x, y), (x + 0.06, y)], (150, 192, 206), 0.003)


def _mountain(canvas: Canvas, rng: np.random.Generator) -> None:
    x = -0.2
    while x < WIDTH + 0.2:
        _peak(canvas, x, float(rng.uniform(0.26, 0.38)), float(rng.uniform(0.28, 0.4)))
        x += float(rng.uniform(0.3, 0.45))
    canvas.shade(0.66, GROUND, (112, 140, 104), (122, 152, 96))
    hills(canvas, rng, 0.05, (112, 140, 104), base=0.67)
    _trees(canvas, rng, 0.76, 7, first=0.1, pointed=True)
    canvas.shade(GROUND, 1, (142, 158, 96), (122, 138, 82))
    for _ in range(14):
        x, y = float(rng.uniform(0, WIDTH)), float(rng.uniform(0.87, 0.98))
        canvas.oval(x, y, x + 0.035, y + 0.016, (160, 158, 150))
    canvas.line([(0, 0.462), (2, 0.462)], (60, 62, 68), 0.006)


def _peak(canvas: Canvas, x: float, top: float, half: float) -> None:
    rock: Colour = (126, 134, 146)
    canvas.shape([(x - half, 0.68), (x, top), (x + half, 0.68)], rock)
    canvas.shape([(x, top), (x + half, 0.68), (x + 0.3 * half, 0.68)], darker(rock, 0.14))
    share = 0.28
    low = top + share * (0.68 - top)
    canvas.shape(
        [(x - share * half, low), (x, top), (x + share * half, low), (x, low - 0.02)],
        (240, 244, 248),
    )


def hills(
    canvas: Canvas, rng: np.random.Generator, height: float, colour: Colour, base: float
) -> None:
    """Draw a line of hills that stands on `base`."""
    x = np.linspace(0, 2, 81)
    phases = rng.uniform(0, 2 * np.pi, 3)
    waves = np.stack([np.sin(n * 2.2 * x + phase) / n for n, phase in enumerate(phases, 1)])
    tops = base - height * (0.55 + 0.3 * waves.sum(axis=0))
    outline: list[Point] = list(zip(x.tolist(), tops.tolist(), strict=True))
    canvas.shape([*outline, (2, base + 0.01), (0, base + 0.01)], colour)


def _trees(
    canvas: Canvas,
    rng: np.random.Generator,
    foot: float,
    count: int,
    first: float,
    pointed: bool = False,
) -> None:
    for n in range(count):
        x = first + (WIDTH - first) * (n + float(rng.uniform(0.2, 0.8))) / count
        size = float(rng.uniform(0.04, 0.06))
        green = mixed((52, 96, 56), (96, 132, 66), float(rng.uniform()))
        canvas.box(x - 0.008, foot - 0.03, x + 0.008, foot, (92, 70, 52))
        if pointed:
            for step in range(3):
                y = foot - 0.02 - 0.6 * size * step
                half = 0.7 * size * (1 - 0.22 * step)
                canvas.shape([(x - half, y), (x, y - 1.1 * size), (x + half, y)], green)
            continue
        canvas.disc(x - 0.5 * size, foot - 0.06, 0.8 * size, darker(green, 0.08))
        canvas.disc(x + 0.5 * size, foot - 0.06, 0.8 * size, darker(green, 0.08))
        canvas.disc(x, foot - 0.06 - 0.5 * size, size, green)


_GROUNDS: dict[str, Ground] = {
    "street": _street,
    "harbour": _harbour,
    "station": _station,
    "farm": _farm,
    "lake": _lake,
    "mountain": _mountain,
}
