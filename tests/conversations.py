"""Conversations for every interface: as OpenAI's JSON for the engine, and with PIL images for transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from training.own_engine import as_openai, data_url

__all__ = ["CONVERSATIONS", "Message", "as_openai", "assistant", "blurred_image", "data_url", "user"]

Message = dict[str, Any]


def blurred_image(seed: int, width: int = 112, height: int = 112) -> Image.Image:
    """Return blurred noise, rich in detail and different for each seed."""
    noise = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BILINEAR)


def user(*parts: str | Image.Image | Sequence[Image.Image]) -> Message:
    """Return a message of text, images and videos (lists of frames) in the format of transformers."""
    return {"role": "user", "content": [_part(part) for part in parts]}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _part(part: str | Image.Image | Sequence[Image.Image]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Image.Image):
        return {"type": "image", "image": part}
    return {"type": "video", "video": list(part)}


CONVERSATIONS: dict[str, list[Message]] = {
    "text": [user("Hello there.")],
    "one picture": [user(blurred_image(1), "What is this?")],
    "text before the picture": [user("What is this?", blurred_image(2, 140, 84))],
    "three pictures between text": [
        user(
            "First ",
            blurred_image(3),
            " then ",
            blurred_image(4, 168, 112),
            " and ",
            blurred_image(5, 84, 140),
            ": compare.",
        )
    ],
    "video": [user([blurred_image(seed) for seed in range(6, 12)], "What happens?")],
    "video of an odd number of frames": [user([blurred_image(seed, 84, 112) for seed in range(12, 15)], "And now?")],
    "picture and video": [user(blurred_image(15), [blurred_image(16), blurred_image(17)], "Is it the same?")],
    "two turns": [
        user(blurred_image(18), "What is this?"),
        assistant("A star."),
        user("And this? ", blurred_image(19, 100, 90)),
    ],
}
