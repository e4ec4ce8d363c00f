"""OpenAI's embeddings of one conversation, as in vLLM, with the standard library, for engines without a server.

Runs under the other engines' interpreters: its only other import is Pillow.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from PIL import Image

BATCH = 32
WAIT_SECONDS = 0.05
"""How long a batch waits for each further request: they are sent at the same time, but parsed one after the other."""


class Item(NamedTuple):
    """One request: the instruction, and a text or an RGB image."""

    instruction: str
    text: str
    image: Image.Image | None


Vectors = list[list[float]]
Embed = Callable[[list[Item]], Vectors]
Job = tuple[Item, "Future[list[float]]"]


def serve(embed: Embed, port: int) -> None:
    """Serve on 127.0.0.1 until the process is ended; the waiting requests are embedded in batches of up to `BATCH`."""
    jobs: queue.Queue[Job] = queue.Queue()
    threading.Thread(target=_work, args=(embed, jobs), daemon=True).start()

    class Handler(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "model"}]})

        def do_POST(self) -> None:
            item = _item(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            vector: Future[list[float]] = Future()
            jobs.put((item, vector))
            if error := vector.exception():
                self._send(500, {"error": {"message": f"{type(error).__name__}: {error}"}})
            else:
                self._send(200, {"data": [{"index": 0, "embedding": vector.result()}]})

        def _send(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Do not log requests."""

    Server(("127.0.0.1", port), Handler).serve_forever()


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # the library's 5 are too few for concurrent users
    daemon_threads = True


def _work(embed: Embed, jobs: queue.Queue[Job]) -> None:
    while True:
        batch = list(_batch(jobs))
        try:
            vectors = embed([item for item, _ in batch])
        except Exception as error:  # noqa: BLE001 - the benchmark shows it
            for _, future in batch:
                future.set_exception(error)
        else:
            for (_, future), vector in zip(batch, vectors, strict=True):
                future.set_result(vector)


def _batch(jobs: queue.Queue[Job]) -> Iterator[Job]:
    """Yield the waiting requests, at least one."""
    yield jobs.get()
    with contextlib.suppress(queue.Empty):
        for _ in range(BATCH - 1):
            yield jobs.get(timeout=WAIT_SECONDS)


def _item(body: dict[str, Any]) -> Item:
    system, user = body["messages"]
    (part,) = user["content"]
    if part["type"] == "text":
        return Item(system["content"], part["text"], None)
    data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
    return Item(system["content"], "", Image.open(io.BytesIO(data)).convert("RGB"))
