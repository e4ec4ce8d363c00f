"""Small images and videos, encoded on demand."""

from __future__ import annotations

import base64
import io
import re
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image


def noise(height: int, width: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Return random pixels, uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encode(image: Image.Image | npt.NDArray[np.uint8], format: str = "PNG", **options: Any) -> bytes:  # noqa: A002  Pillow's name
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, format, **options)
    return buffer.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_url(height: int = 20, width: int = 30, seed: int = 0) -> str:
    return data_url(encode(noise(height, width, seed)))


def encode_video(
    frames: int = 12, *, height: int = 48, width: int = 64, fps: int = 10, container: str = "mp4", codec: str = ""
) -> bytes:
    """Encode a video in which every frame has its own color and a gradient."""
    import av

    codec = codec or {"webm": "libvpx-vp9", "avi": "mpeg4"}.get(container, "libx264")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for index in range(frames):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(video_frame(index, height, width), format="rgb24")))
        file.mux(stream.encode())
    return buffer.getvalue()


def video_frame(index: int, height: int, width: int) -> npt.NDArray[np.uint8]:
    """Return the pixels of frame `index` of `encode_video` before encoding."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 3 + index * 5, y * 4 + index * 3, np.full_like(x, index * 8)], axis=-1).astype(np.uint8)


def label(value: object) -> str:
    """Return a test parameter's id that is equal in every process: no memory addresses, at most 80 characters."""
    return re.sub(r" at 0x[0-9A-Fa-f]+", "", " ".join(str(value).split()))[:80]
