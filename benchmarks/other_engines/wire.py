"""OpenAI's streaming chat completions with the standard library, for engines without a server.

Runs under the other engines' interpreters: its only other imports are jinja2 and Pillow.
"""

from __future__ import annotations

import base64
import io
import json
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from PIL import Image


class Chat(NamedTuple):
    """One request.

    Attributes:
        prompt: the rendered chat template; `mark` gives the placeholder of each image.
        images: RGB images, in order.
        max_tokens: the exact number of completion tokens.
        alone: whether there is only one user.
    """

    prompt: str
    images: list[Image.Image]
    max_tokens: int
    alone: bool


Generate = Callable[[Chat], Iterator[str]]
"""The text of each token, as it is decoded."""


def start(work: Callable[[], None]) -> None:
    """Run a thread that does not return. If it fails, the process ends, so that no request waits for it."""

    def run() -> None:
        try:
            work()
        finally:
            traceback.print_exc()
            os._exit(1)

    threading.Thread(target=run, daemon=True).start()


def serve(generate: Generate, *, model: Path, port: int, mark: Callable[[int], str] | None = None) -> None:
    """Serve until the process is ended.

    Args:
        generate: streams the response to a chat; called in several threads.
        model: folder with the chat template.
        port: on 127.0.0.1.
        mark: returns the placeholder of an image's index, instead of the template's placeholder.
    """
    template = jinja2.Template(_template(model))

    class Handler(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._head("application/json")
            self.wfile.write(json.dumps({"data": [{"id": "model"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            chat = _chat(body, template, mark)
            self._head("text/event-stream")
            count = 0
            for text in generate(chat):
                count += 1
                self._send({"choices": [{"index": 0, "delta": {"content": text}}]})
            self._send({"choices": [], "usage": {"completion_tokens": count}})
            self.wfile.write(b"data: [DONE]\n\n")

        def _head(self, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()

        def _send(self, event: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

        def log_message(self, *_: object) -> None:
            """Do not log requests."""

    Server(("127.0.0.1", port), Handler).serve_forever()


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # the library's 5 are too few for concurrent users
    daemon_threads = True


def _template(model: Path) -> str:
    file = model / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    return str(json.loads((model / "tokenizer_config.json").read_text())["chat_template"])


def _chat(body: dict[str, Any], template: jinja2.Template, mark: Callable[[int], str] | None) -> Chat:
    images: list[Image.Image] = []
    messages = [{**message, "content": _content(message["content"], images, mark)} for message in body["messages"]]
    prompt = template.render(messages=messages, add_generation_prompt=True)
    return Chat(prompt, images, body["max_tokens"], body.get("metadata", {}).get("users") == "1")


def _content(content: Any, images: list[Image.Image], mark: Callable[[int], str] | None) -> Any:
    if isinstance(content, str):
        return content
    parts = []
    for part in content:
        if part["type"] == "text":
            parts.append(part)
            continue
        data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
        images.append(Image.open(io.BytesIO(data)).convert("RGB"))
        parts.append({"type": "text", "text": mark(len(images) - 1)} if mark else {"type": "image"})
    return parts
