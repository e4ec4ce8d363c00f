"""The pooling pipeline: from a request for embeddings or scores to vectors."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from openai.types import CompletionUsage

from ..concurrency.fair_slots import FairSlots
from ..concurrency.tasks import run_concurrently
from ..config import EngineConfig
from ..decoders import DecodeRequest, Pooled
from ..errors import DashInferVLMError, EngineError, InvalidParameter, MediaTooLarge
from ..models.pooling import Projection
from ..preprocessing.pooling import PlacedItem, embedding_items, score_items
from ..preprocessing.retrieval import late_interaction_items, token_items
from ..protocol import EmbeddingRequest, LoRARequest, PoolingItem, PoolingRequest, RerankRequest, ScoreRequest
from ..protocol.client import current_client
from .admission import hide_internal_errors
from .chat_pipeline import ChatPipeline
from .inputs import LoadedMedia, in_client_namespace
from .late_interaction import MAX_VECTORS, TokenEmbeddings, TokenVectors, maxsim, to_base64
from .loras import ActiveLora
from .observers import RequestTimer
from .validation import check_item, pooling_of

if TYPE_CHECKING:
    from ..models.pooling import PoolingSpec

SHORTEST = 1e-12
"""Vectors are divided by at least this, as by `torch.nn.functional.normalize`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PoolingResult:
    """The results of the items of a request, in order.

    Attributes:
        model: the name of the model, or of the LoRA adapter.
        values: embeddings, float32 [items, dimensions], or how relevant documents are, float32 [items]: probabilities
            or, with late interaction, sums of similarities.
        prompt_tokens: the tokens of each prompt, with visual tokens; of a remote engine, their sum.
        cached_tokens: how many of them were taken from the prefix that the items share.
    """

    model: str
    values: npt.NDArray[np.float32]
    prompt_tokens: tuple[int, ...]
    cached_tokens: int

    def encoded(self, encoding_format: Literal["float", "base64"]) -> list[Any]:
        """Return each embedding as a list of numbers, or as base64 of float32 in little-endian order."""
        return list(map(to_base64, self.values)) if encoding_format == "base64" else self.values.tolist()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PoolingPipeline:
    """The components of a running engine that pool hidden states.

    Attributes:
        chat: the pipeline whose components it uses.
        slots: bounds the items in the decoder, and shares it fairly among clients.
        max_parallel: how many items of a request are prepared or computed at the same time.
        max_items: the most items of a client's request.
        max_media: the most images, videos and documents of a client's request.
    """

    chat: ChatPipeline
    slots: FairSlots
    max_parallel: int
    max_items: int
    max_media: int

    @classmethod
    def create(cls, chat: ChatPipeline, config: EngineConfig) -> PoolingPipeline:
        return cls(
            chat=chat,
            slots=FairSlots(config.max_parallel),
            max_parallel=config.max_parallel,
            max_items=config.limits.pooling_items,
            max_media=config.limits.pooling_media,
        )

    async def embed(self, request: EmbeddingRequest) -> PoolingResult:
        """Compute the embeddings of a request.

        Raises:
            RequestError: the request is invalid; `param` is the field, with the index of the item.
            EngineError: the engine could not serve it.
        """
        pooling = pooling_of(self.chat.spec, "embed", name=self.chat.name)
        self._check_count("input", len(request.inputs))
        items = await asyncio.to_thread(embedding_items, request, pooling)
        return await self.pool(items, dimensions=request.dimensions)

    async def embed_tokens(self, request: PoolingRequest) -> TokenEmbeddings:
        """Compute the embeddings of all tokens of each item of a request. Raises the same errors as `embed`."""
        pooling_of(self.chat.spec, "token_embed", name=self.chat.name)
        self._check_count("input", len(request.inputs))
        items = await asyncio.to_thread(token_items, request)
        return await self.pool_tokens(items, dimensions=request.dimensions, limit=MAX_VECTORS)

    async def pool_tokens(
        self,
        items: Sequence[PlacedItem],
        *,
        dimensions: int | None = None,
        limit: int | None = None,
        on_done: Callable[[], object] | None = None,
    ) -> TokenEmbeddings:
        """Compute the embeddings of all tokens of items that use the same LoRA adapter; see `pool`.

        Args:
            items: the items.
            dimensions: the number of dimensions; all by default.
            limit: the most embeddings of a client's request.
            on_done: called after each of them.
        """
        self._check_items(items, dimensions)
        collected = TokenVectors(limit=limit)
        tokens: dict[int, int] = {}

        async def collect(index: int, pooled: Pooled, count: int) -> None:
            collected.add(index, items[index], normalized(pooled.vector[:, :dimensions]))
            tokens[index] = count
            if on_done:
                on_done()

        async with self._session(items[0].item) as session:
            await self._compute_all(session, items, collect)
        return TokenEmbeddings(
            model=session.model,
            vectors=tuple(collected.found[index] for index in range(len(items))),
            prompt_tokens=tuple(tokens[index] for index in range(len(items))),
        )

    async def score(self, request: RerankRequest | ScoreRequest) -> PoolingResult:
        """Compute how relevant each document is: a probability or, with late interaction, the sum of the largest
        similarity of each token of the query. Raises the same errors as `embed`."""
        self._check_count("documents", len(request.pairs))
        await asyncio.to_thread(self._check_media, request)
        return await self.score_pairs(request)

    async def score_pairs(
        self,
        request: RerankRequest | ScoreRequest,
        *,
        lora_request: LoRARequest | None = None,
        on_done: Callable[[], object] | None = None,
    ) -> PoolingResult:
        """Compute scores like `score`, of any number of pairs.

        Args:
            request: the pairs.
            lora_request: the LoRA adapter, of a caller in this process.
            on_done: called after each pair.
        """
        pooling = pooling_of(self.chat.spec, "score", "token_embed", name=self.chat.name)
        if pooling.pools_tokens:
            pairs = await asyncio.to_thread(late_interaction_items, request, lora_request)
            return await self._compare(pairs, on_done)
        items = await asyncio.to_thread(score_items, request, pooling, lora_request)
        return await self.pool(items, on_done=on_done)

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
        pooling = self._check_items(items, dimensions)
        results: dict[int, tuple[Pooled, int]] = {}

        async def collect(index: int, pooled: Pooled, count: int) -> None:
            results[index] = (pooled, count)
            if on_done:
                on_done()

        async with self._session(items[0].item) as session:
            await self._compute_all(session, items, collect)
        ordered = [results[index] for index in range(len(items))]
        return PoolingResult(
            model=session.model,
            values=_values(np.stack([pooled.vector for pooled, _ in ordered])[:, :dimensions], pooling),
            prompt_tokens=tuple(count for _, count in ordered),
            cached_tokens=sum(pooled.cached_tokens for pooled, _ in ordered),
        )

    async def _compare(
        self, pairs: Sequence[tuple[PlacedItem, PlacedItem]], on_done: Callable[[], object] | None
    ) -> PoolingResult:
        """Score pairs whose tokens are embedded. Only the embeddings of queries are kept."""
        numbers: dict[int, int] = {}
        for query, _ in pairs:
            numbers.setdefault(id(query), len(numbers))
        queries = list({id(query): query for query, _ in pairs}.values())
        embedded = TokenVectors()
        scores = np.zeros(len(pairs), np.float32)
        tokens = [0] * len(pairs)

        async def collect(index: int, pooled: Pooled, _: int) -> None:
            embedded.add(index, queries[index], normalized(pooled.vector))

        async def compare(index: int, pooled: Pooled, count: int) -> None:
            query = embedded.found[numbers[id(pairs[index][0])]]
            scores[index] = await asyncio.to_thread(maxsim, query, normalized(pooled.vector))
            tokens[index] = len(query) + count
            if on_done:
                on_done()

        async with self._session(queries[0].item) as session:
            await self._compute_all(session, queries, collect)
            await self._compute_all(session, [document for _, document in pairs], compare)
        return PoolingResult(model=session.model, values=scores, prompt_tokens=tuple(tokens), cached_tokens=0)

    @contextlib.asynccontextmanager
    async def _session(self, item: PoolingItem) -> AsyncIterator[_Session]:
        session_id = f"pool-{uuid.uuid4().hex}"
        with hide_internal_errors(), self.chat.limiter.slots():
            async with self.chat.loras.use(item) as lora:
                timer = RequestTimer(self.chat.observer, n=1)
                loaded = LoadedMedia() if self.chat.spec.task == "score" else None
                session = _Session(pipeline=self, id=session_id, lora=lora, loaded=loaded, prompt_tokens=[])
                try:
                    yield session
                finally:
                    self.chat.decoder.forget(session_id)
                tokens = sum(session.prompt_tokens)
                timer.completed(CompletionUsage(prompt_tokens=tokens, completion_tokens=0, total_tokens=tokens))

    async def _compute_all(
        self, session: _Session, items: Sequence[PlacedItem], on_result: Callable[[int, Pooled, int], Awaitable[None]]
    ) -> None:
        async def compute(index: int) -> None:
            pooled, count = await session.compute(items[index])
            await on_result(index, pooled, count)

        first = 0
        if not (self.chat.spec.pooling and self.chat.spec.pooling.pools_tokens):
            # The others take what they have in common with the first one, such as the query, from the prefix cache.
            await compute(0)
            first = 1
        await run_concurrently(range(first, len(items)), compute, max_concurrency=self.max_parallel)

    def _check_items(self, items: Sequence[PlacedItem], dimensions: int | None) -> PoolingSpec:
        pooling = self.chat.spec.pooling
        assert pooling
        self._check_dimensions(dimensions, pooling)
        if not items:
            raise InvalidParameter("There are no prompts. Pass at least one.", param="prompts")
        return pooling

    def _check_dimensions(self, dimensions: int | None, pooling: PoolingSpec) -> None:
        size = pooling.head.size if isinstance(pooling.head, Projection) else self.chat.spec.hidden_size
        if dimensions in (None, size) or dimensions in pooling.dimensions:
            return
        raise InvalidParameter(
            f"`dimensions` is {dimensions}, but embeddings of this model have {size} dimensions"
            f"{_describe(pooling.dimensions)}. Remove it, or use one of these numbers.",
            param="dimensions",
        )

    def _check_count(self, name: str, count: int) -> None:
        if count > self.max_items:
            raise InvalidParameter(
                f"`{name}` has {count} entries, but the limit is {self.max_items}. Send several requests.", param=name
            )

    def _check_media(self, request: RerankRequest | ScoreRequest) -> None:
        """Check the number of media of all pairs; the limits of `limit_mm_per_prompt` are those of each pair."""
        contents = {id(content): content for pair in request.pairs for content in pair}.values()
        parts = {path: part for content in contents for path, part in content}
        paths = [path for path, part in parts.items() if part.media(path) or part.document(path)]
        if len(paths) > self.max_media:
            raise MediaTooLarge(
                f"The request has {len(paths)} images, videos and documents, but the limit is {self.max_media}. Send"
                " several requests.",
                param=paths[self.max_media],
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Session:
    """The items of one request, which share their keys and values under a salt that no other request has.

    Attributes:
        id: the salt, and the id in logs.
        loaded: the media and documents of the first pair, of which those of the query are not loaded again; None for
            embeddings.
        prompt_tokens: the tokens of each prompt that was computed.
    """

    pipeline: PoolingPipeline
    id: str
    lora: ActiveLora | None
    loaded: LoadedMedia | None
    prompt_tokens: list[int]

    @property
    def model(self) -> str:
        """The name of the model, or of the adapter."""
        return self.lora.weights.name if self.lora else self.pipeline.chat.name

    async def compute(self, placed: PlacedItem) -> tuple[Pooled, int]:
        """Return what is computed from one item, and the tokens of its prompt."""
        try:
            return await self._compute(in_client_namespace(placed.item))
        except DashInferVLMError as error:
            if isinstance(error, EngineError) and error.param is None:  # not about the item
                raise
            raise placed.name_field(error) from error.__cause__

    async def _compute(self, item: PoolingItem) -> tuple[Pooled, int]:
        chat = self.pipeline.chat
        check_item(item, chat.decoder, chat.inputs.prompts)
        inputs = await chat.inputs.load(item, self.lora, self.loaded)
        inputs, spans = await chat.inputs.encode(inputs, item, self.lora)
        request = DecodeRequest(
            id=self.id,
            token_ids=inputs.prompt.token_ids,
            positions=inputs.prompt.positions,
            spans=spans,
            pooling=True,
            cache_salt=self.id,
            lora=self.lora.weights if self.lora else None,
        )
        async with self.pipeline.slots.slot(current_client.get().id, limit=self.pipeline.max_parallel):
            with chat.observer.stage("decode"):
                pooled = await chat.decoder.pool(request)
        self.prompt_tokens.append(len(inputs.prompt))
        return pooled, len(inputs.prompt)


def _values(vectors: npt.NDArray[np.float32], pooling: PoolingSpec) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = vectors
    if pooling.task == "score":
        values = (1 / (1 + np.exp(-vectors[:, 0].astype(np.float64)))).astype(np.float32)
    elif pooling.normalize:
        values = normalized(vectors)
    return values


def normalized(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Divide each row by its Euclidean length."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    values: npt.NDArray[np.float32] = vectors / np.maximum(lengths, SHORTEST)
    return values


def _describe(dimensions: Container[int]) -> str:
    if isinstance(dimensions, range) and dimensions:
        return f", or {dimensions.start} and more"
    return f", or {', '.join(map(str, dimensions))}" if isinstance(dimensions, tuple) and dimensions else ""
