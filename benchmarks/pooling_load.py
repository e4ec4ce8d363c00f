"""The inputs of which engines compute embeddings, and a client of `/v1/embeddings` that sends all of them at once."""

from __future__ import annotations

import asyncio
import base64
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt

from dashinfer_vlm_core.models.patches import smart_resize

from .documents import HEIGHT, WIDTH, page
from .limits import layers_flop, load_spec, vision_flop
from .workloads import image_part, words

MAX_PIXELS = 1280 * 1792
"""More than a page whose sides are rounded to whole patches."""
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_read=3600.0)
"""The last request of a workload waits for all others."""
INSTRUCTION = "Represent the user's input."
Part = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Inputs of one kind.

    Attributes:
        count: their number in a round.
        quick: their number with `--quick`.
        make: makes one, a content part.
        size: width and height of an image in pixels; None for text.
    """

    count: int
    quick: int
    make: Callable[[random.Random], Part]
    size: tuple[int, int] | None = None

    def bodies(self, seed: str, count: int) -> list[dict[str, Any]]:
        """Return requests, equal for all engines and new for each seed."""
        source = random.Random(seed)
        return [_body(self.make(source)) for _ in range(count)]

    def flop(self, model: Path, tokens: int) -> float:
        """Return the floating-point operations of one embedding, whose prompt has `tokens` tokens."""
        layers = layers_flop(load_spec(model).text, tokens)
        return layers + (vision_flop(model, patches(model, *self.size)) if self.size else 0)


def patches(model: Path, width: int, height: int) -> int:
    """Return the number of patches of a resized image."""
    pixels = load_spec(model).pixels
    resized = smart_resize(height, width, factor=pixels.factor, min_pixels=pixels.min_pixels, max_pixels=MAX_PIXELS)
    return resized[0] * resized[1] // pixels.patch_size**2


def _page(source: random.Random) -> Part:
    url = f"data:image/png;base64,{base64.b64encode(page(source)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _body(part: Part) -> dict[str, Any]:
    messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": [part]}]
    return {"messages": messages, "add_generation_prompt": True, "encoding_format": "float"}


WORKLOADS = {
    "texts": Workload(
        count=8,
        quick=2,
        make=lambda source: {"type": "text", "text": words(source, 1000)},
    ),
    "images": Workload(
        count=32,
        quick=8,
        make=lambda source: image_part(source, 224),
        size=(224, 224),
    ),
    "pages": Workload(count=4, quick=1, make=_page, size=(WIDTH, HEIGHT)),
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Embedded:
    """The embeddings of a workload.

    Attributes:
        seconds: from the first request to the last response.
        vectors: float64 [items, dimensions].
        prompt_tokens: tokens of the longest prompt; 0 if the engine does not count them.
    """

    seconds: float
    vectors: npt.NDArray[np.float64]
    prompt_tokens: int

    @property
    def items_per_second(self) -> float:
        return len(self.vectors) / self.seconds

    def agreement(self, other: Embedded) -> float:
        """Return the least cosine similarity of the embeddings of the same input by two engines."""
        lengths = np.linalg.norm(self.vectors, axis=1) * np.linalg.norm(other.vectors, axis=1)
        return float(((self.vectors * other.vectors).sum(axis=1) / lengths).min())


async def embed(base: str, bodies: Sequence[dict[str, Any]]) -> Embedded:
    """Compute embeddings with the server at `base`, such as `http://127.0.0.1:8000/v1`.

    Raises:
        RuntimeError: a request failed; the message has the response.
    """
    async with aiohttp.ClientSession(timeout=TIMEOUT, connector=aiohttp.TCPConnector(limit=0)) as client:
        model = (await _receive(client.get(f"{base}/models")))["data"][0]["id"]
        url = f"{base}/embeddings"
        begin = time.perf_counter()
        answers = await asyncio.gather(*(_receive(client.post(url, json={**body, "model": model})) for body in bodies))
        seconds = time.perf_counter() - begin
    return Embedded(
        seconds=seconds,
        vectors=np.array([answer["data"][0]["embedding"] for answer in answers], np.float64),
        prompt_tokens=max(answer.get("usage", {}).get("prompt_tokens", 0) for answer in answers),
    )


async def _receive(request: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> dict[str, Any]:
    try:
        async with request as response:
            if not response.ok:
                raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:300]}")
            found: dict[str, Any] = await response.json()
            return found
    except aiohttp.ClientError as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None
