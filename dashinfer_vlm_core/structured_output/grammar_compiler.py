"""Grammars to token masks with llguidance: bounded in time and size, cached by content.

llguidance computes masks lazily and caches its states, so compilation takes milliseconds. Its limits count work, not
seconds: whether a grammar compiles does not depend on the machine or its load.
"""

from __future__ import annotations

import threading
from hashlib import sha256
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
from cachetools import LRUCache, cachedmethod

from ..errors import DecoderFailed, InvalidParameter
from ..tokenization.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import llguidance
    import numpy.typing as npt
    import tokenizers

    from ..models.spec import ModelSpec
    from .grammar.rules import Rules

MAX_CACHED_GRAMMARS = 64
"""Maximum number of compiled grammars in the cache."""

MAX_CACHED_PATTERNS = 4096
"""Maximum number of grammars of which the cache knows only whether they compile."""

MAX_GRAMMAR_CHARACTERS = 4_000_000

_TOO_COMPLEX = "cannot be compiled within the limits: make it simpler"


def _digest(_compiler: object, text: str, _param: str = "") -> bytes:
    return sha256(text.encode()).digest()  # a text can have megabytes


class LLGuidanceMatcher:
    """The state of one completion in a grammar; implements `GrammarMatcher`."""

    def __init__(self, matcher: llguidance.LLMatcher, *, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed_tokens(self) -> npt.NDArray[np.bool_]:
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise DecoderFailed(
                "The requested output format exceeded the complexity limits during decoding. Make it simpler."
            )
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=self._vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def accept_token(self, token: int) -> None:
        self._matcher.consume_token(token)

    def forced_tokens(self) -> list[int]:
        # llguidance computes the mask of a position from the same tokens: where the grammar allows only one text, the
        # mask allows only the first token of that text as the tokenizer encodes it.
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens

    def count_allowed(self, tokens: Sequence[int]) -> int:
        # On a copy, since an exceeded limit is recorded in the state.
        return int(self._matcher.deep_copy().validate_tokens(list(tokens)))

    def copy(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._matcher.deep_copy(), vocab_size=self._vocab_size)


class GrammarCompiler:
    """Compiles grammars for one tokenizer, with an LRU cache; thread-safe.

    Args:
        tokenizer: a byte-level tokenizer.
        spec: the model's specification; its vocabulary may be larger than the tokenizer's.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, spec: ModelSpec) -> None:
        self._tokenizer = tokenizer
        self._spec = spec
        self._grammars: LRUCache[bytes, LLGuidanceMatcher] = LRUCache(MAX_CACHED_GRAMMARS)
        self._patterns: LRUCache[bytes, bool] = LRUCache(MAX_CACHED_PATTERNS)
        self._lock = threading.Lock()
        self._llg_tokenizer: llguidance.LLTokenizer | None = None

    def compile(self, rules: Rules, start: str, *, param: str) -> LLGuidanceMatcher:
        """Compile a grammar, or return it from the cache.

        Args:
            rules: the grammar's rules.
            start: the rule that a completion follows.
            param: the request field to name in errors.

        Raises:
            InvalidParameter: the grammar exceeds the limits, or a regular expression in it is invalid.
        """
        text = rules.text(start)
        if len(text) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidParameter(f"`{param}` {_TOO_COMPLEX}.", param=param)
        return self._compile(text, param)

    @cachedmethod(attrgetter("_patterns"), key=_digest, lock=attrgetter("_lock"))
    def compiles(self, text: str) -> bool:
        """Return whether the grammar of one regular expression compiles within the limits, and matches a text."""
        matcher = self._matcher(text)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return not matcher.is_error()

    @cachedmethod(attrgetter("_grammars"), key=_digest, lock=attrgetter("_lock"))
    def _compile(self, text: str, param: str) -> LLGuidanceMatcher:
        matcher = self._matcher(text)
        matcher.compute_bitmask()  # the first mask is the slowest, and detects errors that compilation does not
        if matcher.is_error():
            raise InvalidParameter(f"`{param}` {_TOO_COMPLEX}.", param=param)
        return LLGuidanceMatcher(matcher, vocab_size=self._spec.vocab_size)

    def _matcher(self, text: str) -> llguidance.LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            initial_lexer_fuel=500_000,  # 10 ms
            step_lexer_fuel=200_000,  # 15 ms
            max_items_in_row=20_000,
            step_max_items=200_000,  # 10 ms
            max_lexer_states=50_000,  # 100 MB
            max_grammar_size=200_000,
            verbose_errors=False,
        )
        return LLMatcher(self._token_trie(), text, log_level=0, limits=limits)

    def _token_trie(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._llg_tokenizer is None:  # this takes seconds for a large vocabulary
                from llguidance import LLTokenizer, TokenizerWrapper

                self._llg_tokenizer = LLTokenizer(
                    TokenizerWrapper(_TokenizerAdapter(self._tokenizer, self._spec)),
                    n_vocab=self._spec.vocab_size,
                    eos_token=list(self._spec.tokens.stop),
                    slices=LLTokenizer.json_slices(),
                )
            return self._llg_tokenizer


class _TokenizerAdapter:
    """A tokenizer with the interface that llguidance's `TokenizerWrapper` expects."""

    bos_token_id = None

    def __init__(self, tokenizer: tokenizers.Tokenizer, spec: ModelSpec) -> None:
        detokenizer = IncrementalDetokenizer(tokenizer)
        self._tokenizer = tokenizer
        self.eos_token_id = spec.tokens.stop[0]
        self.tokens = [detokenizer.token_bytes(index) for index in range(spec.vocab_size)]
        self.special_token_ids = [index for index in range(spec.vocab_size) if not detokenizer.is_visible(index)]

    def __call__(self, text: bytes) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False).ids
        return ids
