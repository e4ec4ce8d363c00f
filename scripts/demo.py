"""Start the server with the bundled model, send the images of examples/pictures, and check the responses."""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai

if TYPE_CHECKING:
    from openai.types import CompletionUsage

FOLDER = Path("examples/pictures")
READY = re.compile(r"^Serving \S+ \(decoder \S+\) at (\S+)$", re.MULTILINE)
READY_TIMEOUT = 300.0
STOP_TIMEOUT = 30.0
PROGRESS_SECONDS = 4.0
CURL = """curl {url}/chat/completions -H 'Content-Type: application/json' \\
  -d '{{"messages": [{{"role": "user", "content": [
  {{"type": "image_url", "image_url": {{"url": "data:image/png;base64,'"$(base64 -w0 {image})"'"}}}},
  {{"type": "text", "text": "{prompt}"}}]}}]}}'"""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A prompt about files of examples/pictures, and the expected response."""

    title: str
    files: Sequence[str]
    prompt: str
    expected: str
    stream: bool = False


EXAMPLES = (
    Example(
        title="One image",
        files=["pair.png"],
        prompt="Describe the picture.",
        expected="A yellow star to the left of a purple square.",
    ),
    Example(
        title="One image, streamed",
        files=["three.png"],
        prompt="List the shapes from left to right.",
        expected="A green triangle, a blue circle and an orange cross, from left to right.",
        stream=True,
    ),
    Example(
        title="Two images",
        files=["before.png", "after.png"],
        prompt="Which picture has a red square?",
        expected="The second picture.",
    ),
    Example(
        title="A video",
        files=["moving.mp4"],
        prompt="Which way does the circle move?",
        expected="It moves to the right.",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the server running and print a curl command")
    keep = parser.parse_args().keep
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stop the server, too
    with serving(keep=keep) as url:
        client = openai.OpenAI(
            base_url=url, api_key="not needed", http_client=openai.DefaultHttpxClient(trust_env=False)
        )
        correct = sum([run(client, example) for example in EXAMPLES])
        if keep:
            print("\nThe server is still running. Send it a request:\n")
            print(CURL.format(url=url, image=FOLDER / "circle.png", prompt="What is this?"))
    print(f"\n{correct} of {len(EXAMPLES)} responses are correct.")
    print("Next: `scripts/demo --keep`, or `source .venv/bin/activate` and `dashinfer-vlm serve --port 8000`.")
    return 0 if correct == len(EXAMPLES) else 1


@contextlib.contextmanager
def serving(*, keep: bool) -> Iterator[str]:
    """Start a server on a free loopback port, and yield its URL. If anything fails, print the end of its log."""
    print("Starting the server.", flush=True)
    start = time.monotonic()
    with tempfile.NamedTemporaryFile("w+", prefix="dashinfer-vlm-", suffix=".log", delete=not keep) as log:
        command = [Path(sys.executable).with_name("dashinfer-vlm"), "serve", "--port", "0"]
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            url = _wait(server, Path(log.name))
            print(f"Ready at {url} after {time.monotonic() - start:.1f} s.")
            yield url
        except BaseException:
            _stop(server)
            print("\nThe end of the server's log:\n" + _tail(Path(log.name)), file=sys.stderr)
            raise
        if keep:
            print(f"\nStop it with: kill {server.pid}   Its log: {log.name}")
        else:
            _stop(server)


def run(client: openai.OpenAI, example: Example) -> bool:
    """Send the request, print the response, and return whether it is correct."""
    names = ", ".join(str(FOLDER / name) for name in example.files)
    print(f"\n{example.title}: {names}\n  Prompt: {example.prompt}\n  Response: ", end="", flush=True)
    content = [*map(_part, example.files), {"type": "text", "text": example.prompt}]
    request: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": content}], "temperature": 0}
    start = time.monotonic()
    response, usage, first_token_at = (_stream if example.stream else _plain)(client, request)
    seconds = time.monotonic() - start
    correct = response == example.expected
    print(f"   ({'correct' if correct else f'wrong, expected: {example.expected}'})")
    speed = _speed(usage, first_token_at - start, seconds) if first_token_at else ""
    print(f"  {_usage(usage)} in {seconds:.2f} s{speed}")
    return correct


def _plain(client: openai.OpenAI, request: dict[str, Any]) -> tuple[str, CompletionUsage, None]:
    completion = client.chat.completions.create(**request)
    response = completion.choices[0].message.content
    print(response, end="")
    return response, completion.usage, None


def _stream(client: openai.OpenAI, request: dict[str, Any]) -> tuple[str, CompletionUsage, float]:
    """Return also the time of the first token."""
    texts, first_token_at = [], None
    for chunk in client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text:
            first_token_at = first_token_at or time.monotonic()
            texts.append(text)
            print(text, end="", flush=True)
    return "".join(texts), chunk.usage, first_token_at or time.monotonic()


def _part(name: str) -> dict[str, Any]:
    data = base64.b64encode((FOLDER / name).read_bytes()).decode()
    if name.endswith(".mp4"):
        return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}}
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def _usage(usage: CompletionUsage) -> str:
    details = usage.prompt_tokens_details
    counts = {"image": details.image_tokens, "video": details.video_tokens} if details else {}
    visual = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    return f"{usage.prompt_tokens} prompt tokens ({visual}) + {usage.completion_tokens} completion tokens"


def _speed(usage: CompletionUsage, first: float, seconds: float) -> str:
    rate = (usage.completion_tokens - 1) / max(seconds - first, 1e-6)
    return f"; first token after {first:.2f} s, then {rate:.0f} tokens/s"


def _wait(server: subprocess.Popen[bytes], log: Path) -> str:
    begin = shown = time.monotonic()
    while (now := time.monotonic()) < begin + READY_TIMEOUT:
        if ready := READY.search(log.read_text()):
            return ready[1]
        if server.poll() is not None:
            raise SystemExit(f"The server exited with code {server.returncode} before it was ready.")
        if now - shown > PROGRESS_SECONDS:
            print(f"  {now - begin:.0f} s", flush=True)
            shown = now
        time.sleep(0.1)
    raise SystemExit(f"The server was not ready within {READY_TIMEOUT:.0f} s.")


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(timeout=STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text().splitlines()[-lines:])


if __name__ == "__main__":
    sys.exit(main())
