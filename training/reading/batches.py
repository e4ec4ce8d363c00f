"""Pack pages with a prompt and its response into rows for training."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import ImageFilter

from training.batches import cut
from training.compose import Grid, choose, photo
from training.drawing import Scene, render
from training.network import Batch
from training.reading import fonts, labels, prompts, texts
from training.reading.pages import SIZES, Page, columns_of, print_page
from training.sizes import FACTOR

LINE_GRIDS: Mapping[Grid, float] = {(1, 4): 1, (1, 6): 2, (1, 8): 2, (2, 5): 2, (2, 7): 2, (2, 10): 1}
PART_GRIDS: Mapping[Grid, float] = {(2, 6): 1, (2, 10): 1, (3, 5): 2, (3, 8): 2, (4, 6): 2, (4, 9): 1, (5, 7): 2}
PAGE_GRIDS: Mapping[Grid, float] = {
    (4, 10): 1, (5, 8): 1, (6, 8): 2, (8, 6): 1, (7, 10): 2, (8, 8): 2, (10, 8): 2, (12, 9): 2, (10, 12): 2,
    (14, 10): 2, (9, 14): 1, (3, 12): 1,
}  # fmt: skip
TOKENS = 2600
"""Approximate number of tokens of a batch."""
FAMILIES = (*fonts.MONOSPACED, *fonts.PROPORTIONAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """The composition of a batch."""

    grids: Mapping[Grid, float] = field(default_factory=lambda: PART_GRIDS)
    receipts: float = 0.4
    """Share of the pages of at least three lines that are receipts."""
    totals: float = 0.0
    """Share of the prompts about receipts that ask for the amount to pay."""
    unreadable: float = 0.0
    """Share of the images without text, or with text that nobody could read."""
    sizes: tuple[float, float] = SIZES
    families: Sequence[str] = FAMILIES


@dataclass(frozen=True, slots=True)
class Reading:
    """A page, a prompt about it, and the response."""

    page: Page
    prompt: str
    response: str
    is_text: bool
    """Whether the response is the text of the page."""


def sight_batch(rng: random.Random, pages: Pages) -> Batch:
    """Create a batch of pages without prompts, to train the vision encoder."""
    grid = choose(rng, pages.grids)
    count = max(TOKENS // (grid[0] * grid[1]) // 2, 1)
    return pack([make(rng, grid, pages) for _ in range(count)], grid, asked=False)


def batch(rng: random.Random, pages: Pages) -> Batch:
    """Create a batch of pages of one size."""
    grid = choose(rng, pages.grids)
    readings: list[Reading] = []
    length = 0
    while not readings or length * (len(readings) + 1) < TOKENS:
        readings.append(make(rng, grid, pages))
        length = max(length, _length(readings[-1], grid))
    return pack(readings, grid)


def make(rng: random.Random, grid: Grid, pages: Pages) -> Reading:
    """Create a page, a prompt and its response."""
    if rng.random() < pages.unreadable:
        return _unreadable(rng, grid, pages)
    size = rng.uniform(*pages.sizes)
    width = min(columns_of(size, 0.95 * grid[1] * FACTOR), labels.OFFSETS)
    count = max(int(grid[0] * FACTOR / (size * 1.3)), 1)
    count = min(count if rng.random() < 0.6 else rng.randint(1, count), labels.LINES)
    is_receipt = count >= 3 and rng.random() < pages.receipts
    text = texts.receipt(rng, count, width) if is_receipt else texts.lines(rng, count, width)
    page = print_page(rng, text.lines, grid, size, pages.families)
    if not page.lines:
        return make(rng, grid, pages)
    total = text.total if text.total and any(line.endswith(text.total) for line in page.lines) else None
    prompt, response = prompts.choose(rng, texts.Text(page.lines, total), pages.totals if is_receipt else 0)
    return Reading(page, prompt, response, prompt in prompts.READ)


def _unreadable(rng: random.Random, grid: Grid, pages: Pages) -> Reading:
    """Return an image without text, or text that is too small or too blurred."""
    prompt = rng.choice(prompts.READ)
    size = (grid[1] * FACTOR, grid[0] * FACTOR)
    if rng.random() < 0.5:
        empty = print_page(rng, (), grid, 20, pages.families).image
        scene = Scene(width=size[0], height=size[1], objects=(), backdrop=photo(rng))
        image = empty if rng.random() < 0.5 else render(scene).resize(size)
        return Reading(Page(image, (), ()), prompt, prompts.NO_TEXT, is_text=False)
    text = texts.lines(rng, 2 * grid[0], 6 * grid[1])
    small = rng.random() < 0.5
    printed = print_page(rng, text.lines, grid, 7 if small else rng.uniform(*pages.sizes), pages.families).image
    blurred = printed.filter(ImageFilter.GaussianBlur(1.5 if small else rng.uniform(4, 9)))
    return Reading(Page(blurred, (), ()), prompt, prompts.NOT_READABLE, is_text=False)


def _length(reading: Reading, grid: Grid) -> int:
    fixed = (prompts.BEFORE, prompts.AFTER, reading.prompt, prompts.TURN, prompts.END)
    return sum(len(prompts.encode(text)) for text in fixed) + grid[0] * grid[1] + len(reading.response)


def pack(readings: Sequence[Reading], grid: Grid, *, asked: bool = True) -> Batch:
    """Convert pages of one size to tensors."""
    count, size = len(readings), grid[0] * grid[1]
    length = max(_length(reading, grid) for reading in readings) if asked else 0
    tokens = np.full((count, length), prompts.encode("<|endoftext|>")[0])
    targets, segments = np.full((count, length), -100), np.full((count, length), -1)
    positions = np.zeros((3, count, length), np.int64)
    owners = np.zeros((count, length), np.int64)
    pointers: list[tuple[int, int]] = []
    pointed: list[int] = []
    places = [np.zeros((0, 2 + len(labels.PLACES)), np.int64)]
    for index, reading in enumerate(readings if asked else ()):
        row = _Row(prompts.VOCABULARY + index * size, grid)
        row.write(reading)
        written = len(row.tokens)
        tokens[index, :written], segments[index, :written] = row.tokens, 0
        targets[index, row.answer - 1 : written - 1] = row.tokens[row.answer :]
        owners[index] = index
        positions[:, index, :written] = row.positions()
        places.append(row.places(index))
        if reading.is_text:
            found = labels.spots(reading.page, grid)
            starts = row.starts(reading)
            pointers += [(index, start) for start in starts]
            pointed += [row.image + spot for spot in found]
    spots = np.zeros((len(pointed), length), bool)
    spots[np.arange(len(pointed)), pointed] = True
    return Batch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        segments=torch.from_numpy(segments),
        targets=torch.from_numpy(targets),
        patches=cut(torch.from_numpy(_pixels(readings))).to(torch.bfloat16),
        grid=(2 * grid[0], 2 * grid[1]),
        cells=torch.from_numpy(np.concatenate([labels.cells(reading.page, grid) for reading in readings])),
        places=torch.from_numpy(np.concatenate(places)),
        pointers=torch.tensor(pointers, dtype=torch.int64).view(-1, 2),
        spots=torch.from_numpy(spots),
        owners=torch.from_numpy(owners),
        tasks=tuple(_task(reading) for reading in readings) if asked else (),
    )


class _Row:
    """The tokens of a prompt and its response."""

    def __init__(self, first: int, grid: Grid) -> None:
        self._first, self._grid = first, grid
        self.tokens: list[int] = []
        self.image = self.answer = 0
        """Index of the first token of the image, and of the response."""

    def write(self, reading: Reading) -> None:
        size = self._grid[0] * self._grid[1]
        self.tokens += prompts.encode(prompts.BEFORE)
        self.image = len(self.tokens)
        self.tokens += range(self._first, self._first + size)
        self.tokens += prompts.encode(prompts.AFTER) + prompts.encode(reading.prompt) + prompts.encode(prompts.TURN)
        self.answer = len(self.tokens)
        written = [prompts.character_token(each) for each in reading.response]
        is_fixed = not reading.is_text and reading.response in {prompts.NO_TEXT, prompts.NOT_READABLE, prompts.NO_TOTAL}
        self.tokens += prompts.encode(reading.response) if is_fixed else written
        self.tokens += prompts.encode(prompts.END)

    def positions(self) -> np.ndarray:
        """Return time, row and column of every token, (3, tokens)."""
        size = self._grid[0] * self._grid[1]
        found = np.tile(np.arange(len(self.tokens)), (3, 1))
        found[:, self.image : self.image + size] = self.image + np.indices((1, *self._grid)).reshape(3, -1)
        after = len(self.tokens) - self.image - size
        found[:, self.image + size :] = self.image + max(self._grid) + np.arange(after)
        return found

    def places(self, index: int) -> np.ndarray:
        """Return batch row, index, row and column of the image's tokens."""
        _, rows, columns = np.indices((1, *self._grid)).reshape(3, -1)
        tokens = self.image + np.arange(len(rows))
        return np.stack([np.full(len(rows), index), tokens, rows, columns], axis=1)

    def starts(self, reading: Reading) -> list[int]:
        """Return the index of the token before each character of the page, which predicts it."""
        return [self.answer - 1 + index for index, each in enumerate(reading.response) if each != "\n"]


def _pixels(readings: Sequence[Reading]) -> np.ndarray:
    """Return the images as two equal frames each, (N, 2, H, W, 3)."""
    images = np.stack([np.asarray(reading.page.image) for reading in readings])
    return np.repeat(images[:, None], 2, axis=1)


def _task(reading: Reading) -> str:
    if reading.is_text:
        return f"{min(len(reading.page.lines), 5)} lines"
    return "total" if reading.prompt in prompts.TOTAL else "unreadable"
