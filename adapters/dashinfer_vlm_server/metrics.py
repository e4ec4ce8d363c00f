"""Prometheus metrics. Names follow vLLM's where the meaning is the same. Every label has a fixed set of values.

`prefix_cache_queries` and `prefix_cache_hits` count prompts; vLLM's metrics of these names count tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import choose_encoder

from dashinfer_vlm_core import __version__

from .rate_limits import RejectionReason
from .request_metrics import NAMESPACE, MetricsByModel, RequestMetrics

if TYPE_CHECKING:
    from dashinfer_vlm_core.embedding_store.client import EmbeddingStoreStats
    from dashinfer_vlm_core.engine import ChatEngine, EngineStats

PREFIX = f"{NAMESPACE}_"

HTTP_METRICS = frozenset({f"{PREFIX}requests", f"{PREFIX}rate_limited_requests", f"{PREFIX}requests_in_flight"})
"""The metrics of the application itself, which its engine does not have."""


class Metrics:
    """The metrics of one application, in a separate registry.

    Args:
        engine: the observed engine; its statistics are read on every scrape.
        replica_metrics: returns the last known metrics of other processes of the engine by their name.
    """

    def __init__(
        self, engine: ChatEngine, replica_metrics: Callable[[], Mapping[str, Iterable[Metric]]] = dict
    ) -> None:
        self._replica_metrics = replica_metrics
        self._registry = CollectorRegistry()
        counter = partial(Counter, namespace=NAMESPACE, registry=self._registry)
        self._requests = counter("requests", "Requests by route and outcome.", ["route", "outcome"])
        self._rate_limited = counter(
            "rate_limited_requests", "Requests rejected by a limit of their API key.", ["reason"]
        )
        for reason in get_args(RejectionReason):
            self._rate_limited.labels(reason)
        self.in_flight: Gauge = Gauge(
            "requests_in_flight", "HTTP requests being processed.", namespace=NAMESPACE, registry=self._registry
        )
        ProcessCollector(registry=self._registry)
        self._engine = engine
        self._by_model = MetricsByModel()
        engine.add_observer(self._by_model if engine.manages_models else RequestMetrics(self._registry))

    def count_request(self, route: str, outcome: str) -> None:
        """Count a request that has ended."""
        self._requests.labels(route, outcome).inc()

    def count_rate_limited(self, reason: RejectionReason) -> None:
        """Count a request that a limit of its API key rejected."""
        self._rate_limited.labels(reason).inc()

    def text(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics in a format that the Accept header lists, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self), content_type

    def collect(self) -> Iterable[Metric]:
        """Return the metrics, and those of replicas with the label `replica`; called by the encoder."""
        metrics = {metric.name: metric for metric in self._collect()}
        for replica, collected in self._replica_metrics().items():
            _add_labeled(metrics, collected, replica=replica)
        return metrics.values()

    def collect_for_engine(self) -> list[Metric]:
        """Return the metrics of the engine and its process, without those of HTTP requests."""
        return [metric for metric in self._collect() if metric.name not in HTTP_METRICS]

    def _collect(self) -> Iterator[Metric]:
        yield from self._registry.collect()
        if not self._engine.manages_models:
            yield from _engine(self._engine)
            return
        metrics: dict[str, Metric] = {}
        for engine in self._engine.models():
            name = engine.status().model
            _add_labeled(metrics, self._by_model.registries[name].collect(), model_name=name)
            _add_labeled(metrics, _engine(engine), model_name=name)
        yield from metrics.values()


def _add_labeled(metrics: dict[str, Metric], added: Iterable[Metric], **labels: str) -> None:
    for source in added:
        empty = Metric(source.name, source.documentation, source.type, source.unit)
        metrics.setdefault(source.name, empty).samples += [
            sample._replace(labels={**sample.labels, **labels}) for sample in source.samples
        ]


def _engine(engine: ChatEngine) -> Iterator[Metric]:
    status = engine.status()
    labels = {"version": __version__, "model": status.model, "decoder": status.decoder}
    info = GaugeMetricFamily(f"{PREFIX}info", "Version, model and decoder; always 1.", labels=list(labels))
    info.add_metric(list(labels.values()), 1)
    yield info
    yield _gauge("ready", "1 if requests can be served, otherwise 0.", status.state == "ready")
    if stats := engine.stats():
        yield from _requests(stats)
        yield from _vision(stats)
        yield from _decoder(stats)


def _requests(stats: EngineStats) -> Iterator[Metric]:
    active = stats.active_requests
    yield _gauge("active_requests", "Completions that run or wait; a request with n=2 counts twice.", active)
    limit = stats.max_active_requests
    yield _gauge("max_active_requests", "Maximum number of completions that run or wait; more are rejected.", limit)
    yield _count("decoder_restarts", "Decoder restarts.", stats.restarts)
    yield _count("media_fetches", "Media fetched.", stats.fetches.fetched)
    yield _count("media_fetch_failures", "Media that could not be fetched.", stats.fetches.failed)
    yield _count("media_fetched_bytes", "Bytes of fetched media.", stats.fetches.bytes)
    workers = stats.media_workers
    yield _gauge("media_workers_busy", "Busy media workers.", workers.busy)
    yield _gauge("media_waiting", "Media that wait for a worker.", workers.waiting)
    yield _count("media_workers_started", "Media workers started.", workers.started)
    reasons = {"timed_out": workers.timed_out, "crashed": workers.crashed, "canceled": workers.canceled}
    yield _counts("media_workers_ended", "Media workers killed or crashed.", "reason", reasons)


def _vision(stats: EngineStats) -> Iterator[Metric]:
    vision = stats.vision
    yield _summary(
        "vision_batch_size",
        "Images and frame pairs per forward pass of the vision encoder.",
        vision.passes,
        vision.encoded,
    )
    queries = vision.hits + vision.joins + vision.encoded + (vision.store.hits if vision.store else 0)
    yield _count("mm_cache_queries", "Images and frame pairs looked up in the embedding cache.", queries)
    yield _count(
        "mm_cache_hits",
        "Images and frame pairs found in the embedding cache, or already being encoded.",
        vision.hits + vision.joins,
    )
    yield _gauge("mm_cache_bytes", "Memory used by the embedding cache.", vision.bytes)
    if vision.store:
        yield from _embedding_store(vision.store)


def _embedding_store(store: EmbeddingStoreStats) -> Iterator[Metric]:
    lookups = {
        "hit": store.hits,
        "miss": store.misses,
        "timeout": store.timeouts,
        "error": store.errors,
        "invalid": store.invalid,
        "skipped": store.skipped,
    }
    yield _counts("embedding_store_lookups", "Images and frame pairs looked up in the store.", "result", lookups)
    writes = {"success": store.writes, "error": store.write_errors, "dropped": store.dropped}
    yield _counts("embedding_store_writes", "Images and frame pairs written to the store.", "result", writes)
    yield _gauge("embedding_store_pending_bytes", "Memory of embeddings that wait to be written.", store.pending_bytes)
    yield _gauge("embedding_store_available", "1 unless lookups pause after failures.", store.available)


def _decoder(stats: EngineStats) -> Iterator[Metric]:
    decoder = stats.decoder
    yield _gauge("num_requests_running", "Completions in the batch.", decoder.running)
    yield _gauge("num_requests_waiting", "Completions that wait for the batch.", decoder.waiting)
    yield _summary(
        "request_queue_time_seconds",
        "Time that completions waited for the batch.",
        decoder.started,
        decoder.queue_seconds,
    )
    yield _summary("decode_batch_size", "Completions per decoder step.", decoder.steps, decoder.step_requests)
    yield _gauge("kv_cache_used_tokens", "KV cache of running completions, in tokens.", decoder.kv_used)
    yield _gauge("kv_cache_cached_tokens", "KV cache kept for later prompts, in tokens.", decoder.kv_cached)
    yield _gauge("kv_cache_size_tokens", "Size of the KV cache, in tokens.", decoder.kv_size)
    yield _gauge("recurrent_states_used", "Recurrent states of running completions.", decoder.states_used)
    yield _gauge("recurrent_states_cached", "Recurrent states kept for later prompts.", decoder.states_cached)
    yield _gauge("recurrent_states_size", "Recurrent states that fit.", decoder.states_size)
    yield _count("prefix_cache_queries", "Prompts looked up in the prefix cache (vLLM counts tokens).", decoder.queries)
    yield _count("prefix_cache_hits", "Prompts with a cached prefix.", decoder.hits)
    yield _count("prefix_cache_hit_tokens", "Prompt tokens of these cached prefixes.", decoder.cached_tokens)
    yield _count("num_preemptions", "Preemptions of completions.", decoder.preemptions)
    yield _count("spec_decode_num_draft_tokens", "Tokens drafted by speculation.", decoder.draft_tokens)
    yield _count("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", decoder.accepted_tokens)
    yield _count("guided_num_forced_tokens", "Tokens forced by a response format.", decoder.forced_tokens)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _count(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _counts(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    counts = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in values.items():
        counts.add_metric([key], value)
    return counts


def _summary(name: str, text: str, count: int, total: float) -> Metric:
    return SummaryMetricFamily(PREFIX + name, text, count_value=count, sum_value=total)
