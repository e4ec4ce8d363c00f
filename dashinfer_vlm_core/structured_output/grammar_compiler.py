"""Grammars -> token masks, by llguidance: compiled off the event loop, bounded in time and size, kept by content.

llguidance computes a mask when it is asked for one, and keeps what it learned: so compiling takes milliseconds. Its
limits count work, not seconds: what compiles here today compiles anywhere tomorrow.
"""

from __future__ import annotations

import asyncio
import threading
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
from cachetools import LRUCache

from ..errors import DecoderFailed, InvalidParameter
from ..tokenization.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    import llguidance
    import numpy.typing as npt
    import tokenizers

    from ..models.spec import ModelSpec
    from .grammar import Rules

MAX_GUIDES = 64
"""Compiled grammars that are kept."""

MAX_GRAMMAR_CHARACTERS = 4_000_000

_TOO_HARD = "cannot be compiled within the limits: make it simpler"


class LLGuidanceGrammar:
    """A compiled grammar; implements `decoder.Guide`."""

    def __init__(self, matcher: llguidance.LLMatcher, *, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def new_matcher(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._matcher.deep_copy(), vocab_size=self._vocab_size)


class LLGuidanceMatcher:
    """One answer's way through a grammar; implements `decoder.Walk`."""

    def __init__(self, matcher: llguidance.LLMatcher, *, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed_tokens(self) -> npt.NDArray[np.bool_]:
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise DecoderFailed("The format asked for became too complex within the answer: make it simpler.")
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=self._vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def accept_token(self, token: int) -> None:
        self._matcher.consume_token(token)


class GrammarCompiler:
    """Compiles grammars for one tokenizer, one at a time, and keeps those used last.

    Args:
        tokenizer: of the byte-level kind.
        spec: of the model; its vocabulary may be larger than the tokenizer's.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, spec: ModelSpec) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = spec.vocab_size
        self._stop = list(spec.tokens.stop)
        self._grammars: LRUCache[bytes, LLGuidanceGrammar] = LRUCache(MAX_GUIDES)
        self._lock = threading.Lock()
        self._tokens: llguidance.LLTokenizer | None = None

    def __len__(self) -> int:
        return len(self._grammars)

    async def compile_async(self, rules: Rules, start: str, *, param: str) -> LLGuidanceGrammar:
        """As `compile`, off the event loop."""
        return await asyncio.to_thread(self.compile, rules, start, param=param)

    def compile(self, rules: Rules, start: str, *, param: str) -> LLGuidanceGrammar:
        """The guide of a grammar.

        Args:
            rules: of the grammar.
            start: the rule that an answer follows.
            param: the field to blame.

        Raises:
            InvalidParameter: it exceeds the limits, or a pattern in it is malformed.
        """
        text = rules.text(start)
        if len(text) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidParameter(f"`{param}` {_TOO_HARD}.", param=param)
        key = sha256(text.encode()).digest()
        with self._lock:
            if key not in self._grammars:
                self._grammars[key] = self._compiled(text, rules, param)
            return self._grammars[key]

    def _compiled(self, text: str, rules: Rules, param: str) -> LLGuidanceGrammar:
        matcher = self._matcher(text)
        matcher.compute_bitmask()  # the first mask is the dearest, and finds what compiling leaves for later
        if matcher.is_error():
            raise self._fault(rules, param)
        return LLGuidanceGrammar(matcher, vocab_size=self._vocab_size)

    def _fault(self, rules: Rules, param: str) -> InvalidParameter:
        """What to say of a grammar that does not compile: a pattern is to blame, or the whole."""
        for (field, place), rule in rules.patterns.items():
            if self._is_hard(rules, rule):
                message = (
                    f"`{field or param}` at {place!r} is no regular expression that can be followed, or {_TOO_HARD}."
                )
                return InvalidParameter(message, param=field or param)
        return InvalidParameter(f"`{param}` {_TOO_HARD}.", param=param)

    def _is_hard(self, rules: Rules, rule: str) -> bool:
        matcher = self._matcher(rules.text(rule))
        return bool(matcher.is_error())

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
        return LLMatcher(self._vocabulary(), text, log_level=0, limits=limits)

    def _vocabulary(self) -> llguidance.LLTokenizer:
        """The tokens as a tree; made on first use, which takes seconds for a large vocabulary."""
        if self._tokens is None:
            from llguidance import LLTokenizer, TokenizerWrapper

            tokens = TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size, self._stop[0]))
            slices = LLTokenizer.json_slices()
            self._tokens = LLTokenizer(tokens, n_vocab=self._vocab_size, eos_token=self._stop, slices=slices)
        return self._tokens


class _Vocabulary:
    """What llguidance wants to know of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: tokenizers.Tokenizer, size: int, stop: int) -> None:
        detokenizer = IncrementalDetokenizer(tokenizer)
        self._tokenizer = tokenizer
        self.eos_token_id = stop
        self.tokens = [detokenizer.token_bytes(index) for index in range(size)]
        self.special_token_ids = [index for index in range(size) if not detokenizer.is_visible(index)]

    def __call__(self, text: bytes) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False).ids
        return ids
