"""Token ids -> text, one by one."""

from __future__ import annotations

import codecs

import tokenizers.decoders

from ..errors import CheckpointError


def _byte_of_character() -> dict[str, int]:
    """The alphabet in which byte-level vocabularies are written: GPT-2's `bytes_to_unicode`, read backwards.

    Printable bytes stand for themselves, all others, in order, for the characters from 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


class IncrementalDetokenizer:
    """Token ids to text, one by one, in time linear in the text.

    `tokenizers.decoders.DecodeStream` gives the same text, but decodes all it holds back again at each step, which is
    quadratic on a run of invalid bytes, and it does not tell the bytes of a token, which `logprobs` needs.

    Attributes:
        position: characters given so far.

    Raises:
        CheckpointError: the tokenizer is not byte-level.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        if not isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel):
            raise CheckpointError("The tokenizer of this checkpoint is not byte-level (`decoder` in tokenizer.json).")
        self.position: int = 0
        self._tokenizer = tokenizer
        self._special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for; nothing, for ids that the model has and the tokenizer has not."""
        token = self._tokenizer.id_to_token(token_id) or ""
        try:
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        except KeyError:  # an added token is written as it is
            return token.encode()

    def is_visible(self, token_id: int) -> bool:
        """Whether a token has a part in the text."""
        return token_id not in self._special and bool(self.token_bytes(token_id))

    def feed(self, token_id: int) -> str:
        """The characters that this token completes; invalid bytes become U+FFFD, special tokens nothing."""
        return self._decode(b"" if token_id in self._special else self.token_bytes(token_id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD if the last character was not completed."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        self.position += len(text)
        return text
