"""OcrPipeline: a document -> the Markdown of its pages, each of which is a chat request."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..concurrency.fair_slots import FairSlots
from ..config import EngineConfig
from ..errors import DashInferVLMError, EngineClosed, EngineError, MediaTooLarge, QueueFull, UnsupportedParameter
from ..models.ocr_prompts import OcrPrompt, find_ocr_prompt
from ..protocol import ChatRequest
from ..protocol.client import current_client
from ..protocol.ocr import OcrRequest, renamed_ocr_errors
from ..response.ocr import OcrChunk, OcrDimensions, OcrError, OcrImage, OcrPage, OcrUsage
from .admission import CompletionCount, ConcurrencyLimiter
from .chat_pipeline import ChatPipeline
from .documents import PageRequest

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

    from ..preprocessing.preview import MediaPreview

PAGE_TOKENS = 8192
"""Maximum number of tokens of a page, if the context has at least four times as many; else that of completions."""

MAX_IMAGE_BYTES = 64 * 1024 * 1024
"""Maximum size of the images of all pages of a response."""

_FRONT_MATTER = re.compile(r"\s*---\n.*?\n---(\n|$)", re.DOTALL)
_FENCED = re.compile(r"\s*```(markdown|md|html)\n(?P<text>.*?)\n?```\s*", re.DOTALL)

_FENCE = re.compile(r"^```[ \t]*(\S*)", re.MULTILINE)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Result:
    """A page with the name of the model, or with the error because of which it has no text."""

    page: OcrPage
    model: str = ""
    failure: DashInferVLMError | None = None


@dataclass(slots=True)
class _ImageBudget:
    """Counts the bytes of the images that a response contains."""

    remaining: int = MAX_IMAGE_BYTES

    def use(self, count: int) -> MediaTooLarge | None:
        """Count an image; return an error if the response cannot contain it."""
        if count <= self.remaining:
            self.remaining -= count
            return None
        return MediaTooLarge(
            f"The images of the pages exceed {MAX_IMAGE_BYTES} bytes. Select fewer with `pages`, or remove"
            " `include_image_base64`.",
            param="include_image_base64",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OcrPipeline:
    """Converts documents. The pages of all requests together fill at most half of a batch, which clients share: a long
    document does not delay chat requests for long.

    Attributes:
        chat: serves the pages.
        prompt: the prompt of the model.
        options: fields of each chat request.
        limiter: bounds the requests, from arrival to the last page: each keeps its document.
        slots: one for each page in the engine.
        max_pages: the number of slots.
    """

    chat: ChatPipeline
    prompt: OcrPrompt
    options: Mapping[str, Any]
    limiter: ConcurrencyLimiter
    slots: FairSlots
    max_pages: int

    @classmethod
    def create(cls, chat: ChatPipeline, config: EngineConfig) -> OcrPipeline:
        prompt = find_ocr_prompt(config.model, chat.spec)
        if config.ocr_prompt is not None:
            prompt = OcrPrompt(text=config.ocr_prompt)
        max_pages = max(1, config.max_batch_size // 2)
        return cls(
            chat=chat,
            prompt=prompt,
            options=_chat_options(chat, prompt),
            limiter=ConcurrencyLimiter(chat.limiter.limit, CompletionCount()),
            slots=FairSlots(max_pages),
            max_pages=max_pages,
        )

    async def stream(self, request: OcrRequest) -> AsyncGenerator[OcrChunk, None]:
        """Yield each page, in the order of the document.

        A page that fails has an error in place of its text. Closing the generator cancels all pages.

        Raises:
            RequestError: the document cannot be read, or exceeds a limit; `param` names the field.
            QueueFull: too many requests are waiting.
            EngineClosed: the engine was closed.
            DashInferVLMError: no page has text; this is the error of the first one.
        """
        with self.limiter.slots():
            async with contextlib.aclosing(self._stream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _stream(self, request: OcrRequest) -> AsyncGenerator[OcrChunk, None]:
        with renamed_ocr_errors():
            chat = ChatRequest.parse(request.chat_fields(self.prompt.text, self.options))
            pages = await self.chat.split(chat, request.page_numbers)
        images = _ImageBudget() if request.include_image_base64 else None
        tasks = [asyncio.create_task(self._recognize(page, images)) for page in pages]
        processed = 0
        held: list[_Result] = []  # failures before the first page with text
        try:
            for task in tasks:
                result = await task
                held.append(result)
                if result.failure and not processed:
                    continue
                for each in held:
                    processed += each.failure is None
                    yield OcrChunk(
                        model=result.model or self.chat.name,
                        page=each.page,
                        total_pages=len(pages),
                        usage_info=OcrUsage(pages_processed=processed, doc_size_bytes=pages[0].file_bytes),
                    )
                held.clear()
            if held and held[0].failure:
                raise held[0].failure
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _recognize(self, page: PageRequest, images: _ImageBudget | None) -> _Result:
        try:
            with renamed_ocr_errors():
                if page.error:
                    raise page.error
                async with self.slots.slot(current_client.get().id, limit=self.max_pages):
                    return await self._read(page, images)
        except EngineClosed:
            raise
        except DashInferVLMError as error:
            return _Result(page=_to_page(page, None, error=error), failure=error)

    async def _read(self, page: PageRequest, images: _ImageBudget | None) -> _Result:
        preview = None
        if images or page.size is None:
            (preview,) = (await _when_admitted(self.chat.preview, page.request)).items
        completion = await _when_admitted(self.chat.chat, page.request)
        choice = completion.choices[0]
        error: DashInferVLMError | None = _incomplete(completion) if choice.finish_reason == "length" else None
        image = preview.frames[0].png if images and preview else None
        if images and image and (too_large := images.use(len(image))):
            image, error = None, too_large
        markdown = to_markdown(choice.message.content or "", self.prompt)
        return _Result(
            page=_to_page(page, preview, markdown=markdown, image=image, error=error), model=completion.model
        )


def to_markdown(text: str, prompt: OcrPrompt) -> str:
    """Return a response without its metadata, and without a fence around all of it."""
    if prompt.has_front_matter and (matter := _FRONT_MATTER.match(text)):
        text = text[matter.end() :]
    fenced = _FENCED.fullmatch(text)
    if fenced and _has_whole_blocks(fenced["text"]):
        text = fenced["text"]
    return text.strip()


def _has_whole_blocks(text: str) -> bool:
    """Whether each block of code ends: otherwise, the text is between two blocks."""
    languages = _FENCE.findall(text)
    return len(languages) % 2 == 0 and all(languages[::2]) and not any(languages[1::2])


def _chat_options(chat: ChatPipeline, prompt: OcrPrompt) -> dict[str, Any]:
    options: dict[str, Any] = {
        name: value for name, value in prompt.sampling.items() if name in chat.decoder.supported_params
    }
    if chat.inputs.prompts.max_model_len >= 4 * PAGE_TOKENS:
        options["max_tokens"] = PAGE_TOKENS
    no_reasoning = {"reasoning_effort": "none"}
    try:
        chat.inputs.prompts.options.check(
            ChatRequest.parse({"messages": [{"role": "user", "content": ""}], **no_reasoning})
        )
    except UnsupportedParameter:  # the model always reasons
        return options
    return options | no_reasoning


async def _when_admitted(serve: Callable[[ChatRequest], Awaitable[T]], request: ChatRequest) -> T:
    """Serve a request, again as long as the queue is full: the document was admitted before."""
    while True:
        try:
            return await serve(request)
        except QueueFull as error:  # noqa: PERF203 - a retry
            await asyncio.sleep(error.retry_after)


def _incomplete(completion: ChatCompletion) -> EngineError:
    tokens = completion.usage.completion_tokens if completion.usage else 0
    return EngineError(
        f"The text of the page ended after {tokens} tokens, the maximum: it is incomplete, or repeats itself.",
        code="incomplete_page",
    )


def _to_page(
    page: PageRequest,
    preview: MediaPreview | None,
    *,
    markdown: str = "",
    image: bytes | None = None,
    error: DashInferVLMError | None = None,
) -> OcrPage:
    size = preview.size if preview else page.size
    return OcrPage(
        index=page.number - 1,
        markdown=markdown,
        images=(_to_image(page, size, image),) if image and size else (),
        dimensions=OcrDimensions(dpi=page.dpi, width=size[0], height=size[1]) if size else None,
        error=OcrError(message=error.message, param=error.param, code=error.code) if error else None,
    )


def _to_image(page: PageRequest, size: tuple[int, int], png: bytes) -> OcrImage:
    return OcrImage(
        id=f"page-{page.number - 1}.png",
        top_left_x=0,
        top_left_y=0,
        bottom_right_x=size[0],
        bottom_right_y=size[1],
        image_base64=f"data:image/png;base64,{base64.b64encode(png).decode()}",
    )
