"""What a router in front of this server costs per request and per chunk: LiteLLM's proxy, or Ray Serve.

    python -m benchmarks.overhead litellm    # needs the extra `litellm`, and litellm[proxy]
    python -m benchmarks.overhead ray        # needs the extra `ray`

The same requests about an image that is cached go to a server with the bundled model and through the router, in short
alternating rounds. Every engine computes with one thread. Times are medians of requests, rates are medians of rounds.
CPU times are those of an endpoint's own processes: one of Ray Serve's is a replica, which does the work of the server,
while the server behind LiteLLM is not included.

`benchmarks/litellm_overhead.py` measures LiteLLM's library with the engine in the same process instead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import yaml

from .client import READ_TIMEOUT, authorization
from .engines import Launch, Server, end_with_us, ours
from .environments import OtherEngines
from .workloads import image_part

MODEL = "qwen"
"""The name of the bundled model in requests; that of the example's configuration."""
KEY = "sk-benchmark-0123456789"
LITELLM_CONFIG = Path(__file__).parents[1] / "examples/scale-out/litellm.yaml"


class Endpoint(Protocol):
    """A server to measure."""

    name: str
    base: str
    api_key: str

    def cpu_seconds(self) -> Mapping[str, float]:
        """Return the CPU time of its processes by their titles."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests of one kind.

    Attributes:
        requests: number of requests in a round.
        tokens: completion tokens of each.
        stream: whether they are streamed.
        users: number of concurrent requests.
    """

    requests: int
    tokens: int
    stream: bool
    users: int = 1

    def body(self, content: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.tokens,
            "stream": self.stream,
            "temperature": 0,
            "ignore_eos": True,
        }


@dataclass(kw_only=True)
class Outcome:
    """All rounds of one kind of request at one endpoint.

    Attributes:
        seconds: of each request.
        events: number of chunks of all responses, or of responses if they are not streamed.
        rates: chunks per second of each round.
        cpu: CPU seconds of all processes.
    """

    seconds: list[float] = field(default_factory=list)
    events: int = 0
    rates: list[float] = field(default_factory=list)
    cpu: float = 0.0

    @property
    def median_ms(self) -> float:
        return 1e3 * statistics.median(self.seconds)

    @property
    def events_per_request(self) -> float:
        return self.events / len(self.seconds)

    @property
    def cpu_ms(self) -> float:
        """Return the CPU time of a request."""
        return 1e3 * self.cpu / len(self.seconds)


Outcomes = Mapping[tuple[str, str], Outcome]
"""(name of the endpoint, name of the load) -> outcome."""


def loads(requests: int, tokens: int, users: int) -> dict[str, Load]:
    """Return the kinds of requests by name."""
    return {
        "whole": Load(requests=requests, tokens=1, stream=False),
        "first": Load(requests=requests, tokens=1, stream=True),
        "stream": Load(requests=max(1, requests // 4), tokens=tokens, stream=True),
        "users": Load(requests=2 * users, tokens=tokens, stream=True, users=users),
    }


async def measure(endpoints: Sequence[Endpoint], kinds: Mapping[str, Load], rounds: int) -> Outcomes:
    """Send all kinds of requests to all endpoints in each round; a first round warms up and is not counted."""
    content = [image_part(random.Random(0)), {"type": "text", "text": "What is there to see?"}]
    outcomes: dict[tuple[str, str], Outcome] = defaultdict(Outcome)
    order = random.Random(0)
    async with contextlib.AsyncExitStack() as stack:
        clients = {each.name: await stack.enter_async_context(_client(each)) for each in endpoints}
        for number in range(-1, rounds):
            for name, kind in kinds.items():
                for endpoint in order.sample(list(endpoints), len(endpoints)):
                    outcome = Outcome() if number < 0 else outcomes[endpoint.name, name]
                    await _round(endpoint, clients[endpoint.name], kind, kind.body(content), outcome)
    return outcomes


@contextlib.asynccontextmanager
async def _client(endpoint: Endpoint) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=READ_TIMEOUT)
    async with aiohttp.ClientSession(headers=authorization(endpoint.api_key), timeout=timeout) as client:
        yield client


async def _round(
    endpoint: Endpoint, client: aiohttp.ClientSession, kind: Load, body: Mapping[str, Any], outcome: Outcome
) -> None:
    async def user() -> int:
        return sum([await _send(endpoint, client, body, outcome) for _ in range(kind.requests // kind.users)])

    before, begin = sum(endpoint.cpu_seconds().values()), time.perf_counter()
    events = sum(await asyncio.gather(*(user() for _ in range(kind.users))))
    outcome.rates.append(events / (time.perf_counter() - begin))
    outcome.events += events
    outcome.cpu += sum(endpoint.cpu_seconds().values()) - before


async def _send(endpoint: Endpoint, client: aiohttp.ClientSession, body: Mapping[str, Any], outcome: Outcome) -> int:
    """Send a request, record its time, and return the number of chunks, or 1 for a response that is not streamed."""
    begin = time.perf_counter()
    async with client.post(f"{endpoint.base}/chat/completions", json=body) as response:
        if not response.ok:
            raise RuntimeError(f"{endpoint.name}: HTTP {response.status}: {await response.text()}")
        lines = [line async for line in response.content]
    outcome.seconds.append(time.perf_counter() - begin)
    if not body["stream"]:
        return 1
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    if errors := [event for event in events if "error" in event]:
        raise RuntimeError(f"{endpoint.name}: {errors[0]}")
    return len(events)


def table(names: Sequence[str], outcomes: Outcomes) -> list[str]:
    """Return the lines of a table in Markdown with one column per endpoint."""

    def row(title: str, values: Sequence[float]) -> str:
        return f"| {title} | {' | '.join(f'{value:.2f}' for value in values)} |"

    def per_chunk(name: str, value: float, first: float) -> float:
        """Return the difference of a stream and its first chunk, per further chunk."""
        further = outcomes[name, "stream"].events_per_request - outcomes[name, "first"].events_per_request
        return (value - first) / further

    lines = [f"| | {' | '.join(names)} |", f"|---{'|---' * len(names)}|"]
    lines.append(row("one token, not streamed, ms", [outcomes[name, "whole"].median_ms for name in names]))
    lines.append(row("one token, streamed, ms", [outcomes[name, "first"].median_ms for name in names]))
    times = [per_chunk(name, outcomes[name, "stream"].median_ms, outcomes[name, "first"].median_ms) for name in names]
    lines.append(row("each further chunk, ms", times))
    rates = [statistics.median(outcomes[name, "users"].rates) for name in names]
    lines.append(row("several users, chunks/s", rates))
    lines.append(row("CPU, one token, not streamed, ms", [outcomes[name, "whole"].cpu_ms for name in names]))
    cpu = [per_chunk(name, outcomes[name, "stream"].cpu_ms, outcomes[name, "first"].cpu_ms) for name in names]
    lines.append(row("CPU, each further chunk, ms", cpu))
    return lines


@contextlib.contextmanager
def ray_endpoints(folder: Path) -> Iterator[list[Server]]:
    """Start the server, and an application of Ray Serve with one replica."""
    program = (sys.executable, str(OtherEngines.script("ray_server.py")), "{port}", str(folder))
    options = ("model=demo", f"served_model_name={MODEL}")
    with _servers(folder, [_plain(), Launch(name="Ray Serve", command=(*program, *options))]) as servers:
        yield servers


@contextlib.contextmanager
def litellm_endpoints(folder: Path) -> Iterator[list[Server]]:
    """Start the server, and LiteLLM's proxy in front of it: with the example's configuration, and without routing.

    The deployments of the configuration are one server, so that the proxy has to choose one.
    """
    with _servers(folder, [_plain()]) as (plain,):
        launches = [
            _litellm("LiteLLM, by media", plain.base, folder / "media.yaml"),
            _litellm("LiteLLM, any server", plain.base, folder / "any.yaml", callbacks=[]),
        ]
        with _servers(folder, launches) as proxies:
            yield [plain, *proxies]


def _litellm(name: str, base: str, path: Path, **settings: Any) -> Launch:
    config = yaml.safe_load(LITELLM_CONFIG.read_text(encoding="utf-8"))
    for deployment in config["model_list"]:
        deployment["litellm_params"]["api_base"] = base
    config["litellm_settings"].update(settings)
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    program = str(Path(sysconfig.get_path("scripts")) / "litellm")
    return Launch(
        name=name,
        command=(program, "--config", str(path), "--host", "127.0.0.1", "--port", "{port}"),
        environment={
            "LITELLM_MASTER_KEY": KEY,
            "SERVER_API_KEY": "none",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it fetches prices from the network
            "NO_PROXY": "127.0.0.1",
        },
        api_key=KEY,
    )


def _plain() -> Launch:
    launch = ours("server", "demo", "--served-model-name", MODEL)
    return Launch(name=launch.name, command=launch.command, environment={"OMP_NUM_THREADS": "1"})


@contextlib.contextmanager
def _servers(folder: Path, launches: Sequence[Launch]) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        servers = []
        for launch in launches:
            servers.append(Server(launch, folder / f"{launch.name}.log"))
            stack.callback(servers[-1].stop)
        yield servers


def main(arguments: Sequence[str] | None = None) -> Outcomes:
    """Run the command line, print the table, and return what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("router", nargs="?", choices=("litellm", "ray"), default="litellm", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=12, help="requests of each kind in a round (%(default)s)")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of a streamed response (%(default)s)")
    parser.add_argument("--users", type=int, default=8, help="concurrent streams (%(default)s)")
    given = parser.parse_args(arguments)
    start = ray_endpoints if given.router == "ray" else litellm_endpoints
    # Ray's sockets are in the folder, and the length of their paths is limited.
    with (
        end_with_us(),
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        start(Path(folder)) as endpoints,
    ):
        kinds = loads(given.requests, given.tokens, given.users)
        outcomes = asyncio.run(measure(endpoints, kinds, given.rounds))
        print("\n".join(table([each.name for each in endpoints], outcomes)))
    return outcomes


if __name__ == "__main__":
    main()
