"""Encoded videos and lists of frames -> the sampled frames for the model."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from ..config import EngineConfig
from ..errors import (
    ConfigError,
    EngineError,
    InvalidParameter,
    MediaTooLarge,
    MediaUndecodable,
    MissingDependency,
    RequestError,
)
from ..protocol import MediaPart
from .frame_sampling import VideoSamplingPolicy
from .image import deadline_error, out_of_memory_error
from .types import OpenVideo, Pixels, ResizerFactory, StopCheck, Video, VideoInfo, VideoReader

MAX_FPS = 240.0

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameTimes:
    """When the frames of a list were sampled.

    Attributes:
        times: timestamp of each frame in seconds.
        sampled_fps: as in `Video`.
    """

    times: tuple[float, ...]
    sampled_fps: float


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


def decode_video(
    data: bytes,
    *,
    part: MediaPart,
    readers: Sequence[VideoReader],
    config: EngineConfig,
    policy: VideoSamplingPolicy,
    check_stop: StopCheck,
    resizer: ResizerFactory | None = None,
) -> Video:
    """Sample the frames of an encoded video with the first of `readers` that can read it.

    With `resizer`, frames are resized as they are decoded.

    Raises:
        MediaTooLarge: the header declares too many seconds or pixels, or decoding takes too long.
        MediaUndecodable: no reader can read it.
        InvalidParameter: `part.num_frames` is out of range for the file.
    """
    check = _with_deadline(check_stop, part, config)
    for reader in readers:
        check()
        try:
            return sample_video(
                reader.open(data), part=part, config=config, policy=policy, check_stop=check, resizer=resizer
            )
        except MediaUndecodable:
            continue
        except (RequestError, EngineError):
            raise
        except MemoryError as error:
            raise out_of_memory_error("video", part.path) from error
        except Exception:  # the library is broken or fails on this file; another reader may succeed
            logger.warning("Video reader %r failed; trying the next one.", reader.name, exc_info=True)
    raise undecodable_error(part.path)


def stack_frames(
    frames: Iterable[Pixels],
    count: int,
    part: MediaPart,
    policy: VideoSamplingPolicy,
    resizer: ResizerFactory | None = None,
    *,
    times: FrameTimes | None = None,
) -> Video:
    """Stack `count` decoded frames, which must have one size, into a video; with `resizer`, each is resized first.

    By default, they were sampled at `part.fps`, or else `policy.fps`, frames per second.

    Raises:
        InvalidParameter: a frame has another size; `param` names the frame.
    """
    fps = part.fps or policy.fps
    times = times or FrameTimes(times=policy.even_times(count, fps=fps), sampled_fps=fps)
    video = _stack_video(_of_one_size(frames, part), count, part, times.times, resizer)
    return replace(video, sampled_fps=times.sampled_fps)


def stack(frames: Iterable[Pixels], count: int) -> Pixels:
    """Copy up to `count` frames of one size into one array, without holding all frames a second time."""
    stacked, filled = np.empty((0, 0, 0, 3), np.uint8), 0
    for frame in frames:
        if not filled:
            stacked = np.empty((count, *frame.shape), np.uint8)
        stacked[filled] = frame
        filled += 1
    return stacked[:filled]


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
            f"The frames of the video have more than {limit} pixels in total. Send fewer or smaller ones.",
            param=part.path,
        )


def select_readers(readers: Mapping[str, VideoReader], config: EngineConfig) -> tuple[VideoReader, ...]:
    """Return the readers that `video_reader` selects: one by its name, or with `auto` all that never crash.

    Raises:
        ConfigError: no reader has this name, or it needs media workers and `media_workers` is 0.
        MissingDependency: its library is not installed.
    """
    name = config.video_reader
    if name == "auto":
        return tuple(reader for reader in readers.values() if not may_crash(reader))
    if name not in readers:
        raise ConfigError(
            f"video_reader: no video reader is named {name!r}; available: {', '.join(['auto', *sorted(readers)])}.",
            param="video_reader",
        )
    reader = readers[name]
    if not reader.available():
        extra = getattr(reader, "extra", "")
        fix = f"pip install 'dashinfer-vlm-adapters[{extra}]'" if extra else "install the library that it uses"
        raise MissingDependency(f"video_reader: {name!r} is not installed: {fix}.", param="video_reader")
    if config.media_workers == 0:
        check_without_workers([reader])
    return (reader,)


def check_without_workers(readers: Iterable[VideoReader]) -> None:
    """Check readers that are used in a process of the engine.

    Raises:
        ConfigError: a damaged file could end the process.
    """
    for reader in readers:
        if may_crash(reader):
            raise ConfigError(
                f"video_reader: {reader.name!r} needs media workers, because a damaged file can crash it and would end"
                " the engine. Use `pyav`, or remove `media_workers=0` (worker processes need Linux).",
                param="video_reader",
            )


def may_crash(reader: VideoReader) -> bool:
    """Whether a damaged file can crash the reader's process. `VideoReader` has no such attribute in older plugins."""
    return bool(getattr(reader, "may_crash", False))


def available_readers(readers: Sequence[VideoReader]) -> tuple[VideoReader, ...]:
    """Return the readers whose library is installed, best first.

    Raises:
        MissingDependency: no reader is installed.
    """
    installed = sorted((reader for reader in readers if reader.available()), key=lambda reader: -reader.priority)
    if not installed:
        raise MissingDependency(
            "No video reader is installed: pip install 'dashinfer-vlm-adapters[video]'. "
            "A list of frames works without one."
        )
    return tuple(installed)


def undecodable_error(path: str | None = None) -> MediaUndecodable:
    return MediaUndecodable(
        "The video is incomplete or its format is not supported here. Send H.264 in an MP4 file, or a list of frames.",
        param=path,
    )


def _of_one_size(frames: Iterable[Pixels], part: MediaPart) -> Iterator[Pixels]:
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


def _with_deadline(check_stop: StopCheck, part: MediaPart, config: EngineConfig) -> StopCheck:
    """Extend `check_stop` by a deadline: a file of a few kilobytes can take minutes to decode, even for few frames."""
    end = time.monotonic() + config.limits.video_decode_timeout

    def check() -> None:
        check_stop()
        if time.monotonic() > end:
            raise deadline_error("video", part.path, config.limits.video_decode_timeout)

    return check


def sample_video(
    video: OpenVideo,
    *,
    part: MediaPart,
    config: EngineConfig,
    policy: VideoSamplingPolicy,
    check_stop: StopCheck,
    resizer: ResizerFactory | None = None,
) -> Video:
    """Sample the frames of an open video. Raises the errors of `decode_video`, and those of the reader."""
    info = video.info
    _check_header(info, part, config)
    count = frame_count(info.frames, info.fps, part=part, policy=policy)
    check_total(count * info.height * info.width, part=part, config=config)
    indices = policy.indices(info.frames, count)
    times = tuple(index / info.fps for index in indices)
    decode = getattr(video, "iterate", None) or video.frames
    stacked = _stack_video(decode(indices, check_stop), count, part, times, resizer)
    return replace(stacked, sampled_fps=count / info.frames * info.fps)


def _check_header(info: VideoInfo, part: MediaPart, config: EngineConfig) -> None:
    """Reject a file with an invalid header or one that exceeds the limits, before decoding."""
    if min(info.frames, info.height, info.width) < 1 or not 0 < info.fps < math.inf:
        raise undecodable_error(part.path)
    if info.height * info.width > config.limits.max_decoded_pixels:
        raise MediaTooLarge(
            f"The video has more than {config.limits.max_decoded_pixels} pixels per frame. Send a smaller video.",
            param=part.path,
        )
    if info.frames / min(info.fps, MAX_FPS) > config.video_max_seconds:
        raise MediaTooLarge(
            f"The video is longer than {config.video_max_seconds:g} seconds. Send a shorter video.", param=part.path
        )


def _stack_video(
    frames: Iterable[Pixels],
    count: int,
    part: MediaPart,
    times: tuple[float, ...],
    resizer: ResizerFactory | None,
) -> Video:
    """Stack `count` frames of one size into a video.

    Raises:
        MediaUndecodable: there are fewer frames.
    """
    if resizer is None or not count:
        stacked = frames if isinstance(frames, np.ndarray) else stack(frames, count)
        if len(stacked) < count:
            raise undecodable_error(part.path)
        return _video(stacked, part, times)
    iterator = iter(frames)
    first = next(iterator, None)
    if first is None:
        raise undecodable_error(part.path)
    # Zeros without memory: only their shape is used.
    resize = resizer(_video(np.broadcast_to(np.zeros((), np.uint8), (count, *first.shape)), part, times))
    resized = stack((resize(frame) for frame in chain([first], iterator)), count)
    if len(resized) < count:
        raise undecodable_error(part.path)
    return replace(_video(resized, part, times), source_size=(first.shape[0], first.shape[1]))


def _video(frames: Pixels, part: MediaPart, times: tuple[float, ...]) -> Video:
    return Video(
        frames=frames,
        times=times,
        path=part.path,
        min_pixels=part.min_pixels,
        max_pixels=part.max_pixels,
        total_pixels=part.total_pixels,
        options_field=part.options_field,
    )
