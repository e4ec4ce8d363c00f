"""Encoded videos and lists of frames -> the sampled frames for the model."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from ..config import EngineConfig
from ..errors import ConfigError, InvalidParameter, MediaTooLarge, MediaUndecodable, MissingDependency
from ..installation import pip_step
from ..protocol import MediaPart
from .frame_sampling import VideoSamplingPolicy
from .types import FrameResizer, OpenVideo, Pixels, ResizerFactory, StopCheck, Video, VideoInfo, VideoReader

MAX_FPS = 240.0
"""Frames per second of a file above which they are not believed: FFmpeg reports 1000 for files without a rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameTimes:
    """When the frames of a list were sampled.

    Attributes:
        times: timestamp of each frame in seconds.
        sampled_fps: as in `Video`.
    """

    times: tuple[float, ...]
    sampled_fps: float

    @classmethod
    def of_list(cls, count: int, part: MediaPart, policy: VideoSamplingPolicy) -> FrameTimes:
        """Return the times of a list of frames, which were sampled at `part.fps`, or else `policy.fps`."""
        return cls(times=policy.even_times(count, fps=part.fps), sampled_fps=part.fps or policy.fps)


def frame_count(total: int, video_fps: float, *, part: MediaPart, policy: VideoSamplingPolicy) -> int:
    """Return how many frames of a file to sample: the policy's count, or `part.num_frames` rounded to a multiple
    of `frame_factor`.

    Args:
        total: frames in the file.
        video_fps: frames per second of the file.

    Raises:
        InvalidParameter: `num_frames` exceeds the frames of the file or the limit, or rounds to 0.
    """
    if part.num_frames is None:
        return policy.count(total, video_fps, fps=part.fps)
    factor = policy.frame_factor
    count = round(part.num_frames / factor) * factor
    max_count = min(total, policy.max_frames)
    if not factor <= count <= max_count:
        raise InvalidParameter(
            f"`num_frames` must be {factor} to {max_count} for this video, got {part.num_frames}.",
            param=f"{part.options_path}.num_frames",
        )
    return count


def stack_frames(
    frames: Iterable[Pixels], part: MediaPart, times: FrameTimes, resizer: ResizerFactory | None = None
) -> Video:
    """Stack decoded frames of one size into a video; with `resizer`, each is resized first.

    Raises:
        MediaUndecodable: there are fewer frames than times.
    """
    count = len(times.times)
    iterator = iter(frames)
    first = next(iterator, None)
    if first is None:
        raise undecodable_error(part.path)
    # Zeros without memory: only their shape is used.
    video = _video(np.broadcast_to(np.zeros((), np.uint8), (count, *first.shape)), part, times)
    resize = resizer(video) if resizer else None
    stacked = np.empty(0, np.uint8)
    filled = 0
    for frame in chain([first], iterator):
        resized = resize(frame) if resize else frame
        if not filled:
            stacked = np.empty((count, *resized.shape), np.uint8)
        stacked[filled] = resized
        filled += 1
    if filled < count:
        raise undecodable_error(part.path)
    return replace(video, frames=stacked, source_size=(first.shape[0], first.shape[1]) if resizer else None)


def of_one_size(frames: Iterable[Pixels], part: MediaPart) -> Iterator[Pixels]:
    """Yield the frames of a list.

    Raises:
        InvalidParameter: a frame has another size than the first; `param` names it.
    """
    shape: tuple[int, ...] | None = None
    for i, frame in enumerate(frames):
        shape = shape or frame.shape
        if frame.shape != shape:
            raise InvalidParameter(
                f"All frames of a video must have the size of the first, {shape[1]} x {shape[0]} pixels, got"
                f" {frame.shape[1]} x {frame.shape[0]}.",
                param=frame_path(part, i),
            )
        yield frame


def frame_path(part: MediaPart, index: int) -> str:
    """Return a frame's path in the request."""
    return f"{part.url_path}[{index}]"


def check_frames(count: int, *, part: MediaPart, policy: VideoSamplingPolicy) -> None:
    """Check a list of frames.

    Raises:
        InvalidParameter: the list is empty or too long, or `num_frames` is set, which applies only to video files.
    """
    if part.num_frames is not None:
        raise InvalidParameter(
            "`num_frames` applies only to video files. All frames of a list are used. Send only the frames you want.",
            param=f"{part.options_path}.num_frames",
        )
    if not 0 < count <= policy.max_frames:
        raise InvalidParameter(
            f"A list of frames must have 1 to {policy.max_frames} frames, got {count}.",
            param=part.url_path,
        )


def check_total(pixels: int, *, part: MediaPart, config: EngineConfig) -> None:
    """Check the memory that a decoded video needs.

    Args:
        pixels: pixels of all frames together, before resizing.

    Raises:
        MediaTooLarge: `pixels` exceeds the limit.
    """
    limit = config.limits.video_max_decoded_pixels
    if pixels > limit:
        raise MediaTooLarge(
            f"The frames of the video have {pixels} pixels in total, more than the limit of {limit}"
            " (`limits.video_max_decoded_pixels` of the engine). Send fewer or smaller ones.",
            param=part.path,
        )


def select_readers(readers: Mapping[str, VideoReader], config: EngineConfig) -> tuple[VideoReader, ...]:
    """Return the readers that `video_reader` selects, best first: one by its name, or with `auto` all that are
    installed and never crash.

    Raises:
        ConfigError: no reader has this name.
        MissingDependency: its library is not installed.
    """
    name = config.video_reader
    if name == "auto":
        usable = [reader for reader in readers.values() if reader.available() and not reader.may_crash]
        return tuple(sorted(usable, key=lambda reader: -reader.priority))
    if name not in readers:
        raise ConfigError(
            f"video_reader: no video reader is named {name!r}; available: {', '.join(['auto', *sorted(readers)])}.",
            param="video_reader",
        )
    reader = readers[name]
    if not reader.available():
        fix = pip_step(shlex.join(reader.requirements)) if reader.requirements else "Install its library"
        raise MissingDependency(f"video_reader: {name!r} is not installed. {fix}.", param="video_reader")
    return (reader,)


def undecodable_error(path: str | None = None) -> MediaUndecodable:
    return MediaUndecodable(
        "The video is incomplete or its format is not supported here. Send H.264 in an MP4 file, or a list of frames.",
        param=path,
    )


def sample_video(
    video: OpenVideo,
    *,
    part: MediaPart,
    config: EngineConfig,
    policy: VideoSamplingPolicy,
    check_stop: StopCheck,
    resizer: ResizerFactory | None = None,
) -> Video:
    """Sample the frames of an open video. With `resizer`, they are resized as they are decoded, so that the memory does
    not depend on their size in the file.

    Raises:
        MediaTooLarge: the header declares too many seconds or pixels, or the resized frames have too many.
        MediaUndecodable: the header is invalid, or the reader cannot decode a frame.
        InvalidParameter: `part.num_frames` is out of range for the file, or `part.align` requires too many frames.
    """
    info = video.info
    _check_header(info, part, config)
    indices, sampled_fps = _sampled_frames(info, part, policy)
    if resizer is None:
        check_total(len(indices) * info.height * info.width, part=part, config=config)
    else:
        resizer = _checked(resizer, part, config)
    times = FrameTimes(times=tuple(index / info.fps for index in indices), sampled_fps=sampled_fps)
    return stack_frames(video.frames(indices, check_stop), part, times, resizer)


def _checked(resizer: ResizerFactory, part: MediaPart, config: EngineConfig) -> ResizerFactory:
    """Return a resizer that checks the memory of all resized frames, before there is a second one."""

    def create(video: Video) -> FrameResizer:
        resize = resizer(video)

        def resize_checked(frame: Pixels) -> Pixels:
            resized = resize(frame)
            check_total(len(video.frames) * resized.shape[0] * resized.shape[1], part=part, config=config)
            return resized

        return resize_checked

    return create


def _sampled_frames(info: VideoInfo, part: MediaPart, policy: VideoSamplingPolicy) -> tuple[list[int], float]:
    """Return the indices of the frames to sample, and the frames per second of these."""
    if not part.align:
        count = frame_count(info.frames, info.fps, part=part, policy=policy)
        return policy.indices(info.frames, count), count / info.frames * info.fps
    fps = min(part.fps or policy.fps, info.fps)
    indices = policy.aligned_indices(info.frames, info.fps / fps)
    if len(indices) > policy.max_frames:
        raise InvalidParameter(
            f"With `align`, this video has {len(indices)} frames at {fps:g} frames per second, more than the limit of"
            f" {policy.max_frames}. Set a lower `fps`, or send a shorter video.",
            param=f"{part.options_path}.align",
        )
    return indices, fps


def _check_header(info: VideoInfo, part: MediaPart, config: EngineConfig) -> None:
    if min(info.frames, info.height, info.width) < 1 or not 0 < info.fps < math.inf:
        raise undecodable_error(part.path)
    limit = config.limits.max_decoded_pixels
    if info.height * info.width > limit:
        raise MediaTooLarge(
            f"The frames of the video have {info.width} x {info.height} pixels, more than the limit of {limit}"
            " (`limits.max_decoded_pixels` of the engine). Send a smaller video.",
            param=part.path,
        )
    if info.frames / min(info.fps, MAX_FPS) > config.video_max_seconds:
        raise MediaTooLarge(
            f"The video is longer than {config.video_max_seconds:g} seconds. Send a shorter video.", param=part.path
        )


def _video(frames: Pixels, part: MediaPart, times: FrameTimes) -> Video:
    return Video(
        frames=frames,
        times=times.times,
        sampled_fps=times.sampled_fps,
        path=part.path,
        min_pixels=part.min_pixels,
        max_pixels=part.max_pixels,
        total_pixels=part.total_pixels,
        align=bool(part.align),
        options_field=part.options_field,
    )
