"""The head of a checkpoint for multi-token prediction (MTP; arXiv:2412.19437, section 2.2)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dashinfer_vlm_core.kernels.types import DecoderLayers, ForwardBatch, Kernels, Linear, LMHead, Norm


class MtpHead(NamedTuple):
    """A `DraftHead` that reads the hidden states after the final norm, or those that it returned.

    Attributes:
        kernels: the kernels of its layers.
        eps: epsilon of the norms.
        embedding_norm: the norm of the next token's embedding.
        hidden_norm: the norm of the hidden state, which the model's final norm was applied to before.
        fc: the projection of both, concatenated, to the hidden size.
        layers: its only layer.
        norm: the norm of its hidden states.
        lm_head: the output layer of the model.
    """

    kernels: Kernels
    eps: float
    embedding_norm: Norm
    hidden_norm: Norm
    fc: Linear
    layers: DecoderLayers
    norm: Norm
    lm_head: LMHead

    def project(self, hidden: Tensor) -> Tensor:
        return hidden

    def embed(self, token_ids: Tensor) -> None:
        """See `DraftHead`; it uses the model's table."""

    def forward(self, embeddings: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute normalized hidden states; see `DraftHead`."""
        parts = self._normalize(embeddings, self.embedding_norm), self._normalize(hidden, self.hidden_norm)
        return self._normalize(self.layers(self.fc(torch.cat(parts, dim=-1)), batch), self.norm)

    def argmax(self, x: Tensor) -> Tensor | None:
        return self.lm_head.argmax(x)

    def logits(self, x: Tensor) -> Tensor:
        return self.lm_head(x)

    def _normalize(self, x: Tensor, norm: Norm) -> Tensor:
        return self.kernels.norm(x, norm.weight, norm.bias, self.eps)
