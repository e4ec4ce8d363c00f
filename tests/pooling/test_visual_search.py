"""examples/visual_search indexes a folder, searches it by text and by picture, reranks, and writes a contact sheet."""

from __future__ import annotations

import functools
import html
import importlib.util
import itertools
import random
import re
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dashinfer_vlm_core import VLM
from tests.pages import ROOT, read_page
from tests.pdfs import document
from training.drawing import render
from training.gallery import NIGHT, PAPER, WHITE, item, scene

FOLDER = Path("examples/visual_search")
PROGRAM = ROOT / FOLDER / "search.py"
SEARCH = SimpleNamespace(**runpy.run_path(str(PROGRAM)))
ODD_NAME = 'a & <b> "c" #1 %20.png'


class CountingVLM(VLM):
    """Counts what it embeds."""

    embedded = 0

    def embed(self, *arguments, **options):
        self.embedded += 1
        return super().embed(*arguments, **options)


@pytest.fixture(scope="module")
def vlm():
    with CountingVLM("demo", task="embed") as vlm:
        yield vlm


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    picture = (ROOT / "examples/pictures/circle.png").read_bytes()
    (folder / ODD_NAME).write_bytes(picture)
    (folder / "damaged.PNG").write_bytes(picture[:300])
    (folder / "damaged.pdf").write_bytes(document("x")[:99])
    (folder / "notes.txt").write_text("Not a picture.")
    (folder / "sub/two.pdf").write_bytes(document("First page.", "Second page.", size=(84, 84)))
    return folder


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Run the program in an empty folder; return what it prints, and the contact sheet if it wrote one."""

    def run(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["search.py", *map(str, arguments)])
        runpy.run_path(str(PROGRAM), run_name="__main__")
        return capsys.readouterr(), (tmp_path / "visual-search/contact_sheet.html").read_text("utf-8")

    return run


def scores(printed, name):
    return [float(value) for value in re.findall(rf"{name} ([\d.]+)", printed)]


def test_folder_is_searched_by_picture(folder, run):
    output, sheet = run(folder, "--image", folder / ODD_NAME)
    first, *others, last = output.out.splitlines()
    assert first == f"{ODD_NAME}: similarity 1.000"
    assert sorted(line.partition(",")[0] for line in others) == ["sub/two.pdf: page 1", "sub/two.pdf: page 2"]
    assert scores(output.out, "similarity") == sorted(scores(output.out, "similarity"), reverse=True)
    assert last == "Contact sheet: visual-search/contact_sheet.html"
    skipped = re.findall(r"Skipped (\S+): (\S+)", output.err)
    assert sorted(skipped) == [("damaged.PNG", "This"), ("damaged.pdf", "Failed"), ("notes.txt", "It")]
    assert "<h2>1. a &amp; &lt;b&gt; &quot;c&quot; #1 %20.png</h2><p>similarity 1.000</p>" in sheet
    assert f'<a href="{(folder / "sub/two.pdf").as_uri()}#page=2">' in sheet
    assert sheet.count("<img ") == sheet.count('<img src="data:image/webp;base64,') == 4  # the query, too


def test_text_of_the_query_is_escaped_and_the_number_of_results_limited(folder, run):
    output, sheet = run(folder, "--text", "<script>", "--count", 1)
    assert len(output.out.splitlines()) == 2
    assert "<q>&lt;script&gt;</q>" in sheet
    assert sheet.count("<li>") == 1


def test_reranker_orders_the_results(folder, run, embedding, reranker, scorer):
    output, sheet = run(folder, "--text", "A circle.", "--model", embedding, "--reranker", reranker)
    relevance = scores(output.out, "relevance")
    assert len(relevance) == 3
    assert relevance == sorted(relevance, reverse=True)
    (expected,) = scorer.score("A circle.", [{"image": (folder / ODD_NAME).as_uri()}], use_tqdm=False)
    found = next(line for line in output.out.splitlines() if line.startswith(ODD_NAME))
    assert scores(found, "relevance") == [pytest.approx(expected.outputs.score, abs=0.02)]
    names = [html.escape(line.partition(":")[0]) for line in output.out.splitlines()[:-1]]
    assert re.findall(r"<h2>\d+\. (.+)</h2>", sheet) == names


def test_only_new_and_changed_files_are_embedded(folder, vlm, tmp_path):
    def update(model="demo"):
        before = vlm.embedded
        index = SEARCH.update_index(vlm, model, folder, tmp_path / "index.npz")
        return vlm.embedded - before, sorted(page.name for page in index)

    (folder / "damaged.PNG").unlink()
    both = [ODD_NAME, "sub/two.pdf", "sub/two.pdf"]
    assert update() == (3, both)
    assert update() == (0, both)
    (folder / "b.png").write_bytes((ROOT / "examples/pictures/pair.png").read_bytes())
    (folder / "sub/two.pdf").write_bytes(document("One page.", size=(84, 84)))
    assert update() == (2, [ODD_NAME, "b.png", "sub/two.pdf"])
    (folder / "b.png").unlink()
    assert update() == (0, [ODD_NAME, "sub/two.pdf"])
    assert update("another") == (2, [ODD_NAME, "sub/two.pdf"])
    for damaged in (b"", b"text", (tmp_path / "index.npz").read_bytes()[:200]):
        (tmp_path / "index.npz").write_bytes(damaged)
        with pytest.raises(SystemExit, match="is not a complete index"):
            update()


def test_faiss_finds_what_numpy_finds_or_is_reported_as_missing(folder, run, capsys):
    arguments = (folder, "--text", "A circle.", "--count", 2)
    expected, _ = run(*arguments)
    if importlib.util.find_spec("faiss"):
        output, _ = run(*arguments, "--index", "faiss")
        assert output.out == expected.out
    else:
        with pytest.raises(SystemExit):
            run(*arguments, "--index", "faiss")
        assert "--index faiss needs FAISS" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["."], "pass what to search for: --text or --image"),
        (["missing", "--text", "x"], "there is no folder missing"),
        ([".", "--text", "x", "--count", "0"], "--count"),
        ([".", "--image", "missing.png"], "missing.png"),
        ([".", "--text", "x"], "There are no pictures or PDF pages in ."),
        ([".", "--text", "x", "--model", "missing/folder/of/model"], "missing/folder/of/model"),
    ],
    ids=["no query", "no folder", "no results", "no image", "nothing to index", "no model"],
)
def test_bad_arguments_are_named(arguments, message, run, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    assert message in f"{stopped.value} {capsys.readouterr().err}"


def test_vectors_of_the_demo_model_are_worth_what_the_page_says(vlm):
    """The page has the means of the seeds 0 to 4."""
    generator = random.Random(0)
    words = [*itertools.product(["red", "green", "blue", "yellow"], ["circle", "square", "triangle", "star", "cross"])]
    pictures = [[{"type": "image", "image": draw(generator, *pair)}] for pair in words * 2]
    texts = [[{"type": "text", "text": f"A {color} {shape}."}] for color, shape in words]
    with ThreadPoolExecutor(SEARCH.THREADS) as pool:
        images = np.array(list(pool.map(functools.partial(SEARCH.embed, vlm), pictures)))
        queries = np.array(list(pool.map(lambda text: SEARCH.embed(vlm, text, SEARCH.INSTRUCTION), texts)))
    similar = (images @ images.T - 2 * np.eye(len(images))).argmax(axis=1)
    found = (queries @ images.T).argmax(axis=1)
    stated = [int(rate) for rate in re.findall(r"(\d+) %", read_page(FOLDER / "README.md"))]
    rates = [same(words, rows, place) for rows in (similar, found) for place in (0, 1)]
    assert rates == pytest.approx(stated[:4], abs=15)


def draw(generator, color, shape):
    x, y, radius = generator.randint(30, 80), generator.randint(30, 80), generator.randint(17, 25)
    shown = item(f"{color} {shape}", x, y, radius, generator.uniform(-0.3, 0.3))
    return render(scene(112, 112, generator.choice([WHITE, NIGHT, PAPER]), shown))


def same(words, rows, place):
    """Return for how many percent of the queries the picture of the row has the same color or shape."""
    return 100 * np.mean([words[row % 20][place] == words[query % 20][place] for query, row in enumerate(rows)])
