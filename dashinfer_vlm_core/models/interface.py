"""ModelFamily: everything that belongs to a kind of model, and the types that it shares with the engine.

decoded media ─ImageProcessor─▶ Patches ─VisionEncoder─▶ VisualTokens
                                   └─────PromptLayout─────▶ tokens, spans and positions of the prompt
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..media.types import Image, Kind, Pixels, Video
from .spec import ModelSpec

if TYPE_CHECKING:
    import torch

    from ..config import EngineConfig
    from ..kernels.choice import KernelSelector


class Grid(NamedTuple):
    """Patches of one image or video along time, height and width."""

    t: int
    h: int
    w: int

    @property
    def patches(self) -> int:
        return self.t * self.h * self.w


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Patches:
    """One image or video, resized and cut, not yet normalized: the vision encoder does that where it runs.

    Attributes:
        pixels: uint8 [t * h * w, values of a patch], in the order that the family's vision encoder reads.
        grid: patches along time, height and width.
        tokens: visual tokens that the vision encoder will make of them.
        kind: what they were.
        part: where it stands in the request.
        digest: 32 bytes; equal exactly for equal kind, grid and pixels.
        times: seconds at which each frame of a video is shown, before any padding; none for an image. The digest does
            not cover them: the same frames at other times have the same embedding, and another prompt.
    """

    pixels: npt.NDArray[np.uint8]
    grid: Grid
    tokens: int
    kind: Kind
    path: str
    digest: bytes
    times: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Embedded:
    """Visual tokens that came ready-made, fit for the model.

    Attributes:
        rows: float32 [tokens, visual width], finite.
        grid: patches along time, height and width.
        tokens: number of rows.
        kind: what they are of.
        part: where they stand in the request.
        digest: 32 bytes; equal exactly for equal kind, grid and rows.
        times: as in `Patches`; none where the request does not say.
    """

    rows: npt.NDArray[np.float32]
    grid: Grid
    tokens: int
    kind: Kind
    path: str
    digest: bytes
    times: tuple[float, ...] = ()


class Visual(Protocol):
    """What the prompt has to know of an image or video."""

    @property
    def grid(self) -> Grid: ...

    @property
    def tokens(self) -> int: ...

    @property
    def kind(self) -> Kind: ...

    @property
    def times(self) -> tuple[float, ...]: ...


class GridShape(NamedTuple):
    """What a grid of patches amounts to.

    Attributes:
        cells: visual tokens along time, height and width.
        width: of the image or of each frame, in pixels.
        height: likewise.
        frames: that the model sees, padding included.
    """

    cells: tuple[int, int, int]
    width: int
    height: int
    frames: int

    @property
    def tokens(self) -> int:
        """Visual tokens."""
        time, height, width = self.cells
        return time * height * width


class ImageProcessor(Protocol):
    """Decoded media -> Patches: resize rule, patch size, patch order. It keeps no state: any thread may call it, and an
    equal one can be made in another process from the checkpoint's folder and the options."""

    def process(self, media: Image | Video) -> Patches:
        """Resize and cut.

        Raises:
            InvalidParameter: limits of the request that contradict each other or the server's, or sides that the model
                does not read; the error names the field.
        """

    def count_tokens(self, media: Image | Video) -> int:
        """The visual tokens that `process` will give, by the size of the media alone: nothing is resized.

        Raises:
            InvalidParameter: as `process`.
        """

    def shape(self, grid: Grid) -> GridShape:
        """What a grid amounts to.

        Raises:
            ValueError: the model has no such grids; the message says which it has.
        """

    def frames(self, patches: Patches) -> Pixels:
        """The frames that patches were cut from, as the model sees them: uint8 [frames, height, width, 3]."""


class Placeholder(NamedTuple):
    """Token ids that stand for one image or video in a rendered prompt, one after the other."""

    kind: Kind
    tokens: tuple[int, ...]


class Expansion(NamedTuple):
    """Tokens that take the place of a placeholder.

    Attributes:
        token_ids: int64 [tokens].
        spans: (index, length) of the runs that stand for visual tokens, in order; together they hold all of the item's.
    """

    token_ids: npt.NDArray[np.int64]
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceholderSpan:
    """A run of tokens in the prompt that stand for visual tokens of one image or video.

    Attributes:
        start: index of the first one in the prompt.
        length: how many they are.
        item: index of the image or video in the request.
        row: index of the first one among the item's visual tokens.
    """

    start: int
    length: int
    item: int = 0
    row: int = 0


class PromptLayout(Protocol):
    """How images and videos stand in a prompt: their tokens and their positions.

    Attributes:
        placeholders: what the chat template writes for an image or video; where several fit, the longest counts.
    """

    placeholders: Sequence[Placeholder]

    def expand(self, item: Visual, encode: Callable[[str], Sequence[int]]) -> Expansion:
        """The tokens of one item.

        Args:
            item: an image or video of the request.
            encode: plain text to token ids.
        """

    def positions(
        self, length: int, spans: Sequence[PlaceholderSpan], items: Sequence[Visual]
    ) -> npt.NDArray[np.int64]:
        """Positions of a prompt along time, height and width.

        Args:
            length: tokens of the prompt.
            spans: in the order of the prompt.
            items: images and videos, in the order of the request.

        Returns:
            int64 [3, length]. What is generated goes on after the largest one.
        """


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VisualTokens:
    """One image or video as the language model sees it.

    Attributes:
        embedding: [tokens, visual width] on the vision encoder's device and in its dtype; shared, never written to.
        grid: patches along time, height and width.
        digest: 32 bytes that name the content; under a salt, the content and the salt.
    """

    embedding: torch.Tensor
    grid: Grid
    digest: bytes


class VisionEncoder(Protocol):
    """A vision encoder; called from one thread at a time. On a CPU it computes by `executor_for`, in parts.

    Attributes:
        batch_patches: patches that keep the device busy; with more in a pass, the first ones only wait for the last.
    """

    batch_patches: int

    def encode(self, batch: Sequence[Patches]) -> list[torch.Tensor]:
        """One [tokens, visual width] tensor per item; an item's rows do not depend on the rest of the batch."""

    def adopt(self, rows: npt.NDArray[np.float32]) -> torch.Tensor:
        """Rows that somebody else encoded, on the device and in the dtype of those that `encode` gives."""


class ModelFamily(Protocol):
    """Everything that belongs to a kind of model; a plugin registers one by `register_model_families`.

    Attributes:
        model_types: the values of `model_type` in `config.json` that it reads.
    """

    model_types: frozenset[str]

    def load_spec(self, folder: Path) -> ModelSpec:
        """What the checkpoint says about itself.

        Raises:
            CheckpointError: a file is missing or says something that we do not support.
        """

    def image_processor(self, spec: ModelSpec, config: EngineConfig) -> ImageProcessor:
        """What resizes and cuts images and videos, within the limits of one engine.

        Raises:
            ConfigError: limits of the configuration contradict each other or the model's.
        """

    def prompt_layout(self, spec: ModelSpec) -> PromptLayout:
        """How images and videos stand in a prompt."""

    def load_vision_encoder(self, spec: ModelSpec, config: EngineConfig, kernels: KernelSelector) -> VisionEncoder:
        """The vision encoder, where and in the number type that the configuration says, which may be `auto`.

        Raises:
            CheckpointError: tensors are missing or have other shapes.
        """
