"""MediaDecoder: the encoded files of a part, or a Python object -> Media."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image as PILImage

from ..config import EngineConfig
from ..protocol import MediaPart
from .frame_sampling import VideoSamplingPolicy
from .image import count_pixels, decode_image
from .python_objects import digest_media, load_object
from .types import Image, Media, Pixels, ResizerFactory, StopCheck, Video, VideoReader
from .video import FrameTimes, available_readers, check_total, decode_video, frame_path, of_one_size, stack_frames


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaDecoder:
    """Decodes media within the limits of a configuration. It is stateless and thread-safe.

    Attributes:
        config: limits.
        readers: video readers, in any order.
        policy: the model's video sampling, with the values that the configuration overrides.
    """

    config: EngineConfig
    readers: Sequence[VideoReader]
    policy: VideoSamplingPolicy

    def decode(
        self, part: MediaPart, data: Sequence[bytes], check_stop: StopCheck, resizer: ResizerFactory | None = None
    ) -> Media:
        """Decode a part.

        Args:
            part: the part.
            data: its encoded file, one per frame of a list, or none for a Python object.
            check_stop: called regularly; raises once the result is no longer needed.
            resizer: resizes the frames of a video as they are decoded; by default, they keep their size.

        Raises:
            MediaUndecodable: the data are not an image or video.
            MediaTooLarge: they exceed a limit.
            InvalidParameter: an option of the part does not apply to them, or their shape is not supported.
        """
        check_stop()
        if part.content is not None:
            return load_object(part, self.config, self.policy, check_stop)
        if isinstance(part.url, tuple):
            return self._frames(part, data, check_stop, resizer)
        if part.kind == "video":
            return decode_video(
                data[0],
                part=part,
                readers=available_readers(self.readers),
                config=self.config,
                policy=self.policy,
                check_stop=check_stop,
                resizer=resizer,
            )
        return Image.of(part, self._image(data[0], part, part.path))

    def _frames(
        self, part: MediaPart, data: Sequence[bytes], check_stop: StopCheck, resizer: ResizerFactory | None
    ) -> Video:
        limit = self.config.limits.max_decoded_pixels
        frames = [(encoded, frame_path(part, i)) for i, encoded in enumerate(data)]
        pixels = sum(count_pixels(encoded, path=path, max_pixels=limit) for encoded, path in frames)
        check_total(pixels, part=part, config=self.config)

        def decoded() -> Iterator[Pixels]:
            for encoded, path in frames:
                check_stop()
                yield np.asarray(self._image(encoded, part, path))

        times = FrameTimes.of_list(len(frames), part, self.policy)
        return stack_frames(of_one_size(decoded(), part), part, times, resizer)

    def _image(self, data: bytes, part: MediaPart, path: str) -> PILImage.Image:
        background = part.background or self.config.rgba_background
        return decode_image(data, path=path, max_pixels=self.config.limits.max_decoded_pixels, background=background)


def digest_source(data: Sequence[bytes], media: Media) -> bytes:
    """Return `VisualInput.source_digest` of media that were decoded from `data`, or from a Python object."""
    return digest_files(data) if data else digest_media(media)


def digest_files(data: Sequence[bytes]) -> bytes:
    """Hash all encoded files of a part, each with its length, to 32 bytes."""
    digest = hashlib.sha256()
    for item in data:
        digest.update(len(item).to_bytes(8, "big") + hashlib.sha256(item).digest())
    return digest.digest()
