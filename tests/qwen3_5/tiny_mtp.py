"""A small Qwen3.5 with a head for multi-token prediction that predicts well, and the head in transformers' layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer

from tests.qwen3_vl.tiny_qwen3 import fill_matrix

from .tiny_qwen3_5 import write_checkpoint

DAMPED = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")


class ReferenceHead(nn.Module):
    """The head, composed of transformers' layers, in float32."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        layer_class = Qwen3_5MoeDecoderLayer if hasattr(config, "num_experts") else Qwen3_5DecoderLayer
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, eps=config.rms_norm_eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([layer_class(config, config.layer_types.index("full_attention"))])
        self.norm = Qwen3_5RMSNorm(size, eps=config.rms_norm_eps)

    def forward(self, embeddings: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Return [tokens, hidden_size] of a whole sequence: embeddings of the next tokens, and hidden states."""
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], dim=-1))
        mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
        return self.norm(self.layers[0](x[None], position_embeddings=rotary, attention_mask=mask)[0])


class Reference:
    """The checkpoint in `folder` in transformers, with its head."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(folder).eval()
        self.head = ReferenceHead(self.model.config.text_config).eval()
        weights = load_file(folder / "model.safetensors")
        self.head.load_state_dict(
            {name.removeprefix("mtp."): weight for name, weight in weights.items() if name.startswith("mtp.")}
        )

    @torch.no_grad()
    def logits(self, embeddings: Tensor, positions: Tensor, drafted: Tensor) -> Tensor:
        """Return the logits with which the head predicts the token after a sequence and tokens that it has drafted.

        Args:
            embeddings: [length, hidden_size], with those of visual tokens.
            positions: int64 [3, length + drafted tokens].
            drafted: int64, the tokens that it has predicted so far.
        """
        model = self.model.model.language_model
        positions = positions[:, None]
        inputs = torch.cat([embeddings, model.embed_tokens(drafted)])
        length = len(embeddings)
        hidden = model(inputs_embeds=embeddings[None], position_ids=positions[:, :, :length]).last_hidden_state[0, :-1]
        for stop in range(length, len(inputs) + 1):
            rotary = model.rotary_emb(inputs[None], positions[:, :, : stop - 1])
            x = self.head(inputs[1:stop], hidden, rotary)
            hidden = torch.cat([hidden, x[-1:]])
        logits: Tensor = self.model.lm_head(x[-1])
        return logits


def write_mtp_checkpoint(
    folder: Path, *, moe: bool = False, copies: bool = True, damping: float = 0.015, **text: Any
) -> Path:
    """Write a random model whose next token depends mostly on the last one.

    A head that `copies` passes on the embedding of the token that it gets, which predicts the token after that in most
    cases. Another head is random.
    """
    write_checkpoint(folder, moe=moe, fused=False, **text)
    tensors = load_file(folder / "model.safetensors")
    config = AutoModelForImageTextToText.from_pretrained(folder).config.text_config
    torch.manual_seed(1)
    head = ReferenceHead(config)
    with torch.no_grad():
        for weight in head.parameters():
            fill_matrix(weight) if weight.ndim > 1 else weight.normal_(std=0.2)
        if copies:
            size = config.hidden_size
            head.fc.weight[:, :size] = torch.eye(size)
            head.fc.weight[:, size:] *= 0.03
            head.pre_fc_norm_embedding.weight.zero_()
            head.norm.weight.copy_(
                next(tensors[name] for name in tensors if name.endswith("language_model.norm.weight"))
            )
    tensors |= {f"mtp.{name}": weight.detach() for name, weight in head.state_dict().items()}
    for name, weight in tensors.items():
        if name.endswith(DAMPED) and "visual" not in name:
            tensors[name] = damping * weight
        if name.endswith(("lm_head.weight", "embed_tokens.weight")):
            tensors[name] = 4 * weight
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
