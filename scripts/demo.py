"""Start the server with the bundled model, ask about the pictures of examples/pictures, and compare with the truth."""

from __future__ import annotations

import argparse
import base64
import contextlib
import re
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
READY_WITHIN = 300.0
CURL = """curl {url}/chat/completions -d '{{"messages": [{{"role": "user", "content": [
  {{"type": "image_url", "image_url": {{"url": "data:image/png;base64,'"$(base64 -w0 {picture})"'"}}}},
  {{"type": "text", "text": "{question}"}}]}}]}}'"""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about files of examples/pictures, and its true answer."""

    about: str
    files: Sequence[str]
    text: str
    truth: str
    stream: bool = False


QUESTIONS = (
    Question(
        about="One picture",
        files=["pair.png"],
        text="Describe the picture.",
        truth="A yellow star to the left of a purple square.",
    ),
    Question(
        about="One picture, streamed",
        files=["three.png"],
        text="List the shapes from left to right.",
        truth="A green triangle, a blue circle and an orange cross, from left to right.",
        stream=True,
    ),
    Question(
        about="Two pictures",
        files=["before.png", "after.png"],
        text="Which picture has a red square?",
        truth="The second picture.",
    ),
    Question(
        about="A video",
        files=["moving.mp4"],
        text="Which way does the circle move?",
        truth="It moves to the right.",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the server running and print a curl line")
    keep = parser.parse_args().keep
    with serving(keep=keep) as url:
        client = openai.OpenAI(
            base_url=url, api_key="not needed", http_client=openai.DefaultHttpxClient(trust_env=False)
        )
        wrong = sum([not ask(client, question) for question in QUESTIONS])
        if keep:
            print("\nThe server goes on. Ask it:\n")
            print(CURL.format(url=url, picture=FOLDER / "circle.png", question="What is this?"))
    print(f"\n{len(QUESTIONS) - wrong} of {len(QUESTIONS)} answers are true.")
    return 1 if wrong else 0


@contextlib.contextmanager
def serving(*, keep: bool) -> Iterator[str]:
    """A server on a free loopback port; its URL. If anything fails, the end of its log is shown."""
    start = time.monotonic()
    with tempfile.NamedTemporaryFile("w+", prefix="dashinfer-vlm-", suffix=".log", delete=not keep) as log:
        command = [Path(sys.executable).with_name("dashinfer-vlm"), "serve", "--port", "0"]
        server = subprocess.Popen(command, stderr=log, start_new_session=True)
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


def ask(client: openai.OpenAI, question: Question) -> bool:
    """Ask, print what came back, and say whether it is true."""
    names = ", ".join(str(FOLDER / name) for name in question.files)
    print(f"\n{question.about}: {names}\n  Q: {question.text}\n  A: ", end="", flush=True)
    content = [*map(_part, question.files), {"type": "text", "text": question.text}]
    request: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": content}], "temperature": 0}
    start = time.monotonic()
    answer, usage, first = (_stream if question.stream else _plain)(client, request)
    seconds = time.monotonic() - start
    true = answer == question.truth
    print(f"   ({'true' if true else f'wrong: {question.truth}'})")
    print(f"  {_usage(usage)} in {seconds:.2f} s" + (_speed(usage, first - start, seconds) if first else ""))
    return true


def _plain(client: openai.OpenAI, request: dict[str, Any]) -> tuple[str, CompletionUsage, None]:
    reply = client.chat.completions.create(**request)
    answer = reply.choices[0].message.content
    print(answer, end="")
    return answer, reply.usage, None


def _stream(client: openai.OpenAI, request: dict[str, Any]) -> tuple[str, CompletionUsage, float]:
    """Also when the first piece came."""
    pieces, first = [], None
    for chunk in client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece:
            first = first or time.monotonic()
            pieces.append(piece)
            print(piece, end="", flush=True)
    return "".join(pieces), chunk.usage, first or time.monotonic()


def _part(name: str) -> dict[str, Any]:
    data = base64.b64encode((FOLDER / name).read_bytes()).decode()
    if name.endswith(".mp4"):
        return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}}
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def _usage(usage: CompletionUsage) -> str:
    details = usage.prompt_tokens_details
    seen = {"image": details.image_tokens, "video": details.video_tokens} if details else {}
    visual = ", ".join(f"{count} {kind}" for kind, count in seen.items() if count)
    return f"{usage.prompt_tokens} prompt tokens ({visual}) + {usage.completion_tokens} answer tokens"


def _speed(usage: CompletionUsage, first: float, seconds: float) -> str:
    rate = (usage.completion_tokens - 1) / max(seconds - first, 1e-6)
    return f"; first token after {first:.2f} s, then {rate:.0f} tokens/s"


def _wait(server: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + READY_WITHIN
    while time.monotonic() < end:
        if ready := READY.search(log.read_text()):
            return ready[1]
        if server.poll() is not None:
            raise SystemExit(f"The server ended with {server.returncode} before it was ready.")
        time.sleep(0.1)
    raise SystemExit(f"The server was not ready within {READY_WITHIN:.0f} s.")


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    server.wait(timeout=30)


def _tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text().splitlines()[-lines:])


if __name__ == "__main__":
    sys.exit(main())
