"""Read which tokens end a response from a checkpoint's JSON files. This module does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .json_fields import GENERATION, JsonFields, read_fields

_BEGINNING = 1 << 20
"""Bytes of a tokenizer.json in which the added tokens are looked for first; they take a tenth of that."""


def read_stop_tokens(folder: Path, configs: Sequence[JsonFields]) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of `generation_config.json`, else of the first of `configs` that has some, and
    that of the tokenizer.

    Fine-tunes such as Chandra OCR 2 name only `<|endoftext|>` in the first two, but end a turn with the tokenizer's.

    Raises:
        CheckpointError: they are missing or are not token ids.
    """
    generation = folder / GENERATION
    sources = [*([read_fields(generation)] if generation.exists() else ()), *configs]
    fields = next((fields for fields in sources if fields.get("eos_token_id") is not None), configs[0])
    value = fields.get("eos_token_id")
    tokens = value if isinstance(value, list) else [value]
    if not tokens or not all(type(token) is int and token >= 0 for token in tokens):
        fields.fail_value("eos_token_id", "must be token ids")
    return tuple(dict.fromkeys([*tokens, *_tokenizer_end(folder)]))


def _tokenizer_end(folder: Path) -> list[int]:
    """Return the id of the tokenizer's `eos_token`; none if its files do not have it, or cannot be read, which loading
    the tokenizer reports."""
    try:
        config = _read(folder / "tokenizer_config.json")
        # transformers 5 writes the ids only to the larger file.
        added = config.get("added_tokens_decoder") or {
            token["id"]: token for token in _added_tokens(folder / "tokenizer.json")
        }
        name = config.get("eos_token")
        text = name["content"] if isinstance(name, dict) else name
        return [int(index) for index, token in added.items() if token["content"] == text]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _added_tokens(file: Path) -> Sequence[Mapping[str, Any]]:
    """Read `added_tokens` of a tokenizer.json; if it comes first, as usual, without the vocabulary, which takes 0.15 s
    in which the streams of other models stop."""
    with file.open("rb") as opened:
        beginning = opened.read(_BEGINNING).decode(errors="ignore")
    listed = beginning.partition('"added_tokens":')[2].lstrip()
    try:
        tokens: Sequence[Mapping[str, Any]] = json.JSONDecoder().raw_decode(listed)[0]
    except ValueError:
        tokens = _read(file)["added_tokens"]
    return tokens


def _read(file: Path) -> Mapping[str, Any]:
    values: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return values
