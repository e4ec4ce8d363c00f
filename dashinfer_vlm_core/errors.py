"""The exceptions that this package raises.

    DashInferVLMError
    ├── RequestError                 the request is invalid; retrying it unchanged cannot succeed
    │   ├── InvalidParameter         a value has the wrong type, range or shape
    │   ├── UnsupportedParameter     a known field that this engine or decoder does not support
    │   ├── ContextLengthExceeded    the prompt plus the completion exceed the context length
    │   ├── ModelNotFound            no model with that name is served here
    │   └── MediaError               an image or video in the request
    │       ├── MediaRefused         a policy rejects it: scheme, address, folder
    │       ├── MediaTooLarge        it exceeds a limit on bytes, pixels, frames or items
    │       ├── MediaUnreachable     it could not be fetched
    │       └── MediaUndecodable     its bytes are not a supported image or video
    ├── EngineError                  the request is valid, but the engine could not serve it
    │   ├── QueueFull                too many requests are waiting; retry after `retry_after` seconds
    │   ├── DeadlineExceeded         the request did not complete in time
    │   ├── EngineClosed             the engine was not started, or has been closed
    │   └── DecoderFailed            the decoder died or violated an invariant
    └── SetupError                   the operator has to fix this before requests can be served
        ├── ConfigError              an invalid option of EngineConfig, the command line or the environment
        ├── CheckpointError          a model folder cannot be read
        ├── MissingDependency        an extra is not installed
        ├── AccessDenied             the remote server rejected the API key
        └── PluginError              a plugin cannot be loaded or used

The classes state *kinds* of errors; adapters map them to HTTP status codes, LiteLLM exceptions and exit codes. Each
message states what is wrong and the next step. Messages for remote callers never contain paths, addresses or another
library's text.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from .installation import install_step

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


class DashInferVLMError(Exception):
    """Base class of all errors of this package.

    Attributes:
        message: one or two human-readable sentences: what is wrong, and the next step.
        param: the invalid request field in OpenAI's notation, such as `messages[1].content[0]`, if there is one.
        code: a stable identifier for programs, such as `context_length_exceeded`.
        retryable: whether the same request can succeed later.
    """

    code: str | None = None
    retryable = False

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code


class RequestError(DashInferVLMError):
    """The request is invalid; retrying it unchanged cannot succeed."""


class InvalidParameter(RequestError):
    """A value has the wrong type, range or shape."""

    code: str = "invalid_value"


class UnsupportedParameter(RequestError):
    """A known field that this engine or decoder does not support. It is rejected rather than ignored."""

    code: str = "unsupported_parameter"


class ContextLengthExceeded(RequestError):
    """The prompt plus the completion exceed the context length.

    Attributes:
        prompt_tokens: number of prompt tokens, visual tokens included; None if a remote server did not report it.
        limit: maximum number of tokens of prompt and completion together; None if a remote server did not report it.
    """

    code: str = "context_length_exceeded"

    def __init__(
        self, message: str, *, prompt_tokens: int | None = None, limit: int | None = None, param: str = "messages"
    ) -> None:
        super().__init__(message, param=param)
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class ModelNotFound(RequestError):
    """No model with that name is served here."""

    code: str = "model_not_found"

    @classmethod
    def among(cls, known: Iterable[str], name: str) -> ModelNotFound:
        """Return the error for a name that is none of those that requests can use."""
        return cls(f"The model {name!r} is not served here. Use {' or '.join(map(repr, known))}.", param="model")


class MediaError(RequestError):
    """An error in an image or video of the request; `param` names the content part.

    Attributes:
        file: the local file that contains it, if known. It is part of `str(error)`, for callers in this process, and
            not of `message`, which remote callers receive.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, file: Path | None = None
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.file = file

    def __str__(self) -> str:
        return self.message if self.file is None else f"{self.message} Its path is {str(self.file)!r}."


class MediaRefused(MediaError):
    """A policy rejects this source because of its scheme, address, domain or folder."""

    code: str = "media_refused"


class MediaTooLarge(MediaError):
    """A limit on bytes, pixels, frames, seconds or items was exceeded."""

    code: str = "media_too_large"


class MediaUnreachable(MediaError):
    """The source could not be fetched completely and in time."""

    code: str = "media_unreachable"


class MediaUndecodable(MediaError):
    """The bytes are not an image or video in a supported format."""

    code: str = "media_undecodable"


class EngineError(DashInferVLMError):
    """The request is valid, but the engine could not serve it."""

    retryable = True


class QueueFull(EngineError):
    """Too many requests are waiting.

    Attributes:
        retry_after: seconds to wait before a retry.
    """

    code: str = "queue_full"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(EngineError):
    """The request did not complete in time."""

    code: str = "deadline_exceeded"


class EngineClosed(EngineError):
    """The engine was not started, or was closed while the request ran.

    Attributes:
        to_be_started: whether the engine has to be started (again). The message then addresses the application that
            owns the engine, not its clients.
    """

    code: str = "engine_closed"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, to_be_started: bool = False
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.to_be_started = to_be_started


class DecoderFailed(EngineError):
    """The decoder died or violated an invariant; the engine's log contains the cause."""

    code: str = "decoder_failed"


class SetupError(DashInferVLMError):
    """A problem that the operator has to fix before requests can be served."""


class ConfigError(SetupError):
    """An option of EngineConfig, the command line or the environment is invalid."""


class CheckpointError(SetupError):
    """A model folder is missing, incomplete, or has an unsupported architecture."""


class MissingDependency(SetupError, ImportError):
    """An extra is not installed; the message contains the command that installs it."""


@contextlib.contextmanager
def extra_required(feature: str, extra: str) -> Iterator[None]:
    """Replace the ModuleNotFoundError of an import by one sentence with the command that installs an extra.

    Args:
        feature: what needs the extra, as the subject of a sentence.
        extra: its name.

    Raises:
        MissingDependency: a package of others cannot be found.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package.startswith("dashinfer_vlm"):
            raise
        raise MissingDependency(
            f"{feature} requires {package}, which is not installed. {install_step(extra)}"
        ) from None


class AccessDenied(SetupError):
    """The remote server used in place of an engine rejected the API key."""

    code: str = "access_denied"


class PluginError(SetupError):
    """A plugin cannot be loaded, or no plugin registered the requested name."""
