"""A plugin with a model family that differs from Qwen2-VL in everything that `ModelFamily` can vary.

Images are split into patches of 8 x 8 in row order, one visual token each. Each frame of a video has its own span after
a tokenized timestamp. A visual token has two more rows, which are added after the first two layers. The text model has
LayerNorms without biases, norms of queries and keys, no biases, and rotates neighboring columns.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image as PILImage
from safetensors.torch import save_file

from dashinfer_vlm_core import hookimpl
from dashinfer_vlm_core.errors import InvalidParameter
from dashinfer_vlm_core.media import Grid, Image
from dashinfer_vlm_core.media.frame_sampling import VideoSamplingPolicy
from dashinfer_vlm_core.models.interface import Expansion, GridShape, Patches, Placeholder
from dashinfer_vlm_core.models.patches import frames_shape
from dashinfer_vlm_core.models.spec import ModelSpec, PixelSpec, Profile, TokenSpec
from dashinfer_vlm_core.models.weights import Weights
from dashinfer_vlm_core.text_spec import AttentionSpec, LayerSpec, MlpSpec, RotarySpec, TextModelSpec, TextWeightNames
from dashinfer_vlm_core.tokenization.conversation import ConversationFormat
from tests.tiny import IDS, TEMPLATE, write_tokenizer

MODEL_TYPE = "contrast_vl"
PATCH = 8
MAX_SIDE = 48
LEVELS = 2
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB, CONTEXT = 48, 80, 4, 4, 2, 16, 320, 1024
VISION_INNER = 64
THETA = 50.0
EPS = 1e-5
IMAGE, VIDEO = IDS["<|image_pad|>"], IDS["<|video_pad|>"]
START, END, STOP = IDS["<|vision_start|>"], IDS["<|vision_end|>"], IDS["<|im_end|>"]
AXES = tuple(index % 3 for index in range(HEAD_DIM // 2))

NAMES = TextWeightNames(
    embedding="words",
    norm="end.norm",
    head="end.vocabulary",
    layer="text.{}",
    input_norm="before_attention",
    query="attention.query",
    key="attention.key",
    value="attention.value",
    query_norm="attention.query_norm",
    key_norm="attention.key_norm",
    output="attention.out",
    mlp_norm="before_mlp",
    gate="mlp.gate",
    up="mlp.up",
    down="mlp.down",
)


def write_checkpoint(folder: Path) -> Path:
    """Write random weights, large enough for clear best tokens."""
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": MODEL_TYPE, "dtype": "float32"}))
    random = torch.Generator().manual_seed(0)

    def weight(*shape: int, scale: float = 1.5) -> torch.Tensor:
        return torch.randn(shape, generator=random) * scale * shape[-1] ** -0.5

    def norm(width: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(width, generator=random)

    tensors = {
        "stored.words.weight": weight(VOCAB, HIDDEN, scale=0.5 * HIDDEN**0.5),
        "end.norm.weight": norm(HIDDEN),
        "end.vocabulary.weight": weight(VOCAB, HIDDEN),
        "eye.in.weight": weight(VISION_INNER, 3 * PATCH**2),
        "eye.out.weight": weight(HIDDEN * (1 + LEVELS), VISION_INNER),
    }
    for number in range(LAYERS):
        layer = NAMES.layer.format(number)
        tensors |= {
            f"{layer}.{NAMES.input_norm}.weight": norm(HIDDEN),
            f"{layer}.{NAMES.query}.weight": weight(HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.{NAMES.key}.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.{NAMES.value}.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.{NAMES.query_norm}.weight": norm(HEAD_DIM),
            f"{layer}.{NAMES.key_norm}.weight": norm(HEAD_DIM),
            f"{layer}.{NAMES.output}.weight": weight(HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.{NAMES.mlp_norm}.weight": norm(HIDDEN),
            f"{layer}.{NAMES.gate}.weight": weight(INNER, HIDDEN),
            f"{layer}.{NAMES.up}.weight": weight(INNER, HIDDEN),
            f"{layer}.{NAMES.down}.weight": weight(HIDDEN, INNER),
        }
    save_file(tensors, folder / "model.safetensors")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def resized_side(side: int) -> int:
    return max(PATCH, min(side, MAX_SIDE) // PATCH * PATCH)


def resized(image: PILImage.Image) -> PILImage.Image:
    """Round both sides down to patches, at least one patch and at most `MAX_SIDE`."""
    width, height = map(resized_side, image.size)
    return image.resize((width, height), PILImage.Resampling.BILINEAR)


class ImageProcessor:
    def process(self, media):
        if isinstance(media, Image):
            frames = [np.asarray(resized(media.image))]
        else:
            frames = [
                self.frame_resizer(media)(frame) if media.source_size is None else frame for frame in media.frames
            ]
        pixels = np.stack(frames)
        grid = Grid(len(pixels), pixels.shape[1] // PATCH, pixels.shape[2] // PATCH)
        rows = pixels.reshape(grid.t, grid.h, PATCH, grid.w, PATCH, 3).transpose(0, 1, 3, 2, 4, 5)
        rows = np.ascontiguousarray(rows).reshape(grid.patches, 3 * PATCH**2)
        kind = "image" if isinstance(media, Image) else "video"
        return Patches(
            pixels=rows,
            grid=grid,
            tokens=grid.patches,
            kind=kind,
            path=media.path,
            times=() if kind == "image" else media.times,
        )

    def frame_resizer(self, video):
        return lambda frame: np.asarray(resized(PILImage.fromarray(frame)))

    def count_tokens(self, media):
        if isinstance(media, Image) and min(media.image.size) < 2 and media.source_size is None:
            raise InvalidParameter("This image is too thin.", param=media.path)
        height, width = self.size(media)
        return (1 if isinstance(media, Image) else len(media.frames)) * height * width // PATCH**2

    def size(self, media):
        _, height, width = frames_shape(media)
        return resized_side(height), resized_side(width)

    def shape(self, grid):
        if max(grid.h, grid.w) > MAX_SIDE // PATCH:
            raise ValueError(f"its sides are {MAX_SIDE // PATCH} patches at most")
        return GridShape(cells=tuple(grid), width=grid.w * PATCH, height=grid.h * PATCH, frames=grid.t)

    def frames(self, patches):
        t, h, w = patches.grid
        blocks = patches.pixels.reshape(t, h, w, PATCH, PATCH, 3).transpose(0, 1, 3, 2, 4, 5)
        return blocks.reshape(t, h * PATCH, w * PATCH, 3)


class PromptLayout:
    placeholders = (
        Placeholder("image", (IMAGE,)),
        Placeholder("video", (START, VIDEO, END)),
        Placeholder("video", (VIDEO,)),
    )

    def expand(self, item, encode):
        """Expand an image to placeholders, and each frame of a video to its time and placeholders in tags."""
        if item.kind == "image":
            return Expansion(np.full(item.tokens, IMAGE), ((0, item.tokens),))
        ids, spans, frame = [], [], item.grid.h * item.grid.w
        for time in item.times or range(item.grid.t):
            ids += [*encode(f"<{time:.1f} seconds>"), START]
            spans.append((len(ids), frame))
            ids += [*[VIDEO] * frame, END]
        return Expansion(np.array(ids), tuple(spans))

    def positions(self, length, spans, items):
        """Advance text by one on all axes; visual tokens keep their time and advance rows and columns by two."""
        positions = np.tile(np.arange(length), (3, 1))
        for span in spans:
            height, width = items[span.item].grid[1:]
            rows, columns = np.divmod(np.arange(span.length), width)
            positions[0, span.start : span.start + span.length] = span.start
            positions[1, span.start : span.start + span.length] = span.start + 2 * rows
            positions[2, span.start : span.start + span.length] = span.start + 2 * columns
            assert span.length == height * width
        return positions


class VisionEncoder:
    batch_patches = 256
    splits_videos = True

    def __init__(self, spec):
        with Weights(spec.folder, spec.tensor_renames) as weights:
            shapes = {"eye.in.weight": (VISION_INNER, 3 * PATCH**2), "eye.out.weight": (HIDDEN * 3, VISION_INNER)}
            self.inner, self.outer = (
                weights.tensor(name, shape, device="cpu", dtype=torch.float32) for name, shape in shapes.items()
            )

    def encode(self, batch):
        return [torch.relu(torch.from_numpy(item.pixels) / 255 @ self.inner.T) @ self.outer.T for item in batch]

    def adopt(self, rows):
        return torch.from_numpy(rows)


ATTENTION = AttentionSpec(
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    rotary=RotarySpec(theta=THETA, axes=AXES, pairs="neighbors"),
    head_norms=True,
)


class ContrastVL:
    model_types = frozenset({MODEL_TYPE})

    def load_spec(self, folder):
        config = json.loads((folder / "config.json").read_text())
        return ModelSpec(
            folder=folder,
            model_type=MODEL_TYPE,
            max_model_len=CONTEXT,
            dtype=config["dtype"],
            pixels=PixelSpec(patch_size=PATCH, temporal_patch_size=1, merge_size=1),
            tokens=TokenSpec(image=IMAGE, video=VIDEO, stop=(STOP,)),
            text=TextModelSpec(
                hidden_size=HIDDEN,
                layers=(LayerSpec(mixer=ATTENTION, mlp=MlpSpec(intermediate_size=INNER)),) * LAYERS,
                vocab_size=VOCAB,
                max_position_embeddings=CONTEXT,
                norm_eps=EPS,
                tie_word_embeddings=False,
                norm="layer_norm",
                visual_levels=LEVELS,
                weights=NAMES,
            ),
            video=VideoSamplingPolicy(fps=1.0, min_frames=1, max_frames=5, frame_factor=1),
            conversation=ConversationFormat(call_begin="<use>", call_end="</use>"),
            profile=Profile(tools=False),
            tensor_renames=((r"^stored\.", ""),),
        )

    def image_processor(self, spec, config):
        return ImageProcessor()

    def prompt_layout(self, spec):
        return PromptLayout()

    def load_vision_encoder(self, spec, config, kernels, lora=None):
        return VisionEncoder(spec)


@hookimpl
def register_model_families(register):
    register(ContrastVL())
