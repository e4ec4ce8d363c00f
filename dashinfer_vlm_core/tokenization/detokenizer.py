"""Incremental detokenization: token ids -> text, one token at a time."""

from __future__ import annotations

import codecs

import tokenizers.decoders

from ..errors import CheckpointError


def _bytes_by_character() -> dict[str, int]:
    """Return the alphabet of byte-level vocabularies: the inverse of GPT-2's `bytes_to_unicode`.

    Printable bytes map to themselves, all others, in order, to the characters from 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES_BY_CHARACTER = _bytes_by_character()


class IncrementalDetokenizer:
    """Converts token ids to text, one token at a time, in linear time.

    `tokenizers.decoders.DecodeStream` produces the same text, but decodes everything it holds back again at each step,
    which is quadratic for a sequence of invalid bytes, and it does not return a token's bytes, which `logprobs` needs.

    Args:
        tokenizer: a byte-level tokenizer.
        skip_special_tokens: whether special tokens are left out of the text.

    Attributes:
        position: characters returned so far.

    Raises:
        CheckpointError: the tokenizer is not byte-level.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, skip_special_tokens: bool = True) -> None:
        if not isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel):
            raise CheckpointError("The tokenizer of this checkpoint is not byte-level (`decoder` in tokenizer.json).")
        self.position: int = 0
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().items()
        self._skipped = {index for index, token in added if token.special and skip_special_tokens}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes; empty for ids that the model has but the tokenizer does not."""
        token = self._tokenizer.id_to_token(token_id) or ""
        try:
            return bytes(_BYTES_BY_CHARACTER[character] for character in token)
        except KeyError:  # an added token, which is plain text
            return token.encode()

    def is_visible(self, token_id: int) -> bool:
        """Whether a token contributes to the text."""
        return token_id not in self._skipped and bool(self.token_bytes(token_id))

    def feed(self, token_id: int) -> str:
        """Return the characters that this token completes; invalid bytes become U+FFFD."""
        return self._decode(b"" if token_id in self._skipped else self.token_bytes(token_id))

    def flush(self) -> str:
        """Return the remaining text: U+FFFD if the last character is incomplete."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        self.position += len(text)
        return text
