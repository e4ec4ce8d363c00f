"""Random models in the published layout of Qwen3-VL-Embedding and Qwen3-VL-Reranker, and transformers as the
reference, with the pooling of the published code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from benchmarks.checkpoint_files import write_json
from tests.qwen3_vl.oracle import Oracle
from tests.tiny import IDS

YES, NO = 260, 261
EOS = IDS["<|endoftext|>"]
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the"
    ' answer can only be "yes" or "no".'
)
EMBED_INSTRUCTION = "Represent the user's input."
SCORE_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
DOCUMENTS = [f"The {number} {'dogs' if number % 3 else 'cats'} in the rain." for number in range(100)]


def write_embedding(base: Path, folder: Path) -> Path:
    """Copy a checkpoint, and add the files of an embedding model. Its tokenizer appends the token that is pooled."""
    shutil.copytree(base, folder)
    names = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    write_modules(folder, names)
    write_json(folder / "1_Pooling/config.json", {"embedding_dimension": 64, "pooling_mode": "lasttoken"})
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [EOS], "tokens": ["<|endoftext|>"]}},
    }
    write_json(folder / "tokenizer.json", tokenizer)
    return folder


def write_reranker(base: Path, folder: Path) -> Path:
    """Copy a checkpoint, and add the files of a reranker."""
    shutil.copytree(base, folder)
    write_modules(folder, {"": "Transformer", "1_LogitScore": "LogitScore"})
    write_json(folder / "1_LogitScore/config.json", {"true_token_id": YES, "false_token_id": NO})
    return folder


def write_classifier(base: Path, folder: Path, weight: torch.Tensor | None = None) -> Path:
    """Copy a checkpoint in a layout for sequence classification.

    It has the layer `score` in place of the output layer or, without `weight`, the tokens from which vLLM computes it.
    """
    shutil.copytree(base, folder)
    fields: dict[str, Any] = {"architectures": ["Qwen3VLForSequenceClassification"], "num_labels": 1}
    if weight is None:
        vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokens = [vocabulary.id_to_token(NO), vocabulary.id_to_token(YES)]
        fields |= {"classifier_from_token": tokens, "is_original_qwen3_reranker": True}
    else:
        tensors = load_file(folder / "model.safetensors")
        tensors.pop("lm_head.weight", None)
        save_file({**tensors, "score.weight": weight}, folder / "model.safetensors")
    write_json(folder / "config.json", json.loads((folder / "config.json").read_text()) | fields)
    return folder


def write_modules(folder: Path, names: dict[str, str]) -> None:
    rows = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (path, name) in enumerate(names.items())
    ]
    write_json(folder / "modules.json", rows)
    for path in filter(None, names):
        (folder / path).mkdir(exist_ok=True)


class Reference(Oracle):
    """Embeddings and scores of conversations."""

    def embed(self, messages: list[dict[str, Any]], *, instruction: str = EMBED_INSTRUCTION) -> torch.Tensor:
        """Return float32 [hidden_size], of length 1."""
        system = {"role": "system", "content": instruction}
        return F.normalize(self.last_hidden([system, *messages], suffix=[EOS]).float(), dim=-1)

    def length(self, messages: list[dict[str, Any]]) -> int:
        """Return the number of tokens of a prompt for an embedding."""
        system = {"role": "system", "content": EMBED_INSTRUCTION}
        return self.inputs([system, *messages])["input_ids"].shape[1] + 1

    def score(
        self,
        query: Sequence[Any],
        document: Sequence[Any],
        *,
        instruction: str = SCORE_INSTRUCTION,
        weight: torch.Tensor | None = None,
    ) -> float:
        """Return the probability; query and document are content parts, `weight` that of a classifier [1, hidden]."""
        parts = [_text(f"<Instruct>: {instruction}"), _text("<Query>:"), *query, _text("\n<Document>:"), *document]
        messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": parts}]
        head = self.model.lm_head.weight
        logit = self.last_hidden(messages, suffix=[]) @ (head[YES] - head[NO] if weight is None else weight[0])
        return logit.float().sigmoid().item()

    @torch.no_grad()
    def last_hidden(self, messages: list[dict[str, Any]], *, suffix: list[int]) -> torch.Tensor:
        inputs = self.inputs(messages)
        for name, values in {"input_ids": suffix, "attention_mask": [1] * len(suffix)}.items():
            inputs[name] = torch.cat((inputs[name], torch.tensor([values], dtype=torch.long)), dim=1)
        kinds = torch.zeros(1, len(suffix), dtype=torch.long)
        inputs["mm_token_type_ids"] = torch.cat((inputs["mm_token_type_ids"], kinds), dim=1)
        self.model.model.rope_deltas = None
        return self.model.model(**inputs).last_hidden_state[0, -1]


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def cosine(ours: Any, reference: torch.Tensor) -> float:
    return F.cosine_similarity(torch.as_tensor(ours, dtype=torch.float64), reference.double(), dim=-1).min().item()


def ranks(scores: Sequence[float]) -> list[int]:
    """Return the indices of documents, best first; no two of them may be as good as each other."""
    best = sorted(range(len(scores)), key=lambda index: -scores[index])
    assert min(scores[first] - scores[second] for first, second in pairwise(best)) > 0
    return best
