"""Ray Serve's overhead per request and chunk: the same requests to the server and to an application of Ray Serve.

Both serve the bundled model, with one thread and one replica. Requests alternate between both sequentially, and medians
are compared. Needs the extra `ray`.

    python benchmarks/ray_overhead.py [--requests 100] [--tokens 200]
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import httpx
import ray
from ray import serve

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_ray import RayConfig, build_app

MESSAGES = [{"role": "user", "content": "Which shapes do you know?"}]
SERVER = "from dashinfer_vlm_core.cli.main import main; main()"
START_SECONDS = 120.0

Send = Callable[[httpx.Client, Mapping[str, Any]], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=200)
    arguments = parser.parse_args()
    ports = free_ports(2)
    command = [sys.executable, "-c", SERVER, "serve", "--port", str(ports[0])]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            start_ray(ports[1])
            compare([client(port) for port in ports], arguments.requests, arguments.tokens)
        finally:
            server.terminate()
            serve.shutdown()
            ray.shutdown()


def start_ray(port: int) -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_app(RayConfig(engine=EngineConfig(model="demo"))))


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def client(port: int) -> httpx.Client:
    """Return a client of a server, once it is ready."""
    found = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=START_SECONDS)
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        try:
            if found.get("/health/ready").status_code == 200:
                return found
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise TimeoutError(f"The server on port {port} is not ready.")


def compare(clients: Sequence[httpx.Client], requests: int, tokens: int) -> None:
    request = {"messages": MESSAGES, "temperature": 0, "ignore_eos": True}
    one = timed(whole, clients, {**request, "max_tokens": 1}, requests)
    many = timed(whole, clients, {**request, "max_tokens": tokens}, requests // 4)
    stream = timed(streamed, clients, {**request, "max_tokens": tokens, "stream": True}, requests // 4)
    print(f"{'':32}{'server':>12}{'Ray Serve':>12}{'difference':>12}")
    row("one token, ms", [seconds * 1e3 for seconds in one])
    row(f"{tokens} tokens, not streamed, ms", [seconds * 1e3 for seconds in many])
    row(f"{tokens} tokens, streamed, ms", [seconds * 1e3 for seconds in stream])
    row("per chunk, us", [(long - short) / tokens * 1e6 for long, short in zip(stream, one, strict=True)])


def timed(send: Send, clients: Sequence[httpx.Client], body: Mapping[str, Any], rounds: int) -> list[float]:
    """Return the median seconds of a request to each server; the first ones warm up and are not counted."""
    seconds: list[list[float]] = [[] for _ in clients]
    for index in range(rounds + 3):
        for http, taken in zip(clients, seconds, strict=True):
            start = time.perf_counter()
            send(http, body)
            if index >= 3:
                taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]


def whole(http: httpx.Client, body: Mapping[str, Any]) -> None:
    http.post("/v1/chat/completions", json=body).raise_for_status()


def streamed(http: httpx.Client, body: Mapping[str, Any]) -> None:
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        for _ in response.iter_lines():
            pass


def row(name: str, values: Sequence[float]) -> None:
    print(f"{name:32}{values[0]:>12.2f}{values[1]:>12.2f}{values[1] - values[0]:>12.2f}")


if __name__ == "__main__":
    main()
