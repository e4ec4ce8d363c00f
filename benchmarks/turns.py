"""The time to the first token of the second turn of a chat, relative to that of the first.

    python -m benchmarks.turns [--model qwen3.5-0.8b] [--rounds 5] [--history 0] [--response 32] [--pause 0]
        [any option of dashinfer-vlm serve]

The first turn has a new image of 448 x 448, and the second message 16 tokens. Between them is a pause, in which users
read and write. The response is prescribed, since random weights also choose tokens that have no text. The lower bound
is the ratio of the floating-point operations of the tokens that were not cached, and of the vision encoder.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import click
from openai.types import CompletionUsage

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.cli.command import EngineCommand

from .client import request_body
from .limits import image_patches, load_spec, prefill_flop, vision_flop
from .models import CACHE, checkpoint
from .workloads import image_part, question_part, words

MESSAGE_TOKENS = 16
OUTPUT_TOKENS = 4
"""Of the second turn."""

Messages = list[dict[str, Any]]


class Chat(NamedTuple):
    """The turns before the image, the tokens of a response, and the seconds between two turns."""

    history: int
    response: int
    pause: float


class Turn(NamedTuple):
    """The seconds to the first token, and the tokens of the prompt; `video_tokens` are those of videos."""

    seconds: float
    tokens: int
    cached: int
    video_tokens: int


async def ask(engine: Engine, messages: Messages, tokens: int = OUTPUT_TOKENS, **fields: Any) -> Turn:
    begin = time.perf_counter()
    first: float | None = None
    usage: CompletionUsage | None = None
    request = request_body(messages, tokens, users=1) | fields
    async with contextlib.aclosing(engine.astream(request)) as chunks:
        async for chunk in chunks:
            first = first or time.perf_counter()
            usage = usage or chunk.usage
    assert first
    assert usage
    details = usage.prompt_tokens_details
    assert details
    video_tokens: int = (details.model_extra or {}).get("video_tokens", 0)
    return Turn(first - begin, usage.prompt_tokens, details.cached_tokens or 0, video_tokens)


def message(source: random.Random) -> dict[str, Any]:
    return {"role": "user", "content": words(source, MESSAGE_TOKENS)}


def create_response(source: random.Random, tokens: int) -> dict[str, Any]:
    return {"role": "assistant", "content": words(source, tokens)}


async def run_chat(engine: Engine, source: random.Random, chat: Chat) -> tuple[Turn, Turn]:
    messages = [each for _ in range(chat.history) for each in (message(source), create_response(source, chat.response))]
    messages.append({"role": "user", "content": [image_part(source), question_part(source)]})
    answer = create_response(source, chat.response)
    first = await ask(engine, messages, 4 * chat.response, guided_choice=[answer["content"]], ignore_eos=False)
    await asyncio.sleep(chat.pause)
    return first, await ask(engine, [*messages, answer, message(source)])


def lower_bound(model: Path, first: Turn, second: Turn) -> float:
    text = load_spec(model).text
    computed = prefill_flop(text, second.tokens) - prefill_flop(text, second.cached) + prefill_flop(text, 0)
    return computed / (vision_flop(model, image_patches(model)) + prefill_flop(text, first.tokens))


async def measure(config: EngineConfig, rounds: int, chat: Chat) -> list[tuple[Turn, Turn]]:
    source = random.Random("turns")
    with Engine(config) as engine:
        await run_chat(engine, source, chat)  # warms up lazily loaded parts
        return [await run_chat(engine, source, chat) for _ in range(rounds)]


@click.command(cls=EngineCommand, help=__doc__)
@click.option("--rounds", default=5, show_default=True)
@click.option("--history", default=0, show_default=True, help="Turns before the image.")
@click.option("--response", default=32, show_default=True, help="Tokens of a response.")
@click.option("--pause", default=0.0, show_default=True, help="Seconds between the two turns.")
@click.option("--models", type=click.Path(path_type=Path), default=CACHE, help="Folder of created models.")
def main(*, rounds: int, history: int, response: int, pause: float, models: Path, config: EngineConfig) -> None:
    model = checkpoint(config.model, models)
    chat = Chat(history, response, pause)
    turns = asyncio.run(measure(config.model_copy(update={"model": str(model)}), rounds, chat))
    first, second = turns[-1]
    medians = [statistics.median(turn.seconds for turn in column) for column in zip(*turns, strict=True)]
    ratios = [later.seconds / earlier.seconds for earlier, later in turns]
    print(
        f"{model.name}: first turn {medians[0]:.3f} s ({first.tokens} tokens), second turn {medians[1]:.3f} s"
        f" ({second.tokens - second.cached} of {second.tokens} tokens computed), ratio {statistics.median(ratios):.3f}"
        f" ({min(ratios):.3f} to {max(ratios):.3f}), lower bound {lower_bound(model, first, second):.3f}"
    )


if __name__ == "__main__":
    main()
