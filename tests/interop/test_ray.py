"""Ray Serve: the application of the server in front of replicas of the engine, with the bundled model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
import yaml

from benchmarks.environments import SetupMissing
from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_server.api_keys import ApiKeys
from tests.interop import interpreters
from tests.interop.interpreters import PROGRAMS
from tests.pages import page_text, read_page
from tests.pooling.checkpoints import write_embedding, write_reranker
from tests.pooling.late_checkpoints import write_colqwen2
from tests.qwen3_5.tiny_qwen3_5 import write_checkpoint
from tests.qwen3_vl.tiny_qwen3 import write_checkpoint as write_qwen3_vl
from tests.samples import image_url
from tests.server.conftest import serving
from tests.waiting import HANG, until

if TYPE_CHECKING:
    from tests.redis_server import RedisServer

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
KEY = "key-of-the-test"
LIMITED_KEY = "key-with-a-limit"
SMALL = {"cpus": 1, "ingress_cpus": 1, "kv_cache_mib": 64, "vision_cache_mib": 16}
"""Options for replicas that share this machine."""
CONFIG = {"model": "demo", "kv_cache_mib": 64, "vision_cache_mib": 16}
ENDLESS = {"max_tokens": 1500, "ignore_eos": True, "n": 16}
MANY_THREADS = "3"
"""What replicas would use if they did not follow `cpus`."""
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""By which the processes of a cluster, and the command `serve`, know each other."""


class Application:
    """A running application of Ray Serve, in a cluster of its own.

    Attributes:
        url: the address of its proxy.
        cluster: the address of the Ray cluster.
    """

    def __init__(self, interpreter: interpreters.Interpreter) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        # The folder is where Ray looks for a running cluster. The paths of its sockets must be short.
        self._folder = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
        environment = {"RAY_TMPDIR": self._folder.name, "OMP_NUM_THREADS": MANY_THREADS, **TOKEN}
        self._process = subprocess.Popen(
            [str(interpreter.python), str(PROGRAMS / "serve_with_ray.py"), str(port), "16"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env={**os.environ, **interpreter.environment, **environment},
        )  # fmt: skip
        self._lock = threading.Lock()
        self._clients: dict[str | None, httpx.Client] = {}
        self.cluster = self._read()

    def deploy(self, **arguments: Any) -> None:
        """Deploy an application, or update it, and wait until all its replicas serve."""
        self._send({"deploy": {**SMALL, **arguments}})
        until(lambda: self.http().get("/health/ready").status_code in {200, 401})

    def counts(self) -> list[dict[str, int]]:
        """Return the counters of each replica that responds."""
        return [count for count in self._send({"broadcast": "counts"}) if isinstance(count, dict)]

    def store_count(self, name: str) -> int:
        """Return the sum of a counter of the embedding store over all replicas."""
        return sum(count["store"][name] for count in self.counts())

    def validate(self, config: Any) -> None:
        """Validate a configuration file with Ray Serve's schema."""
        self._send({"validate": config})

    def fail(self) -> None:
        """Let the engine of one replica fail permanently."""
        self._send({"call": "fail"})

    def http(self, key: str | None = KEY) -> httpx.Client:
        """Return the client with a key, which threads share."""
        if key not in self._clients:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            self._clients[key] = httpx.Client(base_url=self.url, trust_env=False, timeout=HANG, headers=headers)
        return self._clients[key]

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(HANG)
        self._process.stdout.close()
        self._folder.cleanup()

    def _send(self, command: dict[str, Any]) -> Any:
        with self._lock:
            assert self._process.stdin
            print(json.dumps(command), file=self._process.stdin)
            return self._read()

    def _read(self) -> Any:
        assert self._process.stdout
        response = json.loads(self._process.stdout.readline() or '{"error": "The program has ended."}')
        assert "error" not in response, response["error"]
        return response["result"]


@pytest.fixture(scope="module")
def interpreter() -> interpreters.Interpreter:
    try:
        return interpreters.ray()
    except SetupMissing as error:
        pytest.skip(f"Ray is not available: {error}")


@pytest.fixture(scope="module")
def ray(interpreter: interpreters.Interpreter) -> Iterator[Application]:
    with contextlib.closing(Application(interpreter)) as application:
        yield application


@pytest.fixture(scope="module")
def two_replicas(ray: Application, tmp_path_factory: pytest.TempPathFactory) -> Application:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEY}\n{LIMITED_KEY} tokens_per_minute=2\n")
    ray.deploy(min_replicas=2, api_key_file=str(keys), max_model_len=2048)
    return ray


@pytest.fixture(scope="module")
def plain() -> Iterator[httpx.Client]:
    """The server without Ray, with the same options and number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(SMALL["cpus"])
    with Engine(EngineConfig(**CONFIG, max_model_len=2048)) as engine, serving(engine, keys=ApiKeys([KEY])) as server:
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=server.url, trust_env=False, timeout=HANG, headers=headers) as client:
            yield client
    torch.set_num_threads(threads)


def chat(text: str = "Hello!", image: str | None = None, **options: Any) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": image}}] if image else []
    content.append({"type": "text", "text": text})
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 16, **options}


HELLO = {"messages": [{"role": "user", "content": "Hello!"}]}
GREEDY = {"temperature": 0, "num_predict": 16}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
    },
}

REQUESTS = {
    "text": chat(),
    "image": chat("What is this?", image_url(seed=1)),
    "two choices": chat(n=2, logprobs=True, top_logprobs=2),
    "tool": chat(tools=[TOOL], tool_choice="required", max_tokens=64),
    "schema": chat(response_format={"type": "json_object"}, max_tokens=32, seed=1),
    "no messages": {"messages": []},
    "unknown model": chat(model="no-such-model"),
    "temperature": chat(temperature=9),
    "no image": chat("?", "data:image/png;base64,AAAA"),
    "too long": chat("word " * 3000),
    "private address": chat("?", "http://127.0.0.1:1/image.png"),
}


def without_ids(body: Any) -> Any:
    """Remove what differs between two equal responses, and round numbers, which depend on the kernels."""
    changing = {"id", "created", "system_fingerprint", "request_id", "created_at", "modified_at"}
    if isinstance(body, dict):
        kept = {name: value for name, value in body.items() if name not in changing and not name.endswith("_duration")}
        return {name: without_ids(value) for name, value in kept.items()}
    if isinstance(body, float):
        return round(body, 2)
    return [without_ids(item) for item in body] if isinstance(body, list) else body


@pytest.mark.parametrize("name", REQUESTS)
def test_response_and_error_equal_those_of_the_server(two_replicas, plain, name):
    ours, expected = (
        client.post("/v1/chat/completions", json=REQUESTS[name]) for client in (two_replicas.http(), plain)
    )
    assert (ours.status_code, without_ids(ours.json())) == (expected.status_code, without_ids(expected.json()))


@pytest.mark.parametrize("name", ["text", "image", "tool"])
def test_stream_equals_that_of_the_server(two_replicas, plain, name):
    request = {**REQUESTS[name], "stream": True, "stream_options": {"include_usage": True}}
    ours, expected = (events(client, request) for client in (two_replicas.http(), plain))
    assert ours[-1] == expected[-1] == "[DONE]"
    assert [without_ids(json.loads(event)) for event in ours[:-1]] == [
        without_ids(json.loads(event)) for event in expected[:-1]
    ]


def events(client: httpx.Client, request: dict[str, Any]) -> list[str]:
    with client.stream("POST", "/v1/chat/completions", json=request) as response:
        return [line.removeprefix("data: ") for line in response.iter_lines() if line]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models", None),
        ("GET", "/v1/no-such-route", None),
        ("POST", "/tokenize", {"prompt": "Hello!", "return_token_strs": True}),
        ("POST", "/tokenize", chat("What is this?", image_url(seed=1))),
        ("POST", "/detokenize", {"tokens": [1, 2, 3]}),
        ("POST", "/v1/media/preview", chat("What is this?", image_url(seed=1))),
        ("POST", "/v1/messages", {**chat("What is this?"), "model": "demo"}),
        ("POST", "/v1/messages", {"model": "demo"}),
        ("POST", "/v1/messages/count_tokens", {"model": "demo", **HELLO}),
        ("POST", "/v1/completions", {"prompt": ["A", "One", "Two"], "n": 2, "logprobs": 2, "temperature": 0}),
        ("POST", "/v1/completions", {"prompt": [[1, 2, 3]], "echo": True, "max_tokens": 1, "temperature": 0}),
        ("POST", "/api/chat", {"model": "demo", "stream": False, "options": GREEDY, **HELLO}),
        ("POST", "/api/generate", {"model": "demo", "stream": False, "options": GREEDY, "prompt": "Hello!"}),
        ("POST", "/api/embed", {"model": "demo", "input": "Hello!"}),
        ("POST", "/api/show", {"model": "demo"}),
        ("GET", "/api/tags", None),
        ("POST", "/pooling", {"input": "Hello!"}),
        ("GET", "/openapi.json", None),
        ("GET", "/", None),
    ],
)
def test_other_routes_equal_those_of_the_server(two_replicas, plain, method, path, body):
    ours, expected = (client.request(method, path, json=body) for client in (two_replicas.http(), plain))
    assert ours.status_code == expected.status_code
    if "json" in expected.headers["Content-Type"]:
        assert without_ids(ours.json()) == without_ids(expected.json())
    else:
        assert ours.content == expected.content


def test_responses_are_stored_by_the_ingress(two_replicas):
    client = two_replicas.http()
    first = client.post("/v1/responses", json={"input": "Hello!", "max_output_tokens": 16}).json()
    request = {"input": "Again.", "previous_response_id": first["id"], "max_output_tokens": 16}
    assert client.post("/v1/responses", json=request).json()["previous_response_id"] == first["id"]


def test_keys_are_required_and_request_ids_are_returned_once(two_replicas):
    assert two_replicas.http(key=None).post("/v1/chat/completions", json=chat()).status_code == 401
    assert two_replicas.http(key="another").get("/v1/models").status_code == 401
    response = two_replicas.http().get("/v1/models", headers={"X-Request-Id": "mine"})
    assert response.headers.get_list("X-Request-Id") == ["mine"]


def test_tokens_of_a_stream_count_towards_the_limit_of_its_key(two_replicas):
    client = two_replicas.http(LIMITED_KEY)
    assert events(client, chat(stream=True))[-1] == "[DONE]"
    rejected = client.post("/v1/chat/completions", json=chat())
    assert (rejected.status_code, rejected.json()["error"]["code"]) == (429, "rate_limit_exceeded")


def test_metrics_of_replicas_have_a_label(two_replicas):
    def replicas() -> set[str]:
        lines = two_replicas.http().get("/metrics").text.splitlines()
        return {line.split('replica="')[1].split('"')[0] for line in lines if 'replica="' in line}

    until(lambda: len(replicas()) == 2)
    text = two_replicas.http().get("/metrics").text
    assert text.count("# TYPE dashinfer_vlm_time_to_first_token_seconds histogram") == 1
    assert 'dashinfer_vlm_requests_total{outcome="unauthorized"' in text


def test_50_concurrent_requests_equal_those_alone(two_replicas):
    client = two_replicas.http()
    requests = [chat(f"What is {index}?", image_url(seed=index % 5)) for index in range(10)]
    alone = [turn(client, request) for request in requests]
    with ThreadPoolExecutor(50) as pool:
        together = list(pool.map(lambda request: turn(client, request), requests * 5))
    assert together == alone * 5


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_frees_the_slot(two_replicas, stream):
    def active() -> int:
        return sum(count["active"] for count in two_replicas.counts())

    assert active() == 0
    request = {**chat("Hello!", **ENDLESS), "stream": stream}
    if stream:
        with two_replicas.http().stream("POST", "/v1/chat/completions", json=request) as response:
            lines = response.iter_lines()  # closing this iterator would close the connection
            next(lines)
            assert active() == ENDLESS["n"]
    else:
        with pytest.raises(httpx.ReadTimeout):
            two_replicas.http().post("/v1/chat/completions", json=request, timeout=0.2)
    until(lambda: active() == 0)


def test_replicas_compute_with_the_cpus_reserved_for_them(two_replicas):
    assert [count["threads"] for count in two_replicas.counts()] == [SMALL["cpus"]] * 2


@dataclass
class Load:
    """Clients that send requests until `stop`, each again when it has an outcome.

    Attributes:
        outcomes: number of outcomes by name: `success`, or the code of an error.
        sent: number of requests sent.
    """

    application: Application
    outcomes: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    _stopped: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def running(self, clients: int = 6) -> Iterator[Load]:
        with ThreadPoolExecutor(clients) as pool:
            futures = [pool.submit(self._run, index) for index in range(clients)]
            try:
                yield self
            finally:
                self._stopped.set()
        for future in futures:
            future.result()

    def _run(self, index: int) -> None:
        client = self.application.http()
        while not self._stopped.is_set():
            request = chat(f"What is {index}?", image_url(seed=index), stream=index % 2 == 0)
            with self._lock:
                self.sent += 1
            outcome = self._stream(client, request) if request["stream"] else self._send(client, request)
            with self._lock:
                self.outcomes[outcome] += 1

    @staticmethod
    def _send(client: httpx.Client, request: dict[str, Any]) -> str:
        body = client.post("/v1/chat/completions", json=request).json()
        assert ("choices" in body) != ("error" in body), body
        return "success" if "choices" in body else str(body["error"]["code"])

    @staticmethod
    def _stream(client: httpx.Client, request: dict[str, Any]) -> str:
        found = events(client, request)
        errors = [json.loads(event)["error"]["code"] for event in found if '"error"' in event]
        assert len(errors) + found.count("[DONE]") == 1, found
        return str(errors[0]) if errors else "success"


def test_killed_replicas_leave_one_outcome_per_request(ray):
    kills = 20
    ray.deploy(min_replicas=3, api_key=KEY)
    with Load(ray).running() as load:
        for _ in range(kills):
            before = load.outcomes["success"]
            victim = ray.counts()[0]["pid"]
            os.kill(victim, signal.SIGKILL)
            until(lambda before=before: load.outcomes["success"] > before + 3)
            until(lambda victim=victim: len([c for c in ray.counts() if c["pid"] != victim]) > 0)
    assert load.outcomes.total() == load.sent
    assert set(load.outcomes) <= {"success", "replica_lost"}
    assert load.outcomes["success"] > load.outcomes["replica_lost"]
    print(f"{kills} kills: {dict(load.outcomes)}")  # noqa: T201 - the figures of the documentation


def test_update_fails_no_request(ray):
    ray.deploy(min_replicas=2, api_key=KEY)
    before = {count["pid"] for count in ray.counts()}
    with Load(ray).running() as load:
        until(lambda: load.outcomes["success"] > 5)
        ray.deploy(min_replicas=2, api_key=KEY, max_waiting=100)
        until(lambda: before.isdisjoint(count["pid"] for count in ray.counts()))
        after = load.outcomes["success"]
        until(lambda: load.outcomes["success"] > after + 5)
    assert load.outcomes == {"success": load.sent}


def test_replica_with_a_failed_engine_is_replaced(ray):
    ray.deploy(min_replicas=1, api_key=KEY, health_check_period=1)
    (before,) = ray.counts()
    ray.fail()
    until(lambda: [count for count in ray.counts() if count["pid"] != before["pid"]])
    assert ray.http().post("/v1/chat/completions", json=chat()).status_code == 200


def test_replicas_follow_the_number_of_running_requests(ray):
    ray.deploy(
        min_replicas=1, max_replicas=3, target_ongoing_requests=1, upscale_delay=0, downscale_delay=1, api_key=KEY
    )
    assert len(ray.counts()) == 1
    with Load(ray).running(clients=8) as load:
        until(lambda: len(ray.counts()) == 3)
    assert load.outcomes == {"success": load.sent}
    until(lambda: len(ray.counts()) == 1)


def test_busy_replica_leaves_requests_to_the_next_one(ray):
    ray.deploy(min_replicas=2, api_key=KEY, max_ongoing_requests=1)
    request = chat("What is this?", image_url(height=56, width=56))
    endless = {**request, **ENDLESS, "stream": True}
    with ray.http().stream("POST", "/v1/chat/completions", json=endless) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()  # closing this iterator would close the connection
        next(lines)
        turn(ray.http(), request)
    assert [count["encoded"] for count in ray.counts()] == [1, 1]


def test_conversation_with_a_hybrid_model_equals_that_of_the_engine(ray, tmp_path):
    """The second turn finds the states of the first one in its replica."""
    config = {"model": str(write_checkpoint(tmp_path)), "dtype": "float32", "max_model_len": 2048}
    ray.deploy(min_replicas=2, api_key=KEY, **config)
    conversation = chat("What is this? " * 10, image_url(96, 96, seed=1))
    with Engine(EngineConfig(kv_cache_mib=64, **config)) as engine:
        for _ in range(2):
            expected = engine.chat(conversation)
            response = ray.http().post("/v1/chat/completions", json=conversation).json()
            answer = {"role": "assistant", "content": response["choices"][0]["message"]["content"]}
            assert answer["content"] == expected.choices[0].message.content
            conversation["messages"] += [answer, {"role": "user", "content": "And now?"}]
    assert response["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


RED = image_url(56, 56, seed=1)
POOLING = {
    "embed": {
        "/v1/embeddings": [
            {"input": ["A dog.", "A cat."], "encoding_format": "base64"},
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": RED}}]}]},
            {"input": []},
            {"input": ["a", ""]},
            {"input": "a", "dimensions": 7},
            {"input": ["a", "word " * 3000]},
        ],
        "/v1/rerank": [{"query": "a", "documents": ["b"]}],
        "/v1/chat/completions": [chat()],
    },
    "score": {
        "/v1/rerank": [{"query": "dogs", "documents": ["A dog.", {"image": RED}]}, {"query": "a", "documents": [{}]}],
        "/score": [{"text_1": "dogs", "text_2": ["A dog.", "A cat."]}, {"text_1": ["a", "b"], "text_2": ["c"] * 3}],
        "/v1/embeddings": [{"input": "a"}],
    },
    "token_embed": {
        "/pooling": [{"input": ["A dog.", "A cat."]}, {"input": "a", "encoding_format": "base64"}, {"input": []}],
        "/v1/rerank": [{"query": "dogs", "documents": ["A dog.", "A cat."]}],
    },
}


def write_retriever(_base: Path, folder: Path) -> Path:
    return write_colqwen2(folder)


@pytest.mark.parametrize(
    ("task", "write"), [("embed", write_embedding), ("score", write_reranker), ("token_embed", write_retriever)]
)
def test_embeddings_and_scores_equal_those_of_the_server(ray, tmp_path, task, write):
    model = write(write_qwen3_vl(tmp_path / "base"), tmp_path / "model")
    config = {"model": str(model), "dtype": "float32", "max_model_len": 2048}
    limited = f"{LIMITED_KEY} tokens_per_minute=2"
    (tmp_path / "keys").write_text(f"{KEY}\n{limited}\n")
    ray.deploy(min_replicas=2, api_key_file=str(tmp_path / "keys"), **config)
    with Engine(EngineConfig(kv_cache_mib=64, **config)) as engine, serving(engine) as server, server.http() as plain:
        for path, bodies in POOLING[task].items():
            for body in bodies:
                ours, expected = (client.post(path, json=body) for client in (ray.http(), plain))
                assert ours.status_code == expected.status_code, ours.text
                assert without_ids(ours.json()) == without_ids(expected.json())
    path = {"embed": "/v1/embeddings", "score": "/score", "token_embed": "/pooling"}[task]
    body = POOLING[task][path][0]
    assert [ray.http(LIMITED_KEY).post(path, json=body).status_code for _ in range(2)] == [200, 429]


TWO_INGRESSES = {"ingress_replicas": 2, "max_stored_responses": 0}


@pytest.mark.parametrize(
    ("options", "stored", "encoded"),
    [
        ({"routing": "content", **TWO_INGRESSES}, False, range(8, 9)),
        ({"routing": "round-robin"}, False, range(9, 33)),
        ({"routing": "round-robin"}, True, range(8, 9)),
    ],
    ids=["content, two ingress replicas", "round robin", "round robin, store"],
)
def test_eight_conversations_about_eight_images(ray, tmp_path, options, stored, encoded):
    store = {"embedding_store": f"file://{tmp_path}/store", "limits": {"store_timeout": 30}} if stored else {}
    ray.deploy(min_replicas=4, api_key=KEY, **options, **store)
    conversations = [chat("What is this?", image_url(height=112, width=112, seed=index)) for index in range(8)]
    client = ray.http()
    with ThreadPoolExecutor(8) as pool:
        for _ in range(4):
            answers = pool.map(lambda request: turn(client, request), conversations)
            for conversation, answer in zip(conversations, answers, strict=True):
                conversation["messages"] += [answer, {"role": "user", "content": "And now?"}]
            if stored:
                until(lambda: ray.store_count("writes") == 8)
    assert sum(count["encoded"] for count in ray.counts()) in encoded


def turn(client: httpx.Client, request: dict[str, Any]) -> dict[str, Any]:
    content = client.post("/v1/chat/completions", json=request).json()["choices"][0]["message"]["content"]
    return {"role": "assistant", "content": content}


@pytest.fixture
def redis_server(tmp_path) -> Iterator[RedisServer]:
    from tests.redis_server import RedisServer  # skips the test where it cannot run

    with contextlib.closing(RedisServer(tmp_path)) as server:
        yield server


def test_replicas_answer_equally_whatever_happens_to_redis(ray, redis_server):
    """Replicas that keep no embeddings look up each image: with Redis, with wrong values in it, and so on."""
    store = {"embedding_store": redis_server.store_url, "limits": {"store_timeout": 5}, "vision_cache_mib": 0}
    ray.deploy(min_replicas=4, api_key=KEY, routing="round-robin", **store)
    requests = [chat("What is this?", image_url(height=84, width=84, seed=index)) for index in range(8)]

    expected = logprobs(ray, requests)
    assert len(set(map(tuple, expected))) == 8  # a wrong embedding would be noticed
    until(lambda: ray.store_count("writes") == 8)
    assert logprobs(ray, requests) == expected
    assert sum(count["encoded"] for count in ray.counts()) == ray.store_count("hits") == 8

    keys = redis_server.client.keys()
    values = redis_server.client.mget(keys)
    redis_server.client.mset(dict(zip(keys, values[::-1], strict=True)))
    assert logprobs(ray, requests) == expected
    until(lambda: redis_server.client.mget(keys) == values)
    assert ray.store_count("invalid") == 8

    redis_server.client.flushall()
    redis_server.client.config_set("maxmemory", 1)
    assert logprobs(ray, requests) == expected
    until(lambda: ray.store_count("write_errors") + ray.store_count("dropped") == 8)

    redis_server.pause(HANG)
    assert logprobs(ray, requests) == expected
    assert ray.store_count("timeouts") > 0

    redis_server.kill()
    assert logprobs(ray, requests) == expected
    assert ray.store_count("errors") > 0


def logprobs(application: Application, requests: list[dict[str, Any]]) -> list[list[float]]:
    """Send requests at the same time, and return the log probabilities of four tokens of each response."""

    def send(request: dict[str, Any]) -> list[float]:
        options = {"max_tokens": 4, "ignore_eos": True, "logprobs": True}
        response = application.http().post("/v1/chat/completions", json={**request, **options})
        assert response.status_code == 200, response.text
        return [token["logprob"] for token in response.json()["choices"][0]["logprobs"]["content"]]

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(send, requests))


def test_configuration_files_fit_the_schema_of_ray_serve(ray):
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", page_text("ray.md"), re.MULTILINE | re.DOTALL)
    ray.validate(yaml.safe_load(block))
    objects = {each["kind"]: each for each in yaml.safe_load_all(read_page("examples/scale-out/rayservice.yaml"))}
    config = yaml.safe_load(objects["RayService"]["spec"]["serveConfigV2"])
    ray.validate(config)
    config["applications"][0]["import_paths"] = config["applications"][0].pop("import_path")
    with pytest.raises(AssertionError, match="import_path"):
        ray.validate(config)


BUILD_TWICE = """
import ray
from dashinfer_vlm_ray import app
app({"model": "demo", "min_replicas": 2})
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 * 1024 * 1024)
app({"model": "demo", "min_replicas": 1})
app({"model": "demo", "min_replicas": 4, "ingress_cpus": 0.5})
"""


def test_application_states_what_the_cluster_lacks(interpreter):
    """Before this process joins a cluster, as in `serve run`, and after, as in `serve deploy`."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, **interpreter.environment, "RAY_TMPDIR": folder, **TOKEN}
        command = [interpreter.python, "-c", BUILD_TWICE]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG, check=True)
    found = re.findall(r"requires (\S+) CPUs, and the cluster has (\S+):", ended.stdout + ended.stderr)
    assert found == [("3", "2"), ("4.5", "2")]


# A process that was started in the background may ignore SIGINT.
SERVE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from ray.serve.scripts import cli
cli()
"""


def test_serve_run_serves_until_it_is_interrupted(interpreter, tmp_path):
    """The command `serve`, as users run it, in a cluster whose proxy listens on a free port."""
    log = tmp_path / "log"
    options = {**SMALL, "model": "demo", "served_model_name": "served", "api_key": KEY}
    with contextlib.closing(Application(interpreter)) as cluster, log.open("w") as output:
        command = [interpreter.python, "-c", SERVE, "run", "--address", cluster.cluster, "dashinfer_vlm_ray:app"]
        command += [f"{name}={value}" for name, value in options.items()]
        environment = {**os.environ, **interpreter.environment, **TOKEN}
        with subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process:
            try:
                until(lambda: process.poll() is not None or is_ready(cluster))
                assert process.poll() is None, log.read_text()
                assert [model["id"] for model in cluster.http().get("/v1/models").json()["data"]] == ["served"]
                assert cluster.http().post("/v1/chat/completions", json=chat()).status_code == 200
                process.send_signal(signal.SIGINT)
                assert process.wait(HANG) == 0, log.read_text()
                until(lambda: not is_ready(cluster))
            finally:
                process.kill()


def is_ready(application: Application) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return application.http().get("/health/ready").status_code == 200
    return False
