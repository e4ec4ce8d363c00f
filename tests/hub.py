"""A hub with the endpoints of Hugging Face and ModelScope that downloads use, which can misbehave."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MAIN = "from dashinfer_vlm_core.cli.main import main; main()"


class Hub(BaseHTTPRequestHandler):
    """One repository, `maker/tiny`, with the files in `folder`.

    Attributes:
        asked: the requests, with the ranges.
        tokens: the authorizations of the requests.
        entries: replacements for entries of the list of files, by path; None leaves one out.
        bodies: functions that send the content of a file instead, by path.
        statuses: statuses of files, by path, or of the API (`api`), with an error code of the hub.
        token: the token that all requests need; empty for none.
        commit: the commit that the API states.
        lists: a function that sends the responses of the API instead.
        next_page: the address of the second page of the list of files; empty if there is none.
        second_page: its entries.
    """

    folder: Path
    asked: list[str]
    tokens: set[str | None]
    entries: dict[str, Any]
    bodies: dict[str, Any]
    statuses: dict[str, tuple[int, str]]
    token = ""
    commit = COMMIT
    lists: Any = None
    next_page = ""
    second_page: list[Any]
    mute = False
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.asked.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        self.tokens.add(self.headers.get("Authorization"))
        if self.mute:
            self.close_connection = True
        elif self.token and self.headers.get("Authorization") != f"Bearer {self.token}":
            self._refuse(401, "GatedRepo")
        elif self.path.startswith("/api/") and "api" in self.statuses:
            self._refuse(*self.statuses["api"])
        elif self.path.startswith("/api/") and self.lists:
            self.lists()
        elif self.path.startswith("/api/models/maker/tiny/tree/") and "page=2" in self.path:
            self._send(json.dumps(self.second_page).encode())
        elif self.path.startswith("/api/models/maker/tiny/tree/"):
            self._send(json.dumps(self._tree()).encode(), link=self.next_page)
        elif self.path.startswith("/api/models/maker/tiny"):
            self._send(json.dumps({"id": "maker/tiny", "sha": self.commit, "siblings": []}).encode())
        elif self.path.startswith("/api/v1/models/maker/tiny/repo/files?"):
            self._send(json.dumps({"Code": 200, "Data": {"Files": self._modelscope_files()}}).encode())
        elif self.path.startswith((f"/maker/tiny/resolve/{COMMIT}/", "/models/maker/tiny/resolve/master/")):
            self._file(self.path.rpartition("/")[2])
        else:
            self._refuse(401 if "private" in self.path else 404, "RepoNotFound")

    def _tree(self):
        listed = {path.name: entry(path) for path in sorted(self.folder.iterdir())} | self.entries
        return [each for each in listed.values() if each is not None]

    def _modelscope_files(self):
        found = [{"Type": "tree", "Path": "folder", "Size": 0, "Sha256": ""}]
        for path in sorted(self.folder.iterdir()):
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            found.append({"Type": "blob", "Path": path.name, "Size": len(content), "Sha256": digest})
        return found

    def _file(self, name):
        if name in self.statuses:
            self._refuse(*self.statuses[name])
        elif name in self.bodies:
            self.bodies[name](self)
        else:
            self._send((self.folder / name).read_bytes())

    def _refuse(self, status, code):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, body, link=""):
        start = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        part = body[int(start[1]) :] if start else body
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start[1]}-{len(body) - 1}/{len(body)}")
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(part)))
        if link:
            self.send_header("Link", f'<{link}>; rel="next"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(part)

    def log_message(self, *args):
        """Keep the test's output clean."""


def entry(path: Path) -> dict[str, Any]:
    """Return the entry of a file in the list of files."""
    content = path.read_bytes()
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    found: dict[str, Any] = {"type": "file", "path": path.name, "size": len(content), "oid": git}
    if path.suffix == ".safetensors":
        digest = hashlib.sha256(content).hexdigest()
        found["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
    return found


def halves(content: bytes, *, then: threading.Event | None = None) -> Any:
    """Return a body that ends after its first half; with `then`, the connection stays open until that is set."""

    def send(handler: Hub) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content[: len(content) // 2])
        handler.wfile.flush()
        if then:
            then.wait(60)
        handler.close_connection = True

    return send


def endless(handler: Hub) -> None:
    """Send a file without a length, and without an end until the client closes the connection."""
    handler.send_response(200)
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.close_connection = True
    try:
        while True:
            handler.wfile.write(b"x" * 65536)
            time.sleep(0.001)
    except OSError:
        return


@contextmanager
def serve_hub(folder: Path) -> Iterator[type[Hub]]:
    """Serve a folder; yields the handler, whose attributes can be changed, and whose `url` is the endpoint."""
    handler = type(
        "Handler", (Hub,), {"folder": folder, "asked": [], "tokens": set(), "entries": {}, "bodies": {}, "statuses": {}}
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        handler.url = f"http://127.0.0.1:{server.server_port}"
        yield handler
        server.shutdown()


def environment(home: Path, endpoint: str, **more: str) -> dict[str, str]:
    """Return the environment of a process that uses the hub."""
    return {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "DASHINFER_VLM_CACHE_DIR": str(home / "ours"),
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",  # where both are set, the lowercase names take precedence
        **more,
    }


def start(*arguments: str, home: Path, endpoint: str, **more: str) -> subprocess.Popen[str]:
    """Start the command line in a process."""
    # Background jobs of shells ignore SIGINT.
    program = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {MAIN}"
    command = [sys.executable, "-c", program, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment(home, endpoint, **more), stdout=pipe, stderr=pipe, text=True)
