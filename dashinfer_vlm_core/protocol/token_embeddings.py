"""Requests for an embedding of each token, with the fields of vLLM's pooling API."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from .pooling import EmbeddingRequest
from .validation_errors import invalid


class PoolingRequest(EmbeddingRequest):
    """A request for the embeddings of all tokens of each text of `input`, or of the message of `messages`.

    Attributes:
        task: `token_embed`, which is the only one.
        input_type: whether the input is queries or documents, which have different prompts; by default, `input` is
            queries, and `messages` is a document, as in vLLM's examples. Token IDs are used as they are.
    """

    task: str | None = None
    input_type: Literal["query", "document"] | None = None

    @model_validator(mode="after")
    def _check_task(self) -> PoolingRequest:
        if self.task not in (None, "token_embed"):
            raise invalid(
                "task",
                f"must be 'token_embed', got {self.task!r}. Embeddings are computed by `/v1/embeddings`, and scores by"
                " `/v1/rerank` and `/score`.",
            )
        return self
