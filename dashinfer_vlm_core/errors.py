"""Every error that this package raises on purpose.

    DashInferVLMError
    ├── RequestError                 the request is wrong; sending it again unchanged cannot work
    │   ├── InvalidParameter         a value has the wrong type, range or shape
    │   ├── UnsupportedParameter     a known field that this engine or decoder cannot honour
    │   ├── ContextLengthExceeded    prompt plus answer do not fit the model
    │   ├── ModelNotFound            no model of that name is served here
    │   └── MediaError               a picture or video of the request
    │       ├── MediaRefused         a policy forbids it: scheme, address, folder
    │       ├── MediaTooLarge        a cap on bytes, pixels, frames or items
    │       ├── MediaUnreachable     it could not be fetched
    │       └── MediaUndecodable     its bytes are no picture or video we read
    ├── EngineError                  the request is right, the engine could not serve it now
    │   ├── QueueFull                too many requests wait; try again after `retry_after` seconds
    │   ├── DeadlineExceeded         the answer was not there in time
    │   ├── EngineClosed             the engine was not started, or was closed
    │   └── DecoderFailed            the decoder died or broke an invariant
    └── SetupError                   what the operator has to mend before a request can be served
        ├── ConfigError              an option of EngineConfig, the command line or the environment
        ├── CheckpointError          a model folder that cannot be read
        ├── MissingDependency        an extra that is not installed
        ├── AccessDenied             the server that was asked wants another key
        └── PluginError              a plugin that cannot be loaded or used

Errors state *kinds*; HTTP numbers, LiteLLM classes and exit codes belong to the adapters. Each message says what was
wrong and what to do next, and never holds paths, addresses or a library's own text when the request came from somebody
else.
"""

from __future__ import annotations


class DashInferVLMError(Exception):
    """Base of all errors here.

    Attributes:
        message: one or two sentences for a person: what is wrong, and the next step.
        param: the request field in OpenAI's notation, such as `messages[1].content[0]`, when one is to blame.
        code: a stable word for programs, such as `context_length_exceeded`.
        retryable: whether the same request may succeed later.
    """

    code: str | None = None
    retryable = False

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code


class RequestError(DashInferVLMError):
    """The request is wrong; sending it again unchanged cannot work."""


class InvalidParameter(RequestError):
    """A value has the wrong type, range or shape."""

    code: str = "invalid_value"


class UnsupportedParameter(RequestError):
    """A known field that this engine or decoder cannot honour, so that it is refused rather than ignored."""

    code: str = "unsupported_parameter"


class ContextLengthExceeded(RequestError):
    """Prompt plus answer do not fit the model.

    Attributes:
        prompt_tokens: tokens of the prompt, visual tokens included; None where a server that was asked did not tell.
        limit: tokens that prompt and answer may have together; None as above.
    """

    code: str = "context_length_exceeded"

    def __init__(
        self, message: str, *, prompt_tokens: int | None = None, limit: int | None = None, param: str = "messages"
    ) -> None:
        super().__init__(message, param=param)
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class ModelNotFound(RequestError):
    """No model of that name is served here."""

    code: str = "model_not_found"


class MediaError(RequestError):
    """A picture or video of the request; `param` names the content part."""


class MediaRefused(MediaError):
    """A policy forbids this source: its scheme, address, domain or folder."""

    code: str = "media_refused"


class MediaTooLarge(MediaError):
    """A cap on bytes, pixels, frames, seconds or items was exceeded."""

    code: str = "media_too_large"


class MediaUnreachable(MediaError):
    """The source could not be fetched in time and whole."""

    code: str = "media_unreachable"


class MediaUndecodable(MediaError):
    """The bytes are no picture or video that we read."""

    code: str = "media_undecodable"


class EngineError(DashInferVLMError):
    """The request is right, the engine could not serve it now."""

    retryable = True


class QueueFull(EngineError):
    """Too many requests wait.

    Attributes:
        retry_after: seconds after which trying again is reasonable.
    """

    code: str = "queue_full"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(EngineError):
    """The answer was not there in time."""

    code: str = "deadline_exceeded"


class EngineClosed(EngineError):
    """The engine was not started, or was closed while the request ran.

    Attributes:
        to_be_started: whether the message asks whoever holds the engine to start it, and is of no use to others.
    """

    code: str = "engine_closed"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, to_be_started: bool = False
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.to_be_started = to_be_started


class DecoderFailed(EngineError):
    """The decoder died or broke an invariant; the engine's log has the cause."""

    code: str = "decoder_failed"


class SetupError(DashInferVLMError):
    """What the operator has to mend before a request can be served."""


class ConfigError(SetupError):
    """An option of EngineConfig, the command line or the environment."""


class CheckpointError(SetupError):
    """A model folder that is missing, incomplete, or of another architecture."""


class MissingDependency(SetupError):
    """An extra that is not installed; the message holds the command that installs it."""


class AccessDenied(SetupError):
    """The server that was asked in place of an engine wants another key."""

    code: str = "access_denied"


class PluginError(SetupError):
    """A plugin that cannot be loaded, or a name that no plugin registered."""
