"""Pages: text printed in an image, with the place of every character."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from training.compose import Grid
from training.reading import fonts
from training.sizes import FACTOR

SIZES = (15, 27)
"""Smallest and largest size of a font in pixels of the model's input."""

Color = tuple[int, int, int]
BLACK, WHITE = (0, 0, 0), (255, 255, 255)


class Glyph(NamedTuple):
    """A character of the response and the center of its place, in pixels. Spaces have a place too."""

    character: str
    line: int
    offset: int
    """Its index in the line."""
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Page:
    """A printed text at the model's input size."""

    image: Image.Image
    glyphs: tuple[Glyph, ...]
    lines: tuple[str, ...]
    """The lines as the model responds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Print:
    """How a page is printed; sizes in pixels before it is resized to the model's input."""

    font: ImageFont.FreeTypeFont
    pitch: float
    left: float
    top: float
    scale: float
    """The size of the image that is drawn, relative to the model's input."""
    aligned: bool
    """Whether what follows several spaces is at the right end of the line."""
    ink: Color
    paper: Color


def columns_of(size: float, width: float) -> int:
    """Return how many characters of average width fit into `width` pixels."""
    return max(int(width / (0.56 * size)), 4)


def print_page(rng: random.Random, lines: Sequence[str], grid: Grid, size: float, families: Sequence[str]) -> Page:
    """Print lines, from the top of an image of `grid` tokens, with a font of about `size` pixels. What does not fit is
    left out."""
    style = _style(rng, len(lines), grid, size, families)
    target = (grid[1] * FACTOR, grid[0] * FACTOR)
    canvas = Image.new("RGB", (round(target[0] * style.scale), round(target[1] * style.scale)), style.paper)
    draw = ImageDraw.Draw(canvas)
    glyphs: list[Glyph] = []
    printed: list[str] = []
    for number, line in enumerate(lines):
        top = style.top + number * style.pitch
        if top + style.pitch > canvas.height:
            break
        placed = _place(line, style, canvas.width)
        for x, text in placed:
            draw.text((x, top), text, style.ink, style.font)
        found = _glyphs(placed, number, style, top)
        glyphs += found
        printed.append("".join(glyph.character for glyph in found))
    image = _distort(rng, canvas.resize(target, 3) if canvas.size != target else canvas)
    return Page(image, tuple(glyphs), tuple(printed))


def _style(rng: random.Random, count: int, grid: Grid, size: float, families: Sequence[str]) -> Print:
    scale = 1.0 if rng.random() < 0.5 else rng.uniform(0.8, 2.0)
    path = rng.choice(fonts.styles(rng.choice(families), slanted=rng.random() < 0.12))
    font = fonts.load(path, max(round(size * scale), 8))
    ascent, descent = font.getmetrics()
    pitch = max((ascent + descent) * rng.uniform(0.95, 1.3), 16 * scale)
    height, width = grid[0] * FACTOR * scale, grid[1] * FACTOR * scale
    dark, light = _color(rng, 0, 90), _color(rng, 200, 255)
    if rng.random() < 0.5:
        dark, light = BLACK, WHITE
    ink, paper = (dark, light) if rng.random() < 0.92 else (light, dark)
    return Print(
        font=font,
        pitch=pitch,
        left=rng.uniform(0.01, 0.08) * width,
        top=rng.uniform(0, max(min(height - count * pitch, 30 * scale), 0)),
        scale=scale,
        aligned=rng.random() < 0.6,
        ink=ink,
        paper=paper,
    )


def _color(rng: random.Random, least: int, most: int) -> Color:
    return rng.randint(least, most), rng.randint(least, most), rng.randint(least, most)


def _place(line: str, style: Print, width: float) -> list[tuple[float, str]]:
    """Return the parts of a line with their left ends: what follows two spaces can be at the right end."""
    left, gap, right = line.partition("  ")
    right = right.strip()
    if gap and style.aligned:
        start = width - style.left - style.font.getlength(right)
        end = style.left + style.font.getlength(left + " ")
        if start > end:
            return [(style.left, left), (start, right)]
    return [(style.left, _shorten(line, style.font, width - style.left))]


def _shorten(line: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    while len(line) > 1 and font.getlength(line) > width:
        excess = font.getlength(line) - width
        line = line[: -max(1, int(excess / font.getlength("M")))].rstrip()
    return line


def _glyphs(parts: Sequence[tuple[float, str]], number: int, style: Print, top: float) -> list[Glyph]:
    """Return the characters of a line; of a run of spaces, the first; between its parts, a space."""
    ascent, _ = style.font.getmetrics()
    y = (top + 0.68 * ascent) / style.scale
    found: list[Glyph] = []
    for left, part in parts:
        start = 0.0
        text = part if part == parts[-1][1] else f"{part} "
        for index, character in enumerate(text):
            end = style.font.getlength(text[: index + 1])
            if character != " " or text[index - 1] != " ":
                found.append(Glyph(character, number, len(found), (left + (start + end) / 2) / style.scale, y))
            start = end
    return found


def _distort(rng: random.Random, image: Image.Image) -> Image.Image:
    if rng.random() < 0.35:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.2, 0.8)))
    if rng.random() < 0.25:
        noise = np.random.default_rng(rng.getrandbits(32)).normal(0, rng.uniform(2, 14), (image.height, image.width, 1))
        image = Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))
    return image
