"""Metrics for Prometheus. Names and units follow vLLM's, with our prefix; every label has a handful of values."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from dashinfer_vlm_core.engine.observers import RequestObserver, Stage
from dashinfer_vlm_core.version import __version__

if TYPE_CHECKING:
    from openai.types import CompletionUsage

    from dashinfer_vlm_core.engine import ChatEngine, EngineStats

PREFIX = "dashinfer_vlm_"

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


@runtime_checkable
class ObservableEngine(Protocol):
    """An engine in this process, which can be looked into; one behind an address cannot."""

    def stats(self) -> EngineStats | None: ...

    def add_observer(self, observer: RequestObserver) -> None: ...


class Metrics(RequestObserver):
    """The metrics of one application, in a registry of their own.

    Args:
        engine: what answers; counts of its rooms are read when they are asked for.
    """

    def __init__(self, engine: ChatEngine) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests by what became of them.", ["route", "outcome"])
        self.in_flight: Gauge = Gauge(
            f"{PREFIX}requests_in_flight", "Requests at the door now.", registry=self._registry
        )
        self._first = self._histogram("time_to_first_token_seconds", "From a request to its first token.", SECONDS)
        self._next = self._histogram("inter_token_latency_seconds", "From one token of an answer to the next.", GAPS)
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From a request to the end of its answer.", SECONDS
        )
        self._stages = Histogram(
            f"{PREFIX}stage_seconds", "In each stage.", ["stage"], buckets=SECONDS, registry=self._registry
        )
        self._prompts = self._histogram("request_prompt_tokens", "Tokens of the prompts of whole answers.", TOKENS)
        self._answers = self._histogram("request_generation_tokens", "Tokens of whole answers.", TOKENS)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of whole answers.", [])
        self._answer_tokens = self._counter("generation_tokens", "Tokens of whole answers.", [])
        self._cached_tokens = self._counter("cached_prompt_tokens", "Prompt tokens that came from a cache.", [])
        self._visual_tokens = self._counter("visual_tokens", "Prompt tokens of pictures and videos.", ["kind"])
        self._registry.register(_EngineCollector(engine))
        ProcessCollector(registry=self._registry)
        if isinstance(engine, ObservableEngine):
            engine.add_observer(self)

    def request(self, route: str, outcome: str) -> None:
        """A request has left the door."""
        self._requests.labels(route, outcome).inc()

    def text(self, accept: str) -> tuple[bytes, str]:
        """All metrics in a format that `accept` names, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    # RequestObserver

    @contextlib.contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._stages.labels(stage).observe(time.monotonic() - start)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._next.observe(seconds)

    def answered(self, usage: CompletionUsage, seconds: float) -> None:
        self._whole.observe(seconds)
        self._prompts.observe(usage.prompt_tokens)
        self._answers.observe(usage.completion_tokens)
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._answer_tokens.inc(usage.completion_tokens)
        if details := usage.prompt_tokens_details:
            self._cached_tokens.inc(details.cached_tokens or 0)
            self._visual_tokens.labels("image").inc(getattr(details, "image_tokens", 0))
            self._visual_tokens.labels("video").inc(getattr(details, "video_tokens", 0))

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self._registry)


class _EngineCollector(Collector):
    """What the engine's rooms count, read when Prometheus asks."""

    def __init__(self, engine: ChatEngine) -> None:
        self._engine = engine

    def describe(self) -> list[Metric]:
        """Nothing beforehand: an engine may not be there yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        if not isinstance(self._engine, ObservableEngine):
            return  # asking one behind an address would take a request
        status = self._engine.status()
        labels = [__version__, status.model, status.decoder]
        info = GaugeMetricFamily(f"{PREFIX}info", "What is served; always 1.", labels=["version", "model", "decoder"])
        info.add_metric(labels, 1)
        yield info
        yield _gauge("ready", "Whether requests can be answered.", status.state == "ready")
        if stats := self._engine.stats():
            yield from _door(stats)
            yield from _vision(stats)
            yield from _decoder(stats)


def _door(stats: EngineStats) -> Iterator[Metric]:
    yield _gauge("answers", "Answers that are being made or wait.", stats.active_requests)
    yield _gauge("answer_places", "Most of them; more are rejected.", stats.limiter)
    yield _count("decoder_restarts", "Times that a decoder that died was replaced.", stats.restarts)
    yield _count("media_fetches", "Pictures and videos that were fetched.", stats.fetches.fetched)
    yield _count("media_fetch_failures", "Those that could not be fetched.", stats.fetches.failed)
    yield _count("media_fetched_bytes", "Bytes of those that were fetched.", stats.fetches.bytes)


def _vision(stats: EngineStats) -> Iterator[Metric]:
    vision = stats.vision
    yield _mean("vision_batch_size", "Pictures and videos of each pass of the tower.", vision.passes, vision.encoded)
    queries = vision.hits + vision.joins + vision.encoded
    yield _count("mm_cache_queries", "Pictures and videos that were looked for in the vision cache.", queries)
    yield _count("mm_cache_hits", "Those that were found there, or on their way.", vision.hits + vision.joins)
    yield _gauge("mm_cache_bytes", "Memory that the vision cache takes.", vision.bytes)


def _decoder(stats: EngineStats) -> Iterator[Metric]:
    decoder = stats.decoder
    yield _gauge("num_requests_running", "Answers in the batch.", decoder.running)
    yield _gauge("num_requests_waiting", "Answers that wait for a place in it.", decoder.waiting)
    yield _mean("request_queue_time_seconds", "That answers waited for it.", decoder.started, decoder.queue_seconds)
    yield _mean("decode_batch_size", "Answers of each step.", decoder.steps, decoder.step_requests)
    yield _gauge("kv_cache_used_tokens", "Tokens' worth of keys and values that answers hold.", decoder.kv_used)
    yield _gauge("kv_cache_cached_tokens", "Tokens' worth that is kept for later prompts.", decoder.kv_cached)
    yield _gauge("kv_cache_size_tokens", "Tokens' worth that there is.", decoder.kv_size)
    yield _count("prefix_cache_queries", "Prompts that were looked up in the prefix cache.", decoder.queries)
    yield _count("prefix_cache_hits", "Those of which a part was found there.", decoder.hits)
    yield _count("prefix_cache_hit_tokens", "Tokens of these parts.", decoder.cached_tokens)
    yield _count("num_preemptions", "Times that an answer lost its place for a while.", decoder.preemptions)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _count(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _mean(name: str, text: str, count: int, total: float) -> Metric:
    """A sum and a count: their rates give the mean."""
    return SummaryMetricFamily(PREFIX + name, text, count_value=count, sum_value=total)
