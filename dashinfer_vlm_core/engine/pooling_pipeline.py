"""The pooling pipeline: from a request for embeddings or scores to vectors."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from openai.types import CompletionUsage

from ..concurrency.fair_slots import FairSlots
from ..concurrency.tasks import run_concurrently
from ..config import EngineConfig
from ..decoders import DecodeRequest, Pooled
from ..decoders.supervisor import Supervisor
from ..errors import InvalidParameter, RequestError
from ..preprocessing.pooling import PlacedItem, embedding_items, score_items
from ..protocol import EmbeddingRequest, PoolingItem, RerankRequest, ScoreRequest
from ..protocol.client import current_client
from .admission import ConcurrencyLimiter, hide_internal_errors
from .chat_pipeline import ChatPipeline
from .inputs import InputPipeline, LoadedMedia, in_client_namespace
from .loras import ActiveLora, LoraManager
from .observers import RequestObserver, RequestTimer
from .validation import check_item, pooling_of

if TYPE_CHECKING:
    from ..models.pooling import PoolingSpec
    from ..models.spec import ModelSpec

SHORTEST = 1e-12
"""Vectors are divided by at least this, as by `torch.nn.functional.normalize`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PoolingResult:
    """The results of the items of a request, in order.

    Attributes:
        model: the name of the model, or of the LoRA adapter.
        values: embeddings, float32 [items, dimensions], or probabilities that documents are relevant, float32 [items].
        prompt_tokens: the tokens of each prompt, with visual tokens; of a remote engine, their sum.
        cached_tokens: how many of them were taken from the prefix that the items share.
    """

    model: str
    values: npt.NDArray[np.float32]
    prompt_tokens: tuple[int, ...]
    cached_tokens: int

    def encoded(self, encoding_format: Literal["float", "base64"]) -> list[Any]:
        """Return each embedding as a list of numbers, or as base64 of float32 in little-endian order."""
        rows: list[Any] = self.values.tolist()
        if encoding_format == "base64":
            rows = [base64.b64encode(row.tobytes()).decode() for row in self.values.astype(np.dtype("<f4"))]
        return rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PoolingPipeline:
    """The components of a running engine that pool hidden states.

    Attributes:
        name: the model's name in responses.
        limiter: bounds the requests, from arrival to the response.
        slots: bounds the items in the decoder, and shares it fairly among clients.
        max_parallel: how many items of a request are prepared or computed at the same time.
        max_items: the most items of a client's request.
        loras: the LoRA adapters that requests can use.
        observer: is notified of stages and completed requests.
    """

    name: str
    spec: ModelSpec
    limiter: ConcurrencyLimiter
    slots: FairSlots
    max_parallel: int
    max_items: int
    inputs: InputPipeline
    decoder: Supervisor
    loras: LoraManager
    observer: RequestObserver

    @classmethod
    def create(cls, chat: ChatPipeline, config: EngineConfig) -> PoolingPipeline:
        """Return the pipeline with the components of another one."""
        max_parallel = max(min(config.max_batch_size, config.max_waiting), 1)  # so that the decoder never rejects one
        return cls(
            name=chat.name,
            spec=chat.spec,
            limiter=chat.limiter,
            slots=FairSlots(max_parallel),
            max_parallel=max_parallel,
            max_items=config.limits.pooling_items,
            inputs=chat.inputs,
            decoder=chat.decoder,
            loras=chat.loras,
            observer=chat.observer,
        )

    async def embed(self, request: EmbeddingRequest) -> PoolingResult:
        """Compute the embeddings of a request.

        Raises:
            RequestError: the request is invalid; `param` is the field, with the index of the item.
            EngineError: the engine could not serve it.
        """
        pooling = pooling_of(self.spec, "embed", name=self.name)
        self._check_count("input", len(request.inputs))
        items = await asyncio.to_thread(embedding_items, request, pooling)
        return await self.pool(items, dimensions=request.dimensions)

    async def score(self, request: RerankRequest | ScoreRequest) -> PoolingResult:
        """Compute the probability that each document is relevant. Raises the same errors as `embed`."""
        pooling = pooling_of(self.spec, "score", name=self.name)
        self._check_count("documents", len(request.pairs()))
        items = await asyncio.to_thread(score_items, request, pooling)
        return await self.pool(items)

    async def pool(
        self,
        items: Sequence[PlacedItem],
        *,
        dimensions: int | None = None,
        on_done: Callable[[], object] | None = None,
    ) -> PoolingResult:
        """Compute the embeddings, or the scores, of items that use the same LoRA adapter.

        Args:
            items: the items.
            dimensions: the number of dimensions of embeddings; all by default.
            on_done: called after each of them.

        Raises the same errors as `embed`.
        """
        pooling = self.spec.pooling
        assert pooling
        if dimensions is not None:
            self._check_dimensions(dimensions, pooling)
        if not items:
            raise InvalidParameter("There are no prompts. Pass at least one.", param="prompts")
        with hide_internal_errors(), self.limiter.slots():
            async with self._session(items[0].item) as session:
                timer = RequestTimer(self.observer, n=1)
                results = await self._compute_all(session, items, on_done)
                tokens = tuple(count for _, count in results)
                timer.completed(
                    CompletionUsage(prompt_tokens=sum(tokens), completion_tokens=0, total_tokens=sum(tokens))
                )
                return PoolingResult(
                    model=session.lora.weights.name if session.lora else self.name,
                    values=_values(np.stack([pooled.vector for pooled, _ in results])[:, :dimensions], pooling),
                    prompt_tokens=tokens,
                    cached_tokens=sum(pooled.cached_tokens for pooled, _ in results),
                )

    @contextlib.asynccontextmanager
    async def _session(self, item: PoolingItem) -> AsyncIterator[_Session]:
        session_id = f"pool-{uuid.uuid4().hex}"
        async with self.loras.use(item) as lora:
            try:
                loaded: LoadedMedia | None = {} if self.spec.task == "score" else None
                yield _Session(pipeline=self, id=session_id, lora=lora, loaded=loaded)
            finally:
                self.decoder.forget(session_id)

    async def _compute_all(
        self, session: _Session, items: Sequence[PlacedItem], on_done: Callable[[], object] | None
    ) -> list[tuple[Pooled, int]]:
        results: dict[int, tuple[Pooled, int]] = {}

        async def compute(index: int) -> None:
            results[index] = await session.compute(items[index])
            if on_done:
                on_done()

        # The others take what they have in common with the first one, such as the query, from the prefix cache.
        await compute(0)
        await run_concurrently(range(1, len(items)), compute, max_concurrency=self.max_parallel)
        return [results[index] for index in range(len(items))]

    def _check_dimensions(self, dimensions: int, pooling: PoolingSpec) -> None:
        if dimensions == self.spec.hidden_size or dimensions in pooling.dimensions:
            return
        raise InvalidParameter(
            f"`dimensions` is {dimensions}, but embeddings of this model have {self.spec.hidden_size} dimensions"
            f"{_describe(pooling.dimensions)}. Remove it, or use one of these numbers.",
            param="dimensions",
        )

    def _check_count(self, name: str, count: int) -> None:
        if count > self.max_items:
            raise InvalidParameter(
                f"`{name}` has {count} entries, but the limit is {self.max_items}. Send several requests.", param=name
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Session:
    """The items of one request, which share their keys and values under a salt that no other request has.

    Attributes:
        id: the salt, and the id in logs.
        loaded: the media of the first pair, of which those of the query are not loaded again; None for embeddings.
    """

    pipeline: PoolingPipeline
    id: str
    lora: ActiveLora | None
    loaded: LoadedMedia | None

    async def compute(self, placed: PlacedItem) -> tuple[Pooled, int]:
        """Return what is computed from one item, and the tokens of its prompt."""
        try:
            return await self._compute(in_client_namespace(placed.item))
        except RequestError as error:
            raise placed.name_field(error) from error.__cause__

    async def _compute(self, item: PoolingItem) -> tuple[Pooled, int]:
        pipeline = self.pipeline
        check_item(item, pipeline.decoder, pipeline.inputs.prompts)
        inputs = await pipeline.inputs.load(item, self.lora, self.loaded)
        spans = await pipeline.inputs.encode(inputs, item, self.lora)
        request = DecodeRequest(
            id=self.id,
            token_ids=inputs.prompt.token_ids,
            positions=inputs.prompt.positions,
            spans=spans,
            pooling=True,
            cache_salt=self.id,
            lora=self.lora.weights if self.lora else None,
        )
        async with pipeline.slots.slot(current_client.get().id, limit=pipeline.max_parallel):
            with pipeline.observer.stage("decode"):
                return await pipeline.decoder.pool(request), len(inputs.prompt)


def _values(vectors: npt.NDArray[np.float32], pooling: PoolingSpec) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = vectors
    if pooling.task == "score":
        values = (1 / (1 + np.exp(-vectors[:, 0].astype(np.float64)))).astype(np.float32)
    elif pooling.normalize:
        lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
        values = vectors / np.maximum(lengths, SHORTEST)
    return values


def _describe(dimensions: Container[int]) -> str:
    if isinstance(dimensions, range) and dimensions:
        return f", or {dimensions.start} and more"
    return f", or {', '.join(map(str, dimensions))}" if isinstance(dimensions, tuple) and dimensions else ""
