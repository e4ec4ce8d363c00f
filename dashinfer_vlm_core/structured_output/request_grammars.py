"""Requests to compiled grammars, in separate threads: schemas of one client do not delay the prompts of others."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from ..concurrency.fair_slots import FairSlots
from ..errors import DeadlineExceeded, InvalidParameter
from ..protocol import ChatRequest
from ..protocol.client import current_client
from ..protocol.name_log import NameLog
from .grammar.rules import Rules, Steps
from .grammar_compiler import GrammarCompiler, LLGuidanceMatcher
from .output_grammar import OutputGrammar, grammar_for_request

if TYPE_CHECKING:
    import tokenizers

    from ..models.spec import ModelSpec

THREADS = max(1, (os.cpu_count() or 1) // 2)
"""How many grammars of one client are compiled at a time; other clients have one more thread together.

Compilation holds the interpreter lock for milliseconds at a time: the other processors are for the requests.
"""

COMPILE_SECONDS = 30.0
"""How long a request waits for its grammar, including those before it."""

MAX_LOGGED_PARTS = 8
"""Maximum number of parts that are logged for one request."""

_LOG = NameLog(
    logging.getLogger(__name__),
    "Schemas without `strict` have parts that cannot be guaranteed, which are ignored: %s.",
    "Further parts of schemas that cannot be guaranteed are not logged.",
)


class RequestGrammars:
    """Compiles the grammars that requests need.

    Args:
        tokenizer: a byte-level tokenizer.
        spec: the model's specification.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, spec: ModelSpec) -> None:
        self._compiler = GrammarCompiler(tokenizer, spec)
        self._spec = spec
        self._slots = FairSlots(THREADS + 1)
        self._threads = ThreadPoolExecutor(THREADS + 1, thread_name_prefix="dashinfer-vlm-grammar")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def compile(
        self, request: ChatRequest, opens_reasoning: Callable[[ChatRequest], bool]
    ) -> LLGuidanceMatcher | None:
        """Return the grammar that the response has to follow; None if it is unconstrained.

        Args:
            request: the request.
            opens_reasoning: returns whether the prompt of a request ends with the tag that begins reasoning.

        Raises:
            InvalidParameter: a schema or an expression is invalid, too complex, or cannot be guaranteed.
            DeadlineExceeded: it takes longer than `COMPILE_SECONDS`.
        """
        if request.output_constraint is None and not request.callable_tools:
            return None
        work = _Compilation(request, self._spec, self._compiler, opens_reasoning)
        try:
            with anyio.move_on_after(COMPILE_SECONDS):
                async with self._slots.slot(current_client.get().id, limit=THREADS):
                    return await asyncio.get_running_loop().run_in_executor(self._threads, work.run)
            raise DeadlineExceeded(
                f"The output format was not compiled within {COMPILE_SECONDS:g} seconds. Make its schemas simpler, or"
                " try again later."
            )
        finally:
            work.canceled.set()


@dataclass(frozen=True, slots=True)
class _Compilation:
    """The compilation of one request's grammar; it ends at its next step once `canceled` is set."""

    request: ChatRequest
    spec: ModelSpec
    compiler: GrammarCompiler
    opens_reasoning: Callable[[ChatRequest], bool]
    canceled: threading.Event = field(default_factory=threading.Event)

    def run(self) -> LLGuidanceMatcher:
        reasons = self.opens_reasoning(self.request)
        grammar = self._build(reasons=reasons, is_widest=False)
        _check_end(self.request, grammar.param)
        try:
            compiled = self._compile(grammar)
        except InvalidParameter:  # the parts compile, but are too complex together
            widest = self._build(reasons=reasons, is_widest=True)
            if widest.widened == grammar.widened:
                raise
            grammar = widest
            compiled = self._compile(grammar)
        _LOG.log(grammar.widened[:MAX_LOGGED_PARTS])
        return compiled

    def _build(self, *, reasons: bool, is_widest: bool) -> OutputGrammar:
        rules = Rules(self.compiler.compiles, Steps(self._check))
        spec = self.spec
        return grammar_for_request(
            self.request, spec.conversation, spec.coordinates, rules=rules, reasons=reasons, is_widest=is_widest
        )

    def _compile(self, grammar: OutputGrammar) -> LLGuidanceMatcher:
        self._check()
        return self.compiler.compile(grammar.rules, grammar.start, param=grammar.param)

    def _check(self) -> None:
        if self.canceled.is_set():
            raise CancelledError


def _check_end(request: ChatRequest, param: str) -> None:
    if request.ignore_eos:
        raise InvalidParameter(
            "`ignore_eos` would continue after the end that the output format requires."
            f" Remove `ignore_eos` or `{param.partition('.')[0]}`.",
            param="ignore_eos",
        )
