"""transformers' Qwen2-VL with tiny random weights: the reference for the decoder."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.decoders import DecodeRequest, VisualSpan
from dashinfer_vlm_core.media import Grid
from dashinfer_vlm_core.models.interface import VisualTokens
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec
from dashinfer_vlm_core.protocol.sampling import Sampling
from dashinfer_vlm_torch.decoder import TorchDecoder
from tests.kernels import selector

VOCAB = 96
IMAGE, VIDEO, STOP = 90, 91, 95


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The parameters that differ between the random models."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    sections: tuple[int, int, int] = (2, 3, 3)
    tied: bool = True
    layers: int = 2


SHAPES = {
    "gqa-tied": Shape(),
    "mha-untied": Shape(heads=2, kv_heads=2, tied=False),
    "one-kv-head-128": Shape(heads=2, kv_heads=1, head_dim=128, sections=(16, 24, 24)),
    "64-untied": Shape(heads=2, kv_heads=1, head_dim=64, sections=(8, 12, 12), tied=False),
}


def save_random_model(folder: Path, shape: Shape) -> Qwen2VLForConditionalGeneration:
    """Save weights large enough for clear best tokens, and rotary frequencies that matter in short prompts."""
    hidden = shape.heads * shape.head_dim
    rope = {"rope_type": "default", "mrope_section": list(shape.sections), "rope_theta": 100.0}
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": VOCAB,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "max_position_embeddings": 4096,
            "rope_parameters": rope,
            "tie_word_embeddings": shape.tied,
            "bos_token_id": None,
            "eos_token_id": STOP,
        },
        vision_config={"depth": 1, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "hidden_size": hidden},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=92,
        vision_end_token_id=93,
        tie_word_embeddings=shape.tied,
        eos_token_id=STOP,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(std=0.5 if "bias" in name or "embed" in name else 1.5 * weight.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = STOP
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        '{"min_pixels": 3136, "max_pixels": 50176, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,'
        ' "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}'
    )
    return model


class AheadDecoder(TorchDecoder):
    """Launches steps ahead, or not, on any device."""

    schedules_ahead: bool | None = None

    def _load(self):
        runner = super()._load()
        if self.schedules_ahead is not None:
            runner.computes_in_background = self.schedules_ahead
        return runner


@dataclass(frozen=True)
class Oracle:
    """One random model, in transformers and on disk."""

    folder: Path
    model: Qwen2VLForConditionalGeneration

    def decoder(self, *, schedules_ahead=None, **options) -> TorchDecoder:
        """Return the project's decoder with the same weights, not started."""
        options = {"device": "cpu", "dtype": "float32", "kv_cache_mib": 64} | options
        config = EngineConfig(**options)
        decoder = AheadDecoder(read_spec(self.folder), config, selector(config))
        decoder.schedules_ahead = schedules_ahead
        return decoder

    @property
    def width(self) -> int:
        return self.model.config.text_config.hidden_size

    @torch.no_grad()
    def inputs(self, request: DecodeRequest) -> torch.Tensor:
        """Return the embeddings including visual tokens, [1, length, hidden_size]."""
        embeds = self.model.get_input_embeddings()(torch.from_numpy(request.token_ids))
        for span in request.spans:
            embeds[span.start : span.stop] = span.tokens.embedding
        return embeds[None]

    @torch.no_grad()
    def logits(self, request: DecodeRequest, completion: list[int]) -> torch.Tensor:
        """Return the logits of `completion`, [tokens, vocab], teacher-forced in one pass without a cache."""
        tail = self.model.get_input_embeddings()(torch.tensor(completion[:-1], dtype=torch.long))[None]
        start = request.positions.max() + 1
        positions = np.concatenate(
            (request.positions, np.tile(np.arange(start, start + len(completion) - 1), (3, 1))), axis=1
        )
        out = self.model(
            inputs_embeds=torch.cat((self.inputs(request), tail), 1), position_ids=torch.from_numpy(positions)[:, None]
        )
        return out.logits[0, len(request.token_ids) - 1 :].float()

    @torch.no_grad()
    def greedy(self, request: DecodeRequest) -> list[int]:
        """Return transformers' greedy completion, with its own cache, token by token."""
        cache, embeds, completion = DynamicCache(), self.inputs(request), []
        positions, position = torch.from_numpy(request.positions)[:, None], int(request.positions.max())
        while len(completion) < request.sampling.max_tokens and completion[-1:] != [STOP]:
            out = self.model(inputs_embeds=embeds, position_ids=positions, past_key_values=cache, use_cache=True)
            completion.append(int(out.logits[0, -1].argmax()))
            position += 1
            embeds = self.model.get_input_embeddings()(torch.tensor([completion[-1:]]))
            positions = torch.full((3, 1, 1), position)
        return completion


def text(*ids: int, **sampling) -> DecodeRequest:
    """Return a text request."""
    positions = np.tile(np.arange(len(ids)), (3, 1))
    return DecodeRequest(
        id="text",
        token_ids=np.array(ids),
        positions=positions,
        sampling=Sampling(**{"temperature": 0, "max_tokens": 24} | sampling),
    )


def prompt(content: int, length: int, **sampling) -> DecodeRequest:
    """Return a random text request."""
    return text(*np.random.default_rng(content).integers(0, 90, length).tolist(), **sampling)


def visual(*parts: int | tuple[int, int, int], width: int, content: int = 0, **sampling) -> DecodeRequest:
    """Return a request of parts in order: a number of text tokens, or the grid (t, h, w) of merged visual tokens of an
    image or video.

    Positions follow the published rule: after an image, text continues at the largest position + 1.
    """
    random = np.random.default_rng(content)
    ids, positions, spans, after = [], [], [], 0
    for part in parts:
        if isinstance(part, int):
            ids += random.integers(0, 90, part).tolist()
            positions.append(np.tile(np.arange(after, after + part), (3, 1)))
        else:
            size = int(np.prod(part))
            rows = torch.from_numpy(random.normal(size=(size, width), scale=0.5).astype(np.float32))
            name = hashlib.sha256(rows.numpy().tobytes()).digest()
            tokens = VisualTokens(
                kind="image" if part[0] == 1 else "video",
                path="",
                grid=Grid(part[0], 2 * part[1], 2 * part[2]),
                tokens=size,
                digest=name,
                embedding=rows,
            )
            spans.append(VisualSpan(start=len(ids), tokens=tokens))
            ids += [IMAGE if part[0] == 1 else VIDEO] * size
            positions.append(np.indices(part).reshape(3, -1) + after)
        after = positions[-1].max() + 1
    return DecodeRequest(
        id="visual",
        token_ids=np.array(ids),
        positions=np.concatenate(positions, axis=1),
        spans=tuple(spans),
        sampling=Sampling(**{"temperature": 0, "max_tokens": 24} | sampling),
    )


def next_turn(request: DecodeRequest, output_ids: list[int], message: DecodeRequest) -> DecodeRequest:
    """Return the request, its completion and the next message."""
    length, after = len(request.token_ids) + len(output_ids), int(request.positions.max()) + 1
    output_positions = np.tile(np.arange(after, after + len(output_ids)), (3, 1))
    positions = (request.positions, output_positions, message.positions + after + len(output_ids))
    spans = (replace(span, start=span.start + length) for span in message.spans)
    return replace(
        request,
        token_ids=np.concatenate((request.token_ids, output_ids, message.token_ids)),
        positions=np.concatenate(positions, axis=1),
        spans=(*request.spans, *spans),
    )


def with_embedding(request: DecodeRequest, embedding: torch.Tensor, **changes) -> DecodeRequest:
    """Return the request with other rows in its first span."""
    first, *rest = request.spans
    return replace(request, spans=(replace(first, tokens=replace(first.tokens, embedding=embedding, **changes)), *rest))


async def collect(decoder: TorchDecoder, request: DecodeRequest) -> list:
    return [token async for token in decoder.decode(request)]


async def one_by_one(decoder: TorchDecoder, requests: list[DecodeRequest]) -> list:
    return [await collect(decoder, request) for request in requests]


async def at_once(decoder: TorchDecoder, requests: list[DecodeRequest]) -> list:
    return await asyncio.gather(*(collect(decoder, request) for request in requests))


def ids(tokens) -> list[int]:
    return [token.id for token in tokens]


def assert_equal(found: list, expected: list, *, tolerance: float = 1e-4) -> None:
    """Assert equal tokens, and log probabilities up to `tolerance`."""
    for one, other in zip(found, expected, strict=True):
        assert ids(one) == ids(other)
        assert [token.logprob for token in one] == pytest.approx([token.logprob for token in other], abs=tolerance)
        for token, twin in zip(one, other, strict=True):
            assert dict(token.top_logprobs) == pytest.approx(dict(twin.top_logprobs), abs=tolerance)


@asynccontextmanager
async def decoding(decoder: TorchDecoder):
    """Start and close a decoder."""
    await decoder.start()
    try:
        yield decoder
    finally:
        await decoder.close()
