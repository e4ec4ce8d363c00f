"""Conversations for every interface: as OpenAI's JSON for the engine, and with PIL images for transformers."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

Message = dict[str, Any]


def as_openai(messages: Sequence[Message]) -> list[Message]:
    """Convert messages whose parts contain images and lists of frames to OpenAI's JSON."""
    return [message | {"content": _openai_content(message["content"])} for message in messages]


def data_url(image: Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def _openai_content(content: str | Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [_openai_part(part) for part in content]


def _openai_part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "image":
        return {"type": "image_url", "image_url": {"url": data_url(part["image"])}}
    if part["type"] == "video":
        return {"type": "video_url", "video_url": {"url": [data_url(frame) for frame in part["video"]]}}
    return part


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
