"""The fields of OpenAI's request: each is supported, ignored or rejected; and rejected fields of other programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from .validation_errors import show, unsupported

RejectedFields: TypeAlias = Mapping[str, tuple[tuple[object, ...], str]]
"""Names that are not supported, each with the values that have no effect, as null has none, and the next step for other
values."""

SUPPORTED_FIELDS = frozenset(
    {
        "messages", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p",
        "frequency_penalty", "presence_penalty", "stop", "seed", "logprobs", "top_logprobs", "logit_bias", "n",
        "reasoning_effort", "response_format", "tools", "tool_choice", "parallel_tool_calls",
    }
)  # fmt: skip
"""Fields with the same effect as in OpenAI's API."""

IGNORED_FIELDS = frozenset(
    {
        "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        "guided_decoding_backend",
    }
)  # fmt: skip
"""Fields that by definition do not affect the completion: labels, hints for caches, and vLLM's choice of a library."""

RETURNED_FIELDS = frozenset(
    {
        # OpenAI's types, and what its client adds to them.
        "annotations", "caller", "created_by", "id", "index", "logprobs", "name", "namespace", "parsed",
        "parsed_arguments", "phase", "prompt_cache_breakpoint", "refusal", "status",
        # Other servers, LiteLLM and LangChain.
        "additional_kwargs", "cache_control", "citations", "context", "example", "extra_content", "extras", "format",
        "metadata", "prefix", "provider_specific_fields", "reasoning", "reasoning_content", "reasoning_details",
        "reasoning_items", "response_metadata", "signature", "thinking", "thinking_blocks", "usage_metadata",
        # Tools.
        "allowed_callers", "defer_loading", "output_schema",
    }
)  # fmt: skip
"""Fields without effect in messages, parts, items and tools, most of which clients copy from responses."""

NO_AUDIO = "The models do not support audio. Remove it."
_NO_FUNCTIONS = "It is deprecated. Use `tools` and `tool_choice`."
_NO_GRAMMAR = "Use `response_format` with a JSON schema."
NO_CUSTOM_GRAMMAR = "Grammars cannot be sent. Use a JSON schema, `regex` or `choice` of `structured_outputs`."
_NO_TEMPLATE = "Requests cannot change the engine's chat template. Remove it."

REJECTED_FIELDS: RejectedFields = {
    # OpenAI's fields.
    "audio": ((), NO_AUDIO),
    "function_call": (("none",), _NO_FUNCTIONS),
    "functions": (([],), _NO_FUNCTIONS),
    "modalities": ((["text"],), NO_AUDIO),
    "moderation": ((), "Moderation is not available. Remove it."),
    "prediction": ((), "Predicted outputs are not available. Remove it."),
    "service_tier": (("auto", "default"), 'There is only one tier. Remove it, or use "auto".'),
    "store": ((False,), "Completions are not stored. Remove it."),
    "verbosity": (
        ("medium",),
        "The models cannot control verbosity. Remove it, and describe the desired length in the prompt.",
    ),
    "web_search_options": ((), "Web search is not available. Remove it."),
    # Fields of other servers. There they affect the completion, so that ignoring them here would be misleading.
    "add_generation_prompt": ((True,), _NO_TEMPLATE),
    "allowed_token_ids": ((), _NO_GRAMMAR),
    "bad_words": (([],), "Use `logit_bias` on their tokens."),
    "best_of": ((1,), "Completions are not ranked. Use `n`."),
    "chat_template": ((), _NO_TEMPLATE),
    "continue_final_message": ((False,), _NO_TEMPLATE),
    "echo": ((False,), "Completions do not include the prompt. Remove it."),
    "guided_grammar": ((), NO_CUSTOM_GRAMMAR),
    "guided_whitespace_pattern": ((), "JSON has at most one space after commas and colons. Remove it."),
    "length_penalty": ((1, 1.0), "It applies to beam search, which is not available. Remove it."),
    "logits_processors": (([],), "Requests cannot run code. Remove it."),
    "prompt_logprobs": ((), "Log probabilities are available for completion tokens only. Use `logprobs`."),
    "truncate_prompt_tokens": ((), "Prompts are never truncated. Shorten the messages."),
    "use_beam_search": ((False,), "Use `temperature` 0 for greedy decoding."),
}
REJECTED_PARTS: Mapping[str, str] = {
    "input_audio": NO_AUDIO,
    "audio_url": NO_AUDIO,
}
"""Types of content parts that OpenAI's clients can send, but that the models do not support."""

REJECTED_IN_MESSAGES: Mapping[str, str] = {"audio": NO_AUDIO, "function_call": "It is deprecated. Use `tool_calls`."}
"""Fields of a message whose contents the model would not receive."""


def reject_fields(given: Mapping[str, object], rejected: RejectedFields, *, prefix: str = "") -> None:
    """Raise UnsupportedParameter for the first rejected field whose value has an effect.

    Args:
        given: the values by their names.
        rejected: the rejected names.
        prefix: what the path of each field begins with.
    """
    for name in rejected:
        if reason := rejection(name, given.get(name), rejected):
            raise unsupported(prefix + name, reason)


def rejection(name: str, value: object, rejected: RejectedFields) -> str | None:
    """Return why a value is rejected, as the predicate of a sentence; None if it has no effect."""
    neutral, next_step = rejected[name]
    if value is None or any(type(value) is type(other) and value == other for other in neutral):
        return None
    return f"is not supported, got {show(value)}. {next_step}"
