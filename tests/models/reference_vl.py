"""A reference implementation of `contrast_vl` in plain PyTorch: one request at a time, no cache, one pass per token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.models import contrast_vl as model


class Reference:
    """Generates greedy completions of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.tensors = load_file(folder / "model.safetensors")
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def generate(self, parts: list, count: int) -> list[int]:
        """Generate `count` tokens; parts are texts, PIL images, and videos as lists of (seconds, PIL image)."""
        ids, positions, visual = self.prompt(parts)
        output_ids: list[int] = []
        for _ in range(count):
            following = range(max(map(max, positions)) + 1, max(map(max, positions)) + 1 + len(output_ids))
            all_positions = [[*axis, *following] for axis in positions]
            output_ids.append(self.next_token([*ids, *output_ids], all_positions, visual))
        return output_ids

    def prompt(self, parts: list):
        """Return token ids, positions on three axes, and (index, rows) of each visual token."""
        ids: list[int] = []
        visual: dict[int, torch.Tensor] = {}
        axes: list[tuple[int, int, int]] = []

        def text(words: str) -> None:
            for token in self.tokenizer.encode(words, add_special_tokens=False).ids:
                axes.append((len(ids),) * 3)
                ids.append(token)

        def add_image(image: Image.Image, token: int) -> None:
            image = model.resized(image)
            start, pixels = len(ids), np.asarray(image)
            for row in range(image.height // model.PATCH):
                for column in range(image.width // model.PATCH):
                    y, x = row * model.PATCH, column * model.PATCH
                    visual[len(ids)] = self.embed_patch(pixels[y : y + model.PATCH, x : x + model.PATCH])
                    axes.append((start, start + 2 * row, start + 2 * column))
                    ids.append(token)

        text("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n")
        for part in parts:
            if isinstance(part, str):
                text(part)
            elif isinstance(part, list):
                for seconds, frame in part:
                    text(f"<{seconds:.1f} seconds>")
                    text("<|vision_start|>")
                    add_image(frame, model.VIDEO)
                    text("<|vision_end|>")
            else:
                text("<|vision_start|>")
                add_image(part, model.IMAGE)
                text("<|vision_end|>")
        text("<|im_end|>\n<|im_start|>assistant\n")
        return ids, list(zip(*axes, strict=True)), visual

    def embed_patch(self, patch: np.ndarray) -> torch.Tensor:
        """Return the rows of a patch, [levels + 1, hidden]."""
        pixels = torch.from_numpy(patch.astype(np.float32).reshape(-1)) / 255
        inner = F.relu(F.linear(pixels, self.tensors["eye.in.weight"]))
        return F.linear(inner, self.tensors["eye.out.weight"]).view(1 + model.LEVELS, model.HIDDEN)

    def next_token(self, ids: list[int], positions: list[list[int]], visual: dict[int, torch.Tensor]) -> int:
        x = self.tensors["stored.words.weight"][ids].clone()
        for index, rows in visual.items():
            x[index] = rows[0]
        angles = self.angles(positions)
        for number in range(model.LAYERS):
            layer = model.NAMES.layer.format(number)
            x = x + self.attention(self.norm(x, f"{layer}.{model.NAMES.input_norm}"), layer, angles)
            x = x + self.mlp(self.norm(x, f"{layer}.{model.NAMES.mlp_norm}"), layer)
            if number < model.LEVELS:
                for index, rows in visual.items():
                    x[index] += rows[1 + number]
        return int(F.linear(self.norm(x[-1:], "end.norm"), self.tensors["end.vocabulary.weight"]).argmax())

    def angles(self, positions: list[list[int]]) -> torch.Tensor:
        """Return the rotary angles, [tokens, head_dim / 2]."""
        columns = [
            torch.tensor(positions[axis]) * model.THETA ** (-2 * index / model.HEAD_DIM)
            for index, axis in enumerate(model.AXES)
        ]
        return torch.stack(columns, dim=1)

    def attention(self, x: torch.Tensor, layer: str, angles: torch.Tensor) -> torch.Tensor:
        names = model.NAMES
        query, key, value = (
            F.linear(x, self.tensors[f"{layer}.{name}.weight"]).view(len(x), -1, model.HEAD_DIM)
            for name in (names.query, names.key, names.value)
        )
        query = self.rotated(self.norm(query, f"{layer}.{names.query_norm}"), angles)
        key = self.rotated(self.norm(key, f"{layer}.{names.key_norm}"), angles)
        groups = model.HEADS // model.KV_HEADS
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * model.HEAD_DIM**-0.5
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, value).flatten(1)
        return F.linear(mixed, self.tensors[f"{layer}.{names.output}.weight"])

    def mlp(self, x: torch.Tensor, layer: str) -> torch.Tensor:
        gate, up, down = (
            self.tensors[f"{layer}.{name}.weight"] for name in (model.NAMES.gate, model.NAMES.up, model.NAMES.down)
        )
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], None, model.EPS)

    def rotated(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Rotate pairs of neighboring columns."""
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
