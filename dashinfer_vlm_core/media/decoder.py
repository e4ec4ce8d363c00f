"""MediaDecoder: the encoded files of a part, or a Python object -> Media."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image as PILImage

from ..config import EngineConfig
from ..errors import EngineError, MediaUndecodable, RequestError
from ..protocol import MediaPart
from .frame_sampling import VideoSamplingPolicy
from .image import count_pixels, deadline_error, decode_image, out_of_memory_error
from .python_objects import load_object
from .types import Image, Media, Pixels, ResizerFactory, StopCheck, Video, VideoReader
from .video import FrameTimes, check_total, frame_path, of_one_size, sample_video, stack_frames, undecodable_error

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaDecoder:
    """Decodes media within the limits of a configuration. It is stateless and thread-safe.

    Attributes:
        config: limits.
        readers: video readers, best first.
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
            MediaTooLarge: they exceed a limit, or a video its time limit.
            InvalidParameter: an option of the part does not apply to them, or their shape is not supported.
        """
        check_stop()
        if part.content is not None:
            return load_object(part, self.config, self.policy, check_stop)
        for index, file in enumerate(data):
            if not file:
                path = frame_path(part, index) if isinstance(part.url, tuple) else part.path
                raise MediaUndecodable(f"The file of the {part.kind} has 0 bytes. Save it again.", param=path)
        if isinstance(part.url, tuple):
            return self._frames(part, data, check_stop, resizer)
        if part.kind == "video":
            return self._video(part, data[0], check_stop, resizer)
        return Image.of(part, self._image(data[0], part, part.path))

    def _video(self, part: MediaPart, data: bytes, check_stop: StopCheck, resizer: ResizerFactory | None) -> Video:
        check = self._with_deadline(check_stop, part)
        for reader in self.readers:
            check()
            try:
                video = reader.open(data)
                return sample_video(
                    video, part=part, config=self.config, policy=self.policy, check_stop=check, resizer=resizer
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

    def _with_deadline(self, check_stop: StopCheck, part: MediaPart) -> StopCheck:
        # A file of a few kilobytes can take minutes to decode, even for few frames.
        seconds = self.config.video_decode_seconds
        end = time.monotonic() + seconds

        def check() -> None:
            check_stop()
            if time.monotonic() > end:
                raise deadline_error("video", part.path, seconds)

        return check

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


def digest_files(data: Sequence[bytes]) -> bytes:
    """Hash all encoded files of a part, each with its length, to 32 bytes."""
    digest = hashlib.sha256()
    for item in data:
        digest.update(len(item).to_bytes(8, "big") + hashlib.sha256(item).digest())
    return digest.digest()
