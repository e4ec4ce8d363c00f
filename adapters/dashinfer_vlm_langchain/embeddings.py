"""Embeddings of texts and images for LangChain's vector stores."""

from __future__ import annotations

import asyncio
import base64
import mimetypes
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from langchain_core.embeddings import Embeddings
from pydantic import Field

from dashinfer_vlm_core.concurrency.tasks import run_concurrently
from dashinfer_vlm_core.engine.shared import LOOP
from dashinfer_vlm_core.errors import InvalidParameter, MediaUnreachable
from dashinfer_vlm_core.models.pooling import Task

from .connection import EngineConnection

if TYPE_CHECKING:
    from dashinfer_vlm_core.engine import ChatEngine

MAX_IMAGES = 16
"""Images whose embeddings are computed at the same time, each with a request of its own."""


class DashInferVLMEmbeddings(EngineConnection, Embeddings):
    """LangChain embeddings of texts and images in one vector space, with models such as Qwen3-VL-Embedding.

    A model in this process that was not trained for embeddings is used as with `--task embed`. Errors of the engine are
    raised as the classes of `dashinfer_vlm_core.errors`.

    Raises:
        ConfigError: an engine option that does not exist, or is out of range.
        pydantic.ValidationError: an argument that does not exist, or has the wrong type.
    """

    _task: ClassVar[Task | None] = "embed"

    query_instruction: str | None = None
    """The instruction of queries; the model's by default."""
    document_instruction: str | None = None
    """The instruction of documents, images included; the model's by default."""
    dimensions: int | None = Field(default=None, gt=0)
    """Fewer dimensions than the model's, if it was trained for them."""
    chunk_size: int = Field(default=256, gt=0)
    """Maximum number of texts of a request."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return LOOP.get().call(self.aembed_documents(texts))

    def embed_query(self, text: str) -> list[float]:
        return LOOP.get().call(self.aembed_query(text))

    def embed_image(self, uris: list[str]) -> list[list[float]]:
        """Return the embeddings of images, as vector stores call it to index them.

        Args:
            uris: paths of files that this process reads, or `http`, `https` and `data` URLs that the engine loads.

        Raises:
            InvalidParameter: a URI is not a string.
            MediaUnreachable: a file cannot be read.
        """
        return LOOP.get().call(self.aembed_image(uris))

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = []
        for start in range(0, len(texts), self.chunk_size):
            vectors += await self._embed({"input": texts[start : start + self.chunk_size]}, self.document_instruction)
        return vectors

    async def aembed_query(self, text: str) -> list[float]:
        return (await self._embed({"input": text}, self.query_instruction))[0]

    async def aembed_image(self, uris: Sequence[str]) -> list[list[float]]:
        """Like `embed_image`, for callers on an event loop."""
        vectors: dict[int, list[float]] = {}

        async def embed(index: int) -> None:
            url = await asyncio.to_thread(_to_url, uris[index], f"uris[{index}]")
            image = {"type": "image_url", "image_url": {"url": url}}
            message = {"role": "user", "content": [image]}
            vectors[index] = (await self._embed({"messages": [message]}, self.document_instruction))[0]

        await run_concurrently(range(len(uris)), embed, max_concurrency=MAX_IMAGES)
        return [vectors[index] for index in range(len(uris))]

    async def _embed(self, given: dict[str, Any], instruction: str | None) -> list[list[float]]:
        options = {"instruction": instruction, "dimensions": self.dimensions}
        request = given | {name: value for name, value in options.items() if value is not None}

        async def embed(engine: ChatEngine, model: dict[str, str]) -> list[list[float]]:
            vectors: list[list[float]] = (await engine.aembed(request | model)).values.tolist()
            return vectors

        return await self._call_engine(embed)


def _to_url(uri: str, param: str) -> str:
    if not isinstance(uri, str):
        raise InvalidParameter(f"`{param}` must be a path or a URL, as a string.", param=param)
    if uri.startswith(("http://", "https://", "data:")):
        return uri
    path = Path(uri)
    try:
        data = base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise MediaUnreachable(f"{uri[:200]} cannot be read: {error.strerror}. Pass a path or a URL.") from error
    return f"data:{mimetypes.guess_type(path.name)[0] or 'image/png'};base64,{data}"
