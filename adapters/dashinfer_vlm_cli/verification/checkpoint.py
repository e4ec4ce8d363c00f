"""A checkpoint of random weights with the parts of an engine that are verified, random prompts for it, and transformers
as the reference."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image as PILImage
from torch import Tensor
from transformers import AutoModelForImageTextToText

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.decoders import Decoder, DecodeRequest, Sampling, VisualSpan
from dashinfer_vlm_core.kernels.choice import KernelSelector
from dashinfer_vlm_core.media import Image, Video
from dashinfer_vlm_core.models.interface import Patches, PlaceholderSpan, VisionEncoder, VisualTokens
from dashinfer_vlm_core.models.patches import with_digest
from dashinfer_vlm_core.plugins import Registry

from .models import IMAGE, ORDINARY, VIDEO, VISION_END, VISION_START

VIDEO_FPS = 2.0  # transformers' default


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A folder, the device it runs on, and the registry with its family and the decoders."""

    registry: Registry
    device: str
    folder: Path

    @property
    def is_on_cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"

    def config(self, dtype: str, *, decoder: str = "torch", **options: Any) -> EngineConfig:
        """Return the configuration of an engine; models that DashInfer converts are deleted with the checkpoint."""
        if decoder != "torch":
            cache = options["cache_dir"] = self.folder / "cache"
            if not cache.exists():
                cache.mkdir(mode=0o700)
                for environment in EngineConfig().cache_folder.glob("dashinfer-*-cp*"):
                    (cache / environment.name).symlink_to(environment)
        return EngineConfig(model=str(self.folder), device=self.device, dtype=dtype, decoder=decoder, **options)

    def load_encoder(self, config: EngineConfig) -> VisionEncoder:
        kernels = KernelSelector(self.registry.kernels.values(), config)
        spec = self.registry.load_spec(self.folder)
        return self.registry.family_of(self.folder).load_vision_encoder(spec, config, kernels)

    def other_decoders(self) -> dict[str, str]:
        """Return the decoders besides the PyTorch decoder, and why they cannot run; empty if they can."""
        names = self.registry.decoders.keys() - {"torch"}
        if not self.is_on_cuda:
            return dict.fromkeys(names, "it is verified on CUDA only")
        spec = self.registry.load_spec(self.folder)
        supports = {
            name: self.registry.decoder(name).check_support(spec, self.config("auto", decoder=name)) for name in names
        }
        return {name: "" if support.score else support.reason for name, support in supports.items()}

    @asynccontextmanager
    async def decoding(self, config: EngineConfig) -> AsyncIterator[Decoder]:
        """Run the decoder of `config`."""
        kernels = KernelSelector(self.registry.kernels.values(), config)
        decoder = self.registry.decoder(config.decoder).create(self.registry.load_spec(self.folder), config, kernels)
        await decoder.start()
        try:
            yield decoder
        finally:
            await decoder.close()


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """Token ids and positions with images and videos; `name` is for the report."""

    name: str
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    items: tuple[Patches, ...]
    spans: tuple[PlaceholderSpan, ...]

    def request(self, embeddings: Sequence[Tensor], sampling: Sampling) -> DecodeRequest:
        """Return a request for a completion; `embeddings` are the visual tokens of the items."""
        visual = [
            VisualTokens.of(item, rows, digest=item.digest) for item, rows in zip(self.items, embeddings, strict=True)
        ]
        spans = tuple(
            VisualSpan(start=span.start, tokens=visual[span.item], row=span.row, length=span.length)
            for span in self.spans
        )
        return DecodeRequest(
            id=self.name, token_ids=self.token_ids, positions=self.positions, spans=spans, sampling=sampling
        )


class PromptBuilder:
    """Builds prompts of one model; text and pixels are random, and always the same."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        family = checkpoint.registry.family_of(checkpoint.folder)
        spec = family.load_spec(checkpoint.folder)
        self._processor = family.image_processor(spec, EngineConfig())
        self._layout = family.prompt_layout(spec)
        self._random = np.random.default_rng(0)

    def text(self, count: int) -> list[int]:
        tokens: list[int] = self._random.integers(0, ORDINARY, count).tolist()
        return tokens

    def image(self, height: int, width: int) -> Patches:
        image = PILImage.fromarray(self._pixels(height, width))
        return with_digest(self._processor.process(Image(image=image, path="image")))

    def video(self, count: int, height: int, width: int) -> Patches:
        times = tuple(index / VIDEO_FPS for index in range(count))
        video = Video(frames=self._pixels(count, height, width), path="video", times=times, sampled_fps=VIDEO_FPS)
        return with_digest(self._processor.process(video))

    def prompt(self, name: str, *parts: list[int] | Patches) -> Prompt:
        """Concatenate parts: token ids of text, images and videos."""
        ids: list[int] = []
        spans: list[PlaceholderSpan] = []
        items: list[Patches] = []
        for part in parts:
            if isinstance(part, Patches):
                self._append(part, len(items), ids, spans)
                items.append(part)
            else:
                ids += part
        return Prompt(
            name=name,
            token_ids=np.array(ids, np.int64),
            positions=self._layout.positions(len(ids), spans, items),
            items=tuple(items),
            spans=tuple(spans),
        )

    def _append(self, item: Patches, number: int, ids: list[int], spans: list[PlaceholderSpan]) -> None:
        expansion = self._layout.expand(item, _encode)
        # A placeholder of more than one token includes those around the visual tokens.
        is_framed = any(len(each.tokens) > 1 for each in self._layout.placeholders if each.kind == item.kind)
        ids += [*([] if is_framed else [VISION_START]), *_encode(expansion.leading_text)]
        row = 0
        for index, length in expansion.spans:
            spans.append(PlaceholderSpan(start=len(ids) + index, length=length, item=number, row=row))
            row += length
        ids += [*expansion.token_ids.tolist(), *([] if is_framed else [VISION_END])]

    def _pixels(self, *shape: int) -> npt.NDArray[np.uint8]:
        return self._random.integers(0, 256, (*shape, 3), dtype=np.uint8)


def _encode(text: str) -> list[int]:
    # The timestamps of a video.
    return list(map(ord, text))


class Reference:
    """One checkpoint in transformers. Prompts run one at a time, so that no padding is involved."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint.folder, dtype=dtype)
        self._model = model.to(checkpoint.device).eval()
        self._preprocessor = json.loads((checkpoint.folder / "preprocessor_config.json").read_text())
        self._device = checkpoint.device
        self._dtype = dtype
        self._logprobs: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    @torch.inference_mode()
    def vision_tokens(self, items: Sequence[Patches]) -> Tensor:
        """Return [tokens, visual width]."""
        out = self._model.model.visual(*self._pixels(items))
        return torch.cat([out.pooler_output, *(getattr(out, "deepstack_features", None) or ())], dim=1)

    @torch.inference_mode()
    def logprobs(self, prompt: Prompt, completion: Sequence[int]) -> Tensor:
        """Return the log probabilities before each token of `completion`, in one pass without a cache: float32
        [len(completion), vocabulary] on the CPU. They are computed once."""
        key = (prompt.name, tuple(completion))
        if key not in self._logprobs:
            inputs = self._inputs(prompt, [*prompt.token_ids.tolist(), *completion[:-1]])
            logits = self._model(**inputs, use_cache=False).logits[0, len(prompt.token_ids) - 1 :]
            self._logprobs[key] = torch.log_softmax(logits.float(), dim=-1).cpu()
        return self._logprobs[key]

    def _inputs(self, prompt: Prompt, ids: Sequence[int]) -> dict[str, Any]:
        self._model.model.rope_deltas = None  # of the prompt before
        tokens = torch.tensor([ids], device=self._device)
        inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if prompt.items:
            inputs["mm_token_type_ids"] = (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()
        if images := [item for item in prompt.items if item.kind == "image"]:
            inputs["pixel_values"], inputs["image_grid_thw"] = self._pixels(images)
        if videos := [item for item in prompt.items if item.kind == "video"]:
            inputs["pixel_values_videos"], inputs["video_grid_thw"] = self._pixels(videos)
        return inputs

    def _pixels(self, items: Sequence[Patches]) -> tuple[Tensor, Tensor]:
        columns = self._preprocessor["temporal_patch_size"] * self._preprocessor["patch_size"] ** 2
        mean = torch.tensor(self._preprocessor["image_mean"]).repeat_interleave(columns)
        std = torch.tensor(self._preprocessor["image_std"]).repeat_interleave(columns)
        pixels = torch.cat([(torch.from_numpy(item.pixels) / 255 - mean) / std for item in items])
        grids = torch.tensor([item.grid for item in items])
        return pixels.to(self._device, self._dtype), grids.to(self._device)
