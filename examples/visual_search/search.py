"""Search pictures and PDF pages by text or picture: python search.py [FOLDER (--text TEXT | --image IMAGE)]"""

from __future__ import annotations

import argparse
import base64
import html
import importlib.util
import io
import json
import string
import sys
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pypdfium2 as pdfium
from PIL import Image, ImageOps
from tqdm import tqdm

from dashinfer_vlm_core import VLM, DashInferVLMError, RequestError

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
TEMPLATE = Path(__file__).with_name("contact_sheet.html")
SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
INSTRUCTION = "Retrieve images or text relevant to the user's query."  # of text; pictures are compared as they are
THREADS = 8  # concurrent requests, which the engine computes in batches
SAVE_EVERY = 500
THUMBNAIL = 320

Content = list[dict[str, Any]]


@dataclass(frozen=True)
class Page:
    """A picture, or a page of a PDF (`number`, from 1 on). A file that changed has new pages."""

    folder: str
    name: str
    size: int
    modified: int
    number: int | None = None

    @property
    def path(self) -> Path:
        return Path(self.folder, self.name)

    @property
    def content(self) -> Content:
        url = self.path.as_uri()
        if self.number is None:
            return [{"type": "image_url", "image_url": {"url": url}}]
        return [{"type": "file", "file": {"file_url": url, "pages": str(self.number)}}]


@dataclass(frozen=True)
class Match:
    page: Page
    similarity: float
    relevance: float | None = None


Index = dict[Page, np.ndarray]


def find_pages(folder: Path) -> Iterator[Page]:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        page = picture_of(path, folder)
        if path.suffix.lower() in SUFFIXES:
            yield page
        elif path.suffix.lower() == ".pdf":
            try:
                with pdfium.PdfDocument(path) as document:
                    numbers = range(1, len(document) + 1)
            except pdfium.PdfiumError as error:
                skip(page, str(error))
            else:
                yield from (replace(page, number=number) for number in numbers)
        else:
            skip(page, "It is neither a picture nor a PDF.")


def picture_of(path: Path, folder: Path) -> Page:
    stat = path.stat()
    return Page(str(folder), str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns)


def skip(page: Page, reason: str) -> None:
    name = page.name + (f", page {page.number}" if page.number else "")
    tqdm.write(f"Skipped {name}: {reason}", file=sys.stderr)


def embed(vlm: VLM, content: Content, instruction: str | None = None) -> np.ndarray:
    (output,) = vlm.embed([{"role": "user", "content": content}], instruction=instruction, use_tqdm=False)
    vector = np.array(output.outputs.embedding, np.float32)
    vector /= np.linalg.norm(vector)
    return vector


def update_index(vlm: VLM, model: str, folder: Path, file: Path) -> Index:
    """Embed the pages that the index in this file does not have, and drop those that the folder does not have."""
    pages = list(find_pages(folder))
    known = load_index(file, model)
    index = {page: known[page] for page in pages if page in known}
    new = [page for page in pages if page not in known]
    for start in range(0, len(new), SAVE_EVERY):
        index |= embed_pages(vlm, new[start : start + SAVE_EVERY])
        save_index(index, model, file)
    return index


def embed_pages(vlm: VLM, pages: Sequence[Page]) -> Index:
    """Embed pages without those that cannot be read."""

    def try_embed(page: Page) -> np.ndarray | None:
        try:
            return embed(vlm, page.content)
        except RequestError as error:
            skip(page, error.message.removeprefix("`prompts[0]`: "))
            return None

    with ThreadPoolExecutor(THREADS) as pool:
        vectors = tqdm(pool.map(try_embed, pages), total=len(pages), desc="Embedding", unit="page")
        return {page: vector for page, vector in zip(pages, vectors, strict=True) if vector is not None}


def load_index(file: Path, model: str) -> Index:
    if not file.exists():
        return {}
    try:
        with file.open("rb") as stream, np.load(stream) as saved:
            if str(saved["model"]) != model:  # vectors of two models cannot be compared
                return {}
            pages = [Page(*fields) for fields in json.loads(str(saved["pages"]))]
            return dict(zip(pages, saved["vectors"], strict=True))
    except (EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile):
        sys.exit(f"{file} is not a complete index. Delete it, or choose another --output.")


def save_index(index: Index, model: str, file: Path) -> None:
    unfinished = file.with_suffix(".part.npz")
    pages = json.dumps([astuple(page) for page in index])
    np.savez(unfinished, model=model, pages=pages, vectors=np.array(list(index.values())))
    unfinished.replace(file)


def search(index: Index, query: np.ndarray, count: int, *, use_faiss: bool) -> list[Match]:
    vectors = np.array(list(index.values()))
    if use_faiss:
        import faiss

        flat = faiss.IndexFlatIP(vectors.shape[1])
        flat.add(vectors)
        (similarities,), (rows,) = flat.search(query[None], min(count, len(vectors)))
    else:
        rows = np.argsort(-(vectors @ query), kind="stable")[:count]
        similarities = vectors[rows] @ query
    pages = list(index)
    return [Match(pages[row], float(similarity)) for row, similarity in zip(rows, similarities, strict=True)]


def rerank(model: str, query: Content, matches: Sequence[Match]) -> list[Match]:
    with VLM(model, task="score") as vlm:
        outputs = vlm.score({"content": query}, [{"content": match.page.content} for match in matches], use_tqdm=False)
    scored = [replace(match, relevance=output.outputs.score) for match, output in zip(matches, outputs, strict=True)]
    return sorted(scored, key=lambda match: match.relevance or 0, reverse=True)


def contact_sheet(query: str, matches: Sequence[Match]) -> str:
    cards = "".join(card(rank, match) for rank, match in enumerate(matches, 1))
    return string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(query=query, cards=cards)


def card(rank: int, match: Match) -> str:
    page = match.page
    link = page.path.as_uri() + (f"#page={page.number}" if page.number else "")
    image = f'<a href="{html.escape(link)}">{thumbnail(page)}</a>'
    return f"<li>{image}<h2>{rank}. {html.escape(page.name)}</h2><p>{describe(match)}</p></li>\n"


def describe(match: Match) -> str:
    number = f"page {match.page.number}, " if match.page.number else ""
    relevance = f"relevance {match.relevance:.3f}, " if match.relevance is not None else ""
    return f"{number}{relevance}similarity {match.similarity:.3f}"


def thumbnail(page: Page) -> str:
    """Return an <img> that contains its data."""
    if page.number is None:
        with Image.open(page.path) as opened:
            image = ImageOps.exif_transpose(opened)
    else:
        with pdfium.PdfDocument(page.path) as document:
            sheet = document[page.number - 1]
            image = sheet.render(scale=THUMBNAIL / max(sheet.get_size())).to_pil()
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    data = io.BytesIO()
    image.convert("RGBA").save(data, "webp")
    return f'<img src="data:image/webp;base64,{base64.b64encode(data.getvalue()).decode()}" alt="">'


def _count(text: str) -> int:
    count = int(text)
    if not 1 <= count <= 1000:
        raise argparse.ArgumentTypeError("must be 1 to 1000")
    return count


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Search pictures and PDF pages by text or picture.")
    parser.add_argument("folder", nargs="?", type=Path, default=PICTURES, help="default: the example pictures")
    query = parser.add_mutually_exclusive_group()
    query.add_argument("--text", help="what to search for")
    query.add_argument("--image", type=Path, help="a picture; finds similar ones")
    parser.add_argument("--model", default="demo", help="computes vectors, such as Qwen/Qwen3-VL-Embedding-2B")
    parser.add_argument("--reranker", help="orders what was found, such as Qwen/Qwen3-VL-Reranker-2B")
    parser.add_argument("--count", type=_count, default=12, metavar="N", help="default: 12")
    parser.add_argument("--index", choices=("numpy", "faiss"), default="numpy", help="compares vectors")
    parser.add_argument("--output", type=Path, default=Path("visual-search"), help="folder of the index and the sheet")
    arguments = parser.parse_args()
    if not arguments.folder.is_dir():
        parser.error(f"there is no folder {arguments.folder}: pass one that has pictures or PDFs")
    if arguments.image and not arguments.image.is_file():
        parser.error(f"--image: there is no file {arguments.image}")
    if arguments.output.exists() and not arguments.output.is_dir():
        parser.error(f"--output: {arguments.output} is not a folder")
    if arguments.folder == PICTURES and arguments.text is None and not arguments.image:
        arguments.image = PICTURES / "circle.png"
    if not arguments.text and not arguments.image:
        parser.error("pass what to search for: --text or --image")
    if arguments.index == "faiss" and not importlib.util.find_spec("faiss"):
        parser.error("--index faiss needs FAISS: run pip install faiss-cpu, or omit it")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.text:
        content = [{"type": "text", "text": arguments.text}]
        title = f"<q>{html.escape(arguments.text)}</q>"
    else:
        picture = picture_of(arguments.image.resolve(), arguments.image.resolve().parent)
        content = picture.content
        title = thumbnail(picture)
    with VLM(arguments.model, task="embed") as vlm:
        query = embed(vlm, content, INSTRUCTION if arguments.text else None)
        index = update_index(vlm, arguments.model, arguments.folder.resolve(), arguments.output / "index.npz")
    if not index:
        sys.exit(f"There are no pictures or PDF pages in {arguments.folder}.")
    matches = search(index, query, arguments.count, use_faiss=arguments.index == "faiss")
    if arguments.reranker:
        matches = rerank(arguments.reranker, content, matches)
    for match in matches:
        print(f"{match.page.name}: {describe(match)}")
    sheet = arguments.output / "contact_sheet.html"
    sheet.write_text(contact_sheet(title, matches), encoding="utf-8")
    print(f"Contact sheet: {sheet}")


if __name__ == "__main__":
    try:
        main()
    except (DashInferVLMError, OSError) as error:
        sys.exit(str(error))
