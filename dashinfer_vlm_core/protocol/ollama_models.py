"""Requests of Ollama's API for embeddings and about models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from .base import LARGEST, Array, Name, StringOrArray, Text
from .body import RequestBody
from .converted import rename_prefix
from .fields import RejectedFields
from .ollama import OllamaBody
from .pooling import EmbeddingRequest
from .validation_errors import invalid, renamed_errors

_WHOLE = -1
"""Texts are truncated to the limit of the model."""


class OllamaEmbeddingBody(OllamaBody, ABC):
    """Base class of requests for embeddings. Sampling parameters in `options` have no effect."""

    _rejected_fields: ClassVar[RejectedFields] = {}
    _renames: ClassVar[Sequence[tuple[str, str]]] = ()

    @property
    @abstractmethod
    def texts(self) -> Sequence[str]:
        """The texts to embed; none loads the model."""

    @abstractmethod
    def _fields(self) -> dict[str, Any]: ...

    def to_embedding(self, model: str) -> EmbeddingRequest:
        """Convert it to a request of OpenAI's API for a model.

        Raises:
            InvalidParameter: like `EmbeddingRequest.parse`; `param` has the names of this request.
        """
        with self.renamed_errors():
            return EmbeddingRequest.parse({"model": model, "truncate_prompt_tokens": _WHOLE, **self._fields()})

    def renamed_errors(self) -> AbstractContextManager[None]:
        """Return a context in which errors about the converted request name the fields of this one."""
        return renamed_errors(partial(rename_prefix, renames=self._renames))


class OllamaEmbedRequest(OllamaEmbeddingBody):
    """A request of /api/embed."""

    _rejected_fields: ClassVar[RejectedFields] = {"prompt": ((), "Use `input`.")}
    _accepted_fields: ClassVar[Collection[str]] = frozenset(_rejected_fields)
    _renames: ClassVar[Sequence[tuple[str, str]]] = (("truncate_prompt_tokens", "truncate"),)

    input: StringOrArray[Text, Array[Text]] = ()
    truncate: bool = True
    dimensions: Annotated[int, Field(ge=0, le=LARGEST)] = 0

    @property
    def texts(self) -> Sequence[str]:
        return self.input if isinstance(self.input, tuple) else tuple(filter(None, [self.input]))

    def _fields(self) -> dict[str, Any]:
        options = {"input": self.input, "dimensions": self.dimensions or None}
        return options if self.truncate else {**options, "truncate_prompt_tokens": None}


class OllamaEmbeddingsRequest(OllamaEmbeddingBody):
    """A request of /api/embeddings, which Ollama replaced by /api/embed."""

    _rejected_fields: ClassVar[RejectedFields] = {"input": ((), "Use `prompt`, or /api/embed.")}
    _accepted_fields: ClassVar[Collection[str]] = frozenset(_rejected_fields)
    _renames: ClassVar[Sequence[tuple[str, str]]] = (("input", "prompt"),)

    prompt: Text = ""

    @property
    def texts(self) -> Sequence[str]:
        return tuple(filter(None, [self.prompt]))

    def _fields(self) -> dict[str, Any]:
        return {"input": self.prompt}


class OllamaModelRequest(RequestBody):
    """A request about a model.

    Attributes:
        name: the former name of `model`.
        stream: whether the progress is streamed; for /api/pull only.
    """

    _accepted_fields: ClassVar[Collection[str]] = frozenset(
        {"insecure", "options", "password", "system", "template", "username", "verbose"}
    )

    model: Name | None = None
    name: Name | None = None
    stream: bool = True

    @model_validator(mode="after")
    def _check(self) -> OllamaModelRequest:
        if self.model is None and self.name is None:
            raise invalid("model", "is required.")
        return self

    @property
    def requested(self) -> str:
        """The model's name."""
        return self.model or self.name or ""
