"""Load a checkpoint's tokenizer: directly from `tokenizer.json`, else with transformers from older files.

transformers also parses `tokenizer.json` and rebuilds it: including its import, this takes 2 s for a vocabulary of
152,000 tokens, instead of 0.3 s.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import CheckpointError

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""The files that a tokenizer, and its chat templates, are read from."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CheckpointTokenizer:
    """A checkpoint's tokenizer with its special tokens and chat templates.

    Attributes:
        backend: encodes and decodes, without truncation or padding.
        special_tokens_map: special tokens by the names that chat templates use: `eos_token`, `pad_token`.
        chat_templates: chat templates in the tokenizer's configuration by name; a single one is named "default".
        used_transformers: whether transformers read it, which may also read other files.
    """

    backend: tokenizers.Tokenizer
    special_tokens_map: Mapping[str, str]
    chat_templates: Mapping[str, str]
    used_transformers: bool = False


class TokenizerCache:
    """Keeps the tokenizers that it has read. Safe to use from any thread.

    Parsing one holds the interpreter for a quarter of a second, in which the streams of other models stop.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[tuple[str, str], ...], CheckpointTokenizer] = {}

    def read(self, folder: Path) -> CheckpointTokenizer:
        """Return the tokenizer of a checkpoint; one of equal files is parsed once, unless with transformers.

        Raises as `read_tokenizer`.
        """
        try:
            files = tuple((name, _digest(folder / name)) for name in _FILES if (folder / name).is_file())
        except OSError as error:
            raise _unreadable(folder, error) from error
        if files in self._kept:
            return self._kept[files]
        read = read_tokenizer(folder)
        if not read.used_transformers:
            self._kept[files] = read
        return read


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"The tokenizer in {folder} cannot be read ({error}); it needs a valid tokenizer.json.")


def read_tokenizer(folder: Path) -> CheckpointTokenizer:
    """Read the tokenizer of a checkpoint.

    Raises:
        CheckpointError: the folder has no tokenizer, or it cannot be read.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        # transformers would create an empty one
        raise CheckpointError(f"{folder} has no tokenizer.json: copy or download the checkpoint again.")
    try:
        read = _read_tokenizer_json(folder) or _load_with_transformers(folder)
    except Exception as error:  # tokenizers raises nothing narrower
        raise _unreadable(folder, error) from error
    read.backend.no_truncation()
    read.backend.no_padding()
    return read


def _read_tokenizer_json(folder: Path) -> CheckpointTokenizer | None:
    """Read `tokenizer.json`; return None if other files define tokens that it lacks."""
    if not (folder / "tokenizer.json").is_file():
        return None
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    older = (folder / "added_tokens.json", folder / "special_tokens_map.json")
    if "added_tokens_decoder" not in config and any(map(Path.is_file, older)):
        return None
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if not _matches_config(backend, config):
        return None
    return CheckpointTokenizer(
        backend=backend,
        special_tokens_map=_special_tokens_map(config),
        chat_templates=_chat_templates(config.get("chat_template")),
    )


def _matches_config(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> bool:
    added = backend.get_added_tokens_decoder()
    configured = config.get("added_tokens_decoder", {})
    special = {token.content for token in added.values() if token.special}
    return special.issuperset(_special_tokens(config)) and all(
        (token := added.get(int(index))) is not None
        and (token.content, token.special) == (entry["content"], entry.get("special", False))
        for index, entry in configured.items()
    )


def _special_tokens_map(config: Mapping[str, Any]) -> dict[str, str]:
    # Keys that end in `_token` may also be numbers or flags.
    return {
        key: _content(value)
        for key, value in config.items()
        if key.endswith("_token") and (isinstance(value, str) or (isinstance(value, Mapping) and "content" in value))
    }


def _special_tokens(config: Mapping[str, Any]) -> Iterator[str]:
    yield from _special_tokens_map(config).values()
    for key in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(key) or ()
        yield from map(_content, extra.values() if isinstance(extra, Mapping) else extra)


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _chat_templates(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, Mapping):
        return {str(name): str(text) for name, text in value.items()}
    return {str(item["name"]): str(item["template"]) for item in value}


def _load_with_transformers(folder: Path) -> CheckpointTokenizer:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return CheckpointTokenizer(
        backend=tokenizer.backend_tokenizer,
        special_tokens_map={
            name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)
        },
        chat_templates=_chat_templates(tokenizer.chat_template),
        used_transformers=True,
    )
