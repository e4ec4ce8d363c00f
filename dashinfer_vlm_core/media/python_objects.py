"""Python objects of this process -> Media: images, arrays, tensors and embeddings passed without encoding.

    image       a PIL image; an array of pixels; embeddings
    video       an array of pixels; a list of PIL images or of arrays, all of one size; `(frames, metadata)`, see
                `video_objects.read_metadata`; a `decord.VideoReader`, which is sampled like a file; embeddings
    pixels      numpy or torch, uint8 or floats from 0 to 255: [height, width] (gray) or [height, width, 1, 3 or 4
                channels]; for a video [frames, height, width, channels]. Three channels may also precede height and
                width, if the last axis cannot be the channels. Floats are rounded.
    embeddings  {"image_embeds": rows, "image_grid_thw": grid}, or video_embeds and video_grid_thw: floats
                [tokens, hidden size], and three integers or one row of them; numpy or torch, the grid also a list.
                Or `EncodedEmbeddings`.

Pixels are read while the request is prepared and must not change before the request completes; embeddings are copied.
Tensors are recognized by duck typing, because torch is not imported here.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from PIL import Image as PILImage

from ..concurrency.compute import CPU_EXECUTOR
from ..config import EngineConfig
from ..errors import InvalidParameter
from ..protocol import EncodedEmbeddings, MediaPart
from .frame_sampling import VideoSamplingPolicy
from .image import check_size, convert_image
from .tensors import Array, as_grid, as_rows, read_embeddings
from .types import Embeddings, Image, Media, Pixels, StopCheck, Video
from .video import FrameTimes, check_frames, check_total, frame_path, of_one_size, sample_video, stack_frames
from .video_objects import DecordReaderVideo, Metadata, has_metadata, is_decord_reader, lock_of, read_metadata

_Frame: TypeAlias = PILImage.Image | Array
"""A PIL image, or pixels: uint8 or floats from 0 to 255."""


def load_object(part: MediaPart, config: EngineConfig, policy: VideoSamplingPolicy, check_stop: StopCheck) -> Media:
    """Convert `part.content`, a Python object of this process, within the limits of `config`.

    Raises:
        InvalidParameter: the object is not one that this module supports, has a wrong shape, dtype or range, or is a
            list of frames with `num_frames`.
        MediaTooLarge: more pixels or bytes than are allowed.
        MediaUndecodable: encoded embeddings that cannot be read, or an image whose file is damaged.
    """
    if isinstance(part.content, (Mapping, EncodedEmbeddings)):
        return _embeddings(part.content, part, config)
    if part.kind == "video":
        return _video(part.content, part, config, policy, check_stop)
    frame = _frame(part.content, part.path, config)
    _check_scale([frame], part.path)
    image = PILImage.fromarray(_to_uint8(frame)) if isinstance(frame, np.ndarray) else frame
    return Image.of(part, _convert(image, part, part.path, config))


def digest_media(media: Media) -> bytes:
    """Hash media to 32 bytes; equal if and only if kind and contents are equal."""
    grid: tuple[int, ...] = ()
    data: Array
    if isinstance(media, Image):
        data = np.asarray(media.image)
    elif isinstance(media, Video):
        data = media.frames
    else:
        data = media.rows
        grid = media.grid
    digest = hashlib.sha256(f"{type(media).__name__} {data.shape} {tuple(grid)}".encode())
    digest.update(np.ascontiguousarray(data).data)
    return digest.digest()


def _embeddings(content: Mapping[Any, Any] | EncodedEmbeddings, part: MediaPart, config: EngineConfig) -> Embeddings:
    if isinstance(content, EncodedEmbeddings):
        rows, grid = read_embeddings(content, path=part.path, max_bytes=config.image_max_bytes)
    else:
        names = (f"{part.kind}_embeds", f"{part.kind}_grid_thw")
        if set(content) != set(names):
            raise InvalidParameter(
                f"Embeddings of kind {part.kind} must be a dict with the keys `{names[0]}` and `{names[1]}`.",
                param=part.path,
            )
        rows = as_rows(_as_array(content[names[0]], part.path), path=part.path)
        grid = as_grid(_as_grid_array(content[names[1]], part.path), path=part.path)
    return Embeddings(kind=part.kind, path=part.path, grid=grid, tokens=len(rows), rows=rows)


def _video(
    content: object, part: MediaPart, config: EngineConfig, policy: VideoSamplingPolicy, check_stop: StopCheck
) -> Video:
    if is_decord_reader(content):
        video = DecordReaderVideo(content, part.path)
        return sample_video(video, part=part, config=config, policy=policy, check_stop=check_stop)
    metadata: Metadata | None = None
    if has_metadata(content):
        assert isinstance(content, tuple)
        content, metadata = content
    array = _as_array(content, part.path)
    items = content if isinstance(content, (list, tuple)) else None if array is None else _channels_last(array)
    if items is None or (array is not None and array.ndim != 4):
        raise InvalidParameter(
            "A video must be an array of shape [frames, height, width, 3] or a list of images.", param=part.path
        )
    check_frames(len(items), part=part, policy=policy)
    times = FrameTimes.of_list(len(items), part, policy) if metadata is None else _times(metadata, len(items), part)
    frames = [_frame(frame, frame_path(part, index), config) for index, frame in enumerate(items)]
    check_total(sum(width * height for width, height in map(_size, frames)), part=part, config=config)
    _check_scale(frames, frame_path(part, 0))

    def pixels() -> Iterator[Pixels]:
        for index, frame in enumerate(frames):
            check_stop()
            yield _rgb(frame, part, frame_path(part, index), config)

    return stack_frames(of_one_size(pixels(), part), part, times)


def _times(metadata: Metadata, count: int, part: MediaPart) -> FrameTimes:
    if part.fps is not None:
        raise InvalidParameter(
            "`fps` cannot be combined with metadata, which has the time of each frame. Remove one of them.",
            param=f"{part.options_path}.fps",
        )
    return read_metadata(metadata, count, f"{part.path}[1]")


def _frame(content: object, path: str, config: EngineConfig) -> _Frame:
    """Return a PIL image unchanged, or pixels [height, width] or [height, width, 3 or 4]; checks size and range."""
    if isinstance(content, PILImage.Image):
        check_size(content.size, config.limits.max_decoded_pixels, path)
        return content
    array = _as_array(content, path)
    if array is None:
        raise InvalidParameter(
            f"{type(content).__name__} is not an image. Pass a PIL image, an array of pixels, or embeddings with their"
            " grid.",
            param=path,
        )
    is_in_range = array.dtype.kind == "f" and array.min(initial=0) >= 0 and array.max(initial=0) <= 255
    if array.dtype != np.uint8 and not is_in_range:
        raise _pixels_error(f"got {array.dtype}", path)
    array = _channels_last(array)
    if array.ndim != 2 and (array.ndim != 3 or array.shape[2] not in (1, 3, 4)):
        raise InvalidParameter(
            "An array of pixels must have the shape [height, width] or [height, width, channels] with 1, 3 or 4"
            f" channels, got {list(array.shape)}.",
            param=path,
        )
    check_size((array.shape[1], array.shape[0]), config.limits.max_decoded_pixels, path)
    return array[:, :, 0] if array.shape[2:] == (1,) else array


def _check_scale(frames: Sequence[_Frame], path: str) -> None:
    """Reject floats that are probably from 0 to 1: fractions, of which none exceeds 1 in the whole video.

    Raises:
        InvalidParameter: `path` is its `param`.
    """
    floats = [frame for frame in frames if isinstance(frame, np.ndarray) and frame.dtype.kind == "f"]
    if not floats or any(frame.max(initial=0) > 1 for frame in floats):
        return
    if any((frame != np.rint(frame)).any() for frame in floats):
        raise _pixels_error("got floats from 0 to 1", path)


def _pixels_error(reason: str, path: str) -> InvalidParameter:
    return InvalidParameter(
        f"Pixels must be uint8, or floats from 0 to 255; {reason}. Multiply floats from 0 to 1 by 255. Pass embeddings"
        " with their grid, as image_embeds and image_grid_thw.",
        param=path,
    )


def _to_uint8(pixels: Array) -> Pixels:
    return pixels if pixels.dtype == np.uint8 else np.rint(pixels).astype(np.uint8)


def _size(frame: _Frame) -> tuple[int, int]:
    return frame.size if isinstance(frame, PILImage.Image) else (frame.shape[1], frame.shape[0])


def _rgb(frame: _Frame, part: MediaPart, path: str, config: EngineConfig) -> Pixels:
    if isinstance(frame, np.ndarray):
        frame = _to_uint8(frame)
        if frame.shape[2:] == (3,):
            return frame
        frame = PILImage.fromarray(frame)
    return np.asarray(_convert(frame, part, path, config))


def _convert(image: PILImage.Image, part: MediaPart, path: str, config: EngineConfig) -> PILImage.Image:
    background = part.background or config.rgba_background
    with lock_of(image):
        return convert_image(image, path=path, max_pixels=config.limits.max_decoded_pixels, background=background)


def _as_array(value: Any, path: str) -> Array | None:
    # Floating-point tensors become float32, because numpy has no bfloat16.
    if isinstance(value, np.ndarray):
        return value
    if not (hasattr(value, "detach") and hasattr(value, "is_floating_point")):  # file objects have `detach` too
        return None
    try:
        tensor = value.detach().cpu()
        array: Array = (CPU_EXECUTOR.run(tensor.float) if tensor.is_floating_point() else tensor).numpy()
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        raise InvalidParameter("The tensor cannot be read. Pass a dense tensor with data.", param=path) from error
    return array


def _as_grid_array(value: Any, path: str) -> Array | None:
    if not isinstance(value, (list, tuple)):
        return _as_array(value, path)
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return np.array(value)
    return None


def _channels_last(pixels: Array) -> Array:
    # from [..., 3, height, width], if the last axis cannot be the channels
    if pixels.ndim > 2 and pixels.shape[-1] not in (1, 3, 4) and pixels.shape[-3] == 3:
        return np.moveaxis(pixels, -3, -1)
    return pixels
