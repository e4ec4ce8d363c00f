"""Limits that are no options: defaults that suit every server, which Python code can change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of an engine that protect it against hostile or broken requests, files and decoders.

    Attributes:
        max_loras: LoRA adapters in memory, if not more are loaded at startup.
        max_media_ids: cached names (`uuid`) of images and videos.
        max_decoded_pixels: pixels of an image before resizing, read from its header. Pillow warns above the bound.
        video_max_decoded_pixels: pixels of all frames of a video: of a file after resizing, of a list before.
        document_pages: pages of a request's documents that are rendered.
        document_page_text: characters of the text layer of a page.
        image_decode_timeout: seconds for decoding and resizing an image, or rendering a page; needs media workers.
        video_decode_timeout: seconds for opening, decoding and resizing a video, or reading a document; see
            `EngineConfig.video_decode_seconds`.
        media_worker_memory_mib: memory that a media worker may allocate, in MiB.
        pooling_items: texts of a request for embeddings, or documents of one for scores.
        pooling_media: images, videos and documents of such a request.
        max_fetched_bytes: bytes fetched for all media of a request.
        max_fetches: concurrent fetches of a client.
        decoder_restarts: consecutive restarts of a decoder that has died.
        step_timeout: seconds after which a step of the decoder is considered hung.
        store_timeout: seconds for a lookup in the embedding store; by default half of the time that encoding takes.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    max_loras: PositiveInt = 8
    max_media_ids: NonNegativeInt = 4096
    max_decoded_pixels: Annotated[int, Field(ge=784, le=89_478_485)] = 64_000_000
    video_max_decoded_pixels: Annotated[int, Field(ge=784)] = 768_000_000
    document_pages: PositiveInt = 50
    document_page_text: PositiveInt = 100_000
    image_decode_timeout: PositiveFloat = 10.0
    video_decode_timeout: PositiveFloat = 30.0
    media_worker_memory_mib: Annotated[int, Field(ge=64)] = 1024
    pooling_items: PositiveInt = 2048
    pooling_media: PositiveInt = 256
    max_fetched_bytes: PositiveInt = 512 * 1024 * 1024
    max_fetches: PositiveInt = 16
    decoder_restarts: NonNegativeInt = 3
    step_timeout: PositiveFloat = 600.0
    store_timeout: PositiveFloat | None = None
