"""ModelSpec: a checkpoint's configuration in a form that all packages share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..media.frame_sampling import VideoSamplingPolicy
from ..text_spec import TextModelSpec
from ..tokenization.conversation import ConversationFormat
from .coordinates import CoordinateSpec
from .eagle import EagleSpec
from .model_card import ModelCard
from .pooling import PoolingSpec, Task

if TYPE_CHECKING:
    from .formats.interface import ModuleReader


ROTATION = "dashinfer_vlm_rotation"
"""The field of `config.json` of checkpoints whose hidden states are rotated."""


class PixelLimits(NamedTuple):
    """Minimum and maximum number of pixels (height times width) of a resized image or frame, or of all frames."""

    min_pixels: int
    max_pixels: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PixelSpec:
    """The model's preprocessing parameters (`preprocessor_config.json`).

    Attributes:
        patch_size: side of a square patch, in pixels.
        temporal_patch_size: frames that one patch spans.
        merge_size: patches per side that the vision encoder merges into one visual token.
        min_pixels: minimum number of pixels (height times width) of a resized image.
        max_pixels: maximum number of pixels of a resized image that the checkpoint allows.
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
        """Both sides of a resized image are multiples of this, in pixels."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSpec:
    """Token ids that are special to the engine (`config.json`, `generation_config.json`).

    Attributes:
        image: placeholder for one visual token of an image.
        video: placeholder for one visual token of a video.
        stop: tokens that end a response.
    """

    image: int
    video: int
    stop: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A model's capabilities, which the adapters report.

    Attributes:
        images: whether it accepts images.
        videos: whether it accepts videos.
        tools: whether it was trained to call tools.
        reasoning: whether it reasons before it responds.
    """

    images: bool = True
    videos: bool = True
    tools: bool = True
    reasoning: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One checkpoint.

    Attributes:
        folder: the folder with its files.
        model_type: `model_type` of its `config.json`; the key of the family that loads it.
        max_model_len: maximum number of tokens of prompt and response together.
        dtype: dtype of the stored weights that are not quantized, as torch names it.
        video: the policy that selects the frames of a video.
        conversation: the format of tool calls.
        profile: its capabilities, which the adapters report.
        tensor_renames: pairs of a regular expression and its replacement, applied in this order, that map the stored
            tensor names to those that the family and `text.weights` use. Tensors without a name after that are ignored.
        card: what users are shown of it.
        coordinates: how it writes positions in images; None if that is not known.
        min_dimensions: the fewest dimensions that the family's embedding models were trained for; 0 if not known.
        pooling: how its hidden states are pooled; None if it generates text.
        vision_weights: number of weights of the vision encoder, for estimates; 0 if not known.
        draft: the smaller model, or the head, that drafts tokens for it; None without one.
        visual_outputs: the layers whose outputs are visual tokens, or are added to hidden states with them; empty if
            the family does not name them, so that the hidden states cannot be rotated.
        rotated: whether the hidden states are in another basis than the original's, see `models.quantizing.rotation`.
    """

    folder: Path
    model_type: str
    max_model_len: int
    dtype: str
    pixels: PixelSpec
    tokens: TokenSpec
    text: TextModelSpec
    video: VideoSamplingPolicy
    conversation: ConversationFormat
    profile: Profile
    tensor_renames: tuple[tuple[str, str], ...] = ()
    quantization: ModuleReader | None = None
    card: ModelCard = field(default_factory=ModelCard)
    coordinates: CoordinateSpec | None = None
    min_dimensions: int = 0
    pooling: PoolingSpec | None = None
    vision_weights: int = 0
    draft: ModelSpec | EagleSpec | None = None
    visual_outputs: tuple[str, ...] = ()
    rotated: bool = False

    @property
    def task(self) -> Task:
        """What the checkpoint is used for."""
        return self.pooling.task if self.pooling else "generate"

    @property
    def vocab_size(self) -> int:
        """Number of rows of the output layer; token ids are below it."""
        return self.text.vocab_size

    @property
    def hidden_size(self) -> int:
        """Size of a token's embedding."""
        return self.text.hidden_size

    @property
    def visual_width(self) -> int:
        """Width of a visual token's row, see `TextModelSpec.visual_width`."""
        return self.text.visual_width
