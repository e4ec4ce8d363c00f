"""The `options` of requests of Ollama's API, and how long a model stays loaded.

| Option | In the chat request |
|---|---|
| `temperature`, `top_k`, `top_p`, `min_p`, `presence_penalty`, `frequency_penalty`, `stop` | the same |
| `seed` | `seed`; -1 selects a random one |
| `num_predict` | `max_tokens`; -1 and -2 are the rest of the context |
| `repeat_penalty` | `repetition_penalty` |
| those of `IgnoredOptions` | nothing |
| those of `REJECTED_OPTIONS` | an error |
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from .base import LARGEST, Array, RequestModel, StringOrArray, Text
from .fields import RejectedFields, reject_fields
from .request import REST_OF_CONTEXT
from .validation_errors import invalid

_NO_LIMIT = (-1, -2)
"""Values of `num_predict` for no limit, and for the rest of the context, which are the same here."""

_RANDOM_SEED = -1

REJECTED_OPTIONS: RejectedFields = {
    "repeat_last_n": ((-1, 64), "Penalties consider all tokens. Remove it."),
    "typical_p": ((1, 1.0), "Use `options.min_p` or `options.top_p`."),
}
"""64, the default of `repeat_last_n`, is what Ollama's clients send if they send all options."""

SAME_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop", "seed")
"""Options with the name of a field of chat requests."""

OPTION_RENAMES = (
    ("max_tokens", "options.num_predict"),
    ("repetition_penalty", "options.repeat_penalty"),
    *((name, f"options.{name}") for name in SAME_OPTIONS),
)
"""Fields of chat requests, and what they are from."""

_DURATION = re.compile(r"[+-]?(0|((\d+(\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h))+)", re.ASCII)


def _check_duration(text: str) -> str:
    if len(text) > 64 or not _DURATION.fullmatch(text):
        raise ValueError('must be a duration with its unit, such as "5m", or a number of seconds')
    return text


KeepAlive: TypeAlias = Annotated[
    Annotated[float, Tag("number")] | Annotated[str, AfterValidator(_check_duration), Tag("string")],
    Discriminator(lambda value: "string" if isinstance(value, str) else "number"),
]
"""A duration of Go, or a number of seconds; below 0 for ever."""


def is_zero(duration: float | str | None) -> bool:
    """Return whether a model is to be unloaded at once."""
    return not re.search("[1-9]", duration) if isinstance(duration, str) else duration == 0


class IgnoredOptions(RequestModel):
    """Options without effect: how Ollama loads a model, which is an option of the server here, and options that Ollama
    had in earlier versions and ignores."""

    draft_num_predict: int | None = None
    main_gpu: int | None = None
    num_batch: int | None = None
    num_ctx: int | None = None
    num_gpu: int | None = None
    num_keep: int | None = None
    num_thread: int | None = None
    use_mmap: bool | None = None

    embedding_only: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    low_vram: bool | None = None
    mirostat: int | None = None
    mirostat_eta: float | None = None
    mirostat_tau: float | None = None
    numa: bool | None = None
    penalize_newline: bool | None = None
    tfs_z: float | None = None
    use_mlock: bool | None = None
    vocab_only: bool | None = None


class OllamaOptions(IgnoredOptions):
    """Sampling parameters. The chat request that they become checks their ranges."""

    _accepted_fields: ClassVar[Collection[str]] = REJECTED_OPTIONS.keys()

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    seed: int | None = None
    stop: StringOrArray[Text, Array[Text]] | None = None
    num_predict: Annotated[int, Field(ge=-2, le=LARGEST)] | None = None

    @model_validator(mode="after")
    def _check(self) -> OllamaOptions:
        reject_fields(self.model_extra or {}, REJECTED_OPTIONS, prefix="options.")
        if self.num_predict == 0:
            raise invalid("options.num_predict", "must be at least 1, or -1 for no limit; got 0.")
        return self

    def to_chat(self) -> dict[str, Any]:
        """Return fields of a chat request."""
        return {name: getattr(self, name) for name in SAME_OPTIONS} | {
            "max_tokens": REST_OF_CONTEXT if self.num_predict in _NO_LIMIT else self.num_predict,
            "repetition_penalty": self.repeat_penalty,
            "seed": None if self.seed == _RANDOM_SEED else self.seed,
            "stop": self.stop or None,
        }
