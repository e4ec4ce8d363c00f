"""Pages of text for training: what is printed, where, and how it is asked, in the font that Pillow contains."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ImageFont

from tests.cases import cases
from tests.transformers_engine import TransformersEngine
from training.export import export
from training.learner import Learner
from training.reading import batches, evaluate, fonts, labels, prompts, texts
from training.reading.batches import Pages, Reading
from training.reading.export import PUBLISHED
from training.reading.pages import Page, print_page
from training.reading.train import PLAN, SIZES
from training.sizes import PATCH

GRID = (4, 7)
SMALL = replace(SIZES, num_hidden_layers=2, depth=1)


@pytest.fixture(autouse=True)
def _one_font(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    font = ImageFont.load_default(20)
    assert isinstance(font, ImageFont.FreeTypeFont)
    monkeypatch.setattr(fonts, "styles", lambda family, *, slanted=False: (Path(family),))
    monkeypatch.setattr(fonts, "load", lambda path, size: font.font_variant(size=size))
    return


def reading(seed: int, pages: Pages | None = None) -> Reading:
    return batches.make(random.Random(seed), GRID, pages or Pages())


def printed(*lines: str, seed: int = 0) -> Page:
    return print_page(random.Random(seed), lines, GRID, 20, ["Pillow"])


@cases("seed", range(12))
def test_characters_have_their_places(seed: int) -> None:
    """Where a character is, the image has ink, and the order of characters is that of the response."""
    page = printed("Milk   1.50", "A  B", "x" * 50, seed=seed)
    assert "".join(glyph.character for glyph in page.glyphs) == "".join(page.lines)
    assert page.lines[:2] == ("Milk 1.50", "A B")
    assert 3 < len(page.lines[2]) < 50
    pixels = np.asarray(page.image.convert("L"), np.float32)
    for glyph in page.glyphs:
        left, top = round(glyph.x) - 5, round(glyph.y) - 9
        ink = np.ptp(pixels[max(top, 0) : top + 14, max(left, 0) : left + 10])
        assert ink > 60 or glyph.character in " .", glyph
    keys = [(glyph.line, glyph.x) for glyph in page.glyphs]
    assert keys == sorted(keys)


def test_labels_are_those_of_the_patches() -> None:
    page = printed("Milk")
    cells = labels.cells(page, GRID).reshape(*GRID, -1)
    for glyph in page.glyphs:
        row, column = int(glyph.y // PATCH), int(glyph.x // PATCH)
        patch = 2 * (row % 2) + column % 2
        slots = cells[row // 2, column // 2, patch * labels.SLOTS : (patch + 1) * labels.SLOTS]
        assert texts.CHARACTERS.index(glyph.character) in slots
        assert cells[row // 2, column // 2, 4 * labels.SLOTS + 2 * (row % 2)] == 0
    assert np.count_nonzero(cells[..., : 4 * labels.SLOTS] != labels.NONE) == len("Milk")


def test_batch_points_to_the_characters() -> None:
    made = batches.pack([reading(seed) for seed in (1, 2)], GRID)
    for index, one in enumerate(reading(seed) for seed in (1, 2)):
        ends = made.pointers[made.pointers[:, 0] == index, 1]
        targets = made.targets[index, ends].tolist()
        assert targets == [prompts.character_token(each) for each in one.response if each != "\n"]
    assert bool((made.spots.sum(1) == 1).all())


def test_texts_fit_and_totals_are_on_the_receipt() -> None:
    rng = random.Random(1)
    for count in range(3, 12):
        receipt = texts.receipt(rng, count, 20)
        assert len(receipt.lines) <= max(count, 4)
        assert all(0 < len(line) <= 20 for line in receipt.lines)
        assert receipt.total is None or any(line.endswith(receipt.total) for line in receipt.lines)
    asked = [reading(seed, Pages(receipts=1, totals=1)) for seed in range(40)]
    totals = [one for one in asked if one.prompt in prompts.TOTAL]
    assert {prompts.NO_TOTAL} < {one.response for one in totals}
    found = [one for one in totals if one.response != prompts.NO_TOTAL]
    assert all(any(line.endswith(one.response) for line in one.page.lines) for one in found)


def test_unreadable_images_are_declined() -> None:
    responses = {reading(seed, Pages(unreadable=1)).response for seed in range(20)}
    assert responses == {prompts.NO_TEXT, prompts.NOT_READABLE}


@pytest.mark.slow
def test_exported_model_reads_what_it_was_trained_on(tmp_path: Path) -> None:
    """Pixels, tokens and positions of training are those of transformers."""
    pages = [
        Reading(printed(text, seed=seed), "OCR", text, is_text=True) for seed, text in ((1, "Tea 1.20"), (2, "#7"))
    ]
    learner = Learner(SMALL, 1, dtype=torch.float32, cells=PLAN.cells, places=PLAN.places)
    learner.begin(("",))
    learner.pointing = 0.3
    batch = batches.pack(pages, GRID)
    for _ in range(60):
        learner.learn([batch], 1, 2e-3)
    export(learner.weights, replace(PUBLISHED, architecture=SMALL), tmp_path)
    conversations = [
        [{"role": "user", "content": [{"type": "image", "image": page.page.image}, {"type": "text", "text": "OCR"}]}]
        for page in pages
    ]
    assert TransformersEngine(tmp_path).respond(conversations) == ["Tea 1.20", "#7"]


def test_results_count_characters_and_lines() -> None:
    page = Page(printed("a").image, (), ())
    asked = [Reading(page, "", text, is_text=True) for text in ("abc\nde", "x")]
    result = evaluate.grade("row", asked, ["abc\ndf", "x"])
    assert (round(result.characters, 3), round(result.lines, 3), result.exact) == (
        round(6 / 7, 3),
        round(2 / 3, 3),
        0.5,
    )
    assert evaluate.distance("kitten", "sitting") == 3
    assert "| row | 85.7% | 66.7% | 50.0% |" in evaluate.table([result])


def test_evaluation_needs_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        evaluate.main(["checkpoint", "--n", "0"])
    assert "--n: at least one page" in capsys.readouterr().err
