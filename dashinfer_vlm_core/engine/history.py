"""Compute a conversation as its next turn will contain it, while no request to any model runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ..decoders import DecodeRequest, VisualSpan
from ..decoders.supervisor import Supervisor
from ..errors import DashInferVLMError
from ..preprocessing.prompt import Prompt, PromptBuilder
from ..protocol import ChatRequest
from ..protocol.messages import Message
from ..protocol.sampling import Sampling
from .admission import CompletionCount
from .inputs import Inputs, place_visual_tokens

logger: logging.Logger = logging.getLogger(__name__)

FOLLOWING_MESSAGE = Message(role="user", content="Hello")
"""The next message of the user. Templates leave out the reasoning of the responses before it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Turn:
    """A turn of a conversation that ended with text.

    Attributes:
        inputs: its request, and what the model got for it.
        decoded: what the decoder got for it.
        output_ids: the tokens of its response.
        response: its response.
    """

    inputs: Inputs
    decoded: DecodeRequest
    output_ids: Sequence[int]
    response: str


class HistoryPrefill:
    """Prefills the response of the last turn as the next one will contain it, if templates render it differently from
    how it was generated, as those do that leave out reasoning.

    It begins when no request has arrived for `IDLE_SECONDS`, and ends when one to another model runs. A few tokens are
    computed at a time, so that a request that arrives waits for these at most. The prefix cache keeps them. Belongs to
    one event loop.

    Args:
        prompts: builds the prompt of the next turn.
        decoder: computes it.
        completions: those of all models that share the processor.
    """

    IDLE_SECONDS: ClassVar[float] = 1.0
    STEP_TOKENS: ClassVar[int] = 64

    def __init__(self, prompts: PromptBuilder, decoder: Supervisor, completions: CompletionCount) -> None:
        self._prompts = prompts
        self._decoder = decoder
        self._completions = completions
        self._task: asyncio.Task[None] | None = None

    def start(self, turn: Turn) -> None:
        """Prefill the history of a turn from now on, unless a request arrives."""
        self.stop()
        self._task = asyncio.create_task(self._run(turn), name="history-prefill")

    def stop(self) -> None:
        """Stop because a request has arrived; what has been computed stays in the prefix cache."""
        if self._task:
            self._task.cancel()

    async def close(self) -> None:
        self.stop()
        if self._task:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, turn: Turn) -> None:
        await asyncio.sleep(self.IDLE_SECONDS)
        try:
            for request in await asyncio.to_thread(lambda: list(self._requests(turn))):
                if self._completions.value:
                    return
                async with contextlib.aclosing(self._decoder.decode(request)) as tokens:
                    async for _ in tokens:
                        pass
        except DashInferVLMError as error:
            logger.debug("The history is not prefilled: %s", error.message)
        except Exception:
            logger.exception("The history could not be prefilled. Requests are not affected.")

    def _requests(self, turn: Turn) -> Iterator[DecodeRequest]:
        """Yield requests for growing parts of the history, none if it is what has been computed already."""
        prompt = self._prompts.build(_next_turn(turn), turn.inputs.items, turn.inputs.coordinates)
        if len(prompt.response_boundaries) < 2:
            return
        end = prompt.response_boundaries[-2]  # of the response; the last one begins the next response
        known = np.concatenate((turn.decoded.token_ids, turn.output_ids))
        length = min(len(known), end)
        (different,) = np.nonzero(known[:length] != prompt.token_ids[:length])
        if not len(different):
            return
        spans = _place_again(turn, prompt)
        start = max(int(different[0]), *(span.stop for span in spans), 0)
        for stop in [*range(start + self.STEP_TOKENS, end, self.STEP_TOKENS), end]:
            yield replace(
                turn.decoded,
                id=f"{turn.decoded.id}-history",
                token_ids=prompt.token_ids[: stop + 1],  # the last token is never taken from the prefix cache
                positions=prompt.positions[:, : stop + 1],
                spans=spans,
                response_boundaries=tuple(index for index in prompt.response_boundaries if index <= stop),
                sampling=Sampling(max_tokens=1),
                grammar=None,
                is_background=True,
            )


def _next_turn(turn: Turn) -> ChatRequest:
    request = turn.inputs.request
    messages = *request.messages, Message(role="assistant", content=turn.response), FOLLOWING_MESSAGE
    return request.model_copy(update={"messages": messages, "max_tokens": 1, "max_completion_tokens": None})


def _place_again(turn: Turn, prompt: Prompt) -> tuple[VisualSpan, ...]:
    given = zip(turn.inputs.prompt.spans, turn.decoded.spans, strict=True)
    visual = {placeholder.item: span.tokens for placeholder, span in given}
    return place_visual_tokens(prompt, visual)
