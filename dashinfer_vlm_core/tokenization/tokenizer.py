"""A checkpoint's tokenizer: `tokenizer.json` as it stands, else what transformers makes of the older files.

transformers takes apart `tokenizer.json` too and builds it anew: with its import that takes 2 s for a vocabulary of
152,000 tokens, in place of 0.3 s.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CheckpointTokenizer:
    """What a checkpoint says of its text.

    Attributes:
        backend: encodes and decodes; cuts nothing off and pads nothing.
        names: special tokens as chat templates name them: `eos_token`, `pad_token`.
        templates: chat templates in the tokenizer's configuration, by name; the only one is "default".
    """

    backend: tokenizers.Tokenizer
    names: Mapping[str, str]
    templates: Mapping[str, str]


def read_tokenizer(folder: Path) -> CheckpointTokenizer:
    """Read the tokenizer of a checkpoint.

    Raises:
        CheckpointError: the folder has none, or none that can be read.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        # transformers would make an empty one
        raise CheckpointError(f"{folder} has no tokenizer.json: copy or download the checkpoint again.")
    try:
        read = _as_it_stands(folder) or _by_transformers(folder)
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(
            f"{folder} has no tokenizer that can be read ({error}); it needs tokenizer.json."
        ) from error
    read.backend.no_truncation()
    read.backend.no_padding()
    return read


def _as_it_stands(folder: Path) -> CheckpointTokenizer | None:
    """None where other files say more of the tokens than `tokenizer.json`."""
    if not (folder / "tokenizer.json").is_file():
        return None
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if "added_tokens_decoder" not in config and any(
        (folder / name).is_file() for name in ("added_tokens.json", "special_tokens_map.json")
    ):
        return None
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if not _holds(backend, config):
        return None
    return CheckpointTokenizer(backend=backend, names=_names(config), templates=_templates(config.get("chat_template")))


def _holds(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> bool:
    """Whether the tokenizer has every token that `tokenizer_config.json` adds, and takes it for what that says."""
    added = backend.get_added_tokens_decoder()
    stated = config.get("added_tokens_decoder", {})
    special = {token.content for token in added.values() if token.special}
    return special.issuperset(_special(config)) and all(
        (token := added.get(int(index))) is not None
        and (token.content, token.special) == (says["content"], says.get("special", False))
        for index, says in stated.items()
    )


def _names(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens that have a name of their own there; numbers and switches may be called alike."""
    return {
        key: _content(value)
        for key, value in config.items()
        if key.endswith("_token") and (isinstance(value, str) or (isinstance(value, Mapping) and "content" in value))
    }


def _special(config: Mapping[str, Any]) -> Iterator[str]:
    yield from _names(config).values()
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(key) or ()
        listed: Iterable[Any] = more.values() if isinstance(more, Mapping) else more
        yield from map(_content, listed)


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _templates(stated: Any) -> dict[str, str]:
    """From the forms in which `tokenizer_config.json` has them: one text, or a list of named ones."""
    if stated is None:
        return {}
    if isinstance(stated, str):
        return {"default": stated}
    if isinstance(stated, Mapping):
        return {str(name): str(text) for name, text in stated.items()}
    return {str(item["name"]): str(item["template"]) for item in stated}


def _by_transformers(folder: Path) -> CheckpointTokenizer:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return CheckpointTokenizer(
        backend=tokenizer.backend_tokenizer,
        names={name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)},
        templates=_templates(tokenizer.chat_template),
    )
