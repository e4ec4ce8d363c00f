"""Attacks on a real server, next to a well-behaved user: what each one achieves.

    python -m benchmarks.attacks [--seconds 5] [--only NAME] [--out FILE]
    python -m benchmarks.attacks --engine-command 'dashinfer-vlm serve --port {port} {key_options} --grace 2'

starts a server with two API keys, runs each attack alone in a loop and then all of them with four attackers, and prints
a Markdown table. The attackers share one key. The user has the other one and requests one token for an image of 448 x
448 pixels at a time. The attacks are those of rules 23 to 32 and 41 of SECURITY.md that come over the network.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from .engines import end_with_us, free_port, members
from .hostile_media import HOSTILE, HostileFile

HOST = "127.0.0.1"
USER_KEY, ATTACKER_KEY = "user-key", "attacker-key"
ATTACKERS = 4
GRACE_SECONDS = 2.0
PATIENCE_SECONDS = 120.0
"""How long an attacker waits for a response."""
EXIT_SECONDS = 120.0
START_SECONDS = 120.0
SAMPLE_SECONDS = 0.05
BIG_BODY_BYTES = 64 << 20
IMAGES = 32
"""Number of different images that the user sends."""
KILLS = 50
MIB = 1 << 20
BUSY = 0.5
"""Share of a core that a process uses while it decodes."""


# Requests


def http_request(body: bytes, *, key: str, host: str = HOST, headers: Sequence[str] = ()) -> bytes:
    """Return a chat completion request; `headers` replace the type and length of the body."""
    about_body = headers or ("Content-Type: application/json", f"Content-Length: {len(body)}")
    lines = ["POST /v1/chat/completions HTTP/1.1", f"Host: {host}", "Connection: close", *about_body]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chat_body(*parts: dict[str, object], text: str = "What is this?") -> bytes:
    content = [*parts, {"type": "text", "text": text}]
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1}).encode()


def media_part(file: HostileFile) -> dict[str, object]:
    url = f"data:{file.media_type};base64,{base64.b64encode(file.build()).decode()}"
    if file.kind == "file":
        return {"type": "file", "file": {"file_data": url}}
    return {"type": f"{file.kind}_url", f"{file.kind}_url": {"url": url}}


@cache
def image_part(seed: int, side: int = 448) -> dict[str, object]:
    """Return a JPEG of smooth random colors."""
    from PIL import Image

    small = Image.frombytes("RGB", (16, 16), random.Random(seed).randbytes(768))
    buffer = io.BytesIO()
    small.resize((side, side), Image.Resampling.BICUBIC).save(buffer, "JPEG")
    url = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def send(port: int, request: bytes, patience: float = PATIENCE_SECONDS) -> str:
    """Send a request and return the status of its response, with the code of an error."""
    try:
        with socket.create_connection((HOST, port), timeout=patience) as sock:
            sock.sendall(request)
            response = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    except TimeoutError:
        return "no response"
    except OSError:
        return "connection closed"
    head, _, body = response.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1].decode() if head.startswith(b"HTTP/") else "connection closed"
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return f"{status} {json.loads(body)['error']['code']}"
    return status


# Attacks


@dataclass(frozen=True, kw_only=True, slots=True)
class Attack:
    """One attack.

    Attributes:
        name: its name in the table.
        rule: the rule of SECURITY.md that it violates.
        request: builds the HTTP request for a key, which is empty for a server without keys.
        without_keys: whether it attacks a server without API keys.
        setup: the request of the user that comes before it, if there is one.
    """

    name: str
    rule: int
    request: Callable[[str], bytes]
    without_keys: bool = False
    setup: Callable[[str], bytes] | None = None


def attacks() -> list[Attack]:
    """Return all attacks, by rule."""
    media = [
        Attack(name=name, rule=file.rule, request=lambda key, file=file: http_request(_media_body(file), key=key))  # type: ignore[misc]
        for name, file in HOSTILE.items()
    ]
    return sorted([*media, *_http_attacks()], key=lambda attack: attack.rule)


def _http_attacks() -> list[Attack]:
    hello = chat_body(text="Hello")
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(hello), hello)
    named = {**image_part(0), "uuid": "private"}
    return [
        Attack(
            name="a foreign Host header (DNS rebinding)",
            rule=27,
            without_keys=True,
            request=lambda key: http_request(hello, key=key, host="attacker.example"),
        ),
        Attack(
            name="a cross-origin request of type text/plain",
            rule=27,
            without_keys=True,
            request=lambda key: http_request(
                hello,
                key=key,
                headers=(
                    "Origin: http://attacker.example",
                    "Content-Type: text/plain",
                    f"Content-Length: {len(hello)}",
                ),
            ),
        ),
        Attack(
            name="an image of the user, by its uuid",
            rule=28,
            setup=lambda key: http_request(chat_body(named), key=key),
            request=lambda key: http_request(chat_body({"type": "image_url", "uuid": "private"}), key=key),
        ),
        Attack(
            name="Content-Length and Transfer-Encoding",
            rule=30,
            request=lambda key: http_request(
                chunked,
                key=key,
                headers=(
                    "Content-Type: application/json",
                    f"Content-Length: {len(chunked)}",
                    "Transfer-Encoding: chunked",
                ),
            ),
        ),
        Attack(name="JSON of 64 MiB", rule=32, request=lambda key: http_request(_big_body(), key=key)),
    ]


@cache
def _media_body(file: HostileFile) -> bytes:
    return chat_body(media_part(file))


@cache
def _big_body() -> bytes:
    escaped = b"\\u0041"
    return b'{"messages":[{"role":"user","content":"' + escaped * (BIG_BODY_BYTES // len(escaped)) + b'"}]}'


# The server and what is measured of it


class Server:
    """A server in its own session, with all processes that it starts."""

    def __init__(self, command: str, folder: Path, *, keys: bool) -> None:
        self.port = free_port()
        (folder / "keys").write_text(f"{USER_KEY}\n{ATTACKER_KEY}\n")
        options = f"--api-key-file {folder / 'keys'}" if keys and "{key_options}" in command else ""
        self.has_keys = bool(options)
        arguments = shlex.split(command.replace("{port}", str(self.port)).replace("{key_options}", options))
        with (folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def wait_until_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while self.health() is None or not self.answers():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("The server did not start.")
            time.sleep(0.1)

    def answers(self) -> bool:
        """Return whether it responds to a request with an image, which also loads what is loaded on first use."""
        return send(self.port, http_request(chat_body(image_part(0)), key=self.key(USER_KEY))) == "200"

    def key(self, name: str) -> str:
        return name if self.has_keys else ""

    def health(self) -> float | None:
        """Return the seconds that `/health` takes; None if there is no response."""
        begin = time.perf_counter()
        try:
            with socket.create_connection((HOST, self.port), timeout=PATIENCE_SECONDS) as sock:
                sock.sendall(f"GET /health HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode())
                return time.perf_counter() - begin if sock.recv(1 << 16) else None
        except OSError:
            return None

    def children(self) -> list[int]:
        """Return the processes of the session, without the server itself."""
        return [process for process in members(self.process.pid) if process != self.process.pid]

    def grandchildren(self) -> list[int]:
        """Return the children of the processes that the server has started: the media workers."""
        return [process for process in self.children() if parent(process) not in (self.process.pid, None)]

    def kill(self) -> None:
        for process in (*self.children(), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()


def resident_bytes(process: int) -> int:
    """Return the resident memory of a process, without mapped files and shared memory; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{process}/statm").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(process: int) -> float | None:
    """Return the CPU time of a process; None if it has ended."""
    fields = _statistics(process)
    return None if fields is None else (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def parent(process: int) -> int | None:
    """Return the parent of a process; None if it has ended."""
    fields = _statistics(process)
    return None if fields is None else int(fields[1])


def _statistics(process: int) -> list[str] | None:
    """Return the fields of `/proc/PROCESS/stat` from the state on; None if the process has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields


@dataclass(kw_only=True)
class Observations:
    """What happened while attacks were running.

    Attributes:
        outcomes: statuses of the attacks.
        seconds: the duration of each attack.
        user_seconds: the duration of each request of the user that succeeded.
        failures: other statuses of the user's requests.
        health: seconds of `/health`.
        memory: the maximum resident memory of the server, and that of its children together.
        elapsed: seconds of all of this.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    user_seconds: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    health: list[float] = field(default_factory=list)
    memory: tuple[int, int] = (0, 0)
    elapsed: float = 0.0

    @property
    def rate(self) -> float:
        """The user's responses per second."""
        return len(self.user_seconds) / self.elapsed


class Observer:
    """The user, the probe of `/health` and the measurement of memory, each in a thread."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stop = threading.Event()
        self.seen = Observations()

    @contextlib.contextmanager
    def running(self) -> Iterator[Observations]:
        threads = [threading.Thread(target=work) for work in (self._use, self._probe, self._measure)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        try:
            yield self.seen
        finally:
            self.seen.elapsed = time.perf_counter() - begin
            self._stop.set()
            for thread in threads:
                thread.join()

    def _use(self) -> None:
        number = 0
        while not self._stop.is_set():
            body, begin = chat_body(image_part(number % IMAGES)), time.perf_counter()
            status = send(self._server.port, http_request(body, key=self._server.key(USER_KEY)))
            number += 1
            if self._stop.is_set():
                return
            if status == "200":
                self.seen.user_seconds.append(time.perf_counter() - begin)
            else:
                self.seen.failures[status] += 1

    def _probe(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            seconds = self._server.health()
            if seconds is not None:
                self.seen.health.append(seconds)

    def _measure(self) -> None:
        server, children = 0, 0
        while not self._stop.wait(SAMPLE_SECONDS):
            server = max(server, resident_bytes(self._server.process.pid))
            children = max(children, sum(map(resident_bytes, self._server.children())))
            self.seen.memory = server, children


def observe(server: Server, work: Sequence[Attack], *, attackers: int, seconds: float) -> Observations:
    """Run attacks in a loop for `seconds`, each at least once; attacks in progress are waited for."""
    requests = [attack.request(server.key(ATTACKER_KEY)) for attack in work]
    end = time.monotonic() + seconds

    def attack(number: int, seen: Observations) -> None:
        while number < len(requests) or time.monotonic() < end:
            begin = time.perf_counter()
            seen.outcomes[send(server.port, requests[number % len(requests)])] += 1
            seen.seconds.append(time.perf_counter() - begin)
            number += attackers

    with Observer(server).running() as seen:
        threads = [threading.Thread(target=attack, args=(number, seen)) for number in range(attackers if work else 0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(max(0.0, end - time.monotonic()))
    return seen


def busiest_process(server: Server) -> int | None:
    """Return the process of the server that uses most of a core; None if there is none."""
    processes = [server.process.pid, *server.children()]
    before = {process: cpu_seconds(process) for process in processes}
    time.sleep(0.3)
    used = {process: (cpu_seconds(process) or 0) - (start or 0) for process, start in before.items()}
    busiest = max(used, key=used.__getitem__)
    return busiest if used[busiest] > 0.3 * BUSY else None


def cancellation(server: Server, attack: Attack) -> str:
    """Return the time from a client's disconnect until the process that worked for it is idle or gone."""
    with socket.create_connection((HOST, server.port)) as sock:
        sock.sendall(attack.request(server.key(ATTACKER_KEY)))
        time.sleep(0.5)
        process = busiest_process(server)
    if process is None:
        return "not measured, since it takes less than a second"
    begin = time.monotonic()
    while (elapsed := time.monotonic() - begin) < PATIENCE_SECONDS:
        if not is_busy(process):
            ended = time.monotonic() - begin if cpu_seconds(process) is None else elapsed
            return f"{ended:.2f} s"
    return f"more than {PATIENCE_SECONDS:g} s"


def is_busy(process: int, seconds: float = 0.2) -> bool:
    """Return whether a process uses a core for `seconds`; returns early if it ends."""
    begin, before = time.monotonic(), cpu_seconds(process)
    while (now := cpu_seconds(process)) is not None and before is not None:
        if (elapsed := time.monotonic() - begin) > seconds:
            return now - before > BUSY * elapsed
        time.sleep(0.01)
    return False


def outcomes_after_kills(server: Server) -> Counter[str]:
    """Kill the processes that decode media again and again; return the statuses of a request of the user after each."""
    statuses = Counter[str]()
    for number in range(KILLS):
        for process in server.grandchildren():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        request = http_request(chat_body(image_part(IMAGES + number)), key=server.key(USER_KEY))
        statuses[send(server.port, request)] += 1
    return statuses


def shutdown_seconds(server: Server, work: Sequence[Attack]) -> float:
    """Return the time from SIGTERM until the process ends, while attacks are running."""
    for attack in work:
        request = attack.request(server.key(ATTACKER_KEY))
        threading.Thread(target=send, args=(server.port, request), daemon=True).start()
    time.sleep(1.0)
    begin = time.monotonic()
    server.process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(EXIT_SECONDS)
    return time.monotonic() - begin


# The report

HEADER = (
    "| Attack | Rule | Outcome | Seconds | Server, MiB | Children, MiB | User's rate | User's failures |"
    " /health p50, ms | p99, ms | maximum, ms |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def row(name: str, rule: str, seen: Observations, idle: Observations) -> str:
    """Return a row of the table; memory is the growth since `idle`, the user's rate is relative to that of `idle`."""
    outcomes = ", ".join(f"{status} ({count})" for status, count in seen.outcomes.most_common(6))
    failures = ", ".join(f"{status} ({count})" for status, count in seen.failures.most_common(3)) or "none"
    growth = (f"{(after - before) / MIB:.0f}" for after, before in zip(seen.memory, idle.memory, strict=True))
    health = [f"{1e3 * value:.0f}" for value in (*percentiles(seen.health), max(seen.health, default=float("nan")))]
    slowest = f"{max(seen.seconds):.1f}" if seen.seconds else ""
    figures = (slowest, *growth, f"{seen.rate / idle.rate:.0%}", failures, *health)
    return "| " + " | ".join((name, rule, outcomes, *figures)) + " |"


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile; NaN without two values."""
    if len(values) < 2:
        return float("nan"), float("nan")
    return statistics.median(values), statistics.quantiles(values, n=100, method="inclusive")[98]


class Report:
    """Lines that are printed when they are known."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)


def run(command: str, work: Sequence[Attack], *, seconds: float, report: Report, folder: Path) -> None:
    """Run all attacks on servers that `command` starts."""
    report.add(HEADER)
    open_work = [attack for attack in work if attack.without_keys]
    keyed_work = [attack for attack in work if not attack.without_keys]
    if open_work:
        with running(command, folder, keys=False) as server:
            _run_alone(server, open_work, seconds, report)
    if keyed_work:
        with running(command, folder, keys=True) as server:
            idle = _run_alone(server, keyed_work, seconds, report)
            name = f"all of them, {ATTACKERS} attackers"
            report.add(_observed_row(name, "", server, keyed_work, idle, attackers=ATTACKERS, seconds=4 * seconds))
            _run_endings(server, keyed_work, report)


def _run_alone(server: Server, work: Sequence[Attack], seconds: float, report: Report) -> Observations:
    for number in range(IMAGES):  # otherwise, only later requests would find embeddings in the cache
        send(server.port, http_request(chat_body(image_part(number)), key=server.key(USER_KEY)))
    idle = observe(server, [], attackers=0, seconds=seconds)
    report.add(row("none", "", idle, idle))
    for attack in work:
        if attack.setup is not None:
            send(server.port, attack.setup(server.key(USER_KEY)))
        report.add(_observed_row(attack.name, str(attack.rule), server, [attack], idle, attackers=1, seconds=seconds))
    return idle


def _observed_row(
    name: str, rule: str, server: Server, work: Sequence[Attack], idle: Observations, *, attackers: int, seconds: float
) -> str:
    # The speed of a shared machine changes within minutes: the user's rate without an attack is measured again.
    before = observe(server, [], attackers=0, seconds=seconds)
    seen = observe(server, work, attackers=attackers, seconds=seconds)
    return row(name, rule, seen, replace(before, memory=idle.memory))


def _run_endings(server: Server, work: Sequence[Attack], report: Report) -> None:
    """Measure how long work goes on after a client disconnects, and after SIGTERM."""
    slow = [attack for attack in work if attack.rule in (24, 25)]
    report.add("")
    for attack in slow:
        report.add(f"* From a client's disconnect until the work ends, {attack.name}: {cancellation(server, attack)}")
    statuses = ", ".join(f"{status} ({count})" for status, count in outcomes_after_kills(server).most_common())
    report.add(f"* The user's requests, each after SIGKILL of all processes that decode media: {statuses}")
    beyond = shutdown_seconds(server, slow) - GRACE_SECONDS
    report.add(
        f"* From SIGTERM to the end of the process, beyond a grace period of {GRACE_SECONDS:g} s: {beyond:.1f} s"
    )


@contextlib.contextmanager
def running(command: str, folder: Path, *, keys: bool) -> Iterator[Server]:
    server = Server(command, folder, keys=keys)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


def default_command() -> str:
    program = Path(sysconfig.get_path("scripts")) / "dashinfer-vlm"
    return f"{shlex.quote(str(program))} serve --model demo --port {{port}} {{key_options}} --grace {GRACE_SECONDS:g}"


def main(arguments: Sequence[str] | None = None) -> list[str]:
    """Run the attacks and return the lines of the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--engine-command", default=default_command(), help="server; {port}, {key_options} are replaced"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="time for each attack")
    parser.add_argument("--only", default="", help="only attacks whose name contains this text")
    parser.add_argument("--out", type=Path, help="file for the report")
    options = parser.parse_args(arguments)
    work = [attack for attack in attacks() if options.only in attack.name]
    if not work:
        parser.error(f"--only: no attack contains {options.only!r}. The names are: {[a.name for a in attacks()]}")
    report = Report()
    with end_with_us(), tempfile.TemporaryDirectory() as folder:
        run(options.engine_command, work, seconds=options.seconds, report=report, folder=Path(folder))
    if options.out:
        options.out.write_text("\n".join(report.lines) + "\n")
    return report.lines


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
