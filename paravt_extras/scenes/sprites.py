"""Draws what moves or changes in the scenes: vehicles, animals, clouds, the board and the clock.

Lengths are in units of the frame's height.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import UInt8

from paravt_extras.scenes.canvas import Canvas, Colour, darker, lighter, readable_on
from paravt_extras.scenes.storyboard import COLOURS, Vehicle

WORD_HEIGHT = 0.125
"""Height of the capitals on the board."""
NUMBER_HEIGHT = 0.14
"""Height of the digits on a vehicle."""
TIME_HEIGHT = 0.105
"""Height of the digits of the clock."""
ANIMAL_HEIGHT = 0.11
ANIMAL_WIDTH = 0.16
VEHICLE_WIDTH, VEHICLE_HEIGHT = 0.74, 0.38
BOARD_WIDTH, BOARD_HEIGHT = 0.78, 0.20
CLOCK_WIDTH, CLOCK_HEIGHT = 0.46, 0.17
HANGING = 0.05  # from the upper edge of the frame to the board and to the clock

_GLASS: Colour = (176, 208, 226)
_TYRE: Colour = (36, 36, 38)
_FRAME: Colour = (58, 60, 66)

Sprite = UInt8[np.ndarray, "h w 4"]


def board(word: str, lines: int) -> Sprite:
    """Return the board, which hangs from the upper edge of the frame. It is lit if there is a
    word."""
    inside: Colour = (16, 40, 92) if word else (30, 33, 38)
    canvas = _panel(BOARD_WIDTH, BOARD_HEIGHT, _FRAME, inside, lines)
    canvas.text(BOARD_WIDTH / 2, HANGING + BOARD_HEIGHT / 2, word, WORD_HEIGHT, (255, 240, 170))
    return canvas.pixels()


def clock(text: str, lines: int) -> Sprite:
    """Return the clock, such as "14:05"."""
    canvas = _panel(CLOCK_WIDTH, CLOCK_HEIGHT, (232, 232, 228), (22, 24, 28), lines)
    canvas.text(CLOCK_WIDTH / 2, HANGING + CLOCK_HEIGHT / 2, text, TIME_HEIGHT, (246, 246, 240))
    return canvas.pixels()


def _panel(width: float, height: float, edge: Colour, inside: Colour, lines: int) -> Canvas:
    """Return a panel that hangs from the upper edge of the frame."""
    canvas = Canvas(width, HANGING + height, lines)
    for x in (0.2 * width, 0.8 * width):
        canvas.box(x - 0.008, 0, x + 0.008, HANGING + 0.02, _FRAME)
    canvas.box(0, HANGING, width, HANGING + height, edge, 0.022)
    canvas.box(0.013, HANGING + 0.013, width - 0.013, HANGING + height - 0.013, inside, 0.014)
    return canvas


def cloud(lines: int) -> Sprite:
    canvas = Canvas(0.34, 0.11, lines)
    for x, y, radius in ((0.08, 0.075, 0.035), (0.15, 0.055, 0.052), (0.23, 0.065, 0.044)):
        canvas.disc(x, y, radius, (248, 249, 251))
    canvas.box(0.045, 0.07, 0.30, 0.11, (248, 249, 251), 0.02)
    return canvas.pixels()


# --- vehicles ---


def vehicle(kind: str, look: Vehicle, lines: int) -> Sprite:
    """Return a vehicle from its side, with its number."""
    canvas = Canvas(VEHICLE_WIDTH, VEHICLE_HEIGHT, lines)
    colour = COLOURS[look.colour]
    draw, (x, y) = _VEHICLES[kind]
    draw(canvas, colour)
    pixels = canvas.pixels()
    if look.heading == "left":
        # Mirror the vehicle without its number.
        pixels = pixels[:, ::-1]
        x = VEHICLE_WIDTH - x
    number = Canvas(VEHICLE_WIDTH, VEHICLE_HEIGHT, lines)
    number.text(x, y, str(look.number), NUMBER_HEIGHT, readable_on(colour))
    return blended(pixels, number.pixels())


def blended(below: Sprite, above: Sprite) -> Sprite:
    """Return a sprite on top of another one of the same size."""
    share = above[..., 3:] / 255
    colour = below[..., :3] * (1 - share) + above[..., :3] * share
    opacity = np.maximum(below[..., 3:], above[..., 3:])
    return np.concatenate([colour.round().astype(np.uint8), opacity], axis=2)


def _wheels(canvas: Canvas, y: float, radius: float, *positions: float) -> None:
    for x in positions:
        canvas.disc(x, y, radius, _TYRE)
        canvas.disc(x, y, 0.45 * radius, (190, 192, 196))


def _bus(canvas: Canvas, colour: Colour) -> None:
    canvas.box(0.01, 0.02, 0.73, 0.34, darker(colour, 0.25), 0.04)
    canvas.box(0.01, 0.02, 0.73, 0.32, colour, 0.04)
    for n in range(4):
        canvas.box(0.05 + 0.125 * n, 0.055, 0.155 + 0.125 * n, 0.135, _GLASS, 0.012)
    canvas.box(0.58, 0.055, 0.725, 0.17, _GLASS, 0.02)
    canvas.disc(0.715, 0.265, 0.014, (255, 244, 190))
    _wheels(canvas, 0.33, 0.048, 0.15, 0.58)


def _ferry(canvas: Canvas, colour: Colour) -> None:
    canvas.box(0.40, 0.0, 0.47, 0.09, darker(colour, 0.15), 0.01)
    canvas.box(0.13, 0.07, 0.56, 0.17, (246, 246, 242), 0.02)
    for n in range(5):
        canvas.box(0.16 + 0.08 * n, 0.095, 0.21 + 0.08 * n, 0.135, _WINDOW_DARK, 0.008)
    canvas.shape([(0.02, 0.16), (0.73, 0.16), (0.62, 0.37), (0.09, 0.37)], colour)
    canvas.shape([(0.08, 0.345), (0.635, 0.345), (0.62, 0.37), (0.09, 0.37)], darker(colour, 0.35))
    canvas.box(0.02, 0.155, 0.73, 0.175, lighter(colour, 0.35))


_WINDOW_DARK: Colour = (70, 92, 116)


def _train(canvas: Canvas, colour: Colour) -> None:
    canvas.box(0.0, 0.03, 0.60, 0.31, colour, 0.02)
    canvas.shape([(0.52, 0.03), (0.62, 0.03), (0.735, 0.20), (0.735, 0.31), (0.52, 0.31)], colour)
    canvas.shape([(0.60, 0.055), (0.628, 0.055), (0.71, 0.185), (0.60, 0.185)], _GLASS)
    for n in range(4):
        canvas.box(0.04 + 0.135 * n, 0.06, 0.14 + 0.135 * n, 0.13, _GLASS, 0.01)
    canvas.box(0.0, 0.30, 0.735, 0.335, (52, 54, 60))
    _wheels(canvas, 0.345, 0.033, 0.10, 0.21, 0.52, 0.63)


def _tractor(canvas: Canvas, colour: Colour) -> None:
    canvas.box(0.50, 0.02, 0.525, 0.12, _FRAME)
    canvas.box(0.10, 0.0, 0.34, 0.03, darker(colour, 0.2), 0.01)
    canvas.box(0.12, 0.03, 0.32, 0.14, _GLASS)
    canvas.box(0.21, 0.03, 0.225, 0.14, darker(colour, 0.2))
    canvas.box(0.08, 0.11, 0.70, 0.29, colour, 0.03)
    canvas.box(0.655, 0.13, 0.70, 0.27, darker(colour, 0.3), 0.01)
    _wheels(canvas, 0.265, 0.11, 0.13)
    _wheels(canvas, 0.305, 0.07, 0.60)


def _balloon(canvas: Canvas, colour: Colour) -> None:
    canvas.line([(0.29, 0.24), (0.34, 0.34)], _FRAME, 0.006)
    canvas.line([(0.45, 0.24), (0.40, 0.34)], _FRAME, 0.006)
    canvas.oval(0.17, 0.0, 0.57, 0.28, darker(colour, 0.18))
    canvas.oval(0.22, 0.0, 0.52, 0.28, colour)
    canvas.box(0.335, 0.325, 0.405, 0.375, (136, 98, 62), 0.008)
    # A flag shows where it points to.
    canvas.line([(0.405, 0.375), (0.405, 0.31)], _FRAME, 0.005)
    canvas.shape([(0.405, 0.30), (0.50, 0.325), (0.405, 0.35)], (214, 60, 60))


def _cable_car(canvas: Canvas, colour: Colour) -> None:
    canvas.line([(0.37, 0.0), (0.37, 0.09)], _FRAME, 0.014)
    canvas.box(0.33, 0.0, 0.41, 0.022, _FRAME, 0.008)
    canvas.box(0.13, 0.08, 0.61, 0.36, darker(colour, 0.25), 0.05)
    canvas.box(0.13, 0.08, 0.61, 0.34, colour, 0.05)
    canvas.box(0.17, 0.105, 0.47, 0.175, _GLASS, 0.015)
    canvas.box(0.505, 0.105, 0.605, 0.33, lighter(colour, 0.3), 0.012)


_Draw = Callable[[Canvas, Colour], None]
# How each is drawn, pointing to the right, and the middle of its number.
_VEHICLES: dict[str, tuple[_Draw, tuple[float, float]]] = {
    "bus": (_bus, (0.31, 0.225)),
    "ferry": (_ferry, (0.36, 0.26)),
    "train": (_train, (0.30, 0.215)),
    "tractor": (_tractor, (0.41, 0.20)),
    "balloon": (_balloon, (0.37, 0.135)),
    "cable car": (_cable_car, (0.31, 0.26)),
}


# --- animals ---


def animal(kind: str, lines: int) -> Sprite:
    """Return an animal from its side."""
    canvas = Canvas(ANIMAL_WIDTH, ANIMAL_HEIGHT, lines)
    if kind in _BIRDS:
        _bird(canvas, *_BIRDS[kind])
    else:
        _beast(canvas, *_BEASTS[kind])
    return canvas.pixels()


# Colours of body, wing and beak; whether it swims.
_BIRDS: dict[str, tuple[Colour, Colour, Colour, bool]] = {
    "pigeons": ((112, 122, 142), (84, 92, 112), (206, 150, 110), False),
    "gulls": ((250, 250, 248), (150, 158, 168), (240, 180, 50), False),
    "crows": ((30, 30, 36), (54, 54, 64), (70, 70, 74), False),
    "ducks": ((146, 96, 58), (108, 70, 44), (240, 180, 50), True),
}
# Colours of body and head; whether it is woolly.
_BEASTS: dict[str, tuple[Colour, Colour, bool]] = {
    "sheep": ((246, 244, 236), (44, 42, 44), True),
    "goats": ((128, 86, 56), (104, 68, 44), False),
}


def _bird(canvas: Canvas, body: Colour, wing: Colour, beak: Colour, swims: bool) -> None:
    if not swims:
        for x in (0.065, 0.085):
            canvas.line([(x, 0.08), (x, 0.109)], (196, 120, 60), 0.006)
    canvas.shape([(0.005, 0.05), (0.06, 0.045), (0.05, 0.075)], wing)
    canvas.oval(0.025, 0.035, 0.125, 0.092, body)
    canvas.oval(0.035, 0.042, 0.095, 0.076, wing)
    head = (40, 112, 74) if swims else body
    canvas.disc(0.118, 0.030, 0.024, head)
    canvas.shape([(0.137, 0.022), (0.158, 0.033), (0.137, 0.042)], beak)
    canvas.disc(0.124, 0.026, 0.0045, (250, 250, 250) if body[0] < 60 else (10, 10, 10))


def _beast(canvas: Canvas, body: Colour, head: Colour, woolly: bool) -> None:
    for x in (0.04, 0.058, 0.094, 0.112):
        canvas.line([(x, 0.07), (x, 0.109)], head, 0.010)
    canvas.box(0.018, 0.022, 0.126, 0.082, body, 0.03)
    if woolly:
        for x in (0.03, 0.052, 0.074, 0.096, 0.116):
            canvas.disc(x, 0.03, 0.018, body)
    else:
        canvas.line([(0.132, 0.018), (0.112, 0.0)], (64, 52, 44), 0.008)
        canvas.line([(0.140, 0.018), (0.126, 0.0)], (64, 52, 44), 0.008)
    canvas.oval(0.112, 0.012, 0.158, 0.05, head)
    canvas.disc(0.140, 0.026, 0.0045, (250, 250, 250))
