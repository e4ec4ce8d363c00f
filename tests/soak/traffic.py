"""Clients of a soak, each in its own thread, and the outcomes of their requests."""

from __future__ import annotations

import collections
import contextlib
import email.parser
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.samples import image_url
from tests.waiting import HANG

CHAT = "/v1/chat/completions"
QUESTION = {"type": "text", "text": "What is this?"}
IMAGES = [image_url(40, 60, seed) for seed in range(8)]


@dataclass
class Ledger:
    """The outcome of every request as seen by its client; thread-safe.

    Attributes:
        outcomes: counts by the outcome's name in the metrics.
        prompt_tokens, completion_tokens: totals of the usages of complete responses.
        unexpected: errors that should not have happened.
    """

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    unexpected: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self, outcome: str, usage: dict[str, Any] | None = None) -> None:
        with self._lock:
            self.outcomes[outcome] += 1
            if usage:
                self.prompt_tokens += usage["prompt_tokens"]
                self.completion_tokens += usage["completion_tokens"]

    def add_unexpected(self, error: str) -> None:
        with self._lock:
            self.unexpected.append(error)


class Clients:
    """Threads that send requests, in a `with` block.

    Args:
        url: the server's base URL.
        web: base URL of the image server; `/gone.png` does not exist.
        ledger: records the outcome of each request.
    """

    def __init__(self, url: str, web: str, ledger: Ledger) -> None:
        self._url = url
        self._web = web
        self._ledger = ledger
        self._stop = threading.Event()

    @contextlib.contextmanager
    def running(self, number: int) -> Iterator[None]:
        threads = [
            threading.Thread(target=self._run, args=[random.Random(seed)], daemon=True) for seed in range(number)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
        for thread in threads:
            thread.join(timeout=HANG)
            assert not thread.is_alive(), "a client never got its response"

    def _run(self, rng: random.Random) -> None:
        actions: list[Callable[[httpx.Client, random.Random], None]] = [
            self._send_plain, self._send_plain, self._send_streamed, self._send_streamed, self._disconnect,
            self._send_invalid, self._send_fetched_image,
        ]  # fmt: skip
        with httpx.Client(base_url=self._url, trust_env=False, timeout=HANG) as client:
            while not self._stop.is_set():
                try:
                    rng.choice(actions)(client, rng)
                except Exception as error:  # noqa: BLE001 - the test reports it
                    self._ledger.add_unexpected(repr(error))
                time.sleep(rng.random() * 0.02)

    def _send_plain(self, client: httpx.Client, rng: random.Random) -> None:
        self._record(client.post(CHAT, json=random_request(rng)))

    def _send_streamed(self, client: httpx.Client, rng: random.Random) -> None:
        body = random_request(rng) | {"stream": True, "stream_options": {"include_usage": True}}
        response = client.post(CHAT, json=body)
        if response.status_code != 200:
            self._record(response)
            return
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        if events[-1] == "[DONE]":
            self._ledger.write("success", json.loads(events[-2])["usage"])
        else:
            self._ledger.write(_outcome(json.loads(events[-1])["error"]))

    def _disconnect(self, client: httpx.Client, rng: random.Random) -> None:
        """Disconnect in the middle of a long response; the request may be rejected first."""
        body = json.dumps(random_request(rng) | {"stream": True, "max_tokens": 1500}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((client.base_url.host, client.base_url.port or 80), timeout=HANG) as connection:
            connection.sendall(head.encode() + body)
            with connection.makefile("rb") as response:
                if b" 200 " in response.readline():
                    self._ledger.write("left")
                    return
                headers = email.parser.BytesParser().parsebytes(b"".join(iter(response.readline, b"\r\n")))
                self._ledger.write(_outcome(json.loads(response.read(int(headers["content-length"])))["error"]))

    def _send_invalid(self, client: httpx.Client, rng: random.Random) -> None:
        self._record(
            client.post(CHAT, json=random_request(rng) | rng.choice([{"temperature": 3}, {"messages": []}, {"n": 0}]))
        )

    def _send_fetched_image(self, client: httpx.Client, rng: random.Random) -> None:
        name = rng.choice(["picture.png", "gone.png"])
        self._record(client.post(CHAT, json=chat_request([image(f"{self._web}/{name}"), QUESTION])))

    def _record(self, response: httpx.Response) -> None:
        body = response.json()
        if response.status_code == 200:
            self._ledger.write("success", body["usage"])
        else:
            self._ledger.write(_outcome(body["error"]))


def random_request(rng: random.Random) -> dict[str, Any]:
    parts = [image(url) for url in rng.sample(IMAGES, rng.choice([0, 0, 1, 2]))]
    return chat_request([*parts, QUESTION]) | {"max_tokens": rng.randint(1, 24), "ignore_eos": True}


def chat_request(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def _outcome(error: dict[str, Any]) -> str:
    """Return the name of an error in the metrics."""
    words = {"queue_full": "rejected", "decoder_failed": "unavailable", "engine_closed": "unavailable"}
    other = "invalid" if error["type"] == "invalid_request_error" else "error"
    return words.get(error["code"], other)
