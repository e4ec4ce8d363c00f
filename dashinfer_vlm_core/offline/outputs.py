"""What comes back for each prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..engine.chat_pipeline import Generation
from ..errors import DashInferVLMError

if TYPE_CHECKING:
    from openai.types import CompletionUsage
    from openai.types.chat.chat_completion import Choice
    from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One answer.

    Attributes:
        index: counts the answers of a prompt.
        text: the answer, without what ended it.
        token_ids: the answer's tokens, the one that ended it included.
        finish_reason: `stop`, or `length` where the tokens ran out.
        logprobs: one entry for each token of the text, as in OpenAI's answers; None unless they were asked for.
    """

    index: int = 0
    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    logprobs: tuple[ChatCompletionTokenLogprob, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """What became of one prompt.

    Attributes:
        request_id: numbers the prompts of one `VLM`.
        prompt: the prompt as it was given, if it was text.
        prompt_token_ids: what the model read; each picture and video is a run of placeholders there.
        outputs: the answers; none where there is an error.
        usage: tokens counted as OpenAI does; None where there is an error.
        error: why there is no answer.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...] = ()
    outputs: tuple[CompletionOutput, ...] = ()
    usage: CompletionUsage | None = None
    error: DashInferVLMError | None = None


def to_request_output(request_id: str, prompt: str | None, found: Generation) -> RequestOutput:
    answers = zip(found.completion.choices, found.token_ids, strict=True)
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=found.prompt_token_ids,
        outputs=tuple(_output(choice, token_ids) for choice, token_ids in answers),
        usage=found.completion.usage,
    )


def _output(choice: Choice, token_ids: tuple[int, ...]) -> CompletionOutput:
    assert choice.finish_reason in {"stop", "length"}  # no prompt here offers tools, and nothing is filtered
    listed = choice.logprobs.content if choice.logprobs else None
    return CompletionOutput(
        index=choice.index,
        text=choice.message.content or "",
        token_ids=token_ids,
        finish_reason="length" if choice.finish_reason == "length" else "stop",
        logprobs=None if listed is None else tuple(listed),
    )
