"""Options for all media of a request, in vLLM's words: `media_io_kwargs` and `mm_processor_kwargs`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

from pydantic import Field, Strict

from ..errors import InvalidParameter
from .base import Count, StrictModel
from .messages import MediaPart

_Level = Annotated[int, Field(ge=0, le=255)]
_Rate = Annotated[float, Field(gt=0, le=1000)]


class ImageIO(StrictModel):
    """How pictures, and frames given as pictures, are decoded."""

    rgba_background_color: Annotated[tuple[_Level, _Level, _Level], Strict(False)] | None = None


class VideoIO(StrictModel):
    """How video files are sampled."""

    fps: _Rate | None = None
    num_frames: Count | None = None


class MediaIO(StrictModel):
    image: ImageIO = ImageIO()
    video: VideoIO = VideoIO()


class Edges(StrictModel):
    """Bounds as transformers spells them: pixels, not edges, in spite of their names."""

    shortest_edge: Count | None = None
    longest_edge: Count | None = None


class ProcessorOptions(StrictModel):
    """How pictures and frames are resized, and video files sampled."""

    min_pixels: Count | None = None
    max_pixels: Count | None = None
    size: Edges = Edges()
    total_pixels: Count | None = None
    fps: _Rate | None = None
    num_frames: Count | None = None


class MediaOptions:
    """What a request asks for all of its media; a part's own options come first.

    `fps`, `num_frames` and `total_pixels` are for videos, and the first two for video files: pictures, and lists of
    frames, do not heed them. They bound each other as one part's own options do.
    """

    def __init__(self, reading: MediaIO, processing: ProcessorOptions) -> None:
        self._reading = reading
        self._processing = processing

    def faults(self) -> Iterator[InvalidParameter]:
        """What one option says against another."""
        video, processing, size = self._reading.video, self._processing, self._processing.size
        for name, one, two in (
            ("mm_processor_kwargs.size.shortest_edge", size.shortest_edge, processing.min_pixels),
            ("mm_processor_kwargs.size.longest_edge", size.longest_edge, processing.max_pixels),
            ("media_io_kwargs.video.fps", video.fps, processing.fps),
            ("media_io_kwargs.video.num_frames", video.num_frames, processing.num_frames),
        ):
            if one is not None and two is not None and one != two:
                message = f"`{name}` is {one}, and the same option of the processor is {two}: give one of them."
                yield InvalidParameter(message, param=name)
        if self._fps is not None and self._num_frames is not None:
            name = "mm_processor_kwargs.num_frames" if processing.num_frames else "media_io_kwargs.video.num_frames"
            yield InvalidParameter(f"`{name}` samples a video file, and not together with `fps`.", param=name)
        if self._least is not None and self._most is not None and self._least > self._most:
            yield InvalidParameter(
                f"`mm_processor_kwargs` asks for {self._least} pixels at least and {self._most} at most: mend one.",
                param="mm_processor_kwargs.min_pixels" if processing.min_pixels else "mm_processor_kwargs.size",
            )

    def applied(self, part: MediaPart) -> MediaPart:
        """The part, with these options where it has none of its own."""
        frames = isinstance(part.url, tuple) or part.content is not None
        part = replace(
            part,
            min_pixels=part.min_pixels or self._least,
            max_pixels=part.max_pixels or self._most,
            background=self._reading.image.rgba_background_color,
        )
        if part.kind != "video":
            return part
        part = replace(part, total_pixels=part.total_pixels or self._processing.total_pixels)
        if frames or part.fps is not None or part.num_frames is not None:
            return part
        return replace(part, fps=self._fps, num_frames=self._num_frames)

    @property
    def _least(self) -> int | None:
        return self._processing.min_pixels or self._processing.size.shortest_edge

    @property
    def _most(self) -> int | None:
        return self._processing.max_pixels or self._processing.size.longest_edge

    @property
    def _fps(self) -> float | None:
        return self._processing.fps or self._reading.video.fps

    @property
    def _num_frames(self) -> int | None:
        return self._processing.num_frames or self._reading.video.num_frames
