"""Metrics of requests to a model, which an engine's observer measures."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram

from dashinfer_vlm_core.engine.observers import RequestObserver, Stage

if TYPE_CHECKING:
    from openai.types import CompletionUsage

NAMESPACE = "dashinfer_vlm"

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class RequestMetrics(RequestObserver):
    """The metrics of the requests to one model.

    Args:
        registry: where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, namespace=NAMESPACE, registry=registry)
        histogram = partial(Histogram, namespace=NAMESPACE, registry=registry)
        self._time_to_first_token = histogram(
            "time_to_first_token_seconds", "Time from a request to its first token.", buckets=SECONDS
        )
        self._inter_token_latency = histogram(
            "inter_token_latency_seconds", "Time between two tokens of a completion.", buckets=TOKEN_SECONDS
        )
        self._e2e_latency = histogram(
            "e2e_request_latency_seconds", "Time from a request to the end of its response.", buckets=SECONDS
        )
        self._stages = histogram("stage_seconds", "Time in each stage of a request.", ["stage"], buckets=SECONDS)
        self._request_prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens per successful request.", buckets=TOKENS
        )
        self._request_generation_tokens = histogram(
            "request_generation_tokens", "Generated tokens per successful request.", buckets=TOKENS
        )
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of successful requests.")
        self._generation_tokens = counter("generation_tokens", "Generated tokens of successful requests.")
        self._cached_tokens = counter("cached_prompt_tokens", "Prompt tokens reused from the prefix cache.")
        self._visual_tokens = counter("visual_tokens", "Prompt tokens of images and videos.", ["kind"])
        self._pruned_tokens = counter("pruned_visual_tokens", "Tokens of images and videos that were dropped.")

    @contextlib.contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._stages.labels(stage).observe(time.monotonic() - start)

    def first_token(self, seconds: float) -> None:
        self._time_to_first_token.observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._inter_token_latency.observe(seconds)

    def completed(self, usage: CompletionUsage, seconds: float) -> None:
        self._e2e_latency.observe(seconds)
        self._request_prompt_tokens.observe(usage.prompt_tokens)
        self._request_generation_tokens.observe(usage.completion_tokens)
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._generation_tokens.inc(usage.completion_tokens)
        if details := usage.prompt_tokens_details:
            self._cached_tokens.inc(details.cached_tokens or 0)
            self._visual_tokens.labels("image").inc(getattr(details, "image_tokens", 0))
            self._visual_tokens.labels("video").inc(getattr(details, "video_tokens", 0))
            self._pruned_tokens.inc(getattr(details, "pruned_tokens", 0))


class MetricsByModel(RequestObserver):
    """The metrics of the requests to several models.

    Attributes:
        registries: those of each model, by its name.
    """

    def __init__(self) -> None:
        self.registries: dict[str, CollectorRegistry] = {}

    def for_model(self, name: str) -> RequestObserver:
        registry = self.registries[name] = CollectorRegistry()
        return RequestMetrics(registry)
