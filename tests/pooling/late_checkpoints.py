"""Random ColQwen models in their published layouts, and transformers as the reference.

The prompts are those of the processors of transformers (ColQwen2), colpali-engine (ColQwen2.5) and Tomoro (ColQwen3).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.checkpoint_files import write_json
from tests.qwen3_vl.tiny_qwen3 import write_checkpoint as write_qwen3_vl
from tests.tiny import write_checkpoint, write_qwen2_5_vl

PAD = "<|endoftext|>"
IMAGE = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>"
QUERIES = {
    "colqwen2": f"Query: {{}}{PAD * 10}\n",
    "colqwen2_5": f"Query: {{}}{PAD * 10}",
    "colqwen3": f"{{}}{PAD * 10}",
}
DOCUMENTS = {"colqwen2": "{}", "colqwen2_5": "{}", "colqwen3": f"{{}}{PAD * 10}"}
SIZES = {"colqwen2": 128, "colqwen2_5": 128, "colqwen3": 320}


def write_colqwen2(folder: Path) -> Path:
    """Write a random model in transformers' layout: `vlm.` before the names, and `vlm_config`."""
    base = write_checkpoint(folder)
    tensors = load_file(folder / "model.safetensors")
    _save(
        folder, {f"vlm.{name}": tensor for name, tensor in _nested(tensors)} | _projection("embedding_proj_layer", 128)
    )
    config = json.loads((base / "config.json").read_text())
    fields = {"architectures": ["ColQwen2ForRetrieval"], "model_type": "colqwen2", "embedding_dim": 128}
    write_json(folder / "config.json", {**fields, "dtype": config.pop("dtype"), "vlm_config": config})
    return folder


def write_colqwen2_5(folder: Path) -> Path:
    """Write a random model in colpali-engine's layout: the files of Qwen2.5-VL without its output layer."""
    write_qwen2_5_vl(folder)
    tensors = load_file(folder / "model.safetensors")
    _save(folder, dict(_nested(tensors)) | _projection("custom_text_proj", 128))
    edit(folder / "config.json", architectures=["ColQwen2_5"])
    return folder


def write_colqwen3(folder: Path) -> Path:
    """Write a random model in Tomoro's layout: `vlm.` before the names of Qwen3-VL, and `model_type` colqwen3."""
    write_qwen3_vl(folder)
    tensors = load_file(folder / "model.safetensors")
    _save(
        folder, {f"vlm.{name}": tensor for name, tensor in tensors.items()} | _projection("embedding_proj_layer", 320)
    )
    edit(folder / "config.json", architectures=["ColQwen3"], model_type="colqwen3", embed_dim=320)
    return folder


WRITERS = {"colqwen2": write_colqwen2, "colqwen2_5": write_colqwen2_5, "colqwen3": write_colqwen3}
BASES = {"colqwen2": write_checkpoint, "colqwen2_5": write_qwen2_5_vl, "colqwen3": write_qwen3_vl}


def edit(file: Path, **fields: Any) -> None:
    write_json(file, json.loads(file.read_text()) | fields)


def _nested(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors without the output layer, by their names in transformers' model without a head."""
    for name, tensor in tensors.items():
        if not name.startswith("lm_head."):
            yield re.sub(r"^model\.(language_model\.)?(?!visual)", "language_model.", name), tensor


def _save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def _projection(name: str, size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return {
        f"{name}.weight": torch.randn(size, 64, generator=generator) / 8,
        f"{name}.bias": torch.randn(size, generator=generator) / 4,
    }


class LateReference:
    """Embeddings of the tokens of a prompt, with the model that a ColQwen model extends."""

    def __init__(self, name: str, base: Path, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.name = name
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        self.images = Qwen2VLImageProcessorPil.from_pretrained(base)
        self.model = AutoModelForImageTextToText.from_pretrained(base, dtype=dtype).eval().model
        tensors = load_file(folder / "model.safetensors")
        self.weight, self.bias = (
            next(tensor for name, tensor in tensors.items() if "_proj" in name and name.count(".") == 1 and end in name)
            for end in ("weight", "bias")
        )

    def query(self, text: str) -> torch.Tensor:
        """Return float32 [tokens, size], with rows of length 1."""
        return self.embed(QUERIES[self.name].format(text))

    def document(self, content: str | Image.Image, text: str = "") -> torch.Tensor:
        """Return the embeddings of a text or an image, the latter with an additional text."""
        if isinstance(content, str):
            return self.embed(DOCUMENTS[self.name].format(content))
        return self.embed(IMAGE.replace("image.", f"image. {text}") if text else IMAGE, content)

    def embed(self, prompt: str, image: Image.Image | None = None) -> torch.Tensor:
        return self._embed(**self.inputs(prompt, image))

    def embed_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return self._embed(input_ids=ids[None])

    @torch.no_grad()
    def _embed(self, **inputs: torch.Tensor) -> torch.Tensor:
        self.model.rope_deltas = None
        hidden = self.model(**inputs).last_hidden_state[0]
        return F.normalize(F.linear(hidden, self.weight.to(hidden), self.bias.to(hidden)).float(), dim=-1)

    def inputs(self, prompt: str, image: Image.Image | None = None) -> dict[str, torch.Tensor]:
        pixels: dict[str, torch.Tensor] = {}
        if image:
            pixels = dict(self.images(images=[image], return_tensors="pt"))
            prompt = prompt.replace("<|image_pad|>", "<|image_pad|>" * (pixels["image_grid_thw"].prod().item() // 4))
        ids = torch.tensor([self.tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        kinds = (ids == self.model.config.image_token_id).long()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds, **pixels}

    def score(self, query: torch.Tensor, document: torch.Tensor) -> float:
        return (query @ document.T).max(dim=1).values.sum().item()
