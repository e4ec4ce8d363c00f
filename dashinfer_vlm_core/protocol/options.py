"""Options for all media of a request, with vLLM's names: `media_io_kwargs` and `mm_processor_kwargs`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated

from pydantic import Field, Strict

from .base import Array, ClosedModel, Count, NumberOrArray
from .media_part import MediaPart
from .messages import MAX_PARTS
from .sources import Rate, check_bounds
from .validation_errors import invalid

_Level = Annotated[int, Field(ge=0, le=255)]


class ImageIO(ClosedModel):
    """How images, and video frames sent as images, are decoded."""

    rgba_background_color: Annotated[tuple[_Level, _Level, _Level], Strict(False)] | None = None


class VideoIO(ClosedModel):
    """How video files are sampled."""

    fps: Rate | None = None
    num_frames: Count | None = None


class MediaIO(ClosedModel):
    image: ImageIO = ImageIO()
    video: VideoIO = VideoIO()


class Edges(ClosedModel):
    """Size bounds with transformers' names: numbers of pixels, despite the word edge."""

    shortest_edge: Count | None = None
    longest_edge: Count | None = None


class ProcessorOptions(ClosedModel):
    """How images and video frames are resized, and video files sampled.

    `fps` and `do_sample_frames` have the form that `process_vision_info` of qwen-vl-utils returns: `fps` can be a list
    with a value for each video of the request.
    """

    min_pixels: Count | None = None
    max_pixels: Count | None = None
    size: Edges = Edges()
    total_pixels: Count | None = None
    fps: NumberOrArray[Rate, Annotated[Array[Rate], Field(max_length=MAX_PARTS)]] | None = None
    num_frames: Count | None = None
    do_sample_frames: bool | None = None
    align: bool | None = None


class MediaOptions:
    """Options that a request sets for all of its media. The options of a content part take precedence.

    `total_pixels`, `align` and `mm_processor_kwargs.fps` apply to videos, `num_frames` and `media_io_kwargs` to video
    files only, not to images or lists of frames. The same rules for combinations apply as to the options of one part.
    """

    def __init__(self, reading: MediaIO, processing: ProcessorOptions) -> None:
        self._reading = reading
        self._processing = processing
        self._min_pixels = processing.min_pixels or processing.size.shortest_edge
        self._max_pixels = processing.max_pixels or processing.size.longest_edge
        self._num_frames = processing.num_frames or reading.video.num_frames

    def check(self) -> None:
        """Raise InvalidParameter if options contradict each other."""
        video = self._reading.video
        processing = self._processing
        size = processing.size
        single_rate = None if isinstance(processing.fps, tuple) else processing.fps
        for name, one, other, two in (
            ("mm_processor_kwargs.size.shortest_edge", size.shortest_edge, "min_pixels", processing.min_pixels),
            ("mm_processor_kwargs.size.longest_edge", size.longest_edge, "max_pixels", processing.max_pixels),
            ("media_io_kwargs.video.fps", video.fps, "fps", single_rate),
            ("media_io_kwargs.video.num_frames", video.num_frames, "num_frames", processing.num_frames),
        ):
            if one is not None and two is not None and one != two:
                raise invalid(name, f"is {one}, but `mm_processor_kwargs.{other}` is {two}. Pass one of them.")
        if (processing.fps or video.fps) and self._num_frames is not None:
            name = "mm_processor_kwargs.num_frames" if processing.num_frames else "media_io_kwargs.video.num_frames"
            raise invalid(name, "cannot be combined with `fps`. Pass one of them.")
        if processing.align and self._num_frames is not None:
            raise invalid("mm_processor_kwargs.align", "cannot be combined with `num_frames`. Set `fps` instead of it.")
        name = "min_pixels" if processing.min_pixels else "size"
        check_bounds(f"mm_processor_kwargs.{name}", self._min_pixels, self._max_pixels)

    def apply_to(self, parts: Iterable[MediaPart]) -> tuple[MediaPart, ...]:
        """Return the parts with these options, except for those that a part sets itself.

        Raises:
            InvalidParameter: `fps` is a list of another length than that of the videos, `do_sample_frames` does not
                match a video, or a minimum number of pixels is above the maximum.
        """
        given = tuple(parts)
        videos = [part for part in given if part.kind == "video"]
        rates = self._rates(len(videos))
        for part in videos:
            self._check_sampling(part)
        return tuple(self._apply(part, next(rates) if part.kind == "video" else None) for part in given)

    def _apply(self, part: MediaPart, rate: float | None) -> MediaPart:
        part = replace(
            part,
            min_pixels=part.min_pixels or self._min_pixels,
            max_pixels=part.max_pixels or self._max_pixels,
            background=self._reading.image.rgba_background_color,
        )
        check_bounds(part.options_path, part.min_pixels, part.max_pixels)
        if part.kind != "video":
            return part
        part = replace(part, total_pixels=part.total_pixels or self._processing.total_pixels)
        if part.align is None and part.num_frames is None:
            part = replace(part, align=self._processing.align)
        if part.fps is not None or part.num_frames is not None:
            return part
        if part.is_sampled or not part.has_source:
            num_frames = None if part.align else self._num_frames
            return replace(part, fps=rate or self._reading.video.fps, num_frames=num_frames)
        return replace(part, fps=rate)

    def _rates(self, videos: int) -> Iterator[float | None]:
        fps = self._processing.fps
        if not isinstance(fps, tuple):
            return itertools.repeat(fps, videos)
        if len(fps) != videos:
            raise invalid(
                "mm_processor_kwargs.fps",
                f"has {len(fps)} values, but the request has {videos} videos. Pass one value, or one for each video.",
            )
        return iter(fps)

    def _check_sampling(self, part: MediaPart) -> None:
        """Check `do_sample_frames`, which cannot change what happens: files are sampled, lists of frames are not."""
        wanted = self._processing.do_sample_frames
        if wanted is None or wanted == part.is_sampled or not part.has_source:
            return
        reason = "a video file is always sampled" if part.is_sampled else "all frames of a list are used"
        raise invalid(
            "mm_processor_kwargs.do_sample_frames",
            f"is {str(wanted).lower()}, but `{part.path}` is different: {reason}. Remove it.",
        )
