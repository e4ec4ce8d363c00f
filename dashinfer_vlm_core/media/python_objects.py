"""What code in this process hands over -> Media: pictures, arrays, tensors and embeddings that are already there.

    picture     a PIL image; an array of pixels; embeddings
    video       an array of pixels; a list of PIL images or of arrays, all of one size; embeddings
    pixels      numpy or torch, uint8: [height, width] (grey) or [height, width, 1, 3 or 4 channels]; of a video
                [frames, height, width, channels]. The channels may also be the axis before height, if they are 3 and
                the last axis cannot be theirs.
    embeddings  {"image_embeds": rows, "image_grid_thw": grid}, or video_embeds and video_grid_thw: floats
                [tokens, hidden size], and three whole numbers or one row of them; numpy or torch, the grid also a list.
                Or `EncodedEmbeddings`.

Pixels are read while their request is prepared, and are not to be changed before it is answered; embeddings are copied.
Tensors are known by what they can do: torch is not imported here.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from PIL import Image as PILImage

from ..concurrency.compute import CPU_EXECUTOR
from ..config import EngineConfig
from ..errors import InvalidParameter
from ..protocol import EncodedEmbeddings, MediaPart
from .image import check_size, convert_image
from .sampling import VideoSamplingPolicy
from .tensors import Array, as_grid, as_rows, read_embeddings
from .types import Embeddings, Image, Media, Pixels, StopCheck, Video
from .video import check_frames, check_total, frame_name, stack_frames

_Frame: TypeAlias = PILImage.Image | Pixels

# Pillow reads a file on first use, and not in two threads at once; pictures that share a lock merely wait.
_LOCKS = tuple(threading.Lock() for _ in range(61))


def load_object(part: MediaPart, config: EngineConfig, policy: VideoSamplingPolicy, check_stop: StopCheck) -> Media:
    """What a caller of this process handed over as `part.content`, within the limits of `config`.

    Raises:
        InvalidParameter: it is nothing that this module lists, or has a wrong shape or type.
        UnsupportedParameter: `fps` or `num_frames` of a video that is frames already.
        MediaTooLarge: more pixels or bytes than are allowed.
        MediaUndecodable: embeddings as text that cannot be read, or an image whose file is damaged.
    """
    if isinstance(part.content, (Mapping, EncodedEmbeddings)):
        return _embeddings(part.content, part, config)
    if part.kind == "video":
        return _video(part.content, part, config, policy, check_stop)
    frame = _frame(part.content, part.path, config)
    image = PILImage.fromarray(frame) if isinstance(frame, np.ndarray) else frame
    return Image(
        image=_converted(image, part, part.path, config),
        path=part.path,
        min_pixels=part.min_pixels,
        max_pixels=part.max_pixels,
    )


def fingerprint(media: Media) -> bytes:
    """32 bytes, equal exactly for equal contents of one kind."""
    digest = hashlib.sha256(type(media).__name__.encode())
    shape: tuple[int, ...]
    if isinstance(media, Image):
        data, shape = np.asarray(media.image), (media.image.height, media.image.width)
    elif isinstance(media, Video):
        data, shape = media.frames, media.frames.shape[:3]
    else:
        data, shape = media.rows, (*media.grid, len(media.rows))
    digest.update(repr(tuple(map(int, shape))).encode())
    digest.update(np.ascontiguousarray(data).data)
    return digest.digest()


def _embeddings(content: Mapping[Any, Any] | EncodedEmbeddings, part: MediaPart, config: EngineConfig) -> Embeddings:
    if isinstance(content, EncodedEmbeddings):
        rows, grid = read_embeddings(content, part=part.path, max_bytes=config.image_max_bytes)
    else:
        names = (f"{part.kind}_embeds", f"{part.kind}_grid_thw")
        if set(content) != set(names):
            raise InvalidParameter(
                f"Embeddings of a part of kind {part.kind} are an object of `{names[0]}` and `{names[1]}`.",
                param=part.path,
            )
        rows = as_rows(_array(content[names[0]], part.path), part=part.path)
        grid = as_grid(_numbers(content[names[1]], part.path), part=part.path)
    return Embeddings(rows=rows, grid=grid, kind=part.kind, path=part.path)


def _video(
    content: object, part: MediaPart, config: EngineConfig, policy: VideoSamplingPolicy, check_stop: StopCheck
) -> Video:
    found = _array(content, part.path)
    given = content if isinstance(content, (list, tuple)) else None if found is None else _channels_last(found)
    if given is None or (found is not None and found.ndim != 4):
        raise InvalidParameter(
            "A video is an array of the shape [frames, height, width, 3], or a list of pictures.", param=part.path
        )
    check_frames(len(given), part=part, policy=policy)
    frames = [_frame(frame, frame_name(part, index), config) for index, frame in enumerate(given)]
    check_total(sum(width * height for width, height in map(_size, frames)), part=part, config=config)

    def pixels() -> Iterator[Pixels]:
        for index, frame in enumerate(frames):
            check_stop()
            yield _rgb(frame, part, frame_name(part, index), config)

    return stack_frames(pixels(), len(frames), part, policy)


def _frame(content: object, name: str, config: EngineConfig) -> _Frame:
    """A PIL image as it is, or uint8 [height, width] or [height, width, 3 or 4]; its size is allowed."""
    if isinstance(content, PILImage.Image):
        check_size(content.size, config.max_decoded_pixels, name)
        return content
    found = _array(content, name)
    if found is None:
        raise InvalidParameter(
            "This is no picture: give a PIL image, an array of pixels, or embeddings with their grid.", param=name
        )
    if found.dtype != np.uint8:
        raise InvalidParameter(
            "Pixels are of the type uint8: multiply floats from 0 to 1 by 255 and convert them. Embeddings come with"
            " their grid, as image_embeds and image_grid_thw.",
            param=name,
        )
    found = _channels_last(found)
    if found.ndim != 2 and (found.ndim != 3 or found.shape[2] not in (1, 3, 4)):
        raise InvalidParameter(
            "An array of pixels has the shape [height, width] or [height, width, channels], of 1, 3 or 4 channels.",
            param=name,
        )
    check_size((found.shape[1], found.shape[0]), config.max_decoded_pixels, name)
    return found[:, :, 0] if found.shape[2:] == (1,) else found


def _size(frame: _Frame) -> tuple[int, int]:
    return frame.size if isinstance(frame, PILImage.Image) else (frame.shape[1], frame.shape[0])


def _rgb(frame: _Frame, part: MediaPart, name: str, config: EngineConfig) -> Pixels:
    """uint8 [height, width, 3]."""
    if isinstance(frame, np.ndarray):
        if frame.shape[2:] == (3,):
            return frame
        frame = PILImage.fromarray(frame)
    return np.asarray(_converted(frame, part, name, config))


def _converted(image: PILImage.Image, part: MediaPart, name: str, config: EngineConfig) -> PILImage.Image:
    background = part.background or config.rgba_background
    with _LOCKS[id(image) % len(_LOCKS)]:
        return convert_image(image, part=name, max_pixels=config.max_decoded_pixels, background=background)


def _array(value: Any, name: str) -> Array | None:
    """A numpy array, or a torch tensor (one of floats as float32: numpy has no bfloat16); None if it is neither."""
    if isinstance(value, np.ndarray):
        return value
    if not (hasattr(value, "detach") and hasattr(value, "is_floating_point")):  # files have the first
        return None
    try:
        tensor = value.detach().cpu()
        found: Array = (CPU_EXECUTOR.run(tensor.float) if tensor.is_floating_point() else tensor).numpy()
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        raise InvalidParameter("This tensor cannot be read: give a dense one with its data.", param=name) from error
    return found


def _numbers(value: Any, name: str) -> Array | None:
    if not isinstance(value, (list, tuple)):
        return _array(value, name)
    try:
        return np.array(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidParameter("The grid of embeddings is three whole numbers.", param=name) from error


def _channels_last(pixels: Array) -> Array:
    """[..., height, width, channels], also of [..., 3, height, width] where the last axis cannot be the channels."""
    if pixels.ndim > 2 and pixels.shape[-1] not in (1, 3, 4) and pixels.shape[-3] == 3:
        return np.moveaxis(pixels, -3, -1)
    return pixels
