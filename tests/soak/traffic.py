"""What clients of a soak do, each in a thread of its own, and what became of what they did."""

from __future__ import annotations

import collections
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.samples import picture_url
from tests.waiting import HANG

CHAT = "/v1/chat/completions"
QUESTION = {"type": "text", "text": "What is this?"}
PICTURES = [picture_url(40, 60, seed) for seed in range(8)]


@dataclass
class Ledger:
    """What became of every request, as its client saw it; used by many threads.

    Attributes:
        outcomes: how often each came, by its name in the metrics.
        prompt_tokens, completion_tokens: that the usages of whole answers told, together.
        strange: what should not have come.
    """

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    strange: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self, outcome: str, usage: dict[str, Any] | None = None) -> None:
        with self._lock:
            self.outcomes[outcome] += 1
            if usage:
                self.prompt_tokens += usage["prompt_tokens"]
                self.completion_tokens += usage["completion_tokens"]

    def wonder(self, what: str) -> None:
        with self._lock:
            self.strange.append(what)


class Clients:
    """Threads that ask until they are told to stop.

    Args:
        url: of the server.
        web: base address of pictures; those at `/gone.png` are not there.
        ledger: gets what became of each request.
    """

    def __init__(self, url: str, web: str, ledger: Ledger) -> None:
        self._url = url
        self._web = web
        self._ledger = ledger
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, number: int) -> None:
        for seed in range(number):
            thread = threading.Thread(target=self._run, args=[random.Random(seed)])
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=HANG)
            assert not thread.is_alive(), "a client never got its answer"

    def _run(self, rng: random.Random) -> None:
        deeds: list[Callable[[httpx.Client, random.Random], None]] = [
            self._whole, self._whole, self._streamed, self._streamed, self._leaves, self._wrong, self._fetched,
        ]  # fmt: skip
        with httpx.Client(base_url=self._url, trust_env=False, timeout=HANG) as client:
            while not self._stop.is_set():
                try:
                    rng.choice(deeds)(client, rng)
                except Exception as error:  # noqa: BLE001 - the test shows it
                    self._ledger.wonder(repr(error))
                time.sleep(rng.random() * 0.02)

    def _whole(self, client: httpx.Client, rng: random.Random) -> None:
        self._note(client.post(CHAT, json=question(rng)))

    def _streamed(self, client: httpx.Client, rng: random.Random) -> None:
        body = question(rng) | {"stream": True, "stream_options": {"include_usage": True}}
        reply = client.post(CHAT, json=body)
        if reply.status_code != 200:
            self._note(reply)
            return
        events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
        if events[-1] == "[DONE]":
            self._ledger.write("success", json.loads(events[-2])["usage"])
        else:
            self._ledger.write(_outcome(json.loads(events[-1])["error"]))

    def _leaves(self, client: httpx.Client, rng: random.Random) -> None:
        """In the midst of an answer that takes long; a refusal may come first."""
        body = json.dumps(question(rng) | {"stream": True, "max_tokens": 1500}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: soak\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection((client.base_url.host, client.base_url.port or 80), timeout=HANG) as connection:
            connection.sendall(head + body)
            answer = connection.recv(65536)
            while b"\r\n\r\n" not in answer:
                answer += connection.recv(65536)
            if answer.startswith(b"HTTP/1.1 200"):
                self._ledger.write("left")
                return
            with contextlib.suppress(TimeoutError):
                connection.settimeout(0.2)
                while piece := connection.recv(65536):
                    answer += piece
            self._ledger.write(_outcome(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]))

    def _wrong(self, client: httpx.Client, rng: random.Random) -> None:
        self._note(client.post(CHAT, json=question(rng) | rng.choice([{"temperature": 3}, {"messages": []}, {"n": 0}])))

    def _fetched(self, client: httpx.Client, rng: random.Random) -> None:
        name = rng.choice(["picture.png", "gone.png"])
        self._note(client.post(CHAT, json=asked([image(f"{self._web}/{name}"), QUESTION])))

    def _note(self, reply: httpx.Response) -> None:
        body = reply.json()
        if reply.status_code == 200:
            self._ledger.write("success", body["usage"])
        else:
            self._ledger.write(_outcome(body["error"]))


def question(rng: random.Random) -> dict[str, Any]:
    parts = [image(url) for url in rng.sample(PICTURES, rng.choice([0, 0, 1, 2]))]
    return asked([*parts, QUESTION]) | {"max_tokens": rng.randint(1, 24), "ignore_eos": True}


def asked(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def _outcome(error: dict[str, Any]) -> str:
    """The metrics' name for an error."""
    words = {"queue_full": "rejected", "decoder_failed": "unavailable", "engine_closed": "unavailable"}
    other = "invalid" if error["type"] == "invalid_request_error" else "error"
    return words.get(error["code"], other)
