"""Metrics: values, and a fixed set of labels."""

from __future__ import annotations

import contextlib
import logging
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dashinfer_vlm_core import Engine, EngineConfig, errors
from dashinfer_vlm_core.testing import scripted_engine
from dashinfer_vlm_server import create_app
from dashinfer_vlm_server.api_keys import ApiKeys
from dashinfer_vlm_server.metrics import PREFIX, Metrics
from tests.samples import image_url
from tests.server.conftest import RunningServer, serving
from tests.waiting import HANG, until
from tests.web import serve

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
CHAT = "/v1/chat/completions"


def sample(client, name, **labels):
    """Return the value of a metric; 0 if it has no value yet."""
    text = client.get("/metrics").text
    for family in text_string_to_metric_families(text):
        for item in family.samples:
            if item.name == PREFIX + name and item.labels == labels:
                return item.value
    return 0


def image_request(url):
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


def test_metrics_match_the_usage_of_completions(scripted):
    with scripted("A red circle.").server.http() as client:
        usages = [client.post(CHAT, json=body).json()["usage"] for body in (HELLO, image_request(image_url(60, 90)))]
        streamed = HELLO | {"stream": True}
        client.post(CHAT, json=streamed)
        # A stream's request ends shortly after its last byte; the request for the metrics is in flight too.
        until(lambda: sample(client, "requests_in_flight") == 1)
        usages.append(usages[0])
        assert sample(client, "prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
        assert sample(client, "generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
        images = usages[1]["prompt_tokens_details"]["image_tokens"]
        assert sample(client, "visual_tokens_total", kind="image") == images
        assert sample(client, "request_prompt_tokens_count") == 3
        assert sample(client, "time_to_first_token_seconds_count") == 3
        assert sample(client, "e2e_request_latency_seconds_count") == 3
        intervals = sum(usage["completion_tokens"] - 1 for usage in usages)
        assert sample(client, "inter_token_latency_seconds_count") == intervals
        assert sample(client, "stage_seconds_count", stage="decode") == 3
        assert sample(client, "vision_batch_size_sum") == 1


def test_metrics_of_the_embedding_store(scripted, tmp_path):
    """Each part of the sum `mm_cache_queries` is counted once."""
    options = {"embedding_store": tmp_path.as_uri(), "limits": {"store_timeout": HANG}, "vision_cache_mib": 0}
    with scripted("A red circle.", **options).server.http() as client:
        for result, misses, hits in (("miss", 1, 0), ("hit", 1, 1)):
            assert client.post(CHAT, json=image_request(image_url(60, 90))).status_code == 200
            assert sample(client, "embedding_store_lookups_total", result=result) == 1
            until(lambda: sample(client, "embedding_store_pending_bytes") == 0)
            assert sample(client, "mm_cache_queries_total") == misses + hits
        assert sample(client, "embedding_store_writes_total", result="success") == 1
        assert sample(client, "embedding_store_available") == 1


OUTCOMES = {
    "success": ("Fine.", HELLO),
    "invalid": ("Fine.", {"messages": []}),
    "rejected": (errors.QueueFull("Busy."), HELLO),
    "unavailable": (errors.DecoderFailed("It died."), HELLO),
    "timeout": (errors.DeadlineExceeded("Late."), HELLO),
    "error": (ValueError("A bug."), HELLO),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("outcome", "response", "body"), [(name, *case) for name, case in OUTCOMES.items()])
def test_request_is_counted_with_one_outcome(scripted, outcome, response, body, stream):
    with scripted(response).server.http() as client:
        client.post(CHAT, json=body | {"stream": stream})
        # A stream's request ends shortly after its last byte.
        until(lambda: sum_of(client.get("/metrics").text, "requests_total", route=CHAT) == 1)
        assert sample(client, "requests_total", route=CHAT, outcome=outcome) == 1


def sum_of(text, name, **labels):
    families = text_string_to_metric_families(text)
    return sum(
        item.value
        for family in families
        for item in family.samples
        if item.name == PREFIX + name and labels.items() <= item.labels.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "path", "route"),
    [
        ("POST", CHAT, CHAT),
        ("GET", "/v1/models/anything", "/v1/models/{name:path}"),
        ("GET", "/metrics", "/metrics"),
        ("DELETE", "/version", "/version"),
        ("GET", "/nothing", "other"),
    ],
)
def test_unauthorized_request_is_counted_under_its_route(scripted, method, path, route, caplog):
    caplog.set_level(logging.INFO)
    with scripted("Fine.", settings={"keys": ApiKeys(["right"])}).server.http() as client:
        assert client.request(method, path).status_code == 401
        client.headers["Authorization"] = "Bearer right"
        assert sample(client, "requests_total", route=route, outcome="unauthorized") == 1
        assert sum_of(client.get("/metrics").text, "requests_total", outcome="unauthorized") == 1
    assert f"{method} {route} 401" in caplog.text


def test_disconnect_is_counted_as_cancelled(scripted):
    served = scripted("A long answer. " * 100, delay=0.1)
    with served.server.http() as client:
        with client.stream("POST", CHAT, json=HELLO | {"stream": True}) as response:
            next(response.iter_lines())
        until(lambda: sample(client, "requests_total", route=CHAT, outcome="cancelled") == 1)


def test_failed_stream_is_not_counted_as_success(scripted):
    served = scripted("A long answer. " * 100, delay=0.05)
    with served.server.http() as client:
        with client.stream("POST", CHAT, json=HELLO | {"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            served.engine.close()
            assert "engine_closed" in "".join(lines)
        # The request is counted after the engine's event loop has ended the stream.
        until(lambda: sample(client, "requests_total", route=CHAT, outcome="unavailable") == 1)


def test_failed_fetches_are_counted(scripted):
    with serve({}) as web, scripted("Fine.", allow_private_addresses=True).server.http() as client:
        assert client.post(CHAT, json=image_request(web.url("/none.png"))).status_code == 400
        assert sample(client, "media_fetch_failures_total") == 1
        assert sample(client, "media_fetches_total") == 0


def test_embedding_cache_metrics(scripted):
    with scripted("Fine.").server.http() as client:
        for _ in range(3):
            client.post(CHAT, json=image_request(image_url(60, 90)))
        counted = [sample(client, f"mm_cache_{name}") for name in ("queries_total", "hits_total", "bytes")]
    assert counted[:2] == [3, 2]
    assert counted[2] > 0


@pytest.mark.slow
def test_torch_decoder_metrics(tiny_checkpoint):
    config = EngineConfig(model=str(tiny_checkpoint), decoder="torch")
    with Engine(config) as engine, serving(engine) as server, server.http() as client:
        usage = client.post(CHAT, json=HELLO | {"max_tokens": 5, "ignore_eos": True}).json()["usage"]
        assert usage["completion_tokens"] == 5
        steps = sample(client, "decode_batch_size_count")
        assert steps + sample(client, "spec_decode_num_accepted_tokens_total") == 5
        assert sample(client, "decode_batch_size_sum") == steps
        assert sample(client, "request_queue_time_seconds_count") == 1
        assert sample(client, "kv_cache_size_tokens") > 0
        assert sample(client, "num_requests_running") == 0
        assert sample(client, "ready") == 1


def test_metrics_before_the_engine_starts(tiny_checkpoint):
    with serving(scripted_engine("Fine.", model=str(tiny_checkpoint))) as server, server.http() as client:
        assert sample(client, "ready") == 0
        assert "active_requests" not in client.get("/metrics").text


def test_applications_have_separate_metrics(tiny_checkpoint):
    for _ in range(2):
        engine = scripted_engine("Fine.", model=str(tiny_checkpoint))
        with engine, serving(engine) as server, server.http() as client:
            client.post(CHAT, json=HELLO)
            assert sample(client, "requests_total", route=CHAT, outcome="success") == 1


def test_metric_names_have_a_prefix(tiny_checkpoint):
    with serving(scripted_engine("Fine.", model=str(tiny_checkpoint))) as server, server.http() as client:
        names = re.findall(r"^# TYPE (\S+)", client.get("/metrics").text, re.MULTILINE)
    assert all(name.startswith((PREFIX, "process_")) for name in names)
    assert len(names) == len(set(names))


def test_metrics_of_replicas_are_labeled_and_listed_once(tiny_checkpoint):
    with scripted_engine("Yes.", model=str(tiny_checkpoint)) as engine, contextlib.ExitStack() as stack:
        metrics = Metrics(engine)  # of both replicas, which are the engine itself here
        app = create_app(engine, replica_metrics=lambda: dict.fromkeys(("one", "two"), metrics.collect_for_engine()))
        client = stack.enter_context(stack.enter_context(RunningServer(app).running()).http())
        client.post(CHAT, json=HELLO)
        text = client.get("/metrics").text
        for replica in ("one", "two"):
            assert sample(client, "e2e_request_latency_seconds_count", replica=replica) == 1
            assert sample(client, "max_active_requests", replica=replica) > 0
        assert sample(client, "requests_total", route=CHAT, outcome="success") == 1
    kinds = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(kinds) == len(set(kinds))
    assert not re.search(r"^dashinfer_vlm_requests_total\{.*replica=", text, re.MULTILINE)
