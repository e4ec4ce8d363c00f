"""LiteLLM's overhead per request and chunk: the same responses from the engine and through LiteLLM.

The engine is complete except for the language model, which plays a script without delay, so that decoding time does not
hide the difference. Requests alternate between both sequentially, and medians are compared.

    python benchmarks/litellm_overhead.py [--requests 200] [--tokens 100]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise importing it fetches prices from the network

import litellm
from litellm.utils import custom_llm_setup

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.engine.shared import SharedEngines
from dashinfer_vlm_core.testing import Script, scripted_registry
from dashinfer_vlm_litellm import DashInferVLM

MESSAGES = [{"role": "user", "content": "Hello"}]
MODEL = "benchmark/demo"
OPTIONS = {"decoder": "scripted"}

Ask = Callable[[], Awaitable[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=100)
    arguments = parser.parse_args()
    engines = SharedEngines(scripted_registry(Script("a" + " a" * (arguments.tokens - 2))))
    engine = engines.get(EngineConfig(**OPTIONS))
    litellm.custom_provider_map = [{"provider": "benchmark", "custom_handler": DashInferVLM(engines, name="benchmark")}]
    custom_llm_setup()
    asyncio.run(compare(engine, arguments.requests))
    engines.close()


async def compare(engine: Engine, requests: int) -> None:
    whole = await timed([lambda: engine_whole(engine), litellm_whole], requests)
    streamed = await timed([lambda: engine_stream(engine), litellm_stream], requests)
    print(f"{'':24}{'engine':>12}{'LiteLLM':>12}{'difference':>12}")
    row("whole response, ms", [seconds * 1e3 for seconds, _ in whole])
    row("stream, ms", [seconds * 1e3 for seconds, _ in streamed])
    row(f"per chunk ({streamed[1][1]}), us", [seconds / chunks * 1e6 for seconds, chunks in streamed])


async def timed(ways: list[Ask], requests: int) -> list[tuple[float, int]]:
    """Return the median seconds of a request and the chunks of its response for each variant."""
    seconds: list[list[float]] = [[] for _ in ways]
    chunks = [await way() for way in ways for _ in range(5)][4::5]  # the first requests warm up lazily loaded parts
    for _ in range(requests):
        for way, taken in zip(ways, seconds, strict=True):
            start = time.perf_counter()
            await way()
            taken.append(time.perf_counter() - start)
    return [(statistics.median(taken), count) for taken, count in zip(seconds, chunks, strict=True)]


async def engine_whole(engine: Engine) -> int:
    await engine.achat({"messages": MESSAGES})
    return 1


async def engine_stream(engine: Engine) -> int:
    request: dict[str, Any] = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
    return len([chunk async for chunk in engine.astream(request)])


async def litellm_whole() -> int:
    await litellm.acompletion(MODEL, messages=MESSAGES, engine_options=OPTIONS)
    return 1


async def litellm_stream() -> int:
    options = {"engine_options": OPTIONS, "stream": True, "stream_options": {"include_usage": True}}
    return len([chunk async for chunk in await litellm.acompletion(MODEL, messages=MESSAGES, **options)])


def row(name: str, values: list[float]) -> None:
    print(f"{name:24}{values[0]:>12.2f}{values[1]:>12.2f}{values[1] - values[0]:>12.2f}")


if __name__ == "__main__":
    main()
