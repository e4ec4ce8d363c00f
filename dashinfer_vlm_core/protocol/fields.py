"""What becomes of every field of OpenAI's request: each is in exactly one of three groups."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

HONOURED = frozenset(
    {
        "messages", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p",
        "frequency_penalty", "presence_penalty", "stop", "seed", "logprobs", "top_logprobs", "logit_bias", "n",
        "response_format", "tools", "tool_choice", "parallel_tool_calls",
    }
)  # fmt: skip
"""They shape the answer here as they do there."""

NO_EFFECT = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
)
"""By their definition they do not change the answer: labels, and hints to a cache."""

NO_AUDIO = "These models neither hear nor speak: leave it out."
_NO_FUNCTIONS = "It is outdated: write `tools` and `tool_choice`."
_NO_GRAMMAR = "Leave it out, and write `response_format`: a JSON schema can say the same."
_NO_TEMPLATE = "The chat template is the server's: leave it out."

REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
        # OpenAI's. To each field the values that ask for nothing, and the next step for whoever sends another.
        "audio": ((), NO_AUDIO),
        "function_call": (("none",), _NO_FUNCTIONS),
        "functions": (([],), _NO_FUNCTIONS),
        "modalities": ((["text"],), NO_AUDIO),
        "moderation": ((), "Nothing is moderated here: leave it out."),
        "prediction": ((), "Predicted output is not used here: leave it out."),
        "reasoning_effort": (("none",), "These models do not reason before they answer: leave it out."),
        "service_tier": (("auto", "default"), 'There is one tier: leave it out, or write "auto".'),
        "store": ((False,), "Answers are not stored here: leave it out."),
        "verbosity": (("medium",), "Length is not steered here: leave it out, and ask for it in the prompt."),
        "web_search_options": ((), "Nothing is searched here: leave it out."),
        # Other servers'. They would change the answer there, so that ignoring them here would deceive.
        "add_generation_prompt": ((True,), _NO_TEMPLATE),
        "allowed_token_ids": ((), "Leave it out, and use `logit_bias` on the other tokens."),
        "bad_words": (([],), "Leave it out, and use `logit_bias` on their tokens."),
        "best_of": ((1,), "Answers are not ranked here: leave it out, and write `n`."),
        "chat_template": ((), _NO_TEMPLATE),
        "chat_template_kwargs": (({},), _NO_TEMPLATE),
        "continue_final_message": ((False,), _NO_TEMPLATE),
        "echo": ((False,), "The prompt is not repeated in the answer: leave it out."),
        "guided_choice": ((), _NO_GRAMMAR),
        "guided_grammar": ((), _NO_GRAMMAR),
        "guided_json": ((), _NO_GRAMMAR),
        "guided_regex": ((), _NO_GRAMMAR),
        "include_stop_str_in_output": ((False,), "The answer ends before the stop string: leave it out."),
        "length_penalty": ((1, 1.0), "It belongs to beam search, which is not done here: leave it out."),
        "logits_processors": (([],), "No code of a request is run: leave it out."),
        "min_p": ((0, 0.0), "Leave it out, and use `top_p` or `top_k`."),
        "prompt_logprobs": ((), "Only tokens of the answer have log probabilities: leave it out, and use `logprobs`."),
        "skip_special_tokens": ((True,), "Special tokens are never shown: leave it out."),
        "structured_outputs": ((), _NO_GRAMMAR),
        "truncate_prompt_tokens": (
            (),
            "Prompts are never cut short in silence: leave it out, and shorten the messages.",
        ),
        "use_beam_search": ((False,), "Leave it out; at temperature 0 the likeliest token is taken."),
    }
)
"""They cannot be honoured: refused by name, unless their value asks for nothing."""

REFUSED_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "input_audio": NO_AUDIO,
        "audio_url": NO_AUDIO,
        "file": "Send pictures as `image_url` parts, and text as `text` parts.",
    }
)
"""Types of content parts that OpenAI's clients can send and these models cannot take."""

REFUSED_IN_MESSAGES: Mapping[str, str] = MappingProxyType(
    {"audio": NO_AUDIO, "function_call": "It is outdated: write `tool_calls`."}
)
"""Fields of a message that say what the model would never get to see."""
