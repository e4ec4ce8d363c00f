"""Read animated images as videos. After `pip install .` here, `dashinfer-vlm plugins` lists the plugin."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import numpy as np
from PIL import Image, UnidentifiedImageError

from dashinfer_vlm_core import hookimpl
from dashinfer_vlm_core.errors import MediaUndecodable
from dashinfer_vlm_core.media import StopCheck, VideoInfo, VideoReader

dashinfer_vlm_api = 1
"""The plugin API version that this plugin uses."""


class Slideshow:
    """An open animated image."""

    def __init__(self, image: Image.Image) -> None:
        self._image = image
        seconds = (image.info.get("duration") or 100) / 1000
        self.info = VideoInfo(frames=image.n_frames, fps=1 / seconds, width=image.width, height=image.height)

    def frames(self, indices: list[int], check_stop: StopCheck) -> Iterator[np.ndarray]:
        for index in indices:
            check_stop()  # raises if the request was canceled
            self._image.seek(index)
            yield np.asarray(self._image.convert("RGB"))


class SlideshowReader(VideoReader):
    """Reads animated images that PyAV, which has a higher priority, cannot read."""

    name = "slideshow"
    priority = 5

    def available(self) -> bool:
        return True

    def open(self, data: bytes) -> Slideshow:
        try:
            image = Image.open(io.BytesIO(data), formats=["GIF", "WEBP", "PNG"])
        except UnidentifiedImageError:
            raise MediaUndecodable("The data is not an animated image.") from None
        return Slideshow(image)


@hookimpl
def register_video_readers(register: Callable[[SlideshowReader], None]) -> None:
    register(SlideshowReader())
