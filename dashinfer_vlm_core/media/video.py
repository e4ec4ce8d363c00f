"""Encoded videos and lists of frames -> the frames that the model will see."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ..config import EngineConfig
from ..errors import (
    EngineError,
    InvalidParameter,
    MediaTooLarge,
    MediaUndecodable,
    MissingDependency,
    RequestError,
    UnsupportedParameter,
)
from ..protocol import MediaPart
from .sampling import VideoSamplingPolicy
from .types import OpenVideo, Pixels, StopCheck, Video, VideoInfo, VideoReader

MAX_FPS = 240.0

_FRAMES = ".video_url.url"  # where the frames of a part stand in JSON

logger: logging.Logger = logging.getLogger(__name__)


def frame_count(total: int, fps: float, *, part: MediaPart, policy: VideoSamplingPolicy) -> int:
    """How many frames of a file to sample: as the policy says, or `part.num_frames` rounded to what it allows.

    Args:
        total: frames in the file.
        fps: frames per second of the file.

    Raises:
        InvalidParameter: `num_frames` is more than the file or the limit has, or rounds to none.
    """
    if part.num_frames is None:
        return policy.count(total, fps, rate=part.fps)
    factor = policy.frame_factor
    count = round(part.num_frames / factor) * factor
    most = min(total, policy.max_frames)
    if not factor <= count <= most:
        raise InvalidParameter(
            f"num_frames must be {factor} to {most} for this video.", param=f"{part.path}.video_url.num_frames"
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
) -> Video:
    """The sampled frames of an encoded video, by the first of `readers` that can read it.

    Raises:
        MediaTooLarge: by its header the video is too long, or has too many pixels; or decoding it takes too long.
        MediaUndecodable: no reader can read it.
        InvalidParameter: `part.num_frames` does not fit the file.
    """
    check = _in_time(check_stop, part, config)
    for reader in readers:
        check()
        try:
            return _sample(reader.open(data), part, config, policy, check)
        except MediaUndecodable:
            continue
        except (RequestError, EngineError):
            raise
        except Exception:  # a library that is broken, or breaks on this file: another may read it
            logger.warning("the video reader %r failed; the next one is tried", reader.name, exc_info=True)
    raise undecodable(part.path)


def stack_frames(frames: Iterable[Pixels], count: int, part: MediaPart, policy: VideoSamplingPolicy) -> Video:
    """A clip of `count` decoded pictures, which must be of one size.

    Raises:
        InvalidParameter: one is not; the error names it.
    """
    return _video(stack(_of_one_size(frames, part), count), part, policy.even_times(count))


def stack(frames: Iterable[Pixels], count: int) -> Pixels:
    """Frames of one size, up to `count`, in one array; each is copied into its place and let go, so that none is held
    twice."""
    stacked, filled = np.empty((0, 0, 0, 3), np.uint8), 0
    for frame in frames:
        if not filled:
            stacked = np.empty((count, *frame.shape), np.uint8)
        stacked[filled] = frame
        filled += 1
    return stacked[:filled]


def frame_name(part: MediaPart, index: int) -> str:
    """Where a frame stands in the request."""
    return f"{part.path}{_FRAMES if part.content is None else ''}[{index}]"


def check_frames(count: int, *, part: MediaPart, policy: VideoSamplingPolicy) -> None:
    """Refuse a list of frames that is to be sampled, is empty, or is too long.

    Raises:
        UnsupportedParameter, InvalidParameter: it is; the error names the option, or the list.
    """
    for name, value in (("num_frames", part.num_frames), ("fps", part.fps)):
        if value is not None:
            raise UnsupportedParameter(
                f"{name} samples a video file; a list of frames is taken whole, so send the frames you want.",
                param=f"{part.path}.video_url.{name}" if part.content is None else f"{part.path}.{name}",
            )
    if not 0 < count <= policy.max_frames:
        raise InvalidParameter(
            f"A video is a list of 1 to {policy.max_frames} frames, and this one has {count}.",
            param=part.path + (_FRAMES if part.content is None else ""),
        )


def check_total(pixels: int, *, part: MediaPart, config: EngineConfig) -> None:
    """Refuse a clip that would take more memory than is allowed.

    Args:
        pixels: of all its frames together, before resizing.

    Raises:
        MediaTooLarge: it would.
    """
    most = config.video_max_decoded_pixels
    if pixels > most:
        raise MediaTooLarge(
            f"The frames of the video have more than {most} pixels; send fewer or smaller ones.", param=part.path
        )


def available(readers: Sequence[VideoReader]) -> tuple[VideoReader, ...]:
    """The readers whose library is installed, best first.

    Raises:
        MissingDependency: there is none.
    """
    found = sorted((reader for reader in readers if reader.available()), key=lambda reader: -reader.priority)
    if not found:
        raise MissingDependency(
            "No reader of video files is installed here: pip install 'dashinfer-vlm-adapters[video]'. "
            "A list of frames works without one."
        )
    return tuple(found)


def undecodable(part: str | None = None) -> MediaUndecodable:
    return MediaUndecodable(
        "This is no whole video that can be read here; send H.264 in an MP4 file, or a list of frames.", param=part
    )


def _of_one_size(frames: Iterable[Pixels], part: MediaPart) -> Iterator[Pixels]:
    shape: tuple[int, ...] | None = None
    for i, frame in enumerate(frames):
        shape = shape or frame.shape
        if frame.shape != shape:
            raise InvalidParameter(
                f"All frames of a video have one size, and the first has {shape[1]} x {shape[0]} pixels.",
                param=frame_name(part, i),
            )
        yield frame


def _in_time(check_stop: StopCheck, part: MediaPart, config: EngineConfig) -> StopCheck:
    """Also ends what takes too long: a few kilobytes can hold minutes of work, and few frames be sampled of them."""
    end = time.monotonic() + config.video_decode_timeout

    def check() -> None:
        check_stop()
        if time.monotonic() > end:
            raise MediaTooLarge(
                f"Decoding the video takes more than {config.video_decode_timeout:g} seconds; send a shorter or smaller"
                " one.",
                param=part.path,
            )

    return check


def _sample(
    video: OpenVideo, part: MediaPart, config: EngineConfig, policy: VideoSamplingPolicy, check_stop: StopCheck
) -> Video:
    info = video.info
    _check_header(info, part, config)
    count = frame_count(info.frames, info.fps, part=part, policy=policy)
    check_total(count * info.height * info.width, part=part, config=config)
    indices = policy.indices(info.frames, count)
    times = tuple(index / info.fps for index in indices)
    return _video(video.frames(indices, check_stop), part, times)


def _check_header(info: VideoInfo, part: MediaPart, config: EngineConfig) -> None:
    """Nothing is decoded of a file whose header is senseless, or of one that would take too long."""
    if min(info.frames, info.height, info.width) < 1 or not 0 < info.fps < math.inf:
        raise undecodable(part.path)
    if info.height * info.width > config.max_decoded_pixels:
        raise MediaTooLarge(
            f"The video has more than {config.max_decoded_pixels} pixels per frame; send a smaller one.",
            param=part.path,
        )
    if info.frames / min(info.fps, MAX_FPS) > config.video_max_seconds:
        raise MediaTooLarge(
            f"The video is longer than {config.video_max_seconds:g} seconds; send a shorter one.", param=part.path
        )


def _video(frames: Pixels, part: MediaPart, times: tuple[float, ...]) -> Video:
    return Video(
        frames=frames,
        times=times,
        path=part.path,
        min_pixels=part.min_pixels,
        max_pixels=part.max_pixels,
        total_pixels=part.total_pixels,
    )
