"""The outputs of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..engine.observers import RequestStateStats
from ..errors import DashInferVLMError
from ..protocol import LoRARequest
from .batch import BatchResult

if TYPE_CHECKING:
    from openai.types import CompletionUsage
    from openai.types.chat.chat_completion import Choice
    from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One completion.

    Attributes:
        index: the index among the completions of a prompt.
        text: the completion, by default without the stop string or token that ended it. Tool calls are part of it.
        reasoning_content: what a model that reasons wrote before `text`; None if it did not.
        token_ids: the completion's tokens, including the one that ended it.
        finish_reason: `stop`, or `length` if the token limit was reached.
        stop_reason: the stop string or the token of `stop_token_ids` that ended the completion; None for other reasons.
        logprobs: one entry for each token of the text, as in OpenAI's responses; None unless they were requested.
    """

    index: int = 0
    text: str
    reasoning_content: str | None = None
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = None
    logprobs: tuple[ChatCompletionTokenLogprob, ...] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the log probabilities; None unless they were requested."""
        return None if self.logprobs is None else sum(token.logprob for token in self.logprobs)

    def finished(self) -> bool:
        """Return True: outputs are returned when they are complete. vLLM has this method for streams."""
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """The output of one prompt.

    Attributes:
        request_id: the number of the prompt, unique in a `VLM`.
        prompt: the prompt as passed by the caller, if it was text.
        prompt_token_ids: the model's input; each image and video is a sequence of placeholder tokens.
        outputs: the completions; empty in case of an error.
        usage: token counts, as OpenAI counts them; None in case of an error.
        error: why there is no completion; None without an error.
        lora_request: the LoRA adapter of the prompt; None for the model itself.
        metrics: when the prompt was served; None in case of an error.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...] = ()
    outputs: tuple[CompletionOutput, ...] = ()
    usage: CompletionUsage | None = None
    error: DashInferVLMError | None = None
    lora_request: LoRARequest | None = None
    metrics: RequestStateStats | None = None

    @property
    def finished(self) -> bool:
        """True: outputs are returned when they are complete. vLLM has this attribute for streams."""
        return True

    @property
    def num_cached_tokens(self) -> int | None:
        """Number of prompt tokens whose keys and values were cached; None in case of an error."""
        details = self.usage and self.usage.prompt_tokens_details
        return details.cached_tokens if details else None


def to_request_output(
    request_id: str, prompt: str | None, lora_request: LoRARequest | None, result: BatchResult
) -> RequestOutput:
    if isinstance(result, DashInferVLMError):
        return RequestOutput(request_id=request_id, prompt=prompt, error=result, lora_request=lora_request)
    choices = zip(result.completion.choices, result.token_ids, result.stop_reasons, strict=True)
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=result.prompt_token_ids,
        outputs=tuple(_output(*choice) for choice in choices),
        usage=result.completion.usage,
        lora_request=lora_request,
        metrics=result.stats,
    )


def _output(choice: Choice, token_ids: tuple[int, ...], stop_reason: str | int | None) -> CompletionOutput:
    assert choice.finish_reason in {"stop", "length"}  # offline requests have no tools and no content filter
    content = choice.logprobs.content if choice.logprobs else None
    return CompletionOutput(
        index=choice.index,
        text=choice.message.content or "",
        reasoning_content=getattr(choice.message, "reasoning_content", None),
        token_ids=token_ids,
        finish_reason="length" if choice.finish_reason == "length" else "stop",
        stop_reason=stop_reason,
        logprobs=None if content is None else tuple(content),
    )
