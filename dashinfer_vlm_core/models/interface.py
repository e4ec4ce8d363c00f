"""ModelFamily: everything specific to one model architecture, and the types that it shares with the engine.

decoded media ─ImageProcessor─▶ Patches ─VisionEncoder─▶ VisualTokens
                                   └─────PromptLayout─────▶ tokens, spans and positions of the prompt
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..media.types import FrameResizer, Grid, Image, Kind, Pixels, Video, VisualInput
from .spec import ModelSpec

if TYPE_CHECKING:
    import torch

    from ..config import EngineConfig
    from ..kernels.choice import KernelSelector
    from .lora import LoraWeights


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Patches(VisualInput):
    """One image or video, resized and split into patches. The vision encoder normalizes the pixels on its device.

    Attributes:
        pixels: uint8 [t * h * w, values per patch], in the order that the family's vision encoder expects.
    """

    pixels: npt.NDArray[np.uint8]

    def temporal_patches(self) -> list[Patches]:
        """Return the temporal patches of a video as items of their own, which share its pixels."""
        count = len(self.units)
        grid = self.grid._replace(t=1)
        pixels = self.pixels.reshape(count, grid.patches, -1)
        return [
            replace(self, pixels=pixels[index], grid=grid, tokens=self.tokens // count, digest=digest, units=())
            for index, digest in enumerate(self.units)
        ]


class GridShape(NamedTuple):
    """The visual tokens and pixels of a grid of patches.

    Attributes:
        cells: visual tokens along time, height and width.
        width: width of the image or of each frame, in pixels.
        height: height of the image or of each frame, in pixels.
        frames: number of frames that the model receives, including padding.
    """

    cells: tuple[int, int, int]
    width: int
    height: int
    frames: int

    @property
    def tokens(self) -> int:
        """Number of visual tokens."""
        time, height, width = self.cells
        return time * height * width


class ImageProcessor(Protocol):
    """Converts decoded media to `Patches`: resize rule, patch size, patch order.

    It is stateless and thread-safe, and an equal one can be created in another process from the checkpoint's folder and
    the options.
    """

    def process(self, media: Image | Video) -> Patches:
        """Resize and patchify an image or video.

        Raises:
            InvalidParameter: the request's limits contradict each other or the server's, or the model does not support
                the aspect ratio; the error names the field.
        """

    def count_tokens(self, media: Image | Video) -> int:
        """Return the number of visual tokens that `process` would produce, from the size alone, without resizing.

        Raises:
            InvalidParameter: as for `process`.
        """

    def size(self, media: Image | Video) -> tuple[int, int]:
        """Return (height, width) that `process` resizes an image or each frame to, in pixels.

        A page of a document is rendered at this size. `process` then receives it with its `source_size`.

        Raises:
            InvalidParameter: as for `process`.
        """

    def frame_resizer(self, video: Video) -> FrameResizer:
        """Return a function that resizes one frame as `process` does.

        The frames of a video are resized with it as they are decoded. `process` then receives them with the video's
        `source_size`, and does not resize them again.

        Args:
            video: only the shape of its frames and the request's limits are used.

        Raises:
            InvalidParameter: as for `process`.
        """

    def shape(self, grid: Grid) -> GridShape:
        """Return the tokens and pixels that a grid corresponds to.

        Raises:
            ValueError: the grid is not valid for the model; the message states the requirement.
        """

    def frames(self, patches: Patches) -> Pixels:
        """Restore the resized frames from patches: uint8 [frames, height, width, 3]."""


class Placeholder(NamedTuple):
    """The consecutive token ids that represent one image or video in a rendered prompt."""

    kind: Kind
    tokens: tuple[int, ...]


class Expansion(NamedTuple):
    """The tokens that replace a placeholder.

    Attributes:
        token_ids: int64 [tokens].
        spans: (index, length) of the token ranges that represent visual tokens, in order; together they cover all of
            the item's visual tokens.
        leading_text: plain text before the tokens. It is tokenized together with plain text before the placeholder, as
            if it were part of the prompt.
    """

    token_ids: npt.NDArray[np.int64]
    spans: tuple[tuple[int, int], ...]
    leading_text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceholderSpan:
    """Consecutive tokens of the prompt that represent visual tokens of one image or video.

    Attributes:
        start: index of the first token in the prompt.
        length: number of tokens.
        item: index of the image or video in the request.
        row: index of the first token among the item's visual tokens.
    """

    start: int
    length: int
    item: int = 0
    row: int = 0


class PromptLayout(Protocol):
    """The representation of images and videos in a prompt: their tokens and positions.

    Attributes:
        placeholders: the tokens that the chat template writes for an image or video; the longest match wins.
    """

    placeholders: Sequence[Placeholder]

    def expand(self, item: VisualInput, encode: Callable[[str], Sequence[int]]) -> Expansion:
        """Return the tokens of one item.

        Args:
            item: an image or video of the request.
            encode: tokenizes plain text.
        """

    def positions(
        self, length: int, spans: Sequence[PlaceholderSpan], items: Sequence[VisualInput]
    ) -> npt.NDArray[np.int64]:
        """Return the positions of a prompt along time, height and width.

        Args:
            length: number of tokens of the prompt.
            spans: in the order of the prompt.
            items: images and videos in the order of the request.

        Returns:
            int64 [3, length]. Generated tokens continue after the largest position.
        """


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VisualTokens(VisualInput):
    """The visual tokens of one image or video, as the language model receives them.

    With a cache salt, `digest` identifies the content and the salt. `units` is empty if the encoder does not encode
    temporal patches separately, so that their rows depend on the whole video.

    Attributes:
        embedding: [tokens, visual width] on the vision encoder's device and in its dtype; shared and read-only.
    """

    embedding: torch.Tensor

    @classmethod
    def of(
        cls, item: VisualInput, embedding: torch.Tensor, *, digest: bytes, units: tuple[bytes, ...] = ()
    ) -> VisualTokens:
        """Return the visual tokens of an item, which has this embedding."""
        return cls(embedding=embedding, **item.shared_fields() | {"digest": digest, "units": units})


class VisionEncoder(Protocol):
    """A vision encoder; called from one thread at a time. On a CPU it computes in parts on the shared
    `ComputeExecutor`.

    Attributes:
        batch_patches: number of patches that saturates the device; larger batches only add latency. The values of the
            built-in family were not measured on a GPU.
        splits_videos: whether temporal patches of a video are encoded and cached as separate items. The rows of each
            must depend on its pixels alone, and pixels and rows must be in the order of time.
    """

    batch_patches: int
    splits_videos: bool

    def encode(self, batch: Sequence[Patches]) -> list[torch.Tensor]:
        """Return one [tokens, visual width] tensor per item; an item's rows do not depend on the rest of the batch."""

    def adopt(self, rows: npt.NDArray[np.float32]) -> torch.Tensor:
        """Convert precomputed embeddings to the device and dtype of `encode`'s output."""


class ModelFamily(Protocol):
    """Everything specific to one model architecture; plugins register it in the `register_model_families` hook.

    Attributes:
        model_types: the supported values of `model_type` in `config.json`.
    """

    model_types: frozenset[str]

    def load_spec(self, folder: Path) -> ModelSpec:
        """Load the checkpoint's configuration.

        Raises:
            CheckpointError: a file is missing, invalid or requires an unsupported feature.
        """

    def image_processor(self, spec: ModelSpec, config: EngineConfig) -> ImageProcessor:
        """Create the image processor for images and videos, with the limits of one engine.

        Raises:
            ConfigError: the configuration's limits contradict each other or the model's.
        """

    def prompt_layout(self, spec: ModelSpec) -> PromptLayout:
        """Create the prompt layout for images and videos."""

    def load_vision_encoder(
        self, spec: ModelSpec, config: EngineConfig, kernels: KernelSelector, lora: LoraWeights | None = None
    ) -> VisionEncoder:
        """Load the vision encoder on the configuration's device and in its dtype, both of which may be `auto`.

        `Weights` merges the changes of an adapter into the tensors that it reads.

        `placement.quantizes_vision_encoder` decides whether its weights are quantized. A family whose encoder cannot be
        quantized rejects `vision_quantization` int8.

        Raises:
            CheckpointError: a tensor is missing or has an unexpected shape, or the encoder does not use one that `lora`
                changes.
            ConfigError: the encoder does not support `vision_quantization`.
        """
