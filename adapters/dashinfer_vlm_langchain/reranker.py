"""A reranker for LangChain's retrievers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import Field

from dashinfer_vlm_core.engine.shared import LOOP
from dashinfer_vlm_core.errors import InvalidParameter
from dashinfer_vlm_core.models.pooling import Task
from dashinfer_vlm_core.protocol import RerankRequest

from .connection import EngineConnection

if TYPE_CHECKING:
    from dashinfer_vlm_core.engine import ChatEngine

SCORE = "relevance_score"
"""The key of the score in the metadata of documents."""


class DashInferVLMReranker(EngineConnection, BaseDocumentCompressor):
    """A document compressor that returns the documents that are most relevant for a query, the best first.

    Their metadata have the probability that they are relevant as `relevance_score`. A model in this process that was
    not trained for it is used as with `--task score`. Raises the errors of `DashInferVLMEmbeddings`.
    """

    _task: ClassVar[Task | None] = "score"

    instruction: str | None = None
    """What the documents are ranked for; the model's by default."""
    top_n: int | None = Field(default=3, gt=0)
    """Number of documents to return; None for all."""
    image_key: str = "image"
    """The key of the metadata with the URL or the base64 of a document's image, which is ranked with its text."""

    def compress_documents(
        self,
        documents: Sequence[Document],
        query: str,
        callbacks: Callbacks | None = None,
    ) -> Sequence[Document]:
        return LOOP.get().call(self.acompress_documents(documents, query, callbacks))

    async def acompress_documents(
        self,
        documents: Sequence[Document],
        query: str,
        callbacks: Callbacks | None = None,
    ) -> Sequence[Document]:
        if not documents:
            return []
        contents = [self._content(document, index) for index, document in enumerate(documents)]
        given: dict[str, Any] = {"query": query, "documents": contents}
        if self.instruction is not None:
            given["instruction"] = self.instruction

        async def score(engine: ChatEngine, model: dict[str, str]) -> list[float]:
            scores: list[float] = (await engine.ascore(RerankRequest.parse(given | model))).values.tolist()
            return scores

        scores = await self._call_engine(score)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        return [_scored(documents[index], scores[index]) for index in order[: self.top_n]]

    def _content(self, document: Document, index: int) -> str | dict[str, str]:
        image = document.metadata.get(self.image_key)
        if image is None:
            return document.page_content
        if not isinstance(image, str):
            param = f"documents[{index}].metadata.{self.image_key}"
            raise InvalidParameter(f"`{param}` must be a URL or base64, as a string.", param=param)
        return {"image": image} | ({"text": document.page_content} if document.page_content else {})


def _scored(document: Document, score: float) -> Document:
    return document.model_copy(update={"metadata": {**document.metadata, SCORE: score}})
