"""Read animated pictures as videos: `pip install .` here, and `dashinfer-vlm plugins` lists it."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
from PIL import Image, UnidentifiedImageError

from dashinfer_vlm_core import hookimpl
from dashinfer_vlm_core.errors import MediaUndecodable
from dashinfer_vlm_core.media import StopCheck, VideoInfo

dashinfer_vlm_api = 2
"""The version of the plugin API that this plugin was written for."""


class Slideshow:
    """One animated picture, opened."""

    def __init__(self, image: Image.Image) -> None:
        self._image = image
        seconds = (image.info.get("duration") or 100) / 1000
        self.info = VideoInfo(frames=image.n_frames, fps=1 / seconds, width=image.width, height=image.height)

    def frames(self, indices: list[int], check_stop: StopCheck) -> np.ndarray:
        return np.stack([self._frame(index, check_stop) for index in indices])

    def _frame(self, index: int, check_stop: StopCheck) -> np.ndarray:
        check_stop()  # raises when the request was cancelled meanwhile
        self._image.seek(index)
        return np.asarray(self._image.convert("RGB"))


class SlideshowReader:
    """Comes after PyAV: it is asked about what that cannot read."""

    name = "slideshow"
    priority = 5

    def available(self) -> bool:
        return True

    def open(self, data: bytes) -> Slideshow:
        try:
            image = Image.open(io.BytesIO(data), formats=["GIF", "WEBP", "PNG"])
        except UnidentifiedImageError:
            raise MediaUndecodable("This is no animated picture.") from None
        return Slideshow(image)


@hookimpl
def register_video_readers(register: Callable[[SlideshowReader], None]) -> None:
    register(SlideshowReader())
