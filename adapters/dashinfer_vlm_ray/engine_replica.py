"""The deployment of the engine: each replica is a process with one engine."""

from __future__ import annotations

import contextlib
import logging
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dashinfer_vlm_core.engine import Engine
from dashinfer_vlm_core.engine.observers import RequestObserver
from dashinfer_vlm_core.errors import DecoderFailed
from dashinfer_vlm_core.plugins.discovery import plugin_entries
from dashinfer_vlm_core.protocol.client import current_client
from dashinfer_vlm_server.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from prometheus_client.core import Metric

    from dashinfer_vlm_core.config import EngineConfig
    from dashinfer_vlm_core.engine import EngineStatus, PoolingResult, TokenEmbeddings
    from dashinfer_vlm_core.engine.capabilities import Capabilities
    from dashinfer_vlm_core.preprocessing.preview import Preview
    from dashinfer_vlm_core.protocol import (
        ChatRequest,
        EmbeddingRequest,
        PoolingRequest,
        RerankRequest,
        ScoreRequest,
    )
    from dashinfer_vlm_core.protocol.client import Client
    from dashinfer_vlm_core.protocol.ocr import OcrRequest
    from dashinfer_vlm_core.response.ocr import OcrChunk


def log_to_serve() -> None:
    """Write the logs of this process with Ray Serve's handlers, which add the replica and the request's ID.

    Those of other packages than this one and the plugins are left as they are.
    """
    source = logging.getLogger("ray.serve")
    plugins = {entry.module.partition(".")[0] for entry in plugin_entries()}
    for name in plugins | {"dashinfer_vlm_core", "dashinfer_vlm_ray"}:
        logger = logging.getLogger(name)
        logger.handlers = list(source.handlers)
        logger.setLevel(source.level)
        logger.propagate = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaReport:
    """What a replica reports periodically.

    Attributes:
        replica: its name, unique in the application.
        status: the status of its engine.
        capabilities: what its model supports.
        metrics: the metrics of its engine and process.
    """

    replica: str
    status: EngineStatus
    capabilities: Capabilities
    metrics: Sequence[Metric]


@dataclass(slots=True, kw_only=True)
class TokenCounts:
    """The tokens of one request that have been processed."""

    prompt: int = 0
    completion: int = 0


class EngineReplica:
    """Loads a model and serves the requests of `RayEngine`. Arguments and results are pickled.

    Args:
        config: the configuration of the engine.
        threads: number of threads that compute on CPUs.

    Raises:
        SetupError: the model cannot be loaded; Ray Serve logs it and tries again.
    """

    def __init__(self, config: EngineConfig, *, threads: int) -> None:
        import torch
        from ray import serve

        log_to_serve()
        torch.set_num_threads(threads)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._engine = Engine(config)
        self._metrics = Metrics(self._engine)
        self._engine.add_observer(_TokenCounter())
        self._engine.start()

    async def chat(self, client: Client, request: ChatRequest) -> tuple[TokenCounts, ChatCompletion]:
        counts = _begin(client)
        return counts, await self._engine.achat(request)

    async def stream(
        self, client: Client, request: ChatRequest
    ) -> AsyncGenerator[tuple[TokenCounts, ChatCompletionChunk], None]:
        """Yield each chunk with the number of tokens until then."""
        counts = _begin(client)
        async with contextlib.aclosing(self._engine.astream(request)) as chunks:
            async for chunk in chunks:
                yield replace(counts), chunk

    async def ocr(self, client: Client, request: OcrRequest) -> AsyncGenerator[tuple[TokenCounts, OcrChunk], None]:
        """Yield each page with the number of tokens until then."""
        counts = _begin(client)
        async with contextlib.aclosing(self._engine.aocr(request)) as chunks:
            async for chunk in chunks:
                yield replace(counts), chunk

    async def embed(self, client: Client, request: EmbeddingRequest) -> tuple[TokenCounts, PoolingResult]:
        counts = _begin(client)
        return counts, await self._engine.aembed(request)

    async def embed_tokens(self, client: Client, request: PoolingRequest) -> tuple[TokenCounts, TokenEmbeddings]:
        counts = _begin(client)
        return counts, await self._engine.aembed_tokens(request)

    async def score(self, client: Client, request: RerankRequest | ScoreRequest) -> tuple[TokenCounts, PoolingResult]:
        counts = _begin(client)
        return counts, await self._engine.ascore(request)

    async def preview(self, client: Client, request: ChatRequest) -> Preview:
        current_client.set(client)
        return await self._engine.apreview(request)

    async def tokenize(self, client: Client, request: ChatRequest) -> list[int]:
        current_client.set(client)
        return await self._engine.atokenize(request)

    async def encode(self, text: str) -> list[int]:
        return await self._engine.aencode(text)

    async def decode(self, ids: Sequence[int]) -> str:
        return await self._engine.adecode(ids)

    async def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return await self._engine.aconvert_ids_to_tokens(ids)

    async def report(self) -> ReplicaReport:
        return ReplicaReport(
            replica=self._name,
            status=self._engine.status(),
            capabilities=self._engine.capabilities(),
            metrics=self._metrics.collect_for_engine(),
        )

    def check_health(self) -> None:
        """Raise DecoderFailed if the engine failed permanently, so that Ray Serve replaces the replica."""
        status = self._engine.status()
        if status.state in {"failed", "closed"}:
            raise DecoderFailed(f"The engine is {status.state}: {status.fatal_error or 'it was closed'}.")

    def __del__(self) -> None:
        """Close the engine; Ray Serve calls this when a replica has finished its requests and is stopped."""
        if engine := vars(self).get("_engine"):
            engine.close()


class _TokenCounter(RequestObserver):
    """Counts the tokens of each request, in its context; only the engine's event loop writes."""

    def prompt_built(self, num_tokens: int) -> None:
        if counts := _current_counts.get():
            counts.prompt += num_tokens

    def token_decoded(self) -> None:
        if counts := _current_counts.get():
            counts.completion += 1


_current_counts: ContextVar[TokenCounts | None] = ContextVar("dashinfer_vlm_token_counts", default=None)


def _begin(client: Client) -> TokenCounts:
    counts = TokenCounts()
    current_client.set(client)
    _current_counts.set(counts)
    return counts
