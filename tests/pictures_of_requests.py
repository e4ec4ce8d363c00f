"""Requests with a small image."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

IMAGE = Path(__file__).parents[1] / "examples" / "pictures" / "circle.png"


def picture_request(text: str) -> dict[str, Any]:
    """Return the body of a request with an image and a text."""
    url = f"data:image/png;base64,{base64.b64encode(IMAGE.read_bytes()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}]}
