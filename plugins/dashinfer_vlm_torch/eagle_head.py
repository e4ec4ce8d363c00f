"""An EAGLE-3 head (arXiv:2503.01840), composed of a kernel set's basic operations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dashinfer_vlm_core.errors import CheckpointError
from dashinfer_vlm_core.kernels.kv_cache import attend_cached, write_rows
from dashinfer_vlm_core.kernels.types import Attention, DecoderLayer, ForwardBatch, Kernels, Linear, LMHead, Mlp, Norm
from dashinfer_vlm_core.models.eagle import NUM_HIDDEN_STATES, EagleSpec
from dashinfer_vlm_core.text_spec import AttentionSpec

from .text_model_reader import TextModelReader

DRAFT_TO_TARGET = "d2t"
HIDDEN_NORM = "midlayer.hidden_norm"


class EagleHead(NamedTuple):
    """A `DraftHead` that reads the hidden states of three layers, or those that it returned.

    Attributes:
        kernels: the kernels of its layer.
        spec: the attention of its layer.
        eps: epsilon of the norms.
        fc: the projection of the hidden states of three layers to the hidden size.
        hidden_norm: the norm of hidden states; `input_norm` of `layer` is that of embeddings.
        layer: its layer, whose query, key and value projections read both, concatenated.
        adds_normalized: as in `EagleSpec`.
        norm: the norm before its output layer.
        lm_head: its output layer.
        token_ids: int64, the token of each row of `lm_head`; None if these are all tokens.
        vocab_size: number of tokens of the model.
        table: its embeddings; None if they are the model's.
    """

    kernels: Kernels
    spec: AttentionSpec
    eps: float
    fc: Linear
    hidden_norm: Norm
    layer: DecoderLayer
    adds_normalized: bool
    norm: Norm
    lm_head: LMHead
    token_ids: Tensor | None
    vocab_size: int
    table: Tensor | None

    def project(self, hidden: Tensor) -> Tensor:
        return self.fc(hidden)

    def embed(self, token_ids: Tensor) -> Tensor | None:
        return None if self.table is None else torch.nn.functional.embedding(token_ids, self.table)

    def forward(self, embeddings: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute hidden states before the norm; see `DraftHead`."""
        mixer = self.layer.mixer
        mlp = self.layer.mlp
        assert isinstance(mixer, Attention)
        assert isinstance(mlp, Mlp)
        normed = self._normalize(hidden, self.hidden_norm)
        qkv = mixer.qkv(torch.cat([self._normalize(embeddings, self.layer.input_norm), normed], dim=-1))
        qkv = qkv.view(len(hidden), -1, self.spec.head_dim)
        heads = self.spec.num_heads
        self.kernels.rotate_(qkv[:, : heads + self.spec.num_kv_heads], batch.cos, batch.sin)
        cache = batch.cache_layer(0)
        write_rows(cache, batch.slots, qkv[:, heads:])
        x = (normed if self.adds_normalized else hidden)[batch.last]
        if len(x):
            queries = qkv[:, :heads][batch.last]
            mixer.output.add_to(x, attend_cached(self.kernels, queries, cache, batch.last_spans))
            mlp.down.add_to(x, mlp.gate_up(self._normalize(x, self.layer.mlp_norm)))
        return x

    def argmax(self, x: Tensor) -> Tensor | None:
        rows = self.lm_head.argmax(self._normalize(x, self.norm))
        return rows if rows is None or self.token_ids is None else self.token_ids[rows]

    def logits(self, x: Tensor) -> Tensor:
        logits = self.lm_head(self._normalize(x, self.norm))
        if self.token_ids is None:
            return logits
        return logits.new_full((len(x), self.vocab_size), -torch.inf).index_copy_(1, self.token_ids, logits)

    def _normalize(self, x: Tensor, norm: Norm) -> Tensor:
        return self.kernels.norm(x, norm.weight, norm.bias, self.eps)


def read_eagle_head(reader: TextModelReader, head: EagleSpec, *, vocab_size: int) -> EagleHead:
    """Read a head with a reader of its checkpoint whose spec is `head.text`.

    Args:
        reader: the reader; `quantization` is that of its layer and its output layer.
        head: the configuration.
        vocab_size: number of tokens of the model.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or a file is damaged.
    """
    hidden = head.text.hidden_size
    attention = head.text.attention
    layer = reader.layer(0, attention_inputs=2 * hidden)
    names = reader.weights.names
    table = reader.tensor("embed_tokens.weight", vocab_size, hidden) if "embed_tokens.weight" in names else None
    return EagleHead(
        kernels=reader.kernels,
        spec=attention,
        eps=head.text.norm_eps,
        fc=reader.linear("fc", hidden, NUM_HIDDEN_STATES * hidden),
        hidden_norm=reader.norm(HIDDEN_NORM, hidden),
        layer=layer,
        adds_normalized=head.adds_normalized,
        norm=reader.norm(head.text.weights.norm, hidden),
        lm_head=reader.head(torch.empty(0)),
        token_ids=_token_ids(reader, head, vocab_size),
        vocab_size=vocab_size,
        table=table,
    )


def _token_ids(reader: TextModelReader, head: EagleSpec, vocab_size: int) -> Tensor | None:
    count = head.text.vocab_size
    if DRAFT_TO_TARGET not in reader.weights.names:
        if count != vocab_size:
            raise CheckpointError(
                f"{head.folder} has no tensor {DRAFT_TO_TARGET!r}, which the `draft_vocab_size` {count} of its"
                " config.json requires. Copy or download the checkpoint again.",
                param="speculative_model",
            )
        return None
    offsets = reader.weights.tensor(DRAFT_TO_TARGET, (count,), device=reader.device, dtype=torch.int64)
    ids = offsets + torch.arange(count, device=reader.device)
    if ids.min() < 0 or ids.max() >= vocab_size or len(set(ids.tolist())) < count:
        raise CheckpointError(
            f"{head.folder}: the tensor {DRAFT_TO_TARGET!r} does not map {count} rows to as many of the model's"
            f" {vocab_size} tokens. Set `speculative_model` to a head that was trained for this model.",
            param="speculative_model",
        )
    return ids
