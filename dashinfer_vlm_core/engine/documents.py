"""DocumentExpander: documents of a request -> the texts and images of their pages, before any page is rendered; or a
document -> a request for each page."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import TypeAlias

from ..config import EngineConfig
from ..errors import ContextLengthExceeded, InvalidParameter, RequestError
from ..media.documents import POINTS_PER_INCH, Document, Page, check_pages
from ..media.loader import MediaLoader
from ..media.types import Image
from ..media_workers import MediaExecutor
from ..models.interface import ImageProcessor
from ..models.spec import ModelSpec
from ..preprocessing.prompt import PromptBuilder
from ..protocol import ChatRequest, DocumentPart, MediaPart
from ..protocol.validation_errors import invalid

MIN_TOKENS = 16
"""Images of pages with fewer tokens are not suggested."""

_PageContents: TypeAlias = tuple[str | MediaPart, ...]
"""The text and the image of a page, if it has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageRequest:
    """The request for one page of a document, or for an image.

    Attributes:
        number: the number of the page, from 1 on.
        request: the request, with the page's image in place of the document.
        size: width and height of that image in pixels; None of an image that was not decoded yet.
        dpi: its pixels per inch; of an image, a point is a pixel.
        file_bytes: size of the document; None if it was not loaded yet.
        error: why the page cannot be read.
    """

    number: int
    request: ChatRequest
    size: tuple[int, int] | None = None
    dpi: int = POINTS_PER_INCH
    file_bytes: int | None = None
    error: RequestError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentExpander:
    """Replaces the documents of requests.

    Attributes:
        config: limits.
        spec: the checkpoint.
        media: loads the files.
        executor: reads them.
        processor: determines the sizes of pages.
        prompts: counts the tokens.
    """

    config: EngineConfig
    spec: ModelSpec
    media: MediaLoader
    executor: MediaExecutor
    processor: ImageProcessor
    prompts: PromptBuilder

    async def expand(self, request: ChatRequest, loaded: dict[DocumentPart, Document]) -> ChatRequest:
        """Return the request with the text layer and the image of each page in place of its documents.

        Args:
            request: the request.
            loaded: documents that need not be read again; if it is empty, those of this request are added.

        Raises:
            RequestError: a document cannot be loaded or read, or exceeds a limit.
            ContextLengthExceeded: the prompt with all pages and the completion exceed the context.
        """
        parts = request.documents()
        if not parts:
            return request
        missing = await asyncio.to_thread(lambda: [part for part in parts if part not in loaded])  # hashes megabytes
        read = dict(zip(missing, await self.media.load(missing, self.executor.read_document), strict=True))
        documents = [read[part] if part in read else loaded[part] for part in parts]
        if not loaded:
            loaded.update(read)
        self._check_pages(parts, documents)
        return await asyncio.to_thread(self._expand, request, parts, documents)

    async def split(self, request: ChatRequest, pages: str) -> list[PageRequest]:
        """Return a request for the image of each page of a request's only document, or image.

        Args:
            request: the request.
            pages: the selected pages, as in `DocumentPart.pages`.

        Raises:
            RequestError: the document cannot be loaded or read, has no such page, or exceeds a limit.
        """
        parts = [replace(part, pages=pages, render="image", split=True) for part in request.documents()]
        if not parts:
            if not {"", "1"}.issuperset(re.split("[-,]", pages)):
                raise invalid("pages", "selects other pages than 0, but an image has one page. Remove it.")
            return [PageRequest(number=1, request=request)]
        documents = await self.media.load(parts, self.executor.read_document)
        return await asyncio.to_thread(self._split, request, parts[0], documents[0])

    def _split(self, request: ChatRequest, part: DocumentPart, document: Document) -> list[PageRequest]:
        images = document.images(part)
        first = request.with_documents({part.path: (images[0],)})
        available = self._max_prompt_tokens(request) - self._count_text_tokens(first, images=1)
        return [
            self._page_request(
                request.with_documents({part.path: (image,)}), page, image, len(document.file), available
            )
            for page, image in zip(document.pages, images, strict=True)
        ]

    def _page_request(
        self, request: ChatRequest, page: Page, image: MediaPart, file_bytes: int, available: int
    ) -> PageRequest:
        error: RequestError | None = page.error
        try:
            if not error and (tokens := self._count_tokens(image)) > available:
                error = self._page_too_long(image, tokens, available)
        except InvalidParameter as raised:
            if raised.param != image.path:  # an option, which applies to all pages
                raise
            error = raised
        if error:
            return PageRequest(number=page.number, request=request, file_bytes=file_bytes, error=error)
        height, width = self.processor.size(Image.of_page(image))
        dpi = max(1, round(width * POINTS_PER_INCH / page.width))
        return PageRequest(number=page.number, request=request, size=(width, height), dpi=dpi, file_bytes=file_bytes)

    def _check_pages(self, parts: Sequence[DocumentPart], documents: Sequence[Document]) -> None:
        counts = {"rendered": 0, "read": 0}
        for part, document in zip(parts, documents, strict=True):
            use = "read" if part.render == "text" else "rendered"
            counts[use] += len(document.pages)
            check_pages(counts[use], part, self.config.limits)

    def _expand(
        self, request: ChatRequest, parts: Sequence[DocumentPart], documents: Sequence[Document]
    ) -> ChatRequest:
        contents = {part.path: _contents(part, document) for part, document in zip(parts, documents, strict=True)}
        expanded = request.with_documents({path: tuple(chain(*pages)) for path, pages in contents.items()})
        tokens = [self._count_tokens(part) for part in expanded.media() if part.page is not None]
        # Other images and videos are counted when they are processed, and the exact prompt when it is built.
        total = sum(tokens)
        if request.prompt_limit is None:  # otherwise, text is cut when the prompt is built
            total += self._count_text_tokens(expanded, images=len(tokens))
        limit = self._max_prompt_tokens(request)
        if total > limit:
            raise self._too_long(request, list(chain(*contents.values())), tokens, total, limit)
        return expanded

    def _max_prompt_tokens(self, request: ChatRequest) -> int:
        completion = 0 if self.spec.pooling else request.sampling().max_tokens or 1
        return self.prompts.max_model_len - completion

    def _count_text_tokens(self, request: ChatRequest, *, images: int) -> int:
        return self.prompts.count_tokens(request) - images  # which are a token each

    def _count_tokens(self, part: MediaPart) -> int:
        assert part.page is not None
        image = Image.of_page(part)
        try:
            size = self.processor.size(image)
        except InvalidParameter as error:
            if error.param != part.path:
                raise
            raise InvalidParameter(f"Page {part.page.number}: {error.message}", param=part.path) from None
        is_smaller = any(full - side > self.spec.pixels.factor for full, side in zip(part.page.size, size, strict=True))
        if is_smaller and part.page.dpi is not None and part.max_pixels is None:
            param = f"{part.options_path}.dpi"
            full, scaled = (f"{width} x {height}" for height, width in (part.page.size, size))
            raise InvalidParameter(
                f"`{param}` is {part.page.dpi}, so page {part.page.number} has {full} pixels, more than the {scaled}"
                " that images can have. Lower it, or set `max_pixels` as well: the page is then scaled.",
                param=param,
            )
        return self.processor.count_tokens(image)

    def _too_long(
        self, request: ChatRequest, pages: Sequence[_PageContents], tokens: Sequence[int], total: int, limit: int
    ) -> ContextLengthExceeded:
        fitting = self._count_fitting(pages, tokens, total - limit)
        completion = self.prompts.max_model_len - limit
        requested = f", and {completion} more are requested" if completion > 1 else ""
        pixels = self._max_pixels(tokens, limit - total + sum(tokens))
        advice = f"{fitting} pages fit: select them with `pages`{pixels}."
        if not fitting:
            advice = f"No page fits: request fewer tokens, or shorten the messages{pixels}."
        return ContextLengthExceeded(
            f"The prompt has {total} tokens with the {len(pages)} pages of its documents{requested}, but the context"
            f" length is {self.prompts.max_model_len}, completion included. {advice}",
            prompt_tokens=total,
            limit=self.prompts.max_model_len,
            param=request.documents()[0].options_path,
        )

    def _page_too_long(self, image: MediaPart, tokens: int, available: int) -> ContextLengthExceeded:
        assert image.page is not None
        return ContextLengthExceeded(
            f"Page {image.page.number} has {tokens} tokens, but only {max(0, available)} of the context length of"
            f" {self.prompts.max_model_len} are free for it. Leave it out with"
            f" `pages`{self._max_pixels([tokens], available)}.",
            prompt_tokens=tokens,
            limit=self.prompts.max_model_len,
            param=image.options_path,
        )

    def _count_fitting(self, pages: Sequence[_PageContents], tokens: Sequence[int], excess: int) -> int:
        images = list(tokens)
        fitting = len(pages)
        while excess > 0 and fitting:
            fitting -= 1
            for content in pages[fitting]:
                excess -= len(self.prompts.encode_plain(content)) if isinstance(content, str) else images.pop()
        return fitting

    def _max_pixels(self, tokens: Sequence[int], available: int) -> str:
        each = available // len(tokens) if tokens else 0
        return f", or set `max_pixels` to {each * self.spec.pixels.factor**2} or less" if each >= MIN_TOKENS else ""


def _contents(part: DocumentPart, document: Document) -> list[_PageContents]:
    images = document.images(part) if part.render != "text" else []
    if not images and not any(page.text.strip() for page in document.pages):
        param = f"{part.options_path}.render"
        raise InvalidParameter(
            f'`{param}` is "text", but the pages have no text layer. Set it to "image".', param=param
        )
    is_only = len(document.pages) == 1
    return [_page_contents(page, image, is_only=is_only) for page, image in zip_longest(document.pages, images)]


def _page_contents(page: Page, image: MediaPart | None, *, is_only: bool) -> _PageContents:
    title = "" if is_only else f"Page {page.number}:\n"
    text = title + (f"{page.text}\n" if page.text.strip() else "")
    return tuple(content for content in (text, image) if content)
