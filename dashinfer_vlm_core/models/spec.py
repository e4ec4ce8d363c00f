"""ModelSpec: what a checkpoint says about itself, in the words that every room shares."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class PixelSpec:
    """How the model wants its pixels (`preprocessor_config.json`).

    Attributes:
        patch_size: side of a square patch, in pixels.
        temporal_patch_size: frames that one patch spans.
        merge_size: patches per side that the tower merges into one visual token.
        min_pixels: least pixels (height times width) of a resized picture.
        max_pixels: most pixels of a resized picture that the checkpoint allows.
        mean: per channel (red, green, blue), on a scale of 0 to 1.
        std: per channel.
    """

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 4 * 28 * 28
    max_pixels: int = 16384 * 28 * 28
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    @property
    def factor(self) -> int:
        """Both sides of a resized picture are multiples of this, in pixels."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSpec:
    """Token ids that have a meaning to the engine (`config.json`, `generation_config.json`).

    Attributes:
        image: placeholder that stands for one visual token of a picture.
        video: placeholder that stands for one visual token of a video.
        stop: tokens that end an answer.
    """

    image: int
    video: int
    stop: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One checkpoint.

    Attributes:
        folder: where its files are.
        architecture: `model_type` of its configuration; the key of the architecture that reads it.
        max_model_len: tokens that prompt and answer may have together.
        vocab_size: rows of the output layer; token ids are below it.
        hidden_size: width of a token's embedding, visual tokens included.
        dtype: number type of the stored weights, as torch names it.
    """

    folder: Path
    architecture: str
    max_model_len: int
    vocab_size: int
    hidden_size: int
    dtype: str
    pixels: PixelSpec
    tokens: TokenSpec
