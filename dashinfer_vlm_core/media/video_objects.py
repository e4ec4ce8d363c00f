"""Videos of callers in this process that are more than frames: frames with metadata, and open readers of decord."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from ..errors import InvalidParameter
from .types import Pixels, StopCheck, VideoInfo
from .video import FrameTimes, undecodable_error

Metadata: TypeAlias = Mapping[str, Any]

_LOCKS = tuple(threading.Lock() for _ in range(61))


def lock_of(item: object) -> threading.Lock:
    """Return the lock of an object that is not thread-safe, and that a caller may pass in several prompts.

    Such are decord's readers, and Pillow's images, which read their file on first use. Objects that share a lock only
    wait for each other.
    """
    return _LOCKS[id(item) % len(_LOCKS)]


def has_metadata(content: object) -> bool:
    """Return whether this is `(frames, metadata)`, as qwen-vl-utils returns it and vLLM accepts it."""
    return isinstance(content, tuple) and len(content) == 2 and isinstance(content[1], Mapping)


def read_metadata(metadata: Metadata, count: int, path: str) -> FrameTimes:
    """Return the times of frames from the metadata of qwen-vl-utils, vLLM and transformers.

    Args:
        metadata: `fps` of the original video, `frames_indices` of the frames in it (by default, all in order), and its
            `total_num_frames` (by default, the number of frames). Other keys describe the file, and are not used.
        count: number of frames.
        path: the path of the metadata in the request.

    Raises:
        InvalidParameter: a value is missing or invalid, or the frames are still to be sampled.
    """
    if metadata.get("do_sample_frames"):
        raise InvalidParameter(
            f"`{path}.do_sample_frames` is true, but all frames of a list are used. Sample them first, or pass the path"
            " of the file.",
            param=f"{path}.do_sample_frames",
        )
    fps = _positive(metadata.get("fps"), f"{path}.fps")
    indices = metadata.get("frames_indices")
    numbers = _indices(range(count) if indices is None else indices, count, f"{path}.frames_indices")
    total = metadata.get("total_num_frames")
    frames = count if total is None else _positive(total, f"{path}.total_num_frames")
    return FrameTimes(times=tuple(index / fps for index in numbers), sampled_fps=count / frames * fps)


def is_decord_reader(content: object) -> bool:
    """Return whether this has the methods of `decord.VideoReader`."""
    return hasattr(content, "get_batch") and hasattr(content, "get_avg_fps")


class DecordReaderVideo:
    """An `OpenVideo` that reads frames with a `decord.VideoReader` of the caller; `path` is for errors."""

    def __init__(self, reader: Any, path: str) -> None:
        self._reader = reader
        self._path = path
        height, width = self._read(0).shape[:2] if len(reader) else (0, 0)
        self.info = VideoInfo(frames=len(reader), fps=float(reader.get_avg_fps()), width=width, height=height)

    def frames(self, indices: list[int], check_stop: StopCheck) -> Iterator[Pixels]:
        for index in indices:
            check_stop()
            yield self._read(index)

    def _read(self, index: int) -> Pixels:
        try:
            with lock_of(self._reader):
                batch = self._reader.get_batch([index])
        except Exception as error:  # decord has several classes, and cannot be imported here
            raise undecodable_error(self._path) from error
        # An `NDArray` of decord, or a tensor if `decord.bridge` was set to PyTorch.
        frame: Pixels = np.asarray(batch.asnumpy() if hasattr(batch, "asnumpy") else batch, np.uint8)[0]
        return frame


def _positive(value: Any, path: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise InvalidParameter(f"`{path}` must be a number above 0, got {str(value)[:40]}.", param=path)
    return number


def _indices(value: Any, count: int, path: str) -> list[int]:
    array = np.asarray(value)
    if array.shape != (count,) or array.dtype.kind not in "iu" or (count and int(array.min()) < 0):
        raise InvalidParameter(f"`{path}` must have one index for each of the {count} frames, 0 or larger.", param=path)
    return [int(index) for index in array]
