"""Labels of vision tokens for a model that reads: characters, and where they are in the text.

A token covers four patches. Each patch has the first two characters whose centers it covers, in reading order; each
half of a token has the line and the index in the line of its first character.
"""

from __future__ import annotations

import numpy as np

from training.compose import Grid
from training.reading.pages import Page
from training.reading.texts import CHARACTERS
from training.sizes import PATCH

UNKNOWN = -100
SLOTS = 2
LINES, OFFSETS = 16, 40
NONE = len(CHARACTERS)
CELLS = (len(CHARACTERS) + 1,) * (4 * SLOTS) + (LINES + 1, OFFSETS) * 2
PLACES = (16, 16)
"""Labels of a vision token in the text model: its row and column."""


def cells(page: Page, grid: Grid) -> np.ndarray:
    """Return the labels of every token, (rows * columns, 12)."""
    slots = np.full((2 * grid[0], 2 * grid[1], SLOTS), NONE, np.int64)
    places = np.full((2 * grid[0], grid[1], 2), UNKNOWN, np.int64)
    places[..., 0] = LINES
    for glyph in page.glyphs:
        row, column = int(glyph.y // PATCH), int(glyph.x // PATCH)
        if not (0 <= row < slots.shape[0] and 0 <= column < slots.shape[1]):
            continue
        free = np.flatnonzero(slots[row, column] == NONE)
        if len(free):
            slots[row, column, free[0]] = CHARACTERS.index(glyph.character)
        if places[row, column // 2, 0] == LINES:
            places[row, column // 2] = min(glyph.line, LINES - 1), min(glyph.offset, OFFSETS - 1)
    found = [slots[half::2, part::2, :] for half in (0, 1) for part in (0, 1)]
    found += [places[half::2] for half in (0, 1)]
    return np.concatenate(found, axis=-1).reshape(-1, len(CELLS))


def spots(page: Page, grid: Grid) -> list[int]:
    """Return the index of the token that covers the center of each character."""
    found = []
    for glyph in page.glyphs:
        row = min(int(glyph.y // (2 * PATCH)), grid[0] - 1)
        column = min(int(glyph.x // (2 * PATCH)), grid[1] - 1)
        found.append(row * grid[1] + column)
    return found
