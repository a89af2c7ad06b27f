"""A canvas in units of the frame's height, and the colours and textures that are drawn on it.

Everything is drawn at twice its size and then reduced, which smooths all edges.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]
Point = tuple[float, float]

_SUPERSAMPLING = 2
# Strokes make the font of Pillow bold. Their width, in units of the height of a digit.
_BOLDNESS = 0.045


class Canvas:
    """A picture to draw on. Lengths are in units of `lines` pixels, from the upper left corner.

    Args:
        width: Width of the canvas.
        height: Height of the canvas.
        lines: Pixels per unit: the height of a frame.
        background: Its colour; None: transparent.
    """

    def __init__(self, width: float, height: float, lines: int, background: Colour | None = None):
        self._unit = lines * _SUPERSAMPLING
        size = (
            max(1, round(width * lines)) * _SUPERSAMPLING,
            max(1, round(height * lines)) * _SUPERSAMPLING,
        )
        self._image = Image.new("RGBA", size, (0, 0, 0, 0) if background is None else background)
        self._draw = ImageDraw.Draw(self._image)

    def box(
        self, left: float, top: float, right: float, bottom: float, fill: Colour, corner: float = 0
    ) -> None:
        """Draw a rectangle, whose corners may be round."""
        self._draw.rounded_rectangle(
            self._pixels(left, top, right, bottom), self._unit * corner, fill
        )

    def oval(self, left: float, top: float, right: float, bottom: float, fill: Colour) -> None:
        """Draw an ellipse within a rectangle."""
        self._draw.ellipse(self._pixels(left, top, right, bottom), fill)

    def disc(self, x: float, y: float, radius: float, fill: Colour) -> None:
        self.oval(x - radius, y - radius, x + radius, y + radius, fill)

    def shape(self, points: Sequence[Point], fill: Colour) -> None:
        """Draw a polygon."""
        self._draw.polygon([(x * self._unit, y * self._unit) for x, y in points], fill)

    def line(self, points: Sequence[Point], fill: Colour, width: float) -> None:
        at = [(x * self._unit, y * self._unit) for x, y in points]
        self._draw.line(at, fill, max(1, round(width * self._unit)), joint="curve")

    def text(self, x: float, y: float, text: str, height: float, fill: Colour) -> None:
        """Draw a text around a point. `height` is that of its digits and capitals."""
        pixels = height * self._unit
        self._draw.text(
            (x * self._unit, y * self._unit + pixels / 2),
            text,
            fill,
            _font(pixels),
            # The middle of the base line, because all letters stand on it.
            anchor="ms",
            stroke_width=pixels * _BOLDNESS,
        )

    def shade(self, top: float, bottom: float, first: Colour, last: Colour) -> None:
        """Fill a band with a gradient from top to bottom, over the whole width."""
        ys = slice(round(top * self._unit), round(bottom * self._unit))
        pixels = np.array(self._image)
        count = len(pixels[ys])
        share = np.linspace(0, 1, max(count, 1))[:count, None]
        pixels[ys, :, :3] = (np.array(first) * (1 - share) + np.array(last) * share)[:, None]
        pixels[ys, :, 3] = 255
        self._image = Image.fromarray(pixels)
        self._draw = ImageDraw.Draw(self._image)

    def pixels(self) -> UInt8[np.ndarray, "h w 4"]:
        """Return the picture at its size, as RGB and opacity."""
        return np.asarray(self._image.reduce(_SUPERSAMPLING))

    def _pixels(self, *lengths: float) -> list[float]:
        return [length * self._unit for length in lengths]


@functools.cache
def _font(pixels: float) -> ImageFont.FreeTypeFont:
    """Return pillow's own font, of a size at which digits are so many pixels high."""
    _, top, _, bottom = ImageFont.load_default(100).getbbox("0", anchor="ls")
    font = ImageFont.load_default(100 * pixels / (bottom - top))
    # Pillow's wheels have FreeType.
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font


def mixed(first: Colour, second: Colour, share: float) -> Colour:
    """Return `first` with a share of `second`."""
    red, green, blue = (
        round(a * (1 - share) + b * share) for a, b in zip(first, second, strict=True)
    )
    return red, green, blue


def lighter(colour: Colour, share: float) -> Colour:
    return mixed(colour, (255, 255, 255), share)


def darker(colour: Colour, share: float) -> Colour:
    return mixed(colour, (0, 0, 0), share)


def readable_on(colour: Colour) -> Colour:
    """Return black or white, whichever contrasts more with a colour."""
    red, green, blue = colour
    bright = 0.299 * red + 0.587 * green + 0.114 * blue > 140
    return (20, 20, 24) if bright else (255, 255, 255)
